"""Reads and writes JSON that preserves the types of plain Python data. Reading it cannot run code."""

from __future__ import annotations

import base64
import binascii
import datetime
import json
import math
import re
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

import numpy as np

from echelon.base.errors import CheckpointError
from echelon.checkpoint import storage
from echelon.checkpoint.damage import damaged
from echelon.checkpoint.object_store import Location

if TYPE_CHECKING:
    import torch

MAX_DEPTH = 64
"""The maximum nesting of lists and dicts."""

_MAX_JSON_BYTES = 1 << 28
_MAX_BITS = 4096  # Python does not parse or print integers of more than 4300 digits
_ARRAY_DTYPE = re.compile(r"[<>|=]?(b1|[biufcSU]\d{1,9}|[mM]8(\[\d{0,9}[a-zA-Z]{1,2}\])?)")
_FACTORIES: Mapping[str, Callable[[], Any]] = {kind.__name__: kind for kind in (int, float, str, list, dict, set)}
_PLAIN = "numbers, strings, bytes, lists, tuples, sets, dicts, dates, paths, numpy arrays and tensors"


def to_bytes(encoded: Any) -> bytes:
    """Return the result of ``encode`` as JSON text. Equal values produce equal text."""
    return json.dumps(encoded, ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode("ascii")


def from_bytes(text: bytes, *, source: str) -> Any:
    """Parse JSON text. Pass the result to ``decode``. Error messages refer to the text as ``source``.

    Raises:
        CheckpointError: the text is not valid JSON, has a duplicate key, or is nested too deeply.
    """
    try:
        return json.loads(text.decode("utf-8"), object_pairs_hook=_object, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        why = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise damaged(f"{source} cannot be read: {why}") from error


def read_json(path: Location) -> dict[str, Any]:
    """Return the JSON object stored in a file.

    Raises:
        CheckpointError: the file cannot be read or does not contain a JSON object.
    """
    try:
        text = storage.read_file(path, max_bytes=_MAX_JSON_BYTES)
    except OSError as error:
        raise damaged(f"{path} cannot be read: {error}") from error
    content = from_bytes(text, source=str(path))
    if not isinstance(content, dict):
        raise damaged(f"{path} does not contain a JSON object")
    return content


def encode(value: Any, *, name: str, put_tensor: Callable[[str, torch.Tensor], None] | None = None) -> Any:
    """Convert ``value`` to data that JSON can represent. Tensors are replaced with their names.

    Args:
        name: name of the value, used in error messages and in the names of its tensors.
        put_tensor: called with each tensor's name and value. If None, tensors are rejected.

    Raises:
        CheckpointError: part of the value is not plain data; the error names that part.
    """
    return _encode(value, name, 0, put_tensor)


def decode(value: Any, *, source: str, get_tensor: Callable[[str], torch.Tensor] | None = None) -> Any:
    """Return the value that was passed to ``encode``.

    Args:
        value: result of ``from_bytes``.
        source: name of the file, used in error messages.
        get_tensor: returns the tensor with a given name. If None, tensors are rejected.

    Raises:
        CheckpointError: ``value`` was not produced by ``encode``.
    """
    try:
        return _decode(value, get_tensor)
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError, binascii.Error) as error:
        raise damaged(f"{source} cannot be read: {error}") from error


# ---- encode ----------------------------------------------------------------------------------------------------------


def _encode(value: Any, name: str, depth: int, put_tensor: Callable[[str, torch.Tensor], None] | None) -> Any:
    # The exact type decides: a subclass (an enum, a named tuple) would be decoded as its base class.
    kind = type(value)
    if value is None or kind in (bool, str) or (kind is int and value.bit_length() <= _MAX_BITS):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if depth > MAX_DEPTH:
        raise CheckpointError(
            f"{name} is nested deeper than {MAX_DEPTH} levels or contains itself", do="save a flatter structure"
        )

    def inner(item: Any, step: str) -> Any:
        return _encode(item, f"{name}{step}", depth + 1, put_tensor)

    if kind is list:
        return [inner(item, f"[{i}]") for i, item in enumerate(value)]
    if kind is dict and all(type(key) is str and not key.startswith("$") for key in value):
        return {key: inner(item, f"[{key!r}]") for key, item in value.items()}
    if kind in _PAIRS:
        return {_PAIRS[kind]: [[inner(key, ".keys()"), inner(item, f"[{key!r}]")] for key, item in value.items()]}
    if kind is defaultdict and (value.default_factory is None or value.default_factory in _FACTORIES.values()):
        factory = None if value.default_factory is None else value.default_factory.__name__
        return {"$default_dict": [factory, inner(dict(value), "")]}
    if kind is tuple:
        return {"$tuple": [inner(item, f"[{i}]") for i, item in enumerate(value)]}
    if kind in (set, frozenset):
        return {_NAMES[kind]: sorted((inner(item, " (an item)") for item in value), key=to_bytes)}
    if kind is deque:
        return {"$deque": [value.maxlen, [inner(item, f"[{i}]") for i, item in enumerate(value)]]}
    import torch  # noqa: PLC0415 - after plain data, which needs no torch

    if put_tensor is not None and isinstance(value, torch.Tensor):
        put_tensor(name, value)
        return {"$tensor": name}
    encoded = _encode_leaf(value)
    if encoded is None:
        what = "a tensor" if isinstance(value, torch.Tensor) else f"a {kind.__module__}.{kind.__qualname__}"
        raise CheckpointError(
            f"{name} is {what}, which is not plain data and could not be loaded without running code",
            do=f"save {_PLAIN}",
        )
    return encoded


def _encode_leaf(value: Any) -> dict[str, Any] | None:
    import torch  # noqa: PLC0415 - as above

    kind = type(value)
    if kind is bytes:
        return {"$bytes": base64.b64encode(value).decode("ascii")}
    if kind is complex:
        return {"$complex": [_encode(part, "", 0, None) for part in (value.real, value.imag)]}
    if isinstance(value, np.generic) and _ARRAY_DTYPE.fullmatch(value.dtype.str):
        return {"$scalar": [value.dtype.str, base64.b64encode(value.tobytes()).decode("ascii")]}
    if kind is np.ndarray and _ARRAY_DTYPE.fullmatch(value.dtype.str):
        data = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode("ascii")
        return {"$array": [value.dtype.str, list(value.shape), data]}
    if kind is torch.Size:
        return {"$size": list(value)}
    if kind is torch.dtype:
        return {"$torch_dtype": str(value).removeprefix("torch.")}
    if kind is torch.device:
        return {"$device": str(value)}
    if kind in (datetime.datetime, datetime.date, datetime.time):
        return {f"${kind.__name__}": value.isoformat()}
    if kind is datetime.timedelta:
        return {"$timedelta": [value.days, value.seconds, value.microseconds]}
    if isinstance(value, PurePath):
        return {"$path": str(value)}
    return None


# ---- decode ----------------------------------------------------------------------------------------------------------


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} occurs twice")
    return found


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is not valid JSON")


