"""Attention over a sequence that is cut over ranks: each rank computes some of the heads, over the whole sequence."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

from echelon.base.errors import ConfigError
from echelon.engines.context_parallel.sequence_group import SequenceGroup
from echelon.engines.context_parallel.sequence_mask import SequenceMask


def ulysses_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    group: SequenceGroup,
    is_causal: bool,
    scale: float | None = None,
    mask: SequenceMask | None = None,
    dropout_p: float = 0.0,
) -> torch.Tensor:
    """Return softmax(q k^T * scale) v over the whole sequence, for the positions of this rank.

    Two exchanges: from all heads of a piece of the sequence to the whole sequence of some heads, and back. Key and value heads are
    repeated if there are fewer than ranks.

    Args: as of ``ring_attention``, and ``dropout_p``, the probability with which attention weights are dropped.

    Collective: on all ranks of ``group``, forward and backward.

    Raises:
        ConfigError: the heads cannot be divided among the ranks.

    Source: Jacobs et al., "DeepSpeed Ulysses", 2023.
    """
    num_ranks = group.size
    if q.shape[1] % num_ranks:
        raise ConfigError(
            f"{q.shape[1]} attention heads cannot be divided among {num_ranks} ranks, each of which computes whole heads",
            where="sp_size",
            do="set sp_size to a divisor of the number of heads (with tp: of the heads of one rank), or use cp_size, which divides sequences only",
        )
    if k.shape[1] % num_ranks:  # as few copies as possible: each rank needs the key heads of its query heads
        copies = num_ranks // k.shape[1] if num_ranks % k.shape[1] == 0 else q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(copies, dim=1), v.repeat_interleave(copies, dim=1)
    q, k, v = (_Exchange.apply(part, group, True) for part in (q, k, v))  # type: ignore[no-untyped-call]
    seen = None
    if mask is not None and not mask.is_empty:
        positions = torch.arange(q.shape[2], device=q.device)
        seen = mask.allowed(positions, positions, is_causal=is_causal)
    out = scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=seen,
        dropout_p=dropout_p,
        is_causal=is_causal and seen is None,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    found: torch.Tensor = _Exchange.apply(out, group, False)  # type: ignore[no-untyped-call]
    return found


class _Exchange(torch.autograd.Function):
    """To (batch, heads / W, length, size) from (batch, heads, length / W, size), or back. Each is the other's gradient."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: SequenceGroup, to_heads: bool) -> torch.Tensor:
        ctx.group, ctx.to_heads = group, to_heads
        return _to_heads(part, group) if to_heads else _to_positions(part, group)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor, None, None]:
        change = _to_positions if ctx.to_heads else _to_heads
        return change(grads[0], ctx.group), None, None


def _to_heads(part: torch.Tensor, group: SequenceGroup) -> torch.Tensor:
    pieces = _all_to_all(torch.stack(part.chunk(group.size, dim=1)), group)
    return group.order.join(list(pieces), 2)


def _to_positions(part: torch.Tensor, group: SequenceGroup) -> torch.Tensor:
    pieces = torch.stack([group.order.cut(part, 2, rank) for rank in range(group.size)])
    return torch.cat(list(_all_to_all(pieces, group)), dim=1)


def _all_to_all(pieces: torch.Tensor, group: SequenceGroup) -> torch.Tensor:
    received = torch.empty_like(pieces)
    dist.all_to_all_single(received, pieces, group=group.group)
    return received
