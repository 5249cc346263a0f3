"""Builds a Trainer's Accelerator from its arguments, and seeds the random number generators."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from echelon.accelerator import (
    Accelerator,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    InitProcessGroupKwargs,
)
from echelon.accelerator.plugins.configuration import TorchDynamoPlugin
from echelon.accelerator.plugins.project_configuration import ProjectConfiguration
from echelon.accelerator.prepare.prepare_objects import search_silently
from echelon.accelerator.sequences import cuts_sequences
from echelon.accelerator.setup.choose_precision import is_fastest
from echelon.base.device import has_tf32
from echelon.base.errors import ConfigError
from echelon.trainer.arguments.enums import suggest
from echelon.trainer.arguments.plugins import deepspeed_plugin, fsdp_plugin, parallelism
from echelon.trainer.arguments.training_arguments import TrainingArguments, num_devices_of
from echelon.trainer.callbacks.trackers import tracker_settings

# Keys of accelerator_config and their defaults.
_DATA_OPTIONS = {
    "split_batches": False,
    "dispatch_batches": None,
    "even_batches": True,
    "use_seedable_sampler": True,
    "non_blocking": False,
}
_ACCUMULATION = ("num_steps", "sync_each_batch", "sync_with_dataloader", "adjust_scheduler")
# use_configured_state has no effect: an existing process group is always used.
_OTHERS = ("gradient_accumulation_kwargs", "use_configured_state")


def build_accelerator(args: TrainingArguments, build_arguments: Callable[..., dict[str, Any]]) -> Accelerator:
    """Build the Accelerator for ``args``.

    ``build_arguments`` returns the Accelerator's arguments; it is ``Trainer._build_accelerator_args`` and receives the
    same arguments as in transformers.

    The Accelerator's number of accumulation steps stays 1, because the Trainer itself accumulates gradients and scales
    the loss. Schedulers count optimizer steps.

    Collective: call on every rank if the process group does not exist yet.

    Raises:
        ConfigError: a setting is not supported.
    """
    num_steps = accumulation_options(args).get("num_steps")
    if num_steps is not None:
        args.gradient_accumulation_steps = num_steps
    given = _accelerator_config(args)
    for name in given:
        _check_key(name, (*_DATA_OPTIONS, *_OTHERS), "accelerator_config")
    options: dict[str, Any] = {name: given.get(name, default) for name, default in _DATA_OPTIONS.items()}
    data_config = DataLoaderConfiguration(**options, data_seed=data_seed(args))
    accelerator = Accelerator(**build_arguments(dataloader_config=data_config, fsdp_plugin=fsdp_plugin(args)))
    if accelerator.parity == "off" and cuts_sequences(accelerator):
        raise ConfigError(
            "the Trainer with cp_size or sp_size needs an exact mode: without it, batches and losses are counted per process, but several "
            "processes have pieces of the same samples",
            where="TrainingArguments.parallelism_config",
            do="set TrainingArguments(parity='exact')",
        )
    is_exact = args.parity not in (None, "off")
    if accelerator.parity != "off" and not is_exact:  # set outside the script, as is the micro-batch size
        accelerator.gradient_accumulation_steps = args.gradient_accumulation_steps
    if accelerator.session.update.spikes is not None:
        accelerator.session.update.spikes.is_driven = True
    if args.ddp_find_unused_parameters is None:
        search_silently(accelerator.session)
    if args.tf32 is not None:
        _set_tf32(args.tf32, accelerator.device)
    return accelerator


def accelerator_arguments(args: TrainingArguments, model: nn.Module | None) -> dict[str, Any]:
    """Return the Accelerator arguments that ``args`` determines, without the two that depend on other objects."""
    is_exact = args.parity not in (None, "off")
    uses_several = args.engine is None and args.n_gpu > 1 and num_devices_of(args, args.distributed_state) > 1
    dynamo = None
    if args.torch_compile:
        dynamo = TorchDynamoPlugin(backend=args.torch_compile_backend, mode=args.torch_compile_mode)
    settings = tracker_settings(args)
    project = settings.setdefault("project_config", ProjectConfiguration())
    project.save_on_each_node, project.max_failed_saves = args.save_on_each_node, args.max_failed_saves
    project.checkpoint_format = "echelon"  # the Trainer itself writes the layout of transformers
    return dict(
        mixed_precision=None if args.mixed_precision == "no" and is_fastest(args.speed) else args.mixed_precision,
        cpu=args.use_cpu,
        deepspeed_plugin=deepspeed_plugin(args),
        parallelism_config=parallelism(args),
        dynamo_plugin=dynamo,
        step_scheduler_with_optimizer=False,
        kwargs_handlers=[
            _ddp_kwargs(args, model),
            InitProcessGroupKwargs(backend=args.ddp_backend, timeout=args.ddp_timeout_delta),
        ],
        engine="dp" if uses_several else args.engine,
        parity=args.parity,
        seed=args.seed if is_exact else None,
        canonical_shards=args.canonical_shards,
        speed=args.speed,
        verify_every=args.verify_every,
        verify_action=args.verify_action,
        master_weights=args.master_weights,
        spike_guard=args.spike_guard,
        spike_factor=args.spike_factor,
        activation_checkpointing=activation_mode(args),
        activation_checkpointing_blocks=args.activation_checkpointing_blocks,
        max_micro_batch_size=(args.max_micro_batch_size or args.train_batch_size) if is_exact else None,
        **settings,
    )


def activation_mode(args: TrainingArguments) -> str | None:
    """Return the Accelerator's ``activation_checkpointing``; None if the model's own method is meant (True), or nothing."""
    given: object = args.activation_checkpointing  # annotated as transformers has it
    return given if isinstance(given, str) else None


def data_seed(args: TrainingArguments) -> int:
    """Return the seed for the training data's order."""
    return args.seed if args.data_seed is None else args.data_seed


