"""Attention over a sequence that is cut over ranks: keys and values visit each rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch

from echelon.engines.context_parallel.sequence_group import SequenceGroup
from echelon.engines.context_parallel.sequence_mask import SequenceMask
from echelon.engines.context_parallel.sequence_order import BlockPair


def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    group: SequenceGroup,
    is_causal: bool,
    scale: float | None = None,
    mask: SequenceMask | None = None,
) -> torch.Tensor:
    """Return softmax(q k^T * scale) v over the whole sequence, for the positions of this rank.

    Args:
        q: (batch, heads, local length, size): this rank's positions, in the order of ``group.order``.
        k: as ``q``; its number of heads may be a divisor of the heads of ``q`` (grouped-query attention).
        v: as ``k``.
        group: the ranks of the sequence.
        is_causal: whether each position sees only itself and earlier ones.
        scale: None: 1 / sqrt(size).
        mask: documents, padding and window; None: everything is seen.

    Queries that see no key return 0, as in torch's scaled_dot_product_attention.

    Collective: on all ranks of ``group``, forward and backward.

    Source: Liu et al., "Ring Attention with Blockwise Transformers", 2023; the blocks' results are merged as in Dao et al.,
    "FlashAttention", 2022.
    """
    chosen = q.shape[-1] ** -0.5 if scale is None else scale
    masked = None if mask is None or mask.is_empty else mask
    setting = _Setting(group=group, is_causal=is_causal, scale=chosen, mask=masked)
    out: torch.Tensor = _Ring.apply(q, k, v, setting)  # type: ignore[no-untyped-call]
    return out


@dataclass(frozen=True, slots=True, kw_only=True)
class _Setting:
    group: SequenceGroup
    is_causal: bool
    scale: float
    mask: SequenceMask | None

    def blocks(self, source: int, q: torch.Tensor) -> Iterator[tuple[BlockPair, dict[str, Any]]]:
        """Yield the blocks that this rank computes with the keys of ``source``, with the arguments of the kernel."""
        group, length = self.group, q.shape[2]
        pairs = group.order.block_pairs(group.rank, source, length, is_causal=self.is_causal)
        if self.mask is None:
            for pair in pairs:
                yield pair, {"is_causal": pair.is_diagonal, "allowed": None, "scale": self.scale}
            return
        whole = length * group.size
        own, other = (group.order.positions(whole, rank, device=q.device) for rank in (group.rank, source))
        for pair in pairs:
            allowed = self.mask.allowed(own[pair.queries], other[pair.keys], is_causal=self.is_causal)
            yield pair, {"is_causal": False, "allowed": allowed, "scale": self.scale}


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, setting: _Setting) -> torch.Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        total = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=wide, device=q.device)
        lse = torch.full(q.shape[:-1], float("-inf"), dtype=wide, device=q.device)
        num_groups = q.shape[1] // k.shape[1]
        for source, both in setting.group.sources(_packed(k, v)):
            keys, values = _unpacked(both, k, v)
            for pair, options in setting.blocks(source, q):
                out, own_lse = _attend_block(
                    q[:, :, pair.queries],
                    _expand(keys[:, :, pair.keys], num_groups),
                    _expand(values[:, :, pair.keys], num_groups),
                    **options,
                )
                _merge(total[:, :, pair.queries], lse[:, :, pair.queries], out, own_lse)
        found = total.to(q.dtype)
        # The last tensor only makes the number of saved tensors differ from that of local attention: activation checkpointing compares
        # it, and so notices when the forward pass is repeated outside the context.
        ctx.save_for_backward(q, k, v, found, lse, lse.new_empty(0))
        ctx.setting = setting
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
        q, k, v, out, lse, _ = ctx.saved_tensors
        setting: _Setting = ctx.setting
        group, grad = setting.group, grads[0].contiguous()
        num_groups = q.shape[1] // k.shape[1]
        # exp(-inf - lse) is 0 for a query that sees no key, where exp(-inf + inf) is NaN.
        lse = lse.masked_fill(lse == float("-inf"), 0.0)
        grad_q = torch.zeros_like(q, dtype=lse.dtype)
        moving = _packed(k, v).to(lse.dtype).zero_()  # the gradients of the keys and values that this rank holds now
        gathered = moving.new_zeros(group.size, *moving.shape) if group.exchange == "allgather" else None
        for step, (source, both) in enumerate(group.sources(_packed(k, v))):
            if step and gathered is None:
                moving = group.pass_on(moving)
            target = moving if gathered is None else gathered[source]
            keys, values = _unpacked(both, k, v)
            target_k, target_v = _unpacked(target, k, v)
            for pair, options in setting.blocks(source, q):
                own_q, own_k, own_v = _attend_block_backward(
                    grad[:, :, pair.queries],
                    q[:, :, pair.queries],
                    _expand(keys[:, :, pair.keys], num_groups),
                    _expand(values[:, :, pair.keys], num_groups),
                    out[:, :, pair.queries],
                    lse[:, :, pair.queries].contiguous(),
                    **options,
                )
                grad_q[:, :, pair.queries] += own_q
                target_k[:, :, pair.keys] += _sum_groups(own_k, num_groups)
                target_v[:, :, pair.keys] += _sum_groups(own_v, num_groups)
        moving = group.pass_on(moving) if gathered is None else group.reduce_to_sources(gathered)
        grad_k, grad_v = _unpacked(moving, k, v)
        return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype), None


def _merge(total: torch.Tensor, lse: torch.Tensor, out: torch.Tensor, own_lse: torch.Tensor) -> None:
    """Add a block's output to ``total``, and its log-sum-exp to ``lse``, in place."""
    joint = torch.logaddexp(lse, own_lse.to(lse.dtype))
    safe = joint.masked_fill(joint == float("-inf"), 0.0)  # no key so far: both weights are exp(-inf) = 0
    total.mul_(torch.exp(lse - safe)[..., None]).add_(out * torch.exp(own_lse.to(lse.dtype) - safe)[..., None])
    lse.copy_(joint)


