"""Callbacks: the training events, the handler that dispatches them, and the callbacks that control the loop."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from echelon.accelerator.process import require_all_ranks
from echelon.base.errors import ConfigError, UsageError
from echelon.base.logging import get_logger
from echelon.base.messages.translation import gettext as _, gettext_noop as N_
from echelon.trainer.arguments.enums import IntervalStrategy, SaveStrategy
from echelon.trainer.state import ExportableState, TrainerControl, TrainerState

if TYPE_CHECKING:
    from echelon.trainer.arguments.training_arguments import TrainingArguments

logger = get_logger(__name__)

_Control = TrainerControl | None


class TrainerCallback:
    """Base class for callbacks; override the events you need.

    Every event receives ``(args, state, control)`` and the keyword arguments ``model``, ``processing_class`` (also
    passed as ``tokenizer``), ``optimizer``, ``lr_scheduler``, ``train_dataloader`` and ``eval_dataloader``; ``on_log``
    also receives ``logs``, and ``on_evaluate`` and ``on_predict`` receive ``metrics``. Modify ``control`` or return a
    new one.
    """

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> _Control:
        """Called at the end of the Trainer's constructor."""
        return None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> _Control:
        """Called at the start of training."""
        return None

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> _Control:
        """Called at the end of training."""
        return None

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> _Control:
        """Called at the start of an epoch."""
        return None

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> _Control:
        """Called at the end of an epoch."""
        return None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> _Control:
        """Called before an update's first forward pass."""
        return None

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> _Control:
        """Called after each backward pass in an update except the last."""
        return None

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> _Control:
        """Called after gradient clipping, before the optimizer steps."""
        return None

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> _Control:
        """Called after the optimizer step, before the gradients are zeroed."""
        return None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> _Control:
        """Called at the end of an update; request a log, an evaluation, a checkpoint or the end of training here."""
        return None

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> _Control:
        """Called after an evaluation."""
        return None

    def on_predict(self, args: Any, state: Any, control: Any, metrics: Any, **kwargs: Any) -> _Control:
        """Called after a prediction."""
        return None

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> _Control:
        """Called after a checkpoint is saved."""
        return None

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> _Control:
        """Called after metrics are logged."""
        return None

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> _Control:
        """Called after each batch of an evaluation or prediction."""
        return None

    def on_push_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> _Control:
        """Called before an upload."""
        return None


EVENTS = tuple(name for name in vars(TrainerCallback) if name.startswith("on_"))


