"""A run's folder: what is written is what readers find, however the writers ended, and no secret of the command line is in it."""

from __future__ import annotations

import json
import math
import socket
import subprocess
from pathlib import Path

import pytest

from echelon.status import run_files
from echelon.status.run_facts import GitQuery, machine_facts, mask_secrets, package_versions


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
        (
            "--hftoken abc --token2 abc API_KEY1=abc --num_tokens 5",
            "--hftoken *** --token2 *** API_KEY1=*** --num_tokens 5",
        ),
        ("--api_keys a b --lr 3", "--api_keys *** *** --lr 3"),
        ("+db={host:x,password:abc}", "+db={host:x,password:***}"),
        (r'{"token":"a\"b","lr":3}', '{"token":***,"lr":3}'),
        ("https://host/x?id=3&token=abc&n=1", "https://host/x?id=3&token=***&n=1"),
        ("https://me:p@ss@host/x", "https://me:***@host/x"),
        ("s3://bucket/monkey:x http://host:80/a", "s3://bucket/monkey:x http://host:80/a"),
    ],
)
def test_secrets_in_a_command_line_are_masked(words: str, masked: str) -> None:
    assert mask_secrets(words.split()) == masked.split()


@pytest.mark.parametrize(
    ("word", "masked"),
    [
        ("cd /x && HF_TOKEN=abc python train.py", "cd /x && HF_TOKEN=*** python train.py"),
        ("python train.py --token abc --lr 3", "python train.py --token *** --lr 3"),
        ("Authorization: Bearer abcdefgh.ij", "Authorization: Bearer ***"),
        ("the lr = 3 and --note: a b", "the lr = 3 and --note: a b"),
    ],
)
def test_secrets_in_a_word_with_spaces_are_masked(word: str, masked: str) -> None:
    assert mask_secrets(["-c", word]) == ["-c", masked]


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
    assert run_files.read_lines(path) == []  # no file
    run_files.append_line(path, {"kind": "start"})
    run_files.append_line(path, {"kind": "end", "text": "\u00fc"})
    with path.open("ab") as file:
        file.write(b'{"kind": "chec')
    assert [line["kind"] for line in run_files.read_lines(path)] == ["start", "end"]
    run_files.append_line(path, {"kind": "restart"})  # by the next attempt
    assert run_files.read_lines(path) == [{"kind": "start"}, {"kind": "end", "text": "\u00fc"}, {"kind": "restart"}]


def test_numbers_that_are_not_finite_are_strict_json_and_are_read_back(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    values = {"loss": math.nan, "best": math.inf, "worst": [-math.inf, 1.5], "name": {"float": "x"}}
    run_files.append_line(path, {"values": values})
    run_files.write_info(tmp_path, {"goodput": math.nan})

    def refuse(word: str) -> float:
        raise AssertionError(f"{word} is not JSON")

    for file in (path, tmp_path / "run.json"):
        json.loads(file.read_text(), parse_constant=refuse)
    with path.open("a") as file:
        file.write('{"values": {"loss": NaN}}\n')  # as earlier versions wrote it
    new, old = run_files.read_lines(path)
    assert repr(new["values"]) == repr(values)
    assert math.isnan(old["values"]["loss"])
    assert math.isnan(run_files.read_info(tmp_path)["goodput"])


def test_a_description_is_replaced_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_files.write_info(tmp_path, {"outcome": "running"})

    def full(*_: object, **__: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", full)
        with pytest.raises(OSError, match="No space left"):
            run_files.write_info(tmp_path, {"outcome": "failed"})
    assert run_files.read_info(tmp_path) == {"version": 1, "outcome": "running"}
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]
    (tmp_path / "run.json").write_text('{"version": 2}')
    with pytest.raises(ValueError, match="format version 1"):
        run_files.read_info(tmp_path)
