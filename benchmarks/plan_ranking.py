"""Compares the ranking of layouts by ``plan_layout`` with measured steps, on this machine's CPU with gloo.

For each of ten models, ten layouts compute the same global batch on two processes of one thread each (``single``: on one of them). The
FLOP/s, the bandwidth of memory, each collective of gloo, and what the host takes for an operator and for a unit of fully_shard are measured
first; the plan knows nothing else of the machine. Layouts take turns, and the
fastest step of each counts, because other programs only slow a step down.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from results import footer, publish
from torch import nn

from echelon.engines.ddp import DDPEngine
from echelon.engines.fsdp.fsdp2 import FSDP2Engine
from echelon.engines.fsdp.options import ShardingOptions
from echelon.engines.single import SingleEngine
from echelon.engines.zero1 import Zero1Engine
from echelon.plan.devices import Device, Hardware, Link
from echelon.plan.facts import Cluster, ParallelLayout, StepSettings
from echelon.plan.layouts import plan_layout
from echelon.plan.step_time import EFFICIENCY
from echelon.plan.trace import trace_step
from echelon.world.world import World


class Shape(NamedTuple):
    """Of a stack of blocks, and the rows of the global batch."""

    width: int
    layers: int
    rows: int


SHAPES = [
    Shape(64, 4, 4096),
    Shape(128, 8, 1024),
    Shape(256, 4, 256),
    Shape(256, 8, 1024),
    Shape(384, 4, 64),
    Shape(512, 2, 512),
    Shape(512, 4, 32),
    Shape(512, 8, 128),
    Shape(768, 4, 16),
    Shape(1024, 2, 64),
]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.relu(self.up(x)))
        return out


class Stack(nn.Sequential):
    _no_split_modules = ("Block",)


def build(shape: Shape) -> tuple[Stack, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Stack(*(Block(shape.width) for _ in range(shape.layers)), nn.Linear(shape.width, shape.width))
    return model, torch.optim.AdamW(model.parameters())


def loss_of(model: Any, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(batch).square().mean()
    return loss


def layouts(shape: Shape) -> dict[str, ParallelLayout]:
    found = {}
    for accumulation in (1, 4):
        name = "" if accumulation == 1 else f", {accumulation} micro-steps"
        whole = StepSettings(micro_batch=shape.rows // accumulation)
        half = replace(whole, micro_batch=whole.micro_batch // 2)
        found |= {
            f"single{name}": ParallelLayout("single", whole, accumulation),
            f"ddp{name}": ParallelLayout("ddp", half, accumulation, dp_replicate=2),
            f"zero1{name}": ParallelLayout("zero1", half, accumulation, dp_replicate=2),
            f"fsdp2, stage 2{name}": ParallelLayout("fsdp2", half, accumulation, dp_shard=2, stage=2),
            f"fsdp2, stage 3{name}": ParallelLayout("fsdp2", half, accumulation, dp_shard=2),
        }
    return found


# ---- what is measured ----------------------------------------------------------------------------------------------------


def fastest(work: Callable[[], object], turns: int) -> float:
    """Return the seconds of the fastest of several calls."""
    found = []
    for _ in range(turns):
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
    return min(found)


def calibrate() -> Hardware:
    """Measure one process while the other one does the same. Collective: call on both ranks."""
    a, b = torch.randn(512, 512), torch.randn(512, 2048)
    dist.barrier()
    flops = 2 * 512 * 512 * 2048 / fastest(lambda: a @ b, 20)
    large, target = torch.zeros(2**24), torch.zeros(2**24)
    dist.barrier()
    bandwidth = 2 * large.nbytes / fastest(lambda: target.copy_(large), 5)
    links = {kind: measured_link(kind) for kind in COLLECTIVES}
    dist.barrier()
    small = torch.zeros(1)
    dispatch = fastest(lambda: [small.add(1.0) for _ in range(1000)], 20) / 1000
    device = Device("this CPU", 2**34, bandwidth / EFFICIENCY, {"float32": flops / EFFICIENCY})
    link = links["all_reduce"]
    return Hardware(
        device=device,
        link=link,
        network=link,
        host=Link(bandwidth, 0.0),
        overlaps=False,
        links=links,
        dispatch=dispatch,
        hooks=hooks_seconds(links, dispatch),
    )


def measured_link(kind: str) -> Link:
    """Measure a collective of both ranks. What ``collective_seconds`` then computes for it is what was measured."""
    start, sent, rounds = COLLECTIVES[kind]
    seconds = {}
    for numel in (2, 2**22):
        dist.barrier()
        whole, half = torch.zeros(numel), torch.zeros(numel // 2)
        seconds[numel] = fastest(partial(start, whole, half), 30 if numel == 2 else 7)
    return Link(sent * 4 * 2**22 / (seconds[2**22] - seconds[2]), seconds[2] / rounds)


reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)  # the name in torch 2.13
OPERATORS = 60  # of a block and its optimizer step
# How it is called with a whole tensor and half of it, the share of the bytes that a rank of two sends, and the rounds of a ring.
COLLECTIVES: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor], object], float, int]] = {
    "all_reduce": (lambda whole, _half: dist.all_reduce(whole), 1.0, 2),
    "all_gather": (dist.all_gather_into_tensor, 0.5, 1),
    "reduce_scatter": (lambda whole, half: reduce_scatter(half, whole), 0.5, 1),
    "broadcast": (lambda whole, _half: dist.broadcast(whole, 0), 1.0, 1),
}


def hooks_seconds(links: dict[str, Link], dispatch: float) -> float:
    """Measure what fully_shard takes for each of many small units in one pass, beside its collectives and the operators of a block."""
    seconds = {}
    for layers in (8, 24):
        step, release = prepared_step(
            Shape(2, layers, 2), ParallelLayout("fsdp2", StepSettings(micro_batch=1), dp_shard=2)
        )
        seconds[layers] = fastest(step, 10)
        release()
    others = 2 * links["all_gather"].latency + links["reduce_scatter"].latency + OPERATORS * dispatch
    return max(0.0, (seconds[24] - seconds[8]) / 16 - others) / 2


def prepared_step(shape: Shape, layout: ParallelLayout) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return a function that makes a step, and one that frees the model. Collective: call on both ranks."""
    world = World.current(cpu=True)
    engine: Any
    if layout.engine == "fsdp2":
        engine = FSDP2Engine(world, options=ShardingOptions(reshard_after_forward=layout.stage == 3))
    else:
        engine = {"single": SingleEngine, "ddp": DDPEngine, "zero1": Zero1Engine}[layout.engine](world)
    own, stepping = build(shape)
    prepared = engine.prepare([own], [stepping], [])
    (model,), (optimizer,) = prepared.models, prepared.optimizers
    batch = torch.randn(layout.settings.micro_batch, shape.width)
    idle = layout.engine == "single" and dist.get_rank() > 0

    def step() -> None:
        if idle:
            return
        for micro_step in range(layout.accumulation):
            if micro_step < layout.accumulation - 1:
                with engine.no_sync(model):
                    engine.backward(loss_of(model, batch), model)
            else:
                engine.backward(loss_of(model, batch), model)
        engine.step(optimizer)
        engine.zero_grad(optimizer)

    return step, engine.release


