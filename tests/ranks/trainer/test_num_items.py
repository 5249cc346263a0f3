"""num_items_in_batch on several ranks: evaluations count every label once, and resumed runs log their own mean loss."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from echelon.trainer import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer
from tests.harness import run_on_ranks
from tests.trainer_models import (
    CONSTANT_SGD,
    DividingNet,
    EndsAfter,
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


def _data(n: int) -> list[dict[str, torch.Tensor]]:
    """Batches hold different numbers of labels that count, and one holds none."""
    return net_data(n, unlabelled=(1, 5, 8, 9, 10, 11))


_KINDS: dict[str, Any] = {
    "function": (Net, {"compute_loss_func": divided}),
    "model": (DividingNet, {}),
    "smoothed": (DividingNet, {"label_smoothing_factor": 0.1}),
    "mean": (Net, {}),
}


def _evaluate(folder: str, kind: str, n: int, options: dict[str, Any]) -> tuple[float, float, float]:
    model, more = _KINDS[kind]
    more = dict(more)
    smoothing = more.pop("label_smoothing_factor", 0.0)
    args = arguments(folder, per_device_eval_batch_size=4, label_smoothing_factor=smoothing, **options)
    rows = _data(n)
    trainer = Trainer(model(), args, eval_dataset={"a": rows, "b": rows[:6]}, **more)
    found = trainer.evaluate()
    return found["eval_a_loss"], found["eval_b_loss"], trainer.predict(rows).metrics["test_loss"]


def _expected(kind: str, n: int, *, num_together: int) -> float:
    """The mean over the labels of ``num_together`` batches at a time, weighed by their samples."""
    rows, model, size = _data(n), Net(), 4 * num_together
    total = counted = 0.0
    for start in range(0, n, size):
        part = rows[start : start + size]
        x, labels = stacked(part)
        if not bool((labels != -100).any()):
            continue  # no label, no loss: left out of the mean
        logits = model.layers(x)
        smoothing = 0.1 if kind == "smoothed" else 0.0
        total += F.cross_entropy(logits, labels, label_smoothing=smoothing).item() * len(part)
        counted += len(part)
    return total / counted


@pytest.mark.sample(6)
@pytest.mark.parametrize("kind", list(_KINDS))
@pytest.mark.parametrize(
    ("world_size", "n", "options"),
    [
        *((world_size, n, {}) for world_size, n in ((2, 16), (2, 21), (2, 13), (3, 14), (3, 25), (2, 3))),
        (2, 13, {"average_tokens_across_devices": False}),
        *((world_size, 21, {"parity": "exact"}) for world_size in (1, 2, 3)),
    ],
)
def test_an_evaluation_divides_by_the_labels_of_all_ranks_batches(
    tmp_path: Any, kind: str, world_size: int, n: int, options: dict[str, Any]
) -> None:
    """In the exact mode of all data; without the mean over devices, and by a model that takes the mean, of each batch."""
    num_together = 1 if options.get("average_tokens_across_devices") is False or kind == "mean" else world_size
    num_together = n if "parity" in options else num_together
    expected = _expected(kind, n, num_together=num_together)
    short = _expected(kind, min(n, 6), num_together=num_together)
    for whole, part, test in run_on_ranks(_evaluate, str(tmp_path), kind, n, options, world_size=world_size):
        # float64, sums in another order.
        assert (whole, part, test) == pytest.approx((expected, short, expected), rel=1e-12)


class _IgnoringGenerator(IgnoringNet):
    """Generates one token."""

    generation_config = SimpleNamespace(max_length=1, max_new_tokens=None, pad_token_id=0)

    def generate(self, x: torch.Tensor, **options: Any) -> torch.Tensor:
        return torch.zeros(len(x), 1, dtype=torch.long)


class _DividingGenerator(DividingNet):
    """Generates one token."""

    generation_config = _IgnoringGenerator.generation_config
    generate = _IgnoringGenerator.generate


def _generate(folder: str, model: Any, n: int, smoothing: float) -> float:
    args = Seq2SeqTrainingArguments(
        folder,
        use_cpu=True,
        disable_tqdm=True,
        predict_with_generate=True,
        per_device_eval_batch_size=4,
        label_smoothing_factor=smoothing,
    )
    # Without compute_metrics, nothing is generated.
    trainer = Seq2SeqTrainer(model(), args, eval_dataset=_data(n), compute_metrics=lambda result: {})
    loss: float = trainer.evaluate()["eval_loss"]
    return loss


@pytest.mark.parametrize("model", [_IgnoringGenerator, _DividingGenerator])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("n", [16, 13])
def test_with_generation_the_loss_is_the_mean_of_each_batch(
    tmp_path: Any, model: Any, smoothing: float, n: int
) -> None:
    expected = _expected("smoothed" if smoothing else "mean", n, num_together=1)
    for loss in run_on_ranks(_generate, str(tmp_path), model, n, smoothing, world_size=2):
        assert loss == pytest.approx(expected, rel=1e-12)  # float64, sums in another order


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", list(_KINDS))
def test_an_exact_evaluation_is_the_mean_over_all_labels_on_any_number_of_ranks(tmp_path: Any, kind: str) -> None:
    expected = _expected(kind, 21, num_together=21)
    for world_size in (1, 2, 3):
        for whole, _, _ in run_on_ranks(_evaluate, str(tmp_path), kind, 21, {"parity": "exact"}, world_size=world_size):
            assert whole == pytest.approx(expected, rel=1e-12)


def _train(folder: str, options: dict[str, Any]) -> tuple[list[str], list[float]]:
    args = arguments(folder, logging_steps=1, learning_rate=0.0, **options)
    trainer = Trainer(IgnoringNet(), args, train_dataset=net_data(12))
    texts = [text for text in warnings_of(trainer.train) if "num_items_in_batch" in text]
    return texts, logged(trainer)


def test_a_loss_that_ignores_num_items_warns_with_the_factor(tmp_path: Any) -> None:
    (first, losses), (second, _) = run_on_ranks(_train, str(tmp_path), {"gradient_accumulation_steps": 3}, world_size=2)
    assert len(first) == 1
    assert "counts 6 times" in first[0]
    assert "(3 batches of an update x 2 processes)" in first[0]
    assert not second  # rank zero warns
    order = torch.randperm(12, generator=torch.Generator().manual_seed(42)).tolist()
    x, labels = stacked([net_data(12)[i] for i in order])
    mean = F.cross_entropy(Net().layers(x), labels).item()
    assert losses == [pytest.approx(6 * mean, rel=1e-12)]  # as transformers logs it


def _resumed(folder: str) -> tuple[float, list[float], list[float]]:
    losses: list[float] = []

    class Noting(Trainer):
        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            loss = super().training_step(*args, **kwargs)
            losses.append(float(loss))
            return loss

    options: dict[str, Any] = {"logging_steps": 4, "learning_rate": 0.1, "optim": "sgd"}
    rows = net_data(24)
    Noting(Net(), arguments(folder, **options), train_dataset=rows, callbacks=[EndsAfter(3)]).train()
    trainer = Noting(Net(), arguments(folder, **options), train_dataset=rows)
    result = trainer.train(resume_from_checkpoint=True)
    return result.training_loss, losses, logged(trainer)


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_mean_loss_after_a_resume_within_a_logging_window_is_that_of_its_own_steps(
    tmp_path: Any, world_size: int
) -> None:
    answers = run_on_ranks(_resumed, str(tmp_path), world_size=world_size)
    num_steps = 24 // 2 // world_size
    steps = torch.tensor([losses for _, losses, _ in answers], dtype=torch.float64).mean(dim=0).tolist()
    assert len(steps) == num_steps
    for mean, _, values in answers:
        assert mean == pytest.approx(sum(steps[3:]) / (num_steps - 3), rel=1e-12)
        assert values[0] == pytest.approx(sum(steps[:4]) / 4, rel=1e-12)  # the window is whole


class _OwnMean(Trainer):
    """Divides by the update's number of batches if ``compute_loss_func`` says so; else returns its batch's mean."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.compute_loss_func is None:
            self.model_accepts_loss_kwargs = False

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        loss = F.cross_entropy(model(x=inputs["x"])["logits"], inputs["labels"])
        return loss if self.compute_loss_func is None else loss / self.current_gradient_accumulation_steps


def _train_own_mean(folder: str, func: Any) -> list[torch.Tensor]:
    options = {"gradient_accumulation_steps": 3, "train_sampling_strategy": "sequential", **CONSTANT_SGD}
    trainer = _OwnMean(IgnoringNet(), arguments(folder, **options), train_dataset=net_data(24), compute_loss_func=func)
    trainer.train()
    return [parameter.detach() for parameter in trainer.model.parameters()]


@pytest.mark.parametrize("func", [None, "scaled in compute_loss"])
def test_what_a_subclass_says_of_its_loss_holds_on_two_ranks(tmp_path: Any, func: Any) -> None:
    plain = Net()
    train_rows_plainly(plain, net_data(24), batch_size=12)
    for found in run_on_ranks(_train_own_mean, str(tmp_path), func, world_size=2):
        for mine, wanted in zip(found, plain.parameters()):
            torch.testing.assert_close(mine, wanted.detach(), rtol=1e-12, atol=1e-14)  # float64, sums in another order
