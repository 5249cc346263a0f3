"""One seed for every random number generator that training code uses."""

from __future__ import annotations

import random

import numpy as np
import torch

from echelon.base.rank import known_rank

__all__ = ["set_seed"]


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed ``random``, numpy and torch (every device) of this process.

    Args:
        seed: the seed.
        device_specific: add the rank, so that dropout and augmentation differ between ranks. Seed equally while the
            model is built (its initial weights must agree), and by rank after it.
        deterministic: also ask torch for deterministic algorithms (slower; an operation without one raises).
    """
    if device_specific:
        seed += known_rank() or 0
    random.seed(seed)
    np.random.seed(seed % 2**32)  # numpy takes 32 bits only
    torch.manual_seed(seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)
