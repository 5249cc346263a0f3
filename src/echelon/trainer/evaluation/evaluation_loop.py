"""The evaluation loop: gathers every sample's loss, predictions and labels, and computes the metrics."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.data import IterableDataset

from echelon.accelerator.metrics import num_samples
from echelon.accelerator.preemption import Preempted
from echelon.accelerator.prepare.prepare_arguments import contents, is_record
from echelon.base.errors import ConfigError, DesyncError, UsageError
from echelon.base.logging import get_logger
from echelon.trainer.data import batches
from echelon.trainer.data.epoch_batches import EpochBatches
from echelon.trainer.data.num_items import items_of
from echelon.trainer.features.model_changes import inspect_model, prepare_pipeline, splits_layers
from echelon.trainer.optim.optimizers import set_optimizer_mode
from echelon.trainer.results import EvalLoopOutput, EvalPrediction, as_numbers, speed_metrics
from echelon.trainer.session import TrainerSession
from echelon.trainer.trainer_methods import (
    TrainerMethods,
    call_model,
    explain_missing_column,
    is_overridden,
    notify,
)
from echelon.trainer.training_plan import num_examples_of

logger = get_logger(__name__)


def measure_evaluation(
    trainer: TrainerMethods, session: TrainerSession, build_loader: Callable[[], Any], **options: Any
) -> EvalLoopOutput:
    """Call ``Trainer.evaluation_loop`` with ``options``, and add its speed and memory use to the metrics.

    Collective: call on every rank.
    """
    stage = "test" if session.evaluation.is_predicting else "eval"
    session.memory.begin(stage)
    if not trainer.is_in_train:  # a script may have set another model or compute_loss_func since construction
        session.interface = inspect_model(trainer, before=session.interface)
    dataloader = build_loader()
    start = time.time()
    try:
        with session.averaged():
            output = trainer.evaluation_loop(dataloader, **options)
    finally:
        trainer.accelerator.session.objects.forget_loader(dataloader)
    output.metrics.update(_speed(trainer, session, options["metric_key_prefix"], start, output.num_samples))
    output.metrics.update(session.memory.end(stage))
    return output


def _speed(
    trainer: TrainerMethods, session: TrainerSession, prefix: str, start: float, num_samples: int | None
) -> dict[str, float]:
    size = trainer.args.eval_batch_size * trainer.accelerator.session.num_readers
    steps = -(-num_samples // size) if num_samples is not None else None
    metrics = speed_metrics(prefix, start, num_samples=num_samples, num_steps=steps)
    if not session.optimizer.is_prepared and session.evaluation.preparation_time is not None:
        metrics[f"{prefix}_model_preparation_time"] = session.evaluation.preparation_time
    return metrics


def run_evaluation(
    trainer: TrainerMethods,
    session: TrainerSession,
    dataloader: Any,
    *,
    description: str,
    prediction_loss_only: bool | None,
    ignore_keys: list[str] | None,
    prefix: str,
) -> EvalLoopOutput:
    """Return the model's outputs for every sample of ``dataloader``, and the metrics.

    Padding samples in a rank's last batch are removed before the forward pass, so that every sample counts once and the
    loss matches a single-process evaluation.

    Collective: call on every rank, with the same number of batches.
    """
    args, state = trainer.args, session.evaluation
    loss_only = args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
    with _cast_to(_evaluation_dtype(trainer), trainer.model):
        logger.info("***** Running %s *****", description)
        num_examples = num_examples_of(dataloader)
        logger.info("  Num examples%s", ": Unknown" if num_examples is None else f" = {num_examples}")
        logger.info("  Batch size = %d", args.eval_batch_size)
        limit = None if state.is_predicting else args.batches_of(args.limit_eval_batches, dataloader)
        model = _prepared_model(trainer, session)
        model.eval()
        set_optimizer_mode(trainer.optimizer, "eval")
        trainer.callback_handler.eval_dataloader = dataloader
        numbered, state.rows_per_sample = _batches_and_rows(trainer, dataloader)
        try:
            collected, metrics, inputs = _evaluate_batches(
                trainer, session, model, numbered, dataloader, limit=limit, loss_only=loss_only, ignore_keys=ignore_keys
            )
        finally:
            state.real_samples = None
            numbered.close()
            trainer.gather_function = trainer.accelerator.gather_for_metrics  # a script's own lasts for one evaluation

        everything = {name: column.joined() for name, column in collected.columns.items()}
        predictions, label_ids = everything["logits"], everything["labels"]
        if trainer.compute_metrics is not None and predictions is not None and not args.batch_eval_metrics:
            metrics = _metrics_of(trainer, session, everything, inputs)
        metrics = {f"{prefix}_{name.removeprefix(f'{prefix}_')}": value for name, value in as_numbers(metrics).items()}
        mean = collected.columns["losses"].mean(filtered=args.logging_nan_inf_filter, weights=collected.weights)
        if mean is not None:
            metrics = {f"{prefix}_loss": mean, **metrics}
        is_iterable = isinstance(getattr(dataloader, "dataset", None), IterableDataset)  # whose __len__ may be wrong
        if num_examples is None or limit is not None or is_iterable:
            columns = collected.columns
            num_examples = columns["losses"].num_samples or columns["logits"].num_samples or collected.num_observed
        return EvalLoopOutput(predictions=predictions, label_ids=label_ids, metrics=metrics, num_samples=num_examples)


def _evaluate_batches(
    trainer: TrainerMethods,
    session: TrainerSession,
    model: nn.Module,
    numbered: EpochBatches,
    dataloader: Any,
    *,
    limit: int | None,
    loss_only: bool,
    ignore_keys: list[str] | None,
) -> tuple[_Collected, dict[str, Any], Any]:
    """Return the collected outputs, the metrics (with ``batch_eval_metrics``), and the last batch.

    Raises:
        Preempted: the run stops.
    """
    args, state, collected = trainer.args, session.evaluation, _Collected(trainer)
    by_batch = args.batch_eval_metrics and trainer.compute_metrics is not None
    metrics: dict[str, Any] = {}
    inputs: Any = None
    for done, inputs in enumerate(numbered, 1):
        size = num_samples(inputs)
        real = state.real_samples = _real_samples(trainer, dataloader, size)
        # A batch of padding only still runs, because the forward pass may be collective; gathering drops it.
        rows = real[0] if real is not None and 0 < real[0] < (size or 0) else None
        if rows is not None and size is not None:
            inputs = batches.cut(inputs, rows=rows, of=size)
        loss, logit, label = trainer.prediction_step(model, inputs, loss_only, ignore_keys=ignore_keys)
        column = _main_input(inputs, trainer) if "inputs" in args.include_for_metrics else None
        if rows is not None and size is not None:
            logit, label, column = (batches.fill(part, rows=rows, of=size) for part in (logit, label, column))
        if loss_only and size is not None:
            size //= state.rows_per_sample
        gathered = collected.gather(loss, logit, label, column, size=size)
        if loss is not None and trainer.accelerator.parity != "off":
            collected.weigh(inputs, size=size, shifts=session.interface.shifts_labels)
        if by_batch and gathered["logits"] is not None:
            is_last = done == limit or not numbered.has_more()  # the length may be wrong
            metrics = _metrics_of(trainer, session, gathered, inputs, compute_result=is_last)
        if by_batch and not state.is_predicting:
            collected.keep(losses=gathered["losses"])
        else:
            collected.keep(**gathered)
        collected.num_observed += size or 0
        notify(trainer, "on_prediction_step")
        is_boundary = state.is_repeatable or not trainer.is_in_train  # at which a preempted run can resume
        if is_boundary and trainer.accelerator.preemption.at_boundary(is_new_step=False, is_whole=True):
            raise Preempted
        if done == limit:
            break
    return collected, metrics, inputs


def _prepared_model(trainer: TrainerMethods, session: TrainerSession) -> nn.Module:
    wrapped: nn.Module = trainer._wrap_model(trainer.model, training=False)
    if wrapped is not trainer.model:
        return wrapped
    if splits_layers(trainer):
        prepare_pipeline(trainer, session.optimizer)
        return trainer.model_wrapped
    if not session.optimizer.is_prepared and session.evaluation.preparation_time is None:
        start = time.time()
        devices = trainer.accelerator.capabilities.num_devices
        # With several devices, a batch may be too large for one of them.
        trainer.model_wrapped = trainer.accelerator.prepare_model(trainer.model, evaluation_mode=devices == 1)
        session.evaluation.preparation_time = trainer.model_preparation_time = round(time.time() - start, 4)
    return trainer.model_wrapped


@contextmanager
def _cast_to(dtype: torch.dtype | None, model: nn.Module) -> Iterator[None]:
    """Cast ``model``, which must not be sharded, to ``dtype`` inside the block; restore it from a host copy afterwards.

    ``dtype=None`` changes nothing.
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


