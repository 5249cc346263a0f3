"""Clips by a gradient norm that is bit-identical for any distribution of the gradients' rows across ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from echelon.base.sharded import is_dtensor
from echelon.engines.shards import local_slices, local_tensors


def clip_by_rows(
    parameters: Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float,
    *,
    num_chunks: int = 1,
    copies: DeviceMesh | None = None,
) -> torch.Tensor:
    """Clip the gradients to a norm of at most ``max_norm``; return the norm before clipping (0-d).

    Each rank computes the norm of each row (along the first dimension) that it holds; the kernel's result for a row does not
    depend on the number of rows. Every rank then receives the norms of all rows in one float64 vector. Rows that ranks may share are
    divided into chunks, each of which is on a single rank.

    Collective if parameters are sharded.

    Args:
        parameters: the parameters whose gradients are clipped in place.
        max_norm: the largest norm.
        norm_type: order of the norm.
        num_chunks: number of chunks of each row whose length is a multiple of it.
        copies: 1-D mesh of the ranks that hold equal gradients of parameters that are not sharded over it (tensor parallelism).
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return torch.tensor(0.0)
    device = local_tensors(gradients[:1])[0].device
    is_sharded = any(is_dtensor(gradient) for gradient in gradients)
    rows = [_row_norms(gradient, norm_type, num_chunks=num_chunks).to(device) for gradient in gradients]
    if is_sharded:
        for gradient, norms in zip(gradients, rows):
            if not _counts(gradient, copies):
                norms.zero_()
    vector = torch.cat([norms.flatten() for norms in rows])
    if is_sharded:
        dist.all_reduce(vector)  # exact, because each element is non-zero on only one rank
    norm: torch.Tensor = torch.linalg.vector_norm(vector, norm_type)
    norm = norm.to(max((gradient.dtype.to_real() for gradient in gradients), key=lambda dtype: torch.finfo(dtype).bits))
    if math.isfinite(max_norm):
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for gradient in local_tensors(gradients):
            gradient.mul_(scale.to(gradient.device))
    return norm


def _counts(gradient: torch.Tensor, copies: DeviceMesh | None) -> bool:
    """Return whether this rank is the first of those with the same part of ``gradient``."""
    if not is_dtensor(gradient):
        return dist.get_rank() == 0
    if copies is None or copies.get_local_rank() == 0:
        return True
    mesh = gradient.device_mesh
    axes = [axis for axis in range(mesh.ndim) if mesh.get_group(axis) == copies.get_group()]
    return any(not gradient.placements[axis].is_replicate() for axis in axes)


def _row_norms(gradient: torch.Tensor, norm_type: float, *, num_chunks: int) -> torch.Tensor:
    """Return the norm of each chunk of each row of the full gradient (rows x chunks), with zeros for those on other ranks."""
    (local,) = local_tensors([gradient])
    length = gradient.shape[1:].numel()
    if local.dim() < 2:
        found = local.reshape(-1, 1).abs().double()
        width = 1
    else:
        width = length // num_chunks if length % num_chunks == 0 else length
        wide = torch.promote_types(local.dtype, torch.float32)
        rows = local.reshape(-1, max(1, width))
        found = torch.linalg.vector_norm(rows, norm_type, dim=1, dtype=wide).double()
        found = found.view(local.shape[0], found.numel() // max(1, local.shape[0]))
    if not is_dtensor(gradient):
        return found
    norms = found.new_zeros(gradient.shape[0], length // max(1, width))
    own = local_slices(gradient)
    first = own[1].start * gradient.shape[2:].numel() // width if gradient.dim() > 1 and width else 0
    norms[own[0], first : first + found.shape[1]] = found
    return norms
