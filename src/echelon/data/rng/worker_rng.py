"""What loader workers draw: followed batch by batch, so that a pass that goes on draws what it would have drawn."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader

from echelon.base.warnings import warn
from echelon.data.rebuild_loader import like
from echelon.data.rng.host_rng import OtherDraws, other_states, set_other_states

__all__ = ["WorkerDraws"]


class WorkerDraws:
    """Follows the random states of a loader's workers.

    Batch i of a pass is read by worker i modulo their number, and what it draws depends on all that this worker drew before.
    So a pass can go on where each worker has read equally many batches (a round); what was given of the next round already
    is read once more, and thrown away.

    Args:
        loader: whose batches have an order; it has workers.
        num_ahead: as many batches may have been read and not given.
    """

    def __init__(self, loader: DataLoader[Any], *, num_ahead: int) -> None:
        self.num_workers = loader.num_workers
        self._in_worker = _InWorker(loader.collate_fn, loader.worker_init_fn)
        self._begun_at = 0
        # (batches, the states of the workers after them); as far back as a batch is that was read and not given.
        self._rounds: deque[tuple[int, tuple[Any, ...] | None]] = deque(maxlen=num_ahead // self.num_workers + 2)
        self._loaded: dict[str, Any] | None = None

    def following(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        """Return a loader as ``loader`` whose batches come with the states of their workers: for ``follow``."""
        inside = self._in_worker
        batches = (
            {"sampler": loader.sampler, "batch_size": None}
            if loader.batch_sampler is None
            else {"batch_sampler": loader.batch_sampler}
        )
        chosen = {**batches, "collate_fn": inside.collate, "worker_init_fn": inside.begin}
        return like(loader, loader.dataset, kind=DataLoader, **chosen)  # type: ignore[no-any-return]

    def state(self, num_given: int) -> dict[str, Any]:
        """Return the place in the draws from which the batch after ``num_given`` can be read again."""
        states = next((states for count, states in reversed(self._rounds) if count <= num_given), None)
        return {"num_workers": self.num_workers, "begun_at": self._begun_at, "states": states}

    def load(self, state: dict[str, Any]) -> None:
        """Let the next pass draw from ``state`` on."""
        if state["num_workers"] == self.num_workers:
            self._loaded = state
        else:
            warn(
                f"the checkpoint was saved with {state['num_workers']} loader workers, and here are {self.num_workers}: what "
                "the data set draws in them for the rest of this epoch differs"
            )

    def begin(self, skip: int) -> int:
        """A pass begins with batch ``skip``; return how many batches before it have to be read again."""
        loaded, self._loaded = self._loaded, None
        self._begun_at = skip if loaded is None else loaded["begun_at"]
        self._in_worker.states = states = None if loaded is None else loaded["states"]
        given = skip - self._begun_at
        num_again = given if states is None else given % self.num_workers
        self._rounds.clear()
        self._rounds.append((skip - num_again, states))
        return num_again

    def follow(self, items: Iterator[Any], num_again: int) -> Iterator[Any]:
        """Yield the batches of ``items``, without the first ``num_again``. The workers have begun."""
        self._in_worker.states = None  # the next ones begin by themselves
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
    """What runs in each worker: sets its states at the beginning, and sends them with a batch that has changed them."""

    def __init__(self, collate: Callable[[Any], Any], init: Callable[[int], None] | None) -> None:
        self.states: Sequence[Any] | None = None
        """Of the workers that are about to begin; None: their own."""
        self._collate, self._init = collate, init
        self._others = OtherDraws()
        self._last: dict[str, Any] = {}

    def begin(self, worker: int) -> None:
        """Set the states of ``worker``. In the worker."""
        if self._init is not None:
            self._init(worker)
        state: dict[str, Any] = (None if self.states is None else self.states[worker]) or {}
        if state:
            torch.set_rng_state(torch.frombuffer(bytearray(state["torch"]), dtype=torch.uint8))
            set_other_states(state)
        self._last, self._others = {}, OtherDraws(are_used="random" in state)
        self._others.before()

    def collate(self, samples: Any) -> tuple[Any, dict[str, Any] | None]:
        """Return the batch, and what has changed of the states; None: nothing. In the worker."""
        batch = self._collate(samples)
        self._others.after()
        # As bytes: a tensor would be sent through shared memory of its own.
        now: dict[str, Any] = {"torch": torch.get_rng_state().numpy().tobytes()}
        if self._others.are_used:
            now |= other_states()
        self._others.before()
        if now == self._last:
            return batch, None
        self._last = now
        return batch, now
