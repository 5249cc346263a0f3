"""Maps functions over nested data (tuples, lists, dicts or dataclasses of tensors), iterates over it and describes it.

Containers are tuples, lists, mappings, and dataclass instances; everything else is a leaf. A rebuilt container has the type,
order and other attributes of the original. Its ``__init__``, ``__setitem__`` and ``update`` are not called, because in model
output classes they may validate, have side effects, or raise errors.
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


def map_tensors(fn: Callable[[torch.Tensor], Any], data: Any) -> Any:
    """Return ``data`` with each tensor replaced by ``fn(tensor)``; other leaves and container types are kept.

    A container whose contents do not change is returned as the same object.
    """
    return _map(fn, data, ())


def _map(fn: Callable[[torch.Tensor], Any], data: Any, above: tuple[Any, ...]) -> Any:
    if isinstance(data, torch.Tensor):
        return fn(data)
    held = contents(data)
    if held is None:
        return data
    if is_record(data):
        if any(data is one for one in above):  # a reference cycle
            return data
        above = (*above, data)
    if isinstance(held, dict):
        items: Any = {key: _map(fn, value, above) for key, value in held.items()}
        is_same = all(items[key] is value for key, value in held.items())
    else:
        items = [_map(fn, value, above) for value in held]
        is_same = all(new is old for new, old in zip(items, held))
    return data if is_same else rebuild_like(data, items)


def map_items(fn: Callable[[Any], Any], data: Any) -> Any:
    """Return a container like ``data`` with each item replaced by ``fn(item)``."""
    held = contents(data)
    assert held is not None, type(data)
    return rebuild_like(
        data, {key: fn(item) for key, item in held.items()} if isinstance(held, dict) else list(map(fn, held))
    )


def is_record(data: Any) -> bool:
    """Return whether ``data`` is a dataclass instance that is not also a container, tensor or module."""
    return (
        is_dataclass(data)
        and not isinstance(data, type)
        and not isinstance(data, (tuple, list, Mapping, torch.Tensor, nn.Module))
    )


def contents(data: Any) -> list[Any] | dict[Any, Any] | None:
    """Return the items of a container (a dict for mappings and dataclasses), or None for a leaf."""
    if isinstance(data, (tuple, list)):
        return list(data)
    if isinstance(data, (dict, Mapping)):
        return dict(data.items())
    return _fields_of(data) if is_record(data) else None


def _fields_of(data: Any) -> dict[str, Any]:
    """Return the stored fields of ``data``, excluding values that a property or ``__getattr__`` would compute."""
    own = getattr(data, "__dict__", {})
    found = {}
    for one in fields(data):
        if one.name in own:
            found[one.name] = own[one.name]
        elif isinstance(slot := getattr(type(data), one.name, None), MemberDescriptorType):
            with suppress(AttributeError):  # the slot was never set
                found[one.name] = slot.__get__(data)
    return found


def rebuild_like(data: Any, items: Any) -> Any:
    """Put ``items`` (a list or dict, as returned by ``contents``) into a container of the same type as ``data``.

    Raises:
        UsageError: ``data`` is a mapping that is neither a dict nor a UserDict and cannot be created from a dict.
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
    if isinstance(data, (dict, Mapping)):
        try:
            return kind(items)
        except TypeError as error:
            raise UsageError(
                f"cannot replace the tensors in a {kind.__name__}, because it cannot be created from a dict: {error}",
                where=f"{kind.__module__}.{kind.__qualname__}",
                do="use a dict, a dataclass or a named tuple instead, or make its __init__ accept a dict",
            ) from error
    assert is_record(data), kind
    made = _with_state(_new_instance(kind), data, {})
    for name, value in items.items():
        object.__setattr__(made, name, value)  # works for frozen dataclasses, too
    return made


def _tuple_like(data: tuple[Any, ...], items: list[Any]) -> Any:
    kind: Any = type(data)
    try:
        made = tuple.__new__(kind, items)  # works for named tuples, too
    except TypeError:  # a type defined in C, such as torch.return_types.max
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
    # Items that are also attributes (ModelOutput) are replaced, too.
    return _with_state(made, data, replaced)


def _replaced(old: Any, new: Any) -> dict[int, tuple[Any, Any]]:
    return {id(before): (before, after) for before, after in zip(old, new)}


def _with_state(made: Any, data: Any, replaced: Mapping[int, tuple[Any, Any]]) -> Any:
    """Copy the attributes and slots of ``data`` to ``made``, substituting the values in ``replaced`` (by identity)."""
    for name, value in getattr(data, "__dict__", {}).items():
        made.__dict__[name] = replaced[id(value)][1] if id(value) in replaced else value
    for kind in type(data).__mro__:
        if "__slots__" in vars(kind):
            for slot in vars(kind).values():
                if isinstance(slot, MemberDescriptorType):
                    with suppress(AttributeError):  # the slot was never set
                        slot.__set__(made, slot.__get__(data))
    return made


def _new_instance(kind: Any) -> Any:
    try:
        return object.__new__(kind)
    except TypeError:  # it inherits from a type defined in C, such as an exception
        return kind.__new__(kind)


def leaves(data: Any) -> Iterator[Any]:
    """Yield the leaves of ``data`` in order: tensors and everything else that is not a container."""
    held = contents(data)
    if held is None:
        yield data
    else:
        for item in held.values() if isinstance(held, dict) else held:
            yield from leaves(item)


def describe(data: Any, *, shapes: bool = True) -> str:
    """Return the structure of ``data`` on one line, such as ``{'loss': float32[], 'ids': (int64[4, 8], str)}``.

    Args:
        shapes: include tensor shapes, not only dtypes.
    """
    if isinstance(data, torch.Tensor):
        return str(data.dtype).removeprefix("torch.") + (str(list(data.shape)) if shapes else "")
    if isinstance(data, (dict, Mapping)):
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
