"""One run in one output_dir: another process is refused, another Trainer is not; what killed saves left is removed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from echelon.base.errors import CheckpointError
from echelon.checkpoint.lock import Owner, _start_of
from echelon.trainer import Trainer, TrainerCallback
from tests.trainer_models import DATA, Line, arguments


def _trainer(folder: Path, *callbacks: TrainerCallback, **options: Any) -> Trainer:
    settings = arguments(
        folder, **{"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "logging_strategy": "steps", **options}
    )
    return Trainer(Line(), settings, train_dataset=DATA, callbacks=[*callbacks])


def _lock(folder: Path, pid: int, started: str) -> None:
    folder.mkdir(exist_ok=True)
    owner = replace(Owner.current(), pid=pid, started=started)
    (folder / ".lock").write_text(json.dumps(asdict(owner)))


def test_another_process_that_trains_in_the_folder_is_named_before_the_first_step(tmp_path: Path) -> None:
    parent = os.getppid()
    _lock(tmp_path, parent, str(_start_of(parent)))
    trainer = _trainer(tmp_path)
    with pytest.raises(
        CheckpointError, match=rf"(?s)locked by another run.*process {parent} on .*use a different folder for this run"
    ):
        trainer.train()
    assert trainer.state.global_step == 0
    assert json.loads((tmp_path / ".lock").read_text())["pid"] == parent
    _trainer(tmp_path, save_strategy="no").train()  # writes no checkpoints: nothing is in its way


@pytest.mark.parametrize("layout", ["echelon", "transformers"])
def test_after_a_kill_the_next_process_goes_on_at_once_and_removes_what_was_left(layout: str, tmp_path: Path) -> None:
    _trainer(tmp_path, checkpoint_format=layout, max_steps=2, logging_steps=2).train()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    _lock(tmp_path, child.pid, str(_start_of(child.pid)))
    child.kill()
    child.communicate()
    aside = "0" * 16
    (tmp_path / "checkpoint-2").rename(tmp_path / f"checkpoint-2.old-{aside}")  # killed between two renames
    for name in (f"checkpoint-4.tmp-{aside}", f"checkpoint-x.tmp-{aside}"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"cut off")
    again = _trainer(tmp_path, checkpoint_format=layout, logging_steps=2)
    again.train(resume_from_checkpoint="auto")
    assert [entry["step"] for entry in again.state.log_history if "loss" in entry] == [2, 4]
    # The folder of no checkpoint of a Trainer is somebody else's.
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "checkpoint-2",
        "checkpoint-4",
        f"checkpoint-x.tmp-{aside}",
    ]


@pytest.mark.parametrize("layout", ["echelon", "transformers"])
def test_a_save_that_is_killed_leaves_a_folder_that_the_next_run_removes(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def killed(*arguments: Any, **options: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:  # neither the rename nor the tidying up after an error happens
        patch.setattr("echelon.checkpoint.commit.PendingFolder.commit", killed)
        patch.setattr("echelon.checkpoint.commit.PendingFolder._give_up", lambda self: None)
        with pytest.raises(Killed):
            _trainer(tmp_path, checkpoint_format=layout).train()
    assert [path.name.partition("tmp-")[0] for path in tmp_path.iterdir()] == ["checkpoint-2."]
    _trainer(tmp_path, checkpoint_format=layout).train()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-2", "checkpoint-4"]


def test_trainers_of_one_process_follow_one_another_in_a_folder(tmp_path: Path) -> None:
    first = _trainer(tmp_path)
    for trainer in (first, _trainer(tmp_path), first):
        trainer.train()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-2", "checkpoint-4"]


class TakenOver(TrainerCallback):
    """A later attempt of the run takes the folder while this one computes."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            _lock(Path(args.output_dir), os.getppid(), "")


@pytest.mark.parametrize("options", [{}, {"checkpoint_format": "transformers"}, {"save_only_model": True}])
def test_a_run_whose_folder_was_taken_saves_no_more(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=rf"may no longer write checkpoints to .* process {os.getppid()} on .* holds it now"
    ):
        _trainer(tmp_path, TakenOver(), **options).train()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "checkpoint-2"]
