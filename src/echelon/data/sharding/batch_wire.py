"""Wire format for batches: the structure as JSON (or pickle, if it contains other objects), followed by the tensors."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from echelon.base.errors import DesyncError
from echelon.distributed.small_messages import broadcast_bytes, bytes_of
from echelon.distributed.structure_check import wire_device
from echelon.distributed.tree import rebuild_like

__all__ = ["END", "announce_failure", "pack_batch", "receive_batch", "send_batch"]

END: Any = object()
"""Marks that there are no more batches."""


def pack_batch(batch: Any) -> tuple[bytes, list[torch.Tensor]]:
    """Split ``batch`` into its structure and its tensors."""
    if batch is END:
        return b".", []
    tensors: list[torch.Tensor] = []
    try:
        return b"J" + json.dumps(_to_json(batch, tensors), separators=(",", ":")).encode(), tensors
    except _NotPlainError:
        tensors.clear()
        return b"P" + pickle.dumps(_take_tensors(batch, tensors)), tensors


def send_batch(structure: bytes, tensors: list[torch.Tensor], *, is_last: bool, device: torch.device | None) -> None:
    """Send a batch from rank zero. Collective: other ranks must call ``receive_batch``."""
    broadcast_bytes((b"L" if is_last else b"-") + structure)
    target = wire_device(device or torch.device("cpu"), None)
    for tensor in tensors:
        if tensor.numel():
            dist.broadcast(bytes_of(tensor.detach().to(target)), src=0)


def announce_failure(error: BaseException) -> None:
    """Make ``receive_batch`` raise an error on other ranks. Collective, like ``send_batch``."""
    broadcast_bytes(b"-E" + f"{type(error).__name__}: {error}".encode())


def receive_batch(device: torch.device | None) -> tuple[Any, bool]:
    """Receive a batch from rank zero, and whether it is known to be the last. Collective: rank zero must call ``send_batch``.

    Raises:
        DesyncError: rank zero failed to read the batch.
    """
    message = broadcast_bytes(None)
    is_last, kind, body = message[:1] == b"L", message[1:2], message[2:]
    if kind == b".":
        return END, True
    if kind == b"E":
        raise DesyncError(f"rank zero failed to read the next batch: {body.decode()}", do="fix the error on rank 0")
    target = device or torch.device("cpu")
    # The pickle comes from rank zero of the same job (SECURITY.md).
    return _from_json(json.loads(body), target) if kind == b"J" else _receive_tensors(
        pickle.loads(body), target
    ), is_last


def _to_json(data: Any, tensors: list[torch.Tensor]) -> Any:
    """Return the structure of ``data`` in a form suitable for JSON, and append its tensors to ``tensors``."""
    if isinstance(data, torch.Tensor):
        tensors.append(data)
        return ["t", str(data.dtype).removeprefix("torch."), list(data.shape)]
    if type(data) is dict and all(type(key) in (str, int) for key in data):
        return ["d", [[key, _to_json(value, tensors)] for key, value in data.items()]]
    if type(data) in (list, tuple):
        if all(type(item) in _SCALARS for item in data):
            return ["c" if type(data) is list else "k", list(data)]
        return ["l" if type(data) is list else "u", [_to_json(item, tensors) for item in data]]
    if type(data) in _SCALARS:
        return ["v", data]
    raise _NotPlainError


def _from_json(plain: list[Any], device: torch.device) -> Any:
    kind, value = plain[0], plain[1]
    if kind == "t":
        return _receive_tensor(_Placeholder(value, tuple(plain[2])), device)
    if kind == "d":
        return {key: _from_json(item, device) for key, item in value}
    if kind in ("l", "u"):
        items = [_from_json(item, device) for item in value]
        return items if kind == "l" else tuple(items)
    return tuple(value) if kind == "k" else value


class _NotPlainError(Exception):
    """A batch contains an object that JSON cannot represent."""


_SCALARS = (str, int, float, bool, type(None))


class _Placeholder:
    """Replaces a tensor in a pickled structure."""

    __slots__ = ("dtype", "shape")

    def __init__(self, dtype: str, shape: tuple[int, ...]) -> None:
        self.dtype = dtype
        self.shape = shape


def _take_tensors(data: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(data, torch.Tensor):
        tensors.append(data)
        return _Placeholder(str(data.dtype).removeprefix("torch."), tuple(data.shape))
    if isinstance(data, (list, tuple)):
        return rebuild_like(data, [_take_tensors(item, tensors) for item in data])
    if isinstance(data, Mapping):
        return rebuild_like(data, {key: _take_tensors(value, tensors) for key, value in data.items()})
    return data


def _receive_tensors(data: Any, device: torch.device) -> Any:
    if isinstance(data, _Placeholder):
        return _receive_tensor(data, device)
    if isinstance(data, (list, tuple)):
        return rebuild_like(data, [_receive_tensors(item, device) for item in data])
    if isinstance(data, Mapping):
        return rebuild_like(data, {key: _receive_tensors(value, device) for key, value in data.items()})
    return data


def _receive_tensor(hole: _Placeholder, device: torch.device) -> torch.Tensor:
    tensor = torch.empty(hole.shape, dtype=getattr(torch, hole.dtype), device=wire_device(device, None))
    if tensor.numel():
        dist.broadcast(tensor.reshape(-1).view(torch.uint8), src=0)
    return tensor.to(device)
