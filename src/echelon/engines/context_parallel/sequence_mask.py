"""Documents, padding and sliding windows: which keys a query sees, by positions in the whole sequence."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from echelon.base.errors import UsageError

_IGNORED = -100  # torch's default ignore_index of cross_entropy


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceMask:
    """Which keys a query sees, beside causality. All tensors are of the whole sequence, and equal on all ranks."""

    documents: torch.Tensor | None = None
    """(batch or 1, length): a number for each position; queries see only keys with the same number."""
    is_real: torch.Tensor | None = None
    """(batch or 1, length), bool: False for keys that are padding."""
    window: int | None = None
    """A query sees its own position and the ``window - 1`` before it (and after it, without causality)."""

    @property
    def is_empty(self) -> bool:
        """Whether this masks nothing."""
        return self.documents is None and self.is_real is None and self.window is None

    def rows(self, index: torch.Tensor) -> SequenceMask:
        """Return the mask of these rows of the batch. A mask of one row is for all rows."""

        def select(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return tensor if tensor is None or len(tensor) == 1 else tensor[index.to(tensor.device)]

        return SequenceMask(documents=select(self.documents), is_real=select(self.is_real), window=self.window)

    def allowed(self, queries: torch.Tensor, keys: torch.Tensor, *, is_causal: bool) -> torch.Tensor:
        """Return whether each query sees each key: bool, of shape (batch or 1, 1, queries, keys).

        Args:
            queries: positions in the whole sequence.
            keys: positions in the whole sequence.
            is_causal: whether queries see only keys at their own position and before it.
        """
        distance = queries[:, None] - keys[None, :]
        seen = torch.ones_like(distance, dtype=torch.bool)
        if is_causal:
            seen = distance >= 0
        if self.window is not None:
            seen = seen & (distance.abs() < self.window)
        seen = seen[None, None]
        if self.documents is not None:
            seen = seen & (self.documents[:, None, queries, None] == self.documents[:, None, None, keys])
        if self.is_real is not None:
            seen = seen & self.is_real[:, None, None, keys]
        return seen


def documents_of_positions(position_ids: torch.Tensor) -> torch.Tensor | None:
    """Return the number of the document of each position, or None if each row is one document.

    Args:
        position_ids: (batch, length) of whole sequences; a document begins where a position does not follow the one before it.

    Source: transformers.masking_utils.find_packed_sequence_indices.
    """
    starts = torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1) != 1
    documents = starts.cumsum(-1)
    # One comparison per forward pass decides whether attention needs masks.
    return documents if bool(documents[:, -1].any()) else None


def documents_of_lengths(cu_seqlens: torch.Tensor, length: int) -> torch.Tensor:
    """Return the number of the document of each position, of shape (1, length).

    Args:
        cu_seqlens: first position of each document, and ``length`` (as FlashAttention's ``cu_seqlens``).
        length: number of positions of the whole sequence.

    Raises:
        UsageError: ``cu_seqlens`` does not begin with 0 and end with ``length``.
    """
    bounds = cu_seqlens.flatten()
    if not bounds.numel() or int(bounds[0]) != 0 or int(bounds[-1]) != length:
        raise UsageError(
            f"cu_seqlens={bounds.tolist()[:8]} does not go from 0 to the sequence length {length}",
            where="context_parallel(cu_seqlens=)",
            do="pass the cumulative lengths of the documents of the whole sequence",
        )
    positions = torch.arange(length, device=bounds.device)
    return torch.searchsorted(bounds.to(positions.dtype).contiguous(), positions, right=True)[None]


def shift_labels(labels: torch.Tensor, *, ignore_index: int = _IGNORED) -> torch.Tensor:
    """Return the label that each position predicts: the one of the next position, and ``ignore_index`` at the end.

    Shift labels before a sequence is cut, because the label of a rank's last position is on another rank.

    Args:
        labels: (batch, length) of whole sequences.
        ignore_index: the label that the loss ignores.
    """
    return pad(labels[:, 1:], (0, 1), value=ignore_index).contiguous()
