"""Tracebacks in colour, by the library rich."""

from __future__ import annotations

from typing import Any

from echelon.base.optional import require

__all__ = ["install"]


def install(**options: Any) -> Any:
    """Show tracebacks through rich from now on; options as of ``rich.traceback.install``.

    Raises:
        MissingExtraError: rich is not installed.
    """
    # Locals may hold secrets: off unless asked for.
    return require("rich.traceback", extra="dev", purpose="rich tracebacks").install(
        **{"show_locals": False, **options}
    )
