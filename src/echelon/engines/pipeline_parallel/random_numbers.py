"""Random numbers of stages: each rank of a pipeline has its own, because one process would not draw equal masks in two layers.

Ranks of a pipeline have equal RNG states between steps. A step uses a state that is derived from the shared one and the rank, and
the shared state continues after it. So a resumed run draws the same masks, and what the loop draws is equal on all ranks.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["StageNumbers", "own_random_numbers"]


class StageNumbers:
    """The random numbers of a step on this rank."""

    has_drawn = False
    """Whether the step drew any; known after the block of ``own_random_numbers``."""

    def advance(self) -> None:
        """Let the shared state continue, so that the next step draws other numbers. Call on all ranks if one of them has drawn."""
        _draw(None)


@contextmanager
def own_random_numbers(rank: int, device: torch.device) -> Iterator[StageNumbers]:
    """Let torch's random numbers differ by ``rank`` inside the block, and restore the shared state after it.

    Args:
        rank: in the pipeline.
        device: the device of this rank, whose numbers also differ.
    """
    on_device = device.type != "cpu"
    module: Any = torch.get_device_module(device) if on_device else None
    before = torch.get_rng_state()
    device_before = module.get_rng_state(device) if on_device else None
    shared = torch.Generator()
    shared.set_state(before)
    # Python's generator mixes the bits, so that neighbouring ranks have unrelated seeds.
    torch.manual_seed(random.Random(f"{_draw(shared)} {rank}").getrandbits(62))
    start = torch.get_rng_state()
    device_start: Any = module.get_rng_state(device) if on_device else None
    numbers = StageNumbers()
    try:
        yield numbers
        numbers.has_drawn = not torch.equal(torch.get_rng_state(), start)
        if on_device:
            numbers.has_drawn |= not torch.equal(module.get_rng_state(device), device_start)
    finally:
        torch.set_rng_state(before)
        if on_device:
            module.set_rng_state(device_before, device)


def _draw(generator: torch.Generator | None) -> int:
    return int(torch.randint(2**62, (), dtype=torch.int64, generator=generator))
