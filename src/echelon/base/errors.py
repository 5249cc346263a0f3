"""Errors that say what happened, where, and what to do; they keep all three when pickled between ranks."""

from __future__ import annotations

from echelon.base.rank import known_rank

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DesyncError",
    "EchelonError",
    "LaunchError",
    "MissingExtraError",
    "RankTimeoutError",
    "SetupError",
    "UsageError",
]


class EchelonError(Exception):
    """Base of every error that a user of echelon can meet.

    Args:
        what: what happened, with the values.
        where: the setting or place; the rank is put before it when it is known.
        do: what to do about it.
    """

    exit_code = 1
    """Of a process that ends because of it."""

    def __init__(self, what: str, *, where: str | None = None, do: str | None = None) -> None:
        super().__init__(what)
        rank = known_rank()
        places = ([f"rank {rank}"] if rank is not None else []) + ([where] if where else [])
        self.what = what
        self.where: str | None = ", ".join(places) or None
        self.do = do

    def __str__(self) -> str:
        lines = [self.what]
        if self.where:
            lines.append(f"  where: {self.where}")
        if self.do:
            lines.append(f"  do:    {self.do}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[object, ...]:
        # Keyword-only arguments do not survive Exception's own __reduce__, and the rank must stay the raising one's.
        return (_rebuild, (type(self), self.what, self.where, self.do))


def _rebuild(kind: type[EchelonError], what: str, where: str | None, do: str | None) -> EchelonError:
    error = kind(what, do=do)
    error.where = where
    return error


class ConfigError(EchelonError, ValueError):
    """A setting is wrong, unknown, or in conflict with another one."""


class UsageError(EchelonError, ValueError):
    """A function of echelon was called in a way that cannot work."""


class SetupError(EchelonError, RuntimeError):
    """The process group cannot be made as asked."""


class CheckpointError(EchelonError, RuntimeError):
    """A checkpoint cannot be written, or is not what it must be to be loaded."""


class DesyncError(EchelonError, RuntimeError):
    """The ranks disagree: other shapes, other structures, other decisions."""


class RankTimeoutError(EchelonError, TimeoutError):
    """Some ranks did not arrive in time; they are named."""


class LaunchError(EchelonError, RuntimeError):
    """The processes cannot be started, or one of them failed."""


class MissingExtraError(EchelonError, ImportError):
    """An optional dependency is needed and not installed."""
