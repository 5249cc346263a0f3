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
from echelon.accelerator.plugins.configuration import TorchDynamoPlugin
from echelon.accelerator.plugins.project_configuration import ProjectConfiguration
from echelon.base.device import has_tf32
from echelon.base.errors import ConfigError
from echelon.trainer.arguments.deepspeed import deepspeed_plugin
from echelon.trainer.arguments.devices import num_devices_of
from echelon.trainer.arguments.fsdp import fsdp_plugin, parallelism
from echelon.trainer.arguments.training_arguments import TrainingArguments
from echelon.trainer.callbacks.trackers import tracker_settings

__all__ = ["accumulation_options", "make_accelerator", "set_seeds"]

# What accelerator_config may hold, with the Trainer's own defaults.
_DATA_OPTIONS = {
    "split_batches": False,
    "dispatch_batches": None,
    "even_batches": True,
    "use_seedable_sampler": True,
    "non_blocking": False,
}
_ACCUMULATION = ("num_steps", "sync_each_batch", "sync_with_dataloader", "adjust_scheduler")
# A process group that is there is always used: nothing has to be said for it.
_OTHERS = ("gradient_accumulation_kwargs", "use_configured_state")


def make_accelerator(args: TrainingArguments) -> Accelerator:
    """Return an Accelerator of the choices in ``args``.

    The Trainer divides by the accumulation itself, because it knows the batches of an update before the first one runs:
    so the Accelerator's own number of accumulation steps stays 1. Schedules count optimizer steps.

    Collective: it makes the process group where there is none.

    Raises:
        ConfigError: a setting that the Trainer does not offer.
    """
    accumulation_options(args)  # raises for a wrong key
    is_exact = args.parity not in (None, "off")
    settings = tracker_settings(args)
    project = settings.setdefault("project_config", ProjectConfiguration())
    project.save_on_each_node, project.max_failed_saves = args.save_on_each_node, args.max_failed_saves
    project.checkpoint_format = "echelon"  # what it saves; files of transformers' layout are the Trainer's own
    accelerator = Accelerator(
        mixed_precision=args.mixed_precision,
        cpu=args.use_cpu,
        dataloader_config=DataLoaderConfiguration(
            **_data_options(args), data_seed=args.seed if args.data_seed is None else args.data_seed
        ),
        deepspeed_plugin=deepspeed_plugin(args),
        fsdp_plugin=fsdp_plugin(args),
        parallelism_config=parallelism(args),
        dynamo_plugin=_dynamo(args),
        step_scheduler_with_optimizer=False,
        kwargs_handlers=[
            _of_ddp(args),
            InitProcessGroupKwargs(backend=args.ddp_backend, timeout=args.ddp_timeout_delta),
        ],
        engine=_engine(args),
        parity=args.parity,
        seed=args.seed if is_exact else None,
        canonical_shards=args.canonical_shards,
        max_micro_batch_size=(args.max_micro_batch_size or args.train_batch_size) if is_exact else None,
        **settings,
    )
    if accelerator.parity != "off" and not is_exact:  # chosen outside of the script, where it is said what fits, too
        accelerator.gradient_accumulation_steps = args.gradient_accumulation_steps
    if args.tf32 is not None:
        _choose_tf32(args.tf32, accelerator.device)
    return accelerator


def set_seeds(args: TrainingArguments) -> None:
    """Seed ``random``, numpy and torch, equally on all ranks, so that a model made after it is the same everywhere."""
    random.seed(args.seed)
    np.random.seed(args.seed % 2**32)
    torch.manual_seed(args.seed)
    if args.full_determinism:
        torch.use_deterministic_algorithms(True)


def accumulation_options(args: TrainingArguments) -> dict[str, Any]:
    """Return ``accelerator_config["gradient_accumulation_kwargs"]``.

    Raises:
        ConfigError: an unknown key, or two numbers of steps.
    """
    given = dict(_accelerator_config(args).get("gradient_accumulation_kwargs") or {})
    for name in given:
        _known(name, _ACCUMULATION, "accelerator_config['gradient_accumulation_kwargs']")
    num_steps, own = given.get("num_steps"), args.gradient_accumulation_steps
    if num_steps is not None and own not in (1, num_steps):
        raise ConfigError(
            f"gradient_accumulation_steps={own} and accelerator_config's num_steps={num_steps} are one setting with two values",
            where="TrainingArguments.gradient_accumulation_steps",
            do="keep gradient_accumulation_steps only",
        )
    return given


def _data_options(args: TrainingArguments) -> dict[str, Any]:
    given = _accelerator_config(args)
    for name in given:
        _known(name, (*_DATA_OPTIONS, *_OTHERS), "accelerator_config")
    return {name: given.get(name, default) for name, default in _DATA_OPTIONS.items()}


def _accelerator_config(args: TrainingArguments) -> dict[str, Any]:
    given = args.accelerator_config or {}
    if isinstance(given, dict):
        return given
    return {name: value for name, value in vars(given).items() if not name.startswith("_")}


def _known(name: str, choices: tuple[str, ...], setting: str) -> None:
    if name not in choices:
        near = difflib.get_close_matches(name, choices, n=1)
        raise ConfigError(
            f"{setting} has no key {name!r}",
            where="TrainingArguments.accelerator_config",
            do=f"did you mean {near[0]!r}?" if near else f"use one of {', '.join(choices)}",
        )


def _engine(args: TrainingArguments) -> str | None:
    """Return the engine for the Accelerator; None: it chooses."""
    uses_several = args.engine is None and args.n_gpu > 1 and num_devices_of(args, args.distributed_state) > 1
    return "dp" if uses_several else args.engine


def _dynamo(args: TrainingArguments) -> TorchDynamoPlugin | None:
    if not args.torch_compile:
        return None
    return TorchDynamoPlugin(backend=args.torch_compile_backend, mode=args.torch_compile_mode)


def _choose_tf32(wanted: bool, device: torch.device) -> None:
    """Allow or forbid the device to round float32 factors to TF32, in this process.

    Raises:
        ConfigError: it is asked for, and the device has none.
    """
    if wanted and not has_tf32(device):
        raise ConfigError(
            f"tf32=True, and this device ({device.type}) has no TF32: an NVIDIA GPU of the Ampere generation or later has",
            where="TrainingArguments.tf32",
            do="leave it out, or set bf16=True",
        )
    torch.set_float32_matmul_precision("high" if wanted else "highest")
    torch.backends.cudnn.allow_tf32 = wanted


def _of_ddp(args: TrainingArguments) -> DistributedDataParallelKwargs:
    options = {
        "find_unused_parameters": args.ddp_find_unused_parameters,
        "bucket_cap_mb": args.ddp_bucket_cap_mb,
        "broadcast_buffers": args.ddp_broadcast_buffers,
        "static_graph": args.ddp_static_graph,
    }
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    return DistributedDataParallelKwargs(**given)
