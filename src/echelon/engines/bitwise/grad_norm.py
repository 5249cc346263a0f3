"""Clips by a gradient norm that is bit-identical for any distribution of the gradients' rows across ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist

from echelon.base.sharded import is_dtensor
from echelon.engines.shards import local_slices, local_tensors

__all__ = ["clip_by_rows"]


def clip_by_rows(parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float) -> torch.Tensor:
    """Clip the gradients to a norm of at most ``max_norm``; return the norm before clipping (0-d).

    Each rank computes the norm of each row (along the first dimension) that it holds; the kernel's result for a row does not
    depend on the number of rows. Every rank then receives the norms of all rows in one float64 vector.

    Collective if parameters are sharded.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return torch.tensor(0.0)
    device = local_tensors(gradients[:1])[0].device
    is_sharded = any(is_dtensor(gradient) for gradient in gradients)
    is_first = not is_sharded or dist.get_rank() == 0
    rows = [_row_norms(gradient, norm_type, is_first=is_first).to(device) for gradient in gradients]
    vector = torch.cat(rows)
    if is_sharded:
        dist.all_reduce(vector)  # exact, because each element is non-zero on only one rank
    norm: torch.Tensor = torch.linalg.vector_norm(vector, norm_type)
    norm = norm.to(max((gradient.dtype.to_real() for gradient in gradients), key=lambda dtype: torch.finfo(dtype).bits))
    if math.isfinite(max_norm):
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for gradient in local_tensors(gradients):
            gradient.mul_(scale.to(gradient.device))
    return norm


def _row_norms(gradient: torch.Tensor, norm_type: float, *, is_first: bool) -> torch.Tensor:
    """Return the norm of each row of the full gradient, with zeros for rows on other ranks."""
    (local,) = local_tensors([gradient])
    if local.dim() < 2:
        found = local.reshape(-1).abs().double()
    else:
        wide = torch.promote_types(local.dtype, torch.float32)
        found = torch.linalg.vector_norm(local.flatten(1), norm_type, dim=1, dtype=wide).double()
    if not is_dtensor(gradient):
        return found if is_first else torch.zeros_like(found)
    norms = found.new_zeros(gradient.shape[0])
    norms[local_slices(gradient)[0]] = found
    return norms
