"""Weights from files, loaded into a model under whatever wrapper they were saved from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from echelon.accelerator.models.save_objects import extract_model_from_parallel
from echelon.accelerator.models.weight_check import misfit
from echelon.accelerator.prepare.compile import is_compiled_module
from echelon.base.errors import CheckpointError
from echelon.base.sharded import is_dtensor
from echelon.checkpoint.formats.weight_files import aliases_in
from echelon.engines.shards import shard_like

__all__ = ["load_weights"]


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
        name: shard_like(value, state[name]) if is_dtensor(state.get(name)) else value for name, value in named.items()
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
