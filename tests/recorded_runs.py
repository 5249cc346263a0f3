"""Writes the folders of made-up runs, for the tests of the report: any number of ranks, steps and restarts, in simulated time."""

from __future__ import annotations

import json
import math
import os
import random
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from echelon.config.origin import Origin, Setting, SettingSource
from echelon.config.resolve import resolve
from echelon.config.run_record import to_run_file
from echelon.config.schema import RunConfig
from echelon.status import step_records
from echelon.status.board import StepPart
from echelon.status.step_records import StepRecorder

BEGAN = 1_790_000_000.0
START_S, RESTART_S, DETECTION_S, EVALUATION_S, CHECKPOINT_S = 6.0, 4.0, 0.8, 0.4, 0.25
BATCH = 32


class _Run:
    """The state of a simulated run: its clock, and what has been written so far."""

    def __init__(
        self, folder: Path, *, num_ranks: int, num_steps: int, slow_rank: int | None, seed: int, began: float
    ) -> None:
        self.folder, self.num_ranks, self.num_steps, self.slow_rank = folder, num_ranks, num_steps, slow_rank
        self.random = random.Random(seed)
        self.now = self.began = began
        self.parts: dict[str, float] = {}
        self.events: list[dict[str, Any]] = []
        self.metrics: list[dict[str, Any]] = []
        self.every = max(10, num_steps // 8)  # steps between checkpoints

    def spend(self, part: str, seconds: float) -> None:
        self.now += seconds
        self.parts[part] = self.parts.get(part, 0.0) + seconds

    def event(self, kind: str, text: str, **more: Any) -> None:
        fields = {"time": self.now, "attempt": 0, "kind": kind, "rank": None, "step": None, "text": text}
        self.events.append({**fields, **more})


def write_run(
    parent: Path,
    name: str,
    *,
    num_ranks: int = 1,
    num_steps: int = 200,
    kills: Sequence[int] = (),
    slow_rank: int | None = None,
    lr: float = 1e-3,
    seed: int = 0,
    facts: dict[str, Any] | None = None,
    stall_at: int | None = None,
    began: float = BEGAN,
) -> Path:
    """Write a run and return its folder.

    Args:
        parent: folder for the run's folder.
        name: name of the run's folder.
        num_ranks: number of ranks.
        num_steps: number of optimizer steps.
        kills: steps after which a rank is killed; training continues from the last checkpoint.
        slow_rank: a rank whose backward pass takes longer.
        lr: largest learning rate.
        seed: seed of the noise.
        facts: fields of run.json to replace.
        stall_at: step at which the run stalls for 20 s.
        began: Unix time at which the run began.
    """
    folder = parent / name
    run = _Run(folder, num_ranks=num_ranks, num_steps=num_steps, slow_rank=slow_rank, seed=seed, began=began)
    first = 1
    for attempt, end in enumerate([*kills, num_steps]):
        run.event("restart" if attempt else "start", f"{num_ranks} processes started", attempt=attempt)
        run.spend("restart" if attempt else "init", RESTART_S if attempt else START_S)
        base_s = run.parts.get("compute", 0.0)
        _write_attempt(run, attempt, first, end, lr, stall_at)
        if end == num_steps and attempt == len(kills):
            break
        kept = end // run.every * run.every
        lost = (run.parts["compute"] - base_s) * (end - kept) / (end - first + 1)
        run.parts["compute"] -= lost
        run.parts["lost steps"] = run.parts.get("lost steps", 0.0) + lost
        run.spend("detection", DETECTION_S)
        victim = attempt % num_ranks
        run.event("failure", f"rank {victim} was killed by signal 9", rank=victim, step=end, attempt=attempt)
        first = kept + 1
    run.spend("end", 0.7)
    if slow_rank is not None:
        run.event("straggler", f"rank {slow_rank} is slow: backward 6.5 ms per step (median 5.0)", rank=slow_rank)
    run.event("end", "the run succeeded (exit code 0)", attempt=len(kills))
    _write_files(run, name, len(kills), lr, facts or {})
    return folder


def _write_attempt(run: _Run, attempt: int, first: int, end: int, lr: float, stall_at: int | None) -> None:
    records = run.folder / "records" / str(attempt)
    records.mkdir(parents=True)
    with simulated_clock(run.now) as clock:
        ranks = [
            StepRecorder(records / f"rank_{rank}.steps", rank=rank, world_size=run.num_ranks)
            for rank in range(run.num_ranks)
        ]
        spent = [[0.0] * len(StepPart) for _ in ranks]
        for step in range(first, end + 1):
            wait = 0.0 if run.slow_rank is None else 1.5
            noise = abs(run.random.gauss(0, 0.25))
            common_s = (2.0 + 3.0 + 5.0 + wait + 1.2 + 0.8 + 0.5 + noise) / 1e3
            run.spend("data wait", 2.0e-3)
            run.spend("communication", (1.2 + wait) / 1e3)
            run.spend("compute", common_s - 2.0e-3 - (1.2 + wait) / 1e3)
            extra = _between_steps(run, attempt, step, stall_at)
            clock.now_ns = int(run.now * 1e9)
            loss = 2.1 * math.exp(-5 * step / run.num_steps) + 0.18
            for rank, (recorder, total) in enumerate(zip(ranks, spent)):
                is_slow = rank == run.slow_rank
                ms = [2.0, 3.0, 5.0 + wait * is_slow, 1.2 + wait * (not is_slow), 0.8, 0.0, 0.0, 0.5 + noise]
                for part, one in enumerate(ms):
                    total[part] += one
                for part, one in extra.items():
                    total[part] += one
                recorder.add_loss(loss * (1 + 0.12 * run.random.gauss(0, 1)))
                recorder.grad_norm = 1.5 * math.exp(-2 * step / run.num_steps) * (1 + abs(run.random.gauss(0, 0.15)))
                recorder.memory_mb = 900 + 40 * rank + 300 * min(1.0, 4 * (step - first) / run.num_steps)
                recorder.num_samples += BATCH
                recorder.num_items += BATCH * 128
                recorder.record(step, _schedule(step, run.num_steps, lr), [int(one * 1e6) for one in total])


def _between_steps(run: _Run, attempt: int, step: int, stall_at: int | None) -> dict[StepPart, float]:
    """Do what happens after a step; return the milliseconds by part."""
    extra: dict[StepPart, float] = {}
    if step == stall_at:
        run.event("stall", "rank 1 is in a different part of the program", rank=1, step=step, attempt=attempt)
        run.spend("communication", 20.0)
        extra[StepPart.COMMUNICATION] = 20e3
    if step % run.every == 0:
        accuracy = 1 - 0.6 * math.exp(-4 * step / run.num_steps)
        line = {"time": run.now, "attempt": attempt, "step": step, "epoch": step / run.num_steps * 3}
        run.metrics.append({**line, "values": {"eval_accuracy": accuracy, "eval_loss": 1.2 - accuracy}})
        run.spend("compute", EVALUATION_S)
        text = f"saved checkpoint-{step}"
        run.event(
            "checkpoint", text, step=step, attempt=attempt, path=f"out/checkpoint-{step}", duration_s=CHECKPOINT_S
        )
        run.spend("checkpoint", CHECKPOINT_S)
        extra |= {StepPart.EVALUATION: EVALUATION_S * 1e3, StepPart.CHECKPOINT: CHECKPOINT_S * 1e3}
    return extra


def _schedule(step: int, num_steps: int, lr: float) -> float:
    warmup = max(1, num_steps // 20)
    if step < warmup:
        return lr * step / warmup
    return lr * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, num_steps - warmup)))


