"""Measures the overhead of the launcher and the recovery of a killed run: `echelon launch` compared with torchrun, alternating.

- an empty script on 2 processes: seconds from the start of the command to its end;
- plain DDP on 2 processes: seconds from the start of the command to the end of the first step;
- steps of 10 ms: the time added by the status board, its reporter and the monitoring launcher;
- recovery: from the SIGKILL of a rank to the next saved step, including the load of a small checkpoint. The script uses plain DDP
  and torch.save. torchrun sometimes fails to restart; only its successes are measured, and the failures are counted.
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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from results import footer, middle_half, publish, verdict
from tqdm import tqdm

ECHELON, COLD, TORCHRUN = "echelon launch", "echelon launch --no_warm", "torchrun"
COMMANDS = {
    ECHELON: ["-m", "echelon", "launch", "-q", "--cpu", "--num_processes=2"],
    COLD: ["-m", "echelon", "launch", "-q", "--cpu", "--num_processes=2", "--no_warm"],
    TORCHRUN: ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"],
}
LIMIT_S = 120.0
COST_LIMIT = 0.01
FIRST_STEP_LIMIT = 1.0
WARM_LIMIT_S = 1.0
NO_OP = "pass\n"

STEPS = """
import json, sys, time
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
weights, sums = torch.randn(256, 256), torch.ones(1000)
took = []
for number in range(int(sys.argv[1]) + 20):
    started = time.perf_counter()
    until = started + 0.01
    while time.perf_counter() < until:
        weights @ weights
    dist.all_reduce(sums)
    sums /= 2
    took.append(time.perf_counter() - started)
if dist.get_rank() == 0:
    took = sorted(took[20:])
    json.dump(took, open(sys.argv[2], "w"))
dist.destroy_process_group()
"""

FIRST_STEP = """
import sys, time
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 10))
optimizer = torch.optim.AdamW(model.parameters())
model(torch.randn(8, 64)).sum().backward()
optimizer.step()
if dist.get_rank() == 0:
    open(sys.argv[1], "w").write(repr(time.time()))
