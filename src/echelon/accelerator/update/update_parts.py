"""The parts of a run that its updates use."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from echelon.accelerator.gradient_state import GradientState
from echelon.accelerator.prepared_objects import PreparedObjects
from echelon.accelerator.unprepared_model import UnpreparedModelCheck
from echelon.accelerator.update.gradient_normalization import AccumulationWindow
from echelon.base.progress import Progress
from echelon.config.resolve import Resolved
from echelon.config.schema import RunConfig
from echelon.engines.base import Engine
from echelon.world.world import World


@dataclass(frozen=True, kw_only=True)
class UpdateParts:
    """The parts of a run that an update uses."""

    config: Resolved[RunConfig]
    world: World
    """All ranks."""
    data_world: World
    """The ranks that read different samples."""
    loss_world: World
    """The ranks over which losses and gradients are averaged: those with different samples or pieces of a sequence."""
    engine: Engine
    scaler: torch.amp.GradScaler | None
    state: GradientState
    progress: Progress
    objects: PreparedObjects
    unprepared: UnpreparedModelCheck

    def build_window(self, *, averages_gradients: bool = True) -> AccumulationWindow:
        """Return the weights of an update whose gradients the engine averages, or else sums, across ranks."""
        return AccumulationWindow(
            world_size=self.loss_world.world_size if averages_gradients else 1,
            total_of=partial(_total_over_ranks, self.loss_world),
            is_redone=not averages_gradients,
        )


def _total_over_ranks(world: World, items: float) -> float:
    return sums_over_ranks(world, [items])[0]


def sums_over_ranks(world: World, numbers: list[float]) -> list[float]:
    """Return the sum of each number across ranks, using one small reduction. Collective."""
    if world.world_size == 1:
        return numbers
    sums = torch.tensor(numbers, dtype=torch.float64, device=world.device)
    dist.all_reduce(sums, group=world.group)
    return sums.tolist()  # the host needs them: losses are scaled by them
