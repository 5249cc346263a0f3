"""``echelon doctor RUN``: each distinct error once, the rank that failed first, and preemption, which is no error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from echelon.cli.main import _run
from echelon.status.run_files import append_line
from tests.recorded_runs import write_run

_FRAME = {"file": "train.py", "line": 7, "function": "main", "source": "step()", "user": True}


def _write_error(run: Path, rank: int, kind: str, message: str, *, time_ns: int) -> None:
    folder = run / "attempt_0" / f"rank_{rank}"
    folder.mkdir(parents=True)
    record = {"time_ns": time_ns, "type": kind, "message": message, "frames": [_FRAME], "chain": [], "where": "main"}
    (folder / "error.json").write_text(json.dumps([record]), encoding="utf-8")


def _shown(run: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert _run(["doctor", str(run)]) == 0
    return capsys.readouterr().out.splitlines()


def test_ranks_with_the_same_error_share_one_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path, "run", num_ranks=4, num_steps=20)
    for rank, message in ((0, "bad"), (1, "bad"), (2, "worse"), (3, "bad")):
        _write_error(run, rank, "ValueError", message, time_ns=rank)
    append_line(
        run / "events.jsonl", {"time": 2e9, "attempt": 0, "kind": "failure", "text": "rank 2 failed first: worse"}
    )
    lines = _shown(run, capsys)
    errors = [line for line in lines if line.startswith("attempt_0")]
    assert errors == [
        "attempt_0: rank 2 failed first: worse",
        "attempt_0, ranks 0-1, 3: ValueError: bad",
        "attempt_0, rank 2: ValueError: worse",
    ]
    assert lines.count("  train.py:7 in main: step()") == 2


def test_a_preempted_run_has_no_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path, "run", num_ranks=2, num_steps=20)
    for rank in range(2):
        _write_error(run, rank, "echelon.distributed.preemption.Preempted", "143", time_ns=rank)
    lines = _shown(run, capsys)
    assert lines[-1] == "attempt_0, ranks 0-1: saved a checkpoint and ended, because the run was preempted"
    assert not any("train.py" in line for line in lines)
