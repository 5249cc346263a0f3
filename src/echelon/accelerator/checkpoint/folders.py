"""Finds, verifies and reads checkpoint folders."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from echelon.base.errors import CheckpointError, UsageError
from echelon.base.progress import progress_bar
from echelon.checkpoint import object_store, storage
from echelon.checkpoint.background_save import store_gather
from echelon.checkpoint.commit import make_folders, place_of, require_folder_or_nothing
from echelon.checkpoint.formats.dcp import open_dcp
from echelon.checkpoint.formats.layouts import TRAINER_STATE, layout_of, weight_files
from echelon.checkpoint.formats.transformers import SCHEDULER
from echelon.checkpoint.formats.weight_files import read_model
from echelon.checkpoint.object_store import Location, ObjectPath
from echelon.checkpoint.plan import gather_json
from echelon.checkpoint.read import Checkpoint, try_open
from echelon.checkpoint.rotation import numbered
from echelon.checkpoint.tensor_file import stored_tensors
from echelon.checkpoint.tensor_names import averages_of, model_prefix
from echelon.checkpoint.typed_json import read_json
from echelon.config.variables import checkpoint_format as checkpoint_format
from echelon.distributed.small_messages import gather_bytes
from echelon.world.world import World

_ARCHIVES = ("*.pt", "*.pth", "*.bin", "*.pkl")  # written by torch.save: zip files, whose directory is at the end
_ADAPTER = "adapter_model.*"  # in the folder itself, or in a folder with the adapter's name
_CUT_OFF = "checkpoint-is-incomplete.txt"  # left by transformers if a save is killed


# ---- finding ---------------------------------------------------------------------------------------------------------


def is_own_format(folder: Location) -> bool:
    """Return whether ``folder`` uses echelon's own format, with checksums."""
    return layout_of(folder) == "echelon"


def holds_training(folder: Path) -> bool:
    """Return whether training can resume from a complete checkpoint: True if it has an optimizer or a scheduler."""
    if is_own_format(folder):
        return "accelerator" in Checkpoint(folder).objects()
    return (place_of(folder) / SCHEDULER).is_file()


def holds_model(folder: Path) -> bool:
    """Return whether a checkpoint in echelon's own format stores weights itself, not only in other formats' files."""
    prefix = model_prefix(0)
    return any(name.startswith(prefix) for name in Checkpoint(folder).names())


def registered_state(folder: Path, index: int) -> Any:
    """Return the state of a registered object from a checkpoint in echelon's own format."""
    return Checkpoint(folder).objects()[f"custom.{index}"]


def require_folder(path: Location, *, makes: bool) -> None:
    """Raise if ``path`` exists and is not a directory; create it if it is missing and ``makes`` is set.

    Raises:
        UsageError: ``path`` is a file or a broken symbolic link.
    """
    require_folder_or_nothing(path)
    if makes:
        make_folders(storage.real_path(path))


def has_checkpoint(folder: Location) -> bool:
    """Return whether ``folder`` contains anything; an empty folder holds no checkpoint yet.

    Raises:
        UsageError: ``folder`` is a file or a broken symbolic link.
    """
    if isinstance(folder, ObjectPath):
        return object_store.is_checkpoint(folder)
    require_folder_or_nothing(folder)
    place = place_of(folder)
    return place.is_dir() and bool(storage.entries(place))


def newest_whole(
    world: World,
    folder: Location,
    *,
    prefix: str,
    usable: Callable[[Path], str | None] = lambda _: None,
    fetch: Callable[[ObjectPath], Path] | None = None,
) -> tuple[Path | None, Sequence[tuple[Location, str]]]:
    """Return the newest checkpoint (in any layout) in ``folder`` that is complete on every machine, and the skipped
    ones.

    Args:
        prefix: name prefix before the number.
        fetch: returns a local copy of a checkpoint in an object store (``CheckpointStore.fetch``), which is then returned.
        usable: returns why a complete checkpoint cannot be used, or None; must return the same on all ranks.

    Collective: call on every rank.

    Raises:
        UsageError: ``folder`` is a file or a broken symbolic link.
    """
    require_folder_or_nothing(folder)
    candidates = {path.name: path for path in numbered(folder, prefix=prefix)}
    names = sorted(
        {name for found in gather_json(list(candidates), gather_bytes) for name in found},
        key=lambda name: int(name.removeprefix(prefix)),
        reverse=True,
    )
    skipped: list[tuple[Location, str]] = []
    for name in names:
        found = folder / name
        try:
            if isinstance(found, ObjectPath):
                assert fetch is not None, found
                path = fetch(found)
            else:
                path = found
            problem = _problem_on_any(world, path) or usable(path)
        except CheckpointError as error:  # from fetch, on every rank
            if isinstance(found, Path):
                raise
            problem = error.what
        if problem is None:
            return path, skipped
        skipped.append((found, problem))
    return None, skipped


