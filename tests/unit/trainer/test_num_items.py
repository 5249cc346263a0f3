"""num_items_in_batch: who gets it, in evaluations too, and what is said of a loss that is not divided by it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from echelon.base.warnings import EchelonWarning
from echelon.trainer import EarlyStoppingCallback, Trainer
from tests.trainer_models import (
    CONSTANT_SGD,
    DividingNet,
    IgnoringNet,
    Net,
    arguments,
    divided,
    logged,
    net_data,
    stacked,
    train_rows_plainly,
    warnings_of,
)

PER_BATCH = 4
N = 10  # batches of 4, 4 and 2


def sum_or_divided(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    total = F.cross_entropy(outputs["logits"], labels, reduction="sum")
    return total if num_items_in_batch is None else total / num_items_in_batch


class Overriding(Trainer):
    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(x=inputs["x"])
        loss = sum_or_divided(outputs, inputs["labels"], num_items_in_batch)
        return (loss, outputs) if return_outputs else loss


class OldOverriding(Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False) -> Any:  # type: ignore[override]
        outputs = model(x=inputs["x"])
        loss = F.cross_entropy(outputs["logits"], inputs["labels"])
        return (loss, outputs) if return_outputs else loss


class AnythingOverriding(Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        return super().compute_loss(model, inputs, return_outputs, **kwargs)


def _data(n: int = N) -> list[dict[str, torch.Tensor]]:
    """Every fifth label does not count."""
    return net_data(n, unlabelled=range(4, n, 5))


def _mean_of_batches(
    model: nn.Module, rows: list[dict[str, torch.Tensor]], *, smoothing: float, size: int = PER_BATCH
) -> float:
    """Each batch's mean over the labels that count, weighed by its samples; knows nothing of echelon."""
    total = 0.0
    for start in range(0, len(rows), size):
        part = rows[start : start + size]
        x, labels = stacked(part)
        logits = model.layers(x)  # type: ignore[operator]
        total += F.cross_entropy(logits, labels, label_smoothing=smoothing).item() * len(part)
    return total / len(rows)


@pytest.mark.parametrize(
    ("trainer_class", "model_class", "options", "smoothing"),
    [
        (Trainer, Net, {"compute_loss_func": divided}, 0.0),
        (Trainer, Net, {"compute_loss_func": sum_or_divided}, 0.0),
        (Trainer, DividingNet, {}, 0.0),
        (Trainer, IgnoringNet, {}, 0.0),
        (Trainer, Net, {}, 0.0),
        (Trainer, DividingNet, {}, 0.1),
        (Overriding, DividingNet, {}, 0.0),
        (OldOverriding, DividingNet, {}, 0.0),
        (AnythingOverriding, DividingNet, {}, 0.0),
        (AnythingOverriding, Net, {"compute_loss_func": divided}, 0.0),
    ],
)
@pytest.mark.parametrize("parity", ["off", "exact"])
def test_an_evaluation_divides_by_the_labels_of_its_batch(
    tmp_path: Path, trainer_class: Any, model_class: Any, options: dict[str, Any], smoothing: float, parity: str
) -> None:
    if parity == "exact" and trainer_class is Overriding:
        pytest.skip("an overridden compute_loss gets no number in the exact modes: docs/parity.md")
    model, rows = model_class(), _data()
    args = arguments(
        tmp_path,
        per_device_eval_batch_size=PER_BATCH,
        label_smoothing_factor=smoothing,
        gradient_accumulation_steps=3,
        parity=parity,
    )
    trainer = trainer_class(model, args, eval_dataset={"a": rows, "b": rows[:7]}, **options)
    found = trainer.evaluate()
    # float64, the same sums up to their order. In the exact modes every label weighs the same: batches are cut by what fits.
    size = N if parity == "exact" else PER_BATCH
    for name, part in (("a", rows), ("b", rows[:7])):
        expected = _mean_of_batches(model, part, smoothing=smoothing, size=size)
        assert found[f"eval_{name}_loss"] == pytest.approx(expected, rel=1e-12)
    output = trainer.predict(rows)
    assert output.metrics["test_loss"] == pytest.approx(found["eval_a_loss"], rel=1e-15)
    assert output.predictions.shape == (N, 3)
    assert np.array_equal(output.label_ids, stacked(rows)[1].numpy())


