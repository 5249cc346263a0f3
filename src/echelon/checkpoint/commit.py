"""Commits a checkpoint folder atomically, in any layout: at any moment, either the old or the new checkpoint is complete.

The order of operations matters: sync the new files, sync the names in the new folder, rename the old folder, rename the new
folder, sync the parent folder, and only then delete the old folder. A crash leaves at most a folder ``<name>.tmp-<token>``,
which is not a checkpoint, or a folder ``<name>.old-<token>``, which is a complete checkpoint.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import overload

from echelon.base.errors import CheckpointError, UsageError
from echelon.base.messages.translation import gettext as _
from echelon.base.warnings import warn
from echelon.checkpoint import object_store, storage
from echelon.checkpoint.manifest import MANIFEST, is_inside, is_part as is_part_of_own, listed_files, read_manifest
from echelon.checkpoint.object_store import Location, ObjectPath
from echelon.checkpoint.tensor_file import FileFacts, sync_file, write_file

_ASIDE = re.compile(r"(.+)\.(tmp|old)-[0-9a-f]{16}")
_NUM_ASIDE_BYTES = len(".tmp-") + 16
_MAX_NAME_BYTES = 255  # limit of all common file systems
_ABANDONED_AFTER = timedelta(minutes=10)
"""How long a temporary folder must have been unmodified to be considered a leftover from a killed save."""
_VISIBLE_WITHIN_S = 5.0


def new_token() -> str:
    """Return a unique token for a save."""
    return secrets.token_hex(8)


@dataclass(slots=True, kw_only=True)
class PendingFolder:
    """The files of a save, which nobody takes for a checkpoint before ``commit``: a folder ``<name>.tmp-<token>``.

    Each rank that writes has one of these objects. The rank that creates the folder owns and commits it. Saves use only the
    methods that ``PendingObjects`` has, too.
    """

    target: Path
    """Path of the checkpoint, with symbolic links resolved (``storage.real_path``)."""
    token: str
    """Unique token that identifies this save."""
    fence: Callable[[], None] | None = None
    """Raises an error if this run may no longer write here. Called before the folder is created and just before it is
    renamed."""
    path: Path = field(init=False)
    """Folder to which the files are written."""
    is_owner: bool = False
    _is_committing: bool = False
    _has_manifest: bool = False

    def __post_init__(self) -> None:
        self.path = self.target.parent / f"{self.target.name}.tmp-{self.token}"

    def make(self, *, creates: bool = True, may_exist: bool = False) -> None:
        """Check that ``target`` can be replaced; if ``creates``, create the folder and become its owner.

        If a crash left an older checkpoint under its ``.old-`` name, that folder is renamed back. Leftovers from killed saves
        to ``target`` are removed, unless they were modified recently.

        Args:
            creates: whether this rank creates the folder.
            may_exist: whether to do nothing if another machine has created the folder and it is visible here.
        """
        if creates and self.fence is not None:
            self.fence()
        require_replaceable(self.target)
        if not creates:
            return
        make_folders(self.target.parent)
        clean(self.target.parent, belongs=lambda name: name == self.target.name, abandoned_for=_ABANDONED_AFTER)
        try:
            storage.make_folder(self.path)
        except FileExistsError:
            if not may_exist:
                raise
        else:
            self.is_owner = True

    def folder_to_add(self) -> Path:
        """Return the folder to which other code writes files of its own, before ``sync_added``."""
        return self.path

    @property
    def is_added_to(self) -> bool:
        """Whether this rank calls ``sync_added``."""
        return self.is_owner

    def is_visible(self) -> bool:
        """Return whether this process can see the folder, allowing for a slow network file system."""
        deadline = time.monotonic() + _VISIBLE_WITHIN_S
        while storage.kind(self.path) is None and time.monotonic() < deadline:
            time.sleep(0.05)
        return storage.kind(self.path) == "folder"

    def write(
        self,
        name: str,
        contents: Iterable[bytes | memoryview],
        *,
        num_bytes: int,
        progress: Callable[[int], None] = lambda _: None,
    ) -> FileFacts:
        """Write a new file. Return once it is durable. ``num_bytes`` is its approximate size."""
        return write_file(self.path / name, contents, progress=progress)

    def sync_added(self, *, is_part: Callable[[str], bool]) -> dict[str, FileFacts]:
        """Sync the files that other code wrote to the folder, and return their sizes and checksums.

        Args:
            is_part: returns whether a file with this name was written by ``write``.
        """
        found: dict[str, FileFacts] = {}
        for name in _files_in(self.path):
            if is_part(name):
                continue
            if not is_inside(name):
                raise CheckpointError(
                    f"a hook wrote the file {name!r} to {self.target}; its name is not valid UTF-8 or could refer to a file "
                    "outside the folder",
                    where="a save_state hook",
                    do="use a UTF-8 file name without backslashes",
                )
            found[name] = sync_file(self.path / name)
        return found

    def sync(self) -> None:
        """Sync all files in the folder, written by any process."""
        for name in _files_in(self.path):
            with storage.opened(self.path / name) as handle:
                storage.sync(handle)

    def free_bytes(self) -> int:
        """Return the free space, in bytes, for the files."""
        return storage.free_bytes(self.target.parent)

    def written_bytes(self, names: Iterable[str]) -> int:
        """Return the size of those of the files that exist."""
        num_bytes = 0
        for name in names:
            with suppress(OSError), storage.opened(self.path / name) as handle:
                num_bytes += storage.size(handle)
        return num_bytes

    def commit(self, manifest: Iterable[bytes] | None, *, is_part: Callable[[str], bool]) -> None:
        """Replace ``target`` with the folder, whose files are already synced. The result survives a power failure.

        Args:
            manifest: contents of the manifest file, which marks the folder as a checkpoint; None for a layout without a
                manifest.
            is_part: returns whether a file with this name belongs to the checkpoint being replaced. Other files are kept, except
                those that its manifest lists.
        """
        target, new = self.target, self.path
        self._has_manifest = manifest is not None
        if manifest is not None:
            self.write(MANIFEST, manifest, num_bytes=0)
        is_new = storage.kind(target) is None
        if not is_new:
            replaced = listed_files(target)
            _keep_foreign(target, new, lambda name: is_part(name) or name in replaced)
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
                retire(old)
            except OSError as error:
                warn(
                    _(
                        "{target} was saved, but the old folder {old} could not be deleted: {error}",
                        target=target,
                        old=old,
                        error=error,
                    )
                )

    @contextmanager
    def discarded_on_error(self) -> Iterator[None]:
        """If the block raises, delete the folder, unless renaming has begun and it may contain the old checkpoint."""
        try:
            yield
        except BaseException:
            self._give_up()
            raise

    def _give_up(self) -> None:
        try:
            if self.is_owner and not self._may_hold_the_old_one() and storage.kind(self.path) == "folder":
                discard(self.path)
        except OSError:
            return  # the original error matters more; the next start of the run removes the leftovers

    def _may_hold_the_old_one(self) -> bool:
        if not (self._is_committing and self._has_manifest):
            return self._is_committing
        try:
            return read_manifest(self.target).token == self.token
        except CheckpointError:
            return False


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Yield a folder that replaces ``target`` if the block ends without an error. For a single process and layouts without a
    manifest.

    Args:
        target: path without symbolic links (``storage.real_path``); an existing folder is replaced.
    """
    folder = PendingFolder(target=target, token=new_token())
    folder.make()
    with folder.discarded_on_error():
        yield folder.path
        folder.sync()
        folder.commit(None, is_part=lambda _: True)


