"""Measures the time to 98.5 % test accuracy on MNIST, on 2 CPU processes: DDP by hand, accelerate, and echelon with each ``speed``.

Every variant trains the network of the examples (examples/mnist_net.py) on the same data with the same settings: AdamW, 64 samples per
process, a new order for each seed. It evaluates after each EVERY-th step, whose time is not counted, and ends at the first evaluation
that reaches the accuracy. The variants take turns, in an order that is drawn for each seed; each run is two new processes, whose start
and imports are not counted.

python benchmarks/mnist_time.py --seeds 5 --write    # an hour on 2 cores
python benchmarks/mnist_time.py --seeds 1 --profile  # where the time of a step goes
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from overhead import installed, processor, write
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from mnist_data import mnist
from mnist_net import Net

RANKS, BATCH, EVERY, MOST_EPOCHS, TARGET = 2, 64, 50, 5, 98.5
LIMITS = {"echelon, safe": 0.75, "echelon, max": 0.5}
BY_HAND = "DDP by hand"
HEADING = "## Time to 98.5 % on MNIST"
Step = Callable[[Any, Any], None]
Run = tuple[float, float, int, float]
"""Seconds, CPU seconds of rank 0, steps, and the accuracy in percent."""


def by_hand(train: TensorDataset, seed: int) -> tuple[Any, Callable[[int], Any], Step]:
    torch.manual_seed(seed)
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sampler: Any = DistributedSampler(train, seed=seed)
    loader = DataLoader(train, batch_size=BATCH, sampler=sampler)

    def batches(epoch: int) -> Any:
        sampler.set_epoch(epoch)
        return loader

    def step(images: Any, labels: Any) -> None:
        optimizer.zero_grad()
        F.nll_loss(model(images), labels).backward()
        optimizer.step()

    return model, batches, step


def prepared(accelerator: Any, train: TensorDataset, seed: int) -> tuple[Any, Callable[[int], Any], Step]:
    torch.manual_seed(seed)
    model: Any = Net()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader: Any = DataLoader(train, batch_size=BATCH, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    def step(images: Any, labels: Any) -> None:
        optimizer.zero_grad()
        accelerator.backward(F.nll_loss(model(images), labels))
        optimizer.step()

    return model, lambda _: loader, step


def build(variant: str, train: TensorDataset, seed: int) -> tuple[Any, Callable[[int], Any], Step]:
    if variant == BY_HAND:
        return by_hand(train, seed)
    if variant == "accelerate":
        import accelerate

        return prepared(accelerate.Accelerator(cpu=True), train, seed)
    from echelon import Accelerator

    return prepared(Accelerator(cpu=True, speed=variant.partition(", ")[2]), train, seed)


def accuracy(model: Any, test: TensorDataset) -> float:
    """Return the accuracy in percent; every process computes it on its half of the test images. Collective."""
    bare = model.module if hasattr(model, "module") else model
    rank = dist.get_rank()
    right = torch.zeros(())
    bare.eval()
    with torch.no_grad():
        for images, labels in zip(*(tensor[rank::RANKS].split(1000) for tensor in test.tensors)):
            right += (bare(images).argmax(dim=1) == labels).sum()
    bare.train()
    dist.all_reduce(right)
    return 100 * right.item() / len(test)


def train_to_target(variant: str, seed: int, num_steps: int | None) -> Run:
    """Train until the accuracy is reached. ``num_steps``: make as many steps, without evaluation."""
    train, test = mnist(True), mnist(False)
    model, batches, step = build(variant, train, seed)
    torch.manual_seed(1000 * seed + dist.get_rank())  # dropout
    seconds, cpu, count, reached = 0.0, 0.0, 0, 0.0
    dist.barrier()
    started, began = time.perf_counter(), time.process_time()
    for epoch in range(MOST_EPOCHS):
        for images, labels in batches(epoch):
            step(images, labels)
            count += 1
            if count == num_steps:
                return time.perf_counter() - started, time.process_time() - began, count, 0.0
            if num_steps is None and count % EVERY == 0:
                seconds, cpu = seconds + time.perf_counter() - started, cpu + time.process_time() - began
                reached = accuracy(model, test)
                if reached >= TARGET:
                    return seconds, cpu, count, reached
                started, began = time.perf_counter(), time.process_time()
    raise RuntimeError(f"{variant}, seed {seed}: {reached:.2f} % after {MOST_EPOCHS} epochs")


def profile_steps(variant: str, num_steps: int) -> list[tuple[str, float]]:
    """Return the milliseconds per step of this process by torch operation, and the whole step's. Recording adds to small operations."""
    _, batches, step = build(variant, mnist(True), 0)
    data: Iterator[Any] = iter(batches(0))
    for _ in range(5):
        step(*next(data))
    dist.barrier()
    began = time.perf_counter()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        for _ in range(num_steps):
            step(*next(data))
    whole = (time.perf_counter() - began) * 1e3 / num_steps
    rows = [(event.key, event.self_cpu_time_total / 1e3 / num_steps) for event in seen.key_averages()]
    return [("whole step", whole), *sorted(rows, key=lambda row: -row[1])[:12]]


