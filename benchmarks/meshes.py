"""Measures the overhead of echelon in a training step with split layers, compared with ``parallelize_module`` and ``fully_shard`` by hand.

Both train the same transformer on the same tokens, with AdamW and clipping, alternating in the same processes. The ratio is the median
over the turns. Both must end with the same weights.
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
from collections import defaultdict
from collections.abc import Callable
from datetime import date
from typing import Any

import torch
import torch.distributed as dist
from overhead import processor, write
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from echelon import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from echelon.distributed import process_group
from echelon.utils import TorchTensorParallelConfig

HEADING = "## A step with split layers"
VOCABULARY, WIDTH, HEADS, DEPTH, BATCH, LENGTH = 512, 128, 4, 4, 8, 32
STEPS, TURNS, WARM_UP = 5, 30, 2
LIMIT = 1.03
LAYOUTS = {"tp 2": (1, 2), "shard 2 x tp 2": (2, 2), "tp 4": (1, 4)}  # sizes of dp_shard and tp
PLAN = {
    "embed": "embedding_rowwise",
    "blocks.*.[qkv]": "colwise",
    "blocks.*.o": "rowwise",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
    "head": "colwise_gather_output",
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=i != 1) for i in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        q, k, v = (f(y).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for f in (self.q, self.k, self.v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        out: torch.Tensor = x + self.down(nn.functional.gelu(self.up(self.second(x))))
        return out


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(DEPTH)))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.blocks(self.embed(ids)))
        return out


def loss_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def net() -> Any:
    torch.manual_seed(0)
    return Net()


def clip_by_hand(parameters: list[Any], limit: float) -> None:
    """As ``clip_grad_norm_``, which torch refuses for DTensors of different meshes: one all_reduce per set of sharded axes."""
    gradients = [p.grad for p in parameters]
    parts: dict[tuple[Any, ...], list[torch.Tensor]] = defaultdict(list)
    for gradient in gradients:
        mesh = gradient.device_mesh
        axes = enumerate(gradient.placements)
        parts[tuple(mesh.get_group(axis) for axis, p in axes if not p.is_replicate())].append(gradient.to_local())
    total = torch.zeros(())
    for groups, locals_ in parts.items():
        squares = torch.stack(torch._foreach_norm(locals_)).square().sum()
        for group in groups:
            dist.all_reduce(squares, group=group)
        total = total + squares
    factor = (limit / (total.sqrt() + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_([gradient.to_local() for gradient in gradients], factor)


def by_hand(shards: int, parts: int) -> tuple[Any, Callable[[torch.Tensor], None]]:
    model = net()
    mesh: Any = init_device_mesh("cpu", (shards, parts), mesh_dim_names=("dp_shard", "tp"))
    plan: dict[str, Any] = {"embed": RowwiseParallel(input_layouts=Replicate())}
    for i in range(DEPTH):
        plan |= {f"blocks.{i}.{name}": ColwiseParallel() for name in ("q", "k", "v", "up")}
        plan |= {f"blocks.{i}.{name}": RowwiseParallel() for name in ("o", "down")}
    plan["head"] = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(model, mesh["tp"], plan)
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp_shard"])
    # As echelon (and Accelerate) on ZeRO stage 3; torch's default keeps the outermost unit gathered.
    fully_shard(model, mesh=mesh["dp_shard"], reshard_after_forward=True)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)

    def step(ids: torch.Tensor) -> None:
        loss_of(model, ids).backward()
        clip_by_hand(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return model, step


def through_echelon(shards: int, parts: int) -> tuple[Any, Callable[[torch.Tensor], None]]:
    config = ParallelismConfig(dp_shard_size=shards, tp_size=parts, tp_handler=TorchTensorParallelConfig(plan=PLAN))
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"]
    )
    accelerator = Accelerator(cpu=True, parallelism_config=config, fsdp_plugin=plugin)
    model: Any = net()
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


def measure(layout: str, turns: int) -> str:
    """Return a row of the table. Collective: every rank."""
    shards, parts = LAYOUTS[layout]
    generator = torch.Generator().manual_seed(dist.get_rank() // parts)
    variants = {"by hand": by_hand(shards, parts), "echelon": through_echelon(shards, parts)}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
    for turn in range(WARM_UP + turns):
        batches = [torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator) for _ in range(STEPS)]
        for name in list(variants) if turn % 2 else reversed(list(variants)):
            took = milliseconds(variants[name][1], batches)
            if turn >= WARM_UP:
                times[name].append(took)
    pairs = zip(*(variants[name][0].parameters() for name in variants))
    off = max(float((p.full_tensor() - q.full_tensor()).abs().max()) for p, q in pairs)
    assert off <= 3e-4, f"the variants do not train alike: {off}"  # AdamW amplifies float32 rounding
    cells = []
    for kind in range(2):  # wall, CPU
        hand, ours = ([one[kind] for one in times[name]] for name in ("by hand", "echelon"))
        ratios = [b / a for a, b in zip(hand, ours)]
        quarter, middle, three_quarters = statistics.quantiles(ratios, n=4)
        cells += [
            f"{statistics.median(hand):.1f}",
            f"{statistics.median(ours):.1f}",
            f"{middle:.3f} ({quarter:.3f} - {three_quarters:.3f})",
        ]
    verdict = "met" if middle <= LIMIT else "missed"
    return f"| {layout} | {' | '.join(cells)} | {LIMIT}, {verdict} | {off:.0e} |"


def section(rows: list[str], turns: int) -> str:
    return "\n".join(
        [
            HEADING,
            "",
            "`parallelize_module` + `fully_shard` by hand (clipping, which torch refuses for mixed meshes, included), compared with echelon:",
            f"{DEPTH} transformer blocks of width {WIDTH}, {BATCH} x {LENGTH} tokens, AdamW, clipping, float32, ZeRO stage 3 over `dp_shard`. The",
            f"values are milliseconds per step, medians of {turns} turns of {STEPS} steps that alternate in the same processes; CPU is the mean",
            "of the ranks. The ratios are medians over the turns, with their middle half; the target is for CPU time, which a busy machine",
            "disturbs less. Off: the largest final difference of a weight.",
            "",
            "| layout | wall, by hand | echelon | ratio | CPU, by hand | echelon | ratio | target | off |",
            "|---|---:|---:|---|---:|---:|---|---|---:|",
            *rows,
            "",
            f"{date.today()}, {processor()}, load {os.getloadavg()[0]:.0f}, Python {platform.python_version()}; torch {torch.__version__}.",
            "Repeat: `.venv/bin/python benchmarks/meshes.py --write`.",
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--layout", choices=list(LAYOUTS), action="append", help="only this one; may be repeated")
    parser.add_argument("--write", action="store_true", help="replace the section in RESULTS.md")
    arguments = parser.parse_args()
    layouts = arguments.layout or list(LAYOUTS)
    if "RANK" in os.environ:
        warnings.simplefilter("ignore")
        with process_group():
            row = measure(layouts[0], arguments.turns)
            if dist.get_rank() == 0:
                print(row)
        return
    rows = []
    for layout in layouts:
        shards, parts = LAYOUTS[layout]
        start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={shards * parts}"]
        command = [*start, __file__, "--layout", layout, "--turns", str(arguments.turns)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
        rows += [line for line in done.stdout.splitlines() if line.startswith("| ")]
    text = section(rows, arguments.turns)
    print(text)
    if arguments.write:
        write(text)


if __name__ == "__main__":
    main()
