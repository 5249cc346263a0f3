"""Loads weights from files into a model, regardless of the wrapper they were saved from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from echelon.accelerator.models.save_objects import bare_module
from echelon.accelerator.models.weight_check import describe_mismatch, listed, other_model_error
from echelon.base.errors import CheckpointError
from echelon.base.messages.translation import gettext as _, gettext_noop as N_
from echelon.base.sharded import is_dtensor
from echelon.checkpoint.formats.weight_files import aliases_in
from echelon.engines.shards import shard_like


def load_weights(
    model: nn.Module,
    tensors: Mapping[str, Any],
    *,
    source: object,
    strict: bool = True,
    advice: str = N_("load the weights into the model they were saved from, or pass strict=False"),
    **kwargs: Any,
) -> None:
    """Load ``tensors`` into ``model``, regardless of how either was wrapped (DDP, torch.compile).

    Args:
        model: prepared or not. Tied weights may be stored under only one of their names.
        tensors: tensors by name.
        source: where the tensors come from, for error messages.
        strict: require exactly the model's tensors.
        advice: what the error for another model recommends, in English.
        kwargs: passed to ``load_state_dict``.

    Raises:
        CheckpointError: the tensors belong to another model.
    """
    bare = bare_module(model)
    state = bare.state_dict()
    own = list(state)
    named = _named_as(own, tensors)
    shapes = {name: value.shape for name, value in named.items() if isinstance(value, torch.Tensor)}
    own_shapes = {
        # A tensor partitioned by a library is empty here, so its shape is taken from the file.
        name: shapes.get(name, value.shape) if not value.numel() else value.shape
        for name, value in state.items()
        if isinstance(value, torch.Tensor)
    }
    aliases = aliases_in(state)
    first = {name: aliases.get(name, name) for name in own}
    there = {first[name] for name in own if name in named}
    found = describe_mismatch(
        shapes,
        own_shapes,
        may_be_missing=lambda name: not strict or first[name] in there or name in named,
        may_be_unknown=lambda name: not strict or name in state,
    )
    if found:
        do = _(advice) if strict else _("load the weights into the model they were saved from")
        raise other_model_error(source, bare, found, do=do)
    # A sharded parameter takes this rank's shard.
    parts = {
        name: shard_like(value, state[name]) if is_dtensor(state.get(name)) else value for name, value in named.items()
    }
    if _returns_other_names(bare, state):
        _copy_into(state, parts)
        return
    try:
        missing, unexpected = bare.load_state_dict(parts, strict=False, **kwargs)
    except RuntimeError as error:  # sizes differ; torch's message names them
        raise CheckpointError(
            _("{source} does not match the model: {error}", source=source, error=error),
            do=_("load the weights into the model they were saved from"),
        ) from error
    if strict and missing:
        aliases = aliases_in(bare.state_dict())
        first = {name: aliases.get(name, name) for name in own}
        loaded = {first[name] for name in own if name not in missing}
        missing = [name for name in missing if first[name] not in loaded]
    if strict and (missing or unexpected):
        raise other_model_error(source, bare, listed({"missing": missing, "unexpected": unexpected}), do=_(advice))


def _returns_other_names(model: nn.Module, state: Mapping[str, Any]) -> bool:
    """Return whether ``state_dict`` is overridden, so that ``load_state_dict`` does not know its names.

    One example is trl's model with a value head, which returns the names of its inner model.
    """
    kind = type(model)
    is_overridden = kind.state_dict is not nn.Module.state_dict and kind.load_state_dict is nn.Module.load_state_dict
    return is_overridden and nn.Module.state_dict(model).keys() != state.keys()


def _copy_into(state: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Copy ``values`` into the tensors of a model's state dict, which share the model's memory."""
    with torch.no_grad():
        for name, target in state.items():
            if name in values:
                target.copy_(values[name])


def _named_as(own: list[str], tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Rename ``tensors`` to the names ``own``, ignoring prefixes added by DDP and torch.compile."""
    by_plain = {name.replace("_orig_mod.", ""): name for name in own}
    found = {name.replace("_orig_mod.", ""): value for name, value in tensors.items()}
    while found and not found.keys() & by_plain.keys() and all(name.startswith("module.") for name in found):
        found = {name.removeprefix("module."): value for name, value in found.items()}
    return {by_plain.get(name, name): value for name, value in found.items()}
