"""Training functions on a Ray cluster: ``echelon.ray.run(fn, num_workers=2)``; docs/clusters.md."""

from __future__ import annotations

from echelon.launch.schedulers.ray import run

__all__ = ["run"]
