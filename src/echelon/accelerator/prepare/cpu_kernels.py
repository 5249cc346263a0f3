"""Replaces three of torch's CPU kernels in this process by others of torch, which compute the same bits in less time."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch

__all__ = ["draw_masks_in_integers", "pool_channels_last", "pool_gradients_channels_last"]

_FEWEST_CHANNELS, _FEWEST_PIXELS = 8, 2**15  # with fewer, the copies take longer than the pooling
_POOLED = (torch.float32, torch.float64)
_FEWEST_DRAWN = 2**12
_DRAWN_AT_ONCE = 2**15  # they stay in the processor's cache
_MANTISSA = 53  # bits of a float64 number


@lru_cache(maxsize=1)
def pool_channels_last() -> torch.library.Library:
    """Pool contiguous images by the kernel for the channels last format, which compares several channels in one instruction.

    The kernel for contiguous images compares one number after the other. Returns what must stay alive.
    """
    return _replace("max_pool2d_with_indices", _max_pool2d)


@lru_cache(maxsize=1)
def pool_gradients_channels_last() -> torch.library.Library:
    """Compute the gradients of pooled channels last images by the kernel for that format, even if those that arrive are contiguous.

    They are if the pooled images were flattened. torch then copies the images' gradients and the indices to the other format, and the result
    back. Returns what must stay alive.
    """
    return _replace("max_pool2d_with_indices_backward", _max_pool2d_backward)


@lru_cache(maxsize=1)
def draw_masks_in_integers() -> torch.library.Library | None:
    """Draw the masks of dropout as integers, if this torch gives the same masks and leaves the generator in the same state.

    ``bernoulli_`` makes a float64 number of each. On Intel's processors, torch draws them with MKL, and nothing is replaced: returns None.
    """
    first, second = (torch.Generator().manual_seed(1) for _ in range(2))
    own = _bernoulli(torch.empty(3 * _FEWEST_DRAWN), 0.3, generator=second)
    drawn = torch.empty(own.shape).bernoulli_(0.3, generator=first)
    if not torch.equal(own, drawn) or not torch.equal(first.get_state(), second.get_state()):
        return None
    return _replace("bernoulli_.float", _bernoulli)


def _replace(name: str, kernel: Callable[..., Any]) -> torch.library.Library:
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that there was a kernel
        library.impl(name, kernel, "CPU")
    return library  # type: ignore[no-any-return]


def _max_pool2d(
    images: torch.Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pool ``(N, C, H, W)`` or ``(C, H, W)``; the results have the format that torch's kernel gives them."""
    out: Any = torch.ops.aten.max_pool2d_with_indices.out  # has kernels of its own, which are not replaced
    values, indices = images.new_empty(0), images.new_empty(0, dtype=torch.int64)
    converts = (
        images.dim() == 4
        and images.size(1) >= _FEWEST_CHANNELS
        and images.numel() >= _FEWEST_PIXELS
        and images.dtype in _POOLED
        and images.is_contiguous()
        and not images.is_contiguous(memory_format=torch.channels_last)
    )
    if converts:
        images = images.contiguous(memory_format=torch.channels_last)
    out(images, kernel_size, stride, padding, dilation, ceil_mode, out=values, indices=indices)
    return (values.contiguous(), indices.contiguous()) if converts else (values, indices)


def _max_pool2d_backward(
    gradients: torch.Tensor,
    images: torch.Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    indices: torch.Tensor,
) -> torch.Tensor:
    """Return the gradients of ``images`` from those of the pooled ones. Both kernels add them in the same order."""
    # This overload has kernels of its own, which are not replaced.
    into: Any = torch.ops.aten.max_pool2d_with_indices_backward.grad_input
    if images.dim() == 4 and _is_channels_last_only(images):
        gradients = gradients.contiguous(memory_format=torch.channels_last)
    options = kernel_size, stride, padding, dilation, ceil_mode, indices
    return into(gradients, images, *options, grad_input=images.new_empty(0))  # type: ignore[no-any-return]


def _is_channels_last_only(images: torch.Tensor) -> bool:
    return images.is_contiguous(memory_format=torch.channels_last) and not images.is_contiguous()


def _bernoulli(
    mask: torch.Tensor, probability: float = 0.5, *, generator: torch.Generator | None = None
) -> torch.Tensor:
    """Set each element to 1 with ``probability``, else to 0.

    torch compares ``(random64() % 2**53) / 2**53`` with the probability; to compare the integers gives the same.
    """
    # torch fills a tensor in the order of its memory.
    is_channels_last = mask.is_contiguous(memory_format=torch.channels_last) if mask.dim() == 4 else False
    is_dense = is_channels_last or mask.is_contiguous()
    if mask.numel() < _FEWEST_DRAWN or not is_dense or not 0 <= probability <= 1:
        by_tensor: Any = torch.ops.aten.bernoulli_.Tensor  # has a kernel of its own, which draws the same
        return by_tensor(mask, torch.tensor(probability, dtype=torch.float64), generator=generator)  # type: ignore[no-any-return]
    drawn, limit = torch.empty(_DRAWN_AT_ONCE, dtype=torch.int64), math.ceil(probability * (1 << _MANTISSA))
    for part in torch.split(mask.as_strided((mask.numel(),), (1,)), _DRAWN_AT_ONCE):
        integers = drawn[: part.numel()].random_(generator=generator).bitwise_and_((1 << _MANTISSA) - 1)
        torch.lt(integers, limit, out=part)
    return mask
