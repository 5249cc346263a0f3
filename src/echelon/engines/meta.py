"""Models without values ("meta"), which get those of rank zero after they were sharded: no rank but zero holds them whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from echelon.base.errors import UsageError
from echelon.distributed.wire import gather_counts
from echelon.engines.shards import part_like

__all__ = ["fill_from_rank_zero", "take_values", "tied_names"]

Values = Mapping[str, torch.Tensor]


def take_values(model: nn.Module) -> Values | None:
    """Where ranks have ``model`` without values, take them out of it on rank zero, too, and return them (elsewhere nothing).

    None: every rank has them, and keeps them.

    Collective: every rank.

    Raises:
        UsageError: rank zero has no values, either.
    """
    tensors = dict(_tensors(model))
    on_meta = [name for name, tensor in tensors.items() if tensor.is_meta]
    (counts,) = gather_counts(len(on_meta))
    if not any(counts):
        return None
    if counts[0]:
        raise UsageError(
            f"{type(model).__name__} is on the meta device on rank zero, too ({counts[0]} tensors), so nobody has its values",
            where="prepare()",
            do="build or load it on rank zero, and on the meta device elsewhere",
        )
    with torch.no_grad():
        _put_on_meta(model)
    return tensors if not on_meta else {}


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _put_on_meta(model: nn.Module) -> None:
    """Replace every tensor by one without values; tied ones stay tied."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                empty = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
                module._parameters[name] = made.setdefault(id(parameter), empty)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty_like(buffer, device="meta")


def tied_names(model: nn.Module) -> list[list[str]]:
    """Return the names of each parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def fill_from_rank_zero(model: nn.Module, values: Values, *, ties: list[list[str]], device: torch.device) -> None:
    """Give the sharded ``model`` memory on ``device``, and its parts of rank zero's ``values``: one tensor at a time.

    Collective: every rank.
    """
    model.to_empty(device=device)
    for first, *others in ties:
        owner = model.get_parameter(first)
        for other in others:
            path, _, name = other.rpartition(".")
            model.get_submodule(path)._parameters[name] = owner
    with torch.no_grad():
        for name, own in _tensors(model):
            full = torch.empty(own.shape, dtype=own.dtype, device=device)
            if values:
                full.copy_(values[name])
            dist.broadcast(full, src=0)
            if isinstance(own, DTensor):
                own.to_local().copy_(part_like(full, own).to_local())
            else:
                own.copy_(full)
