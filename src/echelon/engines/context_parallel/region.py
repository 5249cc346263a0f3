"""A block of code in which sequences are cut over ranks, and attention is computed over the whole sequence."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function

from echelon.base.errors import ConfigError, UsageError
from echelon.base.messages.translation import gettext as _
from echelon.base.warnings import warn
from echelon.engines.context_parallel.ring_attention import ring_attention
from echelon.engines.context_parallel.sequence_group import SequenceGroup
from echelon.engines.context_parallel.sequence_mask import SequenceMask
from echelon.engines.context_parallel.ulysses_attention import ulysses_attention
from echelon.engines.random_numbers import RankNumbers, own_random_numbers

_WHERE = "context_parallel()"
_BACKWARD = (torch.Tensor.backward, torch.autograd.backward)
_REFUSED = {
    F.multi_head_attention_forward: "torch.nn.MultiheadAttention",
    torch._native_multi_head_attention: "torch.nn.MultiheadAttention",
    torch._transformer_encoder_layer_fwd: "torch.nn.TransformerEncoderLayer",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SequencePiece:
    """What a rank has of a sequence."""

    length: int
    """Number of positions of the whole sequence."""
    positions: torch.Tensor
    """The positions of this rank's piece in the whole sequence, ascending: integers, 1-D."""


