"""Tracebacks with rich."""

from __future__ import annotations

from typing import Any


def install(**options: Any) -> Any:
    """Display tracebacks with rich; options are passed to ``rich.traceback.install``."""
    from rich.traceback import install as install_rich  # noqa: PLC0415 - rarely needed, and takes 0.1 s

    # Off by default, because locals may contain secrets.
    return install_rich(**{"show_locals": False, **options})
