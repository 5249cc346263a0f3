"""In the exact modes, losses and hooks that depend on how a batch is split are reported once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

from echelon import Accelerator
from echelon.base.warnings import EchelonWarning
from tests.harness import run_on_ranks
from tests.prepared_loop import all_warnings
from tests.reference import gaussian, tanh_net


def _loss_of(form: str, output: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
    target = torch.zeros_like(output)
    if form == "sum":
        return F.mse_loss(output, target, reduction="sum"), {}
    if form == "sum of samples":
        return F.mse_loss(output, target, reduction="none").mean(1).sum(), {}
    if form == "counted sum":
        return F.mse_loss(output, target, reduction="sum"), {"num_items": len(output)}
    if form == "sum of two means":
        return torch.stack([F.mse_loss(output, target), output.abs().mean()]).sum(), {}
    return F.mse_loss(output, target), {}


def _train(form: str, batch_size: int, options: dict[str, Any]) -> list[str]:
    with all_warnings() as caught:
        accelerator = Accelerator(cpu=True, seed=0, parity="exact", **options)
        model: Any = tanh_net(6, 5, 1)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        loader: Any = DataLoader(gaussian(32, 6), batch_size=batch_size)  # type: ignore[arg-type]
        if form == "hook":
            next(model.parameters()).register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for x in loader:
            with accelerator.accumulate(model):
                loss, items = _loss_of(form, model(x))
                accelerator.backward(loss, **items)
                optimizer.step()
                optimizer.zero_grad()
    return [str(w.message) for w in caught if w.category is EchelonWarning]


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ("sum", "is a sum over the samples"),
        ("sum of samples", "is a sum over the samples"),
        ("hook", "a hook on 0.weight"),
    ],
)
@pytest.mark.parametrize(
    ("world_size", "options"), [(2, {}), (1, {"max_micro_batch_size": 4}), (2, {"max_micro_batch_size": 2})]
)
def test_what_depends_on_the_split_is_reported_once(
    form: str, said: str, world_size: int, options: dict[str, Any]
) -> None:
    (text,), *others = run_on_ranks(_train, form, 8, options, world_size=world_size)
    assert said in text
    assert all(texts == [] for texts in others)


@pytest.mark.parametrize("form", ["mean", "counted sum", "sum of two means"])
def test_other_losses_are_silent(form: str) -> None:
    assert run_on_ranks(_train, form, 8, {"max_micro_batch_size": 2}, world_size=2) == [[], []]


@pytest.mark.parametrize("form", ["sum", "sum of samples", "hook"])
def test_whole_batches_are_silent(form: str) -> None:
    assert run_on_ranks(_train, form, 8, {}, world_size=1) == [[]]
