"""Checks and measures echelon on the accelerator of this machine, within a limit of time.

    PYTHONPATH=src python benchmarks/gpu_day.py --budget 480 --out gpu-day       # on a machine with a GPU
    PYTHONPATH=src python benchmarks/gpu_day.py --cpu --tiny --budget 90         # only runs the code
    python -m benchmarks.gpu_day --read gpu-day/results.jsonl --write            # the section of RESULTS.md

The jobs of eight parts run in the order of their value, each in processes of its own with its own limit of time. Every result is
appended to FOLDER/results.jsonl as soon as it is known, so that nothing is lost if this program is killed. A job that fails or hangs
is recorded with the end of its output, and the next one runs. Jobs that measure time run alone, the others beside each other.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))  # `python -m benchmarks.gpu_day` finds the files beside this one, too

PARTS = {
    1: "facts",
    2: "engine contract and tests/gpu",
    3: "synchronisations per step",
    4: "language models",
    5: "numbers against the CPU's",
    6: "a background save",
    7: "memory",
    8: "reports of failures",
}
LEAST_S = 4.0
"""A job for which less time is left is not started: it would only import torch."""
LAST_LINES = 15


# ---- the jobs --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """A command of one part."""

    part: int
    name: str
    command: Sequence[str]
    limit_s: float
    needs: Sequence[str] = ()
    """Packages without which the job is not started."""
    is_timed: bool = False
    """Runs alone, because it measures time."""
    environment: Mapping[str, str] = field(default_factory=dict)


VARIANTS = (
    "by hand",
    "echelon Accelerator",
    "echelon Trainer",
    "accelerate",
    "lightning Fabric",
    "transformers Trainer",
)


def all_jobs(*, is_tiny: bool, planted: Sequence[str]) -> list[Job]:
    """Return the jobs in the order in which they run."""
    limit = 40.0 if is_tiny else 75.0
    python, parts = sys.executable, str(HERE / "gpu_parts.py")

    def job(part: int, name: str, *options: str, ranks: int = 0, limit_s: float = limit, **settings: Any) -> Job:
        start = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks else []
        return Job(part, name, [python, *start, parts, name.split()[0], *options], limit_s, **settings)

    def models(variant: str, *options: str, turn: int = 1) -> Job:
        steps = ("2", "1") if is_tiny else ("30", "8")
        command = [
            python,
            str(HERE / "gpu.py"),
            "--worker",
            "--only",
            variant,
            "--steps",
            steps[0],
            "--warmup",
            steps[1],
        ]
        package = variant.split()[0]
        needs = {
            "accelerate": ["accelerate"],
            "lightning": ["lightning"],
            "transformers": ["transformers", "accelerate"],
        }
        name = f"{variant}{' compiled' if '--compile' in options else ''}, turn {turn}"
        slower = 2.0 if "--compile" in options else 1.0
        return Job(4, name, [*command, *options], slower * limit, needs.get(package, ()), is_timed=True)

    shared = {"CUDA_VISIBLE_DEVICES": "0"}  # with this variable, echelon lets several ranks use one device
    bitwise = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # what parity="bitwise" requires on CUDA
    both = ("--model", "gpt2", "--model", "llama-1b")
    plants = {
        "failing": job(2, "failing planted"),
        "hanging": job(3, "hanging planted", limit_s=20.0),
        "missing": job(7, "missing planted", needs=("a_package_that_does_not_exist",)),
    }
    tests = [
        job(2, f"tests {name}", "--file", f"tests/gpu/test_{name}.py", needs=("pytest", "hypothesis", "psutil"))
        for name in ("parity", "trainer_devices", "offload", "fp8")
    ]
    compiled = [
        models(variant, "--model", model, "--compile") for model in ("gpt2", "llama-1b") for variant in VARIANTS
    ]
    found = [
        job(1, "facts"),
        *[plants[name] for name in planted],
        *[job(2, f"contract {name}", "--engine", name, ranks=1) for name in ("single", "ddp", "fsdp2", "zero1")],
        *[
            job(2, f"contract {name}, 2 ranks on one device", "--engine", name, "--shared", ranks=2, environment=shared)
            for name in ("ddp", "fsdp2", "zero1")
        ],
        *tests,
        *[job(3, f"syncs {loop}", "--loop", loop, ranks=1) for loop in ("level1", "single", "ddp", "fsdp2", "trainer")],
        *[models(variant, *both) for variant in VARIANTS],
        job(5, "numbers", environment=bitwise),
        job(5, "numbers of shards", "--engine", "fsdp2", ranks=1, environment=bitwise),
        job(5, "numbers of 2 ranks on one device", "--shared", ranks=2, environment={**bitwise, **shared}),
        job(6, "save", is_timed=True),
        *[
            job(7, f"memory {mode}", "--mode", mode, ranks=1, is_timed=True)
            for mode in (
                "plain",
                "blocks full",
                "blocks selective",
                "blocks offload",
                "bf16 masters",
                "bf16 kept",
                "chunked loss",
                "offload",
            )
        ],
        job(7, "memory qlora", "--mode", "qlora", ranks=1, needs=("bitsandbytes", "peft"), is_timed=True),
        job(7, "memory fp8", "--mode", "fp8", ranks=1, needs=("torchao",), is_timed=True),
        *[job(8, f"failure {kind}", "--kind", kind) for kind in ("memory", "access", "timeout", "devices")],
        *([] if is_tiny else compiled[: len(VARIANTS)]),
        *[models(variant, *both, turn=2) for variant in VARIANTS],
        *([] if is_tiny else compiled[len(VARIANTS) :]),
    ]
    if is_tiny:  # something of each part runs before more of any
        turns = {one.name: sum(other.part == one.part for other in found[:i]) for i, one in enumerate(found)}
        found.sort(key=lambda one: (turns[one.name], one.part))
    return found


# ---- running them ----------------------------------------------------------------------------------------------------


@dataclass
class Day:
    """One run of the jobs."""

    out: Path
    budget_s: float
    started: float = field(default_factory=time.monotonic)
    processes: set[subprocess.Popen[bytes]] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def results(self) -> Path:
        return self.out / "results.jsonl"

    @property
    def left_s(self) -> float:
        return self.budget_s - (time.monotonic() - self.started)

    def record(self, kind: str, **values: Any) -> None:
        """Append a line to the results."""
        line = json.dumps({"kind": kind, "at_s": round(time.monotonic() - self.started, 1), **values})
        with self.lock, self.results.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())

    def run(self, jobs: Sequence[Job], *, options: Sequence[str], beside: int) -> None:
        """Run ``jobs``: timed ones alone, others ``beside`` at a time."""
        with tempfile.TemporaryDirectory(prefix="gpu-day-") as folder:
            try:
                for is_timed, group in groupby(jobs, key=lambda job: job.is_timed):
                    with ThreadPoolExecutor(1 if is_timed else beside) as pool:
                        list(pool.map(lambda job: self._end(job, options, Path(folder)), group))
            finally:
                for process in self.processes:
                    _kill(process)

    def _end(self, job: Job, options: Sequence[str], folder: Path) -> None:
        """Run ``job``, and record how it ended."""
        began = time.monotonic()
        lines: list[str] = []
        missing = [name for name in job.needs if importlib.util.find_spec(name) is None]
        if missing:
            outcome, lines = "missing", [f"not installed: {', '.join(missing)}"]
        elif self.left_s < LEAST_S:
            outcome = "no time"
        else:
            outcome, lines = self._wait(job, options, folder, limit=min(job.limit_s, self.left_s))
        seconds = round(time.monotonic() - began, 1)
        self.record("end", part=job.part, job=job.name, outcome=outcome, seconds=seconds, lines=lines)
        print(f"{time.monotonic() - self.started:6.1f} s  {job.part} {job.name}: {outcome}, {seconds} s", flush=True)

    def _wait(self, job: Job, options: Sequence[str], folder: Path, *, limit: float) -> tuple[str, list[str]]:
        place = folder / "".join(letter if letter.isalnum() else "-" for letter in job.name)
        place.mkdir()
        paths = [str(HERE.parent / "src"), str(HERE.parent), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
            "PYTHONUNBUFFERED": "1",
            "GPU_DAY_JOB": job.name,
            "GPU_DAY_ENDS_AT": str(time.time() + limit),
            "HF_HUB_OFFLINE": "1",
            **job.environment,
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1" if "--cpu" in options else "4"),
        }
        command = [*job.command, *options, "--results", str(self.results)]
        with (place / "output").open("wb") as output:
            process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, cwd=place, env=environment, start_new_session=True
            )
        self.processes.add(process)
        began = time.monotonic()
        try:
            outcome = "done" if process.wait(limit) == 0 else f"failed with exit code {process.returncode}"
        except subprocess.TimeoutExpired:
            outcome = "stopped"
        finally:
            _kill(process)
            self.processes.discard(process)
        if outcome != "done" and time.monotonic() - began > limit - 2.0:  # gpu_parts.py ends itself a second earlier
            outcome = f"stopped after {limit:.0f} s"
        text = (place / "output").read_text(encoding="utf-8", errors="replace")
        with self.lock, (self.out / "log.txt").open("a", encoding="utf-8") as log:
            log.write(f"==== {job.part} {job.name}: {outcome}\n{text}\n")
        return outcome, [] if outcome == "done" else text.splitlines()[-LAST_LINES:]


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of the process group of ``process``."""
    with suppress(ProcessLookupError):  # all of its processes have ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


