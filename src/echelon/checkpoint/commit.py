"""The commit of a checkpoint of any layout: at every instant the old checkpoint is whole, or the new one.

The order matters: files are synced, then the names in the folder, then the folder is renamed, then its new name is synced, and
only then anything old is deleted, which loses its name first. A crash leaves at most a folder ``<name>.tmp-<token>``, which is
no checkpoint, or ``<name>.old-<token>``, which is a whole one.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from echelon.base.errors import CheckpointError, UsageError
from echelon.base.warnings import warn
from echelon.checkpoint.manifest import MANIFEST, is_part as is_part_of_own, read_manifest
from echelon.checkpoint.storage import Storage, remove_tree
from echelon.checkpoint.tensor_file import write_file

__all__ = [
    "PendingFolder",
    "clean",
    "discard",
    "make_folders",
    "new_folder",
    "new_token",
    "place_of",
    "require_folder_or_nothing",
    "require_replaceable",
    "retire",
    "sync_tree",
]

_ASIDE = re.compile(r"(.+)\.(tmp|old)-[0-9a-f]{16}")
_NUM_ASIDE_BYTES = len(".tmp-") + 16
_MAX_NAME_BYTES = 255  # of every file system in use
_ABANDONED_AFTER = timedelta(minutes=10)
"""A folder in which nothing was written for this long belongs to a save that was killed."""
_VISIBLE_WITHIN_S = 5.0


def new_token() -> str:
    """Return a unique name for a save."""
    return secrets.token_hex(8)


@dataclass(slots=True, kw_only=True)
class PendingFolder:
    """A folder that is written under ``<name>.tmp-<token>`` and then takes the place of ``target``, for every layout.

    All ranks that write into it have one of these; the rank that made the folder owns it, and commits it.
    """

    storage: Storage
    target: Path
    """Without symbolic links (``Storage.real_path``)."""
    token: str
    """Of this save."""
    fence: Callable[[], None] | None = None
    """Raises when this run may not write here any more; called before the folder is made, and right before the names change."""
    is_owner: bool = False
    _is_committing: bool = False
    _has_manifest: bool = False

    @property
    def path(self) -> Path:
        """Where the files are written."""
        return self.target.parent / f"{self.target.name}.tmp-{self.token}"

    def make(self, *, may_exist: bool = False) -> None:
        """Make the folder, and own it.

        An older checkpoint that a crash left under its other name gets its place back; what killed saves to ``target`` left
        behind is removed.

        Args:
            may_exist: do nothing where the folder of another machine is visible here.
        """
        if self.fence is not None:
            self.fence()
        storage, target = self.storage, self.target
        require_replaceable(storage, target)
        make_folders(storage, target.parent)
        place = place_of(storage, target)
        if place != target:
            storage.rename(place, target)
            storage.sync_folder(target.parent)
        _remove_abandoned(storage, target)
        try:
            storage.make_folder(self.path)
        except FileExistsError:
            if not may_exist:
                raise
        else:
            self.is_owner = True

    def is_visible(self) -> bool:
        """Whether this process sees the folder, which a network file system may take a while to show."""
        deadline = time.monotonic() + _VISIBLE_WITHIN_S
        while self.storage.kind(self.path) is None and time.monotonic() < deadline:
            time.sleep(0.05)
        return self.storage.kind(self.path) == "folder"

    def commit(self, *, manifest: bytes | None, is_part: Callable[[str], bool]) -> None:
        """Make the folder, in which every file is synced, the checkpoint; when it returns, a power cut changes nothing.

        Does nothing on ranks that do not own it.

        Args:
            manifest: the file that makes it a checkpoint; None: of a layout without one, where its name does.
            is_part: whether a file of this name in the old folder belongs to the checkpoint that is replaced; others are
                kept.
        """
        if not self.is_owner:
            return
        storage, target, new = self.storage, self.target, self.path
        self._has_manifest = manifest is not None
        if manifest is not None:
            write_file(storage, new / MANIFEST, [manifest])
        is_new = storage.kind(target) is None
        if not is_new:
            _keep_foreign(storage, target, new, is_part)
        storage.sync_folder(new)
        if self.fence is not None:
            self.fence()
        self._is_committing = True
        old = new
        if is_new:
            storage.rename(new, target)
        elif not storage.exchange(new, target):
            old = target.with_name(new.name.replace(".tmp-", ".old-"))
            storage.rename(target, old)
            storage.rename(new, target)
        storage.sync_folder(target.parent)
        if not is_new:
            try:
                retire(storage, old)
            except OSError as error:
                warn(f"{target} is saved, but {old}, which it has replaced, could not be deleted: {error}")

    def give_up(self) -> None:
        """Remove what was written, unless the names may have changed: then the folder may hold the old checkpoint."""
        try:
            if self.is_owner and not self._may_hold_the_old_one() and self.storage.kind(self.path) == "folder":
                discard(self.storage, self.path)
        except OSError:
            return  # the error that led here is the one to show; the next start of the run removes the rest

    def _may_hold_the_old_one(self) -> bool:
        if not (self._is_committing and self._has_manifest):
            return self._is_committing
        try:
            return read_manifest(self.storage, self.target).token == self.token
        except CheckpointError:
            return False


@contextmanager
def new_folder(storage: Storage, target: Path) -> Iterator[Path]:
    """Yield a folder that becomes ``target`` when the block ends without an error; one process, no manifest.

    Args:
        storage: of the folder.
        target: without symbolic links (``Storage.real_path``); what is there is replaced.
    """
    folder = PendingFolder(storage=storage, target=target, token=new_token())
    folder.make()
    try:
        yield folder.path
        sync_tree(storage, folder.path)
        folder.commit(manifest=None, is_part=lambda _: True)
    except BaseException:
        folder.give_up()
        raise


def make_folders(storage: Storage, folder: Path) -> None:
    """Create ``folder`` and its missing parents, and sync them."""
    missing = []
    while storage.kind(folder) is None:
        missing.append(folder)
        folder = folder.parent
    for made in reversed(missing):
        try:
            storage.make_folder(made)
        except FileExistsError:  # another run created it meanwhile
            continue
        storage.sync_folder(made.parent)


def sync_tree(storage: Storage, folder: Path) -> None:
    """Sync the files in ``folder``, whichever process wrote them, and the names in its subfolders."""
    for name in storage.entries(folder):
        path = folder / name
        kind = storage.kind(path)
        if kind == "folder":
            sync_tree(storage, path)
            storage.sync_folder(path)
        elif kind == "file":
            handle = storage.open(path)
            try:
                storage.sync(handle)
            finally:
                storage.close(handle)


def retire(storage: Storage, path: Path) -> None:
    """Delete a checkpoint; of a symbolic link to one, only the link.

    It is renamed first, so that a partly deleted folder is never taken for a checkpoint.
    """
    if storage.kind(path) == "other":
        storage.remove_file(path)
        return
    name, kind = _aside(path.name)
    if kind != "tmp":
        aside = path.with_name(f"{name or path.name}.tmp-{new_token()}")
        storage.rename(path, aside)
        storage.sync_folder(path.parent)
        path = aside
    discard(storage, path)


def discard(storage: Storage, folder: Path) -> None:
    """Delete a folder that is no checkpoint any more, or not yet. Its manifest is deleted first."""
    remove_tree(storage, folder, first=MANIFEST)


def place_of(storage: Storage, target: Path) -> Path:
    """Return where the checkpoint ``target`` is: a crash between two renames leaves it as ``<name>.old-<token>``.

    Symbolic links are followed; if ``target`` exists, it is returned.
    """
    real = storage.real_path(target)
    if storage.kind(real) is not None or storage.kind(real.parent) != "folder":
        return target
    others = [real.parent / name for name in storage.entries(real.parent) if _aside(name) == (real.name, "old")]
    whole = [other for other in others if _is_whole(storage, other)]
    return whole[-1] if whole else target


def _is_whole(storage: Storage, old: Path) -> bool:
    """Whether a folder that was renamed away is a complete checkpoint, not one of echelon's format that is partly deleted."""
    if storage.kind(old) != "folder":
        return False
    names = storage.entries(old)
    return MANIFEST in names or not any(map(is_part_of_own, names))


