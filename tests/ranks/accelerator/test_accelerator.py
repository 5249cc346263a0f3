"""The Accelerator against plain PyTorch: bit-identical on one process, equal up to rounding on two."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from echelon import Accelerator, set_seed
from tests.programs.program import Case, Layout, Program
from tests.programs.runner import require_plain


def _small() -> tuple[nn.Module, torch.optim.Optimizer, Any, DataLoader[Any]]:
    set_seed(0)
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    data = TensorDataset(torch.randn(100, 10), torch.randint(0, 2, (100,)))
    return model, optimizer, scheduler, DataLoader(data, batch_size=8, shuffle=True)


@pytest.mark.parametrize("accumulation", [1, 3])
def test_one_process_follows_a_plain_loop_bit_for_bit(accumulation: int) -> None:
    model, optimizer, scheduler, loader = _small()
    expected = []
    for _ in range(4):
        for i, (x, y) in enumerate(loader):
            loss = nn.functional.cross_entropy(model(x), y)
            expected.append(loss.detach())
            loss = loss * (1 / accumulation) if accumulation > 1 else loss
            loss.backward()
            if (i + 1) % accumulation == 0 or i + 1 == len(loader):
                length = i % accumulation + 1
                if length < accumulation:  # the last window of an epoch is divided by its own length
                    for p in model.parameters():
                        p.grad *= accumulation / length
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    weights = [p.detach().clone() for p in model.parameters()]

    model, optimizer, scheduler, loader = _small()
    accelerator = Accelerator(gradient_accumulation_steps=accumulation)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    seen = []
    for _ in range(4):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(x), y)
                seen.append(loss.detach())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    assert len(seen) >= 50
    assert torch.equal(torch.stack(seen), torch.stack(expected))
    assert all(torch.equal(p, w) for p, w in zip(model.parameters(), weights))


_TOKENS = {"num_samples": 53, "collate": "padded", "loss": "items"}  # 53 = 6 * 8 + 5; some samples have no tokens
_PROGRAMS = [
    *(
        Program(
            **_TOKENS, batch_size=8, accumulation=accumulation, clipping="norm", optimizer=optimizer, split_batches=True
        )
        for accumulation in (1, 3)
        for optimizer in ("momentum", "adamw")
    ),
    *(Program(**_TOKENS, batch_size=size, accumulation=size) for size in (1, 2, 3)),
    *(Program(num_samples=13, batch_size=2, accumulation=accumulation, loss="two") for accumulation in (1, 2)),
    *(
        Program(num_samples=14, batch_size=2, accumulation=3, guards=True, clears_first=first)
        for first in (True, False)
    ),
]


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_update_equals_that_of_one_large_batch(world_size: int) -> None:
    """Whatever the numbers of tokens and losses, and where ``zero_grad`` stands beside ``accumulate`` and ``backward``."""
    require_plain([Case(program=program, layout=Layout(world_size=world_size)) for program in _PROGRAMS])


def test_scaling_the_item_counts_does_not_change_the_bits() -> None:
    """Items of 3 and of 3 * 1024 give the same gradients: the scale between them is a power of two."""
    results = []
    for factor in (1, 1024):
        torch.manual_seed(4)
        model = nn.Linear(4, 2)
        accelerator = Accelerator(gradient_accumulation_steps=2)
        model = accelerator.prepare(model)
        for x in torch.randn(2, 3, 4):
            with accelerator.accumulate(model):
                accelerator.backward(model(x).square().mean(), num_items=3 * factor)
        results.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results))