# ---- the command -----------------------------------------------------------------------------------------------------


def summary(results: Path) -> list[str]:
    """Return a line for each part, and one for each job that did not end well."""
    from gpu_report import read

    lines, found = [], read(results)
    for part, title in PARTS.items():
        ends = [line for line in found if line["kind"] == "end" and line["part"] == part]
        jobs = {line["job"] for line in ends}
        number = sum(line["kind"] == "result" and line["job"] in jobs for line in found)
        outcomes = [end["outcome"] for end in ends]
        counts = ", ".join(f"{outcomes.count(each)} {each}" for each in dict.fromkeys(outcomes)) or "not chosen"
        lines.append(f"part {part}, {title}: {counts}; {number} results")
        lines += [f"    {end['job']}: {end['outcome']}" for end in ends if end["outcome"] not in ("done", "no time")]
        if late := [end["job"] for end in ends if end["outcome"] == "no time"]:
            lines.append(f"    did not fit the budget: {'; '.join(late)}")
    return lines


def _has_accelerator() -> bool:
    """Ask a process of its own, because a process that has used the device would keep memory of it."""
    asked = "import sys, torch; sys.exit(not torch.accelerator.is_available())"
    return subprocess.run([sys.executable, "-c", asked], check=False).returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=480.0, help="seconds after which nothing runs any more")
    parser.add_argument("--out", type=Path, default=Path("gpu-day"), help="folder of results.jsonl and log.txt")
    parser.add_argument(
        "--part", type=int, action="append", choices=list(PARTS), help="only this part; may be repeated"
    )
    parser.add_argument("--job", action="append", help="only jobs whose name contains this; may be repeated")
    parser.add_argument("--cpu", action="store_true", help="on the CPU")
    parser.add_argument("--tiny", action="store_true", help="tiny models and few steps")
    parser.add_argument(
        "--beside", type=int, help="jobs at a time of those that measure no time (default: 6, on the CPU 2)"
    )
    parser.add_argument(
        "--read", type=Path, metavar="FILE", help="print the section of RESULTS.md for these results, and end"
    )
    parser.add_argument("--write", action="store_true", help="with --read: write it to benchmarks/RESULTS.md")
    parser.add_argument(
        "--plant", action="append", default=[], choices=["failing", "hanging", "missing"], help=argparse.SUPPRESS
    )
    arguments = parser.parse_args()
    if arguments.read is not None:
        if not arguments.read.is_file():
            raise SystemExit(
                f"--read {arguments.read}: there is no such file; name the results.jsonl in the folder of --out"
            )
        from gpu_report import section
        from results import publish

        publish(section(arguments.read), is_written=arguments.write)
        return
    if not arguments.cpu and not _has_accelerator():
        raise SystemExit("there is no accelerator: nothing to measure (--cpu --tiny runs the code on this machine)")
    arguments.out.mkdir(parents=True, exist_ok=True)
    day = Day(arguments.out.resolve(), arguments.budget)
    if day.results.exists():
        raise SystemExit(f"{day.results} exists: name another folder with --out, or move it away")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    chosen = [
        job
        for job in all_jobs(is_tiny=arguments.tiny, planted=arguments.plant)
        if (not arguments.part or job.part in arguments.part)
        and (not arguments.job or any(text in job.name for text in arguments.job))
    ]
    day.record("start", command=sys.argv[1:], budget_s=arguments.budget, date=time.strftime("%Y-%m-%d"))
    options = [f"--{name}" for name in ("cpu", "tiny") if getattr(arguments, name)]
    day.run(chosen, options=options, beside=arguments.beside or (2 if arguments.cpu else 6))
    print("\n".join(summary(day.results)))


if __name__ == "__main__":
    main()
