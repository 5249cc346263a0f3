"""Runs a program of `programs/` natively and with echelon in the place of accelerate and transformers' Trainer.

``python tests/ecosystem/run.py [PROGRAM ...]`` prints the largest difference of each value. The results of the native runs are kept
for the length of one run of the tests.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PYTHON = ROOT / ".venv-ecosystem" / "bin" / "python"

Way = Literal["native", "launch --as", "install"]
WAYS: tuple[Way, ...] = ("launch --as", "install")
TOLERANCE = 1e-6

# Name -> file and arguments.
PROGRAMS: dict[str, tuple[str, ...]] = {
    "sft": ("sft.py",),
    "sft packed": ("sft.py", "--packed"),
    "dpo": ("dpo.py",),
    "sentence-transformers": ("sentences.py",),
    "setfit": ("fewshot.py",),
    "denoising-diffusion": ("denoising.py",),
    "pytorch-accelerated": ("loops.py",),
    "diffusers": ("diffusion_ema.py",),
    "lora": ("lora.py",),
    "glue": ("glue.py",),
    "evaluation": ("evaluation.py",),
}

_FIRST_LINE = 'import echelon.compat; echelon.compat.install("accelerate", "transformers")\n'


class ProgramFailedError(Exception):
    """A program ended with an error; the text is the end of its output."""


@dataclass(frozen=True)
class Run:
    """The printed values by name, and the output of the program."""

    values: dict[str, Any]
    output: str


def run(
    name: str,
    way: Way,
    num_processes: int,
    *,
    args: tuple[str, ...] = (),
    flags: tuple[str, ...] = (),
    timeout_s: float = 600.0,
) -> Run:
    """Run a program in a new folder.

    Args:
        name: key of ``PROGRAMS``.
        way: ``native``; ``launch --as``: by echelon's launcher; ``install``: with one more line, by python or torchrun.
        num_processes: number of processes.
        args: further arguments of the program.
        flags: further flags of echelon's launcher.
        timeout_s: time limit.

    Raises:
        ProgramFailedError: the program failed.
    """
    file, *own = PROGRAMS[name]
    with tempfile.TemporaryDirectory(prefix="ecosystem-") as folder:
        script = HERE / "programs" / file
        if way == "install":
            script = Path(folder) / file
            script.write_text(_FIRST_LINE + (HERE / "programs" / file).read_text())
        if way == "launch --as":
            starter = [
                "-m",
                "echelon",
                "launch",
                "--as",
                "accelerate,transformers",
                "--cpu",
                "--num_processes",
                str(num_processes),
                *flags,
            ]
        elif num_processes > 1:
            starter = ["-m", "torch.distributed.run", "--nproc_per_node", str(num_processes)]
        else:
            starter = []
        source = [] if way == "native" else [str(ROOT / "src")]
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("ECHELON_", "ACCELERATE_", "TORCHELASTIC_"))
            and name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        }
        done = subprocess.run(
            [str(PYTHON), *starter, str(script), *own, *args],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=timeout_s,
            env={
                **inherited,
                "PYTHONPATH": os.pathsep.join([*source, str(HERE / "programs")]),
                "HF_HOME": f"{folder}/huggingface",
                "HF_HUB_OFFLINE": "1",
                "ACCELERATE_USE_CPU": "true",
                "CUDA_VISIBLE_DEVICES": "",
                "GLOO_SOCKET_IFNAME": "lo",
                "OMP_NUM_THREADS": "1",
                "TOKENIZERS_PARALLELISM": "false",
            },
        )
    results = [line.removeprefix("RESULT ") for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode != 0 or len(results) != 1:
        raise ProgramFailedError(
            f"{name} ({way}, {num_processes} processes): exit code {done.returncode}\n{done.stdout[-6000:]}"
        )
    return Run(values=json.loads(results[0]), output=done.stdout)


def compare(native: dict[str, Any], swapped: dict[str, Any]) -> dict[str, float]:
    """Return name -> largest difference, relative for values above 1; infinite for values that cannot be compared."""
    one, other = dict(_flat(native)), dict(_flat(swapped))
    found: dict[str, float] = {}
    for (name, i), value in one.items():
        distance = _distance(value, other.get((name, i)))
        found[name] = max(found.get(name, 0.0), distance)
    for name, _ in set(other) - set(one):
        found[name] = math.inf
    return found


def _distance(one: Any, other: Any) -> float:
    if isinstance(one, (int, float)) and isinstance(other, (int, float)):
        return abs(one - other) / max(1.0, abs(one))
    return 0.0 if one == other else math.inf


def _flat(
    values: Any, name: str = "", place: tuple[int, ...] = ()
) -> Iterator[tuple[tuple[str, tuple[int, ...]], Any]]:
    if isinstance(values, dict):
        for key, value in values.items():
            yield from _flat(value, f"{name}.{key}".strip("."), place)
    elif isinstance(values, list):
        yield (f"length of {name}", place), len(values)
        for i, value in enumerate(values):
            yield from _flat(value, name, (*place, i))
    else:
        yield (name, place), values


def main() -> None:
    for name in sys.argv[1:] or PROGRAMS:
        for num_processes in (1, 2):
            try:
                native = run(name, "native", num_processes).values
            except ProgramFailedError as error:
                print(error)
                continue
            for way in WAYS:
                try:
                    found = compare(native, run(name, way, num_processes).values)
                except ProgramFailedError as error:
                    print(error)
                    continue
                different = {key: float(f"{value:.2g}") for key, value in found.items() if value > TOLERANCE}
                print(f"{name}, {num_processes} processes, {way}: {different or 'equal'}", flush=True)


if __name__ == "__main__":
    main()
