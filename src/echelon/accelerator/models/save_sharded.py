"""Writes the weights of a sharded model to safetensors files, several ranks at once, without gathering the model on any rank."""

from __future__ import annotations

import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import groupby, zip_longest
from pathlib import Path
from typing import Any

import torch

from echelon.base.errors import CheckpointError
from echelon.checkpoint.formats.weight_files import aside_of, cut_into_shards, publish_shards, shard_files
from echelon.checkpoint.object_store import Location, write_object
from echelon.checkpoint.stored_weights import converted
from echelon.checkpoint.tensor_file import header_of, stored_form, torch_dtype, write_file
from echelon.distributed.collectives import gather_object
from echelon.distributed.control import raise_on_all_ranks
from echelon.distributed.small_messages import bytes_of
from echelon.engines.base import ShardedState

_TENSORS_IN_MEMORY = 2  # gathered ones on a rank that writes: one is written while the next one is gathered
_VISIBLE_WITHIN_S = 5.0  # on slow network file systems


def write_sharded(
    state: ShardedState,
    folder: Location,
    *,
    rank: int,
    max_shard_bytes: int,
    dtype_of: Callable[[str, torch.dtype], torch.dtype],
) -> bool:
    """Write the weights to files of at most ``max_shard_bytes`` each, as ``write_shards`` does; return whether this was possible.

    The files are dealt to the ranks that can see ``folder``. Each tensor is gathered on the rank that writes it, which holds at
    most two at a time beside its shards. The stages of a pipeline have separate files. To an object store, the ranks upload them as they
    are written.

    Args:
        state: the sharded state dict.
        dtype_of: returns the dtype to store, given a name and the dtype of the tensor.

    Collective: call on every rank.

    Raises:
        CheckpointError: a value is too large for the dtype, or no rank with a stage of the pipeline can see ``folder``.
        DesyncError: some ranks failed.
    """
    described: list[Any] = gather_object([_described(state, dtype_of)])
    if any(one is None for one in described):
        return False
    is_visible = _visible_ranks(folder, rank) if isinstance(folder, Path) else [True] * len(described)
    stored: dict[str, tuple[str, Sequence[int], int]] = {}  # dtype in the file, shape, number of bytes
    part_of: dict[str, int] = {}
    unsharded: set[str] = set()
    for part, tensors in described:
        for name, (kind, shape, num_bytes, is_sharded) in tensors.items():
            if name not in stored:
                stored[name], part_of[name] = (kind, shape, num_bytes), part
                unsharded |= set() if is_sharded else {name}
    # The first rank of a part writes its unsharded tensors, of which other ranks may have different values.
    names = sorted((name for name in state.names if name in stored), key=lambda n: (part_of[n], n not in unsharded))
    shards: list[list[str]] = []
    writers: list[int] = []
    for part, group in groupby(names, part_of.__getitem__):
        able = [other for other, (its, _) in enumerate(described) if its == part and is_visible[other]]
        if not able:
            raise CheckpointError(
                f"no rank that holds a stage of the pipeline can see {folder}",
                do="save to a folder that all machines share, or save a checkpoint and run echelon checkpoint merge",
            )
        cut = [shard for shard in cut_into_shards({n: stored[n][2] for n in group}, max_shard_bytes) if shard]
        writers += [able[0 if unsharded & {*shard} else i % len(able)] for i, shard in enumerate(cut)]
        shards += cut
    files = shard_files(
        [sorted(shard, key=lambda name: (-torch_dtype(stored[name][0]).itemsize, name)) for shard in shards],
        safe_serialization=True,
    )
    writer_of = dict(zip(files, writers))
    own = {file: files[file] for file in files if writer_of[file] == rank}
    headers = {
        file: header_of(
            [(name, *stored[name]) for name in held],
            {alias: first for alias, first in state.aliases.items() if first in held},
        )
        for file, held in own.items()
    }
    sizes = {file: sum(stored[name][2] for name in held) for file, held in own.items()}
    thread = _WriterThread(
        headers,
        [len(held) for held in own.values()],
        write=lambda file, blocks: _write(folder, file, blocks, num_bytes=sizes[file]),
    )
    try:
        for file, name in _in_turns(files, writer_of):
            if part_of[name] != state.part:
                continue
            gather, writer = state.tensors[name].gather, writer_of[file]
            if writer != rank:
                gather(writer)
                continue
            thread.room.acquire()
            full = gather(writer)
            assert full is not None, name
            thread.put(name, full, stored[name][0])
            del full
    finally:
        thread.close()
    try:
        with raise_on_all_ranks("save_model"):
            if thread.error is not None:
                raise thread.error
    except Exception:
        if isinstance(folder, Path):
            for file in own:
                aside_of(folder / file).unlink(missing_ok=True)
        raise
    with raise_on_all_ranks("save_model"):
        if rank == 0:
            publish_shards(folder, files, sum(num_bytes for _, _, num_bytes in stored.values()))
    return True


