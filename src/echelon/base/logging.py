"""Loggers that speak on rank zero only, unless told otherwise."""

from __future__ import annotations

import logging
from collections.abc import Mapping, MutableMapping
from typing import Any

from echelon.base.rank import known_rank

__all__ = ["RankLogger", "get_logger"]


class RankLogger(logging.LoggerAdapter[logging.Logger]):
    """A logger whose records come from rank zero only; ``all_ranks=True`` in a call lets every rank speak."""

    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        """Log ``msg % args`` at ``level``; every other method of the logger ends here."""
        all_ranks = bool(kwargs.pop("all_ranks", False))
        if not self.isEnabledFor(level) or not (all_ranks or known_rank() in (None, 0)):
            return
        kwargs.setdefault("stacklevel", 2)
        super().log(level, msg, *args, **kwargs)

    def process(self, msg: object, kwargs: MutableMapping[str, Any]) -> tuple[object, MutableMapping[str, Any]]:
        """Leave the message as it is: ranks are told by the launcher's prefix."""
        return msg, kwargs


def get_logger(name: str, extra: Mapping[str, object] | None = None) -> RankLogger:
    """Return the logger ``name`` that speaks on rank zero; pass ``all_ranks=True`` to a call for every rank."""
    return RankLogger(logging.getLogger(name), dict(extra or {}))
