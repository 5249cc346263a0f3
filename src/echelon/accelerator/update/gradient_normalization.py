"""Normalizes an update: weights its losses, and divides its gradients once by the sum of the weights."""

from __future__ import annotations

import math
from collections.abc import Callable

from echelon.base.errors import UsageError
from echelon.base.messages.translation import gettext as _

TotalOf = Callable[[float], float]


class AccumulationWindow:
    """The micro-steps of one update, and their weights.

    A mean loss over n items is scaled by ``n / REF``, and the reduced gradients are multiplied once by ``REF *
    world_size / total`` (DDP and FSDP average across ranks), so no rank needs to know about later micro-steps. REF is a
    power of two near the typical n, so it does not change the bits, and an fp16 loss keeps the magnitude that its loss
    scale was chosen for. If an update has one micro-step, its total is known before the backward pass, so no second
    pass over the gradients is needed.

    Without weights the factors match Accelerate: each loss is divided by the number of accumulation steps. An
    incomplete window at the end of a loader is corrected once, in the same way.
    """

    __slots__ = (
        "_count",
        "_factor",
        "_finished",
        "_is_redone",
        "_is_weighted",
        "_items",
        "_reference",
        "_scale",
        "_total_of",
        "_weight",
        "_world_size",
        "is_open",
        "total",
    )

    def __init__(self, *, world_size: int, total_of: TotalOf, is_redone: bool = False) -> None:
        """Create a closed window.

        Args:
            world_size: number of ranks across which gradients are averaged.
            total_of: ``total_of(x)`` returns the sum of x across ranks (a collective).
            is_redone: whether each backward pass in the last micro-step recomputes the sum of all gradients (bitwise).
        """
        self._world_size = world_size
        self._is_redone = is_redone
        self._total_of = total_of
        self._reference: float | None = None
        self.is_open = False
        """Whether this window has further micro-steps."""
        self._reset()

    def _reset(self) -> None:
        self._count = 0  # micro-steps started
        self._is_weighted: bool | None = None  # None: no loss yet
        self._weight = 0.0  # items of this rank in the micro-steps so far
        self._items: float | None = None  # in the current micro-step; None: not given yet
        self._factor: float | None = None  # applied to the finished gradients, so later losses of this step include it
        self._finished: frozenset[int] = frozenset()  # ids of the models it was applied to
        self.total = 0.0
        """Number of items across all ranks in this update, once known."""
        self._scale: float | None = None  # in a window of one micro-step

    def begin_micro_step(self) -> int:
        """Start the next micro-step, in a new window if the last one was complete; return its number."""
        if not self.is_open:
            self._reset()
            self.is_open = True
        self._count += 1
        self._items = None
        return self._count

    def drop(self) -> None:
        """Forget the micro-steps so far; the next one starts a new window."""
        self._reset()
        self.is_open = False

    @property
    def num_micro_steps(self) -> int:
        """Number of micro-steps started."""
        return self._count

    def plain(self, *, num_steps: int, inside: bool, sync: bool) -> tuple[float, float]:
        """Return the factors (for the loss before backward, for the gradients after it) for a loss without a weight."""
        scale = 1.0 / num_steps
        if not inside:
            return scale, 1.0
        if self._is_weighted:
            self._require_one_kind(weighted=False)
        self._is_weighted = False
        if not sync or self._count == num_steps:
            return scale, 1.0
        if self._factor is not None:  # a second loss in a step whose gradients are finished
            return scale * self._factor, 1.0
        self._factor = num_steps / self._count
        return scale, self._factor

    def weighted(
        self, num_items: float, *, inside: bool, sync: bool, trained: frozenset[int] = frozenset()
    ) -> tuple[float, float]:
        """Return the factors (see ``plain``) for a mean over ``num_items`` items; a loss factor of 0 means no
        contribution.

        ``trained`` contains the ids of the models whose gradients the factor is applied to; each is scaled once.

        Collective: call on every rank at the end of a window and for the first weighted loss.
        """
        if not (math.isfinite(num_items) and num_items >= 0):
            raise UsageError(
                _("num_items={num_items} is not a valid number of items", num_items=num_items),
                do=_("pass the number of items that the loss averages over"),
            )
        if not inside:  # a separate window
            return self._single_scale(num_items), 1.0
        self._require_one_kind(weighted=True)
        if self._items is None:
            self._items = num_items
            self._weight += num_items
        elif self._items != num_items:
            raise UsageError(
                f"got num_items={num_items} after num_items={self._items} in the same micro-step",
                do="pass the same num_items for every loss in a micro-step (scale the losses instead if the counts "
                "differ)",
            )
        if self._count == 1 and sync and not self._is_redone:
            if self._scale is None:
                self._scale = self._single_scale(num_items)
            return self._scale, 1.0
        if self._reference is None:
            mean = self._total_of(num_items) / self._world_size
            self._reference = 2.0 ** round(math.log2(mean)) if mean else 1.0
        scale = num_items / self._reference
        if not sync:
            return scale, 1.0
        if self._factor is None:
            self.total = self._total_of(self._weight)
            self._factor = self._reference * self._world_size / self.total if self.total else 1.0
        elif trained <= self._finished and not self._is_redone:
            return scale * self._factor, 1.0
        self._finished |= trained
        return scale, self._factor

    def _require_one_kind(self, *, weighted: bool) -> None:
        if self._is_weighted is not None and self._is_weighted is not weighted:
            raise UsageError(
                _("one update mixes losses with num_items= and losses without"),
                do=_("pass num_items= to every backward() call in an update, or to none"),
            )
        self._is_weighted = weighted

    def _single_scale(self, num_items: float) -> float:
        self.total = self._total_of(num_items)
        return num_items * self._world_size / self.total if self.total else 0.0
