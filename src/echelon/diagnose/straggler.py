"""Detects stragglers from step times by rank and part, and names the rank that the other ranks wait for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from echelon.base.messages.translation import gettext as _, gettext_noop as N_, in_english
from echelon.status.board import StepPart

_OWN = (StepPart.DATA, StepPart.FORWARD, StepPart.BACKWARD, StepPart.OPTIMIZER, StepPart.OTHER)
_MIN_STEPS = 20
_NAMES = (N_("data"), N_("other"), N_("wait"))
"""Names of parts of a step that the report's page has not."""
_MIN_WAIT = 0.1
"""A rank counts as slow if the other ranks wait for it during at least this fraction of a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimeSpread:
    """How the time for one part of a step varies across ranks, in milliseconds."""

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
    """The times for each part of a step, and the slow rank."""

    num_steps: int
    parts: Mapping[str, StepTimeSpread]
    """``communication`` is the shortest communication time on any rank; ``wait`` is how much longer each rank took."""
    slowest: int | None = None
    """The rank that the other ranks waited for, or None."""
    slow_part: str = ""
    """The part of the step in which this rank was slow."""
    slow_ms: float = 0.0
    """The slow rank's time for this part, in milliseconds per step."""

    def __str__(self) -> str:
        parts = ", ".join(f"{_(name)} {spread}" for name, spread in self.parts.items() if spread.most >= 0.05)
        return _(
            "{num_steps} steps, ms per step, min / median / max across ranks: {parts}",
            num_steps=self.num_steps,
            parts=parts,
        )

    @property
    def verdict(self) -> str:
        """A sentence that names the slow rank; empty if there is none."""
        if self.slowest is None:
            return ""
        own, wait = self.parts[self.slow_part], self.parts["wait"]
        return _(
            "rank {slowest} is slow: {slow_part} {slow_ms:.1f} ms per step (median {median:.1f}); the other "
            "ranks wait for it for up to {most:.1f} ms per step",
            slowest=self.slowest,
            slow_part=_(self.slow_part),
            slow_ms=self.slow_ms,
            median=own.median,
            most=wait.most,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON data that ``from_json`` accepts."""
        parts = {
            name: {field: getattr(spread, field) for field in StepTimeSpread.__slots__}
            for name, spread in self.parts.items()
        }
        slow = {"slowest": self.slowest, "slow_part": self.slow_part, "slow_ms": self.slow_ms}
        return {"num_steps": self.num_steps, "parts": parts, **slow, "verdict": in_english(self.verdict)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Steps:
        """Return the record from JSON data that ``to_json`` returned."""
        parts = {name: StepTimeSpread(**spread) for name, spread in data["parts"].items()}
        slow = {name: data[name] for name in ("slowest", "slow_part", "slow_ms")}
        return cls(num_steps=data["num_steps"], parts=parts, **slow)


def steps_of(spent_ms: Mapping[int, Sequence[float]], *, num_steps: int) -> Steps | None:
    """Return the times for each part of a step, or None if there were no steps.

    Fast ranks wait for slow ranks during communication. Therefore, communication time beyond the shortest on any rank counts
    as ``wait``.
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
