"""Measures the overhead of echelon in a training step of sharded and split models, compared with torch's functions by hand.

Both train the same transformer on the same tokens, with AdamW and clipping, alternating in the same processes: by hand with
``parallelize_module`` and ``fully_shard``. The ratio is the median over the turns. Both must end with the same weights.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from gpu import PLAN, Shape, build, clip_on_meshes
from results import footer, middle_half, publish, verdict
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from echelon import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from echelon.distributed import process_group
from echelon.utils import TorchTensorParallelConfig

SHAPE = Shape(vocabulary=512, width=128, hidden=512, heads=4, kv_heads=4, layers=4, length=32, batch=8, is_llama=True)
STEPS, TURNS, WARM_UP = 5, 30, 2
LIMIT = 1.03
Variant = tuple[Any, Callable[[torch.Tensor], None]]
"""A model, and the function that makes a step with a batch."""


class Layout(NamedTuple):
    """Sizes of the axes, and whether parameters are resharded after the forward pass (ZeRO stage 3)."""

    shards: int
    parts: int
    reshards: bool = True


SHARDED, SPLIT = "## A step of sharded models", "## A step with split layers"
LAYOUTS = {
    SHARDED: {"ZeRO stage 2": Layout(2, 1, reshards=False), "ZeRO stage 3": Layout(2, 1)},
    SPLIT: {"tp 2": Layout(1, 2), "shard 2 x tp 2": Layout(2, 2), "tp 4": Layout(1, 4)},
}
INTRODUCTIONS = {
    SHARDED: "`fully_shard` by hand, compared with echelon, on 2 processes:",
    SPLIT: "`parallelize_module` + `fully_shard` by hand (clipping, which torch refuses for mixed meshes, included), compared with echelon,\n"
    "ZeRO stage 3 over `dp_shard`:",
}


def loss_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(ids[:, :-1], labels=ids[:, 1:])["loss"]
    return loss


def by_hand(layout: Layout) -> Variant:
    model: Any = build(SHAPE)
    mesh: Any = init_device_mesh("cpu", (layout.shards, layout.parts), mesh_dim_names=("dp_shard", "tp"))
    clip: Callable[[list[Any], float], object] = nn.utils.clip_grad_norm_
    if layout.parts > 1:
        plan: dict[str, Any] = {"embed": RowwiseParallel(input_layouts=Replicate())}
        for i in range(SHAPE.layers):
            plan |= {f"blocks.{i}.{name}": ColwiseParallel() for name in ("q", "k", "v", "up", "gate")}
            plan |= {f"blocks.{i}.{name}": RowwiseParallel() for name in ("o", "down")}
        plan["head"] = ColwiseParallel(output_layouts=Replicate())
        parallelize_module(model, mesh["tp"], plan)
        clip = clip_on_meshes
    # As echelon (and Accelerate) on ZeRO stage 3; torch's default keeps the outermost unit gathered.
    for unit in (*model.blocks, model):
        fully_shard(unit, mesh=mesh["dp_shard"], reshard_after_forward=layout.reshards)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)

    def step(ids: torch.Tensor) -> None:
        loss_of(model, ids).backward()
        clip(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return model, step


def through_echelon(layout: Layout) -> Variant:
    options: dict[str, Any] = {}
    if layout.parts > 1:
        handler = TorchTensorParallelConfig(plan=PLAN)
        config = ParallelismConfig(dp_shard_size=layout.shards, tp_size=layout.parts, tp_handler=handler)
        options["parallelism_config"] = config
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=layout.reshards,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, **options)
    model: Any = build(SHAPE)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))

    def step(ids: torch.Tensor) -> None:
        accelerator.backward(loss_of(model, ids))
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return model, step


def milliseconds(step: Callable[[torch.Tensor], None], batches: list[torch.Tensor]) -> tuple[float, float]:
    """Return wall time and CPU time (mean of the ranks) of a step."""
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    for ids in batches:
        step(ids)
    spent = torch.tensor([time.perf_counter() - wall, time.process_time() - cpu], dtype=torch.float64)
    dist.all_reduce(spent)
    wall, cpu = (1e3 * spent / dist.get_world_size() / len(batches)).tolist()
    return wall, cpu


def measure(name: str, layout: Layout, turns: int) -> str:
    """Return a row of the table. Collective: every rank."""
    generator = torch.Generator().manual_seed(dist.get_rank() // layout.parts)
    variants = {"by hand": by_hand(layout), "echelon": through_echelon(layout)}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
    for turn in range(WARM_UP + turns):
        batches = [
            torch.randint(SHAPE.vocabulary, (SHAPE.batch, SHAPE.length), generator=generator) for _ in range(STEPS)
        ]
        for variant in list(variants) if turn % 2 else reversed(list(variants)):
            took = milliseconds(variants[variant][1], batches)
            if turn >= WARM_UP:
                times[variant].append(took)
    pairs = zip(*(model.parameters() for model, _ in variants.values()))
    off = max(float((p.full_tensor() - q.full_tensor()).abs().max()) for p, q in pairs)
    assert off <= 3e-4, f"the variants do not train alike: {off}"  # AdamW amplifies float32 rounding
    cells, ratios = [], [0.0]
    for kind in range(2):  # wall, CPU
        hand, ours = ([one[kind] for one in times[variant]] for variant in ("by hand", "echelon"))
        ratios = [b / a for a, b in zip(hand, ours)]
        cells += [f"{statistics.median(hand):.1f}", f"{statistics.median(ours):.1f}", middle_half(ratios)]
    met = verdict(statistics.median(ratios) <= LIMIT)
    return f"| {name} | {' | '.join(cells)} | {LIMIT}, {met} | {off:.0e} |"


def section(heading: str, rows: list[str], turns: int) -> str:
    return f"""{heading}

{INTRODUCTIONS[heading]}
{SHAPE.layers} Llama blocks of width {SHAPE.width}, {SHAPE.batch} x {SHAPE.length} tokens, AdamW, clipping, float32. The values are milliseconds per step, medians
of {turns} turns of {STEPS} steps that alternate in the same processes; CPU is the mean of the ranks. The ratios are medians over the
turns, with their middle half; the target is for CPU time, which a busy machine disturbs less. The column "off" is the largest final difference of a weight.

| layout | wall, by hand | echelon | ratio | CPU, by hand | echelon | ratio | target | off |
|---|---:|---:|---|---:|---:|---|---|---:|
{chr(10).join(rows)}

{footer("meshes.py")}"""


def main() -> None:
    layouts = {name: layout for table in LAYOUTS.values() for name, layout in table.items()}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--layout", choices=list(layouts), action="append", help="only this one; may be repeated")
    parser.add_argument("--write", action="store_true", help="replace the sections in RESULTS.md")
    arguments = parser.parse_args()
    chosen = arguments.layout or list(layouts)
    if "RANK" in os.environ:
        warnings.simplefilter("ignore")
        with process_group():
            row = measure(chosen[0], layouts[chosen[0]], arguments.turns)
            if dist.get_rank() == 0:
                print(row)
        return
    for heading, table in LAYOUTS.items():
        rows = []
        for name in (name for name in table if name in chosen):
            num_ranks = table[name].shards * table[name].parts
            start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
            command = [*start, __file__, "--layout", name, "--turns", str(arguments.turns)]
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
            rows += [line for line in done.stdout.splitlines() if line.startswith("| ")]
        if rows:
            publish(section(heading, rows, arguments.turns), is_written=arguments.write)


if __name__ == "__main__":
    main()
