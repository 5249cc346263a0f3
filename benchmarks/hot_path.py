"""Counts what echelon adds to one training step: Python calls and, with valgrind, processor instructions beyond the plain loop's.

Unlike times, counts do not depend on the machine's load, so ``make bench-check`` compares them with those in hot_path.json. The
variants are those of overhead.py: AdamW, a scheduler, a tiny MLP, and a loader whose items are whole batches.
"""

from __future__ import annotations

import argparse
import collections
import functools
import gc
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from itertools import pairwise
from multiprocessing import util
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.utils.data import Dataset

sys.path.insert(0, str(Path(__file__).parent))
import overhead

STORED = Path(__file__).with_suffix(".json")
TOLERANCE = 1.05
FIRST, NUM_STEPS, TOTAL = (
    132,
    96,
    240,
)  # measured steps: a multiple of an update, without a power of two (the first ones do more)
PLAIN = {"": "plain loop", "accumulating": "plain loop, accumulating", "clipping": "plain loop, clipping"}

Counts = collections.Counter[tuple[str, str]]


class Steps(Dataset[dict[str, torch.Tensor]]):
    """Prepared batches that call ``begin`` and ``end`` around the measured steps."""

    def __init__(
        self,
        begin: Callable[[], None],
        end: Callable[[], None],
        at_update: Callable[[], None] = lambda: None,
        *,
        num_steps: int = NUM_STEPS,
    ) -> None:
        self.items = [{"inputs": torch.randn(8, 16), "labels": torch.randint(4, (8,))} for _ in range(32)]
        self._begin, self._end, self._at_update = begin, end, at_update
        self._last = FIRST + num_steps
        self._taken = 0

    def __len__(self) -> int:
        return self._last + TOTAL - FIRST - NUM_STEPS

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        self._taken += 1
        if self._taken == FIRST:
            self._begin()
        elif self._taken == self._last:
            self._at_update()
            self._end()
        elif FIRST < self._taken < self._last and (self._taken - FIRST) % overhead.ACCUMULATION == 0:
            self._at_update()
        return self.items[number % 32]


def level_1(steps: Any, run: Callable[[Any], None]) -> None:
    """Run a plain loop in a process group of one process."""
    from echelon.distributed import process_group

    with process_group():
        run(steps)


def level_2_clipping(steps: Any) -> None:
    from echelon import Accelerator

    accelerator = Accelerator(cpu=True)
    model, optimizer, scheduler, loader = accelerator.prepare(*overhead.parts(steps))
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch)["loss"]
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()


VARIANTS: dict[str, Callable[[Any], None]] = {
    "plain loop": overhead.plain,
    "plain loop, accumulating": overhead.plain_with_accumulation,
    "plain loop, clipping": overhead.plain_with_clipping,
    "level 1": functools.partial(level_1, run=overhead.plain),
    "level 2": overhead.level_2,
    "level 2, accumulating": functools.partial(overhead.level_2, accumulation=overhead.ACCUMULATION),
    "level 2, clipping": level_2_clipping,
    "level 3": overhead.level_3,
    "level 3, accumulating": functools.partial(overhead.level_3, accumulation=overhead.ACCUMULATION),
    "level 3, clipping": functools.partial(overhead.level_3, max_norm=1.0),
}


@functools.cache
def folder() -> str:
    """Return a folder for the files of this process, which is removed after echelon has completed its record of the run."""
    path = tempfile.mkdtemp(prefix="hot_path")
    util.Finalize(None, shutil.rmtree, args=(path,), kwargs={"ignore_errors": True}, exitpriority=0)
    return path


def run(name: str, steps: Steps, *, records: bool) -> None:
    """Run one variant. ``records``: with the record of the run that echelon writes by default."""
    from echelon.base import environ

    torch.set_num_threads(1)
    before = os.getcwd()
    with warnings.catch_warnings(), redirect_stdout(StringIO()):
        warnings.simplefilter("ignore")
        os.chdir(folder())
        try:
            with environ.patch({"ECHELON_NO_RECORD": None if records else "1"}):
                VARIANTS[name](steps)
        finally:
            os.chdir(before)


def count(name: str, *, records: bool = False) -> tuple[Counts, float]:
    """Return the Python calls of the measured steps by file and function, and their number per step.

    The number is the median of the updates, because a record of the run is completed once per second.
    """
    counts: Counts = collections.Counter()
    totals = [0]

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            code = frame.f_code
            counts[code.co_filename, code.co_name] += 1

    gc.collect()
    gc.disable()  # finalizers would be counted where they happen to run
    try:
        steps = Steps(lambda: sys.setprofile(note), lambda: sys.setprofile(None), lambda: totals.append(counts.total()))
        run(name, steps, records=records)
    finally:
        sys.setprofile(None)
        gc.enable()
    return counts, statistics.median(after - before for before, after in pairwise(totals)) / overhead.ACCUMULATION