def clean(storage: Storage, parent: Path, *, belongs: Callable[[str], bool]) -> list[str]:
    """Remove what interrupted saves left in ``parent``, and return the names; a complete checkpoint gets its name back.

    Args:
        storage: of the folder.
        parent: may be missing.
        belongs: whether a checkpoint of this name is this run's. Only a run that holds the lock may call this.
    """
    parent = storage.real_path(parent)
    if storage.kind(parent) != "folder":
        return []
    cleaned = []
    for entry in storage.entries(parent):
        name, kind = _aside(entry)
        if name is None or not belongs(name) or storage.kind(parent / entry) != "folder":
            continue
        if kind == "old" and place_of(storage, parent / name) == parent / entry:
            storage.rename(parent / entry, parent / name)
            storage.sync_folder(parent)
        else:
            retire(storage, parent / entry)
        cleaned.append(entry)
    return cleaned


def require_replaceable(storage: Storage, target: Path) -> None:
    """Raise when ``target`` cannot become a checkpoint.

    Raises:
        UsageError: it is a file, or a folder that cannot be renamed, or its name is too long.
    """
    num_bytes = len(target.name.encode(errors="surrogateescape"))
    if num_bytes + _NUM_ASIDE_BYTES > _MAX_NAME_BYTES:
        raise UsageError(
            f"the checkpoint {target.name[:40]}... has a name of {num_bytes} bytes; while it is written, {_NUM_ASIDE_BYTES} more "
            f"are appended, which exceeds the {_MAX_NAME_BYTES} of a file system",
            do=f"give a name of at most {_MAX_NAME_BYTES - _NUM_ASIDE_BYTES} bytes",
        )
    kind = storage.kind(target)
    if kind is None:
        return
    if kind != "folder":
        what = "a file" if kind == "file" else "a symbolic link or special file"
        raise UsageError(f"{target} exists and is {what}, not a directory", do="give another name")
    here = Path.cwd()
    if target.is_mount() or target == here or target in here.parents:
        place = "a mount point" if target.is_mount() else f"the working directory {here} or above it"
        raise UsageError(f"{target} is {place}, and cannot be replaced", do="give a folder inside it")


