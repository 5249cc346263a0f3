"""The loop over an evaluation set: losses, predictions and labels of every sample once, and the metrics of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import IterableDataset

from echelon.base.errors import UsageError
from echelon.base.logging import get_logger
from echelon.trainer.data import batches
from echelon.trainer.data.epoch_batches import EpochBatches
from echelon.trainer.parity import items_of
from echelon.trainer.results import EvalLoopOutput, EvalPrediction, as_numbers

if TYPE_CHECKING:
    from echelon.trainer.trainer import Trainer

__all__ = ["main_input", "run_evaluation", "whole_model_as"]

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
    args = trainer.args
    logger.info("***** Running %s *****", description)
    num_examples = trainer._num_examples(dataloader)
    logger.info("  Num examples%s", ": Unknown" if num_examples is None else f" = {num_examples}")
    logger.info("  Batch size = %d", args.eval_batch_size)
    limit = None if trainer._is_predicting else args.batches_of(args.limit_eval_batches, dataloader)

    model = trainer._model_for_evaluation()
    was_training = model.training
    model.eval()
    trainer._tell_optimizer("eval")
    trainer.callback_handler.eval_dataloader = dataloader
    collected = _Collected(trainer)
    by_batch = args.batch_eval_metrics and trainer.compute_metrics is not None
    metrics: dict[str, Any] = {}
    observed, done = 0, 0
    inputs: Any = None
    numbered = EpochBatches(dataloader)
    try:
        for inputs in numbered:
            done += 1
            size = batches.batch_size(inputs)
            rows = _new_rows(trainer, dataloader, size)
            if rows is not None and size is not None:
                inputs = batches.cut(inputs, rows=rows, of=size)
            trainer._round = _round_of(trainer, dataloader, size)
            loss, logit, label = trainer.prediction_step(model, inputs, prediction_loss_only, ignore_keys=ignore_keys)
            extra = main_input(inputs, trainer) if "inputs" in args.include_for_metrics else None
            if rows is not None and size is not None:
                logit, label, extra = (batches.fill(part, rows=rows, of=size) for part in (logit, label, extra))
            gathered = collected.gather(loss, logit, label, extra, size=size)
            if loss is not None and trainer.accelerator.parity != "off":
                collected.weigh(inputs, size=size)
            if by_batch and gathered["logits"] is not None:
                is_last = done == limit or not numbered.has_more()  # whatever its length says
                metrics = _metrics_of(trainer, gathered, inputs, compute_result=is_last)
            if by_batch and not trainer._is_predicting:
                collected.keep(losses=gathered["losses"])
            else:
                collected.keep(**gathered)
            observed += size or 0
            trainer._after_evaluation_batch()
            if done == limit:
                break
    finally:
        trainer._round = None
        numbered.close()
        model.train(was_training)

    everything = {name: column.joined() for name, column in collected.columns.items()}
    predictions, label_ids = everything["logits"], everything["labels"]
    if trainer.compute_metrics is not None and predictions is not None and not by_batch:
        metrics = _metrics_of(trainer, everything, inputs)
    metrics = {_prefixed(name, metric_key_prefix): value for name, value in as_numbers(metrics).items()}
    if (mean := collected.mean_loss(filtered=args.logging_nan_inf_filter)) is not None:
        metrics = {f"{metric_key_prefix}_loss": mean, **metrics}
    is_claimed = isinstance(getattr(dataloader, "dataset", None), IterableDataset)  # its length is what it says
    if num_examples is None or limit is not None or is_claimed:
        columns = collected.columns
        num_examples = columns["losses"].num_samples or columns["logits"].num_samples or observed
    return EvalLoopOutput(predictions=predictions, label_ids=label_ids, metrics=metrics, num_samples=num_examples)


@contextmanager
def whole_model_as(dtype: torch.dtype | None, model: nn.Module) -> Iterator[None]:
    """Inside, the numbers of ``model`` are of ``dtype``; afterwards those of before are back, which were on the host.

    Args:
        dtype: None: nothing changes.
        model: not sharded.
    """
    if dtype is None:
        yield
        return
    tensors = [one for one in (*model.parameters(), *model.buffers()) if one.is_floating_point()]
    before = [one.data.cpu() for one in tensors]
    devices = [one.device for one in tensors]
    for one in tensors:
        one.data = one.data.to(dtype)
    try:
        yield
    finally:
        for one, data, device in zip(tensors, before, devices):
            one.data = data.to(device)


def main_input(inputs: Any, trainer: Trainer) -> Any:
    """Return the column of a batch that the model reads first: ``main_input_name`` of the model, else ``input_ids``.

    Raises:
        UsageError: the batch has no such column.
    """
    name = getattr(trainer.model, "main_input_name", "input_ids")
    if isinstance(inputs, Mapping) and name in inputs:
        return batches.to_device(inputs[name], trainer.accelerator.device)
    if isinstance(inputs, (list, tuple)) and inputs:
        return batches.to_device(inputs[0], trainer.accelerator.device)
    raise UsageError(
        f"the batch has no {name!r}: its columns are {', '.join(map(str, inputs))}",
        where="TrainingArguments.include_for_metrics",
        do=f"set main_input_name of {type(trainer.model).__name__} to the name of one of them",
    )


def _metrics_of(trainer: Trainer, found: Mapping[str, Any], inputs: Any, **more: Any) -> dict[str, Any]:
    """Call ``compute_metrics`` with what was gathered; nothing of a prediction without labels."""
    if found["labels"] is None:
        _refuse_without_labels(trainer, inputs)
        return {}
    wanted = trainer.args.include_for_metrics
    assert trainer.compute_metrics is not None
    prediction = EvalPrediction(
        predictions=found["logits"],
        label_ids=found["labels"],
        inputs=found["inputs"] if "inputs" in wanted else None,
        losses=found["losses"] if "loss" in wanted else None,
    )
    return dict(trainer.compute_metrics(prediction, **more) or {})


class _Collected:
    """What was gathered of all ranks, batch by batch."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.columns = {name: _Column(trainer.args) for name in ("losses", "logits", "labels", "inputs")}
        self._weights: list[torch.Tensor] = []  # of the losses, sample by sample; none: they weigh the same

    def gather(self, loss: Any, logits: Any, labels: Any, inputs: Any, *, size: int | None) -> dict[str, Any]:
        """Return the outputs of one batch for the samples of all ranks, padded to the longest with -100.

        Collective: every rank, once a batch.
        """
        trainer = self._trainer
        losses = None if loss is None else loss.detach().reshape(1).repeat(size or 1)
        labels, logits, inputs = self._padded(labels), self._padded(logits), self._padded(inputs)
        if logits is not None and trainer.preprocess_logits_for_metrics is not None:
            logits = trainer.preprocess_logits_for_metrics(logits, labels)
        found = {"losses": losses, "logits": logits, "labels": labels, "inputs": inputs}
        return {name: None if part is None else self._gathered(part) for name, part in found.items()}

    def keep(self, **found: Any) -> None:
        """Keep what is to be joined after the last batch."""
        for name, part in found.items():
            if part is not None:
                self.columns[name].add(part)

    def weigh(self, inputs: Any, *, size: int | None) -> None:
        """Let the loss of a batch weigh as much as it holds items: in the exact modes batches are cut by what fits.

        Collective: every rank, once a batch.
        """
        rows = batches.batch_size(inputs) or 1
        items = items_of(inputs, model=self._trainer.model)
        weight = 1.0 if items is None else items / rows
        weights = torch.full((size or 1,), weight, dtype=torch.float64, device=self._trainer.accelerator.device)
        self._weights.append(self._gathered(weights).cpu())

    def mean_loss(self, *, filtered: bool) -> float | None:
        """Return the mean of the losses over all samples, in float64; None when there are none.

        Args:
            filtered: leave those out that are not finite, unless none is.
        """
        return self.columns["losses"].mean(filtered=filtered, weights=self._weights)

    def _padded(self, part: Any) -> Any:
        if part is None or self._is_of_objects(part):
            return part
        return self._trainer.accelerator.pad_across_processes(part, dim=1, pad_index=-100)

    def _gathered(self, part: Any) -> Any:
        return self._trainer.accelerator.gather_for_metrics(part, use_gather_object=self._is_of_objects(part))

    def _is_of_objects(self, part: Any) -> bool:
        """Whether ``part`` is a list with an object for each sample; tensors are gathered as tensors all the same."""
        return self._trainer.args.eval_use_gather_object and isinstance(part, list)


