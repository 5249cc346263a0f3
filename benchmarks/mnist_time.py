"""Measures the time to 98.5 % test accuracy on MNIST, on 2 CPU processes: DDP by hand, accelerate, and echelon with each ``speed``.

Every variant trains the network of the examples (examples/mnist_net.py) with the same settings: AdamW, 64 samples per process. For each seed,
all of them begin with the same weights, read the same samples in the same order and drop the same activations, so that no variant needs fewer
steps by chance. A run evaluates after each EVERY-th step, and ends at the first evaluation that reaches the accuracy. It is measured twice:
from the command (torchrun, or `echelon launch`) to that evaluation, and the steps alone. The variants take turns, in an order that is
drawn for each seed.

python benchmarks/mnist_time.py --seeds 5 --write    # an hour on 2 cores
python benchmarks/mnist_time.py --seeds 1 --profile  # where the time of a step goes
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from results import footer, installed, publish
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, Sampler, TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from mnist_data import mnist
from mnist_net import Net

RANKS, BATCH, TEST_BATCH, EVERY, MOST_EPOCHS, TARGET = 2, 64, 1000, 50, 5, 98.5
LIMITS = {"echelon, safe": 0.75, "echelon, max": 0.5}
BY_HAND = "DDP by hand"
HEADING = "## Time to 98.5 % on MNIST"
LIMIT_S = 900
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={RANKS}"]
ECHELON = ["-m", "echelon", "launch", "-q", "--cpu", f"--num_processes={RANKS}"]
Step = Callable[[Any, Any], None]
Parts = tuple[Any, Any, Any, Step]
"""The model, the loaders of training and test images, and the function that makes a step."""
Run = tuple[float, float, float, int, float]
"""Seconds since the command was started, seconds and CPU seconds of rank 0 in steps, steps, and the accuracy in percent."""
WHOLE, STEPS, CPU, COUNT = range(4)


class Order(Sampler[int]):
    """The samples of each epoch in an order that depends on the seed and the epoch alone."""

    def __init__(self, num_samples: int, seed: int) -> None:
        self._num_samples, self._seed, self._epoch = num_samples, seed, 0

    def __len__(self) -> int:
        return self._num_samples

    def __iter__(self) -> Iterator[int]:
        draw = torch.Generator().manual_seed(1000 * self._seed + self._epoch)
        self._epoch += 1
        yield from torch.randperm(self._num_samples, generator=draw).tolist()


class OwnBatches(BatchSampler):
    """Every second batch, as accelerate and echelon distribute them."""

    def __iter__(self) -> Iterator[list[int]]:
        batches = list(super().__iter__())
        yield from batches[dist.get_rank() : len(batches) // RANKS * RANKS : RANKS]


def by_hand(train: TensorDataset, test: TensorDataset, seed: int) -> Parts:
    dist.init_process_group("gloo")
    torch.manual_seed(seed)
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(train, batch_sampler=OwnBatches(Order(len(train), seed), BATCH, drop_last=True))
    sampler: Any = DistributedSampler(test, shuffle=False)

    def step(images: Any, labels: Any) -> None:
        optimizer.zero_grad()
        F.nll_loss(model(images), labels).backward()
        optimizer.step()

    return model, loader, DataLoader(test, batch_size=TEST_BATCH, sampler=sampler), step


def prepared(accelerator: Any, train: TensorDataset, test: TensorDataset, seed: int) -> Parts:
    torch.manual_seed(seed)
    model: Any = Net()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader: Any = DataLoader(train, BATCH, sampler=Order(len(train), seed), drop_last=True)
    model, optimizer, loader, test_loader = accelerator.prepare(model, optimizer, loader, DataLoader(test, TEST_BATCH))

    def step(images: Any, labels: Any) -> None:
        optimizer.zero_grad()
        accelerator.backward(F.nll_loss(model(images), labels))
        optimizer.step()

    return model, loader, test_loader, step


def build(variant: str, seed: int) -> Parts:
    train, test = mnist(True), mnist(False)
    if variant == BY_HAND:
        return by_hand(train, test, seed)
    if variant == "accelerate":
        import accelerate

        return prepared(accelerate.Accelerator(cpu=True), train, test, seed)
    from echelon import Accelerator

    return prepared(Accelerator(cpu=True, speed=variant.partition(", ")[2]), train, test, seed)


def accuracy(model: Any, loader: Any) -> float:
    """Return the accuracy in percent; every process computes it on its half of the test images. Collective."""
    right, num = torch.zeros(2).unbind()
    model.eval()
    with torch.no_grad():
        for images, labels in loader:
            right += (model(images).argmax(dim=1) == labels).sum()
            num += len(labels)
    model.train()
    total = torch.stack([right, num])
    dist.all_reduce(total)
    return float(100 * total[0] / total[1])


def train_to_target(variant: str, seed: int, num_steps: int | None, began: float) -> Run:
    """Train until the accuracy is reached. ``num_steps``: make as many steps, without evaluation."""
    model, loader, test_loader, step = build(variant, seed)
    seconds, cpu, count = 0.0, 0.0, 0
    dist.barrier()
    started, cpu_started = time.perf_counter(), time.process_time()
    for _ in range(MOST_EPOCHS):
        for images, labels in loader:
            torch.manual_seed(RANKS * (10_000 * seed + count) + dist.get_rank())  # dropout
            step(images, labels)
            count += 1
            if count == num_steps or (num_steps is None and count % EVERY == 0):
                seconds, cpu = seconds + time.perf_counter() - started, cpu + time.process_time() - cpu_started
                reached = accuracy(model, test_loader) if num_steps is None else TARGET
                if reached >= TARGET:
                    return time.time() - began, seconds, cpu, count, reached
                started, cpu_started = time.perf_counter(), time.process_time()
    raise RuntimeError(f"{variant}, seed {seed}: {TARGET} % was not reached in {MOST_EPOCHS} epochs")


def profile_steps(variant: str, num_steps: int) -> list[tuple[str, float]]:
    """Return the milliseconds per step of this process by torch operation, and the whole step's. Recording adds to small operations."""
    _, loader, _, step = build(variant, 0)
    data: Iterator[Any] = iter(loader)
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


