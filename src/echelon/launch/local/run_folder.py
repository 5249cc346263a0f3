"""The folder of a launcher's run."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from echelon.base.errors import ConfigError
from echelon.base.messages.terminal import say
from echelon.base.messages.translation import gettext as _
from echelon.launch.interrupts import Interrupted
from echelon.launch.local.ranks import STALL_FILE
from echelon.status.run_files import DEFAULT_PARENT
from echelon.status.run_recorder import RunRecorder, new_folder, run_name


@contextmanager
def run_folder(
    log_dir: str | None, *, name: str, machine: str, is_recorded: bool, began_ns: int
) -> Iterator[tuple[Path, RunRecorder]]:
    """Yield a new folder for the run, and the run's recorder, which records how the run ends if an exception ends it.

    The folder is created below ``log_dir`` or, for a recorded run, ``./echelon-runs``. If neither is possible, it is temporary
    and is kept only if it contains stacks from a stall.

    Args:
        log_dir: the folder that the user has chosen.
        name: the part of the folder's name that says what runs: the program, or the name that the user has given the run.
        machine: prefix that makes the name unique among machines; empty on a single machine.
        is_recorded: whether to record the run.
        began_ns: ``time.monotonic_ns()`` when the launcher started.

    Raises:
        ConfigError: the folder cannot be created below ``log_dir``.
    """
    name = run_name(name, f"{machine}{os.getpid()}")
    folder = None
    if log_dir is not None or is_recorded:
        folder = _create(Path(log_dir or DEFAULT_PARENT).absolute() / name, is_requested=log_dir is not None)
    if folder is not None:
        recorder = RunRecorder(folder if is_recorded else None, began_ns=began_ns)
        try:
            yield folder, recorder
        except Interrupted as stop:
            recorder.end("interrupted", 128 + stop.number)
            raise
        except BaseException:
            recorder.end("failed", 1)
            raise
        return
    folder = Path(tempfile.mkdtemp(prefix="echelon-"))
    try:
        yield folder, RunRecorder(None, began_ns=began_ns)
    finally:
        if not any(folder.glob(f"attempt_*/{STALL_FILE.format('*')}")):
            shutil.rmtree(folder, ignore_errors=True)


def _create(path: Path, *, is_requested: bool) -> Path | None:
    try:
        path = new_folder(path)
    except OSError as error:
        if is_requested:
            raise ConfigError(
                _("cannot create the log folder {path}: {strerror}", path=path, strerror=error.strerror),
                where=_("flag {name}", name="--log_dir"),
                do=_("pass a folder that you can write to"),
            ) from error
        say(
            _(
                "warning: the run is not recorded, because its folder {path} cannot be created: {strerror} "
                "(--log_dir DIR chooses another one, --no_record none)",
                path=path,
                strerror=error.strerror,
            ),
            kind="warning",
        )
        return None
    return path
