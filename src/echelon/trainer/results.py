"""The return values of train, evaluate and predict, the argument of compute_metrics, and reports of metrics."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch


class EvalPrediction:
    """The argument of ``compute_metrics``: numpy arrays with one row per sample, in dataset order.

    Unpacks to ``predictions, label_ids``, followed by ``inputs`` and ``losses`` if ``include_for_metrics`` requests them.
    """

    def __init__(self, predictions: Any, label_ids: Any, inputs: Any = None, losses: Any = None) -> None:
        self.predictions = predictions
        self.label_ids = label_ids
        self.inputs = inputs
        self.losses = losses
        extra = tuple(part for part in (inputs, losses) if part is not None)
        self.elements: tuple[Any, ...] = (predictions, label_ids, *extra)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.elements)

    def __getitem__(self, position: int) -> Any:
        if not 0 <= position < len(self.elements):
            raise IndexError(f"index {position} is out of range for an EvalPrediction of {len(self.elements)} elements")
        return self.elements[position]


class EvalLoopOutput(NamedTuple):
    """Return value of an evaluation loop."""

    predictions: Any
    label_ids: Any
    metrics: dict[str, float]
    num_samples: int | None


class PredictionOutput(NamedTuple):
    """Return value of ``predict``."""

    predictions: Any
    label_ids: Any
    metrics: dict[str, float]


class TrainOutput(NamedTuple):
    """Return value of ``train``."""

    global_step: int
    training_loss: float
    metrics: dict[str, float]


def speed_metrics(
    split: str,
    start_time: float,
    num_samples: int | None = None,
    num_steps: int | None = None,
    num_tokens: int | None = None,
) -> dict[str, float]:
    """Return the seconds since ``start_time`` (from ``time.time()``), and samples, steps and tokens per second."""
    runtime = time.time() - start_time
    metrics = {f"{split}_runtime": round(runtime, 4)}
    if runtime == 0:
        return metrics
    if num_samples is not None:
        metrics[f"{split}_samples_per_second"] = round(num_samples / runtime, 3)
    if num_steps is not None:
        metrics[f"{split}_steps_per_second"] = round(num_steps / runtime, 3)
    if num_tokens is not None:
        metrics[f"{split}_tokens_per_second"] = round(num_tokens / runtime, 3)
    return metrics


def as_numbers(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Convert numpy scalars and one-element tensors in ``metrics`` to Python numbers."""
    return {name: _as_number(value) for name, value in metrics.items()}


def _as_number(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, (torch.Tensor, np.ndarray)) and math.prod(value.shape) == 1:
        return value.item()
    return value


def metrics_format(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Format ``metrics``: durations as h:mm:ss.cc, floating-point operations as GF, other floats with 4 decimals."""
    return {name: _shown(name, value) for name, value in metrics.items()}


def metrics_table(split: str, metrics: Mapping[str, Any]) -> str:
    """Return formatted ``metrics`` as a sorted table with two columns."""
    left = max((len(str(name)) for name in metrics), default=0)
    right = max((len(str(value)) for value in metrics.values()), default=0)
    lines = [f"  {name: <{left}} = {metrics[name]!s:>{right}}" for name in sorted(metrics)]
    return "\n".join([f"***** {split} metrics *****", *lines])


def write_metrics(folder: Path, split: str, metrics: Mapping[str, Any], *, combined: bool) -> None:
    """Write ``<split>_results.json`` and, if ``combined``, add the metrics to ``all_results.json``."""
    _write(folder / f"{split}_results.json", dict(metrics))
    if combined:
        path = folder / "all_results.json"
        before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        _write(path, {**before, **metrics})


def _write(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=4, sort_keys=True), encoding="utf-8")


def _shown(name: str, value: Any) -> Any:
    if name == "total_flos":
        return f"{int(value) >> 30}GF"
    if name.endswith("_runtime"):
        seconds, _, part = f"{value:.2f}".partition(".")
        return f"{timedelta(seconds=int(seconds))}.{part}"
    return round(value, 4) if isinstance(value, float) else value
