"""``hyperparameter_search``: trains with different settings and returns the best ones."""

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
_OPTIMIZE_OPTIONS = ("timeout", "n_jobs", "catch", "callbacks", "gc_after_trial", "show_progress_bar")


class BestRun(NamedTuple):
    """The best run in a search."""

    run_id: str
    objective: float | list[float]
    hyperparameters: dict[str, Any]
    run_summary: Any = None


def default_compute_objective(metrics: Mapping[str, float]) -> float:
    """Return the sum of all metrics except the loss, times and rates, or the evaluation loss if there are none."""
    ignored = ("_runtime", "_per_second", "_model_preparation_time")
    others = {name: value for name, value in metrics.items() if not name.endswith(ignored)}
    loss = others.pop("eval_loss", None)
    others.pop("epoch", None)
    return float(sum(others.values()) if others or loss is None else loss)


def default_space(trial: Any) -> dict[str, Any]:
    """Suggest the learning rate, number of epochs, seed and batch size."""
    return {
        "learning_rate": trial.suggest_float("learning_rate", 1e-6, 1e-4, log=True),
        "num_train_epochs": trial.suggest_int("num_train_epochs", 1, 5),
        "seed": trial.suggest_int("seed", 1, 40),
        "per_device_train_batch_size": trial.suggest_categorical("per_device_train_batch_size", [4, 8, 16, 32, 64]),
    }


