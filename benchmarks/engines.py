"""Measures the overhead of echelon in a training step of sharded models, compared with direct calls of ``fully_shard``.

Both train the same transformer on the same tokens, with AdamW and clipping, alternating in the same two processes. The
ratio is the median over the turns. Both must end with the same weights.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from datetime import date
from typing import Any

import torch
import torch.distributed as dist
from overhead import processor, write
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from echelon import Accelerator, FullyShardedDataParallelPlugin
from echelon.distributed import process_group

HEADING = "## A step of sharded models"
VOCABULARY, WIDTH, DEPTH, BATCH, LENGTH = 500, 128, 4, 8, 32
STEPS, TURNS, WARM_UP = 5, 30, 2
LIMIT = 1.03
STAGES = {2: False, 3: True}  # ZeRO stage -> reshard_after_forward


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.feed = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        out: torch.Tensor = x + self.feed(self.second(x))
        return out


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(DEPTH)))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.blocks(self.embed(ids)))
        return out


def loss_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def by_hand(reshard: bool) -> tuple[Any, Callable[[torch.Tensor], None]]:
    model = net()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(ids: torch.Tensor) -> None:
        loss_of(model, ids).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return model, step


def through_echelon(reshard: bool) -> tuple[Any, Callable[[torch.Tensor], None]]:
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=reshard,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    model: Any = net()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))

    def step(ids: torch.Tensor) -> None:
        accelerator.backward(loss_of(model, ids))
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return model, step


def net() -> Any:
    torch.manual_seed(0)
    return Net()


def milliseconds(step: Callable[[torch.Tensor], None], batches: list[torch.Tensor]) -> float:
    dist.barrier()
    started = time.perf_counter()
    for ids in batches:
        step(ids)
    return 1e3 * (time.perf_counter() - started) / len(batches)


def measure(turns: int) -> list[str]:
    """Return the rows of the table. Collective: every rank."""
    rows = []
    generator = torch.Generator().manual_seed(dist.get_rank())
    for stage, reshard in STAGES.items():
        variants = {"by hand": by_hand(reshard), "echelon": through_echelon(reshard)}
        times: dict[str, list[float]] = {name: [] for name in variants}
        for turn in range(WARM_UP + turns):
            batches = [torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator) for _ in range(STEPS)]
            for name in list(variants) if turn % 2 else reversed(list(variants)):
                took = milliseconds(variants[name][1], batches)
                if turn >= WARM_UP:
                    times[name].append(took)
        pairs = zip(*(variants[name][0].parameters() for name in variants))
        off = max(float((p.full_tensor() - q.full_tensor()).abs().max()) for p, q in pairs)
        assert off <= 3e-4, f"the variants do not train alike: {off}"  # AdamW amplifies float32 rounding
        ratios = [ours / hand for hand, ours in zip(times["by hand"], times["echelon"])]
        quarter, middle, three_quarters = statistics.quantiles(ratios, n=4)
        least = min(times["echelon"]) / min(times["by hand"])
        verdict = "met" if middle <= LIMIT else "MISSED"
        rows.append(
            f"| {stage} | {statistics.median(times['by hand']):.1f} | {statistics.median(times['echelon']):.1f} "
            f"| {middle:.3f} | {quarter:.3f} - {three_quarters:.3f} | {least:.3f} | {LIMIT}, {verdict} | {off:.0e} |"
        )
    return rows


def section(rows: list[str], turns: int) -> str:
    return "\n".join(
        [
            HEADING,
            "",
            f"{DEPTH} transformer blocks of width {WIDTH}, {BATCH} x {LENGTH} tokens, AdamW, clipping, float32, 2 processes. The values are",
            f"milliseconds of wall time per step, medians of {turns} turns of {STEPS} steps that alternate in the same processes. The ratio is the",
            "median over the turns, with its middle half and the ratio of the minimum times. Off: the largest final difference of a weight.",
            "",
            "| ZeRO stage | `fully_shard`, ms | echelon, ms | ratio | middle half | of minimum times | target | off |",
            "|---:|---:|---:|---:|---:|---:|---|---:|",
            *rows,
            "",
            f"{date.today()}, {processor()}, Python {platform.python_version()}; torch {torch.__version__}.",
            "Repeat: `.venv/bin/python benchmarks/engines.py --write`.",
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--write", action="store_true", help="replace the section in RESULTS.md")
    arguments = parser.parse_args()
    if "RANK" not in os.environ:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *sys.argv]
        raise SystemExit(subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False).returncode)
    warnings.simplefilter("ignore")
    with process_group():
        rows = measure(arguments.turns)
        if dist.get_rank() == 0:
            text = section(rows, arguments.turns)
            print(text)
            if arguments.write:
                write(text)


if __name__ == "__main__":
    main()
