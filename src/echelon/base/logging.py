"""Loggers that emit records on rank zero only by default."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

from echelon.base.rank import known_rank

__all__ = ["Adapter", "RankLogger", "get_logger", "is_speaker"]

if TYPE_CHECKING:
    Adapter = logging.LoggerAdapter[logging.Logger]
else:
    Adapter = logging.LoggerAdapter  # generic from Python 3.11 on


class RankLogger(Adapter):
    """A logger that emits on rank zero only; ``all_ranks=True`` in a call logs on every rank."""

    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        """Log ``msg % args`` at ``level``; all other methods call this one."""
        all_ranks = bool(kwargs.pop("all_ranks", False))
        if not self.isEnabledFor(level) or not (all_ranks or is_speaker()):
            return
        kwargs["stacklevel"] = _frames_to(kwargs.get("stacklevel", 1))
        # Not super().log(): it puts one more frame of the logging module between, which Python 3.10 counts.
        self.logger.log(level, msg, *args, **kwargs)

    def process(self, msg: object, kwargs: MutableMapping[str, Any]) -> tuple[object, MutableMapping[str, Any]]:
        """Return the message unchanged: the launcher prefixes the rank."""
        return msg, kwargs


def get_logger(name: str, extra: Mapping[str, object] | None = None) -> RankLogger:
    """Return the logger ``name``, which logs on rank zero; pass ``all_ranks=True`` to a call to log on every rank."""
    return RankLogger(logging.getLogger(name), dict(extra or {}))


def is_speaker() -> bool:
    """Tell whether this process logs: it is rank zero, or no rank is known."""
    return known_rank() in (None, 0)


def _frames_to(stacklevel: int) -> int:
    """Return the stacklevel, as seen from ``RankLogger.log``, of the ``stacklevel``-th caller.

    From Python 3.11 on frames of the logging module do not count; 3.10 counts them on the way, and skips them only where
    it arrives at one (``Logger.findCaller`` of each).
    """
    if sys.version_info >= (3, 11) or stacklevel == 1:
        return stacklevel + 1
    through_info = sys._getframe(2).f_code.co_filename == logging.info.__code__.co_filename
    return stacklevel + 1 + through_info
