"""What a comparison found: whether two runs are the same run, and if not, where they first differ."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias

from echelon.distributed.checks.finding import Finding, Stage

CellState: TypeAlias = Literal["equal bits", "within rounding", "different", "not compared"]

Result: TypeAlias = Literal["same", "different", "not comparable"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Result of one stage in one update."""

    update: int
    stage: Stage
    state: CellState
    largest: float = 0.0
    """The greatest difference as a fraction of what rounding explains."""
    num_compared: int = 0
    """Number of values or tensors that were compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """Whether a stage was compared at all."""

    stage: Stage
    num_compared: int
    """Number of values or tensors, over all updates; 0: the stage was not compared."""
    missing: list[str] = field(default_factory=list)
    """What was not compared, and why; may be non-empty although other values of the stage were compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether the layout is the same run as the reference."""

    result: Result
    num_updates: int
    """Number of updates that were compared."""
    world_size: int
    finding: Finding | None = None
    """The first difference: the earliest update, and in it the earliest stage."""
    also: list[Finding] = field(default_factory=list)
    """Other differences that do not follow from the first one."""
    remarks: list[Finding] = field(default_factory=list)
    """What differs from one process without making it another run: the masks of equally seeded ranks in a Trainer."""
    reason: str = ""
    """Why the runs are not comparable."""
    coverage: list[Coverage] = field(default_factory=list)
    """One per stage, in the order of ``STAGES``."""
    cells: list[Cell] = field(default_factory=list)
    """One per update and stage."""
    notes: list[str] = field(default_factory=list)
    """What limits the comparison, in sentences (for example that tolerances are bounds, because the float64 run failed)."""

    @property
    def exit_code(self) -> int:
        """Return 0 if the runs are the same, 1 if they differ, 2 if they are not comparable."""
        return {"same": 0, "different": 1, "not comparable": 2}[self.result]

    def as_json(self) -> dict[str, Any]:
        """Return the verdict as values that ``json`` writes."""
        values: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return values