def _decode(value: Any, get_tensor: Callable[[str], torch.Tensor] | None) -> Any:
    if isinstance(value, list):
        return [_decode(item, get_tensor) for item in value]
    if not isinstance(value, dict):
        return value
    typed = [key for key in value if key.startswith("$")]
    if not typed:
        return {key: _decode(item, get_tensor) for key, item in value.items()}
    if len(value) != 1:
        raise ValueError(f"{typed[0]!r} must be the only key of its object")
    kind, content = typed[0], value[typed[0]]
    if kind == "$tensor":
        if get_tensor is None or not isinstance(content, str):
            raise ValueError("it refers to a tensor in a place where tensors are not allowed")
        return get_tensor(content)
    if kind not in _DECODERS:
        raise ValueError(f"unknown type {kind!r}")
    expected, build, nests = _DECODERS[kind]
    if not isinstance(content, expected):
        what = "text" if expected is str else "a list"
        raise ValueError(f"expected {what}, got {str(content)[:60]!r}")
    return build(_decode(content, get_tensor) if nests else content)


def _raw(content: str) -> bytes:
    return base64.b64decode(content, validate=True)


def _special_float(content: str) -> float:
    if content not in ("nan", "inf", "-inf"):
        raise ValueError(f"expected nan, inf or -inf, but got {content!r}")
    return float(content)


def _default_dict(content: list[Any]) -> defaultdict[Any, Any]:
    factory, items = content
    return defaultdict(None if factory is None else _FACTORIES[factory], items)


def _deque(content: list[Any]) -> deque[Any]:
    limit, items = content
    return deque(items, maxlen=limit)


def _numpy_dtype(content: Any) -> np.dtype[Any]:
    if not _ARRAY_DTYPE.fullmatch(content):
        raise ValueError(f"{content!r} is not a dtype that plain data can have")
    dtype: np.dtype[Any] = np.dtype(content)
    return dtype


def _array(content: list[Any]) -> np.ndarray[Any, Any]:
    dtype, shape, data = content
    return np.frombuffer(_raw(data), dtype=_numpy_dtype(dtype)).reshape(shape).copy()


def _scalar(content: list[Any]) -> Any:
    dtype, data = content
    (scalar,) = np.frombuffer(_raw(data), dtype=_numpy_dtype(dtype))
    return scalar


def _size(content: list[Any]) -> torch.Size:
    import torch  # noqa: PLC0415 - a file without torch's types is read without torch

    return torch.Size(content)


def _torch_dtype(content: str) -> torch.dtype:
    import torch  # noqa: PLC0415 - as above

    dtype = getattr(torch, content, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{content!r} is not a dtype")
    return dtype


def _device(content: str) -> torch.device:
    import torch  # noqa: PLC0415 - as above

    try:
        return torch.device(content)
    except RuntimeError as error:
        raise ValueError(f"{content!r} is not a device") from error


_PAIRS: Mapping[type, str] = {dict: "$dict", OrderedDict: "$ordered_dict", Counter: "$counter"}
_NAMES: Mapping[type, str] = {set: "$set", frozenset: "$frozenset"}
# The JSON type of each kind's content, the function that builds the value, and whether it holds encoded values.
_DECODERS: Mapping[str, tuple[type, Callable[[Any], Any], bool]] = {
    "$dict": (list, dict, True),
    "$ordered_dict": (list, OrderedDict, True),
    "$counter": (list, lambda content: Counter(dict(content)), True),
    "$default_dict": (list, _default_dict, True),
    "$tuple": (list, tuple, True),
    "$size": (list, _size, True),
    "$set": (list, set, True),
    "$frozenset": (list, frozenset, True),
    "$deque": (list, _deque, True),
    "$complex": (list, lambda content: complex(*content), True),
    "$float": (str, _special_float, False),
    "$bytes": (str, _raw, False),
    "$scalar": (list, _scalar, False),
    "$array": (list, _array, False),
    "$torch_dtype": (str, _torch_dtype, False),
    "$device": (str, _device, False),
    "$datetime": (str, datetime.datetime.fromisoformat, False),
    "$date": (str, datetime.date.fromisoformat, False),
    "$time": (str, datetime.time.fromisoformat, False),
    "$timedelta": (list, lambda content: datetime.timedelta(*content), False),
    "$path": (str, Path, False),
}