def _main_input(inputs: Any, trainer: TrainerMethods) -> Any:
    """Return a batch's main input column: the model's ``main_input_name``, or ``input_ids``.

    Raises:
        UsageError: the batch has no such column.
    """
    name = getattr(trainer.model, "main_input_name", "input_ids")
    if isinstance(inputs, Mapping) and name in inputs:
        return trainer._prepare_input(inputs[name])
    if isinstance(inputs, (list, tuple)) and inputs:
        return batches.to_device(inputs[0], trainer.accelerator.device)
    raise UsageError(
        f"the batch has no {name!r}: its columns are {', '.join(map(str, inputs))}",
        where="TrainingArguments.include_for_metrics",
        do=f"set {type(trainer.model).__name__}.main_input_name to one of these columns",
    )


def _metrics_of(
    trainer: TrainerMethods, session: TrainerSession, found: Mapping[str, Any], inputs: Any, **more: Any
) -> dict[str, Any]:
    """Call ``compute_metrics`` with the gathered outputs; return no metrics for a prediction without labels."""
    if found["labels"] is None:
        if session.evaluation.is_predicting:
            return {}
        seen = ", ".join(map(str, inputs)) if isinstance(inputs, Mapping) else f"a {type(inputs).__name__}"
        raise UsageError(
            f"compute_metrics needs labels, but the batches have none: {seen} "
            f"(label_names: {', '.join(trainer.label_names) or 'none'})",
            where="Trainer(compute_metrics=)",
            do="name the label column 'labels', or set label_names to its name",
        )
    wanted = trainer.args.include_for_metrics
    assert trainer.compute_metrics is not None
    prediction = EvalPrediction(
        predictions=found["logits"],
        label_ids=found["labels"],
        inputs=found["inputs"] if "inputs" in wanted else None,
        losses=found["losses"] if "loss" in wanted else None,
    )
    computed = trainer.compute_metrics(prediction, **more)
    if computed is not None and not isinstance(computed, Mapping):
        raise UsageError(
            f"compute_metrics returned a {type(computed).__name__} instead of a dict",
            where="Trainer(compute_metrics=)",
            do="return a dict from names to numbers, such as {'accuracy': 0.5}",
        )
    return dict(computed or {})


