"""A configuration as a table: value, origin, and what it overrode."""

from __future__ import annotations

from echelon.config.resolve import Resolved
from echelon.config.schema import RunConfig, field_names

__all__ = ["show"]


def show(resolved: Resolved[RunConfig]) -> str:
    """Return one line a setting: name, value, origin, and in brackets each value that lost."""
    rows = []
    for name in field_names(RunConfig):
        lost = [f"{s.value!r} from {s.origin}" for s in resolved.shadowed if s.name == name]
        note = f"  (overrides {', '.join(lost)})" if lost else ""
        rows.append((name, repr(getattr(resolved.value, name)), f"{resolved.origins[name]}{note}"))
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    return "\n".join(f"{name:<{widths[0]}}  {value:<{widths[1]}}  {origin}" for name, value, origin in rows)
