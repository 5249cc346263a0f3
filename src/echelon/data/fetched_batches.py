"""Tells which of the batches that a loop has fetched is the one that it trains."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch

from echelon.data.global_batch_slices import Contribution


@dataclass(slots=True, eq=False, kw_only=True)
class FetchedBatch:
    """A batch of a training pass."""

    tensor: ref[torch.Tensor] | None
    """One of its tensors, to see whether the loop still holds the batch. None: it has none."""
    is_last: bool
    """Whether it is this rank's last batch of the pass."""
    ends_early: bool
    """Whether it is this rank's last batch, but other ranks have more."""
    contribution: Contribution | None
    """Its contribution to its update (exact modes)."""
    num_uses: int = 0
    """Number of micro-steps that have trained it."""
    has_ended_window: bool = False
    """Whether it has ended an accumulation window that had fewer micro-steps than others, as the last batch of its pass does."""

    @property
    def is_held(self) -> bool:
        """Whether somebody still holds the batch; False if that is unknown."""
        return self.tensor is not None and self.tensor() is not None


class FetchedBatches:
    """The batches of one loader that were fetched and have not been trained, oldest first.

    Most loops train a batch before they fetch the next one. Others fetch several first (to count the tokens of a window, or to
    copy them to a device), so the loader's position is ahead of the training. A batch that is no longer held was skipped, unless
    the loop trains what it has made of it; ``reuses`` shows that, because there are then more micro-steps than batches left.
    """

    def __init__(self) -> None:
        self._waiting: deque[FetchedBatch] = deque()
        self.last_fetched: FetchedBatch | None = None
        self.current: FetchedBatch | None = None
        """The batch of the latest micro-step."""
        self.is_pass_complete = False
        """Whether the loop has come to the end of the latest pass."""
        self.reuses = False
        """Whether several micro-steps have trained one batch of this pass, or copies of batches that are not held any more."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()  # a copy of a loader has fetched nothing

    @property
    def waits(self) -> bool:
        """Whether any batch has not been trained."""
        return bool(self._waiting)

    def begin_pass(self) -> None:
        """Note that a pass starts; the last batches of a complete one may not be trained yet."""
        if not self.is_pass_complete:
            self.clear()
        self.reuses = self.is_pass_complete = False

    def clear(self) -> None:
        """Forget all batches."""
        self._waiting.clear()
        self.current = self.last_fetched = None

    def skip_waiting(self) -> None:
        """Forget the batches that were fetched and have not been trained, because their update was dropped."""
        self._waiting.clear()

    def add(
        self, batch: Any, *, is_last: bool, ends_early: bool = False, contribution: Contribution | None = None
    ) -> None:
        """Add a batch that the loader is about to yield."""
        tensor = _first_tensor(batch)
        self.last_fetched = FetchedBatch(
            tensor=None if tensor is None else ref(tensor),
            is_last=is_last,
            ends_early=ends_early,
            contribution=contribution,
        )
        self._drop_skipped()
        self._waiting.append(self.last_fetched)

    def _drop_skipped(self) -> None:
        while self._waiting and not self._waiting[0].is_held and self._waiting[0] is not self.last_fetched:
            self._waiting.popleft()

    def take(self) -> FetchedBatch | None:
        """Return the batch that a new micro-step trains; None if there has been none."""
        self._drop_skipped()
        if self._waiting:
            self.current = self._waiting.popleft()
        elif self.current is not None and not self.current.is_last:
            self.reuses = True
        if self.current is not None:
            self.current.num_uses += 1
        return self.current

    def take_held(self, *, is_taken: bool) -> list[Contribution]:
        """Return the contributions of the batch that a loss trains, and of those that the loop still holds for later.

        Args:
            is_taken: whether ``take`` has returned the batch that the loss trains.
        """
        self._waiting = deque(batch for batch in self._waiting if batch.is_held)
        batches = [*([self.current] if is_taken and self.current is not None else []), *self._waiting]
        if self._waiting and not is_taken:
            self._waiting.popleft()
        return [batch.contribution for batch in batches if batch.contribution is not None]


def _first_tensor(batch: Any) -> torch.Tensor | None:
    if isinstance(batch, torch.Tensor):
        return batch
    values = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (list, tuple)) else ()
    return next((found for value in values if (found := _first_tensor(value)) is not None), None)
