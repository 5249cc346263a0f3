"""The Accelerator that a Trainer stands on, made from its arguments; and the seeds."""

from __future__ import annotations

import difflib
import random
from typing import Any

import numpy as np
import torch

from echelon.accelerator import (
    Accelerator,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    InitProcessGroupKwargs,
)
from echelon.base.errors import ConfigError
from echelon.trainer.arguments import TrainingArguments

__all__ = ["make_accelerator", "set_seeds"]

# What accelerator_config may hold, with the Trainer's own defaults.
_DATA_OPTIONS = {
    "split_batches": False,
    "dispatch_batches": None,
    "even_batches": True,
    "use_seedable_sampler": True,
    "non_blocking": False,
}
_WITHOUT_EFFECT = {"gradient_accumulation_kwargs": None, "use_configured_state": False}


def make_accelerator(args: TrainingArguments) -> Accelerator:
    """Return an Accelerator of the choices in ``args``.

    The Trainer divides by the accumulation itself, because it knows the batches of an update before the first one runs:
    so the Accelerator's own number of accumulation steps stays 1. Schedules count optimizer steps.

    Collective: it makes the process group where there is none.

    Raises:
        ConfigError: a setting that the Trainer does not offer.
    """
    accelerator = Accelerator(
        mixed_precision=args.mixed_precision,
        cpu=args.use_cpu,
        dataloader_config=DataLoaderConfiguration(
            **_data_options(args), data_seed=args.seed if args.data_seed is None else args.data_seed
        ),
        step_scheduler_with_optimizer=False,
        kwargs_handlers=[
            _of_ddp(args),
            InitProcessGroupKwargs(backend=args.ddp_backend, timeout=args.ddp_timeout_delta),
        ],
    )
    if accelerator.parity != "off":  # its plan counts batches of one process
        raise ConfigError(
            f"the Trainer of this version of echelon does not offer parity={accelerator.parity!r}",
            where=str(accelerator.config.origins["parity"]),
            do="leave it out, or train by your own loop on Accelerator(parity='exact')",
        )
    return accelerator


def set_seeds(args: TrainingArguments) -> None:
    """Seed ``random``, numpy and torch, equally on all ranks, so that a model made after it is the same everywhere."""
    random.seed(args.seed)
    np.random.seed(args.seed % 2**32)
    torch.manual_seed(args.seed)
    if args.full_determinism:
        torch.use_deterministic_algorithms(True)


def _data_options(args: TrainingArguments) -> dict[str, Any]:
    given = args.accelerator_config or {}
    if not isinstance(given, dict):
        given = {name: value for name, value in vars(given).items() if not name.startswith("_")}
    for name, value in given.items():
        known = [*_DATA_OPTIONS, *_WITHOUT_EFFECT]
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise ConfigError(
                f"accelerator_config has no key {name!r}",
                where="TrainingArguments.accelerator_config",
                do=f"did you mean {near[0]!r}?" if near else f"use one of {', '.join(_DATA_OPTIONS)}",
            )
        if name in _WITHOUT_EFFECT and value not in (None, False, {}):
            raise ConfigError(
                f"accelerator_config[{name!r}]={value!r} is not offered yet by this version of echelon",
                where="TrainingArguments.accelerator_config",
                do="leave it out",
            )
    return {name: given.get(name, default) for name, default in _DATA_OPTIONS.items()}


def _of_ddp(args: TrainingArguments) -> DistributedDataParallelKwargs:
    options = {
        "find_unused_parameters": args.ddp_find_unused_parameters,
        "bucket_cap_mb": args.ddp_bucket_cap_mb,
        "broadcast_buffers": args.ddp_broadcast_buffers,
        "static_graph": args.ddp_static_graph,
    }
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    return DistributedDataParallelKwargs(**given)
