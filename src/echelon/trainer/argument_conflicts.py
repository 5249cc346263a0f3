"""Which arguments of a Trainer cannot work together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from echelon.base.errors import UsageError
from echelon.base.lengths import length_of
from echelon.trainer.arguments.enums import IntervalStrategy
from echelon.trainer.signatures import takes
from echelon.trainer.training_plan import no_length

if TYPE_CHECKING:
    from echelon.trainer.trainer import Trainer

__all__ = ["check_arguments"]


def check_arguments(trainer: Trainer, model: nn.Module | None, optimizers: tuple[Any, Any]) -> None:
    """Raise for arguments of ``Trainer(...)`` that cannot work together.

    Raises:
        UsageError: which, and what to do.
    """
    if (model is None) == (trainer.model_init is None):
        raise UsageError(
            "Trainer needs a model or model_init, and was given " + ("neither" if model is None else "both"),
            where="Trainer(model=, model_init=)",
            do="give one of them",
        )
    if trainer.model_init is not None and any(part is not None for part in optimizers):
        raise UsageError(
            "optimizers belong to one model, and model_init makes a new one for each training",
            where="Trainer(optimizers=, model_init=)",
            do="give model= in place of model_init=, or override create_optimizer_and_scheduler",
        )
    if trainer.optimizer_cls_and_kwargs is not None and trainer.optimizer is not None:
        raise UsageError(
            "optimizers and optimizer_cls_and_kwargs both say what the optimizer is",
            where="Trainer(optimizers=, optimizer_cls_and_kwargs=)",
            do="give one of them",
        )
    if trainer.args.eval_strategy != IntervalStrategy.NO and trainer.eval_dataset is None:
        raise UsageError(
            f"eval_strategy={str(trainer.args.eval_strategy)!r}, but there is no eval_dataset",
            where="Trainer(eval_dataset=)",
            do="give an eval_dataset, or set eval_strategy='no'",
        )
    batch_metrics = trainer.args.batch_eval_metrics and trainer.compute_metrics is not None
    if batch_metrics and not takes(trainer.compute_metrics, "compute_result"):  # type: ignore[arg-type]
        raise UsageError(
            "batch_eval_metrics=True calls compute_metrics for each batch, and it does not learn which is the last",
            where="Trainer(compute_metrics=)",
            do="give it a parameter compute_result: False: add to what you keep; True: return the metrics of all",
        )
    if trainer.train_dataset is not None and length_of(trainer.train_dataset) < 0 and trainer.args.max_steps <= 0:
        raise no_length()
