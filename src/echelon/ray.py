"""Runs training on a Ray cluster: ``echelon.ray.run(fn, num_workers=2)``; see docs/clusters.md."""

from echelon.launch.schedulers.ray import run as run
