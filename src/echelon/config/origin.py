"""The origin of a setting."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class SettingSource(IntEnum):
    """Sources of settings, from lowest to highest precedence."""

    DEFAULT = 0
    DERIVED = 1
    """Computed from other settings."""
    FILE = 2
    ENV = 3
    FLAG = 4
    CODE = 5


@dataclass(frozen=True, slots=True)
class Origin:
    """A setting's source, and the flag, variable, file line or argument that set it."""

    source: SettingSource
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.source.name.lower()} {self.detail}".rstrip()


@dataclass(frozen=True, slots=True)
class Setting:
    """A value before type conversion, and its origin."""

    value: object
    origin: Origin
