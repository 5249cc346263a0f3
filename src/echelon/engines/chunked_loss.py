"""The loss of a causal language model of transformers, without the logits of all tokens in memory (``loss_chunk``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import nn

from echelon.base.errors import UsageError
from echelon.base.messages.translation import gettext as _
from echelon.engines.linear_cross_entropy import linear_cross_entropy

_NUM_PROBED = 8  # tokens


@runtime_checkable
class _HasHeadAndLoss(Protocol):
    """A model of transformers; ``loss_function`` may be set."""

    loss_function: Any

    def get_output_embeddings(self) -> Any:
        """Return the layer that computes the logits."""
        ...


@runtime_checkable
class _HasBaseModel(Protocol):
    """A PEFT model."""

    def get_base_model(self) -> nn.Module:
        """Return the base model."""
        ...


def is_causal(model: nn.Module) -> bool:
    """Return whether ``model``, possibly wrapped by PEFT, is a transformers causal language model."""
    inner = getattr(getattr(model, "base_model", None), "model", None)
    kinds = [type(one).__name__ for one in (model, inner) if one is not None]
    return getattr(model, "loss_type", None) == "ForCausalLM" or any(
        kind.endswith(("ForCausalLM", "LMHeadModel")) for kind in kinds
    )


def why_not_chunked(model: nn.Module) -> str:
    """Return why the loss of ``model`` cannot be computed in chunks; "" if it can."""
    name = type(model).__name__
    if not is_causal(model) or not isinstance(model, _HasHeadAndLoss):
        return _("{name} is not a causal language model of transformers", name=name)
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        return _("the head of {name} is a {kind}, not a Linear", name=name, kind=type(head).__name__)
    return ""


def chunk_loss(model: nn.Module, chunk_size: int) -> None:
    """Let ``model``, possibly wrapped by PEFT, compute its loss in chunks of tokens from now on.

    Raises:
        UsageError: the model does not support this.
    """
    if why := why_not_chunked(_with_loss(model)):
        raise UsageError(why, where="loss_chunk", do=_("remove loss_chunk"))
    ChunkedLoss(_with_loss(model), chunk_size)


def can_chunk_loss(model: nn.Module) -> bool:
    """Return whether ``chunk_loss`` supports ``model``."""
    return not why_not_chunked(_with_loss(model))


def loss_chunk_of(model: nn.Module) -> int | None:
    """Return the tokens of a chunk if the loss of ``model`` is computed in chunks."""
    own = _with_loss(model)
    owner = getattr(own.loss_function, "__self__", None) if isinstance(own, _HasHeadAndLoss) else None
    return owner.chunk_size if isinstance(owner, ChunkedLoss) else None


def _with_loss(model: nn.Module) -> nn.Module:
    """Return the model that computes the loss: ``model``, or that inside a PEFT model."""
    return model.get_base_model() if isinstance(model, _HasBaseModel) else model


class ChunkedLoss:
    """Makes ``model`` compute its loss in chunks, in training mode and with labels: its head returns the hidden states, of which
    ``loss_function`` computes the logits. The outputs then have no logits. Otherwise the model computes what it did.

    Args:
        model: one for which ``why_not_chunked`` is empty.
        chunk_size: tokens in a chunk.
    """

    def __init__(self, model: Any, chunk_size: int) -> None:
        self.model, self.chunk_size = model, chunk_size
        self._head = head = model.get_output_embeddings()
        self._hidden: torch.Tensor | None = None  # what the head has returned in place of the logits
        self._compute_logits: Callable[[torch.Tensor], torch.Tensor] = head.forward
        self._compute_loss = model.loss_function
        self._is_deferred = self._is_probing = False
        head.forward = self._run_head
        model.loss_function = self._run_loss
        self._hooks = [
            model.register_forward_pre_hook(self._before_forward, with_kwargs=True),
            model.register_forward_hook(self._after_forward),
        ]

    def remove(self) -> None:
        """Let the model compute its loss as before."""
        for hook in self._hooks:
            hook.remove()
        self._head.forward = self._compute_logits
        self.model.loss_function = self._compute_loss

    def _before_forward(self, model: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
        self._is_deferred = (model.training or self._is_probing) and kwargs.get("labels") is not None

    def _after_forward(self, _model: nn.Module, _args: Any, outputs: Any) -> Any:
        if not self._is_deferred:
            return outputs
        self._is_deferred, self._hidden = False, None
        if isinstance(outputs, tuple):  # return_dict=False
            return (outputs[0], None, *outputs[2:])
        return type(outputs)(**{name: value for name, value in outputs.items() if name != "logits"})

    def _run_head(self, hidden: torch.Tensor) -> torch.Tensor:
        if not self._is_deferred:
            return self._compute_logits(hidden)
        self._hidden = hidden
        return hidden

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
        if logits is not self._hidden and not torch.compiler.is_compiling():
            raise UsageError(
                _("{name} changes the logits that its head has computed", name=type(self.model).__name__),
                where="loss_chunk",
                do=_("remove loss_chunk, or call echelon.linear_cross_entropy in the model"),
            )
        if shift_labels is None:
            shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        loss = linear_cross_entropy(
            logits,
            self._head.weight,
            shift_labels.to(logits.device),
            chunk_size=self.chunk_size,
            bias=self._head.bias,
            ignore_index=ignore_index,
            reduction="mean" if num_items_in_batch is None else "sum",
        )
        if isinstance(num_items_in_batch, torch.Tensor):
            num_items_in_batch = num_items_in_batch.to(loss.device)
        return loss if num_items_in_batch is None else loss / num_items_in_batch

    @torch.no_grad()
    def probe(self, model: nn.Module, device: torch.device) -> tuple[float, float]:
        """Return the loss that the model computes for a few tokens, and that in chunks, which differ if the model scales its logits.

        Args:
            model: the prepared model.

        Collective: call on every rank if the model's forward pass is collective.
        """
        tokens = torch.arange(_NUM_PROBED, device=device).remainder(self.model.config.vocab_size)[None]
        was_training = model.training
        model.eval()
        try:
            usual = model(input_ids=tokens, labels=tokens)["loss"]
            self._is_probing = True
            chunked = model(input_ids=tokens, labels=tokens)["loss"]
        finally:
            self._is_probing = False
            model.train(was_training)
        return float(usual), float(chunked)
