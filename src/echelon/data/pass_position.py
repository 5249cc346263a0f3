"""A loader's position in its passes, which is saved in checkpoints and determines where the next pass starts."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler

from echelon.base.errors import CheckpointError, UsageError
from echelon.base.messages.translation import gettext as _
from echelon.base.protocols import SupportsStateDict
from echelon.base.warnings import warn
from echelon.data.active_loaders import PassFacts
from echelon.data.exact.exact_sources import ExactSource
from echelon.data.global_batch_slices import Contribution, PassPlan
from echelon.data.rng.host_rng import HostDraws, OtherDraws
from echelon.data.sharding.batch_source import BatchSource, Steps
from echelon.world.world import World

_MODES = ("'off'", "'exact' or 'bitwise'")

END: Any = object()
"""Marks the end of a pass."""


class PassPosition(ABC):
    """One loader's position. Loaders over the same source (from ``skip_first_batches``) have separate positions; a complete pass of
    the copy is one of the loader from which it was made.

    Args:
        is_stateful: whether the inner loader can save its state during a pass.
    """

    is_exact: ClassVar[bool]
    """Whether this counts samples instead of batches. A position in samples is valid for any number of ranks."""

    def __init__(self, source: BatchSource, original: DataLoader[Any], *, world: World, is_stateful: bool) -> None:
        self.source = source
        self.original = original
        self.world = world
        self.is_stateful = is_stateful
        self.iteration = 0
        """Epoch of the next pass, which increases with each completed pass."""
        self.num_given = 0
        """Number of batches yielded in this pass, including batches skipped at its start."""
        self.facts: PassFacts | None = None
        """Facts about the latest pass, or None if no pass has started or no tracker records passes."""
        self.is_open = False
        """Whether the latest pass is incomplete."""
        self.draws: HostDraws | None = None
        """RNG states for the latest batch, or None if its random numbers depend only on the position."""
        self.loaded: dict[str, Any] | None = None
        """``record`` of the pass in a loaded checkpoint, until a pass starts."""
        self.resumes = False
        """Whether the next pass continues ``loaded``."""
        # Order and position of a checkpoint that was loaded during a pass, until that pass ends.
        self._deferred: tuple[dict[str, Any] | None, dict[str, Any] | None] | None = None
        self._state: dict[str, Any] | None = None  # state after the current batch
        self._resume: dict[str, Any] | None = None  # state from which the next pass continues
        self.draws_before: dict[str, Any] | None = None
        """RNG states for the first batch of a resumed pass, as ``rng_state`` has saved them."""

    def renew(self) -> PassPosition:
        """Return a new position object for another loader over the same source."""
        position = type(self)(self.source, self.original, world=self.world, is_stateful=self.is_stateful)
        position.iteration = self.iteration
        return position

    # ---- one pass ------------------------------------------------------------------------------------------------------

    @abstractmethod
    def open(
        self, skip: int, plan_pass: Callable[[], PassPlan], resumed_from: dict[str, Any] | None
    ) -> tuple[Steps, Any]:
        """Start a pass. Return an iterator over its steps, and the first step (``END`` if there are no steps).

        Args:
            plan_pass: returns the plan for the pass (exact modes).
            resumed_from: the ``record`` of the pass to continue. If None, the pass starts from the beginning.

        Collective: call on every rank if ranks share an order or a reader.
        """

    @abstractmethod
    def record_batch(
        self, contribution: Contribution | None, inner_state: dict[str, Any] | None, is_last: bool
    ) -> None:
        """Record a batch before it is yielded.

        Args:
            inner_state: the inner loader's state before it read the next batch.
            is_last: whether this is the last batch of the pass.
        """

    def begin_pass(self) -> dict[str, Any] | None:
        """Start a pass; return the ``record`` of the pass that it continues, or None if it is a new one."""
        self.apply_deferred()
        record, self.loaded = self.loaded if self.resumes else None, None
        self.resumes = False
        return record

    def close(self) -> None:
        """Record that the pass is complete. A checkpoint that was loaded during this pass does not affect the next one."""
        self._deferred = None
        self.iteration += 1
        self.is_open = False

    def forget_resume(self) -> None:
        """Start the next pass at its beginning, also if a position within it was loaded."""
        self._state = self._resume = self.draws_before = None

    def complete_pass_of(self, other: PassPosition) -> None:
        """Take over the epoch after a pass that ``other``, a position in the same source, has completed."""
        self.end_pass()
        self.forget_resume()
        self.iteration = other.iteration
        self.facts, self.num_given = other.facts, other.num_given

    def end_pass(self) -> None:
        """End the current pass, so that the next pass starts from the beginning."""
        record, self.loaded, self.resumes = self.loaded, None, False
        self._deferred = None
        if record is not None:
            self.facts = PassFacts.from_record(record)
            if record["is_within"] and record["is_read"]:  # the saved run went on to complete this pass
                self.iteration = record["iteration"] + 1
        self.is_open = False
        self._resume = self.draws_before = None
        self.source.resumes = False
        if self.source.order is not None:
            self.source.order.unpin()

    # ---- checkpoints ---------------------------------------------------------------------------------------------------

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch that was yielded."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next pass continue where ``state_dict`` was called."""

    @abstractmethod
    def order_state(self, *, is_read: bool, is_within: bool) -> dict[str, Any]:
        """Return the state that determines the order of the next pass or, if ``is_within``, of the current pass."""

    @abstractmethod
    def load_order_state(self, state: dict[str, Any]) -> None:
        """Make the next pass use the order saved by ``order_state``."""

    def load(self, order: dict[str, Any] | None, position: dict[str, Any] | None, *, is_read: bool) -> None:
        """Load the ``order_state`` and the ``state_dict`` of a checkpoint, each None if it has none.

        If ``is_read``, a pass is in progress. It continues as if nothing had been loaded. If the loop leaves it, the next pass is the
        saved one.
        """
        self._deferred = order, position
        if not is_read:
            self.apply_deferred()

    def apply_deferred(self) -> None:
        """Load the state of a checkpoint that was loaded during a pass, because the loop has left this pass."""
        if self._deferred is None:
            return
        (order, position), self._deferred = self._deferred, None
        if order is not None:
            self.loaded, self.resumes = order.get("pass"), False
            self.load_order_state(order)
        if position is not None:
            self.load_state_dict(position)

    def record(self, *, is_read: bool, is_within: bool, num_unused: int) -> dict[str, Any] | None:
        """Return the progress of the latest pass, or None if no pass has started since a checkpoint was loaded.

        Args:
            is_read: whether the pass is in progress.
            is_within: whether the pass has more batches.
            num_unused: number of batches, counted from the end, that count as not yielded.
        """
        if self.facts is None or self.loaded is not None:
            return None
        order = self.source.order
        return {
            "epoch": self.facts.epoch,
            "trains": self.facts.trains,
            "outlives_epochs": self.facts.outlives_epochs,
            "is_within": is_within,
            "is_read": is_read,
            "is_exact": self.is_exact,
            "iteration": self.iteration,
            "num_given": self.num_given - num_unused if is_within else 0,
            "order": order.state() if is_within and order is not None else None,
            "world_size": self.world.world_size,
        }

    def rng_state(self, *, num_unused: int) -> dict[str, Any] | None:
        """Return the RNG states that this rank used to draw the batch after the current one, or None outside a pass."""
        if self.draws is None or not self.is_open:
            return None
        workers = self.source.workers
        if workers is None:
            return self.draws.recorded
        given = (self.num_given - num_unused) * self.source.batches_per_step
        return {**self.draws.recorded, "workers": workers.state(given)}

    def resume_pass(self, current: dict[str, Any] | None) -> None:
        """Make the next pass continue the loaded pass or, if there is none, ``current``.

        If that pass was complete, the next pass is empty.

        Raises:
            CheckpointError: the number of processes or the ``parity`` has changed since the pass was saved.
        """
        if self.loaded is None:
            self.loaded, self._resume = current, self._resume or self._state
        if self.loaded is not None and self.loaded["is_within"]:
            self._require_compatible(self.loaded)
            if not self.is_exact:  # otherwise ``load_state_dict`` has restored the epoch, too
                self.iteration = self.loaded["iteration"]
        self.resumes = self.loaded is not None

    def _require_compatible(self, record: dict[str, Any]) -> None:
        num_saved = record["world_size"]
        if record["is_exact"] is not self.is_exact:
            raise CheckpointError(
                _(
                    "the checkpoint was saved during an epoch with parity={saved}, and this run has parity={own}, which counts "
                    "progress in another way",
                    saved=_MODES[record["is_exact"]],
                    own=_MODES[self.is_exact],
                ),
                do=_("resume with the parity of the run that saved the checkpoint, for example with --parity exact"),
            )
        if not self.is_exact and num_saved != self.world.world_size:
            raise CheckpointError(
                f"the checkpoint was saved during an epoch with {num_saved} process{'es' if num_saved != 1 else ''}, but "
                f"this run has {self.world.world_size}, so samples would be repeated or skipped",
                where="parity='off'",
                do=f"resume with {num_saved} process{'es' if num_saved != 1 else ''}, or train with parity='exact', which can resume "
                "with any number of processes",
            )


