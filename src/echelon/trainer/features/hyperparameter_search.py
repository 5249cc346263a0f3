"""``hyperparameter_search``: train with different settings, and return those that gave the best evaluation."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from echelon.base.errors import ConfigError, UsageError
from echelon.base.logging import get_logger
from echelon.base.optional import require
from echelon.trainer.hooks import TrainerHooks

__all__ = ["BestRun", "SearchState", "Trial", "default_compute_objective", "default_space", "search", "set_arguments"]

logger = get_logger(__name__)

_OTHER_BACKENDS = ("ray", "wandb")
_OF_OPTIMIZE = ("timeout", "n_jobs", "catch", "callbacks", "gc_after_trial", "show_progress_bar")


class BestRun(NamedTuple):
    """The best run of a search."""

    run_id: str
    objective: float | list[float]
    hyperparameters: dict[str, Any]
    run_summary: Any = None


def default_compute_objective(metrics: Mapping[str, float]) -> float:
    """Return the evaluation loss where there are no other metrics, else the sum of these, without times and rates."""
    left_out = ("_runtime", "_per_second", "_model_preparation_time")
    others = {name: value for name, value in metrics.items() if not name.endswith(left_out)}
    loss = others.pop("eval_loss", None)
    others.pop("epoch", None)
    return float(sum(others.values()) if others or loss is None else loss)


def default_space(trial: Any) -> dict[str, Any]:
    """Return a choice of learning rate, passes, seed and batch size."""
    return {
        "learning_rate": trial.suggest_float("learning_rate", 1e-6, 1e-4, log=True),
        "num_train_epochs": trial.suggest_int("num_train_epochs", 1, 5),
        "seed": trial.suggest_int("seed", 1, 40),
        "per_device_train_batch_size": trial.suggest_categorical("per_device_train_batch_size", [4, 8, 16, 32, 64]),
    }


def set_arguments(args: Any, values: Mapping[str, Any]) -> None:
    """Put ``values`` into the arguments.

    Raises:
        ConfigError: there is no such setting.
    """
    for name, value in values.items():
        if not hasattr(args, name):
            raise ConfigError(
                f"hp_space gives {name!r}, which is no setting",
                where="Trainer.hyperparameter_search(hp_space=)",
                do="name the settings of TrainingArguments; what belongs to the model is read in model_init(trial)",
            )
        old = getattr(args, name)
        setattr(args, name, type(old)(value) if isinstance(old, (Enum, float)) else value)


def search(
    hooks: TrainerHooks,
    state: SearchState,
    *,
    space: Callable[[Any], Mapping[str, Any]] | None,
    objective: Callable[[dict[str, float]], Any],
    num_trials: int,
    direction: str | list[str],
    backend: Any,
    name_of: Callable[[Any], str] | None,
    options: Mapping[str, Any],
) -> BestRun | list[BestRun] | None:
    """Run the trials, by optuna, and return the best one (of several directions, a list), on every rank.

    The arguments are afterwards what they were before.

    Args:
        hooks: of a Trainer with ``model_init``.
        state: where the trial that is running is noted.
        space: trial -> settings of the trial.
        objective: metrics -> a number (or one for each direction).
        num_trials: trainings.
        direction: ``minimize``, ``maximize``, or a list of these.
        backend: ``optuna`` or None.
        name_of: optuna's trial -> name of its folder; None: run-<number>.
        options: of ``optuna.create_study`` and of its ``optimize``.

    Collective: every rank; rank zero chooses the settings.

    Raises:
        UsageError: the Trainer has no ``model_init``.
        ConfigError: another backend, or trials at the same time.
        MissingExtraError: optuna is not installed.
    """
    _check(hooks, backend, options)
    optuna: Any = require("optuna", extra="optuna", purpose="hyperparameter_search")
    before = copy.copy(vars(hooks.args))
    ranks = _Ranks(hooks, state, objective, optuna, name_of=name_of)
    try:
        if not hooks.accelerator.is_main_process:
            return ranks.follow()
        optimize = {name: options[name] for name in _OF_OPTIMIZE if name in options}
        several = {"directions": direction} if isinstance(direction, list) else {"direction": direction}
        study = optuna.create_study(**several, **{k: v for k, v in options.items() if k not in _OF_OPTIMIZE})
        found: BestRun | list[BestRun] | None = None
        try:
            study.optimize(ranks.leading(space or default_space), n_trials=num_trials, **optimize)
            if isinstance(direction, list):
                found = [BestRun(str(best.number), best.values, best.params, study) for best in study.best_trials]
            else:
                found = BestRun(str(study.best_trial.number), study.best_trial.value, study.best_trial.params, study)
        finally:
            ranks.end(found)
        return found
    finally:
        vars(hooks.args).update(before)
        state.trial = None
        hooks.create_accelerator_and_postprocess()


class Trial:
    """A trial as the Trainer sees it: its settings, and whether to go on with it after an evaluation."""

    def __init__(self, ranks: _Ranks, trial: Any, values: Mapping[str, Any]) -> None:
        self.trial = trial
        """optuna's; on ranks other than zero, one of the same parameters."""
        self.values = values
        self.name = f"run-{trial.number}"
        """Of its folder."""
        self.objective: Any = None
        """Of the last evaluation."""
        self._ranks = ranks

    def evaluated(self, metrics: dict[str, float], *, step: int) -> None:
        """Tell optuna the objective; all ranks end the trial where it says that going on is of no use.

        Collective: every rank.
        """
        self.objective = self.of(metrics)
        prunes = False
        if self._ranks.leads and not isinstance(self.objective, (list, tuple)):
            self.trial.report(self.objective, step)
            prunes = self.trial.should_prune()
        if self._ranks.shared(prunes):
            raise self._ranks.optuna.TrialPruned()

    def of(self, metrics: dict[str, float]) -> Any:
        """Return the objective of ``metrics``."""
        return self._ranks.objective(metrics)