def test_the_best_model_and_early_stopping_follow_the_mean_not_the_sum(tmp_path: Path) -> None:
    # 9 samples of 8 + 1: by sums of batches the short one would hardly count.
    args = arguments(
        tmp_path,
        num_train_epochs=4,
        learning_rate=0.5,
        optim="sgd",
        per_device_eval_batch_size=8,
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
    )
    rows = _data(9)
    trainer = Trainer(
        Net(), args, train_dataset=rows, eval_dataset=rows, compute_loss_func=sum_or_divided,
        callbacks=[EarlyStoppingCallback(early_stopping_patience=9)],
    )  # fmt: skip
    trainer.train()
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert max(losses) < 3.0  # means: log(3) is 1.1; sums of 8 would be above 5
    x, labels = stacked(rows)
    logits = trainer.model.layers(x)  # type: ignore[operator]
    mean = (8 * F.cross_entropy(logits[:8], labels[:8]) + F.cross_entropy(logits[8:], labels[8:])).item() / 9
    assert trainer.state.best_metric == pytest.approx(min(losses), rel=1e-15)
    assert mean == pytest.approx(min(losses), rel=1e-12)


@pytest.mark.parametrize("parity", ["off", "exact"])
def test_a_loss_function_that_needs_the_number_trains_as_a_plain_loop(tmp_path: Path, parity: str) -> None:
    rows = _data(8)
    model, reference = Net(), Net()
    args = arguments(
        tmp_path,
        per_device_train_batch_size=4,
        train_sampling_strategy="sequential",
        parity=parity,
        **CONSTANT_SGD,
    )
    Trainer(model, args, train_dataset=rows, compute_loss_func=divided).train()
    train_rows_plainly(reference, rows, batch_size=4)
    for ours, theirs in zip(model.parameters(), reference.parameters()):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("parity", ["exact", "bitwise"])
def test_an_update_without_labels_moves_nothing_and_has_no_mean(tmp_path: Path, parity: str) -> None:
    rows = [{**row, "labels": torch.tensor(-100)} if i // 2 in (0, 2) else row for i, row in enumerate(net_data(8))]
    options: dict[str, Any] = {"global_batch_size": 2, "canonical_shards": 2, "max_micro_batch_size": 1}
    options |= {**CONSTANT_SGD, "train_sampling_strategy": "sequential", "logging_steps": 1}
    trainer = Trainer(Net(), arguments(tmp_path, parity=parity, **options), train_dataset=rows)
    trainer.train()

    model, losses = Net(), []  # plain PyTorch
    for start in range(0, 8, 2):
        x, labels = stacked(rows[start : start + 2])
        loss = F.cross_entropy(model.layers(x), labels)
        losses.append(loss.item())
        if not loss.isnan():
            for parameter, gradient in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters()))):
                parameter.data -= 0.1 * gradient
    assert [math.isnan(loss) for loss in losses] == [True, False, True, False]
    assert logged(trainer) == pytest.approx(losses, rel=1e-12, nan_ok=True)  # float64: sums of two in another order
    for mine, wanted in zip(trainer.model.parameters(), model.parameters()):
        torch.testing.assert_close(mine, wanted, rtol=1e-12, atol=1e-14)


