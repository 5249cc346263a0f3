"""Folders of checkpoints whose files the caller names: found, verified, written whole or not at all, deleted."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from echelon.base.errors import CheckpointError, UsageError
from echelon.checkpoint.background_save import store_gather
from echelon.checkpoint.commit import make_folders, place_of, require_folder_or_nothing
from echelon.checkpoint.formats.layouts import TRAINER_STATE, layout_of
from echelon.checkpoint.formats.transformers import SCHEDULER
from echelon.checkpoint.formats.weight_files import read_model, weight_files
from echelon.checkpoint.read import Checkpoint, try_open
from echelon.checkpoint.rotation import numbered, remove_oldest
from echelon.checkpoint.storage import LocalStorage
from echelon.checkpoint.tensor_file import read_header
from echelon.checkpoint.tensor_names import model_prefix
from echelon.checkpoint.typed_json import read_json
from echelon.distributed.small_messages import gather_bytes
from echelon.world.world import World

__all__ = [
    "checkpoints_in",
    "has_checkpoint",
    "holds_model",
    "folder_of",
    "holds_training",
    "is_own_format",
    "newest_whole",
    "problems_in",
    "read_model_files",
    "registered_state",
    "remove_checkpoints",
    "require_folder",
    "require_whole",
    "same_on_all_ranks",
]

_ARCHIVES = ("*.pt", "*.pth", "*.bin", "*.pkl")  # what torch.save wrote: zip files, whose directory is at their end
_CUT_OFF = "checkpoint-is-incomplete.txt"  # what transformers leaves of a save that was killed


# ---- finding ---------------------------------------------------------------------------------------------------------


def checkpoints_in(folder: Path, *, prefix: str) -> list[Path]:
    """Return the folders ``prefix`` + number in ``folder``, lowest number first; what a killed save left does not count."""
    return numbered(folder, prefix=prefix)


def folder_of(folder: Path) -> Path:
    """Return where a checkpoint is: a crash between two renames leaves it under another name."""
    return place_of(LocalStorage(), folder)


def is_own_format(folder: Path) -> bool:
    """Tell whether ``folder`` was written in echelon's own format, with checksums."""
    return layout_of(folder) == "echelon"


def holds_training(folder: Path) -> bool:
    """Tell whether a checkpoint that is whole has more than weights: an optimizer or a schedule to go on with."""
    if is_own_format(folder):
        return "accelerator" in Checkpoint(folder).objects()
    return (place_of(LocalStorage(), folder) / SCHEDULER).is_file()


def holds_model(folder: Path) -> bool:
    """Tell whether a checkpoint of echelon's own format has weights beside those in files of other programs' formats."""
    prefix = model_prefix(0)
    return any(name.startswith(prefix) for name in Checkpoint(folder).names())


def registered_state(folder: Path, index: int) -> Any:
    """Return the state of an object that was registered for checkpointing, from a checkpoint of echelon's own format."""
    return Checkpoint(folder).objects()[f"custom.{index}"]


def require_folder(path: Path, *, makes: bool) -> None:
    """Raise where ``path`` is there and is no folder; where it is not there and this rank ``makes`` it, make it.

    Raises:
        UsageError: it is a file, or a symbolic link that leads nowhere.
    """
    storage = LocalStorage()
    require_folder_or_nothing(storage, path)
    if makes:
        make_folders(storage, storage.real_path(path))


def has_checkpoint(folder: Path) -> bool:
    """Tell whether something was saved in ``folder``, whatever is left of it; a folder that is empty was only made.

    Raises:
        UsageError: it is a file, or a symbolic link that leads nowhere.
    """
    storage = LocalStorage()
    require_folder_or_nothing(storage, folder)
    place = place_of(storage, folder)
    return place.is_dir() and bool(storage.entries(place))


def newest_whole(
    world: World, folder: Path, *, prefix: str, usable: Callable[[Path], str | None] = lambda _: None
) -> tuple[Path | None, Sequence[tuple[Path, str]]]:
    """Return the newest checkpoint in ``folder``, of any layout, that every machine has whole, and what was passed over.

    Args:
        world: of this process.
        folder: of checkpoints ``prefix`` + number.
        prefix: the same.
        usable: returns why a whole checkpoint is not wanted all the same, or None; the same on all ranks.

    Collective: every rank.

    Raises:
        UsageError: ``folder`` is a file, or a symbolic link that leads nowhere.
    """
    require_folder_or_nothing(LocalStorage(), folder)
    candidates = {path.name: path for path in checkpoints_in(folder, prefix=prefix)}
    names = sorted(
        {name for told in _gathered(list(candidates)) for name in told},
        key=lambda name: int(name.removeprefix(prefix)),
        reverse=True,
    )
    skipped: list[tuple[Path, str]] = []
    for name in names:
        path = folder / name
        problem = _problem_on_any(world, path) or usable(path)
        if problem is None:
            return path, skipped
        skipped.append((path, problem))
    return None, skipped


