"""Gathering the results of an evaluation step: each sample exactly once."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from echelon.data.slices import LastStep
from echelon.distributed.collectives import gather, gather_object, pad_across_processes
from echelon.distributed.tree import leaves, map_tensors

__all__ = ["gather_samples"]


def gather_samples(data: Any, last: LastStep | None, *, objects: bool = False) -> Any:
    """Gather ``data`` of one step over the ranks; in the last step leave out what was repeated to fill the batch.

    Args:
        data: nested tensors whose first dimension is this rank's batch (others are gathered whole), or any object.
        last: what each rank has of the last step; None in every other step.
        objects: gather as objects even if all leaves are tensors.

    Collective: every rank.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    if objects or not all(isinstance(leaf, torch.Tensor) for leaf in leaves(data)):
        if last is not None and isinstance(data, (list, tuple)) and len(data) == last.sizes[rank]:
            data = data[: last.real[rank]]
        return gather_object(data)
    if last is None:
        return gather(data)
    return map_tensors(lambda tensor: _gather_last(tensor, last, rank), data)


def _gather_last(tensor: torch.Tensor, last: LastStep, rank: int) -> torch.Tensor:
    of_samples = tensor.dim() > 0 and tensor.size(0) == last.sizes[rank]
    if not of_samples:
        whole: torch.Tensor = gather(tensor)
        return whole
    largest = max(last.sizes)
    padded = pad_across_processes(tensor) if min(last.sizes) < largest else tensor
    parts = gather(padded).split(largest)
    return torch.cat([part[:real] for part, real in zip(parts, last.real)])
