"""Measures the time, algorithm bandwidth and bus bandwidth (as defined by nccl-tests) of five collectives."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from echelon.base.errors import DesyncError
from echelon.base.messages.translation import gettext as _

_MAX_CALLS = 100
# The functions have other names before torch 2.13.
_all_gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
_reduce_scatter = dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveBenchmark:
    """A torch collective to run on n ranks."""

    name: str
    call: Callable[[torch.Tensor, torch.Tensor], object]
    """Called with an input and an output tensor. In-place collectives use only the output, which initially equals the input."""
    shares: tuple[bool, bool]
    """Whether the input and the output are one n-th of the reported size. As in nccl-tests, the size is that of the largest
    buffer."""
    result: Callable[[torch.Tensor], torch.Tensor]
    """Returns the expected value of each n-th of the output, given that the ranks' inputs are 1 ... n."""
    bus_factor: Callable[[int], float]
    """Bus bandwidth divided by algorithm bandwidth, which makes results for different n comparable."""


COLLECTIVES = (
    CollectiveBenchmark(
        name="all_reduce",
        call=lambda x, out: dist.all_reduce(out),
        shares=(False, False),
        result=lambda numbers: numbers.sum().expand_as(numbers),
        bus_factor=lambda n: 2 * (n - 1) / n,
    ),
    CollectiveBenchmark(
        name="all_gather",
        call=lambda x, out: _all_gather(out, x),
        shares=(True, False),
        result=lambda numbers: numbers,
        bus_factor=lambda n: (n - 1) / n,
    ),
    CollectiveBenchmark(
        name="reduce_scatter",
        call=lambda x, out: _reduce_scatter(out, x),
        shares=(False, True),
        result=lambda numbers: numbers.sum().expand_as(numbers),
        bus_factor=lambda n: (n - 1) / n,
    ),
    CollectiveBenchmark(
        name="broadcast",
        call=lambda x, out: dist.broadcast(out, src=0),
        shares=(False, False),
        result=lambda numbers: numbers[:1].expand_as(numbers),
        bus_factor=lambda n: 1.0,
    ),
    CollectiveBenchmark(
        name="all_to_all",
        call=lambda x, out: dist.all_to_all_single(out, x),
        shares=(False, False),
        result=lambda numbers: numbers,
        bus_factor=lambda n: (n - 1) / n,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Measurement of one collective at one size."""

    name: str
    size_bytes: int
    num_ranks: int
    seconds: float
    """Duration of one call on the slowest rank."""
    bus_factor: float

    @property
    def algorithm_bytes_per_s(self) -> float:
        """The reported size divided by the time per call."""
        return self.size_bytes / self.seconds

    @property
    def bus_bytes_per_s(self) -> float:
        """The algorithm bandwidth, corrected for the traffic that each link carries."""
        return self.algorithm_bytes_per_s * self.bus_factor


def measure(
    sizes_bytes: Sequence[int], *, device: torch.device, budget: timedelta = timedelta(seconds=0.2)
) -> list[Measured]:
    """Time each collective on float32 tensors of each size, taking about ``budget`` per size.

    If a call takes longer than ``budget``, larger sizes are skipped, which limits the total time on any network.

    Collective: call on every rank in the default group.

    Raises:
        DesyncError: a collective returned a wrong result.
    """
    found: list[Measured] = []
    for collective in COLLECTIVES:
        for size in sorted(sizes_bytes):
            found.append(_measured(collective, size, device, budget.total_seconds()))
            if found[-1].seconds > budget.total_seconds():
                break
    return found


def _measured(collective: CollectiveBenchmark, size_bytes: int, device: torch.device, budget_s: float) -> Measured:
    n = dist.get_world_size()
    share = -(-size_bytes // (n * 4))  # elements per rank, rounded up
    sizes = [share if is_share else share * n for is_share in collective.shares]
    x = torch.full((sizes[0],), dist.get_rank() + 1.0, device=device)
    out = x.clone() if sizes[0] == sizes[1] else torch.zeros(sizes[1], device=device)
    _timed(collective, x, out, num_calls=1)  # the first call opens connections
    _check(collective, out)
    out.zero_()  # otherwise the sums of all_reduce would grow with each call
    once = _timed(collective, x, out, num_calls=1)
    num_calls = max(1, min(_MAX_CALLS, int(budget_s / max(once, 1e-9))))
    seconds = once if num_calls == 1 else _timed(collective, x, out, num_calls=num_calls)
    return Measured(
        name=collective.name,
        size_bytes=share * n * 4,
        num_ranks=n,
        seconds=seconds,
        bus_factor=collective.bus_factor(n),
    )


def _timed(collective: CollectiveBenchmark, x: torch.Tensor, out: torch.Tensor, *, num_calls: int) -> float:
    """Return the seconds per call on the slowest rank. All ranks get the same value, so that they all make the same calls."""
    dist.barrier()
    started = time.perf_counter()
    for _time in range(num_calls):
        collective.call(x, out)
    _wait_for(out.device)
    seconds = torch.tensor((time.perf_counter() - started) / num_calls, device=out.device)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return seconds.item()


def _wait_for(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()


def _check(collective: CollectiveBenchmark, out: torch.Tensor) -> None:
    n = dist.get_world_size()
    numbers = collective.result(torch.arange(1.0, n + 1, device=out.device))
    wanted = numbers[:1].expand_as(out) if collective.shares[1] else numbers.repeat_interleave(out.numel() // n)
    if not torch.equal(out, wanted):
        raise DesyncError(
            _(
                "{collective} returned a wrong result: expected {wanted}, but got {found}",
                collective=collective.name,
                wanted=sorted(set(wanted.tolist()))[:4],
                found=sorted(set(out.tolist()))[:4],
            ),
            do=_(
                "update torch, the driver and the network libraries; set NCCL_DEBUG=INFO (or GLOO_LOG_LEVEL) to see "
                "details"
            ),
        )
