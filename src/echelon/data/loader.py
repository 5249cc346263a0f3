"""The loader that ``prepare`` gives back: the user's DataLoader, cut for the ranks, that knows its last batch."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from echelon.base.errors import CheckpointError, DesyncError, UsageError
from echelon.base.protocols import SupportsSetEpoch, SupportsStateDict
from echelon.base.warnings import warn
from echelon.data.active_loaders import ActiveLoaders, LoaderOptions, PassFacts
from echelon.data.data_facts import DataFacts, facts_of_data
from echelon.data.exact.batch_slices import Contribution, LastStep
from echelon.data.exact.exact_batches import PassPlan
from echelon.data.exact.exact_sources import ExactDispatchSource, ExactSource
from echelon.data.fork_workers import settle_before_fork
from echelon.data.rng.host_rng import HostDraws, OtherDraws, synchronize_rng_states
from echelon.data.sharding.already_sharded import OwnPartsSource
from echelon.data.sharding.batch_source import BatchSource, DispatchSource, PlainSource, Steps, batches_of
from echelon.data.to_device import to_device
from echelon.distributed.checks.already_sharded import cutters_with_epoch, samplers_of
from echelon.distributed.checks.ungathered_metrics import DatasetLength
from echelon.status.board import Phase
from echelon.status.notes import notes_of_process
from echelon.world.world import World

__all__ = ["DispatchedLoader", "PreparedLoader"]


class PreparedLoader(DataLoader[Any]):
    """A DataLoader for scripts, whose batches come from the source inside; unknown attributes are the user's loader's."""

    def __init__(
        self,
        source: BatchSource,
        original: DataLoader[Any],
        *,
        world: World,
        options: LoaderOptions,
        reading: ActiveLoaders,
        device: torch.device | None,
        skip_batches: int = 0,
    ) -> None:
        # DataLoader's own __init__ is not called: this object holds a loader, it does not read by itself.
        self.__dict__.update(
            source=source,
            original=original,
            reading=reading,
            device=device,
            skip_batches=skip_batches,
            end_of_dataloader=False,
            ends_early=False,
            last_step=None,
            contribution=None,
            plan=None,
            num_given=0,
            iteration=0,
            _even=options.even_batches,
            _options=options,
            _world=world,
            _length=DatasetLength(),
            _draws=None,
            _draws_before=None,
            _other_draws=OtherDraws(),
            _facts=None,
            _is_open=False,
            _loaded=None,
            _goes_on=False,
            _resume=None,
            _state=None,
            _trims=False,
            _cutters=cutters_with_epoch(original),
            _data_facts=None,
        )
        self._seen_epochs = self._epochs_of_cutters()

    source: BatchSource
    original: DataLoader[Any]
    """The user's."""
    skip_batches: int
    """Steps left out at the beginning of every pass."""
    end_of_dataloader: bool
    """Is the batch in hand the last one of this rank?"""
    ends_early: bool
    """Is it so, and other ranks have one more?"""
    last_step: LastStep | None
    """What each rank has of the batch in hand; None when each has equally many samples, all new."""
    contribution: Contribution | None
    """What the batch in hand is in its update (exact modes)."""
    plan: PassPlan | None
    """What the pass begun last is for (exact modes)."""
    num_given: int
    """Batches given in this pass, with those that were left out at its beginning."""
    _cutters: list[Any]
    """Samplers of the user's that cut for the ranks, and have an ``epoch``."""
    _seen_epochs: list[int]
    _state: dict[str, Any] | None
    _resume: dict[str, Any] | None
    _facts: PassFacts | None
    """Of the pass begun last."""
    _is_open: bool
    """Was it left before its end?"""
    _draws: HostDraws | None
    """What the batch read last was drawn from."""
    _draws_before: dict[str, Any] | None
    """The same of the run that was saved."""
    _other_draws: OtherDraws
    _loaded: dict[str, Any] | None
    """The ``record`` of a pass that was begun before a checkpoint was loaded."""
    _goes_on: bool
    """The next pass is that one."""
    _trims: bool
    _data_facts: DataFacts | None
    """As they were when they were looked at last."""
    iteration: int
    """The epoch of the next pass; it counts the passes that were read to their end."""

    @property
    def inner(self) -> DataLoader[Any]:
        """The loader that reads on this rank."""
        return self.source.inner

    @property
    def facts(self) -> PassFacts | None:
        """What the pass begun last is; None: no pass was begun, or nobody keeps a book."""
        return self._facts if self._loaded is None else _facts_of(self._loaded)

    @property
    def dataset(self) -> Any:  # type: ignore[override]
        """The user's, whole; an evaluation that is divided by its length without a gather is warned about."""
        if self._world.world_size > 1:
            self._length.note_access()
        return self.original.dataset

    @property
    def gradient_state(self) -> Any:
        """The counters of the Accelerator that it was prepared for; None for one that nobody knows."""
        return self.reading.owner

    @property
    def base_dataloader(self) -> DataLoader[Any]:
        """``inner`` under Accelerate's name."""
        return self.inner

    @property
    def rng_types(self) -> list[str]:
        """The random states that every rank takes from rank zero at the beginning of a pass."""
        return list(self._options.rng_types)

    @property
    def synchronized_generator(self) -> torch.Generator | None:
        """The generator that the order is drawn from; None when the global one is, or the order is fixed."""
        generator: torch.Generator | None = getattr(self.get_sampler(), "generator", None)
        return generator

    @property
    def batch_sampler(self) -> Any:  # type: ignore[override]
        """The batches of this rank."""
        inner = self.inner  # DataLoader(sampler=BatchSampler(...), batch_size=None) has them elsewhere
        return inner.sampler if isinstance(inner.sampler, BatchSampler) else inner.batch_sampler

    @property
    def even_batches(self) -> bool:
        """Is the last step completed, so that every rank makes the same number? May be changed between passes."""
        return bool(self._even)

    @even_batches.setter
    def even_batches(self, even: bool) -> None:
        self.__dict__["_even"] = even
        self.source.set_even(even)

    @property
    def split_batches(self) -> bool:
        """Is the user's batch cut for the ranks?"""
        return bool(self._options.split_batches)

    @property
    def total_batch_size(self) -> int | None:
        """Samples of all ranks in one step (exact modes: in one update)."""
        size = self._batch_size()
        is_global = self.split_batches or isinstance(self.source, ExactSource)
        return size if size is None or is_global else size * self._world.world_size

    @property
    def total_dataset_length(self) -> int:
        """Samples of the dataset.

        Raises:
            TypeError: nobody knows.
        """
        if isinstance(self.source, OwnPartsSource) and self.source.total_samples >= 0:
            return self.source.total_samples
        if not isinstance(self.source, (DispatchSource, ExactDispatchSource)):
            return len(self.original.dataset)  # type: ignore[arg-type]
        if self.source.total_samples < 0:
            raise TypeError(f"object of type {type(self.original.dataset).__name__} has no len()")
        return self.source.total_samples

    def _batch_size(self) -> int | None:
        if isinstance(self.source, (DispatchSource, ExactSource)):
            return self.source.batch_size
        size: int | None = self.original.batch_size
        return getattr(self.batch_sampler, "batch_size", None) if size is None else size

    @property
    def remainder(self) -> int:
        """The new samples of all ranks in the last step; 0 when all have full batches, -1 when nobody knows."""
        last, contribution = self.last_step, self.contribution
        if last is not None:
            return sum(last.real)
        size = self.total_batch_size
        if contribution is not None:
            is_short = size is None or len(contribution.update) < size
            return len(contribution.samples) * self._world.world_size if is_short else 0
        try:
            return -1 if size is None or self.original.drop_last else self.total_dataset_length % size
        except (TypeError, NotImplementedError):  # a dataset without a length
            return -1

    @property
    def holds_no_update(self) -> bool:
        """Is the batch in hand a part of the user's, or more than one (exact modes, in an evaluation)?"""
        contribution = self.contribution
        assert contribution is not None
        assert isinstance(self.source, ExactSource)
        size = self.source.batch_size
        return contribution.num_micro_steps > 1 or (size is not None and len(contribution.update) > size)

    def step_to_trim(self) -> LastStep | None:
        """Return ``last_step`` to somebody who leaves out what is not new: then nobody need be warned."""
        self._trims = True
        return self.last_step

    def _tell_loans(self) -> None:
        """Warn, once, of results that were taken without a look at what is on loan."""
        last, plan = self.last_step, self.plan
        if self._trims or last is None or plan is None or plan.trains or min(last.real) > 0:
            return
        self._trims = True
        idle = ", ".join(str(rank) for rank, num in enumerate(last.real) if num == 0)
        warn(
            f"a step of this evaluation has {sum(last.real)} samples for {len(last.real)} processes: each of rank(s) {idle} had "
            "one of another's on loan, which a sum over the batches counts again. Use accelerator.gather_for_metrics(...), "
            "or accelerator.trim_for_metrics(...) before adding up"
        )

    def require_every_rank(self, operation: str) -> None:
        """Raise when some ranks have no batch in this step, so that ``operation`` would wait for them for ever.

        It costs a look at ``last_step``: who has how much is known without asking.

        Raises:
            DesyncError: which ranks ended, and when.
        """
        last = self.last_step
        if last is None or not self._is_open or self.reading.joined or min(last.sizes) > 0:
            return
        ended = [rank for rank, size in enumerate(last.sizes) if size == 0]
        names = f"rank {ended[0]}" if len(ended) == 1 else f"ranks {', '.join(map(str, ended))}"
        raise DesyncError(
            f"{operation} in step {self.num_given} of this pass, and {names} ended after at most {self.num_given - 1} "
            f"batches: the ranks do not have the same number of batches (even_batches={self.even_batches})",
            where="the prepared DataLoader",
            do="use even_batches=True, or drop_last=True, or put the loop into accelerator.join_uneven_inputs([model])",
        )

    def refuse_short_window(self, operation: str, *, micro_step: int, num_steps: int) -> None:
        """Say that this rank ends in the middle of an update that the others go on with.

        Raises:
            DesyncError: always.
        """
        raise DesyncError(
            f"{operation} in step {self.num_given} of this pass, the last one of rank {self._world.rank}: its update ends here, "
            f"in micro-step {micro_step} of {num_steps} (gradient_accumulation_steps={num_steps}), and other ranks, which have "
            f"more batches, are in the middle of theirs (even_batches={self.even_batches})",
            where="the prepared DataLoader",
            do=f"use even_batches=True, or drop_last=True, or give each rank a multiple of {num_steps} batches",
        )

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next pass; passes count on from there by themselves."""
        if epoch != self.iteration:
            self.end_pass()
        self.iteration = epoch
        self._tell_epoch()

    def _tell_epoch(self) -> None:
        inner = self.inner
        if isinstance(self.source, OwnPartsSource):
            places: tuple[Any, ...] = (*samplers_of(inner), *self._cutters, inner.dataset)
        elif inner is self.original and not isinstance(inner.sampler, SupportsSetEpoch):
            places = (inner.dataset,)
        else:
            batches = inner.batch_sampler
            places = (batches, getattr(batches, "sampler", None), inner.sampler, inner.dataset)
        for place in places:
            if isinstance(place, SupportsSetEpoch):
                place.set_epoch(self.iteration)
        self._seen_epochs = self._epochs_of_cutters()

    def _follow_sampler(self) -> None:
        """Take over an epoch that the script has given to a sampler of its own, which cuts for the ranks.

        Every tutorial of DistributedSampler calls its ``set_epoch`` before each pass.
        """
        if not self._cutters:
            return
        epochs = self._epochs_of_cutters()
        changed = [epoch for epoch, seen in zip(epochs, self._seen_epochs) if epoch != seen]
        if changed:
            self.set_epoch(changed[0])

    def _epochs_of_cutters(self) -> list[int]:
        return [sampler.epoch for sampler in self._cutters]

    def get_sampler(self) -> Any:
        """Return the sampler that draws the order."""
        order = self.source.order
        return getattr(self.original.batch_sampler, "sampler", None) if order is None else order.sampler

    @property
    def shuffles(self) -> bool:
        """Is the order drawn by a RandomSampler?"""
        return isinstance(self.get_sampler(), RandomSampler)

    def set_sampler(self, sampler: Any) -> None:
        """Draw the order from another sampler.

        Raises:
            UsageError: the data has an order of its own, or another rank draws it.
        """
        if self.source.order is not None:
            self.source.order.sampler = sampler
        elif isinstance(self.source, PlainSource) and not isinstance(self.original.dataset, IterableDataset):
            owner: Any = self.original.batch_sampler
            owner.sampler = sampler
        else:
            raise UsageError("this loader draws no order that a sampler could replace", do="change its dataset instead")

    def skipping(self, num_batches: int) -> PreparedLoader:
        """Return a loader as this one, whose passes begin ``num_batches`` steps later."""
        skipping = type(self)(
            self.source,
            self.original,
            world=self._world,
            options=self._options,
            reading=self.reading,
            device=self.device,
            skip_batches=self.skip_batches + num_batches,
        )
        skipping.__dict__.update(iteration=self.iteration, _even=self._even)
        return skipping

    # ---- saving and resuming a pass ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return where this pass is: after the batch given last (the loader inside has read one more).

        Raises:
            UsageError: the loader was not made for it.
        """
        if isinstance(self.source, ExactSource):
            return dict(self._state or self._resume or {"epoch": self.iteration, "position": 0, "source": None})
        self._require_state_dict()
        return self._snapshot(None) if self._state is None else dict(self._state)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the next pass go on where ``state_dict`` was taken; after the last batch, begin the next epoch.

        Raises:
            UsageError: the loader was not made for it.
        """
        if isinstance(self.source, ExactSource):
            self.iteration, self._state = state_dict["epoch"], None
            self._resume = None if state_dict["source"] is None else dict(state_dict)  # None: no pass had begun
            return
        self._require_state_dict()
        state = dict(state_dict)
        self.iteration = state["iteration"]
        self._resume = None if state["_iterator_finished"] or not state["num_given"] else state
        self._state = None
        if state["_iterator_finished"]:
            self.iteration += 1

    def order_state(self) -> dict[str, Any]:
        """Return what the order of the next pass depends on, beside torch's own random state; within a pass, of this one.

        It does not say how far the pass has come: that is ``state_dict``, or ``skip_first_batches`` after loading.
        """
        reader = self._reader()
        if isinstance(self.source, ExactSource):
            exact = (self if reader is None else reader).state_dict()
            return {"exact": exact, "pass": self.record(), "data": self.data_facts().to_json()}
        is_within = reader is not None and not reader.end_of_dataloader
        order = self.source.order
        return {
            "iteration": self.iteration if reader is None else reader.iteration + (not is_within),
            "is_within": is_within,
            "order": order.state() if order is not None and (is_within or order.is_seedable) else None,
            "generators": [generator.get_state() for generator in self._generators()],
            "pass": self.record(),
            "data": self.data_facts().to_json(),
        }

    def data_facts(self) -> DataFacts:
        """Return what a place in a pass of this loader depends on; of data that another rank reads, what is known here."""
        num_samples = None
        if isinstance(self.source, (DispatchSource, ExactDispatchSource)):
            num_samples = self.source.total_samples
            if not self._world.is_rank_zero:
                return DataFacts(
                    num_samples=None if num_samples < 0 else num_samples, batch_size=self.source.batch_size
                )
        elif isinstance(self.source, OwnPartsSource) and not self._world.is_rank_zero:
            return DataFacts(batch_size=self._batch_size())  # its part is another one than rank zero's
        found = facts_of_data(
            self.original,
            sampler=self.get_sampler(),
            batches=batches_of(self.original),
            num_samples=num_samples,
            split_batches=self.split_batches,
            exact=self._options.exact,
        )
        # What a dataset changes by itself (an order that it draws in set_epoch, a cache) says nothing of whose data it is.
        known = self._data_facts
        if known is not None and known.num_samples == found.num_samples:
            found = found.with_stable_columns(known)
        self.__dict__["_data_facts"] = found
        # Checkpoints have rank zero's. Datasets that each rank makes by itself (without a seed, say) differ from rank to rank.
        return found if self._world.is_rank_zero else replace(found, columns=None)

    def load_order_state(self, state: dict[str, Any]) -> None:
        """Let the next pass have the order that ``order_state`` was taken of."""
        self._loaded, self._goes_on = state.get("pass"), False
        if "exact" in state or isinstance(self.source, ExactSource):
            exact = state.get("exact")
            if exact is not None and isinstance(self.source, ExactSource):
                self.load_state_dict(exact)
            else:  # of another parity: the epoch is what they share
                self.iteration = state["iteration"] if exact is None else exact["epoch"]
            return
        self.iteration = state["iteration"]
        self.source.goes_on = state["is_within"]
        for generator, saved in zip(self._generators(), state["generators"]):
            generator.set_state(saved)
        if self.source.order is not None:
            self.source.order.pin(state["order"])

    # ---- going on in the middle of a pass ----------------------------------------------------------------------------

    def record(self) -> dict[str, Any] | None:
        """Return how far the pass begun last has come, here or before a checkpoint was loaded; None: none was begun.

        A pass that was left by ``break`` is not over: it is until another one begins, or ``end_pass`` ends it.
        """
        noted = None if self.reading.book is None else self.reading.book.begun_update(self)
        return noted or self.record_now()

    def record_now(self, *, num_unused: int = 0) -> dict[str, Any] | None:
        """Return ``record`` without regard to half an update; the last ``num_unused`` batches count as not given."""
        reader = self._reader()
        reader = self if reader is None else reader
        if reader._facts is None or reader._loaded is not None:
            return self._loaded
        is_within = reader._is_open and not reader.end_of_dataloader
        order = self.source.order
        return {
            "epoch": reader._facts.epoch,
            "trains": reader._facts.trains,
            "outlives_epochs": reader._facts.outlives_epochs,
            "is_within": is_within,
            "is_read": reader in self.reading.loaders,
            "is_exact": isinstance(self.source, ExactSource),
            "iteration": reader.iteration,
            "num_given": reader.num_given - num_unused if is_within else 0,
            "order": order.state() if is_within and order is not None else None,
            "world_size": self._world.world_size,
        }

    def _reader(self) -> PreparedLoader | None:
        """Return the innermost loader, of those that are being read, over the same source as this one."""
        loader: PreparedLoader
        for loader in reversed(self.reading.loaders):  # in each update: a generator takes several times as long
            if loader.source is self.source:
                return loader
        return None

    def draws(self, *, num_unused: int = 0) -> dict[str, Any] | None:
        """Return what the batch after the one in hand was drawn from on this rank; None outside of a pass.

        The last ``num_unused`` batches count as not given.
        """
        if self._goes_on:  # and has not begun to
            return self._draws_before
        reader = self._reader()
        reader = self if reader is None else reader
        if reader._draws is None or not reader._is_open:
            return None
        workers = self.source.workers
        if workers is None:
            return reader._draws.noted
        given = (reader.num_given - num_unused) * self.source.batches_per_step
        return {**reader._draws.noted, "workers": workers.state(given)}

    def load_draws(self, draws: dict[str, Any] | None) -> None:
        """Read the first batch of a pass that goes on with the draws that ``draws`` was taken of."""
        self._draws_before = draws

    def go_on(self) -> None:
        """Let the next pass be the rest of the one of ``record``: nothing, if that was read to its end.

        Raises:
            CheckpointError: it was saved by another number of processes, or with another ``parity``.
        """
        if self._loaded is None:
            self._loaded, self._resume = self.record_now(), self._resume or self._state
        record = self._loaded
        if record is not None and record["is_within"]:
            self._require_same_place(record)
            if not isinstance(self.source, ExactSource):
                self.iteration = record["iteration"]
        self._goes_on = record is not None

    def _require_same_place(self, record: dict[str, Any]) -> None:
        is_exact, num_saved = isinstance(self.source, ExactSource), record["world_size"]
        if record["is_exact"] is not is_exact:
            raise CheckpointError(
                "the checkpoint is of the middle of an epoch, which parity='off' counts in another way than the exact modes",
                do="resume with the parity that it was saved with",
            )
        if not is_exact and num_saved != self._world.world_size:
            raise CheckpointError(
                f"the checkpoint is of the middle of an epoch on {num_saved} processes, and here are {self._world.world_size}: "
                "samples would come twice, or never",
                where="parity='off'",
                do=f"resume on {num_saved} processes, or train with parity='exact', which goes on with any number",
            )

    def end_pass(self) -> None:
        """Let the next pass begin at its beginning, however far the one begun last has come."""
        record, self._loaded, self._goes_on = self._loaded, None, False
        if record is not None:
            self._facts = _facts_of(record)
            if record["is_within"] and record["is_read"]:  # the run that was saved has read it to its end
                self.iteration = record["iteration"] + 1
        self._is_open = False
        self._resume = self._draws_before = None
        if isinstance(self.source, ExactSource):
            self._state = None
        self.source.goes_on = False
        if self.source.order is not None:
            self.source.order.unpin()

    def enter_epoch(self, epoch: int) -> None:
        """Epoch ``epoch`` begins: so does the next pass, in the order of that epoch, or of a later one if it was ahead.

        A pass that is being read goes on into the epoch, and so does one that was to ``go_on``.
        """
        reader = next((r for r in self.reading.loaders if r.source is self.source), None)
        if reader is not None and reader._facts is not None:
            reader._facts = replace(reader._facts, epoch=epoch, outlives_epochs=True)
        elif not self._goes_on:
            if (
                self.facts is not None
            ):  # else nobody knows of a pass, but a position of Accelerate's may have been loaded
                self.end_pass()
            if self.iteration < epoch:
                self.set_epoch(epoch)

    def _generators(self) -> list[torch.Generator]:
        """Return the user's own generators, each once."""
        sampler = getattr(self.original.batch_sampler, "sampler", self.original.sampler)
        owned = (self.original.generator, getattr(sampler, "generator", None))
        return list({id(g): g for g in owned if isinstance(g, torch.Generator)}.values())

    @property
    def is_stateful(self) -> bool:
        """Can ``state_dict`` say how far a pass has come?"""
        if isinstance(self.source, ExactSource):
            return False  # a position is a part of the order's state
        return self._options.use_stateful_dataloader or isinstance(self.original, SupportsStateDict)

    def _inner_state(self) -> dict[str, Any]:
        """Return the state of the loader inside; empty where another rank reads."""
        return self.inner.state_dict() if isinstance(self.inner, SupportsStateDict) else {}

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

    # ---- reading -----------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        if isinstance(self.source, ExactSource):
            return max(self.source.num_planned(self._plan_pass()) - self.skip_batches, 0)
        return max(self.source.num_steps() - self.skip_batches, 0)

    def _plan_pass(self) -> PassPlan:
        driver = self.reading.driver
        return PassPlan() if driver is None else driver.plan_pass()

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self.reading.metrics.begin_pass()
        self._follow_sampler()
        going_on = self._loaded if self._goes_on else None
        self._loaded, self._goes_on = None, False
        if going_on is not None and not going_on["is_within"]:
            self._facts = _facts_of(going_on)
            return  # this pass was read to its end before
        if self._data_facts is None:  # before the dataset is told the epoch, as it will be when a checkpoint is loaded
            self.data_facts()
        if self._world.world_size > 1:
            synchronize_rng_states([kind for kind in self._options.rng_types if kind != "generator"])
        self._tell_epoch()
        self.end_of_dataloader = self.ends_early = False
        self.last_step = None
        loaders, book = self.reading.loaders, self.reading.book
        loaders.append(self)
        is_over = False
        try:
            device, non_blocking = self.device, self._options.non_blocking
            is_saved = self.is_stateful
            self._facts = None if book is None else book.begin_pass(self)
            # One batch ahead: the last one is known as such while it is being used.
            notes = notes_of_process()
            if notes is not None:
                notes.phase(Phase.DATA)
            steps, step = self._open(going_on)
            first_pass, self.source.first_pass = self.source.first_pass, None
            draws, draws_again = self._draws, self._draws is not None and self._draws.is_of_a_batch
            self._is_open = True
            num_before = self.reading.metrics.num_collectives() if self._world.world_size > 1 else None
            while step is not _END:
                batch, facts = step
                self.num_given += 1
                if first_pass is not None and not first_pass.note(batch):
                    first_pass = None
                self.reading.note_giving(self)
                if book is not None:
                    book.begin_batch(self)
                inner_state = self._inner_state() if is_saved else None
                if draws_again:
                    assert draws is not None
                    draws.take()
                if notes is not None:
                    notes.phase(Phase.DATA)
                step = next(steps, _END)
                if notes is not None:
                    notes.phase(Phase.TRAIN if torch.is_grad_enabled() else Phase.EVALUATE)
                if draws_again:
                    assert draws is not None
                    draws.end_batch()
                if step is _END:
                    self.end_of_dataloader = True
                    facts = facts or self.source.at_end()
                    self.ends_early = self.source.ended_early
                if isinstance(facts, Contribution):
                    self._note(facts)
                else:
                    self.last_step = facts
                if is_saved:
                    self._state = {**self._snapshot(inner_state), "_iterator_finished": self.end_of_dataloader}
                yield batch if device is None else to_device(batch, device, non_blocking=non_blocking)
                if book is not None:
                    book.end_batch(self)
                if self.contribution is not None:
                    self._tell_loans()
            if first_pass is not None:
                first_pass.end()
            self.iteration += 1
            self._is_open = False
            self.reading.metrics.note_pass(self._length, num_before)
            if self.contribution is not None:
                self._state = None  # the next pass begins at its beginning
            is_over = True
        finally:  # also after a break or an error in the loop
            loaders.remove(self)
            if self.reading.driver is not None:
                self.reading.driver.end_pass(self, is_over=is_over)

    def _note(self, contribution: Contribution) -> None:
        """The batch in hand is ``contribution``."""
        self.contribution = contribution
        self.last_step = contribution.step
        assert isinstance(self.source, ExactSource)
        assert self.plan is not None
        if self.end_of_dataloader and contribution.ends_update:
            self._state = {"epoch": self.iteration + 1, "position": 0, "source": None}
        else:
            position = contribution.next_position
            self._state = {"epoch": self.iteration, "position": position, "source": self.source.state(position)}
        if self.plan.trains and self.reading.driver is not None:
            self.reading.driver.begin_micro_step(self, contribution)

    def _begin_exact(self, source: ExactSource) -> Steps:
        resumed, self._resume = self._resume, None
        self.num_given = self.skip_batches
        driver = self.reading.driver
        self.plan = PassPlan() if driver is None else driver.plan_pass(self)
        if self.reading.driver is not None:
            self.reading.driver.begin_pass(self, self.plan)
        source.begin(
            self.plan,
            epoch=self.iteration,
            position=0 if resumed is None else resumed["position"],
            resumed=None if resumed is None else resumed["source"],
        )
        return source.steps(self.skip_batches)

    def _open(self, going_on: dict[str, Any] | None) -> tuple[Steps, Any]:
        """Begin a pass, and return its steps and the first of them.

        The first batch of one that goes on is read with the random numbers that it was read with before; then those are
        put back.
        """
        if isinstance(self.source, ExactSource):
            self._draws = None  # draws depend on the place alone
            steps = self._begin()
            return steps, next(steps, _END)
        self._draws = HostDraws(self._generators(), is_of_a_batch=self._draws_by_batch, others=self._other_draws)
        before, self._draws_before = self._draws_before, None
        if going_on is None:
            self._draws.take()
            steps = self._begin()
            step = next(steps, _END)
            self._draws.end_batch()
            return steps, step
        began = time.monotonic()
        with self._draws.put_back():
            if before is not None:
                self._draws.go_back_to(before)
            # What is drawn for a whole pass is drawn again where nothing stands between; else it was noted.
            begins_again = before is not None and not (self._draws.is_of_a_batch and going_on["num_given"])
            if before is not None and "workers" in before and self.source.workers is not None:
                self.source.workers.load(before["workers"])
            steps = self._begin(going_on, begins_again=begins_again)
            step = next(steps, _END)
        self._tell_replay(going_on["num_given"], time.monotonic() - began)
        return steps, step

    @property
    def _draws_by_batch(self) -> bool:
        """Does this process read the samples, and need nothing that was drawn earlier in the pass to do so?"""
        is_iterable = isinstance(self.original.dataset, IterableDataset)
        in_order = isinstance(self.get_sampler(), SequentialSampler)
        return not is_iterable and not self.inner.num_workers and (self.source.order is not None or in_order)

    def _tell_replay(self, num_batches: int, seconds: float) -> None:
        is_iterable = isinstance(self.original.dataset, IterableDataset)
        if is_iterable and not self.is_stateful and self._world.is_rank_zero:
            warn(
                f"{num_batches} batches of iterable data were read again in {seconds:.1f} s, to go on after them: "
                "DataLoaderConfiguration(use_stateful_dataloader=True) goes there at once, if the dataset has state_dict and "
                "load_state_dict"
            )

    def _begin(self, going_on: dict[str, Any] | None = None, *, begins_again: bool = False) -> Steps:
        if self.inner.num_workers:
            settle_before_fork()
        if isinstance(self.source, ExactSource):
            return self._begin_exact(self.source)
        resumed, self._resume = self._resume, None
        if resumed is None:
            self.num_given = self.skip_batches
            if going_on is not None:
                self.num_given = going_on["num_given"]
                self.source.goes_on = not begins_again
                if self.source.order is not None:
                    self.source.order.unpin()
                    self.source.order.pin(None if begins_again else going_on["order"])
            return self.source.steps(self.num_given)
        self.num_given = self.source.num_behind = resumed["num_given"]
        if self.source.order is not None:
            self.source.order.pin(resumed["order"])
        if isinstance(self.inner, SupportsStateDict):
            self.inner.load_state_dict(resumed["inner"])
        return self.source.steps(0)

    def __getattr__(self, name: str) -> Any:
        if name in ("source", "original"):
            raise AttributeError(name)  # not there yet (unpickling)
        return getattr(self.original, name)


class DispatchedLoader(PreparedLoader):
    """A prepared loader that rank zero reads for all (a class of its own because scripts ask for it)."""


def _facts_of(record: dict[str, Any]) -> PassFacts:
    return PassFacts(epoch=record["epoch"], trains=record["trains"], outlives_epochs=record["outlives_epochs"])


_END: Any = object()
