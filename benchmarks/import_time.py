"""Measures what echelon adds to the start of a program: `import echelon` and `echelon --help`, compared with `import torch` and `pass`."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

ROUNDS = 7
COMMAND = Path(sys.executable).parent / "echelon"
PROGRAMS = {
    "python -c pass": [sys.executable, "-c", "pass"],
    "import echelon": [sys.executable, "-c", "import echelon"],
    "echelon --help": [str(COMMAND), "--help"],
    "import torch": [sys.executable, "-c", "import torch"],
    "import torch, echelon": [sys.executable, "-c", "import torch, echelon"],
    "import torch, echelon.distributed": [sys.executable, "-c", "import torch, echelon.distributed"],
}


def main() -> None:
    seconds: dict[str, list[float]] = {name: [] for name in PROGRAMS}
    for number in range(ROUNDS + 1):
        for name, program in PROGRAMS.items():  # interleaved, so that load on the machine affects all alike
            started = time.perf_counter()
            subprocess.run(program, check=True, stdout=subprocess.DEVNULL)
            if number > 0:  # the first round fills the disk cache
                seconds[name].append(time.perf_counter() - started)
    width = max(map(len, PROGRAMS))
    print(f"{'start to exit, ms':{width}}  median    min    max   ({ROUNDS} rounds, interleaved)")
    for name, values in seconds.items():
        ms = [1000 * value for value in (statistics.median(values), min(values), max(values))]
        print(f"{name:{width}}  {ms[0]:6.0f} {ms[1]:6.0f} {ms[2]:6.0f}")


if __name__ == "__main__":
    main()