class CallbackHandler:
    """Dispatches each event to the callbacks that override it, in order.

    The Trainer calls the ``on_...`` methods, which clear the event's flags in ``control`` and call ``call_event``; a
    subclass may override both. Callbacks receive ``model``, ``optimizer`` and the other attributes, which the Trainer
    keeps up to date. ``callbacks`` may be edited at any time.
    """

    def __init__(
        self,
        callbacks: Iterable[TrainerCallback | type[TrainerCallback]],
        model: Any,
        processing_class: Any,
        optimizer: Any,
        lr_scheduler: Any,
    ) -> None:
        self.model = model
        self.processing_class = processing_class
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.train_dataloader: Any = None
        self.eval_dataloader: Any = None
        self.callbacks: list[TrainerCallback] = []
        self._listeners: dict[str, list[TrainerCallback]] = {event: [] for event in EVENTS}
        self._listed: list[TrainerCallback] = []  # the callbacks that _listeners was made from
        for callback in callbacks:
            self.add_callback(callback)
        if not any(isinstance(one, DefaultFlowCallback) for one in self.callbacks):
            logger.warning(
                N_(
                    "DefaultFlowCallback is not among the callbacks (%s), so nothing triggers logging, evaluation, saving "
                    "or the end of training; add it with trainer.add_callback(DefaultFlowCallback)"
                ),
                ", ".join(type(one).__name__ for one in self.callbacks) or "none",
            )

    def add_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Add a callback, given as an instance or a class; warn if one of the same class is already present.

        Raises:
            UsageError: it has no method that is named like an event.
        """
        added = callback() if isinstance(callback, type) else callback
        if not any(hasattr(added, event) for event in EVENTS):
            raise UsageError(
                f"{getattr(callback, '__name__', None) or type(callback).__name__} is not a callback: it has no method such as "
                "on_step_end",
                where="Trainer(callbacks=)",
                do="pass objects or classes that derive from TrainerCallback",
            )
        if any(type(other) is type(added) for other in self.callbacks):
            warnings.warn(
                _(
                    "a {kind} has already been added (callbacks: {names}); both will be called",
                    kind=type(added).__name__,
                    names=", ".join(type(one).__name__ for one in self.callbacks),
                ),
                stacklevel=3,
            )
        self.callbacks.append(added)

    def pop_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> TrainerCallback | None:
        """Remove and return a callback or, given a class, its first instance; return None if nothing matches."""
        for other in self.callbacks:
            if isinstance(other, callback) if isinstance(callback, type) else other == callback:
                self.callbacks.remove(other)
                return other
        return None

    def remove_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Remove a callback or, given a class, its first instance."""
        self.pop_callback(callback)

    @property
    def callback_list(self) -> str:
        """The callbacks' names, one per line."""
        return "\n".join(type(callback).__name__ for callback in self.callbacks)

    def restore(self, states: Mapping[str, Any]) -> None:
        """Restore the callbacks from ``TrainerState.stateful_callbacks``; warn about missing callbacks.

        Args:
            states: class name -> ``{"args": constructor arguments, "attributes": values set afterwards}``, or a list of
                such dicts for several callbacks of the same class.
        """
        for name, saved in states.items():
            here = [position for position, one in enumerate(self.callbacks) if type(one).__name__ == name]
            parts = saved if isinstance(saved, list) else [saved]
            if name == "TrainerControl":
                continue
            if len(here) < len(parts):
                logger.warning(
                    N_("the checkpoint holds state for %d %s, but this run has %d"), len(parts), name, len(here)
                )
            for position, part in zip(here, parts):
                callback = type(self.callbacks[position])(**part.get("args", {}))
                for attribute, value in part.get("attributes", {}).items():
                    setattr(callback, attribute, value)
                self.callbacks[position] = callback

    def call_event(
        self, event: str, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any
    ) -> TrainerControl:
        """Dispatch ``event`` and return the resulting control."""
        if self.callbacks != self._listed:
            self._find_listeners()
        for listener in self._listeners[event]:
            answer = getattr(listener, event)(
                args,
                state,
                control,
                model=self.model,
                processing_class=self.processing_class,
                tokenizer=self.processing_class,  # old callbacks require it
                optimizer=self.optimizer,
                lr_scheduler=self.lr_scheduler,
                train_dataloader=self.train_dataloader,
                eval_dataloader=self.eval_dataloader,
                **more,
            )
            if answer is not None:
                control = answer
        return control

    def listeners_of(self, event: str) -> list[TrainerCallback]:
        """Return the callbacks that override ``event``."""
        if self.callbacks != self._listed:
            self._find_listeners()
        return self._listeners[event]

    def _find_listeners(self) -> None:
        # Only if the callbacks have changed, not at every step: most override two or three of the sixteen events.
        self._listed = list(self.callbacks)
        self._listeners = {event: [one for one in self.callbacks if _listens(one, event)] for event in EVENTS}

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> TrainerControl:
        """Dispatch the event."""
        return self.call_event("on_init_end", args, state, control, **kwargs)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> TrainerControl:
        """Dispatch the event; clear should_training_stop."""
        control.should_training_stop = False
        return self.call_event("on_train_begin", args, state, control, **kwargs)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> TrainerControl:
        """Dispatch the event."""
        return self.call_event("on_train_end", args, state, control, **kwargs)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> TrainerControl:
        """Dispatch the event; clear should_epoch_stop."""
        control.should_epoch_stop = False
        return self.call_event("on_epoch_begin", args, state, control, **kwargs)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> TrainerControl:
        """Dispatch the event."""
        return self.call_event("on_epoch_end", args, state, control, **kwargs)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> TrainerControl:
        """Dispatch the event; clear should_log, should_evaluate and should_save."""
        control.should_log = control.should_evaluate = control.should_save = False
        return self.call_event("on_step_begin", args, state, control, **kwargs)

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> TrainerControl:
        """Dispatch the event."""
        return self.call_event("on_substep_end", args, state, control, **kwargs)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> TrainerControl:
        """Dispatch the event."""
        return self.call_event("on_pre_optimizer_step", args, state, control, **kwargs)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> TrainerControl:
        """Dispatch the event."""
        return self.call_event("on_optimizer_step", args, state, control, **kwargs)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> TrainerControl:
        """Dispatch the event."""
        return self.call_event("on_step_end", args, state, control, **kwargs)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> TrainerControl:
        """Dispatch the event; clear should_evaluate."""
        control.should_evaluate = False
        return self.call_event("on_evaluate", args, state, control, metrics=metrics, **kwargs)

    def on_predict(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> TrainerControl:
        """Dispatch the event."""
        return self.call_event("on_predict", args, state, control, metrics=metrics, **kwargs)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> TrainerControl:
        """Dispatch the event; clear should_save."""
        control.should_save = False
        return self.call_event("on_save", args, state, control, **kwargs)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> TrainerControl:
        """Dispatch the event; clear should_log."""
        control.should_log = False
        return self.call_event("on_log", args, state, control, logs=logs, **kwargs)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> TrainerControl:
        """Dispatch the event."""
        return self.call_event("on_prediction_step", args, state, control, **kwargs)

    def on_push_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> TrainerControl:
        """Dispatch the event."""
        return self.call_event("on_push_begin", args, state, control, **kwargs)


def _listens(callback: object, event: str) -> bool:
    """Return whether ``callback`` overrides ``event``.

    The base class may also be transformers' ``TrainerCallback``, whose methods are empty too.
    """
    if event in getattr(callback, "__dict__", ()):
        return True
    for owner in type(callback).__mro__:
        if event in vars(owner):
            return owner.__name__ != "TrainerCallback"
    return False


class DefaultFlowCallback(TrainerCallback):
    """Triggers logging, evaluation, saving and the end of training as the arguments specify."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> TrainerControl:
        """Request the actions that are due after this step."""
        step = state.global_step
        if step == 1 and args.logging_first_step:
            control.should_log = True
        if args.logging_strategy == IntervalStrategy.STEPS and step % state.logging_steps == 0:
            control.should_log = True
        evaluates = args.eval_strategy == IntervalStrategy.STEPS
        if evaluates and step % state.eval_steps == 0 and args.eval_delay <= step:
            control.should_evaluate = True
        saves = args.save_strategy == SaveStrategy.STEPS
        if saves and state.save_steps > 0 and step % state.save_steps == 0:
            control.should_save = True
        if step >= state.max_steps:
            control.should_training_stop = True
            if evaluates and step % state.eval_steps != 0 and args.eval_delay <= step:
                control.should_evaluate = True
            if saves:
                control.should_save = True
        return control  # type: ignore[no-any-return]

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> TrainerControl:
        """Request the actions that are due after this epoch."""
        if args.logging_strategy == IntervalStrategy.EPOCH:
            control.should_log = True
        if args.eval_strategy == IntervalStrategy.EPOCH and args.eval_delay <= state.epoch:
            control.should_evaluate = True
        if args.save_strategy == SaveStrategy.EPOCH:
            control.should_save = True
        return control  # type: ignore[no-any-return]


class EarlyStoppingCallback(TrainerCallback, ExportableState):
    """Stops training when ``metric_for_best_model`` has stopped improving.

    Args:
        early_stopping_patience: training stops after this many consecutive evaluations without improvement.
        early_stopping_threshold: smallest change that counts as an improvement.
    """

    def __init__(self, early_stopping_patience: int = 1, early_stopping_threshold: float | None = 0.0) -> None:
        self.early_stopping_patience = early_stopping_patience
        self.early_stopping_threshold = early_stopping_threshold or 0.0
        self.early_stopping_patience_counter = 0

    def state(self) -> dict[str, Any]:
        """Return the state to save in trainer_state.json."""
        return {
            "args": {
                "early_stopping_patience": self.early_stopping_patience,
                "early_stopping_threshold": self.early_stopping_threshold,
            },
            "attributes": {"early_stopping_patience_counter": self.early_stopping_patience_counter},
        }

    def check_metric_value(self, args: Any, state: Any, control: Any, metric_value: float) -> None:
        """Count the evaluations since the last improvement; overrides may use another rule."""
        better = np.greater if args.greater_is_better else np.less
        best = state.best_metric
        if best is None or (better(metric_value, best) and abs(metric_value - best) > self.early_stopping_threshold):
            self.early_stopping_patience_counter = 0
        else:
            self.early_stopping_patience_counter += 1

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Check that the arguments define a metric and enable evaluation."""
        if not args.load_best_model_at_end:
            logger.warning(
                N_(
                    "EarlyStoppingCallback is used without load_best_model_at_end=True, so training ends with the last "
                    "model, not the best one"
                )
            )
        if args.metric_for_best_model is None or args.eval_strategy == IntervalStrategy.NO:
            raise ConfigError(
                "EarlyStoppingCallback needs a metric and evaluations, but "
                f"metric_for_best_model={args.metric_for_best_model!r} and eval_strategy={str(args.eval_strategy)!r}",
                where="EarlyStoppingCallback",
                do="set metric_for_best_model, for example to 'loss', and eval_strategy to 'steps' or 'epoch'",
            )

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        """Compare the metric with the best value so far, which the Trainer updates afterwards."""
        name = args.metric_for_best_model
        name = name if name.startswith("eval_") else f"eval_{name}"
        value = (metrics or {}).get(name)
        if value is None:
            # Another of several evaluation sets may have it; the Trainer raises if none has.
            logger.warning(
                N_("early stopping ignores this evaluation, because its metrics do not include %s (metrics: %s)"),
                name,
                ", ".join(metrics or {}),
            )
            return
        self.check_metric_value(args, state, control, value)
        if self.early_stopping_patience_counter >= self.early_stopping_patience:
            if not control.should_training_stop:
                # A warning is visible by default.
                logger.warning(
                    N_(
                        "early stopping ends the training at step %d: %s has not improved on %s in the last %d evaluation(s)"
                    ),
                    state.global_step,
                    name,
                    state.best_metric,
                    self.early_stopping_patience_counter,
                )
            control.should_training_stop = True


# ---- callbacks that request something on some ranks only ---------------------------------------------------------------

# For each event that clears flags of the control: the flags.
_CLEARED_FLAGS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "on_train_begin": ("should_training_stop",),
        "on_epoch_begin": ("should_epoch_stop",),
        "on_step_begin": ("should_log", "should_evaluate", "should_save"),
        "on_evaluate": ("should_evaluate",),
        "on_save": ("should_save",),
        "on_log": ("should_log",),
    }
)
_FLAGS = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")
# Evaluations may have another number of batches on each rank.
_UNCHECKED = frozenset({"on_init_end", "on_prediction_step", "on_predict", "on_push_begin", "on_train_end"})
_ADVICE = (
    "Decide from what is equal on all ranks, such as state.global_step and metrics, and not from state.is_world_process_zero, a "
    "clock or this rank's own data; or share one rank's decision first (echelon.distributed.agree)"
)


