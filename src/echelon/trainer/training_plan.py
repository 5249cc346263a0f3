"""A run's training plan: its length in steps, epochs and samples."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from echelon.base.errors import DesyncError, UsageError
from echelon.base.lengths import length_of
from echelon.base.logging import get_logger
from echelon.trainer.arguments.training_arguments import TrainingArguments

logger = get_logger(__name__)

# The numbers that ``Trainer.set_initial_training_values`` returns, in the order of transformers.
_INITIAL_VALUES = (
    "num_epochs",
    "steps_per_epoch",
    "num_examples",
    "num_train_samples",
    "total_train_batch_size",
    "batches_per_epoch",
    "max_steps",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPlan:
    """A run's length, as seen by this rank."""

    max_steps: int
    """Total number of optimizer steps."""
    num_epochs: int
    """Number of epochs, including a partial last one; ``sys.maxsize`` if only the number of steps limits the run."""
    steps_per_epoch: int
    """Optimizer steps per epoch."""
    batches_per_epoch: int
    """Number of batches per epoch on this rank or, if the data has no length, in the whole run."""
    num_examples: int
    """Number of samples per epoch or, if the data has no length, in the whole run."""
    num_train_samples: int
    """Samples in all epochs across all ranks, for throughput metrics."""
    total_train_batch_size: int
    """Samples per optimizer step across all ranks."""
    batch_size: int
    """Samples per batch on this rank; in the exact modes, across all ranks."""
    is_sized: bool
    """Whether the data has a length."""
    is_limited: bool = False
    """Whether a limit set by the user ends an epoch after ``batches_per_epoch`` batches."""
    ends_with_data: bool = False
    """Whether the run ends when its last epoch's data is exhausted, rather than after ``max_steps``."""

    def with_initial_values(self, values: tuple[int, ...]) -> TrainingPlan:
        """Return the plan with the values that an override of ``Trainer.set_initial_training_values`` returned."""
        if values == self.initial_values():
            return self
        changed: dict[str, Any] = dict(zip(_INITIAL_VALUES, values, strict=True))
        if (changed["max_steps"], changed["num_epochs"]) != (self.max_steps, self.num_epochs):
            changed["ends_with_data"] = False  # the user's number of steps ends the run
        return replace(self, **changed)

    def initial_values(self) -> tuple[int, int, int, int, int, int, int]:
        """Return the values of ``Trainer.set_initial_training_values``."""
        return tuple(getattr(self, name) for name in _INITIAL_VALUES)


def make_plan(
    args: TrainingArguments,
    loader: Any,
    *,
    num_examples: int | None,
    batch_size: int,
    accumulation: int,
    world_size: int,
    gather_rows: Callable[[list[int]], list[list[int]]] | None = None,
) -> TrainingPlan:
    """Return the training plan for a run over ``loader``.

    Args:
        args: training arguments; ``max_steps`` takes precedence over ``num_train_epochs``.
        num_examples: number of samples in the loader's dataset; None if the dataset has no length.
        world_size: number of ranks; 1 if ``loader`` yields all ranks' batches.
        gather_rows: gathers a row of integers from every rank; None if all ranks have the same number of batches.

    Collective: call on every rank if ``gather_rows`` is given; the rank with the most batches determines the plan.

    Raises:
        UsageError: the data is empty, or it has no length and ``max_steps`` is not set.
        DesyncError: some ranks have no batch.
    """
    total = batch_size * accumulation * world_size
    limit = args.batches_of(args.limit_train_batches, loader)
    batches = length_of(loader)
    if gather_rows is not None:
        batches, limit = _max_over_ranks(batches, limit, gather_rows)
    if batches < 0:
        if args.max_steps <= 0:
            raise no_length_error()
        batches = args.max_steps * accumulation if limit is None else limit
        return TrainingPlan(
            max_steps=args.max_steps,
            num_epochs=sys.maxsize,
            steps_per_epoch=math.ceil(batches / accumulation),
            batches_per_epoch=batches,
            num_examples=total * args.max_steps,
            num_train_samples=total * args.max_steps,
            total_train_batch_size=total,
            batch_size=batch_size,
            is_sized=False,
            is_limited=limit is not None,
        )
    if not batches:
        raise UsageError(
            f"there is no batch to train on (samples: {num_examples})",
            where="Trainer.train",
            do="check train_dataset; with dataloader_drop_last=True, it must contain at least one full batch",
        )
    is_limited = limit is not None and limit < batches
    if limit is not None and is_limited:
        batches = limit
        num_examples = min(num_examples or sys.maxsize, batches * batch_size * world_size)
    steps_per_epoch = math.ceil(batches / accumulation)  # an incomplete last update counts
    samples = num_examples if num_examples is not None else batches * batch_size * world_size
    if args.max_steps > 0:
        max_steps, num_epochs = args.max_steps, math.ceil(args.max_steps / steps_per_epoch)
        num_train_samples = max_steps * total
    else:
        max_steps = math.ceil(args.num_train_epochs * steps_per_epoch)
        num_epochs = math.ceil(args.num_train_epochs)
        num_train_samples = int(samples * args.num_train_epochs)
    return TrainingPlan(
        max_steps=max_steps,
        num_epochs=num_epochs,
        steps_per_epoch=steps_per_epoch,
        batches_per_epoch=batches,
        num_examples=samples,
        num_train_samples=num_train_samples,
        total_train_batch_size=total,
        batch_size=batch_size,
        is_sized=True,
        is_limited=is_limited,
        ends_with_data=args.max_steps <= 0 and float(args.num_train_epochs).is_integer(),
    )