def work(options: argparse.Namespace) -> None:
    """Run one variant in one of two processes."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if options.profile:
        found: Any = profile_steps(options.variant, options.steps or 30)
    else:
        found = train_to_target(options.variant, options.seed, options.steps, options.began)
    if dist.get_rank() == 0:
        Path(options.result).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def run(variant: str, seed: int, num_steps: int | None = None, *, profiles: bool = False) -> Any:
    """Start two processes that run one variant, and return what rank 0 found."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result")
        args = [f"--variant={variant}", f"--seed={seed}", f"--result={result}", *(["--profile"] if profiles else [])]
        args += [f"--steps={num_steps}"] if num_steps else []
        launcher = ECHELON if variant.startswith("echelon") else TORCHRUN
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "ECHELON_NO_RECORD": "1"}
        done = subprocess.run(
            [sys.executable, *launcher, __file__, *args, f"--began={time.time()}"],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        assert result.exists(), f"{variant}, seed {seed} failed:\n{done.stderr}"
        return json.loads(result.read_text())


def report(found: dict[str, list[Run]], num_steps: int | None) -> str:
    what = f"{num_steps} steps" if num_steps else f"{TARGET} %"
    rows, verdicts = [], []
    for variant, runs in found.items():
        ms, cpu_ms = (statistics.median(1e3 * one[i] / one[COUNT] for one in runs) for i in (STEPS, CPU))
        cells = []
        for column in (WHOLE, STEPS):
            values = [one[column] for one in runs]
            cells.append(f"{statistics.median(values):.1f} ({min(values):.1f} - {max(values):.1f})")
        rows.append(
            f"| {variant} | {' | '.join(cells)} | {', '.join(str(one[COUNT]) for one in runs)} | {ms:.1f} | {cpu_ms:.1f} |"
        )
        for peer in (name for name in (BY_HAND, "accelerate") if variant in LIMITS and name in found):
            whole, steps = (
                statistics.median(own[i] / its[i] for own, its in zip(runs, found[peer], strict=True))
                for i in (WHOLE, STEPS)
            )
            limit = LIMITS[variant]
            verdicts.append(
                f"- {variant}: {whole:.3f} times the time of {peer} (target: {limit}, {'met' if whole <= limit else 'missed'}), "
                f"and {steps:.3f} times that of its steps alone"
            )
    num_seeds = len(next(iter(found.values())))
    return f"""{HEADING}

Seconds until {what} on 2 processes with one thread each, for the network of the examples with AdamW, 64 samples per process and {num_seeds} seed(s). For each
seed, every variant has the same weights at the start, the same order of samples and the same dropout. "Whole" is the time from the
command (torchrun, or `echelon launch`) to the evaluation that reaches the accuracy, one of which follows each {EVERY} steps; "steps" is that of
the steps alone. Ratios are the medians of those of the runs with the same seed.

| variant | whole, median (range) | steps, median (range) | number of steps | ms per step | CPU ms |
|---|---:|---:|---:|---:|---:|
{chr(10).join(rows)}

{chr(10).join(verdicts)}

{footer("mnist_time.py", needs_peers=True)}"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, help="measure this number of steps instead of the time to the accuracy")
    parser.add_argument("--only", action="append", help="part of the name of a variant; may be repeated")
    parser.add_argument(
        "--profile", action="store_true", help="print where the time of a step goes, by torch operation"
    )
    parser.add_argument("--write", action="store_true", help="write the table to benchmarks/RESULTS.md")
    for name, kind in (("--variant", str), ("--seed", int), ("--result", str), ("--began", float)):
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)  # of one of the processes that this script starts
    options = parser.parse_args()
    if options.variant:
        work(options)
        return
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
    publish(section, is_written=options.write)


if __name__ == "__main__":
    main()
