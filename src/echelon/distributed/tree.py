"""Nested data (tuples, lists, dicts, dataclasses of tensors): map over it, take it apart, describe it.

Containers are tuples, lists, mappings, and instances of dataclasses; everything else is a leaf. What is put together again
has the type, the order and the other attributes of what it was made of, and none of its own methods is called for that:
``__init__``, ``__setitem__`` and ``update`` of the classes that models return check, count or refuse.
"""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from types import MemberDescriptorType
from typing import Any

import torch
from torch import nn

from echelon.base.errors import UsageError

__all__ = ["contents", "describe", "is_record", "leaves", "map_tensors", "rebuild_like"]


def map_tensors(fn: Callable[[torch.Tensor], Any], data: Any) -> Any:
    """Return ``data`` with ``fn(tensor)`` in the place of each tensor; other leaves stay, containers keep their types.

    A container in which nothing is replaced comes back as the same object.
    """
    return _map(fn, data, ())


def _map(fn: Callable[[torch.Tensor], Any], data: Any, above: tuple[Any, ...]) -> Any:
    if isinstance(data, torch.Tensor):
        return fn(data)
    held = contents(data)
    if held is None:
        return data
    if is_record(data):
        if any(data is one for one in above):  # it refers to itself
            return data
        above = (*above, data)
    if isinstance(held, dict):
        items: Any = {key: _map(fn, value, above) for key, value in held.items()}
        is_same = all(items[key] is value for key, value in held.items())
    else:
        items = [_map(fn, value, above) for value in held]
        is_same = all(new is old for new, old in zip(items, held))
    return data if is_same else rebuild_like(data, items)


def is_record(data: Any) -> bool:
    """Tell whether ``data`` is an instance of a dataclass, whose fields are its items (a mapping has items of its own)."""
    return (
        is_dataclass(data)
        and not isinstance(data, type)
        and not isinstance(data, (tuple, list, Mapping, torch.Tensor, nn.Module))
    )


def contents(data: Any) -> list[Any] | dict[Any, Any] | None:
    """Return the items of a container, those of mappings and dataclasses by their names; None for a leaf."""
    if isinstance(data, (tuple, list)):
        return list(data)
    if isinstance(data, Mapping):
        return dict(data.items())
    return _fields_of(data) if is_record(data) else None


def _fields_of(data: Any) -> dict[str, Any]:
    """Return the fields that ``data`` holds by itself: not what a property, or a foreign ``__getattr__``, would make."""
    own = getattr(data, "__dict__", {})
    found = {}
    for one in fields(data):
        if one.name in own:
            found[one.name] = own[one.name]
        elif isinstance(slot := getattr(type(data), one.name, None), MemberDescriptorType):
            with suppress(AttributeError):  # it was never set
                found[one.name] = slot.__get__(data)
    return found


def rebuild_like(data: Any, items: Any) -> Any:
    """Put ``items`` (a list or a dict, as ``contents`` gives them) into a container of the type of ``data``.

    Raises:
        UsageError: a mapping that is neither a dict nor a UserDict, and cannot be made of a dict.
    """
    kind: Any = type(data)
    if kind in (list, tuple, dict):
        return kind(items)
    if isinstance(data, tuple):
        return _tuple_like(data, items)
    if isinstance(data, list):
        made: Any = list.__new__(kind)
        list.extend(made, items)
        return _with_state(made, data, _replaced(data, items))
    if isinstance(data, dict):
        return _dict_like(data, dict(items))
    if isinstance(data, UserDict):
        made = _with_state(object.__new__(kind), data, _replaced(data.values(), [items[key] for key in data]))
        made.__dict__["data"] = rebuild_like(data.data, {**data.data, **items})
        return made
    if isinstance(data, Mapping):
        try:
            return kind(items)
        except TypeError as error:
            raise UsageError(
                f"a {kind.__name__} holds tensors that are to be replaced, and cannot be made of a dict: {error}",
                where=f"{kind.__module__}.{kind.__qualname__}",
                do="return a dict, a dataclass or a named tuple in its place, or let its __init__ take one dict",
            ) from error
    assert is_record(data), kind
    made = _with_state(_bare(kind), data, {})
    for name, value in items.items():
        object.__setattr__(made, name, value)  # also of a frozen one
    return made


def _tuple_like(data: tuple[Any, ...], items: list[Any]) -> Any:
    kind: Any = type(data)
    try:
        made = tuple.__new__(kind, items)  # a named tuple, too
    except TypeError:  # one of C's, such as torch.return_types.max
        return kind(items)
    return _with_state(made, data, _replaced(data, items))


def _dict_like(data: dict[Any, Any], items: dict[Any, Any]) -> Any:
    base: Any = next(one for one in (defaultdict, OrderedDict, dict) if isinstance(data, one))
    made = base.__new__(type(data))
    if isinstance(data, defaultdict):
        made.default_factory = data.default_factory
    replaced = {}
    for key, old in {**data, **items}.items():
        base.__setitem__(made, key, items.get(key, old))
        if key in data:
            replaced[id(data[key])] = (data[key], items.get(key, old))
    # Items that are attributes, too (ModelOutput), are those of the new one.
    return _with_state(made, data, replaced)


def _replaced(old: Any, new: Any) -> dict[int, tuple[Any, Any]]:
    return {id(before): (before, after) for before, after in zip(old, new)}


def _with_state(made: Any, data: Any, replaced: Mapping[int, tuple[Any, Any]]) -> Any:
    """Give ``made`` the attributes and slots of ``data``; for those in ``replaced``, by identity, what came in their place."""
    for name, value in getattr(data, "__dict__", {}).items():
        made.__dict__[name] = replaced[id(value)][1] if id(value) in replaced else value
    for kind in type(data).__mro__:
        if "__slots__" in vars(kind):
            for slot in vars(kind).values():
                if isinstance(slot, MemberDescriptorType):
                    with suppress(AttributeError):  # it was never set
                        slot.__set__(made, slot.__get__(data))
    return made


def _bare(kind: Any) -> Any:
    try:
        return object.__new__(kind)
    except TypeError:  # it inherits from a type of C's, such as an exception
        return kind.__new__(kind)


def leaves(data: Any) -> Iterator[Any]:
    """Yield every leaf of ``data`` in order: tensors and everything that is no container."""
    held = contents(data)
    if held is None:
        yield data
    else:
        for item in held.values() if isinstance(held, dict) else held:
            yield from leaves(item)


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
    if is_record(data):
        held = _fields_of(data)
        return f"{type(data).__name__}({', '.join(f'{k}={describe(v, shapes=shapes)}' for k, v in held.items())})"
    return type(data).__name__
