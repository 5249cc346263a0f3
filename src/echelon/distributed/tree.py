"""Nested data (tuples, lists, dicts, namedtuples of tensors): map over it, take it apart, describe it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

__all__ = ["describe", "leaves", "map_tensors", "rebuild_like"]


def map_tensors(fn: Callable[[torch.Tensor], Any], data: Any) -> Any:
    """Return ``data`` with ``fn(tensor)`` in the place of each tensor; other leaves stay, containers keep their types."""
    if isinstance(data, torch.Tensor):
        return fn(data)
    if isinstance(data, (tuple, list)):
        return rebuild_like(data, [map_tensors(fn, item) for item in data])
    if isinstance(data, Mapping):
        return rebuild_like(data, {key: map_tensors(fn, value) for key, value in data.items()})
    return data


def rebuild_like(data: Any, items: Any) -> Any:
    """Put ``items`` (a list or a dict) into a container of the type of ``data``: namedtuple, list, UserDict, ..."""
    if isinstance(data, tuple) and hasattr(data, "_fields"):  # a namedtuple takes its fields one by one
        return type(data)(*items)
    if isinstance(data, dict) and type(data) is not dict:  # OrderedDict, defaultdict, ModelOutput: keep what it holds
        copied = data.copy()
        copied.update(items)
        return copied
    return type(data)(items)


def leaves(data: Any) -> Iterator[Any]:
    """Yield every leaf of ``data`` in order: tensors and everything that is no container."""
    if isinstance(data, (tuple, list)):
        for item in data:
            yield from leaves(item)
    elif isinstance(data, Mapping):
        for value in data.values():
            yield from leaves(value)
    else:
        yield data


def describe(data: Any, *, shapes: bool = True) -> str:
    """Return the structure of ``data`` as one line, such as ``{'loss': float32[], 'ids': (int64[4, 8], str)}``.

    Args:
        data: any nested data.
        shapes: with the shape of each tensor, or its dtype alone.
    """
    if isinstance(data, torch.Tensor):
        return str(data.dtype).removeprefix("torch.") + (str(list(data.shape)) if shapes else "")
    if isinstance(data, Mapping):
        return "{" + ", ".join(f"{key!r}: {describe(value, shapes=shapes)}" for key, value in data.items()) + "}"
    if isinstance(data, list):
        return "[" + ", ".join(describe(item, shapes=shapes) for item in data) + "]"
    if isinstance(data, tuple):
        name = type(data).__name__ if hasattr(data, "_fields") else ""
        return f"{name}(" + ", ".join(describe(item, shapes=shapes) for item in data) + ")"
    return type(data).__name__
