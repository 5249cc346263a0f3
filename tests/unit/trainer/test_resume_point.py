"""A Trainer that is stopped goes on as if it had not been: against a plain loop that never stops, bit for bit."""

from __future__ import annotations

import json
import math
import os
import random
import re
import shutil
import signal
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import Dataset, IterableDataset

from echelon.accelerator.checkpoint.folders import problems_in
from echelon.base.errors import CheckpointError, ConfigError
from echelon.base.warnings import EchelonWarning
from echelon.checkpoint import storage
from echelon.checkpoint.background_save import TooManyFailedSavesError
from echelon.cli.main import _run
from echelon.trainer import (
    EarlyStoppingCallback,
    Trainer,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
    get_last_checkpoint,
)
from tests.reference import PlainTraining, train_plainly, warmup_then_linear
from tests.trainer_models import EndsAfter, RecordingModel, RecordingTrainer, arguments, logged

N, SIZE, EPOCHS, SEED = 22, 2, 2, 5  # 11 batches of an epoch: with accumulation 3 the last update has 2


class Net(nn.Module):
    """Dropout: the random states count; an uninitialised copy of it has other weights."""

    def __init__(self, seed: int = SEED) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.drop, self.second = nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.second(self.drop(self.first(x).tanh()))
        return {"logits": logits} if labels is None else {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Noisy(Dataset[dict[str, torch.Tensor]]):
    """Samples that draw when they are read, as augmentation does."""

    def __init__(self, *, noise: bool) -> None:
        self.x = torch.randn(N, 4, generator=torch.Generator().manual_seed(1))
        self.noise = noise

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        x = self.x[i] + 0.1 * torch.rand(4) if self.noise else self.x[i]
        return {"x": x, "labels": torch.tensor(i % 3)}


class Words:
    """A tokenizer, to the eye of a Trainer."""

    def save_pretrained(self, save_directory: str, **options: Any) -> None:
        folder = Path(save_directory)
        (folder / "words").mkdir()
        for path in (folder / "words.json", folder / "words" / "vocab.txt"):
            path.write_text("{}")


class DrawsOnce(TrainerCallback):
    """Draws random numbers when a training begins: one that goes on does not notice."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        torch.rand(3)


def _args(folder: Path, **options: Any) -> TrainingArguments:
    defaults: dict[str, Any] = {
        "num_train_epochs": EPOCHS,
        "gradient_accumulation_steps": 3,
        "learning_rate": 0.01,
        "warmup_steps": 3,
        "max_grad_norm": 0.5,
        "optim": "adamw_torch",
        "logging_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
        "seed": SEED,
    }
    return arguments(folder, **{**defaults, **options})


def _trainer(args: TrainingArguments, *, seed: int = SEED, noise: bool = False, **options: Any) -> Trainer:
    return Trainer(Net(seed), args, train_dataset=Noisy(noise=noise), **options)


def _plain_loop() -> PlainTraining:
    """Train as ``_args`` say, by a plain loop."""
    model, data = Net(), Noisy(noise=False)
    torch.manual_seed(SEED)
    return train_plainly(
        model,
        lambda rows: model(data.x[rows], torch.tensor([i % 3 for i in rows]))["loss"],
        num_samples=N,
        batch_size=SIZE,
        epochs=EPOCHS,
        seed=SEED,
        accumulation=3,
        optimizer=torch.optim.AdamW(model.parameters(), weight_decay=0.0),
        rate=warmup_then_linear(0.01, warmup=3, total=EPOCHS * math.ceil(math.ceil(N / SIZE) / 3)),
        clip=lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.5),
    )


@pytest.mark.sample(2)
@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("layout", ["echelon", "transformers"])
def test_a_training_that_is_stopped_anywhere_goes_on_bit_for_bit(
    tmp_path: Path, layout: str, blocking: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = _plain_loop()
    losses = plain.losses
    monkeypatch.setenv("ECHELON_CHECKPOINT_FORMAT", layout)
    whole = _trainer(_args(tmp_path, save_blocking=blocking))
    whole.train()
    assert logged(whole) == losses
    assert len(losses) == 8
    for step in (1, 3, 4, 5, 8) if blocking else (3, 8):  # 4 is the last of an epoch, 8 of all
        trainer = _trainer(_args(tmp_path / "again", save_strategy="no"), seed=99, callbacks=[DrawsOnce()])
        random.seed(step), np.random.seed(step), torch.manual_seed(step)
        result = trainer.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
        assert logged(trainer) == losses, step
        assert (result.global_step, trainer.state.epoch) == (8, 2.0)
        for name, value in plain.model.state_dict().items():
            assert torch.equal(trainer.model.state_dict()[name], value), (step, name)
        if step < 8:  # of this call alone
            assert result.training_loss == pytest.approx(sum(losses[step:]) / (8 - step), rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_what_is_drawn_when_samples_are_read_is_drawn_again(tmp_path: Path, workers: int) -> None:
    options = {"dataloader_num_workers": workers, "logging_steps": 3, "save_steps": 2}
    whole = _trainer(_args(tmp_path, **options), noise=True)
    whole.train()
    for step in (2, 6):
        trainer = _trainer(_args(tmp_path / "again", **{**options, "save_strategy": "no"}), seed=99, noise=True)
        trainer.train(resume_from_checkpoint=tmp_path / f"checkpoint-{step}")
        assert logged(trainer) == logged(whole)  # also the window that was open
        for name, value in whole.model.state_dict().items():
            assert torch.equal(trainer.model.state_dict()[name], value), (step, name)


def test_the_newest_whole_checkpoint_is_taken_and_what_is_passed_over_is_told(tmp_path: Path) -> None:
    whole = _trainer(_args(tmp_path, save_steps=2))
    assert whole.train(resume_from_checkpoint="auto").global_step == 8  # nothing is there: a new training
    damaged = tmp_path / "checkpoint-8" / "model.safetensors"
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
    (tmp_path / "checkpoint-6" / "trainer_state.json").unlink()
    (tmp_path / f"checkpoint-9.tmp-{'0' * 16}").mkdir()
    assert get_last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-4")
    for wanted in ("auto", True, "True"):
        again = _trainer(_args(tmp_path, save_strategy="no", resume_from_checkpoint=wanted), seed=99)
        with pytest.warns(
            EchelonWarning, match=r"(?s)checkpoint-4; newer.*checkpoint-8:.*model.safetensors is damaged.*-6: .*missing"
        ):
            again.train()
        assert logged(again) == logged(whole)
    with pytest.raises(CheckpointError, match=r"model.safetensors is damaged"):
        _trainer(_args(tmp_path)).train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))


def test_a_second_training_of_one_trainer_and_an_evaluation_before_it_change_nothing(tmp_path: Path) -> None:
    args = _args(tmp_path, eval_strategy="epoch", save_steps=5)
    whole = _trainer(args, eval_dataset=Noisy(noise=False))
    whole.train()
    again = _trainer(
        _args(tmp_path / "2", eval_strategy="epoch", save_strategy="no"), seed=99, eval_dataset=Noisy(noise=False)
    )
    again.evaluate()
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    wanted = [entry for entry in whole.state.log_history if "loss" in entry or "eval_loss" in entry]
    found = [entry for entry in again.state.log_history if ("loss" in entry or "eval_loss" in entry) and entry["step"]]
    names = ("loss", "eval_loss", "grad_norm", "learning_rate", "step", "epoch")
    assert [[e.get(n) for n in names] for e in found] == [[e.get(n) for n in names] for e in wanted]


def test_a_resumed_run_says_where_it_resumes_and_its_table_has_the_same_columns(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(resume: bool) -> list[str]:
        args = _args(tmp_path, save_strategy="epoch", eval_strategy="epoch", disable_tqdm=True)
        trainer = Trainer(
            Net(3),
            args,
            train_dataset=Noisy(noise=False),
            eval_dataset=Noisy(noise=False),
            compute_metrics=lambda _: {"zeta": 1.0, "accuracy": 0.5},
            callbacks=[],
        )
        trainer.train(resume_from_checkpoint=resume)
        return capsys.readouterr().out.splitlines()

    table = run(False)[-3:]
    assert table[0].split("  ") == ["epoch", "training loss", "validation loss", "accuracy", "zeta"]
    first = min(tmp_path.glob("checkpoint-*"), key=lambda folder: int(folder.name.partition("-")[2]))
    last = [folder for folder in tmp_path.glob("checkpoint-*") if folder != first]
    assert caplog.messages == []
    assert run(True)[-3:] == table
    shutil.rmtree(last[0])
    assert run(True)[-3:] == table
    steps = int(first.name.partition("-")[2])
    assert caplog.messages == [
        f"resuming from {last[0]}: epoch 2, step {2 * steps} of {2 * steps}",
        f"resuming from {first}: epoch 1, step {steps} of {2 * steps}",
    ]


def test_data_that_begin_anew_and_other_batches(tmp_path: Path) -> None:
    _trainer(_args(tmp_path, save_steps=5)).train()

    def go_on(**options: Any) -> list[float]:
        args = _args(tmp_path / "2", **{"save_strategy": "no", "max_steps": 6, **options})
        trainer = RecordingTrainer(Net(9), args, train_dataset=Noisy(noise=False))
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
        return trainer.samples()

    order = torch.randperm(N, generator=torch.Generator().manual_seed(SEED + 1)).tolist()
    first = [Noisy(noise=False).x[i, 0].item() for i in order]
    assert go_on() == first[6:12]
    assert go_on(ignore_data_skip=True) == first[:6]
    with pytest.warns(EchelonWarning, match=r"per_device_train_batch_size=1 \(saved: 2\)"):
        assert go_on(per_device_train_batch_size=1) == first[6:9]
    with (
        pytest.warns(EchelonWarning, match="arguments differ"),
        pytest.warns(EchelonWarning, match="some samples are repeated"),
    ):
        assert go_on(per_device_train_batch_size=4, gradient_accumulation_steps=1) == first[4:8]
    with pytest.warns(EchelonWarning, match=r"save_steps=7 \(saved: 5\)"):
        go_on(save_strategy="steps", save_steps=7)


def test_weights_alone_are_no_training_to_go_on_with(tmp_path: Path) -> None:
    for layout in ("echelon", "transformers"):
        folder = tmp_path / layout
        _trainer(_args(folder, save_only_model=True, save_steps=8, checkpoint_format=layout)).train()
        assert problems_in(folder / "checkpoint-8") == []
        with pytest.raises(CheckpointError, match="holds only weights"):
            _trainer(_args(folder)).train(resume_from_checkpoint=str(folder / "checkpoint-8"))
        with pytest.warns(EchelonWarning, match=r"(?s)starting from scratch\n.*checkpoint-8: holds only weights"):
            _trainer(_args(folder, max_steps=1, save_strategy="no")).train(resume_from_checkpoint="auto")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_dcp_folder_is_none_to_go_on_with(tmp_path: Path) -> None:
    """As a Trainer of transformers writes it with FSDP."""
    folder = tmp_path / "checkpoint-8"
    dcp.save({"model": {"w": torch.ones(2)}}, checkpoint_id=folder / "pytorch_model_fsdp_0", no_dist=True)
    (folder / "trainer_state.json").write_text("{}")
    (folder / "scheduler.pt").write_bytes(b"PK")
    with pytest.raises(CheckpointError, match=r"format of torch\.distributed\.checkpoint, from which a Trainer cannot"):
        _trainer(_args(tmp_path)).train(resume_from_checkpoint=str(folder))


def test_files_of_transformers_layout_have_its_names_and_plain_data(tmp_path: Path) -> None:
    args = _args(tmp_path, checkpoint_format="transformers", save_steps=4, max_steps=4, fp16=True)
    trainer = _trainer(args)
    trainer.train()
    folder = tmp_path / "checkpoint-4"
    names = ["model.safetensors", "optimizer.pt", "rng_state.pth", "scaler.pt", "scheduler.pt", "trainer_state.json"]
    ours = "echelon_data.json"  # what its place in the data depends on; transformers does not look at it
    assert sorted(path.name for path in folder.iterdir()) == sorted([*names, "training_args.bin", ours])
    saved = torch.load(folder / "training_args.bin", weights_only=False)
    assert (type(saved), saved.save_steps, saved.hub_token) == (type(args), 4, None)
    state = torch.load(folder / "optimizer.pt", weights_only=True)
    assert [len(group["params"]) for group in state["param_groups"]] == [2, 2]  # with decay, without
    (folder / "optimizer.pt").write_bytes((folder / "optimizer.pt").read_bytes()[:-40])
    assert len(problems_in(folder)) == 1
    with pytest.raises(ConfigError, match="checkpoint_format='accelerate' is not one of"):
        _trainer(_args(tmp_path, checkpoint_format="accelerate", max_steps=1)).train()


def test_callbacks_and_the_state_come_back(tmp_path: Path) -> None:
    options = {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "loss"}
    stops = [EarlyStoppingCallback(early_stopping_patience=50), EarlyStoppingCallback(early_stopping_patience=60)]
    with pytest.warns(UserWarning, match="has already been added"):
        whole = _trainer(_args(tmp_path, **options), eval_dataset=Noisy(noise=False), callbacks=stops)
    whole.train()
    path = tmp_path / "checkpoint-3" / "trainer_state.json"
    saved = TrainerState.load_from_json(path)
    counters = [
        one["attributes"]["early_stopping_patience_counter"]
        for one in saved.stateful_callbacks["EarlyStoppingCallback"]
    ]
    assert [one["args"]["early_stopping_patience"] for one in saved.stateful_callbacks["EarlyStoppingCallback"]] == [
        50,
        60,
    ]

    def resume(*, restores: bool) -> tuple[int, int]:
        seen = []

        class Looks(TrainerCallback):
            def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                found = next(c for c in again.callback_handler.callbacks if isinstance(c, EarlyStoppingCallback))
                seen.append((found.early_stopping_patience, found.early_stopping_patience_counter))
                assert (state.global_step, state.best_metric) == (3, saved.best_metric)
                raise KeyboardInterrupt

        callbacks = [EarlyStoppingCallback(early_stopping_patience=7), EarlyStoppingCallback(9), Looks]
        args = _args(tmp_path / "2", restore_callback_states_from_checkpoint=restores, **options)
        with pytest.warns(UserWarning, match="has already been added"):
            again = _trainer(args, eval_dataset=Noisy(noise=False), callbacks=callbacks)
        with pytest.raises(KeyboardInterrupt):
            again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
        return seen[0]

    assert resume(restores=True) == (50, counters[0])
    assert resume(restores=False) == (7, 0)


@pytest.mark.parametrize("blocking", [True, False])
def test_the_best_checkpoint_is_kept_and_a_new_training_replaces_what_is_there(tmp_path: Path, blocking: bool) -> None:
    options: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True}
    options["save_blocking"] = blocking
    options |= {"save_total_limit": 2, "greater_is_better": True}  # so that the first is the best
    whole = _trainer(_args(tmp_path, **options), eval_dataset=Noisy(noise=False), processing_class=Words())
    whole.train()
    best = whole.state.best_global_step
    assert best == 1
    kept = {path.name for path in tmp_path.iterdir()}
    assert kept == {f"checkpoint-{best}", "checkpoint-8"}
    weights = load_file(tmp_path / f"checkpoint-{best}" / "model.safetensors")
    assert all(torch.equal(value, weights[name]) for name, value in whole.model.state_dict().items())
    (tmp_path / "checkpoint-8" / "notes.txt").write_text("of the user")
    assert (tmp_path / "checkpoint-8" / "words" / "vocab.txt").exists()
    assert (tmp_path / "checkpoint-8" / "words.json").exists()
    again = _trainer(
        _args(
            tmp_path,
            save_strategy="best",
            metric_for_best_model="loss",
            eval_strategy="steps",
            eval_steps=8,
            save_blocking=blocking,
        ),
        eval_dataset=Noisy(noise=False),
    )
    again.train()
    assert problems_in(tmp_path / "checkpoint-8") == []
    assert (tmp_path / "checkpoint-8" / "notes.txt").exists()
    assert not (tmp_path / "checkpoint-8" / "words.json").exists()  # it was the old checkpoint's
    assert json.loads((tmp_path / "checkpoint-8" / "trainer_state.json").read_text())["eval_steps"] == 8


def _train_by_value(folder: Path, values: list[float], *, resume: Any = None, **options: Any) -> Trainer:
    """Train with an evaluation at every step, whose metrics are ``values``, and a checkpoint at every other step."""
    given = iter(values)
    options = {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 2, "max_steps": 4, **options}
    args = _args(folder, load_best_model_at_end=True, metric_for_best_model="value", **options)
    data = Noisy(noise=False)
    trainer = _trainer(args, eval_dataset=data, compute_metrics=lambda _: {"value": next(given)})
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.mark.sample(2)
@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize(
    ("limit", "kept"), [(None, {2, 4, 5, 8}), (1, {2, 4, 5, 8}), (6, {2, 4, 5, 6, 7, 8})], ids=["", "1", "6"]
)
def test_the_best_checkpoints_stay(tmp_path: Path, limit: int | None, kept: set[int], blocking: bool) -> None:
    values = [0.1, 0.9, 0.3, 0.7, 0.7, 0.2, math.nan, 0.5]  # the best are those of steps 2, 4 and 5
    options: dict[str, Any] = {"save_best": 3, "save_total_limit": limit, "save_steps": 1, "max_steps": 8}
    options["save_blocking"] = blocking
    with pytest.raises(StopIteration):  # as if interrupted
        _train_by_value(tmp_path, values[:5], **options)
    trainer = _train_by_value(tmp_path, values[5:], resume=True, **options)
    assert {int(path.name.removeprefix("checkpoint-")) for path in tmp_path.iterdir()} == kept
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")


def _has_weights_of(trainer: Trainer, folder: Path) -> bool:
    weights = load_file(folder / "model.safetensors")
    return all(torch.equal(value, weights[name]) for name, value in trainer.model.state_dict().items())


@pytest.mark.parametrize(
    ("values", "loaded", "best", "told"),
    [
        ([0.3, 0.2, 0.9, 0.1], "checkpoint-4", None, r"value 0\.9\) was at step 3, .* leaves the model of step 4"),
        (
            [0.3, 0.5, 0.9, 0.1],
            "checkpoint-2",
            "checkpoint-2",
            r"value 0\.9\) was at step 3, .* leaves the model of step 2",
        ),
        ([0.3, 0.9, 0.5, 0.1], "checkpoint-2", "checkpoint-2", None),
    ],
)
def test_the_best_checkpoint_is_one_of_this_run(
    tmp_path: Path, values: list[float], loaded: str, best: str | None, told: str | None
) -> None:
    """Another run has left checkpoints in the directory, also one of the step that is the best here."""
    _trainer(_args(tmp_path, max_steps=3, save_steps=1, learning_rate=1.0)).train()
    with pytest.warns(EchelonWarning, match=told) if told else nullcontext():
        trainer = _train_by_value(tmp_path, values)
    assert trainer.state.best_model_checkpoint == (None if best is None else str(tmp_path / best))
    assert _has_weights_of(trainer, tmp_path / loaded)


def test_a_resumed_run_loads_the_best_checkpoint_of_its_first_part(tmp_path: Path) -> None:
    with pytest.raises(StopIteration):  # as if interrupted
        _train_by_value(tmp_path, [0.3, 0.9])
    trainer = _train_by_value(tmp_path, [0.5, 0.1], resume=True)
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")
    assert _has_weights_of(trainer, tmp_path / "checkpoint-2")


@pytest.mark.parametrize("blocking", [True, False])
def test_a_disk_that_is_full_is_told_and_then_ends_the_training(
    tmp_path: Path, blocking: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    trainer = _trainer(_args(tmp_path, save_total_limit=1, max_failed_saves=2, save_blocking=blocking))

    class Fills(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            trainer.accelerator.checkpoints.store.wait()  # the save that is being written is that of the step before
            if state.global_step == 2:
                monkeypatch.setattr(storage, "write", full)
            if state.global_step == 3:
                monkeypatch.setattr(storage, "write", write)
                monkeypatch.setattr(
                    "echelon.trainer.checkpoint.model_files.write_tensors", full
                )  # as save_pretrained would fail

    write = storage.write
    trainer.add_callback(Fills)
    with pytest.warns(EchelonWarning, match="No space left on device"), pytest.raises(TooManyFailedSavesError) as error:
        trainer.train()
    assert error.value.exit_code == 74
    assert trainer.state.global_step == 4  # the saves after steps 3 and 4
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-2"]
    assert problems_in(tmp_path / "checkpoint-2") == []


def test_an_error_leaves_a_checkpoint_of_the_last_whole_step(tmp_path: Path) -> None:
    whole = _trainer(_args(tmp_path / "whole", save_strategy="no"))
    whole.train()

    class Breaks(Trainer):
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
            if self.state.global_step == 5 and self.state.epoch == 1.0 + 3 / 11:
                self.micro = getattr(self, "micro", 0) + 1
                if self.micro == 2:
                    torch.rand(7)
                    raise RuntimeError("a broken sample")
            return super().training_step(model, inputs, num_items_in_batch)

    args = _args(tmp_path, save_strategy="no", save_on_exception=True)
    with pytest.raises(RuntimeError, match="a broken sample"):
        Breaks(Net(), args, train_dataset=Noisy(noise=False)).train()
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-5"]
    again = _trainer(_args(tmp_path, save_strategy="no"), seed=99)
    again.train(resume_from_checkpoint="auto")
    assert logged(again) == logged(whole)
    for name, value in whole.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], value), name


class Signals(TrainerCallback):
    """A scheduler asks the process to end, in the middle of an update."""

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 4 and not self.__dict__.setdefault("is_sent", False):
            self.is_sent = True
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("setting", ["save_on_signal", "enable_jit_checkpoint"])
def test_a_signal_ends_the_training_after_the_step_and_auto_goes_on(
    tmp_path: Path, setting: str, caplog: pytest.LogCaptureFixture
) -> None:
    losses, before = _plain_loop().losses, signal.getsignal(signal.SIGTERM)
    options = {"save_strategy": "no", setting: True}
    first = _trainer(_args(tmp_path, **options), callbacks=[Signals()])
    if setting == "save_on_signal":
        with pytest.raises(SystemExit) as error:
            first.train(resume_from_checkpoint="auto")
        assert error.value.code == 143
    else:
        assert first.train(resume_from_checkpoint="auto").global_step == 5
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-5"]
    assert "stopping after a signal: saved a checkpoint of step 5 of 8" in caplog.text
    assert signal.getsignal(signal.SIGTERM) is before
    second = _trainer(_args(tmp_path, **options), seed=99)
    assert second.train(resume_from_checkpoint="auto").global_step == 8
    assert logged(second) == losses


class SignalsInEvaluation(TrainerCallback):
    """The process is asked to end in the middle of the second evaluation."""

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 4 and not self.__dict__.setdefault("is_sent", False):
            self.is_sent = True
            os.kill(os.getpid(), signal.SIGTERM)


def test_an_evaluation_that_a_signal_ends_is_made_again(tmp_path: Path) -> None:
    def trainer(folder: str, **more: Any) -> Trainer:
        options = {"save_strategy": "no", "eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 2}
        args = _args(tmp_path / folder, save_on_signal=True, **options)
        return _trainer(args, noise=True, eval_dataset=Noisy(noise=True), **more)

    whole = trainer("whole")
    whole.train()
    first = trainer("parts", callbacks=[SignalsInEvaluation()])
    with pytest.raises(SystemExit) as error:
        first.train()
    assert error.value.code == 143
    assert [entry["step"] for entry in first.state.log_history if "eval_loss" in entry] == [2]
    assert [path.name for path in (tmp_path / "parts").iterdir()] == ["checkpoint-4"]
    second = trainer("parts", seed=99)
    second.train(resume_from_checkpoint="auto")
    losses = [
        [(entry["step"], entry["eval_loss"]) for entry in made.state.log_history if "eval_loss" in entry]
        for made in (whole, second)
    ]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 4
    assert logged(second) == logged(whole)
    for name, value in whole.model.state_dict().items():
        assert torch.equal(second.model.state_dict()[name], value), name


@pytest.mark.slow
def test_the_example_of_the_document_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (Path(__file__).resolve().parents[3] / "docs" / "checkpoints.md").read_text()
    (example,) = re.findall(r"```python trainer\n(.*?)```", text, re.DOTALL)
    losses = []
    for folder, program in (
        ("whole", example),
        (
            "parts",
            example.replace("num_train_epochs=3", "num_train_epochs=3, max_steps=10, lr_scheduler_type='constant'"),
        ),
        ("parts", example.replace("num_train_epochs=3", "num_train_epochs=3, lr_scheduler_type='constant'")),
    ):
        (tmp_path / folder).mkdir(exist_ok=True)
        monkeypatch.chdir(tmp_path / folder)
        torch.manual_seed(0)
        capsys.readouterr()
        scope: dict[str, Any] = {}
        exec(
            program.replace("Trainer(torch", "trainer = Trainer(torch").replace(").train()", "); trainer.train()"),
            scope,
        )
        losses.append(logged(scope["trainer"]))
    assert len(losses[0]) == 4
    assert losses[1] == losses[2][:1]
    assert len(losses[2]) == 4


def test_a_checkpoint_is_exported_for_transformers(tmp_path: Path) -> None:
    whole = _trainer(_args(tmp_path, save_steps=5))
    whole.train()
    out = tmp_path / "out"
    assert _run(["checkpoint", "export", str(tmp_path / "checkpoint-5"), str(out), "--format", "transformers"]) == 0
    assert {"model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth"} <= {
        path.name for path in out.iterdir()
    }
    again = _trainer(_args(tmp_path / "2", save_strategy="no"), seed=99)
    again.train(resume_from_checkpoint=out)
    assert logged(again) == logged(whole)


class _Leaves(TrainerCallback):
    """Ends the training in the middle of a pass, after whole updates or within one."""

    def __init__(self, *, within: bool) -> None:
        self.within = within

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop |= self.within and state.global_step == 2

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop |= not self.within and state.global_step == 2


@pytest.mark.parametrize("within", [False, True])
@pytest.mark.parametrize("checkpoint_format", ["echelon", "transformers"])
def test_a_training_that_was_ended_within_a_pass_goes_on_with_what_is_left_of_it(
    tmp_path: Path, within: bool, checkpoint_format: str
) -> None:
    def trainer(*callbacks: TrainerCallback) -> RecordingTrainer:
        args = TrainingArguments(
            output_dir=str(tmp_path), per_device_train_batch_size=SIZE, gradient_accumulation_steps=3, num_train_epochs=1,
            save_strategy="epoch", checkpoint_format=checkpoint_format, disable_tqdm=True, use_cpu=True, seed=SEED,
        )  # fmt: skip
        return RecordingTrainer(Net(), args, train_dataset=Noisy(noise=False), callbacks=list(callbacks))

    first, second = trainer(_Leaves(within=within)), trainer()
    first.train()
    assert get_last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-2")
    second.train(resume_from_checkpoint=True)
    seen = first.samples()[: 2 * 3 * SIZE] + second.samples()  # nothing was stepped with beyond these of the first
    x = torch.randn(N, 4, generator=torch.Generator().manual_seed(1))[:, 0]
    order = torch.randperm(N, generator=torch.Generator().manual_seed(SEED)).tolist()
    assert seen == x[order].tolist()  # every sample once


class Endless(IterableDataset[dict[str, torch.Tensor]]):
    """10 samples without a length, whose values tell the epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        return ({"x": torch.tensor([i + 100.0 * self.epoch])} for i in range(10))


@pytest.mark.sample(4)
@pytest.mark.filterwarnings("ignore:.*batches of iterable data were read again")
@pytest.mark.parametrize("end", [3, 4, 7])  # within the first pass, within the second, after the third
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("kind", ["echelon", "transformers", "of transformers' own"])
def test_data_without_a_length_goes_on_where_it_ended(tmp_path: Path, kind: str, accumulation: int, end: int) -> None:
    options: dict[str, Any] = {"gradient_accumulation_steps": accumulation, "checkpoint_format": kind.split()[0]}
    if kind == "of transformers' own":
        options["checkpoint_format"] = "transformers"
    seen = []
    for stop, resume in ((end, None), (None, True)):
        args = arguments(tmp_path, per_device_train_batch_size=2, max_steps=9, **options)
        trainer = Trainer(model := RecordingModel(), args, train_dataset=Endless(), callbacks=[EndsAfter(stop)])
        trainer.train(resume_from_checkpoint=resume)
        seen += model.seen
        if kind == "of transformers' own" and stop:
            (tmp_path / f"checkpoint-{end}" / "echelon_data.json").unlink()
    # An update at the end of a pass has one batch of 2.
    assert seen == [i + 100.0 * epoch for epoch in range(4) for i in range(10)][: len(seen)]
    assert len(seen) == {1: 9 * 2, 2: 3 * 10}[accumulation]


def test_data_without_a_length_goes_on_after_the_samples_of_other_batches(tmp_path: Path) -> None:
    seen = []
    for size, stop, resume in ((2, 7, None), (1, None, True)):  # 14 samples: 4 of the second pass
        args = arguments(tmp_path, per_device_train_batch_size=size, max_steps=9, checkpoint_format="transformers")
        trainer = Trainer(model := RecordingModel(), args, train_dataset=Endless(), callbacks=[EndsAfter(stop)])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", EchelonWarning)  # the batch size differs
            trainer.train(resume_from_checkpoint=resume)
        seen += model.seen
    assert seen == [*map(float, range(10)), *(100.0 + i for i in range(6))]


@pytest.mark.parametrize("layout", ["echelon", "transformers"])
def test_the_advice_for_another_model_names_no_argument_that_train_lacks(layout: str, tmp_path: Path) -> None:
    def options() -> TrainingArguments:
        return arguments(tmp_path, max_steps=1, save_strategy="steps", save_steps=1, checkpoint_format=layout)

    Trainer(Net(), options(), train_dataset=Noisy(noise=False)).train()
    other = Net()
    other.second = nn.Linear(8, 4)
    other.third = nn.Linear(1, 1)
    with pytest.raises(CheckpointError, match="to start over, ") as caught:
        Trainer(other, options(), train_dataset=Noisy(noise=False)).train(resume_from_checkpoint=True)
    assert not re.search("allow_missing|strict", str(caught.value))
