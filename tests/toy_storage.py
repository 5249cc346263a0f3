"""A file system in memory that records its operations, and computes every state that a power cut may leave.

A file or folder is an inode. Writes to it are on the disk after that inode is synced, and may be there earlier: a crash keeps
any subset of the unsynced operations, each of them completely or not at all. A name belongs to the inode of its folder.
"""

from __future__ import annotations

import errno
import itertools
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from echelon.checkpoint import storage
from echelon.checkpoint.storage import Kind

CHANGES = (
    "create",
    "write",
    "sync",
    "close",
    "make_folder",
    "sync_folder",
    "link",
    "rename",
    "exchange",
    "remove_file",
)
CHANGES += ("remove_folder",)
"""The operations of ``echelon.checkpoint.storage`` that change a file system."""
_READS = ("kind", "real_path", "link_target", "modified", "entries", "open_file", "size", "read", "free_bytes")

# (inode, offset, data): bytes of a file; (inode, names): names of a folder, None removes a name; (inode,): a sync
Operation = tuple[int, int, bytes] | tuple[int, dict[str, int | None]] | tuple[int]


class ToyStorage:
    """A file system whose root is the existing folder ``/toy``."""

    def __init__(self, muted: Callable[[str, str], bool] = lambda operation, name: False) -> None:
        self.files: dict[int, bytearray] = {}
        self.folders: dict[int, dict[str, int]] = {0: {}}
        self.operations: list[Operation] = []
        self.calls: list[tuple[str, str]] = []
        """(operation, last part of the path) of each modification and sync."""
        self._muted = muted
        self._handles: dict[int, tuple[int, str]] = {}
        self._lock = threading.RLock()
        self._next = itertools.count(1)

    @contextmanager
    def used(self) -> Iterator[None]:
        """Make checkpoints use this file system inside the block."""
        with pytest.MonkeyPatch.context() as patch:
            for name in (*CHANGES, *_READS):
                patch.setattr(storage, name, getattr(self, name))
            yield

    # ---- paths -------------------------------------------------------------------------------------------------------

    def _find(self, path: Path) -> int | None:
        assert path.parts[:2] == ("/", "toy"), path
        inode: int | None = 0
        for name in path.parts[2:]:
            inode = None if inode not in self.folders else self.folders[inode].get(name)
            if inode is None:
                return None
        return inode

    def _folder(self, path: Path) -> int:
        inode = self._find(path)
        if inode is None:
            raise FileNotFoundError(errno.ENOENT, "no such folder", str(path))
        if inode not in self.folders:
            raise NotADirectoryError(errno.ENOTDIR, "no folder", str(path))
        return inode

    def _names(self, folder: int, names: dict[str, int | None]) -> None:
        self.operations.append((folder, names))
        _apply_names(self.folders[folder], names)

    def _may(self, operation: str, path: Path) -> bool:
        name = re.sub(r"\.(tmp|old)-[0-9a-f]{16}$", r".\1", path.name)
        self.calls.append((operation, name))
        return not self._muted(operation, name)

    # ---- the operations ----------------------------------------------------------------------------------------------

    def create(self, path: Path) -> int:
        with self._lock:
            folder = self._folder(path.parent)
            if path.name in self.folders[folder]:
                raise FileExistsError(errno.EEXIST, "there already", str(path))
            self.calls.append(("create", path.name))
            inode = next(self._next)
            self.files[inode] = bytearray()
            self._names(folder, {path.name: inode})
            return self._handle(inode, path.name)

    def _handle(self, inode: int, name: str) -> int:
        handle = next(self._next)
        self._handles[handle] = (inode, name)
        return handle

    def write(self, handle: int, data: bytes | memoryview) -> None:
        with self._lock:
            inode, name = self._handles[handle]
            self.calls.append(("write", name))
            self.operations.append((inode, len(self.files[inode]), bytes(data)))
            self.files[inode] += data

    def sync(self, handle: int) -> None:
        with self._lock:
            inode, name = self._handles[handle]
            if self._may("sync", Path(name)):
                self.operations.append((inode,))

    def close(self, handle: int) -> None:
        del self._handles[handle]

    def make_folder(self, path: Path) -> None:
        with self._lock:
            parent = self._folder(path.parent)
            if path.name in self.folders[parent]:
                raise FileExistsError(errno.EEXIST, "there already", str(path))
            self.calls.append(("make_folder", path.name))
            inode = next(self._next)
            self.folders[inode] = {}
            self._names(parent, {path.name: inode})

    def sync_folder(self, path: Path) -> None:
        with self._lock:
            inode = self._folder(path)
            if self._may("sync_folder", path):
                self.operations.append((inode,))

    def link(self, source: Path, target: Path) -> None:
        with self._lock:
            inode = self._find(source)
            assert inode in self.files, source
            self.calls.append(("link", target.name))
            self._names(self._folder(target.parent), {target.name: inode})

    def rename(self, source: Path, target: Path) -> None:
        with self._lock:
            assert source.parent == target.parent
            folder = self._folder(source.parent)
            inode, replaced = self.folders[folder][source.name], self.folders[folder].get(target.name)
            if replaced is not None and self.folders.get(replaced):
                raise OSError(errno.ENOTEMPTY, "not empty", str(target))
            if self._may("rename", source):
                self._names(folder, {source.name: None, target.name: inode})

    def exchange(self, one: Path, other: Path) -> bool:
        with self._lock:
            assert one.parent == other.parent
            folder = self._folder(one.parent)
            names = self.folders[folder]
            if self._may("exchange", one):
                self._names(folder, {one.name: names[other.name], other.name: names[one.name]})
            return True

    def remove_file(self, path: Path) -> None:
        with self._lock:
            self.calls.append(("remove_file", path.name))
            assert self._find(path) in self.files, path
            self._names(self._folder(path.parent), {path.name: None})

    def remove_folder(self, path: Path) -> None:
        with self._lock:
            self.calls.append(("remove_folder", path.name))
            if self.folders[self._folder(path)]:
                raise OSError(errno.ENOTEMPTY, "not empty", str(path))
            self._names(self._folder(path.parent), {path.name: None})

    def kind(self, path: Path) -> Kind | None:
        inode = self._find(path)
        return None if inode is None else "folder" if inode in self.folders else "file"

    def real_path(self, path: Path) -> Path:
        return path  # there are no links

    def link_target(self, path: Path) -> Path | None:
        return None

    def modified(self, path: Path) -> float:
        return time.time()

    def entries(self, folder: Path) -> list[str]:
        return sorted(self.folders[self._folder(folder)])

    def open_file(self, path: Path) -> int:
        inode = self._find(path)
        if inode is None:
            raise FileNotFoundError(errno.ENOENT, "no such file", str(path))
        if inode not in self.files:
            raise OSError(errno.EINVAL, "no plain file", str(path))
        return self._handle(inode, path.name)

    def size(self, handle: int) -> int:
        return len(self.files[self._handles[handle][0]])

    def read(self, handle: int, offset: int, buffer: memoryview) -> None:
        data = self.files[self._handles[handle][0]][offset : offset + len(buffer)]
        if len(data) < len(buffer):
            raise OSError(errno.ENODATA, "the file ends before")
        buffer[:] = data

    def free_bytes(self, folder: Path) -> int:
        return 1 << 40