def work(rank: int, variant: str, seed: int, num_steps: int | None, profiles: bool, result: str) -> None:
    """Run one variant in one of two processes."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS}
    os.environ.update({name: str(value) for name, value in names.items()})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "GLOO_SOCKET_IFNAME": "lo"})
    os.environ["ECHELON_NO_RECORD"] = "1"  # overhead.py measures what a record costs
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{result}.store", rank=rank, world_size=RANKS)
    found = profile_steps(variant, num_steps or 30) if profiles else train_to_target(variant, seed, num_steps)
    if rank == 0:
        Path(result).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def run(variant: str, seed: int, num_steps: int | None = None, *, profiles: bool = False) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result")
        context: Any = torch.multiprocessing.get_context("spawn")
        args = (variant, seed, num_steps, profiles, str(result))
        ranks = [context.Process(target=work, args=(rank, *args)) for rank in range(RANKS)]
        for one in ranks:
            one.start()
        for one in ranks:
            one.join()
        assert result.exists(), f"{variant}, seed {seed} failed"
        return json.loads(result.read_text())


def report(found: dict[str, list[Run]], num_steps: int | None) -> str:
    what = f"{num_steps} steps" if num_steps else f"{TARGET} %"
    rows = []
    for variant, runs in found.items():
        ms, cpu_ms = (statistics.median(1e3 * one[i] / one[2] for one in runs) for i in (0, 1))
        whole = [one[0] for one in runs]
        others = [name for name in (BY_HAND, "accelerate") if name in found and name != variant]
        ratios = [
            [statistics.median(own[i] / its[i] for own, its in zip(runs, found[name], strict=True)) for i in (0, 1)]
            for name in others
        ]
        rows.append(
            f"| {variant} | {statistics.median(whole):.1f} | {min(whole):.1f} - {max(whole):.1f} "
            f"| {statistics.median(one[2] for one in runs):.0f} | {ms:.1f} | {cpu_ms:.1f} "
            f"| {', '.join(f'{wall:.2f} ({cpu:.2f}) x {name}' for name, (wall, cpu) in zip(others, ratios))} "
            f"| {LIMITS.get(variant, '')} |"
        )
    num_seeds = len(next(iter(found.values())))
    return f"""{HEADING}

Seconds of training, without evaluations, until {what} on 2 processes with one thread each: the network of the examples, AdamW, 64 samples
per process, {num_seeds} seed(s), in an order drawn for each seed. Ratios are those of the runs with the same seed (median).

| variant | s, median | min - max | steps | ms per step | CPU ms | ratio (of CPU time) | target |
|---|---:|---:|---:|---:|---:|---|---:|
{chr(10).join(rows)}

{date.today()}, {processor()}, load {os.getloadavg()[0]:.0f}, Python {platform.python_version()}; torch {torch.__version__}.
Repeat: `make peers`, then `.venv-peers/bin/python benchmarks/mnist_time.py --write`.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, help="measure this number of steps instead of the time to the accuracy")
    parser.add_argument("--only", action="append", help="part of the name of a variant; may be repeated")
    parser.add_argument(
        "--profile", action="store_true", help="print where the time of a step goes, by torch operation"
    )
    parser.add_argument("--write", action="store_true", help="write the table to benchmarks/RESULTS.md")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    variants = [BY_HAND, "accelerate", "echelon, safe", "echelon, max"]
    if not installed("accelerate"):
        print("!! accelerate is not installed and is not measured. To compare: make peers.")
        variants.remove("accelerate")
    variants = [name for name in variants if not options.only or any(part in name for part in options.only)]
    if options.profile:
        for variant in variants:
            print(variant)
            for name, ms in run(variant, 0, options.steps, profiles=True):
                print(f"{ms:8.2f} ms {name}")
        return
    found: dict[str, list[Run]] = {name: [] for name in variants}
    for seed in range(options.seeds):
        for variant in random.Random(seed).sample(variants, len(variants)):
            found[variant].append(run(variant, seed, options.steps))
            print(seed, variant, found[variant][-1], flush=True)
    section = report(found, options.steps)
    print(section)
    if options.write:
        write(section)


if __name__ == "__main__":
    main()
