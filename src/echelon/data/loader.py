"""The loader that ``prepare`` returns: the user's DataLoader, sharded, that knows when its last batch is in use."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from echelon.base.errors import DesyncError
from echelon.base.protocols import SupportsSetEpoch, SupportsStateDict
from echelon.base.warnings import warn
from echelon.data.active_loaders import ActiveLoaders, LoaderOptions, PassFacts
from echelon.data.data_facts import DataFacts, facts_of_data
from echelon.data.exact.exact_batches import PassPlan
from echelon.data.exact.global_batch_slices import Contribution, LastStep
from echelon.data.pass_position import END, PassPosition
from echelon.data.rng.host_rng import synchronize_rng_states
from echelon.data.sharding.batch_source import BatchSource, batches_of
from echelon.data.to_device import to_device
from echelon.distributed.checks.already_sharded import SamplerEpochs
from echelon.distributed.checks.ungathered_metrics import DatasetLength
from echelon.status.board import Phase
from echelon.status.notes import notes_of_process
from echelon.world.world import World

__all__ = ["DispatchedLoader", "PreparedLoader"]


class PreparedLoader(DataLoader[Any]):
    """A DataLoader whose batches come from ``source``; unknown attributes are those of the user's loader.

    Args:
        position: of this loader in its passes.
        original: the user's loader.
        world: this rank.
        options: how it is sharded.
        active: where the loader is listed while it is read.
        device: batches are moved there; None: the source does, or nobody.
        skip_batches: steps left out at the beginning of every pass.
    """

    def __init__(
        self,
        position: PassPosition,
        original: DataLoader[Any],
        *,
        world: World,
        options: LoaderOptions,
        active: ActiveLoaders[PreparedLoader],
        device: torch.device | None,
        skip_batches: int = 0,
    ) -> None:
        # DataLoader's own __init__ is not called: this object holds a loader, it does not read by itself.
        self.source: BatchSource = position.source
        self.original = original
        self.active = active
        self.device = device
        self.skip_batches = skip_batches
        self.end_of_dataloader = False
        """The current batch is the last one of this rank."""
        self.ends_early = False
        """It is, and other ranks have at least one more."""
        self.last_step: LastStep | None = None
        """What each rank has of the current step; None when each has equally many samples, all new."""
        self.contribution: Contribution | None = None
        """What the current batch is in its update (exact modes)."""
        self.plan: PassPlan | None = None
        """What the pass that started last is for (exact modes)."""
        self._position = position
        self._even = options.even_batches
        self._options = options
        self._world = world
        self._length = DatasetLength()
        self._has_trimmed = False
        self._data_facts: DataFacts | None = None
        self._epochs = SamplerEpochs(original)

    # ---- what scripts read ---------------------------------------------------------------------------------------------

    @property
    def inner(self) -> DataLoader[Any]:
        """The loader that reads on this rank."""
        return self.source.inner

    @property
    def base_dataloader(self) -> DataLoader[Any]:
        """``inner`` under Accelerate's name."""
        return self.inner

    @property
    def iteration(self) -> int:
        """The epoch of the next pass; it counts the passes that were read to their end."""
        return self._position.iteration

    @iteration.setter
    def iteration(self, epoch: int) -> None:
        self._position.iteration = epoch

    @property
    def num_given(self) -> int:
        """Batches yielded in this pass, with those that were skipped at its beginning."""
        return self._position.num_given

    @property
    def facts(self) -> PassFacts | None:
        """Of the pass that started last; None: none has, or no tracker records passes."""
        loaded = self._position.loaded
        return self._position.facts if loaded is None else PassFacts.from_record(loaded)

    @property
    def dataset(self) -> Any:  # type: ignore[override]
        """The user's, whole; an evaluation that is divided by its length without a gather is warned about."""
        if self._world.world_size > 1:
            self._length.note_access()
        return self.original.dataset

    @property
    def gradient_state(self) -> Any:
        """The counters of the Accelerator that it was prepared for; None without one."""
        return self.active.owner

    @property
    def rng_types(self) -> list[str]:
        """The RNG states that every rank takes from rank zero at the beginning of a pass."""
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
        return self._even

    @even_batches.setter
    def even_batches(self, even: bool) -> None:
        self._even = even
        self.source.set_even(even)

    @property
    def split_batches(self) -> bool:
        """Is the user's batch split between the ranks?"""
        return self._options.split_batches

    @property
    def total_batch_size(self) -> int | None:
        """Samples of all ranks in one step (exact modes: in one update)."""
        size = self.source.batch_size
        is_global = self.split_batches or self.is_exact
        return size if size is None or is_global else size * self._world.world_size

    @property
    def total_dataset_length(self) -> int:
        """Samples of the dataset.

        Raises:
            TypeError: it has no length.
        """
        return self.source.dataset_length(self.original.dataset)

    @property
    def is_exact(self) -> bool:
        """Are its batches global ones, as in the exact modes?"""
        return self._position.is_exact

    @property
    def is_stateful(self) -> bool:
        """Can ``state_dict`` be saved in the middle of a pass? (In the exact modes ``order_state`` holds the position.)"""
        return self._position.is_stateful

    @property
    def remainder(self) -> int:
        """The new samples of all ranks in the last step; 0 when all have full batches, -1 when it is not known."""
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

    # ---- the current step ----------------------------------------------------------------------------------------------

    @property
    def holds_no_update(self) -> bool:
        """Is the current batch a part of the user's, or more than one (exact modes, in an evaluation)?"""
        contribution, size = self.contribution, self.source.batch_size
        assert contribution is not None
        return contribution.num_micro_steps > 1 or (size is not None and len(contribution.update) > size)

    def step_to_trim(self) -> LastStep | None:
        """Return ``last_step`` to a caller who removes the padding samples: then no warning is needed."""
        self._has_trimmed = True
        return self.last_step

    def _warn_of_padding(self) -> None:
        """Warn, once, of an evaluation whose padding samples are not removed."""
        last, plan = self.last_step, self.plan
        if self._has_trimmed or last is None or plan is None or plan.trains or min(last.real) > 0:
            return
        self._has_trimmed = True
        idle = ", ".join(str(rank) for rank, num in enumerate(last.real) if num == 0)
        warn(
            f"a step of this evaluation has {sum(last.real)} samples for {len(last.real)} processes: rank(s) {idle} received a "
            "padding sample; summing per-batch results counts it twice. Use accelerator.gather_for_metrics(...), or "
            "accelerator.trim_for_metrics(...) before summing"
        )

    def require_every_rank(self, operation: str) -> None:
        """Raise when some ranks have no batch in this step, so that ``operation`` would hang.

        It communicates nothing: ``last_step`` knows the batches of all ranks.

        Raises:
            DesyncError: which ranks ended, and when.
        """
        last = self.last_step
        if last is None or not self._position.is_open or self.active.joined or min(last.sizes) > 0:
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
        """Raise because this rank ends in the middle of an update that other ranks continue.

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

    # ---- the order -----------------------------------------------------------------------------------------------------

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next pass; later passes count on from there."""
        if epoch != self.iteration:
            self.end_pass()
        self.iteration = epoch
        self._set_epoch_of_samplers()

    def _set_epoch_of_samplers(self) -> None:
        for owner in self.source.owners_of_epoch(self.original):
            if isinstance(owner, SupportsSetEpoch):
                owner.set_epoch(self.iteration)
        self._epochs.record()

    def get_sampler(self) -> Any:
        """Return the sampler that draws the order."""
        return self.source.sampler_of(self.original)

    @property
    def shuffles(self) -> bool:
        """Is the order drawn by a RandomSampler?"""
        return isinstance(self.get_sampler(), RandomSampler)

    def set_sampler(self, sampler: Any) -> None:
        """Draw the order from another sampler.

        Raises:
            UsageError: the data has an order of its own, or another rank draws it.
        """
        self.source.set_sampler(sampler, self.original)

    def skipping(self, num_batches: int) -> PreparedLoader:
        """Return a loader like this one, whose passes begin ``num_batches`` steps later."""
        skipping = type(self)(
            self._position.renew(),
            self.original,
            world=self._world,
            options=self._options,
            active=self.active,
            device=self.device,
            skip_batches=self.skip_batches + num_batches,
        )
        skipping._even = self._even
        return skipping

    # ---- saving and resuming a pass ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the position in this pass: after the batch yielded last (the loader inside has read one more).

        Raises:
            UsageError: the loader cannot be saved in the middle of a pass.
        """
        return self._position.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the next pass continue where ``state_dict`` was called; after the last batch, with the next epoch.

        Raises:
            UsageError: the loader cannot be saved in the middle of a pass.
        """
        self._position.load_state_dict(state_dict)

    def order_state(self) -> dict[str, Any]:
        """Return what the order of the next pass depends on, beside torch's own RNG state; within a pass, of this one.

        Where the pass is at the moment is in ``state_dict`` (or up to ``skip_first_batches`` after loading).
        """
        reader = self._reader()
        is_read = reader in self.active.loaders
        return {
            **reader._position.order_state(is_read=is_read, is_within=is_read and not reader.end_of_dataloader),
            "pass": self.record(),
            "data": self.data_facts().to_json(),
        }

    def load_order_state(self, state: dict[str, Any]) -> None:
        """Let the next pass have the order of ``order_state``."""
        self._position.loaded, self._position.resumes = state.get("pass"), False
        self._position.load_order_state(state)

    def data_facts(self) -> DataFacts:
        """Return what a position in a pass of this loader depends on; of data that another rank reads, what is known here."""
        elsewhere = self.source.facts_elsewhere()
        if elsewhere is not None:
            return elsewhere
        found = facts_of_data(
            self.original,
            sampler=self.get_sampler(),
            batches=batches_of(self.original),
            split_batches=self.split_batches,
            exact=self._options.exact,
        )
        # What a dataset changes by itself (an order that it draws in set_epoch, a cache) does not identify its data.
        known = self._data_facts
        if known is not None and known.num_samples == found.num_samples:
            found = found.with_stable_columns(known)
        self._data_facts = found
        # Checkpoints have rank zero's. Datasets that each rank makes by itself (without a seed, say) differ from rank to rank.
        return found if self._world.is_rank_zero else replace(found, columns=None)

    def record(self) -> dict[str, Any] | None:
        """Return how far the pass that started last has come, here or before a checkpoint was loaded; None: none has.

        A pass that was left by ``break`` is not over: it is until another one starts, or ``end_pass`` ends it.
        """
        tracked = None if self.active.tracker is None else self.active.tracker.begun_update(self)
        return tracked or self.record_now()

    def record_now(self, *, num_unused: int = 0) -> dict[str, Any] | None:
        """Return ``record`` without regard to an unfinished update; the last ``num_unused`` batches count as not yielded."""
        reader = self._reader()
        position = reader._position
        found = position.record(
            is_read=reader in self.active.loaders,
            is_within=position.is_open and not reader.end_of_dataloader,
            num_unused=num_unused,
        )
        return self._position.loaded if found is None else found

    def _reader(self) -> PreparedLoader:
        """Return the innermost loader, of those that are being read, over the same source as this one; else this one."""
        for loader in reversed(self.active.loaders):  # in each update: a generator takes several times as long
            if loader.source is self.source:
                return loader
        return self

    def rng_state(self, *, num_unused: int = 0) -> dict[str, Any] | None:
        """Return what the batch after the current one was drawn from on this rank; None outside of a pass.

        The last ``num_unused`` batches count as not yielded.
        """
        if self._position.resumes:  # and has not started
            return self._position.resumed_rng_state
        return self._reader()._position.rng_state(num_unused=num_unused)

    def load_rng_state(self, draws: dict[str, Any] | None) -> None:
        """Read the first batch of a resumed pass with the random numbers of ``draws``."""
        self._position.load_rng_state(draws)

    def resume_pass(self) -> None:
        """Let the next pass be the rest of the one of ``record``: empty, if that was read to its end.

        Raises:
            CheckpointError: it was saved on another number of processes, or with another ``parity``.
        """
        self._position.resume_pass(self.record_now())

    def end_pass(self) -> None:
        """Let the next pass start at its beginning, however far the last one has come."""
        self._position.end_pass()

    def enter_epoch(self, epoch: int) -> None:
        """Epoch ``epoch`` begins: so does the next pass, in the order of that epoch, or of a later one if it was ahead.

        A pass that is being read continues into the epoch, and so does one that is to be resumed.
        """
        reader = next((r for r in self.active.loaders if r.source is self.source), None)
        position = None if reader is None else reader._position
        if position is not None and position.facts is not None:
            position.facts = replace(position.facts, epoch=epoch, outlives_epochs=True)
        elif not self._position.resumes:
            if self.facts is not None:  # else no pass is recorded, but a position of Accelerate's may have been loaded
                self.end_pass()
            if self.iteration < epoch:
                self.set_epoch(epoch)

    # ---- reading -----------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return max(self._position.num_steps(self._plan_pass) - self.skip_batches, 0)

    def _plan_pass(self) -> PassPlan:
        driver = self.active.driver
        return PassPlan() if driver is None else driver.plan_pass()

    def _begin_planned_pass(self) -> PassPlan:
        driver = self.active.driver
        self.plan = PassPlan() if driver is None else driver.plan_pass(self)
        if driver is not None:
            driver.begin_pass(self, self.plan)
        return self.plan

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        active, position, source = self.active, self._position, self.source
        active.metrics.begin_pass()
        changed = self._epochs.changed()
        if changed is not None:
            self.set_epoch(changed)
        resumed_from = position.loaded if position.resumes else None
        position.loaded, position.resumes = None, False
        if resumed_from is not None and not resumed_from["is_within"]:
            position.facts = PassFacts.from_record(resumed_from)
            return  # this pass was read to its end before
        if self._data_facts is None:  # before the dataset gets its epoch, as it will when a checkpoint is loaded
            self.data_facts()
        if self._world.world_size > 1:
            synchronize_rng_states([kind for kind in self._options.rng_types if kind != "generator"])
        self._set_epoch_of_samplers()
        self.end_of_dataloader = self.ends_early = False
        self.last_step = None
        loaders, tracker = active.loaders, active.tracker
        loaders.append(self)
        is_over = False
        try:
            device, non_blocking = self.device, self._options.non_blocking
            is_saved = self.is_stateful
            position.facts = None if tracker is None else tracker.begin_pass(self)
            # One batch ahead: the last one is known as such while it is being used.
            notes = notes_of_process()
            if notes is not None:
                notes.phase(Phase.DATA)
            steps, step = position.open(self.skip_batches, self._begin_planned_pass, resumed_from)
            first_pass, source.first_pass = source.first_pass, None
            draws = position.draws if position.draws is not None and position.draws.is_of_a_batch else None
            position.is_open = True
            num_before = active.metrics.num_collectives() if self._world.world_size > 1 else None
            while step is not END:
                batch, facts = step
                position.num_given += 1
                if first_pass is not None and not first_pass.add(batch):
                    first_pass = None
                active.make_innermost(self)
                if tracker is not None:
                    tracker.begin_batch(self)
                inner_state = self._inner_state() if is_saved else None
                if draws is not None:
                    draws.take()
                if notes is not None:
                    notes.phase(Phase.DATA)
                step = next(steps, END)
                if notes is not None:
                    notes.phase(Phase.TRAIN if torch.is_grad_enabled() else Phase.EVALUATE)
                if draws is not None:
                    draws.end_batch()
                if step is END:
                    self.end_of_dataloader = True
                    facts = facts or source.at_end()
                    self.ends_early = source.ended_early
                self._note_step(facts, inner_state)
                yield batch if device is None else to_device(batch, device, non_blocking=non_blocking)
                if tracker is not None:
                    tracker.end_batch(self)
                if self.contribution is not None:
                    self._warn_of_padding()
            if first_pass is not None:
                first_pass.end()
            position.close()
            active.metrics.end_pass(self._length, num_before)
            is_over = True
        finally:  # also after a break or an error in the loop
            loaders.remove(self)
            if active.driver is not None:
                active.driver.end_pass(self, is_over=is_over)

    def _inner_state(self) -> dict[str, Any]:
        """Return the state of the loader inside; empty where another rank reads."""
        return self.inner.state_dict() if isinstance(self.inner, SupportsStateDict) else {}

    def _note_step(self, facts: LastStep | Contribution | None, inner_state: dict[str, Any] | None) -> None:
        """A batch is about to be yielded, of which the ranks have ``facts``."""
        if not isinstance(facts, Contribution):
            self.last_step = facts
            self._position.note_batch(None, inner_state, self.end_of_dataloader)
            return
        self.contribution = facts
        self.last_step = facts.step
        self._position.note_batch(facts, inner_state, self.end_of_dataloader)
        assert self.plan is not None
        if self.plan.trains and self.active.driver is not None:
            self.active.driver.begin_micro_step(self, facts)

    def __getattr__(self, name: str) -> Any:
        if name in ("source", "original"):
            raise AttributeError(name)  # not set yet (unpickling)
        return getattr(self.original, name)


class DispatchedLoader(PreparedLoader):
    """A prepared loader that rank zero reads for all (a class of its own because scripts ask for it)."""
