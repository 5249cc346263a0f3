"""The names of ``accelerate.memory_utils``, so that its scripts run: re-exports only."""

from __future__ import annotations

from echelon.accelerator.memory import (
    clear_device_cache,
    find_executable_batch_size,
    release_memory,
    should_reduce_batch_size,
)

__all__ = [
    "clear_device_cache",
    "find_executable_batch_size",
    "release_memory",
    "should_reduce_batch_size",
]
