"""Inspects user functions, which may have fewer parameters than the current interface."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from echelon.base.errors import UsageError


def takes(function: Callable[..., Any], name: str) -> bool:
    """Return whether ``function`` accepts ``name`` as a keyword argument."""
    parameters = inspect.signature(_called(function)).parameters
    return name in parameters or takes_anything(function)


def takes_anything(function: Callable[..., Any]) -> bool:
    """Return whether ``function`` has ``**kwargs``."""
    return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(_called(function)).parameters.values())


def parameters_of(function: Callable[..., Any]) -> list[str]:
    """Return the parameter names of ``function``, without ``*args`` and ``**kwargs``."""
    kinds = inspect.Parameter
    variable = (kinds.VAR_KEYWORD, kinds.VAR_POSITIONAL)
    return [name for name, p in inspect.signature(function).parameters.items() if p.kind not in variable]


def new_model(model_init: Callable[..., nn.Module] | None, trial: Any) -> nn.Module:
    """Call ``model_init``, with the trial if its first parameter is named ``trial`` or has no default."""
    assert model_init is not None
    kinds = inspect.Parameter
    wanted = inspect.signature(model_init).parameters.values()
    positional = [p for p in wanted if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)]
    takes_trial = bool(positional) and (positional[0].name == "trial" or positional[0].default is kinds.empty)
    model = model_init(trial) if takes_trial else model_init()
    if model is None:
        raise UsageError("model_init returned None", where="Trainer(model_init=)", do="return the model")
    return model


def num_positional(function: Callable[..., Any]) -> int | None:
    """Return the number of positional parameters that ``function`` takes; None for any number."""
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return None
    return sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)


def _called(function: Callable[..., Any]) -> Callable[..., Any]:
    # Calling a module such as CrossEntropyLoss calls its forward.
    return function.forward if isinstance(function, nn.Module) else function
