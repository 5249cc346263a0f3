"""Provides the names in ``accelerate.utils.random``, implemented by echelon."""

from echelon.data.rng.host_rng import (
    synchronize_rng_state as synchronize_rng_state,
    synchronize_rng_states as synchronize_rng_states,
)
from echelon.world.seed import set_seed as set_seed
