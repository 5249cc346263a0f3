"""Small programs of trl, sentence-transformers, setfit, diffusers, peft and others give the same numbers on echelon as natively.

``make ecosystem`` installs the libraries and runs these tests, which take many minutes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest

from tests.ecosystem.run import PYTHON, TOLERANCE, WAYS, Way, compare, run

pytestmark = pytest.mark.soak

# (program, number of processes, arguments). On two processes, a shuffled loader that a program prepares with an Accelerator has
# another order than natively (see below). Read in order, the numbers are the same.
CASES: list[tuple[str, int, tuple[str, ...]]] = [
    ("sft", 1, ()),
    ("sft packed", 1, ()),
    ("dpo", 1, ()),
    ("sentence-transformers", 1, ()),
    ("setfit", 1, ()),
    ("denoising-diffusion", 1, ()),
    ("pytorch-accelerated", 1, ()),
    ("diffusers", 1, ()),
    ("diffusers", 1, ("--save-on-main",)),
    ("lora", 1, ()),
    ("glue", 1, ()),
    ("sft", 2, ()),
    ("sft packed", 2, ()),
    ("dpo", 2, ()),
    ("sentence-transformers", 2, ()),
    ("setfit", 2, ()),
    ("denoising-diffusion", 2, ("--in-order", "--whole-batches")),
    ("denoising-diffusion", 2, ("--in-order", "--dataloader-config")),
    ("pytorch-accelerated", 2, ("--in-order",)),
    ("diffusers", 2, ("--in-order",)),
    ("diffusers", 2, ("--in-order", "--save-on-main")),
    ("lora", 2, ()),
    ("glue", 2, ("--in-order",)),
]

# (program, number of processes) -> values that differ. The tests at the end of this file prove the reasons.
DIFFERENT: dict[tuple[str, int], set[str]] = {("diffusers", 1): {"resumed", "resumed_average"}}


@pytest.fixture(scope="session", autouse=True)
def _installed() -> None:
    if not PYTHON.exists():
        text = f"NOT COMPARED with the libraries' own runs: there is no {PYTHON} (make ecosystem)"
        assert os.environ.get("REQUIRE_ECOSYSTEM") != "1", text
        pytest.skip(text)


_run = cache(run)


def _different(name: str, way: Way, num_processes: int, args: tuple[str, ...]) -> dict[str, float]:
    native, swapped = (_run(name, each, num_processes, args=args) for each in ("native", way))
    assert "stands in for accelerate" in swapped.output
    known = DIFFERENT.get((name, num_processes), set())
    found = compare(native.values, swapped.values)
    assert found  # something was compared
    return {key: value for key, value in found.items() if value > TOLERANCE and key not in known}


def _name(case: object) -> str:
    if isinstance(case, tuple):
        name, num_processes, args = case
        return " ".join((name, *args, "on", str(num_processes)))
    return str(case)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES, ids=_name)
def test_a_program_gives_the_native_numbers(case: tuple[str, int, tuple[str, ...]], way: Way) -> None:
    name, num_processes, args = case
    assert _different(name, way, num_processes, args) == {}


@pytest.mark.parametrize("way", ["python, install()", "echelon launch, install()"])
def test_python_and_echelon_launch_run_a_program_with_install(way: Way) -> None:
    assert _different("glue", way, 1, ()) == {}


def test_a_state_that_the_main_process_saves_alone_is_announced() -> None:
    on_main = _run("diffusers", "launch --as", 2, args=("--in-order", "--save-on-main")).output
    assert on_main.count("save_state() runs on the main process only") == 1
    assert "main process only" not in _run("diffusers", "launch --as", 2, args=("--in-order",)).output


# The reasons of the differences.


def _values(name: str, way: Way, num_processes: int, *args: str) -> dict[str, Any]:
    return _run(name, way, num_processes, args=args).values


def _close(one: Sequence[float], other: Sequence[float]) -> bool:
    return list(one) == pytest.approx(list(other), rel=TOLERANCE, abs=TOLERANCE)


@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_resumed_run_of_diffusers_continues_as_the_uninterrupted_run(num_processes: int) -> None:
    # The checkpoint of step 6 is in the middle of an epoch on one process, and at the end of one on two.
    swapped = _values("diffusers", "launch --as", num_processes)
    assert swapped["resumed"] == swapped["losses"][12:]
    assert swapped["resumed_average"] == swapped["average"]


def test_natively_a_loader_that_resumes_in_an_epoch_draws_the_seed_of_its_workers_again() -> None:
    for num_processes in (1, 2):
        swapped, native = (_values("rules", way, num_processes) for way in ("launch --as", "native"))
        assert swapped["resumed"] == swapped["drawn"][2:]
        assert native["resumed"] == native["shifted"] != native["drawn"][2:]


def test_a_shuffled_loader_has_the_order_of_the_loop_without_an_accelerator() -> None:
    for num_processes in (1, 2):
        swapped = _values("rules", "launch --as", num_processes)
        assert swapped["prepared"] == swapped["plain"]
    assert _values("rules", "native", 1)["prepared"] == _values("rules", "native", 1)["plain"]
    assert _values("rules", "native", 2)["prepared"] != _values("rules", "native", 2)["plain"]


def test_an_incomplete_window_of_accumulation_is_the_mean_of_its_batches() -> None:
    for num_processes in (1, 2):
        assert _values("rules", "launch --as", num_processes)["weights"] == [-1.0, -2.0, -3.0]
        assert _values("rules", "native", num_processes)["weights"] == [-1.0, -2.0, -2.5]


def test_split_batches_takes_effect() -> None:
    # Accelerate ignores Accelerator(split_batches=True), which denoising-diffusion-pytorch passes, and follows the same setting in a
    # DataLoaderConfiguration.
    given, configured = (("--in-order",), ("--in-order", "--dataloader-config"))
    whole = ("--in-order", "--whole-batches")
    one = "denoising-diffusion"
    assert _close(_values(one, "launch --as", 2, *given)["losses"], _values(one, "native", 2, *configured)["losses"])
    assert _close(_values(one, "native", 2, *given)["losses"], _values(one, "native", 2, *whole)["losses"])
