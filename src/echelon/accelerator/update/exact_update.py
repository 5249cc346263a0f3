"""The exact modes: groups batches into updates, and weights losses so that an update equals the one-process update."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Protocol

import torch
from torch import nn
from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.optim import Optimizer

from echelon.accelerator.agreement import agree_on_models
from echelon.accelerator.plugins.configuration import DataLoaderConfiguration
from echelon.accelerator.rng_states import current_random_states
from echelon.accelerator.update.batch_split_check import BatchSplitCheck
from echelon.accelerator.update.kept_gradients import KeptGradients
from echelon.accelerator.update.multiple_loaders import UpdateLoaders
from echelon.accelerator.update.numerics_environment import NumericsEnvironment
from echelon.accelerator.update.update_parts import UpdateParts, sums_over_ranks
from echelon.base.errors import UsageError
from echelon.base.logging import get_logger
from echelon.base.messages.translation import gettext as _, gettext_noop as N_
from echelon.base.warnings import warn
from echelon.data.active_loaders import PassDriver
from echelon.data.exact.exact_batches import ExactOptions
from echelon.data.global_batch_slices import Contribution, PassPlan, num_micro_steps
from echelon.data.loader import PreparedLoader
from echelon.data.rng.per_sample_rng import key_of
from echelon.distributed.small_messages import gather_counts
from echelon.world.world import World

_logger = get_logger(__name__)
CHANGED = N_(
    "the parameters changed between two micro-steps of one update, but all of an update's gradients must be computed "
    "with the same parameters"
)
HOW_TO_CHANGE = N_(
    "Change parameters only after the step, when accelerator.sync_gradients is true. A two-step optimizer (SAM) "
    "requires one micro-step per update: remove gradient_accumulation_steps and max_micro_batch_size, and start more "
    "processes"
)


class BatchSplit(Protocol):
    """How the batch of an update is split, and what follows from it."""

    parity: Literal["exact", "bitwise"]
    averages_gradients: bool
    """Whether the engine averages the ranks' gradients; otherwise it sums those of the parts."""
    allows_alternation: bool
    """Whether loops over several loaders may be interleaved, which requires one micro-step per update."""
    canonical_shards: int | None
    """Number of parts of an update if it does not depend on the number of ranks."""
    environment: NumericsEnvironment | None
    """What a checkpoint stores, and a run that continues it must have."""

    @property
    def place(self) -> tuple[int, int]:
        """Index of the current part among the sums of an update, and the number of these sums."""

    def describe(self, batch_size: int) -> str:
        """Return how a global batch is split."""

    def check_prepared(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        """Check objects that are about to be prepared."""

    def begin_pass(self) -> None:
        """Prepare for a training pass. Collective."""

    def begin_micro_step(self, contribution: Contribution, kept: KeptGradients, *, seed: int) -> None:
        """Prepare for the forward pass of a micro-batch; ``kept`` are the gradients of the micro-steps before it."""

    def refuse_outside(self) -> None:
        """Raise if losses of batches outside of a loader's loop cannot be assigned to a part."""

    def check_loss(self, num_items: float, *, num_postponed: int, num_taken: int) -> None:
        """Check a loss over ``num_items`` items; the numbers are those of optimizer steps since its batch's first loss."""

    def add(self, losses: Sequence[float]) -> float:
        """Return the sum of a part's losses."""

    def report_changed_parameters(self) -> None:
        """Report that the parameters changed within an update."""

    def before_reevaluation(self, who: str) -> None:
        """Raise if ``who`` cannot evaluate its closure again."""

    def before_backward(self, kept: KeptGradients) -> None:
        """Check the gradients of the micro-steps before this one."""

    def after_backward(self, *, ends_update: bool) -> None:
        """Complete the gradients. Collective in the last micro-step."""

    def keeps_after_zero_grad(self, parameters: Collection[int], *, clears: bool) -> bool:
        """Return whether gradients of this micro-step stay after ``zero_grad()`` of an optimizer, given its parameters' ids."""

    def report_kept_gradients(self) -> None:
        """Report that another loss is added to gradients that ``zero_grad()`` was to clear."""

    def drop_update(self) -> None:
        """Drop the update that is pending."""


class ExactUpdate(PassDriver[PreparedLoader]):
    """Groups prepared loaders' micro-batches into updates; the loader decides where an update ends."""

    def __init__(self, parts: UpdateParts, split: BatchSplit) -> None:
        self.split = split
        self.window = parts.build_window(averages_gradients=split.averages_gradients)
        self._config = parts.config
        self._world = parts.world
        self._data_world = parts.data_world
        self._loss_world = parts.loss_world
        self._state = parts.state
        self._progress = parts.progress
        self._objects = parts.objects
        self._seed = parts.config.value.seed
        # (index of the part, mean loss, item count) of each loss of this update on this rank.
        self._losses: list[tuple[int, torch.Tensor, float]] = []
        self._num_items = 0.0  # in this update on this rank
        self._is_counted = False  # whether _num_items includes this micro-step
        self._has_had_loss = False  # in any update
        self._is_outside = False  # the latest loss was of a batch trained outside of its loader's loop
        self._micro_step_items: float | None = None  # items of this micro-step
        self._is_reevaluating = False  # a closure is being re-evaluated at other parameters
        self._misses_losses = False  # whether an earlier micro-step of this update has had no loss
        self._keeps_cleared = False  # zero_grad() after a loss of this micro-step left gradients of it
        self._steps_at_loss = 0, 0  # postponed and taken steps when this micro-step had its first loss
        # Numbers of postponed and taken steps of each optimizer at the start of this update.
        self._step_counts_before: list[tuple[int, int]] = []
        self._split_check = BatchSplitCheck()
        self._warned_of_missing_step = False
        self._kept = KeptGradients(split.parity)
        self._logged: set[str] = set()
        self._update_loaders = UpdateLoaders(allows_alternation=split.allows_alternation)
        # State of the outer loops whose updates are suspended, keyed by the id of the loader.
        self._interrupted: dict[int, tuple[list[tuple[int, torch.Tensor, float]], float, bool, float | None]] = {}
        self._warned_of_dropped_update = False
        self._has_several_micro_steps = False  # whether this update has several micro-steps
        self._parameter_versions: list[int] = []  # when this update had its first loss
        self._is_mid_update = False  # an update has started and its last micro-step has not
        self._random_states: dict[str, Any] | None = None  # at the start of an update of several micro-steps

    @property
    def seed(self) -> int:
        """The run's seed, equal on every rank. Default: torch's seed on rank zero when the first loader is prepared.

        The seed is not read earlier, because many scripts call ``set_seed`` after they create the Accelerator.

        Collective: the first call must be made on every rank.
        """
        if self._seed is None:
            (seeds,) = gather_counts(torch.initial_seed() & (2**62 - 1))
            self._seed = seeds[0]
        return self._seed

    def log_batch_size(self, batch_size: int) -> None:
        """Log once how this mode splits a batch."""
        line = self.split.describe(batch_size)
        if line not in self._logged:
            self._logged.add(line)
            # A warning is visible by default: the meaning of a number in the script has changed.
            _logger.warning("%s", line)

    # ---- PassDriver: events of the loaders ---------------------------------------------------------------------------

    def plan_pass(self, starting: PreparedLoader | None = None) -> PassPlan:
        """Plan a training pass if gradients are enabled and a prepared model (if any) is in training mode."""
        models = self._objects.models
        trains = torch.is_grad_enabled() and (not models or any(model.training for model in models))
        # A loader that is read in lockstep with another one (zip) is cut into as many micro-steps.
        lockstep = self._update_loaders.lockstep_micro_steps(starting, is_counted=self._is_counted)
        return PassPlan(num_micro_steps=max(self._state.num_steps, lockstep), trains=trains)

    def begin_pass(self, loader: PreparedLoader, plan: PassPlan) -> None:
        if plan.trains:
            self.split.begin_pass()
            self._progress.epoch = loader.iteration

    def begin_micro_step(self, loader: PreparedLoader, contribution: Contribution) -> None:
        """Start the micro-step for the batch that the loader is about to yield."""
        before = self._update_loaders.lead
        if not self._update_loaders.leads(
            loader, contribution, is_counted=self._is_counted, is_mid_update=self._is_mid_update
        ):
            return
        if before is not None and before is not loader:
            self._interrupted[id(before)] = (self._losses, self._num_items, self._is_counted, self._micro_step_items)
        self._interrupted.pop(id(loader), None)
        # A step that is due may still come after a batch of another loader.
        is_same_loop = before is None or before is loader
        if contribution.micro_step == 0 and is_same_loop:
            self._check_steps()
        self._open_micro_step(contribution)

    def repeat_micro_step(self, contribution: Contribution) -> None:
        """Start a micro-step again, after ``UpdatePolicy.drop_update``, to train a batch that its loader has yielded before.

        Repeat all micro-steps of the update, in their order. The counters of ``progress`` count the samples again.
        """
        lead = self._update_loaders.lead
        assert lead is not None
        lead.contribution = contribution
        self._open_micro_step(contribution)

    def _open_micro_step(self, contribution: Contribution) -> None:
        if contribution.micro_step > 0 and not self._is_mid_update:
            raise UsageError(
                "a loop tried to resume an update that was dropped, because another pass over its loader had started, a "
                "checkpoint was loaded, or the objects were released",
                where="parity='exact'",
                do="iterate over a loader in one loop at a time, and leave the loop before load_state() and free_memory(); or "
                "use one micro-step per update: remove gradient_accumulation_steps and max_micro_batch_size, and start "
                "more processes",
            )
        self._state.sync_gradients = contribution.ends_update
        if contribution.micro_step == 0:
            self._count_tokens()
            if self._is_mid_update or self._misses_last_loss():
                if self._losses:
                    self._warn_of_dropped_update()
                self._drop_partial_update()
            self.window.is_open = False
            self._losses, self._num_items = [], 0.0
            self._random_states = (
                current_random_states(self._world.device.type) if contribution.num_micro_steps > 1 else None
            )
            self._has_several_micro_steps, self._parameter_versions = contribution.num_micro_steps > 1, []
            self._step_counts_before = self._step_counts() if self._has_several_micro_steps else []
            self._kept.clear()
        self._misses_losses = contribution.micro_step > 0 and (self._misses_losses or not self._is_counted)
        self._is_mid_update = not contribution.ends_update
        self._is_counted, self._micro_step_items = False, None
        self._state.has_loss = self._keeps_cleared = False
        self.window.begin_micro_step()
        self._progress.micro_step = contribution.micro_step + 1
        self._progress.position = contribution.next_position
        if contribution.ends_update:
            self._progress.samples_seen += len(contribution.update)
        self.split.begin_micro_step(contribution, self._kept, seed=self.seed)

    def end_pass(self, loader: PreparedLoader, *, is_over: bool) -> None:
        """See ``PassDriver``. An enclosing loop continues with its current batch."""
        self._interrupted.pop(id(loader), None)
        is_lead = self._update_loaders.lead is loader
        outer = self._update_loaders.end(loader, is_over=is_over)
        if outer is None:
            if is_lead:
                self.window.is_open = False  # what follows outside of the loop is another update
            return
        if self._is_mid_update and self._losses:
            self._drop_partial_update()
        self._is_mid_update = False  # an update without losses needs no clean-up
        kept = self._interrupted.pop(id(outer), None)
        assert kept is not None
        self._losses, self._num_items, self._is_counted, self._micro_step_items = kept
        self._state.sync_gradients = True  # loops alternate only if each update is one micro-step
        self.window.is_open = False
        self.window.begin_micro_step()
        self._progress.micro_step = 1

    def _count_tokens(self) -> None:
        self._progress.tokens_seen += self.window.total
        self.window.total = 0.0

    def _warn_of_dropped_update(self) -> None:
        if not self._warned_of_dropped_update:
            self._warned_of_dropped_update = True
            warn(
                _(
                    "a loop ended in the middle of an update with several micro-steps; the update's gradients are "
                    "dropped and its samples are read again. Leave loops only when accelerator.sync_gradients is true, "
                    "and count updates (accelerator.progress.step) instead of loop iterations"
                )
            )

    def _step_counts(self) -> list[tuple[int, int]]:
        return [(optimizer.num_postponed, optimizer.num_steps) for optimizer in self._objects.optimizers]

    def _misses_last_loss(self) -> bool:
        """Return whether the loop ended in the last micro-step before backward, in which case no step used the gradients."""
        if self._is_counted or not self._has_several_micro_steps or not self._losses:
            return False
        return all(now[1] == before[1] for now, before in zip(self._step_counts(), self._step_counts_before))

    def _check_steps(self) -> None:
        """Warn if an optimizer step was postponed to the end of the last update and never ran."""
        if self._warned_of_missing_step or not self._is_counted or self._is_mid_update:
            return
        for optimizer, (postponed, taken) in zip(self._objects.optimizers, self._step_counts_before):
            is_missing = optimizer.num_postponed > postponed and optimizer.num_steps == taken
            if is_missing and not optimizer.step_was_skipped:
                self._warned_of_missing_step = True
                warn(
                    _(
                        "{name}.step() was called in an earlier micro-step of an update, where it does nothing, but "
                        "not in the last one, so the parameters did not change. Call step() in every loop iteration, "
                        "or when accelerator.sync_gradients is true; here, an iteration is not an update",
                        name=type(optimizer.optimizer).__name__,
                    )
                )
                return

    def _drop_partial_update(self) -> None:
        """Drop the gradients of an update whose loop ended early; its samples are read again."""
        self._is_mid_update = False
        self._kept.clear()
        self._objects.drop_update()

    # ---- backward ----------------------------------------------------------------------------------------------------

    def check_prepared(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        """Check objects that are about to be prepared, and that all ranks start with the same model. Collective."""
        self.split.check_prepared(models, optimizers)
        if self._world.world_size > 1:
            agree_on_models(models)

    def take_loss(self, loss: torch.Tensor, num_items: float | None, *, is_accumulating: bool) -> Contribution | None:
        """Add a loss to the update's; return its batch's share of the update, or None outside a prepared loader's loop.

        Args:
            loss: mean loss for the current batch.
            num_items: number of items on this rank; None: the batch's samples.
            is_accumulating: whether an ``accumulate()`` block is active.
        """
        contribution = self.contribution()
        self._is_outside = contribution is None
        if contribution is None and self._is_mid_update:
            raise UsageError(
                "backward() was called after a loader's iterator was closed in the middle of an update with several "
                "micro-steps (by leaving a loop, or by next(iter(loader))), so the update cannot be completed",
                where=f"parity={self._config.value.parity!r}, micro-step {self._progress.micro_step}",
                do="keep the iterator (batches = iter(loader)), leave loops only when accelerator.sync_gradients is "
                "true, or use one micro-step per update: remove gradient_accumulation_steps and max_micro_batch_size",
            )
        is_counted = num_items is not None
        self._require_newest_batch(contribution, is_counted=is_counted, is_accumulating=is_accumulating)
        if contribution is not None:
            items = contribution.num_items if num_items is None or contribution.is_padding else num_items
            self._note_loss(loss, items)
            self._split_check.check(loss, self._objects.models, contribution, is_counted=is_counted)
        return contribution

    def _require_newest_batch(
        self, contribution: Contribution | None, *, is_counted: bool, is_accumulating: bool
    ) -> None:
        """Raise if the loop has fetched other batches before it trains this one: weights and losses follow the newest batch.

        Args:
            contribution: that of the newest batch. None: outside of a loader's loop. A single batch may be trained there
                (``next(iter(loader))``), several may not.
            is_counted: whether the loop passes the number of items.
            is_accumulating: whether an ``accumulate()`` block is active.
        """
        lead = self._update_loaders.lead
        loader = self._state.reading.trained if lead is None else lead
        if loader is None:
            return
        if contribution is not None and self._is_counted:
            # The copies of batches that were fetched ahead cannot be recognized, but each of them is followed by a step.
            is_wrong = self._misses_losses and self._step_counts() != self._step_counts_before
        else:
            # Outside of a loader's loop, accumulate() has taken the batch that is trained.
            is_taken = contribution is None and is_accumulating and self._state.plugin.sync_with_dataloader
            held = loader.fetched.take_held(is_taken=is_taken)
            is_wrong = len(held) > 1 if contribution is None else bool(held) and held[0] is not contribution
            if contribution is None and not is_counted and any(one.step is not None for one in held):
                raise UsageError(
                    "the ranks have different numbers of samples of a batch that is trained outside of its loader's loop, where losses "
                    "have equal weights",
                    where=f"backward(), parity={self._config.value.parity!r}",
                    do="train the batch in the loop over the loader, or call accelerator.backward(loss, num_items=n)",
                )
        if is_wrong:
            raise UsageError(
                "several batches were fetched before the first of them is trained, so losses cannot be assigned to the updates of "
                "their batches",
                where=f"backward(), parity={self._config.value.parity!r}",
                do="fetch each batch right before it is trained; to divide by the number of items of a whole update, call "
                "accelerator.backward(loss, num_items=n), which adds them up",
            )

    def before_backward(self) -> None:
        """Check gradients before the current batch's backward pass."""
        if self._keeps_cleared:
            self.split.report_kept_gradients()
        self.split.before_backward(self._kept)

    def after_backward(self) -> None:
        """Record gradients after the backward pass. Collective in the last micro-step."""
        if self._is_mid_update:
            self._kept.record(self._objects.models)
        else:
            self._kept.clear()
        self.split.after_backward(ends_update=self._state.sync_gradients)

    def note_zero_grad(self, optimizer: Optimizer, *, clears: bool) -> None:
        if clears:
            self._kept.clear()
        parameters = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        keeps = self.split.keeps_after_zero_grad(parameters, clears=clears)
        # After a step, another loss of the batch is reported as such.
        is_between = self._state.has_loss and not any(self._steps_since_loss())
        self._keeps_cleared = self._keeps_cleared or (keeps and is_between)

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any] | None:
        """See ``UpdatePolicy.snapshot``; an unfinished accumulation window is replayed from the RNG state it started with."""
        self._count_tokens()
        return self._random_states if self._is_mid_update else None

    def drop_update(self) -> None:
        """Drop the update that is pending; see ``UpdatePolicy.drop_update``."""
        self._is_mid_update = self._is_counted = self._has_several_micro_steps = False
        self._micro_step_items = self._random_states = None
        self.window.total = 0.0  # counted as tokens otherwise
        self._kept.clear()
        lead = self._update_loaders.lead
        loader = self._state.reading.trained if lead is None else lead
        if loader is not None:
            loader.fetched.skip_waiting()  # the loss of a dropped update may still hold its batch
        self.split.drop_update()

    # ---- losses ------------------------------------------------------------------------------------------------------

    def contribution(self) -> Contribution | None:
        """Return the current batch's share of its update; None outside a prepared loader's loop.

        Raises:
            UsageError: the pass is an evaluation, whose batches do not form updates.
        """
        if self._update_loaders.lead is not None:
            self._update_loaders.require_usable_batches()
            return self._update_loaders.lead.contribution
        loader = self._state.active_dataloader
        if loader is None or loader.contribution is None:
            self.split.refuse_outside()
            return None
        assert loader.plan is not None
        if not loader.plan.trains and loader.holds_no_update:
            raise UsageError(
                "backward() was called in a pass that started as an evaluation (all models in eval mode, or gradients "
                "disabled), whose batches do not form updates",
                where="parity='exact'",
                do="call model.train() before the loop; submodules may stay in eval mode",
            )
        return loader.contribution

    @property
    def drives(self) -> bool:
        """Whether a prepared loader decides where the update ends."""
        return self._update_loaders.lead is not None

    @property
    def awaits_loss(self) -> bool:
        return not self._is_counted and self.drives and self._progress.micro_step > 1

    @property
    def micro_step(self) -> int:
        return self._progress.micro_step

    @property
    def num_items(self) -> float | None:
        return self._micro_step_items

    @property
    def place(self) -> tuple[int, int]:
        return self.split.place

    @contextmanager
    def evaluating_again(self, who: str) -> Iterator[None]:
        self.split.before_reevaluation(who)
        self._is_reevaluating = True
        try:
            yield
        finally:
            self._is_reevaluating = False

    def _num_steps(self) -> tuple[int, int]:
        """Return the numbers of postponed and taken steps of all optimizers."""
        return sum(one.num_postponed for one in self._objects.optimizers), self._objects.num_steps()

    def _steps_since_loss(self) -> tuple[int, int]:
        """Return the same since the first loss of this micro-step."""
        (postponed, taken), (postponed_before, taken_before) = self._num_steps(), self._steps_at_loss
        return postponed - postponed_before, taken - taken_before

    def _note_loss(self, loss: torch.Tensor, num_items: float) -> None:
        """Add a mean loss over ``num_items`` items on this rank to the update's loss."""
        if self._is_reevaluating:
            return
        if not self._is_counted:
            self._steps_at_loss = self._num_steps()
        num_postponed, num_taken = self._steps_since_loss()
        self.split.check_loss(num_items, num_postponed=num_postponed, num_taken=num_taken)
        if not self._is_counted:
            if self._has_several_micro_steps:
                self._check_parameters_unchanged()
            self._micro_step_items = num_items
            self._num_items += num_items
            self._is_counted = self._has_had_loss = True
        if num_items:
            self._losses.append((self.split.place[0], loss.detach(), num_items))

    def _check_parameters_unchanged(self) -> None:
        """Compare parameter versions with those in the first micro-step, for each model's first and last parameter."""
        trained = [[p for p in model.parameters() if p.requires_grad] for model in self._objects.models]
        now = [getattr(p, "_local_tensor", p)._version for own in trained for p in own[:1] + own[-1:]]
        if self.micro_step > 1 and self._parameter_versions not in ([], now):
            self.split.report_changed_parameters()
        self._parameter_versions = now

    def update_loss(self) -> float:
        """Return the mean loss since the update started; nan if there were no items. Collective.

        Raises:
            UsageError: the loss was computed outside of a loader's loop, or there has been none.
        """
        if self._is_outside:
            raise UsageError(
                "update_loss() knows the losses of batches that are trained in the loop over their loader, and the latest one was "
                "trained outside of it",
                where=f"parity={self._config.value.parity!r}",
                do="train each batch in the loop, right after it was fetched, or average the loss with accelerator.reduce(loss.detach(), "
                "'mean')",
            )
        terms: list[list[float]] = [[] for _ in range(self.split.place[1])]
        for part, loss, num_items in self._losses:
            terms[part].append(float(loss) * num_items)
        # In the bitwise mode one rank owns each part; the others add zero.
        *sums, num_items = sums_over_ranks(self._loss_world, [*map(self.split.add, terms), self._num_items])
        if not num_items and not self._has_had_loss:
            raise UsageError("no loss has been recorded yet", do="call update_loss() after backward()")
        return math.fsum(sums) / num_items if num_items else math.nan

    def loader_options(self, config: DataLoaderConfiguration) -> ExactOptions:
        """Return how loaders split batches. Collective on the first call."""
        seed = self.seed
        return ExactOptions(
            seed=seed if config.data_seed is None else config.data_seed,
            order=config.order,
            max_micro_batch_size=self._config.value.max_micro_batch_size,
            replays=config.replay_iterable,
            canonical_shards=self.split.canonical_shards,
        )

    def weigh(self, contribution: Contribution) -> float:
        """Return the factor for a mean loss over the samples in ``contribution``, computed without communication."""
        self._update_loaders.require_matching_shares(contribution)
        num_averaged = self._data_world.world_size if self.split.averages_gradients else 1
        return contribution.num_items * num_averaged / len(contribution.update)


class RankSplit:
    """Splits a batch among the ranks, and a rank's part into micro-steps: ``parity="exact"``."""

    parity: Literal["exact", "bitwise"] = "exact"
    averages_gradients = True
    allows_alternation = True
    canonical_shards: int | None = None
    environment: NumericsEnvironment | None = None
    place = 0, 1
    """Sums may be added in any order."""

    def __init__(self, parts: UpdateParts) -> None:
        self._parts = parts
        self._batch_norms: list[_BatchNorm] = []
        self._warned_of_batch_norm = self._told_of_dropout = False
        self._warned_of_postponed_step = self._warned_of_kept_gradients = False
        self._warned_of_changed_parameters = False

    def describe(self, batch_size: int) -> str:
        """Return the number of processes, micro-steps and samples."""
        world_size = self._parts.data_world.world_size
        num_micro = num_micro_steps(
            batch_size,
            world_size=world_size,
            wanted=self._parts.state.num_steps,
            max_micro_batch_size=self._parts.config.value.max_micro_batch_size,
        )
        least, rest = divmod(batch_size, world_size * num_micro)
        micro_steps = f"{num_micro} micro-steps x " if num_micro > 1 else ""
        samples = f"{least} to {least + 1}" if rest else str(least)
        return _(
            "parity='exact': the batch size of a DataLoader is global, global batch {batch_size} = {world_size} "
            "process{es} x {micro_steps}{samples} sample{s}",
            batch_size=batch_size,
            world_size=world_size,
            es="es" if world_size > 1 else "",
            micro_steps=micro_steps,
            samples=samples,
            s="s" if rest or least > 1 else "",
        )

    def check_prepared(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        """Do nothing: any objects can be used."""

    def begin_pass(self) -> None:
        """Seed each rank's RNG separately and collect the BatchNorm layers. Collective."""
        seed_ranks_separately(self._parts.data_world)
        modules = [module for model in self._parts.objects.models for module in model.modules()]
        self._batch_norms = [module for module in modules if isinstance(module, _BatchNorm)]
        num_dropouts = sum(isinstance(module, _DropoutNd) and module.p > 0 and module.training for module in modules)
        if num_dropouts and self._parts.data_world.world_size > 1 and not self._told_of_dropout:
            self._told_of_dropout = True
            text = _(
                "parity='exact': the model has {number} dropout layer(s), whose masks depend on how the batch is divided: "
                "runs on different numbers of processes agree in distribution only",
                number=num_dropouts,
            )
            _logger.warning("%s", text)

    def begin_micro_step(self, contribution: Contribution, kept: KeptGradients, *, seed: int) -> None:
        """Check whether the statistics of the micro-batch are those of the batch."""
        if self._batch_norms:
            self._check_batch_norms(contribution)

    def _check_batch_norms(self, contribution: Contribution) -> None:
        training = [norm for norm in self._batch_norms if norm.training]
        idle = [] if contribution.step is None else [r for r, num in enumerate(contribution.step.real) if num == 0]
        if idle and training:
            raise UsageError(
                _(
                    "an update of {num_update} samples leaves rank(s) {ranks} without samples, and BatchNorm in "
                    "training mode would count their padding samples",
                    num_update=len(contribution.update),
                    ranks=", ".join(map(str, idle)),
                ),
                where="parity='exact'",
                do=_("use drop_last=True, a different batch size, fewer processes, or GroupNorm"),
            )
        if contribution.num_micro_steps == 1:
            # SyncBatchNorm sees the micro-batches of all ranks, which is the whole batch here.
            training = (
                []
                if self._parts.loss_world.world_size == 1
                else [n for n in training if not isinstance(n, SyncBatchNorm)]
            )
        if training and not self._warned_of_batch_norm:
            self._warned_of_batch_norm = True
            warn(
                _(
                    "the model has {num_training} BatchNorm layer(s) that compute statistics per micro-batch, so the "
                    "update depends on how the batch is split, with or without parity='exact'. Use GroupNorm or "
                    "LayerNorm, or torch.nn.SyncBatchNorm.convert_sync_batchnorm(model), which uses all ranks' samples "
                    "and matches one process if there is no gradient accumulation",
                    num_training=len(training),
                )
            )

    def refuse_outside(self) -> None:
        """Do nothing: such losses have equal weights."""

    def check_loss(self, num_items: float, *, num_postponed: int, num_taken: int) -> None:
        """Warn once about a second loss after a step that was postponed."""
        if num_postponed > 0 and not self._warned_of_postponed_step:
            self._warned_of_postponed_step = True
            warn(
                _(
                    "a second loss for the same batch was computed after an optimizer's step(), which is postponed to "
                    "the last micro-step. If the loss depends on that optimizer's parameters, it uses their old "
                    "values, with or without parity='exact'. To use the new values, remove gradient_accumulation_steps "
                    "and max_micro_batch_size"
                )
            )

    def add(self, losses: Sequence[float]) -> float:
        """Return the sum."""
        return sum(losses)

    def report_changed_parameters(self) -> None:
        """Warn once."""
        if not self._warned_of_changed_parameters:
            self._warned_of_changed_parameters = True
            warn(_("{what}. {do}", what=_(CHANGED), do=_(HOW_TO_CHANGE)))

    def before_reevaluation(self, who: str) -> None:
        """Do nothing: additional losses are not counted."""

    def before_backward(self, kept: KeptGradients) -> None:
        """Require that they are unchanged."""
        kept.require_unchanged()

    def after_backward(self, *, ends_update: bool) -> None:
        """Do nothing: the engine has averaged the gradients."""

    def keeps_after_zero_grad(self, parameters: Collection[int], *, clears: bool) -> bool:
        """Return whether the gradients of earlier micro-steps are kept."""
        return not clears

    def report_kept_gradients(self) -> None:
        """Warn once, because the loss before need not have reached the optimizer's parameters."""
        if not self._warned_of_kept_gradients:
            self._warned_of_kept_gradients = True
            warn(
                _(
                    "zero_grad() between two losses of a batch has no effect in an update with several micro-steps, so gradients of the "
                    "first loss stay. Detach what that loss need not reach, or call zero_grad() before it, or remove "
                    "gradient_accumulation_steps and max_micro_batch_size"
                )
            )

    def drop_update(self) -> None:
        """Do nothing: this keeps nothing of an update."""


def seed_ranks_separately(world: World) -> None:
    """Seed torch's generators differently on each rank of ``world``, if all of them have the same seed.

    Rank zero keeps its seed, so that one process matches the plain program; the other ranks derive theirs from it. Ranks that
    already differ (seeded by the user, restored, or by this function) keep their seeds.

    Collective: call on every rank.
    """
    if world.world_size == 1:
        return
    mine = torch.initial_seed() & (2**62 - 1)
    (seeds,) = gather_counts(mine, group=world.group)
    if mine in seeds[: world.rank]:
        torch.manual_seed(key_of(mine, world.rank) >> 2)