def usual_flags(
    listeners: list[TrainerCallback], event: str, args: Any, state: Any, control: TrainerControl
) -> Mapping[str, bool] | None:
    """Return the flags after ``event`` if no callback but the default one changed them; None if there is no other callback.

    All ranks have these flags, because they follow from the arguments and the step.
    """
    if event in _UNCHECKED or all(type(one) is DefaultFlowCallback for one in listeners):
        return None
    usual = copy.copy(control)
    for flag in _CLEARED_FLAGS.get(event, ()):
        setattr(usual, flag, False)
    for listener in listeners:
        if type(listener) is DefaultFlowCallback:
            usual = getattr(listener, event)(args, state, usual) or usual
    return {flag: getattr(usual, flag) for flag in _FLAGS}


def require_agreement(event: str, usual: Mapping[str, bool], control: TrainerControl) -> None:
    """If callbacks have changed flags in ``event``, wait for the ranks whose callbacks did the same.

    Logging, evaluating, saving and stopping need all ranks: a rank that does so alone would wait for the others forever, and they for
    it in the next step.

    Collective: on the ranks where flags were changed.

    Raises:
        DesyncError: the callbacks of another rank did not change the same flags.
    """
    changed = [f"{flag} = {getattr(control, flag)}" for flag in _FLAGS if getattr(control, flag) != usual[flag]]
    if changed:
        require_all_ranks(f"setting control.{', control.'.join(changed)} in {event}", advice=_ADVICE)
