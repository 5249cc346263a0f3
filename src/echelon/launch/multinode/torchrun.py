"""The entry point of the group ``torchrun.handlers``, through which torchrun finds echelon's rendezvous."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousParameters


def torchrun_handler() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Return the function that builds the handler for ``--rdzv-backend echelon``."""
    return _build_handler


def _build_handler(params: RendezvousParameters) -> RendezvousHandler:
    # torch loads all entry points whenever a program imports torch.distributed.elastic; most programs use another backend.
    from echelon.launch.multinode.torchrun_rendezvous import build_handler  # noqa: PLC0415

    return build_handler(params)
