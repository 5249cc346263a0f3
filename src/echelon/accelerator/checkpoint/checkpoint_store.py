"""A run's checkpoint folders: locking, numbering, atomic writing and deletion."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from echelon.accelerator.session import Session
from echelon.base.errors import CheckpointError, UsageError
from echelon.base.logging import get_logger
from echelon.base.messages.translation import gettext as _
from echelon.base.progress import progress_bar
from echelon.base.warnings import warn
from echelon.checkpoint import object_store, storage
from echelon.checkpoint.background_save import EXIT_CODE, BackgroundSaver, TooManyFailedSavesError
from echelon.checkpoint.commit import clean, make_folders, place_of
from echelon.checkpoint.lock import RunLock
from echelon.checkpoint.manifest import MANIFEST
from echelon.checkpoint.object_store import Location, ObjectPath, location
from echelon.checkpoint.plan import Planner, gather_json
from echelon.checkpoint.read import Checkpoint
from echelon.checkpoint.rotation import best_of, numbered, remove_oldest
from echelon.checkpoint.save import PendingCheckpoint, SaveFailedError, creates_folder, run_on_all_ranks
from echelon.distributed.control import raise_on_all_ranks
from echelon.distributed.small_messages import gather_bytes

PREFIX = "checkpoint_"
"""Name prefix of automatically named checkpoints, followed by a number."""

logger = get_logger(__name__)


class CheckpointStore:
    """The folders to which a run writes checkpoints, in echelon's own or another library's layout."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._project = session.project
        self.background = BackgroundSaver()
        self.on_committed: Callable[[Path], None] | None = None
        """Called in the same way as ``PendingCheckpoint.on_committed``, after the checkpoints whose save begins while it is set."""
        self.latest: PendingCheckpoint | None = None
        """The last save that has begun."""
        self._planner = Planner()
        self._failures_in_a_row = 0  # the same on every rank
        self._last_failure: str | None = None
        self._lock: RunLock | None = None
        self._copy: tuple[Path, ObjectPath] | None = None
        """A local copy of a checkpoint in an object store, and that checkpoint."""
        self._drop_copy: Callable[[], object] | None = None
        self._place: Location | None = None  # folder locked by the active ``alone_in`` block

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "on_committed": None, "latest": None, "_copy": None, "_drop_copy": None}

    @property
    def is_on_each_node(self) -> bool:
        """Whether each machine stores a complete checkpoint. Gathered state exists only on rank zero."""
        return self._project.save_on_each_node and self._session.capabilities.exposes_state

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
        try:
            self.background.wait()
        except SaveFailedError as error:
            self._note_failure(error)
        else:
            self._failures_in_a_row = 0

    @contextmanager
    def alone_in(self, folder: Location, *, prefix: str) -> Iterator[None]:
        """Lock ``folder``: inside the block, no other run can write checkpoints named ``prefix`` + number to it.

        Leftovers of interrupted saves are removed first. A nested block for the same folder does not lock again.

        Collective: enter on every rank.

        Raises:
            CheckpointError: another run holds the lock; the message names it.
        """
        folder = storage.real_path(folder)
        if folder == self._place:
            yield
            return
        lock, place = self._lock, self._place
        try:
            with raise_on_all_ranks(f"locking {folder}"):
                if creates_folder(self._session.world, on_each_node=self.is_on_each_node):
                    self._lock_folder(folder, folder / ".lock", prefix=prefix)
            self._place = folder
            yield
        finally:
            try:
                self.wait()  # a background save must not outlive the lock
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

    def save(self, pending: PendingCheckpoint, *, blocking: bool = True) -> bool:
        """Write ``pending``; if the disk fails, report this and return False (see ``max_failed_saves``).

        If checkpoints are named automatically, their folder is locked, and those beyond ``total_limit`` are deleted.

        Args:
            pending: has not begun.
            blocking: False: return once the state is copied, and write it in a background thread.

        Collective: call on every rank.

        Raises:
            TooManyFailedSavesError: ``max_failed_saves`` consecutive saves have failed.
        """
        self.wait()
        try:
            if self._project.automatic_checkpoint_naming:
                lock = partial(self._lock_numbered, pending)
                run_on_all_ranks("locking the checkpoint folder", lock, pending.gather, target=pending.target)
                pending.on_committed = self._rotate
            elif self.on_committed is not None:
                pending.on_committed = self.on_committed
            pending.fence = None if self._lock is None else self._lock.require
            pending.planner = self._planner
            self.latest = pending.begin()
            if not blocking:
                self.background.start(pending)
                return True
            pending.finish(show=progress_bar)
        except SaveFailedError as error:
            self._note_failure(error)
            return False
        self._failures_in_a_row = 0
        return True

    def _lock_numbered(self, pending: PendingCheckpoint) -> None:
        """Lock the folder of automatically named checkpoints, on the ranks that write to it."""
        if self._lock is None and creates_folder(pending.world, on_each_node=pending.on_each_node):
            folder = storage.real_path(pending.target.parent)
            # Accelerate's load_state treats every entry of the folder as a numbered checkpoint.
            path = folder / ".lock" if pending.collect is not None else folder.parent / f".{folder.name}.lock"
            self._lock_folder(folder, path, prefix=PREFIX)

    def _lock_folder(self, folder: Location, path: Location, *, prefix: str) -> None:
        make_folders(folder)
        self._lock = RunLock(path)
        clean(folder, belongs=lambda name: name.startswith(prefix) and name.removeprefix(prefix).isdigit())

    def _rotate(self, target: Location) -> None:
        """Delete the checkpoints beyond ``total_limit`` after ``target`` was written."""
        limit = self._project.total_limit
        if limit is None:
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
            warn(
                _("{target} is saved, but older checkpoints could not be deleted: {error}", target=target, error=error)
            )

    def best(self) -> Location | None:
        """See ``Accelerator.best_checkpoint``."""
        return next(iter(self._best(self.folder(), 1)), None)

    def _best(self, folder: Location, number: int | None = None) -> list[Location]:
        """Return the checkpoints in ``folder`` with the best metrics, best first; the newer one wins a tie."""
        number = self._project.keep_best if number is None else number
        if not number:
            return []
        return best_of(
            numbered(folder, prefix=PREFIX),
            metric_of,
            number=number,
            greater_is_better=self._project.greater_is_better,
        )

    def next_folder(self) -> Location:
        """Return the path of the next automatically named checkpoint."""
        target = self.folder() / f"{PREFIX}{self._project.iteration}"
        if storage.kind(place_of(target)) is not None:
            raise UsageError(
                _("the checkpoint {target} already exists", target=target),
                do=_(
                    "set accelerator.project_configuration.iteration to the next free number (after load_state: the loaded "
                    "checkpoint's number plus one), or use another project_dir"
                ),
            )
        return target

    def numbered(self) -> Sequence[Location]:
        """Return the automatically named checkpoints, oldest first."""
        return numbered(self.folder(), prefix=PREFIX)

    def folder(self) -> Location:
        """Return the folder of automatically named checkpoints."""
        if self._project.project_dir is None:
            raise UsageError(
                _("automatic_checkpoint_naming requires a project_dir"),
                do=_("pass Accelerator(project_dir=...) or ProjectConfiguration(project_dir=...)"),
            )
        return location(os.fspath(self._project.project_dir)) / "checkpoints"

    # ---- object stores -----------------------------------------------------------------------------------------------

    def fetch(self, path: ObjectPath) -> Path:
        """Copy a checkpoint in an object store to a local folder, which the ranks of this machine share, and return it.

        It is deleted by ``drop_copy``, by the next ``fetch``, and at the end of the process.

        Collective: call on every rank.

        Raises:
            UsageError: there is no checkpoint.
            CheckpointError: a rank could not read it, or has no space for it (in the folder for temporary files, TMPDIR).
        """
        world = self._session.world
        self.drop_copy()
        places: list[str] = []
        with raise_on_all_ranks(f"looking for {path}"):
            if world.is_rank_zero:
                place = object_store.place_of(path)
                if not object_store.exists(place / MANIFEST):
                    raise UsageError(
                        _("there is no checkpoint at {path}", path=path),
                        do=_("echelon checkpoint ls lists the checkpoints at a URL"),
                    )
                places.append(str(place))
            made = None
            if world.is_local_rank_zero:
                made = Path(tempfile.mkdtemp(prefix="echelon-load-"))
                self._drop_copy = weakref.finalize(self, shutil.rmtree, made, True)
        announced = gather_json([world.node_rank, None if made is None else str(made), places], gather_bytes)
        folder = next(Path(one) for node, one, _places in announced if node == world.node_rank and one is not None)
        copy, found = folder / (path.name or "checkpoint"), location(announced[0][2][0])
        assert isinstance(found, ObjectPath)
        logger.info("copying %s to %s", found, copy)
        with raise_on_all_ranks(f"reading {path}"):
            try:
                object_store.download(found, copy, share=world.local_rank, num_shares=world.local_world_size)
            except OSError as error:
                raise CheckpointError(
                    _("{path} could not be copied to {folder}: {error}", path=path, folder=copy, error=error),
                    do=_("resolve the error above; TMPDIR sets the folder"),
                ) from error
        self._copy = (copy, path)
        return copy

    def origin(self, folder: Path) -> Location:
        """Return the checkpoint that ``fetch`` has copied to ``folder``; others unchanged."""
        return self._copy[1] if self._copy is not None and self._copy[0] == folder else folder

    def drop_copy(self) -> None:
        """Delete the local copy that ``fetch`` made."""
        if self._drop_copy is not None:
            self._drop_copy()
        self._copy = None

    def _note_failure(self, error: SaveFailedError) -> None:
        """Count ``error``, which was raised on every rank, and warn about it.

        Raises:
            TooManyFailedSavesError: ``max_failed_saves`` consecutive saves have failed.
        """
        self._failures_in_a_row += 1
        if self._last_failure is None:
            atexit.register(_tell_of_failed_save, weakref.ref(self))
        self._last_failure = error.what
        number, limit = self._failures_in_a_row, self._project.max_failed_saves
        if number >= limit:
            raise TooManyFailedSavesError(
                f"{number} consecutive checkpoints could not be written; the last error was:\n{error.what}",
                do=f"{error.do}. The process exits with code {EXIT_CODE}; the launcher may report a different one",
            ) from error
        warn(
            _(
                "{what}\n  Training continues ({number} of at most {limit} failures in a row).",
                what=error.what,
                number=number,
                limit=limit,
            )
        )


def _tell_of_failed_save(store: weakref.ref[CheckpointStore]) -> None:
    """Say at the end of the process that its last save has failed."""
    found = store()
    if found is not None and found._failures_in_a_row:
        text = _(
            "the last save of this run has failed, so its newest state is not on disk: {what}", what=found._last_failure
        )
        logger.error("%s", text)


def no_folder_error(function: str, *, do: str) -> UsageError:
    """Return the error for a call without a folder when checkpoints are not named automatically."""
    return UsageError(
        f"{function}() was called without a folder",
        do=f"{do}, or set ProjectConfiguration(automatic_checkpoint_naming=True)",
    )


def metric_of(folder: Location) -> float | None:
    """Return the metric that was passed to ``save_state``; None if there is none or it cannot be read."""
    try:
        metric = Checkpoint(folder).objects().get("accelerator", {}).get("metric")
    except (CheckpointError, OSError):
        return None
    return metric if isinstance(metric, (int, float)) else None
