"""Reports members that a subclass defines for transformers' Trainer and that echelon never reads."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from echelon.base.environ import is_strict
from echelon.base.errors import UsageError
from echelon.base.warnings import warn
from echelon.compat.transformers_names import ARGUMENTS_MEMBERS, HANDLER_MEMBERS, TRAINER_MEMBERS
from echelon.trainer.arguments.training_arguments import TrainingArguments
from echelon.trainer.callbacks.callback_handler import CallbackHandler
from echelon.trainer.checkpoint.checkpoint_folders import checkpoint_format

_SHARDED_AT_LOAD = (
    "it is used with models that transformers shards during loading, which echelon's Trainer does not support"
)
_NO_AXIS = "the sizes come from parallelism_config"
_OWN_FORMAT = (
    "it writes part of a transformers checkpoint, but this run saves echelon checkpoints (set "
    "checkpoint_format='transformers')"
)

NOT_CALLED: Mapping[str, str] = MappingProxyType(
    {
        "_defer_fsdp_gradient_reduction": _SHARDED_AT_LOAD,
        "_sync_replicated_trainable_parameters": _SHARDED_AT_LOAD,
        "_mixed_mesh_grad_norm": _SHARDED_AT_LOAD,
        "_has_mixed_mesh_grads": _SHARDED_AT_LOAD,
        "_tune_save_checkpoint": "it is used in Ray Tune searches, which are not supported",
        "get_cp_size": _NO_AXIS,
        "get_sp_size": _NO_AXIS,
        "get_tp_size": _NO_AXIS,
    }
)
"""For each method of transformers' Trainer that echelon's Trainer lacks or never calls: the reason."""

NOT_READ: Mapping[str, str] = MappingProxyType(
    {
        "_loggers_initialized": "the trackers start in on_train_begin",
        "is_distributed_loading_by_transformers": _SHARDED_AT_LOAD,
        **dict.fromkeys(
            ("is_fsdp_xla_enabled", "is_fsdp_xla_v1_enabled", "is_fsdp_xla_v2_enabled"), "echelon does not run on TPUs"
        ),
    }
)
"""For each attribute that has one value here, which libraries read: the reason."""

_SET_LATER = frozenset({"_eval_dataloaders", "model_preparation_time"})
"""Attributes that the Trainer has only after an evaluation, as in transformers."""

NOT_READ_IN_ARGUMENTS: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(
            ("_no_sync_in_gradient_accumulation", "_setup_devices", "fsdp_plugin_args", "default_optim"),
            "it is derived from the other arguments",
        ),
        "device": "the device comes from the Accelerator; select it with use_cpu or with the launcher",
        "parallel_mode": "the Accelerator's engine decides how training is distributed; see the engine argument",
    }
)
"""For each TrainingArguments member that exists only for scripts and that the Trainer does not read: the reason."""

_STATE_FILES = ("_save_optimizer_and_scheduler", "_save_rng_state", "_save_scaler")


def check_overrides(trainer: Any, base: type[Any]) -> None:
    """Report the members that a subclass defines and that transformers reads but echelon does not.

    Raises:
        UsageError: anything is reported and the program runs with ``--strict``.
    """
    own_format = checkpoint_format(trainer.args) != "transformers"
    not_called = {**NOT_CALLED, **NOT_READ, **(dict.fromkeys(_STATE_FILES, _OWN_FORMAT) if own_format else {})}
    found = [
        *_ignored(trainer, base, TRAINER_MEMBERS, not_called),
        *_ignored(trainer.args, TrainingArguments, ARGUMENTS_MEMBERS, NOT_READ_IN_ARGUMENTS),
        *_ignored(trainer.callback_handler, CallbackHandler, HANDLER_MEMBERS, {}),
    ]
    _report(found, trainer)


def check_attributes(trainer: Any, base: type[Any], known: frozenset[str]) -> None:
    """Report attributes that a subclass or script has set since construction and that echelon does not read.

    Args:
        known: the attributes that echelon sets itself.

    Raises:
        UsageError: anything is reported and the program runs with ``--strict``.
    """
    added = vars(trainer).keys() & TRAINER_MEMBERS - known - _SET_LATER
    reasons = {**NOT_CALLED, **NOT_READ}
    unread = sorted(name for name in added if name in reasons or not hasattr(base, name))
    why = {name: reasons.get(name, "echelon has no member with this name") for name in unread}
    _report([f"{type(trainer).__name__}().{name} ({why[name]})" for name in unread], trainer)


def _report(found: list[str], trainer: Any) -> None:
    if not found:
        return
    text = "transformers' Trainer uses these definitions, but echelon's Trainer does not: " + "; ".join(found)
    if is_strict():
        raise UsageError(
            text,
            where=f"{type(trainer).__name__}(...)",
            do="remove the definitions, or start the program without --strict",
        )
    warn(text)


def _ignored(instance: Any, base: type[Any], members: frozenset[str], not_read: Mapping[str, str]) -> list[str]:
    """Return one line for each name in ``members`` that a subclass of ``base`` defines and echelon does not read."""
    lines: dict[str, str] = {}
    for owner in type(instance).__mro__:
        if owner is base or owner.__module__.partition(".")[0] in ("echelon", "transformers", "builtins"):
            continue
        for name in vars(owner).keys() & members:
            is_known = hasattr(base, name) or name in vars(instance)
            if name not in not_read and is_known:
                continue
            why = not_read.get(name, "echelon has no member with this name")
            lines.setdefault(name, f"{owner.__name__}.{name} ({why})")
    return [lines[name] for name in sorted(lines)]
