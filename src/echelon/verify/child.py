"""Runs the user's script with its steps recorded: ``python -m echelon.verify.child FOLDER script.py args``.

``echelon verify`` starts one on each rank, and says in the folder's ``run.json`` what to record. The script is not changed. It ends after its
updates, wherever it is.
"""

from __future__ import annotations

import faulthandler
import json
import os
import runpy
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from echelon.verify.parts import record_everything
from echelon.verify.recording import recording
from echelon.verify.trace import RUN_FILE, RecordingSettings
from echelon.world.environment import detect
from echelon.world.seed import set_seed

_WAIT_S = 30.0
_POLL_S = 0.02


def main(argv: Sequence[str] | None = None) -> None:
    """Run the script. Leaves the process after the last update."""
    folder, script, *arguments = sys.argv[1:] if argv is None else argv
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    run = RecordingSettings(**json.loads((Path(folder) / RUN_FILE).read_text(encoding="utf-8")))
    world = detect()
    with (Path(folder) / f"rank_{world.rank}.stacks").open("w", encoding="utf-8") as stacks:
        if run.stacks_after_s:
            faulthandler.dump_traceback_later(run.stacks_after_s, file=stacks)
        set_seed(run.seed + world.rank)
        try:
            _record(run, Path(folder), world.rank, world.world_size)
        finally:
            faulthandler.cancel_dump_traceback_later()


def _record(run: RecordingSettings, folder: Path, rank: int, world_size: int) -> None:
    done = folder / f"rank_{rank}.done"

    def leave() -> None:
        done.touch()
        _wait_for_ranks(folder, world_size)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        # In the middle of the script, whose own handlers (except, finally, atexit) must not run on a recorded part of a training.
        os._exit(0)

    ended: SystemExit | None = None
    with recording(folder, run, rank=rank, on_done=leave) as one:
        record_everything(one)
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit as error:
            ended = error
    done.touch()
    if ended is not None:
        raise ended


def _wait_for_ranks(folder: Path, world_size: int) -> None:
    """Wait until the other ranks have recorded everything: the launcher would stop them when the first one leaves."""
    deadline = time.monotonic() + _WAIT_S
    files = [folder / f"rank_{rank}.done" for rank in range(world_size)]
    while time.monotonic() < deadline and not all(file.exists() for file in files):
        time.sleep(_POLL_S)


if __name__ == "__main__":
    main()
