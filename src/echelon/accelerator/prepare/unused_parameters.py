"""DDP's search for unused parameters, where the user has not asked for it."""

from __future__ import annotations

from echelon.accelerator.session import Session
from echelon.distributed.ddp.unused_parameters_warning import silence_unused_parameters_warning

__all__ = ["search_silently"]


def search_silently(session: Session) -> None:
    """Keep torch from warning that the search finds no unused parameters: the user did not ask for the search."""
    if session.world.world_size > 1 and session.capabilities.replicates:
        silence_unused_parameters_warning(session.world.device)
