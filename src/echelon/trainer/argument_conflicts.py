"""Checks for conflicting arguments of a Trainer."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.utils.data import IterableDataset

from echelon.base.errors import UsageError
from echelon.base.lengths import length_of
from echelon.base.logging import get_logger
from echelon.base.warnings import warn
from echelon.trainer.arguments.enums import IntervalStrategy
from echelon.trainer.hooks import TrainerHooks
from echelon.trainer.signatures import takes
from echelon.trainer.training_plan import no_length_error

__all__ = ["check_arguments", "check_model", "choose_processing_class"]

logger = get_logger(__name__)


def check_model(model: nn.Module | None, model_init: Any) -> None:
    """Check that ``Trainer(...)`` received exactly one of ``model`` and ``model_init``.

    Raises:
        UsageError: both or neither were passed.
    """
    if (model is None) == (model_init is None):
        raise UsageError(
            "Trainer needs either model or model_init, but got " + ("neither" if model is None else "both"),
            where="Trainer(model=, model_init=)",
            do="pass one of them",
        )


def check_arguments(hooks: TrainerHooks) -> None:
    """Check the arguments of ``Trainer(...)`` for conflicts.

    Raises:
        UsageError: arguments conflict, or a required one is missing.
    """
    if hooks.model_init is not None and not (hooks.optimizer is None and hooks.lr_scheduler is None):
        raise UsageError(
            "optimizers= belongs to one model, but model_init creates a new model for each call to train()",
            where="Trainer(optimizers=, model_init=)",
            do="pass model= instead of model_init=, or override create_optimizer_and_scheduler",
        )
    if hooks.optimizer_cls_and_kwargs is not None and hooks.optimizer is not None:
        raise UsageError(
            "optimizers and optimizer_cls_and_kwargs both define the optimizer",
            where="Trainer(optimizers=, optimizer_cls_and_kwargs=)",
            do="pass one of them",
        )
    if hooks.args.eval_strategy != IntervalStrategy.NO and hooks.eval_dataset is None:
        raise UsageError(
            f"eval_strategy={str(hooks.args.eval_strategy)!r}, but there is no eval_dataset",
            where="Trainer(eval_dataset=)",
            do="pass eval_dataset, or set eval_strategy='no'",
        )
    if hooks.args.max_steps > 0 and hooks.args.num_train_epochs > 0:
        logger.info("max_steps=%d is set, so num_train_epochs has no effect", hooks.args.max_steps)
    strategy = hooks.args.train_sampling_strategy
    if strategy in ("group_by_length", "batch_rebalance") and isinstance(hooks.train_dataset, IterableDataset):
        logger.warning(
            "train_sampling_strategy=%r is ignored, because an IterableDataset determines the order of its samples "
            "itself",
            strategy,
        )
    batch_metrics = hooks.args.batch_eval_metrics and hooks.compute_metrics is not None
    if batch_metrics and not takes(hooks.compute_metrics, "compute_result"):  # type: ignore[arg-type]
        raise UsageError(
            "batch_eval_metrics=True calls compute_metrics for each batch, but compute_metrics "
            "has no parameter compute_result",
            where="Trainer(compute_metrics=)",
            do=(
                "add the parameter compute_result; when it is True (on the last batch), return the metrics over all "
                "batches"
            ),
        )
    if hooks.train_dataset is not None and length_of(hooks.train_dataset) < 0 and hooks.args.max_steps <= 0:
        raise no_length_error()


def choose_processing_class(processing_class: Any, tokenizer: Any) -> Any:
    """Return the processing class, which may have been passed under its old name ``tokenizer``.

    Raises:
        UsageError: ``tokenizer`` and ``processing_class`` were both passed and differ.
    """
    if tokenizer is None:
        return processing_class
    warn("Trainer(tokenizer=) was renamed to processing_class=")
    if processing_class is not None and processing_class is not tokenizer:
        raise UsageError(
            "tokenizer and processing_class conflict: tokenizer is the old name of processing_class",
            where="Trainer(processing_class=, tokenizer=)",
            do="pass only processing_class=",
        )
    return tokenizer
