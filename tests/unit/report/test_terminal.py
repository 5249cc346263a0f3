"""What ``echelon watch`` draws fits the terminal, whatever its size and the number of ranks."""

from __future__ import annotations

import io
import math
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from echelon.report.live_run import Snapshot
from echelon.report.rank_rows import Difference, RankRow
from echelon.report.terminal import draw


def _snapshot(num_ranks: int = 8, **changes: Any) -> Snapshot:
    rows = [
        RankRow(
            rank=rank,
            step=1200,
            phase="forward/backward, waiting",
            operation="all_reduce of float32[4, 1024]",
            num_collectives=5000,
            heartbeat_s=0.3,
            memory_mb=1234.0,
        )
        for rank in range(1, num_ranks)
    ]
    stopped = RankRow(rank=0, difference=Difference.STOPPED, what="stopped (SIGSTOP or a debugger)", step=1200)
    facts: dict[str, Any] = {
        "name": "20261123-120000-train-7",
        "outcome": "running",
        "is_live": True,
        "why_not_live": "",
        "host": "node1",
        "num_processes": num_ranks,
        "num_machines": 1,
        "num_restarts": 1,
        "command": ["echelon", "launch", "train.py"],
        "elapsed_s": 3723.4,
        "step": 1200,
        "num_steps": 4800,
        "epoch": 1.25,
        "steps_per_s": 12.5,
        "samples_per_s": 800.0,
        "items_per_s": math.nan,
        "eta_s": 288.0,
        "loss": 0.1234567,
        "lr": 3e-4,
        "grad_norm": math.nan,
        "losses": [8.0 / (i + 1) for i in range(240)],
        "loss_from": "rank 0",
        "rows": [stopped, *rows],
        "events": ["8 processes started", "rank 3 failed", "8 processes restarted (restart 1)"],
    }
    return Snapshot(**{**facts, **changes})


def _drawn(snapshot: Snapshot, *, width: int = 120, height: int | None = None, encoding: str = "utf-8") -> list[str]:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(file=file, width=width, color_system=None, highlight=False)
    console.print(draw(snapshot, console, height=height))
    file.flush()
    file.seek(0)
    return file.read().splitlines()


def test_the_whole_picture() -> None:
    lines = _drawn(_snapshot(3))
    assert lines[:3] == [
        "20261123-120000-train-7: running, 1:02:03, 3 processes, 1 restart",
        "step 1,200 of 4,800 ━━━━━━╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌ 25%, epoch 1.25, 12.5 steps/s, 0:04:48 left",
        "loss 0.1235, learning rate 0.0003, 800 samples/s",
    ]
    assert lines[3].startswith("loss (rank 0): █▃▂▂")
    assert lines[4].split() == ["rank", "step", "state", "last", "operation", "heartbeat", "memory"]
    assert lines[5].split(maxsplit=2) == ["0", "1,200", "stopped (SIGSTOP or a debugger)"]
    assert lines[6].endswith("0.3 s  1,234 MB")
    assert lines[-1] == "event: 8 processes restarted (restart 1)"


@pytest.mark.parametrize("num_ranks", [1, 8, 64])
@pytest.mark.parametrize(("width", "height"), [(200, 60), (120, 24), (80, 24), (60, 16), (40, 10), (20, 5)])
def test_the_picture_fits_the_terminal(num_ranks: int, width: int, height: int) -> None:
    lines = _drawn(_snapshot(num_ranks), width=width, height=height)
    assert len(lines) <= height
    assert max(map(cell_len, lines)) <= width
    assert any("stop" in line for line in lines)


def test_without_steps_the_line_says_so() -> None:
    snapshot = _snapshot(step=0, num_steps=0, epoch=math.nan, eta_s=math.nan, steps_per_s=math.nan)
    assert _drawn(snapshot)[1] == "no step recorded yet"


def test_64_ranks_are_folded_and_those_that_differ_are_first() -> None:
    lines = _drawn(_snapshot(64), height=24)
    (first,) = (i for i, line in enumerate(lines) if line.strip().startswith("rank "))
    assert "stopped" in lines[first + 1]
    assert lines[first + 2].startswith("ranks 1-63: step 1200; forward/backward, waiting; heartbeat")


def test_a_terminal_without_unicode_gets_ascii() -> None:
    lines = _drawn(_snapshot(), encoding="ascii")
    assert "".join(lines).isascii()
    assert "######.................." in lines[1]


def test_control_characters_are_escaped() -> None:
    row = RankRow(rank=0, operation="bad\x1b[2Jname", phase="x")
    text = "\n".join(_drawn(_snapshot(name="r\x1b]0;t\x07", rows=[row], events=["e\x1b[2J"])))
    assert "\x1b" not in text
    assert "bad\\x1b[2Jname" in text


def test_a_run_on_several_machines_names_this_one() -> None:
    lines = _drawn(_snapshot(num_machines=2))
    assert "ranks on node1 (run echelon watch on the other machines for theirs)" in lines
    assert "8 processes on 2 machines" in lines[0]


def test_a_run_that_is_over_says_why_there_are_no_ranks() -> None:
    lines = _drawn(_snapshot(rows=[], outcome="succeeded", is_live=False, why_not_live="the run has ended"))
    assert "ranks: the run has ended" in lines


def test_unknown_numbers_are_null_in_json() -> None:
    data = _snapshot().to_json()
    assert data["grad_norm"] is None
    assert data["rows"][0]["difference"] == "stopped"
    assert data["rows"][0]["heartbeat_s"] is None
    assert data["losses"][0] == 8.0
