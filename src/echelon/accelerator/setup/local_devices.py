"""Counts the devices that one process trains on if no engine was chosen and no launcher started it as a rank."""

from __future__ import annotations

import torch
import torch.distributed as dist

from echelon.base.device import devices_from
from echelon.config.sources import current
from echelon.engines.registry import ON_ALL_DEVICES
from echelon.world.environment import detect


def num_devices_of_process(device: torch.device, *, engine: str | None, parity: str | None) -> int:
    """Return the number of accelerators that this process, whose own device is ``device``, trains on; 0 on the CPU.

    A process trains on several accelerators with the ``dp`` engine. This is the default if it sees several
    accelerators, is not a rank, and neither the script nor the environment chooses an engine, sharding or a parity
    mode.
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
