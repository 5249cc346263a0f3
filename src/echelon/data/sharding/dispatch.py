"""Dispatch mode: rank zero alone reads, and gives each rank its part of every global batch."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist

from echelon.base.errors import DesyncError, UsageError
from echelon.data.batch import join_batches, num_samples, slice_batch
from echelon.data.exact.batch_slices import Contribution, LastStep
from echelon.data.to_device import to_device
from echelon.distributed.small_messages import broadcast_bytes, bytes_of
from echelon.distributed.structure_check import wire_device
from echelon.distributed.tree import describe, rebuild_like

__all__ = ["SliceFn", "dispatch"]

SliceFn = Callable[..., Any]


def dispatch(
    batches: Iterator[Any] | None,
    *,
    rank: int,
    world_size: int,
    split: bool,
    even: bool,
    drop_last: bool,
    slice_fn: SliceFn | None,
    device: torch.device | None,
    non_blocking: bool,
    pieces: Callable[[int], Iterator[Contribution]] | None = None,
) -> Generator[tuple[Any, LastStep | Contribution | None], None, bool]:
    """Yield the batches of this rank, which rank zero reads.

    Args:
        batches: what rank zero's loader yields; None on the others.
        rank: this one.
        world_size: of the default group.
        split: each batch is cut for the ranks; else each rank gets one, joined and cut again.
        even: complete a step that does not divide with samples from the beginning, else cut it as it goes.
        drop_last: leave out a last step that has not a batch for every rank.
        slice_fn: called as ``slice_batch``; None: that.
        device: where batches travel and stay; None: the CPU.
        non_blocking: copy to the device without waiting.
        pieces: how a batch of so many samples is cut for this rank, instead of ``even`` and ``drop_last`` (exact modes).

    Returns:
        Have other ranks a last batch that this one has no part in?

    Collective: each step.

    Raises:
        DesyncError: on the other ranks, when reading failed on rank zero.
    """
    cut = slice_fn or slice_batch
    num_read = 1 if split else world_size
    few: Any = None  # samples from the beginning
    pending: Any = _NONE  # read already, because of a step that has not a sample for every rank
    while True:
        if batches is None:
            batch, is_last = _receive(device)
        else:
            with _telling_the_others():
                batch = _read(batches, num_read, drop_last=drop_last) if pending is _NONE else pending
                pending, is_last = _NONE, False
                if not even and pieces is None and batch is not _END and (num_samples(batch) or 0) < world_size:
                    pending = _read(batches, num_read, drop_last=drop_last)
                    is_last = pending is _END
                if batch is not _END and device is not None:
                    batch = to_device(batch, device, non_blocking=non_blocking)
                packed = _pack(batch) if world_size > 1 else None
            if packed is not None:
                _send(*packed, is_last=is_last, device=device)
        if batch is _END:
            return False
        count = num_samples(batch)
        if count is None:
            raise UsageError(
                f"a batch without a tensor of samples, or a list with one item a sample, cannot be cut: {describe(batch)}",
                where="dispatch_batches=True (the default for an iterable dataset)",
                do="let collate_fn make one, or use dispatch_batches=False",
            )
        if pieces is not None:
            for one in pieces(count):
                part = slice(one.samples.start, one.samples.stop)
                yield cut(batch, part, process_index=rank, num_processes=world_size), one
            continue
        if few is None:
            few = cut(batch, slice(0, world_size), process_index=rank, num_processes=world_size)
        share, extra = divmod(count, world_size)
        # Every rank makes every step but the last one: who has no samples in that ends before the others.
        if extra and (even or (share == 0 and not is_last)):
            batch = _complete(batch, few, missing=world_size - extra)
            sizes = [share + 1] * world_size
            real = [min(max(count - r * sizes[r], 0), sizes[r]) for r in range(world_size)]
        else:
            sizes = real = [share + (r < extra) for r in range(world_size)]
        start = sum(sizes[:rank])
        if sizes[rank]:
            part = cut(batch, slice(start, start + sizes[rank]), process_index=rank, num_processes=world_size)
            yield part, LastStep(sizes, real) if extra else None
        if is_last:
            return sizes[rank] == 0


def _read(batches: Iterator[Any], num_read: int, *, drop_last: bool) -> Any:
    found = list(islice(batches, num_read))
    return _END if not found or (drop_last and len(found) < num_read) else join_batches(found)


@contextmanager
def _telling_the_others() -> Iterator[None]:
    """Let the other ranks, which wait for a batch, know when making it fails."""
    try:
        yield
    except BaseException as error:
        if dist.is_initialized():
            broadcast_bytes(b"-E" + f"{type(error).__name__}: {error}".encode())
        raise


def _complete(batch: Any, few: Any, *, missing: int) -> Any:
    while (count := num_samples(few) or 0) < missing:
        few = join_batches([few, few]) if count else batch
    return join_batches([batch, slice_batch(few, slice(0, missing))])


# ---- one batch on the wire: its structure as JSON (as a pickle only where it holds objects), then its tensors ----------


def _pack(batch: Any) -> tuple[bytes, list[torch.Tensor]]:
    if batch is _END:
        return b".", []
    tensors: list[torch.Tensor] = []
    try:
        return b"J" + json.dumps(_plain(batch, tensors), separators=(",", ":")).encode(), tensors
    except _NotPlainError:
        tensors.clear()
        return b"P" + pickle.dumps(_hollow(batch, tensors)), tensors


def _send(structure: bytes, tensors: list[torch.Tensor], *, is_last: bool, device: torch.device | None) -> None:
    """Send from rank zero. Collective: the others call ``_receive``."""
    broadcast_bytes((b"L" if is_last else b"-") + structure)
    target = wire_device(device or torch.device("cpu"), None)
    for tensor in tensors:
        if tensor.numel():
            dist.broadcast(bytes_of(tensor.detach().to(target)), src=0)


def _receive(device: torch.device | None) -> tuple[Any, bool]:
    """Receive on the other ranks what rank zero sends: a batch, and whether it is known to be the last.

    Raises:
        DesyncError: rank zero could not read.
    """
    message = broadcast_bytes(None)
    is_last, kind, body = message[:1] == b"L", message[1:2], message[2:]
    if kind == b".":
        return _END, True
    if kind == b"E":
        raise DesyncError(f"rank zero could not read the next batch: {body.decode()}", do="mend the error of rank 0")
    target = device or torch.device("cpu")
    # A structure that holds objects of the user's: exchanged inside the user's own job (SECURITY.md).
    return _fill(json.loads(body), target) if kind == b"J" else _refill(pickle.loads(body), target), is_last


def _plain(data: Any, tensors: list[torch.Tensor]) -> Any:
    """Describe ``data`` in JSON and list its tensors."""
    if isinstance(data, torch.Tensor):
        tensors.append(data)
        return ["t", str(data.dtype).removeprefix("torch."), list(data.shape)]
    if type(data) is dict and all(type(key) in (str, int) for key in data):
        return ["d", [[key, _plain(value, tensors)] for key, value in data.items()]]
    if type(data) in (list, tuple):
        if all(type(item) in _SCALARS for item in data):
            return ["c" if type(data) is list else "k", list(data)]
        return ["l" if type(data) is list else "u", [_plain(item, tensors) for item in data]]
    if type(data) in _SCALARS:
        return ["v", data]
    raise _NotPlainError


def _fill(plain: list[Any], device: torch.device) -> Any:
    kind, value = plain[0], plain[1]
    if kind == "t":
        return _receive_tensor(_Hole(value, tuple(plain[2])), device)
    if kind == "d":
        return {key: _fill(item, device) for key, item in value}
    if kind in ("l", "u"):
        items = [_fill(item, device) for item in value]
        return items if kind == "l" else tuple(items)
    return tuple(value) if kind == "k" else value


class _NotPlainError(Exception):
    """A batch holds what JSON cannot say."""


_SCALARS = (str, int, float, bool, type(None))


class _Hole:
    """The place of a tensor in a pickled structure."""

    __slots__ = ("dtype", "shape")

    def __init__(self, dtype: str, shape: tuple[int, ...]) -> None:
        self.dtype = dtype
        self.shape = shape


def _hollow(data: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(data, torch.Tensor):
        tensors.append(data)
        return _Hole(str(data.dtype).removeprefix("torch."), tuple(data.shape))
    if isinstance(data, (list, tuple)):
        return rebuild_like(data, [_hollow(item, tensors) for item in data])
    if isinstance(data, Mapping):
        return rebuild_like(data, {key: _hollow(value, tensors) for key, value in data.items()})
    return data


def _refill(data: Any, device: torch.device) -> Any:
    if isinstance(data, _Hole):
        return _receive_tensor(data, device)
    if isinstance(data, (list, tuple)):
        return rebuild_like(data, [_refill(item, device) for item in data])
    if isinstance(data, Mapping):
        return rebuild_like(data, {key: _refill(value, device) for key, value in data.items()})
    return data


def _receive_tensor(hole: _Hole, device: torch.device) -> torch.Tensor:
    tensor = torch.empty(hole.shape, dtype=getattr(torch, hole.dtype), device=wire_device(device, None))
    if tensor.numel():
        dist.broadcast(tensor.reshape(-1).view(torch.uint8), src=0)
    return tensor.to(device)


_END: Any = object()
_NONE: Any = object()