def measure(rank: int, store: str, turns: int, shapes: list[Shape], results: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    found: dict[str, Any] = {"hardware": calibrate(), "seconds": []}
    for shape in shapes:
        steps = {name: prepared_step(shape, layout) for name, layout in layouts(shape).items()}
        seconds = dict.fromkeys(steps, float("inf"))
        for turn in range(turns + 1):
            for name, (step, _) in steps.items():
                dist.barrier()
                taken = fastest(step, 1)
                if turn:
                    seconds[name] = min(seconds[name], taken)
        for _, release in steps.values():
            release()
        found["seconds"].append(seconds)
    if rank == 0:
        torch.save(found, results)
    dist.barrier()
    dist.destroy_process_group()


# ---- what is planned -----------------------------------------------------------------------------------------------------


def planned(shape: Shape, hardware: Hardware) -> dict[str, float]:
    found, traced = {}, {}
    cluster = Cluster(gpus_per_node=2, nodes=1, gpu_memory=2**34)
    for name, layout in layouts(shape).items():
        if layout.settings not in traced:
            model, optimizer = build(shape)
            batch = torch.randn(layout.settings.micro_batch, shape.width)
            traced[layout.settings] = trace_step(model, optimizer, loss_of, batch, layout.settings, device="cpu")
        facts, trace = traced[layout.settings]
        found[name] = plan_layout(facts, trace, layout, cluster, hardware=hardware).seconds
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=3, help="steps of each layout")
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help="how many of the models")
    parser.add_argument("--write", action="store_true", help="replace the section in RESULTS.md")
    options = parser.parse_args()
    shapes = SHAPES[: options.shapes]
    with tempfile.TemporaryDirectory() as folder:
        results = str(Path(folder) / "results")
        mp.spawn(measure, (str(Path(folder) / "store"), options.turns, shapes, results), nprocs=2)
        found = torch.load(results, weights_only=False)  # written above
    hardware = found["hardware"]
    hits, rows = 0, []
    for shape, seconds in zip(shapes, found["seconds"]):
        plans = planned(shape, hardware)
        best = min(plans, key=lambda name: plans[name])
        order = sorted(seconds, key=lambda name: seconds[name])
        hits += best in order[:2]
        others = [f"{order[i]} ({seconds[order[i]]:.3f})" for i in (0, 1, -1)]
        rows.append(
            f"| {shape.width}, {shape.layers}, {shape.rows} | {best} ({plans[best]:.3f}) | {seconds[best]:.3f}, place {order.index(best) + 1} | "
            f"{' | '.join(others)} |"
        )
    links = ", ".join(
        f"{kind} {link.bandwidth / 1e9:.2f} GB/s and {1e6 * link.latency:.0f} us a round"
        for kind, link in hardware.links.items()
    )
    text = "\n".join(
        [
            "## The fastest layout by echelon plan",
            "",
            "Ten layouts of each model on two processes of one thread each, with gloo; seconds of a step, the fastest of "
            f"{options.turns}. The plan knows of",
            f"the machine what was measured first: {hardware.device.flops['float32'] * EFFICIENCY / 1e9:.0f} GFLOP/s, "
            f"{hardware.device.bandwidth * EFFICIENCY / 1e9:.1f} GB/s of memory, {1e6 * hardware.dispatch:.1f} us an operator, "
            f"{1e6 * hardware.hooks:.0f} us a unit and pass of fully_shard;",
            f"{links}.",
            "",
            "| width, layers, rows | fastest by plan | measured | fastest measured | second | slowest |",
            "|---|---|---|---|---|---|",
            *rows,
            "",
            f"The fastest by plan is among the measured best two in {hits} of {len(shapes)} cases (target: 9 of 10).",
            "",
            footer("plan_ranking.py"),
        ]
    )
    publish(text, is_written=options.write)


if __name__ == "__main__":
    main()
