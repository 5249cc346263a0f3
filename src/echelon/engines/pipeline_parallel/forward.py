"""Forward passes of a pipeline without backward passes, for evaluation and inference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int8,
)
_MAX_DIMS = 8


def forward_stages(
    modules: Mapping[int, nn.Module],
    micro_batches: Sequence[tuple[torch.Tensor, ...]],
    *,
    ranks: Sequence[int],
    group: dist.ProcessGroup,
    device: torch.device,
) -> list[tuple[torch.Tensor, ...]]:
    """Run the forward passes of all micro-batches; return their outputs on the rank of the last stage, elsewhere an empty list.

    Args:
        modules: this rank's stages by number.
        micro_batches: inputs of the first stage.
        ranks: for each stage, its rank in ``group``.
        group: the ranks of the pipeline.
        device: the device of this rank.

    Collective: call on every rank of the pipeline.
    """
    own, last = dist.get_rank(group), len(ranks) - 1
    held: dict[int, list[tuple[torch.Tensor, ...]]] = {}  # outputs of own stages whose next stage is here, too
    sends: list[tuple[Any, torch.Tensor]] = []
    outputs = []
    for number, module in sorted(modules.items()):
        for index, inputs in enumerate(micro_batches):
            if number == 0:
                values = inputs
            elif ranks[number - 1] == own:
                values = held[number - 1][index]
            else:
                values = _receive(ranks[number - 1], group=group, device=device)
            out = module(*values)
            results = out if isinstance(out, tuple) else (out,)
            if number == last:
                outputs.append(results)
            elif ranks[number + 1] == own:
                held.setdefault(number, []).append(results)
            else:
                sends += _send(results, ranks[number + 1], group=group, device=device)
    for work, _ in sends:
        work.wait()
    return outputs


def _header(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    numbers = [len(tensors)]
    for one in tensors:
        numbers += [_DTYPES.index(one.dtype), one.dim(), *one.shape, *[0] * (_MAX_DIMS - one.dim())]
    return torch.tensor(numbers, dtype=torch.int64, device=device)


def _empty_like(numbers: list[int], device: torch.device) -> list[torch.Tensor]:
    found, width = [], 2 + _MAX_DIMS
    for start in range(0, len(numbers), width):
        dtype, dims, *shape = numbers[start : start + width]
        found.append(torch.empty(shape[:dims], dtype=_DTYPES[dtype], device=device))
    return found


def _send(
    tensors: Sequence[torch.Tensor], rank: int, *, group: dist.ProcessGroup, device: torch.device
) -> list[tuple[Any, torch.Tensor]]:
    header = _header(tensors, device)
    # Sent values are kept until they are received.
    values = [header[:1], *([header[1:]] if tensors else []), *(one.detach().contiguous() for one in tensors)]
    return [(dist.isend(one, group=group, group_dst=rank), one) for one in values]


def _receive(rank: int, *, group: dist.ProcessGroup, device: torch.device) -> tuple[torch.Tensor, ...]:
    count = torch.zeros(1, dtype=torch.int64, device=device)
    dist.recv(count, group=group, group_src=rank)
    header = torch.zeros(int(count) * (2 + _MAX_DIMS), dtype=torch.int64, device=device)
    if len(header):
        dist.recv(header, group=group, group_src=rank)
    values = _empty_like(header.tolist(), device)
    for one in values:
        dist.recv(one, group=group, group_src=rank)
    return tuple(values)


def broadcast_tensors(
    tensors: Sequence[torch.Tensor], *, source: int, group: dist.ProcessGroup, device: torch.device
) -> list[torch.Tensor]:
    """Return the tensors of rank ``source`` of ``group`` on all its ranks. Collective: call on every rank of the group."""
    is_source = dist.get_rank(group) == source
    count = torch.tensor([len(tensors)], dtype=torch.int64, device=device)
    dist.broadcast(count, group=group, group_src=source)
    if not int(count):
        return []
    header = (
        _header(tensors, device)[1:]
        if is_source
        else torch.zeros(int(count) * (2 + _MAX_DIMS), dtype=torch.int64, device=device)
    )
    dist.broadcast(header, group=group, group_src=source)
    values = [one.contiguous() for one in tensors] if is_source else _empty_like(header.tolist(), device)
    for one in values:
        dist.broadcast(one, group=group, group_src=source)
    return values
