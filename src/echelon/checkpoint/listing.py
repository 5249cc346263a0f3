"""Lists a folder's checkpoints with their state and progress, and the leftovers from interrupted saves."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Literal

from echelon.base.errors import CheckpointError
from echelon.base.progress import BarOpener
from echelon.checkpoint import object_store, storage
from echelon.checkpoint.commit import place_of
from echelon.checkpoint.formats.layouts import TRAINER_STATE, Layout, layout_of
from echelon.checkpoint.manifest import MANIFEST
from echelon.checkpoint.object_store import Location, ObjectPath
from echelon.checkpoint.read import Checkpoint
from echelon.checkpoint.typed_json import read_json

State = Literal["complete", "verified", "damaged", "unknown"]

_ASIDE = re.compile(r"(.+)\.(tmp|old)-[0-9a-f]{8,16}")
_NUMBERED = re.compile(r".*[-_](\d+)")
_IS_CHECKPOINT = re.compile(r"checkpoint[-_]\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointEntry:
    """A checkpoint in a folder."""

    name: str
    place: str
    """The folder's current name, which differs from ``name`` after a crash between two renames."""
    layout: Layout | None
    """Layout of the files; None if the folder is named like a checkpoint but is not one."""
    state: State
    """``complete`` means that the manifest is valid and the file sizes match; ``unknown`` means that the layout has no
    checksums."""
    problems: Sequence[str]
    step: int | None
    epoch: float | None
    world_size: int | None
    num_bytes: int
    created: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftover:
    """A folder left behind by an interrupted save or deletion."""

    name: str
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """The contents of a folder, with the newest checkpoint first."""

    entries: Sequence[CheckpointEntry]
    leftovers: Sequence[Leftover]


def list_folder(folder: Location, *, verify: BarOpener | None = None) -> Listing:
    """List the checkpoints in ``folder``.

    Args:
        verify: progress bar to show while every file is read, for checkpoints in echelon's format. If None, only names, sizes
            and manifests are checked.
    """
    entries, leftovers = [], []
    if isinstance(folder, ObjectPath):
        for name in storage.entries(folder):
            if object_store.is_checkpoint(folder / name):
                entries.append(_entry(folder / name, object_store.place_of(folder / name), "echelon", verify))
            elif (num_bytes := object_store.leftover_bytes(folder / name)) is not None:
                leftovers.append(Leftover(name=name, num_bytes=num_bytes))
        entries.sort(key=lambda entry: (entry.created, _number(entry.name)), reverse=True)
        return Listing(entries=entries, leftovers=leftovers)
    for name in storage.entries(folder):
        path = folder / name
        if storage.kind(storage.real_path(path)) != "folder":
            if (target := storage.link_target(path)) is not None and _IS_CHECKPOINT.fullmatch(name):
                why = f"{path} is a symbolic link to {target}, which is not a folder"
                entries.append(_entry(path, path, None, verify, problem=why))
            continue
        match = _ASIDE.fullmatch(name)
        if match is None:
            layout = layout_of(path)
            if layout is not None or _IS_CHECKPOINT.fullmatch(name):
                entries.append(_entry(path, path, layout, verify))
        elif match[2] == "old" and place_of(folder / match[1]).name == name:
            entries.append(_entry(folder / match[1], path, layout_of(path), verify))
        else:
            leftovers.append(Leftover(name=name, num_bytes=folder_bytes(path)))
    entries.sort(key=lambda entry: (entry.created, _number(entry.name)), reverse=True)
    return Listing(entries=entries, leftovers=leftovers)


def _entry(
    path: Location, place: Location, layout: Layout | None, verify: BarOpener | None, *, problem: str | None = None
) -> CheckpointEntry:
    if isinstance(place, ObjectPath):
        changed = object_store.objects_in(place)[MANIFEST]["last_modified"]
    else:
        changed = datetime.fromtimestamp((place.lstat() if problem else place.stat()).st_mtime, timezone.utc)
    step: int | None = None
    epoch: float | None = None
    world_size: int | None = None
    state: State = "unknown"
    problems: list[str] = []
    try:
        if layout == "echelon":
            checkpoint = Checkpoint(path)
            manifest = checkpoint.manifest
            problems = checkpoint.problems(show=verify)
            state = "damaged" if problems else "complete" if verify is None else "verified"
            progress = manifest.progress or {}
            step, epoch, world_size = progress.get("step"), progress.get("epoch"), manifest.world_size
            changed = datetime.fromisoformat(manifest.created)
        elif layout == "transformers" and isinstance(place, Path):
            trainer = read_json(place / TRAINER_STATE)
            step, epoch = trainer.get("global_step"), trainer.get("epoch")
        elif layout is None:
            state, problems = "damaged", [problem or f"{place} has no manifest and no weights in a known layout"]
    except (CheckpointError, ValueError, OSError) as error:
        state, problems = "damaged", [error.what if isinstance(error, CheckpointError) else str(error)]
    return CheckpointEntry(
        name=path.name,
        place=path.name if isinstance(place, ObjectPath) else place.name,
        layout=layout,
        state=state,
        problems=problems,
        step=step,
        epoch=epoch,
        world_size=world_size,
        num_bytes=folder_bytes(place),
        created=changed,
    )


def is_numbered(name: str) -> bool:
    """Return whether ``name`` is that of a checkpoint in a series: ``checkpoint_3`` or ``checkpoint-500``."""
    return _IS_CHECKPOINT.fullmatch(name) is not None


def folder_bytes(folder: Location) -> int:
    """Return the size of all files in a checkpoint folder, which every command shows as its size."""
    if isinstance(folder, ObjectPath):
        return sum(one["size"] for one in object_store.objects_in(folder).values())
    return sum(path.lstat().st_size for path in Path(os.path.realpath(folder)).rglob("*") if path.is_file())


def _number(name: str) -> int:
    match = _NUMBERED.fullmatch(name)
    return int(match[1]) if match else -1