@contextmanager
def simulated_clock(now: float) -> Iterator[SimpleNamespace]:
    """Let the step records of this process use a clock that starts at ``now``; its ``now_ns`` can be set."""
    clock = SimpleNamespace(now_ns=int(now * 1e9))
    clock.monotonic_ns = clock.time_ns = lambda: clock.now_ns
    with mock.patch.object(step_records, "time", clock):
        yield clock


def _write_files(run: _Run, name: str, num_restarts: int, lr: float, facts: dict[str, Any]) -> None:
    layer = {
        "num_processes": Setting(run.num_ranks, Origin(SettingSource.FLAG, "--num_processes")),
        "mixed_precision": Setting("bf16", Origin(SettingSource.FILE, "echelon.toml:3")),
        "gradient_accumulation_steps": Setting(1, Origin(SettingSource.CODE, "Accelerator()")),
    }
    (run.folder / "config.json").write_text(to_run_file(resolve(RunConfig, [layer])))
    arguments = ["--lr", f"{lr:g}", "--epochs", "3"]
    info = {
        "version": 1,
        "run_id": name,
        "launcher": "echelon launch",
        "command": ["echelon", "launch", "--num_processes", str(run.num_ranks), "train.py", *arguments],
        "script": "train.py",
        "arguments": arguments,
        "cwd": "/home/user/project",
        "git": {"commit": "3f2a9c1d5e7b8a6f4c2d1e0b9a8f7c6d5e4b3a2f", "branch": "main", "is_dirty": True},
        "versions": {"python": "3.11.7", "torch": "2.13.0", "echelon": "0.1.0", "numpy": "2.4.6"},
        "machine": {
            "host": socket.gethostname(),
            "system": "Linux 6.1",
            "processor": "AMD EPYC 9354",
            "num_cores": 32,
            "memory_mb": 257_000,
            "accelerators": [],
        },
        "num_processes": run.num_ranks,
        "num_machines": 1,
        "began": run.began,
        "ended": run.now,
        "outcome": "succeeded",
        "exit_code": 0,
        "num_restarts": num_restarts,
        "pid": os.getpid(),
        "board": None,
        "goodput": {"wall_s": run.now - run.began, "parts": run.parts},
    }
    (run.folder / "run.json").write_text(json.dumps({**info, **facts}, indent=2))
    for file, lines in (("metrics.jsonl", run.metrics), ("events.jsonl", run.events)):
        (run.folder / file).write_text("".join(json.dumps(line) + "\n" for line in lines))


def record_steps(
    folder: Path,
    rank: int,
    losses: list[float],
    *,
    first: int = 1,
    attempt: int = 0,
    began: float = 0.0,
    has_parts: bool = True,
) -> None:
    """Write steps of 10 ms: 4 ms of data wait, 5 + rank ms forward, the rest communication; 8 samples each."""
    path = folder / "records" / str(attempt) / f"rank_{rank}.steps"
    path.parent.mkdir(parents=True, exist_ok=True)
    with simulated_clock(began) as clock:
        recorder = StepRecorder(path, rank=rank, world_size=2)
        spent = [0] * len(StepPart)
        for i, loss in enumerate(losses):
            clock.now_ns += 10_000_000
            for part, ms in (
                (StepPart.DATA, 4),
                (StepPart.FORWARD, 5 + min(rank, 1)),
                (StepPart.COMMUNICATION, max(0, 1 - rank)),
            ):
                spent[part] += ms * 1_000_000 * has_parts
            recorder.add_loss(loss)
            recorder.num_samples += 8
            recorder.memory_mb = 100.0 + rank + i
            recorder.record(first + i, 0.1, spent)
