"""The arguments of a function that is called on every rank: where it asks for its rank and the world size, it gets them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from echelon.base.errors import UsageError

__all__ = ["arguments_of_rank"]

# What tutorials call them.
_RANK = frozenset({"rank", "local_rank"})
_WORLD_SIZE = frozenset({"world_size", "num_processes", "nprocs"})
_NONE: Mapping[str, object] = MappingProxyType({})


def arguments_of_rank(
    function: Callable[..., object],
    args: Sequence[object],
    *,
    rank: int,
    world_size: int,
    caller: str,
    begins_with_rank: bool,
) -> tuple[tuple[object, ...], Mapping[str, object]]:
    """Return what to call ``function`` with on ``rank``: ``args`` (after the rank), and by name what it asks for and they lack.

    Args:
        function: the user's.
        args: the user's.
        rank: of the process.
        world_size: of the run.
        caller: what the user called, for the error.
        begins_with_rank: ``caller`` gives the rank before ``args``, as torch's spawn does.

    Raises:
        UsageError: ``args`` do not fit the function.
    """
    given = (rank, *args) if begins_with_rank else tuple(args)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # one of C, say
        return given, _NONE
    if _fits(signature, given, _NONE):
        return given, _NONE
    place = {
        name: rank if name in _RANK else world_size
        for name, parameter in signature.parameters.items()
        if name in _RANK | _WORLD_SIZE and parameter.kind is not inspect.Parameter.POSITIONAL_ONLY
    }
    # Theirs take the other places, in their order.
    others = [
        name
        for name, parameter in signature.parameters.items()
        if name not in place and parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    ]
    by_name = {**place, **dict(zip(others, args))}
    if place and len(args) <= len(others) and _fits(signature, (), by_name):
        return (), by_name
    name = getattr(function, "__qualname__", repr(function))
    first = "the rank, and then " if begins_with_rank else ""
    raise UsageError(
        f"{name}{signature} cannot be called by {caller}(args={tuple(args)!r}), which gives it {first}args",
        where=f"code {caller}(args=)",
        do="pass one value for each of its parameters in args; parameters named rank and world_size are filled in",
    )


def _fits(signature: inspect.Signature, args: tuple[object, ...], by_name: Mapping[str, object]) -> bool:
    try:
        signature.bind(*args, **by_name)
    except TypeError:
        return False
    return True
