"""Repeats every test file that starts processes, next to busy loops, to find races that fail once in twenty runs.

``python -m tests.repeat --times 20 --beside 2 [--record FILE] [FILES]``, as ``make repeat`` does. It continues after a
failure and prints a list at the end. With ``--record`` it appends each run to FILE as a line of JSON, and a second start resumes
after the last one:
``{"round": 1, "file": "tests/ranks/distributed/test_setup.py", "code": 0, "failed": [], "seconds": 12.3}``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("ranks", "launch", "machines")
STARTS_PROCESSES = re.compile(r"run_on_ranks|subprocess\.|Popen|os\.fork|num_workers=[1-9]|multiprocessing|WarmStarter")
# Exits with this process, however that exits.
BUSY = "import os, sys\nwhile os.getppid() == int(sys.argv[1]): pass"
_NO_TESTS_RAN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One file in one round."""

    round: int
    file: str
    code: int
    """Exit code of pytest."""
    failed: list[str]
    """Failed tests, or the file if no test is named."""
    seconds: float


def files() -> list[Path]:
    """Return the test files that start processes."""
    found = [path for folder in FOLDERS for path in sorted((ROOT / "tests" / folder).rglob("test_*.py"))]
    units = sorted((ROOT / "tests" / "unit").rglob("test_*.py"))
    return found + [path for path in units if STARTS_PROCESSES.search(path.read_text(encoding="utf-8"))]


def recorded(record: Path | None) -> list[Run]:
    """Return the runs of earlier starts; an incomplete last line is removed."""
    if record is None or not record.exists():
        return []
    text = record.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        record.write_text(whole, encoding="utf-8")
    return [Run(**json.loads(line)) for line in whole.splitlines()]


def run_file(path: Path, *, number: int, file: str) -> Run:
    """Run the tests of ``path`` in a separate pytest; print its output if a test fails."""
    began = time.monotonic()
    command = [sys.executable, "-m", "pytest", "-m", "not soak and not gpu", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    failed: list[str] = []
    if done.returncode not in (0, _NO_TESTS_RAN):
        named = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
        failed = named or [f"{path} (exit code {done.returncode})"]
        print(f"----- round {number}: {path}\n{done.stdout}{done.stderr}", flush=True)
    seconds = round(time.monotonic() - began, 1)
    return Run(round=number, file=file, code=done.returncode, failed=failed, seconds=seconds)


def main(argv: list[str] | None = None) -> int:
    """Run all files, and return the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--beside", type=int, default=0, help="busy loops that run meanwhile")
    parser.add_argument("--record", type=Path, help="note each run in this file, and leave out those that are in it")
    parser.add_argument("files", nargs="*", type=Path)
    options = parser.parse_args(argv)
    paths = {_name(path): path for path in options.files or files()}
    runs = recorded(options.record)
    known = {(run.round, run.file) for run in runs}
    if known:
        print(f"{options.record}: goes on after {len(known)} runs", flush=True)
    # Files with soak tests only are not collected in each round.
    empty = {run.file for run in runs if run.code == _NO_TESTS_RAN}
    busy = [subprocess.Popen([sys.executable, "-c", BUSY, str(os.getpid())]) for _ in range(options.beside)]
    try:
        for number in range(1, options.times + 1):
            for name, path in paths.items():
                if (number, name) in known or name in empty:
                    continue
                run = run_file(path, number=number, file=name)
                runs.append(run)
                if run.code == _NO_TESTS_RAN:
                    empty.add(name)
                if options.record is not None:
                    with options.record.open("a", encoding="utf-8") as record:
                        record.write(json.dumps(asdict(run)) + "\n")
            seconds = sum(run.seconds for run in runs if run.round == number)
            num_failures = sum(len(run.failed) for run in runs)
            print(f"round {number} of {options.times}: {seconds:.0f} s, {num_failures} failures so far", flush=True)
    finally:
        for process in busy:
            process.kill()
            process.wait()
    print(
        f"{len(runs)} runs in {sum(run.seconds for run in runs):.0f} s, {options.beside} busy loops beside them; the longest:"
    )
    by_file: dict[str, float] = {}
    for run in runs:
        by_file[run.file] = by_file.get(run.file, 0.0) + run.seconds
    for name, total in sorted(by_file.items(), key=lambda item: -item[1])[:5]:
        print(f"{total:.0f} s: {name}")
    failures = Counter(name for run in runs for name in run.failed)
    for name, count in failures.most_common():
        print(f"{count} times: {name}")
    return 1 if failures else 0


def _name(path: Path) -> str:
    """Return the path relative to the root of the repository, so that another checkout can use it."""
    path = path.resolve()
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.as_posix()


if __name__ == "__main__":
    sys.exit(main())
