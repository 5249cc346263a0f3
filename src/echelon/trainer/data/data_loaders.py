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
from echelon.base.logging import get_logger
from echelon.trainer.arguments.training_arguments import TrainingArguments
from echelon.trainer.data.balanced_batches import BalancedBatchSampler
from echelon.trainer.data.columns import ColumnFilter, Table, drop_columns
from echelon.trainer.data.length_grouped_sampler import LengthGroupedSampler, lengths_of
from echelon.trainer.hooks import TrainerHooks
from echelon.trainer.model_interface import ModelInterface, columns_of

__all__ = ["as_dataset", "build_loader", "choose_eval_dataset", "require_train_dataset", "train_sampler"]

logger = get_logger(__name__)


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


def train_sampler(
    args: TrainingArguments, dataset: Any, *, batch_size: int, accumulation: int, num_ranks: int, tokenizer: Any
) -> Sampler[Any] | None:
    """Return the order of the training data (of the strategy ``batch_rebalance``, its batches).

    The prepared loader makes it one of (seed, epoch) only.

    Args:
        args: which order.
        dataset: None or without a length: no sampler.
        batch_size: samples of one rank in one forward pass.
        accumulation: forward passes of an optimizer step.
        num_ranks: ranks.
        tokenizer: its first input is the column whose length is that of the sample; else it is ``input_ids``.
    """
    if dataset is None or length_of(dataset) < 0:
        return None
    if args.train_sampling_strategy == "sequential":
        return SequentialSampler(dataset)
    if args.train_sampling_strategy == "random":
        return RandomSampler(dataset)
    names = getattr(tokenizer, "model_input_names", None) or ["input_ids"]
    lengths = lengths_of(dataset, column=args.length_column_name, name=names[0])
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


def require_train_dataset(dataset: Any) -> None:
    """Raise where there is no training data.

    Raises:
        UsageError: ``dataset`` is None.
    """
    if dataset is None:
        raise UsageError(
            "there is nothing to train on: train_dataset is None",
            where="Trainer(train_dataset=)",
            do="give a train_dataset, or override get_train_dataloader",
        )


def choose_eval_dataset(given: Any, own: Any) -> Any:
    """Return the data set that ``evaluate(given)`` means: ``given``, or one of the Trainer's ``own``.

    Raises:
        UsageError: there is none, or none of that name.
    """
    if isinstance(given, str) and isinstance(own, dict) and given in own:
        return own[given]
    dataset = given if given is not None else own
    if dataset is None or isinstance(dataset, str):
        known = list(own) if isinstance(own, dict) else "none by name"
        raise UsageError(
            "there is nothing to evaluate on: eval_dataset is None"
            if dataset is None
            else f"there is no evaluation set {dataset!r} (available: {known})",
            where="Trainer.evaluate",
            do="give an eval_dataset to the Trainer or to evaluate()",
        )
    return as_dataset(dataset)


def build_loader(
    hooks: TrainerHooks,
    interface: ModelInterface,
    dataset: Any,
    sampler: Sampler[Any] | None,
    batch_size: int,
    *,
    purpose: Literal["train", "eval"] = "eval",
) -> DataLoader[Any]:
    """Return the loader of ``dataset``, with the columns that the model takes, sharded over the ranks."""
    args, accelerator, model = hooks.args, hooks.accelerator, hooks.model
    collator, kept = hooks.data_collator, columns_of(hooks, interface)
    if kept is not None and isinstance(dataset, Table):
        dataset, dropped = drop_columns(dataset, kept, model=model)
        if dropped:
            logger.info("columns that %s.forward does not take: %s", type(model).__name__, ", ".join(dropped))
    elif kept is not None:
        collator = ColumnFilter(collator, kept)
    rank, device = accelerator.process_index, accelerator.device
    loader = _local_loader(
        args, dataset, collator=collator, batch_size=batch_size, sampler=sampler, rank=rank, device=device
    )
    # Whether the user says that each process has its own share of the data; None: unspecified.
    is_sharded = {"true": True, purpose: True, "false": False}.get(args.already_sharded or "none")
    return accelerator.prepare_data_loader(loader, already_sharded=is_sharded)


def _local_loader(
    args: TrainingArguments,
    dataset: Any,
    *,
    collator: Callable[[Any], Any],
    batch_size: int,
    sampler: Sampler[Any] | None,
    rank: int,
    device: torch.device,
) -> DataLoader[Any]:
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