class _Collected:
    """The outputs of all batches, gathered from all ranks."""

    def __init__(self, trainer: TrainerMethods) -> None:
        self._trainer = trainer
        self.columns = {name: _Column(trainer.args) for name in ("losses", "logits", "labels", "inputs")}
        self.num_observed = 0
        """Number of samples on this rank."""
        self.weights: list[torch.Tensor] = []
        """Weights of the losses, per sample; empty for equal weights."""

    def gather(self, loss: Any, logits: Any, labels: Any, inputs: Any, *, size: int | None) -> dict[str, Any]:
        """Gather one batch's outputs from all ranks, padded with -100 to the longest.

        Collective: call on every rank, once per batch.
        """
        trainer = self._trainer
        losses = None if loss is None else loss.detach().reshape(1).repeat(size or 1)
        labels, logits, inputs = self._padded(labels), self._padded(logits), self._padded(inputs)
        if logits is not None and trainer.preprocess_logits_for_metrics is not None:
            logits = trainer.preprocess_logits_for_metrics(logits, labels)
        found = {"losses": losses, "logits": logits, "labels": labels, "inputs": inputs}
        gathered: dict[str, Any] = {}
        for name, part in found.items():
            try:
                gathered[name] = None if part is None else self._gathered(part)
            except DesyncError as error:
                if (rows := batches.batch_size(part)) in (None, size):
                    raise
                raise DesyncError(
                    f"{name} have {rows} rows on this rank for an evaluation batch of {size} samples, and another number of "
                    f"rows on another rank: {error.what}",
                    where=f"{type(trainer).__name__}.prediction_step",
                    do="return one row per sample, padded to the same length (or do so in preprocess_logits_for_metrics), or a "
                    "list with one entry per sample, with eval_use_gather_object=True",
                ) from error
        return gathered

    def keep(self, **found: Any) -> None:
        """Store outputs for concatenation after the last batch."""
        for name, part in found.items():
            if part is not None:
                self.columns[name].add(part)

    def weigh(self, inputs: Any, *, size: int | None, shifts: bool) -> None:
        """Weight a batch's loss by its number of items, because micro-batches differ in size in the exact modes.

        Collective: call on every rank, once per batch.
        """
        rows = num_samples(inputs) or 1
        items = items_of(inputs, shifts=shifts)
        weight = 1.0 if items is None else items / rows
        weights = torch.full((size or 1,), weight, dtype=torch.float64, device=self._trainer.accelerator.device)
        self.weights.append(self._gathered(weights).cpu())

    def _padded(self, part: Any) -> Any:
        if part is None:
            return None
        pad = partial(self._trainer.accelerator.pad_across_processes, dim=1, pad_index=-100)
        return self._by_kind(part, tensors=pad, objects=lambda samples: samples)

    def _gathered(self, part: Any) -> Any:
        gather_objects = partial(self._trainer.accelerator.gather_for_metrics, use_gather_object=True)
        return self._by_kind(part, tensors=self._trainer.gather_function, objects=gather_objects)

    def _by_kind(self, part: Any, *, tensors: Callable[[Any], Any], objects: Callable[[Any], Any]) -> Any:
        """Apply ``objects`` to the lists of one object per sample in ``part``, and ``tensors`` to everything else."""
        if not self._trainer.args.eval_use_gather_object or not _has_lists(part):
            return tensors(part)
        if isinstance(part, list):
            return objects(part)
        apply = partial(self._by_kind, tensors=tensors, objects=objects)
        if isinstance(part, Mapping):
            return {name: apply(value) for name, value in part.items()}
        return tuple(apply(value) for value in part)