class BatchPosition(PassPosition):
    """Counts batches (``parity="off"``). A pass resumes with the same order and RNG states if the number of processes is the same."""

    is_exact = False

    def __init__(self, source: BatchSource, original: DataLoader[Any], *, world: World, is_stateful: bool) -> None:
        super().__init__(source, original, world=world, is_stateful=is_stateful)
        self._other_draws = OtherDraws()

    def open(
        self, skip: int, plan_pass: Callable[[], PassPlan], resumed_from: dict[str, Any] | None
    ) -> tuple[Steps, Any]:
        draws = self.draws = HostDraws(self._generators(), is_of_a_batch=self._draws_by_batch, others=self._other_draws)
        before, self.draws_before = self.draws_before, None
        if resumed_from is None:
            draws.take()
            steps = self._start(skip)
            step = next(steps, END)
            draws.end_batch()
            return steps, step
        started_at = time.monotonic()
        with draws.preserve():  # the first batch is read with the RNG states of the saved run
            if before is not None:
                draws.restore(before)
            # Draws at the start of a pass are repeated if the restored states are those of the start of the pass.
            begins_again = before is not None and not (draws.is_of_a_batch and resumed_from["num_given"])
            if before is not None and "workers" in before and self.source.workers is not None:
                self.source.workers.load(before["workers"])
            steps = self._start(skip, resumed_from, begins_again=begins_again)
            step = next(steps, END)
        self._warn_of_replay(resumed_from["num_given"], time.monotonic() - started_at)
        return steps, step

    def _start(self, skip: int, resumed_from: dict[str, Any] | None = None, *, begins_again: bool = False) -> Steps:
        source = self.source
        resumed, self._resume = self._resume, None
        if resumed is None:
            self.num_given = skip
            if resumed_from is not None:
                self.num_given = resumed_from["num_given"]
                source.resumes = not begins_again
                if source.order is not None:
                    source.order.unpin()
                    source.order.pin(None if begins_again else resumed_from["order"])
            return source.steps(self.num_given)
        self.num_given = source.num_behind = resumed["num_given"]
        if source.order is not None:
            source.order.pin(resumed["order"])
        if isinstance(source.inner, SupportsStateDict):
            source.inner.load_state_dict(resumed["inner"])
        return source.steps(0)

    def record_batch(
        self, contribution: Contribution | None, inner_state: dict[str, Any] | None, is_last: bool
    ) -> None:
        if self.is_stateful:
            self._state = {**self._snapshot(inner_state), "_iterator_finished": is_last}

    def state_dict(self) -> dict[str, Any]:
        self._require_state_dict()
        return self._snapshot(None) if self._state is None else dict(self._state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._require_state_dict()
        self.iteration = state["iteration"]
        self._resume = None if state["_iterator_finished"] or not state["num_given"] else dict(state)
        self._state = None
        if state["_iterator_finished"]:
            self.iteration += 1

    def order_state(self, *, is_read: bool, is_within: bool) -> dict[str, Any]:
        order = self.source.order
        return {
            "iteration": self.iteration + (is_read and not is_within),
            "is_within": is_within,
            "order": order.state() if order is not None and (is_within or order.is_seedable) else None,
            "generators": [generator.get_state() for generator in self._generators()],
        }

    def load_order_state(self, state: dict[str, Any]) -> None:
        if "exact" in state:  # saved with another parity: only the epoch is common
            self.iteration = state["exact"]["epoch"]
            return
        self.iteration = state["iteration"]
        self.source.resumes = state["is_within"]
        for generator, saved in zip(self._generators(), state["generators"]):
            generator.set_state(saved)
        if self.source.order is not None:
            self.source.order.pin(state["order"])

    def _generators(self) -> list[torch.Generator]:
        """Return the user's generators without duplicates."""
        sampler = getattr(self.original.batch_sampler, "sampler", self.original.sampler)
        owned = (self.original.generator, getattr(sampler, "generator", None))
        return list({id(g): g for g in owned if isinstance(g, torch.Generator)}.values())

    @property
    def _draws_by_batch(self) -> bool:
        """Whether this process reads the samples itself, and does so independently of earlier random numbers in the pass."""
        source = self.source
        in_order = source.order is not None or isinstance(source.sampler_of(self.original), SequentialSampler)
        return in_order and not source.inner.num_workers and not isinstance(self.original.dataset, IterableDataset)

    def _require_state_dict(self) -> None:
        if not self.is_stateful:
            raise UsageError(
                "this loader's state cannot be saved during a pass",
                do="pass DataLoaderConfiguration(use_stateful_dataloader=True), or use skip_first_batches(loader, n) "
                "to resume",
            )

    def _snapshot(self, inner: dict[str, Any] | None) -> dict[str, Any]:
        order = self.source.order
        return {
            "iteration": self.iteration,
            "num_given": self.num_given if inner is not None else 0,
            "order": None if order is None or inner is None else order.state(),
            "inner": inner,
            "_iterator_finished": False,
        }

    def _warn_of_replay(self, num_batches: int, seconds: float) -> None:
        is_iterable = isinstance(self.original.dataset, IterableDataset)
        if is_iterable and not self.is_stateful and self.world.is_rank_zero:
            warn(
                _(
                    "{num_batches} batches of iterable data were read again to resume after them, which took "
                    "{seconds:.1f} s. DataLoaderConfiguration(use_stateful_dataloader=True) avoids this if the dataset "
                    "has state_dict and load_state_dict",
                    num_batches=num_batches,
                    seconds=seconds,
                )
            )


class SamplePosition(PassPosition):
    """Counts samples in the global order (exact modes). A pass can resume at any update with any number of processes."""

    is_exact = True
    source: ExactSource

    def open(
        self, skip: int, plan_pass: Callable[[], PassPlan], resumed_from: dict[str, Any] | None
    ) -> tuple[Steps, Any]:
        resumed, self._resume = self._resume, None
        self.num_given = skip
        self.source.begin(
            plan_pass(),
            epoch=self.iteration,
            position=0 if resumed is None else resumed["position"],
            resumed=None if resumed is None else resumed["source"],
        )
        steps = self.source.steps(skip)
        return steps, next(steps, END)

    def record_batch(
        self, contribution: Contribution | None, inner_state: dict[str, Any] | None, is_last: bool
    ) -> None:
        assert contribution is not None
        if is_last and contribution.ends_update:
            self._state = {"epoch": self.iteration + 1, "position": 0, "source": None}
        else:
            position = contribution.next_position
            self._state = {"epoch": self.iteration, "position": position, "source": self.source.state(position)}

    def close(self) -> None:
        super().close()
        self._state = None  # the next pass starts at its beginning

    def end_pass(self) -> None:
        super().end_pass()
        self._state = None

    def state_dict(self) -> dict[str, Any]:
        return dict(self._state or self._resume or {"epoch": self.iteration, "position": 0, "source": None})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.iteration, self._state = state["epoch"], None
        self._resume = None if state["source"] is None else dict(state)  # None: no pass had started

    def order_state(self, *, is_read: bool, is_within: bool) -> dict[str, Any]:
        return {"exact": self.state_dict()}

    def load_order_state(self, state: dict[str, Any]) -> None:
        if "exact" in state:
            self.load_state_dict(state["exact"])
        else:  # saved with another parity: only the epoch is common
            self.iteration = state["iteration"]
