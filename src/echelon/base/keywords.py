"""Suggests the closest match for an unknown keyword argument, as Python 3.13 and later do."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import Any, TypeVar

Class = TypeVar("Class", bound=type)


def unexpected_keyword(function: str, name: str, known: Iterable[str]) -> TypeError:
    """Return the error for an unknown keyword argument ``name`` of ``function``, worded as in Python."""
    near = get_close_matches(name, list(known), n=1)
    hint = f"Did you mean {near[0]!r}?" if near else f"See help({function})."
    return TypeError(f"{function}() got an unexpected keyword argument {name!r}. {hint}")


def suggest_keywords(cls: Class) -> Class:
    """Decorate a class so that its constructor's TypeError for an unknown keyword argument suggests the closest match."""
    init: Callable[..., None] = cls.__init__  # type: ignore[misc]
    known = inspect.signature(init).parameters.keys() - {"self"}

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        for name in kwargs:
            if name not in known:
                raise unexpected_keyword(cls.__name__, name, sorted(known))
        init(self, *args, **kwargs)

    cls.__init__ = checked  # type: ignore[misc]
    return cls
