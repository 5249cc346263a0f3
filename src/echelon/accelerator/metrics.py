"""Gathers the results of an evaluation step, with each sample exactly once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from echelon.accelerator.gradient_state import GradientState
from echelon.base.errors import UsageError
from echelon.data.batch import is_column, num_samples
from echelon.data.global_batch_slices import LastStep
from echelon.distributed.collectives import gather, gather_object
from echelon.distributed.small_messages import gather_bytes
from echelon.distributed.tree import contents, is_record, leaves, map_tensors, rebuild_like
from echelon.world.world import World

__all__ = ["gather_samples", "is_column", "is_repeated", "num_samples", "own_samples", "trim_for_metrics"]

_MIN_REPEATED = 4  # rows; fewer may be equal by chance


def gather_samples(data: Any, last: LastStep | None, *, world: World, objects: bool = False) -> Any:
    """Gather ``data`` of one step across the ranks of ``world``, without samples that were repeated to fill the batch.

    Args:
        data: nested tensors or lists with one row (or the same number of rows) for each sample of this rank's batch; those of
            other lengths are gathered whole. With lists, it is gathered as objects.
        last: number of samples on each rank in the step; None if every rank has a full batch of new samples.
        world: the ranks that read different samples.
        objects: gather as objects even if all leaves are tensors.

    Collective: call on every rank.

    Raises:
        UsageError: a list of lists may hold either samples or columns.
    """
    if objects or not _is_of_tensors(data):
        return gather_object(data if last is None else _cut_objects(data, last, world.rank), mesh=world.mesh)
    if last is None:
        return gather(data, mesh=world.mesh)
    # A tensor holds samples only if its size matches on every rank; on a single rank it may match by chance.
    own = [_rows_of(leaf, last, world.rank) for leaf in leaves(data)]
    votes = [json.loads(vote) for vote in gather_bytes(json.dumps(own).encode(), group=world.group)]
    if len({len(vote) for vote in votes}) > 1:
        return gather(data, mesh=world.mesh)  # raises an error that describes the difference
    agreed = iter([_agreed_rows_per_sample([_Rows(*vote) for vote in theirs]) for theirs in zip(*votes)])
    return map_tensors(lambda tensor: _gather_step(tensor, next(agreed), last, world), data)


def is_repeated(gathered: Any, world: World) -> bool:
    """Return whether each rank gave the same rows, several and not all alike, to every tensor of ``gathered``."""
    tensors = [leaf for leaf in leaves(gathered) if isinstance(leaf, torch.Tensor) and leaf.dim() > 0]
    return bool(tensors) and all(_repeats(tensor, world.world_size) for tensor in tensors)


def _repeats(tensor: torch.Tensor, num_ranks: int) -> bool:
    if len(tensor) % num_ranks or len(tensor) < _MIN_REPEATED * num_ranks:
        return False
    first, *others = tensor.chunk(num_ranks)
    return not torch.equal(first, first[:1].expand_as(first)) and all(torch.equal(first, other) for other in others)


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
        data: nested tensors or lists with one row (or the same number of rows) for each sample of this rank's batch; those of
            other lengths, and anything else, are returned unchanged.
        last: number of samples on each rank in the step; None if every rank has a full batch of new samples.
        rank: this rank's index among the ranks that read different samples.
    """
    if last is None:
        return data
    if not _is_of_tensors(data):
        return _cut_objects(data, last, rank)
    return map_tensors(lambda tensor: _own_rows(tensor, last, rank), data)


def _is_of_tensors(data: Any) -> bool:
    found = list(leaves(data))
    if isinstance(data, (list, tuple)) and (not found or any(is_record(item) for item in data)):
        return False  # a list of samples, each an object, or of objects that this rank has none of
    return all(isinstance(leaf, torch.Tensor) for leaf in found)


class _Rows(NamedTuple):
    """How the rows of a tensor or column may belong to this rank's samples."""

    per_sample: int
    """Number of rows of each sample, or 0 if they do not hold samples."""
    fill_a_batch: bool = False
    """Whether they are as many as a full batch has samples, although this batch has fewer: scripts repeat a mean loss for each
    sample of a full batch, or pad their results to its size."""


def _rows_of(data: torch.Tensor | list[Any] | tuple[Any, ...], last: LastStep, rank: int) -> _Rows:
    size = last.sizes[rank]
    if isinstance(data, torch.Tensor) and data.dim() == 0:
        return _Rows(0)
    rows = len(data)
    if rows == size:
        return _Rows(1)
    whole, rest = divmod(rows, size) if size else (0, rows)
    fills = size < rows == last.batch_size and isinstance(data, torch.Tensor)
    if fills and rest == 0:  # two rows of each sample, unless all are equal
        assert isinstance(data, torch.Tensor)
        fills = torch.equal(data, data[:1].expand_as(data))
    return _Rows(0 if rest else whole, fills)


def _agreed_rows_per_sample(votes: Sequence[_Rows]) -> int:
    """Return the number of rows per sample that all ranks have, or 0 if there is none."""
    if all(vote.fill_a_batch or vote.per_sample == 1 for vote in votes):
        return 1
    rows = {vote.per_sample for vote in votes}
    return rows.pop() if len(rows) == 1 else 0


def _gather_step(tensor: torch.Tensor, rows_per_sample: int, last: LastStep, world: World) -> torch.Tensor:
    """Gather a tensor without the rows of repeated samples, or whole if it does not hold samples."""
    if rows_per_sample == 0:
        whole: torch.Tensor = gather(tensor, mesh=world.mesh)
        return whole
    tensor = tensor[: rows_per_sample * last.sizes[world.rank]]
    largest = rows_per_sample * max(last.sizes)
    padding = tensor.new_zeros((largest - tensor.size(0), *tensor.shape[1:]))
    parts: Sequence[torch.Tensor] = gather(torch.cat([tensor, padding]), mesh=world.mesh).split(largest)
    return torch.cat([part[: rows_per_sample * real] for part, real in zip(parts, last.real)])


def _own_rows(data: Any, last: LastStep, rank: int) -> Any:
    """Return the rows of a tensor or column that belong to new samples, or all if it does not hold samples."""
    rows = _rows_of(data, last, rank)
    rows_per_sample = 1 if rows.fill_a_batch else rows.per_sample
    return data[: rows_per_sample * last.real[rank]] if rows_per_sample else data


def _cut_objects(data: Any, last: LastStep, rank: int) -> Any:
    """Return nested lists and tensors without this rank's repeated samples.

    A list whose length is the number of samples holds samples, a tuple of lists columns.
    """
    if isinstance(data, torch.Tensor):
        return _own_rows(data, last, rank)
    held = contents(data)
    if held is None:
        return data
    if isinstance(held, dict):
        return rebuild_like(data, {key: _cut_objects(item, last, rank) for key, item in held.items()})
    size = last.sizes[rank]
    holds_samples = isinstance(data, list) and len(data) == size
    if holds_samples and last.real != last.sizes and _is_square(data):
        raise UsageError(
            f"cannot tell whether a list of {size} lists of {size} holds the {size} samples of this step or {size} columns of "
            "it, to remove its repeated samples",
            where="gather_for_metrics",
            do="pass columns as a tuple, (predictions, references), and samples as a list of tuples or dicts",
        )
    if holds_samples or (is_column(data) and _rows_of(data, last, rank).per_sample):
        return _own_rows(data, last, rank)
    return rebuild_like(data, [_cut_objects(item, last, rank) for item in held])


def _is_square(data: list[Any]) -> bool:
    return all(isinstance(item, list) and len(item) == len(data) for item in data)
