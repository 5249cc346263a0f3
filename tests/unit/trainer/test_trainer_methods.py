"""Overrides of transformers' private methods: each is called as often as there, has its effect, or is named at construction."""

from __future__ import annotations

import json
import warnings
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import echelon.trainer
from echelon.base import environ
from echelon.base.errors import UsageError
from echelon.base.warnings import EchelonWarning
from echelon.compat.transformers_names import TRAINER_MEMBERS
from echelon.trainer import Trainer, TrainerCallback, TrainerControl, TrainingArguments
from echelon.trainer.build_accelerator import accelerator_arguments
from echelon.trainer.unread_members import NOT_CALLED
from tests.side_by_side.trainer_calls import DATA as CALLS, METHODS, PUBLIC, SCENARIOS, count_calls
from tests.trainer_models import CONSTANT_SGD, DATA, Line, arguments

RECORDED = json.loads(CALLS.read_text())["calls"]
SAME = [{"x": torch.ones(1), "labels": torch.tensor(2.0)}] * 10
OWN_FORMAT_LACKS = {"_save_optimizer_and_scheduler", "_save_rng_state", "_save_scaler"}


@pytest.mark.parametrize("layout", ["transformers", "echelon"])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_each_override_is_called_as_often_as_in_transformers(scenario: str, layout: str, tmp_path: Path) -> None:
    with pytest.warns(EchelonWarning, match="transformers' Trainer uses these definitions") as warned:
        counts = count_calls(echelon.trainer, scenario, tmp_path, checkpoint_format=layout)
    named = "; ".join(str(one.message) for one in warned)
    silent = {}
    for name in (*METHODS, *PUBLIC):
        expected, found = RECORDED[scenario].get(name, 0), counts.get(name, 0)
        if expected != found and f"Counting.{name} (" not in named:
            silent[name] = (expected, found)
    assert silent == {}
    ignored = set(NOT_CALLED) | (OWN_FORMAT_LACKS if layout == "echelon" else set())
    assert {name for name in METHODS if f"Counting.{name} (" in named} <= ignored


def test_the_recorded_scenarios_call_at_least_forty_private_methods() -> None:
    called = {name for counts in RECORDED.values() for name in counts} & set(METHODS)
    assert set(METHODS) <= TRAINER_MEMBERS
    assert len(called - set(NOT_CALLED)) >= 40


# ---- what is named at construction -----------------------------------------------------------------------------------


class _Ignored(Trainer):
    _mixed_mesh_grads = True  # an attribute of transformers that echelon does not have

    def get_tp_size(self) -> int:
        return 2

    def _tune_save_checkpoint(self, checkpoint_dir: str) -> None: ...

    def _own_helper(self) -> None: ...  # not a name of transformers


def test_what_is_ignored_is_named_at_construction(tmp_path: Path) -> None:
    with pytest.warns(EchelonWarning) as warned:
        _Ignored(Line(), arguments(tmp_path))
    text = str(warned[0].message)
    for name in ("_mixed_mesh_grads", "get_tp_size", "_tune_save_checkpoint"):
        assert f"_Ignored.{name} (" in text
    assert "_own_helper" not in text


def test_members_of_arguments_and_handlers_are_named_too(tmp_path: Path) -> None:
    @dataclass
    class Arguments(TrainingArguments):
        mine: int = 3

        @property
        def device(self) -> torch.device:
            return torch.device("cpu")

        def _process_fsdp_args(self) -> None: ...

    with pytest.warns(EchelonWarning) as warned:
        Trainer(Line(), Arguments(str(tmp_path), use_cpu=True, report_to="none"))
    text = str(warned[0].message)
    assert "Arguments.device (the device comes from the Accelerator" in text
    assert "Arguments._process_fsdp_args (" in text
    assert "mine" not in text


