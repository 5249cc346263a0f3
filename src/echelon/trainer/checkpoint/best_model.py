"""Tracks the best model so far by a metric, and loads its checkpoint at the end of training."""

from __future__ import annotations

from collections.abc import Callable, Set
from pathlib import Path
from typing import Any

from echelon.accelerator.checkpoint.folders import require_whole
from echelon.base.errors import ConfigError
from echelon.base.logging import get_logger
from echelon.base.warnings import warn
from echelon.trainer.arguments.enums import SaveStrategy
from echelon.trainer.checkpoint.checkpoint_folders import PREFIX, remove_last
from echelon.trainer.checkpoint.resume_point import best_folder, load_model_from
from echelon.trainer.hooks import TrainerHooks

__all__ = [
    "load_best",
    "metric_for_best",
    "point_to_best",
    "remove_last_checkpoint",
    "update_best_metric",
    "warn_of_unsaved_best",
]

logger = get_logger(__name__)


def update_best_metric(hooks: TrainerHooks, metrics: dict[str, float]) -> bool:
    """Record an evaluation's metric if it is the best so far, and return whether it is."""
    if hooks.args.metric_for_best_model is None:
        return False
    args, state, value = hooks.args, hooks.state, metric_for_best(hooks, metrics)
    if state.best_metric is None:  # so that nan never becomes the best
        state.best_metric = float("-inf" if args.greater_is_better else "inf")
    is_better = value > state.best_metric if args.greater_is_better else value < state.best_metric
    if is_better:
        state.best_metric = value
        if args.save_strategy != SaveStrategy.NO:  # otherwise it has no checkpoint
            state.best_global_step = state.global_step
    return is_better


def metric_for_best(hooks: TrainerHooks, metrics: dict[str, float]) -> float:
    """Return the value of ``metric_for_best_model``, which may be written without the prefix ``eval_``.

    Raises:
        ConfigError: the evaluation did not return this metric.
    """
    name = hooks.args.metric_for_best_model or "loss"
    name = name if name.startswith("eval_") else f"eval_{name}"
    if name not in metrics:
        raise ConfigError(
            f"metric_for_best_model={hooks.args.metric_for_best_model!r}, but the evaluation returned no {name!r}; "
            f"it returned {', '.join(metrics)}",
            where="TrainingArguments.metric_for_best_model",
            do="set metric_for_best_model to one of these metrics, or return it from compute_metrics",
        )
    return metrics[name]


def point_to_best(hooks: TrainerHooks, run_dir: Path, *, saved: Set[int]) -> None:
    """Set ``state.best_model_checkpoint`` if this run has saved the best step.

    Args:
        hooks: the Trainer's hooks.
        run_dir: directory of the checkpoints, as the arguments name it. It may hold another run's, too.
        saved: the steps that this run has saved, or is saving.
    """
    best = hooks.state.best_global_step
    if best is not None and best in saved:
        hooks.state.best_model_checkpoint = str(run_dir / f"{PREFIX}{best}")


def warn_of_unsaved_best(hooks: TrainerHooks) -> None:
    """Warn if the best step has no checkpoint, so that ``load_best_model_at_end`` cannot load it."""
    best, step = hooks.state.best_model_checkpoint, hooks.state.best_global_step
    if step is not None and (best is None or Path(best).name != f"{PREFIX}{step}"):
        loaded = hooks.state.global_step if best is None else Path(best).name.removeprefix(PREFIX)
        warn(
            f"the best evaluation ({hooks.args.metric_for_best_model} {hooks.state.best_metric:.6g}) was at step {step}, "
            f"which this run has not saved, so load_best_model_at_end leaves the model of step {loaded}. Save at every evaluation: set save_steps to "
            "eval_steps, or save_strategy='best'"
        )


def load_best(hooks: TrainerHooks, output_dir: Path, *, report: Callable[[Any], None]) -> None:
    """Load the weights of the best checkpoint, if there is one.

    Args:
        hooks: the Trainer's hooks.
        output_dir: current directory of the checkpoints, which may have been moved since they were saved.
        report: called with the names of missing and unexpected weights.

    Collective: call on every rank.

    Raises:
        CheckpointError: the checkpoint is damaged.
    """
    best = hooks.state.best_model_checkpoint
    if best is not None:
        logger.info("loading the best model from %s (%s)", best, hooks.state.best_metric)
        folder = best_folder(hooks.args, output_dir, best)
        require_whole(hooks.accelerator.world, folder)
        load_model_from(hooks.model, folder, report=report, select=hooks.accelerator.session.select_tensors)


def remove_last_checkpoint(hooks: TrainerHooks, output_dir: Path) -> None:
    """Delete the last checkpoint if it is not the best one and ``save_total_limit=1`` kept it only for resuming."""
    best = hooks.state.best_model_checkpoint
    if hooks.args.should_save and best is not None and hooks.args.save_total_limit == 1:
        remove_last(output_dir, best=best)
