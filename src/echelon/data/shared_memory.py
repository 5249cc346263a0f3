"""Stores one copy of a dataset per machine, in shared memory."""

from __future__ import annotations

import io
import json
import os
import pickle
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.data import Dataset

from echelon.base.errors import DesyncError, SetupError, UsageError
from echelon.distributed.small_messages import gather_bytes, gather_counts
from echelon.distributed.tree import rebuild_like
from echelon.world.world import World

T = TypeVar("T")

_ALIGNMENT = 64
_MEMORY = Path("/dev/shm")


def share_dataset(dataset: T | None) -> T:
    """Move the columns of ``dataset`` into memory that is shared by all ranks on a machine.

    Columns are CPU tensors and NumPy arrays in tuples, lists and dicts, and in the attributes of ``dataset`` and of every
    ``torch.utils.data.Dataset`` in it (``TensorDataset``, ``Subset``, ``ConcatDataset``, ...). Objects, lists and dicts keep
    their identity, but their columns are replaced. Writes to a column are visible to all ranks on the machine.

    Only the first rank on each machine has to build the data. Other ranks may pass None; they receive that rank's object,
    which is pickled without its columns.

    Args:
        dataset: the same dataset on all ranks, or None on all ranks except the first on each machine.

    Returns:
        ``dataset``, with shared columns.

    Collective: call on every rank.

    Raises:
        DesyncError: the columns differ in kind or shape between ranks on a machine.
        SetupError: there is not enough shared memory.
        UsageError: the first rank on a machine passed no data.

    Examples:
        >>> dataset = share_dataset(TensorDataset(torch.randn(1000, 8), torch.randn(1000, 1)))
    """
    world = World.current()
    first = world.rank - world.local_rank
    if world.world_size == 1:
        if dataset is None:
            raise UsageError("share_dataset: the dataset is None", do="pass the dataset at least on local rank 0")
        return dataset
    leads = world.rank == first
    columns: dict[int, _Column] = {}
    if dataset is not None:
        _replace_columns(dataset, lambda column: _add_column(column, columns))
    wanted = gather_bytes(_describe(columns) if dataset is not None else b"")
    _require_same_columns(wanted, gather_counts(first)[0])
    is_requested = b"" in wanted[first : first + world.local_world_size]
    path = ""
    try:
        message, error = b"", None
        if leads:
            try:
                path = _allocate(columns)
                message = b"F" + os.fsencode(path)
            except OSError as problem:
                error, message = problem, b"E" + str(problem).encode()
        of_first = gather_bytes(message)[first]
        memory = _map(of_first, wanted[first], error)
        if leads:
            _copy(columns, memory)
        # This collective ensures that all ranks have mapped the file before it is unlinked, and that the data is written before
        # any rank reads it.
        skeletons = gather_bytes(_pickle(dataset, columns) if leads and is_requested else b"")
    finally:
        if path:
            os.unlink(path)
    layout = [_Column(*item) for item in json.loads(wanted[first])]
    views = _views(layout, memory)
    if dataset is None:
        # The pickle comes from another rank of the same job (SECURITY.md).
        return _DatasetUnpickler(io.BytesIO(skeletons[first]), views).load()  # type: ignore[no-any-return]
    by_id = {identity: views[number] for number, identity in enumerate(columns)}
    return _replace_columns(dataset, lambda column: by_id[id(column)])  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class _Column:
    kind: str
    """``tensor`` or ``array``."""
    dtype: Any
    """Name of a torch dtype, or NumPy's description of a dtype."""
    shape: list[int]
    offset: int
    num_bytes: int
    value: Any = None


