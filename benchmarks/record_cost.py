"""What recording adds to an optimizer step: microseconds, and the share of a step of 10 ms.

python benchmarks/record_cost.py

Epochs with and without recording alternate in one process. Each number is the median CPU time of a step in the fastest epochs, because
other programs only ever add time. "Under echelon launch" leaves out the notes on the status board, which a rank writes with --no_record, too.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from echelon import Accelerator
from echelon.base import environ
from echelon.distributed.record.recorder import recorder_of_process
from echelon.status.board import Board
from echelon.status.notes import BOARD_VARIABLE
from echelon.status.run_files import NO_RECORD_VARIABLE, RECORD_VARIABLE

NUM_STEPS, NUM_BLOCKS, STEP_MS = 100, 60, 10.0


def main() -> None:
    """Measure both kinds of processes, and print the results."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        off = {NO_RECORD_VARIABLE: "1"}
        on = {NO_RECORD_VARIABLE: None, RECORD_VARIABLE: f"0:{folder}"}
        _report("without a launcher", _compare({**off, BOARD_VARIABLE: None}, {**on, BOARD_VARIABLE: None}))
        board = Board(1, folder=folder)
        slot, on = {BOARD_VARIABLE: f"{board.path}:0"}, {**on, RECORD_VARIABLE: f"1:{folder}"}
        _report("under echelon launch", _compare({**off, **slot}, {**on, **slot}))
        board.remove()
        assert sorted(path.parent.name for path in Path(folder).rglob("rank_0.steps")) == ["0", "1"]


def _report(name: str, times_us: tuple[float, float]) -> None:
    without, with_records = times_us
    added = with_records - without
    print(
        f"{name}: {without:.1f} us -> {with_records:.1f} us, +{added:.1f} us = {added / STEP_MS / 10:.2f} % of {STEP_MS:g} ms"
    )


def _compare(*kinds: dict[str, str | None]) -> tuple[float, float]:
    """Return the time of a step, in microseconds, with each of two environments."""
    loops = []
    for variables in kinds:
        with environ.patch(variables):
            loops.append(_Loop())
    times: list[list[float]] = [[] for _ in kinds]
    for _ in range(NUM_BLOCKS):
        for i, (variables, loop) in enumerate(zip(kinds, loops, strict=True)):
            with environ.patch(variables):
                times[i].append(loop.run())
    with environ.patch(kinds[1]):
        recorder = recorder_of_process()
        assert recorder is not None
        recorder.close()
    without, with_records = (statistics.median(sorted(epochs)[: NUM_BLOCKS // 4]) for epochs in times)
    return without, with_records


class _Loop:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self._accelerator = Accelerator(cpu=True)
        model = nn.Linear(16, 16)
        data = TensorDataset(torch.ones(4 * NUM_STEPS, 16))
        prepared: Any = self._accelerator.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.01), DataLoader(data, batch_size=4)
        )
        self._model, self._optimizer, self._loader = prepared

    def run(self) -> float:
        """Run an epoch, and return the median of the microseconds per step."""
        times, began = [], time.thread_time_ns()
        for (x,) in self._loader:
            loss = F.mse_loss(self._model(x), x)
            self._accelerator.backward(loss)
            self._accelerator.clip_grad_norm_(self._model.parameters(), 1.0)
            self._optimizer.step()
            self._optimizer.zero_grad()
            times.append(-began + (began := time.thread_time_ns()))
        return statistics.median(times) / 1000


if __name__ == "__main__":
    main()
