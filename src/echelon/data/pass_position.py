"""Where a loader is in its passes: what a checkpoint keeps of it, and where the next pass starts."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler

from echelon.base.errors import CheckpointError, UsageError
from echelon.base.protocols import SupportsStateDict
from echelon.base.warnings import warn
from echelon.data.active_loaders import PassFacts
from echelon.data.exact.exact_batches import PassPlan
from echelon.data.exact.exact_sources import ExactSource
from echelon.data.exact.global_batch_slices import Contribution
from echelon.data.rng.host_rng import HostDraws, OtherDraws
from echelon.data.sharding.batch_source import BatchSource, Steps
from echelon.world.world import World

__all__ = ["END", "BatchPosition", "PassPosition", "SamplePosition"]

END: Any = object()
"""In the place of a step: the pass is over."""


class PassPosition(ABC):
    """The position of one loader; loaders over the same source (``skip_first_batches`` makes them) each have their own.

    Args:
        source: of the batches.
        original: the user's loader.
        world: this rank.
        is_stateful: the loader that reads can save its state in the middle of a pass.
    """

    is_exact: ClassVar[bool]
    """It counts samples, and means the same on any number of ranks; else it counts the batches of this many ranks."""

    def __init__(self, source: BatchSource, original: DataLoader[Any], *, world: World, is_stateful: bool) -> None:
        self.source = source
        self.original = original
        self.world = world
        self.is_stateful = is_stateful
        self.iteration = 0
        """The epoch of the next pass; it counts the passes that were read to their end."""
        self.num_given = 0
        """Batches yielded in this pass, with those that were skipped at its beginning."""
        self.facts: PassFacts | None = None
        """Of the pass that started last; None: none has, or no tracker records passes."""
        self.is_open = False
        """That pass has not been read to its end."""
        self.draws: HostDraws | None = None
        """What the batch read last was drawn from; None: its draws depend on the position alone."""
        self.loaded: dict[str, Any] | None = None
        """The ``record`` of the pass of a loaded checkpoint, until a pass starts."""
        self.resumes = False
        """The next pass is the rest of ``loaded``."""
        self._state: dict[str, Any] | None = None  # after the current batch
        self._resume: dict[str, Any] | None = None  # of the batch after which the next pass starts
        self._draws_before: dict[str, Any] | None = None  # of the run that was saved

    def renew(self) -> PassPosition:
        """Return the position of another loader over the same source, before its first pass."""
        position = type(self)(self.source, self.original, world=self.world, is_stateful=self.is_stateful)
        position.iteration = self.iteration
        return position

    # ---- one pass ------------------------------------------------------------------------------------------------------

    @abstractmethod
    def open(
        self, skip: int, plan_pass: Callable[[], PassPlan], resumed_from: dict[str, Any] | None
    ) -> tuple[Steps, Any]:
        """Start a pass, and return its steps and the first of them (``END``: there is none).

        Args:
            skip: batches to leave out.
            plan_pass: returns what the pass is for (exact modes).
            resumed_from: the ``record`` of the pass that this one continues; None: it starts at its beginning.

        Collective: where ranks share an order or a reader.
        """

    @abstractmethod
    def num_steps(self, plan_pass: Callable[[], PassPlan]) -> int:
        """Return the steps of a whole pass.

        Raises:
            TypeError: it is not known.
        """

    @abstractmethod
    def note_batch(self, contribution: Contribution | None, inner_state: dict[str, Any] | None, is_last: bool) -> None:
        """A batch is about to be yielded.

        Args:
            contribution: what it is in its update (exact modes).
            inner_state: of the loader that reads, before it read the next batch.
            is_last: of the pass.
        """

    def close(self) -> None:
        """The pass was read to its end."""
        self.iteration += 1
        self.is_open = False

    def end_pass(self) -> None:
        """Let the next pass start at its beginning, however far the last one has come."""
        record, self.loaded, self.resumes = self.loaded, None, False
        if record is not None:
            self.facts = PassFacts.from_record(record)
            if record["is_within"] and record["is_read"]:  # the run that was saved has read it to its end
                self.iteration = record["iteration"] + 1
        self.is_open = False
        self._resume = self._draws_before = None
        self.source.resumes = False
        if self.source.order is not None:
            self.source.order.unpin()

    # ---- checkpoints ---------------------------------------------------------------------------------------------------

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the position after the batch yielded last."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next pass continue where ``state_dict`` was called."""

    @abstractmethod
    def order_state(self, *, is_read: bool, is_within: bool) -> dict[str, Any]:
        """Return what the order of the next pass (of this one, if it ``is_within`` one) depends on."""

    @abstractmethod
    def load_order_state(self, state: dict[str, Any]) -> None:
        """Let the next pass have the order of ``order_state``."""

    def record(self, *, is_read: bool, is_within: bool, num_unused: int) -> dict[str, Any] | None:
        """Return how far the pass that started last has come; None: none has started here since a checkpoint was loaded.

        Args:
            is_read: its loop runs.
            is_within: batches are left.
            num_unused: batches at the end that count as not yielded.
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
        """Return what the batch after the current one was drawn from on this rank; None outside of a pass."""
        if self.draws is None or not self.is_open:
            return None
        workers = self.source.workers
        if workers is None:
            return self.draws.noted
        given = (self.num_given - num_unused) * self.source.batches_per_step
        return {**self.draws.noted, "workers": workers.state(given)}

    @property
    def resumed_rng_state(self) -> dict[str, Any] | None:
        """What the first batch of a resumed pass is drawn from."""
        return self._draws_before

    def load_rng_state(self, state: dict[str, Any] | None) -> None:
        """Read the first batch of a resumed pass with the random numbers of ``rng_state``."""
        self._draws_before = state

    def resume_pass(self, current: dict[str, Any] | None) -> None:
        """Let the next pass be the rest of the loaded pass (else of ``current``); an empty one if that was over.

        Raises:
            CheckpointError: it was saved on another number of processes, or with another ``parity``.
        """
        if self.loaded is None:
            self.loaded, self._resume = current, self._resume or self._state
        if self.loaded is not None and self.loaded["is_within"]:
            self._require_same_meaning(self.loaded)
            self._resume_at(self.loaded)
        self.resumes = self.loaded is not None

    @abstractmethod
    def _resume_at(self, record: dict[str, Any]) -> None:
        """Take over the position of ``record``, of the middle of a pass."""

    def _require_same_meaning(self, record: dict[str, Any]) -> None:
        num_saved = record["world_size"]
        if record["is_exact"] is not self.is_exact:
            raise CheckpointError(
                "the checkpoint was saved in the middle of an epoch, and parity='off' counts its progress differently from "
                "the exact modes",
                do="resume with the parity that it was saved with",
            )
        if not self.is_exact and num_saved != self.world.world_size:
            raise CheckpointError(
                f"the checkpoint was saved in the middle of an epoch on {num_saved} processes, and this run has "
                f"{self.world.world_size}: samples would be repeated or lost",
                where="parity='off'",
                do=f"resume on {num_saved} processes, or train with parity='exact', which resumes on any number",
            )


class BatchPosition(PassPosition):
    """Counts batches (parity off): a pass is resumed with the same order, RNG states and number of processes."""

    is_exact = False

    def __init__(self, source: BatchSource, original: DataLoader[Any], *, world: World, is_stateful: bool) -> None:
        super().__init__(source, original, world=world, is_stateful=is_stateful)
        self._other_draws = OtherDraws()

    def open(
        self, skip: int, plan_pass: Callable[[], PassPlan], resumed_from: dict[str, Any] | None
    ) -> tuple[Steps, Any]:
        draws = self.draws = HostDraws(self._generators(), is_of_a_batch=self._draws_by_batch, others=self._other_draws)
        before, self._draws_before = self._draws_before, None
        if resumed_from is None:
            draws.take()
            steps = self._start(skip)
            step = next(steps, END)
            draws.end_batch()
            return steps, step
        began = time.monotonic()
        with draws.put_back():  # the first batch is read with the random numbers that it was read with before
            if before is not None:
                draws.go_back_to(before)
            # What is drawn for a whole pass is drawn again where nothing stands between; else it was noted.
            begins_again = before is not None and not (draws.is_of_a_batch and resumed_from["num_given"])
            if before is not None and "workers" in before and self.source.workers is not None:
                self.source.workers.load(before["workers"])
            steps = self._start(skip, resumed_from, begins_again=begins_again)
            step = next(steps, END)
        self._warn_of_replay(resumed_from["num_given"], time.monotonic() - began)
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

    def num_steps(self, plan_pass: Callable[[], PassPlan]) -> int:
        return self.source.num_steps()

    def note_batch(self, contribution: Contribution | None, inner_state: dict[str, Any] | None, is_last: bool) -> None:
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
        if "exact" in state:  # of another parity: the epoch is what they share
            self.iteration = state["exact"]["epoch"]
            return
        self.iteration = state["iteration"]
        self.source.resumes = state["is_within"]
        for generator, saved in zip(self._generators(), state["generators"]):
            generator.set_state(saved)
        if self.source.order is not None:
            self.source.order.pin(state["order"])

    def _resume_at(self, record: dict[str, Any]) -> None:
        self.iteration = record["iteration"]

    def _generators(self) -> list[torch.Generator]:
        """Return the user's own generators, each once."""
        sampler = getattr(self.original.batch_sampler, "sampler", self.original.sampler)
        owned = (self.original.generator, getattr(sampler, "generator", None))
        return list({id(g): g for g in owned if isinstance(g, torch.Generator)}.values())

    @property
    def _draws_by_batch(self) -> bool:
        """Does this process read the samples, and need nothing that was drawn earlier in the pass to do so?"""
        source = self.source
        is_iterable = isinstance(self.original.dataset, IterableDataset)
        in_order = isinstance(source.sampler_of(self.original), SequentialSampler)
        return not is_iterable and not source.inner.num_workers and (source.order is not None or in_order)

    def _require_state_dict(self) -> None:
        if not self.is_stateful:
            raise UsageError(
                "this loader cannot be saved in the middle of a pass",
                do="use DataLoaderConfiguration(use_stateful_dataloader=True), or skip_first_batches(loader, n)",
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
                f"{num_batches} batches of iterable data were read again in {seconds:.1f} s to resume after them: "
                "DataLoaderConfiguration(use_stateful_dataloader=True) resumes there at once, if the dataset has state_dict "
                "and load_state_dict"
            )


class SamplePosition(PassPosition):
    """Counts samples of the global order (exact modes): a pass is resumed at any update, on any number of processes."""

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

    def num_steps(self, plan_pass: Callable[[], PassPlan]) -> int:
        return self.source.num_planned(plan_pass())

    def note_batch(self, contribution: Contribution | None, inner_state: dict[str, Any] | None, is_last: bool) -> None:
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
        else:  # of another parity: the epoch is what they share
            self.iteration = state["iteration"]

    def _resume_at(self, record: dict[str, Any]) -> None:
        pass  # its own state says where
