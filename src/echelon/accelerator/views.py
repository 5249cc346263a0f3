"""Builds properties and methods that forward to a part of the Accelerator or a state."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from operator import attrgetter
from typing import Any, Concatenate, ParamSpec, TypeVar

from echelon.accelerator.plugins.kwargs_handlers import KwargsHandler
from echelon.base.errors import UsageError


def view(path: str, doc: str, *, is_settable: bool = False) -> Any:
    """Return a property that reads the attribute at ``path`` (such as ``session.world.device``) without a Python frame."""
    setter: Callable[[Any, Any], None] | None = None
    if is_settable:
        owner, _, name = path.rpartition(".")
        find = attrgetter(owner)

        def setter(instance: Any, value: Any) -> None:
            setattr(find(instance), name, value)

    return property(attrgetter(path), setter, doc=doc)


def given_handler(kind: type[KwargsHandler]) -> Any:
    """Return a read-only property for the handler of this type in ``kwargs_handlers``, which the engine was built with."""
    return property(
        lambda instance: instance.session.handler(kind),
        doc=f"The ``{kind.__name__}`` in ``kwargs_handlers``; None if there is none.",
    )


def axis_rank(name: str, axis: str | None) -> Any:
    """Return a property for the rank on ``axis`` of ``parallelism_config``; pass None for an unsupported axis."""

    def rank(instance: Any) -> int:
        layout = instance.session.layout
        if layout is None or axis is None:
            raise UsageError(
                f"{name} is not available, because no parallelism_config was given",
                do="use process_index, because each process has a separate part of the data",
            )
        mesh = layout.device_mesh
        return mesh.get_local_rank(axis) if mesh is not None and axis in layout.active_mesh_dims else 0

    where = f"The rank on the ``{axis}`` axis of ``parallelism_config``." if axis else "Not supported."
    return property(rank, doc=f"{where} Raises UsageError if there is no such axis.")


_P = ParamSpec("_P")
_R = TypeVar("_R")


def delegate(function: Callable[Concatenate[Any, _P], _R], owner: str) -> Callable[Concatenate[Any, _P], _R]:
    """Return a method that calls ``function`` on the attribute ``owner`` of its instance, with the same signature and
    docstring.

    If ``function`` is a method, it is looked up on that attribute, so that subclasses can override it.
    """
    find, name = attrgetter(owner), function.__name__
    is_method = "." in function.__qualname__

    @functools.wraps(function)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        part = find(self)
        return getattr(part, name)(*args, **kwargs) if is_method else function(part, *args, **kwargs)

    method: Any = call
    signature = inspect.signature(function)
    first, *others = signature.parameters.values()
    method.__signature__ = signature.replace(parameters=[first.replace(name="self", annotation=first.empty), *others])
    return method  # type: ignore[no-any-return]
