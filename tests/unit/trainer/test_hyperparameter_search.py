"""The Trainer beside optuna's search."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from echelon.base.errors import ConfigError, MissingExtraError, UsageError
from echelon.trainer import (
    BestRun,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from echelon.trainer.features.hyperparameter_search import default_compute_objective
from tests.trainer_models import DATA, Line, arguments

PLAIN: dict[str, Any] = {"optim": "sgd", "lr_scheduler_type": "constant", "max_grad_norm": 0}


def _args(folder: Path | str, **options: Any) -> TrainingArguments:
    return arguments(folder, **{"per_device_train_batch_size": 10, **options})


def _loss_after_one_step(rate: float, start: float) -> float:
    """Of y = w x + b on y = 2 x, x = 0 ... 9: the gradients are 2 * 28.5 (w - 2) and 2 * 4.5 (w - 2)."""
    weight, bias = start - rate * 57 * (start - 2), -rate * 9 * (start - 2)
    return sum((weight * x + bias - 2 * x) ** 2 for x in range(10)) / 10


def test_a_search_finds_the_best_settings_and_leaves_the_arguments_as_they_were(tmp_path: Path) -> None:
    optuna = pytest.importorskip("optuna")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    started = []

    class Looks(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            started.append((args.learning_rate, state.is_hyper_param_search, state.trial_name, state.trial_params))

    args = _args(tmp_path, save_strategy="epoch", **PLAIN)
    trainer = Trainer(
        model_init=lambda trial: Line(0.0 if trial is None else trial.params.get("start", 0.0)),
        args=args,
        train_dataset=DATA,
        eval_dataset=DATA,
        callbacks=[Looks()],
    )

    def space(trial: Any) -> dict[str, Any]:
        trial.suggest_categorical("start", [1.0])  # of the model: read in model_init
        return {"learning_rate": trial.suggest_categorical("learning_rate", [0.001, 0.01, 0.015])}

    grid = optuna.samplers.GridSampler({"learning_rate": [0.001, 0.01, 0.015], "start": [1.0]}, seed=0)
    best = trainer.hyperparameter_search(space, n_trials=3, sampler=grid, hp_name=lambda trial: f"try-{trial.number}")
    assert isinstance(best, BestRun)
    expected = {rate: _loss_after_one_step(rate, 1.0) for rate in (0.001, 0.01, 0.015)}
    assert best.hyperparameters == {"start": 1.0, "learning_rate": min(expected, key=expected.__getitem__)}
    assert best.objective == pytest.approx(min(expected.values()), rel=1e-4)
    found = {trial.params["learning_rate"]: trial.value for trial in best.run_summary.trials}
    assert found == pytest.approx(expected, rel=1e-4)  # float32
    assert [name for _, _, name, _ in started] == ["try-0", "try-1", "try-2"]
    assert all(is_search and values == {"learning_rate": rate} for rate, is_search, _, values in started)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["try-0", "try-1", "try-2"]
    assert (tmp_path / "try-0" / "checkpoint-1").is_dir()
    assert args.learning_rate == 5e-5
    trainer.train()  # as before the search
    assert started[-1][1:] == (False, None, None)


def test_a_trial_of_no_use_is_ended_early(tmp_path: Path) -> None:
    optuna = pytest.importorskip("optuna")
    optuna.logging.set_verbosity(optuna.logging.ERROR)

    class EndsAll(optuna.pruners.BasePruner):  # type: ignore[misc]
        def prune(self, study: Any, trial: Any) -> bool:
            return bool(trial.number)

    args = _args(tmp_path, eval_strategy="epoch", num_train_epochs=3, **PLAIN)
    trainer = Trainer(model_init=Line, args=args, train_dataset=DATA, eval_dataset=DATA)
    best = trainer.hyperparameter_search(lambda trial: {}, n_trials=2, pruner=EndsAll())
    assert isinstance(best, BestRun)
    assert best.run_id == "0"
    assert [trial.state.name for trial in best.run_summary.trials] == ["COMPLETE", "PRUNED"]
    assert [len(trial.intermediate_values) for trial in best.run_summary.trials] == [3, 1]


def test_what_a_search_cannot_do_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fixed = Trainer(Line(), _args(tmp_path), train_dataset=DATA)
    with pytest.raises(UsageError, match="the Trainer has no model_init"):
        fixed.hyperparameter_search()
    trainer = Trainer(model_init=Line, args=_args(tmp_path), train_dataset=DATA, eval_dataset=DATA)
    for backend, message in (("ray", "runs trials in separate processes"), ("grid", "'grid' is unknown")):
        with pytest.raises(ConfigError, match=message):
            trainer.hyperparameter_search(backend=backend)
    with pytest.raises(ConfigError, match="n_jobs=2"):
        trainer.hyperparameter_search(n_jobs=2)
    with pytest.raises(ConfigError, match="hp_space returned 'learning_rat', which is not a TrainingArguments setting"):
        trainer.train(trial={"learning_rat": 1.0})
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(MissingExtraError, match='pip install "optuna>='):
        trainer.hyperparameter_search()


def test_the_objective_is_the_loss_or_the_sum_of_the_metrics() -> None:
    times = {"eval_runtime": 3.0, "eval_samples_per_second": 4.0, "epoch": 1.0}
    assert default_compute_objective({"eval_loss": 0.5, **times}) == 0.5
    assert default_compute_objective({"eval_loss": 0.5, "eval_f1": 0.25, "eval_recall": 0.5, **times}) == 0.75