def test_a_loss_function_is_called_without_labels_where_the_batch_has_none(tmp_path: Path) -> None:
    given: list[Any] = []

    def norm(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        given.append((labels, num_items_in_batch))
        return outputs["logits"].square().mean()

    rows = [{"x": row["x"]} for row in net_data(4)]
    Trainer(Net(), arguments(tmp_path, label_names=[]), train_dataset=rows, compute_loss_func=norm).train()
    assert given == [(None, None)] * 2


def _ignoring(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    return F.cross_entropy(outputs["logits"], labels)


class IgnoringTrainer(Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        outputs = model(**inputs)
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]


@pytest.mark.parametrize(
    ("trainer_class", "model_class", "options", "who", "remedy"),
    [
        (Trainer, IgnoringNet, {}, "IgnoringNet.forward", "set IgnoringNet.accepts_loss_kwargs = False"),
        (
            IgnoringTrainer,
            DividingNet,
            {},
            "IgnoringTrainer.compute_loss",
            "set DividingNet.accepts_loss_kwargs = False",
        ),
        (Trainer, Net, {"compute_loss_func": _ignoring}, "compute_loss_func", "remove this parameter"),
    ],
)
def test_a_loss_that_is_not_divided_by_the_number_is_told_once_where_that_matters(
    tmp_path: Path, trainer_class: Any, model_class: Any, options: dict[str, Any], who: str, remedy: str
) -> None:
    def make(accumulation: int, **more: Any) -> Any:
        args = arguments(tmp_path, gradient_accumulation_steps=accumulation, logging_strategy="epoch", **more)
        return trainer_class(model_class(), args, train_dataset=net_data(12), **options)

    trainer = make(3)
    (told,) = warnings_of(trainer.train)
    assert told.startswith(f"{who} accepts num_items_in_batch")
    assert "counts 3 times in the gradients and in the logs (3 batches of an update)" in told
    assert remedy in told
    mean = make(1)
    assert not warnings_of(mean.train)  # nothing to divide by
    assert not warnings_of(make(3, parity="exact").train)


def test_the_remedies_of_that_warning_make_the_loss_a_mean(tmp_path: Path) -> None:
    class Remedied(IgnoringNet):
        accepts_loss_kwargs = False

    class Scaled(IgnoringTrainer):
        loss_is_scaled_for_ga = False

    args = arguments(tmp_path, gradient_accumulation_steps=3, logging_strategy="epoch", learning_rate=0.0)
    rows = net_data(12)
    x, labels = stacked(rows)
    mean = F.cross_entropy(Net().layers(x), labels).item()
    for trainer in (
        Trainer(Remedied(), args, train_dataset=rows),
        Scaled(DividingNet(), args, train_dataset=rows),
        Trainer(DividingNet(), args, train_dataset=rows),
        Trainer(Net(), args, train_dataset=rows, compute_loss_func=lambda out, y: F.cross_entropy(out["logits"], y)),
        Trainer(Net(), args, train_dataset=rows, compute_loss_func=divided),
    ):
        assert not warnings_of(trainer.train)
        assert trainer.state.log_history[0]["loss"] == pytest.approx(mean, rel=1e-12)


@pytest.mark.parametrize(
    ("loss_type", "has_encoder", "more", "count"),
    [
        ("ForCausalLM", False, {}, 3),
        ("ForCausalLM", False, {"shift_labels": torch.tensor([[2, -100], [-100, -100]])}, 1),
        ("ForConditionalGeneration", False, {}, 3),  # a language model that sees
        ("ForConditionalGeneration", True, {}, 5),  # T5: its labels are those of the decoder
        ("ForTokenClassification", False, {}, 5),
        (None, False, {}, 5),
    ],
)
def test_labels_of_the_next_word_are_counted_by_what_the_loss_does(
    tmp_path: Path, loss_type: str | None, has_encoder: bool, more: dict[str, Any], count: int
) -> None:
    model: Any = DividingNet()
    model.loss_type = loss_type
    model.config = type("Config", (), {"is_encoder_decoder": has_encoder, "use_cache": False})()
    batch = {"labels": torch.tensor([[1, 2, 2], [3, -100, 1]]), **more}
    _, found = Trainer(model, arguments(tmp_path)).get_batch_samples(iter([batch]), 1, torch.device("cpu"))
    assert int(found) == count


def test_labels_that_are_no_tensor_are_not_counted(tmp_path: Path) -> None:
    batch = {"x": torch.zeros(1), "labels": [{"boxes": torch.zeros(2, 4)}]}
    _, found = Trainer(DividingNet(), arguments(tmp_path)).get_batch_samples(iter([batch]), 1, torch.device("cpu"))
    assert found is None


def test_smoothed_labels_of_many_kinds_at_once_are_refused_by_the_plain_loss(tmp_path: Path) -> None:
    model: Any = Net()
    model.config = type("Config", (), {"problem_type": "multi_label_classification", "use_cache": False})()
    with pytest.warns(
        EchelonWarning,
        match="label_smoothing_factor=0.1 is ignored: label smoothing needs one label per sample, but Net is set up",
    ):
        trainer = Trainer(model, arguments(tmp_path, label_smoothing_factor=0.1))
    assert trainer.label_smoother is None


def test_the_first_bad_tensor_is_found_with_a_loss_that_needs_the_number(tmp_path: Path) -> None:
    rows = net_data(4)

    def overflowing(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any) -> torch.Tensor:
        return divided(outputs, labels, num_items_in_batch) * float("inf")

    trainer = Trainer(Net(), arguments(tmp_path, stop_on_nan=True), train_dataset=rows, compute_loss_func=overflowing)
    with pytest.raises(FloatingPointError, match="the loss contains 1 inf among 1 values, but all model outputs"):
        trainer.train()


def test_an_evaluation_that_is_nan_is_never_the_best(tmp_path: Path) -> None:
    values = iter([float("nan"), 0.5, 0.75, float("nan")])
    args = arguments(
        tmp_path, num_train_epochs=4, eval_strategy="epoch", save_strategy="epoch", metric_for_best_model="value",
        greater_is_better=True, per_device_eval_batch_size=4,
    )  # fmt: skip
    trainer = Trainer(
        Net(),
        args,
        train_dataset=net_data(4),
        eval_dataset=net_data(4),
        compute_metrics=lambda _: {"value": next(values)},
    )
    trainer.train()
    assert (trainer.state.best_metric, trainer.state.best_global_step) == (0.75, 6)


def test_without_checkpoints_the_best_has_a_value_and_no_step(tmp_path: Path) -> None:
    args = arguments(tmp_path, eval_strategy="epoch", metric_for_best_model="loss")
    trainer = Trainer(Net(), args, train_dataset=net_data(4), eval_dataset=net_data(4))
    assert trainer.state.epoch == 0
    trainer.train()
    assert trainer.state.best_metric is not None
    assert trainer.state.best_global_step is None