def _new_rows(trainer: Trainer, dataloader: Any, size: int | None) -> int | None:
    """Return how many samples of this rank's batch no other rank has; None when all, or when that cannot be told."""
    counted = _round_of(trainer, dataloader, size)
    # With none of its own the batch runs all the same: models may talk in their forward; gathering leaves it out.
    return counted[0] if counted is not None and 0 < counted[0] < (size or 0) else None


def _round_of(trainer: Trainer, dataloader: Any, size: int | None) -> tuple[int, int] | None:
    """Return how many samples of a batch of ``size`` count on this rank, and on all ranks; None when that cannot be told."""
    if trainer.accelerator.num_processes == 1:
        return None
    last = getattr(dataloader, "last_step", None)  # of a prepared loader; a user's own has no such thing
    if last is None or last.sizes[trainer.accelerator.process_index] != size:
        return None
    return int(last.real[trainer.accelerator.process_index]), sum(int(new) for new in last.real)


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
        self._holds_objects = args.eval_use_gather_object
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
        if isinstance(self._parts[0], list) and self._holds_objects:
            return [batches.to_numpy(sample) for part in self._parts for sample in part]
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

    def mean(self, *, filtered: bool, weights: list[torch.Tensor]) -> float | None:
        """Return the mean of all rows, in float64; None when there are none.

        Args:
            filtered: leave those out that are not finite, unless none is.
            weights: of the rows, as parts; none: equal ones.
        """
        if not self._parts:
            return None
        rows = torch.cat([part.cpu() for part in self._parts]).double()
        weight = torch.cat(weights) if weights else torch.ones_like(rows)
        if bool((weight > 0).any()):
            rows, weight = rows[weight > 0], weight[weight > 0]
        finite = rows.isfinite()
        if filtered and bool(finite.any()):
            rows, weight = rows[finite], weight[finite]
        return float((rows * weight).sum() / weight.sum()) if weights else float(rows.mean())


def _prefixed(name: str, prefix: str) -> str:
    return name if name.startswith(f"{prefix}_") else f"{prefix}_{name}"
