"""File operations for checkpoints, behind an interface that lets tests record, interrupt and replay them."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import stat
import sys
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Literal

__all__ = ["LocalStorage", "Storage", "remove_tree"]

Kind = Literal["file", "folder", "other"]


class Storage(ABC):
    """The file operations that checkpoints need. Errors are raised as the operating system's ``OSError``."""

    @abstractmethod
    def create(self, path: Path) -> int:
        """Create a new file and return a handle for writing to it."""

    @abstractmethod
    def write(self, handle: int, data: bytes | memoryview) -> None:
        """Append all of ``data``."""

    @abstractmethod
    def sync(self, handle: int) -> None:
        """Flush the written data to disk."""

    @abstractmethod
    def close(self, handle: int) -> None:
        """Close the handle."""

    @abstractmethod
    def make_folder(self, path: Path) -> None:
        """Create a folder whose parent already exists."""

    @abstractmethod
    def sync_folder(self, path: Path) -> None:
        """Flush a folder's directory entries to disk."""

    @abstractmethod
    def link(self, source: Path, target: Path) -> None:
        """Hard-link the file ``source``, or copy it if links are not supported."""

    @abstractmethod
    def rename(self, source: Path, target: Path) -> None:
        """Rename atomically, replacing ``target`` if it is a file."""

    @abstractmethod
    def exchange(self, one: Path, other: Path) -> bool:
        """Exchange two names atomically. If the system does not support this, do nothing and return False."""

    @abstractmethod
    def remove_file(self, path: Path) -> None:
        """Remove a file, or a symbolic link but not its target."""

    @abstractmethod
    def remove_folder(self, path: Path) -> None:
        """Remove an empty folder."""

    @abstractmethod
    def kind(self, path: Path) -> Kind | None:
        """Return what ``path`` is (``other`` for a symbolic link), or None if it does not exist."""

    @abstractmethod
    def real_path(self, path: Path) -> Path:
        """Return ``path`` with all symbolic links resolved. Components that do not exist are left unchanged."""

    @abstractmethod
    def link_target(self, path: Path) -> Path | None:
        """Return the target of the symbolic link ``path`` as written, or None if ``path`` is not a link."""

    @abstractmethod
    def modified(self, path: Path) -> float:
        """Return the modification time in seconds since the epoch, without following links."""

    @abstractmethod
    def entries(self, folder: Path) -> list[str]:
        """Return the sorted names of a folder's entries."""

    @abstractmethod
    def open(self, path: Path) -> int:
        """Open a regular file for reading. Raise ``OSError`` for symbolic links, devices and pipes."""

    @abstractmethod
    def size(self, handle: int) -> int:
        """Return the size in bytes of an open file."""

    @abstractmethod
    def read(self, handle: int, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with data starting at ``offset``. Raise ``OSError`` if the file ends too early."""

    @abstractmethod
    def free_bytes(self, folder: Path) -> int:
        """Return the free space, in bytes, on the file system that contains ``folder``."""


class LocalStorage(Storage):
    """The file systems mounted on this machine."""

    def create(self, path: Path) -> int:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)

    def write(self, handle: int, data: bytes | memoryview) -> None:
        rest = memoryview(data).cast("B")
        while rest:  # the kernel writes at most 2 GiB per call
            rest = rest[os.write(handle, rest) :]

    def sync(self, handle: int) -> None:
        os.fsync(handle)

    def close(self, handle: int) -> None:
        os.close(handle)

    def make_folder(self, path: Path) -> None:
        path.mkdir()

    def sync_folder(self, path: Path) -> None:
        """Some network file systems neither support nor need this, because the server keeps directory operations in order."""
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
        finally:
            os.close(handle)

    def link(self, source: Path, target: Path) -> None:
        try:
            os.link(source, target, follow_symlinks=False)
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EXDEV):
                raise
            shutil.copy2(source, target, follow_symlinks=False)

    def rename(self, source: Path, target: Path) -> None:
        source.rename(target)

    def exchange(self, one: Path, other: Path) -> bool:
        """Source: renameat2(2) with RENAME_EXCHANGE, available since Linux 3.15 on some file systems."""
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

    def remove_file(self, path: Path) -> None:
        path.unlink()

    def remove_folder(self, path: Path) -> None:
        path.rmdir()

    def kind(self, path: Path) -> Kind | None:
        try:
            mode = path.lstat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            if error.errno in (errno.ENAMETOOLONG, errno.ELOOP):  # such a path cannot exist
                return None
            raise
        return "folder" if stat.S_ISDIR(mode) else "file" if stat.S_ISREG(mode) else "other"

    def real_path(self, path: Path) -> Path:
        return Path(os.path.realpath(path))

    def link_target(self, path: Path) -> Path | None:
        try:
            return path.readlink()
        except OSError:  # not a link (EINVAL), or it does not exist
            return None

    def modified(self, path: Path) -> float:
        return path.lstat().st_mtime

    def entries(self, folder: Path) -> list[str]:
        return sorted(os.listdir(folder))

    def open(self, path: Path) -> int:
        # Without O_NONBLOCK, opening a pipe would block until a writer opens it.
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            os.close(handle)
            raise OSError(errno.EINVAL, "is not a regular file", str(path))
        return handle

    def size(self, handle: int) -> int:
        return os.fstat(handle).st_size

    def read(self, handle: int, offset: int, buffer: memoryview) -> None:
        rest = buffer.cast("B")
        while rest:
            count = os.preadv(handle, [rest], offset)
            if count == 0:
                raise OSError(errno.ENODATA, f"the file ends at byte {offset}")
            rest, offset = rest[count:], offset + count

    def free_bytes(self, folder: Path) -> int:
        return shutil.disk_usage(folder).free


def remove_tree(storage: Storage, folder: Path, *, first: str) -> None:
    """Remove ``folder`` and its contents, starting with the file ``first``."""
    names = storage.entries(folder)
    for name in sorted(names, key=lambda name: name != first):
        path = folder / name
        if storage.kind(path) == "folder":
            remove_tree(storage, path, first=first)
        else:
            storage.remove_file(path)
    storage.remove_folder(folder)
