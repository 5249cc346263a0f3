"""Memory of a rank: between two steps the formulas of ZeRO (Rajbhandari et al., 2020, section 3) and the table of docs/engines.md, and
in a step the activations that autograd keeps, which fall with the number of ranks as docs/parallelism.md says.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from echelon import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from echelon.utils import TorchTensorParallelConfig
from tests.harness import run_on_ranks
from tests.parallel_models import GPT_PLAN, tiny_gpt
from tests.ranks.engines.test_tensor_parallel import _sequence_parallel_plan

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


@pytest.mark.sample(4)
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


_ROWS, _LENGTH, _WIDTH, _LAYERS = 3, 64, 64, 2


def _kept(size: int, splits_sequences: bool) -> int:
    """Return the bytes of the activations of the blocks."""
    config = None
    if size > 1:
        plan: Any = _sequence_parallel_plan() if splits_sequences else GPT_PLAN
        config = ParallelismConfig(
            tp_size=size, tp_handler=TorchTensorParallelConfig(plan=plan, loss_parallel=splits_sequences)
        )
    model: Any = tiny_gpt(width=_WIDTH, num_heads=8, num_layers=_LAYERS)
    model = Accelerator(cpu=True, parallelism_config=config).prepare(model)
    kept: dict[tuple[int, int], int] = {}
    alive = []  # so that no address is used twice

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        # Rows come first, but in no parameter; means and log-sum-exps have no last dimension of features.
        if (
            own.is_floating_point()
            and own.dim() >= 2
            and own.shape[0] in (_ROWS, _ROWS * _LENGTH)
            and own.shape[-1] > 1
        ):
            storage = own.untyped_storage()
            kept[storage.data_ptr(), storage.nbytes()] = storage.nbytes()
            alive.append((tensor, storage))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = model(torch.zeros(_ROWS, _LENGTH, dtype=torch.int64))
    del out
    return sum(kept.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("splits_sequences", "whole"),
    [
        (False, 4 + 2 / _LAYERS),  # of each layer the inputs and outputs of two norms, and the last norm's
        pytest.param(True, 2 + 1 / _LAYERS, marks=pytest.mark.soak),  # the outputs of the norms, which are gathered
    ],
)
def test_what_is_split_falls_with_the_number_of_ranks(splits_sequences: bool, whole: float) -> None:
    """In units of T * d of a layer: q, k, v, the output of attention, and 8 of the MLP are split."""
    unit = _ROWS * _LENGTH * _WIDTH * _LAYERS * 8
    found = {n: run_on_ranks(_kept, n, splits_sequences, world_size=n)[0] / unit for n in (1, 2, 4)}
    split = found[1] - whole
    assert split == pytest.approx(14 if splits_sequences else 12, rel=0.1)
    for n in (2, 4):
        assert found[n] - whole == pytest.approx(split / n, rel=0.01)
