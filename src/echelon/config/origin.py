"""The origin of a setting; sources are ordered from the lowest to the highest precedence."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

__all__ = ["Origin", "Setting", "SettingSource"]


class SettingSource(IntEnum):
    """The layers of configuration; the higher one takes precedence."""

    DEFAULT = 0
    DERIVED = 1
    """Computed from other settings."""
    FILE = 2
    ENV = 3
    FLAG = 4
    CODE = 5


@dataclass(frozen=True, slots=True)
class Origin:
    """The layer of a setting, and the name of the flag, variable, file line or argument."""

    source: SettingSource
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.source.name.lower()} {self.detail}".rstrip()


@dataclass(frozen=True, slots=True)
class Setting:
    """A value as it was given, and its origin."""

    value: object
    origin: Origin
