"""Straggler detection: the time of a step by rank and part, and which rank makes the others wait."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from echelon.status.board import StepPart

__all__ = ["StepTimeSpread", "Steps", "steps_of"]

_OWN = (StepPart.DATA, StepPart.FORWARD, StepPart.BACKWARD, StepPart.OPTIMIZER, StepPart.OTHER)
_MIN_STEPS = 20
_MIN_WAIT = 0.1
"""A rank counts as slow if the others wait for it during this fraction of a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimeSpread:
    """Milliseconds of one part of a step, over the ranks."""

    least: float
    least_rank: int
    median: float
    most: float
    most_rank: int

    def __str__(self) -> str:
        if self.most - self.least < 0.1:
            return f"{self.median:.1f}"
        return (
            f"{self.least:.1f} (rank {self.least_rank}) / {self.median:.1f} / {self.most:.1f} (rank {self.most_rank})"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """The parts of a step, and the slow rank."""

    num_steps: int
    parts: Mapping[str, StepTimeSpread]
    """``communication`` is that of the rank that waited least, the same for all; ``wait`` is the rest of each rank's."""
    slowest: int | None = None
    """The rank that the others waited for; None: none."""
    slow_part: str = ""
    """The part in which it was slow."""
    slow_ms: float = 0.0
    """Its time of that part, per step."""

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {spread}" for name, spread in self.parts.items() if spread.most >= 0.05)
        return f"of {self.num_steps} steps, ms a step, least / median / most of the ranks: {parts}"

    @property
    def verdict(self) -> str:
        """Which rank is slow, in words; empty: none."""
        if self.slowest is None:
            return ""
        own, wait = self.parts[self.slow_part], self.parts["wait"]
        return (
            f"rank {self.slowest} is slow: {self.slow_part} {self.slow_ms:.1f} ms a step (median {own.median:.1f}); "
            f"the others wait up to {wait.most:.1f} ms a step for it"
        )

    def to_json(self) -> dict[str, Any]:
        """Return what ``from_json`` reads."""
        parts = {
            name: {field: getattr(spread, field) for field in StepTimeSpread.__slots__}
            for name, spread in self.parts.items()
        }
        slow = {"slowest": self.slowest, "slow_part": self.slow_part, "slow_ms": self.slow_ms}
        return {"num_steps": self.num_steps, "parts": parts, **slow, "verdict": self.verdict}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Steps:
        """Read what ``to_json`` gave."""
        parts = {name: StepTimeSpread(**spread) for name, spread in data["parts"].items()}
        slow = {name: data[name] for name in ("slowest", "slow_part", "slow_ms")}
        return cls(num_steps=data["num_steps"], parts=parts, **slow)


def steps_of(spent_ms: Mapping[int, Sequence[float]], *, num_steps: int) -> Steps | None:
    """Return the parts of a step; None: there were no steps.

    An early rank waits in communication for a late one, so its time there says nothing about itself: what exceeds the
    shortest communication of all ranks counts as ``wait``.

    Args:
        spent_ms: rank -> time of each ``StepPart``.
        num_steps: of each rank.
    """
    if not num_steps or not spent_ms:
        return None
    by_rank = {rank: [ms / num_steps for ms in spent] for rank, spent in spent_ms.items()}
    transfer = min(spent[StepPart.COMMUNICATION] for spent in by_rank.values())
    columns = {part.name.lower(): {rank: spent[part] for rank, spent in by_rank.items()} for part in StepPart}
    columns["communication"] = dict.fromkeys(by_rank, transfer)
    columns["wait"] = {rank: spent[StepPart.COMMUNICATION] - transfer for rank, spent in by_rank.items()}
    parts = {name: _spread(column) for name, column in columns.items()}
    own = {rank: sum(spent[part] for part in _OWN) for rank, spent in by_rank.items()}
    slowest = max(own, key=lambda rank: own[rank])
    waited = min((ms for rank, ms in columns["wait"].items() if rank != slowest), default=0.0)
    step = sum(by_rank[slowest])
    if num_steps < _MIN_STEPS or waited < _MIN_WAIT * step:
        return Steps(num_steps=num_steps, parts=parts)

    def excess(part: StepPart) -> float:
        return by_rank[slowest][part] - median(spent[part] for spent in by_rank.values())

    slow = max(_OWN, key=excess)
    return Steps(
        num_steps=num_steps,
        parts=parts,
        slowest=slowest,
        slow_part=slow.name.lower(),
        slow_ms=by_rank[slowest][slow],
    )


def _spread(column: Mapping[int, float]) -> StepTimeSpread:
    least, most = min(column, key=lambda rank: column[rank]), max(column, key=lambda rank: column[rank])
    return StepTimeSpread(
        least=column[least],
        least_rank=least,
        median=median(column.values()),
        most=column[most],
        most_rank=most,
    )
