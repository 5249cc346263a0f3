"""The file operations of checkpoints. Errors are the operating system's ``OSError``.

Callers use them as ``storage.rename(...)``, so that tests can record, interrupt and replay the operations of a save. The operations
that read take places in object stores, too; those that write are for local folders (a store's are in ``object_store``).
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, overload

from echelon.checkpoint import object_store
from echelon.checkpoint.object_store import Location as Location, ObjectFile, ObjectPath, location as location

Kind = Literal["file", "folder", "other"]
Handle = int | ObjectFile
"""An open file."""


# ---- writing ---------------------------------------------------------------------------------------------------------


def create(path: Path) -> int:
    """Create a new file and return a handle for writing to it."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)


def write(handle: int, data: bytes | memoryview) -> None:
    """Append all of ``data``."""
    rest = memoryview(data).cast("B")
    while rest:  # the kernel writes at most 2 GiB per call
        rest = rest[os.write(handle, rest) :]


def sync(handle: Handle) -> None:
    """Flush the written data to disk. An object is durable as soon as it exists."""
    if isinstance(handle, int):
        os.fsync(handle)


def close(handle: Handle) -> None:
    """Close the handle."""
    if isinstance(handle, int):
        os.close(handle)


def make_folder(path: Path) -> None:
    """Create a folder whose parent already exists."""
    path.mkdir()


def sync_folder(path: Path) -> None:
    """Flush a folder's directory entries to disk.

    Some network file systems neither support nor need this, because the server keeps directory operations in order.
    """
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)


def link(source: Path, target: Path) -> None:
    """Hard-link the file ``source``, or copy it if links are not supported."""
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EXDEV):
            raise
        shutil.copy2(source, target, follow_symlinks=False)


def rename(source: Path, target: Path) -> None:
    """Rename atomically, replacing ``target`` if it is a file."""
    source.rename(target)


def exchange(one: Path, other: Path) -> bool:
    """Exchange two names atomically. If the system does not support this, do nothing and return False.

    Source: renameat2(2) with RENAME_EXCHANGE, available since Linux 3.15 on some file systems.
    """
    function = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None) if sys.platform == "linux" else None
    if function is None:
        return False
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    if function(here, os.fsencode(one), here, os.fsencode(other), ctypes.c_uint(exchange)) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(one), None, str(other))


def remove_file(path: Path) -> None:
    """Remove a file, or a symbolic link but not its target."""
    path.unlink()


def remove_folder(path: Path) -> None:
    """Remove an empty folder."""
    path.rmdir()


# ---- reading ---------------------------------------------------------------------------------------------------------


def kind(path: Location) -> Kind | None:
    """Return what ``path`` is (``other`` for a symbolic link), or None if it does not exist."""
    if isinstance(path, ObjectPath):
        return "file" if path.key and object_store.exists(path) else "folder" if object_store.is_folder(path) else None
    try:
        mode = path.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        if error.errno in (errno.ENAMETOOLONG, errno.ELOOP):  # such a path cannot exist
            return None
        raise
    return "folder" if stat.S_ISDIR(mode) else "file" if stat.S_ISREG(mode) else "other"


@overload
def real_path(path: Path) -> Path: ...
@overload
def real_path(path: ObjectPath) -> ObjectPath: ...
def real_path(path: Location) -> Location:
    """Return ``path`` with all symbolic links resolved. Components that do not exist are left unchanged."""
    return path if isinstance(path, ObjectPath) else Path(os.path.realpath(path))


def link_target(path: Location) -> Path | None:
    """Return the target of the symbolic link ``path`` as written, or None if ``path`` is not a link."""
    if isinstance(path, ObjectPath):
        return None
    try:
        return path.readlink()
    except OSError:  # not a link (EINVAL), or it does not exist
        return None


def modified(path: Path) -> float:
    """Return the modification time in seconds since the epoch, without following links."""
    return path.lstat().st_mtime


def entries(folder: Location) -> list[str]:
    """Return the sorted names of a folder's entries."""
    return object_store.entries(folder) if isinstance(folder, ObjectPath) else sorted(os.listdir(folder))


def open_file(path: Location) -> Handle:
    """Open a regular file for reading. Raise ``OSError`` for symbolic links, devices and pipes."""
    if isinstance(path, ObjectPath):
        return ObjectFile(path)
    # Without O_NONBLOCK, opening a pipe would block until a writer opens it.
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "is not a regular file", str(path))
    return handle


def size(handle: Handle) -> int:
    """Return the size in bytes of an open file."""
    return os.fstat(handle).st_size if isinstance(handle, int) else handle.size


def read(handle: Handle, offset: int, buffer: memoryview) -> None:
    """Fill ``buffer`` with data starting at ``offset``. Raise ``OSError`` if the file ends too early."""
    if not isinstance(handle, int):
        handle.read(offset, buffer)
        return
    rest = buffer.cast("B")
    while rest:
        count = os.preadv(handle, [rest], offset)
        if count == 0:
            raise OSError(errno.ENODATA, f"the file ends at byte {offset}")
        rest, offset = rest[count:], offset + count


def free_bytes(folder: Path) -> int:
    """Return the free space, in bytes, on the file system that contains ``folder``."""
    return shutil.disk_usage(folder).free


# ---- made of these ---------------------------------------------------------------------------------------------------


@contextmanager
def opened(path: Location) -> Iterator[Handle]:
    """Open a regular file for reading inside the block."""
    handle = open_file(path)
    try:
        yield handle
    finally:
        close(handle)


def read_file(path: Location, *, max_bytes: int) -> bytes:
    """Return the contents of a regular file. Raise ``OSError`` if it has more than ``max_bytes``."""
    with opened(path) as handle:
        num_bytes = size(handle)
        if num_bytes > max_bytes:
            raise OSError(f"it has {num_bytes} bytes")
        content = bytearray(num_bytes)
        read(handle, 0, memoryview(content))
        return bytes(content)
