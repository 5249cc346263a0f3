"""Compares a checkpoint's weights with a model before loading any, and reports all differences at once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import nn

from echelon.accelerator.state_names import START_OVER, Allowed
from echelon.base.errors import CheckpointError
from echelon.base.messages.translation import gettext as _
from echelon.checkpoint.read import Checkpoint
from echelon.checkpoint.tensor_names import model_prefix
from echelon.engines.base import Engine
from echelon.engines.quantized_weights import flat_state
from echelon.engines.shards import address_of
from echelon.engines.state_dicts import plain_name, plain_state_dict

_NUM_SHOWN = 5


def describe_mismatch(
    saved: Mapping[str, Sequence[int]],
    own: Mapping[str, Sequence[int]],
    *,
    may_be_missing: Callable[[str], bool] = lambda name: False,
    may_be_unknown: Callable[[str], bool] = lambda name: False,
) -> str:
    """Return a description of how the ``saved`` shapes differ from the model's (``own``), with a few examples of each kind
    of mismatch, or an empty string if they match.
    """
    missing = [name for name in own if name not in saved and not may_be_missing(name)]
    unknown = [name for name in saved if name not in own and not may_be_unknown(name)]
    unlike = [
        f"{name}: {list(saved[name])} in the checkpoint, {list(shape)} in the model"
        for name, shape in own.items()
        if name in saved and tuple(saved[name]) != tuple(shape)
    ]
    return listed({"missing": missing, "unexpected": unknown, "different shape": unlike})


def listed(kinds: Mapping[str, Sequence[str]]) -> str:
    """Return the non-empty entries of ``kinds`` on one line, each with its first few names."""
    return "; ".join(f"{kind} {shortened(names)}" for kind, names in kinds.items() if names)


def shortened(names: Sequence[str], separator: str = ", ") -> str:
    """Format the first few ``names`` and the number of remaining ones."""
    more = len(names) - _NUM_SHOWN
    return separator.join(names[:_NUM_SHOWN]) + (f" and {more} more" if more > 0 else "")


def other_model_error(source: object, model: nn.Module, differences: str, *, do: str) -> CheckpointError:
    """Return the error for weights in ``source`` that belong to another model than ``model``."""
    what = _(
        "{source} belongs to a different model than this {kind}: {found}",
        source=source,
        kind=type(model).__name__,
        found=differences,
    )
    return CheckpointError(what, do=do)


def require_model_of_checkpoint(
    checkpoint: Checkpoint,
    model: nn.Module,
    index: int,
    *,
    engine: Engine,
    strict: bool,
    allowed: Allowed,
    elsewhere: Collection[str] = (),
) -> set[str]:
    """Return the weights of ``model`` that the checkpoint lacks; raise if it lacks any that may not be missing.

    ``elsewhere`` has the names of weights on other ranks (stages of a pipeline).

    Raises:
        CheckpointError: the checkpoint belongs to another model.
    """
    prefix, piece = model_prefix(index), f"model[{index}]."
    parameters = {plain_name(name): p for name, p in model.named_parameters(remove_duplicate=False)}
    own = {
        name: engine.full_shape(parameters[name]) if name in parameters else value.shape
        for name, value in flat_state(plain_state_dict(model)).items()
        if hasattr(value, "shape")
    }
    saved = {
        name.removeprefix(prefix): checkpoint.layout(name).shape
        for name in checkpoint.names()
        if name.startswith(prefix)
    }
    # Other programs store tied weights under only one of their names.
    there = {id(parameters[name]) for name in saved if name in parameters}
    found = describe_mismatch(
        saved,
        own,
        may_be_missing=lambda name: not strict or allowed.covers(piece + name) or id(parameters.get(name)) in there,
        may_be_unknown=lambda name: not strict or name in elsewhere or allowed.covers(piece + name),
    )
    if found:
        first = next((name for name in (*saved, *own) if (name in saved) is not (name in own)), None)
        advice = _("load the checkpoint into the model it was saved from (echelon checkpoint show lists its contents)")
        if first is not None and allowed.is_argument:
            names = f"'{piece}{first}', ..."
            advice = _("{advice}, or pass allow_missing=({names}) or strict=False", advice=advice, names=names)
        do = _("{advice}; {start_over}", advice=advice, start_over=_(START_OVER))
        raise other_model_error(checkpoint.folder, model, found, do=do)
    return own.keys() - saved.keys()


def trained_outside_state_dict(model: nn.Module) -> list[str]:
    """Return the names of trained parameters that the model's state dict leaves out, because a class overrides it."""
    state = plain_state_dict(model)
    stored = {address_of(value) for value in state.values() if isinstance(value, torch.Tensor)}
    return [
        plain_name(name)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and plain_name(name) not in state and address_of(parameter) not in stored
    ]
