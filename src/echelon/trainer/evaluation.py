"""The loop over an evaluation set: losses, predictions and labels of every sample once, and the metrics of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from echelon.base.errors import UsageError
from echelon.base.logging import get_logger
from echelon.trainer import batches
from echelon.trainer.results import EvalLoopOutput, EvalPrediction, as_numbers

if TYPE_CHECKING:
    from echelon.trainer.trainer import Trainer

__all__ = ["run_evaluation"]

logger = get_logger(__name__)


def run_evaluation(
    trainer: Trainer,
    dataloader: Any,
    *,
    description: str,
    prediction_loss_only: bool,
    ignore_keys: list[str] | None,
    metric_key_prefix: str,
) -> EvalLoopOutput:
    """Return what the model says of every sample of ``dataloader``, and the metrics.

    Every sample counts once: where the last batch of a rank is filled with samples that another rank has too, the model
    gets the new ones only, so that the loss, too, is that of a single process.

    Collective: every rank, with the same number of batches.
    """
    args, accelerator = trainer.args, trainer.accelerator
    logger.info("***** Running %s *****", description)
    num_examples = trainer._num_examples(dataloader)
    logger.info("  Num examples%s", ": Unknown" if num_examples is None else f" = {num_examples}")
    logger.info("  Batch size = %d", args.eval_batch_size)

    model = trainer._model_for_evaluation()
    was_training = model.training
    model.eval()
    trainer.callback_handler.eval_dataloader = dataloader
    losses, logits, labels = _Column(args), _Column(args), _Column(args)
    observed, inputs = 0, None
    for inputs in dataloader:
        size = batches.batch_size(inputs)
        rows = _new_rows(trainer, dataloader, size)
        if rows is not None and size is not None:
            inputs = batches.cut(inputs, rows=rows, of=size)
        loss, logit, label = trainer.prediction_step(model, inputs, prediction_loss_only, ignore_keys=ignore_keys)
        if rows is not None and size is not None:
            logit, label = (batches.fill(part, rows=rows, of=size) for part in (logit, label))
        if loss is not None:
            losses.add(accelerator.gather_for_metrics(loss.detach().reshape(1).repeat(size or 1)))
        if logit is not None:
            logit = accelerator.pad_across_processes(logit, dim=1, pad_index=-100)
            if label is not None and trainer.preprocess_logits_for_metrics is not None:
                label = accelerator.pad_across_processes(label, dim=1, pad_index=-100)
            if trainer.preprocess_logits_for_metrics is not None:
                logit = trainer.preprocess_logits_for_metrics(logit, label)
            logits.add(accelerator.gather_for_metrics(logit))
        if label is not None:
            labels.add(accelerator.gather_for_metrics(accelerator.pad_across_processes(label, dim=1, pad_index=-100)))
        observed += size or 0
        trainer._tell("on_prediction_step")
    model.train(was_training)

    predictions, label_ids = logits.joined(), labels.joined()
    metrics: dict[str, Any] = {}
    if trainer.compute_metrics is not None and predictions is not None and label_ids is None:
        _refuse_without_labels(trainer, inputs)
    if trainer.compute_metrics is not None and predictions is not None and label_ids is not None:
        metrics = dict(trainer.compute_metrics(EvalPrediction(predictions=predictions, label_ids=label_ids)))
    metrics = {_prefixed(name, metric_key_prefix): value for name, value in as_numbers(metrics).items()}
    if (mean := losses.mean()) is not None:
        metrics = {f"{metric_key_prefix}_loss": mean, **metrics}
    if num_examples is None:
        num_examples = losses.num_samples or logits.num_samples or observed
    return EvalLoopOutput(predictions=predictions, label_ids=label_ids, metrics=metrics, num_samples=num_examples)


def _new_rows(trainer: Trainer, dataloader: Any, size: int | None) -> int | None:
    """Return how many samples of this rank's batch no other rank has; None when all, or when that cannot be told."""
    if trainer.accelerator.num_processes == 1:
        return None
    last = getattr(dataloader, "last_step", None)  # of a prepared loader; a user's own has no such thing
    if last is None or last.sizes[trainer.accelerator.process_index] != size:
        return None
    new = int(last.real[trainer.accelerator.process_index])
    # With none of its own the batch runs all the same: models may talk in their forward; gathering leaves it out.
    return new if 0 < new < (size or 0) else None


def _refuse_without_labels(trainer: Trainer, inputs: Any) -> None:
    """Raise where metrics were asked for and cannot be computed; a prediction need not have labels."""
    if trainer._is_predicting:
        return
    seen = ", ".join(map(str, inputs)) if isinstance(inputs, Mapping) else f"a {type(inputs).__name__}"
    raise UsageError(
        f"compute_metrics needs labels, and the batches have none: {seen} "
        f"(label_names: {', '.join(trainer.label_names) or 'none'})",
        where="Trainer(compute_metrics=)",
        do="name the label column 'labels', or set label_names to its name",
    )


class _Column:
    """One kind of output, batch by batch."""

    def __init__(self, args: Any) -> None:
        self._every = args.eval_accumulation_steps
        self._joins = args.eval_do_concat_batches
        self._parts: list[Any] = []
        self._on_device = 0
        self.num_samples = 0

    def add(self, part: Any) -> None:
        """Keep a batch; on the device, until eval_accumulation_steps of them are moved to the CPU."""
        self._parts.append(part)
        self.num_samples += batches.batch_size(part) or 0
        self._on_device += 1
        if self._every is not None and self._on_device >= self._every:
            self._parts[-self._on_device :] = [
                batches.to_device(kept, torch.device("cpu")) for kept in self._parts[-self._on_device :]
            ]
            self._on_device = 0

    def joined(self) -> Any:
        """Return the batches as numpy arrays: joined, or a list; None when there are none."""
        if not self._parts:
            return None
        if not self._joins:
            return [batches.to_numpy(part) for part in self._parts]
        try:
            return batches.to_numpy(
                batches.concatenate([batches.to_device(p, torch.device("cpu")) for p in self._parts])
            )
        except (RuntimeError, TypeError) as error:
            raise UsageError(
                f"the predictions of {len(self._parts)} batches cannot be joined: {error}",
                where="TrainingArguments.eval_do_concat_batches",
                do="set eval_do_concat_batches=False, or let preprocess_logits_for_metrics make them of one shape",
            ) from error

    def mean(self) -> float | None:
        """Return the mean of all rows, in float64; None when there are none."""
        if not self._parts:
            return None
        return float(torch.cat([part.cpu() for part in self._parts]).double().mean())


def _prefixed(name: str, prefix: str) -> str:
    return name if name.startswith(f"{prefix}_") else f"{prefix}_{name}"
