"""Runs the user's script with its steps recorded: ``python -m echelon.verify.child --folder F --steps S script.py args``.

``echelon verify`` starts one on each rank. The script is not changed. It ends after S updates, wherever it is.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import random
import runpy
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from echelon.verify.parts import default_parts
from echelon.verify.recording import recording
from echelon.world.environment import detect

_WAIT_S = 30.0
_POLL_S = 0.02


def main(argv: Sequence[str] | None = None) -> None:
    """Run the script. Leaves the process after the last update."""
    options = _parse(sys.argv[1:] if argv is None else argv)
    place = detect()
    rank, world_size = place.rank, place.world_size
    folder: Path = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"rank_{rank}.stacks").open("w", encoding="utf-8") as stacks:
        if options.stacks_after is not None:
            faulthandler.dump_traceback_later(options.stacks_after, file=stacks)
        _seed(options.seed, rank)
        try:
            _record(options, rank, world_size)
        finally:
            faulthandler.cancel_dump_traceback_later()


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m echelon.verify.child", allow_abbrev=False)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--float64", action="store_true")
    parser.add_argument("--batch_factor", type=int, default=1)
    parser.add_argument("--first_update", type=int, default=0)
    parser.add_argument("--perturbation", type=int, default=0)
    parser.add_argument("--gradient_errors", type=Path)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--stacks_after", type=float)
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    return parser.parse_args(argv)


def _seed(seed: int | None, rank: int) -> None:
    """Seed the generators differently on each rank, as they are in a script that does not seed them."""
    if seed is not None:
        random.seed(seed + rank)
        np.random.seed(seed + rank)
        torch.manual_seed(seed + rank)


def _record(options: argparse.Namespace, rank: int, world_size: int) -> None:
    folder: Path = options.folder
    done = folder / f"rank_{rank}.done"

    def leave() -> None:
        done.touch()
        _wait_for_ranks(folder, world_size)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        # In the middle of the script, whose own handlers (except, finally, atexit) must not run on a recorded part of a training.
        os._exit(0)

    sys.argv = [options.script, *options.arguments]
    sys.path[0] = str(Path(options.script).resolve().parent)
    ended: SystemExit | None = None
    with recording(
        folder,
        parts=default_parts(perturbation=options.perturbation, gradient_errors=options.gradient_errors),
        rank=rank,
        world_size=world_size,
        steps=options.steps,
        dtype="float64" if options.float64 else "own",
        batch_factor=options.batch_factor,
        first_update=options.first_update,
        on_done=leave,
    ):
        try:
            runpy.run_path(options.script, run_name="__main__")
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
