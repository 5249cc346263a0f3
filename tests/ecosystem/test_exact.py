"""With ``--parity exact`` the programs give the same numbers on 1, 2 and 3 processes; evaluations count each row once on any number.

``make ecosystem`` runs these tests.
"""

from __future__ import annotations

import os
from functools import cache

import pytest

from tests.ecosystem.run import PYTHON, TOLERANCE, WAYS, Way, compare, run

pytestmark = pytest.mark.soak

# Name -> arguments of the program, flags of the launcher. 12 samples are one batch of all processes; the last batches are shorter.
EXACT: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "sft": (("--whole", "12"), ("--parity", "exact")),
    "sentence-transformers": (("--whole", "12", "--gather"), ("--parity", "exact")),
    "diffusers": (("--whole", "12", "--noise-in-data"), ("--parity", "exact")),
}

# trl logs the mean over the micro-steps of an accuracy over tokens, and the micro-steps are other groups of samples.
BY_MICRO_STEP = {"mean_token_accuracy"}

# The unchanged program, which draws noise in the loop. It computes where to resume from gradient_accumulation_steps, which has no
# effect here, so that the resumed part is another run.
BITWISE = ("diffusers", ("--whole", "12"), ("--parity", "bitwise", "--canonical_shards", "12"))
NOT_COMPARED = {"resumed", "resumed_average"}

# Norms are sums of squares of thousands of gradients in float32, which amplify the rounding of the losses.
NORM_TOLERANCE = 1e-5


@pytest.fixture(scope="session", autouse=True)
def _installed() -> None:
    if not PYTHON.exists():
        text = f"NOT RUN: there is no {PYTHON} (make ecosystem)"
        assert os.environ.get("REQUIRE_ECOSYSTEM") != "1", text
        pytest.skip(text)


_run = cache(run)


@pytest.mark.parametrize("name", EXACT)
def test_exact_parity_gives_the_same_numbers_on_any_number_of_processes(name: str) -> None:
    args, flags = EXACT[name]
    one, *others = (_run(name, "launch --as", num, args=args, flags=flags).values for num in (1, 2, 3))
    for other in others:
        found = compare(one, other)
        assert found
        limits = {key: NORM_TOLERANCE if key == "grad_norm" else TOLERANCE for key in found}
        assert {key: value for key, value in found.items() if value > limits[key] and key not in BY_MICRO_STEP} == {}


def test_bitwise_parity_gives_the_same_numbers_also_for_draws_in_the_loop() -> None:
    name, args, flags = BITWISE
    one, *others = (_run(name, "launch --as", num, args=args, flags=flags).values for num in (1, 2, 3))
    for other in others:
        found = compare(one, other)
        assert {key for key, value in found.items() if value > TOLERANCE} <= NOT_COMPARED
        assert found["average"] == 0.0


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("num_processes", [1, 2])
def test_an_evaluation_counts_each_row_once(way: Way, num_processes: int) -> None:
    values = _run("evaluation", way, num_processes).values
    for name in ("dpo", "lora"):
        assert values[name] == pytest.approx(values[f"{name}_expected"], rel=0, abs=TOLERANCE)


def test_the_native_evaluation_on_two_processes_counts_rows_twice() -> None:
    """The formulas are those of the libraries on one process; on two they differ unless the rows fill the batches of both."""
    alone, two = (_run("evaluation", "native", num).values for num in (1, 2))
    for name in ("dpo", "lora"):
        assert alone[name] == pytest.approx(alone[f"{name}_expected"], rel=0, abs=TOLERANCE)
        filled, *others = (abs(a - b) for a, b in zip(two[name], two[f"{name}_expected"]))
        assert filled < TOLERANCE
        assert max(others) > 1e-3
