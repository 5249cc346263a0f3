"""The watcher of an Accelerator's process."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from echelon.base.sharded import is_dtensor
from echelon.distributed.peer_responder import Watcher
from echelon.world.world import World

__all__ = ["watched"]


def watched(models: Sequence[nn.Module], *, world: World) -> Watcher | None:
    """Return what answers for this rank when others look for it; it counts the collectives over the shards of ``models``.

    Args:
        models: as the engine returned them.
        world: on one rank nobody looks.
    """
    if world.world_size == 1:
        return None
    watcher = Watcher.of_process(world.device)
    meshes = {p.device_mesh for model in models for p in model.parameters() if is_dtensor(p)}
    watcher.watch(group for mesh in meshes for group in mesh.get_all_groups())
    return watcher
