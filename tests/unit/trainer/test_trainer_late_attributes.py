"""What a subclass or a script sets after ``super().__init__()`` holds in training and in evaluations."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from echelon.base.errors import UsageError
from echelon.base.warnings import EchelonWarning
from echelon.trainer import Trainer, TrainerCallback
from echelon.trainer.state import TrainerControl
from tests.trainer_models import (
    CONSTANT_SGD,
    DividingNet,
    IgnoringNet,
    Net,
    arguments,
    net_data,
    stacked,
    train_rows_plainly,
)

STEPS = 3
ROWS = net_data(12)  # two updates of three batches of two


class MeanOfTheBatch(Trainer):
    """A library's Trainer whose loss is a mean over its batch, whatever the number of labels in the update."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(x=inputs["x"])
        loss = F.cross_entropy(outputs["logits"], inputs["labels"])
        return (loss, outputs) if return_outputs else loss


class SetsItsFlag(MeanOfTheBatch):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.model_accepts_loss_kwargs = False


class SetsItAtTheBeginning(TrainerCallback):
    trainer: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.model_accepts_loss_kwargs = False


def _arguments(folder: Path, **options: Any) -> Any:
    return arguments(
        folder, gradient_accumulation_steps=STEPS, train_sampling_strategy="sequential", **CONSTANT_SGD, **options
    )


def _equals_a_plain_loop(model: nn.Module) -> None:
    plain = Net()
    train_rows_plainly(plain, ROWS, batch_size=2 * STEPS)
    for mine, wanted in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(mine, wanted, rtol=1e-12, atol=1e-14)  # float64: sums in another order


def _trainer(kind: type[Trainer], folder: Path, how: str, **options: Any) -> Trainer:
    source: dict[str, Any] = {"model_init": IgnoringNet} if how == "model_init" else {"model": IgnoringNet()}
    return kind(args=_arguments(folder, **options), train_dataset=ROWS, eval_dataset=ROWS, **source)


@pytest.mark.parametrize("how", ["subclass", "script", "callback", "model_init", "after an evaluation", "twice"])
def test_a_subclass_whose_loss_is_a_mean_turns_the_number_of_labels_off(tmp_path: Path, how: str) -> None:
    by_hand = how in ("script", "callback")
    trainer = _trainer(MeanOfTheBatch if by_hand else SetsItsFlag, tmp_path, how)
    if how == "callback":
        SetsItAtTheBeginning.trainer = trainer
        trainer.add_callback(SetsItAtTheBeginning)
    elif how == "script":
        trainer.model_accepts_loss_kwargs = False
    elif how == "after an evaluation":
        trainer.evaluate()
    elif how == "twice":
        trainer.train()
        trainer.model.load_state_dict(Net().state_dict())
        trainer.optimizer = trainer.lr_scheduler = None
    trainer.train()
    assert trainer.model_accepts_loss_kwargs is False
    _equals_a_plain_loop(trainer.model)


