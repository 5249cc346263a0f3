"""The file operations of checkpoints, behind an interface that tests use to record, interrupt and replay them."""

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
    """The file operations that checkpoints need. They raise the operating system's ``OSError``."""

    @abstractmethod
    def create(self, path: Path) -> int:
        """Create a new file, and return a handle for writing."""

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
        """Create a folder; its parent exists."""

    @abstractmethod
    def sync_folder(self, path: Path) -> None:
        """Flush the names in a folder to disk."""

    @abstractmethod
    def link(self, source: Path, target: Path) -> None:
        """Hard-link the file ``source``, or copy it if links are not supported."""

    @abstractmethod
    def rename(self, source: Path, target: Path) -> None:
        """Rename atomically, replacing a file ``target``."""

    @abstractmethod
    def exchange(self, one: Path, other: Path) -> bool:
        """Exchange two names atomically. Return False and do nothing if the system does not support it."""

    @abstractmethod
    def remove_file(self, path: Path) -> None:
        """Remove a file or a symbolic link, not the link's target."""

    @abstractmethod
    def remove_folder(self, path: Path) -> None:
        """Remove an empty folder."""

    @abstractmethod
    def kind(self, path: Path) -> Kind | None:
        """Return the kind of ``path`` (``other`` for a symbolic link), or None if it does not exist."""

    @abstractmethod
    def real_path(self, path: Path) -> Path:
        """Return ``path`` with all symbolic links resolved. Missing parts stay unchanged."""

    @abstractmethod
    def link_target(self, path: Path) -> Path | None:
        """Return the target of the symbolic link ``path`` as written, or None if ``path`` is not a link."""

    @abstractmethod
    def modified(self, path: Path) -> float:
        """Return the modification time in seconds since the epoch, without following links."""

    @abstractmethod
    def entries(self, folder: Path) -> list[str]:
        """Return the names in a folder, sorted."""

    @abstractmethod
    def open(self, path: Path) -> int:
        """Open a regular file for reading. A symbolic link, a device or a pipe raises ``OSError``."""

    @abstractmethod
    def size(self, handle: int) -> int:
        """Return the size in bytes of an open file."""

    @abstractmethod
    def read(self, handle: int, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from ``offset``. A file that ends earlier raises ``OSError``."""

    @abstractmethod
    def free_bytes(self, folder: Path) -> int:
        """Return the free space of the file system of ``folder``."""


class LocalStorage(Storage):
    """The file systems of this machine."""

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
        """Some network file systems do not support this and do not need it, because the server orders names."""
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
        """Source: renameat2(2), RENAME_EXCHANGE; Linux since 3.15, not on every file system."""
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
    """Remove ``folder`` and its contents, the file ``first`` before everything else."""
    names = storage.entries(folder)
    for name in sorted(names, key=lambda name: name != first):
        path = folder / name
        if storage.kind(path) == "folder":
            remove_tree(storage, path, first=first)
        else:
            storage.remove_file(path)
    storage.remove_folder(folder)
