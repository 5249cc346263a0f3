"""The likely cause of a difference."""

from __future__ import annotations

from dataclasses import dataclass, field

from echelon.verify.finding import Stage

__all__ = ["LikelyCause"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LikelyCause:
    """A hypothesis that the recorded values support."""

    name: str
    """Short name, as in ``Finding.cause``."""
    why: str
    do: str
    stage: Stage | None = None
    """The stage at fault, if it is not the one whose values differ (a loss that is averaged per rank shows in ``reduce``)."""
    ranks: list[int] = field(default_factory=list)
    tensors: list[str] = field(default_factory=list)
    """Tensors at fault, if these are not simply those that differ."""
    ratio: float | None = None
    line: str = ""
