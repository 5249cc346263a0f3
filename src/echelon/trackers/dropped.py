"""Values that a tracking library cannot take: left out, and told once for each name."""

from __future__ import annotations

from typing import Any

from echelon.base.logging import get_logger

__all__ = ["Dropped"]

_logger = get_logger(__name__)


class Dropped:
    """Remembers, for one tracker, which names it has told of."""

    def __init__(self, library: str) -> None:
        self._library = library
        self._told: set[str] = set()

    def tell(self, name: str, value: Any, takes: str) -> None:
        """Warn that ``name`` was left out; its value is not shown."""
        if name not in self._told:
            self._told.add(name)
            _logger.warning(
                "%s takes %s; %r is of type %s and was left out", self._library, takes, name, type(value).__name__
            )
