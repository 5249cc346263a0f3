"""What a function of the user's takes: old tutorials override methods with fewer parameters than today's."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

__all__ = ["parameters_of", "takes", "takes_anything"]


def takes(function: Callable[..., Any], name: str) -> bool:
    """Tell whether ``function`` can be given ``name=``."""
    parameters = inspect.signature(function).parameters
    return name in parameters or takes_anything(function)


def takes_anything(function: Callable[..., Any]) -> bool:
    """Tell whether ``function`` has ``**kwargs``."""
    return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(function).parameters.values())


def parameters_of(function: Callable[..., Any]) -> list[str]:
    """Return the names of the parameters of ``function``, without ``*args`` and ``**kwargs``."""
    kinds = inspect.Parameter
    variable = (kinds.VAR_KEYWORD, kinds.VAR_POSITIONAL)
    return [name for name, p in inspect.signature(function).parameters.items() if p.kind not in variable]
