"""Runs a program of `programs/` natively and with echelon in the place of accelerate and transformers' Trainer.

``python -m tests.ecosystem.run [PROGRAM ...]`` prints the largest difference of each value. With ``ECOSYSTEM_NATIVE_RUNS=FOLDER`` the
results of native runs are kept in that folder and used again, until the program or the pinned versions change.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tests.ecosystem.bounded import run_bounded

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PYTHON = ROOT / ".venv-ecosystem" / "bin" / "python"

Way = Literal["native", "launch --as", "torchrun, install()", "echelon launch, install()", "python, install()"]
WAYS: tuple[Way, ...] = ("launch --as", "torchrun, install()")
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
    "rules": ("rules.py",),
}

FIRST_LINE = 'import echelon.compat; echelon.compat.install("accelerate", "transformers")\n'


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
    """Run a program in a new folder, or return the kept result of a native run.

    Args:
        name: key of ``PROGRAMS``.
        way: ``native``: by python or torchrun; ``launch --as``: by echelon's launcher; ``..., install()``: with one more line in the
            program, by that launcher.
        num_processes: number of processes.
        args: further arguments of the program.
        flags: further flags of echelon's launcher.
        timeout_s: time limit.

    Raises:
        ProgramFailedError: the program failed.
    """
    file, *own = PROGRAMS[name]
    kept = _kept_file(name, num_processes, args) if way == "native" else None
    if kept is not None and kept.exists():
        return Run(**json.loads(kept.read_text()))
    with tempfile.TemporaryDirectory(prefix="ecosystem-") as folder:
        script = HERE / "programs" / file
        if way.endswith("install()"):
            script = Path(folder) / file
            script.write_text(FIRST_LINE + (HERE / "programs" / file).read_text())
        done = run_bounded(
            [str(PYTHON), *starter(way, num_processes, flags), str(script), *own, *args],
            folder=Path(folder),
            variables=environment(Path(folder), [HERE / "programs"], source=way != "native"),
            timeout_s=timeout_s,
        )
    results = [line.removeprefix("RESULT ") for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode != 0 or len(results) != 1:
        raise ProgramFailedError(
            f"{name} ({way}, {num_processes} processes): exit code {done.returncode}\n{done.stdout[-6000:]}"
        )
    if kept is not None:
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps({"values": json.loads(results[0]), "output": done.stdout}))
    return Run(values=json.loads(results[0]), output=done.stdout)


def environment(folder: Path, paths: Iterable[Path], *, source: bool = False) -> dict[str, str]:
    """Return the variables of a program that computes on CPUs, downloads nothing, and finds modules in ``paths``.

    Args:
        folder: folder for the caches.
        paths: folders of modules.
        source: also find this checkout's echelon.
    """
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("ECHELON_", "ACCELERATE_", "TORCHELASTIC_"))
        and name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    found_in = [*([ROOT / "src"] if source else []), *paths]
    return {
        **inherited,
        "PYTHONPATH": os.pathsep.join(map(str, found_in)),
        "HF_HOME": f"{folder}/huggingface",
        "HF_HUB_OFFLINE": "1",
        "ACCELERATE_USE_CPU": "true",
        "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def starter(way: Way, num_processes: int, flags: tuple[str, ...] = ()) -> list[str]:
    """Return the arguments of python that start a program in this way."""
    if way in ("launch --as", "echelon launch, install()"):
        swap = ["--as", "accelerate,transformers"] if way == "launch --as" else []
        return ["-m", "echelon", "launch", *swap, "--cpu", "--num_processes", str(num_processes), *flags]
    if way == "torchrun, install()" or (way == "native" and num_processes > 1):
        return ["-m", "torch.distributed.run", "--nproc_per_node", str(num_processes)]
    assert num_processes == 1, way
    return []


def _kept_file(name: str, num_processes: int, args: tuple[str, ...]) -> Path | None:
    """Return the file of a native run's result; its name depends on everything that decides the result."""
    folder = os.environ.get("ECOSYSTEM_NATIVE_RUNS")
    if not folder:
        return None
    parts = [HERE / "programs" / PROGRAMS[name][0], HERE / "programs" / "tiny.py", HERE / "constraints.txt"]
    content = b"".join(part.read_bytes() for part in parts) + repr((PROGRAMS[name], num_processes, args)).encode()
    return Path(folder) / f"{name.replace(' ', '-')}-{num_processes}-{hashlib.sha256(content).hexdigest()[:16]}.json"


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
        if math.isnan(one) or math.isnan(other):
            return 0.0 if math.isnan(one) and math.isnan(other) else math.inf
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
