"""``parity="bitwise"``: updates that are bit-identical on any number of ranks."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from echelon.accelerator.plugins.configuration import DataLoaderConfiguration
from echelon.accelerator.update.exact_update import CHANGED, HOW_TO_CHANGE, ExactUpdate
from echelon.accelerator.update.kept_gradients import KeptGradients
from echelon.accelerator.update.numerics_environment import (
    NumericsEnvironment,
    build_numerics_environment,
    refuse_changed_buffers,
    refuse_modules,
    refuse_optimizers,
    refuse_sparse_gradients,
)
from echelon.accelerator.update.update_policy import UpdateParts
from echelon.base.errors import ConfigError, UsageError
from echelon.base.logging import get_logger
from echelon.data.exact.exact_batches import ExactOptions, PassPlan
from echelon.data.global_batch_slices import Contribution
from echelon.data.loader import PreparedLoader
from echelon.data.rng.per_sample_rng import key_of

__all__ = ["BitwiseUpdate", "build_bitwise_update"]

# Stand-ins for a shard number: draws after the last backward pass of an update, and draws of a process without a shard.
_AFTER, _IDLE = -1, -2
_logger = get_logger(__name__)


class BitwiseUpdate(ExactUpdate):
    """Splits each update into the same shards on any number of processes, and isolates state that depends on a shard."""

    _allows_alternation = False  # with fewer processes an update has several micro-steps

    averages_gradients = False

    def __init__(self, parts: UpdateParts, *, environment: NumericsEnvironment) -> None:
        """Create the policy; the engine sums the gradients of shards from now on."""
        super().__init__(parts)
        self._kept = KeptGradients("bitwise")
        self._environment = environment
        self.num_shards = environment.canonical_shards
        self.shards = self.engine.build_sharded_update(
            self.num_shards, self.objects.parameters, num_chunks=environment.canonical_chunks or 1
        )
        # Buffer versions before the first update; None once it has been checked.
        self._versions: dict[int, int] | None = {}
        self._by_shard: dict[int, list[tuple[torch.Tensor, float]]] = {}  # losses of this rank in this update
        self._contribution: Contribution | None = None

    def log_batch_size(self, batch_size: int | None) -> None:
        """Log once how this mode splits a batch.

        Raises:
            ConfigError: a shard exceeds ``max_micro_batch_size``.
        """
        if batch_size is None:
            return
        largest = -(-batch_size // self.num_shards)
        limit = self._max_micro_batch_size
        if limit is not None and largest > limit:
            raise ConfigError(
                f"max_micro_batch_size={limit} is smaller than a shard: a batch of {batch_size} is split into "
                f"{self.num_shards} shards of up to {largest} samples",
                where="parity='bitwise'",
                do=f"set canonical_shards={-(-batch_size // limit)} or a larger max_micro_batch_size",
            )
        n = self.data_world.world_size
        rounds = -(-self.num_shards // n)
        used = self.num_shards / (n * rounds)
        line = (
            f"batch {batch_size} = {self.num_shards} shards of {batch_size // self.num_shards}"
            f"{'' if batch_size % self.num_shards == 0 else f' to {largest}'} samples, {rounds} on each of {n} "
            f"process{'es' if n > 1 else ''}"
        )
        if used < 1:
            line += f" ({100 * used:.0f} % utilization)"
        if line not in self._logged:
            self._logged.add(line)
            _logger.warning("parity='bitwise': %s", line)

    def begin_pass(self, loader: PreparedLoader, plan: PassPlan) -> None:
        """Check again for layers that mix samples in a shard."""
        if not plan.trains:
            return
        self.progress.epoch = loader.iteration
        refuse_modules(self.objects.models)

    def _open_micro_step(self, contribution: Contribution) -> None:
        """Start a shard's micro-step and seed its random numbers."""
        if contribution.micro_step:
            self._kept.require_unchanged()  # the gradients of the previous shard are about to be stored
        self._kept.clear()
        super()._open_micro_step(contribution)
        self.shards.begin(contribution)
        if contribution.micro_step == 0:
            self._by_shard = {}
            self._require_threads()
            if self._versions is not None:
                self._versions = {id(b): b._version for model in self.objects.models for b in model.buffers()}
        self._contribution = contribution
        self._draw_from(_IDLE if contribution.shard is None else contribution.shard)

    def _draw_from(self, shard: int) -> None:
        """Seed all generators from the run's seed, the update's position, and ``shard``."""
        assert self._contribution is not None
        key = key_of(self.seed, self.progress.epoch, self._contribution.update.start, shard)
        torch.default_generator.manual_seed(key)
        random.seed(key)
        np.random.seed(key % 2**32)
        device = self.world.device
        if device.type != "cpu":
            torch.get_device_module(device).manual_seed(key)

    def _require_threads(self) -> None:
        if torch.get_num_threads() != self._environment.threads:
            raise UsageError(
                f"torch now uses {torch.get_num_threads()} threads, but the run started with "
                f"{self._environment.threads}, so kernels would round differently",
                where="parity='bitwise'",
                do="remove torch.set_num_threads() from the script and set OMP_NUM_THREADS before starting the run",
            )

    def contribution(self) -> Contribution:
        """See ``ExactUpdate``.

        Raises:
            UsageError: the loss cannot be assigned to a shard.
        """
        found = super().contribution()
        if found is None:
            raise UsageError(
                "backward() was called outside a prepared DataLoader's loop, which defines the shards of an update",
                where="parity='bitwise'",
                do="prepare the loader and call backward() in its loop, or use parity='exact'",
            )
        return found

    def before_backward(self) -> None:
        """See ``ExactUpdate``."""
        self.shards.before_backward()

    def after_backward(self) -> None:
        """See ``ExactUpdate``; the last micro-step sums the shards and reseeds the RNGs for use outside a shard."""
        if self._versions is not None:
            refuse_sparse_gradients(self.objects.models)
        self._keep_gradients()
        if not self.state.sync_gradients:
            return
        self.shards.finish()
        self._draw_from(_AFTER)
        if self._versions is not None:
            before, self._versions = self._versions, None
            refuse_changed_buffers(self.objects.models, before)

    def check_prepared(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        """See ``ExactUpdate``.

        Raises:
            UsageError: a module or optimizer would make the bits depend on the number of processes.
        """
        refuse_modules(models)
        refuse_optimizers(optimizers, is_sharded=self.engine.capabilities.shards_parameters)
        super().check_prepared(models, optimizers)

    def drop_update(self) -> None:
        """See ``UpdatePolicy``."""
        super().drop_update()
        self.shards.discard()
        self._by_shard, self._contribution = {}, None

    def finished_models(self) -> Sequence[nn.Module]:
        """See ``ExactUpdate``; the sums cover all parameters."""
        return self.objects.models

    def record(self) -> dict[str, Any]:
        """See ``ExactUpdate``."""
        return asdict(self._environment)

    def require_record(self, saved: Mapping[str, Any], folder: object) -> None:
        """See ``ExactUpdate``."""
        if saved:
            self._environment.require(saved, folder)

    def weigh(self, contribution: Contribution) -> float:
        """Return the factor for a mean loss over the samples in ``contribution``; gradients are summed across ranks."""
        self._update_loaders.require_matching_shares(contribution)
        return contribution.num_items / len(contribution.update)

    def note_loss(self, loss: torch.Tensor, num_items: float, *, num_postponed: int, num_taken: int) -> None:
        """See ``ExactUpdate``.

        Raises:
            UsageError: ``num_items`` is not an integer, so its sum would depend on the summation order.
        """
        if num_items != int(num_items):
            raise UsageError(
                f"num_items={num_items} is not an integer, so its sum would depend on the order of the processes",
                where="parity='bitwise'",
                do="pass an integer count as num_items, and scale the loss instead",
            )
        num_turns = num_postponed + num_taken
        if self._is_counted and num_turns > self._num_postponed:
            raise UsageError(
                "a second loss for the same batch was computed after an optimizer's step(). It uses the new "
                "parameters with one shard per process, but the old ones with several, so the bits would depend on "
                "the number of processes",
                where="parity='bitwise'",
                do="compute both losses before the first step(), give each optimizer its own loop, or use parity='exact'",
            )
        super().note_loss(loss, num_items, num_postponed=num_turns, num_taken=num_taken)
        assert self._contribution is not None
        if num_items and self._contribution.shard is not None:
            self._by_shard.setdefault(self._contribution.shard, []).append((loss.detach(), num_items))

    @property
    def place(self) -> tuple[int, int]:
        """See ``PassDriver``."""
        shard = None if self._contribution is None else self._contribution.shard
        return shard or 0, self.num_shards  # a process without a shard adds zeros

    def _report_changed_parameters(self) -> None:
        raise UsageError(CHANGED, where="parity='bitwise'", do=HOW_TO_CHANGE)

    @contextmanager
    def evaluating_again(self, who: str) -> Iterator[None]:
        """See ``PassDriver``.

        Raises:
            UsageError: always raised, because with fewer processes an update has several micro-steps, whose batches are
                not kept.
        """
        raise UsageError(
            f"{who} evaluates its closure again with different parameters. With several shards per process, the "
            "earlier shards' batches are not kept",
            where="parity='bitwise', optimizer.step(closure)",
            do="use an optimizer that evaluates its closure once (LBFGS: max_iter=1), or parity='exact' with one "
            "micro-step per update",
        )
        yield

    def update_loss(self) -> float:
        """Return the mean loss since the update started, bit-identical on any number of ranks. Collective.

        See ``ExactUpdate``.
        """
        sums = [0.0] * self.num_shards  # one rank owns each entry; the others add zero
        for shard, losses in self._by_shard.items():
            sums[shard] = math.fsum(float(loss) * num_items for loss, num_items in losses)
        *sums, num_items = self._sum_over_ranks([*sums, self._num_items])
        return self._mean(math.fsum(sums), num_items)

    def loader_options(self, config: DataLoaderConfiguration) -> ExactOptions:
        """Return how loaders split batches. Collective on the first call."""
        return replace(super().loader_options(config), canonical_shards=self.num_shards)


def build_bitwise_update(
    parts: UpdateParts, *, comm_hook: object, num_chunks: int | None = None, other_axes: Sequence[str] = ()
) -> BitwiseUpdate:
    """Return the policy for ``parity="bitwise"``, which replaces the engine's gradient reduction.

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
            f"canonical_shards={num_shards} is less than the number of processes ({num_readers}), so some "
            "processes would be idle",
            where=str(config.origins["canonical_shards"]),
            do=f"set canonical_shards={num_readers} or more, and the same value in every run that must match bit for bit",
        )
    if str(getattr(comm_hook, "value", comm_hook)) != "no":
        raise ConfigError(
            f"comm_hook={str(comm_hook)!r} has no effect, because DDP sends no gradients with parity='bitwise'",
            where="parity='bitwise'",
            do="remove comm_hook, or use parity='exact'",
        )
    return BitwiseUpdate(
        parts, environment=build_numerics_environment(config, world.device, num_chunks=num_chunks or 0)
    )
