"""Making and ending torch's default process group; on one machine nothing of it listens off loopback."""

from __future__ import annotations

import errno
import socket
import sys
from datetime import timedelta
from importlib import import_module
from typing import Any, ClassVar
from urllib.parse import urlsplit

import torch.distributed as dist

from echelon.base import environ
from echelon.base.device import use_device
from echelon.base.errors import SetupError
from echelon.world.environment import LaunchEnvironment
from echelon.world.world import World

__all__ = ["DEFAULT_TIMEOUT", "close_group", "open_group", "serve_store"]

DEFAULT_TIMEOUT = timedelta(minutes=30)
"""As torch's own: long enough for a first compilation or a slow file system."""

# gloo binds to the address that the host name resolves to, which may be a public one. The group is process-wide state
# and so is this variable: it lives exactly as long, and the second variable remembers that it was ours to remove.
_INTERFACE = "GLOO_SOCKET_IFNAME"
_OURS = "ECHELON_SET_GLOO_SOCKET_IFNAME"


def open_group(
    world: World,
    environment: LaunchEnvironment,
    *,
    timeout: timedelta = DEFAULT_TIMEOUT,
    init_method: str | None = None,
) -> None:
    """Make the default process group of ``world``.

    Args:
        world: who this process is.
        environment: where rank 0 is.
        timeout: of each collective.
        init_method: as torch's: ``env://``, ``tcp://host:port``, ``file:///path``; None: from ``environment``.

    Collective: every process of the world must call this.

    Raises:
        SetupError: no address for rank 0, its port is in use, or the others did not come.
    """
    use_device(world.device)
    if _is_one_machine(world, environment, init_method) and environ.get(_INTERFACE) is None:
        environ.write({_INTERFACE: "lo0" if sys.platform == "darwin" else "lo", _OURS: "1"})
    try:
        if init_method is not None:
            dist.init_process_group(
                world.backend, init_method=init_method, rank=world.rank, world_size=world.world_size, timeout=timeout
            )
        else:
            store = _open_store(world, environment, timeout)
            dist.init_process_group(
                world.backend, store=store, rank=world.rank, world_size=world.world_size, timeout=timeout
            )
    except (dist.DistError, RuntimeError, ValueError) as error:
        _forget_interface()
        # torch (2.7 to 2.13) counts a failed attempt and puts the number into the keys of the next one, so that a rank
        # that failed once more than the others never meets them again (test_setup.py: ..._the_ghosts_of_the_old_one).
        if not dist.is_initialized():
            dist.distributed_c10d._world.group_count = 0
        if isinstance(error, SetupError):
            raise
        raise SetupError(
            f"the process group of {world.world_size} processes could not be made: {_first_line(error)}",
            where=init_method or f"{environment.master_addr}:{environment.master_port}",
            do="check that every process was started, with the same address, port and world size",
        ) from error


class _Closed:
    last: ClassVar[Any] = None
    """The group that was closed last, while something else holds it.

    torch 2.13 hangs when DistributedDataParallel is the last to hold a group of gloo: its destructor waits for the group's
    threads and keeps the interpreter's lock, which such a thread may need to free a tensor of the last collective. Python's
    own reference gives the lock up; so it outlives a model that goes after its group, or the threads have ended their work.
    """


def close_group() -> None:
    """End the default process group; harmless when there is none."""
    if dist.is_initialized():
        group = dist.group.WORLD
        dist.destroy_process_group()
        _Closed.last = group if sys.getrefcount(group) > 2 else None  # nobody else holds it: its files are closed now
    _forget_meshes()
    _forget_interface()


def _forget_meshes() -> None:
    """Empty torch's caches of how sharded tensors are computed with: a mesh of the next group is equal to one in them.

    What they hold leads to the ended group: the next one's tensors would be looked up on a rank, or in a group, of before.
    """
    if "torch.distributed.tensor" not in sys.modules:  # no program without sharded tensors loads it for this
        return
    debug = import_module("torch.distributed.tensor.debug")
    if hasattr(debug, "_clear_sharding_prop_cache"):
        debug._clear_sharding_prop_cache()
    else:  # torch 2.7
        propagator = import_module("torch.distributed.tensor").DTensor._op_dispatcher.sharding_propagator
        propagator.propagate_op_sharding.cache.cache_clear()
    redistribute = import_module("torch.distributed.tensor._redistribute")
    redistribute._gen_transform_infos.cache_clear()
    if hasattr(redistribute, "clear_redistribute_planner_cache"):  # a later torch's
        redistribute.clear_redistribute_planner_cache()


