"""``auto_find_batch_size``: when memory runs out, the training begins again with smaller batches and more accumulation."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from echelon.accelerator.memory import find_executable_batch_size, should_reduce_batch_size
from echelon.base.errors import ConfigError, UsageError
from echelon.trainer.hooks import TrainerHooks
from echelon.trainer.results import TrainOutput

__all__ = ["evaluation_ran_out", "smaller_batch_sizes", "train_with_a_batch_that_fits"]


def smaller_batch_sizes(batch_size: int, *, accumulation: int) -> list[int]:
    """Return the batch sizes below ``batch_size`` with which accumulation gives the same total, largest first."""
    total = batch_size * accumulation
    return [size for size in range(batch_size - 1, 0, -1) if total % size == 0]


def train_with_a_batch_that_fits(
    hooks: TrainerHooks, attempt: Callable[[int, int], TrainOutput], *, accumulation: int
) -> TrainOutput:
    """Call ``attempt(batch_size, accumulation)`` with smaller and smaller batches until one fits into memory.

    Their product, and so the training, stays the same. Each attempt begins with the weights, the optimizer and the
    random states of the first.

    Collective: every rank; all of them try the same sizes.

    Raises:
        ConfigError: the model is sharded.
        UsageError: not even a batch of one sample fits.
    """
    args = hooks.args
    if hooks.accelerator.capabilities.shards_parameters:
        raise ConfigError(
            "auto_find_batch_size is not offered for a model that is sharded",
            where="TrainingArguments.auto_find_batch_size",
            do="choose per_device_train_batch_size by hand",
        )
    total = args.train_batch_size * accumulation
    sizes = iter([*smaller_batch_sizes(args.train_batch_size, accumulation=accumulation), 0])
    weights = {name: value.detach().cpu().clone() for name, value in hooks.model.state_dict().items()}
    given = hooks.optimizer, hooks.lr_scheduler
    states = [None if one is None else copy.deepcopy(one.state_dict()) for one in given]
    chance = random.getstate(), np.random.get_state(), torch.get_rng_state()
    tries = 0

    def _try(batch_size: int) -> TrainOutput:
        nonlocal tries
        tries += 1
        if tries > 1:
            hooks.accelerator.free_memory()
            hooks.model_wrapped = hooks.model
            hooks.model.load_state_dict(weights)
            hooks.optimizer, hooks.lr_scheduler = given
            for one, state in zip(given, states):
                if one is not None and state is not None:
                    one.load_state_dict(state)
            hooks.model.zero_grad()
            random.setstate(chance[0])
            np.random.set_state(chance[1])
            torch.set_rng_state(chance[2])
        return attempt(batch_size, total // batch_size)

    search: Any = find_executable_batch_size(
        _try, starting_batch_size=args.train_batch_size, reduce_batch_size_fn=lambda: next(sizes)
    )
    result: TrainOutput = search()
    return result


def evaluation_ran_out(error: BaseException, *, batch_size: int) -> UsageError | None:
    """Return the error for an evaluation inside such a training; None when ``error`` is not one of memory."""
    if not should_reduce_batch_size(error):
        return None
    return UsageError(
        f"the evaluation ran out of memory with batches of {batch_size}; auto_find_batch_size changes the training's only",
        where="TrainingArguments.per_device_eval_batch_size",
        do="make it smaller, or set eval_accumulation_steps so that predictions go to the host sooner",
    )
