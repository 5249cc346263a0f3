"""DataLoaders of a Trainer: from a data set, a collator and the arguments."""

from __future__ import annotations

import random
from collections.abc import Callable, Sized
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Sampler, SequentialSampler

from echelon.trainer.arguments import TrainingArguments

__all__ = ["length_of", "make_loader", "train_sampler"]


def length_of(dataset: Any) -> int | None:
    """Return how many samples ``dataset`` has; None where it cannot tell."""
    if not isinstance(dataset, Sized):
        return None
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):  # a length in name only, as some iterable data sets have
        return None


def train_sampler(args: TrainingArguments, dataset: Any) -> Sampler[int] | None:
    """Return the order of the training data; the prepared loader makes it one of (seed, epoch) only."""
    if dataset is None or length_of(dataset) is None:
        return None
    return SequentialSampler(dataset) if args.train_sampling_strategy == "sequential" else RandomSampler(dataset)


def make_loader(
    args: TrainingArguments,
    dataset: Any,
    *,
    collator: Callable[[Any], Any],
    batch_size: int,
    sampler: Sampler[int] | None,
    rank: int,
    device: torch.device,
) -> DataLoader[Any]:
    """Return the loader of one process, not yet dealt to the ranks."""
    workers = args.dataloader_num_workers
    options: dict[str, Any] = {
        "batch_size": batch_size,
        "collate_fn": collator,
        "num_workers": workers,
        "pin_memory": args.dataloader_pin_memory and device.type != "cpu",  # torch warns where there is no accelerator
        "in_order": args.dataloader_in_order,
    }
    if workers:
        options["persistent_workers"] = args.dataloader_persistent_workers
        options["prefetch_factor"] = args.dataloader_prefetch_factor
        options["multiprocessing_context"] = args.dataloader_multiprocessing_context
        options["worker_init_fn"] = partial(_seed_worker, num_workers=workers, rank=rank)
    if not isinstance(dataset, IterableDataset):
        options["sampler"] = sampler
        options["drop_last"] = args.dataloader_drop_last
    return DataLoader(dataset, **options)


def _seed_worker(worker: int, *, num_workers: int, rank: int) -> None:
    # All ranks have one seed; their workers must not augment different samples in the same way.
    seed = (torch.initial_seed() + num_workers * rank) % 2**32
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
