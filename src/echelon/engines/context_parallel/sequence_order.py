"""Which positions of a sequence each rank holds, and which parts of causal attention it computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from echelon.base.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPair:
    """A part of the attention matrix: a range of a rank's queries, and a range of another rank's keys."""

    queries: slice
    """In the local sequence of the rank that computes."""
    keys: slice
    """In the local sequence of the rank whose keys they are."""
    is_diagonal: bool
    """Whether queries and keys are at the same positions, so that causal attention is a triangle. Otherwise each query sees each key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceOrder:
    """A sequence in equal blocks, of which each rank has one or two.

    With ``zigzag``, rank r of W has the blocks r and 2 W - 1 - r, so that causal attention takes each rank the same time. Without it,
    rank r has block r.

    Source: Brandon et al., "Striped Attention", 2023; the zig-zag order of torch's context_parallel and of Megatron-core.
    """

    num_ranks: int
    zigzag: bool = True

    @property
    def num_blocks(self) -> int:
        """The number of blocks of a sequence."""
        return 2 * self.num_ranks if self.zigzag else self.num_ranks

    def blocks(self, rank: int) -> tuple[int, ...]:
        """Return the blocks of ``rank``, in the order of their positions."""
        return (rank, 2 * self.num_ranks - 1 - rank) if self.zigzag else (rank,)

    def positions(self, length: int, rank: int, *, device: torch.device | None = None) -> torch.Tensor:
        """Return the positions that ``rank`` holds of a sequence of ``length``: a tensor of integers, ascending.

        Raises:
            ConfigError: ``length`` cannot be divided into the blocks.
        """
        size = self._block_size(length)
        return torch.cat([torch.arange(b * size, (b + 1) * size, device=device) for b in self.blocks(rank)])

    def cut(self, tensor: torch.Tensor, dim: int, rank: int) -> torch.Tensor:
        """Return a copy of the part of ``rank`` of a whole sequence along ``dim``.

        Raises:
            ConfigError: the length cannot be divided into the blocks.
        """
        size = self._block_size(tensor.shape[dim])
        return torch.cat([tensor.narrow(dim, block * size, size) for block in self.blocks(rank)], dim)

    def join(self, parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
        """Return the whole sequence of the ``parts`` of all ranks."""
        found: dict[int, torch.Tensor] = {}
        for rank, part in enumerate(parts):
            found.update(zip(self.blocks(rank), part.chunk(len(self.blocks(rank)), dim), strict=True))
        return torch.cat([found[block] for block in range(self.num_blocks)], dim)

    def block_pairs(self, rank: int, source: int, local_length: int, *, is_causal: bool) -> list[BlockPair]:
        """Return what ``rank`` computes with the keys of ``source``; with causal attention, nothing that is masked as a whole.

        Args:
            rank: the rank that computes.
            source: the rank whose keys and values are used.
            local_length: number of positions that each rank holds.
            is_causal: whether each position sees only itself and earlier ones.
        """
        everything = slice(0, local_length)
        if not is_causal:
            return [BlockPair(queries=everything, keys=everything, is_diagonal=False)]
        if rank == source:
            # The positions of a rank ascend, so causal attention within its blocks is one triangle.
            return [BlockPair(queries=everything, keys=everything, is_diagonal=True)]
        half = local_length // 2
        if source < rank:  # with zigzag, the second block of the source lies after both blocks of this rank
            keys = slice(0, half) if self.zigzag else everything
            return [BlockPair(queries=everything, keys=keys, is_diagonal=False)]
        if self.zigzag:  # both blocks of the source lie between the blocks of this rank
            return [BlockPair(queries=slice(half, local_length), keys=everything, is_diagonal=False)]
        return []

    def _block_size(self, length: int) -> int:
        size, rest = divmod(length, self.num_blocks)
        if rest or not size:
            raise ConfigError(
                f"a sequence of {length} positions cannot be divided into {self.num_blocks} equal blocks for {self.num_ranks} ranks",
                where="context_parallel(buffers=)",
                do=f"pad sequences to a multiple of {self.num_blocks}, with labels of -100 at the padding",
            )
        return size