def make_folders(folder: Location) -> None:
    """Create ``folder`` and its missing parents, and sync them. Object stores have no folders."""
    if isinstance(folder, ObjectPath):
        return
    missing = []
    while storage.kind(folder) is None:
        missing.append(folder)
        folder = folder.parent
    for made in reversed(missing):
        try:
            storage.make_folder(made)
        except FileExistsError:  # another run has created it in the meantime
            continue
        storage.sync_folder(made.parent)


def _files_in(folder: Path, inside: str = "") -> Iterator[str]:
    """Yield the files in ``folder`` with their paths in it. The names in a subfolder are synced after its last file."""
    for name in storage.entries(folder / inside):
        path = f"{inside}{name}"
        kind = storage.kind(folder / path)
        if kind == "folder":
            yield from _files_in(folder, f"{path}/")
            storage.sync_folder(folder / path)
        elif kind == "file":
            yield path


def retire(path: Location) -> None:
    """Delete a checkpoint. If ``path`` is a symbolic link, only the link is deleted.

    The folder is renamed first, so that a partially deleted folder is never mistaken for a checkpoint.
    """
    if isinstance(path, ObjectPath):
        object_store.remove(path)
        return
    if storage.kind(path) == "other":
        storage.remove_file(path)
        return
    name, kind = _aside(path.name)
    if kind != "tmp":
        aside = path.with_name(f"{name or path.name}.tmp-{new_token()}")
        storage.rename(path, aside)
        storage.sync_folder(path.parent)
        path = aside
    discard(path)


