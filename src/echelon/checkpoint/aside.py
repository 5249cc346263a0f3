"""Write a folder aside and put it in its place when every rank has written its part: a failed save changes nothing."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from echelon.base.errors import UsageError
from echelon.distributed.collectives import broadcast_object_list
from echelon.distributed.control import fail_together
from echelon.world.world import World

__all__ = ["Aside", "written_aside"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Aside:
    """A folder that is being written."""

    folder: Path
    """Beside the place where it will be."""
    is_owner: bool
    """This rank made the folder: rank zero, and one rank of each machine that does not see rank zero's files."""


@contextmanager
def written_aside(target: Path, *, world: World, is_part: Callable[[str], bool]) -> Iterator[Aside]:
    """Give every rank one new folder to write into; after the block it is ``target``, whole, or (an error) it is gone.

    Args:
        target: where the folder shall be. One that is there is replaced; what others have put into it is kept.
        world: of this process.
        is_part: tells by its name whether a file in the old folder was a part of what is replaced.

    Collective: every rank; the block itself must not communicate.

    Raises:
        UsageError: the folder cannot be replaced.
        DesyncError: some ranks failed, in the block or outside it; they are named.
    """
    token: str = broadcast_object_list([secrets.token_hex(8)])[0]  # as long as ``commit.clean`` looks for
    folder = target.with_name(f"{target.name}.tmp-{token}")
    is_owner = False
    try:
        with fail_together(f"making {folder}"):
            if world.is_rank_zero:
                _require_replaceable(target)
                folder.mkdir(parents=True)
                is_owner = True
        with fail_together(f"making {folder}"):
            if world.is_local_rank_zero and not folder.exists():
                _require_replaceable(target)
                folder.mkdir(parents=True)
                is_owner = True
        with fail_together(f"writing {target}"):
            yield Aside(folder=folder, is_owner=is_owner)
        with fail_together(f"renaming {folder}"):
            if is_owner:
                _put_in_place(folder, target, old=target.with_name(f"{target.name}.old-{token}"), is_part=is_part)
    except BaseException:
        if is_owner:
            shutil.rmtree(folder, ignore_errors=True)  # the error that brought us here is the one to show
        raise


def _require_replaceable(target: Path) -> None:
    if not target.exists():
        return
    if not target.is_dir():
        raise UsageError(f"{target} is a file, and a folder is to be there", do="give another name")
    here = Path.cwd()
    if os.path.ismount(target) or target == here or target in here.parents:
        place = "a mount point" if os.path.ismount(target) else f"the working directory {here} or above it"
        raise UsageError(f"{target} is {place}, and cannot be replaced", do="give a folder inside it")


def _put_in_place(folder: Path, target: Path, *, old: Path, is_part: Callable[[str], bool]) -> None:
    """Rename ``folder`` to ``target``. Nothing of an old ``target`` is deleted before the new one is there."""
    if not target.exists():
        folder.rename(target)
        return
    target.rename(old)
    try:
        folder.rename(target)
    except OSError:
        old.rename(target)
        raise
    for entry in old.iterdir():
        if not is_part(entry.name) and not (target / entry.name).exists():
            entry.rename(target / entry.name)
    shutil.rmtree(old)
