"""Opens and closes the process group of a training program, from arguments or from its launcher."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta

import torch.distributed as dist

from echelon.base.errors import ConfigError, SetupError
from echelon.base.fork_repair import repair_fork
from echelon.config.sources import current
from echelon.distributed.checks.raw_ddp_guard import RawDDPGuard
from echelon.distributed.shard import METRICS
from echelon.world.environment import LaunchEnvironment, check_rank, detect
from echelon.world.group import DEFAULT_TIMEOUT, close_group, open_group
from echelon.world.world import World, world_of

__all__ = ["cleanup", "process_group", "setup"]


def setup(
    rank: int | None = None,
    world_size: int | None = None,
    backend: str | None = None,
    timeout: timedelta | float | None = None,
    init_method: str | None = None,
) -> World:
    """Create the default process group and return this process' ``World``. Calling it again with the same values is harmless.

    Args:
        rank: of this process; None: from the environment (torchrun, Slurm, MPI), else 0.
        world_size: number of processes; None: from the environment, else 1.
        backend: as torch's; None: nccl (or the accelerator's own) with gloo for CPU tensors, gloo on a CPU.
        timeout: of each collective; a timedelta or seconds; None: 30 minutes.
        init_method: as torch's; None: MASTER_ADDR and MASTER_PORT.

    Collective: every process of the world must call this.

    Raises:
        ConfigError: a rank outside the world, or arguments against RANK / WORLD_SIZE.
        SetupError: set up already with other values, the port is in use, rank 0 is unreachable.
    """
    repair_fork()
    environment = _resolve_environment(rank, world_size)
    world = world_of(environment, cpu=current().value.cpu, backend=backend)
    if dist.is_initialized():
        _require_same_setup(world, backend)
        return world
    limit = timedelta(seconds=timeout) if isinstance(timeout, (int, float)) else timeout
    open_group(world, environment, timeout=limit or DEFAULT_TIMEOUT, init_method=init_method)
    RawDDPGuard.begin()
    return world


def cleanup() -> None:
    """End the default process group; harmless when there is none, so also twice.

    Collective: every process should call this (it does not wait for the others).
    """
    METRICS.close()
    RawDDPGuard.end()
    close_group()


@contextmanager
def process_group(
    rank: int | None = None,
    world_size: int | None = None,
    backend: str | None = None,
    timeout: timedelta | float | None = None,
    init_method: str | None = None,
) -> Iterator[World]:
    """``setup`` for a ``with`` block; ends the group after it, also when the block raises.

    A group that existed before is left open.

    Collective: every process of the world must enter.
    """
    ours = not dist.is_initialized()
    world = setup(rank, world_size, backend, timeout, init_method)
    try:
        yield world
    except BaseException:
        METRICS.forget()  # the block may have been about to gather them
        raise
    finally:
        if ours:
            cleanup()


def _resolve_environment(rank: int | None, world_size: int | None) -> LaunchEnvironment:
    """Merge the arguments with the environment; where both set a value they must agree."""
    environment = detect()
    if environment.starter != "single":
        for name, given, found in (
            ("rank", rank, environment.rank),
            ("world_size", world_size, environment.world_size),
        ):
            if given is not None and given != found:
                raise ConfigError(
                    f"setup({name}={given}) contradicts {name}={found} from the environment ({environment.starter})",
                    where=f"code setup({name}=), env {name.upper() if environment.starter == 'torchrun' else environment.starter}",
                    do=f"leave {name} out (a launcher started this process and knows it), or start the processes by hand",
                )
        return environment
    if rank is None and world_size is None and dist.is_initialized():  # a group that the user made by hand
        rank, world_size = dist.get_rank(), dist.get_world_size()
    if (rank is None) != (world_size is None):
        if world_size != 1 and rank != 0:
            raise ConfigError(
                f"setup(rank={rank}, world_size={world_size}): one of the two is missing",
                do="give both, or none and start by echelon launch or torchrun",
            )
        rank, world_size = rank or 0, world_size or 1
    if rank is None or world_size is None:
        return environment
    check_rank(rank, world_size, rank_from="code setup(rank=)", world_size_from="code setup(world_size=)")
    # Started by hand: one machine, unless the user says otherwise by LOCAL_RANK and a launcher.
    return replace(environment, rank=rank, world_size=world_size, local_rank=rank, local_world_size=world_size)


def _require_same_setup(world: World, backend: str | None) -> None:
    there = {"rank": dist.get_rank(), "world_size": dist.get_world_size(), "backend": dist.get_backend()}
    asked = {"rank": world.rank, "world_size": world.world_size, "backend": backend or there["backend"]}
    if asked != there:
        differing = ", ".join(
            f"{name} {there[name]!r} -> {asked[name]!r}" for name in there if asked[name] != there[name]
        )
        raise SetupError(
            f"the process group is set up already, with other values ({differing})",
            do="call cleanup() before a second setup(), or give the same values",
        )
