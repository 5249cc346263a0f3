"""States of optimizers that other libraries quantize are those that their real first step makes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from echelon.plan.facts import ParallelLayout, StepSettings
from echelon.plan.holdings import RankClass, held_bytes, holdings
from echelon.plan.trace import trace_step


def _loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(batch).sum()
    return loss


def _inner(value: torch.Tensor) -> list[torch.Tensor]:
    names = value.__tensor_flatten__()[0] if hasattr(value, "__tensor_flatten__") else ()
    return [getattr(value, name) for name in names] or [value]


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # of torchao's extensions
@pytest.mark.parametrize("library", ["bitsandbytes", "torchao"])
def test_states_of_8_bit_optimizers_are_counted_with_their_scales(library: str) -> None:
    optim = pytest.importorskip(f"{library}.optim")
    model = nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 512), nn.Linear(512, 10))
    optimizer = optim.AdamW8bit(model.parameters())
    facts, trace = trace_step(model, optimizer, _loss, torch.randn(4, 64), StepSettings(micro_batch=4))
    assert not optimizer.state
    assert max(one.temporaries for one in trace.moments if one.phase == "optimizer") == 0

    _loss(model, torch.randn(4, 64)).backward()
    with torch.compiler.set_stance("force_eager"):  # torchao compiles its step for half a minute
        optimizer.step()
    tensors = [
        one for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor) for one in _inner(v)
    ]
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}
    layout = ParallelLayout(engine="single", settings=trace.settings)
    assert held_bytes(holdings(facts, layout, RankClass()))["optimizer state"] == sum(storages.values())
    sharded = ParallelLayout(engine="fsdp2", settings=trace.settings, dp_shard=2)
    half = held_bytes(holdings(facts, sharded, RankClass()))["optimizer state"]
    assert half == pytest.approx(sum(storages.values()) / 2, rel=0.03)  # scales and tables of bitsandbytes stay whole
