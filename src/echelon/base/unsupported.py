"""Names of Accelerate that this version knows and cannot do yet: importing them works, using them is an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from echelon.base.errors import UsageError

__all__ = ["NotOffered", "not_offered_class", "not_offered_function", "tpu_instead"]


class NotOffered:
    """Base of the classes that only raise; a subclass of the user's raises when it is made into an object, too."""

    _offered_instead: str

    def __new__(cls, *args: object, **kwargs: object) -> NoReturn:
        """Raise instead of making an object."""
        raise _error(cls.__name__, cls._offered_instead)


def not_offered_class(name: str, *, instead: str) -> type[Any]:
    """Return a class ``name`` of which no object can be made.

    Args:
        name: as in Accelerate; scripts import it and ask ``isinstance``.
        instead: what to do in this version.
    """
    return type(name, (NotOffered,), {"__doc__": _doc(name, instead), "_offered_instead": instead})


def not_offered_function(name: str, *, instead: str) -> Callable[..., Any]:
    """Return a function ``name`` that raises when it is called.

    Args:
        name: as in Accelerate.
        instead: what to do in this version.
    """

    def refuse(*args: object, **kwargs: object) -> NoReturn:
        raise _error(name, instead)

    refuse.__name__ = refuse.__qualname__ = name
    refuse.__doc__ = _doc(name, instead)
    return refuse


def tpu_instead() -> str:
    """Return what to do in the place of a run on TPUs."""
    return (
        "train on CPUs, or on the accelerators that torch.accelerator knows (CUDA, ROCm, XPU, NPU, MPS). A package that "
        "brings an Engine for torch_xla can name it under the entry point 'echelon.engines', for "
        "Accelerator(engine='its name'); an Engine of your own: Accelerator(engine=MyEngine(...))"
    )


def _doc(name: str, instead: str) -> str:
    return f"Raise: {name} is not offered by this version of echelon ({instead})."


def _error(name: str, instead: str) -> UsageError:
    return UsageError(f"{name} is not offered by this version of echelon", do=instead)
