"""Creates and destroys a program's process group, configured by arguments or by its launcher."""

from __future__ import annotations

import atexit
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import cache

import torch.distributed as dist

from echelon.base.errors import ConfigError, SetupError
from echelon.base.fork_repair import repair_fork
from echelon.base.messages.translation import gettext as _
from echelon.config.sources import current
from echelon.distributed.checks.coalescing import guard_coalescing, stop_guarding_coalescing
from echelon.distributed.checks.raw_ddp_guard import RawDDPGuard
from echelon.distributed.record.recorder import recorder_of_process
from echelon.distributed.shard import METRICS
from echelon.status.idle_threads import wait_for_idle_threads
from echelon.world.environment import LaunchEnvironment, check_rank, detect
from echelon.world.group import DEFAULT_TIMEOUT, close_group, open_group
from echelon.world.world import World, world_of


def setup(
    rank: int | None = None,
    world_size: int | None = None,
    backend: str | None = None,
    timeout: timedelta | float | None = None,
    init_method: str | None = None,
) -> World:
    """Create the default process group and return this process's ``World``. Calling it again with equal values is safe.

    Args:
        rank: this process's rank (default: taken from the environment, as set by torchrun, Slurm or MPI, else 0).
        world_size: number of processes (default: taken from the environment, else 1).
        backend: as in ``init_process_group`` (default: gloo for CPU tensors, and nccl or the accelerator's own backend for
            accelerator tensors).
        timeout: timeout for collectives, as a timedelta or in seconds (default: 30 minutes).
        init_method: as in ``init_process_group`` (default: use MASTER_ADDR and MASTER_PORT).

    Collective: call on every process of the world.

    Raises:
        ConfigError: the rank is out of range, or the arguments contradict RANK or WORLD_SIZE.
        SetupError: the group already exists with different values, the port is in use, or rank 0 is unreachable.

    Examples:
        >>> world = setup(timeout=600)
        >>> model = torch.nn.Linear(8, 1).to(world.device)
        >>> cleanup()
    """
    repair_fork()
    _wait_for_threads_at_exit()
    environment = _resolve_environment(rank, world_size)
    world = world_of(environment, cpu=current().value.cpu, backend=backend)
    if dist.is_initialized():
        _require_same_setup(world, backend)
        guard_coalescing()
        return world
    limit = timedelta(seconds=timeout) if isinstance(timeout, (int, float)) else timeout
    open_group(world, environment, timeout=limit or DEFAULT_TIMEOUT, init_method=init_method)
    guard_coalescing()
    RawDDPGuard.begin()
    recorder = recorder_of_process()
    if recorder is not None:
        recorder.watch_plain_optimizers()
    return world


def cleanup() -> None:
    """Destroy the default process group; do nothing if there is none.

    Call on every process. It does not wait for the other processes.

    Examples:
        >>> world = setup()
        >>> cleanup()
    """
    METRICS.close()
    RawDDPGuard.end()
    stop_guarding_coalescing()
    recorder = recorder_of_process()
    if recorder is not None:
        recorder.stop_watching()
    close_group()


@contextmanager
def process_group(
    rank: int | None = None,
    world_size: int | None = None,
    backend: str | None = None,
    timeout: timedelta | float | None = None,
    init_method: str | None = None,
) -> Iterator[World]:
    """Call ``setup`` before the ``with`` block and ``cleanup`` after it, even if the block raises.

    A process group that existed before the block stays open.

    Collective: enter the context on every process of the world.

    Examples:
        >>> with process_group() as world:
        ...     print(f"rank {world.rank} of {world.world_size}")
        rank 0 of 1
    """
    ours = not dist.is_initialized()
    world = setup(rank, world_size, backend, timeout, init_method)
    try:
        yield world
    except BaseException:
        METRICS.forget()  # the block may have failed before it gathered its results
        raise
    finally:
        if ours:
            cleanup()


@cache  # once for each process: what is registered first is called last
def _wait_for_threads_at_exit() -> None:
    atexit.register(wait_for_idle_threads)


def _resolve_environment(rank: int | None, world_size: int | None) -> LaunchEnvironment:
    """Merge the arguments with the environment; values that both specify must agree."""
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
                    do=f"omit {name}, which this process's launcher sets, or start the processes without a launcher",
                )
        return environment
    if rank is None and world_size is None and dist.is_initialized():  # the user has created the group through torch
        rank, world_size = dist.get_rank(), dist.get_world_size()
    if (rank is None) != (world_size is None):
        if world_size != 1 and rank != 0:
            raise ConfigError(
                _(
                    "setup() needs both rank and world_size, but got rank={rank} and world_size={world_size}",
                    rank=rank,
                    world_size=world_size,
                ),
                do=_("pass both, or omit both and start the program with `echelon launch` or torchrun"),
            )
        rank, world_size = rank or 0, world_size or 1
    if rank is None or world_size is None:
        return environment
    check_rank(rank, world_size, rank_from="code setup(rank=)", world_size_from="code setup(world_size=)")
    # Without a launcher all processes are on one machine.
    return replace(environment, rank=rank, world_size=world_size, local_rank=rank, local_world_size=world_size)


def _require_same_setup(world: World, backend: str | None) -> None:
    present = {"rank": dist.get_rank(), "world_size": dist.get_world_size(), "backend": dist.get_backend()}
    requested = {"rank": world.rank, "world_size": world.world_size, "backend": backend or present["backend"]}
    if requested != present:
        differing = ", ".join(
            f"{name} {present[name]!r} -> {requested[name]!r}" for name in present if requested[name] != present[name]
        )
        raise SetupError(
            f"the process group already exists with different values ({differing})",
            do="call cleanup() before the second setup(), or pass the same values",
        )
