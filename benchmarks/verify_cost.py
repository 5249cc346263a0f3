"""Measures what ``echelon verify`` adds to a step: CPU time of a step with and without recording, side by side in one process.

Turns with and without recording alternate, because the speed of a shared machine varies from second to second. Each number is the median
over the fastest turns: other programs only ever add time. The steps are plain PyTorch, on one thread.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from results import footer, publish
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from echelon.verify.parts import record_everything
from echelon.verify.recording import recording
from echelon.verify.trace import RecordingSettings

HEADING = "## Cost of recording steps for `echelon verify`"
TARGET = 3.0
NUM_TURNS = 12
WARMUP = 3  # steps of a turn that are not counted: the first one records all weights


class GPT(nn.Module):
    """A decoder-only language model with tied embeddings and dropout."""

    def __init__(self, *, vocabulary: int, length: int, width: int, num_layers: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(
            width, width // 32, 4 * width, dropout=dropout, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.tokens(tokens) + self.positions(torch.arange(tokens.size(1)))
        hidden = self.norm(self.blocks(hidden, mask=self.mask, is_causal=True))
        return F.linear(hidden, self.tokens.weight)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true", help="replace the section in RESULTS.md")
    parser.add_argument("--only", type=int, help="number of the model, from 0")
    parser.add_argument("--turns", type=int, default=NUM_TURNS)
    parser.add_argument("--profile", action="store_true", help="print a profile of the recorded turns")
    options = parser.parse_args()
    torch.set_num_threads(1)
    models = MODELS if options.only is None else MODELS[options.only : options.only + 1]
    rows = []
    for name, build, num_steps in models:
        torch.manual_seed(0)
        loop = build()
        if options.profile:
            _profile(loop, num_steps)
            continue
        rows.append((name, loop.num_parameters, *_compare(loop, num_steps, options.turns)))
    if options.profile:
        return
    text = _table(rows)
    publish(text, is_written=options.write)


class _Loop:
    """A plain training loop: backward pass, clipping and AdamW."""

    def __init__(self, model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor, batch_size: int) -> None:
        self.num_parameters = sum(one.numel() for one in model.parameters())
        self._model = model
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self._loader = DataLoader(TensorDataset(inputs, labels), batch_size=batch_size)

    def run(self, num_steps: int) -> list[float]:
        """Return the microseconds of CPU time of each step."""
        times: list[float] = []
        began = time.process_time_ns()
        while True:
            for x, y in self._loader:
                loss = F.cross_entropy(self._model(x).flatten(0, -2), y.flatten())
                loss.backward()
                nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
                self._optimizer.step()
                self._optimizer.zero_grad()
                times.append((-began + (began := time.process_time_ns())) / 1000)
                if len(times) == num_steps:
                    return times


def _mlp(inputs: int, hidden: int, depth: int, batch: int) -> _Loop:
    layers: list[nn.Module] = [nn.Linear(inputs, hidden), nn.ReLU()]
    for _ in range(depth - 1):
        layers += [nn.Linear(hidden, hidden), nn.ReLU()]
    num = 64 * batch
    return _Loop(nn.Sequential(*layers, nn.Linear(hidden, 10)), torch.randn(num, inputs), torch.arange(num) % 10, batch)


def _gpt(width: int, num_layers: int, dropout: float) -> _Loop:
    length, batch, vocabulary = 64, 8, 256
    model = GPT(vocabulary=vocabulary, length=length, width=width, num_layers=num_layers, dropout=dropout)
    tokens = torch.randint(vocabulary, (16 * batch, length + 1))
    return _Loop(model, tokens[:, :-1], tokens[:, 1:], batch)


MODELS: list[tuple[str, Callable[[], _Loop], int]] = [
    ("MLP 16-64-64-10, batch 16", lambda: _mlp(16, 64, 2, 16), 60),
    ("MLP of 0.7 million parameters, batch 64", lambda: _mlp(256, 512, 3, 64), 12),
    ("GPT, 2 layers of width 128, 8 x 64 tokens", lambda: _gpt(128, 2, 0.0), 8),
    ("GPT, 4 layers of width 256, 8 x 64 tokens", lambda: _gpt(256, 4, 0.0), 6),
    ("the same with dropout", lambda: _gpt(256, 4, 0.1), 6),
]


def _compare(loop: _Loop, num_steps: int, num_turns: int) -> tuple[float, float]:
    """Return the microseconds of a step without and with recording."""
    without, recorded = [], []
    for _ in range(num_turns):
        without.append(statistics.median(loop.run(num_steps)[WARMUP:]))
        with tempfile.TemporaryDirectory() as folder, _recording(folder, num_steps):
            recorded.append(statistics.median(loop.run(num_steps)[WARMUP:]))
    fastest = max(num_turns // 3, 1)
    return statistics.median(sorted(without)[:fastest]), statistics.median(sorted(recorded)[:fastest])


@contextmanager
def _recording(folder: str, num_steps: int) -> Iterator[None]:
    with recording(Path(folder), RecordingSettings(steps=num_steps + 1), rank=0) as one:
        record_everything(one)
        yield


def _profile(loop: _Loop, num_steps: int) -> None:
    import cProfile
    import pstats

    profile = cProfile.Profile(time.process_time)
    loop.run(num_steps)
    with tempfile.TemporaryDirectory() as folder, _recording(folder, 5 * num_steps):
        loop.run(num_steps)
        with profile:
            loop.run(4 * num_steps)
    pstats.Stats(profile).sort_stats("tottime").print_stats(45)


def _table(rows: list[tuple[Any, ...]]) -> str:
    lines = [
        HEADING,
        "",
        "The CPU time of a training step of plain PyTorch with backward pass, clipping and AdamW, in one process with one thread on the CPU.",
        "",
        "| model | parameters | us per step | recorded, us | times |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, num, without, recorded in rows:
        lines.append(f"| {name} | {num:,} | {without:.0f} | {recorded:.0f} | {recorded / without:.2f} |")
    met = [row for row in rows if row[3] <= TARGET * row[2]]
    lines += [
        "",
        f"- a recorded step takes at most {TARGET:g} times the time of an unrecorded one in {len(met)} of {len(rows)} rows (target: all)",
        "- without `echelon verify`, none of this runs, because no module of `echelon.verify` is imported",
        "",
        footer("verify_cost.py"),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
