"""The interface of every experiment tracker, and the decorator that limits a method to rank zero."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

from echelon.base.rank import known_rank

__all__ = ["GeneralTracker", "on_main_process"]

F = TypeVar("F", bound=Callable[..., Any])


def on_main_process(function: F) -> F:
    """Make a method of a tracker run on rank zero only, if its ``main_process_only`` says so; elsewhere it returns None."""

    @functools.wraps(function)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(self, "main_process_only", False) and known_rank() not in (None, 0):
            return None
        return function(self, *args, **kwargs)

    return wrapper  # type: ignore[return-value]


class GeneralTracker:
    """Base class of the trackers, for your own ones too.

    A subclass has the attributes ``name`` and ``requires_logging_directory`` (whether its second argument is a folder) and the
    property ``tracker`` (the object of the tracking library); it overrides the methods that it needs. Its constructor
    takes the project's name first and must not start anything: ``start`` does, which runs on every rank.

    Raises:
        NotImplementedError: one of the three is missing; it is named.
    """

    main_process_only = True
    """Whether methods under ``@on_main_process`` run on rank zero only."""
    registered: ClassVar[Mapping[str, type[GeneralTracker]]] = MappingProxyType({})
    """The classes given to ``register_tracker_class`` in this process, by name."""

    def __init__(self, _blank: bool = False) -> None:
        needed = () if _blank else ("name", "requires_logging_directory", "tracker")
        known = set(dir(self))  # not hasattr: the property may work only after start()
        missing = [f"`{attribute}`" for attribute in needed if attribute not in known]
        if missing:
            raise NotImplementedError(
                f"the tracker class {type(self).__name__} does not define {', '.join(missing)}: every tracker needs "
                "`name`, `requires_logging_directory` and `tracker`"
            )

    def start(self) -> None:
        """Start the run."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store ``values`` as the settings of the run."""

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Store ``values``, measured at ``step``; ``kwargs`` are those of the tracking library."""

    def finish(self) -> None:
        """End the run."""
