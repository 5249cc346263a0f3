"""torch's profiler: one trace a rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from echelon import Accelerator
from echelon.accelerator.plugins.kwargs_handlers import ProfileKwargs
from echelon.accelerator.profiling import profile
from echelon.base.errors import ConfigError
from echelon.base.warnings import EchelonWarning
from tests.harness import run_on_ranks


def _names(path: Path) -> set[str]:
    return {event.get("name", "") for event in json.loads(path.read_text())["traceEvents"]}


def _profile(folder: str) -> list[str]:
    handler = ProfileKwargs(activities=["cpu"], output_trace_dir=folder)
    with Accelerator(cpu=True, kwargs_handlers=[handler]).profile() as profiler:
        torch.ones(2, 2) @ torch.ones(2, 2)
    # All ranks have written when any of them comes out.
    return [
        *sorted(p.name for p in Path(folder).iterdir()),
        str("aten::mm" in {e.key for e in profiler.key_averages()}),
    ]


def test_each_rank_writes_its_trace(tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    assert run_on_ranks(_profile, str(folder)) == [["profile_0.json", "profile_1.json", "True"]] * 2
    assert "aten::mm" in _names(folder / "profile_0.json")
    assert "aten::mm" in _names(folder / "profile_1.json")


def test_a_schedule_calls_back_at_the_end_of_each_active_part(tmp_path: Path) -> None:
    ready: list[Any] = []
    schedule = {"wait": 1, "warmup": 1, "active": 1, "repeat": 1}
    handler = ProfileKwargs(activities=["cpu"], schedule_option=schedule, on_trace_ready=ready.append)
    with profile(handler, rank=0) as profiler:
        for _ in range(4):
            torch.ones(2, 2) @ torch.ones(2, 2)
            profiler.step()
    assert ready == [profiler]


def test_missing_or_already_written_traces_are_reported(tmp_path: Path) -> None:
    idle = ProfileKwargs(
        activities=["cpu"],
        schedule_option={"wait": 9, "warmup": 1, "active": 1},
        output_trace_dir=str(tmp_path),
    )
    with pytest.warns(EchelonWarning, match="never became active"), profile(idle, rank=0):
        pass
    twice = ProfileKwargs(
        activities=["cpu"],
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(tmp_path / "own.json")),
        output_trace_dir=str(tmp_path),
    )
    with pytest.warns(EchelonWarning, match="has already exported the trace"), profile(twice, rank=0):
        torch.ones(2)
    assert [path.name for path in tmp_path.iterdir()] == ["own.json"]


def test_an_unknown_activity_is_rejected() -> None:
    with pytest.raises(ConfigError, match="'gpu' is not a profiler activity"):
        ProfileKwargs(activities=["gpu"]).build()  # type: ignore[list-item]