def test_a_subclass_turns_the_number_of_labels_on(tmp_path: Path) -> None:
    class Divides(Trainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.model_accepts_loss_kwargs = True

        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            return (
                F.cross_entropy(model(x=inputs["x"])["logits"], inputs["labels"], reduction="sum") / num_items_in_batch
            )

    trainer = Divides(Net(), _arguments(tmp_path), train_dataset=ROWS)
    trainer.train()
    _equals_a_plain_loop(trainer.model)


class Scores(nn.Module):
    """A reward model: forward takes labels, but its loss is computed outside and needs none."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(6, 1).double()

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        return {"logits": self.score(x)}


class Rewards(Trainer):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.can_return_loss, self.label_names = True, []

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(**inputs)
        loss = outputs["logits"].square().mean()
        return (loss, outputs) if return_outputs else loss


@pytest.mark.parametrize("how", ["model", "model_init"])
def test_a_loss_without_labels_is_evaluated_during_training(tmp_path: Path, how: str) -> None:
    rows = [{"x": row["x"]} for row in ROWS]
    source: dict[str, Any] = {"model": Scores()} if how == "model" else {"model_init": Scores}
    trainer = Rewards(args=_arguments(tmp_path, eval_strategy="epoch"), train_dataset=rows, eval_dataset=rows, **source)
    assert "eval_loss" in trainer.evaluate()
    trainer.train()
    assert [entry["step"] for entry in trainer.state.log_history if "eval_loss" in entry] == [2]
    assert (trainer.can_return_loss, trainer.label_names) == (True, [])
    with torch.no_grad():
        mean = trainer.model(stacked(ROWS)[0])["logits"].square().mean().item()
    assert trainer.predict(rows).metrics["test_loss"] == pytest.approx(mean, rel=1e-12)


def test_a_column_is_appended_to_the_label_names(tmp_path: Path) -> None:
    trainer = Trainer(Net(), _arguments(tmp_path), train_dataset=ROWS)
    trainer.label_names.append("mask")
    trainer.train()
    assert trainer.label_names == ["labels", "mask"]
    rows = [{**row, "mask": torch.tensor(i)} for i, row in enumerate(ROWS)]
    trainer.args.remove_unused_columns = True
    trainer.compute_loss = MeanOfTheBatch.compute_loss.__get__(trainer)  # type: ignore[method-assign]
    output = trainer.predict(rows)
    assert [list(part) for part in output.label_ids] == [[int(row["labels"]) for row in ROWS], list(range(12))]


def test_attributes_that_nobody_changed_follow_a_new_model(tmp_path: Path) -> None:
    trainer = Trainer(Net(), _arguments(tmp_path), train_dataset=ROWS)
    assert trainer.model_accepts_loss_kwargs is False
    trainer.model = trainer.model_wrapped = DividingNet()
    trainer.train()
    assert trainer.model_accepts_loss_kwargs is True
    _equals_a_plain_loop(trainer.model)


@pytest.mark.parametrize("before", ["evaluate", "train"])
def test_a_loss_function_that_a_subclass_sets_late_is_called_with_the_number(tmp_path: Path, before: str) -> None:
    class Late(Trainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.compute_loss_func = lambda outputs, labels, num_items_in_batch: (
                F.cross_entropy(outputs["logits"], labels, reduction="sum") / num_items_in_batch
            )

    trainer = Late(Net(), _arguments(tmp_path, per_device_eval_batch_size=12), train_dataset=ROWS, eval_dataset=ROWS)
    if before == "evaluate":
        x, labels = stacked(ROWS)
        mean = F.cross_entropy(Net().layers(x), labels).item()
        assert trainer.evaluate()["eval_loss"] == pytest.approx(mean, rel=1e-12)
    trainer.train()
    _equals_a_plain_loop(trainer.model)


def test_what_a_subclass_sets_in_the_model_and_in_the_control_stays(tmp_path: Path) -> None:
    class Own(TrainerControl):
        pass

    model: Any = Net()
    model.config = SimpleNamespace(use_cache=True, problem_type="multi_label_classification")
    trainer = Trainer(model, _arguments(tmp_path), train_dataset=ROWS)
    smoother: Any = lambda outputs, labels, *_: F.cross_entropy(outputs["logits"], labels)  # noqa: E731
    trainer.label_smoother, trainer.control, model.config.use_cache = smoother, Own(), True
    trainer.train()
    assert trainer.label_smoother is smoother
    assert isinstance(trainer.control, Own)
    assert model.config.use_cache is True
    _equals_a_plain_loop(trainer.model)


def test_a_subclass_keeps_the_model_of_model_init_where_it_is(tmp_path: Path) -> None:
    moved: list[Any] = []

    class Stays(Trainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.place_model_on_device = False
            moved.clear()

        def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
            moved.append(device)

    Stays(model_init=Net, args=_arguments(tmp_path), train_dataset=ROWS).train()
    assert not moved


class DividesItself(Trainer):
    """As in reinforcement learning: the loss is divided by the number of batches in the update here."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        loss = F.cross_entropy(model(x=inputs["x"])["logits"], inputs["labels"])
        return loss / self.current_gradient_accumulation_steps


@pytest.mark.parametrize("model", [Net, IgnoringNet])
@pytest.mark.parametrize(
    "given",
    ["scaled elsewhere", 1, lambda *args, **kwargs: None, lambda outputs, labels: None],
    ids=["string", "number", "function of anything", "function of two"],
)
@pytest.mark.filterwarnings("error")
def test_any_loss_function_that_is_not_called_means_that_the_loss_is_scaled(
    tmp_path: Path, model: Any, given: Any
) -> None:
    trainer = DividesItself(model(), _arguments(tmp_path), train_dataset=ROWS, compute_loss_func=given)
    trainer.train()
    _equals_a_plain_loop(trainer.model)


def test_a_loss_function_with_two_parameters_is_a_mean_under_an_override_too(tmp_path: Path) -> None:
    class Passes(Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(*args, **kwargs)

    trainer = Passes(
        Net(), _arguments(tmp_path), train_dataset=ROWS,
        compute_loss_func=lambda outputs, labels: F.cross_entropy(outputs["logits"], labels),
    )  # fmt: skip
    trainer.train()
    _equals_a_plain_loop(trainer.model)


def test_a_value_that_cannot_be_called_is_named_where_it_would_be_called(tmp_path: Path) -> None:
    given: Any = "scaled elsewhere"
    trainer = Trainer(Net(), _arguments(tmp_path), train_dataset=ROWS, compute_loss_func=given)
    with pytest.raises(UsageError, match="compute_loss_func='scaled elsewhere' cannot be called"):
        trainer.train()


def test_a_loss_function_without_a_number_counts_as_scaled_and_is_told_once(tmp_path: Path) -> None:
    rows = [{"x": row["x"], "target": row["labels"]} for row in ROWS]
    trained = []
    for scale, stated in ((STEPS, None), (1, False)):

        class Stated(Trainer):
            loss_is_scaled_for_ga = stated

        trainer = Stated(
            Net(), _arguments(tmp_path, label_names=[], remove_unused_columns=False), train_dataset=rows,
            data_collator=lambda rows: {"x": torch.stack([row["x"] for row in rows])},
            compute_loss_func=lambda out, labels, num_items_in_batch=None: out["logits"].square().mean() / scale,  # noqa: B023
        )  # fmt: skip
        if stated is None:
            with pytest.warns(EchelonWarning, match="num_items_in_batch=None") as told:
                trainer.train()
            assert len(told) == 1
        else:
            trainer.train()
        trained.append(trainer.model.get_parameter("layers.0.weight"))
    plain = Net()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for start in (0, 6):
        optimizer.zero_grad()
        plain.layers(stacked(ROWS[start : start + 6])[0]).square().mean().backward()
        optimizer.step()
    for weight in trained:
        torch.testing.assert_close(weight, plain.get_parameter("layers.0.weight"), rtol=1e-12, atol=1e-14)