def measure(names: list[str] | None = None) -> dict[str, float]:
    """Return for each variant how many Python calls it adds to a step of the plain loop that does the same work."""
    wanted = {name.partition(", ")[2] for name in names or VARIANTS}
    plain = {kind: count(name)[1] for kind, name in PLAIN.items() if kind in wanted}
    found = {}
    for records in (False, True):
        for name in VARIANTS:
            level, _, kind = name.partition(", ")
            if level == "plain loop" or (records and kind) or (names and name not in names):
                continue
            found[f"{name}, recorded" if records else name] = count(name, records=records)[1] - plain[kind]
    return found


def exceeded(found: dict[str, float], stored: dict[str, float]) -> list[str]:
    """Return one line for each count that is more than 5 % above the stored one, or that is not stored."""
    return [
        f"{name}: {found[name]:g} Python calls per step beyond the plain loop's, stored {stored.get(name, 'none')}"
        for name in found
        if name not in stored or found[name] > stored[name] + abs(stored[name]) * (TOLERANCE - 1)
    ]


# ---- instructions ----------------------------------------------------------------------------------------------------


def instructions(names: list[str]) -> dict[str, float]:
    """Return thousands of instructions per step, from the difference between two runs under valgrind, minus the plain loop's."""
    plain = {kind: _instructions_per_step(name) for kind, name in PLAIN.items()}
    return {name: round(_instructions_per_step(name) - plain[name.partition(", ")[2]], 1) for name in names}


def _instructions_per_step(name: str) -> float:
    short, long = (_instructions_of_run(name, num_steps) for num_steps in (NUM_STEPS, 3 * NUM_STEPS))
    return (long - short) / (2 * NUM_STEPS) / 1000


def _instructions_of_run(name: str, num_steps: int) -> int:
    own = [sys.executable, str(Path(__file__)), "--run", name, str(num_steps)]
    tool = ["valgrind", "--tool=lackey", "--basic-counts=yes"]
    environment = {**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*tool, *own], capture_output=True, text=True, check=True, env=environment)
    match = re.search(r"guest instrs:\s+([\d,]+)", done.stderr)
    assert match is not None, done.stderr[-2000:]
    return int(match[1].replace(",", ""))


def show(name: str, *, records: bool) -> None:
    """Print the calls per step that ``name`` adds to those of the plain loop, by function."""
    counts, _ = count(name, records=records)
    counts.subtract(count(PLAIN[name.partition(", ")[2]])[0])
    print(f"{counts.total() / NUM_STEPS:.2f} Python calls per step beyond the plain loop's")
    for (file, function), number in sorted(counts.items(), key=lambda one: -one[1]):
        if number and Path(file) != Path(__file__):
            print(f"{number / NUM_STEPS:8.2f} {file.split('site-packages/')[-1].split('/src/')[-1]} {function}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help=f"fail if a count is 5 %% above that in {STORED.name}")
    parser.add_argument("--variant", action="append", help="count only this variant; may be repeated")
    parser.add_argument("--stored", type=Path, default=STORED, help="other file with the counts to compare with")
    parser.add_argument("--write", action="store_true", help=f"store the counts in {STORED.name}")
    parser.add_argument("--show", metavar="VARIANT", help="list the calls of one variant")
    parser.add_argument("--recorded", action="store_true", help="with --show: with the record of the run")
    parser.add_argument(
        "--instructions", action="store_true", help="count instructions, too (minutes; requires valgrind)"
    )
    parser.add_argument("--run", nargs=2, metavar=("VARIANT", "STEPS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        name, num_steps = options.run
        run(name, Steps(lambda: None, lambda: None, num_steps=int(num_steps)), records=False)
        return
    if options.show:
        show(options.show, records=options.recorded)
        return
    found = measure(options.variant)
    stored = json.loads(options.stored.read_text()) if options.stored.exists() else {}
    for name, number in found.items():
        print(f"{number:8.2f} {name} (stored: {stored.get(name)})")
    if options.instructions:
        if shutil.which("valgrind") is None:
            sys.exit("--instructions requires valgrind")
        for name, number in instructions([name for name in VARIANTS if not name.startswith("plain")]).items():
            print(f"{number:8.1f} thousand instructions: {name}")
    if options.write:
        options.stored.write_text(json.dumps({**stored, **found}, indent=2) + "\n")
    elif options.check and (lines := exceeded(found, stored)):
        sys.exit("\n".join(lines))


if __name__ == "__main__":
    main()
