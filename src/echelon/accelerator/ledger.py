"""The exact modes' book: what each micro-step weighs in its update, and how far the run is."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from echelon.accelerator.gradient_state import GradientState
from echelon.accelerator.plugins import DataLoaderConfiguration
from echelon.accelerator.window import Window
from echelon.base.errors import UsageError
from echelon.base.progress import Progress
from echelon.base.warnings import warn
from echelon.data.exact import ExactOptions, PassPlan
from echelon.data.keyed import key_of
from echelon.data.loader import Driver, PreparedLoader
from echelon.data.slices import Contribution
from echelon.world.world import World

__all__ = ["Ledger"]


class Ledger(Driver):
    """Turns the contributions of prepared loaders into windows of the update: the loader decides where one ends."""

    def __init__(
        self,
        *,
        world: World,
        seed: int,
        state: GradientState,
        window: Window,
        progress: Progress,
        models: Callable[[], Sequence[nn.Module]],
        max_micro_batch_size: int | None,
    ) -> None:
        self.seed = seed
        """Of the run; the same on every rank."""
        self._world = world
        self._state = state
        self._window = window
        self._progress = progress
        self._models = models
        self._max_micro_batch_size = max_micro_batch_size
        self._loss: torch.Tensor | float = 0.0  # sum over the items of this rank in the update
        self._num_items = 0.0  # of the update, this rank's
        self._is_counted = False  # are the items of this micro-step in it?
        self._has_streams = False
        self._is_warned = False
        self._batch_norms: list[_BatchNorm] = []

    # ---- what loaders tell -------------------------------------------------------------------------------------------

    def plan_pass(self) -> PassPlan:
        """A pass is one of updates when gradients are on and a prepared model is in training mode, or none is prepared."""
        models = self._models()
        trains = torch.is_grad_enabled() and (not models or any(model.training for model in models))
        return PassPlan(num_micro_steps=self._state.num_steps, trains=trains)

    def begin_pass(self, loader: PreparedLoader, plan: PassPlan) -> None:
        """Give each rank a random stream of its own, once, and look for batch norms.

        Collective: the first pass of updates.
        """
        if not plan.trains:
            return
        if not self._has_streams:
            self._has_streams = True
            open_random_streams(self._world, self.seed)
        self._progress.epoch = loader.iteration
        norms = [module for model in self._models() for module in model.modules() if isinstance(module, _BatchNorm)]
        self._batch_norms = norms
        if norms and not self._is_warned and (self._world.world_size > 1 or plan.num_micro_steps > 1):
            self._is_warned = True
            warn(
                f"the model has {len(norms)} BatchNorm layer(s), whose statistics are those of each rank's micro-batch: the "
                "update depends on how the batch is split, parity='exact' or not. GroupNorm or LayerNorm does not; "
                "torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) sees all ranks, without accumulation the same as one"
            )

    def begin_micro_step(self, loader: PreparedLoader, contribution: Contribution) -> None:
        """Open the micro-step of the batch that the loader is about to give."""
        if contribution.step is not None and self._batch_norms:
            self._refuse_loans_with_batch_norm(contribution)
        self._state.sync_gradients = contribution.ends_update
        if contribution.micro_step == 0:
            self._progress.tokens_seen += self._window.total
            self._window.end_window()
            self._loss, self._num_items = 0.0, 0.0
        self._is_counted = False
        self._window.begin_micro_step()
        self._progress.micro_step = contribution.micro_step + 1
        self._progress.position = contribution.next_position
        if contribution.ends_update:
            self._progress.samples_seen += len(contribution.update)

    def _refuse_loans_with_batch_norm(self, contribution: Contribution) -> None:
        assert contribution.step is not None
        idle = [rank for rank, num in enumerate(contribution.step.real) if num == 0]
        if idle and any(norm.training for norm in self._batch_norms):
            raise UsageError(
                f"an update of {len(contribution.update)} samples leaves rank(s) {', '.join(map(str, idle))} without any, and "
                "a BatchNorm in training mode would count the sample that they borrow",
                where="parity='exact'",
                do="use drop_last=True, another batch size, fewer processes, or GroupNorm",
            )

    # ---- what the loop asks ------------------------------------------------------------------------------------------

    def contribution(self) -> Contribution | None:
        """Return what the batch in hand is in its update; None outside the loop of a prepared loader.

        Raises:
            UsageError: the pass is an evaluation, and its batches are no whole updates.
        """
        loader = self._state.active_dataloader
        if loader is None or loader.contribution is None:
            return None
        assert loader.plan is not None
        if not loader.plan.trains and loader.contribution.num_micro_steps > 1:
            raise UsageError(
                "backward() in a pass that began as an evaluation (all models in eval mode, or gradients off), whose "
                "batches are cut so that results come in order",
                where="parity='exact', max_micro_batch_size",
                do="call model.train() before the loop; parts of it may be in eval mode",
            )
        return loader.contribution

    @property
    def drives(self) -> bool:
        """Does a loader decide where the update ends?"""
        loader = self._state.active_dataloader
        return loader is not None and loader.plan is not None and loader.plan.trains

    def note_loss(self, loss: torch.Tensor, num_items: float) -> None:
        """Add a loss, a mean over ``num_items``, to the loss of the update."""
        if not self._is_counted:
            self._num_items += num_items
            self._is_counted = True
        if num_items:
            self._loss = self._loss + loss.detach().double() * num_items

    def update_loss(self, sum_over_ranks: Callable[[list[float]], list[float]]) -> float:
        """Return the mean of the losses noted since the update began. Collective."""
        loss, num_items = sum_over_ranks([float(self._loss), self._num_items])
        if not num_items:
            raise UsageError("no update has had a loss yet", do="call update_loss() after backward()")
        return loss / num_items

    def options(self, config: DataLoaderConfiguration) -> ExactOptions:
        """Return how loaders read."""
        return ExactOptions(
            seed=self.seed if config.data_seed is None else config.data_seed,
            order=config.order,
            max_micro_batch_size=self._max_micro_batch_size,
            replays=config.replay_iterable,
        )

    def weigh(self, contribution: Contribution) -> float:
        """Return the factor of a loss that is a mean over the samples of ``contribution``: no rank need be asked."""
        return contribution.num_items * self._world.world_size / len(contribution.update)


def open_random_streams(world: World, seed: int) -> None:
    """Give torch's generators on each rank a stream of its own where all ranks have been seeded equally.

    Rank zero's stays as it is, so that one process is the plain program. Ranks that differ already (seeded by the user,
    or restored) keep what they have.

    Collective: every rank.
    """
    if world.world_size == 1:
        return
    mine = torch.tensor([torch.initial_seed() & (2**62 - 1)], dtype=torch.int64, device=world.device)
    seeds = [torch.empty_like(mine) for _ in range(world.world_size)]
    dist.all_gather(seeds, mine)
    if world.rank > 0 and any(torch.equal(mine, other) for other in seeds[: world.rank]):
        torch.manual_seed(key_of(seed, world.rank) >> 2)
