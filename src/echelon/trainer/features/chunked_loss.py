"""``loss_chunk``: the loss of a causal language model of transformers, without the logits of all tokens in memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from echelon.accelerator.sequences import ChunkedLoss, cuts_sequences, why_not_chunked
from echelon.base.errors import UsageError
from echelon.base.messages.translation import gettext as _
from echelon.trainer.data.columns import base_model_of
from echelon.trainer.session import ModelInterface
from echelon.trainer.trainer_methods import TrainerMethods


@contextmanager
def chunked_loss(trainer: TrainerMethods, interface: ModelInterface, chunk_size: int) -> Iterator[ChunkedLoss]:
    """Compute the loss of the Trainer's model in chunks of tokens inside the block.

    Raises:
        UsageError: the model or another setting does not support this.
    """
    model: Any = base_model_of(trainer.model)
    if why := why_not_chunked(model):
        raise _unsupported(why)
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
    loss = ChunkedLoss(model, chunk_size)
    try:
        yield loss
    finally:
        loss.remove()


def require_same_loss(loss: ChunkedLoss, model: nn.Module, device: torch.device) -> None:
    """Raise if the loss in chunks is not that of the model, which may scale its logits or have a loss of its own.

    Args:
        model: the prepared model.

    Collective: call on every rank if the model's forward pass is collective.
    """
    usual, chunked = loss.probe(model, device)
    if not abs(usual - chunked) <= math.sqrt(torch.finfo(torch.float32).eps) * abs(usual):
        raise _unsupported(
            _(
                "the loss of {name} ({usual:.6g} for a probe) is not the cross-entropy of its head's outputs ({chunked:.6g})",
                name=type(loss.model).__name__,
                usual=usual,
                chunked=chunked,
            )
        )


def _unsupported(why: str) -> UsageError:
    return UsageError(
        _("loss_chunk cannot be used: {why}", why=why),
        where="TrainingArguments.loss_chunk",
        do=_("remove loss_chunk, or call echelon.linear_cross_entropy in the model"),
    )
