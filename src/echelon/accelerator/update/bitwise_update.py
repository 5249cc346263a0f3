"""``parity="bitwise"``: updates that are bit-identical on any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Literal

import torch
from torch import nn
from torch.optim import Optimizer

from echelon.accelerator.update.exact_update import CHANGED, HOW_TO_CHANGE
from echelon.accelerator.update.kept_gradients import KeptGradients
from echelon.accelerator.update.numerics_environment import (
    NumericsEnvironment,
    build_numerics_environment,
    refuse_changed_buffers,
    refuse_modules,
    refuse_optimizers,
    refuse_sparse_gradients,
)
from echelon.accelerator.update.update_parts import UpdateParts
from echelon.base.errors import ConfigError, UsageError
from echelon.base.messages.translation import gettext as _
from echelon.data.global_batch_slices import Contribution
from echelon.data.rng.per_sample_rng import key_of
from echelon.world.seed import seed_random_and_numpy

# Stand-ins for a shard number: draws after the last backward pass of an update, and draws of a process without a shard.
_AFTER, _IDLE = -1, -2


class ShardSplit:
    """Splits each update into the same shards on any number of processes, and isolates state that depends on a shard."""

    parity: Literal["exact", "bitwise"] = "bitwise"
    averages_gradients = False
    allows_alternation = False  # with fewer processes an update has several micro-steps

    def __init__(self, parts: UpdateParts, environment: NumericsEnvironment) -> None:
        """Create the split; the engine sums the gradients of shards from now on."""
        self.environment: NumericsEnvironment | None = environment
        self.canonical_shards: int | None = environment.canonical_shards
        self._parts = parts
        self._num_shards = environment.canonical_shards
        self._num_threads = environment.threads
        self._sums = parts.engine.build_sharded_update(
            self._num_shards, parts.objects.parameters, num_chunks=environment.canonical_chunks or 1
        )
        # Buffer versions before the first update; None once it has been checked.
        self._versions: dict[int, int] | None = {}
        self._contribution: Contribution | None = None
        self._seed = 0

    @property
    def place(self) -> tuple[int, int]:
        """Index of the current shard, and the number of shards."""
        shard = None if self._contribution is None else self._contribution.shard
        return shard or 0, self._num_shards  # a process without a shard adds zeros

    def describe(self, batch_size: int) -> str:
        """Return how a batch is divided into shards.

        Raises:
            ConfigError: a shard exceeds ``max_micro_batch_size``.
        """
        largest = -(-batch_size // self._num_shards)
        limit = self._parts.config.value.max_micro_batch_size
        if limit is not None and largest > limit:
            raise ConfigError(
                f"max_micro_batch_size={limit} is smaller than a shard: a batch of {batch_size} is split into "
                f"{self._num_shards} shards of up to {largest} samples",
                where="parity='bitwise'",
                do=f"set canonical_shards={-(-batch_size // limit)} or a larger max_micro_batch_size",
            )
        n = self._parts.data_world.world_size
        rounds = -(-self._num_shards // n)
        used = self._num_shards / (n * rounds)
        utilization = f" ({100 * used:.0f} % utilization)" if used < 1 else ""
        return (
            f"parity='bitwise': batch {batch_size} = {self._num_shards} shards of {batch_size // self._num_shards}"
            f"{'' if batch_size % self._num_shards == 0 else f' to {largest}'} samples, {rounds} on each of {n} "
            f"process{'es' if n > 1 else ''}{utilization}"
        )

    def check_prepared(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        """Raise if a module or optimizer would make the bits depend on the number of processes."""
        refuse_modules(models)
        refuse_optimizers(optimizers, is_sharded=self._parts.engine.capabilities.shards_parameters)

    def begin_pass(self) -> None:
        """Check again for layers that mix samples in a shard."""
        refuse_modules(self._parts.objects.models)

    def begin_micro_step(self, contribution: Contribution, kept: KeptGradients, *, seed: int) -> None:
        """Start a shard's micro-step and seed its random numbers."""
        if contribution.micro_step:
            kept.require_unchanged()  # the gradients of the previous shard are about to be stored
        kept.clear()
        self._sums.begin(contribution)
        if contribution.micro_step == 0:
            self._require_threads()
            if self._versions is not None:
                models = self._parts.objects.models
                self._versions = {id(b): b._version for model in models for b in model.buffers()}
        self._contribution, self._seed = contribution, seed
        self._draw_from(_IDLE if contribution.shard is None else contribution.shard)

    def _draw_from(self, shard: int) -> None:
        """Seed all generators from the run's seed, the update's position, and ``shard``."""
        assert self._contribution is not None
        key = key_of(self._seed, self._parts.progress.epoch, self._contribution.update.start, shard)
        torch.default_generator.manual_seed(key)
        seed_random_and_numpy(key)
        device = self._parts.world.device
        if device.type != "cpu":
            torch.get_device_module(device).manual_seed(key)

    def _require_threads(self) -> None:
        if torch.get_num_threads() != self._num_threads:
            raise UsageError(
                f"torch now uses {torch.get_num_threads()} threads, but the run started with "
                f"{self._num_threads}, so kernels would round differently",
                where="parity='bitwise'",
                do="remove torch.set_num_threads() from the script and set OMP_NUM_THREADS before starting the run",
            )

    def refuse_outside(self) -> None:
        """Raise, because the loss cannot be assigned to a shard."""
        raise UsageError(
            "backward() was called outside a prepared DataLoader's loop, which defines the shards of an update",
            where="parity='bitwise'",
            do="prepare the loader and call backward() in its loop, or use parity='exact'",
        )

    def check_loss(self, num_items: float, *, num_postponed: int, num_taken: int) -> None:
        """Raise if the sum of the losses would depend on the number of processes."""
        if num_items != int(num_items):
            raise UsageError(
                f"num_items={num_items} is not an integer, so its sum would depend on the order of the processes",
                where="parity='bitwise'",
                do="pass an integer count as num_items, and scale the loss instead",
            )
        if num_postponed + num_taken > 0:
            raise UsageError(
                "a second loss for the same batch was computed after an optimizer's step(). It uses the new "
                "parameters with one shard per process, but the old ones with several, so the bits would depend on "
                "the number of processes",
                where="parity='bitwise'",
                do="compute both losses before the first step(), give each optimizer its own loop, or use parity='exact'",
            )

    def add(self, losses: Sequence[float]) -> float:
        """Return the correctly rounded sum, which does not depend on the order."""
        return math.fsum(losses)

    def report_changed_parameters(self) -> None:
        """Raise, because processes with fewer shards would not notice it."""
        raise UsageError(_(CHANGED), where="parity='bitwise'", do=_(HOW_TO_CHANGE))

    def before_reevaluation(self, who: str) -> None:
        """Raise, because with fewer processes an update has several micro-steps, whose batches are not kept."""
        raise UsageError(
            f"{who} evaluates its closure again with different parameters. With several shards per process, the "
            "earlier shards' batches are not kept",
            where="parity='bitwise', optimizer.step(closure)",
            do="use an optimizer that evaluates its closure once (LBFGS: max_iter=1), or parity='exact' with one "
            "micro-step per update",
        )

    def before_backward(self, kept: KeptGradients) -> None:
        """Prepare the sum for a backward pass; the gradients were checked when the micro-step started."""
        self._sums.before_backward()

    def keeps_after_zero_grad(self, parameters: Collection[int], *, clears: bool) -> bool:
        """Return whether a backward pass of this micro-step has reached the parameters; forget gradients of earlier updates."""
        if clears:
            self._sums.forget_earlier(parameters)
        return self._sums.has_reached(parameters)

    def report_kept_gradients(self) -> None:
        """Raise, because the gradients of the loss before have been added to the sums over the shards."""
        raise UsageError(
            "zero_grad() between two losses of a batch would clear gradients of the first loss, which have been added to the "
            "sums over the shards",
            where="parity='bitwise'",
            do="detach what the first loss need not reach (generator(x).detach()), call zero_grad() before the first loss, or "
            "use parity='exact'",
        )

    def after_backward(self, *, ends_update: bool) -> None:
        """Sum the shards in the last micro-step, and reseed the RNGs for use outside a shard."""
        models = self._parts.objects.models
        if self._versions is not None:
            refuse_sparse_gradients(models)
        if not ends_update:
            return
        self._sums.finish()
        self._draw_from(_AFTER)
        if self._versions is not None:
            before, self._versions = self._versions, None
            refuse_changed_buffers(models, before)

    def drop_update(self) -> None:
        """Drop the sums of the shards so far."""
        self._sums.discard()
        self._contribution = None


