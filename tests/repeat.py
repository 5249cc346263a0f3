"""Run every test file that starts processes again and again, in pieces, beside other work: what fails once in twenty is a race.

``python -m tests.repeat --times 20 --beside 2 [FILES]``, as ``make repeat`` does. It goes on after a failure and ends with a list.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("ranks", "launch", "machines")
STARTS_PROCESSES = re.compile(r"run_on_ranks|subprocess\.|Popen|os\.fork|num_workers=[1-9]|multiprocessing|WarmStarter")
BUSY = "while True: pass"
_NO_TESTS_RAN = 5


def files() -> list[Path]:
    """Return the test files that start processes."""
    found = [path for folder in FOLDERS for path in sorted((ROOT / "tests" / folder).glob("test_*.py"))]
    units = sorted((ROOT / "tests" / "unit").glob("test_*.py"))
    return found + [path for path in units if STARTS_PROCESSES.search(path.read_text(encoding="utf-8"))]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--beside", type=int, default=0, help="busy loops that run meanwhile")
    parser.add_argument("files", nargs="*", type=Path)
    options = parser.parse_args()
    busy = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(options.beside)]
    failures: Counter[str] = Counter()
    began, num_runs = time.monotonic(), 0
    try:
        for number in range(options.times):
            for path in options.files or files():
                command = [sys.executable, "-m", "pytest", "-m", "not soak and not gpu", str(path)]
                done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
                num_runs += 1
                if done.returncode not in (0, _NO_TESTS_RAN):
                    named = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
                    failures.update(named or [f"{path} (exit code {done.returncode})"])
                    print(f"----- round {number + 1}: {path}\n{done.stdout}{done.stderr}", flush=True)
            print(f"round {number + 1} of {options.times}: {failures.total()} failures so far", flush=True)
    finally:
        for process in busy:
            process.kill()
            process.wait()
    print(f"{num_runs} runs in {time.monotonic() - began:.0f} s, {options.beside} busy loops beside them")
    for name, count in failures.most_common():
        print(f"{count} times: {name}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
