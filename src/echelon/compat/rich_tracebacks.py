"""Tracebacks with rich."""

from __future__ import annotations

from typing import Any

from echelon.base.optional import require

__all__ = ["install"]


def install(**options: Any) -> Any:
    """Display tracebacks with rich; options are passed to ``rich.traceback.install``.

    Raises:
        MissingExtraError: rich is not installed.
    """
    # Off by default, because locals may contain secrets.
    return require("rich.traceback", extra="rich", purpose="rich tracebacks").install(
        **{"show_locals": False, **options}
    )
