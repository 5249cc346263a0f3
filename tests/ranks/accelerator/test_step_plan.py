"""``Accelerator.plan`` on several ranks: for as many devices as there are ranks, and not of what an engine has sharded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from echelon import Accelerator
from echelon.base.errors import UsageError
from tests.harness import run_on_ranks


def _plans(engine: str) -> tuple[str, int, str]:
    accelerator = Accelerator(cpu=True, engine=engine)
    model = nn.Linear(8, 3)
    optimizer = torch.optim.AdamW(model.parameters())

    def plan(model: Any, optimizer: Any) -> Any:
        loss = lambda model, batch: model(batch).sum()  # noqa: E731
        return accelerator.plan(model, optimizer, torch.randn(4, 8), loss, gpu_memory="80GB").asked.plan.layout

    before = plan(model, optimizer)
    with pytest.raises(UsageError) as caught:
        plan(*accelerator.prepare(model, optimizer))
    return before.engine, before.world, str(caught.value)


@pytest.mark.parametrize("engine", ["zero1", "fsdp2"])
def test_plans_are_for_the_ranks_of_the_run_before_they_shard(engine: str) -> None:
    for found, world_size, error in run_on_ranks(_plans, engine):
        assert (found, world_size) == (engine, 2)
        assert error.startswith(f"the engine {engine} has sharded the model or the optimizer")
