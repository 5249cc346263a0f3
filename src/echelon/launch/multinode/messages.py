"""Converts the typed records that launchers exchange (dataclasses, named tuples, enums, mappings) to and from JSON.

pickle would run code sent by another machine, and the standard library has no typed JSON decoder.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from enum import Enum
from functools import lru_cache
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


def encode(value: Any) -> Any:
    """Return ``value`` as plain JSON data."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: encode(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return [[encode(key), encode(item)] for key, item in value.items()]  # keys may be numbers
    if isinstance(value, (tuple, list)):
        return [encode(item) for item in value]
    assert value is None or isinstance(value, (bool, int, float, str)), value
    return value


def decode(kind: type[T], data: Any) -> T:
    """Convert JSON data to a value of type ``kind``.

    Raises:
        ValueError: ``data`` does not match the type.
    """
    try:
        found: T = _decode(kind, data)
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"not a {kind}: {error}") from error
    return found


def _decode(kind: Any, data: Any) -> Any:
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        if data is None and NoneType in args:
            return None
        (kind,) = (arg for arg in args if arg is not NoneType)
        return _decode(kind, data)
    if origin is tuple and args[1:] == (...,):
        return tuple(_decode(args[0], item) for item in data)
    if origin is tuple:
        return tuple(_decode(arg, item) for arg, item in zip(args, data, strict=True))
    if origin in (list, Sequence):
        return [_decode(args[0], item) for item in data]
    if origin in (dict, Mapping):
        return {_decode(args[0], key): _decode(args[1], item) for key, item in data}
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        hints = _hints(kind)
        return kind(**{name: _decode(hints[name], item) for name, item in data.items()})
    if isinstance(kind, type) and issubclass(kind, tuple):
        return kind(*(_decode(hint, item) for hint, item in zip(_hints(kind).values(), data, strict=True)))
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind(data)
    if kind is float and type(data) is int:
        return float(data)
    if type(data) is not kind:
        raise TypeError(f"{data!r} is not a {kind.__name__}")
    return data


@lru_cache(maxsize=64)
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)
