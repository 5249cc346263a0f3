"""The interface of every experiment tracker, and the decorator that limits a method to rank zero."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

from echelon.base.rank import known_rank

F = TypeVar("F", bound=Callable[..., Any])


def on_main_process(function: F) -> F:
    """Run a tracker method only on rank zero if the tracker's ``main_process_only`` is True; other ranks return None."""

    @functools.wraps(function)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(self, "main_process_only", False) and known_rank() not in (None, 0):
            return None
        return function(self, *args, **kwargs)

    return wrapper  # type: ignore[return-value]


class GeneralTracker:
    """Base class for trackers, including custom ones.

    A subclass defines the attributes ``name`` and ``requires_logging_directory`` (whether its constructor takes a
    directory as its second argument) and the property ``tracker`` (the tracking library's object), and overrides
    methods as needed. Its constructor takes the project name first and must not start the run, because ``start`` does
    so on every rank. A tracker's exceptions propagate to the caller of ``Accelerator.log``.

    Raises:
        NotImplementedError: a subclass does not define ``name``, ``requires_logging_directory`` or ``tracker``.
    """

    main_process_only = True
    """Whether methods decorated with ``@on_main_process`` run only on rank zero."""
    registered: ClassVar[Mapping[str, type[GeneralTracker]]] = MappingProxyType({})
    """The classes that were passed to ``register_tracker_class`` in this process, by name."""

    def __init__(self, _blank: bool = False) -> None:
        needed = () if _blank else ("name", "requires_logging_directory", "tracker")
        known = set(dir(self))  # not hasattr, since the property may fail before start()
        missing = [f"`{attribute}`" for attribute in needed if attribute not in known]
        if missing:
            raise NotImplementedError(
                f"the tracker class {type(self).__name__} does not define {', '.join(missing)}; every tracker needs "
                "`name`, `requires_logging_directory` and `tracker`"
            )

    def start(self) -> None:
        """Start the run."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store ``values`` as the run's configuration."""

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log ``values`` at ``step``; ``kwargs`` are passed to the tracking library."""

    def finish(self) -> None:
        """End the run."""
