"""Type checks for torch's sharded tensors and modules, without importing ``torch.distributed.tensor`` or ``fsdp``.

These packages take about as long to import as torch itself, and programs without sharding never need them. A ``DTensor`` can
exist only if its module has been imported, so the class is looked up in ``sys.modules``.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

__all__ = ["is_dtensor", "is_fsdp_module", "is_old_fsdp", "local_shape_and_offset"]


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
    """Return the shape of this rank's shard of ``tensor`` and its offset in the whole tensor."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # noqa: PLC0415 - as above

    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(shape), tuple(offset)


def _is_a(value: object, module: str, name: str) -> bool:
    loaded: Any = sys.modules.get(module)
    kind = getattr(loaded, name, None)  # also None while another thread is importing the module
    return kind is not None and isinstance(value, kind)
