"""Attention between a range of queries and a range of keys, with the logarithm of its normalization.

All tensors are (batch, heads, length, size) with equally many heads. ``allowed`` is None or bool, and broadcasts to (batch, heads,
queries, keys); it is not combined with ``is_causal``.
"""

from __future__ import annotations

from typing import Literal

import torch

__all__ = ["attend_block", "attend_block_backward"]

_FLASH_DTYPES = (torch.float16, torch.bfloat16)


def attend_block(
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


def attend_block_backward(
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
