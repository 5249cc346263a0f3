"""A run's checkpoint folders: locking, numbering, atomic writing and deletion."""

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
from echelon.checkpoint import storage
from echelon.checkpoint.background_save import EXIT_CODE, BackgroundSaver, TooManyFailedSavesError
from echelon.checkpoint.commit import clean, make_folders, place_of
from echelon.checkpoint.lock import RunLock
from echelon.checkpoint.read import Checkpoint
from echelon.checkpoint.rotation import numbered, remove_oldest
from echelon.checkpoint.save import Content, SaveFailedError, begin_save, run_on_all_ranks, save_folder
from echelon.distributed.control import raise_on_all_ranks
from echelon.distributed.small_messages import gather_bytes

PREFIX = "checkpoint_"
"""Name prefix of automatically named checkpoints, followed by a number."""


class CheckpointStore:
    """The folders to which a run writes checkpoints, in echelon's own or another library's layout."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._project = session.project
        self.background = BackgroundSaver()
        self._failures_in_a_row = 0  # the same on every rank
        self._lock: RunLock | None = None
        self._place: Path | None = None  # folder locked by the active ``alone_in`` block

    @property
    def is_on_each_node(self) -> bool:
        """Whether each machine stores a complete checkpoint. Gathered state exists only on rank zero."""
        return self._project.save_on_each_node and self._session.capabilities.exposes_state

    @property
    def saves(self) -> bool:
        """Whether this process creates folders."""
        world = self._session.world
        return world.is_rank_zero or (self.is_on_each_node and world.is_local_rank_zero)

    @property
    def is_saved(self) -> bool:
        """Whether the last save succeeded."""
        return self._failures_in_a_row == 0

    def wait(self) -> None:
        """Wait until no checkpoint is being written; report a failed save.

        Raises:
            TooManyFailedSavesError: ``max_failed_saves`` consecutive saves have failed.
        """
        if self.background.is_idle:
            return
        self.count_failures(self.background.wait)

    @property
    def fence(self) -> Callable[[], None] | None:
        """Function that raises if another run has taken over the lock; None if this process holds no lock."""
        return None if self._lock is None else self._lock.require

    @contextmanager
    def alone_in(self, folder: Path, *, prefix: str) -> Iterator[None]:
        """Lock ``folder``: inside the block, no other run can write checkpoints named ``prefix`` + number to it.

        Leftovers of interrupted saves are removed first. A nested block for the same folder does not lock again.

        Collective: enter on every rank.

        Raises:
            CheckpointError: another run holds the lock; the message names it.
        """
        folder = folder.resolve()
        if folder == self._place:
            yield
            return
        lock, place = self._lock, self._place
        try:
            with raise_on_all_ranks(f"locking {folder}"):
                if self.saves:
                    self._lock_folder(folder, folder / ".lock", prefix=prefix)
            self._place = folder
            yield
        finally:
            if self._lock is not None and self._lock is not lock:
                self._lock.release()
            self._lock, self._place = lock, place

    def close(self) -> None:
        """Wait for the pending save, and release the lock."""
        self.wait()
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def lock_numbered(self, target: Path, *, is_first: bool, is_foreign: bool) -> None:
        """Lock the folder of automatically named checkpoints, if they are, and remove leftovers of interrupted saves.

        Args:
            target: the next checkpoint.
            is_first: whether this process creates the folder.
            is_foreign: whether the checkpoint uses Accelerate's layout.

        Collective: call on every rank.
        """

        def lock() -> None:
            if is_first and self._lock is None:
                folder = storage.real_path(target.parent)
                # Accelerate's load_state treats every entry of the folder as a numbered checkpoint.
                path = folder.parent / f".{folder.name}.lock" if is_foreign else folder / ".lock"
                self._lock_folder(folder, path, prefix=PREFIX)

        if self._project.automatic_checkpoint_naming:
            run_on_all_ranks("locking the checkpoint folder", lock, gather_bytes, target=target)

    def _lock_folder(self, folder: Path, path: Path, *, prefix: str) -> None:
        make_folders(folder)
        self._lock = RunLock(path)
        clean(folder, belongs=lambda name: name.startswith(prefix) and name.removeprefix(prefix).isdigit())

    def rotate(self, target: Path, is_first: bool) -> None:
        """Delete the checkpoints beyond ``total_limit`` after ``target`` was written."""
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
        """Return the checkpoints in ``folder`` with the best metrics, best first; the newer one wins a tie."""
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
        """Return the path of the next checkpoint."""
        if not self._project.automatic_checkpoint_naming:
            if output_dir is None:
                raise no_folder_error("save_state", do="pass output_dir")
            return Path(output_dir).expanduser()
        target = self.folder() / f"{PREFIX}{self._project.iteration}"
        if place_of(target).exists():
            raise UsageError(
                f"the checkpoint {target} already exists",
                do="set accelerator.project_configuration.iteration to the next free number (after load_state: the "
                "loaded checkpoint's number plus one), or use another project_dir",
            )
        return target

    def numbered(self) -> list[Path]:
        """Return the automatically named checkpoints, oldest first."""
        return numbered(self.folder(), prefix=PREFIX)

    def folder(self) -> Path:
        """Return the folder of automatically named checkpoints."""
        if self._project.project_dir is None:
            raise UsageError(
                "automatic_checkpoint_naming requires a project_dir",
                do="pass Accelerator(project_dir=...) or ProjectConfiguration(project_dir=...)",
            )
        return Path(os.fspath(self._project.project_dir)) / "checkpoints"

    def save_files(self, target: Path, write: Callable[[Path], None]) -> bool:
        """Write a checkpoint in echelon's own format from the files that ``write(folder)`` creates.

        The files are synced, listed with their checksums, and committed atomically. Returns False if the disk failed;
        the failure is reported (see ``max_failed_saves``).

        Collective: call on every rank; ``write`` must not call collectives.

        Raises:
            TooManyFailedSavesError: ``max_failed_saves`` consecutive saves have failed.
        """
        world, each = self._session.world, self._project.save_on_each_node

        def save() -> None:
            content = Content(progress=self._session.progress.to_json())
            begun = begin_save(target, content, world=world, fence=self.fence, on_each_node=each)
            begun.write_others(f"writing {target}", lambda: write(begun.pending.path))
            begun.finish()

        return self.count_failures(save)

    def write_files(self, target: Path, write: Callable[[Path, bool], None], *, is_part: Callable[[str], bool]) -> bool:
        """Write a checkpoint in another layout from the files that ``write(folder, is_owner)`` creates, without a
        manifest.

        Args:
            target: folder, written atomically; an existing checkpoint in it is replaced, and other programs' files are
                kept.
            write: called on every rank; ``is_owner`` is true on the one rank per folder that writes shared
                files. ``write`` must not call collectives.
            is_part: returns whether a file name in the old folder belongs to the replaced checkpoint.

        Collective: call on every rank.

        Raises:
            TooManyFailedSavesError: ``max_failed_saves`` consecutive saves have failed.
        """

        def save() -> None:
            save_folder(target, write, world=self._session.world, is_part=is_part, fence=self.fence)

        return self.count_failures(save)

    def count_failures(self, save: Callable[[], None]) -> bool:
        """Call ``save``; if it fails, report this and return False.

        Raises:
            TooManyFailedSavesError: ``max_failed_saves`` consecutive saves have failed.
        """
        try:
            save()
        except SaveFailedError as error:
            self.note_failure(error)
            return False
        self.note_success()
        return True

    def note_success(self) -> None:
        """End a row of failed saves."""
        self._failures_in_a_row = 0

    def note_failure(self, error: SaveFailedError) -> None:
        """Count ``error``, which was raised on every rank, and warn about it.

        Raises:
            TooManyFailedSavesError: ``max_failed_saves`` consecutive saves have failed.
        """
        self._failures_in_a_row += 1
        number, limit = self._failures_in_a_row, self._project.max_failed_saves
        if number >= limit:
            raise TooManyFailedSavesError(
                f"{number} consecutive checkpoints could not be written; the last error was:\n{error.what}",
                do=f"{error.do}. The process exits with code {EXIT_CODE}; the launcher may report a different one",
            ) from error
        warn(f"{error.what}\n  Training continues ({number} of at most {limit} failures in a row).")


def no_folder_error(function: str, *, do: str) -> UsageError:
    """Return the error for a call without a folder when checkpoints are not named automatically."""
    return UsageError(
        f"{function}() was called without a folder",
        do=f"{do}, or set ProjectConfiguration(automatic_checkpoint_naming=True)",
    )


def _metric_of(folder: Path) -> float | None:
    """Return a checkpoint's metric; None if it has none or cannot be read."""
    try:
        metric = Checkpoint(folder).objects().get("accelerator", {}).get("metric")
    except (CheckpointError, OSError):
        return None
    return metric if isinstance(metric, (int, float)) and not math.isnan(metric) else None
