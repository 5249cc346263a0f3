"""Tracks the RNG states in DataLoader workers, so that a resumed pass draws the same random numbers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader

from echelon.base.messages.translation import gettext as _
from echelon.base.warnings import warn
from echelon.data.rebuild_loader import copy_loader
from echelon.data.rng.host_rng import OtherDraws, other_states, set_other_states


class WorkerDraws:
    """Tracks the RNG states in a loader's workers.

    Worker ``i % num_workers`` reads batch ``i`` of a pass, and its random numbers depend on everything that it has drawn
    before. A pass can therefore resume only at a point where all workers have read the same number of batches. Batches
    after that point that were already yielded are read again and discarded.

    Args:
        loader: a loader with workers whose batches arrive in order.
        num_ahead: maximum number of batches that have been read but not yet yielded.
    """

    def __init__(self, loader: DataLoader[Any], *, num_ahead: int) -> None:
        self.num_workers = loader.num_workers
        self._in_worker = _InWorker(loader.collate_fn, loader.worker_init_fn)
        self._first_batch = 0
        # (number of batches, worker states after them) of all rounds whose batches may not have been yielded yet.
        self._rounds: deque[tuple[int, tuple[Any, ...] | None]] = deque(maxlen=num_ahead // self.num_workers + 2)
        self._loaded: dict[str, Any] | None = None

    def following(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        """Return a copy of ``loader`` that yields (batch, worker state) pairs for ``follow``."""
        inside = self._in_worker
        batches = (
            {"sampler": loader.sampler, "batch_size": None}
            if loader.batch_sampler is None
            else {"batch_sampler": loader.batch_sampler}
        )
        chosen = {**batches, "collate_fn": inside.collate, "worker_init_fn": inside.begin}
        return copy_loader(loader, loader.dataset, kind=DataLoader, **chosen)  # type: ignore[no-any-return]

    def state(self, num_given: int) -> dict[str, Any]:
        """Return the state needed to read the batch after the first ``num_given`` again."""
        states = next((states for count, states in reversed(self._rounds) if count <= num_given), None)
        return {"num_workers": self.num_workers, "begun_at": self._first_batch, "states": states}

    def load(self, state: dict[str, Any]) -> None:
        """Make the next pass draw random numbers starting from ``state``."""
        if state["num_workers"] == self.num_workers:
            self._loaded = state
        else:
            warn(
                _(
                    "the checkpoint was saved with {num_saved} DataLoader workers, but this run has {num_workers}, so the "
                    "dataset's random numbers will differ for the rest of this epoch",
                    num_saved=state["num_workers"],
                    num_workers=self.num_workers,
                )
            )

    def begin(self, skip: int) -> int:
        """Start a pass at batch ``skip``, and return how many of the preceding batches must be read again."""
        loaded, self._loaded = self._loaded, None
        self._first_batch = skip if loaded is None else loaded["begun_at"]
        self._in_worker.states = states = None if loaded is None else loaded["states"]
        given = skip - self._first_batch
        num_again = given if states is None else given % self.num_workers
        self._rounds.clear()
        self._rounds.append((skip - num_again, states))
        return num_again

    def follow(self, items: Iterator[Any], num_again: int) -> Iterator[Any]:
        """Yield the batches in ``items`` except the first ``num_again``, after the workers have started."""
        self._in_worker.states = None  # workers of the next pass start with their own states
        start, first = self._rounds[0]
        states: list[Any] = list(first or [None] * self.num_workers)
        for number, (batch, state) in enumerate(items):
            worker = number % self.num_workers
            if state is not None:
                states[worker] = {**(states[worker] or {}), **state}
            if worker == self.num_workers - 1:
                self._rounds.append((start + number + 1, tuple(states)))
            if number >= num_again:
                yield batch


class _InWorker:
    """Runs in each worker. Sets the RNG states at the start, and sends them along with each batch that changes them."""

    def __init__(self, collate: Callable[[Any], Any], init: Callable[[int], None] | None) -> None:
        self.states: Sequence[Any] | None = None
        """States for the workers in the next pass. If None, workers keep their own states."""
        self._collate, self._init = collate, init
        self._others = OtherDraws()
        self._last: dict[str, Any] = {}

    def begin(self, worker: int) -> None:
        """Set the RNG states for ``worker``. Called in the worker process."""
        if self._init is not None:
            self._init(worker)
        state: dict[str, Any] = (None if self.states is None else self.states[worker]) or {}
        if state:
            torch.set_rng_state(torch.frombuffer(bytearray(state["torch"]), dtype=torch.uint8))
            set_other_states(state)
        self._last, self._others = {}, OtherDraws(are_used="random" in state)
        self._others.before()

    def collate(self, samples: Any) -> tuple[Any, dict[str, Any] | None]:
        """Return the batch, and the worker's states or None if they have not changed. Called in the worker process."""
        batch = self._collate(samples)
        self._others.after()
        # Bytes, because a tensor would be sent through a separate shared memory segment.
        now: dict[str, Any] = {"torch": torch.get_rng_state().numpy().tobytes()}
        if self._others.are_used:
            now |= other_states()
        self._others.before()
        if now == self._last:
            return batch, None
        self._last = now
        return batch, now
