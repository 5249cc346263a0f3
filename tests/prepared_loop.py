"""The loop of a training script under an Accelerator, as most tests of several ranks run it."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from echelon import Accelerator
from tests.reference import mean_square


def train_prepared(
    accelerator: Accelerator,
    model: Any,
    optimizer: Any,
    batches: Iterable[Any],
    *,
    loss_of: Callable[[Any], torch.Tensor] | None = None,
    schedule: Any = None,
    max_norm: float | None = None,
    counts_items: bool = False,
) -> list[float]:
    """Train on this rank's micro-batches and return the norm of each update's gradients.

    Args:
        accelerator: prepared ``model``, ``optimizer`` and ``schedule``.
        batches: micro-batches of this rank.
        loss_of: the mean loss of a micro-batch; None: the mean square of the outputs.
        max_norm: the gradients are clipped to it; None: not clipped, and no norms are returned.
        counts_items: pass the length of a micro-batch as ``num_items``.
    """
    norms = []
    for x in batches:
        with accelerator.accumulate(model):
            loss = mean_square(model(x)) if loss_of is None else loss_of(x)
            accelerator.backward(loss, num_items=len(x) if counts_items else None)
            if max_norm is not None and accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), max_norm)))
            optimizer.step()
            if schedule is not None:
                schedule.step()
            optimizer.zero_grad()
    return norms


def weights_of(accelerator: Accelerator, model: Any) -> list[torch.Tensor]:
    """Return copies of the whole parameters of a model. Collective if they are sharded."""
    return [whole(p) for p in accelerator.unwrap_model(model).parameters()]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor without shards. Collective if it has some."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


@contextmanager
def all_warnings() -> Iterator[list[warnings.WarningMessage]]:
    """Collect every warning of the block, also the repeated ones."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught


@contextmanager
def heard(name: str, *, level: int = logging.WARNING, note: Path | None = None) -> Iterator[list[str]]:
    """Collect what the logger ``name`` is told in the block; create the file ``note`` at the first text."""
    texts: list[str] = []

    def keep(record: logging.LogRecord) -> None:
        texts.append(record.getMessage())
        if note is not None:
            note.touch()

    handler, logger = logging.Handler(level), logging.getLogger(name)
    handler.emit = keep  # type: ignore[method-assign]
    before = logger.level
    logger.addHandler(handler)
    if level < logging.WARNING:
        logger.setLevel(level)
    try:
        yield texts
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def marked_line(file: str, mark: str = "STEP") -> str:
    """Return ``name:number`` of the first line of ``file`` that ends with the comment ``mark``."""
    return marked_lines(file, mark)[0]


def marked_lines(file: str, mark: str) -> list[str]:
    """Return ``name:number`` of the lines of ``file`` that end with the comment ``mark``."""
    path = Path(file)
    return [f"{path.name}:{i}" for i, line in enumerate(path.read_text().splitlines(), 1) if line.endswith(f"# {mark}")]


def share_of(batch: torch.Tensor) -> torch.Tensor:
    """Return this rank's contiguous part of a batch that the number of ranks divides."""
    return batch.chunk(dist.get_world_size())[dist.get_rank()]
