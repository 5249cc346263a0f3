"""How many collectives this process has begun: whether ranks can have exchanged anything between two places of a program."""

from __future__ import annotations

import torch.distributed as dist

__all__ = ["num_collectives"]


def num_collectives() -> int | None:
    """Return how many collectives this process has begun in the default group; None: nobody counts them."""
    count = getattr(dist.group.WORLD, "_get_sequence_number_for_group", None) if dist.is_initialized() else None
    return None if count is None else int(count())
