"""Mixture-of-experts models: what depends on the tokens of all ranks, and choices that rounding can change."""

from __future__ import annotations

from collections.abc import Iterable

import torch.distributed as dist
from torch import nn

from echelon.accelerator.session import Session
from echelon.engines.expert_parallel.moe import find_routers
from echelon.engines.expert_parallel.routing_gap import RoutingGaps

__all__ = ["prepare_experts"]


def prepare_experts(session: Session, models: Iterable[nn.Module]) -> None:
    """Watch the routers of ``models`` under ``parity="exact"``, and let load-balancing losses count the tokens of all ranks.

    The latter also holds with expert parallelism. In other runs each rank's loss counts its own tokens, as with Accelerate.
    """
    is_exact = session.config.value.parity == "exact"
    is_divided = session.layout is not None and session.layout.ep_enabled
    if not is_exact and not is_divided:
        return
    world = session.update.loss_world
    for model in models:
        routers = find_routers(model)
        if not routers:
            continue
        if is_exact:
            session.routing = session.routing or RoutingGaps()
            for name, router in routers.items():
                session.routing.watch(name, router)
        group = world.group or dist.group.WORLD
        if world.world_size > 1 and group is not None:
            from echelon.engines.expert_parallel.balance import balance_over_ranks  # noqa: PLC0415 - only for such models

            balance_over_ranks(model, group, has_samples=lambda: not _is_padding(session))


def _is_padding(session: Session) -> bool:
    """Return whether this rank's batch is a copy of other samples, because there are fewer samples than ranks."""
    driver = session.update.driver
    contribution = None if driver is None else driver.contribution()
    return contribution is not None and contribution.is_padding