@dataclass
class SearchState:
    """The search that a Trainer runs."""

    trial: Trial | None = None
    """The trial that is running; None: no search is."""


class _Ranks:
    """What rank zero decides for all: the settings of a trial, its early end, the end of the search."""

    def __init__(
        self,
        hooks: TrainerHooks,
        state: SearchState,
        objective: Callable[[dict[str, float]], Any],
        optuna: Any,
        *,
        name_of: Callable[[Any], str] | None,
    ) -> None:
        self.objective = objective
        self.optuna = optuna
        self.leads = hooks.accelerator.is_main_process
        self._hooks = hooks
        self._state = state
        self._name_of = name_of

    def leading(self, space: Callable[[Any], Mapping[str, Any]]) -> Callable[[Any], Any]:
        """Return what optuna calls for each trial, on rank zero."""

        def _run(trial: Any) -> Any:
            values = dict(space(trial))
            self.shared(("trial", (trial.number, values, trial.params)))
            return self._run_trial(Trial(self, trial, values))

        return _run

    def follow(self) -> BestRun | list[BestRun] | None:
        """Run the trials of rank zero until it ends, and return what it found; None where it failed."""
        while (told := self.shared(None))[0] == "trial":
            number, values, params = told[1]
            trial = self.optuna.trial.FixedTrial(params, number)
            try:
                self._run_trial(Trial(self, trial, values))
            except self.optuna.TrialPruned:
                logger.debug("trial %d was ended early", number)
        found: BestRun | list[BestRun] | None = told[1]
        return found

    def _run_trial(self, trial: Trial) -> Any:
        """Train with the settings of ``trial`` and return its objective."""
        hooks = self._hooks
        set_arguments(hooks.args, trial.values)
        if self._name_of is not None:
            trial.name = self._name_of(trial.trial)
        self._state.trial = trial
        hooks.accelerator.free_memory()
        hooks.create_accelerator_and_postprocess()  # the order of the data, precision and the like may be another one
        hooks.train(trial=trial.trial)
        if trial.objective is None:
            trial.objective = trial.of(hooks.evaluate())
        return trial.objective

    def end(self, found: BestRun | list[BestRun] | None) -> None:
        """Tell the other ranks that there is no further trial, and what was found; optuna's study stays here."""
        if isinstance(found, BestRun):
            self.shared(("end", BestRun(*found[:3])))
        else:
            self.shared(("end", found and [BestRun(*one[:3]) for one in found]))

    def shared(self, value: Any) -> Any:
        """Return rank zero's ``value``.

        Collective: every rank.
        """
        return self._hooks.accelerator.gather_for_metrics([value], use_gather_object=True)[0]


def _check(hooks: TrainerHooks, backend: Any, options: Mapping[str, Any]) -> None:
    name = str(getattr(backend, "value", backend or "optuna"))
    if name in _OTHER_BACKENDS:
        raise ConfigError(
            f"backend={name!r} is not offered: it runs trainings in processes of its own",
            where="Trainer.hyperparameter_search",
            do=f"let {name} call a function that makes a Trainer and trains, or use backend='optuna'",
        )
    if name != "optuna":
        raise ConfigError(
            f"backend={name!r} is not known", where="Trainer.hyperparameter_search", do="use backend='optuna'"
        )
    if options.get("n_jobs", 1) != 1:
        raise ConfigError(
            f"n_jobs={options['n_jobs']}: one Trainer trains one model at a time",
            where="Trainer.hyperparameter_search",
            do="leave it out; start the program several times with the same storage= and study_name= in place of it",
        )
    if hooks.model_init is None:
        raise UsageError(
            "a search trains a new model in each trial, and this Trainer was given one model",
            where="Trainer.hyperparameter_search",
            do="give the Trainer model_init=, a function that returns a new model, in place of model=",
        )
