"""Is a checkpoint of this model? All weights that are missing, unknown or of another shape are told at once, before one is loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import nn

from echelon.accelerator.checkpoint.state_names import Allowed, optional_names
from echelon.base.errors import CheckpointError
from echelon.checkpoint.read import Checkpoint
from echelon.checkpoint.tensor_names import model_prefix
from echelon.engines.base import Engine
from echelon.engines.state_dicts import plain_name, plain_state_dict

__all__ = ["misfit", "require_model_of_checkpoint"]

_NUM_SHOWN = 5


def misfit(
    saved: Mapping[str, Sequence[int]],
    own: Mapping[str, Sequence[int]],
    *,
    may_be_missing: Callable[[str], bool] = lambda _: False,
    may_be_unknown: Callable[[str], bool] = lambda _: False,
) -> str:
    """Return in what the shapes ``saved`` are not those of the model, ``own``, with a few examples of each kind; empty: in nothing."""
    missing = [name for name in own if name not in saved and not may_be_missing(name)]
    unknown = [name for name in saved if name not in own and not may_be_unknown(name)]
    unlike = [name for name, shape in own.items() if name in saved and tuple(saved[name]) != tuple(shape)]
    unlike = [f"{name}: {list(saved[name])} there, {list(own[name])} here" for name in unlike]
    kinds = (("missing", missing), ("unknown", unknown), ("of another shape", unlike))
    return "; ".join(f"{kind} {_some(names)}" for kind, names in kinds if names)


def _some(names: Sequence[str]) -> str:
    more = len(names) - _NUM_SHOWN
    return ", ".join(names[:_NUM_SHOWN]) + (f" and {more} more" if more > 0 else "")


def require_model_of_checkpoint(
    checkpoint: Checkpoint, model: nn.Module, index: int, *, engine: Engine, strict: bool, allowed: Allowed
) -> None:
    """Raise unless the checkpoint has the weights of ``model``, or what it has not is allowed to be missing.

    Raises:
        CheckpointError: it is of another model.
    """
    prefix, piece = model_prefix(index), f"model[{index}]."
    parameters = {plain_name(name): p for name, p in model.named_parameters(remove_duplicate=False)}
    own = {
        name: engine.full_shape(parameters[name]) if name in parameters else value.shape
        for name, value in plain_state_dict(model).items()
        if hasattr(value, "shape")
    }
    saved = {
        name.removeprefix(prefix): checkpoint.layout(name).shape
        for name in checkpoint.names()
        if name.startswith(prefix)
    }
    optional = set(optional_names(checkpoint, model, own, index, strict=strict, allowed=allowed))
    found = misfit(
        saved,
        own,
        may_be_missing=lambda name: prefix + name in optional,
        may_be_unknown=lambda name: not strict or allowed.covers(piece + name),
    )
    if found:
        first = next((name for name in (*saved, *own) if (name in saved) is not (name in own)), None)
        hint = (
            ""
            if first is None
            else f", give allow_missing=('{piece}{first}', ...) for what may differ, or strict=False"
        )
        raise CheckpointError(
            f"{checkpoint.folder} is of another model than the {type(model).__name__} here: {found}",
            do=f"load it into the model that it was saved from (`echelon checkpoint show {checkpoint.folder}` lists it){hint}",
        )
