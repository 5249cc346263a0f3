"""The origin of a setting."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from types import MappingProxyType

from echelon.base.messages.translation import gettext as _, gettext_noop as N_


class SettingSource(IntEnum):
    """Sources of settings, from lowest to highest precedence."""

    DEFAULT = 0
    DERIVED = 1
    """Computed from other settings."""
    FILE = 2
    ENV = 3
    FLAG = 4
    CODE = 5


_TEXTS = MappingProxyType(
    {
        SettingSource.DEFAULT: N_("default {name}"),
        SettingSource.DERIVED: N_("derived {name}"),
        SettingSource.FILE: N_("file {name}"),
        SettingSource.ENV: N_("env {name}"),
        SettingSource.FLAG: N_("flag {name}"),
        SettingSource.CODE: N_("code {name}"),
    }
)


_ALONE = MappingProxyType({SettingSource.DEFAULT: N_("default"), SettingSource.DERIVED: N_("derived")})


@dataclass(frozen=True, slots=True)
class Origin:
    """A setting's source, and the flag, variable, file line or argument that set it."""

    source: SettingSource
    detail: str = ""

    def __str__(self) -> str:
        return (
            _(_TEXTS[self.source], name=self.detail)
            if self.detail
            else _(_ALONE.get(self.source, self.source.name.lower()))
        )


@dataclass(frozen=True, slots=True)
class Setting:
    """A value before type conversion, and its origin."""

    value: object
    origin: Origin
