"""``python -m tests.mutants``: verifies all planted faults, and prints the table of docs/verify.md.

``--write`` writes it to the page; ``--clean N`` verifies N random scripts without faults; further arguments select faults by a part of
their name, their script or their number.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.harness import shut_down
from tests.mutants.catalogue import MUTANTS
from tests.mutants.clean_runs import clean_run
from tests.mutants.mutant import Mutant
from tests.mutants.runner import Outcome, WarmRecorder, outcome_of
from tests.mutants.table import table_of
from tests.verify_causes import PAGE, page_with


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--clean", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="seed of the first clean run")
    parser.add_argument("words", nargs="*")
    options = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "ECHELON_NO_RECORD": "1"}
    try:
        with TemporaryDirectory() as folder:
            recorder = WarmRecorder(Path(folder))
            if options.clean:
                return _verify_clean(range(options.first, options.first + options.clean), recorder)
            chosen = [one for one in MUTANTS if not options.words or _is_chosen(one, options.words)]
            outcomes = [_verify(mutant, recorder) for mutant in chosen]
    finally:
        shut_down(for_good=True)
    table = table_of(outcomes)
    print(table)
    if options.write:
        page = page_with(table, PAGE.read_text(encoding="utf-8"), name="planted faults")
        PAGE.write_text(page, encoding="utf-8")
    return 0 if all(one.is_found_late for one in outcomes) else 1


def _verify_clean(seeds: range, recorder: WarmRecorder) -> int:
    alarms, scripts = 0, set()
    for seed in seeds:
        run = clean_run(seed)
        scripts.add(run.text)
        alarm = run.alarm(recorder)
        alarms += bool(alarm)
        if alarm:
            print(alarm, flush=True)
    print(f"{alarms} alarms in {len(seeds)} runs of {len(scripts)} scripts without faults")
    return int(alarms > 0)


def _verify(mutant: Mutant, recorder: WarmRecorder) -> Outcome:
    began = time.monotonic()
    one = outcome_of(mutant, recorder)
    word = "ok" if one.is_localized else "FOUND AT ANOTHER PLACE" if one.is_found else "NOT FOUND"
    print(f"{word}: {mutant.name} [{mutant.script}] {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
    if not one.is_localized:
        print(
            f"    expected update {mutant.update}, {mutant.stages}, {mutant.tensors!r}; got {one.result} {one.update} "
            f"{one.stage!r} {one.tensors[:4]} ({one.cause}) {one.what} {one.reason[-800:]}",
            file=sys.stderr,
            flush=True,
        )
    return one


def _is_chosen(mutant: Mutant, words: list[str]) -> bool:
    return any(word in mutant.name or word == mutant.script for word in words)


if __name__ == "__main__":
    sys.exit(main())