class WithoutExchange(ToyStorage):
    """A file system that cannot exchange two names atomically."""

    def exchange(self, one: Path, other: Path) -> bool:
        return False


def crash_states(
    toy: ToyStorage, *, start: int = 0, max_pending: int = 12, seed: int = 0
) -> Iterator[tuple[int, ToyStorage]]:
    """Yield (number of completed operations, contents of the disk) for every distinct state that a crash may leave.

    Args:
        toy: the recorded operations.
        start: number of first operations that are always completed and on the disk.
        max_pending: maximum number of unsynced operations for which all subsets are tried; above it, a selection.
        seed: seed of the selection.
    """
    draw = random.Random(seed)
    operations = toy.operations
    for done in range(start, len(operations) + 1):
        durable, pending = _split(operations[:done], start)
        if done > start and done < len(operations) and len(operations[done - 1]) == 1:
            continue  # a sync adds no new state
        newest = done - 1
        for kept in _subsets([i for i in pending if i != newest], max_pending, draw):
            # Without the newest operation these are the previous states.
            chosen = {*durable, *kept, *([newest] if newest in pending else [])}
            yield done, _replayed(toy, [op for i, op in enumerate(operations[:done]) if i in chosen])
        if done == len(operations) or done == start:
            for kept in _subsets(pending, max_pending, draw):
                chosen = {*durable, *kept}
                yield done, _replayed(toy, [op for i, op in enumerate(operations[:done]) if i in chosen])


def _split(operations: list[Operation], start: int) -> tuple[list[int], list[int]]:
    last_sync: dict[int, int] = {op[0]: i for i, op in enumerate(operations) if len(op) == 1}
    changes = [i for i, op in enumerate(operations) if len(op) > 1]
    durable = [i for i in changes if i < start or i < last_sync.get(operations[i][0], -1)]
    return durable, [i for i in changes if i not in set(durable)]


def _subsets(pending: list[int], max_pending: int, draw: random.Random) -> Iterator[tuple[int, ...]]:
    if len(pending) <= max_pending:
        for size in range(len(pending) + 1):
            yield from itertools.combinations(pending, size)
        return
    yield from (tuple(pending[:size]) for size in range(len(pending) + 1))
    yield from (tuple(pending[size:]) for size in range(len(pending) + 1))
    yield from (tuple(i for i in pending if i not in dropped) for dropped in itertools.combinations(pending, 2))
    yield from (tuple(i for i in pending if draw.random() < 0.5) for _ in range(64))


def _replayed(toy: ToyStorage, operations: list[Operation]) -> ToyStorage:
    state = ToyStorage()
    state._next = itertools.count(1 << 32)
    state.files = {inode: bytearray() for inode in toy.files}
    state.folders = {inode: {} for inode in toy.folders}
    for operation in operations:
        if len(operation) == 2:
            _apply_names(state.folders[operation[0]], operation[1])
        elif len(operation) == 3:
            inode, offset, data = operation
            content = state.files[inode]
            content.extend(bytes(max(0, offset - len(content))))  # unwritten bytes before the offset are zeros
            content[offset : offset + len(data)] = data
    return state


def fingerprint(state: ToyStorage, inode: int = 0) -> object:
    """Return the visible contents of a state, to compare states."""
    if inode in state.files:
        return bytes(state.files[inode])
    return tuple((name, fingerprint(state, child)) for name, child in sorted(state.folders[inode].items()))


def _apply_names(folder: dict[str, int], names: dict[str, int | None]) -> None:
    for name, inode in names.items():
        if inode is None:
            folder.pop(name, None)
        else:
            folder[name] = inode
