"""The checks of ``echelon test`` detect errors. Their references are plain PyTorch and the formulas of nccl-tests."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from echelon import Accelerator
from echelon.base.errors import DesyncError
from echelon.testing import bandwidth, self_test
from echelon.testing.bandwidth import COLLECTIVES, Measured, measure
from echelon.testing.evidence import CheckFinding, EvidenceWriter, read_findings
from tests.harness import run_on_ranks

KILOBYTE = 1 << 10


def _checks(folder: Path, engine: str, is_wrong: bool) -> list[CheckFinding]:
    """Make the checks of one start, ``is_wrong`` with other weights and a sample too few; return what rank zero told."""
    accelerator = Accelerator(
        parity="exact",
        cpu=True,
        engine=engine,
        max_micro_batch_size=self_test.MAX_MICRO_BATCH_SIZE,
        **self_test._settings(),
    )
    teller = EvidenceWriter(folder, is_silent=accelerator.process_index != 0)
    with pytest.MonkeyPatch.context() as patch:
        if is_wrong:
            plain = self_test.plain
            patch.setattr(self_test, "plain", lambda *args: {k: v * (1 + 1e-11) for k, v in plain(*args).items()})
            patch.setattr(accelerator, "trim_for_metrics", lambda numbers: numbers[1:])
        self_test.check_world(accelerator, teller)
        self_test.check_exact(accelerator, teller)
        self_test.check_bandwidth(accelerator, teller, is_quick=True)
    return [one for one in next(read_findings(folder)) if isinstance(one, CheckFinding)]


@pytest.mark.parametrize(
    ("engine", "is_wrong"),
    [("ddp", True), *(pytest.param(engine, False, marks=pytest.mark.soak) for engine in ("ddp", "fsdp2", "zero1"))],
)
def test_a_check_fails_only_on_an_actual_error(tmp_path: Path, engine: str, is_wrong: bool) -> None:
    found: list[CheckFinding] = run_on_ranks(_checks, tmp_path, engine, is_wrong)[0]
    assert [one.name for one in found] == ["world", "exact", "data", "bandwidth"]
    assert [one.name for one in found if not one.passed] == (["exact", "data"] if is_wrong else []), found
    figures = {one.name: one.figures for one in found}
    assert figures["world"]["world_size"] == 2
    assert figures["world"]["engine"] == engine
    assert figures["exact"]["dtype"] == "float64"
    assert figures["exact"]["tolerance"] == 1e-12
    assert {one["name"] for one in figures["bandwidth"]["collectives"]} == {one.name for one in COLLECTIVES}


def _measured(sizes: list[int]) -> list[Measured]:
    return measure(sizes, device=torch.device("cpu"), budget=timedelta(milliseconds=5))


def test_bandwidths_match_the_formulas_of_nccl_tests() -> None:
    both = run_on_ranks(_measured, [KILOBYTE, 10], world_size=3)
    for one in both[0]:
        assert one.num_ranks == 3
        assert one.size_bytes in (12, 1032)  # 10 and 1024, rounded up to whole floats of each rank
        assert one.algorithm_bytes_per_s == one.size_bytes / one.seconds
        # https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
        factors = {
            "all_reduce": 4 / 3,
            "all_gather": 2 / 3,
            "reduce_scatter": 2 / 3,
            "broadcast": 1.0,
            "all_to_all": 2 / 3,
        }
        assert one.bus_bytes_per_s == pytest.approx(one.algorithm_bytes_per_s * factors[one.name])
    # The time of the slowest rank, so it is the same on all ranks.
    assert [one.seconds for one in both[0]] == [one.seconds for one in both[1]] == [one.seconds for one in both[2]]


def _with_wrong_results() -> list[str]:
    told = []
    for collective in COLLECTIVES:

        def wrong(x: torch.Tensor, out: torch.Tensor, call: Any = collective.call) -> None:
            call(x, out)
            out[-1] += 1

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(bandwidth, "COLLECTIVES", (replace(collective, call=wrong),))
            with pytest.raises(DesyncError) as raised:
                _measured([KILOBYTE])
        told.append(raised.value.what.partition(":")[0])
    return told


def test_a_collective_with_a_wrong_result_is_named() -> None:
    expected = [f"{collective.name} returned a wrong result" for collective in COLLECTIVES]
    assert run_on_ranks(_with_wrong_results) == [expected, expected]


def test_the_tolerance_of_each_dtype_follows_from_the_number_of_additions() -> None:
    problem = self_test.Problem(world_size=2, dtype=torch.float32)
    assert problem.num_updates == 12
    assert problem.tolerance == pytest.approx(12 * 24 * 2**-23)
