"""The return values of train, evaluate and predict, and the argument of compute_metrics."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

__all__ = [
    "EvalLoopOutput",
    "EvalPrediction",
    "PredictionOutput",
    "TrainOutput",
    "as_numbers",
    "speed_metrics",
]


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
