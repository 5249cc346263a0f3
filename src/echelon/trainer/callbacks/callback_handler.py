"""Callbacks: the events of a training, the handler that tells them, and the callbacks that steer the loop."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from echelon.base.errors import ConfigError
from echelon.base.logging import get_logger
from echelon.trainer.arguments.enums import IntervalStrategy, SaveStrategy
from echelon.trainer.state import TrainerControl, TrainerState

if TYPE_CHECKING:
    from echelon.trainer.arguments.training_arguments import TrainingArguments

__all__ = [
    "EVENTS",
    "CallbackHandler",
    "DefaultFlowCallback",
    "EarlyStoppingCallback",
    "TrainerCallback",
]

logger = get_logger(__name__)

_Control = TrainerControl | None


class TrainerCallback:
    """Override the events that you want to hear of.

    Every event gets ``(args, state, control)`` and the keyword arguments ``model``, ``processing_class`` (also as
    ``tokenizer``), ``optimizer``, ``lr_scheduler``, ``train_dataloader``, ``eval_dataloader``; ``logs`` in ``on_log``,
    ``metrics`` in ``on_evaluate`` and ``on_predict``. Change ``control``, or return another one.
    """

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> _Control:
        """Hear that the Trainer is made."""
        return None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> _Control:
        """Hear that the training begins."""
        return None

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> _Control:
        """Hear that the training is over."""
        return None

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> _Control:
        """Hear that a pass over the data begins."""
        return None

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> _Control:
        """Hear that a pass over the data is over."""
        return None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> _Control:
        """Hear that the first forward pass of an update comes."""
        return None

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> _Control:
        """Hear that a backward pass is done which is not the last of its update."""
        return None

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> _Control:
        """See the gradients of an update, clipped."""
        return None

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> _Control:
        """Hear that the optimizer has stepped; the gradients are still there."""
        return None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> _Control:
        """Hear that an update is done; ask for a log, an evaluation, a checkpoint, or the end here."""
        return None

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> _Control:
        """Hear that an evaluation is done."""
        return None

    def on_predict(self, args: Any, state: Any, control: Any, metrics: Any, **kwargs: Any) -> _Control:
        """Hear that a prediction is done."""
        return None

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> _Control:
        """Hear that a checkpoint is written."""
        return None

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> _Control:
        """See the numbers that are logged."""
        return None

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> _Control:
        """Hear that a batch of an evaluation is done."""
        return None

    def on_push_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> _Control:
        """Hear that an upload begins."""
        return None


EVENTS = tuple(name for name in vars(TrainerCallback) if name.startswith("on_"))
# What each event has answered, and so takes back before or after it is told.
_CLEARED_BEFORE: Mapping[str, tuple[str, ...]] = {
    "on_train_begin": ("should_training_stop",),
    "on_epoch_begin": ("should_epoch_stop",),
    "on_step_begin": ("should_log", "should_evaluate", "should_save"),
    "on_log": ("should_log",),
    "on_evaluate": ("should_evaluate",),
    "on_save": ("should_save",),
}


# What subclasses of older programs hand over by position: handler.on_log(args, state, control, logs).
_FOURTH: Mapping[str, str] = {"on_log": "logs", "on_evaluate": "metrics", "on_predict": "metrics"}


class CallbackHandler:
    """Tells every event to the callbacks that listen to it, in their order; every event is also a method.

    ``model``, ``optimizer`` and the other attributes are what the callbacks get; the Trainer keeps them up to date.
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
        self._listeners: dict[str, list[Callable[..., Any]]] = {event: [] for event in EVENTS}
        for callback in callbacks:
            self.add_callback(callback)

    def add_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Add a callback, or make one of a class; a second one of the same class is added with a warning."""
        added = callback() if isinstance(callback, type) else callback
        if any(type(other) is type(added) for other in self.callbacks):
            warnings.warn(
                f"a {type(added).__name__} is among the callbacks already ({self.callback_list}); both are called",
                stacklevel=3,
            )
        self.callbacks.append(added)
        self._find_listeners()

    def pop_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> TrainerCallback | None:
        """Take a callback out and return it; the first of its class, if a class is given; None when there is none."""
        for other in self.callbacks:
            if other is callback or type(other) is callback:
                self.callbacks.remove(other)
                self._find_listeners()
                return other
        return None

    def remove_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Take a callback out."""
        self.pop_callback(callback)

    @property
    def callback_list(self) -> str:
        """The names of the callbacks, for messages."""
        return ", ".join(type(callback).__name__ for callback in self.callbacks)

    def restore(self, states: Mapping[str, Any]) -> None:
        """Give callbacks what ``TrainerState.stateful_callbacks`` holds of them; one that is not here is told.

        Args:
            states: class name -> ``{"args": of its constructor, "attributes": set after it}``, or a list of these for
                several of one class.
        """
        for name, saved in states.items():
            here = [position for position, one in enumerate(self.callbacks) if type(one).__name__ == name]
            parts = saved if isinstance(saved, list) else [saved]
            if name == "TrainerControl":
                continue
            if len(here) < len(parts):
                logger.warning("the checkpoint holds the state of %d %s, and there are %d", len(parts), name, len(here))
            for position, part in zip(here, parts):
                callback = type(self.callbacks[position])(**part.get("args", {}))
                for attribute, value in part.get("attributes", {}).items():
                    setattr(callback, attribute, value)
                self.callbacks[position] = callback
        self._find_listeners()

    def _find_listeners(self) -> None:
        # Once here, not once a step: most callbacks hear of two or three of the sixteen events.
        self._listeners = {
            event: [getattr(callback, event) for callback in self.callbacks if _listens(callback, event)]
            for event in EVENTS
        }

    def __getattr__(self, event: str) -> Callable[..., TrainerControl]:
        if event not in EVENTS:
            raise AttributeError(f"CallbackHandler has no attribute {event!r}")

        def _call(args: Any, state: Any, control: Any, *fourth: Any, **more: Any) -> TrainerControl:
            return self.call_event(event, args, state, control, **dict(zip([_FOURTH.get(event, "")], fourth)), **more)

        return _call

    def call_event(
        self, event: str, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any
    ) -> TrainerControl:
        """Tell ``event`` to its listeners and return the control that results."""
        for flag in _CLEARED_BEFORE.get(event, ()):
            setattr(control, flag, False)
        for listener in self._listeners[event]:
            answer = listener(
                args,
                state,
                control,
                model=self.model,
                processing_class=self.processing_class,
                tokenizer=self.processing_class,  # callbacks of older tutorials require it
                optimizer=self.optimizer,
                lr_scheduler=self.lr_scheduler,
                train_dataloader=self.train_dataloader,
                eval_dataloader=self.eval_dataloader,
                **more,
            )
            if answer is not None:
                control = answer
        return control


