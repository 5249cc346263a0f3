"""Measures what a Trainer's checkpoints cost the training: the time blocked, and how much slower steps are during a background save.

``python benchmarks/trainer_save.py [--folder DIR] [--megabytes N] [--saves N] [--write]``. A step either computes on the CPU, and so competes
with the save for cores, or waits, as for an accelerator; then only what the save takes from the main thread counts. Steps
during a save and between saves are compared within one run.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from results import footer, publish
from torch import nn

from echelon.trainer import Trainer, TrainerCallback, TrainingArguments

TITLE = "## Saving a Trainer's checkpoint beside the training"
EVERY = 40
"""Number of steps between two saves."""


class _Model(nn.Module):
    """Weights of the given size, of which a step uses one row, and a fixed amount of work."""

    def __init__(self, megabytes: int, waits_s: float) -> None:
        super().__init__()
        self.layers = nn.ParameterList(torch.randn(2048, 2048) for _ in range(max(megabytes // 16, 1)))
        self.waits_s = waits_s

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.waits_s:
            time.sleep(self.waits_s)
        else:
            y = torch.ones(384, 384) / 384
            for _ in range(20):
                y = (y @ y).tanh()
        return {"loss": (self.layers[0][0] * x.mean()).sum()}


class _Clock(TrainerCallback):
    """Notes the duration of each step, and whether a checkpoint was written all the while."""

    def __init__(self) -> None:
        self.trainer: Any = None
        self.steps: dict[bool, list[float]] = {False: [], True: []}
        self.saves: list[float] = []

    def _is_saving(self) -> bool:
        return bool(self.trainer.accelerator.checkpoints.store.background.is_busy)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._was_saving, self._began = self._is_saving(), time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._ended = time.perf_counter()
        if self._was_saving == self._is_saving():
            self.steps[self._was_saving].append(self._ended - self._began)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.saves.append(time.perf_counter() - self._ended)


def measure(folder: Path, *, megabytes: int, num_saves: int, blocking: bool, waits_s: float) -> _Clock:
    """Train, and return what was measured without the first save, in which memory is allocated."""
    clock = _Clock()
    args = TrainingArguments(
        str(folder),
        max_steps=EVERY * (num_saves + 1),
        save_steps=EVERY,
        save_total_limit=1,
        save_blocking=blocking,
        optim="sgd",
        learning_rate=0.0,
        max_grad_norm=0.0,
        logging_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        per_device_train_batch_size=1,
    )
    data: Any = [{"x": torch.ones(1)}] * EVERY
    clock.trainer = Trainer(_Model(megabytes, waits_s), args, train_dataset=data, callbacks=[clock])
    clock.trainer.train()
    clock.saves = clock.saves[1:]
    return clock


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", help="existing folder on the disk to measure")
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--saves", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="replace the section in RESULTS.md")
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name, waits_s in (("waits 50 ms, as for an accelerator", 0.05), ("computes on the CPU", 0.0)):
        blocked = {}
        for blocking in (True, False):
            with tempfile.TemporaryDirectory(dir=given.folder) as scratch:
                clock = measure(
                    Path(scratch), megabytes=given.megabytes, num_saves=given.saves, blocking=blocking, waits_s=waits_s
                )
            blocked[blocking] = statistics.median(clock.saves)
        beside, alone = (statistics.median(clock.steps[is_saving]) for is_saving in (True, False))
        rows.append(
            f"| {name} | {1e3 * alone:.1f} | {1e3 * beside:.1f} | {beside / alone:.3f} | {blocked[True]:.3f} | {blocked[False]:.3f} |"
        )
    text = "\n".join(
        [
            TITLE,
            "",
            f"Weights of {given.megabytes} MB, one process with one thread; medians, without the first save.",
            "",
            "| a step | alone, ms | during a save, ms | ratio | a save blocks, s | with `save_blocking=False`, s |",
            "|---|---:|---:|---:|---:|---:|",
            *rows,
            "",
            footer("trainer_save.py"),
        ]
    )
    publish(text, is_written=given.write)


if __name__ == "__main__":
    main()
