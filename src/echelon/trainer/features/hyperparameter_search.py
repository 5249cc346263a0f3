"""``hyperparameter_search``: trains with different settings and returns the best ones."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from echelon.base.errors import ConfigError, UsageError
from echelon.base.logging import get_logger
from echelon.base.optional import require
from echelon.trainer.arguments.training_arguments import set_arguments
from echelon.trainer.session import TrainerSession
from echelon.trainer.trainer_methods import TrainerMethods

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


def search(
    trainer: TrainerMethods,
    session: TrainerSession,
    *,
    space: Callable[[Any], Mapping[str, Any]] | None,
    objective: Callable[[dict[str, float]], Any],
    num_trials: int,
    direction: str | list[str],
    backend: Any,
    name_of: Callable[[Any], str] | None,
    options: Mapping[str, Any],
) -> BestRun | list[BestRun] | None:
    """Implement ``Trainer.hyperparameter_search`` with optuna; the training arguments are restored afterwards.

    Collective: call on every rank; rank zero chooses the settings.

    Raises:
        ConfigError: the backend is not supported, or ``n_jobs`` is not 1.
    """
    _check(trainer, backend, options)
    optuna: Any = require("optuna", extra="optuna", purpose="hyperparameter_search")
    before = copy.copy(vars(trainer.args))
    shared = _Search(trainer, session, optuna, objective, name_of)

    def run_on_all_ranks(trial: Any) -> Any:
        values = dict((space or default_space)(trial))
        shared.broadcast(("trial", (trial.number, values, trial.params)))
        return shared.run_trial(trial, values)

    bare: Any = None  # the result without the study
    try:
        if not trainer.accelerator.is_main_process:
            return shared.follow()
        optimize = {name: options[name] for name in _OPTIMIZE_OPTIONS if name in options}
        several = {"directions": direction} if isinstance(direction, list) else {"direction": direction}
        study = optuna.create_study(**several, **{k: v for k, v in options.items() if k not in _OPTIMIZE_OPTIONS})
        try:
            study.optimize(run_on_all_ranks, n_trials=num_trials, **optimize)
            if isinstance(direction, list):
                bare = [BestRun(str(best.number), best.values, best.params) for best in study.best_trials]
                return [run._replace(run_summary=study) for run in bare]
            bare = BestRun(str(study.best_trial.number), study.best_trial.value, study.best_trial.params)
            best: BestRun = bare._replace(run_summary=study)
            return best
        finally:
            shared.broadcast(("end", bare))
    finally:
        vars(trainer.args).update(before)
        session.trial = None
        trainer.create_accelerator_and_postprocess()


@dataclass
class Trial:
    """One trial in a search; reports evaluations to optuna, which may prune the trial."""

    search: _Search
    trial: Any
    """The optuna trial; on ranks other than zero, a ``FixedTrial`` with the same parameters."""
    values: Mapping[str, Any]
    name: str
    """Name of its directory."""
    objective: Any = None
    """The last evaluation's objective."""

    def report_evaluation(self, metrics: dict[str, float], *, step: int) -> None:
        """Report the objective to optuna; end the trial on all ranks if optuna prunes it.

        Collective: call on every rank.
        """
        self.objective = self.search.objective(metrics)
        prunes = False
        if self.search.trainer.accelerator.is_main_process and not isinstance(self.objective, (list, tuple)):
            self.trial.report(self.objective, step)
            prunes = self.trial.should_prune()
        if self.search.broadcast(prunes):
            raise self.search.optuna.TrialPruned()


@dataclass(frozen=True)
class _Search:
    """Shares rank zero's decisions with all ranks: settings, pruning and the end of the search."""

    trainer: TrainerMethods
    session: TrainerSession
    optuna: Any
    objective: Callable[[dict[str, float]], Any]
    name_of: Callable[[Any], str] | None

    def follow(self) -> BestRun | list[BestRun] | None:
        """Run the trials that rank zero sends; return the search's result, or None if the search failed."""
        while (message := self.broadcast(None))[0] == "trial":
            number, values, params = message[1]
            try:
                self.run_trial(self.optuna.trial.FixedTrial(params, number), values)
            except self.optuna.TrialPruned:
                logger.debug("trial %d was pruned", number)
        found: BestRun | list[BestRun] | None = message[1]
        return found

    def run_trial(self, trial: Any, values: Mapping[str, Any]) -> Any:
        """Train with the settings in ``values`` and return the objective."""
        trainer = self.trainer
        set_arguments(trainer.args, values)
        name = f"run-{trial.number}" if self.name_of is None else self.name_of(trial)
        running = self.session.trial = Trial(self, trial, values, name)
        trainer.accelerator.free_memory()
        trainer.create_accelerator_and_postprocess()  # precision, seed and other settings may have changed
        trainer.train(trial=trial)
        return self.objective(trainer.evaluate()) if running.objective is None else running.objective

    def broadcast(self, value: Any) -> Any:
        """Return rank zero's ``value``.

        Collective: call on every rank.
        """
        return self.trainer.accelerator.gather_for_metrics([value], use_gather_object=True)[0]


def _check(trainer: TrainerMethods, backend: Any, options: Mapping[str, Any]) -> None:
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
    if trainer.model_init is None:
        raise UsageError(
            "hyperparameter_search needs a new model for each trial, but the Trainer has no model_init",
            where="Trainer.hyperparameter_search",
            do="pass model_init=, a function that returns a new model, to the Trainer instead of model=",
        )
