"""Builds a Trainer's data loaders."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Sampler, SequentialSampler, TensorDataset

from echelon.base.errors import UsageError
from echelon.base.lengths import length_of
from echelon.trainer.arguments.training_arguments import TrainingArguments
from echelon.trainer.data.columns import KeptColumns
from echelon.trainer.data.length_samplers import BalancedBatchSampler, LengthGroupedSampler, lengths_of


@dataclass(frozen=True, slots=True, eq=False)
class LoaderSource:
    """What an evaluation's loader was built from, to tell whether it can be used again."""

    dataset: Any
    collator: Any
    accelerator: Any
    _: KW_ONLY
    batch_size: int
    columns: KeptColumns | None

    def equals(self, other: LoaderSource) -> bool:
        """Return whether both name the same objects and equal settings."""
        are_same = (
            self.dataset is other.dataset and self.collator is other.collator and self.accelerator is other.accelerator
        )
        return are_same and (self.batch_size, self.columns) == (other.batch_size, other.columns)


def as_dataset(data: Any) -> Any:
    """Convert a tuple of tensors or arrays to a ``TensorDataset``; return other data unchanged.

    Raises:
        UsageError: the tensors have different lengths.
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
            f"the dataset's tensors have different lengths: {', '.join(map(str, lengths))}",
            where="Trainer(train_dataset=, eval_dataset=)",
            do="pass tensors with one row per sample, such as (x, y)",
        )
    return TensorDataset(*(torch.as_tensor(part) for part in data))


def train_sampler(
    args: TrainingArguments,
    dataset: Any,
    *,
    batch_size: int,
    accumulation: int,
    num_ranks: int,
    tokenizer: Any,
    whole: Any = None,
) -> Sampler[Any] | None:
    """Return the training data's sampler, or a batch sampler for the ``batch_rebalance`` strategy.

    The prepared loader makes the order depend only on the seed and the epoch.

    Args:
        dataset: the training data; if it has no length, no sampler is returned.
        tokenizer: its first ``model_input_names`` entry (default: ``input_ids``) is the column that defines lengths.
        whole: the dataset with all its columns, one of which may hold the lengths.
    """
    if dataset is None or length_of(dataset) < 0:
        return None
    if args.train_sampling_strategy == "sequential":
        return SequentialSampler(dataset)
    if args.train_sampling_strategy == "random":
        return RandomSampler(dataset)
    names = getattr(tokenizer, "model_input_names", None) or ["input_ids"]
    has_all = whole is not None and length_of(whole) == length_of(dataset)
    lengths = lengths_of(whole if has_all else dataset, column=args.length_column_name, name=names[0])
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


def choose_eval_dataset(given: Any, own: Any) -> Any:
    """Return the dataset to evaluate: ``given``, the dataset in ``own`` that ``given`` names, or ``own`` itself.

    Raises:
        UsageError: there is no evaluation dataset, or none with this name.
    """
    if isinstance(given, str) and isinstance(own, dict) and given in own:
        return own[given]
    dataset = given if given is not None else own
    if dataset is None or isinstance(dataset, str):
        known = list(own) if isinstance(own, dict) else "none by name"
        raise UsageError(
            "eval_dataset is None"
            if dataset is None
            else f"there is no evaluation dataset {dataset!r} (available: {known})",
            where="Trainer.evaluate",
            do="pass eval_dataset to the Trainer or to evaluate()",
        )
    return as_dataset(dataset)


def local_loader(
    args: TrainingArguments,
    dataset: Any,
    *,
    collator: Callable[[Any], Any],
    batch_size: int,
    sampler: Sampler[Any] | None,
    rank: int,
    device: torch.device,
) -> DataLoader[Any]:
    """Return a loader for ``dataset`` on this rank, before it is prepared."""
    workers = args.dataloader_num_workers
    options: dict[str, Any] = {
        "batch_size": batch_size,
        "collate_fn": collator,
        "num_workers": workers,
        "pin_memory": args.dataloader_pin_memory and device.type != "cpu",  # torch warns without an accelerator
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
    # All ranks have the same seed, but their workers must draw different random augmentations.
    seed = (torch.initial_seed() + num_workers * rank) % 2**32
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
