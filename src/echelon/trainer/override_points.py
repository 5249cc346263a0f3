"""The private methods of transformers' Trainer that subclasses override: the user's version, or the default of a component."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from echelon.base.environ import is_strict
from echelon.base.errors import UsageError
from echelon.base.warnings import warn
from echelon.compat.transformers_names import ARGUMENTS_MEMBERS, HANDLER_MEMBERS, TRAINER_MEMBERS
from echelon.trainer.arguments.training_arguments import TrainingArguments
from echelon.trainer.callbacks.callback_handler import CallbackHandler
from echelon.trainer.checkpoint.checkpoint_folders import checkpoint_format

__all__ = ["NOT_CALLED", "NOT_READ_IN_ARGUMENTS", "OverridePoints", "check_attributes", "check_overrides"]

_Method = TypeVar("_Method", bound=Callable[..., Any] | None)

_SHARDED_AT_LOAD = "it belongs to models that transformers shards while it loads them, which the Trainer does not train"
_NO_AXIS = "the Trainer has no tensor, context or sequence parallelism: its size is always 1"
_OWN_FORMAT = "it writes a file of transformers' checkpoints, and this run saves echelon's own (set checkpoint_format='transformers')"

NOT_CALLED: Mapping[str, str] = MappingProxyType(
    {
        "_defer_fsdp_gradient_reduction": _SHARDED_AT_LOAD,
        "_sync_replicated_trainable_parameters": _SHARDED_AT_LOAD,
        "_mixed_mesh_grad_norm": _SHARDED_AT_LOAD,
        "_has_mixed_mesh_grads": _SHARDED_AT_LOAD,
        "_tune_save_checkpoint": "it belongs to searches with Ray Tune, which are not supported",
        "get_cp_size": _NO_AXIS,
        "get_sp_size": _NO_AXIS,
        "get_tp_size": _NO_AXIS,
    }
)
"""Methods of transformers' Trainer that echelon's has for callers but never calls itself, or does not have; with the reason."""

NOT_READ_IN_ARGUMENTS: Mapping[str, str] = MappingProxyType(
    {
        "device": "the device comes from the Accelerator; choose it with use_cpu or with the launcher",
        "parallel_mode": "the engine of the Accelerator decides how work is shared; see the argument engine",
    }
)
"""Members of transformers' TrainingArguments that echelon's has for scripts, but the Trainer does not read; with the reason."""

_STATE_FILES = ("_save_optimizer_and_scheduler", "_save_rng_state", "_save_scaler")


class OverridePoints:
    """Finds the user's overrides of private methods, and keeps the default implementations that need a running component.

    The component that implements a method passes its implementation to ``bind`` and calls the result: the override, or the
    implementation itself, so that a Trainer without overrides makes no extra call. The method of the Trainer's base class,
    which an override calls with ``super()``, calls ``default``.

    Args:
        trainer: the Trainer.
        base: class whose methods count as not overridden.
    """

    def __init__(self, trainer: Any, base: type[Any]) -> None:
        self._trainer = trainer
        self._base = base
        self._defaults: dict[str, Callable[..., Any]] = {}
        self.overridden: frozenset[str] = frozenset()
        """Names of the overridden private methods, as of the last ``refresh``; for code that runs for every batch."""

    def refresh(self) -> None:
        """Find out again what is overridden."""
        known = (name for name in TRAINER_MEMBERS if callable(getattr(self._base, name, None)))
        self.overridden = frozenset(name for name in known if self.is_overridden(name))

    def is_overridden(self, name: str) -> bool:
        """Return whether a subclass or the object itself replaces the method."""
        return name in vars(self._trainer) or getattr(type(self._trainer), name) is not getattr(self._base, name)

    def method(self, name: str) -> Callable[..., Any]:
        """Return the method of the Trainer."""
        found: Callable[..., Any] = getattr(self._trainer, name)
        return found

    def choose(self, name: str, plain: _Method) -> _Method:
        """Return the user's override, or ``plain`` without one."""
        return getattr(self._trainer, name) if self.is_overridden(name) else plain

    def bind(self, name: str, default: _Method) -> _Method:
        """Make ``default`` the implementation of the method, and return the user's override, or ``default`` without one."""
        assert default is not None
        self._defaults[name] = default
        return self.choose(name, default)

    def default(self, name: str) -> Callable[..., Any]:
        """Return the implementation of the method.

        Raises:
            UsageError: the component that implements it is not running.
        """
        found = self._defaults.get(name)
        if found is None:
            raise UsageError(
                f"{name}() works only while the Trainer trains or saves, which it does not do now",
                where=f"{type(self._trainer).__name__}.{name}",
                do="call it in a callback or in an overridden method of the Trainer",
            )
        return found

    def release(self) -> None:
        """Forget the implementations, and with them the components of the last training run."""
        self._defaults.clear()


def check_overrides(trainer: Any, base: type[Any]) -> None:
    """Name what subclasses define that transformers reads and echelon does not.

    Args:
        trainer: the Trainer, constructed.
        base: echelon's Trainer.

    Raises:
        UsageError: there is such a name and the program runs with ``--strict``.
    """
    own_format = checkpoint_format(trainer.args) != "transformers"
    not_called = {**NOT_CALLED, **(dict.fromkeys(_STATE_FILES, _OWN_FORMAT) if own_format else {})}
    found = [
        *_ignored(trainer, base, TRAINER_MEMBERS, not_called),
        *_ignored(trainer.args, TrainingArguments, ARGUMENTS_MEMBERS, NOT_READ_IN_ARGUMENTS),
        *_ignored(trainer.callback_handler, CallbackHandler, HANDLER_MEMBERS, {}),
    ]
    _report(found, trainer)


def check_attributes(trainer: Any, base: type[Any], known: frozenset[str]) -> None:
    """Name the attributes that a subclass or a script has set since the construction and echelon does not read.

    Args:
        trainer: the Trainer.
        base: echelon's Trainer.
        known: the attributes that echelon sets itself.

    Raises:
        UsageError: there is such a name and the program runs with ``--strict``.
    """
    added = vars(trainer).keys() & TRAINER_MEMBERS - known - {"_eval_dataloaders"}
    unread = sorted(name for name in added if name in NOT_CALLED or not hasattr(base, name))
    why = {name: NOT_CALLED.get(name, "echelon has nothing of this name") for name in unread}
    _report([f"{type(trainer).__name__}().{name} ({why[name]})" for name in unread], trainer)


def _report(found: list[str], trainer: Any) -> None:
    if not found:
        return
    text = "the Trainer of transformers uses these definitions, and echelon's does not: " + "; ".join(found)
    if is_strict():
        raise UsageError(
            text,
            where=f"{type(trainer).__name__}(...)",
            do="remove the definitions, or start the program without --strict",
        )
    warn(text)


def _ignored(instance: Any, base: type[Any], members: frozenset[str], not_read: Mapping[str, str]) -> list[str]:
    """Return a line for each of ``members`` that a subclass of ``base`` defines and echelon does not read."""
    lines: dict[str, str] = {}
    for owner in type(instance).__mro__:
        if owner is base or owner.__module__.partition(".")[0] in ("echelon", "transformers", "builtins"):
            continue
        for name in vars(owner).keys() & members:
            is_known = hasattr(base, name) or name in vars(instance)
            if name not in not_read and is_known:
                continue
            why = not_read.get(name, "echelon has nothing of this name")
            lines.setdefault(name, f"{owner.__name__}.{name} ({why})")
    return [lines[name] for name in sorted(lines)]
