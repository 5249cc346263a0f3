"""The names of ``accelerate.utils.random``, so that its scripts run: re-exports only."""

from __future__ import annotations

from echelon.data.rng.host_rng import synchronize_rng_state, synchronize_rng_states
from echelon.world.seed import set_seed

__all__ = [
    "set_seed",
    "synchronize_rng_state",
    "synchronize_rng_states",
]