def discard(folder: Path) -> None:
    """Delete a folder, starting with its manifest."""
    for name in sorted(storage.entries(folder), key=lambda name: name != MANIFEST):
        path = folder / name
        if storage.kind(path) == "folder":
            discard(path)
        else:
            storage.remove_file(path)
    storage.remove_folder(folder)


@overload
def place_of(target: Path) -> Path: ...
@overload
def place_of(target: ObjectPath) -> ObjectPath: ...
def place_of(target: Location) -> Location:
    """Return where the files of the checkpoint ``target`` are: ``<name>.old-<token>`` after a crash between the two renames of a
    commit; ``<name>/<version>`` in an object store.

    Symbolic links are followed. If ``target`` exists, it is returned.
    """
    if isinstance(target, ObjectPath):
        return object_store.place_of(target)
    real = storage.real_path(target)
    if storage.kind(real) is not None or storage.kind(real.parent) != "folder":
        return target
    others = [real.parent / name for name in storage.entries(real.parent) if _aside(name) == (real.name, "old")]
    whole = [other for other in others if _is_whole(other)]
    return whole[-1] if whole else target


def _is_whole(old: Path) -> bool:
    """Return whether an ``.old-`` folder is a complete checkpoint and not a partially deleted one."""
    if storage.kind(old) != "folder":
        return False
    names = storage.entries(old)
    return MANIFEST in names or not any(map(is_part_of_own, names))


def clean(parent: Location, *, belongs: Callable[[str], bool], abandoned_for: timedelta = timedelta(0)) -> list[str]:
    """Remove leftovers from interrupted saves in ``parent`` and return their names. Complete ``.old-`` folders are renamed
    back.

    Only a run that holds the lock may remove leftovers that were modified recently.

    Args:
        parent: folder that contains the checkpoints; it need not exist.
        belongs: returns whether a checkpoint with this name belongs to this run.
        abandoned_for: how long leftovers must have been unmodified.
    """
    if isinstance(parent, ObjectPath):
        return object_store.clean(parent, belongs=belongs, abandoned_for=abandoned_for)
    parent = storage.real_path(parent)
    if storage.kind(parent) != "folder":
        return []
    cleaned = []
    for entry in storage.entries(parent):
        name, kind = _aside(entry)
        folder = parent / entry
        if name is None or not belongs(name) or storage.kind(folder) != "folder":
            continue
        if kind == "old" and place_of(parent / name) == folder:
            storage.rename(folder, parent / name)
            storage.sync_folder(parent)
        elif not abandoned_for or _last_modified(folder) < time.time() - abandoned_for.total_seconds():
            retire(folder)
        else:
            continue
        cleaned.append(entry)
    return cleaned