def build_shard_split(
    parts: UpdateParts, *, comm_hook: object, num_chunks: int | None = None, other_axes: Sequence[str] = ()
) -> ShardSplit:
    """Return the split for ``parity="bitwise"``, which replaces the engine's gradient reduction.

    Args:
        parts: the run's parts.
        comm_hook: DDP communication hook that the script configured.
        num_chunks: number of canonical chunks of split layers. None: no layers are split.
        other_axes: axes on which ranks read the same samples, beside ``tp``.

    Collective: call on every rank.

    Raises:
        ConfigError: there are fewer shards than processes, or the bits would depend on the number of processes.
        UsageError: the engine does not support ``parity="bitwise"``.
    """
    config, world = parts.config, parts.world
    num_shards, num_readers = config.value.canonical_shards, parts.data_world.world_size
    if other_axes:
        raise ConfigError(
            f"parity='bitwise' sums the gradients of batch shards in a fixed order, but with {' and '.join(f'{axis}_size' for axis in other_axes)}, "
            "sums inside a sample or over micro-batches are also divided among the ranks, in an order that depends on their number",
            where=f"{config.origins['parity']}, parallelism_config",
            do="use only data-parallel axes and tp_size (dp_replicate_size, dp_shard_size), or parity='exact'",
        )
    if num_shards < num_readers:
        raise ConfigError(
            _(
                "canonical_shards={num_shards} is less than the number of processes ({num_readers}), so some "
                "processes would be idle",
                num_shards=num_shards,
                num_readers=num_readers,
            ),
            where=str(config.origins["canonical_shards"]),
            do=_(
                "set canonical_shards={num_readers} or more, and the same value in every run that must match bit for "
                "bit",
                num_readers=num_readers,
            ),
        )
    if str(getattr(comm_hook, "value", comm_hook)) != "no":
        raise ConfigError(
            f"comm_hook={str(comm_hook)!r} has no effect, because DDP sends no gradients with parity='bitwise'",
            where="parity='bitwise'",
            do="remove comm_hook, or use parity='exact'",
        )
    return ShardSplit(parts, build_numerics_environment(config, world.device, num_chunks=num_chunks or 0))
