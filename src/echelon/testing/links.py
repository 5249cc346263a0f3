"""Measures the bandwidth between each pair of machines. Run by ``echelon doctor --nnodes``, one process per machine."""

from __future__ import annotations

import socket
import statistics
import time
from itertools import combinations

import torch
import torch.distributed as dist

from echelon.base.messages.translation import gettext as _
from echelon.distributed.setup import cleanup, setup
from echelon.world.launch_variables import network_interface
from echelon.world.world import World

_SMALL_CALLS = 50
_LARGE_BYTES = 16 << 20
_LARGE_CALLS = 5
_SLOW = 0.5
"""Links with less than this fraction of the median bandwidth are reported as slow."""


def main() -> None:
    """Measure each pair in turn while the other ranks wait. Rank zero prints the results.

    Collective: call on every rank.
    """
    world = setup()
    names: list[str] = [""] * world.world_size
    dist.all_gather_object(names, socket.gethostname())
    found: dict[tuple[int, int], tuple[float, float]] = {}
    for pair in combinations(range(world.world_size), 2):
        dist.barrier()
        if world.rank in pair:
            found[pair] = _measure(world, pair)
    rows: list[dict[tuple[int, int], tuple[float, float]]] = [{}] * world.world_size
    dist.all_gather_object(rows, found)
    if world.rank == 0:
        _print_links({pair: row[pair] for row in rows for pair in row}, names, str(dist.get_backend()))
    cleanup()


def _measure(world: World, pair: tuple[int, int]) -> tuple[float, float]:
    """Return the round-trip time of a small message in seconds, and the bandwidth of large messages in bytes per second."""
    other = pair[1] if world.rank == pair[0] else pair[0]
    small = torch.zeros(1, device=world.device)
    large = torch.zeros(_LARGE_BYTES, dtype=torch.uint8, device=world.device)

    def round_trip(tensor: torch.Tensor) -> float:
        started = time.perf_counter()
        for send in (world.rank == pair[0], world.rank == pair[1]):
            dist.send(tensor, other) if send else dist.recv(tensor, other)
        tensor[0].item()  # waits for the accelerator
        return time.perf_counter() - started

    for tensor in (small, large):
        round_trip(tensor)  # opens the connection
    seconds = statistics.median(round_trip(small) for _ in range(_SMALL_CALLS))
    took = statistics.median(round_trip(large) for _ in range(_LARGE_CALLS))
    return seconds, 2 * _LARGE_BYTES / took


def _print_links(found: dict[tuple[int, int], tuple[float, float]], names: list[str], backend: str) -> None:
    usual = statistics.median(rate for _, rate in found.values()) if found else 0.0
    interface = network_interface("gloo" if backend == "gloo" else "nccl") or _("automatic")
    print(
        _(
            "all {num_names} machines can communicate ({backend}, network interface on this machine: {interface})",
            num_names=len(names),
            backend=backend,
            interface=interface,
        )
    )
    for (one, other), (seconds, rate) in found.items():
        slow = _("  SLOW: less than half the median bandwidth") if rate < _SLOW * usual else ""
        speed = _("{number:,.0f} MB/s, round trip {count:,.0f} us", number=rate / 1e6, count=seconds * 1e6)
        print(f"  {one} {names[one]} - {other} {names[other]}: {speed}{slow}")


if __name__ == "__main__":
    main()