def _packed(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return keys and values in one 1-D tensor, so that one message carries them."""
    return torch.cat([k.flatten(), v.flatten()])


def _unpacked(both: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views with the shapes of ``k`` and ``v``."""
    return both[: k.numel()].view(k.shape), both[k.numel() :].view(v.shape)


def _expand(heads: torch.Tensor, num_groups: int) -> torch.Tensor:
    return heads if num_groups == 1 else heads.repeat_interleave(num_groups, dim=1)


def _sum_groups(grad: torch.Tensor, num_groups: int) -> torch.Tensor:
    return grad if num_groups == 1 else grad.unflatten(1, (-1, num_groups)).sum(2)  # type: ignore[no-untyped-call]


# ---- one block of queries and keys -----------------------------------------------------------------------------------
# All tensors are (batch, heads, length, size) with equally many heads. ``allowed`` is None or bool, and broadcasts to (batch, heads,
# queries, keys); it is not combined with ``is_causal``.


_FLASH_DTYPES = (torch.float16, torch.bfloat16)


def _attend_block(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    is_causal: bool,
    allowed: torch.Tensor | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return softmax(q k^T * scale) v, and the log-sum-exp of each query: (batch, heads, queries), -inf for those that see no key."""
    kernel = _kernel_for(q, v, allowed)
    if kernel == "cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, is_causal, attn_mask=_bias(allowed, q), scale=scale
        )
        if allowed is not None:  # the kernel returns 0 for the log-sum-exp over no key
            lse = lse.masked_fill(~allowed.any(-1), float("-inf"))
        return out, lse
    if kernel == "cuda":
        found = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, False, scale=scale)
        return found[0], found[1]
    scores = _scores(q, k, is_causal=is_causal, allowed=allowed, scale=scale)
    lse = torch.logsumexp(scores, -1)
    # For queries that see no key, the weights are exp(-inf) and not NaN.
    weights = torch.exp(scores - lse.masked_fill(lse == float("-inf"), 0.0)[..., None])
    return (weights @ v.to(scores.dtype)).to(q.dtype), lse


def _attend_block_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    is_causal: bool,
    allowed: torch.Tensor | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of q, k and v.

    ``out`` and ``lse`` are those over all keys, not only the keys of this block; ``lse`` is 0 for queries that see no key at all.
    """
    kernel = _kernel_for(q, v, allowed)
    found: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    if kernel == "cpu":
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, is_causal, attn_mask=_bias(allowed, q), scale=scale
        )
        return found
    if kernel == "cuda":
        state = torch.empty(0, dtype=torch.int64, device=q.device)  # of the generator, which only dropout uses
        lengths = None, None, q.shape[-2], k.shape[-2]  # no sequences of different lengths
        found = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse.contiguous(), *lengths, 0.0, is_causal, state, state, scale=scale
        )
        return found
    scores = _scores(q, k, is_causal=is_causal, allowed=allowed, scale=scale)
    dtype = scores.dtype
    weights = torch.exp(scores - lse[..., None])
    grad, out = grad.to(dtype), out.to(dtype)
    grad_v = weights.transpose(-1, -2) @ grad
    products = grad @ v.to(dtype).transpose(-1, -2)
    inner = weights * (products - (grad * out).sum(-1, keepdim=True)) * scale
    grad_q, grad_k = inner @ k.to(dtype), inner.transpose(-1, -2) @ q.to(dtype)
    return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype)


def _kernel_for(q: torch.Tensor, v: torch.Tensor, allowed: torch.Tensor | None) -> Literal["cpu", "cuda"] | None:
    """Return which of torch's flash kernels computes the block; None: the formula, which keeps the block's matrix in memory."""
    if q.shape[-1] != v.shape[-1]:
        return None
    if q.device.type == "cpu":  # float64, float32, bfloat16 and float16
        return "cpu"
    is_supported = q.shape[-1] % 8 == 0 and q.shape[-1] <= 256 and q.dtype in _FLASH_DTYPES and allowed is None
    return "cuda" if q.device.type == "cuda" and is_supported else None


def _bias(allowed: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor | None:
    if allowed is None:
        return None
    return torch.zeros(allowed.shape, dtype=like.dtype, device=like.device).masked_fill_(~allowed, float("-inf"))


def _scores(
    q: torch.Tensor, k: torch.Tensor, *, is_causal: bool, allowed: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """Return q k^T * scale in at least float32, with -inf for keys that are not seen."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    scores = (q.to(dtype) @ k.to(dtype).transpose(-1, -2)) * scale
    if is_causal:
        allowed = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
    return scores if allowed is None else scores.masked_fill(~allowed, float("-inf"))
