"""Measures the cost of `parity="bitwise"` with tensor parallelism, compared with "exact" in the same micro-batches.

Decoders of two widths train on 2 gloo processes that share each layer, and on one process, which computes the layers whole or in the
same chunks. Each process has one thread. The variants of a number of processes run in order and in reverse order, so that none of them
always comes first; both numbers of processes take turns.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from parity import CPU, WALL, Found, timed_updates
from results import footer, publish
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from echelon import Accelerator, ParallelismConfig
from echelon.distributed import process_group, spawn
from echelon.utils import TorchTensorParallelConfig

SHARDS, CHUNKS, HEADS = 4, 8, 8
BATCH, LENGTH, VOCABULARY = 16, 64, 512  # samples of an update: shards of 4
WARM_UP = 1
WIDTHS = {128: 4, 512: 2}  # number of layers by width
PLAN = {
    "embedding": "embedding_rowwise",
    "blocks.*.[qkv]": "colwise",
    "blocks.*.o": "rowwise",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
    "head": "colwise_gather_output",
}
EXACT, BITWISE, WHOLE = "exact", "bitwise in chunks", "bitwise, whole layers"
VARIANTS = {2: (EXACT, BITWISE), 1: (EXACT, WHOLE, BITWISE)}  # by number of processes


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2, self.head_width = nn.LayerNorm(width), nn.LayerNorm(width), width // HEADS
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        own = self.norm1(x)
        q, k, v = (f(own).unflatten(-1, (-1, self.head_width)).transpose(1, 2) for f in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.o(mixed.transpose(1, 2).flatten(2)))
        out: torch.Tensor = x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))
        return out


class Decoder(nn.Module):
    _no_split_modules = ("Block",)

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(WIDTHS[width]))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(x)
        return out


def turn(width: int, variant: str, steps: int) -> tuple[float, float]:
    """Train for some updates; return milliseconds per update: wall time, and CPU time of this process."""
    torch.manual_seed(0)
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    options: dict[str, Any] = {"parity": "exact", "max_micro_batch_size": BATCH // SHARDS}
    if variant != EXACT:
        options = {"parity": "bitwise", "canonical_shards": SHARDS}
    if world_size > 1 or variant == BITWISE:
        handler = TorchTensorParallelConfig(plan=PLAN, canonical_chunks=CHUNKS if variant == BITWISE else None)
        options["parallelism_config"] = ParallelismConfig(tp_size=world_size, tp_handler=handler)
    accelerator = Accelerator(cpu=True, seed=1, **options)
    model: Any = Decoder(width)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = TensorDataset(torch.randint(VOCABULARY, (BATCH * (WARM_UP + steps), LENGTH + 1)))
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=BATCH))

    def loss_of(batch: Any) -> torch.Tensor:
        logits = model(batch[0][:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), batch[0][:, 1:].flatten())

    return timed_updates(accelerator, (model, optimizer, loader), loss_of, steps=steps, warm_up=WARM_UP)


def measure(rank: int, world_size: int, steps: int, result: str) -> None:
    """Run every variant of ``world_size`` processes twice, in order and in reverse order."""
    found: Found = {}
    with process_group():
        for width in WIDTHS:
            variants = VARIANTS[world_size]
            for variant in (*variants, *variants[::-1]):  # each turn has a warm-up update
                gc.collect()
                sums = torch.tensor(turn(width, variant, steps)) / world_size
                if world_size > 1:
                    dist.all_reduce(sums)
                found.setdefault(f"{world_size} {width} {variant}", []).append(sums.tolist())
    if rank == 0:
        Path(result).write_text(json.dumps(found))


def report(found: Found, rounds: int, steps: int) -> str:
    def median(world_size: int, width: int, variant: str, column: int) -> float:
        return statistics.median(one[column] for one in found[f"{world_size} {width} {variant}"])

    def ratio(world_size: int, width: int, over: str) -> str:
        pairs = zip(found[f"{world_size} {width} {BITWISE}"], found[f"{world_size} {width} {over}"], strict=True)
        low, middle, high = statistics.quantiles([one[CPU] / two[CPU] for one, two in pairs], n=4)
        return f"{middle:.2f} ({low:.2f} - {high:.2f})"

    rows = []
    for width, num_layers in WIDTHS.items():
        for world_size, variants in VARIANTS.items():
            cells = {
                v: f"{median(world_size, width, v, WALL):.0f} / {median(world_size, width, v, CPU):.0f}"
                for v in variants
            }
            ratios = [ratio(world_size, width, EXACT), ratio(world_size, width, WHOLE) if WHOLE in variants else ""]
            rows.append(
                f"| {width}, {num_layers} layers | {world_size} | {cells[EXACT]} | {cells.get(WHOLE, '')} | {cells[BITWISE]} | "
                f"{' | '.join(ratios)} |"
            )
    return f"""## Cost of bitwise tensor parallelism

`parity="bitwise"` with {CHUNKS} canonical chunks and {SHARDS} shards, compared with `"exact"` in the same micro-batches of {BATCH // SHARDS}, on 2 processes
that share each layer (`tp_size=2`, gloo), and on one process, which computes the layers whole or in the same chunks; one thread
each. A decoder with {HEADS} heads, {LENGTH} tokens per sample, dropout 0.1, AdamW, clipping, updates of {BATCH} samples. The values are milliseconds per
update, wall / CPU (mean of the processes), medians of {2 * rounds} alternating turns of {steps} updates. The machine was loaded: the ratios, in chunks over
the other variant, are those of CPU time in turns of the same half of a round, with median and middle half.

| width | processes | exact | bitwise, whole layers | bitwise in chunks | over exact | over whole layers |
|---|---:|---:|---:|---:|---|---|
{chr(10).join(rows)}

{footer("bitwise_tp.py")}"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="write the table to benchmarks/RESULTS.md")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    found: Found = {}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(options.rounds):
            for world_size in VARIANTS:
                result = Path(folder, "result")
                spawn(measure, args=(world_size, options.steps, str(result)), nprocs=world_size)
                for name, turns in json.loads(result.read_text()).items():
                    found.setdefault(name, []).extend(turns)
    section = report(found, options.rounds, options.steps)
    publish(section, is_written=options.write)


if __name__ == "__main__":
    main()
