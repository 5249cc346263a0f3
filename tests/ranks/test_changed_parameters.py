"""A model whose parameters change after ``prepare`` trains like the same model in one process of plain PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from echelon import Accelerator
from tests.harness import run_on_ranks

STEPS = 6


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def _batches(world_size: int) -> torch.Tensor:
    """Of all ranks: [steps, ranks, samples, features]."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(STEPS, world_size, 4, 6, generator=generator, dtype=torch.float64)


def _loss(outputs: torch.Tensor) -> torch.Tensor:
    return outputs.square().mean()


def _change(form: str, model: Any, step: int) -> None:
    """Change which parameters of ``model`` train, before the step."""
    if form == "unfrozen":
        model[0].requires_grad_(step >= 2)
    elif form == "frozen":
        model[2].requires_grad_(step < 2)
    elif form == "both":
        model[0].requires_grad_(step >= 2)
        model[2].requires_grad_(step < 2)
    elif form == "one after the other":
        for i in (0, 2, 4):
            model[i].requires_grad_(i == (4, 2, 0)[step // 2])


FORMS = ["unfrozen", "frozen", "both", "one after the other"]


def _plain(form: str, world_size: int) -> dict[str, torch.Tensor]:
    model = _model()
    _change(form, model, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step, shares in enumerate(_batches(world_size)):
        _change(form, model, step)
        (sum(_loss(model(x)) for x in shares) / world_size).backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach() for name, value in model.state_dict().items()}


def _changed(engine: str, form: str, options: dict[str, Any]) -> dict[str, torch.Tensor] | None:
    from echelon.utils import DistributedDataParallelKwargs

    handlers: list[Any] = [DistributedDataParallelKwargs(**options)] if options else []
    accelerator = Accelerator(engine=engine, kwargs_handlers=handlers)
    bare = _model()
    _change(form, bare, 0)
    model, optimizer = accelerator.prepare(bare, torch.optim.AdamW(bare.parameters(), lr=0.1))
    for step, shares in enumerate(_batches(dist.get_world_size())):
        _change(form, accelerator.unwrap_model(model), step)
        accelerator.backward(_loss(model(shares[dist.get_rank()])))
        optimizer.step()
        optimizer.zero_grad()
    return accelerator.get_state_dict(model)


@pytest.mark.parametrize(
    ("engine", "options"),
    [
        ("ddp", {}),
        ("ddp", {"static_graph": True}),
        ("ddp", {"find_unused_parameters": True}),
        ("ddp", {"gradient_as_bucket_view": True}),
        ("zero1", {}),
        ("fsdp2", {}),
    ],
)
@pytest.mark.parametrize("form", FORMS)
def test_layers_may_be_frozen_and_unfrozen(engine: str, options: dict[str, Any], form: str) -> None:
    """float64, AdamW, whose division enlarges rounding: 1e-9."""
    expected = _plain(form, 2)
    for weights in run_on_ranks(_changed, engine, form, options, world_size=2):
        for name, weight in (weights or {}).items():
            torch.testing.assert_close(weight, expected[name], rtol=1e-9, atol=1e-9)
