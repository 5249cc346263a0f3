"""From a folder beside its place into its place, in one step: at every instant the old checkpoint is whole, or the new one.

The order is all: files are synced, then the folder's names, then the folder gets its name, then that name is synced, and
only then anything old goes. A crash leaves at most a folder ``<name>.tmp-<token>`` or ``<name>.old-<token>``.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable
from pathlib import Path

from echelon.base.errors import UsageError
from echelon.base.warnings import warn
from echelon.checkpoint.manifest import MANIFEST
from echelon.checkpoint.storage import Storage, remove_tree
from echelon.checkpoint.tensor_file import FileFacts, write_file

__all__ = ["begin", "clean", "commit", "discard", "new_token", "place_of", "require_replaceable"]

_ASIDE = re.compile(r"(.+)\.(tmp|old)-[0-9a-f]{16}")


def new_token() -> str:
    """Return the name of one save: no two saves have the same."""
    return secrets.token_hex(8)


def begin(storage: Storage, target: Path, token: str) -> Path:
    """Make and return the folder that is written before it becomes ``target``."""
    require_replaceable(storage, target)
    _make_parents(storage, target.parent)
    folder = target.with_name(f"{target.name}.tmp-{token}")
    storage.make_folder(folder)
    return folder


def commit(
    storage: Storage,
    folder: Path,
    target: Path,
    *,
    manifest: bytes,
    is_part: Callable[[str], bool],
    fence: Callable[[], None] | None = None,
) -> FileFacts:
    """Make ``folder``, in which every file is synced, the checkpoint ``target``; when it returns, a power cut changes nothing.

    Args:
        storage: where both are.
        folder: as ``begin`` made it.
        target: where it goes. A folder that is there is replaced; what others have put into it is kept.
        manifest: the file that makes it a checkpoint.
        is_part: tells by its name whether a file in the old folder was a part of what is replaced.
        fence: raises when this run may not write here any more; called right before the names change.
    """
    facts = write_file(storage, folder / MANIFEST, [manifest])
    is_new = storage.kind(target) is None
    if not is_new:
        _keep_foreign(storage, target, folder, is_part)
    storage.sync_folder(folder)
    if fence is not None:
        fence()
    old = folder
    if is_new:
        storage.rename(folder, target)
    elif not storage.exchange(folder, target):
        old = target.with_name(folder.name.replace(".tmp-", ".old-"))
        storage.rename(target, old)
        storage.rename(folder, target)
    storage.sync_folder(target.parent)
    if not is_new:
        try:
            discard(storage, old)
        except OSError as error:
            warn(f"{target} is saved, but {old}, which it has replaced, could not be deleted: {error}")
    return facts


def discard(storage: Storage, folder: Path) -> None:
    """Delete a checkpoint. Its manifest goes first: what an interrupted deletion leaves is no checkpoint."""
    remove_tree(storage, folder, first=MANIFEST)


def place_of(storage: Storage, target: Path) -> Path:
    """Return where the checkpoint ``target`` is: a crash between two renames leaves it under its other name."""
    if storage.kind(target) is not None or storage.kind(target.parent) != "folder":
        return target
    others = [target.parent / name for name in storage.entries(target.parent) if _aside(name) == (target.name, "old")]
    whole = [other for other in others if storage.kind(other / MANIFEST) == "file"]
    return whole[-1] if whole else target


def clean(storage: Storage, parent: Path, *, belongs: Callable[[str], bool]) -> list[str]:
    """Remove what interrupted saves left in ``parent``, and return the names; a checkpoint among it gets its place back.

    Args:
        storage: of the folder.
        parent: the folder; it need not exist.
        belongs: tells by the name of a checkpoint whether it is this run's. Only a run that has the lock may ask.
    """
    if storage.kind(parent) != "folder":
        return []
    cleaned = []
    for entry in storage.entries(parent):
        name, kind = _aside(entry)
        if name is None or not belongs(name) or storage.kind(parent / entry) != "folder":
            continue
        place = place_of(storage, parent / name)
        # Without a manifest (another program's layout) it is whole as long as nothing else has its place.
        if kind == "old" and (place == parent / entry or storage.kind(place) is None):
            storage.rename(parent / entry, parent / name)
        else:
            discard(storage, parent / entry)
        cleaned.append(entry)
    return cleaned


def require_replaceable(storage: Storage, target: Path) -> None:
    """Raise when ``target`` cannot become a checkpoint.

    Raises:
        UsageError: it is a file, or a folder that cannot be renamed.
    """
    kind = storage.kind(target)
    if kind is None:
        return
    if kind != "folder":
        what = "a file" if kind == "file" else "no folder (a symbolic link, perhaps)"
        raise UsageError(f"{target} is {what}, and a folder is to be there", do="give another name")
    here = Path.cwd()
    if target.is_mount() or target == here or target in here.parents:
        place = "a mount point" if target.is_mount() else f"the working directory {here} or above it"
        raise UsageError(f"{target} is {place}, and cannot be replaced", do="give a folder inside it")


def _aside(name: str) -> tuple[str, str] | tuple[None, None]:
    """Return the name of the checkpoint that a folder was to be or had been, and which."""
    match = _ASIDE.fullmatch(name)
    return (match[1], match[2]) if match else (None, None)


def _make_parents(storage: Storage, folder: Path) -> None:
    missing = []
    while storage.kind(folder) is None:
        missing.append(folder)
        folder = folder.parent
    for made in reversed(missing):
        try:
            storage.make_folder(made)
        except FileExistsError:  # another run in another folder beside ours made it meanwhile
            continue
        storage.sync_folder(made.parent)


def _keep_foreign(storage: Storage, source: Path, target: Path, is_part: Callable[[str], bool]) -> None:
    """Give what others have put into ``source`` a second name in ``target``; what is there already stays."""
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
