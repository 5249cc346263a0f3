"""Merges layers of settings into one configuration that records the origin of each value."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from echelon.base.errors import ConfigError
from echelon.base.messages.translation import gettext as _
from echelon.config.origin import Origin, Setting, SettingSource
from echelon.config.schema import coerce, field_names, field_types

T = TypeVar("T")
Layer = Mapping[str, Setting]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shadowed:
    """A setting that is overridden by a higher layer."""

    name: str
    value: object
    origin: Origin
    winner: Origin


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved(Generic[T]):
    """A configuration, the origin of each field, and the overridden values."""

    value: T
    origins: Mapping[str, Origin]
    shadowed: tuple[Shadowed, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        return _resolved, (self.value, dict(self.origins), self.shadowed)  # a mappingproxy cannot be pickled


def resolve(schema: type[T], layers: Iterable[Layer], *, strict: bool = False) -> Resolved[T]:
    """Merge ``layers``, given in any order, into a ``schema``. The precedence is code > flag > environment > file > default.

    If two layers contain the same setting, the higher layer takes precedence and the lower layer's value is kept in
    ``shadowed``.

    Raises:
        ConfigError: a name is unknown, a value has the wrong type, or ``strict`` is set and two layers give different values
            for a setting.
    """
    names = field_names(schema)
    types = field_types(schema)
    best: dict[str, Setting] = {}
    shadowed: list[Shadowed] = []
    for layer in layers:
        for name, given in layer.items():
            if name not in types:
                raise _unknown(name, given.origin, names)
            setting = Setting(coerce(types[name], name, given.value, where=str(given.origin)), given.origin)
            current = best.get(name)
            if current is None:
                best[name] = setting
                continue
            weak, strong = sorted((current, setting), key=lambda s: s.origin.source)
            best[name] = strong
            if weak.value != strong.value:
                shadowed.append(Shadowed(name=name, value=weak.value, origin=weak.origin, winner=strong.origin))
    if strict and shadowed:
        lost = shadowed[0]
        raise ConfigError(
            _(
                "{lost} is set twice: {value!r} (from {winner}) and {lost_value!r} (from {origin})",
                lost=lost.name,
                value=best[lost.name].value,
                winner=lost.winner,
                lost_value=lost.value,
                origin=lost.origin,
            ),
            do=_("remove one of them, or omit --strict"),
        )
    value = schema(**{name: setting.value for name, setting in best.items()})
    origins = {name: best[name].origin if name in best else Origin(SettingSource.DEFAULT) for name in names}
    return _resolved(value, origins, tuple(shadowed))


def _resolved(value: T, origins: Mapping[str, Origin], shadowed: tuple[Shadowed, ...]) -> Resolved[T]:
    return Resolved(value=value, origins=MappingProxyType(origins), shadowed=shadowed)


def _unknown(name: str, origin: Origin, names: tuple[str, ...]) -> ConfigError:
    near = get_close_matches(name, names, n=1)
    return ConfigError(
        _("unknown setting {name!r}", name=name),
        where=str(origin),
        do=_("did you mean {near!r}?", near=near[0]) if near else _("known settings: {names}", names=", ".join(names)),
    )
