"""Random numbers under tensor parallelism: equal where the ranks hold the same values, different where they hold parts.

All ranks of a tensor-parallel group have the same RNG state, so masks of whole activations are equal. Between a layer whose
output is split and the layer that adds the parts again, each rank has other heads or features, and needs other masks: the state
there is derived from the shared one and the rank. After it the shared state continues, so it stays equal on all ranks. Nothing is
kept between steps: activation checkpointing, which restores the shared state, recomputes the same masks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel
from torch.distributed.tensor.parallel.style import ParallelStyle
from torch.nn.modules.dropout import _DropoutNd

from echelon.engines.random_numbers import restore_states, save_states

__all__ = ["separate_split_regions"]


def separate_split_regions(model: nn.Module, plan: Mapping[str, ParallelStyle], mesh: DeviceMesh) -> None:
    """Give each rank its own random numbers between the first layer with split output and the one that takes split input.

    The two belong together if they have the same parent module. Under sequence parallelism, ranks hold other tokens everywhere
    else, so the whole model is one region. Models without dropout are left alone.
    """
    if not any(map(_draws, model.modules())):
        return
    rank = mesh.get_local_rank()
    if any(isinstance(style, SequenceParallel) for style in plan.values()):
        region = _Region(rank)
        model.register_forward_pre_hook(region.begin)
        model.register_forward_pre_hook(region.enter)
        model.register_forward_hook(region.leave, always_call=True)
        return
    regions: dict[str, tuple[list[nn.Module], list[nn.Module]]] = {}
    for name, style in plan.items():
        starts, ends = regions.setdefault(name.rpartition(".")[0], ([], []))
        if isinstance(style, ColwiseParallel) and style.output_layouts == (Shard(-1),):
            starts.append(model.get_submodule(name))
        elif isinstance(style, RowwiseParallel) and style.input_layouts == (Shard(-1),):
            ends.append(model.get_submodule(name))
    for parent, (starts, ends) in regions.items():
        if starts and ends:
            region = _Region(rank)
            model.get_submodule(parent).register_forward_pre_hook(region.begin)
            for module in starts:
                module.register_forward_hook(region.enter)
            for module in ends:
                module.register_forward_pre_hook(region.leave, prepend=True)


def _draws(module: nn.Module) -> bool:
    """Return whether ``module`` may drop activations, in its own forward or in functions that it calls."""
    return any("drop" in name and isinstance(rate, float) and rate > 0 for name, rate in vars(module).items()) or (
        isinstance(module, _DropoutNd) and module.p > 0
    )


class _Region:
    """The part of a module's forward pass in which activations are split."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._outside: list[torch.Tensor] | None = None

    def begin(self, _module: nn.Module, _args: Any) -> None:
        """Forget a region that was not left: recomputation for activation checkpointing stops anywhere."""
        self._outside = None

    def enter(self, module: nn.Module, *_: Any) -> None:
        if not module.training or self._outside is not None:
            return
        device = next(module.parameters()).device
        seed = int(torch.randint(2**31, (), device="cpu"))  # on the CPU: no wait for the device
        self._outside = save_states(device)
        torch.manual_seed((seed << 16) + self._rank)

    def leave(self, module: nn.Module, *_: Any) -> None:
        if self._outside is not None:
            restore_states(next(module.parameters()).device, self._outside)
            self._outside = None
