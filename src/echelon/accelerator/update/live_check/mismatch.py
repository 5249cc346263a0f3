"""What a live check found."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import torch

STAGES = ("data", "rng", "buffers", "loss weight", "reduce", "clip", "scheduler", "optimizer", "weights")
"""Stages of an update, in the order in which one follows from the other. ``weights`` are those before the step: they follow from an
earlier update that was not checked, in which any of the others differed."""

_FALSE_ALARMS = 1e-6
"""Expected number of false alarms in a run, however long it is."""
_NUM_SHOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """One way in which an update is not the update of one process."""

    stage: str
    what: str
    """Part of a sentence: what differs, with its values."""
    do: str
    tensors: list[str] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    """Ranks on which it shows; empty: all together."""
    size: float = 0.0
    """Norm of the difference divided by the norm of what is expected; the largest is reported first."""
    line: str = ""

    @property
    def order(self) -> tuple[int, float]:
        """What is reported first compares lowest."""
        return STAGES.index(self.stage), -self.size


def those(names: Sequence[object], kind: str = "") -> str:
    """Return the first of ``names`` in words."""
    shown = ", ".join(map(str, names[:_NUM_SHOWN]))
    more = f" and {len(names) - _NUM_SHOWN} more" if len(names) > _NUM_SHOWN else ""
    return f"{kind}{'s' * (len(names) > 1) if kind else ''}{' ' if kind else ''}{shown}{more}"


def allowed_factor(num_comparisons: int, *, number: int) -> float:
    """Return how many standard deviations rounding may take in check ``number`` (from 1) of a run.

    A union bound over all comparisons of all checks: the checks' shares of the allowed false alarms, ``6 / (pi * number)**2`` each, add
    up to 1.

    Source: Hoeffding's inequality for sums with random signs.
    """
    share = _FALSE_ALARMS * 6 / (math.pi * number) ** 2
    return math.sqrt(2 * math.log(2 * max(num_comparisons, 1) / share))


@cache
def roundoff(*dtypes: torch.dtype | None) -> float:
    """Return the unit roundoff of the coarsest dtype."""
    return max((kind.eps / 2 for kind in _inexact(dtypes)), default=0.0)


@cache
def smallest(*dtypes: torch.dtype | None) -> float:
    """Return the distance between numbers near zero in the coarsest dtype."""
    return max((kind.tiny * kind.eps for kind in _inexact(dtypes)), default=0.0)


def _inexact(dtypes: Sequence[torch.dtype | None]) -> list[torch.finfo]:
    return [
        torch.finfo(dtype) for dtype in dtypes if dtype is not None and (dtype.is_floating_point or dtype.is_complex)
    ]
