"""Accelerate's functions to read, patch and clear environment variables."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from echelon.base import environ
from echelon.base.errors import ConfigError
from echelon.base.messages.translation import gettext as _
from echelon.base.warnings import warn

T = TypeVar("T")

_TRUE = frozenset({"y", "yes", "t", "true", "on", "1"})
_FALSE = frozenset({"n", "no", "f", "false", "off", "0"})
_PURGED = ("ACCELERATE_", "ECHELON_")


def str_to_bool(value: str, to_bool: bool = False) -> int | bool:
    """Convert a case-insensitive boolean value such as ``yes`` to 1 or 0, or with ``to_bool`` to a bool.

    Raises:
        ConfigError: ``value`` is not a valid boolean value.
    """
    word = value.lower()
    if word not in _TRUE | _FALSE:
        raise ConfigError(
            _("{value!r} is not a valid boolean value", value=value),
            do=_("use one of y, yes, t, true, on, 1, n, no, f, false, off, 0"),
        )
    return word in _TRUE if to_bool else int(word in _TRUE)


def parse_flag_from_env(key: str, default: bool = False) -> bool:
    """Return the environment variable ``key`` as a bool, or ``default`` if it is unset or empty.

    Raises:
        ConfigError: its value is not a valid boolean value.
    """
    text = environ.get(key)
    if text is None:
        return default
    try:
        return bool(str_to_bool(text, to_bool=True))
    except ConfigError as error:
        raise ConfigError(f"{key}={error.what}", where=f"env {key}", do=error.do) from None


def parse_choice_from_env(key: str, default: str = "no") -> str:
    """Return the environment variable ``key`` as a string, or ``default`` if it is unset or empty."""
    return environ.get(key) or str(default)


def get_int_from_env(env_keys: Iterable[str], default: int) -> int:
    """Return the first environment variable that has a nonnegative integer value, or ``default``.

    Raises:
        ConfigError: a variable's value is not an integer.
    """
    for key in env_keys:
        text = environ.get(key)
        if text is None:
            continue
        try:
            value = int(text)
        except ValueError:
            raise ConfigError(f"{key}={text!r} is not an integer", where=f"env {key}", do=_("set an integer")) from None
        if value >= 0:
            return value
    return default


@contextmanager
def patch_environment(**kwargs: object) -> Iterator[None]:
    """Set environment variables inside the block, and restore them afterwards; names are uppercased."""
    with environ.patch({name.upper(): str(value) for name, value in kwargs.items()}):
        yield


@contextmanager
def clear_environment() -> Iterator[None]:
    """Clear the environment inside the block, and restore it afterwards."""
    with environ.restored(lambda name: True):
        environ.write(dict.fromkeys(environ.snapshot()))
        yield


def purge_accelerate_environment(func_or_cls: T) -> T:
    """Decorate a function or a class's test methods to restore ``ACCELERATE_*`` and ``ECHELON_*`` afterwards."""
    if isinstance(func_or_cls, type):
        _purge_tests(func_or_cls)
        # Also wrap the tests that subclasses add.
        func_or_cls.__init_subclass__ = classmethod(lambda cls, **kwargs: _purge_tests(cls))  # type: ignore[assignment]
        return func_or_cls
    assert callable(func_or_cls), func_or_cls
    return _purged(func_or_cls)  # type: ignore[return-value]


def are_libraries_initialized(*library_names: str) -> list[str]:
    """Return the names of the libraries that this process has imported."""
    return [name for name in library_names if name in sys.modules]


def convert_dict_to_env_variables(current_env: Mapping[str, str]) -> list[str]:
    """Return the ``NAME=value`` lines of an environment file; warn about and skip variables that the format cannot express."""
    lines = []
    for name, value in current_env.items():
        if not name or not value or set(name + value) & set(";\n<> "):
            # Only the name is shown, because the value may be a secret.
            warn(
                _(
                    "skipping the variable {name!r}, because its name or value is empty or contains one of `;`, `<`, "
                    "`>`, space, newline",
                    name=name,
                )
            )
        else:
            lines.append(f"{name}={value}\n")
    return lines


def _purge_tests(owner: type) -> None:
    for name in dir(owner):
        method = getattr(owner, name)
        if name.startswith("test") and callable(method) and not getattr(method, "_echelon_purged", False):
            setattr(owner, name, _purged(method))


def _purged(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def purged(*args: Any, **kwargs: Any) -> Any:
        with environ.restored(lambda name: name.startswith(_PURGED)):
            return function(*args, **kwargs)

    purged._echelon_purged = True  # type: ignore[attr-defined]
    return purged
