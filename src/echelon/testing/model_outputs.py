"""Various output types for a forward pass, for testing engines."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

# Each output has, in this order: logits; hidden, a pair of tensors that no loss uses; note, a non-tensor; missing, None.


class OutputNote:
    """A non-tensor value in a model output. The very same object must be returned."""


class _NamedTuple(NamedTuple):
    logits: torch.Tensor
    hidden: Any
    note: OutputNote
    missing: None


@dataclass
class _Dataclass:
    logits: torch.Tensor
    hidden: Any
    note: OutputNote
    missing: None

    def __post_init__(self) -> None:
        if isinstance(self.missing, torch.Tensor) and self.missing is self.logits:
            raise ValueError("a __post_init__ that checks")
        self.num_items = 4  # an attribute that is not a field


@dataclass(frozen=True)
class _Frozen:
    logits: torch.Tensor
    hidden: Any
    note: OutputNote
    missing: None


@dataclass(frozen=True, slots=True)
class _FrozenSlots:
    logits: torch.Tensor
    hidden: Any
    note: OutputNote
    missing: None


class _Mirrored(OrderedDict[str, Any]):
    """Like ``transformers.utils.ModelOutput``: items are also attributes, None is not an item, and ``update`` raises an error."""

    def __init__(self, **items: Any) -> None:
        super().__init__()
        self.names = tuple(items)
        for name, value in items.items():
            if value is None:
                object.__setattr__(self, name, None)
            else:
                self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        super().__setattr__(name, value)

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise TypeError(f"You cannot change a {type(self).__name__}.")

    update = pop = setdefault = __delitem__ = copy = _refuse


class _Watched(dict[str, Any]):
    """A dict subclass with side effects: its constructor takes no arguments, and it counts changes to its items."""

    __slots__ = ("__dict__", "num_changes")

    def __init__(self) -> None:
        super().__init__()
        self.num_changes = 0

    def __setitem__(self, name: str, value: Any) -> None:
        self.num_changes += 1
        super().__setitem__(name, value)

    def update(self, *_: Any, **__: Any) -> None:
        raise RuntimeError("update() was called")

    def __reduce__(self) -> Any:
        raise RuntimeError("the object was copied")


class _Encoding(UserDict[str, Any]):
    """Like ``transformers.BatchEncoding``: a UserDict with extra attributes, whose items can be read as attributes."""

    def __init__(self, data: dict[str, Any], encodings: Any = None) -> None:
        super().__init__(data)
        self._encodings = encodings

    def __getattr__(self, name: str) -> Any:
        try:
            return self.data[name]
        except KeyError:
            raise AttributeError(name) from None


class _ReadOnly(Mapping[str, Any]):
    """A mapping that is not a dict."""

    def __init__(self, items: Mapping[str, Any]) -> None:
        self._items = dict(items)

    def __getitem__(self, name: str) -> Any:
        return self._items[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


class PlainObject:
    """An object with arbitrary attributes."""

    def __init__(self, **items: Any) -> None:
        vars(self).update(items)


def _defaults(**items: Any) -> defaultdict[str, Any]:
    made: defaultdict[str, Any] = defaultdict(list)
    made.update(items)
    return made


def _watched(**items: Any) -> _Watched:
    made = _Watched()
    for name, value in items.items():
        made[name] = value
    return made


OUTPUT_KINDS: dict[str, Callable[..., Any]] = {
    "tuple": lambda **items: tuple(items.values()),
    "list": lambda **items: list(items.values()),
    "dict": dict,
    "namedtuple": _NamedTuple,
    "dataclass": _Dataclass,
    "frozen dataclass": _Frozen,
    "frozen dataclass with slots": _FrozenSlots,
    "ModelOutput": _Mirrored,
    "dict with side effects": _watched,
    "OrderedDict": OrderedDict,
    "defaultdict": _defaults,
    "UserDict": lambda **items: UserDict(items),
    "BatchEncoding": lambda **items: _Encoding(items, encodings="kept"),
    "Mapping": lambda **items: _ReadOnly(items),
    "nested": lambda **items: {"inner": [_Frozen(**items)]},
}
"""Maps each kind of output to a function that builds it from its items."""


def items_of(output: Any) -> dict[str, Any]:
    """Return the items of an output of any kind, in order. None values are included only if the kind stores them."""
    if isinstance(output, _NamedTuple):
        return output._asdict()
    if isinstance(output, Mapping):
        return items_of(output["inner"][0]) if "inner" in output else dict(output.items())
    if isinstance(output, (tuple, list)):
        return dict(zip(("logits", "hidden", "note", "missing"), output, strict=True))
    if is_dataclass(output):
        return {one.name: getattr(output, one.name) for one in fields(output)}
    return dict(vars(output))


class Returning(nn.Module):
    """Returns the output of ``inner`` as the logits of a given kind of output. ``head`` computes an output that no loss uses."""

    def __init__(self, inner: nn.Module, make: Callable[..., Any], head: nn.Module | None = None) -> None:
        super().__init__()
        self.inner = inner
        self.head = head
        self.make = make
        self.note = OutputNote()

    def forward(self, x: torch.Tensor) -> Any:
        """Run ``inner`` and ``head``, and build the output from their results."""
        logits = self.inner(x)
        hidden = (logits * 2, (logits if self.head is None else self.head(x)) * 3)
        return self.make(logits=logits, hidden=hidden, note=self.note, missing=None)
