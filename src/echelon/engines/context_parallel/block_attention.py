"""Attention between a range of queries and a range of keys, with the logarithm of its normalization."""

from __future__ import annotations

from typing import Any, Protocol

import torch

__all__ = ["BlockKernel", "block_kernel"]

_FLASH_DTYPES = (torch.float16, torch.bfloat16)


class BlockKernel(Protocol):
    """Computes softmax(q k^T * scale) v. All tensors are (batch, heads, length, size) with equally many heads.

    ``allowed`` is None or bool, and broadcasts to (batch, heads, queries, keys). It is not combined with ``is_causal``.
    """

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        is_causal: bool,
        allowed: torch.Tensor | None,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output and the log-sum-exp of each query, (batch, heads, queries), -inf for queries that see no key."""

    def backward(
        self,
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
        """Return the gradients of q, k and v. ``out`` and ``lse`` are those over all keys, not only the keys of this block."""


def block_kernel(q: torch.Tensor, v: torch.Tensor) -> BlockKernel:
    """Return the kernel for tensors like ``q`` and ``v``."""
    if q.shape[-1] != v.shape[-1]:
        return _Formula()
    if q.device.type == "cpu":
        return _CpuFlash()
    if q.device.type == "cuda" and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256 and q.dtype in _FLASH_DTYPES:
        return _CudaFlash()
    return _Formula()


def _bias(allowed: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor | None:
    if allowed is None:
        return None
    return torch.zeros(allowed.shape, dtype=like.dtype, device=like.device).masked_fill_(~allowed, float("-inf"))


class _CpuFlash:
    """torch's CPU flash kernel, for float64, float32, bfloat16 and float16."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, is_causal: bool, allowed: Any, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, is_causal, attn_mask=_bias(allowed, q), scale=scale
        )
        if allowed is not None:  # the kernel returns 0 for the log-sum-exp over no key
            lse = lse.masked_fill(~allowed.any(-1), float("-inf"))
        return out, lse

    def backward(
        self,
        grad: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        *,
        is_causal: bool,
        allowed: Any,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        found: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = (
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad, q, k, v, out, lse, 0.0, is_causal, attn_mask=_bias(allowed, q), scale=scale
            )
        )
        return found


class _Formula:
    """The formula, in at least float32: for devices and head sizes without a kernel. It keeps the matrix of one block in memory."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, is_causal: bool, allowed: Any, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self._scores(q, k, is_causal=is_causal, allowed=allowed, scale=scale)
        lse = torch.logsumexp(scores, -1)
        out = torch.exp(scores - _finite(lse)[..., None]) @ v.to(scores.dtype)
        return out.to(q.dtype), lse

    def backward(
        self,
        grad: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        *,
        is_causal: bool,
        allowed: Any,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        scores = self._scores(q, k, is_causal=is_causal, allowed=allowed, scale=scale)
        dtype = scores.dtype
        weights = torch.exp(scores - _finite(lse)[..., None])
        grad, out = grad.to(dtype), out.to(dtype)
        grad_v = weights.transpose(-1, -2) @ grad
        products = grad @ v.to(dtype).transpose(-1, -2)
        inner = weights * (products - (grad * out).sum(-1, keepdim=True)) * scale
        return (
            (inner @ k.to(dtype)).to(q.dtype),
            (inner.transpose(-1, -2) @ q.to(dtype)).to(k.dtype),
            grad_v.to(v.dtype),
        )

    def _scores(self, q: torch.Tensor, k: torch.Tensor, *, is_causal: bool, allowed: Any, scale: float) -> torch.Tensor:
        dtype = torch.promote_types(q.dtype, torch.float32)
        scores = (q.to(dtype) @ k.to(dtype).transpose(-1, -2)) * scale
        if is_causal:
            allowed = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
        return scores if allowed is None else scores.masked_fill(~allowed, float("-inf"))


class _CudaFlash:
    """FlashAttention as torch calls it. It has no masks; blocks with a mask use the formula."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, is_causal: bool, allowed: Any, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if allowed is not None:
            return _Formula().forward(q, k, v, is_causal=is_causal, allowed=allowed, scale=scale)
        found = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, False, scale=scale)
        return found[0], found[1]

    def backward(
        self,
        grad: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        *,
        is_causal: bool,
        allowed: Any,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if allowed is not None:
            return _Formula().backward(grad, q, k, v, out, lse, is_causal=is_causal, allowed=allowed, scale=scale)
        state = torch.empty(0, dtype=torch.int64, device=q.device)  # of the generator, which only dropout uses
        found: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = (
            torch.ops.aten._scaled_dot_product_flash_attention_backward(
                grad,
                q,
                k,
                v,
                out,
                lse.contiguous(),
                None,
                None,
                q.shape[-2],
                k.shape[-2],
                0.0,
                is_causal,
                state,
                state,
                scale=scale,
            )
        )
        return found


def _finite(lse: torch.Tensor) -> torch.Tensor:
    """Return ``lse`` with 0 for queries that see no key, so that their weights are exp(-inf) and not NaN."""
    return lse.masked_fill(lse == float("-inf"), 0.0)
