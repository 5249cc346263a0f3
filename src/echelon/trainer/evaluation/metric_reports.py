"""The table that ``log_metrics`` prints and the JSON files that ``save_metrics`` writes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

__all__ = ["metrics_format", "metrics_table", "write_metrics"]


def metrics_format(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Format ``metrics``: durations as h:mm:ss.cc, floating-point operations as GF, other floats with 4 decimals."""
    return {name: _shown(name, value) for name, value in metrics.items()}


def metrics_table(split: str, metrics: Mapping[str, Any]) -> str:
    """Return formatted ``metrics`` as a sorted table with two columns."""
    shown = metrics
    left = max((len(str(name)) for name in shown), default=0)
    right = max((len(str(value)) for value in shown.values()), default=0)
    lines = [f"  {name: <{left}} = {shown[name]!s:>{right}}" for name in sorted(shown)]
    return "\n".join([f"***** {split} metrics *****", *lines])


def write_metrics(folder: Path, split: str, metrics: Mapping[str, Any], *, combined: bool) -> None:
    """Write ``<split>_results.json`` and, if ``combined``, add the metrics to ``all_results.json``."""
    _write(folder / f"{split}_results.json", dict(metrics))
    if combined:
        path = folder / "all_results.json"
        before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        _write(path, {**before, **metrics})


def _write(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=4, sort_keys=True), encoding="utf-8")


def _shown(name: str, value: Any) -> Any:
    if name == "total_flos":
        return f"{int(value) >> 30}GF"
    if name.endswith("_runtime"):
        seconds, _, part = f"{value:.2f}".partition(".")
        return f"{timedelta(seconds=int(seconds))}.{part}"
    return round(value, 4) if isinstance(value, float) else value
