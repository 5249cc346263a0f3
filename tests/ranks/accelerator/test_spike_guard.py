"""``spike_guard`` in a loop of one's own: the weights are those of a plain loop whose data never held the batches it drops."""

from __future__ import annotations

import statistics
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from echelon import Accelerator
from echelon.base.errors import ConfigError, LossSpikeError, UsageError
from echelon.base.warnings import EchelonWarning
from tests.harness import RanksFailed, run_on_ranks

BATCH, NUM = 6, 24
BAD = (18, 21)  # updates whose batches are planted


def _data(*, without: tuple[int, ...] = (), nan: bool = False) -> TensorDataset:
    """Return the data of ``NUM`` batches, of which those in ``BAD`` have targets that are far off, or the second one NaN."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(NUM * BATCH, 5, generator=generator, dtype=torch.float64)
    y = x.sum(1, keepdim=True) + torch.randn(len(x), 1, generator=generator, dtype=torch.float64)
    for number, value in zip(BAD, (300.0, float("nan") if nan else 900.0)):
        y[number * BATCH + 1] = value
    kept = [i for i in range(len(x)) if i // BATCH not in without]
    return TensorDataset(x[kept], y[kept])


def _net() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def _plain(*, gamma: float, **data: Any) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Train by plain PyTorch; return the weights and the learning rates."""
    model, rates = _net(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma)
    for x, y in DataLoader(_data(**data), batch_size=BATCH):
        F.mse_loss(model(x), y).backward()
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return model.state_dict(), rates


def _train(mode: str | None, engine: str | None, parity: str, steps: int, nan: bool) -> dict[str, Any]:
    accelerator = Accelerator(
        cpu=True, engine=engine, parity=parity, spike_guard=mode, gradient_accumulation_steps=steps, seed=1
    )
    model = _net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    # Without parity, a scheduler steps once per process.
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98 if parity != "off" else 1.0)
    size = BATCH if parity != "off" else BATCH // (accelerator.num_processes * steps)
    loader = DataLoader(_data(nan=nan), batch_size=size)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    skipped = []
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(F.mse_loss(model(x), y))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1e9)
            optimizer.step()
            if accelerator.sync_gradients:
                skipped.append(accelerator.optimizer_step_was_skipped)
            scheduler.step()
            optimizer.zero_grad()
    guard = accelerator.session.update.spikes
    return {
        "weights": {name: value.clone() for name, value in (accelerator.get_state_dict(model) or {}).items()},
        "skipped": [i for i, one in enumerate(skipped) if one],
        "record": [] if guard is None else guard.skipped,
        "rate": optimizer.param_groups[0]["lr"],
        "steps": optimizer.num_steps,
    }


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("world_size", "engine", "parity", "steps", "nan"),
    [
        (1, None, "exact", 1, True),
        (2, "ddp", "exact", 2, False),
        (3, "fsdp2", "exact", 1, True),
        (2, "zero1", "bitwise", 1, False),
        (2, "ddp", "off", 3, True),
    ],
)
def test_skip_gives_the_weights_of_data_without_the_bad_batches(
    world_size: int, engine: str | None, parity: str, steps: int, nan: bool
) -> None:
    gamma = 0.98 if parity != "off" else 1.0
    expected, rates = _plain(gamma=gamma, without=BAD)
    ranks = run_on_ranks(_train, "skip", engine, parity, steps, nan, world_size=world_size)
    # float64; the order of additions depends on the number of ranks
    torch.testing.assert_close(ranks[0]["weights"], dict(expected), rtol=1e-12, atol=1e-13)
    for found in ranks:
        assert found["skipped"] == list(BAD)
        assert found["steps"] == NUM - 2
    assert ranks[0]["rate"] == pytest.approx(rates[-1] * gamma, rel=1e-12)
    if parity != "off":
        assert [(one["samples"]["first"], one["samples"]["last"]) for one in ranks[0]["record"]] == [
            (number * BATCH, number * BATCH + BATCH - 1) for number in BAD
        ]
        assert ranks[0]["record"][0]["samples"]["indices"] == list(range(18 * BATCH, 19 * BATCH))