def require_whole(world: World, folder: Path) -> None:
    """Raise unless every machine has the checkpoint ``folder``, whole.

    Collective: every rank.

    Raises:
        UsageError: there is no such folder.
        CheckpointError: it is damaged, and how.
    """
    storage = LocalStorage()
    require_folder_or_nothing(storage, folder)
    if not all(_gathered(place_of(storage, folder).is_dir())):
        raise UsageError(f"there is no folder {folder}", do="give the folder of a checkpoint")
    problem = _problem_on_any(world, folder)
    if problem is not None:
        raise CheckpointError(
            f"{folder} cannot be loaded: {problem}", do="load another checkpoint; nothing of this one was used"
        )


def _problem_on_any(world: World, folder: Path) -> str | None:
    if all(_gathered(is_own_format(folder))):
        return try_open(folder, world=world)[1]
    problems = problems_in(folder) if world.is_local_rank_zero else []
    return next((problem for told in _gathered(problems) for problem in told), None)


def _gathered(value: Any) -> list[Any]:
    """Return plain data of each rank. Collective."""
    return [json.loads(told) for told in gather_bytes(json.dumps(value).encode())]


def problems_in(folder: Path) -> list[str]:
    """Return what is wrong with a checkpoint of any layout, naming the files; empty: it is whole.

    In echelon's own format every file is read and compared with its checksum. The others have none: files that are cut off
    or missing are found, changed bytes are not.
    """
    storage = LocalStorage()
    try:
        require_folder_or_nothing(storage, folder)
        layout = layout_of(folder)
        folder = place_of(storage, folder)
        if layout == "echelon":
            return Checkpoint(folder).problems()
        if layout == "sharded":
            return [
                f"{folder} was written by torch.distributed.checkpoint, whose parts can only be found by unpickling"
            ]
        if layout is None:
            what = f"neither a manifest nor a {TRAINER_STATE}, nor files of Accelerate's names"
            return [f"{folder} has {what}" if folder.is_dir() else f"{folder} is no folder"]
        if (folder / _CUT_OFF).exists():
            return [f"{folder / _CUT_OFF} says that its save was cut off"]
        if layout == "transformers":
            read_json(folder / TRAINER_STATE)
        weights = weight_files(folder)
        for path in {*weights, *folder.glob("*.safetensors")}:
            if path.suffix == ".safetensors":
                handle = storage.open(path)
                try:
                    read_header(storage, handle, source=str(path))
                finally:
                    storage.close(handle)
        for path in (path for pattern in _ARCHIVES for path in folder.glob(pattern)):
            _require_whole_archive(path)
        if layout == "transformers" and not weights and not any(folder.glob("adapter_model.*")):
            return [f"{folder} holds no weights"]
    except (CheckpointError, UsageError) as error:
        return [error.what]
    except (OSError, zipfile.BadZipFile) as error:
        return [f"{folder}: {error}"]
    return []


def _require_whole_archive(path: Path) -> None:
    """Raise where a file that torch.save wrote is cut off: the directory of a zip file is at its end."""
    with path.open("rb") as file:
        start = file.read(2)
    if not start:
        raise CheckpointError(f"{path} is empty", do="use another checkpoint")
    if start == b"PK":  # else of an older torch, which wrote no zip files
        try:
            with zipfile.ZipFile(path):
                return
        except zipfile.BadZipFile as error:
            raise CheckpointError(f"{path} is cut off: {error}", do="use another checkpoint") from error


# ---- writing ---------------------------------------------------------------------------------------------------------


def same_on_all_ranks(told: str, *, within: timedelta) -> bool:
    """Tell whether every rank comes here with the text ``told`` in time; for ranks that may be anywhere, or gone.

    Nothing but the store of the process group is used, so a collective that another rank waits in is not disturbed.

    Collective: every rank that can.
    """
    payload = told.encode()
    try:
        return all(other == payload for other in store_gather(told, timeout=within)(payload))
    except (CheckpointError, RuntimeError):  # it did not come, or the store has ended with rank zero
        return False


# ---- reading ---------------------------------------------------------------------------------------------------------


def read_model_files(folder: Path) -> dict[str, Any]:
    """Return the tensors of the model in a checkpoint, also under their further names (tied weights).

    They are in the files that transformers writes, or, in echelon's own format, among its own.

    Raises:
        UsageError: there are none.
        CheckpointError: one is damaged, or holds code.
    """
    if is_own_format(folder) and holds_model(folder):
        checkpoint, prefix = Checkpoint(folder), model_prefix(0)
        names = [name for name in checkpoint.names() if name.startswith(prefix)]
        return {name.removeprefix(prefix): checkpoint.read(name) for name in names}
    files = weight_files(place_of(LocalStorage(), folder))
    if not files:
        raise UsageError(f"{folder} holds no weights of a model", do="give the folder of a whole checkpoint")
    return read_model(files)


# ---- deleting --------------------------------------------------------------------------------------------------------


def remove_checkpoints(folder: Path, *, prefix: str, limit: int, keep: Collection[Path]) -> list[Path]:
    """Delete the lowest numbers until ``limit`` are left, never ``keep``; return what is gone. On one rank."""
    return remove_oldest(folder, prefix=prefix, limit=limit, keep=keep)
