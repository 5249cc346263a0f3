"""What differs between the update of several ranks and that of one process: in ``echelon verify`` and in ``verify_every``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

Stage: TypeAlias = Literal[
    "load",
    "initial weights",
    "data",
    "rng",
    "forward",
    "loss weight",
    "backward",
    "reduce",
    "clip",
    "scheduler",
    "optimizer",
    "buffers",
    "save",
    "weights",
]
"""Stages of an update, in the order in which one follows from the other.

``load`` and ``initial weights`` come before the first update of a process, all others occur in each update. ``reduce`` holds the
gradient that the optimizer received, ``scheduler`` the learning rates of the step, ``optimizer`` the weights and the optimizer state
after it, ``loss weight`` what the loss was averaged over. ``weights`` (of ``verify_every`` only) are those before the step: they follow
from an earlier update that was not checked.
"""

STAGES: tuple[Stage, ...] = get_args(Stage)[:-1]
"""Those of ``echelon verify``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One way in which an update is not the update of one process."""

    update: int
    """Update (optimizer step) in which it occurs, counted from 0 (in ``verify_every`` from 1); -1: before the first."""
    stage: Stage
    what: str
    """One sentence: what differs, with its values."""
    tensors: list[str] = field(default_factory=list)
    """Names of the tensors that differ, the most different first; empty where the stage has none (``data``, ``rng``)."""
    ranks: list[int] = field(default_factory=list)
    """Ranks on which it shows; empty: all ranks together."""
    difference: float | None = None
    """Norm of the difference divided by the norm of the reference's tensor, of the most different tensor."""
    measured: str = ""
    """Of which tensor, on which processes or ranks, ``difference`` is (``"0.weight on 2 processes"``)."""
    allowed: float | None = None
    """The greatest ``difference`` that rounding explains; 0.0 where bits must be equal."""
    ratio: float | None = None
    """The layout's tensor divided by the reference's, if the two are proportional."""
    cause: str = ""
    """Short name of the likely cause (``"loss averaged per rank"``); empty if none of the known causes explains the values."""
    why: str = ""
    """The cause in words, with the values that support it."""
    do: str = ""
    """The remedy."""
    line: str = ""
    """``file:line`` of the user's script."""
    may_be_rounding: bool = False
    """Whether runs of the reference with perturbed weights (``compare(perturbed=)``) must confirm it before it is reported."""
