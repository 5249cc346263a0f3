"""The names of ``accelerate.utils.versions``, so that its scripts run: re-exports only."""

from __future__ import annotations

from echelon.base.versions import compare_versions, is_torch_version, torch_version

__all__ = [
    "compare_versions",
    "is_torch_version",
    "torch_version",
]
