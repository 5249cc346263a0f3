"""``auto_find_batch_size``: restarts training with smaller batches and more accumulation steps when memory runs out."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from echelon.accelerator.memory import find_executable_batch_size, should_reduce_batch_size
from echelon.base.errors import ConfigError, UsageError
from echelon.trainer.results import TrainOutput
from echelon.trainer.trainer_methods import TrainerMethods


def smaller_batch_sizes(batch_size: int, *, accumulation: int) -> list[int]:
    """Return the batch sizes to try next: all smaller divisors of the total batch size, largest first."""
    total = batch_size * accumulation
    return [size for size in range(batch_size - 1, 0, -1) if total % size == 0]


def find_batch_size_and_train(
    trainer: TrainerMethods, attempt: Callable[[int], TrainOutput], *, batch_size: int, accumulation: int
) -> TrainOutput:
    """Call ``attempt(batch_size)`` with decreasing batch sizes until one fits into memory.

    Every size divides ``batch_size * accumulation``, which stays constant. Each attempt starts with the same weights,
    optimizer state and RNG states.

    Collective: call on every rank; all ranks try the same sizes.

    Raises:
        ConfigError: the model is sharded.
        UsageError: even a batch of one sample does not fit into memory.
    """
    if trainer.accelerator.capabilities.shards_parameters:
        raise ConfigError(
            "auto_find_batch_size does not support sharded models",
            where="TrainingArguments.auto_find_batch_size",
            do="remove auto_find_batch_size and set per_device_train_batch_size",
        )
    sizes = iter([*smaller_batch_sizes(batch_size, accumulation=accumulation), 0])
    weights = {name: value.detach().cpu().clone() for name, value in trainer.model.state_dict().items()}
    initial = trainer.optimizer, trainer.lr_scheduler
    states = [None if one is None else copy.deepcopy(one.state_dict()) for one in initial]
    rng_states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    tries = 0

    def _try(batch_size: int) -> TrainOutput:
        nonlocal tries
        tries += 1
        if tries > 1:
            trainer.accelerator.free_memory()
            trainer.model_wrapped = trainer.model
            trainer.model.load_state_dict(weights)
            trainer.optimizer, trainer.lr_scheduler = initial
            for one, state in zip(initial, states):
                if one is not None and state is not None:
                    one.load_state_dict(state)
            trainer.model.zero_grad()
            random.setstate(rng_states[0])
            np.random.set_state(rng_states[1])
            torch.set_rng_state(rng_states[2])
        return attempt(batch_size)

    search: Any = find_executable_batch_size(
        _try, starting_batch_size=batch_size, reduce_batch_size_fn=lambda: next(sizes)
    )
    result: TrainOutput = search()
    return result


def evaluation_memory_error(error: BaseException, *, batch_size: int) -> UsageError | None:
    """Return the error to raise if an evaluation ran out of memory, or None if ``error`` has another cause."""
    if not should_reduce_batch_size(error):
        return None
    return UsageError(
        f"evaluation ran out of memory with batch size {batch_size}; auto_find_batch_size changes only the "
        "training batch size",
        where="TrainingArguments.per_device_eval_batch_size",
        do="reduce per_device_eval_batch_size, or set eval_accumulation_steps to move predictions to the host earlier",
    )
