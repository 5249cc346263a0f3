"""``Accelerator.plan`` answers from the objects of a training loop, and leaves them as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from echelon import Accelerator
from echelon.base.errors import UsageError

WIDTH = 1000


def _objects() -> tuple[nn.Module, torch.optim.Optimizer, tuple[torch.Tensor, torch.Tensor]]:
    model = nn.Sequential(nn.Linear(8, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, 3))
    return model, torch.optim.AdamW(model.parameters()), (torch.randn(16, 8), torch.randint(0, 3, (16,)))


def _loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def _rounded(*sizes: int) -> int:
    return sum(-(-size // 512) * 512 for size in sizes)


def test_a_step_is_planned_and_its_objects_are_unchanged() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
    model, optimizer, batch = _objects()
    weights, state = {name: value.clone() for name, value in model.state_dict().items()}, torch.get_rng_state()
    verdict = accelerator.plan(model, optimizer, batch, _loss, gpus=8, gpu_memory="80GB")
    assert verdict.fits
    layout = verdict.asked.plan.layout
    assert (layout.engine, layout.world, layout.accumulation) == ("ddp", 8, 2)
    assert (layout.settings.micro_batch, layout.settings.mixed_precision) == (16, "bf16")
    assert verdict.cluster.gpu_memory == 80_000_000_000
    sizes = [4 * one.numel() for one in model.parameters()]
    memory = verdict.asked.plan.memory
    assert memory["parameters"] == _rounded(*sizes)
    assert memory["optimizer state"] == _rounded(*sizes, *sizes, *(4 for _one in sizes))  # and a step
    lines = str(verdict).splitlines()
    assert lines[0].startswith("Sequential: ")
    assert lines[3].startswith("FITS: ddp dp_replicate=8, micro-batch 16, 2 accumulation steps needs ")

    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(one.grad is None for one in model.parameters())
    assert not optimizer.state
    prepared = accelerator.prepare(model, optimizer)
    after = accelerator.plan(*prepared, batch, _loss, gpus=8, gpu_memory=1_150_000_000)
    assert after.asked.plan.memory == memory
    assert not after.fits
    assert "DOES NOT FIT: ddp dp_replicate=8, micro-batch 16, 2 accumulation steps needs 1.2 GB of 1.1 GB" in str(after)


@pytest.mark.parametrize(
    ("arguments", "options", "text"),
    [
        ((_loss,), {}, "the memory of the devices is unknown"),
        ((_loss,), {"gpu_memory": "much"}, "'much' is not a size such as 80GB"),
        ((), {"gpu_memory": "80GB"}, "Sequential does not compute its own loss of this batch"),
    ],
)
def test_what_cannot_be_planned_is_an_error(arguments: Any, options: Any, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        Accelerator(cpu=True).plan(*_objects(), *arguments, **options)


def test_a_loss_of_the_model_itself_is_refused() -> None:
    model, optimizer, batch = _objects()
    with pytest.raises(UsageError, match="compute_loss calls the Sequential itself"):
        Accelerator(cpu=True).plan(
            model, optimizer, batch, lambda _copy, inputs: _loss(model, inputs), gpu_memory="80GB"
        )
    assert all(one.grad is None for one in model.parameters())
    _loss(model, batch)  # the model can be called again
