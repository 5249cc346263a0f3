"""Read, patch and clear environment variables, with Accelerate's names; ``environ`` does the access."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any, TypeVar

from echelon.base import environ
from echelon.base.errors import ConfigError
from echelon.base.warnings import warn

__all__ = [
    "are_libraries_initialized",
    "clear_environment",
    "convert_dict_to_env_variables",
    "get_int_from_env",
    "parse_choice_from_env",
    "parse_flag_from_env",
    "patch_environment",
    "purge_accelerate_environment",
    "refuse_misspelled",
    "str_to_bool",
]

T = TypeVar("T")

_TRUE = frozenset({"y", "yes", "t", "true", "on", "1"})
_FALSE = frozenset({"n", "no", "f", "false", "off", "0"})
_PURGED = ("ACCELERATE_", "ECHELON_")


def str_to_bool(value: str, to_bool: bool = False) -> int | bool:
    """Return 1 or 0 for the usual words of yes and no, in any case; ``to_bool``: True or False.

    Raises:
        ConfigError: ``value`` is another word.
    """
    word = value.lower()
    if word not in _TRUE | _FALSE:
        raise ConfigError(
            f"{value!r} is neither yes nor no", do="use one of y, yes, t, true, on, 1, n, no, f, false, off, 0"
        )
    return word in _TRUE if to_bool else int(word in _TRUE)


def parse_flag_from_env(key: str, default: bool = False) -> bool:
    """Return the variable ``key`` as a bool; ``default`` when it is unset or empty.

    Raises:
        ConfigError: its value is neither yes nor no.
    """
    text = environ.get(key)
    if text is None:
        return default
    try:
        return bool(str_to_bool(text, to_bool=True))
    except ConfigError as error:
        raise ConfigError(f"{key}={error.what}", where=f"env {key}", do=error.do) from None


def parse_choice_from_env(key: str, default: str = "no") -> str:
    """Return the variable ``key`` as text; ``default`` when it is unset or empty."""
    return environ.get(key) or str(default)


def get_int_from_env(env_keys: Iterable[str], default: int) -> int:
    """Return the first of the variables that holds an integer from 0 on, else ``default``.

    Raises:
        ConfigError: one holds something else than an integer.
    """
    for key in env_keys:
        text = environ.get(key)
        if text is None:
            continue
        try:
            value = int(text)
        except ValueError:
            raise ConfigError(f"{key}={text!r} is not an integer", where=f"env {key}", do="set an integer") from None
        if value >= 0:
            return value
    return default


def refuse_misspelled(prefix: str, known: Iterable[str]) -> None:
    """Raise for an unknown variable with ``prefix`` that resembles a ``known`` one; others may belong to other programs.

    Raises:
        ConfigError: there is one; the message names the known one.
    """
    ends = sorted(name.removeprefix(prefix) for name in known if name.startswith(prefix))
    for name in environ.snapshot():
        end = name.removeprefix(prefix)
        # Compared without the prefix, which would make short names similar: ECHELON_HELD does not mean ECHELON_SEED.
        if name.startswith(prefix) and end not in ends and (near := _nearest(end, ends)):
            raise ConfigError(
                f"unknown variable {name}",
                where=f"env {name}",
                do=f"did you mean {prefix}{near}? For a variable of your own, choose a name without the prefix {prefix}",
            )


def _nearest(word: str, words: list[str]) -> str | None:
    """Return the word that ``word`` is likely to mean: three quarters similar, or, for short words, one typing error away."""
    near = get_close_matches(word, words, n=1, cutoff=0.75)
    return near[0] if near else next((other for other in words if _is_one_typo(word, other)), None)


def _is_one_typo(one: str, other: str) -> bool:
    """Tell whether one letter is replaced, missing, added, or swapped with its neighbour."""
    if len(one) > len(other):
        one, other = other, one
    at = next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), len(one))
    if len(one) < len(other):
        return len(other) - len(one) == 1 and one[at:] == other[at + 1 :]
    swapped = one[:at] + one[at : at + 2][::-1] + one[at + 2 :]
    return swapped == other or one[at + 1 :] == other[at + 1 :]


@contextmanager
def patch_environment(**kwargs: object) -> Iterator[None]:
    """Set variables (names in upper case, values as text) inside the block and restore what was there after it."""
    with environ.patch({name.upper(): str(value) for name, value in kwargs.items()}):
        yield


@contextmanager
def clear_environment() -> Iterator[None]:
    """Empty the environment inside the block; after it everything is as before, whatever the block has set."""
    with environ.restored(lambda name: True):
        environ.write(dict.fromkeys(environ.snapshot()))
        yield


def purge_accelerate_environment(func_or_cls: T) -> T:
    """Decorate a function, or the test methods of a class, so that ``ACCELERATE_*`` and ``ECHELON_*`` are as before after it."""
    if isinstance(func_or_cls, type):
        _purge_tests(func_or_cls)
        # Subclasses add tests of their own.
        func_or_cls.__init_subclass__ = classmethod(lambda cls, **kwargs: _purge_tests(cls))  # type: ignore[assignment]
        return func_or_cls
    assert callable(func_or_cls), func_or_cls
    return _purged(func_or_cls)  # type: ignore[return-value]


def are_libraries_initialized(*library_names: str) -> list[str]:
    """Return those of the libraries that this process has imported."""
    return [name for name in library_names if name in sys.modules]


def convert_dict_to_env_variables(current_env: Mapping[str, str]) -> list[str]:
    """Return the lines ``NAME=value`` of an environment file; variables that such a line cannot express are left out with a warning."""
    lines = []
    for name, value in current_env.items():
        if not name or not value or set(name + value) & set(";\n<> "):
            # The value may be a secret: only the name is shown.
            warn(
                f"the variable {name!r} is left out: its name or value is empty or holds one of `;`, `<`, `>`, space, newline"
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
