"""``loss_chunk``: the loss of a causal language model of transformers, without the logits of all tokens in memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import nn

from echelon.accelerator.linear_cross_entropy import linear_cross_entropy
from echelon.accelerator.sequences import cuts_sequences
from echelon.base.errors import UsageError
from echelon.base.messages.translation import gettext as _
from echelon.trainer.data.columns import base_model_of
from echelon.trainer.model_loss import is_causal
from echelon.trainer.session import ModelInterface
from echelon.trainer.trainer_methods import TrainerMethods

_NUM_PROBED = 8  # tokens


@runtime_checkable
class _HasHeadAndLoss(Protocol):
    """A model of transformers; ``loss_function`` may be set."""

    loss_function: Any

    def get_output_embeddings(self) -> Any:
        """Return the layer that computes the logits."""
        ...


class ChunkedLoss:
    """Makes ``model`` compute its loss in chunks, in training mode and with labels: its head returns the hidden states, of which
    ``loss_function`` computes the logits. The outputs then have no logits. Otherwise the model computes what it did.
    """

    def __init__(self, model: Any, head: nn.Linear, chunk_size: int) -> None:
        self._model, self._head, self._chunk_size = model, head, chunk_size
        self._compute_logits: Callable[[torch.Tensor], torch.Tensor] = head.forward
        self._compute_loss = model.loss_function
        self._is_deferred = self._is_probing = False
        head.forward = self._run_head  # type: ignore[method-assign, assignment]
        model.loss_function = self._run_loss
        self._hooks = [
            model.register_forward_pre_hook(self._before_forward, with_kwargs=True),
            model.register_forward_hook(self._after_forward),
        ]

    def remove(self) -> None:
        """Let the model compute its loss as before."""
        for hook in self._hooks:
            hook.remove()
        self._head.forward = self._compute_logits  # type: ignore[method-assign, assignment]
        self._model.loss_function = self._compute_loss

    def _before_forward(self, model: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
        self._is_deferred = (model.training or self._is_probing) and kwargs.get("labels") is not None

    def _after_forward(self, _model: nn.Module, _args: Any, outputs: Any) -> Any:
        if not self._is_deferred:
            return outputs
        self._is_deferred = False
        if isinstance(outputs, tuple):  # return_dict=False
            return (outputs[0], None, *outputs[2:])
        return type(outputs)(**{name: value for name, value in outputs.items() if name != "logits"})

    def _run_head(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden if self._is_deferred else self._compute_logits(hidden)

    def _run_loss(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        vocab_size: int,
        num_items_in_batch: Any = None,
        ignore_index: int = -100,
        shift_labels: torch.Tensor | None = None,
        **options: Any,
    ) -> torch.Tensor:
        """Compute what transformers' ``loss_function`` computes; ``logits`` are the hidden states if the head has returned them."""
        if not self._is_deferred:
            result: torch.Tensor = self._compute_loss(
                logits=logits,
                labels=labels,
                vocab_size=vocab_size,
                num_items_in_batch=num_items_in_batch,
                ignore_index=ignore_index,
                shift_labels=shift_labels,
                **options,
            )
            return result
        if shift_labels is None:
            shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        loss = linear_cross_entropy(
            logits,
            self._head.weight,
            shift_labels.to(logits.device),
            chunk_size=self._chunk_size,
            bias=self._head.bias,
            ignore_index=ignore_index,
            reduction="mean" if num_items_in_batch is None else "sum",
        )
        if isinstance(num_items_in_batch, torch.Tensor):
            num_items_in_batch = num_items_in_batch.to(loss.device)
        return loss if num_items_in_batch is None else loss / num_items_in_batch

    @torch.no_grad()
    def require_same_loss(self, model: nn.Module, device: torch.device) -> None:
        """Raise if the loss in chunks is not that of the model, which may scale its logits or have a loss of its own.

        Args:
            model: the prepared model.

        Collective: call on every rank if the model's forward pass is collective.
        """
        tokens = torch.arange(_NUM_PROBED, device=device).remainder(self._model.config.vocab_size)[None]
        was_training = model.training
        model.eval()
        try:
            usual = model(input_ids=tokens, labels=tokens)["loss"]
            self._is_probing = True
            chunked = model(input_ids=tokens, labels=tokens)["loss"]
        finally:
            self._is_probing = False
            model.train(was_training)
        if not abs(float(usual) - float(chunked)) <= math.sqrt(torch.finfo(torch.float32).eps) * abs(float(usual)):
            raise _unsupported(
                _(
                    "the loss of {name} ({usual:.6g} for a probe) is not the cross-entropy of its head's outputs ({chunked:.6g})",
                    name=type(self._model).__name__,
                    usual=float(usual),
                    chunked=float(chunked),
                )
            )


@contextmanager
def chunked_loss(trainer: TrainerMethods, interface: ModelInterface, chunk_size: int) -> Iterator[ChunkedLoss]:
    """Compute the loss of the Trainer's model in chunks of tokens inside the block.

    Raises:
        UsageError: the model or another setting does not support this.
    """
    model: Any = base_model_of(trainer.model)
    name = type(model).__name__
    if not is_causal(model) or not isinstance(model, _HasHeadAndLoss):
        raise _unsupported(_("{name} is not a causal language model of transformers", name=name))
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        raise _unsupported(_("the head of {name} is a {kind}, not a Linear", name=name, kind=type(head).__name__))
    if interface.computes_own_loss:
        raise _unsupported(
            _("the loss is computed outside the model (label_smoothing_factor, compute_loss_func or compute_loss)")
        )
    layout = trainer.accelerator.session.layout
    if cuts_sequences(trainer.accelerator) or (layout is not None and (layout.pp_enabled or layout.tp_enabled)):
        raise UsageError(
            _(
                "loss_chunk cannot be used: {why}",
                why=_("tp_size, pp_size, cp_size and sp_size divide the head or its tokens over ranks"),
            ),
            where="TrainingArguments.loss_chunk",
            do=_("remove loss_chunk"),
        )
    loss = ChunkedLoss(model, head, chunk_size)
    try:
        yield loss
    finally:
        loss.remove()


def _unsupported(why: str) -> UsageError:
    return UsageError(
        _("loss_chunk cannot be used: {why}", why=why),
        where="TrainingArguments.loss_chunk",
        do=_("remove loss_chunk, or call echelon.linear_cross_entropy in the model"),
    )