def set_arguments(args: Any, values: Mapping[str, Any]) -> None:
    """Set fields in the training arguments.

    Raises:
        ConfigError: a field does not exist.
    """
    for name, value in values.items():
        if not hasattr(args, name):
            raise ConfigError(
                f"hp_space returned {name!r}, which is not a TrainingArguments setting",
                where="Trainer.hyperparameter_search(hp_space=)",
                do="return only TrainingArguments settings; read model parameters from the trial in model_init(trial)",
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
    """Run the trials with optuna; return the best run, or a list of the best runs if there are several
    directions, on every rank.

    The training arguments are restored afterwards.

    Args:
        hooks: the hooks of a Trainer that has a ``model_init``.
        state: holds the running trial.
        space: trial -> settings.
        objective: takes the metrics and returns a number, or one number per direction.
        num_trials: number of trials.
        direction: ``minimize``, ``maximize``, or a list of these.
        backend: ``optuna`` or None.
        name_of: takes an optuna trial and returns its directory name (default: ``run-<number>``).
        options: options for ``optuna.create_study`` and for the study's ``optimize``.

    Collective: call on every rank; rank zero chooses the settings.

    Raises:
        UsageError: the Trainer has no ``model_init``.
        ConfigError: the backend is not supported, or ``n_jobs`` is not 1.
        MissingExtraError: optuna is not installed.
    """
    _check(hooks, backend, options)
    optuna: Any = require("optuna", extra="optuna", purpose="hyperparameter_search")
    before = copy.copy(vars(hooks.args))
    ranks = _Ranks(hooks, state, objective, optuna, name_of=name_of)
    try:
        if not hooks.accelerator.is_main_process:
            return ranks.follow()
        optimize = {name: options[name] for name in _OPTIMIZE_OPTIONS if name in options}
        several = {"directions": direction} if isinstance(direction, list) else {"direction": direction}
        study = optuna.create_study(**several, **{k: v for k, v in options.items() if k not in _OPTIMIZE_OPTIONS})
        found: BestRun | list[BestRun] | None = None
        try:
            study.optimize(ranks.make_objective(space or default_space), n_trials=num_trials, **optimize)
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
    """One trial in a search; reports evaluations to optuna, which may prune the trial."""

    def __init__(self, ranks: _Ranks, trial: Any, values: Mapping[str, Any]) -> None:
        self.trial = trial
        """The optuna trial; on ranks other than zero, a ``FixedTrial`` with the same parameters."""
        self.values = values
        self.name = f"run-{trial.number}"
        """Name of its directory."""
        self.objective: Any = None
        """The last evaluation's objective."""
        self._ranks = ranks

    def report_evaluation(self, metrics: dict[str, float], *, step: int) -> None:
        """Report the objective to optuna; end the trial on all ranks if optuna prunes it.

        Collective: call on every rank.
        """
        self.objective = self.of(metrics)
        prunes = False
        if self._ranks.leads and not isinstance(self.objective, (list, tuple)):
            self.trial.report(self.objective, step)
            prunes = self.trial.should_prune()
        if self._ranks.broadcast(prunes):
            raise self._ranks.optuna.TrialPruned()

    def of(self, metrics: dict[str, float]) -> Any:
        """Return the objective computed from ``metrics``."""
        return self._ranks.objective(metrics)


@dataclass
class SearchState:
    """The search that a Trainer runs."""

    trial: Trial | None = None
    """The running trial; None outside a search."""


class _Ranks:
    """Shares rank zero's decisions with all ranks: settings, pruning and the end of the search."""

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

    def make_objective(self, space: Callable[[Any], Mapping[str, Any]]) -> Callable[[Any], Any]:
        """Return the function that optuna calls on rank zero for each trial."""

        def _run(trial: Any) -> Any:
            values = dict(space(trial))
            self.broadcast(("trial", (trial.number, values, trial.params)))
            return self._run_trial(Trial(self, trial, values))

        return _run

    def follow(self) -> BestRun | list[BestRun] | None:
        """Run the trials that rank zero sends; return the search's result, or None if the search failed."""
        while (message := self.broadcast(None))[0] == "trial":
            number, values, params = message[1]
            trial = self.optuna.trial.FixedTrial(params, number)
            try:
                self._run_trial(Trial(self, trial, values))
            except self.optuna.TrialPruned:
                logger.debug("trial %d was pruned", number)
        found: BestRun | list[BestRun] | None = message[1]
        return found

    def _run_trial(self, trial: Trial) -> Any:
        """Train with the settings in ``trial`` and return the objective."""
        hooks = self._hooks
        set_arguments(hooks.args, trial.values)
        if self._name_of is not None:
            trial.name = self._name_of(trial.trial)
        self._state.trial = trial
        hooks.accelerator.free_memory()
        hooks.create_accelerator_and_postprocess()  # precision, seed and other settings may have changed
        hooks.train(trial=trial.trial)
        if trial.objective is None:
            trial.objective = trial.of(hooks.evaluate())
        return trial.objective

    def end(self, found: BestRun | list[BestRun] | None) -> None:
        """Send the search result, without the optuna study, to the other ranks."""
        if isinstance(found, BestRun):
            self.broadcast(("end", BestRun(*found[:3])))
        else:
            self.broadcast(("end", found and [BestRun(*one[:3]) for one in found]))

    def broadcast(self, value: Any) -> Any:
        """Return rank zero's ``value``.

        Collective: call on every rank.
        """
        return self._hooks.accelerator.gather_for_metrics([value], use_gather_object=True)[0]


def _check(hooks: TrainerHooks, backend: Any, options: Mapping[str, Any]) -> None:
    name = str(getattr(backend, "value", backend or "optuna"))
    if name in _OTHER_BACKENDS:
        raise ConfigError(
            f"backend={name!r} is not supported, because it runs trials in separate processes",
            where="Trainer.hyperparameter_search",
            do=f"use backend='optuna', or have {name} call a function that creates and runs a Trainer",
        )
    if name != "optuna":
        raise ConfigError(
            f"backend={name!r} is unknown", where="Trainer.hyperparameter_search", do="use backend='optuna'"
        )
    if options.get("n_jobs", 1) != 1:
        raise ConfigError(
            f"n_jobs={options['n_jobs']} is not supported, because a Trainer trains one model at a time",
            where="Trainer.hyperparameter_search",
            do=(
                "remove n_jobs; to run trials in parallel, start the program several times with the same storage= and "
                "study_name="
            ),
        )
    if hooks.model_init is None:
        raise UsageError(
            "hyperparameter_search needs a new model for each trial, but the Trainer has no model_init",
            where="Trainer.hyperparameter_search",
            do="pass model_init=, a function that returns a new model, to the Trainer instead of model=",
        )