def require_whole(world: World, folder: Path) -> None:
    """Raise unless the checkpoint ``folder`` is complete on every machine.

    Collective: call on every rank.

    Raises:
        UsageError: the folder does not exist.
        CheckpointError: the checkpoint is damaged; the message names the problem.
    """
    require_folder_or_nothing(folder)
    if not all(gather_json(place_of(folder).is_dir(), gather_bytes)):
        raise UsageError(f"there is no folder {folder}", do="pass the path of a checkpoint folder")
    problem = _problem_on_any(world, folder)
    if problem is not None:
        raise CheckpointError(
            f"{folder} cannot be loaded: {problem}", do="load another checkpoint; nothing was loaded from this one"
        )


def _problem_on_any(world: World, folder: Path) -> str | None:
    if all(gather_json(is_own_format(folder), gather_bytes)):
        return try_open(folder, world=world)[1]
    problems = problems_in(folder) if world.is_local_rank_zero else []
    return next((problem for found in gather_json(problems, gather_bytes) for problem in found), None)


def problems_in(folder: Location) -> list[str]:
    """Return the problems in a checkpoint of any layout, with file names; empty if it is complete.

    In echelon's own format every file is compared with its checksum. Other layouts have no checksums: missing and
    truncated files are detected, but changed bytes are not.
    """
    try:
        require_folder_or_nothing(folder)
        layout = layout_of(folder)
        folder = place_of(folder)
        if layout == "echelon" or isinstance(folder, ObjectPath):
            return Checkpoint(folder).problems(show=progress_bar)
        if layout == "sharded":
            return open_dcp(folder).problems()
        if layout is None:
            what = f"neither a manifest, nor a {TRAINER_STATE}, nor files with Accelerate's names"
            return [f"{folder} has {what}" if folder.is_dir() else f"{folder} is not a directory"]
        if (folder / _CUT_OFF).exists():
            return [f"{folder / _CUT_OFF} marks an interrupted save"]
        if layout == "transformers":
            read_json(folder / TRAINER_STATE)
        weights = weight_files(folder)
        adapters = [*folder.glob(_ADAPTER), *folder.glob(f"*/{_ADAPTER}")]
        for path in {*weights, *folder.glob("*.safetensors"), *adapters}:
            if path.suffix == ".safetensors":
                stored_tensors(path)
        for path in (path for pattern in _ARCHIVES for path in folder.glob(pattern)):
            _require_whole_archive(path)
        if layout == "transformers" and not weights and not adapters:
            return [f"{folder} holds no weights"]
    except (CheckpointError, UsageError) as error:
        return [error.what]
    except (OSError, zipfile.BadZipFile) as error:
        return [f"{folder}: {error}"]
    return []


def _require_whole_archive(path: Path) -> None:
    """Raise if a file written by torch.save is truncated, so that it lacks the zip directory at its end."""
    with path.open("rb") as file:
        start = file.read(2)
    if not start:
        raise CheckpointError(f"{path} is empty", do="use another checkpoint")
    if start == b"PK":  # older versions of torch did not write zip files
        try:
            with zipfile.ZipFile(path):
                return
        except zipfile.BadZipFile as error:
            raise CheckpointError(f"{path} is truncated: {error}", do="use another checkpoint") from error


# ---- agreement -------------------------------------------------------------------------------------------------------


def same_on_all_ranks(text: str, *, within: timedelta) -> bool:
    """Return whether every rank calls this with the same ``text`` in time; other ranks may hang or have exited.

    This uses only the process group's store, so it does not disturb a collective in which another rank waits.

    Collective: call on every rank that is still able to.
    """
    payload = text.encode()
    try:
        return all(other == payload for other in store_gather(text, timeout=within)(payload))
    except (CheckpointError, RuntimeError):  # a rank did not call in time, or the store ended with rank zero
        return False


# ---- reading ---------------------------------------------------------------------------------------------------------


def read_model_files(folder: Path) -> dict[str, Any]:
    """Return a checkpoint's model state, for use; tied weights appear under each of their names.

    The state is read from transformers' files or from echelon's own format. If that has an average of the weights, it is the average.

    Raises:
        UsageError: the checkpoint has no model weights.
        CheckpointError: a file is damaged or contains code.
    """
    if is_own_format(folder) and holds_model(folder):
        checkpoint, prefix = Checkpoint(folder), model_prefix(0)
        names = [name for name in checkpoint.names() if name.startswith(prefix)]
        extra: dict[str, Any] = checkpoint.objects()["extra_states"][0]
        averages = averages_of(checkpoint)
        return {name.removeprefix(prefix): checkpoint.read(averages.get(name, name)) for name in names} | extra
    files = weight_files(place_of(folder))
    if not files:
        raise UsageError(f"{folder} holds no model weights", do="pass the folder of a complete checkpoint")
    return read_model(files)