def _batches_and_rows(trainer: TrainerMethods, dataloader: Any) -> tuple[EpochBatches, int]:
    """Return an evaluation's batches, and the number of rows that its collator makes from each sample.

    If a sample has several rows, the layout of a batch is unknown, so padding samples cannot be removed and would count
    in the batch's mean loss. (trl also gathers one value per row, so all ranks need the same number of rows.)
    Therefore, no batch contains both padding and real samples.
    """
    numbered = EpochBatches(dataloader)
    divide = getattr(dataloader, "divide_last_step", None)  # only prepared loaders have it
    if divide is None:
        return numbered, 1
    size, collated = num_samples(numbered.peek()), _num_samples_of(trainer, dataloader)
    if not collated or size is None or size <= collated or size % collated:
        return numbered, 1
    if trainer.accelerator.session.num_readers > 1 and divide():
        numbered.close()
        numbered = EpochBatches(dataloader)
    return numbered, size // collated


def _num_samples_of(trainer: TrainerMethods, dataloader: Any) -> int | None:
    """Return the number of samples in a prepared loader's current batch on this rank, or None if unknown."""
    last, contribution = dataloader.last_step, dataloader.contribution
    if last is not None:
        return int(last.sizes[trainer.accelerator.session.data_world.rank])
    if contribution is not None:
        return len(contribution.samples)
    whole = dataloader.total_batch_size
    return None if whole is None else int(whole) // trainer.accelerator.session.num_readers


