"""Copies a user's DataLoader with a different dataset or different batches."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader

from echelon.base.optional import require

__all__ = ["copy_loader", "stateful_loader"]

_KEPT = (
    "collate_fn",
    "generator",
    "in_order",
    "multiprocessing_context",
    "num_workers",
    "persistent_workers",
    "pin_memory",
    "prefetch_factor",
    "timeout",
    "worker_init_fn",
)


def copy_loader(loader: DataLoader[Any], dataset: Any, *, kind: Any, **choices: Any) -> Any:
    """Return a loader over ``dataset`` with the other options of ``loader``.

    Args:
        loader: the user's loader.
        dataset: the dataset to read.
        kind: ``DataLoader`` or a class that takes the same arguments.
        choices: options that override the user's, and options that define batches (``batch_sampler``, or ``batch_size``, ...).
    """
    kept = {name: getattr(loader, name) for name in _KEPT if hasattr(loader, name)}
    return kind(dataset, **{**kept, **choices})


def stateful_loader() -> Callable[..., Any]:
    """Return a factory for torchdata's StatefulDataLoader.

    Raises:
        MissingExtraError: torchdata is not installed.
    """
    module = require("torchdata.stateful_dataloader", extra="stateful", purpose="use_stateful_dataloader=True")

    def make(*args: Any, **kwargs: Any) -> Any:
        with warnings.catch_warnings():
            # torchdata 0.11 calls torch.set_vital, which is deprecated in torch 2.13.
            warnings.filterwarnings("ignore", message="'set_vital' is deprecated", category=UserWarning)
            return module.StatefulDataLoader(*args, **kwargs)

    return make
