"""Folders of checkpoints whose files the caller names: found, verified, written whole or not at all, deleted."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from echelon.accelerator.state_names import model_prefix
from echelon.accelerator.weights import read_weights
from echelon.base.errors import CheckpointError, UsageError
from echelon.checkpoint.aside import Aside, written_aside
from echelon.checkpoint.background import store_gather
from echelon.checkpoint.layouts import TRAINER_STATE, json_of, layout_of, weight_files
from echelon.checkpoint.merge import aliases_of
from echelon.checkpoint.numbered import numbered, remove_oldest
from echelon.checkpoint.reading import Checkpoint
from echelon.checkpoint.save import Content, SaveFailedError, begin_save, together
from echelon.checkpoint.storage import LocalStorage
from echelon.checkpoint.tensor_file import read_header
from echelon.distributed.wire import gather_bytes

if TYPE_CHECKING:
    from echelon.accelerator.accelerator import Accelerator

__all__ = [
    "alone_in",
    "as_save_failure",
    "checkpoints_in",
    "holds_model",
    "holds_training",
    "is_own_format",
    "is_saved",
    "newest_whole",
    "problems_in",
    "read_model_files",
    "registered_state",
    "remove_checkpoints",
    "require_whole",
    "same_on_all_ranks",
    "save_files",
    "write_files",
]

_ARCHIVES = ("*.pt", "*.pth", "*.bin")  # what torch.save wrote: zip files, whose directory is at their end
_CUT_OFF = "checkpoint-is-incomplete.txt"  # what transformers leaves of a save that was killed


# ---- finding ---------------------------------------------------------------------------------------------------------


def checkpoints_in(folder: Path, *, prefix: str) -> list[Path]:
    """Return the folders ``prefix`` + number in ``folder``, lowest number first; what a killed save left does not count."""
    return numbered(folder, prefix=prefix)


def is_own_format(folder: Path) -> bool:
    """Tell whether ``folder`` was written in echelon's own format, with checksums."""
    return layout_of(folder) == "echelon"


def holds_training(folder: Path) -> bool:
    """Tell whether a checkpoint that is whole has more than weights: an optimizer or a schedule to go on with."""
    if is_own_format(folder):
        return "accelerator" in Checkpoint(folder).objects()
    return (folder / "scheduler.pt").is_file()


def holds_model(folder: Path) -> bool:
    """Tell whether a checkpoint of echelon's own format has weights beside those in files of other programs' formats."""
    prefix = model_prefix(0)
    return any(name.startswith(prefix) for name in Checkpoint(folder).names())


def registered_state(folder: Path, index: int) -> Any:
    """Return the state of an object that was registered for checkpointing, from a checkpoint of echelon's own format."""
    return Checkpoint(folder).objects()[f"custom.{index}"]


def newest_whole(
    accelerator: Accelerator, folder: Path, *, prefix: str, usable: Callable[[Path], str | None]
) -> tuple[Path | None, Sequence[tuple[Path, str]]]:
    """Return the newest checkpoint in ``folder`` that every machine has whole, and what was passed over, with reasons.

    Args:
        accelerator: whose first rank of each machine reads.
        folder: of checkpoints ``prefix`` + number.
        prefix: the same.
        usable: returns why a whole checkpoint is not wanted all the same, or None.

    Collective: every rank.
    """
    candidates = {path.name: path for path in checkpoints_in(folder, prefix=prefix)}
    names = sorted(
        {name for told in _gathered(list(candidates)) for name in told},
        key=lambda name: int(name.removeprefix(prefix)),
        reverse=True,
    )
    skipped: list[tuple[Path, str]] = []
    for name in names:
        path = folder / name
        problem = _problem_on_any(accelerator, path) or usable(path)
        if problem is None:
            return path, skipped
        skipped.append((path, problem))
    return None, skipped


def require_whole(accelerator: Accelerator, folder: Path) -> None:
    """Raise unless every machine has the checkpoint ``folder``, whole.

    Collective: every rank.

    Raises:
        UsageError: there is no such folder.
        CheckpointError: it is damaged, and how.
    """
    if not all(_gathered(folder.is_dir())):
        raise UsageError(f"there is no folder {folder}", do="give the folder of a checkpoint")
    problem = _problem_on_any(accelerator, folder)
    if problem is not None:
        raise CheckpointError(
            f"{folder} cannot be loaded: {problem}", do="load another checkpoint; nothing of this one was used"
        )


def _problem_on_any(accelerator: Accelerator, folder: Path) -> str | None:
    problems = problems_in(folder) if accelerator.is_local_main_process else []
    return next((problem for told in _gathered(problems) for problem in told), None)


def _gathered(value: Any) -> list[Any]:
    """Return plain data of each rank. Collective."""
    return [json.loads(told) for told in gather_bytes(json.dumps(value).encode())]


