"""Computes the norm of sharded and unsharded gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from echelon.engines.shards import local_tensors

__all__ = ["total_norm"]


def total_norm(
    gradients: Sequence[torch.Tensor], p: float, mesh: DeviceMesh | None, device: torch.device
) -> torch.Tensor:
    """Return the p-norm of ``gradients``, each of which is sharded across ranks or equal on all ranks.

    Collective if any gradient is sharded.
    """
    sharded = [g for g in gradients if isinstance(g, DTensor)]
    is_max = math.isinf(p)
    own = _power_sum(local_tensors(sharded), p, device)
    if sharded and mesh is not None:
        group = mesh.get_group(mesh.mesh_dim_names[-1]) if mesh.mesh_dim_names else mesh.get_group()
        dist.all_reduce(own, op=dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM, group=group)
    rest = _power_sum([g for g in gradients if not isinstance(g, DTensor)], p, device)
    return torch.maximum(own, rest) if is_max else (own + rest) ** (1.0 / p)


def _power_sum(tensors: Sequence[torch.Tensor], p: float, device: torch.device) -> torch.Tensor:
    """Return the sum of the p-th powers (or the maximum if p is infinite) as a 0-d tensor with at least float32 precision."""
    # The dtype must be the same on every rank, including ranks without elements, so empty tensors count.
    wide = max((t.dtype.to_real() for t in tensors), key=lambda dtype: torch.finfo(dtype).bits, default=torch.float32)
    wide = torch.float32 if torch.finfo(wide).bits < 32 else wide
    filled = [t for t in tensors if t.numel()]
    if not filled:
        return torch.zeros((), dtype=wide, device=device)
    norms = torch.stack([norm.to(device=device, dtype=wide) for norm in torch._foreach_norm(filled, p)])
    return norms.max() if math.isinf(p) else (norms**p).sum()
