"""``verify_every`` on one rank, where nothing is compared between ranks: what a single process sees alone is still found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from echelon import Accelerator
from echelon.base.errors import VerificationError


def _train(
    plant: Callable[[Accelerator, Any, Any], None], *, hidden: int = 8, num_steps: int = 6, max_norm: float = 0.01
) -> int:
    """Train with a check in each update; return the number of checks."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, verify_every=1)
    model: Any = nn.Sequential(nn.Linear(6, hidden), nn.ReLU(), nn.Linear(hidden, 3))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.05)
    model, optimizer = accelerator.prepare(model, optimizer)
    plant(accelerator, model, optimizer)
    x, y = torch.randn(8, 6), torch.randint(3, (8,))
    for _ in range(num_steps):
        accelerator.backward(F.cross_entropy(model(x), y))
        accelerator.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.end_training()
    check = accelerator.session.live_check
    assert check is not None
    return check.num_checks


def _nothing(accelerator: Accelerator, model: Any, optimizer: Any) -> None:
    pass


def _double_gradients(accelerator: Accelerator, model: Any, optimizer: Any) -> None:
    def double(one: torch.Tensor) -> None:
        assert one.grad is not None
        one.grad.mul_(2)

    model[0].weight.register_post_accumulate_grad_hook(double)


def _change_through_data(accelerator: Accelerator, model: Any, optimizer: Any) -> None:
    """As above, but the version of the gradient does not tell."""

    def change(one: torch.Tensor) -> None:
        assert one.grad is not None
        one.grad.data[0] += 1.0

    model[2].weight.register_post_accumulate_grad_hook(change)


def _clip_one_parameter_less(accelerator: Accelerator, model: Any, optimizer: Any) -> None:
    engine: Any = accelerator.session.live_check.inner  # type: ignore[union-attr]
    clip = engine.clip_grad_norm

    def wrong(parameters: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        kept = model[2].bias.grad.clone()
        norm: torch.Tensor = clip(parameters, *args, **kwargs)
        model[2].bias.grad.copy_(kept)
        return norm

    engine.clip_grad_norm = wrong


def _change_the_last_weight(accelerator: Accelerator, model: Any, optimizer: Any) -> None:
    engine: Any = accelerator.session.live_check.inner  # type: ignore[union-attr]
    step = engine.step

    def wrong(*args: Any, **kwargs: Any) -> bool:
        has_stepped: bool = step(*args, **kwargs)
        model[2].bias.data[1] += 0.001
        return has_stepped

    engine.step = wrong


@pytest.mark.parametrize("hidden", [8, 1000])
@pytest.mark.parametrize("max_norm", [0.01, 1000.0])
def test_a_correct_loop_raises_nothing(hidden: int, max_norm: float) -> None:
    assert _train(_nothing, hidden=hidden, max_norm=max_norm) == 6


@pytest.mark.parametrize("hidden", [8, 2000])  # large gradients are sketched one by one
@pytest.mark.parametrize(
    ("plant", "stage", "tensor"),
    [
        (_double_gradients, "reduce", "0.weight"),
        (_change_through_data, "reduce", "2.weight"),
        (_clip_one_parameter_less, "clip", "2.bias"),
        (_change_the_last_weight, "optimizer", "2.bias"),
    ],
)
def test_a_planted_fault_is_named(plant: Any, stage: str, tensor: str, hidden: int) -> None:
    with pytest.raises(VerificationError) as caught:
        _train(plant, hidden=hidden)
    assert tensor in str(caught.value)
    assert f"stage {stage}" in str(caught.value)
