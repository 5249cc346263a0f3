"""The canonical chunks of split layers: how many there are, which of them a rank has, and sums over them in one fixed order.

Floating-point addition is not associative, so a sum over the parts of a layer depends on their number. With ``parity="bitwise"``
every split dimension is therefore divided into the same chunks on any number of ranks, and sums over chunks are added in one binary
tree. A rank has neighbouring chunks that form a complete subtree; the levels above are added after an exchange between the ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from echelon.engines.bitwise.tree_sum import sum_by_segment


@dataclass(frozen=True, slots=True, kw_only=True)
class CanonicalChunks:
    """The chunks of each split dimension."""

    num_chunks: int
    """Number of chunks on all ranks together: a power of two, and a multiple of the number of ranks."""
    mesh: DeviceMesh | None = None
    """1-D mesh of the ranks that share the chunks. None: this process has all of them."""

    def __deepcopy__(self, memo: dict[int, Any]) -> CanonicalChunks:
        """Return this object itself: copies of a model communicate with the same ranks."""
        return self

    @property
    def num_own(self) -> int:
        """Number of chunks that each rank has."""
        return self.num_chunks // self.num_ranks

    @property
    def num_ranks(self) -> int:
        """Number of ranks that share the chunks."""
        return 1 if self.mesh is None else self.mesh.size()

    @property
    def rank(self) -> int:
        """Number of this rank among them."""
        return 0 if self.mesh is None else self.mesh.get_local_rank()

    @property
    def own(self) -> range:
        """The numbers of this rank's chunks."""
        return range(self.rank * self.num_own, (self.rank + 1) * self.num_own)

    def sum(self, parts: Iterable[torch.Tensor]) -> torch.Tensor:
        """Return the sum of the parts of all chunks, bit-identical on any number of ranks.

        Args:
            parts: one tensor for each own chunk, in order and all of one shape. They are consumed one after the other, so that a
                generator needs memory for few of them.

        Collective: call on every rank of the mesh.
        """
        own = add_in_tree(parts)
        if self.mesh is None or self.num_ranks == 1:
            return own
        counts = [1] * self.num_ranks
        whole = sum_by_segment([own.reshape(-1)], counts=counts, add=add_in_tree, group=self.mesh.get_group())
        return whole.view(own.shape)

    def add_zeros(self, own: torch.Tensor) -> torch.Tensor:
        """Return the sum of the ranks' tensors, of which all but one are zero at each element.

        Such a sum is exact in any order, except for the sign of a zero: -0.0 becomes 0.0, on one rank, too.

        Collective: call on every rank of the mesh.
        """
        total = own + 0.0
        if self.mesh is not None and self.num_ranks > 1:
            dist.all_reduce(total, group=self.mesh.get_group())
        return total

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        """Return the ranks' tensors, concatenated along the last dimension.

        Collective: call on every rank of the mesh.
        """
        if self.mesh is None or self.num_ranks == 1:
            return own
        own = own.contiguous()
        received = own.new_empty(self.num_ranks, *own.shape)
        dist.all_gather(list(received), own, group=self.mesh.get_group())
        return torch.cat(list(received), dim=-1)


def add_in_tree(parts: Iterable[torch.Tensor] | Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of ``parts``, whose number is a power of two: halves are summed first, and then added."""
    sums: list[tuple[int, torch.Tensor]] = []  # complete subtrees with their level, from large to small ones
    for part in parts:
        level, total = 0, part
        while sums and sums[-1][0] == level:
            level, total = level + 1, sums.pop()[1] + total
        sums.append((level, total))
    assert len(sums) == 1, f"the number of parts is no power of two: levels {[level for level, _ in sums]}"
    return sums[0][1]
