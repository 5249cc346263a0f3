"""Every file operation of a checkpoint, so that a test can record, interrupt and replay them."""

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
    """What a checkpoint needs of a file system. Errors are OSErrors, as the system gives them."""

    @abstractmethod
    def create(self, path: Path) -> int:
        """Make a file that is not there yet, and return a handle to write to."""

    @abstractmethod
    def write(self, handle: int, data: bytes | memoryview) -> None:
        """Append all of ``data``."""

    @abstractmethod
    def sync(self, handle: int) -> None:
        """Return when what was written survives a power cut."""

    @abstractmethod
    def close(self, handle: int) -> None:
        """Give the handle back."""

    @abstractmethod
    def make_folder(self, path: Path) -> None:
        """Make a folder that is not there yet, in one that is."""

    @abstractmethod
    def sync_folder(self, path: Path) -> None:
        """Return when the names in a folder survive a power cut."""

    @abstractmethod
    def link(self, source: Path, target: Path) -> None:
        """Give the file ``source`` a second name; where that cannot be, copy it."""

    @abstractmethod
    def rename(self, source: Path, target: Path) -> None:
        """Rename in one step; a file in the place of ``target`` is replaced."""

    @abstractmethod
    def exchange(self, one: Path, other: Path) -> bool:
        """Exchange two names in one step; False, and nothing done, where the system cannot."""

    @abstractmethod
    def remove_file(self, path: Path) -> None:
        """Remove a name; a symbolic link itself, not what it points to."""

    @abstractmethod
    def remove_folder(self, path: Path) -> None:
        """Remove an empty folder."""

    @abstractmethod
    def kind(self, path: Path) -> Kind | None:
        """Return what is there; a symbolic link is ``other``, and nothing is None."""

    @abstractmethod
    def real_path(self, path: Path) -> Path:
        """Return ``path`` with every symbolic link on the way followed, the last one too; what is not there stays as it is."""

    @abstractmethod
    def link_target(self, path: Path) -> Path | None:
        """Return where the symbolic link ``path`` leads, as it was written; None: it is none."""

    @abstractmethod
    def modified(self, path: Path) -> float:
        """Return when what is there was changed last, in seconds since the epoch; of a link, when it was made."""

    @abstractmethod
    def entries(self, folder: Path) -> list[str]:
        """Return the names in a folder, sorted."""

    @abstractmethod
    def open(self, path: Path) -> int:
        """Open a plain file for reading; a symbolic link, a device or a pipe is an OSError."""

    @abstractmethod
    def size(self, handle: int) -> int:
        """Return the size in bytes of an open file."""

    @abstractmethod
    def read(self, handle: int, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from ``offset`` on; a file that ends before is an OSError."""

    @abstractmethod
    def free_bytes(self, folder: Path) -> int:
        """Return how much can still be written where ``folder`` is."""


class LocalStorage(Storage):
    """The file systems of this machine."""

    def create(self, path: Path) -> int:
        """See ``Storage``."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)

    def write(self, handle: int, data: bytes | memoryview) -> None:
        """See ``Storage``."""
        rest = memoryview(data).cast("B")
        while rest:  # the kernel takes 2 GiB at most at once
            rest = rest[os.write(handle, rest) :]

    def sync(self, handle: int) -> None:
        """See ``Storage``."""
        os.fsync(handle)

    def close(self, handle: int) -> None:
        """See ``Storage``."""
        os.close(handle)

    def make_folder(self, path: Path) -> None:
        """See ``Storage``."""
        path.mkdir()

    def sync_folder(self, path: Path) -> None:
        """See ``Storage``; some network file systems cannot, and need not: there the server orders names."""
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
        finally:
            os.close(handle)

    def link(self, source: Path, target: Path) -> None:
        """See ``Storage``."""
        try:
            os.link(source, target, follow_symlinks=False)
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EXDEV):
                raise
            shutil.copy2(source, target, follow_symlinks=False)

    def rename(self, source: Path, target: Path) -> None:
        """See ``Storage``."""
        source.rename(target)

    def exchange(self, one: Path, other: Path) -> bool:
        """See ``Storage``. Source: renameat2(2), RENAME_EXCHANGE; Linux since 3.15, not on every file system."""
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
        """See ``Storage``."""
        path.unlink()

    def remove_folder(self, path: Path) -> None:
        """See ``Storage``."""
        path.rmdir()

    def kind(self, path: Path) -> Kind | None:
        """See ``Storage``."""
        try:
            mode = path.lstat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            if error.errno in (errno.ENAMETOOLONG, errno.ELOOP):  # nothing can be there
                return None
            raise
        return "folder" if stat.S_ISDIR(mode) else "file" if stat.S_ISREG(mode) else "other"

    def real_path(self, path: Path) -> Path:
        """See ``Storage``."""
        return Path(os.path.realpath(path))

    def link_target(self, path: Path) -> Path | None:
        """See ``Storage``."""
        try:
            return path.readlink()
        except OSError:  # EINVAL: it is no link; or nothing is there
            return None

    def modified(self, path: Path) -> float:
        """See ``Storage``."""
        return path.lstat().st_mtime

    def entries(self, folder: Path) -> list[str]:
        """See ``Storage``."""
        return sorted(os.listdir(folder))

    def open(self, path: Path) -> int:
        """See ``Storage``."""
        # Without O_NONBLOCK, opening a pipe would wait for its other end.
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            os.close(handle)
            raise OSError(errno.EINVAL, "is no plain file", str(path))
        return handle

    def size(self, handle: int) -> int:
        """See ``Storage``."""
        return os.fstat(handle).st_size

    def read(self, handle: int, offset: int, buffer: memoryview) -> None:
        """See ``Storage``."""
        rest = buffer.cast("B")
        while rest:
            count = os.preadv(handle, [rest], offset)
            if count == 0:
                raise OSError(errno.ENODATA, f"the file ends at byte {offset}")
            rest, offset = rest[count:], offset + count

    def free_bytes(self, folder: Path) -> int:
        """See ``Storage``."""
        return shutil.disk_usage(folder).free


def remove_tree(storage: Storage, folder: Path, *, first: str) -> None:
    """Remove ``folder`` and what is in it, the file ``first`` before everything else."""
    names = storage.entries(folder)
    for name in sorted(names, key=lambda name: name != first):
        path = folder / name
        if storage.kind(path) == "folder":
            remove_tree(storage, path, first=first)
        else:
            storage.remove_file(path)
    storage.remove_folder(folder)
