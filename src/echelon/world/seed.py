"""Seeds every random number generator that training code uses."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from echelon.base.rank import known_rank


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed ``random``, NumPy and torch (on all devices) in this process.

    Args:
        seed: the seed.
        device_specific: add the rank to the seed, so that dropout and augmentation differ between ranks. Use it only
            after the model is built, because initial weights must be the same on all ranks.
        deterministic: also enable torch's deterministic algorithms (slower; an operation without one raises an error).

    Examples:
        >>> set_seed(42)
    """
    if device_specific:
        seed += known_rank() or 0
    seed_random_and_numpy(seed)
    torch.manual_seed(seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)


def seed_random_and_numpy(seed: int) -> None:
    """Seed ``random`` and NumPy's global generator, whichever bit generator it has."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # NumPy seeds have 32 bits
    state: Any = np.random.get_state(legacy=False)
    if state["has_gauss"]:  # of a pair of Gaussian numbers; only the seed of MT19937 clears it
        np.random.set_state({**state, "has_gauss": 0, "gauss": 0.0})
