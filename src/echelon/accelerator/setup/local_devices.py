"""How many devices one process trains on where no engine was chosen, and nothing started it as a rank."""

from __future__ import annotations

import torch
import torch.distributed as dist

from echelon.base.device import devices_from
from echelon.config.sources import current
from echelon.engines.registry import ON_ALL_DEVICES
from echelon.world.environment import detect

__all__ = ["num_devices_of_process"]


def num_devices_of_process(device: torch.device, *, engine: str | None, parity: str | None) -> int:
    """Return the accelerators that this process trains on, whose own is ``device``; 0: it is the CPU.

    Several with the engine ``dp``, and where neither an engine nor sharding nor a parity was chosen, here or outside of the
    script, in a process that is no rank and sees several.
    """
    count = len(devices_from(device))
    if count < 2:
        return count
    settings = current().value
    engine = engine or settings.engine
    if engine is None:
        is_exact = (parity or settings.parity or "off") != "off"
        is_rank = detect().starter != "single" or (dist.is_available() and dist.is_initialized())
        is_split = settings.sharded_by is not None or bool(settings.use_parallelism_config)
        engine = "single" if is_exact or is_rank or is_split else "dp"
    return count if engine in ON_ALL_DEVICES else 1