class SequenceRegion(TorchFunctionMode):
    """Computes ``scaled_dot_product_attention`` over the whole sequence while it is active (``with``).

    A function mode, so that nothing of torch is replaced, and that the backward pass and other threads of autograd see it, too.

    Args:
        group: the ranks of the sequence.
        method: ``ring`` or ``ulysses``.
        piece: what this rank has.
        mask: documents and padding that ``scaled_dot_product_attention`` masks.
    """

    def __init__(
        self, group: SequenceGroup, *, method: Literal["ring", "ulysses"], piece: SequencePiece, mask: SequenceMask
    ) -> None:
        super().__init__()
        self.group = group
        self.piece = piece
        self.given_mask = self.mask = mask
        self.method = method
        self.numbers_positions = True
        """Whether ``torch.arange`` over the local length is reported, because it probably numbers positions."""
        self.is_completed = False
        """Whether a model of transformers is running, which gets its positions as an argument."""
        self.num_attended = 0
        """Number of attention layers computed so far."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        options = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self._replace_attention(*args, **options)
        if func is current_region:
            return self
        if func in _BACKWARD and options.get("inputs") is None:
            self._backward(*args, **options)
            return None
        if func is torch.arange and self.numbers_positions and not self.is_completed:
            self._check_positions(args, options)
        if func in _REFUSED:
            raise UsageError(
                f"{_REFUSED[func]} computes attention within this rank's piece of the sequence only",
                where=_WHERE,
                do="use torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=...), or set cp_size and sp_size to 1",
            )
        return func(*args, **options)

    def _backward(self, tensors: Any, gradient: Any = None, *args: Any, **options: Any) -> None:
        """Run the backward pass in this mode, because activation checkpointing repeats forward passes in it.

        Torch leaves a mode while it calls the mode's method, and asks the modes for each tensor, but not for edges of the graph.
        """
        tensors = (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors)
        given = options.pop("grad_tensors", options.pop("gradient", gradient))
        gradients = given if isinstance(given, Sequence) else (given,) * len(tensors)
        filled = [
            torch.ones_like(tensor) if grad is None and tensor.numel() == 1 else grad
            for tensor, grad in zip(tensors, gradients, strict=True)
        ]
        edges = [get_gradient_edge(tensor) if tensor.requires_grad else tensor for tensor in tensors]
        counts, self.numbers_positions = self.numbers_positions, False
        try:
            with self:
                torch.autograd.backward(edges, filled, *args, **options)
        finally:
            self.numbers_positions = counts

    def _check_positions(self, args: Sequence[Any], options: Any) -> None:
        local = self.piece.positions.numel()
        bounds = [*args, *(options[name] for name in ("start", "end") if name in options)]
        if bounds in ([local], [0, local]) and local != self.piece.length:
            self.numbers_positions = False  # one warning for each block
            warn(
                _(
                    "torch.arange({local}) inside context_parallel() counts from 0 on each rank, whose piece of the "
                    "sequence begins elsewhere. For positions, use those of the piece: `with "
                    "accelerator.context_parallel(...) as piece: piece.positions`",
                    local=local,
                )
            )

    def _replace_attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        if attn_mask is not None:
            raise UsageError(
                f"scaled_dot_product_attention(attn_mask=) of shape {tuple(attn_mask.shape)} would mask only this rank's piece of the sequence",
                where=_WHERE,
                do="pass is_causal=True, and documents or padding to accelerator.context_parallel(document_ids=, padding_mask=)",
            )
        if key.shape[-3] != query.shape[-3] and not enable_gqa:
            raise UsageError(
                f"{query.shape[-3]} query heads and {key.shape[-3]} key heads", where=_WHERE, do="pass enable_gqa=True"
            )
        return self.attend(query, key, value, is_causal=is_causal, scale=scale, dropout_p=dropout_p)

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        is_causal: bool,
        scale: float | None = None,
        dropout_p: float = 0.0,
        window: int | None = None,
    ) -> torch.Tensor:
        """Return the attention of this rank's positions over the whole sequence.

        Args:
            q: (batch, heads, local length, size).
            k: as ``q``, possibly with fewer heads.
            v: as ``k``.
            is_causal: whether each position sees only itself and earlier ones.
            scale: None: 1 / sqrt(size).
            dropout_p: probability of dropping an attention weight (``ulysses`` only).
            window: number of positions that a query sees.

        Collective: on all ranks of the sequence, forward and backward.

        Raises:
            UsageError: the tensors are not of the piece of this rank.
            ConfigError: dropout with ``ring``.
        """
        local = self.piece.positions.numel()
        if q.dim() != 4 or q.shape[2] != local or k.shape[2] != local:
            raise UsageError(
                f"attention of queries {tuple(q.shape)} and keys {tuple(k.shape)}, but this rank has {local} of the sequence's "
                f"{self.piece.length} positions in dimension 2 of (batch, heads, length, size)",
                where=_WHERE,
                do="pass every tensor with the sequence in buffers=; cross-attention and caches of keys are not supported",
            )
        mask = self.mask if window is None else replace(self.mask, window=window)
        self.num_attended += 1
        if self.method == "ulysses":
            # Transformers' models come here with the mode active, and the heads' own attention is the plain function.
            with torch._C.DisableTorchFunction():
                return ulysses_attention(
                    q, k, v, group=self.group, is_causal=is_causal, scale=scale, mask=mask, dropout_p=dropout_p
                )
        if dropout_p:
            raise ConfigError(
                f"attention dropout {dropout_p} does not work with cp_size={self.group.size}: no rank has all weights of a query",
                where=_WHERE,
                do="set the model's attention dropout to 0 (transformers: config.attention_dropout), or use sp_size",
            )
        return ring_attention(q, k, v, group=self.group, is_causal=is_causal, scale=scale, mask=mask)


def current_region() -> SequenceRegion | None:
    """Return the active region, or None."""
    if has_torch_function((None,)):  # any argument; true if a mode is active
        found: SequenceRegion | None = handle_torch_function(current_region, ())
        return found
    return None


@contextmanager
def sequence_region(
    group: SequenceGroup,
    *,
    method: Literal["ring", "ulysses"],
    buffers: Sequence[torch.Tensor],
    buffer_seq_dims: Sequence[int],
    no_restore_buffers: Sequence[torch.Tensor] = (),
    mask: SequenceMask | None = None,
) -> Iterator[SequenceRegion]:
    """Cut ``buffers`` in place, and compute attention over the whole sequence inside the block.

    In the block, torch's random numbers differ between the ranks of the sequence, because dropout there is of different positions;
    after it, ranks that had equal numbers have them again.

    Args:
        group: the ranks of the sequence.
        method: ``ring`` or ``ulysses``.
        buffers: tensors with whole sequences, equal on all ranks of ``group``; not parameters.
        buffer_seq_dims: the dimension of the sequence in each of them.
        no_restore_buffers: those of ``buffers`` that stay cut after the block.
        mask: documents and padding of the whole sequence.

    Raises:
        UsageError: ``buffers`` and ``buffer_seq_dims`` do not belong together.
        ConfigError: the length cannot be divided among the ranks.

    Source: torch.distributed.tensor.experimental.context_parallel.
    """
    length = _checked_length(buffers, buffer_seq_dims, no_restore_buffers)
    device = buffers[0].device
    piece = SequencePiece(length=length, positions=group.order.positions(length, group.rank, device=device))
    region = SequenceRegion(group, method=method, piece=piece, mask=mask or SequenceMask())
    kept = {id(buffer) for buffer in no_restore_buffers}
    whole = [None if id(buffer) in kept else buffer.detach() for buffer in buffers]  # share the storage
    with torch.no_grad():
        for buffer, dim in zip(buffers, buffer_seq_dims, strict=True):
            # Another storage, because views and expanded tensors share theirs.
            buffer.set_(group.order.cut(buffer, dim, group.rank))  # type: ignore[call-overload]
    numbers: AbstractContextManager[RankNumbers | None]
    numbers = nullcontext() if group.size == 1 else own_random_numbers(group.rank, device)  # alone as the plain program
    shared: RankNumbers | None = None
    try:
        with numbers as shared, region:
            yield region
    finally:
        if shared is not None:
            shared.advance()
        with torch.no_grad():
            for buffer, old in zip(buffers, whole, strict=True):
                if old is not None:
                    buffer.set_(old)  # type: ignore[call-overload]


def _checked_length(
    buffers: Sequence[torch.Tensor], dims: Sequence[int], no_restore_buffers: Sequence[torch.Tensor]
) -> int:
    def refuse(what: str, do: str) -> UsageError:
        return UsageError(what, where="context_parallel(buffers=)", do=do)

    if not buffers:
        raise refuse(
            "no buffers were given", "pass the tensors with the sequence, such as input_ids, labels and position_ids"
        )
    if len(buffers) != len(dims):
        raise refuse(f"{len(buffers)} buffers but {len(dims)} buffer_seq_dims", "pass one dimension for each buffer")
    if any(all(buffer is not other for other in buffers) for buffer in no_restore_buffers):
        raise refuse("no_restore_buffers has a tensor that is not in buffers", "pass a part of buffers")
    if any(isinstance(buffer, nn.Parameter) or buffer.requires_grad for buffer in buffers):
        raise refuse("a buffer is a parameter or requires gradients", "pass only inputs, and buffers of the model")
    lengths = [buffer.shape[dim] for buffer, dim in zip(buffers, dims, strict=True)]
    if len(set(lengths)) > 1:
        raise refuse(
            f"the sequences of the buffers have lengths {lengths}", "pass buffers with the same sequence length"
        )
    return lengths[0]