def _real_samples(trainer: TrainerMethods, dataloader: Any, size: int | None) -> tuple[int, int] | None:
    """Return how many of ``size`` samples are not padding, on this rank and across all ranks, or None if unknown."""
    accelerator = trainer.accelerator
    if accelerator.session.num_readers == 1:
        return None
    last = getattr(dataloader, "last_step", None)  # only prepared loaders have it
    if last is None or last.sizes[accelerator.session.data_world.rank] != size:
        return None
    return int(last.real[accelerator.session.data_world.rank]), sum(int(new) for new in last.real)


class _Column:
    """Stores one kind of output, batch by batch."""

    def __init__(self, args: Any) -> None:
        self._every = args.eval_accumulation_steps
        self._joins = args.eval_do_concat_batches
        self._holds_objects = args.eval_use_gather_object
        self._parts: list[Any] = []
        self._on_device = 0
        self.num_samples = 0

    def add(self, part: Any) -> None:
        """Store a batch; move stored batches to the CPU every eval_accumulation_steps batches."""
        self._parts.append(part)
        self.num_samples += batches.batch_size(part) or 0
        self._on_device += 1
        if self._every is not None and self._on_device >= self._every:
            self._parts[-self._on_device :] = [
                batches.to_device(kept, torch.device("cpu")) for kept in self._parts[-self._on_device :]
            ]
            self._on_device = 0

    def joined(self) -> Any:
        """Return the batches as numpy arrays, concatenated or as a list, or None if there are no batches."""
        if not self._parts:
            return None
        if not self._joins:
            return [batches.to_numpy(part) for part in self._parts]
        return self._concatenated(self._parts)

    def _concatenated(self, parts: list[Any]) -> Any:
        first = parts[0]
        if self._holds_objects and _has_lists(first):
            if isinstance(first, list):
                return [batches.to_numpy(sample) for part in parts for sample in part]
            if isinstance(first, Mapping):
                return {name: self._concatenated([part[name] for part in parts]) for name in first}
            return tuple(self._concatenated(list(column)) for column in zip(*parts))
        try:
            return batches.to_numpy(batches.concatenate([batches.to_device(p, torch.device("cpu")) for p in parts]))
        except (RuntimeError, TypeError) as error:
            raise UsageError(
                f"the predictions of {len(parts)} batches cannot be concatenated: {error}",
                where="TrainingArguments.eval_do_concat_batches",
                do=(
                    "set eval_do_concat_batches=False, or return tensors of the same shape from "
                    "preprocess_logits_for_metrics"
                ),
            ) from error

    def mean(self, *, filtered: bool, weights: list[torch.Tensor]) -> float | None:
        """Return the mean of all rows in float64, or None if there are no rows.

        Args:
            filtered: ignore nonfinite values, unless all are nonfinite.
            weights: each batch's row weights; empty for equal weights.
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


def _has_lists(part: Any) -> bool:
    """Return whether ``part`` is a list, or a tuple or mapping that contains one."""
    if isinstance(part, Mapping):
        return any(map(_has_lists, part.values()))
    return isinstance(part, list) or (isinstance(part, tuple) and any(map(_has_lists, part)))


# ---- one batch ---------------------------------------------------------------------------------------------------------


def _evaluation_dtype(trainer: TrainerMethods) -> torch.dtype | None:
    """Return the dtype to cast the model to for an evaluation outside training, or None for no cast.

    Raises:
        ConfigError: the model is sharded.
    """
    if trainer.is_in_train or not (trainer.args.bf16_full_eval or trainer.args.fp16_full_eval):
        return None
    if trainer.accelerator.capabilities.shards_parameters:
        raise ConfigError(
            "a sharded model cannot be cast for an evaluation",
            where="TrainingArguments.bf16_full_eval, .fp16_full_eval",
            do="remove this setting; bf16=True and fp16=True also apply to evaluations",
        )
    return torch.bfloat16 if trainer.args.bf16_full_eval else torch.float16


def predict_batch(
    trainer: TrainerMethods,
    session: TrainerSession,
    model: nn.Module,
    inputs: Any,
    *,
    prediction_loss_only: bool,
    ignore_keys: list[str] | None,
    count_items: Callable[[list[Any], torch.device], Any],
) -> tuple[torch.Tensor | None, Any, Any]:
    """Return one batch's loss, logits and labels, each of which may be None; see ``Trainer.prediction_step``.

    Args:
        ignore_keys: the model's outputs that are not logits (default: taken from its config).
        count_items: ``count_items(batches, device)`` returns the number to divide the loss by.
    """
    if ignore_keys is None:
        config = getattr(trainer.model, "config", None)
        ignore_keys = list(getattr(config, "keys_to_ignore_at_inference", None) or ["past_key_values"])
    labels = _labels_in(trainer, inputs)
    if (dtype := _evaluation_dtype(trainer)) is not None:
        inputs = batches.map_tensors(lambda part: part.to(dtype) if part.is_floating_point() else part, inputs)
    loss = None
    with torch.no_grad():
        if _has_loss(trainer, session, inputs):
            num_items = count_items([inputs], trainer.accelerator.device)
            context: Callable[[], AbstractContextManager[Any]] = nullcontext
            if is_overridden(trainer, "_prepare_context_parallel_inputs"):  # the default would cut the sequences
                context, inputs = trainer._prepare_context_parallel_inputs(model, inputs)
            with trainer.compute_loss_context_manager(), context():
                options = {"num_items_in_batch": num_items} if session.interface.compute_loss_takes_items else {}
                try:
                    result = trainer.compute_loss(model, inputs, return_outputs=True, **options)
                except KeyError as error:
                    explain_missing_column(trainer, error, inputs)
                    raise
                if not (isinstance(result, tuple) and len(result) == 2):
                    raise UsageError(
                        f"compute_loss(..., return_outputs=True) returned a {type(result).__name__}, not (loss, outputs)",
                        where=f"{type(trainer).__name__}.compute_loss",
                        do="end compute_loss with `return (loss, outputs) if return_outputs else loss`",
                    )
                loss, outputs = result
            loss = loss.detach().mean()
        else:
            outputs = call_model(trainer, model, inputs, None)
    if prediction_loss_only:
        return loss, None, None
    # None values are not predictions, such as the loss of a model whose loss compute_loss computes.
    if isinstance(outputs, Mapping) or is_record(outputs):
        left_out = [*ignore_keys, *(["loss"] if loss is not None else [])]
        held: Any = outputs if isinstance(outputs, Mapping) else contents(outputs)
        logits: Any = tuple(value for name, value in held.items() if name not in left_out and value is not None)
    elif isinstance(outputs, (tuple, list)):
        # Models of transformers return the loss first, but an overridden compute_loss may not.
        has_loss = loss is not None and isinstance(outputs[0], torch.Tensor) and not outputs[0].dim()
        logits = tuple(value for value in (outputs[1:] if has_loss else outputs) if value is not None)
    else:
        logits = (outputs,)
    logits = batches.detach(logits)
    return loss, logits[0] if len(logits) == 1 else logits, batches.detach(labels)


def _has_loss(trainer: TrainerMethods, session: TrainerSession, inputs: Any) -> bool:
    """Return whether a loss can be computed for an evaluation batch."""
    interface, is_predicting = session.interface, session.evaluation.is_predicting
    if not isinstance(inputs, Mapping):
        num_parts = len(inputs) if isinstance(inputs, (tuple, list)) else 1
        if not interface.computes_own_loss:  # forward receives all elements with the labels, and returns the loss first
            return num_parts > 1 and (interface.num_positional is None or num_parts <= interface.num_positional)
        return num_parts > 1 or not is_predicting
    if trainer.label_names and all(inputs.get(name) is not None for name in trainer.label_names):
        return True
    if interface.infers_labels:  # forward takes no labels; only compute_loss knows whether it needs them
        return not is_predicting
    return not trainer.label_names and trainer.can_return_loss


def _labels_in(trainer: TrainerMethods, inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        labels = tuple(inputs.get(name) for name in trainer.label_names)
        if not labels or any(label is None for label in labels):
            return None
        return labels[0] if len(labels) == 1 else labels
    # In a tuple, as from a TensorDataset, the labels are last.
    return inputs[-1] if isinstance(inputs, (tuple, list)) and len(inputs) > 1 else None
