"""Compare the recorded steps of a layout with those of its reference, and name the first difference."""

from __future__ import annotations

from dataclasses import dataclass

from echelon.verify.finding import Verdict
from echelon.verify.trace import Trace

__all__ = ["CompareOptions", "compare"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareOptions:
    """What is known of the two runs besides their traces."""

    is_bitwise: bool = False
    """Whether the layout promises the bits of the reference (parity bitwise, or the reference's own layout): tolerances are zero."""
    num_false_alarms_per_run: float = 1e-6
    """Greatest probability of reporting a difference where there is only rounding."""
    is_resumed: bool = False
    """Whether the layout's trace is that of a run that was resumed: its first weights are then compared at stage ``load``."""


def compare(
    layout: Trace,
    reference: Trace,
    reference_float64: Trace | None = None,
    *,
    options: CompareOptions | None = None,
) -> Verdict:
    """Return whether ``layout`` is the same run as ``reference``, with the first difference if it is not.

    Args:
        layout: the recorded run of all ranks.
        reference: the same run on one process, which takes the samples of all ranks in each update.
        reference_float64: ``reference`` in float64, from which the rounding error of each tensor is measured; without it bounds
            from dtype and depth are used.
        options: defaults to ``CompareOptions()``.
    """
    del reference, reference_float64, options
    return Verdict(result="not comparable", num_updates=0, world_size=len(layout.ranks), reason="not implemented yet")
