"""Models without values ("meta"): sharded, they get those of rank zero, or of a file; no rank needs to hold them whole."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from echelon.base.errors import UsageError
from echelon.base.sharded import is_dtensor
from echelon.distributed.small_messages import broadcast_bytes, gather_counts
from echelon.engines.pages import release_pages
from echelon.engines.shards import fsdp_groups, slices_of

__all__ = ["fill_from_rank_zero", "give_memory", "refuse_without_values", "take_values"]

Values = dict[str, torch.Tensor | None]
"""What rank zero has, by name; elsewhere the same names, without the tensors."""

_PIECE_BYTES = 2**24  # sent at once: larger ones are no faster, and are memory beside the model's


def take_values(model: nn.Module, *, only_rank_zero: bool) -> Values | None:
    """Put ``model`` on the meta device, and return the values that rank zero has.

    None: every rank has values and keeps them (not with ``only_rank_zero``). What no rank has stays without values.

    Collective: every rank.

    Raises:
        UsageError: rank zero lacks values that another rank has.
    """
    tensors = dict(_tensors(model))
    lacking = bytes(tensor.is_meta for tensor in tensors.values())
    (counts,) = gather_counts(sum(lacking))
    if not any(counts) and not only_rank_zero:
        return None
    if min(counts) < counts[0]:
        raise UsageError(
            f"{type(model).__name__} is on the meta device on rank zero ({counts[0]} tensors without values), and rank "
            f"{counts.index(min(counts))} has values for it; rank zero's count",
            where="prepare()",
            do="build or load it on rank zero, and on the meta device elsewhere; or on the meta device on every rank, and "
            "then load_checkpoint_in_model()",
        )
    is_zero = dist.get_rank() == 0
    lacking = broadcast_bytes(lacking if is_zero else None)
    values = {name: tensor if is_zero else None for (name, tensor), lacks in zip(tensors.items(), lacking) if not lacks}
    parameters = list(model.parameters())
    with torch.no_grad():
        _put_on_meta(model)
    if not is_zero:
        for parameter in parameters:
            _empty(parameter)
    return values


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _put_on_meta(model: nn.Module) -> None:
    """Replace every tensor by one without values; those that modules share stay shared.

    The caller keeps the old ones alive: they are known by their ids.
    """
    made: dict[int, nn.Parameter] = {}
    buffers: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                empty = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
                module._parameters[name] = made.setdefault(id(parameter), empty)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffers.setdefault(id(buffer), torch.empty_like(buffer, device="meta"))


def _empty(parameter: torch.Tensor) -> None:
    """Free the memory of a parameter that the model has no more; optimizers still know it, until they get the new one."""
    if isinstance(parameter, nn.Parameter):
        parameter.data = parameter.data.new_empty(0)


def fill_from_rank_zero(model: nn.Module, values: Values, *, device: torch.device) -> None:
    """Give the sharded ``model`` its parts of rank zero's ``values``, which are freed one by one.

    Collective: every rank.
    """
    give_memory(model, values, device=device)
    tensors = dict(_tensors(model))
    with torch.no_grad():
        for name, value in values.items():
            _send(value, tensors[name], device=device)
            if value is not None:
                _empty(value)


def _send(value: torch.Tensor | None, own: torch.Tensor, *, device: torch.device) -> None:
    """Copy rank zero's ``value`` into the parts ``own`` of all ranks, some rows at a time.

    Collective: every rank.
    """
    local, held = own.to_local() if is_dtensor(own) else own, slices_of(own)
    if not own.dim():
        value, local, held = None if value is None else value.reshape(1), local.reshape(1), (slice(0, 1),)
    num_rows, row = (own.shape[0], own.shape[1:]) if own.dim() else (1, torch.Size())
    num_at_once = max(1, _PIECE_BYTES // max(1, row.numel() * own.element_size()))
    for start in range(0, num_rows, num_at_once):
        stop = min(start + num_at_once, num_rows)
        piece = torch.empty((stop - start, *row), dtype=own.dtype, device=device)
        if value is not None:
            piece.copy_(value[start:stop])
            release_pages(value[start:stop])
        dist.broadcast(piece, src=0)
        first, last = max(start, held[0].start), min(stop, held[0].stop)
        if first < last:
            mine = piece[(slice(first - start, last - start), *held[1:])]
            local[first - held[0].start : last - held[0].start].copy_(mine)


def give_memory(model: nn.Module, names: Collection[str], *, device: torch.device) -> None:
    """Move the parameters and buffers ``names`` of ``model``, sharded or not, from the meta device to ``device``.

    They are not initialised. Parameters stay the objects that optimizers know; what modules share stays shared. What torch offloads goes to the
    host.
    """
    groups = fsdp_groups(model)
    on_host = {id(part.sharded_param) for group in groups if _is_offloaded(group) for part in group.fsdp_params}
    wanted = set(names)
    for name, parameter in model.named_parameters():
        if name in wanted:
            place = torch.device("cpu") if id(parameter) in on_host else device
            made = nn.Parameter(torch.empty_like(parameter, device=place), requires_grad=parameter.requires_grad)
            made.__dict__.update(parameter.__dict__)
            torch.utils.swap_tensors(parameter, made)  # type: ignore[no-untyped-call]
    buffers = list(model.named_buffers(remove_duplicate=False))
    filled = {id(buffer): torch.empty_like(buffer, device=device) for name, buffer in buffers if name in wanted}
    for name, buffer in buffers:
        if id(buffer) in filled:
            path, _, attribute = name.rpartition(".")
            model.get_submodule(path)._buffers[attribute] = filled[id(buffer)]
    for group in groups:
        for part in group.fsdp_params:
            part.reset_sharded_param()  # as FSDPModule does after to_empty()


def _is_offloaded(group: Any) -> bool:
    from torch.distributed.fsdp import CPUOffloadPolicy  # noqa: PLC0415 - who has a group of it has loaded it

    return isinstance(group.offload_policy, CPUOffloadPolicy)


def refuse_without_values(model: nn.Module, *_: object) -> None:
    """Raise where parameters or buffers of ``model`` are still on the meta device.

    Raises:
        UsageError: they are named.
    """
    names = [name for name, tensor in _tensors(model) if tensor.is_meta]
    if names:
        raise UsageError(
            f"{type(model).__name__} was prepared on the meta device, and {len(names)} of its tensors have no values yet: "
            f"{', '.join(names[:3])}",
            do="call load_checkpoint_in_model(model, folder) after prepare()",
        )
