"""parity="bitwise" with random models, layouts, restarts and interruptions: the weights are those of one process."""

from __future__ import annotations

import os
import random
import signal
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from echelon.base.warnings import EchelonWarning
from tests.harness import RanksFailed, run_on_ranks
from tests.prepared_loop import weights_of
from tests.ranks.accelerator.test_bitwise_update import MODELS, _accelerator, _data

UPDATES = 11  # 125 samples are 4 to 11 updates an epoch


@dataclass(frozen=True, kw_only=True)
class Run:
    """Settings that are the same in the run of one process."""

    kind: str
    batch_size: int
    num_shards: int
    optimizer: str
    max_norm: float
    counts_items: bool


@dataclass(frozen=True, kw_only=True)
class Start:
    """One start of the run, which ends or is stopped."""

    world_size: int
    layout: str | None
    accumulation: int
    accumulates: bool
    saves_every: int
    stops_after: int  # micro-steps; 0 runs to the end
    killed_rank: int | None  # None: it stops at any position


def _chosen(number: int) -> tuple[Run, list[Start]]:
    draw = random.Random(number)
    run = Run(
        kind=draw.choice(sorted(MODELS)),
        batch_size=draw.randint(12, 32),
        num_shards=draw.randint(4, 12),
        optimizer=draw.choice(["AdamW", "SGD", "RMSprop"]),
        max_norm=draw.choice([0.1, 1.0]),
        counts_items=draw.random() < 0.5,
    )
    starts = []
    for i in range(draw.randint(2, 4)):
        world_size = draw.randint(1, 4)
        rounds = -(-run.num_shards // world_size)
        is_killed = draw.random() < 0.4
        starts.append(
            Start(
                world_size=world_size,
                layout=draw.choice(["ddp", "zero1", "fsdp2 stage 2", "fsdp2 stage 3", *([None] * (world_size == 1))]),
                accumulation=draw.randint(1, 3),
                accumulates=draw.random() < 0.5,
                saves_every=draw.randint(1, 3),
                stops_after=draw.randint(1, rounds * UPDATES // 2),
                killed_rank=draw.randrange(world_size) if is_killed else None,
            )
            if i
            else Start(
                world_size=world_size,
                layout=None if world_size == 1 else "ddp",
                accumulation=1,
                accumulates=True,
                saves_every=1,
                stops_after=draw.randint(rounds, rounds * 4),
                killed_rank=None,
            )
        )
    last = starts[-1]
    starts.append(Start(**{**vars(last), "stops_after": 0, "killed_rank": None}))
    return run, starts


def _train(folder: str, run: Run, start: Start) -> list[torch.Tensor] | None:
    """Resume the run from its checkpoint; return the weights if it finishes."""
    torch.manual_seed(0)
    accelerator = _accelerator(
        run.kind, start.layout, canonical_shards=run.num_shards, gradient_accumulation_steps=start.accumulation
    )
    model: Any = MODELS[run.kind]()
    optimizer: Any = getattr(torch.optim, run.optimizer)(model.parameters(), lr=1e-3)
    loader: Any = DataLoader(_data(), batch_size=run.batch_size, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    with warnings.catch_warnings():  # each shard has its own RNG, so the warning does not apply
        warnings.filterwarnings("ignore", ".*RNG states for", EchelonWarning)
        accelerator.resume(folder)
    num_micro = 0

    def micro_step(x: torch.Tensor, y: torch.Tensor) -> None:
        loss = nn.functional.cross_entropy(model(x), y)
        accelerator.backward(loss, num_items=len(x) + int(y[0]) if run.counts_items else None)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), run.max_norm)
        optimizer.step()
        optimizer.zero_grad()

    while accelerator.progress.step < UPDATES:
        for x, y in loader:
            if start.accumulates:
                with accelerator.accumulate(model):
                    micro_step(x, y)
            else:
                micro_step(x, y)
            num_micro += 1
            if num_micro == start.stops_after:
                if start.killed_rank == accelerator.process_index:
                    os.kill(os.getpid(), signal.SIGKILL)
                if start.killed_rank is None:
                    return None
            if accelerator.sync_gradients and accelerator.progress.step % start.saves_every == 0:
                accelerator.save_state(folder)
            if accelerator.progress.step == UPDATES:
                break
    return weights_of(accelerator, model)


@pytest.mark.soak
@pytest.mark.parametrize("number", range(50))
def test_a_run_with_any_restarts_is_bit_identical_to_one_process(number: int, tmp_path: Path) -> None:
    run, starts = _chosen(number)
    whole = Start(
        world_size=1, layout=None, accumulation=1, accumulates=True, saves_every=99, stops_after=0, killed_rank=None
    )
    (expected,) = run_on_ranks(_train, str(tmp_path / "whole"), run, whole, world_size=1, timeout=600)
    found: list[Any] = []
    for start in starts:
        try:
            found = run_on_ranks(_train, str(tmp_path / "state"), run, start, world_size=start.world_size, timeout=600)
        except RanksFailed as error:
            if start.killed_rank is None or "SIGKILL" not in str(error.errors.get(start.killed_rank)):
                raise
        if found and found[0] is not None:
            break
    assert found
    assert all(torch.equal(p, q) for one in found for p, q in zip(one, expected)), (run, starts)
    print(f"{number}: {run.kind}, {' -> '.join(f'{start.layout} on {start.world_size}' for start in starts)}: equal")
