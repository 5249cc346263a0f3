"""Gathers state that is divided among ranks on the first of them, sending its structure as JSON and its tensors as raw bytes.

torch's functions (``ZeroRedundancyOptimizer.consolidate_state_dict``, ``dist.gather_object``, ``torch.distributed.checkpoint``)
exchange pickles, which echelon does not load from a network.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from echelon.base.errors import UsageError
from echelon.distributed.small_messages import bytes_of, gather_bytes, host_wire

Key = TypeVar("Key", int, str)


def gather_state(
    part: Mapping[Key, Any], *, group: dist.ProcessGroup | None = None, to: int = 0
) -> dict[Key, Any] | None:
    """Return the union of all ranks' ``part`` on the rank ``to`` of ``group``, with tensors copied to the CPU; other ranks return None.

    Args:
        part: values (tensors, numbers, strings, lists, tuples and dicts), by number or name. Of several values, the first rank's counts.
        group: the ranks. None: all.

    Collective: call on every rank of ``group``.

    Raises:
        UsageError: ``part`` contains a value of another type.
    """
    tensors: list[torch.Tensor] = []
    structure = [[key, _describe(value, tensors)] for key, value in part.items()]
    structures = gather_bytes(json.dumps(structure).encode(), group=group)
    if dist.get_rank(group) != to:
        for tensor in tensors:
            _send(tensor, group, to)
        return None
    whole: dict[Key, Any] = {}
    for rank, text in enumerate(structures):
        own = iter(tensors) if rank == to else None
        for key, value in json.loads(text):
            whole.setdefault(key, _rebuild(value, rank, own, group))
    return dict(sorted(whole.items()))


def _describe(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Return ``value`` as JSON, and append its tensors to ``tensors`` in the order in which ``_rebuild`` consumes them."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return {"tensor": [str(value.dtype).removeprefix("torch."), list(value.shape)]}
    if isinstance(value, dict):
        return {"dict": [[_describe(key, tensors), _describe(item, tensors)] for key, item in value.items()]}
    if type(value) in (list, tuple):
        return {type(value).__name__: [_describe(item, tensors) for item in value]}
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise UsageError(
        f"the optimizer state contains a {type(value).__name__}, which cannot be sent to another rank",
        do="store only tensors, numbers, strings, lists, tuples and dicts in it, or use the ddp engine, which does not shard it",
    )


def _rebuild(value: Any, rank: int, own: Iterator[torch.Tensor] | None, group: dist.ProcessGroup | None) -> Any:
    """Undo ``_describe`` for a value from ``rank``; its tensors come from ``own`` or, if that is None, from ``rank``."""
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return _receive(content, rank, group) if own is None else next(own).detach().to("cpu", copy=True)
    if kind == "dict":
        return {_rebuild(key, rank, own, group): _rebuild(item, rank, own, group) for key, item in content}
    items: Iterable[Any] = (_rebuild(item, rank, own, group) for item in content)
    return tuple(items) if kind == "tuple" else list(items)


def _send(tensor: torch.Tensor, group: dist.ProcessGroup | None, to: int) -> None:
    message = bytes_of(tensor.detach())
    if message.numel():
        dist.send(message.to(host_wire(group)), group=group, group_dst=to)


def _receive(described: list[Any], rank: int, group: dist.ProcessGroup | None) -> torch.Tensor:
    dtype, shape = getattr(torch, described[0]), described[1]
    result = torch.empty(shape, dtype=dtype)
    if result.numel():
        message = torch.empty(result.numel() * result.itemsize, dtype=torch.uint8, device=host_wire(group))
        dist.recv(message, group=group, group_src=rank)
        result.view(-1).view(torch.uint8).copy_(message)
    return result