def _listens(callback: object, event: str) -> bool:
    """Tell whether ``callback`` does something at ``event``; the empty methods of a base class do not count.

    A callback written for transformers derives from its TrainerCallback, which is as empty as ours.
    """
    if event in getattr(callback, "__dict__", ()):
        return True
    for owner in type(callback).__mro__:
        if event in vars(owner):
            return owner.__name__ != "TrainerCallback"
    return False


class DefaultFlowCallback(TrainerCallback):
    """Asks for logs, evaluations, checkpoints and the end, as the arguments say."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> TrainerControl:
        """Look at the step that is done."""
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
            if evaluates and step % state.eval_steps != 0:
                control.should_evaluate = True
            if saves:
                control.should_save = True
        return control  # type: ignore[no-any-return]

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> TrainerControl:
        """Look at the pass that is done."""
        if args.logging_strategy == IntervalStrategy.EPOCH:
            control.should_log = True
        if args.eval_strategy == IntervalStrategy.EPOCH and args.eval_delay <= state.epoch:
            control.should_evaluate = True
        if args.save_strategy == SaveStrategy.EPOCH:
            control.should_save = True
        return control  # type: ignore[no-any-return]


class EarlyStoppingCallback(TrainerCallback):
    """Ends the training when ``metric_for_best_model`` has not become better for some evaluations.

    Args:
        early_stopping_patience: how many evaluations in a row without a better value.
        early_stopping_threshold: by how much a value must be better to count.
    """

    def __init__(self, early_stopping_patience: int = 1, early_stopping_threshold: float | None = 0.0) -> None:
        self.early_stopping_patience = early_stopping_patience
        self.early_stopping_threshold = early_stopping_threshold or 0.0
        self.early_stopping_patience_counter = 0

    def state(self) -> dict[str, Any]:
        """Return what trainer_state.json keeps of this object."""
        return {
            "args": {
                "early_stopping_patience": self.early_stopping_patience,
                "early_stopping_threshold": self.early_stopping_threshold,
            },
            "attributes": {"early_stopping_patience_counter": self.early_stopping_patience_counter},
        }

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Check that there is something to watch."""
        if args.metric_for_best_model is None or args.eval_strategy == IntervalStrategy.NO:
            raise ConfigError(
                "EarlyStoppingCallback watches a metric, but "
                f"metric_for_best_model={args.metric_for_best_model!r} and eval_strategy={str(args.eval_strategy)!r}",
                where="EarlyStoppingCallback",
                do="set metric_for_best_model (such as 'loss') and eval_strategy ('steps' or 'epoch')",
            )

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        """Compare with the best value so far; the Trainer notes a new best one after this."""
        name = args.metric_for_best_model
        name = name if name.startswith("eval_") else f"eval_{name}"
        value = (metrics or {}).get(name)
        if value is None:
            # One of several evaluation sets; the Trainer raises when none of them has it.
            logger.warning("early stopping: no %s among the metrics %s", name, ", ".join(metrics or {}))
            return
        better = np.greater if args.greater_is_better else np.less
        best = state.best_metric
        if best is None or (better(value, best) and abs(value - best) > self.early_stopping_threshold):
            self.early_stopping_patience_counter = 0
        else:
            self.early_stopping_patience_counter += 1
        if self.early_stopping_patience_counter >= self.early_stopping_patience:
            control.should_training_stop = True
