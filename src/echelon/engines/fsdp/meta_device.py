"""Shards models on the meta device and then fills them from rank zero or from files, so no rank needs the whole model."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from echelon.base.errors import UsageError
from echelon.base.sharded import is_dtensor
from echelon.distributed.small_messages import broadcast_bytes, gather_counts
from echelon.engines.param_groups import fsdp_groups
from echelon.engines.shards import local_slices

Values = dict[str, torch.Tensor | None]
"""Rank zero's tensors by name; other ranks have the same names with None as values."""

_CHUNK_BYTES = 2**24  # size of a broadcast; larger chunks are not faster and need additional memory
_MIN_RELEASED_BYTES = 2**16  # for fewer bytes, the look-up costs more than the pages
_PAGEOUT = 21  # MADV_PAGEOUT (Linux 5.4), which keeps modified pages, unlike MADV_DONTNEED


def move_to_meta(model: nn.Module, *, only_rank_zero: bool) -> Values | None:
    """Move ``model`` to the meta device, and return rank zero's tensors, except those that have no values on any rank.

    If every rank has values and ``only_rank_zero`` is False, leave the model unchanged and return None.

    Collective: call on every rank.

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
            f"prepare() uses rank zero's values, but on rank zero {type(model).__name__} is on the meta device ({counts[0]} "
            f"tensors have no values), and rank {counts.index(min(counts))} has values",
            where="prepare()",
            do="create the model with values on rank zero and on the meta device on the other ranks, or create it on the meta "
            "device on every rank and call load_checkpoint_in_model() after prepare()",
        )
    is_zero = dist.get_rank() == 0
    lacking = broadcast_bytes(lacking if is_zero else None)
    values = {name: tensor if is_zero else None for (name, tensor), lacks in zip(tensors.items(), lacking) if not lacks}
    parameters = list(model.parameters())
    with torch.no_grad():
        _replace_by_meta(model)
    if not is_zero:
        for parameter in parameters:
            _free(parameter)
    return values


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _replace_by_meta(model: nn.Module) -> None:
    """Replace every tensor with one on the meta device; shared tensors stay shared. The caller must keep the old tensors alive."""
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


def _free(parameter: torch.Tensor) -> None:
    """Free the memory of a replaced parameter, which optimizers still reference until they are updated."""
    if isinstance(parameter, nn.Parameter):
        parameter.data = parameter.data.new_empty(0)


def fill_from_rank_zero(model: nn.Module, values: Values, *, device: torch.device) -> None:
    """Fill the shards of ``model`` from rank zero's ``values``, which are freed one by one. Collective: call on every rank."""
    allocate_tensors(model, values, device=device)
    tensors = dict(_tensors(model))
    with torch.no_grad():
        for name, value in values.items():
            _broadcast_chunks(value, tensors[name], device=device)
            if value is not None:
                _free(value)


def _broadcast_chunks(value: torch.Tensor | None, own: torch.Tensor, *, device: torch.device) -> None:
    """Copy rank zero's ``value`` to each rank's shard ``own`` in chunks of rows. Collective: call on every rank."""
    local, held = own.to_local() if is_dtensor(own) else own, local_slices(own)
    if not own.dim():
        value, local, held = None if value is None else value.reshape(1), local.reshape(1), (slice(0, 1),)
    num_rows, row = (own.shape[0], own.shape[1:]) if own.dim() else (1, torch.Size())
    num_at_once = max(1, _CHUNK_BYTES // max(1, row.numel() * own.element_size()))
    for start in range(0, num_rows, num_at_once):
        stop = min(start + num_at_once, num_rows)
        chunk = torch.empty((stop - start, *row), dtype=own.dtype, device=device)
        if value is not None:
            chunk.copy_(value[start:stop])
            release_pages(value[start:stop])
        dist.broadcast(chunk, src=0)
        first, last = max(start, held[0].start), min(stop, held[0].stop)
        if first < last:
            mine = chunk[(slice(first - start, last - start), *held[1:])]
            local[first - held[0].start : last - held[0].start].copy_(mine)


def allocate_tensors(model: nn.Module, names: Collection[str], *, device: torch.device) -> None:
    """Replace the model's meta parameters and buffers listed in ``names`` with uninitialized ones on ``device``.

    Parameters keep their identity, which optimizers rely on, and shared tensors stay shared. Offloaded parameters are
    allocated on the CPU.
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
    from torch.distributed.fsdp import CPUOffloadPolicy  # noqa: PLC0415 - already loaded if there is a group

    return isinstance(group.offload_policy, CPUOffloadPolicy)


def require_values(model: nn.Module, *_: object) -> None:
    """Raise UsageError if any of the model's parameters or buffers are still on the meta device."""
    names = [name for name, tensor in _tensors(model) if tensor.is_meta]
    if names:
        raise UsageError(
            f"{type(model).__name__} was prepared on the meta device, and {len(names)} of its tensors have no values yet: "
            f"{', '.join(names[:3])}",
            do="call load_checkpoint_in_model(model, folder) after prepare()",
        )


def release_pages(tensor: torch.Tensor) -> None:
    """Remove a memory-mapped tensor's pages from resident memory (Linux only) without changing its values.

    Weights are often memory-mapped (by safetensors or transformers). Without this function, pages that were read stay resident
    until the whole file is unmapped.
    """
    if sys.platform != "linux" or tensor.device.type != "cpu" or not tensor.numel():
        return
    start = tensor.data_ptr()
    size = mmap.PAGESIZE
    first, last = -(-start // size) * size, (start + tensor.numel() * tensor.element_size()) // size * size
    if last - first >= _MIN_RELEASED_BYTES and _is_file_mapped(first):
        # Best effort: if the kernel or a sandbox rejects the call, the pages stay.
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _PAGEOUT)


def _is_file_mapped(address: int) -> bool:
    """Return whether a file is mapped at ``address``. (Anonymous memory would be written to swap.)"""
    for line in Path("/proc/self/maps").read_text().splitlines():
        bounds, _, _, _, inode, *_ = line.split(maxsplit=5)
        low, high = (int(bound, 16) for bound in bounds.split("-"))
        if low <= address < high:
            return inode != "0"
    return False
