"""Which arguments of a Trainer cannot work together."""

from __future__ import annotations

from typing import Any

from torch import nn

from echelon.base.errors import UsageError
from echelon.base.lengths import length_of
from echelon.base.warnings import warn
from echelon.trainer.arguments.enums import IntervalStrategy
from echelon.trainer.hooks import TrainerHooks
from echelon.trainer.signatures import takes
from echelon.trainer.training_plan import no_length

__all__ = ["check_arguments", "choose_processing_class"]


def check_arguments(hooks: TrainerHooks, model: nn.Module | None, optimizers: tuple[Any, Any]) -> None:
    """Raise for arguments of ``Trainer(...)`` that cannot work together.

    Raises:
        UsageError: which, and what to do.
    """
    if (model is None) == (hooks.model_init is None):
        raise UsageError(
            "Trainer needs a model or model_init, and was given " + ("neither" if model is None else "both"),
            where="Trainer(model=, model_init=)",
            do="give one of them",
        )
    if hooks.model_init is not None and any(part is not None for part in optimizers):
        raise UsageError(
            "optimizers belong to one model, and model_init makes a new one for each training",
            where="Trainer(optimizers=, model_init=)",
            do="give model= in place of model_init=, or override create_optimizer_and_scheduler",
        )
    if hooks.optimizer_cls_and_kwargs is not None and hooks.optimizer is not None:
        raise UsageError(
            "optimizers and optimizer_cls_and_kwargs both say what the optimizer is",
            where="Trainer(optimizers=, optimizer_cls_and_kwargs=)",
            do="give one of them",
        )
    if hooks.args.eval_strategy != IntervalStrategy.NO and hooks.eval_dataset is None:
        raise UsageError(
            f"eval_strategy={str(hooks.args.eval_strategy)!r}, but there is no eval_dataset",
            where="Trainer(eval_dataset=)",
            do="give an eval_dataset, or set eval_strategy='no'",
        )
    batch_metrics = hooks.args.batch_eval_metrics and hooks.compute_metrics is not None
    if batch_metrics and not takes(hooks.compute_metrics, "compute_result"):  # type: ignore[arg-type]
        raise UsageError(
            "batch_eval_metrics=True calls compute_metrics for each batch, and it does not learn which is the last",
            where="Trainer(compute_metrics=)",
            do="give it a parameter compute_result: False: add to what you keep; True: return the metrics of all",
        )
    if hooks.train_dataset is not None and length_of(hooks.train_dataset) < 0 and hooks.args.max_steps <= 0:
        raise no_length()


def choose_processing_class(processing_class: Any, tokenizer: Any) -> Any:
    """Return the processing class that was given, also under its old name ``tokenizer``.

    Raises:
        UsageError: two different ones.
    """
    if tokenizer is None:
        return processing_class
    warn("Trainer(tokenizer=) is called processing_class= now")
    if processing_class is not None and processing_class is not tokenizer:
        raise UsageError(
            "tokenizer and processing_class are the same setting with two values",
            where="Trainer(processing_class=, tokenizer=)",
            do="keep processing_class= only",
        )
    return tokenizer
