"""How much memory a stage of a run took, on the host and on the accelerator: ``skip_memory_metrics=False``."""

from __future__ import annotations

import gc
import threading
from typing import Any

import torch

from echelon.base.optional import require

__all__ = ["MemoryMeter"]

# Between two looks at the size of the process, for its peak.
_EVERY_S = 0.01


class MemoryMeter:
    """Measures one stage at a time; a stage inside another one (an evaluation in a training) is part of it.

    The numbers are bytes: ``<stage>_mem_cpu_alloc_delta`` (more at the end than at the beginning), ``..._peaked_delta``
    (how far above the end it was), and the same of the accelerator as ``..._mem_gpu_...``.
    """

    def __init__(self, device: torch.device, *, is_on: bool) -> None:
        self._device = device
        self._stage: str | None = None
        self._not_reported: dict[str, int] = {}
        self._process: Any = None
        if is_on:
            self._process = require("psutil", extra="memory", purpose="skip_memory_metrics=False").Process()

    def begin(self, stage: str) -> None:
        """Begin to measure, unless a stage is being measured already."""
        if self._process is None or self._stage is not None:
            return
        self._stage = stage
        gc.collect()
        self._begin_host = self._peak_host = self._host()
        if self._device.type != "cpu":
            torch.accelerator.memory.reset_peak_memory_stats()
            self._begin_device = torch.accelerator.memory.memory_allocated()
        self._over = threading.Event()
        self._watch = threading.Thread(target=self._look, name="echelon memory metrics", daemon=True)
        self._watch.start()

    def end(self, stage: str) -> dict[str, int]:
        """Return the metrics of ``stage`` and those that were kept back; nothing when it is not what is measured."""
        if self._stage != stage:
            return {}
        self.cancel()
        gc.collect()
        now = self._host()
        metrics = self._not_reported | {
            f"{stage}_mem_cpu_alloc_delta": now - self._begin_host,
            f"{stage}_mem_cpu_peaked_delta": max(0, self._peak_host - now),
        }
        if self._device.type != "cpu":
            used, peak = torch.accelerator.memory.memory_allocated(), torch.accelerator.memory.max_memory_allocated()
            metrics[f"{stage}_mem_gpu_alloc_delta"] = used - self._begin_device
            metrics[f"{stage}_mem_gpu_peaked_delta"] = max(0, peak - used)
        self._not_reported = {}
        return metrics

    def keep(self, metrics: dict[str, int]) -> None:
        """Put ``metrics`` (of a stage without a report of its own) into the next report."""
        if metrics:
            self._not_reported = {**metrics, "before_init_mem_cpu": self._begin_host}

    def cancel(self) -> None:
        """Stop to measure, also after an error."""
        if self._stage is not None:
            self._stage = None
            self._over.set()
            self._watch.join()

    def _look(self) -> None:
        while not self._over.wait(_EVERY_S):
            self._peak_host = max(self._peak_host, self._host())

    def _host(self) -> int:
        return int(self._process.memory_info().rss)