def _last_modified(folder: Path) -> float:
    return max(storage.modified(path) for path in (folder, *(folder / name for name in storage.entries(folder))))


def require_replaceable(target: Path) -> None:
    """Raise an error if no checkpoint can be saved as ``target``.

    Raises:
        UsageError: ``target`` is a file, is a folder that cannot be renamed, or has a name that is too long.
    """
    num_bytes = len(target.name.encode(errors="surrogateescape"))
    if num_bytes + _NUM_ASIDE_BYTES > _MAX_NAME_BYTES:
        raise UsageError(
            f"the checkpoint name {target.name[:40]}... has {num_bytes} bytes; its temporary name is "
            f"{_NUM_ASIDE_BYTES} bytes "
            f"longer, which exceeds the file system's limit of {_MAX_NAME_BYTES} bytes",
            do=f"use a name of at most {_MAX_NAME_BYTES - _NUM_ASIDE_BYTES} bytes",
        )
    kind = storage.kind(target)
    if kind is None:
        return
    if kind != "folder":
        what = "a file" if kind == "file" else "a symbolic link or special file"
        raise UsageError(f"{target} exists and is {what}, not a directory", do="use another name")
    here = Path.cwd()
    if target.is_mount() or target == here or target in here.parents:
        place = "is a mount point" if target.is_mount() else f"contains the working directory {here}"
        raise UsageError(f"{target} {place} and cannot be replaced", do="use a folder inside it")


def require_folder_or_nothing(path: Location) -> None:
    """Raise an error if ``path`` exists but is not a folder, because a search there would wrongly find no checkpoints.

    Raises:
        UsageError: ``path`` is a file or a broken symbolic link, for example to a disk that is not mounted.
    """
    if isinstance(path, ObjectPath):
        return  # an object and a folder can have the same name
    real = storage.real_path(path)
    kind = storage.kind(real)
    if kind == "folder":
        return
    link = next((one for one in (path, *path.parents) if storage.link_target(one) is not None), None)
    if kind is None and link is not None and storage.kind(storage.real_path(link)) is None:
        if place_of(path) != path:
            return  # a crash left the checkpoint under its other name
        raise UsageError(
            f"{link} is a symbolic link to {storage.link_target(link)}, which does not exist",
            do="mount the disk that the link points to; to start from scratch, create the missing folder or remove "
            "the link",
        )
    if kind is not None:
        what = "a file" if kind == "file" else "a special file"
        raise UsageError(
            f"{path} exists and is {what}, not a directory", do="use a different name, or move the file elsewhere"
        )


def _aside(name: str) -> tuple[str, str] | tuple[None, None]:
    """Split the name of a temporary folder into the checkpoint's name and ``tmp`` or ``old``."""
    match = _ASIDE.fullmatch(name)
    return (match[1], match[2]) if match else (None, None)


def _keep_foreign(source: Path, target: Path, is_part: Callable[[str], bool]) -> None:
    """Hard-link files in ``source`` that were written by other programs into ``target``, without replacing existing files."""
    for name in storage.entries(source):
        if not is_part(name):
            _link_tree(source / name, target / name)


def _link_tree(source: Path, target: Path) -> None:
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
        _link_tree(source / name, target / name)
    storage.sync_folder(target)


def require_apart(source: Path, target: Path) -> None:
    """Check that ``target`` is neither ``source`` nor a folder inside it.

    Raises:
        UsageError: ``target`` is inside ``source``.
    """
    if source.resolve() in (target.resolve(), *target.resolve().parents):
        raise UsageError(
            _("{target} is inside the checkpoint {source}", target=target, source=source),
            do=_("use a folder outside the checkpoint"),
        )
