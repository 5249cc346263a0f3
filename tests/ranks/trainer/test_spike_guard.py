"""``spike_guard`` of the Trainer: weights, logs and learning rates are those of a plain loop whose data never held the bad batches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import default_collate

from echelon.trainer import Trainer, TrainerCallback
from tests.harness import run_on_ranks
from tests.trainer_models import Rows, arguments

pytestmark = pytest.mark.slow  # 15 s; tests/ranks/accelerator/test_spike_guard.py is quick

BATCH, NUM = 6, 26
HIGH, POISON, NAN = 18, 21, 3
GAMMA = 0.99


class Line(nn.Module):
    """A linear model in float64 with dropout, and with a buffer that each training forward pass changes."""

    main_input_name = "x"

    def __init__(self, dropout: float = 0.0, counts: bool = False) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.counts = counts
        self.layer = nn.Linear(5, 1).double()
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("num_forwards", torch.zeros((), dtype=torch.float64))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        if self.training and self.counts:
            self.num_forwards += 1
        y = self.layer(self.dropout(x)).sum(-1)  # squeeze would return a view, of which FSDP2 warns
        return {"logits": y} if labels is None else {"loss": F.mse_loss(y, labels), "logits": y}


def _optimizers(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: GAMMA**step)


def _rows(bad: tuple[int, ...]) -> tuple[Rows, list[int]]:
    """Return the rows, and the numbers of the updates whose batches are good.

    The loss of the batch ``POISON`` (or the last one) is as low as the others, but its gradient is so large that the update spoils the weights.
    """
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(NUM * BATCH, 5, generator=generator, dtype=torch.float64)
    y = x.sum(1) + 0.3 * torch.randn(len(x), generator=generator, dtype=torch.float64)
    rows = [{"x": a, "labels": b} for a, b in zip(x, y)]
    good = [number for number in range(NUM) if number not in bad]
    if HIGH in bad:
        rows[HIGH * BATCH + 2]["labels"] += 500.0
    if NAN in bad:
        rows[NAN * BATCH + 5]["labels"] *= float("nan")
    for poison in {POISON, NUM - 1} & {*bad}:
        model, _, _ = _plain(rows, [number for number in good if number < poison])
        row = rows[poison * BATCH + 3]
        row["x"] = row["x"] * 1e4
        row["labels"] = model(row["x"][None])["logits"].detach()[0] + 1.0
    return rows, good


def _plain(rows: Rows, updates: list[int]) -> tuple[nn.Module, list[float], list[float]]:
    """Train by plain PyTorch on the batches of ``updates``; return the model, the losses and the learning rates."""
    model, losses, rates = Line(), [], []
    optimizer, scheduler = _optimizers(model)
    for number in updates:
        loss = model(**default_collate(rows[number * BATCH : (number + 1) * BATCH]))["loss"]
        loss.backward()
        losses.append(loss.item())
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return model, losses, rates


class _Skipped(TrainerCallback):
    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps = state.global_step, state.max_steps


def _train(
    folder: str, mode: str, bad: tuple[int, ...], parity: str, accumulation: int, options: dict[str, Any]
) -> dict[str, Any]:
    options = dict(options)
    dropout, resume = options.pop("dropout", 0.0), options.pop("resume", None)
    without = options.pop("without", ())
    rows, _ = _rows(bad)
    rows = [row for i, row in enumerate(rows) if i // BATCH not in without]
    model = Line(dropout, counts=parity != "bitwise")  # in which no buffer may change
    size = {"per_device_train_batch_size": options.pop("size"), "gradient_accumulation_steps": accumulation}
    if parity != "off":
        size["global_batch_size"] = BATCH
    args = arguments(
        folder,
        **{
            "parity": parity,
            "spike_guard": mode,
            "spike_factor": 10.0,
            "num_train_epochs": 1,
            "train_sampling_strategy": "sequential",
            "logging_steps": 1,
            "max_grad_norm": 0.0,
            **size,
            **options,
        },
    )
    seen = _Skipped()
    trainer = Trainer(model, args, train_dataset=rows, optimizers=_optimizers(model), callbacks=[seen])
    trainer.train(resume_from_checkpoint=resume)
    guard = trainer.accelerator.session.update.spikes
    assert guard is not None
    weights = trainer.accelerator.get_state_dict(trainer.model_wrapped) or {}
    return {
        "weights": {name: value.clone() for name, value in weights.items()},
        "logs": [
            (one["step"], one["loss"], one["learning_rate"]) for one in trainer.state.log_history if "loss" in one
        ],
        "train_loss": trainer.state.log_history[-1]["train_loss"],
        "skipped": [(one["samples"]["first"], one["samples"]["last"]) for one in guard.skipped],
        "steps": seen.steps,
    }


CASES: list[Any] = [
    (1, "rollback", (NAN, HIGH, POISON), "exact", 1, {"size": 6}),
    (2, "rollback", (NAN, HIGH, POISON), "exact", 1, {"size": 2, "engine": "ddp"}),  # two micro-steps
    (3, "rollback", (HIGH, POISON), "exact", 1, {"size": 2, "fsdp": "full_shard", "fsdp_config": {"version": 2}}),
    (2, "rollback", (HIGH, POISON), "bitwise", 1, {"size": 3, "engine": "zero1"}),
    (2, "rollback", (NAN, POISON), "off", 3, {"size": 1, "engine": "ddp"}),
    (1, "skip", (NAN, HIGH), "exact", 1, {"size": 6}),
    (2, "skip", (NAN, HIGH), "off", 1, {"size": 3, "fsdp": "full_shard", "fsdp_config": {"version": 2}}),
    (3, "skip", (NAN, HIGH), "exact", 1, {"size": 2, "engine": "ddp"}),
]


@pytest.mark.parametrize(("world_size", "mode", "bad", "parity", "accumulation", "options"), CASES)
def test_the_weights_are_those_of_data_without_the_bad_batches(
    tmp_path: Path,
    world_size: int,
    mode: str,
    bad: tuple[int, ...],
    parity: str,
    accumulation: int,
    options: dict[str, Any],
) -> None:
    rows, good = _rows(bad)
    model, losses, rates = _plain(rows, good)
    ranks = run_on_ranks(_train, str(tmp_path), mode, bad, parity, accumulation, options, world_size=world_size)
    found = ranks[0]
    for name in ("layer.weight", "layer.bias"):  # float64; ranks add in another order
        torch.testing.assert_close(found["weights"][name], model.state_dict()[name], rtol=1e-12, atol=1e-13)
    if parity != "bitwise":
        assert found["weights"]["num_forwards"] == len(good) * -(-BATCH // (world_size * options["size"]))
    assert [step for step, _, _ in found["logs"]] == list(range(1, len(good) + 1))
    assert [loss for _, loss, _ in found["logs"]] == pytest.approx(losses, rel=1e-12)
    assert [rate for _, _, rate in found["logs"]] == pytest.approx(rates, rel=1e-12)
    assert found["train_loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-12)
    factor = BATCH if parity != "off" else accumulation
    for one in ranks:
        assert one["skipped"] == [(number * factor, number * factor + factor - 1) for number in sorted(bad)]
        assert one["steps"] == (len(good), len(good))


@pytest.mark.parametrize(
    ("average", "options"),
    [
        ({"ema_decay": 0.7}, {"fsdp": "full_shard", "fsdp_config": {"version": 2}}),
        ({"swa_start": 20}, {"engine": "zero1"}),  # the step that is undone
    ],
)
def test_the_average_of_the_weights_does_not_contain_a_step_that_was_undone(
    tmp_path: Path, average: dict[str, Any], options: dict[str, Any]
) -> None:
    bad = (NAN, HIGH, POISON)
    rows, good = _rows(bad)
    history = [_plain(rows, good[:step])[0].state_dict()["layer.weight"] for step in range(len(good) + 1)]
    expected = history[0]
    for weight in history[1:]:
        expected = 0.7 * expected + 0.3 * weight
    if "swa_start" in average:
        expected = torch.stack(history[20:]).mean(0)
    found = run_on_ranks(
        _train, str(tmp_path), "rollback", bad, "exact", 1, {"size": 3, **average, **options}, world_size=2
    )
    torch.testing.assert_close(found[0]["weights"]["layer.weight"], expected, rtol=1e-12, atol=1e-13)


def test_random_numbers_of_dropped_updates_are_drawn_again(tmp_path: Path) -> None:
    """Dropout masks are those of a run whose data never held the batches."""
    bad, options = (HIGH, POISON), {"size": 3, "engine": "ddp", "dropout": 0.2}
    found = run_on_ranks(_train, str(tmp_path), "rollback", bad, "exact", 1, options, world_size=2)
    options["without"] = bad
    expected = run_on_ranks(_train, str(tmp_path), "rollback", bad, "exact", 1, options, world_size=2)
    assert (len(found[0]["skipped"]), expected[0]["skipped"]) == (2, [])
    for name in ("layer.weight", "layer.bias"):
        assert torch.equal(found[0]["weights"][name], expected[0]["weights"][name])
    assert found[1]["logs"] == expected[1]["logs"]


@pytest.mark.parametrize("checkpoint", [10, 18, 20])
def test_a_run_resumed_before_between_or_right_after_spikes_skips_the_same_samples(
    tmp_path: Path, checkpoint: int
) -> None:
    """The checkpoint 20 is saved again after the step that poisoned its first version was undone."""
    rows, good = _rows((NAN, HIGH, POISON))
    model, losses, _ = _plain(rows, good)
    case = ("rollback", (NAN, HIGH, POISON), "exact", 1)
    options: dict[str, Any] = {"size": 3, "engine": "ddp", "save_steps": 2, "save_strategy": "steps"}
    run_on_ranks(_train, str(tmp_path), *case, options, world_size=3)
    state = json.loads((tmp_path / f"checkpoint-{checkpoint}" / "trainer_state.json").read_text())
    assert [one["loss"] for one in state["log_history"]] == pytest.approx(losses[:checkpoint], rel=1e-12)
    options |= {"resume": str(tmp_path / f"checkpoint-{checkpoint}")}
    (found, _) = run_on_ranks(_train, str(tmp_path), *case, options, world_size=2)
    torch.testing.assert_close(
        found["weights"]["layer.weight"], model.state_dict()["layer.weight"], rtol=1e-12, atol=1e-13
    )
    assert found["skipped"] == [(n * BATCH, n * BATCH + BATCH - 1) for n in (NAN, HIGH, POISON)]
    saved = load_file(tmp_path / f"checkpoint-{len(good)}" / "model.safetensors")
    torch.testing.assert_close(saved["layer.weight"], model.state_dict()["layer.weight"], rtol=1e-12, atol=1e-13)


def test_a_checkpoint_of_the_end_of_an_epoch_is_saved_again_without_the_step_that_was_undone(tmp_path: Path) -> None:
    last = NUM - 1
    rows, _ = _rows((last,))
    model, _, _ = _plain(rows, [*range(last), 0])
    options: dict[str, Any] = {"size": 3, "num_train_epochs": 2, "max_steps": NUM + 1, "save_strategy": "epoch"}
    found = run_on_ranks(_train, str(tmp_path), "rollback", (last,), "exact", 1, options, world_size=2)
    assert found[0]["skipped"] == [(last * BATCH, NUM * BATCH - 1)]
    saved = load_file(tmp_path / f"checkpoint-{NUM}" / "model.safetensors")
    torch.testing.assert_close(saved["layer.weight"], model.state_dict()["layer.weight"], rtol=1e-12, atol=1e-13)
