"""DataLoaders of a Trainer: from a data set, a collator and the arguments."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Sampler, SequentialSampler, TensorDataset

from echelon.base.errors import UsageError
from echelon.base.lengths import length_of
from echelon.trainer.arguments.training_arguments import TrainingArguments
from echelon.trainer.data.balanced_batches import BalancedBatchSampler
from echelon.trainer.data.length_grouped_sampler import LengthGroupedSampler, lengths_of

__all__ = ["already_sharded", "as_dataset", "make_loader", "train_sampler"]


def as_dataset(data: Any) -> Any:
    """Return ``data`` as a data set: of a tuple of tensors or arrays, one sample is a row of each; others stay.

    Raises:
        UsageError: the parts of the tuple have different lengths.
    """
    if (
        not isinstance(data, tuple)
        or not data
        or not all(isinstance(part, (torch.Tensor, np.ndarray)) for part in data)
    ):
        return data
    lengths = [len(part) for part in data]
    if len(set(lengths)) > 1:
        raise UsageError(
            f"the parts of a data set have different lengths: {', '.join(map(str, lengths))}",
            where="Trainer(train_dataset=, eval_dataset=)",
            do="give tensors whose first dimension is the samples, such as (x, y)",
        )
    return TensorDataset(*(torch.as_tensor(part) for part in data))


def already_sharded(args: TrainingArguments, *, purpose: Literal["train", "eval"]) -> bool | None:
    """Return whether the user says that each process has its own share of this data; None: nothing is said."""
    return {"true": True, purpose: True, "false": False}.get(args.already_sharded or "none")


def train_sampler(
    args: TrainingArguments, dataset: Any, *, batch_size: int, accumulation: int, num_ranks: int, length_name: str
) -> Sampler[Any] | None:
    """Return the order of the training data (of the strategy ``batch_rebalance``, its batches).

    The prepared loader makes it one of (seed, epoch) only.

    Args:
        args: which order.
        dataset: None or without a length: no sampler.
        batch_size: samples of one rank in one forward pass.
        accumulation: forward passes of an optimizer step.
        num_ranks: ranks.
        length_name: the column whose length is that of the sample.
    """
    if dataset is None or length_of(dataset) < 0:
        return None
    if args.train_sampling_strategy == "sequential":
        return SequentialSampler(dataset)
    if args.train_sampling_strategy == "random":
        return RandomSampler(dataset)
    lengths = lengths_of(dataset, column=args.length_column_name, name=length_name)
    seed = args.seed if args.data_seed is None else args.data_seed
    if args.train_sampling_strategy == "group_by_length":
        return LengthGroupedSampler(batch_size * accumulation, lengths=lengths, seed=seed)
    return BalancedBatchSampler(
        lengths,
        samples_per_update=batch_size * accumulation * num_ranks,
        num_ranks=num_ranks,
        num_rounds=accumulation,
        seed=seed,
        drop_last=args.dataloader_drop_last,
    )


def make_loader(
    args: TrainingArguments,
    dataset: Any,
    *,
    collator: Callable[[Any], Any],
    batch_size: int,
    sampler: Sampler[Any] | None,
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
    if isinstance(sampler, BalancedBatchSampler):
        del options["batch_size"]
        options["batch_sampler"] = sampler
    elif not isinstance(dataset, IterableDataset):
        options["sampler"] = sampler
        options["drop_last"] = args.dataloader_drop_last
    return DataLoader(dataset, **options)


def _seed_worker(worker: int, *, num_workers: int, rank: int) -> None:
    # All ranks have one seed; their workers must not augment different samples in the same way.
    seed = (torch.initial_seed() + num_workers * rank) % 2**32
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
