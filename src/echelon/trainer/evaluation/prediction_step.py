"""Computes the loss, logits and labels of one evaluation batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from echelon.accelerator.prepare.prepare_arguments import contents, is_record
from echelon.base.errors import ConfigError, UsageError
from echelon.trainer.batch_loss import call_compute_loss, call_model
from echelon.trainer.data import batches
from echelon.trainer.hooks import TrainerHooks
from echelon.trainer.session import TrainerSession

__all__ = ["evaluation_dtype", "predict_batch"]


def evaluation_dtype(hooks: TrainerHooks) -> torch.dtype | None:
    """Return the dtype to cast the model to for an evaluation outside training, or None for no cast.

    Raises:
        ConfigError: the model is sharded.
    """
    if hooks.is_in_train or not (hooks.args.bf16_full_eval or hooks.args.fp16_full_eval):
        return None
    if hooks.accelerator.capabilities.shards_parameters:
        raise ConfigError(
            "a sharded model cannot be cast for an evaluation",
            where="TrainingArguments.bf16_full_eval, .fp16_full_eval",
            do="remove this setting; bf16=True and fp16=True also apply to evaluations",
        )
    return torch.bfloat16 if hooks.args.bf16_full_eval else torch.float16


def predict_batch(
    hooks: TrainerHooks,
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
        hooks: the Trainer's hooks.
        session: the Trainer's session.
        model: the wrapped model.
        inputs: a batch on the device.
        prediction_loss_only: return no logits and no labels.
        ignore_keys: the model's outputs that are not logits (default: taken from its config).
        count_items: ``count_items(batches, device)`` returns the number to divide the loss by.
    """
    if ignore_keys is None:
        config = getattr(hooks.model, "config", None)
        ignore_keys = list(getattr(config, "keys_to_ignore_at_inference", None) or ["past_key_values"])
    labels = _labels_in(hooks, inputs)
    if (dtype := evaluation_dtype(hooks)) is not None:
        inputs = batches.map_tensors(lambda part: part.to(dtype) if part.is_floating_point() else part, inputs)
    loss = None
    with torch.no_grad():
        if _has_loss(hooks, session, inputs):
            num_items = count_items([inputs], hooks.accelerator.device)
            context: Callable[[], AbstractContextManager[Any]] = nullcontext
            if session.is_overridden(hooks, "_prepare_context_parallel_inputs"):  # the default would cut the sequences
                context, inputs = hooks._prepare_context_parallel_inputs(model, inputs)
            with hooks.compute_loss_context_manager(), context():
                result = call_compute_loss(hooks, session, model, inputs, num_items, return_outputs=True)
                if not (isinstance(result, tuple) and len(result) == 2):
                    raise UsageError(
                        f"compute_loss(..., return_outputs=True) returned a {type(result).__name__}, not (loss, outputs)",
                        where=f"{type(hooks).__name__}.compute_loss",
                        do="end compute_loss with `return (loss, outputs) if return_outputs else loss`",
                    )
                loss, outputs = result
            loss = loss.detach().mean()
        else:
            outputs = call_model(hooks, session, model, inputs, None)
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


def _has_loss(hooks: TrainerHooks, session: TrainerSession, inputs: Any) -> bool:
    """Return whether a loss can be computed for an evaluation batch."""
    interface, is_predicting = session.interface, session.evaluation.is_predicting
    if not isinstance(inputs, Mapping):
        num_parts = len(inputs) if isinstance(inputs, (tuple, list)) else 1
        if not interface.computes_own_loss:  # forward receives all elements with the labels, and returns the loss first
            return num_parts > 1 and (interface.num_positional is None or num_parts <= interface.num_positional)
        return num_parts > 1 or not is_predicting
    if hooks.label_names and all(inputs.get(name) is not None for name in hooks.label_names):
        return True
    if interface.infers_labels:  # forward takes no labels; only compute_loss knows whether it needs them
        return not is_predicting
    return not hooks.label_names and hooks.can_return_loss


def _labels_in(hooks: TrainerHooks, inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        labels = tuple(inputs.get(name) for name in hooks.label_names)
        if not labels or any(label is None for label in labels):
            return None
        return labels[0] if len(labels) == 1 else labels
    # In a tuple, as from a TensorDataset, the labels are last.
    return inputs[-1] if isinstance(inputs, (tuple, list)) and len(inputs) > 1 else None
