"""Tracks the best model so far by a metric, and loads its checkpoint at the end of training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from echelon.accelerator.checkpoint.folders import require_whole
from echelon.base.errors import ConfigError
from echelon.base.logging import get_logger
from echelon.trainer.arguments.enums import SaveStrategy
from echelon.trainer.checkpoint.checkpoint_folders import remove_last
from echelon.trainer.checkpoint.resume_point import best_folder, load_model_from
from echelon.trainer.hooks import TrainerHooks

__all__ = ["load_best", "metric_for_best", "update_best_metric", "remove_last_checkpoint"]

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
