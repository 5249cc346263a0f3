"""A run's folder: what is written is what readers find, however the writers ended, and no secret of the command line is in it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from pathlib import Path

import pytest

from echelon.status import run_folder
from echelon.status.run_facts import GitQuery, machine_facts, mask_secrets, package_versions
from echelon.status.step_records import StepRecorder


@pytest.mark.parametrize(
    ("words", "masked"),
    [
        ("train.py --lr 3e-4 --model gpt2", "train.py --lr 3e-4 --model gpt2"),
        ("--hub_token abc --lr 3", "--hub_token *** --lr 3"),
        ("--hub-token=abc", "--hub-token=***"),
        ("--apiKey abc -password x", "--apiKey *** -password ***"),
        (
            "WANDB_API_KEY=abc trainer.secret=x +db.credentials=y",
            "WANDB_API_KEY=*** trainer.secret=*** +db.credentials=***",
        ),
        ("--env=OPENAI_API_KEY=abc", "--env=OPENAI_API_KEY=***"),
        # A flag without a value does not hide the next flag.
        ("--use_key --lr 3", "--use_key --lr 3"),
        # These names contain the letters of a secret's name, but not the word.
        (
            "--tokenizer bert --max_tokens 512 --keywords a --monkey b",
            "--tokenizer bert --max_tokens 512 --keywords a --monkey b",
        ),
        ("https://me:secret@host/x", "https://me:***@host/x"),
        ('{"api_key":"abc","lr":3}', '{"api_key":***,"lr":3}'),
        ("--name hf_abcdefghijklmnop", "--name ***"),
    ],
)
def test_secrets_in_a_command_line_are_masked(words: str, masked: str) -> None:
    assert mask_secrets(words.split()) == masked.split()


def test_the_commit_and_its_changes_are_found(tmp_path: Path) -> None:
    assert GitQuery(tmp_path).answer() is None  # no repository
    assert GitQuery(tmp_path / "missing").answer() is None
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=b", "-c", "init.defaultBranch=trunk"]
    subprocess.run([*git, "init", "-q"], check=True)
    assert GitQuery(tmp_path).answer() is None  # no commit
    (tmp_path / "train.py").write_text("a")
    subprocess.run([*git, "add", "train.py"], check=True)
    subprocess.run([*git, "commit", "-qm", "first"], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    assert GitQuery(tmp_path).answer() == {"commit": commit, "branch": "trunk", "is_dirty": False}
    (tmp_path / "other.txt").write_text("b")  # an untracked file is no change of the code that ran
    assert GitQuery(tmp_path).answer() == {"commit": commit, "branch": "trunk", "is_dirty": False}
    (tmp_path / "train.py").write_text("b")
    subprocess.run([*git, "checkout", "-q", "--detach"], check=True)
    assert GitQuery(tmp_path).answer() == {"commit": commit, "branch": None, "is_dirty": True}


def test_the_machine_is_described(tmp_path: Path) -> None:
    gpus = tmp_path / "proc/driver/nvidia/gpus"
    for number in ("0000:01:00.0", "0000:02:00.0"):
        (gpus / number).mkdir(parents=True)
        (gpus / number / "information").write_text("Model: \t\t NVIDIA H100 80GB HBM3\nIRQ: 16\n")
    (tmp_path / "proc/cpuinfo").write_text("model name\t: Some CPU\n")
    facts = machine_facts(tmp_path)
    assert facts["accelerators"] == ["NVIDIA H100 80GB HBM3"] * 2
    assert (facts["processor"], facts["host"]) == ("Some CPU", socket.gethostname())
    assert facts["memory_mb"] > 100
    assert {"python", "echelon", "torch"} <= package_versions().keys()


def test_a_torn_last_line_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    assert run_folder.read_lines(path) == []  # no file
    run_folder.append_line(path, {"kind": "start"})
    run_folder.append_line(path, {"kind": "end", "text": "\u00fc"})
    with path.open("ab") as file:
        file.write(b'{"kind": "chec')
    assert run_folder.read_lines(path) == [{"kind": "start"}, {"kind": "end", "text": "\u00fc"}]


def test_a_description_is_replaced_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_folder.write_info(tmp_path, {"outcome": "running"})

    def full(*_: object, **__: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", full)
        with pytest.raises(OSError, match="No space left"):
            run_folder.write_info(tmp_path, {"outcome": "failed"})
    assert run_folder.read_info(tmp_path) == {"version": 1, "outcome": "running"}
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]
    (tmp_path / "run.json").write_text('{"version": 2}')
    with pytest.raises(ValueError, match="format version 1"):
        run_folder.read_info(tmp_path)


def test_a_run_whose_launcher_was_killed_is_recognized() -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    here = {"outcome": "running", "machine": {"host": socket.gethostname()}, "pid": child.pid}
    assert run_folder.has_lost_launcher(here)
    assert not run_folder.has_lost_launcher({**here, "pid": os.getpid()})
    assert not run_folder.has_lost_launcher({**here, "outcome": "failed"})
    assert not run_folder.has_lost_launcher({**here, "machine": {"host": "elsewhere"}})


def test_the_newest_run_is_the_one_that_began_last(tmp_path: Path) -> None:
    assert run_folder.newest_run(tmp_path) is None
    for name, began in (("b", 2.0), ("a", 3.0), ("c", 1.0)):
        (tmp_path / name).mkdir()
        run_folder.write_info(tmp_path / name, {"began": began})
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "run.json").write_text("torn")
    assert [path.name for path in run_folder.runs_below(tmp_path)] == ["c", "b", "a"]
    assert run_folder.newest_run(tmp_path) == tmp_path / "a"
    assert run_folder.newest_run(tmp_path / "c") == tmp_path / "c"


def test_the_step_records_of_a_run_are_found(tmp_path: Path) -> None:
    assert run_folder.read_steps(tmp_path) == {}
    for attempt, rank in ((0, 1), (0, 0), (1, 0), (10, 0)):
        path = run_folder.steps_path(tmp_path, attempt=attempt, rank=rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        StepRecorder(path, rank=rank, world_size=2).record(attempt + 1, 0.1, [0] * 8)
    run_folder.steps_path(tmp_path, attempt=0, rank=2).write_bytes(b"torn")
    steps = run_folder.read_steps(tmp_path)
    assert {attempt: list(ranks) for attempt, ranks in steps.items()} == {0: [0, 1], 1: [0], 10: [0]}
    assert steps[10][0].records[0].step == 11
    assert json.dumps(list(steps)) == "[0, 1, 10]"
