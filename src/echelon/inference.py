"""The names of ``accelerate.inference``, so that its scripts run: re-exports only."""

from __future__ import annotations

from echelon.compat.accelerate_unsupported import (
    build_pipeline,
    find_pippy_batch_size,
    generate_device_map,
    pippy_forward,
    prepare_pippy,
)

__all__ = [
    "build_pipeline",
    "find_pippy_batch_size",
    "generate_device_map",
    "pippy_forward",
    "prepare_pippy",
]
