"""``parity="exact"``: weights each micro-step's loss so that the update equals the one-process update."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm
from torch.optim import Optimizer

from echelon.accelerator.agreement import agree_on_models
from echelon.accelerator.plugins.configuration import DataLoaderConfiguration
from echelon.accelerator.rng_states import current_random_states
from echelon.accelerator.update.batch_split_check import BatchSplitCheck
from echelon.accelerator.update.kept_gradients import KeptGradients
from echelon.accelerator.update.multiple_loaders import UpdateLoaders
from echelon.accelerator.update.update_policy import UpdateParts, UpdatePolicy, checked_loss
from echelon.base.errors import UsageError
from echelon.base.logging import get_logger
from echelon.base.warnings import warn
from echelon.data.active_loaders import PassDriver
from echelon.data.exact.exact_batches import ExactOptions, PassPlan
from echelon.data.global_batch_slices import Contribution, num_micro_steps
from echelon.data.loader import PreparedLoader
from echelon.data.rng.per_sample_rng import key_of
from echelon.distributed.small_messages import gather_counts
from echelon.world.world import World

__all__ = ["ExactUpdate"]

_logger = get_logger(__name__)
CHANGED = (
    "the parameters changed between two micro-steps of one update, but all of an update's gradients must be computed "
    "with the same parameters"
)
HOW_TO_CHANGE = (
    "Change parameters only after the step, when accelerator.sync_gradients is true. A two-step optimizer (SAM) "
    "requires one micro-step per update: remove gradient_accumulation_steps and max_micro_batch_size, and start more "
    "processes"
)


class ExactUpdate(UpdatePolicy, PassDriver[PreparedLoader]):
    """Groups prepared loaders' micro-batches into updates; the loader decides where an update ends."""

    _allows_alternation = True
    """Whether loops over several loaders may be interleaved, which requires one micro-step per update."""

    uses_global_batches = True

    def __init__(self, parts: UpdateParts) -> None:
        super().__init__(parts)
        self._seed = self.config.value.seed
        self._max_micro_batch_size = self.config.value.max_micro_batch_size
        self._losses: list[tuple[torch.Tensor, float]] = []  # (mean loss, item count) pairs of this update on this rank
        self._num_items = 0.0  # in this update on this rank
        self._is_counted = False  # whether _num_items includes this micro-step
        self._has_had_loss = False  # in any update
        self._is_outside = False  # the latest loss was of a batch trained outside of its loader's loop
        self._micro_step_items: float | None = None  # items of this micro-step
        self._is_reevaluating = False  # a closure is being re-evaluated at other parameters
        self._misses_losses = False  # whether an earlier micro-step of this update has had no loss
        self._num_postponed = 0  # when this micro-step had its first loss
        # Numbers of postponed and taken steps of each optimizer at the start of this update.
        self._step_counts_before: list[tuple[int, int]] = []
        self._split_check = BatchSplitCheck()
        self._warned_of_missing_step = False
        self._warned_of_postponed_step = False
        self._warned_of_batch_norm = False
        self._batch_norms: list[_BatchNorm] = []
        self._kept = KeptGradients("exact")
        self._logged: set[str] = set()
        self._update_loaders = UpdateLoaders(allows_alternation=self._allows_alternation)
        # State of the outer loops whose updates are suspended, keyed by the id of the loader.
        self._interrupted: dict[int, tuple[list[tuple[torch.Tensor, float]], float, bool, float | None]] = {}
        self._warned_of_dropped_update = False
        self._has_several_micro_steps = False  # whether this update has several micro-steps
        self._parameter_versions: list[int] = []  # when this update had its first loss
        self._warned_of_changed_parameters = False
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

    def log_batch_size(self, batch_size: int | None) -> None:
        """Log once how this mode splits a batch."""
        if batch_size is None:
            return
        world_size = self.data_world.world_size
        micro = num_micro_steps(
            batch_size,
            world_size=world_size,
            wanted=self.state.num_steps,
            max_micro_batch_size=self._max_micro_batch_size,
        )
        line = describe_batch(batch_size, world_size=world_size, num_micro=micro)
        if line not in self._logged:
            self._logged.add(line)
            # A warning is visible by default: the meaning of a number in the script has changed.
            _logger.warning("parity='exact': the batch size of a DataLoader is global, %s", line)

    # ---- PassDriver: events of the loaders ---------------------------------------------------------------------------

    def plan_pass(self, starting: PreparedLoader | None = None) -> PassPlan:
        """Plan a training pass if gradients are enabled and a prepared model (if any) is in training mode."""
        models = self.objects.models
        trains = torch.is_grad_enabled() and (not models or any(model.training for model in models))
        # A loader that is read in lockstep with another one (zip) is cut into as many micro-steps.
        lockstep = self._update_loaders.lockstep_micro_steps(starting, is_counted=self._is_counted)
        return PassPlan(num_micro_steps=max(self.state.num_steps, lockstep), trains=trains)

    def begin_pass(self, loader: PreparedLoader, plan: PassPlan) -> None:
        """Seed each rank's RNG separately and collect the BatchNorm layers.

        Collective: call on every rank for a training pass.
        """
        if not plan.trains:
            return
        seed_ranks_separately(self.data_world)
        self.progress.epoch = loader.iteration
        self._batch_norms = [m for model in self.objects.models for m in model.modules() if isinstance(m, _BatchNorm)]

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
        if self._batch_norms:
            self._check_batch_norms(contribution)
        self.state.sync_gradients = contribution.ends_update
        if contribution.micro_step == 0:
            self._count_tokens()
            if self._is_mid_update or self._misses_last_loss():
                if self._losses:
                    self._warn_of_dropped_update()
                self._drop_partial_update()
            self.window.is_open = False
            self._losses, self._num_items = [], 0.0
            self._random_states = current_random_states() if contribution.num_micro_steps > 1 else None
            self._has_several_micro_steps, self._parameter_versions = contribution.num_micro_steps > 1, []
            self._step_counts_before = self._step_counts() if self._has_several_micro_steps else []
            self._kept.clear()
        self._misses_losses = contribution.micro_step > 0 and (self._misses_losses or not self._is_counted)
        self._is_mid_update = not contribution.ends_update
        self._is_counted, self._micro_step_items = False, None
        self.state.has_loss = False
        self.window.begin_micro_step()
        self.progress.micro_step = contribution.micro_step + 1
        self.progress.position = contribution.next_position
        if contribution.ends_update:
            self.progress.samples_seen += len(contribution.update)

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
        self.state.sync_gradients = True  # loops alternate only if each update is one micro-step
        self.window.is_open = False
        self.window.begin_micro_step()
        self.progress.micro_step = 1

    def _count_tokens(self) -> None:
        self.progress.tokens_seen += self.window.total
        self.window.total = 0.0

    def _warn_of_dropped_update(self) -> None:
        if not self._warned_of_dropped_update:
            self._warned_of_dropped_update = True
            warn(
                "a loop ended in the middle of an update with several micro-steps; the update's gradients are dropped "
                "and its samples are read again. Leave loops only when accelerator.sync_gradients is true, and count "
                "updates (accelerator.progress.step) instead of loop iterations"
            )

    def _step_counts(self) -> list[tuple[int, int]]:
        return [(optimizer.num_postponed, optimizer.num_steps) for optimizer in self.objects.optimizers]

    def _misses_last_loss(self) -> bool:
        """Return whether the loop ended in the last micro-step before backward, in which case no step used the gradients."""
        if self._is_counted or not self._has_several_micro_steps or not self._losses:
            return False
        return all(now[1] == before[1] for now, before in zip(self._step_counts(), self._step_counts_before))

    def _check_steps(self) -> None:
        """Warn if an optimizer step was postponed to the end of the last update and never ran."""
        if self._warned_of_missing_step or not self._is_counted or self._is_mid_update:
            return
        for optimizer, (postponed, taken) in zip(self.objects.optimizers, self._step_counts_before):
            is_missing = optimizer.num_postponed > postponed and optimizer.num_steps == taken
            if is_missing and not optimizer.step_was_skipped:
                self._warned_of_missing_step = True
                warn(
                    f"{type(optimizer.optimizer).__name__}.step() was called in an earlier micro-step of an "
                    "update, where it does nothing, but not in the last one, so the parameters did not change. Call "
                    "step() in every loop iteration, or when accelerator.sync_gradients is true; here, an iteration "
                    "is not an update"
                )
                return

    def _drop_partial_update(self) -> None:
        """Drop the gradients of an update whose loop ended early; its samples are read again."""
        self._is_mid_update = False
        self._kept.clear()
        self.objects.drop_update()

    def _check_batch_norms(self, contribution: Contribution) -> None:
        training = [norm for norm in self._batch_norms if norm.training]
        idle = [] if contribution.step is None else [r for r, num in enumerate(contribution.step.real) if num == 0]
        if idle and training:
            raise UsageError(
                f"an update of {len(contribution.update)} samples leaves rank(s) {', '.join(map(str, idle))} without "
                "samples, and BatchNorm in training mode would count their padding samples",
                where="parity='exact'",
                do="use drop_last=True, a different batch size, fewer processes, or GroupNorm",
            )
        if contribution.num_micro_steps == 1:
            # SyncBatchNorm sees the micro-batches of all ranks, which is the whole batch here.
            training = (
                [] if self.loss_world.world_size == 1 else [n for n in training if not isinstance(n, SyncBatchNorm)]
            )
        if training and not self._warned_of_batch_norm:
            self._warned_of_batch_norm = True
            warn(
                f"the model has {len(training)} BatchNorm layer(s) that compute statistics per micro-batch, so the "
                "update depends on how the batch is split, with or without parity='exact'. Use GroupNorm or "
                "LayerNorm, or torch.nn.SyncBatchNorm.convert_sync_batchnorm(model), which uses all ranks' samples "
                "and matches one process if there is no gradient accumulation"
            )

    # ---- backward ----------------------------------------------------------------------------------------------------

    def count_micro_batch(self) -> bool:
        """See ``UpdatePolicy``; a prepared loader has already started the micro-step."""
        if not self.drives:
            return super().count_micro_batch()
        self.step += 1
        return self.state.sync_gradients or self.state.plugin.sync_each_batch

    @property
    def driver(self) -> PassDriver[PreparedLoader]:
        """See ``UpdatePolicy``."""
        return self

    @property
    def is_unfinished(self) -> bool:
        """See ``UpdatePolicy``."""
        return not self.state.sync_gradients

    def check_prepared(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        """See ``UpdatePolicy``; this checks that all ranks start with the same model."""
        if self.world.world_size > 1:
            agree_on_models(models)

    def backward(self, loss: torch.Tensor, num_items: float | None, kwargs: Mapping[str, Any]) -> None:
        """See ``Accelerator.backward``."""
        if not isinstance(loss, torch.Tensor) or not loss.requires_grad or (loss.dim() > 0 and loss.numel() != 1):
            loss = checked_loss(loss, kwargs, num_devices=self.engine.capabilities.num_devices)
        if self.unprepared.is_pending:
            self.check_unprepared()
        state, objects = self.state, self.objects
        if state.sync_gradients:
            self.require_every_rank("backward()")
        contribution, scale, factor = self.contribution(), None, 1.0
        self._is_outside = contribution is None
        if contribution is None and self._is_mid_update:
            raise UsageError(
                "backward() was called after a loader's iterator was closed in the middle of an update with several "
                "micro-steps (by leaving a loop, or by next(iter(loader))), so the update cannot be completed",
                where=f"parity={self.config.value.parity!r}, micro-step {self.progress.micro_step}",
                do="keep the iterator (batches = iter(loader)), leave loops only when accelerator.sync_gradients is "
                "true, or use one micro-step per update: remove gradient_accumulation_steps and max_micro_batch_size",
            )
        if contribution is not None:
            num_items, is_counted = (0.0 if contribution.is_padding else num_items), num_items is not None
            items = contribution.num_items if num_items is None else num_items
            self._require_newest_batch(contribution)
            postponed = sum(optimizer.num_postponed for optimizer in objects.optimizers)
            self.note_loss(loss, items, num_postponed=postponed, num_taken=objects.num_steps())
            self._split_check.check(loss, objects.models, contribution, is_counted=is_counted)
            if not is_counted:
                scale = self.weigh(contribution)
        else:
            self._require_newest_batch(None, is_counted=num_items is not None)
        if scale is None:
            inside = self.accumulating is not None or contribution is not None
            if num_items is None:
                scale, factor = self.window.plain(num_steps=state.num_steps, inside=inside, sync=state.sync_gradients)
            else:
                trained = frozenset(map(id, self.trained_models()))
                scale, factor = self.window.weighted(
                    num_items, inside=inside, sync=state.sync_gradients, trained=trained
                )
        self.before_backward()
        self._backpropagate(loss, scale, kwargs, num_items)
        self.after_backward()
        if factor != 1.0:
            self._finish_gradients(factor)

    def _require_newest_batch(self, contribution: Contribution | None, *, is_counted: bool = True) -> None:
        """Raise if the loop has fetched other batches before it trains this one: weights and losses follow the newest batch.

        Args:
            contribution: that of the newest batch. None: outside of a loader's loop. A single batch may be trained there
                (``next(iter(loader))``), several may not.
            is_counted: whether the loop passes the number of items.
        """
        lead = self._update_loaders.lead
        loader = self.state.reading.trained if lead is None else lead
        if loader is None:
            return
        if contribution is not None and self._is_counted:
            # The copies of batches that were fetched ahead cannot be recognized, but each of them is followed by a step.
            is_wrong = self._misses_losses and self._step_counts() != self._step_counts_before
        else:
            # Outside of a loader's loop, accumulate() has taken the batch that is trained.
            is_taken = contribution is None and self.accumulating is not None and self.state.plugin.sync_with_dataloader
            held = loader.fetched.take_held(is_taken=is_taken)
            is_wrong = len(held) > 1 if contribution is None else bool(held) and held[0] is not contribution
            if contribution is None and not is_counted and any(one.step is not None for one in held):
                raise UsageError(
                    "the ranks have different numbers of samples of a batch that is trained outside of its loader's loop, where losses "
                    "have equal weights",
                    where=f"backward(), parity={self.config.value.parity!r}",
                    do="train the batch in the loop over the loader, or call accelerator.backward(loss, num_items=n)",
                )
        if is_wrong:
            raise UsageError(
                "several batches were fetched before the first of them is trained, so losses cannot be assigned to the updates of "
                "their batches",
                where=f"backward(), parity={self.config.value.parity!r}",
                do="fetch each batch right before it is trained; to divide by the number of items of a whole update, call "
                "accelerator.backward(loss, num_items=n), which adds them up",
            )

    def before_backward(self) -> None:
        """Check gradients before the current batch's backward pass."""
        self._kept.require_unchanged()

    def after_backward(self) -> None:
        """Record gradients after the backward pass. Collective in the last micro-step."""
        self._keep_gradients()

    def note_cleared(self) -> None:
        """See ``PassDriver``."""
        self._kept.clear()

    def _keep_gradients(self) -> None:
        if self._is_mid_update:
            self._kept.record(self.objects.models)
        else:
            self._kept.clear()

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any] | None:
        """See ``UpdatePolicy``; an unfinished accumulation window is replayed from the RNG state it started with."""
        self._count_tokens()
        return self._random_states if self._is_mid_update else None

    def drop_update(self) -> None:
        """See ``UpdatePolicy``."""
        super().drop_update()
        self._is_mid_update = self._is_counted = self._has_several_micro_steps = False
        self._micro_step_items = self._random_states = None
        self.window.total = 0.0  # counted as tokens otherwise
        self._kept.clear()
        lead = self._update_loaders.lead
        loader = self.state.reading.trained if lead is None else lead
        if loader is not None:
            loader.fetched.skip_waiting()  # the loss of a dropped update may still hold its batch

    # ---- losses ------------------------------------------------------------------------------------------------------

    def contribution(self) -> Contribution | None:
        """Return the current batch's share of its update; None outside a prepared loader's loop.

        Raises:
            UsageError: the pass is an evaluation, whose batches do not form updates.
        """
        if self._update_loaders.lead is not None:
            self._update_loaders.require_usable_batches()
            return self._update_loaders.lead.contribution
        loader = self.state.active_dataloader
        if loader is None or loader.contribution is None:
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
        """See ``PassDriver``."""
        return not self._is_counted and self.drives and self.progress.micro_step > 1

    @property
    def micro_step(self) -> int:
        """See ``PassDriver``."""
        return self.progress.micro_step

    @property
    def num_items(self) -> float | None:
        """See ``PassDriver``."""
        return self._micro_step_items

    @property
    def place(self) -> tuple[int, int]:
        """See ``PassDriver``; sums may be added in any order."""
        return 0, 1

    @contextmanager
    def evaluating_again(self, who: str) -> Iterator[None]:
        """See ``PassDriver``."""
        self._is_reevaluating = True
        try:
            yield
        finally:
            self._is_reevaluating = False

    def note_loss(self, loss: torch.Tensor, num_items: float, *, num_postponed: int, num_taken: int) -> None:
        """Add a mean loss over ``num_items`` items to the update's loss.

        Args:
            loss: mean loss for the current batch.
            num_items: on this rank.
            num_postponed: number of optimizer ``step`` calls so far that were postponed to the end of an update.
            num_taken: number of optimizer steps taken so far.
        """
        if self._is_reevaluating:
            return
        if not self._is_counted:
            if self._has_several_micro_steps:
                self._check_parameters_unchanged()
            self._micro_step_items = num_items
            self._num_items += num_items
            self._is_counted = self._has_had_loss = True
            self._num_postponed = num_postponed
        elif num_postponed > self._num_postponed and not self._warned_of_postponed_step:
            self._warned_of_postponed_step = True
            warn(
                "a second loss for the same batch was computed after an optimizer's step(), which is postponed to the "
                "last micro-step. If the loss depends on that optimizer's parameters, it uses their old values, with "
                "or without parity='exact'. To use the new values, remove gradient_accumulation_steps and "
                "max_micro_batch_size"
            )
        if num_items:
            self._losses.append((loss.detach(), num_items))

    def _check_parameters_unchanged(self) -> None:
        """Compare parameter versions with those in the first micro-step, for each model's first and last parameter."""
        trained = [[p for p in model.parameters() if p.requires_grad] for model in self.objects.models]
        now = [getattr(p, "_local_tensor", p)._version for own in trained for p in own[:1] + own[-1:]]
        if self.micro_step > 1 and self._parameter_versions not in ([], now):
            self._report_changed_parameters()
        self._parameter_versions = now

    def _report_changed_parameters(self) -> None:
        if not self._warned_of_changed_parameters:
            self._warned_of_changed_parameters = True
            warn(f"{CHANGED}. {HOW_TO_CHANGE}")

    def update_loss(self) -> float:
        """Return the mean loss since the update started; nan if there were no items. Collective.

        Raises:
            UsageError: the loss was computed outside of a loader's loop, or there has been none.
        """
        if self._is_outside:
            raise UsageError(
                "update_loss() knows the losses of batches that are trained in the loop over their loader, and the latest one was "
                "trained outside of it",
                where=f"parity={self.config.value.parity!r}",
                do="train each batch in the loop, right after it was fetched, or average the loss with accelerator.reduce(loss.detach(), "
                "'mean')",
            )
        mine = sum(float(loss) * num_items for loss, num_items in self._losses)
        loss, num_items = self._sum_over_ranks([mine, self._num_items])
        return self._mean(loss, num_items)

    def _mean(self, total: float, num_items: float) -> float:
        """Return an update's mean loss; nan if it had no items.

        Raises:
            UsageError: no loss has been recorded at all.
        """
        if not num_items and not self._has_had_loss:
            raise UsageError("no loss has been recorded yet", do="call update_loss() after backward()")
        return total / num_items if num_items else math.nan

    def loader_options(self, config: DataLoaderConfiguration) -> ExactOptions:
        """Return how loaders split batches. Collective on the first call."""
        seed = self.seed
        return ExactOptions(
            seed=seed if config.data_seed is None else config.data_seed,
            order=config.order,
            max_micro_batch_size=self._max_micro_batch_size,
            replays=config.replay_iterable,
        )

    def weigh(self, contribution: Contribution) -> float:
        """Return the factor for a mean loss over the samples in ``contribution``, computed without communication."""
        self._update_loaders.require_matching_shares(contribution)
        return contribution.num_items * self.data_world.world_size / len(contribution.update)


def describe_batch(batch_size: int, *, world_size: int, num_micro: int) -> str:
    """Return how a global batch is split, such as ``global batch 32 = 2 processes x 16 samples``."""
    parts = [f"{world_size} process{'es' if world_size > 1 else ''}"]
    if num_micro > 1:
        parts.append(f"{num_micro} micro-steps")
    least, rest = divmod(batch_size, world_size * num_micro)
    samples = f"{least} to {least + 1} samples" if rest else f"{least} sample{'s' if least > 1 else ''}"
    return f"global batch {batch_size} = {' x '.join([*parts, samples])}"


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
