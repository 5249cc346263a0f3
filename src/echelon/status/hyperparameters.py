"""Hyperparameters: what a run was run with, as values that JSON can contain, without secrets.

A line of ``hyperparameters.jsonl`` has a ``group`` (``Group``), ``values`` by name, which may be nested, and in ``defaults`` the names
of those that have their default values (``optimizer.eps``). A later line replaces values of the same names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from numbers import Integral, Real
from pathlib import PurePath
from typing import Any, Literal, TypeAlias, get_args

from echelon.base.errors import UsageError
from echelon.base.messages.translation import gettext as _
from echelon.status.run_facts import mask_values

Group: TypeAlias = Literal["logged", "arguments", "training"]
"""Who named the values: the program, with ``log_hyperparameters``; TrainingArguments; echelon, from the objects that train."""

_MAX_DEPTH = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Hyperparameter:
    """A recorded hyperparameter."""

    group: Group
    name: str
    """Names of nested values are joined with dots: ``optimizer.lr``."""
    value: Any
    """A JSON value that is no dict."""
    is_default: bool


def checked_hyperparameters(values: Any, *, where: str) -> dict[str, Any]:
    """Return the ``values`` of ``log_hyperparameters`` as JSON values, without secrets.

    Args:
        values: texts, numbers, booleans, None, and lists and dicts of these, by name.
        where: the call, for an error.

    Raises:
        UsageError: a name is not text, or a value is of another type.
    """
    if not isinstance(values, Mapping):
        raise UsageError(
            _("hyperparameters are passed as a dict, not as {kind}", kind=type(values).__name__),
            where=where,
            do=_("pass names and values, such as {example}", example="{'lr': 0.1}, vars(args)"),
        )
    found: dict[str, Any] = _checked(values, "", where, 0)
    return mask_values(found)


def _checked(value: Any, name: str, where: str, depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise UsageError(
            _("hyperparameter {name!r} is nested more than {most} times", name=name, most=_MAX_DEPTH),
            where=where,
            do=_("pass a flat dict; a dict must not contain itself"),
        )
    if isinstance(value, Mapping):
        return {
            _checked_name(inner, name, where): _checked(item, f"{name}.{inner}".lstrip("."), where, depth + 1)
            for inner, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_checked(item, f"{name}[{i}]", where, depth + 1) for i, item in enumerate(value)]
    is_plain, plain = _scalar(value)
    if not is_plain:
        raise UsageError(
            _(
                "hyperparameter {name!r} is of type {kind}, but only texts, numbers, booleans, None, and lists and dicts of these "
                "can be recorded",
                name=name,
                kind=type(value).__name__,
            ),
            where=where,
            do=_("pass the number of a tensor with .item(), or the text of another object with str()"),
        )
    return plain


def _checked_name(name: Any, above: str, where: str) -> str:
    if isinstance(name, str):
        return name
    raise UsageError(
        _(
            "the name of a hyperparameter must be a text, but {name!r} is of type {kind}",
            name=name,
            kind=type(name).__name__,
        )
        if not above
        else _(
            "the names in hyperparameter {above!r} must be texts, but {name!r} is of type {kind}",
            above=above,
            name=name,
            kind=type(name).__name__,
        ),
        where=where,
        do=_("convert the name with str()"),
    )


def _scalar(value: Any) -> tuple[bool, Any]:
    """Return whether ``value`` is a text, a number (also numpy's), a boolean or None, and what JSON contains for it."""
    if value is None or isinstance(value, bool):
        return True, value
    if isinstance(value, str):
        return True, str.__str__(value)  # the text of a str enum's member, not its name
    if isinstance(value, Integral):
        return True, int(value)
    return (True, float(value)) if isinstance(value, Real) else (False, None)


def plain_hyperparameters(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``values`` of any types as JSON values, without secrets; what JSON does not have becomes text."""
    return mask_values({str(name): _plain(item, 0) for name, item in values.items()})


def _plain(value: Any, depth: int) -> Any:
    if isinstance(value, Enum):
        value = value.value
    is_plain, plain = _scalar(value)
    if is_plain:
        return plain
    if depth < _MAX_DEPTH and isinstance(value, Mapping):
        return {str(name): _plain(item, depth + 1) for name, item in value.items()}
    if depth < _MAX_DEPTH and isinstance(value, (list, tuple)):
        return [_plain(item, depth + 1) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted(map(str, value))
    # The text of another object may be long, or contain its address, which differs in each run.
    return str(value) if isinstance(value, PurePath) else type(value).__name__


def read_hyperparameters(lines: Sequence[Mapping[str, Any]]) -> list[Hyperparameter]:
    """Return what the lines of ``hyperparameters.jsonl`` say: by group, and those that differ from their defaults first."""
    found: dict[tuple[str, str], Hyperparameter] = {}
    groups: dict[str, Group] = {group: group for group in get_args(Group)}
    for line in lines:
        group, values = groups.get(str(line.get("group"))), line.get("values")
        if group is None or not isinstance(values, dict):
            continue
        defaults = set(line.get("defaults") or ())
        for name, item in values.items():
            for key, value in _flat(name, item):
                is_default = not defaults.isdisjoint((name, key))
                found[group, key] = Hyperparameter(group=group, name=key, value=value, is_default=is_default)
    order = [*groups]
    return sorted(found.values(), key=lambda one: (order.index(one.group), one.is_default))


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, dict) or not value:
        yield name, value
        return
    for inner, item in value.items():
        yield from _flat(f"{name}.{inner}", item)
