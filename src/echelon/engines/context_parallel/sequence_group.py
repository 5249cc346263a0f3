"""The ranks that hold the pieces of one sequence, and how they exchange keys and values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

from echelon.engines.context_parallel.sequence_order import SequenceOrder

Exchange = Literal["allgather", "alltoall"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceGroup:
    """The ranks of one sequence, as this rank sees them."""

    group: dist.ProcessGroup | None
    """None: the default group."""
    rank: int
    """In the group."""
    order: SequenceOrder
    exchange: Exchange = "alltoall"
    """``alltoall``: keys and values go around the ring, so each rank holds those of two ranks at a time. ``allgather``: those of all
    ranks are gathered first, in one collective."""

    @property
    def size(self) -> int:
        """The number of ranks of the group."""
        return self.order.num_ranks

    def gather(self, part: torch.Tensor, dim: int) -> torch.Tensor:
        """Return the whole sequence of this rank's ``part``. Collective; without gradients."""
        if self.size == 1:
            return part
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(self.size)]
        dist.all_gather(parts, part.contiguous(), group=self.group)
        return self.order.join(parts, dim)

    def sources(self, own: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the ``own`` of each rank with its rank in the group, first this rank's. Collective; iterate to the end."""
        if self.exchange == "allgather":
            gathered = own.new_empty(self.size, *own.shape)
            # the second name is that of torch before 2.13
            gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
            gather(gathered.flatten(0, 1), own.contiguous(), group=self.group)
            for step in range(self.size):
                source = (self.rank - step) % self.size
                yield source, gathered[source]
            return
        held = own.contiguous()
        for step in range(self.size):
            pending = None if step == self.size - 1 else self._start(held)  # while the held one is used
            yield (self.rank - step) % self.size, held
            if pending is not None:
                held = pending.wait()

    def pass_on(self, tensor: torch.Tensor) -> torch.Tensor:
        """Send ``tensor`` to the next rank of the ring, and return the one of the rank before. Collective."""
        return self._start(tensor.contiguous()).wait()

    def reduce_to_sources(self, parts: torch.Tensor) -> torch.Tensor:
        """Return the sum over the ranks of their ``parts[rank]``, for this rank. Collective."""
        own = torch.empty_like(parts[0])
        # the second name is that of torch before 2.13
        scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        scatter(own, parts.flatten(0, 1), group=self.group)
        return own

    def _start(self, tensor: torch.Tensor) -> _Pending:
        after, before = (self._global((self.rank + step) % self.size) for step in (1, -1))
        received = torch.empty_like(tensor)
        # One batch: NCCL would deadlock if each rank first waited for its send.
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, tensor, after, group=self.group),
                dist.P2POp(dist.irecv, received, before, group=self.group),
            ]
        )
        return _Pending(works=works, sent=tensor, received=received)

    def _global(self, rank: int) -> int:
        return rank if self.group is None else dist.get_global_rank(self.group, rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pending:
    works: list[Any]
    sent: torch.Tensor  # must live until it is sent
    received: torch.Tensor

    def wait(self) -> torch.Tensor:
        for work in self.works:
            work.wait()
        return self.received
