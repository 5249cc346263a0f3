"""Measures the cost of `parity="bitwise"`, compared with "exact" in the same micro-batches and with "off" in whole batches.

A small CNN and a small transformer train on 2 gloo processes with one thread each, with the same samples in every update. The
variants run in the order A B C C B A, so that none of them always comes first.
"""

from __future__ import annotations

import gc
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from parity import CPU, RANKS, WALL, Found, main, timed_updates
from results import footer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from echelon import Accelerator
from echelon.distributed import process_group

SHARDS = 8
BATCH = 64  # samples of an update: shards of 8, 4 on each process
WARM_UP = 2
LIMIT = 1.15  # over exact in the same micro-batches
WHOLE, EXACT, BITWISE = "off, whole", "exact, same micro-batches", "bitwise"


class Transformer(nn.Module):
    """A transformer of 0.8 million parameters, with 64 tokens per sample."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 128)
        layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.1, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.out = nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = (40 * x[:, 0].flatten(1)[:, :64]).long().remainder(256)
        out: torch.Tensor = self.out(self.blocks(self.embedding(tokens)).mean(1))
        return out


def cnn() -> nn.Module:
    """Return a CNN of 0.6 million parameters, for images of 32 x 32."""
    parts: list[nn.Module] = []
    for before, after in ((3, 64), (64, 128), (128, 128), (128, 256)):
        parts += [nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(8, after), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*parts, nn.Flatten(), nn.Dropout(0.1), nn.Linear(256 * 4, 10))


MODELS: dict[str, Callable[[], nn.Module]] = {"CNN": cnn, "transformer": Transformer}


def turn(model_name: str, variant: str, steps: int) -> tuple[float, float]:
    """Train for some updates; return milliseconds per update: wall time, and CPU time of this process."""
    torch.manual_seed(0)
    parity = variant.partition(",")[0]
    options: dict[str, Any] = {"max_micro_batch_size": BATCH // SHARDS} if variant == EXACT else {}
    accelerator = Accelerator(cpu=True, parity=parity, seed=1, **options)
    model: Any = MODELS[model_name]()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    num_samples = BATCH * (WARM_UP + steps)
    data = TensorDataset(torch.randn(num_samples, 3, 32, 32), torch.randint(10, (num_samples,)))
    size = BATCH // RANKS if parity == "off" else BATCH
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=size, shuffle=True))
    return timed_updates(
        accelerator,
        (model, optimizer, loader),
        lambda batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        steps=steps,
        warm_up=WARM_UP,
    )


def measure(rank: int, rounds: int, steps: int, result: str) -> None:
    """Run every variant twice per round, in order and in reverse order."""
    found: Found = {}
    with process_group():
        for number in range(rounds + 1):
            for model_name in MODELS:
                order = [WHOLE, EXACT, BITWISE]
                for variant in [*order, *order[::-1]] if number else order:
                    gc.collect()
                    wall, cpu = turn(model_name, variant, steps if number else 1)
                    sums = torch.tensor([wall, cpu]) / RANKS
                    dist.all_reduce(sums)
                    if number:  # the first round is a warm-up
                        found.setdefault(f"{model_name}: {variant}", []).append(sums.tolist())
    if rank == 0:
        Path(result).write_text(json.dumps(found))


def ratios(found: Found, model_name: str, other: str, column: int) -> list[float]:
    """Return the ratio of bitwise to ``other`` in the same half of each round."""
    pairs = zip(found[f"{model_name}: {BITWISE}"], found[f"{model_name}: {other}"], strict=True)
    return [one[column] / two[column] for one, two in pairs]


def report(found: Found, rounds: int, steps: int) -> str:
    rows, worst = [], 0.0
    for model_name in MODELS:
        cells = []
        for variant in (WHOLE, EXACT, BITWISE):
            turns = found[f"{model_name}: {variant}"]
            cells += [" / ".join(f"{statistics.median(one[column] for one in turns):.0f}" for column in (WALL, CPU))]
        for other in (EXACT, WHOLE):
            for column in (WALL, CPU):
                ratio = ratios(found, model_name, other, column)
                low, middle, high = statistics.quantiles(ratio, n=4)
                cells.append(f"{middle:.3f} ({low:.2f} - {high:.2f})")
        worst = max(worst, statistics.median(ratios(found, model_name, EXACT, WALL)))
        num_parameters = sum(p.numel() for p in MODELS[model_name]().parameters())
        rows.append(f"| {model_name}, {num_parameters / 1e6:.1f} M | {' | '.join(cells)} |")
    return f"""## Cost of bitwise parity

`parity="bitwise"` with {SHARDS} shards, compared with `"exact"` in the same micro-batches of {BATCH // SHARDS} and with `"off"` in whole batches
of {BATCH // RANKS} samples per process, on {RANKS} gloo processes with one thread each: AdamW, clipping, dropout 0.1, updates of {BATCH}
samples. The values are milliseconds per update, wall / CPU (mean of the processes), medians of {2 * rounds} alternating turns of {steps}
updates. The ratios are bitwise over the other variant in the same half of a round, with median and middle half.

| | off, whole | exact | bitwise | over exact, wall | CPU | over off, wall | CPU |
|---|---:|---:|---:|---|---|---|---|
{chr(10).join(rows)}

- bitwise takes {worst:.3f} times as long as exact in the same micro-batches, in the worst case (wall time; target: {LIMIT}, {"met" if worst <= LIMIT else "missed"})

{footer("bitwise.py")}"""


if __name__ == "__main__":
    main(__doc__, measure, report, rounds=10, steps=6)
