"""Host and accelerator memory use of each stage of a run (``skip_memory_metrics=False``)."""

from __future__ import annotations

import gc
import sys
import threading
from typing import Any

import torch

# Sampling interval of the process's memory, for its peak.
_EVERY_S = 0.01

# The methods that measure their memory in transformers, and the prefixes of their metrics.
_STAGES = {"__init__": "init", "evaluate": "eval", "predict": "test"}


class MemoryMeter:
    """Measures one stage at a time; a nested stage, such as an evaluation during training, counts as part of the outer
    one.

    Metrics are in bytes: ``<stage>_mem_cpu_alloc_delta`` (growth from start to end), ``..._peaked_delta`` (by how
    much the peak exceeded the final value); ``..._mem_gpu_...`` are the same two metrics for the accelerator.
    """

    def __init__(self, device: torch.device, *, is_on: bool) -> None:
        self._device = device
        self._stage: str | None = None
        self._pending: dict[str, int] = {}
        self._process: Any = None
        if is_on:
            import psutil  # noqa: PLC0415 - only for skip_memory_metrics=False

            self._process = psutil.Process()

    @property
    def skip_memory_metrics(self) -> bool:
        """Whether nothing is measured."""
        return self._process is None

    def start(self) -> None:
        """Start measuring the method that calls this, for overrides of transformers' methods."""
        self.begin(_stage_of(sys._getframe(1).f_code.co_name))

    def stop_and_update_metrics(self, metrics: dict[str, Any] | None = None) -> None:
        """Stop measuring the method that calls this, and add its metrics to ``metrics``, or to the next report."""
        found = self.end(_stage_of(sys._getframe(1).f_code.co_name))
        if metrics is None:
            self.keep(found)
        else:
            metrics.update(found)

    def begin(self, stage: str) -> None:
        """Start measuring, unless a stage is already being measured."""
        if self._process is None or self._stage is not None:
            return
        self._stage = stage
        gc.collect()
        self._begin_host = self._peak_host = self._host()
        if self._device.type != "cpu":
            torch.accelerator.memory.reset_peak_memory_stats()
            self._begin_device = torch.accelerator.memory.memory_allocated()
        self._stop = threading.Event()
        self._sampler = threading.Thread(target=self._sample_peak, name="echelon memory metrics", daemon=True)
        self._sampler.start()

    def end(self, stage: str) -> dict[str, int]:
        """Return the metrics for ``stage`` and all pending metrics; empty if another stage is being measured."""
        if self._stage != stage:
            return {}
        self.cancel()
        gc.collect()
        now = self._host()
        metrics = self._pending | {
            f"{stage}_mem_cpu_alloc_delta": now - self._begin_host,
            f"{stage}_mem_cpu_peaked_delta": max(0, self._peak_host - now),
        }
        if self._device.type != "cpu":
            used, peak = torch.accelerator.memory.memory_allocated(), torch.accelerator.memory.max_memory_allocated()
            metrics[f"{stage}_mem_gpu_alloc_delta"] = used - self._begin_device
            metrics[f"{stage}_mem_gpu_peaked_delta"] = max(0, peak - used)
        self._pending = {}
        return metrics

    def keep(self, metrics: dict[str, int]) -> None:
        """Keep the metrics of a stage that has no report, and add them to the next report."""
        if metrics:
            self._pending = {**metrics, "before_init_mem_cpu": self._begin_host}

    def cancel(self) -> None:
        """Stop measuring, even after an error."""
        if self._stage is not None:
            self._stage = None
            self._stop.set()
            self._sampler.join()

    def _sample_peak(self) -> None:
        while not self._stop.wait(_EVERY_S):
            self._peak_host = max(self._peak_host, self._host())

    def _host(self) -> int:
        return int(self._process.memory_info().rss)


def _stage_of(method: str) -> str:
    return _STAGES.get(method, "train")
