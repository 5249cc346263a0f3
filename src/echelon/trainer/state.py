"""TrainerState (a run's progress, saved in trainer_state.json) and TrainerControl (callback requests)."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from echelon.trainer.arguments.training_arguments import TrainingArguments


class ExportableState:
    """Base class for callbacks whose state is saved in ``trainer_state.json``; override ``state``."""

    def state(self) -> dict[str, Any]:
        """Return ``{"args": constructor arguments, "attributes": values to set afterwards}``."""
        raise NotImplementedError(f"{type(self).__name__} must define state()")

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Any:
        """Create a callback from what ``state`` returned."""
        instance = cls(**state["args"])
        for name, value in state["attributes"].items():
            setattr(instance, name, value)
        return instance


@dataclass
class TrainerState:
    """A run's counters and log history, which are saved with each checkpoint."""

    epoch: float | None = 0
    global_step: int = 0
    max_steps: int = 0
    logging_steps: int = 500
    eval_steps: int = 500
    save_steps: int = 500
    train_batch_size: int | None = None
    num_train_epochs: int = 0
    num_input_tokens_seen: int = 0
    total_flos: float = 0
    log_history: list[dict[str, Any]] = field(default_factory=list)
    best_metric: float | None = None
    best_global_step: int | None = None
    best_model_checkpoint: str | None = None
    is_local_process_zero: bool = True
    is_world_process_zero: bool = True
    is_hyper_param_search: bool = False
    trial_name: str | None = None
    trial_params: dict[str, Any] | None = None
    stateful_callbacks: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.log_history is None:
            self.log_history = []
        if not isinstance(self.stateful_callbacks, dict):  # a list of callbacks, as transformers passes it, or None
            self.stateful_callbacks = callback_states(self.stateful_callbacks or [])

    def save_to_json(self, json_path: str | Path) -> None:
        """Write the state to ``json_path``."""
        text = json.dumps(asdict(self), indent=2, sort_keys=True) + "\n"
        Path(json_path).write_text(text, encoding="utf-8")

    @classmethod
    def load_from_json(cls, json_path: str | Path) -> TrainerState:
        """Read a state; unknown keys are ignored."""
        values = json.loads(Path(json_path).read_text(encoding="utf-8"))
        known = {item.name for item in fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in known})

    def init_training_references(self, trainer: Any, max_steps: int, num_train_epochs: int, trial: Any) -> None:
        """Set the length of the training run, the process's role, and the name and values of a search's trial."""
        if trainer.hp_name is not None and trial is not None:
            self.trial_name = trainer.hp_name(trial)
        self.trial_params = None if trial is None else dict(getattr(trial, "params", trial))
        self.max_steps, self.num_train_epochs = max_steps, num_train_epochs
        self.is_local_process_zero = trainer.is_local_process_zero()
        self.is_world_process_zero = trainer.is_world_process_zero()

    def compute_steps(self, args: TrainingArguments, max_steps: int) -> None:
        """Set the intervals from ``args``; an interval below 1 is a fraction of ``max_steps``, rounded up."""
        self.logging_steps = _interval(args.logging_steps, max_steps)
        self.save_steps = _interval(args.save_steps, max_steps)
        if args.eval_steps is not None:
            self.eval_steps = _interval(args.eval_steps, max_steps)


@dataclass
class TrainerControl(ExportableState):
    """Requests from callbacks to the loop; a callback modifies the control that it receives, or returns a new one."""

    should_training_stop: bool = False
    should_epoch_stop: bool = False
    should_save: bool = False
    should_evaluate: bool = False
    should_log: bool = False

    def state(self) -> dict[str, Any]:
        """Return the state to save in trainer_state.json."""
        return {"args": asdict(self), "attributes": {}}

    def _new_training(self) -> None:
        """Clear requests at the start of a training run."""
        self.should_training_stop = False

    def _new_epoch(self) -> None:
        """Clear requests at the start of an epoch."""
        self.should_epoch_stop = False

    def _new_step(self) -> None:
        """Clear requests at the start of a step."""
        self.should_save = self.should_evaluate = self.should_log = False


def callback_states(callbacks: Iterable[Any]) -> dict[str, Any]:
    """Return the state of each stateful callback by class name, or a list of states for several of the same class."""
    states: dict[str, Any] = {}
    for callback in callbacks:
        state = getattr(callback, "state", None)  # optional in callbacks, as in transformers
        if not callable(state):
            continue
        name = type(callback).__name__
        if name in states:
            others = states[name] if isinstance(states[name], list) else [states[name]]
            states[name] = [*others, state()]
        else:
            states[name] = state()
    return states


def _interval(steps: float, max_steps: int) -> int:
    return math.ceil(max_steps * steps) if 0 < steps < 1 else int(steps)
