"""Records the disk operations of real saves in a ToyStorage, and writes its crash states to folders."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from echelon.checkpoint import storage
from tests.toy_storage import CHANGES, ToyStorage, crash_states, fingerprint


@contextmanager
def recorded(root: Path, *, exchanges: bool = True) -> Iterator[ToyStorage]:
    """Record the operations of the block below ``root`` through checkpoint/storage.py, and files written there in other ways when they are found.

    Args:
        root: an empty folder.
        exchanges: whether the file system can exchange two names.
    """
    toy = ToyStorage()
    handles: dict[int, int] = {}

    def at(path: Path) -> Path:
        return Path("/toy") / path.relative_to(root)

    def see() -> None:
        """Record files that were written in other ways since the last call, as unsynced writes."""
        for folder, folders, files in os.walk(root):
            for name in folders:
                if toy.kind(at(Path(folder, name))) is None:
                    toy.make_folder(at(Path(folder, name)))
            for name in files:
                path = Path(folder, name)
                if toy.kind(at(path)) is None and not name.startswith(".lock"):
                    content = path.read_bytes()
                    handle = toy.create(at(path))
                    toy.write(handle, content[: len(content) // 2])
                    toy.write(handle, content[len(content) // 2 :])
                    toy.close(handle)

    def both(name: str) -> Callable[..., Any]:
        real, model = getattr(storage, name), getattr(toy, name)

        def operation(*given: Any) -> Any:
            mine = [
                given[0] if type(given[0]) is int else at(given[0]),
                *(at(p) if isinstance(p, Path) else p for p in given[1:]),
            ]
            if name == "exchange" and not exchanges:
                return False
            if name not in ("create", "write", "sync", "close"):
                see()
            if name in ("write", "sync", "close"):
                mine[0] = handles[given[0]]
            result = (
                None if name in ("sync", "sync_folder") else real(*given)
            )  # only the toy storage has to survive a crash
            ours = model(*mine)
            if name in ("create", "open_file"):
                handles[result] = ours
            return result

        return operation

    with pytest.MonkeyPatch.context() as patch:
        for name in (*CHANGES, "open_file"):
            patch.setattr(storage, name, both(name))
        yield toy


def crash_folders(
    toy: ToyStorage, scratch: Path, *, start: int, max_pending: int, whole: bool
) -> Iterator[tuple[int, Path]]:
    """Yield (number of completed operations, folder) for each distinct crash state of the record.

    Args:
        toy: the record.
        scratch: parent of the created folders.
        start: number of first operations that are always completed.
        max_pending: as in ``crash_states``.
        whole: also yield states that differ only in ``.tmp-`` folders.
    """
    known: dict[object, set[bool]] = {}
    for done, state in crash_states(toy, start=start, max_pending=max_pending):
        mark = fingerprint(state)
        if not whole:
            mark = _collapsed(mark)
        is_last = done == len(toy.operations)
        if is_last in known.setdefault(mark, set()):
            continue
        known[mark].add(is_last)
        folder = scratch / f"state{len(list(scratch.iterdir()))}"
        _write(state, 0, folder)
        yield done, folder


def _collapsed(mark: Any) -> Any:
    if not isinstance(mark, tuple):
        return mark
    return tuple(
        (name.split(".tmp-")[0], bool(inner) if ".tmp-" in name else _collapsed(inner)) for name, inner in mark
    )


def _write(state: ToyStorage, inode: int, path: Path) -> None:
    if inode in state.files:
        path.write_bytes(bytes(state.files[inode]))
        return
    path.mkdir()
    for name, child in state.folders[inode].items():
        _write(state, child, path / name)