def _write(folder: Location, file: str, blocks: Iterator[bytes | memoryview], *, num_bytes: int) -> None:
    if isinstance(folder, Path):
        aside = aside_of(folder / file)
        aside.unlink(missing_ok=True)  # of an export that was killed
        write_file(aside, blocks)
    else:
        write_object(folder / file, blocks, num_bytes=num_bytes)


def _described(state: ShardedState, dtype_of: Callable[[str, torch.dtype], torch.dtype]) -> Any:
    found: dict[str, Any] = {}
    for name, tensor in state.tensors.items():
        dtype = dtype_of(name, tensor.dtype)
        kind, shape = stored_form(str(dtype).removeprefix("torch."), tensor.shape)
        if len(shape) != len(tensor.shape):
            return None  # a dtype that the format has no name for
        found[name] = [kind, list(shape), tensor.shape.numel() * dtype.itemsize, tensor.is_sharded]
    return [state.part, found]


def _visible_ranks(folder: Path, rank: int) -> list[bool]:
    """Create ``folder``, and return for each rank whether it can see it. Collective: call on every rank."""
    with raise_on_all_ranks("save_model"):
        probe = f".{secrets.token_hex(8)}.tmp"
        if rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / probe).touch()
    path = folder / gather_object([probe])[0]
    deadline = time.monotonic() + _VISIBLE_WITHIN_S
    while not (is_visible := path.exists()) and time.monotonic() < deadline:
        time.sleep(0.05)
    found: list[bool] = gather_object([is_visible])
    if rank == 0:
        path.unlink()
    return found


def _in_turns(files: Mapping[str, Sequence[str]], writer_of: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """Yield each file and each of its tensors, a tensor of each writer in turn, so that all write at the same time."""
    queues: dict[int, list[tuple[str, str]]] = {}
    for file, names in files.items():
        queues.setdefault(writer_of[file], []).extend((file, name) for name in names)
    for turn in zip_longest(*queues.values()):
        yield from (one for one in turn if one is not None)


class _WriterThread:
    """Writes files in a thread while the next tensors are gathered, which cannot stop when a disk is full.

    Args:
        headers: the beginning of each file.
        counts: the number of tensors in each file.
        write: writes a file, given its contents.
    """

    def __init__(
        self,
        headers: Mapping[str, bytes],
        counts: Sequence[int],
        *,
        write: Callable[[str, Iterator[bytes | memoryview]], None],
    ) -> None:
        self.error: Exception | None = None
        self._counts, self._write = counts, write
        self.room = threading.Semaphore(_TENSORS_IN_MEMORY)
        """To be acquired for each tensor before it is gathered; the thread releases it."""
        self._queue: queue.SimpleQueue[tuple[str, torch.Tensor, str] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, args=(headers,), name="save_model")
        if headers:
            self._thread.start()

    def put(self, name: str, tensor: torch.Tensor, kind: str) -> None:
        """Append a tensor to the current file, as the dtype ``kind``; it goes to the next file when that is complete."""
        self._queue.put((name, tensor, kind))

    def close(self) -> None:
        """Wait until everything is on disk. ``error`` is set if it is not."""
        self._queue.put(None)
        with suppress(RuntimeError):  # not started
            self._thread.join()

    def _work(self, headers: Mapping[str, bytes]) -> None:
        try:
            for (file, header), count in zip(headers.items(), self._counts):
                self._write(file, self._contents(header, count))
        except Exception as error:  # noqa: BLE001 - raised on all ranks once everything is gathered
            self.error = error
            while self._queue.get() is not None:
                self.room.release()

    def _contents(self, header: bytes, count: int) -> Iterator[bytes | memoryview]:
        yield header
        for _ in range(count):
            item = self._queue.get()
            if item is None:
                raise CheckpointError("the weights could not be gathered", do="see the error of this or another rank")
            name, tensor, kind = item
            try:
                yield bytes_of(converted(tensor, name, kind)).numpy().data
            finally:
                del item, tensor
                self.room.release()