def _max_over_ranks(
    batches: int, limit: int | None, gather_rows: Callable[[list[int]], list[list[int]]]
) -> tuple[int, int | None]:
    """Return the largest number of batches on any rank (-1 if some rank does not know it), and the largest limit.

    Collective: call on every rank.
    """
    by_rank, limits = zip(*gather_rows([batches, -1 if limit is None else limit]))
    most = max(by_rank)
    if min(by_rank) == 0 < most:
        idle = [str(rank) for rank, number in enumerate(by_rank) if number == 0]
        who = f"rank {idle[0]} has" if len(idle) == 1 else f"ranks {', '.join(idle)} have"
        raise DesyncError(
            f"{who} no batch to train on, but rank {by_rank.index(most)} has {most}: the ranks do not have the same "
            "number of batches",
            where="Trainer.train",
            do="set accelerator_config={'even_batches': True} (the default), reduce per_device_train_batch_size, or use fewer processes",
        )
    return -1 if min(by_rank) < 0 else most, None if limit is None else max(limits)


def num_examples_of(dataloader: Any) -> int | None:
    """Return the number of samples in ``dataloader``'s dataset, or None if it has no length."""
    num_examples = length_of(getattr(dataloader, "dataset", None))
    return None if num_examples < 0 else num_examples


def no_length_error() -> UsageError:
    """Return the error for data without a length if ``max_steps`` is not set."""
    return UsageError(
        "train_dataset has no length and max_steps is not set, so training would never end",
        where="TrainingArguments.max_steps",
        do="set max_steps, or add __len__ to the dataset",
    )


def log_plan(plan: TrainingPlan, *, batch_size: int, num_devices: int, accumulation: int, num_parameters: int) -> None:
    """Log the plan; ``batch_size`` is the total across this process's ``num_devices`` devices."""
    logger.info("***** Running training *****")
    logger.info("  Num examples = %s", f"{plan.num_examples:,}")
    logger.info("  Num Epochs = %s", f"{plan.num_epochs:,}")
    logger.info("  Num update steps per epoch = %s", f"{plan.steps_per_epoch:,}")
    logger.info("  Instantaneous batch size per device = %s", f"{batch_size // num_devices:,}")
    if num_devices > 1:
        logger.info("  Training with DataParallel so batch size has been adjusted to: %s", f"{batch_size:,}")
    logger.info(
        "  Total train batch size (w. parallel, distributed & accumulation) = %s", f"{plan.total_train_batch_size:,}"
    )
    logger.info("  Gradient Accumulation steps = %s", accumulation)
    logger.info("  Total optimization steps = %s", f"{plan.max_steps:,}")
    logger.info("  Number of trainable parameters = %s", f"{num_parameters:,}")
