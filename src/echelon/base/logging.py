"""Loggers that by default emit records only on rank zero."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

from echelon.base.messages.terminal import beside_progress_bars
from echelon.base.messages.translation import gettext, in_english
from echelon.base.rank import known_rank

if TYPE_CHECKING:
    Adapter = logging.LoggerAdapter[logging.Logger]
else:
    Adapter = logging.LoggerAdapter  # generic from Python 3.11 on


class RankLogger(Adapter):
    """A logger that emits records only on rank zero, or on every rank for calls with ``all_ranks=True``."""

    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        """Log ``msg % args`` at ``level``; all other methods call this one."""
        all_ranks = bool(kwargs.pop("all_ranks", False))
        if not self.isEnabledFor(level) or not (all_ranks or is_logging_rank()):
            return
        kwargs["stacklevel"] = _frames_to(kwargs.get("stacklevel", 1))
        # Without a handler, logging's last resort prints it to stderr. What handlers write (log files) is English.
        is_shown = not self.logger.hasHandlers() and self.logger.name.startswith("echelon.")
        if is_shown:
            msg = gettext(str(msg))
        else:
            msg, args = in_english(msg), tuple(map(in_english, args))
        # super().log() would add a frame of the logging module, which Python 3.10 counts.
        with beside_progress_bars():
            self.logger.log(level, msg, *args, **kwargs)

    def process(self, msg: object, kwargs: MutableMapping[str, Any]) -> tuple[object, MutableMapping[str, Any]]:
        """Return the message unchanged, because the launcher adds the rank as a prefix."""
        return msg, kwargs


def get_logger(name: str, extra: Mapping[str, object] | None = None) -> RankLogger:
    """Return the logger ``name``, which logs only on rank zero, except for calls with ``all_ranks=True``."""
    return RankLogger(logging.getLogger(name), dict(extra or {}))


def is_logging_rank() -> bool:
    """Return whether this process logs: it is rank zero, or its rank is unknown."""
    return known_rank() in (None, 0)


def _frames_to(stacklevel: int) -> int:
    """Convert the caller's ``stacklevel`` to the one that ``RankLogger.log`` must pass on.

    Since Python 3.11, ``Logger.findCaller`` does not count the logging module's frames. Python 3.10 counts them, and if
    the count ends at one of them, skips to the next frame outside the module.
    """
    if sys.version_info >= (3, 11) or stacklevel == 1:
        return stacklevel + 1
    through_info = sys._getframe(2).f_code.co_filename == logging.info.__code__.co_filename
    return stacklevel + 1 + through_info
