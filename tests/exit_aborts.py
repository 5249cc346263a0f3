"""Checks that ranks exit cleanly, however they end: ``python -m tests.exit_aborts --runs 300 --beside 4``. Not part of the test suite.

A thread that waits for the GIL while the interpreter shuts down makes C++ abort the process ("terminate called without an active
exception"): a thread of gloo that releases the last collective's tensors, or one that talks to the store. Each run starts two
processes that train, end in one of the ways of ``PROGRAMS``, and exit as an interpreter does. Most processes are forked from one that
has imported all modules, which allows many runs; every 20th run starts new interpreters.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from echelon import Accelerator
from echelon.engines.registry import load_engine
from echelon.utils import ProjectConfiguration
from tests.repeat import BUSY

ROOT = Path(__file__).resolve().parent.parent
WORLD_SIZE = 2
ENGINES = ("ddp", "fsdp2", "zero1")
LIMIT_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A way to end."""

    after_update: Callable[[Accelerator, int], None] = lambda _accelerator, _update: None
    """Called with the number of each update."""
    after_training: Callable[[Accelerator], None] = lambda _accelerator: None
    code: int = 0
    parity: str = "off"


def _exit_early(accelerator: Accelerator, update: int) -> None:
    if update == 3:
        accelerator.gather(torch.ones(2))
        sys.exit(3)


def _preempt(accelerator: Accelerator, update: int) -> None:
    if update == 3 and accelerator.is_main_process:
        os.kill(os.getpid(), signal.SIGTERM)


def _gather(accelerator: Accelerator) -> None:
    accelerator.gather(torch.ones(2))


def _start_talking(accelerator: Accelerator, update: int) -> None:
    if update == 0:
        threading.Thread(target=_talk, args=(accelerator.process_index,), daemon=True).start()


def _talk(rank: int) -> None:
    store = dist.PrefixStore("talk", dist.distributed_c10d._get_default_store().clone())  # type: ignore[attr-defined]
    while True:
        store.set(str(rank), "x")
        store.check([str(1 - rank)])
        time.sleep(0.05)


def _save_aside(accelerator: Accelerator) -> None:
    accelerator.save_state(blocking=False)


def _end_training(accelerator: Accelerator) -> None:
    accelerator.update_loss()
    accelerator.end_training()


PROGRAMS = {
    "early": Program(after_update=_exit_early, code=3),
    "preempted": Program(after_update=_preempt, code=143),
    "unended": Program(after_training=_gather),
    # A thread of the program talks to the store until the end, and a thread of echelon is still saving then.
    "threads": Program(after_update=_start_talking, after_training=_save_aside),
    "bitwise": Program(after_training=_end_training, parity="bitwise"),
}


def train(program: Program, engine: str, folder: str) -> None:
    """Train for an epoch, or until the program ends."""
    project = ProjectConfiguration(folder, automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, parity=program.parity, engine=engine, seed=1, project_config=project)
    model: Any = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 4))
    optimizer: Any = torch.optim.AdamW(model.parameters())
    data = TensorDataset(torch.randn(64, 16), torch.randint(4, (64,)))
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=4, shuffle=True))
    update = 0
    for _ in accelerator.epochs(1):
        for x, y in loader:
            accelerator.backward(nn.functional.cross_entropy(model(x), y))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            program.after_update(accelerator, update)
            update += 1
    program.after_training(accelerator)


def fork_ranks(variables: dict[str, str], output: Path) -> list[int] | None:
    """Return the pids of forked ranks; None in each of these, which has to train and to exit."""
    children = []
    for rank in range(WORLD_SIZE):
        child = os.fork()
        if child == 0:
            with output.open("ab", buffering=0) as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            os.environ.update(_place(variables, rank))
            faulthandler.dump_traceback_later(LIMIT_S / 2)
            return None
        children.append(child)
    return children


def _code_of(child: int) -> int:
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def fresh(variables: dict[str, str], output: Path, program: str, engine: str, folder: str) -> list[int]:
    """Return the exit codes of new interpreters."""
    with output.open("ab") as file:
        children = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.exit_aborts", "--train", program, engine, folder],
                env={**os.environ, **_place(variables, rank)},
                stdout=file,
                stderr=file,
                cwd=ROOT,
            )
            for rank in range(WORLD_SIZE)
        ]
        deadline = time.monotonic() + LIMIT_S
        while any(child.poll() is None for child in children) and time.monotonic() < deadline:
            time.sleep(0.02)
        for child in children:
            child.kill()  # a process that has exited keeps its exit code
        return [child.wait() for child in children]


def _meeting_place() -> dict[str, str]:
    """Return a free port for rank zero. (A store in this process would be a thread, which must not be forked.)"""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(one.getsockname()[1])}


def _place(variables: dict[str, str], rank: int) -> dict[str, str]:
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": WORLD_SIZE, "LOCAL_WORLD_SIZE": WORLD_SIZE}
    return {**variables, **{name: str(value) for name, value in names.items()}, "OMP_NUM_THREADS": "1"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=300, help="of each program")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no run after this time")
    parser.add_argument("--beside", type=int, default=0, help="busy loops that run meanwhile")
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS))
    parser.add_argument("--train", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        program, engine, folder = options.train
        train(PROGRAMS[program], engine, folder)
        return
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    for name in ENGINES:
        load_engine(name)
    import_module("torch._dynamo")  # otherwise imported by the first optimizer
    busy = [subprocess.Popen([sys.executable, "-c", BUSY, str(os.getpid())]) for _ in range(options.beside)]
    began, done, bad = time.monotonic(), Counter[str](), Counter[str]()
    for number in range(options.runs * len(options.programs)):
        if time.monotonic() - began > options.seconds:
            break
        program = options.programs[number % len(options.programs)]
        engine = ENGINES[number // len(options.programs) % len(ENGINES)]
        folder = tempfile.mkdtemp(prefix="exit-aborts-")
        output = Path(folder, "output")
        if number % 20 == 19:
            codes = fresh(_meeting_place(), output, program, engine, folder)
        else:
            children = fork_ranks(_meeting_place(), output)
            if children is None:
                train(PROGRAMS[program], engine, folder)
                return
            codes = [_code_of(child) for child in children]
        done[program] += 1
        if codes != [PROGRAMS[program].code] * WORLD_SIZE:
            bad[program] += 1
            print(f"run {number} ({program}, {engine}): {codes}, in {folder}\n{output.read_text()}", flush=True)
        else:
            shutil.rmtree(folder)
        if number % 20 == 19:
            print(
                f"{number + 1} runs in {time.monotonic() - began:.0f} s, {bad.total()} failed; load {os.getloadavg()[0]:.1f}",
                flush=True,
            )
    for process in busy:
        process.kill()
        process.wait()
    print(f"{done.total()} runs beside {options.beside} busy loops, {bad.total()} failed")
    for program, count in done.items():
        print(f"  {program}: {count} runs, {bad[program]} failed")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
