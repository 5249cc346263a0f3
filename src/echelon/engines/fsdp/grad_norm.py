"""Computes the norm of gradients that are sharded over any axes of a device mesh."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

__all__ = ["total_norm"]


def total_norm(
    gradients: Sequence[torch.Tensor], p: float, device: torch.device, *, also: Sequence[dist.ProcessGroup] = ()
) -> torch.Tensor:
    """Return the p-norm of ``gradients``; the placements of each DTensor tell over which ranks it is sharded.

    Shards are summed in one all_reduce per distinct set of mesh axes, and ranks that hold equal copies count once.

    Collective if a gradient is sharded, or ``also`` is not empty: call with the gradients of the same parameters on the ranks of
    each mesh.

    Args:
        gradients: gradients of different parameters.
        p: order of the norm; infinity is the maximum.
        device: device of the result.
        also: groups whose ranks hold different parameters, such as the stages of a pipeline.
    """
    is_max = math.isinf(p)
    operation = dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM
    # The keys are in the order of the parameters, and so equal on the ranks of a mesh.
    parts: dict[tuple[dist.ProcessGroup, ...], list[torch.Tensor]] = defaultdict(list)
    whole: list[torch.Tensor] = []
    for gradient in gradients:
        if not isinstance(gradient, DTensor):
            whole.append(gradient)
            continue
        settled = _without_partial(gradient)
        groups = tuple(_sharding_groups(settled))
        (parts[groups] if groups else whole).append(settled.to_local())
    total = _power_sum(whole, p, device)
    for groups, tensors in parts.items():
        own = _power_sum(tensors, p, device)
        for group in groups:
            dist.all_reduce(own, op=operation, group=group)
        total = torch.maximum(total, own) if is_max else total + own
    if also:
        # The ranks of these groups may have gradients of different dtypes, or none.
        dtype, total = total.dtype, total if device.type == "mps" else total.double()
        for group in also:
            dist.all_reduce(total, op=operation, group=group)
        total = total.to(dtype)
    return total if is_max else total ** (1.0 / p)


def _without_partial(gradient: DTensor) -> DTensor:
    """Return ``gradient`` with partial sums added. Collective if there are any."""
    if not any(placement.is_partial() for placement in gradient.placements):
        return gradient
    settled = [Replicate() if placement.is_partial() else placement for placement in gradient.placements]
    found: DTensor = gradient.redistribute(placements=settled)
    return found


def _sharding_groups(gradient: DTensor) -> Iterator[dist.ProcessGroup]:
    """Yield the groups of the mesh axes over which ``gradient`` is sharded; axes of size 1 also count, because they keep the
    sets of axes equal in runs of all sizes.
    """
    for axis, placement in enumerate(gradient.placements):
        if not placement.is_replicate():  # torch's strided shards are not always instances of Shard
            yield gradient.device_mesh.get_group(axis)


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