def _is_one_machine(world: World, environment: LaunchEnvironment, init_method: str | None) -> bool:
    if world.world_size == 1:
        return True
    if environment.starter != "single":  # the starter counted the processes of each machine
        return world.local_world_size == world.world_size
    if init_method is not None:
        host = urlsplit(init_method).hostname
        return host is not None and _is_loopback(host)
    return environment.master_addr is not None and _is_loopback(environment.master_addr)


def _forget_interface() -> None:
    if environ.get(_OURS) is not None:
        environ.write({_INTERFACE: None, _OURS: None})


def _open_store(world: World, environment: LaunchEnvironment, timeout: timedelta) -> dist.Store:
    address, port = environment.master_addr, environment.master_port
    if world.world_size == 1 and environment.starter == "single":
        return dist.HashStore()
    if address is None or port is None:
        missing = "MASTER_ADDR" if address is None else "MASTER_PORT"
        raise SetupError(
            f"{world.world_size} processes need the address and port of rank 0, and {missing} is not set",
            where=f"env {missing}",
            do="start them by echelon launch, torchrun or echelon.distributed.spawn, or pass init_method='tcp://HOST:PORT'",
        )
    # The launcher's agent keeps a store there already, one generation of processes a prefix (torch's own convention).
    agent_has_store = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serves = world.rank == 0 and not agent_has_store
    if not serves or not _is_loopback(address):
        try:
            store: dist.Store = dist.TCPStore(
                address, port, world.world_size, serves, timeout=timeout, multi_tenant=serves, wait_for_workers=False
            )
        except dist.DistNetworkError as error:
            raise _store_error(error, address, port, serves=serves) from error
    else:
        # torch would listen on every interface; a socket that is bound already keeps the store to this machine.
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((address, port))
            listener.listen(512)
        except OSError as error:
            listener.close()
            raise _store_error(error, address, port, serves=True) from error
        store = serve_store(listener, world_size=world.world_size, timeout=timeout)
    # A group must not read the addresses that an earlier one left in the same store: of the generation before a
    # restart, or of the group that this process closed before. Every rank counts its own groups, in the store.
    restart = f"echelon/group/{environ.get('TORCHELASTIC_RESTART_COUNT') or 0}"
    turn = store.add(f"{restart}/turn/{world.rank}", 1)
    return dist.PrefixStore(f"{restart}/{turn}", store)


def _store_error(error: Exception, address: str, port: int, *, serves: bool) -> SetupError:
    in_use = "EADDRINUSE" in str(error) or (isinstance(error, OSError) and error.errno == errno.EADDRINUSE)
    if serves and in_use:
        return SetupError(
            f"port {port} of {address} is in use",
            where=f"MASTER_PORT={port}",
            do="choose another MASTER_PORT, or start by echelon launch, which takes a free one",
        )
    action = "open its store at" if serves else "reach rank 0 at"
    return SetupError(
        f"this process cannot {action} {address}:{port}: {_first_line(error)}",
        where=f"MASTER_ADDR={address}, MASTER_PORT={port}",
        do="check that rank 0 runs, and that address and port are the same on every rank",
    )


def _is_loopback(address: str) -> bool:
    return address in ("localhost", "::1") or address.startswith("127.")


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0]


def serve_store(listener: socket.socket, *, world_size: int | None = None, timeout: timedelta) -> dist.TCPStore:
    """Serve a store on ``listener``, and return this process's connection to it: torch alone would listen on every address.

    Args:
        listener: bound and listening; it is taken over.
        world_size: how many processes will connect; None: unknown.
        timeout: of waiting for keys.
    """
    host, port = listener.getsockname()[:2]
    return dist.TCPStore(
        host,
        port,
        world_size,
        True,
        timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
        # The newer server accepts such a socket from torch 2.8 on (pytorch/pytorch#150215), which also added clone().
        use_libuv=hasattr(dist.TCPStore, "clone"),
    )
