"""What happens in a training and in which order: events, logs, evaluations, checkpoints; and old ways to override."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import IterableDataset

from echelon.base.errors import ConfigError, UsageError
from echelon.trainer import (
    CallbackHandler,
    EarlyStoppingCallback,
    EvalPrediction,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from echelon.trainer.callbacks.callback_handler import EVENTS
from tests.trainer_models import DATA, Line, RecordingTrainer, arguments as _args


class Bare(nn.Module):
    """Takes no labels."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x).squeeze(-1)
        return y


class Recorder(TrainerCallback):
    def __init__(self) -> None:
        self.events: list[str] = []
        self.keys: set[str] = set()
        self.tokenizers: set[str] = set()


def _recording(event: str) -> Any:
    def method(self: Recorder, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.events.append(event)
        self.keys |= kwargs.keys()
        self.tokenizers.add(kwargs["tokenizer"])

    return method


for _event in EVENTS:
    setattr(Recorder, _event, _recording(_event))


def test_events_come_in_the_order_of_transformers(tmp_path: Path) -> None:
    recorder = Recorder()
    args = _args(
        tmp_path,
        per_device_train_batch_size=5,
        gradient_accumulation_steps=2,
        logging_steps=1,
        eval_strategy="steps",
        per_device_eval_batch_size=5,
        save_strategy="steps",
        save_steps=1,
    )
    data: dict[str, Any] = {"train_dataset": DATA, "eval_dataset": DATA}
    Trainer(Line(), args, processing_class="words", callbacks=[recorder], **data).train()
    assert recorder.events == [
        "on_init_end",
        "on_train_begin",
        "on_epoch_begin",
        "on_step_begin",
        "on_substep_end",
        "on_pre_optimizer_step",
        "on_optimizer_step",
        "on_step_end",
        "on_log",
        "on_prediction_step",
        "on_prediction_step",
        "on_log",
        "on_evaluate",
        "on_save",
        "on_epoch_end",
        "on_log",
        "on_train_end",
    ]
    assert recorder.tokenizers == {"words"}  # under the name of older tutorials
    assert recorder.keys >= {"model", "processing_class", "optimizer", "lr_scheduler", "logs", "metrics"}
    assert recorder.keys >= {"train_dataloader", "eval_dataloader"}


def test_what_callbacks_asked_for_is_forgotten_in_time() -> None:
    def asked(event: str) -> set[str]:
        control = TrainerControl(True, True, True, True, True)
        handler = CallbackHandler([], None, None, None, None)
        left = getattr(handler, event)(TrainingArguments(), TrainerState(), control)
        return {name.removeprefix("should_") for name, value in vars(control).items() if not value} & {
            name.removeprefix("should_") for name, value in vars(left).items() if not value
        }

    cleared = {event: asked(event) for event in EVENTS}
    assert {event: names for event, names in cleared.items() if names} == {
        "on_train_begin": {"training_stop"},
        "on_epoch_begin": {"epoch_stop"},
        "on_step_begin": {"log", "evaluate", "save"},
        "on_log": {"log"},
        "on_evaluate": {"evaluate"},
        "on_save": {"save"},
    }


def test_a_loss_that_needs_no_labels_is_evaluated(tmp_path: Path) -> None:
    class Reconstructs(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            y = model(inputs["x"])
            loss = F.mse_loss(y, inputs["x"].squeeze(-1))
            return (loss, y) if return_outputs else loss

    model = Bare()
    nn.init.zeros_(model.layer.weight)
    nn.init.zeros_(model.layer.bias)
    data = [{"x": row["x"]} for row in DATA]
    trainer = Reconstructs(model, _args(tmp_path), eval_dataset=data)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(28.5)  # the mean of i^2


def test_gradients_are_there_until_after_on_optimizer_step(tmp_path: Path) -> None:
    seen: dict[str, bool] = {}

    class Looks(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
            seen["pre"] = model.layer.weight.grad is not None

        def on_optimizer_step(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
            seen["after"] = model.layer.weight.grad is not None

        def on_step_end(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
            seen["end"] = model.layer.weight.grad is not None

    Trainer(Line(), _args(tmp_path, max_steps=1), train_dataset=DATA, callbacks=[Looks]).train()
    assert seen == {"pre": True, "after": True, "end": False}


def test_a_callback_can_end_the_pass_and_the_training(tmp_path: Path) -> None:
    class Stops(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            if state.global_step == 2:
                control.should_epoch_stop = True
            if state.global_step == 6:
                control.should_training_stop = True
            return control

    recorder = Recorder()
    trainer = Trainer(Line(), _args(tmp_path, num_train_epochs=5), train_dataset=DATA, callbacks=[recorder, Stops()])
    assert trainer.train().global_step == 6  # 2 of the first pass, 4 of the second
    assert recorder.events.count("on_epoch_begin") == 2
    assert trainer.state.epoch == 1.8


class _LeavesUpdate(TrainerCallback):
    """Ends the pass, or the training, after the first of three batches of the second update."""

    def __init__(self, what: str) -> None:
        self.what, self.calls = what, 0

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.calls += 1
        if self.calls == 3:
            setattr(control, self.what, True)


def _leaving(folder: Path, what: str, **options: Any) -> tuple[RecordingTrainer, Recorder]:
    settings: dict[str, Any] = {
        "gradient_accumulation_steps": 3, "per_device_train_batch_size": 1, "num_train_epochs": 2, "optim": "sgd",
        "train_sampling_strategy": "sequential", "learning_rate": 0.001, "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
    }  # fmt: skip
    recorder = Recorder()
    args = _args(folder, **{**settings, **options})
    trainer = RecordingTrainer(Line(), args, train_dataset=DATA[:9], callbacks=[recorder, _LeavesUpdate(what)])
    trainer.train()
    return trainer, recorder


def test_a_callback_can_end_the_training_within_an_update(tmp_path: Path) -> None:
    trainer, recorder = _leaving(tmp_path, "should_training_stop", logging_steps=1)
    # The first update has three batches; of the second the first one ran, and nothing is stepped with.
    assert trainer.samples() == [0.0, 1.0, 2.0, 3.0]
    assert trainer.state.global_step == 1
    assert recorder.events[-4:] == ["on_substep_end", "on_epoch_end", "on_log", "on_train_end"]
    assert recorder.events.count("on_optimizer_step") == 1
    weight = trainer.model.layer.weight.item()  # type: ignore[union-attr, operator]
    gradient = sum(2 * x * (0.0 - 2 * x) for x in (0.0, 1.0, 2.0)) / 3
    assert weight == pytest.approx(-0.001 * gradient, rel=1e-6)  # float32
    assert all(p.grad is None for p in trainer.model.parameters())
    assert trainer.state.log_history[-1]["train_loss"] == pytest.approx((0.0 + 4.0 + 16.0) / 3, rel=1e-6)


def test_a_callback_can_end_the_pass_within_an_update_whose_gradients_are_dropped(tmp_path: Path) -> None:
    trainer, recorder = _leaving(tmp_path, "should_epoch_stop")
    assert trainer.samples() == [0.0, 1.0, 2.0, 3.0] + [float(i) for i in range(9)]
    assert trainer.state.global_step == 4
    assert recorder.events.count("on_epoch_begin") == 2
    weight = bias = 0.0  # a plain loop of the updates that were made
    for rows in ((0, 1, 2), (0, 1, 2), (3, 4, 5), (6, 7, 8)):
        errors = [(x, weight * x + bias - 2.0 * x) for x in rows]
        weight -= 0.001 * sum(2 * x * error for x, error in errors) / 3
        bias -= 0.001 * sum(2 * error for _, error in errors) / 3
    assert trainer.model.layer.weight.item() == pytest.approx(weight, rel=1e-5)  # type: ignore[union-attr, operator]


def test_an_exact_training_ends_after_the_update(tmp_path: Path) -> None:
    trainer, _ = _leaving(tmp_path, "should_training_stop", parity="exact")
    assert len(trainer.seen) == 6
    assert trainer.state.global_step == 2


def test_the_history_holds_every_log(tmp_path: Path) -> None:
    args = _args(tmp_path, logging_strategy="epoch", eval_strategy="epoch", num_train_epochs=2, eval_delay=2)
    trainer = Trainer(Line(), args, train_dataset=DATA, eval_dataset=DATA)
    result = trainer.train()
    assert [sorted(entry) for entry in trainer.state.log_history] == [
        ["epoch", "grad_norm", "learning_rate", "loss", "step"],
        ["epoch", "grad_norm", "learning_rate", "loss", "step"],
        ["epoch", "eval_loss", "eval_runtime", "eval_samples_per_second", "eval_steps_per_second", "step"],
        [
            "epoch",
            "step",
            "total_flos",
            "train_loss",
            "train_runtime",
            "train_samples_per_second",
            "train_steps_per_second",
        ],
    ]
    assert [(entry["epoch"], entry["step"]) for entry in trainer.state.log_history] == [
        (1, 5),
        (2, 10),
        (2, 10),
        (2, 10),
    ]
    assert trainer.state.log_history[0]["learning_rate"] == pytest.approx(
        5e-5 * 6 / 10
    )  # used by the fifth of ten steps
    assert result.metrics == {k: v for k, v in trainer.state.log_history[-1].items() if k != "step"}


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"eval_strategy": "steps", "eval_steps": 2}, [2, 4, 5]),  # one at the end, too
        ({"logging_strategy": "steps", "logging_steps": 2}, [2, 4]),
        ({"logging_strategy": "steps", "logging_steps": 0.4}, [2, 4]),
        ({"logging_strategy": "steps", "logging_steps": 4, "logging_first_step": True}, [1, 4]),
        ({"logging_strategy": "epoch"}, [5]),
        ({"logging_strategy": "no"}, []),
    ],
)
def test_logs_and_evaluations_come_when_asked(tmp_path: Path, options: dict[str, Any], steps: list[int]) -> None:
    trainer = Trainer(Line(), _args(tmp_path, **options), train_dataset=DATA, eval_dataset=DATA)
    trainer.train()
    name = "eval_loss" if "eval_strategy" in options else "loss"
    assert [entry["step"] for entry in trainer.state.log_history if name in entry] == steps


@pytest.mark.parametrize("parameters", [3, 4])
def test_compute_loss_with_three_or_four_parameters_serves_training_and_evaluation(
    tmp_path: Path, parameters: int
) -> None:
    class Three(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False) -> Any:  # type: ignore[override]
            y = model(inputs["x"])
            loss = F.mse_loss(y, inputs["labels"])
            return (loss, y) if return_outputs else loss

    class Four(Trainer):
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            y = model(inputs["x"])
            loss = F.mse_loss(y, inputs["labels"])
            return (loss, y) if return_outputs else loss

    def metrics(result: EvalPrediction) -> dict[str, float]:
        return {"largest": float(np.abs(result.predictions - result.label_ids).max())}

    kind: type[Trainer] = Three if parameters == 3 else Four
    args = _args(tmp_path, eval_strategy="epoch", per_device_eval_batch_size=3)
    model = Bare()
    trainer = kind(model, args, train_dataset=DATA, eval_dataset=DATA, compute_metrics=metrics)
    trainer.train()
    found = trainer.evaluate()
    x = torch.arange(10.0)[:, None]
    errors = model(x).detach() - 2 * x[:, 0]
    assert found["eval_loss"] == pytest.approx(errors.square().mean().item(), rel=1e-6)  # float32 means of four batches
    assert found["eval_largest"] == errors.abs().max().item()
    assert trainer.predict(DATA).predictions.shape == (10,)


def test_older_overrides_of_other_methods_work(tmp_path: Path) -> None:
    called = []

    class Old(Trainer):
        def training_step(self, model: Any, inputs: Any) -> torch.Tensor:  # type: ignore[override]
            called.append("training_step")
            return super().training_step(model, inputs)

        def log(self, logs: Any) -> None:  # type: ignore[override]
            called.append("log")
            super().log(logs)

        def _get_train_sampler(self) -> Any:  # type: ignore[override]
            called.append("sampler")
            return super()._get_train_sampler()

    trainer = Old(Line(), _args(tmp_path, max_steps=2), train_dataset=DATA)
    trainer.train()
    assert called == ["sampler", "training_step", "training_step", "log"]


def test_the_tokenizer_s_old_name_is_its_new_one(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="tokenizer=.* was renamed to processing_class="):
        trainer = Trainer(Line(), _args(tmp_path), tokenizer="words")
    assert trainer.processing_class == trainer.tokenizer == "words"


def test_a_model_that_returns_its_loss_first_is_evaluated_without_it(tmp_path: Path) -> None:
    class Tuple(Line):
        def forward(self, x: Any, labels: Any = None) -> Any:
            outputs = super().forward(x, labels)
            return tuple(outputs.values())

    prediction = Trainer(Tuple(), _args(tmp_path)).predict(DATA)
    assert prediction.predictions.tolist() == [0.0] * 10
    assert prediction.label_ids.tolist() == [2.0 * i for i in range(10)]
    assert prediction.metrics["test_loss"] == pytest.approx(114.0)  # the mean of (2 i)^2
    unlabelled = [{"x": row["x"]} for row in DATA]
    assert Trainer(Tuple(), _args(tmp_path)).predict(unlabelled).predictions.tolist() == [0.0] * 10


@pytest.mark.parametrize("kind", ["tuple", "dict", "namedtuple"])
def test_what_a_model_did_not_compute_is_no_prediction(tmp_path: Path, kind: str) -> None:
    class Output(NamedTuple):
        loss: Any
        logits: Any
        hidden: Any = None

    class Optional(Line):
        def forward(self, x: Any) -> Any:  # type: ignore[override]
            logits = super().forward(x)["logits"]
            if kind == "dict":
                return {"loss": None, "logits": logits, "hidden": None}
            return Output(None, logits) if kind == "namedtuple" else (None, logits)

    def loss(outputs: Any, labels: Any) -> torch.Tensor:
        logits = outputs["logits"] if kind == "dict" else outputs[1]
        return F.mse_loss(logits, labels)

    trainer = Trainer(Optional(), _args(tmp_path), compute_loss_func=loss)
    prediction = trainer.predict(DATA)
    assert prediction.predictions.tolist() == [0.0] * 10
    assert prediction.metrics["test_loss"] == pytest.approx(114.0)  # the mean of (2 i)^2


def test_predictions_of_different_lengths_are_padded(tmp_path: Path) -> None:
    class Echo(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.weight, "logits": x * self.weight}

    data = [{"x": torch.ones(n), "labels": torch.ones(n, dtype=torch.long)} for n in (2, 2, 3)]
    output = Trainer(Echo(), _args(tmp_path, per_device_eval_batch_size=2)).predict(data)
    assert output.predictions.tolist() == [[1, 1, -100], [1, 1, -100], [1, 1, 1]]
    assert output.label_ids.tolist() == [[1, 1, -100], [1, 1, -100], [1, 1, 1]]


def test_logits_can_be_made_smaller_before_they_are_kept(tmp_path: Path) -> None:
    args = _args(tmp_path, eval_accumulation_steps=2, per_device_eval_batch_size=3)
    trainer = Trainer(Line(), args, preprocess_logits_for_metrics=lambda logits, labels: logits + labels)
    assert trainer.predict(DATA).predictions.tolist() == [2.0 * i for i in range(10)]


def test_several_evaluation_sets_have_their_names_in_the_metrics(tmp_path: Path) -> None:
    trainer = Trainer(Line(), _args(tmp_path), eval_dataset={"one": DATA[:4], "two": DATA[4:]})
    metrics = trainer.evaluate()
    assert metrics["eval_one_loss"] == pytest.approx(14.0)
    assert metrics["eval_two_loss"] == pytest.approx(181.0 - 1 / 3)
    assert trainer.evaluate("one")["eval_loss"] == pytest.approx(14.0)


def test_columns_that_the_model_does_not_take_are_left_out_but_labels_stay(tmp_path: Path) -> None:
    rows = [{"x": [float(i)], "text": "word", "idx": i, "label": 2.0 * i} for i in range(10)]
    seen = []

    class Looks(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            seen.append(sorted(inputs))
            y = model(inputs["x"])
            loss = F.mse_loss(y, inputs["labels"])
            return (loss, y) if return_outputs else loss

    trainer = Looks(Bare(), _args(tmp_path, max_steps=1), train_dataset=rows, eval_dataset=rows)
    trainer.train()
    trainer.evaluate()
    assert seen[0] == seen[1] == ["labels", "x"]


def test_a_table_of_columns_loses_those_that_the_model_does_not_take(tmp_path: Path) -> None:
    class Columns:
        def __init__(self, names: list[str]) -> None:
            self.column_names = names

        def remove_columns(self, column_names: list[str]) -> Columns:
            return Columns([name for name in self.column_names if name not in column_names])

        def __len__(self) -> int:
            return 4

        def __getitem__(self, i: int) -> dict[str, Any]:
            values = {"x": [float(i)], "idx": i, "label": 1.0}
            return {name: values[name] for name in self.column_names}

    trainer = Trainer(Line(), _args(tmp_path), train_dataset=Columns(["x", "idx", "label"]))
    batch = next(iter(trainer.get_train_dataloader()))
    assert sorted(batch) == ["labels", "x"]
    with pytest.raises(UsageError, match=r"Line.forward accepts none of the dataset's columns \(idx\)"):
        Trainer(Line(), _args(tmp_path), train_dataset=Columns(["idx"])).train()


def test_data_without_a_length_train_for_max_steps_and_start_again(tmp_path: Path) -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            yield from DATA

    recorder = Recorder()
    trainer = Trainer(Line(), _args(tmp_path, max_steps=8), train_dataset=Stream(), callbacks=[recorder])
    assert trainer.train().global_step == 8
    assert recorder.events.count("on_epoch_begin") == 2
    with pytest.raises(UsageError, match="train_dataset has no length and max_steps is not set"):
        Trainer(Line(), _args(tmp_path), train_dataset=Stream())


@pytest.mark.parametrize(
    ("options", "steps", "epochs"),
    [
        ({"num_train_epochs": 0.5}, 3, 0.6),
        ({"num_train_epochs": 2.5}, 13, 2.6),
        ({"max_steps": 7}, 7, 1.4),
        ({"gradient_accumulation_steps": 3}, 2, 1.0),
        ({"dataloader_drop_last": True, "per_device_train_batch_size": 4}, 2, 1.0),
    ],
)
def test_the_length_of_a_training(tmp_path: Path, options: dict[str, Any], steps: int, epochs: float) -> None:
    trainer = Trainer(Line(), _args(tmp_path, **options), train_dataset=DATA)
    assert trainer.train().global_step == steps
    assert trainer.state.epoch == pytest.approx(epochs)


def test_a_second_training_begins_anew_with_the_same_optimizer(tmp_path: Path) -> None:
    trainer = Trainer(Line(), _args(tmp_path, logging_steps=1), train_dataset=DATA)
    trainer.train()
    optimizer = trainer.optimizer
    trainer.train()
    assert trainer.optimizer is optimizer
    assert trainer.state.global_step == 5
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "loss" in entry]
    assert rates == pytest.approx([5e-5 * part for part in (1, 0.8, 0.6, 0.4, 0.2)])


def test_model_init_makes_the_same_model_for_each_training(tmp_path: Path) -> None:
    trainer = Trainer(model_init=Bare, args=_args(tmp_path), train_dataset=DATA, compute_loss_func=_mse)
    trainer.train()
    first = trainer.model.layer.weight.item()
    trainer.train()
    assert trainer.model.layer.weight.item() == first


def _mse(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    return F.mse_loss(outputs, labels, reduction="sum") / (num_items_in_batch or labels.numel())


def test_the_order_is_the_permutation_of_seed_and_pass(tmp_path: Path) -> None:
    args = _args(tmp_path, num_train_epochs=2, seed=5, data_seed=9)
    trainer = RecordingTrainer(Line(), args, train_dataset=DATA)
    trainer.train()
    expected = [torch.randperm(10, generator=torch.Generator().manual_seed(9 + epoch)).tolist() for epoch in (0, 1)]
    assert trainer.samples() == expected[0] + expected[1]


def test_checkpoints_hold_weights_and_state_as_safetensors_and_json(tmp_path: Path) -> None:
    args = _args(tmp_path, save_strategy="steps", save_steps=2, save_total_limit=2)
    trainer = Trainer(Line(), args, train_dataset=DATA)
    trainer.train()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-4", "checkpoint-5"]
    folder = tmp_path / "checkpoint-5"
    assert sorted(path.name for path in folder.iterdir()) == [
        "manifest.json",
        "model.safetensors",
        "objects.json",
        "rank_00000.json",
        "rank_00000.safetensors",
        "trainer_state.json",
        "training_args.json",
    ]
    weights = load_file(folder / "model.safetensors")
    assert all(torch.equal(weights[name], value) for name, value in trainer.model.state_dict().items())
    state = TrainerState.load_from_json(folder / "trainer_state.json")
    assert (state.global_step, state.epoch, state.max_steps) == (5, 1.0, 5)
    assert json.loads((folder / "training_args.json").read_text())["save_steps"] == 2


def test_tied_weights_are_saved_once(tmp_path: Path) -> None:
    model = Line()
    model.other = model.layer  # the same tensors under two names
    Trainer(model, _args(tmp_path)).save_model(tmp_path / "out")
    assert sorted(load_file(tmp_path / "out" / "model.safetensors")) == ["layer.bias", "layer.weight"]


def test_the_best_model_comes_back(tmp_path: Path) -> None:
    class Goes(nn.Module):
        """Its loss is (weight - 3)^2, and each step adds 1: the best one is after step 3."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(()))

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            loss = -self.weight if self.training else (self.weight - 3) ** 2
            return loss, x

    options: dict[str, Any] = {
        "optim": "sgd",
        "learning_rate": 1.0,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
        "save_total_limit": 1,
        "load_best_model_at_end": True,
    }
    model = Goes()
    trainer = Trainer(model, _args(tmp_path, **options), train_dataset=DATA, eval_dataset=DATA)
    trainer.train()
    assert model.weight.item() == 3.0
    assert (trainer.state.best_global_step, trainer.state.best_metric) == (3, 0.0)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-3"]

    stops = [EarlyStoppingCallback(early_stopping_patience=2)]
    args = _args(tmp_path, **{**options, "num_train_epochs": 3})
    trainer = Trainer(Goes(), args, train_dataset=DATA, eval_dataset=DATA, callbacks=stops)
    assert trainer.train().global_step == 5  # two evaluations after the best one


def test_the_screen_shows_the_numbers_and_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = _args(tmp_path, logging_strategy="epoch", eval_strategy="epoch", num_train_epochs=2, disable_tqdm=False)
    Trainer(Line(), args, train_dataset=DATA, eval_dataset=DATA).train()
    shown = capsys.readouterr()
    assert shown.err == ""  # no terminal: no bar
    lines = shown.out.splitlines()
    assert re.fullmatch(
        r"\{'loss': '\d+\.?\d*', 'grad_norm': '[\d.]+', 'learning_rate': '3e-05', 'epoch': '1'\}", lines[0]
    )
    assert lines[-3].split() == ["epoch", "training", "loss", "validation", "loss"]
    assert [line.split()[0] for line in lines[-2:]] == ["1", "2"]
    assert all(len(line.split()) == 3 for line in lines[-2:])


def test_the_block_before_the_training_has_its_numbers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    args = _args(tmp_path, gradient_accumulation_steps=2)
    with caplog.at_level("INFO", logger="echelon"):
        Trainer(Line(), args, train_dataset=DATA).train()
    assert [record.getMessage() for record in caplog.records] == [
        "***** Running training *****",
        "  Num examples = 10",
        "  Num Epochs = 1",
        "  Num update steps per epoch = 3",
        "  Instantaneous batch size per device = 2",
        "  Total train batch size (w. parallel, distributed & accumulation) = 4",
        "  Gradient Accumulation steps = 2",
        "  Total optimization steps = 3",
        "  Number of trainable parameters = 2",
    ]


def test_metrics_are_shown_and_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = Trainer(Line(), _args(tmp_path))
    trainer.log_metrics("train", {"train_runtime": 8.014, "train_loss": 0.123456, "epoch": 1.0})
    assert capsys.readouterr().out.splitlines() == [
        "***** train metrics *****",
        "  epoch         =        1.0",
        "  train_loss    =     0.1235",
        "  train_runtime = 0:00:08.01",
    ]
    trainer.save_metrics("train", {"train_loss": 0.5})
    trainer.save_metrics("eval", {"eval_loss": 0.25})
    assert json.loads((tmp_path / "all_results.json").read_text()) == {"train_loss": 0.5, "eval_loss": 0.25}
    assert json.loads((tmp_path / "eval_results.json").read_text()) == {"eval_loss": 0.25}


def test_half_precision_trains(tmp_path: Path) -> None:
    for option in ("bf16", "fp16"):
        trainer = Trainer(Line(), _args(tmp_path, use_cpu=True, **{option: True}), train_dataset=DATA)
        assert trainer.accelerator.mixed_precision == option
        assert trainer.train().global_step == 5


def test_the_schedule_waits_where_loss_scaling_left_a_step_out(tmp_path: Path) -> None:
    class Overflows(Line):
        def forward(self, x: Any, labels: Any = None) -> Any:
            outputs = super().forward(x, labels)
            return {**outputs, "loss": outputs["loss"] * 1e38}  # times the scale of 65536: infinite

    args = _args(tmp_path, fp16=True, use_cpu=True, max_steps=1, warmup_steps=10, optim="adamw_torch")
    trainer = Trainer(Overflows(), args, train_dataset=DATA)
    trainer.train()
    assert trainer.get_learning_rates() == [0.0, 0.0]  # still that of step 0


def test_a_metric_that_is_not_there_is_named_with_those_that_are(tmp_path: Path) -> None:
    args = _args(tmp_path, eval_strategy="epoch", metric_for_best_model="accuracy")
    trainer = Trainer(Line(), args, train_dataset=DATA, eval_dataset=DATA)
    with pytest.raises(ConfigError, match=r"returned no 'eval_accuracy'; it returned eval_loss, eval_runtime"):
        trainer.train()
