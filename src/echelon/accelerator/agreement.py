"""Do the ranks begin with the same model?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from echelon.base.errors import DesyncError
from echelon.base.warnings import warn
from echelon.distributed.fingerprint import fingerprint
from echelon.distributed.wire import gather_bytes, gather_counts

__all__ = ["agree_on_models"]


def agree_on_models(models: Sequence[nn.Module]) -> None:
    """Compare the weights and buffers of ``models`` with rank zero's, and name the ranks that begin with others.

    The engine gives every rank those of rank zero. A rank that has others was seeded differently, or has read another file.

    Collective: every rank.

    Raises:
        DesyncError: the models have other parts: other names, shapes or types.
    """
    if not models:
        return
    tensors: dict[str, torch.Tensor] = {}
    for i, model in enumerate(models):
        prefix = f"model {i}: " if len(models) > 1 else ""
        tensors.update({prefix + name: tensor for name, tensor in [*model.named_parameters(), *model.named_buffers()]})
    parts = [f"{name} {tensor.dtype} {list(tensor.shape)}" for name, tensor in tensors.items()]
    values = [fingerprint(tensor) for tensor in tensors.values()]
    mine = "\n".join(f"{value:016x} {part}" for value, part in zip(values, parts)).encode()
    (sums,) = gather_counts(fingerprint(torch.frombuffer(bytearray(mine), dtype=torch.uint8)))
    if len(set(sums)) == 1:
        return
    ranks = [[line.split(" ", 1) for line in theirs.decode().split("\n") if line] for theirs in gather_bytes(mine)]
    for rank, theirs in enumerate(ranks):
        _compare_parts(rank, theirs, ranks[0])
    others = {rank: theirs for rank, theirs in enumerate(ranks) if theirs != ranks[0]}
    if others:
        named = "; ".join(f"rank {rank} {_differences(theirs, ranks[0])}" for rank, theirs in others.items())
        warn(
            f"the ranks did not begin with the same weights: {named}. Rank zero's are used on all. Make the model after "
            "set_seed(seed) with one seed for all ranks, or load the same file on each"
        )


def _compare_parts(rank: int, theirs: Sequence[Any], first: Sequence[Any]) -> None:
    parts, expected = [part for _, part in theirs], [part for _, part in first]
    if parts == expected:
        return
    place = next((i for i, (a, b) in enumerate(zip(parts, expected)) if a != b), min(len(parts), len(expected)))
    mine, his = (found[place] if place < len(found) else "nothing" for found in (parts, expected))
    raise DesyncError(
        f"rank {rank} prepares another model than rank zero: it has {mine!r} where rank zero has {his!r}",
        where="prepare()",
        do="build the model from the same settings on every rank",
    )


def _differences(theirs: Sequence[Any], first: Sequence[Any]) -> str:
    names = [part.rsplit(" torch.", 1)[0] for (value, part), (other, _) in zip(theirs, first) if value != other]
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return f"differs in {', '.join(names[:2])}{more}"
