"""Why a run failed, and the end of what its ranks printed: complete, bounded, and without secrets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from echelon.report.failure import clean, recorded_output, why_it_failed
from echelon.report.page_data import page_data
from echelon.report.run_folder import read_run
from tests.recorded_runs import write_run

REPORT = {
    "what": {"text": "rank 1 failed first: KeyError: 'labels'\n  others: rank 0 then lost contact"},
    "where": {"text": 'rank 1 of 2\n         train.py:9 in main: batch["labels"]'},
    "do": {"text": "name a key that the batch has\n         rank 0: nothing\n  logs:  /runs/1"},
}


def write_failed_run(parent: Path, *, event: dict[str, Any] | None = None) -> Path:
    """Write a run of two ranks in which rank 1 has failed after step 30."""
    folder = write_run(parent, "failed", num_ranks=2, num_steps=30, facts={"outcome": "failed", "exit_code": 1})
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    end = next(one for one in events if one["kind"] == "end")
    failure = {"time": end["time"] - 0.5, "attempt": 0, "kind": "failure", "rank": 1, "step": 30, "text": "of rank 1"}
    events[events.index(end) :] = [{**failure, "report": REPORT} if event is None else event, {**end, "text": "failed"}]
    (folder / "events.jsonl").write_text("".join(json.dumps(one) + "\n" for one in events))
    for rank in range(2):
        (folder / f"attempt_0/rank_{rank}").mkdir(parents=True)
    frames = [{"file": "/x/train.py", "line": 9, "function": "main", "source": 'batch["labels"]', "user": True}]
    errors = [
        {"where": "a thread", "type": "ValueError", "message": "of a thread", "frames": []},
        {"where": "main", "type": "KeyError", "message": "'labels'", "frames": frames},
    ]
    (folder / "attempt_0/rank_1/error.json").write_text(json.dumps(errors))
    (folder / "attempt_0/rank_1/stderr.log").write_text("".join(f"line {i}\n" for i in range(20)))
    (folder / "attempt_0/rank_0/stdout.log").write_text("epoch 0\n")
    return folder


def test_the_box_has_the_error_the_line_the_rank_the_advice_and_the_last_lines(tmp_path: Path) -> None:
    run = read_run(write_failed_run(tmp_path))
    found = why_it_failed(run, recorded_output(run))
    assert found == {
        "what": "rank 1 failed first: KeyError: 'labels'",
        "more": ["others: rank 0 then lost contact"],
        "step": 30,
        "rank": 1,
        "where": ["rank 1 of 2", 'train.py:9 in main: batch["labels"]'],
        "do": ["name a key that the batch has", "rank 0: nothing"],
        "traceback": '  File "/x/train.py", line 9, in main\n    batch["labels"]\nKeyError: \'labels\'',
        "output": "\n".join(f"line {i}" for i in range(8, 20)),
    }


def test_an_error_of_the_program_has_no_place_of_the_output_among_its_lines(tmp_path: Path) -> None:
    report = {
        "what": {"text": "rank 1 failed first: KeyError: 'labels'"},
        "where": {"text": "rank 1 of 2\n         train.py:9 in main: f()\n  logs:  above"},
    }
    event = {"time": 1.0, "attempt": 0, "kind": "failure", "rank": 1, "step": 30, "text": "of rank 1", "report": report}
    run = read_run(write_failed_run(tmp_path, event=event))
    found = why_it_failed(run, recorded_output(run))
    assert found is not None
    assert found["where"] == ["rank 1 of 2", "train.py:9 in main: f()"]


def test_a_failed_run_has_no_second_mark_at_its_end(tmp_path: Path) -> None:
    (data,) = page_data([read_run(write_failed_run(tmp_path))])["runs"]
    assert [kind for _, kind, _ in data["timeline"]["events"]] == ["failure"]
    (start, end, has_failed, first) = data["timeline"]["attempts"][0]
    assert (start, has_failed) == (0.0, True)
    assert start < first < end
    write_run(tmp_path, "stopped", num_steps=5, facts={"outcome": "interrupted"})
    (data,) = page_data([read_run(tmp_path / "stopped")])["runs"]
    assert [kind for _, kind, _ in data["timeline"]["events"]] == ["stop"]
    assert data["failure"] is None


def test_a_run_that_ends_with_a_stall_says_so(tmp_path: Path) -> None:
    text = {
        "what": {"text": "rank 1 does not arrive"},
        "where": {"text": "rank 1: at x.py:3"},
        "do": {"text": "call it"},
    }
    event = {"time": 1.790_000_01e9, "attempt": 0, "kind": "stall", "rank": 1, "step": 3, "report": text}
    run = read_run(write_failed_run(tmp_path, event=event))
    found = why_it_failed(run, [])
    assert found is not None
    assert (found["what"], found["where"], found["do"]) == (
        "rank 1 does not arrive",
        ["rank 1: at x.py:3"],
        ["call it"],
    )


@pytest.mark.parametrize(
    ("facts", "what", "do"),
    [
        ({"outcome": "failed", "exit_code": 3}, "ended with exit code 3", "read the output of the program"),
        ({"outcome": "failed", "launcher": "torchrun"}, "exit code 0", "started with echelon launch, not torchrun"),
        ({"outcome": "running", "pid": 2**22 + 1}, "The launcher was killed", "dmesg"),
    ],
)
def test_without_a_record_of_the_error_it_is_said_where_to_look(
    facts: dict[str, Any], what: str, do: str, tmp_path: Path
) -> None:
    run = read_run(write_run(tmp_path, "run", num_steps=3, facts=facts))
    found = why_it_failed(run, [])
    assert found is not None
    assert what in found["what"]
    assert do in found["do"][0]


def test_a_run_that_recovered_has_not_failed(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path, "run", num_steps=40, kills=(20,)))
    assert why_it_failed(run, []) is None


def test_the_output_is_bounded_and_the_failed_rank_comes_first(tmp_path: Path) -> None:
    folder = write_failed_run(tmp_path)
    (folder / "attempt_0/rank_0/stderr.log").write_text("x" * 99 + "\n" + "y" * 99 + "\n" * 1)
    (folder / "attempt_0/rank_1/stdout.log").write_bytes(b"first\n" + b"z" * 79 + b"\n" + b"0123456789\n" * 100_000)
    found = recorded_output(read_run(folder))
    assert [(one["rank"], one["stream"]) for one in found] == [
        ("1", "stdout"),
        ("1", "stderr"),
        ("0", "stdout"),
        ("0", "stderr"),
    ]
    assert len(found[0]["text"]) < 33_000
    head, *rest = found[0]["text"].splitlines()
    assert head == f"... ({100_000 * 11 + 86 - 32_768:,} bytes before this are in the file)"
    assert set(rest) == {"0123456789"}


def test_control_sequences_and_secrets_are_not_shown() -> None:
    bar = "  0%|  | 0/9\r 50%|# | 5/9\r100%|##| 9/9\n"
    assert clean(bar) == "100%|##| 9/9"
    assert clean("\x1b[1;31mred\x1b[0m \x1b]8;;http://x\x07link\x1b]8;;\x07\x00") == "red link"
    assert clean("HF_TOKEN=abc\nKeyError: 'labels'\nloss: 0.5") == "HF_TOKEN=***\nKeyError: 'labels'\nloss: 0.5"
