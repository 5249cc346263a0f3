"""Checkpoints that are written beside the training (``save_blocking=False``)."""

from __future__ import annotations

import os
import signal
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from echelon.accelerator.checkpoint.folders import problems_in
from echelon.base.errors import ConfigError
from echelon.base.warnings import EchelonWarning
from echelon.checkpoint import storage
from echelon.checkpoint.formats import weight_files
from echelon.checkpoint.read import Checkpoint
from echelon.trainer import Trainer, TrainerCallback, TrainingArguments
from tests.trainer_models import CONSTANT_SGD, DATA, Line, arguments


def _args(folder: Path, **options: Any) -> TrainingArguments:
    defaults = {**CONSTANT_SGD, "learning_rate": 0.001, "max_steps": 4, "save_strategy": "steps", "save_steps": 1}
    return arguments(folder, **{**defaults, "save_blocking": False, **options})


def _trainer(folder: Path, *callbacks: TrainerCallback, **options: Any) -> Trainer:
    return Trainer(Line(), _args(folder, **options), train_dataset=DATA, callbacks=list(callbacks))


class _Held:
    """Holds the writing of the first checkpoint until the training has gone on, as a slow disk does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_write = threading.Event()
        real = storage.sync

        def sync(handle: int) -> None:
            assert self.may_write.wait(60)
            real(handle)

        monkeypatch.setattr(storage, "sync", sync)


@pytest.mark.parametrize("layout", ["echelon", "transformers"])
def test_training_goes_on_during_a_save_which_writes_what_was_there_and_the_next_save_waits(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, seen, waits = _Held(monkeypatch), {}, []

    class Watches(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen[state.global_step] = trainer.model.layer.weight.detach().clone()
            if state.global_step == 2:
                waits.append((tmp_path / "checkpoint-1").exists())
                # The save of step 2 waits for that of step 1, which is released only once it waits.
                real = trainer.accelerator.checkpoints.store.wait

                def wait() -> None:
                    waits.append(trainer.accelerator.checkpoints.store.background.is_busy)
                    held.may_write.set()
                    real()

                monkeypatch.setattr(trainer.accelerator.checkpoints.store, "wait", wait)

    trainer = _trainer(tmp_path, Watches(), checkpoint_format=layout)
    trainer.train()
    assert waits[:2] == [False, True]
    for step in (1, 2, 3, 4):
        folder = tmp_path / f"checkpoint-{step}"
        assert torch.equal(load_file(folder / "model.safetensors")["layer.weight"], seen[step])
        assert problems_in(folder) == []
    if layout == "echelon":  # the weights are in the model files alone, as in a blocking save
        assert not any(name.startswith("models.") for name in Checkpoint(tmp_path / "checkpoint-1").names())


def test_a_save_that_fails_is_no_best_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = iter([0.1, 0.5, 0.3, 0.2])
    real = weight_files.safetensors.torch.save_file

    def save_file(tensors: Any, path: Any, **options: Any) -> None:
        if "checkpoint-2" in str(path):
            raise OSError(28, "No space left on device")
        real(tensors, path, **options)

    monkeypatch.setattr(weight_files.safetensors.torch, "save_file", save_file)
    trainer = Trainer(
        Line(),
        _args(
            tmp_path,
            eval_strategy="steps",
            eval_steps=1,
            load_best_model_at_end=True,
            metric_for_best_model="value",
            greater_is_better=True,
        ),
        train_dataset=DATA,
        eval_dataset=DATA[:2],
        compute_metrics=lambda _: {"value": next(values)},
    )
    with (
        pytest.warns(EchelonWarning, match="No space left on device"),
        pytest.warns(EchelonWarning, match="at step 2, which this run has not saved"),
    ):
        trainer.train()
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-1")
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == [f"checkpoint-{i}" for i in (1, 3, 4)]


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", ["echelon", "transformers"])
def test_a_process_killed_during_a_save_leaves_the_checkpoint_before(layout: str, tmp_path: Path) -> None:
    for at in (1, 3, 6):  # operations of the storage after the first checkpoint
        folder = tmp_path / str(at)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12, about threads, which do nothing here
            child = os.fork()
        if not child:
            _train_and_die(folder, layout, at)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        again = _trainer(folder, checkpoint_format=layout, max_steps=3)
        again.train(resume_from_checkpoint="auto")
        assert again._session.initial_step >= 1
        assert sorted(path.name for path in folder.glob("checkpoint-*")) == [f"checkpoint-{i}" for i in (1, 2, 3)]


def _train_and_die(folder: Path, layout: str, at: int) -> None:
    left = [at]

    def counted(real: Any) -> Any:
        def operation(*arguments: Any) -> Any:
            if (folder / "checkpoint-1").exists():
                left[0] -= 1
                if not left[0]:
                    os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments)

        return operation

    try:
        for name in ("create", "write", "sync", "rename", "sync_folder"):
            setattr(storage, name, counted(getattr(storage, name)))
        _trainer(folder, checkpoint_format=layout).train()
    finally:
        os._exit(1)


def test_what_must_run_before_training_goes_on_does(tmp_path: Path) -> None:
    class Own(Trainer):
        def _save(self, output_dir: Any = None, state_dict: Any = None) -> None:
            threads.append(threading.current_thread())
            super()._save(output_dir, state_dict)

    threads: list[threading.Thread] = []
    Own(Line(), _args(tmp_path), train_dataset=DATA).train()
    assert threads == [threading.main_thread()] * 4
    with pytest.raises(ConfigError, match="hub_strategy='every_save'"):
        _args(tmp_path, push_to_hub=True)
