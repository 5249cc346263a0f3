"""Checks that processes of a bitwise run exit cleanly: ``python -m tests.exit_aborts``. It is not part of the test suite.

A prototype aborted at exit, after destroy_process_group(), with "terminate called without an active exception". Each run starts
three processes that train with canonical shards, destroy the group and exit like an interpreter. Most processes are forked from one
that has imported all modules, which allows many runs; every 25th run starts new interpreters.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import socket
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from echelon import Accelerator
from echelon.engines.registry import load_engine

ROOT = Path(__file__).resolve().parent.parent
WORLD_SIZE = 3
ENGINES = ("ddp", "fsdp2", "zero1")
LIMIT_S = 600.0


def train(engine: str) -> None:
    """Make some updates, and destroy the group."""
    accelerator = Accelerator(cpu=True, parity="bitwise", engine=engine, seed=1)
    model: Any = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 4))
    optimizer: Any = torch.optim.AdamW(model.parameters())
    data = TensorDataset(torch.randn(40, 16), torch.randint(4, (40,)))
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=16, shuffle=True))
    for x, y in loader:
        accelerator.backward(nn.functional.cross_entropy(model(x), y))
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.update_loss()
    accelerator.end_training()


def forked(variables: dict[str, str], engine: str, output: Path) -> list[int]:
    """Return the exit codes of forked processes, each of which finalizes its interpreter."""
    children = []
    for rank in range(WORLD_SIZE):
        child = os.fork()
        if child == 0:
            with output.open("ab", buffering=0) as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            os.environ.update(_place(variables, rank))
            faulthandler.dump_traceback_later(LIMIT_S / 2)
            train(engine)
            faulthandler.cancel_dump_traceback_later()
            sys.exit(0)
        children.append(child)
    return [_code_of(child) for child in children]


def _code_of(child: int) -> int:
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(child, 9)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def fresh(variables: dict[str, str], engine: str, output: Path) -> list[int]:
    """Return the exit codes of new interpreters."""
    with output.open("ab") as file:
        children = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.exit_aborts", "--train", engine],
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
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no run after this time")
    parser.add_argument("--train", choices=ENGINES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(options.train)
        return
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    for name in ENGINES:
        load_engine(name)
    import_module("torch._dynamo")  # otherwise imported by the first optimizer
    began, done, bad = time.monotonic(), {"forked": 0, "fresh": 0}, 0
    for number in range(options.runs):
        if time.monotonic() - began > options.seconds:
            break
        kind, run = ("fresh", fresh) if number % 25 == 24 else ("forked", forked)
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder, "output")
            codes = run(_meeting_place(), ENGINES[number % len(ENGINES)], output)
            done[kind] += 1
            if any(codes):
                bad += 1
                print(
                    f"run {number} ({kind}, {ENGINES[number % len(ENGINES)]}): {codes}\n{output.read_text()}",
                    flush=True,
                )
        if number % 10 == 9:
            print(f"{number + 1} runs, {bad} failed", flush=True)
    print(f"{sum(done.values())} runs ({done['forked']} forked, {done['fresh']} of new interpreters), {bad} failed")
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
