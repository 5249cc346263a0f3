"""Builds the arguments for a function that runs on every rank; fills in ``rank``, ``world_size`` and others."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from echelon.base.errors import UsageError

__all__ = ["arguments_of_rank"]

# Parameter names that tutorials use.
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
    rank_first: bool,
) -> tuple[tuple[object, ...], Mapping[str, object]]:
    """Return the positional and keyword arguments for ``function`` on ``rank``.

    Args:
        function: the user's function.
        args: the user's arguments.
        rank: the process's rank.
        world_size: number of ranks.
        caller: name of the function that the user called, for the error message.
        rank_first: whether ``caller`` passes the rank before ``args``, like torch's spawn.

    Raises:
        UsageError: ``args`` do not match the signature of ``function``.
    """
    given = (rank, *args) if rank_first else tuple(args)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # for example a C function
        return given, _NONE
    if _fits(signature, given, _NONE):
        return given, _NONE
    filled = {
        name: rank if name in _RANK else world_size
        for name, parameter in signature.parameters.items()
        if name in _RANK | _WORLD_SIZE and parameter.kind is not inspect.Parameter.POSITIONAL_ONLY
    }
    # ``args`` are the other parameters, in order.
    others = [
        name
        for name, parameter in signature.parameters.items()
        if name not in filled and parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    ]
    by_name = {**filled, **dict(zip(others, args))}
    if filled and len(args) <= len(others) and _fits(signature, (), by_name):
        return (), by_name
    name = getattr(function, "__qualname__", repr(function))
    first = "the rank and then " if rank_first else ""
    raise UsageError(
        f"{name}{signature} cannot be called by {caller}(args={tuple(args)!r}), which passes {first}args",
        where=f"code {caller}(args=)",
        do="pass one value per parameter in args, except for parameters named rank and world_size, which are filled in",
    )


def _fits(signature: inspect.Signature, args: tuple[object, ...], by_name: Mapping[str, object]) -> bool:
    try:
        signature.bind(*args, **by_name)
    except TypeError:
        return False
    return True
