"""The folders of a run's checkpoints: locked, numbered, written whole or not at all, and deleted."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from echelon.accelerator.session import Session
from echelon.base.errors import CheckpointError, UsageError
from echelon.base.warnings import warn
from echelon.checkpoint.background_save import BackgroundSaver, SaveFailures
from echelon.checkpoint.commit import clean, make_folders, place_of
from echelon.checkpoint.lock import RunLock
from echelon.checkpoint.read import Checkpoint
from echelon.checkpoint.rotation import numbered, remove_oldest
from echelon.checkpoint.save import Content, SaveFailedError, as_save_failure, begin_save, run_on_all_ranks, save_folder
from echelon.checkpoint.storage import LocalStorage
from echelon.distributed.control import raise_on_all_ranks
from echelon.distributed.small_messages import gather_bytes

__all__ = ["PREFIX", "CheckpointStore"]

PREFIX = "checkpoint_"
"""Of automatically named checkpoints; a number follows."""


class CheckpointStore:
    """The folders that a run writes checkpoints to, of the layouts of this library and of others."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._project = session.project
        self.background = BackgroundSaver()
        self.failures = SaveFailures(self._project.max_failed_saves)
        self._lock: RunLock | None = None
        self._place: Path | None = None  # where this run alone may write, during a block of ``alone_in``

    @property
    def is_on_each_node(self) -> bool:
        """Does each machine have a whole checkpoint? What is gathered is on rank zero alone."""
        return self._project.save_on_each_node and self._session.capabilities.exposes_state

    @property
    def saves(self) -> bool:
        """Does this process make folders?"""
        world = self._session.world
        return world.is_rank_zero or (self.is_on_each_node and world.is_local_rank_zero)

    @property
    def is_saved(self) -> bool:
        """Did the disk take what was saved last?"""
        return self.failures.in_a_row == 0

    def wait(self) -> None:
        """Return when no checkpoint is being written; one that the disk did not take is reported.

        Raises:
            TooManyFailedSavesError: it was the last that is borne.
        """
        if self.background.is_idle:
            return
        try:
            self.background.wait()
        except SaveFailedError as error:
            self.failures.failed(error)
        else:
            self.failures.succeeded()

    @property
    def fence(self) -> Callable[[], None] | None:
        """What raises when another run has taken the place of this one; None: nothing is locked by this process."""
        return None if self._lock is None else self._lock.require

    @contextmanager
    def alone_in(self, folder: Path, *, prefix: str) -> Iterator[None]:
        """Keep other runs from writing checkpoints ``prefix`` + number to ``folder`` in the block.

        What killed saves left there is removed. In a block that is already in ``folder``, nothing is locked again.

        Collective: every rank, on entering.

        Raises:
            CheckpointError: another run has it, and which.
        """

        def belongs(name: str) -> bool:
            return name.startswith(prefix) and name.removeprefix(prefix).isdigit()

        folder = folder.resolve()
        if folder == self._place:
            yield
            return
        lock, place = self._lock, self._place
        try:
            with raise_on_all_ranks(f"locking {folder}"):
                if self.saves:
                    make_folders(LocalStorage(), folder)
                    self._lock = RunLock(_lock_inside(folder))
                    clean(LocalStorage(), folder, belongs=belongs)
            self._place = folder
            yield
        finally:
            if self._lock is not None and self._lock is not lock:
                self._lock.release()
            self._lock, self._place = lock, place

    def close(self) -> None:
        """Wait for what is being written, and let other runs write here."""
        self.wait()
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def lock_numbered(self, target: Path, *, is_first: bool, is_foreign: bool) -> None:
        """Keep other runs out of the folder of numbered checkpoints; what killed saves left there is removed.

        Args:
            target: the next checkpoint.
            is_first: does this process make the folder?
            is_foreign: the checkpoint is in Accelerate's layout.

        Collective: every rank.
        """

        def lock() -> None:
            if is_first and self._project.automatic_checkpoint_naming and self._lock is None:
                storage = LocalStorage()
                folder = storage.real_path(target.parent)
                make_folders(storage, folder)
                self._lock = RunLock(_lock_beside(folder) if is_foreign else _lock_inside(folder))
                clean(storage, folder, belongs=_is_numbered)

        run_on_all_ranks("locking the folder of the checkpoints", as_save_failure(lock, target), gather_bytes)

    def rotate(self, target: Path, is_first: bool) -> None:
        """Delete the checkpoints that ``total_limit`` does not keep, now that there is ``target``."""
        limit = self._project.total_limit
        if not (is_first and self._project.automatic_checkpoint_naming and limit is not None):
            return
        try:
            remove_oldest(
                target.parent,
                prefix=PREFIX,
                limit=limit,
                keep=[target, *self._best(target.parent)],
                keep_every=self._project.keep_every,
            )
        except OSError as error:
            warn(f"{target} is saved, but older checkpoints could not be deleted: {error}")

    def best(self) -> Path | None:
        """See ``Accelerator.best_checkpoint``."""
        return next(iter(self._best(self.folder(), 1)), None)

    def _best(self, folder: Path, number: int | None = None) -> list[Path]:
        """Return the checkpoints in ``folder`` with the best metrics, the best first; of equal ones the newer."""
        number = self._project.keep_best if number is None else number
        if not number:
            return []
        measured = [
            (metric, i, path)
            for i, path in enumerate(numbered(folder, prefix=PREFIX))
            if (metric := _metric_of(path)) is not None
        ]
        sign = 1 if self._project.greater_is_better else -1
        return [path for _, _, path in sorted(measured, key=lambda one: (-sign * one[0], -one[1]))[:number]]

    def next_folder(self, output_dir: Any) -> Path:
        """Return where the next checkpoint goes."""
        if not self._project.automatic_checkpoint_naming:
            if output_dir is None:
                raise UsageError(
                    "save_state() was given no folder",
                    do="give output_dir, or use ProjectConfiguration(automatic_checkpoint_naming=True)",
                )
            return Path(output_dir).expanduser()
        target = self.folder() / f"{PREFIX}{self._project.iteration}"
        if place_of(LocalStorage(), target).exists():
            raise UsageError(
                f"the checkpoint {target} is there already",
                do="set accelerator.project_configuration.iteration to the number that comes next (after load_state: the "
                "one after the number that was loaded), or use another project_dir",
            )
        return target

    def numbered(self) -> list[Path]:
        """Return the automatically named checkpoints, the oldest first."""
        return numbered(self.folder(), prefix=PREFIX)

    def folder(self) -> Path:
        """Return the folder of automatically named checkpoints."""
        if self._project.project_dir is None:
            raise UsageError(
                "automatic_checkpoint_naming needs a project_dir",
                do="use Accelerator(project_dir=...), or give it to the configuration",
            )
        return Path(os.fspath(self._project.project_dir)) / "checkpoints"

    def save_files(self, target: Path, write: Callable[[Path], None]) -> bool:
        """Make ``target`` a checkpoint of echelon's own format that holds the files which ``write(folder)`` makes.

        They are synced, listed with their checksums, and there together or not at all. ``False``: the disk did not take them,
        which was reported (``max_failed_saves``).

        Collective: every rank; ``write`` must not communicate.

        Raises:
            TooManyFailedSavesError: the disk refused ``max_failed_saves`` checkpoints in a row.
        """
        world, each = self._session.world, self._project.save_on_each_node

        def save() -> None:
            content = Content(progress=self._session.progress.to_json())
            begun = begin_save(target, content, world=world, fence=self.fence, on_each_node=each)
            try:
                run_on_all_ranks(
                    f"writing {target}", as_save_failure(lambda: write(begun.folder), target), gather_bytes
                )
            except BaseException:
                begun.give_up()
                raise
            begun.finish()

        return self.count_failures(save)

    def write_files(self, target: Path, write: Callable[[Path, bool], None], *, is_part: Callable[[str], bool]) -> bool:
        """Make ``target`` a checkpoint of another layout: the files which ``write(folder, is_owner)`` makes, without a manifest.

        Args:
            target: it is there whole or not at all; one that was there is replaced, and what others have put into it is kept.
            write: called on every rank; ``is_owner`` on the one of each folder that writes what is one for all. It must not
                communicate.
            is_part: tells by its name whether a file in the old folder was a part of what is replaced.

        Collective: every rank.

        Raises:
            TooManyFailedSavesError: the disk refused ``max_failed_saves`` checkpoints in a row.
        """

        def save() -> None:
            save_folder(target, write, world=self._session.world, is_part=is_part, fence=self.fence)

        return self.count_failures(save)

    def count_failures(self, save: Callable[[], None]) -> bool:
        """Call ``save``; return False where the disk refused it, which is reported.

        Raises:
            TooManyFailedSavesError: the disk refused ``max_failed_saves`` checkpoints in a row.
        """
        try:
            save()
        except SaveFailedError as error:
            self.failures.failed(error)
            return False
        self.failures.succeeded()
        return True


def _metric_of(folder: Path) -> float | None:
    """Return how good a checkpoint is; None when nobody said, or it cannot be read."""
    try:
        metric = Checkpoint(folder).objects().get("accelerator", {}).get("metric")
    except (CheckpointError, OSError):
        return None
    return metric if isinstance(metric, (int, float)) and not math.isnan(metric) else None


def _is_numbered(name: str) -> bool:
    return name.startswith(PREFIX) and name.removeprefix(PREFIX).isdigit()


def _lock_inside(folder: Path) -> Path:
    return folder / ".lock"


def _lock_beside(folder: Path) -> Path:
    """Accelerate's load_state, and scripts written for it, take whatever is in the folder for a numbered checkpoint."""
    return folder.parent / f".{folder.name}.lock"