def _is_column(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return type(value) is np.ndarray and not value.dtype.hasobject and value.nbytes > 0
    return (
        type(value) is torch.Tensor
        and value.device.type == "cpu"
        and value.layout == torch.strided
        and not value.requires_grad
        and value.numel() > 0
    )


def _add_column(value: Any, columns: dict[int, _Column]) -> Any:
    """Add ``value`` to ``columns`` by its identity, and return it."""
    if id(value) in columns:
        return value
    end = _end(columns) if columns else 0
    offset = -(-end // _ALIGNMENT) * _ALIGNMENT
    if isinstance(value, torch.Tensor):
        name = str(value.dtype).removeprefix("torch.")
        column = _Column("tensor", name, list(value.shape), offset, value.numel() * value.element_size(), value)
    else:
        column = _Column(
            "array", np.lib.format.dtype_to_descr(value.dtype), list(value.shape), offset, value.nbytes, value
        )
    columns[id(value)] = column
    return value


def _end(columns: dict[int, _Column]) -> int:
    last = columns[next(reversed(columns))]
    return last.offset + last.num_bytes


def _describe(columns: dict[int, _Column]) -> bytes:
    return json.dumps([[c.kind, c.dtype, c.shape, c.offset, c.num_bytes] for c in columns.values()]).encode()


def _require_same_columns(wanted: list[bytes], firsts: list[int]) -> None:
    """Raise an error on every rank of every machine if columns differ, so that no rank hangs."""
    for rank, first in enumerate(firsts):
        if wanted[first] == b"":
            raise UsageError(
                f"share_dataset: the dataset is None on rank {first}, which is the first rank on its machine",
                do="pass the dataset on this rank",
            )
        if wanted[rank] not in (b"", wanted[first]):
            raise DesyncError(
                f"share_dataset: ranks {first} and {rank} are on the same machine, but their datasets contain different "
                "tensors or arrays",
                do="build the same data on every rank of a machine, or pass None on all ranks except the first",
            )


def _allocate(columns: dict[int, _Column]) -> str:
    """Create a file for all columns, in /dev/shm if that exists, and reserve its space."""
    size = _end(columns) if columns else 1
    descriptor, path = tempfile.mkstemp(prefix="echelon-share-", dir=_MEMORY if _MEMORY.is_dir() else None)
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, size)  # raises if space is insufficient, instead of a SIGBUS later
        else:
            os.ftruncate(descriptor, size)
    except OSError:
        os.unlink(path)
        raise
    finally:
        os.close(descriptor)
    return path


def _map(of_first: bytes, described: bytes, error: OSError | None) -> torch.Tensor:
    if of_first[:1] != b"F":
        raise SetupError(
            f"share_dataset: cannot allocate shared memory: {of_first[1:].decode()}",
            where=str(_MEMORY),
            do="increase the size of /dev/shm (docker run --shm-size=...)",
        ) from error
    columns = json.loads(described)
    size = columns[-1][3] + columns[-1][4] if columns else 1
    return torch.from_file(os.fsdecode(of_first[1:]), shared=True, size=size, dtype=torch.uint8)


def _copy(columns: dict[int, _Column], memory: torch.Tensor) -> None:
    for column, view in zip(columns.values(), _views(list(columns.values()), memory)):
        if isinstance(view, torch.Tensor):
            view.copy_(column.value)
        else:
            view[...] = column.value


def _views(columns: list[_Column], memory: torch.Tensor) -> list[Any]:
    views: list[Any] = []
    for column in columns:
        part = memory[column.offset : column.offset + column.num_bytes]
        if column.kind == "tensor":
            views.append(part.view(getattr(torch, column.dtype)).view(column.shape))
        else:
            views.append(part.numpy().view(_dtype(column.dtype)).reshape(column.shape))
    return views


def _dtype(description: Any) -> np.dtype[Any]:
    if isinstance(description, str):
        return np.dtype(description)
    return np.dtype([tuple(tuple(p) if isinstance(p, list) else p for p in field) for field in description])


def _pickle(dataset: Any, columns: dict[int, _Column]) -> bytes:
    with io.BytesIO() as file:
        _DatasetPickler(file, columns).dump(dataset)
        return file.getvalue()


class _DatasetPickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, columns: dict[int, _Column]) -> None:
        super().__init__(file)
        self._numbers = {identity: number for number, identity in enumerate(columns)}

    def persistent_id(self, obj: Any) -> int | None:
        """Leave out columns."""
        return self._numbers.get(id(obj))


class _DatasetUnpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, views: list[Any]) -> None:
        super().__init__(file)
        self._views = views

    def persistent_load(self, pid: Any) -> Any:
        """Return the shared column."""
        return self._views[pid]


def _replace_columns(value: Any, replacement: Callable[[Any], Any]) -> Any:
    """Replace each column in ``value`` with ``replacement(column)``, in place where possible."""
    return _replace(value, replacement, {}, is_top=True)


# Not a function in the one above: that would be a reference cycle, which keeps the columns in memory.
def _replace(value: Any, replacement: Callable[[Any], Any], done: dict[int, Any], *, is_top: bool = False) -> Any:
    if _is_column(value):
        return replacement(value)
    if id(value) in done:
        return done[id(value)]
    done[id(value)] = value
    if isinstance(value, list):
        value[:] = [_replace(item, replacement, done) for item in value]
    elif isinstance(value, dict):
        for key in value:
            value[key] = _replace(value[key], replacement, done)
    elif isinstance(value, tuple):
        items = [_replace(item, replacement, done) for item in value]
        if any(new is not old for new, old in zip(items, value)):
            done[id(value)] = rebuild_like(value, items)
    elif isinstance(value, Dataset) or (is_top and hasattr(value, "__dict__")):
        attributes = vars(value)
        for name in attributes:
            attributes[name] = _replace(attributes[name], replacement, done)
    return done[id(value)]
