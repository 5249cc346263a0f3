"""``parity="exact"``: the weight of each micro-step in its update, so that the update is that of one process."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm
from torch.optim import Optimizer

from echelon.accelerator.checkpoint.rng_states import current_random_states
from echelon.accelerator.plugins.configuration import DataLoaderConfiguration
from echelon.accelerator.setup.agreement import agree_on_models
from echelon.accelerator.update.kept_gradients import KeptGradients
from echelon.accelerator.update.multiple_loaders import UpdateLoaders
from echelon.accelerator.update.update_policy import UpdateParts, UpdatePolicy, checked_loss
from echelon.base.errors import UsageError
from echelon.base.logging import get_logger
from echelon.base.warnings import warn
from echelon.data.active_loaders import PassDriver
from echelon.data.exact.exact_batches import ExactOptions, PassPlan
from echelon.data.exact.global_batch_slices import Contribution, num_micro_steps
from echelon.data.loader import PreparedLoader
from echelon.data.rng.per_sample_rng import key_of
from echelon.distributed.small_messages import gather_counts
from echelon.world.world import World

__all__ = ["ExactUpdate"]

_logger = get_logger(__name__)
CHANGED = "the parameters changed between two micro-steps of an update: in one whole batch all its gradients are those of the same ones"
HOW_TO_CHANGE = (
    "Change them only where accelerator.sync_gradients is true, after the step; an optimizer of two steps (SAM) needs updates "
    "of one micro-step (no gradient_accumulation_steps and no max_micro_batch_size, more processes instead)"
)


class ExactUpdate(UpdatePolicy, PassDriver[PreparedLoader]):
    """Turns the contributions of prepared loaders into windows of the update: the loader decides where one ends."""

    _takes_turns = True
    """May loaders take turns, where an update is one micro-step?"""

    uses_global_batches = True

    def __init__(self, parts: UpdateParts) -> None:
        super().__init__(parts)
        self._seed = self.config.value.seed
        self._max_micro_batch_size = self.config.value.max_micro_batch_size
        self._losses: list[tuple[torch.Tensor, float]] = []  # of the update: each a mean over items of this rank
        self._num_items = 0.0  # of the update, this rank's
        self._is_counted = False  # are the items of this micro-step in it?
        self._has_had_loss = False  # of any update
        self._items_in_hand: float | None = None  # those items
        self._is_again = False  # are losses made again, at other parameters?
        self._num_postponed = 0  # at the first loss of the micro-step
        self._is_told_of_turns = False
        self._is_warned = False
        self._batch_norms: list[_BatchNorm] = []
        self._kept = KeptGradients("exact")
        self._told: set[str] = set()
        self._turns = UpdateLoaders(are_taken=self._takes_turns)
        self._interrupted: dict[
            int, tuple[list[tuple[torch.Tensor, float]], float, bool, float | None]
        ] = {}  # of outer loops
        self._is_told_of_halves = False
        self._has_several = False  # micro-steps of the update
        self._versions_of_parameters: list[int] = []  # at the first loss of the update
        self._is_told_of_changes = False
        self._is_within = False  # has an update begun, and not come to its last micro-step?
        self._random_states: dict[str, Any] | None = None  # at its beginning, where it has several micro-steps

    @property
    def seed(self) -> int:
        """Of the run; the same on every rank. Where none was given, rank zero's of torch when the first loader is prepared.

        Not earlier: many a script makes its Accelerator first, and calls ``set_seed`` then.

        Collective: at the first call.
        """
        if self._seed is None:
            (seeds,) = gather_counts(torch.initial_seed() & (2**62 - 1))
            self._seed = seeds[0]
        return self._seed

    def log_batch_size(self, batch_size: int | None) -> None:
        """Say once what a batch size means now."""
        if batch_size is None:
            return
        world_size = self.world.world_size
        micro = num_micro_steps(
            batch_size,
            world_size=world_size,
            wanted=self.state.num_steps,
            max_micro_batch_size=self._max_micro_batch_size,
        )
        line = describe_batch(batch_size, world_size=world_size, num_micro=micro)
        if line not in self._told:
            self._told.add(line)
            # At the level that is seen by default: a number of the script has another meaning now.
            _logger.warning("parity='exact': a DataLoader's batch is that of all processes together, %s", line)

    # ---- what loaders tell -------------------------------------------------------------------------------------------

    def plan_pass(self, beginning: PreparedLoader | None = None) -> PassPlan:
        """A pass is one of updates when gradients are on and a prepared model is in training mode, or none is prepared."""
        models = self.objects.models
        trains = torch.is_grad_enabled() and (not models or any(model.training for model in models))
        # One that is read beside another (zip) has as many pieces.
        num_beside = self._turns.num_micro_steps_beside(beginning, is_counted=self._is_counted)
        return PassPlan(num_micro_steps=max(self.state.num_steps, num_beside), trains=trains)

    def begin_pass(self, loader: PreparedLoader, plan: PassPlan) -> None:
        """Give each rank a random stream of its own, and look for batch norms.

        Collective: a pass of updates.
        """
        if not plan.trains:
            return
        build_random_streams(self.world)
        self.progress.epoch = loader.iteration
        self._batch_norms = [m for model in self.objects.models for m in model.modules() if isinstance(m, _BatchNorm)]

    def begin_micro_step(self, loader: PreparedLoader, contribution: Contribution) -> None:
        """Open the micro-step of the batch that the loader is about to give."""
        before = self._turns.lead
        if not self._turns.leads(loader, contribution, is_counted=self._is_counted, is_within=self._is_within):
            return
        if before is not None and before is not loader:
            self._interrupted[id(before)] = (self._losses, self._num_items, self._is_counted, self._items_in_hand)
        self._interrupted.pop(id(loader), None)
        self._open_micro_step(contribution)

    def _open_micro_step(self, contribution: Contribution) -> None:
        if contribution.micro_step > 0 and not self._is_within:
            raise UsageError(
                "a loop goes on with an update whose beginning was given up, because another pass of its loader began within it",
                where="parity='exact'",
                do="read a loader in one loop at a time, or let an update be one micro-step (no gradient_accumulation_steps and "
                "no max_micro_batch_size, more processes instead)",
            )
        if self._batch_norms:
            self._check_batch_norms(contribution)
        self.state.sync_gradients = contribution.ends_update
        if contribution.micro_step == 0:
            self._count_tokens()
            if self._is_within:
                if self._losses:
                    self._tell_of_half_an_update()
                self._drop_half_an_update()
            self.window.is_open = False
            self._losses, self._num_items = [], 0.0
            self._random_states = current_random_states() if contribution.num_micro_steps > 1 else None
            self._has_several, self._versions_of_parameters = contribution.num_micro_steps > 1, []
            self._kept.forget()
        self._is_within = not contribution.ends_update
        self._is_counted, self._items_in_hand = False, None
        self.state.has_loss = False
        self.window.begin_micro_step()
        self.progress.micro_step = contribution.micro_step + 1
        self.progress.position = contribution.next_position
        if contribution.ends_update:
            self.progress.samples_seen += len(contribution.update)

    def end_pass(self, loader: PreparedLoader, *, is_over: bool) -> None:
        """See ``PassDriver``: the loop around it, if there is one, goes on with the batch that it has in hand."""
        self._interrupted.pop(id(loader), None)
        outer = self._turns.end(loader, is_over=is_over)
        if outer is None:
            return
        if self._is_within and self._losses:
            self._drop_half_an_update()
        self._is_within = False  # else its batch was only looked at
        kept = self._interrupted.pop(id(outer), None)
        assert kept is not None
        self._losses, self._num_items, self._is_counted, self._items_in_hand = kept
        self.state.sync_gradients = True  # loaders take turns where an update is one micro-step
        self.window.is_open = False
        self.window.begin_micro_step()
        self.progress.micro_step = 1

    def _count_tokens(self) -> None:
        self.progress.tokens_seen += self.window.total
        self.window.total = 0.0

    def _tell_of_half_an_update(self) -> None:
        if not self._is_told_of_halves:
            self._is_told_of_halves = True
            warn(
                "a loop was left within an update of several micro-steps, whose gradients are forgotten, as its samples come "
                "again: leave it where accelerator.sync_gradients is true, and count updates (accelerator.progress.step), not "
                "turns of the loop"
            )

    def _drop_half_an_update(self) -> None:
        """Forget the gradients of an update whose loop was left in its middle: its samples come again."""
        self._is_within = False
        self._kept.forget()
        self.objects.drop_gradients()

    def _check_batch_norms(self, contribution: Contribution) -> None:
        training = [norm for norm in self._batch_norms if norm.training]
        idle = [] if contribution.step is None else [r for r, num in enumerate(contribution.step.real) if num == 0]
        if idle and training:
            raise UsageError(
                f"an update of {len(contribution.update)} samples leaves rank(s) {', '.join(map(str, idle))} without any, and "
                "a BatchNorm in training mode would count the sample that they borrow",
                where="parity='exact'",
                do="use drop_last=True, another batch size, fewer processes, or GroupNorm",
            )
        if contribution.num_micro_steps == 1:
            # SyncBatchNorm sees the micro-batches of all ranks: here, the whole batch.
            training = [] if self.world.world_size == 1 else [n for n in training if not isinstance(n, SyncBatchNorm)]
        if training and not self._is_warned:
            self._is_warned = True
            warn(
                f"the model has {len(training)} BatchNorm layer(s), whose statistics are those of a micro-batch: the update "
                "depends on how the batch is split, parity='exact' or not. GroupNorm or LayerNorm does not; "
                "torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) sees all ranks, without accumulation the same as one"
            )

    # ---- backward ----------------------------------------------------------------------------------------------------

    def count_micro_batch(self) -> bool:
        """See ``UpdatePolicy``: a prepared loader has opened the micro-step."""
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

    def note_prepared(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        """See ``UpdatePolicy``: the ranks begin with the same model."""
        if self.world.world_size > 1:
            agree_on_models(models)

    def backward(self, loss: torch.Tensor, num_items: float | None, kwargs: Mapping[str, Any]) -> None:
        """See ``Accelerator.backward``."""
        if not isinstance(loss, torch.Tensor) or not loss.requires_grad or (loss.dim() > 0 and loss.numel() != 1):
            loss = checked_loss(loss, kwargs, num_devices=self.engine.capabilities.num_devices)
        if self.unprepared.is_pending:
            self.unprepared.run(self.objects.models)
        state, objects = self.state, self.objects
        if state.sync_gradients:
            self.require_every_rank("backward()")
        contribution, scale, factor = self.contribution(), None, 1.0
        if contribution is not None:
            num_items, is_counted = (0.0 if contribution.is_padding else num_items), num_items is not None
            items = contribution.num_items if num_items is None else num_items
            postponed = sum(optimizer.num_postponed for optimizer in objects.optimizers)
            self.note_loss(loss, items, num_postponed=postponed, num_taken=objects.num_steps())
            if not is_counted:
                scale = self.weigh(contribution)
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
        self._backpropagate(loss, scale, kwargs)
        self.after_backward()
        if factor != 1.0:
            self._finish_gradients(factor)

    def before_backward(self) -> None:
        """A backward pass of the batch in hand begins."""
        self._kept.require()

    def after_backward(self) -> None:
        """It has ended. Collective: in the last micro-step."""
        self._keep_gradients()

    def note_cleared(self) -> None:
        """See ``PassDriver``."""
        self._kept.forget()

    def _keep_gradients(self) -> None:
        if self._is_within:
            self._kept.note(self.objects.models)
        else:
            self._kept.forget()

    # ---- what checkpoints ask ----------------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any] | None:
        """See ``UpdatePolicy``: an unfinished accumulation window is replayed with the RNG state it started with."""
        self._count_tokens()
        return self._random_states if self._is_within else None

    def restore(self) -> None:
        """See ``UpdatePolicy``."""
        self._drop_half_an_update()
        self.window.total = 0.0

    # ---- what the loop asks ------------------------------------------------------------------------------------------

    def contribution(self) -> Contribution | None:
        """Return what the batch in hand is in its update; None outside the loop of a prepared loader.

        Raises:
            UsageError: the pass is an evaluation, and its batches are no whole updates.
        """
        if self._turns.lead is not None:
            self._turns.require_fit()
            return self._turns.lead.contribution
        loader = self.state.active_dataloader
        if loader is None or loader.contribution is None:
            return None
        assert loader.plan is not None
        if not loader.plan.trains and loader.holds_no_update:
            raise UsageError(
                "backward() in a pass that began as an evaluation (all models in eval mode, or gradients off), whose "
                "batches are cut and joined so that results come in order and every process has some",
                where="parity='exact'",
                do="call model.train() before the loop; parts of it may be in eval mode",
            )
        return loader.contribution

    @property
    def drives(self) -> bool:
        """Does a loader decide where the update ends?"""
        return self._turns.lead is not None

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
        return self._items_in_hand

    @property
    def place(self) -> tuple[int, int]:
        """See ``PassDriver``: sums in any order will do."""
        return 0, 1

    @contextmanager
    def evaluating_again(self, who: str) -> Iterator[None]:
        """See ``PassDriver``."""
        self._is_again = True
        try:
            yield
        finally:
            self._is_again = False

    def note_loss(self, loss: torch.Tensor, num_items: float, *, num_postponed: int, num_taken: int) -> None:
        """Add a loss, a mean over ``num_items``, to the loss of the update.

        Args:
            loss: of the batch in hand.
            num_items: of this rank.
            num_postponed: calls of an optimizer's ``step`` so far that were left to the end of an update.
            num_taken: steps so far.
        """
        if self._is_again:
            return
        if not self._is_counted:
            if self._has_several:
                self._look_at_parameters()
            self._items_in_hand = num_items
            self._num_items += num_items
            self._is_counted = self._has_had_loss = True
            self._num_postponed = num_postponed
        elif num_postponed > self._num_postponed and not self._is_told_of_turns:
            self._is_told_of_turns = True
            warn(
                "a second loss of a batch came after an optimizer's step(), which is left to the last of several "
                "micro-steps: if it depends on that optimizer's parameters, it does not see their new values as it would in "
                "one whole batch, parity='exact' or not. Without accumulation and max_micro_batch_size it does"
            )
        if num_items:
            self._losses.append((loss.detach(), num_items))

    def _look_at_parameters(self) -> None:
        """Compare the parameters with those of the first micro-step: the ends of each model stand for all of it."""
        trained = [[p for p in model.parameters() if p.requires_grad] for model in self.objects.models]
        now = [getattr(p, "_local_tensor", p)._version for own in trained for p in own[:1] + own[-1:]]
        if self.micro_step > 1 and self._versions_of_parameters not in ([], now):
            self._tell_of_changed_parameters()
        self._versions_of_parameters = now

    def _tell_of_changed_parameters(self) -> None:
        if not self._is_told_of_changes:
            self._is_told_of_changes = True
            warn(f"{CHANGED}. {HOW_TO_CHANGE}")

    def update_loss(self) -> float:
        """Return the mean of the losses noted since the update began; nan: it had no items. Collective."""
        mine = sum(float(loss) * num_items for loss, num_items in self._losses)
        loss, num_items = self._sum_over_ranks([mine, self._num_items])
        return self._mean(loss, num_items)

    def _mean(self, total: float, num_items: float) -> float:
        """Return the mean over ``num_items`` of an update; nan: none.

        Raises:
            UsageError: there was no loss at all.
        """
        if not num_items and not self._has_had_loss:
            raise UsageError("no update has had a loss yet", do="call update_loss() after backward()")
        return total / num_items if num_items else math.nan

    def loader_options(self, config: DataLoaderConfiguration) -> ExactOptions:
        """Return how loaders read. Collective: at the first call."""
        seed = self.seed
        return ExactOptions(
            seed=seed if config.data_seed is None else config.data_seed,
            order=config.order,
            max_micro_batch_size=self._max_micro_batch_size,
            replays=config.replay_iterable,
        )

    def weigh(self, contribution: Contribution) -> float:
        """Return the factor of a loss that is a mean over the samples of ``contribution``: no rank need be asked."""
        self._turns.require_alike(contribution)
        return contribution.num_items * self.world.world_size / len(contribution.update)


def describe_batch(batch_size: int, *, world_size: int, num_micro: int) -> str:
    """Return how a global batch is cut, such as ``global batch 32 = 2 processes x 16 samples``."""
    parts = [f"{world_size} process{'es' if world_size > 1 else ''}"]
    if num_micro > 1:
        parts.append(f"{num_micro} micro-steps")
    least, rest = divmod(batch_size, world_size * num_micro)
    samples = f"{least} to {least + 1} samples" if rest else f"{least} sample{'s' if least > 1 else ''}"
    return f"global batch {batch_size} = {' x '.join([*parts, samples])}"


def build_random_streams(world: World) -> None:
    """Give torch's generators on each rank a stream of its own where all ranks have been seeded equally.

    Rank zero's stays as it is, so that one process is the plain program; the others' come from the same seed. Ranks that
    differ already (seeded by the user, restored, or by this function) keep what they have.

    Collective: every rank.
    """
    if world.world_size == 1:
        return
    mine = torch.initial_seed() & (2**62 - 1)
    (seeds,) = gather_counts(mine)
    if mine in seeds[: world.rank]:
        torch.manual_seed(key_of(mine, world.rank) >> 2)
