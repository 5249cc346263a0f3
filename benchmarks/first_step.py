"""Measures the time to the first step of examples/mnist_trainer.py with echelon and, with the import changed, with transformers.

The time is from the start of the process to the first call of the model in training. Both run the same script, without the line
that prints echelon's `world`, and with a collator, because transformers' default one does not accept pairs. Python's bytecode is
cached between the rounds, as for installed packages; otherwise a read-only checkout would be compiled in every round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from results import footer, installed, publish, verdict

HEADING = "## Time to the first step"
EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
ROUNDS = 7
LIMIT = 0.5
LIBRARIES = ("echelon", "transformers")

PROGRAM = """
import json, os, sys, time
started, source = float(sys.argv[1]), sys.argv[2]
sys.argv = ["mnist_trainer.py"]
sys.path.insert(0, {examples!r})
import mnist_net

def first(self, images):
    print(json.dumps([time.time() - started, time.process_time()]), flush=True)
    os._exit(0)

mnist_net.Net.forward = first
exec(compile(source, "mnist_trainer.py", "exec"), {{"__name__": "__main__"}})
"""


def script(library: str) -> str:
    """Return the source of the example for ``library``."""
    text = (EXAMPLES / "mnist_trainer.py").read_text()
    for old, new in (
        ("from echelon import", f"from {library} import"),
        ('    print(f"world: {trainer.accelerator.world}", flush=True)\n', ""),
        ("compute_metrics=accuracy", "compute_metrics=accuracy, data_collator=default_collate"),
        ("from mnist_data import", "from torch.utils.data import default_collate\nfrom mnist_data import"),
    ):
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def measure(library: str, *, bytecode: str) -> tuple[float, float]:
    """Return the wall and CPU seconds to the first step. ``bytecode`` is the folder of Python's bytecode cache."""
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": bytecode, "PYTHONDONTWRITEBYTECODE": ""}
    program = [sys.executable, "-c", PROGRAM.format(examples=str(EXAMPLES)), str(time.time()), script(library)]
    done = subprocess.run(
        program, env=environment, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    wall, cpu = json.loads(done.stdout.splitlines()[-1])
    return wall, cpu


def report(found: dict[str, list[tuple[float, float]]], *, rounds: int) -> str:
    rows = ["| library | seconds | min - max | CPU seconds |", "|---|---:|---:|---:|"]
    for library, values in found.items():
        walls, cpus = zip(*values)
        rows.append(
            f"| {library} | {statistics.median(walls):.2f} | {min(walls):.2f} - {max(walls):.2f} | {statistics.median(cpus):.2f} |"
        )
    lines = []
    if len(found) == len(LIBRARIES):
        wall, cpu = (statistics.median(a[i] / b[i] for a, b in zip(*found.values(), strict=True)) for i in (0, 1))
        lines = [
            f"- echelon takes {wall:.2f} times as long as transformers (target: {LIMIT}, {verdict(wall <= LIMIT)}), and {cpu:.2f} times the CPU time"
        ]
    return f"""{HEADING}

The time from the start of the process of examples/mnist_trainer.py to its first forward pass, with the complete MNIST. The
libraries alternate for {rounds} rounds, and the ratio is the median over the rounds.

{chr(10).join(rows)}

{chr(10).join(lines)}

{footer("first_step.py", "transformers", needs_peers=True)}"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--write", action="store_true", help="write the table to benchmarks/RESULTS.md")
    options = parser.parse_args()
    libraries = [name for name in LIBRARIES if installed(name)]
    if len(libraries) < len(LIBRARIES):
        print("!! transformers is not installed: only echelon is measured. To compare: make peers, make bench.")
        if options.write:
            sys.exit("--write requires transformers, because the table compares it with echelon")
    found: dict[str, list[tuple[float, float]]] = {library: [] for library in libraries}
    with tempfile.TemporaryDirectory() as bytecode:
        for number in range(options.rounds + 1):
            for library in libraries:  # interleaved, so that load on the machine affects both alike
                seconds = measure(library, bytecode=bytecode)
                if number > 0:  # the first round fills the disk and bytecode caches
                    found[library].append(seconds)
    section = report(found, rounds=options.rounds)
    publish(section, is_written=options.write)


if __name__ == "__main__":
    main()
