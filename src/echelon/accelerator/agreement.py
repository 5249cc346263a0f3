"""Checks that all ranks start with the same settings and the same model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from echelon.base.errors import ConfigError, DesyncError
from echelon.base.messages.translation import gettext as _
from echelon.base.sharded import is_dtensor
from echelon.base.warnings import warn
from echelon.config.schema import RunConfig, field_names
from echelon.config.sources import current, fingerprint as fingerprint_of_settings
from echelon.distributed.small_messages import fingerprint, gather_bytes, gather_counts


def agree_on_settings() -> None:
    """Compare the settings that each rank received from the launcher and the environment.

    Collective: call on every rank.

    Raises:
        ConfigError: the settings differ; raised on every rank, with the setting, its values and their origins.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    mine = fingerprint_of_settings(current())
    values = json.dumps({name: value for name, (value, _) in mine.items()}, sort_keys=True)
    (sums,) = gather_counts(int.from_bytes(hashlib.blake2b(values.encode(), digest_size=7).digest(), "little"))
    if len(set(sums)) == 1:
        return
    ranks = [json.loads(theirs) for theirs in gather_bytes(json.dumps(mine).encode())]
    defaults = RunConfig()
    for name in field_names(RunConfig):
        found = [theirs.get(name, (getattr(defaults, name), "default")) for theirs in ranks]
        other = next((rank for rank, (value, _) in enumerate(found) if value != found[0][0]), None)
        if other is not None:
            values_found = [f"{found[rank][0]!r} on rank {rank} (from {found[rank][1]})" for rank in (0, other)]
            raise ConfigError(
                f"the ranks have different settings: {name} is {' and '.join(values_found)}",
                where=f"setting {name}",
                do="use the same environment and configuration file for all processes; if the script sets variables, "
                "set them on all ranks",
            )


def agree_on_models(models: Sequence[nn.Module]) -> None:
    """Compare the weights and buffers of ``models`` with rank zero's, and warn about ranks where they differ.

    The engine copies rank zero's values to every rank. A rank with different values was seeded differently or read a
    different file.

    Collective: call on every rank.

    Raises:
        DesyncError: the models differ in names, shapes or dtypes.
    """
    if not models:
        return
    tensors: dict[str, torch.Tensor] = {}
    for i, model in enumerate(models):
        prefix = f"model {i}: " if len(models) > 1 else ""
        tensors.update({prefix + name: tensor for name, tensor in [*model.named_parameters(), *model.named_buffers()]})
    parts = [f"{name} {tensor.dtype} {list(tensor.shape)}" for name, tensor in tensors.items()]
    # Parts of layers that are split over ranks differ.
    values = [0 if is_dtensor(tensor) else fingerprint(tensor) for tensor in tensors.values()]
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
            _(
                "the ranks did not start with the same weights: {named}. Rank zero's weights are used on all ranks. "
                "Create the model after set_seed(seed) with the same seed on all ranks, or load the same file on each",
                named=named,
            )
        )


def _compare_parts(rank: int, theirs: Sequence[Any], first: Sequence[Any]) -> None:
    parts, expected = [part for _, part in theirs], [part for _, part in first]
    if parts == expected:
        return
    place = next((i for i, (a, b) in enumerate(zip(parts, expected)) if a != b), min(len(parts), len(expected)))
    mine, his = (found[place] if place < len(found) else "nothing" for found in (parts, expected))
    raise DesyncError(
        _(
            "rank {rank} prepares a different model than rank zero: expected {his!r}, but got {mine!r}",
            rank=rank,
            his=his,
            mine=mine,
        ),
        where="prepare()",
        do="build the model with the same settings on every rank",
    )


def _differences(theirs: Sequence[Any], first: Sequence[Any]) -> str:
    names = [part.rsplit(" torch.", 1)[0] for (value, part), (other, _) in zip(theirs, first) if value != other]
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return f"differs in {', '.join(names[:2])}{more}"
