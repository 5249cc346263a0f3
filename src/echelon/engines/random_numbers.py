"""Random numbers that differ between ranks which otherwise have equal ones: of a pipeline, of a sequence, or of a split layer.

Between steps such ranks have equal RNG states. Where a rank computes other layers, positions or heads than the others, it uses a state
that is derived from the shared one and the rank, and the shared state continues after it. So a resumed run draws the same masks, and
what the loop draws is equal on all ranks.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist


def save_states(device: torch.device) -> list[torch.Tensor]:
    """Return the RNG states of the CPU and, if it is another one, of ``device``."""
    return [get() for get, _ in _generators(device)]


def restore_states(device: torch.device, states: list[torch.Tensor]) -> None:
    """Set the result of ``save_states``."""
    for (_, set_), state in zip(_generators(device), states):
        set_(state)


def share_states(group: dist.ProcessGroup, device: torch.device) -> None:
    """Set the RNG states of the first rank of ``group`` on all of its ranks. Collective: call on every rank of ``group``."""
    for get, set_ in _generators(device):
        state = get().to(device)
        dist.broadcast(state, group=group, group_src=0)
        set_(state.cpu())


def _generators(device: torch.device) -> list[tuple[Any, Any]]:
    found: list[tuple[Any, Any]] = [(torch.get_rng_state, torch.set_rng_state)]
    if device.type not in ("cpu", "meta"):
        own: Any = torch.get_device_module(device)
        found.append((own.get_rng_state, own.set_rng_state))
    return found


class RankNumbers:
    """The random numbers of a block on this rank."""

    has_drawn = False
    """Whether the block drew any; known after the block of ``own_random_numbers``."""

    def advance(self) -> None:
        """Let the shared state continue, so that the next block draws other numbers. Call on all ranks if one of them has drawn."""
        _draw(None)


@contextmanager
def own_random_numbers(rank: int, device: torch.device) -> Iterator[RankNumbers]:
    """Let torch's random numbers differ by ``rank`` inside the block, and restore the shared state after it.

    Args:
        rank: among the ranks with equal random numbers.
        device: the device of this rank, whose numbers also differ.
    """
    before = save_states(device)
    shared = torch.Generator()
    shared.set_state(before[0])
    # Python's generator mixes the bits, so that neighbouring ranks have unrelated seeds.
    torch.manual_seed(random.Random(f"{_draw(shared)} {rank}").getrandbits(62))
    start = save_states(device)
    numbers = RankNumbers()
    try:
        yield numbers
        numbers.has_drawn = not all(map(torch.equal, save_states(device), start))
    finally:
        restore_states(device, before)


def _draw(generator: torch.Generator | None) -> int:
    return int(torch.randint(2**62, (), dtype=torch.int64, generator=generator))
