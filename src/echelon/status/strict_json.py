"""JSON that strict readers accept: nan becomes ``{"float": "nan"}``, and infinities likewise.

Python's ``json`` writes the bare words ``NaN`` and ``Infinity``, which are no JSON; readers in other languages reject the file.
"""

from __future__ import annotations

import json
import math
from typing import Any

_KEY = "float"
_NOT_FINITE = frozenset({"nan", "inf", "-inf"})


def dumps(value: Any, *, indent: int | None = None) -> str:
    """Return ``value`` as JSON."""
    try:
        return json.dumps(value, indent=indent, allow_nan=False)
    except ValueError:
        return json.dumps(encode(value), indent=indent, allow_nan=False)


def loads(text: str | bytes) -> Any:
    """Return the value that ``dumps`` wrote. The bare words that Python's ``json`` writes are read, too.

    Raises:
        ValueError: ``text`` is not JSON.
    """
    value = json.loads(text)
    mark = b'"float"' if isinstance(text, bytes) else '"float"'
    return decode(value) if mark in text else value  # type: ignore[operator]


def encode(value: Any) -> Any:
    """Return ``value`` with each float that strict JSON does not have replaced."""
    if isinstance(value, dict):
        return {name: encode(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [encode(item) for item in value]
    return {_KEY: str(value)} if isinstance(value, float) and not math.isfinite(value) else value


def decode(value: Any) -> Any:
    """Return the value that ``encode`` has replaced."""
    if isinstance(value, dict):
        if value.keys() == {_KEY} and value[_KEY] in _NOT_FINITE:
            return float(value[_KEY])
        return {name: decode(item) for name, item in value.items()}
    return [decode(item) for item in value] if isinstance(value, list) else value
