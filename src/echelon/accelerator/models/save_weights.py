"""The weights of one model on disk: written in shards, and loaded under whatever wrapper they were saved from."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import nn

from echelon.accelerator.models.model_sizes import convert_file_size_to_int
from echelon.accelerator.models.save_objects import aliases_in, extract_model_from_parallel, load, write_tensors
from echelon.accelerator.models.weight_check import misfit
from echelon.accelerator.prepare.compile import is_compiled_module
from echelon.base.errors import CheckpointError
from echelon.base.sharded import is_dtensor
from echelon.compat.constants import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_PATTERN_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_PATTERN_NAME,
)
from echelon.engines.shards import part_like

__all__ = ["load_weights", "read_weights", "write_shards"]


def write_shards(
    state_dict: Mapping[str, Any], folder: Path, *, max_shard_size: int | str, safe_serialization: bool
) -> None:
    """Write ``state_dict`` into files of at most ``max_shard_size`` each, with an index where there are several.

    A tensor that is larger has a file of its own. Files of an earlier, differently cut save are deleted: a reader would
    prefer them.

    Source: the layout of Accelerate, transformers and huggingface_hub.
    """
    aliases = aliases_in(state_dict)
    shards = _cut(state_dict, aliases, convert_file_size_to_int(max_shard_size))
    pattern = SAFE_WEIGHTS_PATTERN_NAME if safe_serialization else WEIGHTS_PATTERN_NAME
    files = {
        pattern.format(suffix="" if len(shards) == 1 else f"-{number:05d}-of-{len(shards):05d}"): names
        for number, names in enumerate(shards, start=1)
    }
    folder.mkdir(parents=True, exist_ok=True)
    for file, names in files.items():
        aside = folder / f"{file}.tmp"
        part = {name: state_dict[name] for name in names}
        write_tensors(part, aside) if safe_serialization else torch.save(part, aside)
        aside.replace(folder / file)
    index = SAFE_WEIGHTS_INDEX_NAME if safe_serialization else WEIGHTS_INDEX_NAME
    if len(shards) > 1:
        left_out = aliases if safe_serialization else ()
        content = {
            "metadata": {"total_size": sum(_num_bytes(t) for name, t in state_dict.items() if name not in aliases)},
            "weight_map": {n: file for file, names in files.items() for n in names if n not in left_out},
        }
        aside = folder / f"{index}.tmp"
        aside.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        aside.replace(folder / index)
    earlier = re.compile(re.escape(pattern).replace(r"\{suffix\}", r"(-\d{5}-of-\d{5})?"))
    for path in list(folder.iterdir()):
        if (earlier.fullmatch(path.name) and path.name not in files) or (path.name == index and len(shards) == 1):
            path.unlink()


def read_weights(path: Path, *, map_location: Any = "cpu") -> dict[str, Any]:
    """Read a file of weights: safetensors, or what ``torch.save`` wrote.

    Raises:
        CheckpointError: it is damaged, or holds code.
    """
    if path.suffix != ".safetensors":
        tensors: dict[str, Any] = load(path, map_location=map_location)
        return tensors
    try:
        return dict(safetensors.torch.load_file(path, device=str(map_location)))
    except safetensors.SafetensorError as error:
        raise CheckpointError(
            f"{path} cannot be read: {error}", do="use another copy, or an older checkpoint"
        ) from error


def load_weights(
    model: nn.Module, tensors: Mapping[str, Any], *, source: object, strict: bool = True, **kwargs: Any
) -> None:
    """Load ``tensors`` into ``model``, whatever wrapper (DDP, torch.compile) either was in when it was saved.

    Args:
        model: prepared or not. Tied weights may be there under one of their names.
        tensors: by name.
        source: where they are from, for the error.
        strict: every tensor of the model must be there, and no other.
        kwargs: of ``load_state_dict``.

    Raises:
        CheckpointError: they are another model's.
    """
    bare = extract_model_from_parallel(model, keep_torch_compile=False)
    while is_compiled_module(bare):
        bare = bare._orig_mod
    state = bare.state_dict()
    own = list(state)
    named = _named_as(own, tensors)
    shapes = {name: value.shape for name, value in named.items() if isinstance(value, torch.Tensor)}
    own_shapes = {
        # What is partitioned by a library is empty here, and its shape is asked by that.
        name: shapes.get(name, value.shape) if not value.numel() else value.shape
        for name, value in state.items()
        if isinstance(value, torch.Tensor)
    }
    aliases = aliases_in(state)
    first = {name: aliases.get(name, name) for name in own}
    there = {first[name] for name in own if name in named}
    found = misfit(
        shapes,
        own_shapes,
        may_be_missing=lambda name: not strict or first[name] in there or name in named,
        may_be_unknown=lambda name: not strict or name in state,
    )
    if found:
        raise CheckpointError(
            f"{source} is of another model than the {type(bare).__name__} here: {found}",
            do="load it into the model that it was saved from" + (", or give strict=False" if strict else ""),
        )
    # Of a sharded parameter this rank takes its part.
    parts = {
        name: part_like(value, state[name]) if is_dtensor(state.get(name)) else value for name, value in named.items()
    }
    try:
        missing, unexpected = bare.load_state_dict(parts, strict=False, **kwargs)
    except RuntimeError as error:  # sizes differ; torch names them
        raise CheckpointError(
            f"{source} does not fit the model: {error}", do="load it into the model it is of"
        ) from error
    if strict and missing:
        aliases = aliases_in(bare.state_dict())
        first = {name: aliases.get(name, name) for name in own}
        loaded = {first[name] for name in own if name not in missing}
        missing = [name for name in missing if first[name] not in loaded]
    if strict and (missing or unexpected):
        lists = [
            f"{what} {', '.join(map(str, names[:5]))}"
            for what, names in (("missing", missing), ("unknown", unexpected))
            if names
        ]
        raise CheckpointError(
            f"{source} does not fit the {type(bare).__name__}: {'; '.join(lists)}",
            do="load it into the model it is of, or give strict=False",
        )


def _named_as(own: list[str], tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Rename ``tensors`` to the names ``own``, without what DDP and torch.compile put into them."""
    by_plain = {name.replace("_orig_mod.", ""): name for name in own}
    found = {name.replace("_orig_mod.", ""): value for name, value in tensors.items()}
    while found and not found.keys() & by_plain.keys() and all(name.startswith("module.") for name in found):
        found = {name.removeprefix("module."): value for name, value in found.items()}
    return {by_plain.get(name, name): value for name, value in found.items()}


def _cut(weights: Mapping[str, Any], aliases: Mapping[str, str], limit: int) -> list[list[str]]:
    """Deal the names to shards, in their order; names of one tensor stay together."""
    shards: list[list[str]] = []
    current: list[str] = []
    current_bytes = 0
    for name, tensor in weights.items():
        if name in aliases:
            continue
        size = _num_bytes(tensor)
        if size > limit:
            shards.append([name])
            continue
        if current_bytes + size > limit:
            shards.append(current)
            current, current_bytes = [], 0
        current.append(name)
        current_bytes += size
    if current or not shards:
        shards.append(current)
    for alias, owner in aliases.items():
        next(shard for shard in shards if owner in shard).append(alias)
    return shards


def _num_bytes(value: Any) -> int:
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0
