"""Memory of a rank between two steps: the formulas of ZeRO (Rajbhandari et al., 2020, section 3) and the table of docs/engines.md."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from echelon import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from tests.harness import run_on_ranks

PAGE = Path(__file__).parents[3] / "docs" / "engines.md"
# Arguments of the Accelerator, by the names in the table.
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "`ddp`": ("ddp", {}),
    "`zero1`": ("zero1", {}),
    "`fsdp2`, stage 2": ("fsdp2", {"reshard_after_forward": False}),
    "`fsdp2`, stage 3": ("fsdp2", {"reshard_after_forward": True}),
    "`fsdp2`, hybrid": ("fsdp2", {"replicas": 2}),
}
RUNS = [(name, n) for n in (2, 4) for name in LAYOUTS if (name, n) != ("`fsdp2`, hybrid", 2)]


def _model(width: int) -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width)) for _ in range(8)]
    return nn.Sequential(nn.Linear(width, width), *blocks)


def _num_bytes(tensor: torch.Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.numel() * local.element_size()


def _held(engine: str, options: dict[str, Any], width: int) -> tuple[int, int, int]:
    """Return the bytes of parameters, gradients and optimizer state on this rank, without torch's step counters."""
    settings: dict[str, Any] = {}
    if "replicas" in options:
        settings["parallelism_config"] = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
    elif options:
        settings["fsdp_plugin"] = FullyShardedDataParallelPlugin(fsdp_version=2, **options)
    accelerator = Accelerator(engine=engine, **settings)
    model: Any = _model(width)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.backward(model(torch.ones(2, width)).square().mean())
    gradients = sum(_num_bytes(p.grad) for p in model.parameters())
    optimizer.step()
    states = [value for entries in optimizer.state.values() for value in entries.values() if value.dim() > 0]
    return sum(map(_num_bytes, model.parameters())), gradients, sum(map(_num_bytes, states))


def _expected(name: str, parts: int, part: int, width: int) -> tuple[int, int, int]:
    """Return the bytes by ZeRO's formula. fully_shard splits rows into equal parts; the last ones are shorter or empty."""
    model = _model(width)
    whole = sum(map(_num_bytes, model.parameters()))
    if name == "`ddp`":
        return whole, whole, 2 * whole
    own = 0
    for parameter in model.parameters():
        rows = -(-len(parameter) // parts)
        own += max(min(rows, len(parameter) - part * rows), 0) * _num_bytes(parameter[0])
    return own, own, 2 * own


@pytest.mark.parametrize("width", [64, 7])  # one size that four ranks divide, and one that they do not
@pytest.mark.parametrize(("name", "world_size"), RUNS)
def test_each_rank_holds_its_expected_share_of_memory(name: str, world_size: int, width: int) -> None:
    engine, options = LAYOUTS[name]
    parts = 2 if name.endswith("hybrid") else world_size
    held = run_on_ranks(_held, engine, options, width, world_size=world_size)
    if name == "`zero1`":  # whole parameters belong to a rank, so shares differ by at most one parameter
        whole = sum(map(_num_bytes, _model(width).parameters()))
        largest = max(map(_num_bytes, _model(width).parameters()))
        assert all(entry[:2] == (whole, whole) for entry in held)
        assert sum(states for *_, states in held) == 2 * whole
        assert all(abs(states - 2 * whole / parts) <= 2 * largest for *_, states in held)
    else:
        assert held == [_expected(name, parts, rank % parts, width) for rank in range(world_size)]
    if width == 64:
        most = [max(column) for column in zip(*held)]
        assert _row(name, world_size) == [f"{value:,}" for value in most]


def _row(name: str, world_size: int) -> list[str]:
    """Return the figures of docs/engines.md."""
    row = re.search(rf"^\| {re.escape(name)} \| {world_size} \|(.*)\|$", PAGE.read_text(), re.MULTILINE)
    assert row is not None, f"docs/engines.md shows no {name} on {world_size} processes"
    return [cell.strip() for cell in row[1].split("|")]
