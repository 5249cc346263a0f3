"""Gathers sharded optimizer state on rank zero, sending its structure as JSON and its tensors as raw bytes.

torch's functions (``ZeroRedundancyOptimizer.consolidate_state_dict``, ``dist.gather_object``, ``torch.distributed.checkpoint``)
exchange pickles, which echelon does not load from a network.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from echelon.base.errors import UsageError
from echelon.distributed.small_messages import bytes_of, gather_bytes, host_wire

__all__ = ["gather_optimizer_state"]


def gather_optimizer_state(part: Mapping[int, Any]) -> dict[int, Any] | None:
    """Return the union of all ranks' ``part`` on rank zero, with tensors copied to the CPU; other ranks return None.

    Args:
        part: values (tensors, numbers, strings, lists, tuples and dicts), by a number that is unique across ranks.

    Collective: call on every rank.

    Raises:
        UsageError: ``part`` contains a value of another type.
    """
    tensors: list[torch.Tensor] = []
    structure = [[number, _describe(value, tensors)] for number, value in part.items()]
    structures = gather_bytes(json.dumps(structure).encode())
    if dist.get_rank():
        for tensor in tensors:
            _send(tensor)
        return None
    whole = {}
    for rank, text in enumerate(structures):
        own = iter(tensors) if rank == 0 else None
        whole.update({number: _rebuild(value, rank, own) for number, value in json.loads(text)})
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


def _rebuild(value: Any, rank: int, own: Iterator[torch.Tensor] | None) -> Any:
    """Undo ``_describe`` for a value from ``rank``; its tensors come from ``own`` or, if that is None, from ``rank``."""
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return _receive(content, rank) if own is None else next(own).detach().to("cpu", copy=True)
    if kind == "dict":
        return {_rebuild(key, rank, own): _rebuild(item, rank, own) for key, item in content}
    items: Iterable[Any] = (_rebuild(item, rank, own) for item in content)
    return tuple(items) if kind == "tuple" else list(items)


def _send(tensor: torch.Tensor) -> None:
    message = bytes_of(tensor.detach())
    if message.numel():
        dist.send(message.to(host_wire()), dst=0)


def _receive(described: list[Any], rank: int) -> torch.Tensor:
    dtype, shape = getattr(torch, described[0]), described[1]
    result = torch.empty(shape, dtype=dtype)
    if result.numel():
        message = torch.empty(result.numel() * result.itemsize, dtype=torch.uint8, device=host_wire())
        dist.recv(message, src=rank)
        result.view(-1).view(torch.uint8).copy_(message)
    return result
