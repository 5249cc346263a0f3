"""Lists of names, and values of several ranks, in a form that reads alike in every language."""

from __future__ import annotations

from collections.abc import Sequence

_MAX_NAMES = 4
_MAX_RANKS = 8


def listed(names: Sequence[str]) -> str:
    """Return the first names, and the number of the others. Tensors of the first model are named without its index, ``0:``."""
    shown = ", ".join(name.removeprefix("0:") or "model" for name in names[:_MAX_NAMES])
    return shown if len(names) <= _MAX_NAMES else f"{shown}, ... (+{len(names) - _MAX_NAMES})"


def per_rank(values: Sequence[float], digits: int = 4) -> str:
    """Return the value of each rank, ``rank 0: 0.4132, rank 1: 0.2906``; of the first eight if there are more."""
    shown = ", ".join(f"rank {rank}: {value:.{digits}g}" for rank, value in enumerate(values[:_MAX_RANKS]))
    return shown if len(values) <= _MAX_RANKS else f"{shown}, ..."


def named_ranks(ranks: Sequence[int]) -> str:
    """Return ``rank 1`` or ``ranks 0, 1``; the first eight if there are more."""
    shown = ", ".join(str(rank) for rank in ranks[:_MAX_RANKS])
    return f"rank{'' if len(ranks) == 1 else 's'} {shown}{', ...' if len(ranks) > _MAX_RANKS else ''}"