dist.destroy_process_group()
"""

RECOVERY = """
import os, signal, sys, time
import torch
import torch.distributed as dist
folder, rank = sys.argv[1], int(os.environ["RANK"])
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Linear(256, 10)))
optimizer = torch.optim.AdamW(model.parameters())
first, saved = 0, os.path.join(folder, "checkpoint.pt")
if os.path.exists(saved):
    state = torch.load(saved, weights_only=True)
    first = state["step"]
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
for step in range(first, first + 10):
    optimizer.zero_grad()
    model(torch.randn(8, 64)).sum().backward()
    optimizer.step()
    if rank == 0:
        torch.save({"step": step + 1, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, saved + ".new")
        os.replace(saved + ".new", saved)
        if attempt and step == first:
            open(os.path.join(folder, f"committed_{attempt}"), "w").write(repr(time.time()))
    if rank == 1 and attempt < int(sys.argv[2]) and step == first + 5:
        # The other rank waits. The warm process is started once, after the first collective, and needs time to import torch.
        time.sleep(1.0 if attempt else 12.0)
        open(os.path.join(folder, f"killed_{attempt + 1}"), "w").write(repr(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
dist.destroy_process_group()
"""


def run(launcher: str, script: str, *args: str, options: Sequence[str] = ()) -> tuple[float, int]:
    """Run the source ``script`` under ``launcher``; return the seconds and the exit code."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "script.py")
        path.write_text(script)
        started = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, *COMMANDS[launcher], *options, str(path), *args],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            code = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            process.terminate()  # the launcher also stops its ranks
            code = process.wait()
        return time.perf_counter() - started, code


class Failed(Exception):
    """A run of a launcher that did not end with 0."""


def no_op(launcher: str) -> float:
    seconds, code = run(launcher, NO_OP)
    if code:
        raise Failed(launcher)
    return seconds


def first_step(launcher: str) -> float:
    """Return the seconds from the start of the command to the end of the first step of plain DDP on rank 0."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result")
        started = time.time()
        _, code = run(launcher, FIRST_STEP, str(result))
        if code:
            raise Failed(launcher)
        return float(result.read_text()) - started


def steps(launcher: str, number: int = 300) -> float:
    """Return the mean seconds of a step, without the slowest tenth, which is due to other load."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result")
        _, code = run(launcher, STEPS, str(number), str(result))
        if code:
            raise Failed(launcher)
        took = json.loads(result.read_text())
    return statistics.fmean(took[: len(took) * 9 // 10])


def recoveries(launcher: str, kills: int) -> list[float]:
    """Return the seconds of each recovery; fewer than ``kills`` if a restart failed."""
    with tempfile.TemporaryDirectory() as folder:
        run(
            launcher, RECOVERY, folder, str(kills), options=[f"--max_restarts={kills}"]
        )  # its files are evaluated even if it was stopped
        found = []
        for number in range(1, kills + 1):
            killed, committed = Path(folder, f"killed_{number}"), Path(folder, f"committed_{number}")
            if killed.exists() and committed.exists():
                found.append(float(committed.read_text()) - float(killed.read_text()))
        return found


def pairs(measure: Callable[[str], float], rounds: int, what: str) -> tuple[list[tuple[float, float]], str]:
    """Return the values of echelon and torchrun for each pair, in the order A B, B A, A B, ..., and torchrun's failures in words.

    A pair in which torchrun fails is measured again.
    """
    found, num_failed = [], 0
    for number in tqdm(range(rounds), desc=what, disable=None):
        order = [ECHELON, TORCHRUN] if number % 2 == 0 else [TORCHRUN, ECHELON]
        while True:
            try:
                values = {launcher: measure(launcher) for launcher in order}
                break
            except Failed as failure:
                num_failed += 1
                if failure.args[0] != TORCHRUN or num_failed > rounds:
                    raise
        found.append((values[ECHELON], values[TORCHRUN]))
    return found, f"; pairs repeated because torchrun failed: {num_failed}" if num_failed else ""


def quantile(values: Sequence[float], part: float) -> float:
    """Return the smallest of ``values`` that is not exceeded by a fraction of at least ``part``."""
    return sorted(values)[max(0, -(-len(values) * round(100 * part) // 100) - 1)]


def in_words(found: list[tuple[float, float]]) -> tuple[float, str]:
    ratios = [mine / its for mine, its in found]
    return statistics.median(ratios), middle_half(ratios)


def recovery_rows(kills: int, rounds: int) -> Iterator[tuple[str, list[float], int]]:
    """Yield each launcher with its recovery times and its number of failed restarts."""
    found: dict[str, list[float]] = {launcher: [] for launcher in COMMANDS}
    for _ in tqdm(range(rounds), desc="recovery", disable=None):
        for launcher in COMMANDS:
            # torchrun's first restart often fails, and no further restart follows: make one kill in each of its runs.
            asked = [1] * kills if launcher == TORCHRUN else [kills]
            for number in asked:
                found[launcher] += recoveries(launcher, number)
    for launcher, values in found.items():
        yield launcher, values, kills * rounds - len(values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launches", type=int, default=20)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--kills", type=int, default=4, help="kills per round and launcher")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of recoveries")
    parser.add_argument("--write", action="store_true", help="write the table to benchmarks/RESULTS.md")
    options = parser.parse_args()
    for launcher in COMMANDS:
        no_op(launcher)  # fills the disk cache

    launches, no_op_failures = pairs(no_op, options.launches, "no-op")
    start_ratio, start = in_words(launches)
    firsts, first_failures = pairs(first_step, options.launches, "first step")
    first_ratio, first = in_words(firsts)
    taken, step_failures = pairs(steps, options.pairs, "steps")
    cost_ratio, cost = in_words(taken)
    rows, medians, tails = [], {}, {}
    for launcher, values, failures in recovery_rows(options.kills, options.rounds):
        medians[launcher], tails[launcher] = (
            quantile(values, part) if values else float("nan") for part in (0.5, 0.95)
        )
        rows.append(f"| {launcher} | {len(values)} | {failures} | {medians[launcher]:.2f} | {tails[launcher]:.2f} |")
    warm, cold, torchruns = tails[ECHELON], medians[COLD], medians[TORCHRUN]
    mine, its = ([pair[i] for pair in launches] for i in (0, 1))

    section = f"""## Launching, monitoring, restarting

torchrun and `echelon launch` alternate with the same scripts, on 2 processes of one machine. The ratios are echelon's over torchrun's,
with the median and the middle half of the pairs.

- an empty script ({options.launches} pairs): {statistics.median(mine):.2f} s under echelon, {statistics.median(its):.2f} s under torchrun; ratio {start} (target: 1, {verdict(start_ratio <= 1)}){no_op_failures}
- from the command to the end of the first step of plain DDP with AdamW ({options.launches} pairs): {statistics.median(p[0] for p in firsts):.2f} s under echelon, {statistics.median(p[1] for p in firsts):.2f} s under torchrun; ratio {first} (target: {FIRST_STEP_LIMIT}, {verdict(first_ratio <= FIRST_STEP_LIMIT)}){first_failures}
- steps of 10 ms with an all_reduce ({options.pairs} pairs of 300 steps): {1e3 * statistics.median(p[0] for p in taken):.3f} and {1e3 * statistics.median(p[1] for p in taken):.3f} ms; ratio {cost} (target: {1 + COST_LIMIT}, {verdict(cost_ratio <= 1 + COST_LIMIT)}){step_failures}
- recovery, from the SIGKILL of a rank to the next saved step, in seconds:

| launcher | recovered | failed | p50 | p95 |
|---|---:|---:|---:|---:|
{chr(10).join(rows)}

- warm, p95: {warm:.2f} s (target: {WARM_LIMIT_S}, {verdict(warm <= WARM_LIMIT_S)}); cold, p50: {cold:.2f} s, compared with torchrun's {torchruns:.2f} s (target: no more, {verdict(cold <= torchruns)})

{footer("launch.py")}"""
    publish(section, is_written=options.write)


if __name__ == "__main__":
    main()
