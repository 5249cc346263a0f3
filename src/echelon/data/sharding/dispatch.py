"""Dispatch mode: only rank zero reads data. It sends each global batch to all ranks, and each rank keeps its slice."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from echelon.base.errors import DesyncError, UsageError
from echelon.data.batch import join_batches, num_samples, slice_batch
from echelon.data.global_batch_slices import LastStep
from echelon.distributed.alone import is_alone
from echelon.distributed.division import real_sizes, share_sizes
from echelon.distributed.small_messages import broadcast_bytes, bytes_of, wire_device
from echelon.distributed.structure import send_batch_to_device
from echelon.distributed.tree import describe, map_items

SliceFn = Callable[..., Any]
ReadBatch = tuple[Any, int | None]
"""A batch, and the number of samples that were collated for it or None if that is unknown."""


class CountedCollate:
    """A ``collate_fn`` that also returns the number of samples. A class, because it is pickled for DataLoader workers."""

    def __init__(self, collate_fn: Callable[[Any], Any]) -> None:
        self.collate_fn = collate_fn

    def __call__(self, samples: Any) -> ReadBatch:
        return self.collate_fn(samples), len(samples)


def global_batches(
    batches: Iterator[ReadBatch] | None,
    *,
    check: Callable[[Any, int | None], None] | None,
    world_size: int,
    split: bool,
    drop_last: bool,
    finds_end: bool,
    device: torch.device | None,
    non_blocking: bool,
) -> Iterator[tuple[Any, int, bool]]:
    """Yield each global batch on every rank, with its number of samples and whether it is known to be the last.

    Args:
        batches: the batches from rank zero's loader, with their numbers of samples; None on other ranks.
        check: raises an error for a batch that cannot be split; None if the user's function splits it.
        split: whether each batch is a global batch. Otherwise, ``world_size`` batches are joined to form one.
        drop_last: whether to drop a last step that does not have a batch for every rank.
        finds_end: whether to read ahead if a batch has fewer samples than there are ranks, to find out whether it is the last.
        device: device on which batches are sent and returned; None means the CPU.

    Collective: each step.

    Raises:
        DesyncError: reading failed on rank zero. Raised on other ranks.
    """
    num_read = 1 if split else world_size
    pending: Any = _NONE  # a batch that was read ahead to find the end
    while True:
        if batches is None:
            batch, is_last = _receive(device)
        else:
            with _announcing_failure():
                batch = _read(batches, num_read, check, drop_last=drop_last) if pending is _NONE else pending
                pending, is_last = _NONE, False
                if finds_end and batch is not _END and (num_samples(batch) or 0) < world_size:
                    pending = _read(batches, num_read, check, drop_last=drop_last)
                    is_last = pending is _END
                if batch is not _END and device is not None:
                    batch = send_batch_to_device(batch, device, non_blocking=non_blocking)
                packed = None if is_alone() else _pack(batch)
            if packed is not None:
                _send(*packed, is_last=is_last, device=device)
        if batch is _END:
            return
        count = num_samples(batch)
        if count is None:
            raise UsageError(
                "Expected a batch with a tensor of samples or a list with one item per sample, to split it across "
                f"ranks, but got {describe(batch)}",
                where="dispatch_batches=True (the default for an iterable dataset)",
                do="make collate_fn return a tensor or list with one item per sample, or pass dispatch_batches=False",
            )
        yield batch, count, is_last


def dispatch(
    batches: Iterator[tuple[Any, int, bool]],
    *,
    rank: int,
    world_size: int,
    batch_size: int | None,
    even: bool,
    slice_fn: SliceFn | None,
) -> Generator[tuple[Any, LastStep | None], None, bool]:
    """Yield this rank's slice of each global batch.

    Args:
        rank: the rank among those that read different samples.
        batch_size: number of samples that each rank gets of a full batch; None if it varies.
        even: whether to repeat samples from the start of the pass to pad a batch whose size is not divisible by
            ``world_size``. Otherwise, the batch is split as evenly as possible.
        slice_fn: replaces ``slice_batch``.

    Returns:
        Whether other ranks have samples in the last batch, but this rank does not.
    """
    slice_samples = slice_fn or slice_batch
    few: Any = None  # the first samples
    for batch, count, is_last in batches:
        if few is None:
            few = slice_samples(batch, slice(0, world_size), process_index=rank, num_processes=world_size)
        share, extra = divmod(count, world_size)
        # Every rank makes every step except the last one, which a rank without samples does not make.
        if extra and (even or (share == 0 and not is_last)):
            batch = _fill_batch(batch, few, missing=world_size - extra)
            sizes, real = [share + 1] * world_size, real_sizes(count, share + 1, world_size)
        else:
            sizes = real = share_sizes(count, world_size)
        start = sum(sizes[:rank])
        if sizes[rank]:
            part = slice_samples(batch, slice(start, start + sizes[rank]), process_index=rank, num_processes=world_size)
            yield part, LastStep(sizes, real) if extra or share != (batch_size or share) else None
        if is_last:
            return sizes[rank] == 0
    return False


def _read(
    batches: Iterator[ReadBatch], num_read: int, check: Callable[[Any, int | None], None] | None, *, drop_last: bool
) -> Any:
    found = list(islice(batches, num_read))
    if check is not None:
        for batch, count in found:
            check(batch, count)
    return _END if not found or (drop_last and len(found) < num_read) else join_batches([batch for batch, _ in found])


@contextmanager
def _announcing_failure() -> Iterator[None]:
    """If reading a batch fails, notify the other ranks, which are waiting for it."""
    try:
        yield
    except BaseException as error:
        if dist.is_initialized():
            broadcast_bytes(b"-E" + f"{type(error).__name__}: {error}".encode())
        raise


def _fill_batch(batch: Any, few: Any, *, missing: int) -> Any:
    while (count := num_samples(few) or 0) < missing:
        few = join_batches([few, few]) if count else batch
    return join_batches([batch, slice_batch(few, slice(0, missing))])


# A batch is sent as one byte that says whether it is the last one, one that says what follows, and the pickled batch, from which
# the tensors in its lists, tuples and mappings are left out; they follow one by one, because their bytes need not be copied.


def _pack(batch: Any) -> tuple[bytes, list[torch.Tensor]]:
    """Split ``batch`` into a message and its tensors."""
    if batch is _END:
        return b".", []
    tensors: list[torch.Tensor] = []

    def take(tensor: torch.Tensor) -> _LeftOutTensor:
        tensors.append(tensor)
        return _LeftOutTensor(tensor.dtype, tuple(tensor.shape))

    return b"P" + pickle.dumps(_replace(torch.Tensor, take, batch)), tensors


def _send(message: bytes, tensors: list[torch.Tensor], *, is_last: bool, device: torch.device | None) -> None:
    """Send a batch from rank zero. Collective: other ranks must call ``_receive``."""
    broadcast_bytes((b"L" if is_last else b"-") + message)
    target = wire_device(device or torch.device("cpu"), None)
    for tensor in tensors:
        if tensor.numel():
            dist.broadcast(bytes_of(tensor.detach().to(target)), src=0)


def _receive(device: torch.device | None) -> tuple[Any, bool]:
    """Receive a batch from rank zero, and whether it is known to be the last. Collective: rank zero must call ``_send``.

    Raises:
        DesyncError: rank zero failed to read the batch.
    """
    message = broadcast_bytes(None)
    is_last, kind, body = message[:1] == b"L", message[1:2], message[2:]
    if kind == b".":
        return _END, True
    if kind == b"E":
        raise DesyncError(f"rank zero failed to read the next batch: {body.decode()}", do="fix the error on rank 0")
    target = device or torch.device("cpu")

    def fill(left_out: _LeftOutTensor) -> torch.Tensor:
        tensor = torch.empty(left_out.shape, dtype=left_out.dtype, device=wire_device(target, None))
        if tensor.numel():
            dist.broadcast(tensor.reshape(-1).view(torch.uint8), src=0)
        return tensor.to(target)

    # The pickle comes from rank zero of the same job (SECURITY.md).
    return _replace(_LeftOutTensor, fill, pickle.loads(body)), is_last


class _LeftOutTensor(NamedTuple):
    """Replaces a tensor in a pickled batch."""

    dtype: torch.dtype
    shape: tuple[int, ...]


def _replace(kind: type, fn: Callable[[Any], Any], data: Any) -> Any:
    """Replace each object of ``kind`` in lists, tuples and mappings; what other objects hold is left to them."""
    if isinstance(data, kind):
        return fn(data)
    if isinstance(data, (list, tuple, Mapping)):
        return map_items(partial(_replace, kind, fn), data)
    return data


_NONE: Any = object()
_END: Any = object()
"""Marks that there are no more batches."""
