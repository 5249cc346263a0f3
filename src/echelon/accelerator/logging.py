"""Loggers for scripts, with Accelerate's API, that log on rank zero, on every rank, or on one rank after another."""

from __future__ import annotations

import logging
from typing import Any

import torch.distributed as dist

from echelon.base.errors import ConfigError
from echelon.base.logging import Adapter, is_logging_rank
from echelon.base.messages.translation import gettext as _
from echelon.base.rank import known_rank
from echelon.config import variables
from echelon.distributed import control


class MultiProcessAdapter(Adapter):
    """A rank-aware logger: every method accepts ``main_process_only`` (True) and ``in_order`` (False).

    It also works before an Accelerator or a process group exists, by reading the rank from the environment.
    """

    def __init__(self, logger: logging.Logger, extra: Any = None) -> None:
        super().__init__(logger, extra if extra is not None else {})
        self._warned: set[str] = set()

    def process(self, msg: Any, kwargs: Any) -> tuple[Any, Any]:
        """Prefix the message with the rank, and attribute the record to the caller's line."""
        msg, kwargs = super().process(msg, kwargs)
        kwargs.setdefault("stacklevel", 2)
        return f"[RANK {known_rank() or 0}] {msg}", kwargs

    def log(self, level: int, msg: Any, *args: Any, **kwargs: Any) -> None:
        """Log ``msg % args`` at ``level``.

        Args:
            level: level of ``logging``.
            msg: message.
            args: format arguments of ``msg``.
            kwargs: the keyword arguments of ``Logger.log``, ``main_process_only=True`` to log only on rank zero, and
                ``in_order=True`` to log on every rank, one after another, regardless of ``main_process_only``.

        Collective: with ``in_order=True``, call on every rank; the level must be enabled on all ranks or on none.
        """
        main_process_only = kwargs.pop("main_process_only", True)
        in_order = kwargs.pop("in_order", False)
        if not self.isEnabledFor(level):
            return
        msg, kwargs = self.process(msg, kwargs)
        if in_order and dist.is_initialized():
            for rank in range(dist.get_world_size()):
                if rank == dist.get_rank():
                    self.logger.log(level, msg, *args, **kwargs)
                control.barrier()
        elif in_order or not main_process_only or is_logging_rank():
            self.logger.log(level, msg, *args, **kwargs)

    def warning_once(self, msg: Any, *args: Any, **kwargs: Any) -> None:
        """Warn, unless this logger has already given the same warning."""
        what = repr((msg, args, sorted(kwargs.items())))
        if what not in self._warned:
            self._warned.add(what)
            # log() instead of warning(), because the stack level must count only our own frames.
            self.log(logging.WARNING, msg, *args, **{"stacklevel": 3, **kwargs})


def get_logger(name: str, log_level: str | None = None) -> MultiProcessAdapter:
    """Return the rank-aware logger ``name``.

    Args:
        name: usually ``__name__``.
        log_level: level of this logger and the root logger. None: use ECHELON_LOG_LEVEL or ACCELERATE_LOG_LEVEL, or
            leave it unchanged.

    Raises:
        ConfigError: the level is unknown.
    """
    origin = "code get_logger(log_level=)"
    if log_level is None and (setting := variables.log_level()) is not None:
        log_level, origin = str(setting.value), str(setting.origin)
    logger = logging.getLogger(name)
    if log_level is not None:
        level = log_level.upper()
        if not isinstance(logging.getLevelName(level), int):
            raise ConfigError(
                _("log level {log_level!r} is unknown", log_level=log_level),
                where=origin,
                do=_("use DEBUG, INFO, WARNING, ERROR or CRITICAL"),
            )
        logger.setLevel(level)
        logger.root.setLevel(level)
    return MultiProcessAdapter(logger, {})
