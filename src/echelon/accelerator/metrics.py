"""Gathers the results of an evaluation step, with each sample exactly once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from echelon.accelerator.gradient_state import GradientState
from echelon.data.exact.global_batch_slices import LastStep
from echelon.distributed.collectives import gather, gather_object
from echelon.distributed.small_messages import gather_bytes
from echelon.distributed.tree import is_record, leaves, map_tensors
from echelon.world.world import World

__all__ = ["gather_samples", "own_samples", "trim_for_metrics"]


def gather_samples(data: Any, last: LastStep | None, *, world: World, objects: bool = False) -> Any:
    """Gather ``data`` of one step across the ranks of ``world``, without samples that were repeated to fill the batch.

    Args:
        data: nested tensors whose first dimension is this rank's batch (others are gathered whole), or any object.
        last: number of samples on each rank in the step; None if it is the same on all ranks and none is repeated.
        world: the ranks that read different samples.
        objects: gather as objects even if all leaves are tensors.

    Collective: call on every rank.
    """
    if objects or not _is_of_tensors(data):
        if last is not None and isinstance(data, (list, tuple)) and len(data) == last.sizes[world.rank]:
            data = data[: last.real[world.rank]]
        return gather_object(data, mesh=world.mesh)
    if last is None:
        return gather(data, mesh=world.mesh)
    # A tensor holds samples only if its size matches on every rank; on a single rank it may match by chance.
    votes = gather_bytes(bytes(_has_samples(leaf, last, world.rank) for leaf in leaves(data)), group=world.group)
    if len({len(vote) for vote in votes}) > 1:
        return gather(data, mesh=world.mesh)  # raises an error that describes the difference
    of_samples = iter([all(theirs) for theirs in zip(*votes)])
    return map_tensors(
        lambda tensor: _gather_step(tensor, last, world) if next(of_samples) else gather(tensor, mesh=world.mesh), data
    )


def trim_for_metrics(state: GradientState, input_data: Any) -> Any:
    """Return the results for one batch of a prepared loader, without samples that another process also counts.

    Use this for metrics that each process accumulates itself and that are reduced once after the loop
    (``accelerator.reduce``, torchmetrics). If a process has only a padding sample in a step, its results become empty.

    Args:
        input_data: nested tensors whose first dimension is the batch, or a list with one item per sample.
    """
    loader = state.active_dataloader
    return input_data if loader is None else own_samples(input_data, loader.step_to_trim(), rank=loader.data_rank)


def own_samples(data: Any, last: LastStep | None, *, rank: int) -> Any:
    """Return ``data`` of one step without this rank's repeated and padding samples.

    Args:
        data: nested tensors whose first dimension is this rank's batch, or a list with one item per sample; anything else is
            returned unchanged.
        last: number of samples on each rank in the step; None if it is the same on all ranks and none is repeated.
        rank: this rank's index among the ranks that read different samples.
    """
    if last is None or last.real[rank] == last.sizes[rank]:
        return data
    real = last.real[rank]
    if _is_of_tensors(data):
        return map_tensors(lambda tensor: tensor[:real] if _has_samples(tensor, last, rank) else tensor, data)
    return data[:real] if isinstance(data, (list, tuple)) and len(data) == last.sizes[rank] else data


def _is_of_tensors(data: Any) -> bool:
    if isinstance(data, (list, tuple)) and any(is_record(item) for item in data):
        return False  # a list of samples, each an object
    return all(isinstance(leaf, torch.Tensor) for leaf in leaves(data))


def _gather_step(tensor: torch.Tensor, last: LastStep, world: World) -> torch.Tensor:
    largest = max(last.sizes)
    padding = tensor.new_zeros((largest - tensor.size(0), *tensor.shape[1:]))
    parts: Sequence[torch.Tensor] = gather(torch.cat([tensor, padding]), mesh=world.mesh).split(largest)
    return torch.cat([part[:real] for part, real in zip(parts, last.real)])


def _has_samples(tensor: torch.Tensor, last: LastStep, rank: int) -> bool:
    return tensor.dim() > 0 and tensor.size(0) == last.sizes[rank]
