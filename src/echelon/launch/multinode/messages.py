"""Converts the typed records that launchers exchange (dataclasses, named tuples, enums, mappings) to and from JSON.

pickle would run code sent by another machine, and the standard library has no typed JSON decoder.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from functools import lru_cache
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

T = TypeVar("T")

_PLAIN = frozenset({NoneType, bool, int, float, str})


def encode(value: Any) -> Any:
    """Return ``value`` as plain JSON data."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if dataclasses.is_dataclass(kind):
        return {name: encode(getattr(value, name)) for name in kind.__dataclass_fields__}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return [[encode(key), encode(item)] for key, item in value.items()]  # keys may be numbers
    if isinstance(value, (tuple, list)):
        return [encode(item) for item in value]
    raise TypeError(f"{value!r} is not a typed record")


def decode(kind: type[T], data: Any) -> T:
    """Convert JSON data to a value of type ``kind``.

    Raises:
        ValueError: ``data`` does not match the type.
    """
    try:
        found: T = _decoder(cast(Any, kind))(data)
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"not a {kind}: {error}") from error
    return found


@lru_cache(maxsize=256)
def _decoder(kind: Any) -> Callable[[Any], Any]:
    """Return the function that converts JSON data to ``kind``, made once: the coordinator reads thousands of ranks a second."""
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        assert NoneType in args, kind
        (inner,) = (_decoder(arg) for arg in args if arg is not NoneType)
        return lambda data: None if data is None else inner(data)
    if origin is tuple and args[1:] != (...,):
        return _tuple_decoder(tuple, args)
    if origin in (tuple, list, Sequence):
        return _sequence_decoder(args[0], tuple if origin is tuple else list)
    if origin in (dict, Mapping):
        key_decoder, value_decoder = map(_decoder, args)
        return lambda data: {key_decoder(key): value_decoder(item) for key, item in data}
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        fields = {name: _decoder(hint) for name, hint in get_type_hints(kind).items()}
        return lambda data: kind(**{name: fields[name](item) for name, item in data.items()})
    if isinstance(kind, type) and issubclass(kind, tuple):
        return _tuple_decoder(lambda items: kind(*items), tuple(get_type_hints(kind).values()))
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind

    def plain(data: Any) -> Any:
        if type(data) is kind:
            return data
        if kind is float and type(data) is int:
            return float(data)
        raise TypeError(f"{data!r} is not a {kind.__name__}")

    return plain


def _sequence_decoder(kind: Any, collect: Callable[[Iterable[Any]], Any]) -> Callable[[Any], Any]:
    item_decoder, only = _decoder(kind), {kind}

    def decode_items(data: Any) -> Any:
        if kind in _PLAIN and set(map(type, data)) == only:
            return collect(data)
        return collect(map(item_decoder, data))

    return decode_items


def _tuple_decoder(make: Callable[[Iterable[Any]], Any], kinds: tuple[Any, ...]) -> Callable[[Any], Any]:
    decoders = [_decoder(kind) for kind in kinds]
    return lambda data: make(decode_item(item) for decode_item, item in zip(decoders, data, strict=True))