def require_folder_or_nothing(storage: Storage, path: Path) -> None:
    """Raise when ``path``, where checkpoints are searched, exists and is not a folder: that is not a new run.

    Raises:
        UsageError: it is a file, or a broken symbolic link (perhaps to a disk that is not mounted).
    """
    real = storage.real_path(path)
    kind = storage.kind(real)
    if kind == "folder":
        return
    link = next((one for one in (path, *path.parents) if storage.link_target(one) is not None), None)
    if kind is None and link is not None and storage.kind(storage.real_path(link)) is None:
        if place_of(storage, path) != path:
            return  # a checkpoint that a crash left under its other name
        raise UsageError(
            f"{link} is a symbolic link to {storage.link_target(link)}, which does not exist",
            do="mount the disk that it points to; to start from scratch, create that folder or remove the link",
        )
    if kind is not None:
        what = "a file" if kind == "file" else "a special file"
        raise UsageError(f"{path} exists and is {what}, not a directory", do="give another name, or move it away")


def _aside(name: str) -> tuple[str, str] | tuple[None, None]:
    """Return the checkpoint's name and ``tmp`` or ``old`` from the name of a temporary folder."""
    match = _ASIDE.fullmatch(name)
    return (match[1], match[2]) if match else (None, None)


def _remove_abandoned(storage: Storage, target: Path) -> None:
    """Remove what killed saves to ``target`` left beside it, unless it was modified recently."""
    before = time.time() - _ABANDONED_AFTER.total_seconds()
    for name in storage.entries(target.parent):
        folder = target.parent / name
        if _aside(name)[0] != target.name or storage.kind(folder) != "folder":
            continue
        written = [storage.modified(path) for path in (folder, *(folder / entry for entry in storage.entries(folder)))]
        if max(written) < before:
            retire(storage, folder)


def _keep_foreign(storage: Storage, source: Path, target: Path, is_part: Callable[[str], bool]) -> None:
    """Hard-link what other programs put into ``source`` into ``target``; existing files stay."""
    for name in storage.entries(source):
        if not is_part(name):
            _link_tree(storage, source / name, target / name)


def _link_tree(storage: Storage, source: Path, target: Path) -> None:
    is_folder = storage.kind(source) == "folder"
    existing = storage.kind(target)
    if not is_folder:
        if existing is None:
            storage.link(source, target)
        return
    if existing is None:
        storage.make_folder(target)
    elif existing != "folder":
        return
    for name in storage.entries(source):
        _link_tree(storage, source / name, target / name)
    storage.sync_folder(target)