def problems_in(folder: Path) -> list[str]:
    """Return what is wrong with a checkpoint of echelon's or transformers' layout, naming the files; empty: it is whole.

    In echelon's own format every file is read and compared with its checksum. The other has none: files that are cut off
    or missing are found, changed bytes are not.
    """
    layout = layout_of(folder)
    try:
        if layout == "echelon":
            return Checkpoint(folder).problems()
        if layout != "transformers":
            return [f"{folder} has neither a manifest nor a {TRAINER_STATE}"]
        if (folder / _CUT_OFF).exists():
            return [f"{folder / _CUT_OFF} says that its save was cut off"]
        json_of(folder / TRAINER_STATE)
        weights = weight_files(folder)
        storage = LocalStorage()
        for path in {*weights, *folder.glob("*.safetensors")}:
            if path.suffix == ".safetensors":
                handle = storage.open(path)
                try:
                    read_header(storage, handle, source=str(path))
                finally:
                    storage.close(handle)
        for path in (path for pattern in _ARCHIVES for path in folder.glob(pattern)):
            with zipfile.ZipFile(path):
                continue
        if not weights and not any(folder.glob("adapter_model.*")):
            return [f"{folder} holds no weights"]
    except CheckpointError as error:
        return [error.what]
    except (OSError, zipfile.BadZipFile) as error:
        return [f"{folder}: {error}"]
    return []


# ---- writing ---------------------------------------------------------------------------------------------------------


def alone_in(accelerator: Accelerator, folder: Path, *, prefix: str) -> AbstractContextManager[None]:
    """Keep other runs from writing checkpoints ``prefix`` + number to ``folder`` in the block.

    What killed saves left there is removed. Blocks may stand in one another; several objects of one process do not meet.

    Collective: every rank, on entering.

    Raises:
        CheckpointError: another run has the folder, and which.
    """

    def belongs(name: str) -> bool:
        return name.startswith(prefix) and name.removeprefix(prefix).isdigit()

    return accelerator._checkpoints.alone_in(accelerator, folder, belongs=belongs)


def save_files(accelerator: Accelerator, target: Path, write: Callable[[Path], None]) -> bool:
    """Make ``target`` a checkpoint of echelon's own format that holds the files which ``write(folder)`` makes.

    They are synced, listed with their checksums, and there together or not at all. ``False``: the disk did not take them,
    which was reported (``max_failed_saves``).

    Collective: every rank; ``write`` must not communicate.

    Raises:
        TooManyFailedSavesError: it was the last failure that is borne.
    """
    world, each = accelerator.world, accelerator.project_configuration.save_on_each_node

    def save() -> None:
        content = Content(progress=accelerator.progress.to_json())
        begun = begin_save(target, content, world=world, fence=accelerator._checkpoints.fence, on_each_node=each)
        try:
            together(f"writing {target}", as_save_failure(lambda: write(begun.folder), target), gather_bytes)
        except BaseException:
            begun.give_up()
            raise
        begun.finish()

    return _counted(accelerator, save)


def write_files(
    accelerator: Accelerator, target: Path, write: Callable[[Path, bool], None], *, is_part: Callable[[str], bool]
) -> bool:
    """Make ``target`` a folder with the files which ``write(folder, is_owner)`` makes, without a manifest.

    Args:
        accelerator: whose ranks write.
        target: it is there whole or not at all; one that was there is replaced, and what others have put into it is kept.
        write: called on every rank; ``is_owner`` on the one of each folder that writes what is one for all. It must not
            communicate.
        is_part: tells by its name whether a file in the old folder was a part of what is replaced.

    Collective: every rank.

    Raises:
        TooManyFailedSavesError: the disk did not take it, and this is the last failure that is borne.
    """

    def fill(aside: Aside) -> None:
        write(aside.folder, aside.is_owner)
        if (fence := accelerator._checkpoints.fence) is not None:
            fence()  # last of all: the folder gets its name next

    def save() -> None:
        with written_aside(target, world=accelerator.world, is_part=is_part) as aside:
            together(f"writing {target}", as_save_failure(lambda: fill(aside), target), gather_bytes)

    return _counted(accelerator, save)


def is_saved(accelerator: Accelerator) -> bool:
    """Tell whether the disk took what was saved last."""
    return accelerator._checkpoints.failures.in_a_row == 0


def as_save_failure(action: Callable[[], Any], target: Path) -> Callable[[], Any]:
    """Return ``action`` with what the file system refuses as the error that is counted, not one that ends the run."""

    def run() -> Any:
        try:
            return action()
        except (OSError, SafetensorError) as error:
            raise SaveFailedError(
                f"{target} could not be saved: {error}",
                do="free space on the disk, or look at what the system says of it; the checkpoints that were there "
                "are untouched",
            ) from error

    return run


def _counted(accelerator: Accelerator, save: Callable[[], None]) -> bool:
    failures = accelerator._checkpoints.failures
    try:
        save()
    except SaveFailedError as error:
        failures.failed(error)
        return False
    failures.succeeded()
    return True


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
    files = weight_files(folder)
    if not files:
        raise UsageError(f"{folder} holds no weights of a model", do="give the folder of a whole checkpoint")
    tensors: dict[str, Any] = {}
    for file in files:
        tensors |= read_weights(file)
        if file.suffix == ".safetensors":
            tensors |= {name: tensors[target] for name, target in aliases_of(file, tensors).items()}
    return tensors


# ---- deleting --------------------------------------------------------------------------------------------------------


def remove_checkpoints(folder: Path, *, prefix: str, limit: int, keep: Collection[Path]) -> list[Path]:
    """Delete the lowest numbers until ``limit`` are left, never ``keep``; return what is gone. On one rank."""
    return remove_oldest(folder, prefix=prefix, limit=limit, keep=keep)
