"""Type checks for torch's sharded tensors and modules, without importing ``torch.distributed.tensor`` or ``fsdp``.

These packages take about as long to import as torch itself, and programs without sharding never need them. A ``DTensor`` can
exist only if its module has been imported, so the class is looked up in ``sys.modules``.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Return whether ``value`` is a DTensor."""
    return _is_a(value, "torch.distributed.tensor", "DTensor")


def is_fsdp_module(module: object) -> TypeGuard[FSDPModule]:
    """Return whether ``fully_shard`` was applied to ``module`` itself."""
    return _is_a(module, "torch.distributed.fsdp", "FSDPModule")


def is_old_fsdp(module: object) -> bool:
    """Return whether ``module`` is an FSDP1 wrapper."""
    return _is_a(module, "torch.distributed.fsdp", "FullyShardedDataParallel")


def local_shape_and_offset(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape of this rank's shard of ``tensor`` and its offset in the whole tensor.

    ``fully_shard`` divides what another mesh axis (tensor or expert parallelism) has divided before; if both divide the same dimension, the
    outer mesh axis has a strided placement. The shard is contiguous nevertheless.

    Raises:
        ValueError: the shard is not contiguous.
    """
    if any(is_strided(placement) for placement in tensor.placements):
        coordinate = tensor.device_mesh.get_coordinate()
        assert coordinate is not None
        return shape_and_offset_at(tensor, coordinate)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # noqa: PLC0415 - as above

    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(shape), tuple(offset)


def is_strided(placement: object) -> bool:
    """Return whether ``placement`` is torch's private ``_StridedShard``, which is a kind of ``Shard`` in some versions only."""
    return type(placement).__name__ == "_StridedShard"


def shape_and_offset_at(tensor: DTensor, coordinate: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape and the offset of the shard of the rank at ``coordinate`` in the mesh of ``tensor``.

    Each strided placement divides what the later mesh axes leave of its dimension.

    Raises:
        ValueError: the shard is not contiguous.

    Source: torch.distributed.tensor.placement_types._StridedShard.
    """
    mesh = tensor.device_mesh
    shape, offset = list(tensor.shape), [0] * tensor.dim()
    plain = [axis for axis, p in enumerate(tensor.placements) if not is_strided(p)]
    strided = [axis for axis, p in enumerate(tensor.placements) if is_strided(p)]
    for axis in (*plain, *reversed(strided)):
        placement: Any = tensor.placements[axis]
        if placement.is_replicate():
            continue
        dim = placement.dim
        if axis in strided:
            later = [i for i in range(axis + 1, mesh.ndim) if getattr(tensor.placements[i], "dim", None) == dim]
            if placement.split_factor != math.prod(mesh.size(i) for i in later):
                raise ValueError(
                    f"the placements {tensor.placements} of a {tuple(tensor.shape)} tensor are not contiguous"
                )
        size = -(-shape[dim] // mesh.size(axis))
        start = min(shape[dim], size * coordinate[axis])
        shape[dim] = min(shape[dim], start + size) - start
        offset[dim] += start
    return tuple(shape), tuple(offset)


def _is_a(value: object, module: str, name: str) -> bool:
    loaded: Any = sys.modules.get(module)
    kind = getattr(loaded, name, None)  # also None while another thread is importing the module
    return kind is not None and isinstance(value, kind)