def test_an_attribute_that_is_set_later_is_named_when_training_starts(tmp_path: Path) -> None:
    class Mine(Trainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._mixed_mesh_grads = self.is_fsdp_xla_enabled = True
            self._signature_columns = ["x", "labels"]
            self.mine = 3

    trainer = Mine(Line(), arguments(tmp_path, max_steps=1), train_dataset=DATA)
    with pytest.warns(EchelonWarning, match=r"echelon's Trainer does not: Mine\(\)\._mixed_mesh_grads \(") as told:
        trainer.train()
    assert "Mine().is_fsdp_xla_enabled (echelon does not run on TPUs)" in str(told[0].message)
    trainer.train()  # named once: a second warning would be an error here


def test_under_strict_it_is_an_error(tmp_path: Path) -> None:
    with environ.patch({"ECHELON_STRICT": "1"}), pytest.raises(UsageError, match=r"_Ignored\.get_tp_size") as error:
        _Ignored(Line(), arguments(tmp_path))
    assert "without --strict" in str(error.value)


def test_a_subclass_without_such_names_is_silent(tmp_path: Path) -> None:
    class Mine(Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(*args, **kwargs)

        def _save_checkpoint(self, model: Any, trial: Any) -> None: ...

        def _set_signature_columns_if_needed(self) -> None: ...

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Mine(Line(), arguments(tmp_path))


# ---- effects ---------------------------------------------------------------------------------------------------------


def test_an_override_of_the_learning_rate_and_of_the_norm_is_logged(tmp_path: Path) -> None:
    class Mine(Trainer):
        def _get_learning_rate(self) -> float:
            return 7.0

        def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> float:
            assert grad_norm is None
            return 5.0

    trainer = Mine(Line(), arguments(tmp_path, logging_steps=1, max_steps=2, max_grad_norm=0.0), train_dataset=DATA)
    trainer.train()
    assert [(log["learning_rate"], log["grad_norm"]) for log in trainer.state.log_history[:2]] == [(7.0, 5.0)] * 2


def test_an_override_that_logs_itself_gets_the_losses(tmp_path: Path) -> None:
    """As OnlineDPOTrainer of trl does: transformers' code, with more metrics."""

    class Mine(Trainer):
        def _maybe_log_save_evaluate(
            self, tr_loss, grad_norm, model, trial, epoch, ignore_keys_for_eval, start_time, learning_rate=None
        ):  # type: ignore[no-untyped-def]
            if self.control.should_log and self.state.global_step > self._globalstep_last_logged:
                total = tr_loss.item()
                tr_loss -= tr_loss
                logs = {"loss": total / (self.state.global_step - self._globalstep_last_logged), "mine": 1.0}
                self._total_loss_scalar += total
                self._globalstep_last_logged = self.state.global_step
                self.store_flos()
                self.log(logs, start_time)
            if self.control.should_evaluate:
                metrics = self._evaluate(trial, ignore_keys_for_eval)
                self._determine_best_metric(metrics=metrics, trial=trial)
            if self.control.should_save:
                self._save_checkpoint(model, trial)
                self.control = self.callback_handler.on_save(self.args, self.state, self.control)

    options: dict[str, Any] = {"logging_steps": 2, "save_strategy": "epoch", "eval_strategy": "epoch"}
    mine = Mine(Line(), arguments(tmp_path, **options), train_dataset=DATA, eval_dataset=DATA)
    result = mine.train()
    plain = Trainer(Line(), arguments(tmp_path / "plain", **options), train_dataset=DATA, eval_dataset=DATA)
    expected = plain.train()
    losses = [[log["loss"] for log in one.state.log_history if "loss" in log] for one in (mine, plain)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)  # summed in float32 and in float64
    assert result.training_loss == pytest.approx(expected.training_loss, rel=1e-6)  # the override summed in float32
    assert (tmp_path / "checkpoint-5").is_dir()
    assert [log["eval_loss"] for log in mine.state.log_history if "eval_loss" in log]


@pytest.mark.parametrize("is_sum_first", [True, False])
def test_the_sum_of_the_losses_that_an_override_sets_is_reported(is_sum_first: bool, tmp_path: Path) -> None:
    class Mine(Trainer):
        def _maybe_log_save_evaluate(self, tr_loss, *args, **kwargs):  # type: ignore[no-untyped-def]
            if self.control.should_log and self.state.global_step > self._globalstep_last_logged:
                total, before = tr_loss.item(), self._total_loss_scalar
                totals.append(total)
                for is_sum in (is_sum_first, not is_sum_first):
                    if is_sum:
                        self._total_loss_scalar = before + 3.0 * total
                    else:
                        self._globalstep_last_logged = self.state.global_step
                assert self._total_loss_scalar == pytest.approx(3.0 * sum(totals), rel=1e-6)

    totals: list[float] = []
    options: dict[str, Any] = {"logging_steps": 2, "save_strategy": "no", "num_train_epochs": 1}
    mine = Mine(Line(), arguments(tmp_path, **options), train_dataset=DATA)
    mine._total_loss_scalar = 100.0  # without effect: training starts with 0, as in transformers
    steps, loss, _ = mine.train()
    plain = Trainer(Line(), arguments(tmp_path / "plain", **options), train_dataset=DATA).train().training_loss
    rest = plain * steps - sum(totals)  # of the steps after the last log
    assert steps % 2, "no step is left after the last log"
    assert rest > 0
    assert loss == pytest.approx((3.0 * sum(totals) + rest) / steps, rel=1e-6)


def test_columns_of_a_subclass_are_exactly_its_own(tmp_path: Path) -> None:
    seen: list[set[str]] = []
    rows = [{**row, "label_extra": torch.tensor(1), "weight": torch.tensor(2.0)} for row in DATA]

    class Mine(Trainer):
        def _set_signature_columns_if_needed(self) -> None:
            if self._signature_columns is None:
                self._signature_columns = ["x", "labels", "weight"]

        def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            seen.append(set(inputs))
            return model(inputs["x"], inputs["labels"])["loss"]

    Mine(Line(), arguments(tmp_path, max_steps=1), train_dataset=rows).train()
    assert seen == [{"x", "labels", "weight"}]


def test_a_loader_of_a_subclass_goes_through_get_dataloader(tmp_path: Path) -> None:
    class Mine(Trainer):
        def get_train_dataloader(self) -> Any:
            return self._get_dataloader(
                dataset=self.train_dataset,
                description="Training",
                batch_size=self._train_batch_size * 2,
                sampler_fn=self._get_train_sampler,
                is_training=True,
            )

    assert Mine(Line(), arguments(tmp_path), train_dataset=DATA[:8]).train().global_step == 2


def test_an_override_may_keep_the_optimizer_from_loading(tmp_path: Path) -> None:
    class Fresh(Trainer):
        def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
            assert checkpoint is not None

    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 3, "lr_scheduler_type": "constant"}
    for layout in ("echelon", "transformers"):
        folder = tmp_path / layout
        args = arguments(folder, checkpoint_format=layout, learning_rate=0.1, max_steps=3, **options)
        Trainer(Line(), args, train_dataset=DATA).train()
        args = arguments(folder, checkpoint_format=layout, learning_rate=0.5, max_steps=4, **options)
        for kind, rate in ((Fresh, 0.5), (Trainer, 0.1)):
            steps: list[float] = []

            class Looks(TrainerCallback):
                def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                    group = kwargs["optimizer"].param_groups[0]
                    steps.append(group["lr"])  # noqa: B023
                    steps.append(len(kwargs["optimizer"].state))  # noqa: B023

            trainer = kind(Line(3.0), args, train_dataset=DATA, callbacks=[Looks()])
            # An override's optimizer is put back after loading.
            told = pytest.warns(EchelonWarning, match="loading the checkpoint sets initial_lr=0.1")
            with told if layout == "echelon" else nullcontext():
                trainer.train(resume_from_checkpoint=str(folder / "checkpoint-3"))
            assert steps[:2] == [rate, 0 if kind is Fresh else 2]
            assert trainer.state.global_step == 4


def test_an_override_loads_the_weights(tmp_path: Path) -> None:
    class Loads(Trainer):
        def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
            assert (Path(resume_from_checkpoint) / "trainer_state.json").is_file()
            nn.init.constant_(self.model.layer.weight, 40.0)

    args = arguments(tmp_path, max_steps=2, save_strategy="steps", save_steps=2)
    Trainer(Line(), args, train_dataset=DATA).train()
    args = arguments(tmp_path, max_steps=3, save_strategy="no")
    trainer = Loads(Line(), args, train_dataset=DATA)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert trainer.model.layer.weight.item() == pytest.approx(40.0, abs=0.01)


def test_an_override_chooses_the_folder_the_best_model_and_the_result(tmp_path: Path) -> None:
    class Mine(Trainer):
        def _get_output_dir(self, trial: Any) -> str:
            return str(tmp_path / "elsewhere")

        def _load_best_model(self) -> None:
            nn.init.constant_(self.model.layer.weight, 8.0)

        def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
            result = super()._inner_training_loop(*args, **kwargs)
            return result._replace(training_loss=-1.0)

    args = arguments(tmp_path, eval_strategy="epoch", save_strategy="epoch", load_best_model_at_end=True)
    trainer = Mine(Line(), args, train_dataset=DATA, eval_dataset=DATA)
    assert trainer.train().training_loss == -1.0
    assert trainer.model.layer.weight.item() == 8.0
    assert trainer.state.best_model_checkpoint == str(tmp_path / "elsewhere" / "checkpoint-5")
    assert not (tmp_path / "checkpoint-5").exists()


def test_an_override_gets_every_part_of_a_batch_and_a_context(tmp_path: Path) -> None:
    parts: list[type] = []
    entered: list[bool] = []

    class Mine(Trainer):
        def _prepare_input(self, data: Any) -> Any:
            parts.append(type(data))
            return super()._prepare_input(data)

        def _prepare_context_parallel_inputs(self, model: nn.Module, inputs: Any) -> Any:
            @contextmanager
            def context() -> Any:
                entered.append(model.training)
                yield

            return context, inputs

    trainer = Mine(Line(), arguments(tmp_path, max_steps=1), train_dataset=DATA, eval_dataset=DATA[:2])
    trainer.train()
    assert parts == [dict, torch.Tensor, torch.Tensor]
    trainer.evaluate()
    assert entered == [True, False]


_REPLACED = {
    "_prepare_inputs": lambda inputs: {**inputs, "labels": inputs["labels"] + 1},
    "_prepare_input": lambda data: {**data, "labels": data["labels"] + 1} if isinstance(data, dict) else data,
    "compute_loss": lambda model, inputs, **_: model(inputs["x"], inputs["labels"] + 1)["loss"],
}


@pytest.mark.parametrize("name", _REPLACED)
@pytest.mark.parametrize("place", ["base class", "object", "object, during training"])
def test_a_method_that_is_replaced_by_assignment_is_called(
    place: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replaced = _REPLACED[name]

    class ReplacesLater(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 2 and place == "object, during training":
                setattr(trainer, name, replaced)

    options: dict[str, Any] = {**CONSTANT_SGD, "max_steps": 4, "per_device_train_batch_size": 2, "logging_steps": 1}
    trainer = Trainer(Line(), arguments(tmp_path, **options), train_dataset=SAME, callbacks=[ReplacesLater])
    if place == "base class":
        monkeypatch.setattr(Trainer, name, lambda _, *args, **kwargs: replaced(*args, **kwargs))
    elif place == "object":
        setattr(trainer, name, replaced)
    trainer.train()

    # All samples are x = 1, y = 2: gradient descent on (w + b - label)^2, in which w = b.
    value, expected = 0.0, []
    for step in range(4):
        error = value - (3.0 if place != "object, during training" or step >= 2 else 2.0)
        expected.append(error**2)
        value -= 2 * 0.1 * 2 * error
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert losses == pytest.approx(expected, rel=1e-6)  # float32


def test_methods_that_are_replaced_during_a_training_are_called_from_then_on(tmp_path: Path) -> None:
    """As in transformers, whose loop looks each of them up where it calls it."""
    called: list[tuple[str, int]] = []
    of_a_step = ["_track_num_input_tokens", "_clip_grad_norm", "_get_grad_norm", "_get_learning_rate"]

    class ReplacesLater(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 2:
                for name in (*of_a_step, "_maybe_log_save_evaluate", "_evaluate", "_finalize_training"):
                    setattr(trainer, name, self.counted(name))

        def counted(self, name: str) -> Any:
            original = getattr(trainer, name)

            def method(*args: Any, **kwargs: Any) -> Any:
                called.append((name, trainer.state.global_step))
                return original(*args, **kwargs)

            return method

    args = arguments(tmp_path, max_steps=4, eval_strategy="steps", eval_steps=4)
    trainer = Trainer(Line(), args, train_dataset=DATA, eval_dataset=DATA[:2], callbacks=[ReplacesLater()])
    trainer.train()
    logs = "_maybe_log_save_evaluate"
    expected = [(logs, 2)]  # the step that replaces them ends with it
    for step in (2, 3):
        expected += [*((name, step) for name in of_a_step), (logs, step + 1)]
    assert called == [*expected, ("_evaluate", 4), (logs, 4), ("_finalize_training", 4)]  # once at the end of the epoch


def test_a_wrapper_of_a_subclass_is_trained(tmp_path: Path) -> None:
    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module, self.calls = module, 0

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return self.module(*args, **kwargs)

    class Wraps(Trainer):
        def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
            return (
                Wrapper(model) if training and not isinstance(model, Wrapper) else super()._wrap_model(model, training)
            )

    trainer = Wraps(Line(), arguments(tmp_path), train_dataset=DATA)
    trainer.train()
    assert trainer.model_wrapped.calls == 5
    assert isinstance(trainer.model, Line)
    assert trainer.model.layer.weight.item() != 0


def test_the_numbers_of_a_plan_can_be_overridden(tmp_path: Path) -> None:
    class Mine(Trainer):
        def set_initial_training_values(self, *args: Any) -> Any:
            return (*super().set_initial_training_values(*args)[:-1], 3)

    assert Mine(Line(), arguments(tmp_path), train_dataset=DATA).train().global_step == 3


def test_a_model_is_placed_by_the_override_or_not_at_all(tmp_path: Path) -> None:
    moved: list[torch.device] = []

    @dataclass
    class Stays(TrainingArguments):
        @property
        def place_model_on_device(self) -> bool:
            return False

    class Moves(Trainer):
        def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
            moved.append(device)

    Moves(Line(), arguments(tmp_path))
    Moves(Line(), Stays(str(tmp_path), use_cpu=True, report_to="none"))
    assert moved == [torch.device("cpu")]


_OF_A_TRAINING: dict[str, tuple[Any, ...]] = {
    "_evaluate": (None, None),
    "_finalize_training": (None, 10, 0.0),
    "_init_training_state": (5, 5, 1, None, None),
    "_inner_training_loop": (2,),
    "_load_optimizer_and_scheduler": ("checkpoint-1",),
    "_load_rng_state": ("checkpoint-1",),
    "_load_scaler": ("checkpoint-1",),
    "_maybe_log_save_evaluate": (torch.tensor(0.0), None, None, None, 0.0, None, 0.0),
    "_prepare_for_training": (5, [], None),
    "_run_epoch": (None, 0, []),
    "_save_optimizer_and_scheduler": ("checkpoint-1",),
    "_update_auto_batch_size": (2,),
}


def test_private_methods_outside_of_a_training_say_when_they_work(tmp_path: Path) -> None:
    trainer = Trainer(Line(), arguments(tmp_path), train_dataset=DATA)
    for is_trained in (False, True):
        for name, args in _OF_A_TRAINING.items():
            with pytest.raises(UsageError, match=f"{name}\\(\\) works only while the Trainer is training"):
                getattr(trainer, name)(*args)
        if not is_trained:
            trainer.train()
    assert trainer._get_output_dir(None) == str(tmp_path)
    assert trainer._train_batch_size == 2


# ---- members ---------------------------------------------------------------------------------------------------------


def test_dict_fields_of_subclasses_are_parsed() -> None:
    @dataclass
    class Arguments(TrainingArguments):
        _VALID_DICT_FIELDS = TrainingArguments._VALID_DICT_FIELDS + ["model_init_kwargs"]

        model_init_kwargs: dict[str, Any] | str | None = field(default=None)

    text = '{"dtype": "float32", "use_cache": "False", "layers": "3", "rate": "0.5", "more": {"a": "1"}}'
    args = Arguments("there", model_init_kwargs=text, lr_scheduler_kwargs='{"num_cycles": "2"}')
    expected = {"dtype": "float32", "use_cache": False, "layers": 3, "rate": 0.5, "more": {"a": 1}}
    assert args.model_init_kwargs == expected
    assert args.lr_scheduler_kwargs == {"num_cycles": 2}
    assert Arguments("there", model_init_kwargs="a name").model_init_kwargs == "a name"


def test_the_model_stays_in_eval_mode_until_the_next_step(tmp_path: Path) -> None:
    modes: list[bool] = []

    class Looks(TrainerCallback):
        def on_evaluate(self, args: Any, state: Any, control: TrainerControl, **kwargs: Any) -> None:
            modes.append(kwargs["model"].training)

        def on_step_end(self, args: Any, state: Any, control: TrainerControl, **kwargs: Any) -> None:
            modes.append(kwargs["model"].training)
            kwargs["model"].eval()  # as a callback that generates does

    args = arguments(tmp_path, max_steps=3, eval_strategy="steps", eval_steps=2)
    trainer = Trainer(Line(), args, train_dataset=DATA, eval_dataset=DATA, callbacks=[Looks()])
    trainer.train()
    assert modes == [True, True, False, True, False]
    trainer.evaluate()
    assert not trainer.model.training


class Columns(Dataset[Any]):
    """Rows with columns that can be removed, as those of the library datasets."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows, self.column_names = rows, list(rows[0])

    def remove_columns(self, column_names: list[str]) -> Columns:
        return Columns([{k: v for k, v in row.items() if k not in column_names} for row in self.rows])

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.rows[index]


def test_persistent_workers_keep_the_loader_of_data_with_unused_columns(tmp_path: Path) -> None:
    args = arguments(tmp_path, dataloader_num_workers=1, dataloader_persistent_workers=True)
    trainer = Trainer(Line(), args, eval_dataset=Columns([{**row, "unused": 1} for row in DATA]))
    loader = trainer.get_eval_dataloader()
    assert trainer.get_eval_dataloader() is loader


@pytest.mark.slow
def test_persistent_workers_read_the_data_that_is_evaluated(tmp_path: Path) -> None:
    args = arguments(tmp_path, dataloader_num_workers=1, dataloader_persistent_workers=True)
    line, other = Line(start=1.0), DATA[:4]  # the error at x is x, its square is the loss
    trainer = Trainer(line, args, eval_dataset=DATA)
    losses = [trainer.evaluate(data)["eval_loss"] for data in (None, other, None, DATA[4:])]
    squares = [float(x) ** 2 for x in range(10)]
    means = [sum(part) / len(part) for part in (squares, squares[:4], squares, squares[4:])]
    assert losses == pytest.approx(means, rel=1e-6)  # float32
    loader = trainer.get_eval_dataloader()
    assert trainer.get_eval_dataloader(DATA) is loader
    assert trainer.evaluate({"a": other, "b": DATA[4:]})["eval_b_loss"] == pytest.approx(means[3], rel=1e-6)
    trainer.args.per_device_eval_batch_size = 3
    assert trainer.get_eval_dataloader() is not loader
    loader = trainer.get_eval_dataloader()
    trainer.eval_dataset = other
    assert trainer.evaluate()["eval_loss"] == pytest.approx(means[1], rel=1e-6)
    trainer.data_collator = lambda rows: {
        name: torch.stack([row[name] for row in rows]) * 2 for name in ("x", "labels")
    }
    assert trainer.evaluate()["eval_loss"] == pytest.approx(4 * means[1], rel=1e-6)
    mine = trainer._eval_dataloaders["mine"] = trainer.get_eval_dataloader()  # a library's own, under its own name
    assert trainer.get_eval_dataloader() is mine


def test_a_function_of_a_script_gathers_the_results(tmp_path: Path) -> None:
    trainer = Trainer(Line(), arguments(tmp_path), train_dataset=DATA)
    calls: list[Any] = []
    trainer.gather_function = lambda part: calls.append(part) or part
    trainer.evaluate(DATA[:2])
    assert calls
    assert trainer.gather_function == trainer.accelerator.gather_for_metrics


def test_optimizers_with_their_own_groups_and_factories(tmp_path: Path) -> None:
    """``optimizer_dict`` is what sentence-transformers returns; a factory is what transformers has for Muon."""

    class Factory:
        def __call__(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
            return torch.optim.SGD(model.parameters(), lr=lr)

    model = Line()
    for name in ("params", "optimizer_dict", "model"):
        groups = [{"params": [model.layer.weight], "lr": 0.5}]
        given: Any = (torch.optim.SGD, {"lr": 0.1, name: groups})
        trainer = Trainer(model, arguments(tmp_path), optimizer_cls_and_kwargs=given)
        assert [group["lr"] for group in trainer.create_optimizer().param_groups] == [0.5]
    given = (Factory, {"lr": 0.25})
    trainer = Trainer(model, arguments(tmp_path), optimizer_cls_and_kwargs=given)
    assert trainer.create_optimizer(model=model).param_groups[0]["lr"] == 0.25


@pytest.mark.parametrize("given", [None, True, False])
def test_ddp_looks_for_unused_parameters_as_in_transformers(given: bool | None, tmp_path: Path) -> None:
    """Unless it is set: yes, but not for a model of transformers that checkpoints its activations."""

    class Pretrained(Line):
        is_activation_checkpointing = False

    def is_searched(model: nn.Module, **options: Any) -> bool:
        args = arguments(tmp_path, ddp_find_unused_parameters=given, **options)
        found: bool = accelerator_arguments(args, model)["kwargs_handlers"][0].find_unused_parameters
        return found

    assert is_searched(Line()) is is_searched(Pretrained()) is (given is not False)
    assert is_searched(Line(), activation_checkpointing=True) is (given is not False)
    assert is_searched(Pretrained(), activation_checkpointing=True) is (given is True)