def set_seeds(args: TrainingArguments) -> None:
    """Seed ``random``, numpy and torch identically on all ranks, so that they create identical models."""
    random.seed(args.seed)
    np.random.seed(args.seed % 2**32)
    torch.manual_seed(args.seed)
    if args.full_determinism:
        torch.use_deterministic_algorithms(True)


def accumulation_options(args: TrainingArguments) -> dict[str, Any]:
    """Return ``accelerator_config["gradient_accumulation_kwargs"]``.

    Raises:
        ConfigError: a key is unknown, or ``num_steps`` conflicts with ``gradient_accumulation_steps``.
    """
    given = dict(_accelerator_config(args).get("gradient_accumulation_kwargs") or {})
    for name in given:
        _check_key(name, _ACCUMULATION, "accelerator_config['gradient_accumulation_kwargs']")
    num_steps, own = given.get("num_steps"), args.gradient_accumulation_steps
    if num_steps is not None and own not in (1, num_steps):
        raise ConfigError(
            f"gradient_accumulation_steps={own} conflicts with num_steps={num_steps} in accelerator_config",
            where="TrainingArguments.gradient_accumulation_steps",
            do="set only gradient_accumulation_steps",
        )
    return given


def _accelerator_config(args: TrainingArguments) -> dict[str, Any]:
    given = args.accelerator_config or {}
    if isinstance(given, dict):
        return given
    if isinstance(given, type):
        raise ConfigError(
            f"accelerator_config is the class {given.__name__}, not an instance of it",
            where="TrainingArguments.accelerator_config",
            do=f"pass {given.__name__}(), or a dict",
        )
    return {name: value for name, value in vars(given).items() if not name.startswith("_")}


def _check_key(name: str, choices: tuple[str, ...], setting: str) -> None:
    if name not in choices:
        raise ConfigError(
            f"{setting} has no key {name!r}",
            where="TrainingArguments.accelerator_config",
            do=suggest(name, choices, otherwise=f"use one of {', '.join(choices)}"),
        )


def _set_tf32(wanted: bool, device: torch.device) -> None:
    """Allow or forbid TF32 in this process.

    Raises:
        ConfigError: TF32 is requested, but the device does not support it.
    """
    if wanted and not has_tf32(device):
        raise ConfigError(
            f"tf32=True needs an NVIDIA Ampere GPU or newer, but the device is {device.type}",
            where="TrainingArguments.tf32",
            do="remove it, or set bf16=True",
        )
    torch.set_float32_matmul_precision("high" if wanted else "highest")
    torch.backends.cudnn.allow_tf32 = wanted


def _ddp_kwargs(args: TrainingArguments, model: nn.Module | None) -> DistributedDataParallelKwargs:
    find_unused = args.ddp_find_unused_parameters
    if find_unused is None:
        # As in transformers. Activation checkpointing of its models does not work with the search for unused parameters.
        # (The second name is that of transformers before 5; later versions warn of it.)
        names = ("is_activation_checkpointing", "is_gradient_checkpointing")
        name = next((name for name in names if hasattr(type(model), name)), None)
        checkpoints = None if name is None else getattr(model, name)
        find_unused = checkpoints is None or not (
            checkpoints or args.activation_checkpointing not in (None, False, "none")
        )
    options = {
        "find_unused_parameters": find_unused,
        "bucket_cap_mb": args.ddp_bucket_cap_mb,
        "broadcast_buffers": args.ddp_broadcast_buffers,
        "static_graph": args.ddp_static_graph,
    }
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    return DistributedDataParallelKwargs(**given)
