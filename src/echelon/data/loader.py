"""The loader returned by ``prepare``: the user's DataLoader with sharding, position tracking and end-of-data detection."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from echelon.base.errors import DesyncError
from echelon.base.lengths import length_of
from echelon.base.messages.translation import gettext as _
from echelon.base.protocols import SupportsStateDict
from echelon.base.warnings import warn
from echelon.data.active_loaders import ActiveLoaders, LoaderOptions, PassFacts
from echelon.data.batch import agreed_num_samples
from echelon.data.data_facts import DataFacts, facts_of_data
from echelon.data.fetched_batches import FetchedBatches
from echelon.data.global_batch_slices import Contribution, LastStep, PassPlan
from echelon.data.pass_observers import observers_of_pass
from echelon.data.pass_position import END, PassPosition
from echelon.data.rng.host_rng import synchronize_rng_states
from echelon.data.sharding.batch_source import BatchSource, batches_of
from echelon.distributed.checks.already_sharded import SamplerEpochs, set_epoch
from echelon.distributed.checks.ungathered_metrics import DatasetAccess
from echelon.distributed.structure import send_batch_to_device
from echelon.distributed.uncompiled import uncompiled_generator
from echelon.status.board import Phase
from echelon.status.notes import note_phase
from echelon.world.world import World


class PreparedLoader(DataLoader[Any]):
    """A DataLoader whose batches come from ``position.source``. Other attributes are forwarded to the user's loader.

    Args:
        device: device that batches are moved to. If None, batches are not moved here.
        skips_for: the loader of which this one is a copy that skips batches, if it is. A complete pass over the copy counts as
            one over that loader.
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
        skips_for: PreparedLoader | None = None,
    ) -> None:
        # DataLoader.__init__ is not called, because `source.inner` reads the data.
        self.source: BatchSource = position.source
        self.original = original
        self.active = active
        self.device = device
        self.skip_batches = skip_batches
        self.skips_for = skips_for
        self.end_of_dataloader = False
        """Whether the current batch is this rank's last batch."""
        self.ends_early = False
        """Whether the current batch is this rank's last batch, but other ranks have more."""
        self.last_step: LastStep | None = None
        """All ranks' batch sizes in the current step, or None if they are equal and all samples are new."""
        self.contribution: Contribution | None = None
        """The current batch's contribution to its update (exact modes)."""
        self.plan: PassPlan | None = None
        """The plan for the latest pass (exact modes)."""
        self.fetched = FetchedBatches()
        """The batches that were fetched in training passes, if an update may have several micro-steps."""
        self._position = position
        self._even = options.even_batches
        self._options = options
        self._world = world
        self._num_samples: int | None = None  # in the current batch, on a single process; None if it is full or unknown
        self._access = DatasetAccess()
        self._has_trimmed = False
        self._data_facts: DataFacts | None = None
        self._epochs = SamplerEpochs(original)

    # ---- attributes for scripts ----------------------------------------------------------------------------------------

    @property
    def inner(self) -> DataLoader[Any]:
        """The loader that reads data on this rank."""
        return self.source.inner

    @property
    def base_dataloader(self) -> DataLoader[Any]:
        """Accelerate's name for ``inner``."""
        return self.inner

    @property
    def iteration(self) -> int:
        """Epoch of the next pass, which increases with each completed pass."""
        return self._position.iteration

    @iteration.setter
    def iteration(self, epoch: int) -> None:
        self._position.iteration = epoch

    @property
    def data_rank(self) -> int:
        """Index of this rank among the ranks that read different samples."""
        return self._world.rank

    @property
    def num_given(self) -> int:
        """Number of batches yielded in this pass, including batches skipped at its start."""
        return self._position.num_given

    @property
    def facts(self) -> PassFacts | None:
        """Facts about the latest pass, or None if no pass has started or no tracker records passes."""
        loaded = self._position.loaded
        return self._position.facts if loaded is None else PassFacts.from_record(loaded)

    @property
    def dataset(self) -> Any:  # type: ignore[override]
        """The user's whole dataset. Do not use its length to average results that were not gathered."""
        if self._world.world_size > 1:
            self._access.record()
        return self.original.dataset

    @property
    def gradient_state(self) -> Any:
        """``GradientState`` of the Accelerator that prepared this loader, or None if there is no Accelerator."""
        return self.active.owner

    @property
    def rng_types(self) -> list[str]:
        """RNG states that are synchronized from rank zero when a pass starts."""
        return list(self._options.rng_types)

    @property
    def synchronized_generator(self) -> torch.Generator | None:
        """Generator used to draw the order, or None if the global generator is used or the order is fixed."""
        generator: torch.Generator | None = getattr(self.get_sampler(), "generator", None)
        return generator

    @property
    def batch_sampler(self) -> Any:  # type: ignore[override]
        """The batch sampler that this rank uses."""
        sampler = self.inner.sampler  # of DataLoader(sampler=BatchSampler(...), batch_size=None), the batch sampler
        return sampler if isinstance(sampler, BatchSampler) else self.inner.batch_sampler

    @property
    def even_batches(self) -> bool:
        """Whether the last step is padded, so that all ranks run the same number of steps. Can be set between passes."""
        return self._even

    @even_batches.setter
    def even_batches(self, even: bool) -> None:
        self._even = even
        self.source.set_even(even)

    def divide_last_step(self) -> bool:
        """Keep new and padding samples in separate batches, starting with the next pass. Return whether that changes the pass.

        The samples in an incomplete last step are divided evenly. Any remaining samples form another step with one sample per
        rank.
        """
        return self.source.divide_last_step()

    @property
    def split_batches(self) -> bool:
        """Whether each batch from the user's loader is split across ranks."""
        return self._options.split_batches

    @property
    def total_batch_size(self) -> int | None:
        """Number of samples in one step (in the exact modes, in one update), across all ranks."""
        size = self.source.batch_size
        is_global = self.split_batches or self.is_exact
        return size if size is None or is_global else size * self._world.world_size

    @property
    def total_dataset_length(self) -> int:
        """Number of samples in the dataset.

        Raises:
            TypeError: the dataset has no length.
        """
        return self.source.dataset_length(self.original.dataset)

    @property
    def is_exact(self) -> bool:
        """Whether batches are global, as in the exact modes."""
        return self._position.is_exact

    @property
    def is_stateful(self) -> bool:
        """Whether ``state_dict`` works during a pass. In the exact modes, ``order_state`` contains the position."""
        return self._position.is_stateful

    @property
    def remainder(self) -> int:
        """Number of new samples in the last step across all ranks; 0 if all batches are full, -1 if unknown."""
        contribution, size = self.contribution, self.total_batch_size
        if self.last_step is not None:
            return sum(self.last_step.real)
        if contribution is not None:
            is_short = size is None or len(contribution.update) < size
            return len(contribution.samples) * self._world.world_size if is_short else 0
        batches = batches_of(self.original)
        if batches is not None and type(batches) is not BatchSampler:
            return -1  # it may have short batches anywhere
        try:
            return -1 if size is None or self.original.drop_last else self.total_dataset_length % size
        except (TypeError, NotImplementedError):  # as in length_of: the dataset has no length
            return -1

    # ---- the current step ----------------------------------------------------------------------------------------------

    @property
    def holds_no_update(self) -> bool:
        """Whether the current batch does not correspond to exactly one of the user's batches (exact modes, evaluation)."""
        contribution, size = self.contribution, self.source.batch_size
        assert contribution is not None
        return contribution.num_micro_steps > 1 or (size is not None and len(contribution.update) > size)

    def step_to_trim(self) -> LastStep | None:
        """Return the current step's batch sizes, or None if every rank has one full batch of new samples.

        For a caller that removes padding samples: disables the warning about padding.
        """
        self._has_trimmed = True
        last, size = self.last_step, self.source.batch_size
        if last is None:
            num_samples = self._num_samples_per_rank()
            if num_samples in (None, size):
                return None
            sizes = [num_samples] * self._world.world_size
            last = LastStep(sizes, sizes)
        return LastStep(last.sizes, last.real, size)

    def _num_samples_per_rank(self) -> int | None:
        """Return the number of samples in the current batch where it is equal on all ranks, or None if there is no batch size."""
        size = self.source.batch_size
        if size is None:
            return None
        if self.contribution is not None:
            return len(self.contribution.samples)
        if self._world.world_size == 1:
            return size if self._num_samples is None else self._num_samples
        return size // self._world.world_size if self.split_batches else size

    def _counts_samples(self) -> bool:
        """Return whether batches with fewer samples than the batch size are found by counting: a single process reads them."""
        return self._world.world_size == 1 and self.source.batch_size is not None and not self.is_exact

    def _count_samples(self, batch: Any) -> int | None:
        """Return the number of samples in a last ``batch`` or in one of any size; None if unknown."""
        batches = batches_of(self.original)
        if type(batches) is not BatchSampler:
            return agreed_num_samples(batch)
        total = length_of(batches.sampler)
        return None if total < 0 or batches.drop_last else total % batches.batch_size or None

    def _warn_of_padding(self, last: LastStep) -> None:
        """Warn once if an evaluation does not remove padding samples."""
        plan = self.plan
        if self._has_trimmed or plan is None or plan.trains or min(last.real) > 0:
            return
        self._has_trimmed = True
        idle = ", ".join(str(rank) for rank, num in enumerate(last.real) if num == 0)
        warn(
            _(
                "an evaluation step has only {real} samples for {num_real} processes, so rank(s) {idle} received a "
                "padding sample; summing per-batch results counts it twice. Call accelerator.gather_for_metrics(...) "
                "or accelerator.trim_for_metrics(...) before summing",
                real=sum(last.real),
                num_real=len(last.real),
                idle=idle,
            )
        )

    def require_every_rank(self, operation: str) -> None:
        """Raise an error if some ranks have no batch in this step, because ``operation`` would hang.

        This requires no communication, because ``last_step`` contains all ranks' batch sizes.

        Raises:
            DesyncError: some ranks have run out of batches. The message names these ranks and the step.
        """
        last = self.last_step
        if last is None or not self._position.is_open or self.active.joined or min(last.sizes) > 0:
            return
        ended = [rank for rank, size in enumerate(last.sizes) if size == 0]
        names = f"rank {ended[0]}" if len(ended) == 1 else f"ranks {', '.join(map(str, ended))}"
        raise DesyncError(
            _(
                "{operation} in step {num_given} of this pass would hang, because {names} ended after at most "
                "{count} batches; the ranks have different numbers of batches (even_batches={even_batches})",
                operation=operation,
                num_given=self.num_given,
                names=names,
                count=self.num_given - 1,
                even_batches=self.even_batches,
            ),
            where="the prepared DataLoader",
            do=_(
                "set even_batches=True or drop_last=True, or run the loop inside "
                "accelerator.join_uneven_inputs([model])"
            ),
        )

    def refuse_short_window(self, operation: str, *, micro_step: int, num_steps: int) -> None:
        """Raise an error because this rank runs out of batches within an update that other ranks continue.

        Raises:
            DesyncError: always.
        """
        raise DesyncError(
            f"{operation} in step {self.num_given} of this pass: rank {self._world.rank} has no more batches, so "
            f"its update ends after micro-step {micro_step} of {num_steps} "
            f"(gradient_accumulation_steps={num_steps}), but other ranks have more batches and continue their "
            f"update (even_batches={self.even_batches})",
            where="the prepared DataLoader",
            do="set even_batches=True or drop_last=True, or make the number of batches on each rank a multiple of "
            f"{num_steps}",
        )

    # ---- the order -----------------------------------------------------------------------------------------------------

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass. Later passes continue counting from it."""
        if epoch != self.iteration:
            self.end_pass()
        self.iteration = epoch
        self._set_epoch_of_samplers()

    def _set_epoch_of_samplers(self) -> None:
        set_epoch(self.iteration, *self.source.owners_of_epoch(self.original))
        self._epochs.record()

    def get_sampler(self) -> Any:
        """Return the sampler that determines the order of samples."""
        return self.source.sampler_of(self.original)

    @property
    def shuffles(self) -> bool:
        """Whether the order is drawn by a RandomSampler."""
        return isinstance(self.get_sampler(), RandomSampler)

    def set_sampler(self, sampler: Any) -> None:
        """Use another sampler to determine the order.

        Raises:
            UsageError: the data's order is fixed, or is determined on another rank.
        """
        self.source.set_sampler(sampler, self.original)

    def skipping(self, num_batches: int) -> PreparedLoader:
        """Return a copy of this loader that skips ``num_batches`` more steps at the start of each pass.

        A complete pass over the copy completes the epoch of this loader, too: its next pass has the order of the next epoch.
        """
        skipping: PreparedLoader = object.__new__(type(self))  # subclasses have other constructors
        skipping.__dict__.update(self.__dict__)
        PreparedLoader.__init__(
            skipping,
            self._position.renew(),
            self.original,
            world=self._world,
            options=self._options,
            active=self.active,
            device=self.device,
            skip_batches=self.skip_batches + num_batches,
            skips_for=self,
        )
        skipping._even = self._even
        return skipping

    # ---- saving and resuming a pass ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the position in this pass after the last batch that was yielded. (``inner`` has already read the next one.)

        Raises:
            UsageError: this loader's state cannot be saved during a pass.
        """
        return self._position.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Make the next pass continue where ``state_dict`` was called or, if that was after the last batch, with the next
        epoch.

        Raises:
            UsageError: this loader's state cannot be saved during a pass.
        """
        self._position.load_state_dict(state_dict)

    def order_state(self) -> dict[str, Any]:
        """Return the state that, in addition to torch's RNG state, determines the order of the current (or else the next) pass.

        This does not include the position in the pass, which ``state_dict`` returns.
        """
        reader = self._reader()
        is_read = reader in self.active.loaders
        return {
            **reader._position.order_state(is_read=is_read, is_within=is_read and not reader.end_of_dataloader),
            "pass": self.record(),
            "data": self.data_facts().to_json(),
        }

    def load_saved(self, order: dict[str, Any] | None, position: dict[str, Any] | None) -> None:
        """Make the next pass the one of a checkpoint, from its ``order_state`` and its ``state_dict``; None if it has none.

        A pass in progress continues. If it is completed, the next pass starts from the beginning, in the order of the next epoch.
        """
        self._position.load(order, position, is_read=self._reader() in self.active.loaders)

    def leave_pass(self) -> None:
        """Make the next pass the one of a checkpoint that was loaded during the current pass, if there is one."""
        self._position.apply_deferred()

    def data_facts(self) -> DataFacts:
        """Return the facts that a position in a pass depends on, or only those known here if another rank reads the data."""
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
        # Columns that the dataset itself changes (a cache, an order drawn in set_epoch) do not identify the data.
        known = self._data_facts
        if known is not None and known.num_samples == found.num_samples:
            found = found.with_stable_columns(known)
        self._data_facts = found
        # Checkpoints store rank zero's columns. Datasets that each rank generates (for example, without a seed) differ.
        return found if self._world.is_rank_zero else replace(found, columns=None)

    def record(self) -> dict[str, Any] | None:
        """Return the progress of the latest pass in this run or in the loaded checkpoint, or None if there was no pass.

        After a ``break``, a pass remains open until another pass starts or ``end_pass`` is called.
        """
        tracked = None if self.active.tracker is None else self.active.tracker.unfinished_update(self)
        return tracked or self.record_now()

    def record_now(self, *, num_unused: int = 0) -> dict[str, Any] | None:
        """Return ``record`` without considering an unfinished update. The last ``num_unused`` batches count as not yielded."""
        reader = self._reader()
        position = reader._position
        is_within = position.is_open and not reader.end_of_dataloader
        found = position.record(is_read=reader in self.active.loaders, is_within=is_within, num_unused=num_unused)
        return self._position.loaded if found is None else found

    def _reader(self) -> PreparedLoader:
        """Return the innermost active loader over the same source, or this loader if there is none."""
        for loader in reversed(self.active.loaders):  # called in each update; a generator expression would be slower
            if loader.source is self.source:
                return loader
        return self

    def rng_state(self, *, num_unused: int = 0) -> dict[str, Any] | None:
        """Return the RNG states that this rank used to draw the batch after the current one, or None outside a pass.

        The last ``num_unused`` batches count as not yielded.
        """
        if self._position.resumes:  # the resumed pass has not started
            return self._position.draws_before
        return self._reader()._position.rng_state(num_unused=num_unused)

    def load_rng_state(self, draws: dict[str, Any] | None) -> None:
        """Make the first batch of a resumed pass use the RNG states in ``draws``."""
        self._position.draws_before = draws

    def resume_pass(self) -> None:
        """Make the next pass continue the pass in ``record``. The next pass is empty if that pass was complete.

        Raises:
            CheckpointError: the number of processes or the ``parity`` has changed since the pass was saved.
        """
        self._position.resume_pass(self.record_now())

    def end_pass(self) -> None:
        """End the current pass, so that the next pass starts from the beginning."""
        self._position.end_pass()

    def enter_epoch(self, epoch: int) -> None:
        """Enter epoch ``epoch``. The next pass uses this epoch's order, or a later epoch's if the loader is already ahead.

        A pass that is in progress, or that will be resumed, continues into this epoch.
        """
        reader = next((r for r in self.active.loaders if r.source is self.source), None)
        position = None if reader is None else reader._position
        if position is not None and position.facts is not None:
            position.facts = replace(position.facts, epoch=epoch, outlives_epochs=True)
        elif not self._position.resumes:
            if self.facts is not None:  # otherwise keep a position that was loaded from Accelerate's state
                self.end_pass()
            if self.iteration < epoch:
                self.set_epoch(epoch)

    # ---- reading -----------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        driver = self.active.driver
        plan = PassPlan() if driver is None else driver.plan_pass()
        return max(self.source.num_steps(plan) - self.skip_batches, 0)

    def _begin_planned_pass(self) -> PassPlan:
        driver = self.active.driver
        self.plan = PassPlan() if driver is None else driver.plan_pass(self)
        if driver is not None:
            driver.begin_pass(self, self.plan)
        return self.plan

    @uncompiled_generator
    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        active, position, source = self.active, self._position, self.source
        active.metrics.begin_pass()
        changed = self._epochs.changed()
        if changed is not None:
            self.set_epoch(changed)
        resumed_from = position.begin_pass()
        if resumed_from is not None and not resumed_from["is_within"]:
            position.facts = PassFacts.from_record(resumed_from)
            return  # the resumed pass was already complete
        self._prepare_pass()
        loaders, tracker, is_over = active.loaders, active.tracker, False
        loaders.append(self)
        try:
            is_saved = self.is_stateful
            position.facts = None if tracker is None else tracker.begin_pass(self)
            is_tracked = self._begin_fetching()
            self._forget_loaded_positions()
            # Reads one batch ahead, so that the last one is known as such while it is in use.
            note_phase(Phase.DATA)
            steps, step = position.open(self.skip_batches, self._begin_planned_pass, resumed_from)
            first_pass, source.first_pass = source.first_pass, None
            before_reading, after_reading = observers_of_pass(
                first_pass=first_pass,
                begin_batch=None if tracker is None else partial(tracker.begin_batch, self),
                draws=position.draws if position.draws is not None and position.draws.is_of_a_batch else None,
                is_alone=self._world.is_alone,
            )
            position.is_open = True
            varies = self._counts_samples() and type(batches_of(self.original)) is not BatchSampler
            num_before = active.metrics.num_collectives() if self._world.world_size > 1 else None
            while step is not END:
                batch, facts = step
                position.num_given += 1
                active.make_innermost(self)
                inner_state = None
                if is_saved:  # empty if another rank reads the data
                    inner_state = self.inner.state_dict() if isinstance(self.inner, SupportsStateDict) else {}
                for observe in before_reading:
                    observe(batch)
                step = next(steps, END)
                for observe_step in after_reading:
                    observe_step(batch, facts)
                self._num_samples = self._count_samples(batch) if varies else None
                if step is END:
                    facts = self._end(batch, facts)
                self._update_step(facts, inner_state)
                # Not a variable, which would keep the batch on the device after the loop body has released it.
                yield self._give(batch, is_tracked=is_tracked)
                if tracker is not None:
                    tracker.end_batch(self)
                if self.last_step is not None:
                    self._warn_of_padding(self.last_step)
            if first_pass is not None:
                first_pass.end()
            self._complete_pass()
            if tracker is not None:
                tracker.end_pass(self)
            active.metrics.end_pass(self._access, num_before)
            is_over = True
        finally:  # also after a break or an error in the loop
            active.remove(self)
            position.apply_deferred()
            if active.driver is not None:
                active.driver.end_pass(self, is_over=is_over)

    def _end(self, batch: Any, facts: LastStep | Contribution | None) -> LastStep | Contribution | None:
        """Record that ``batch`` is the last one, and return all ranks' batch sizes in its step."""
        self.end_of_dataloader = True
        if self._counts_samples():
            self._num_samples = self._count_samples(batch)
        facts = self.source.at_end() or facts
        self.ends_early = self.source.ended_early
        return facts

    def _prepare_pass(self) -> None:
        """Prepare the order of the pass that starts. Collective if RNG states are synchronized."""
        if self._data_facts is None:  # before set_epoch, as when a checkpoint is loaded
            self.data_facts()
        if not self._world.is_alone:
            synchronize_rng_states([kind for kind in self._options.rng_types if kind != "generator"])
        self._set_epoch_of_samplers()
        self.end_of_dataloader = self.ends_early = False
        self.last_step = self._num_samples = None

    def _begin_fetching(self) -> bool:
        """Return whether the batches of the pass that starts are recorded in ``fetched``."""
        facts, owner = self._position.facts, self.active.owner
        if facts is None or not facts.trains or owner is None or not (self.is_exact or owner.num_steps > 1):
            return False
        self.fetched.begin_pass()
        return True

    def _give(self, batch: Any, *, is_tracked: bool) -> Any:
        """Return the batch on its device, and record that it was fetched."""
        given = batch
        if self.device is not None:
            given = send_batch_to_device(batch, self.device, non_blocking=self._options.non_blocking)
        if is_tracked:
            self.active.last_trained = self
            self.fetched.add(
                given, is_last=self.end_of_dataloader, ends_early=self.ends_early, contribution=self.contribution
            )
        return given

    def _originals(self) -> Iterator[PassPosition]:
        """Yield the positions of the loaders of which this is a copy, except loaders that are being iterated over themselves."""
        loader = self.skips_for
        while loader is not None:
            if loader not in self.active.loaders:
                yield loader._position
            loader = loader.skips_for

    def _forget_loaded_positions(self) -> None:
        """Forget where the originals of this copy would continue: the script skips the batches before that by itself."""
        for position in self._originals():
            position.forget_resume()

    def _complete_pass(self) -> None:
        """Record that the pass is complete, which makes it one of the originals, too."""
        self._position.close()
        self.fetched.is_pass_complete = True
        for position in self._originals():
            position.complete_pass_of(self._position)

    def _update_step(self, facts: LastStep | Contribution | None, inner_state: dict[str, Any] | None) -> None:
        """Update the attributes of the current step before its batch is yielded."""
        if not isinstance(facts, Contribution):
            self.last_step = facts
            self._position.record_batch(None, inner_state, self.end_of_dataloader)
            return
        self.contribution = facts
        self.last_step = facts.step
        self._position.record_batch(facts, inner_state, self.end_of_dataloader)
        assert self.plan is not None
        if self.plan.trains and self.active.driver is not None:
            self.active.driver.begin_micro_step(self, facts)

    def __getattr__(self, name: str) -> Any:
        if name in ("source", "original"):
            raise AttributeError(name)  # not yet set, during unpickling
        return getattr(self.original, name)


class DispatchedLoader(PreparedLoader):
    """A prepared loader that rank zero reads for all ranks. This is a separate class because scripts check for it."""