def _warn(folder: str) -> tuple[list[str], dict[str, torch.Tensor]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", EchelonWarning)
        found = _train("warn", None, "exact", 1, True)
    return [str(one.message) for one in caught if "spike" in str(one.message)], found["weights"]


def test_warn_tells_of_each_spike_on_rank_zero_and_changes_nothing() -> None:
    (texts, _), (others, _) = run_on_ranks(_warn, "", world_size=2)
    model = _net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    losses: list[float] = []
    for x, y in DataLoader(_data(nan=True), batch_size=BATCH):
        loss = F.mse_loss(model(x), y)
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        for group in optimizer.param_groups:
            group["lr"] *= 0.98
    assert others == []
    assert (
        texts
        == [  # a model of NaN weights has NaN losses
            f"step {k + 1}: the loss {losses[k]:.6g} is a spike (median of the last losses: "
            f"{statistics.median(losses[: min(k, 21)]):.6g})"
            for k in (18, 21, 22, 23)
        ]
    )


def _resume(folder: str, after: int | None) -> dict[str, Any]:
    """Train to the end, saving after ``after`` batches; or resume from there."""
    accelerator = Accelerator(cpu=True, parity="exact", spike_guard="skip", seed=1)
    model = _net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(_data(nan=True), batch_size=BATCH))
    if after is None:
        accelerator.resume(folder)
    for _epoch in accelerator.epochs(1):
        for number, (x, y) in enumerate(loader):
            accelerator.backward(F.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            if after is not None and number == after:
                accelerator.save_state(folder)
    assert accelerator.session.update.spikes is not None
    weights = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
    return {"weights": weights, "skipped": accelerator.session.update.spikes.skipped}


@pytest.mark.parametrize("after", [19, 10])
def test_a_resumed_run_skips_the_same_samples(tmp_path: Path, after: int) -> None:
    """Saved between the spikes, and before the warm-up is over, on three ranks; resumed on two."""
    whole = run_on_ranks(_resume, str(tmp_path), after, world_size=3)
    resumed = run_on_ranks(_resume, str(tmp_path), None, world_size=2)
    torch.testing.assert_close(resumed[0]["weights"], whole[0]["weights"], rtol=1e-12, atol=1e-13)
    assert [one["samples"] for one in resumed[1]["skipped"]] == [one["samples"] for one in whole[0]["skipped"]]
    assert len(whole[0]["skipped"]) == 2


def _refuse(case: str) -> None:
    options: dict[str, Any] = {"spike_guard": "rollback" if case == "rollback" else "skip"}
    options |= {"factor": {"spike_factor": 0.0}, "verify": {"verify_every": 2}}.get(case, {})
    accelerator = Accelerator(cpu=True, **options)
    model, other = _net(), _net()
    model, other, *optimizers = accelerator.prepare(
        model, other, *(torch.optim.SGD(one.parameters(), lr=1e-3) for one in (model, other))
    )
    x = torch.randn(4, 5, dtype=torch.float64)
    if case == "closure":
        optimizers[0].step(lambda: 0.0)
    if case == "join":
        with accelerator.join_uneven_inputs([model]):
            pass
    if case == "unsynced":
        with accelerator.no_sync(model, unsynced=True):
            accelerator.backward(model(x).square().mean())
            optimizers[0].step()
    for one, optimizer in zip((model, other), optimizers):  # as in a GAN
        accelerator.backward(one(x).square().mean())
        optimizer.step()


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("rollback", "use spike_guard='skip', which drops an update before its step, or train with echelon.Trainer"),
        ("factor", "spike_factor=0.0 must be positive"),
        ("verify", "but verify_every=2 expects a step after every update"),
        ("closure", "SGD.step(closure) cannot be used with spike_guard"),
        ("join", "join_uneven_inputs() cannot be used with spike_guard"),
        ("unsynced", "a step used the gradients of one rank only"),
        ("gan", "several optimizers step after losses of their own"),
    ],
)
def test_what_cannot_be_guarded_is_refused(case: str, text: str) -> None:
    with pytest.raises(RanksFailed) as failed:
        run_on_ranks(_refuse, case, world_size=1)
    assert isinstance(failed.value.errors[0], (UsageError, ConfigError))
    assert text in str(failed.value.errors[0])


def _lose_level() -> None:
    accelerator = Accelerator(cpu=True, spike_guard="skip")
    model = _net()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    x = torch.randn(4, 5, dtype=torch.float64)
    for number in range(31):
        accelerator.backward(model(x).square().mean() + (100.0 if number >= 20 else 0.0))
        optimizer.step()
        optimizer.zero_grad()
        assert optimizer.num_steps == min(number + 1, 20)


def test_losses_that_do_not_come_back_end_the_run() -> None:
    with pytest.raises(RanksFailed) as failed:
        run_on_ranks(_lose_level, world_size=1)
    error = failed.value.errors[0]
    assert isinstance(error, LossSpikeError)
    assert "11 updates in a row were dropped" in str(error)
    assert "use spike_guard='warn' or a larger spike_factor" in str(error)
