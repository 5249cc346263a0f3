"""Runs on CPU tensors the operators that torch would choose on a CUDA device, where that changes what is in memory."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

_HALF = (torch.bfloat16, torch.float16)
# Functions whose inputs autocast casts to float32 on CUDA, but not on the CPU. Source: torch's documentation of autocast.
_FLOAT32_ON_CUDA = frozenset(
    {
        *(F.layer_norm, torch.layer_norm, F.group_norm, torch.group_norm, torch.native_layer_norm),
        *(F.softmax, torch.softmax, torch.Tensor.softmax, F.log_softmax, torch.log_softmax, torch.Tensor.log_softmax),
        *(F.nll_loss, F.cross_entropy, F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.kl_div, F.cosine_similarity),
        *(
            torch.exp,
            torch.Tensor.exp,
            torch.log,
            torch.Tensor.log,
            torch.pow,
            torch.Tensor.pow,
            torch.rsqrt,
            torch.Tensor.rsqrt,
        ),
        *(torch.sum, torch.Tensor.sum, torch.cumsum, torch.Tensor.cumsum, torch.prod, torch.Tensor.prod),
        *(torch.norm, torch.Tensor.norm, F.softplus, F.normalize),
    }
)
_DROPOUTS = frozenset({F.dropout, torch.dropout})


def run_as_on_cuda(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call ``func``, a function of torch, as a CUDA device would: fused attention, dropout with masks of bytes, autocast's dtypes."""
    if func is F.scaled_dot_product_attention:
        return _attention(func, *args, **kwargs)
    if func is F.multi_head_attention_forward and kwargs.get("need_weights") is False:
        return func(*args, **{**kwargs, "dropout_p": 0.0})
    if func in _DROPOUTS:
        return _dropout(func, *args, **kwargs)
    if func in _FLOAT32_ON_CUDA and torch.is_autocast_enabled("cpu"):
        wide = [_float32(one) for one in args]
        return func(*wide, **{name: _float32(value) for name, value in kwargs.items()})
    return func(*args, **kwargs)


def _float32(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.dtype in _HALF else value


def _dropout(func: Callable[..., Any], input: torch.Tensor, p: float = 0.5, *rest: Any, **kwargs: Any) -> Any:
    training = kwargs.get("training", kwargs.get("train", rest[0] if rest else True))
    inplace = kwargs.get("inplace", rest[1] if len(rest) > 1 else False)
    if training and not inplace and 0 < p < 1 and input.numel():
        return torch.native_dropout(input, p, True)[0]
    return func(input, p, *rest, **kwargs)


def _attention(
    func: Callable[..., Any],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    *rest: Any,
    **kwargs: Any,
) -> Any:
    """Compute attention in a kernel without the scores, where CUDA has one. Dropout makes no mask in them."""
    is_half = query.dtype in _HALF or torch.is_autocast_enabled("cpu")
    is_grouped = kwargs.get("enable_gqa", False) and query.shape[-3] != key.shape[-3]
    needs_bias_gradient = attn_mask is not None and attn_mask.requires_grad
    is_flash = is_half and attn_mask is None and query.shape[-1] <= 256
    is_fused = query.dim() == 4 and (is_flash or not (is_grouped or needs_bias_gradient))
    with nullcontext() if is_fused else sdpa_kernel([SDPBackend.MATH]):
        return func(query, key, value, attn_mask, 0.0 if is_fused else dropout_p, *rest, **kwargs)
