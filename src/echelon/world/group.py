"""Creates and destroys torch's default process group; on a single machine, it listens only on loopback."""

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
from echelon.base.errors import LaunchError, SetupError
from echelon.base.messages.translation import gettext as _
from echelon.world.environment import LaunchEnvironment
from echelon.world.launch_variables import attempt_number
from echelon.world.world import World

LOOPBACK = "127.0.0.1"
DEFAULT_TIMEOUT = timedelta(minutes=30)
"""torch's default timeout, which is long enough for a first compilation or a slow file system."""

# gloo binds to the address to which the host name resolves, which may be public. The first variable is set while the group
# exists; the second one records that echelon set it and must remove it.
_INTERFACE = "GLOO_SOCKET_IFNAME"
_OURS = "ECHELON_SET_GLOO_SOCKET_IFNAME"


def open_group(
    world: World,
    environment: LaunchEnvironment,
    *,
    timeout: timedelta = DEFAULT_TIMEOUT,
    init_method: str | None = None,
) -> None:
    """Create the default process group for ``world``.

    Args:
        world: this process's rank and world size.
        environment: provides rank 0's address.
        timeout: timeout of collectives.
        init_method: a URL as in torch (``env://``, ``tcp://host:port`` or ``file:///path``); None uses ``environment``.

    Collective: call on every rank.

    Raises:
        SetupError: rank 0's address is unknown, its port is in use, or other processes did not join.
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
        _unset_interface()
        # torch (2.7 to 2.13) counts failed attempts and uses the count in the keys of the next attempt, so a rank with one more
        # failure than the others could never join them again (test_setup.py: ..._the_ghosts_of_the_old_one).
        if not dist.is_initialized():
            dist.distributed_c10d._world.group_count = 0
        if isinstance(error, SetupError):
            raise
        raise SetupError(
            _(
                "cannot create a process group of {world_size} processes: {error}",
                world_size=world.world_size,
                error=_first_line(error),
            ),
            where=init_method or f"{environment.master_addr}:{environment.master_port}",
            do=_("check that every process was started with the same address, port and world size"),
        ) from error


class _Closed:
    last: ClassVar[Any] = None
    """The most recently closed group, if anything else references it.

    torch 2.13 can deadlock if DistributedDataParallel holds the last reference to a gloo group: its destructor holds
    the GIL while it waits for the group's threads, and such a thread may need the GIL to free a tensor from the last
    collective. Dropping a Python reference releases the GIL, so this reference must outlive models that are freed after
    their group.
    """


def close_group() -> None:
    """Destroy the default process group, if there is one."""
    if dist.is_initialized():
        group = dist.group.WORLD
        dist.destroy_process_group()
        _Closed.last = group if sys.getrefcount(group) > 2 else None  # without other references, its files close now
    _clear_mesh_caches()
    _unset_interface()


def _clear_mesh_caches() -> None:
    """Clear torch's sharding caches, because a mesh in the next group has the same cache keys.

    The cache entries refer to the destroyed group's ranks and subgroups.
    """
    if "torch.distributed.tensor" not in sys.modules:  # do not import it for programs without sharded tensors
        return
    debug = import_module("torch.distributed.tensor.debug")
    if hasattr(debug, "_clear_sharding_prop_cache"):
        debug._clear_sharding_prop_cache()
    else:  # torch 2.7
        propagator = import_module("torch.distributed.tensor").DTensor._op_dispatcher.sharding_propagator
        propagator.propagate_op_sharding.cache.cache_clear()
    redistribute = import_module("torch.distributed.tensor._redistribute")
    redistribute._gen_transform_infos.cache_clear()
    if hasattr(redistribute, "clear_redistribute_planner_cache"):  # later versions of torch
        redistribute.clear_redistribute_planner_cache()


def _is_one_machine(world: World, environment: LaunchEnvironment, init_method: str | None) -> bool:
    if world.world_size == 1:
        return True
    if environment.starter != "single":  # the launcher sets the number of processes per machine
        return world.local_world_size == world.world_size
    if init_method is not None:
        host = urlsplit(init_method).hostname
        return host is not None and _is_loopback(host)
    return environment.master_addr is not None and _is_loopback(environment.master_addr)


def _unset_interface() -> None:
    if environ.get(_OURS) is not None:
        environ.write({_INTERFACE: None, _OURS: None})


def _open_store(world: World, environment: LaunchEnvironment, timeout: timedelta) -> dist.Store:
    address, port = environment.master_addr, environment.master_port
    if world.world_size == 1 and environment.starter == "single":
        return dist.HashStore()
    if address is None or port is None:
        missing = "MASTER_ADDR" if address is None else "MASTER_PORT"
        raise SetupError(
            _(
                "{world_size} processes need rank 0's address and port, but {missing} is not set",
                world_size=world.world_size,
                missing=missing,
            ),
            where=_("env {name}", name=missing),
            do=_(
                "start them with echelon launch, torchrun or echelon.distributed.spawn, or pass "
                "init_method='tcp://HOST:PORT'"
            ),
        )
    # The launcher's agent already serves a store at this address, with one prefix per restart (torch's convention).
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
        # torch would listen on every interface; a socket bound to loopback restricts the store to this machine.
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((address, port))
            listener.listen(512)
        except OSError as error:
            listener.close()
            raise _store_error(error, address, port, serves=True) from error
        store = serve_store(listener, world_size=world.world_size, timeout=timeout)
    # A group must not read addresses that an earlier group has left in the same store, before a restart or before
    # close_group. Therefore every rank counts its groups in the store.
    restart = f"echelon/group/{attempt_number()}"
    turn = store.add(f"{restart}/turn/{world.rank}", 1)
    return dist.PrefixStore(f"{restart}/{turn}", store)


def _store_error(error: Exception, address: str, port: int, *, serves: bool) -> SetupError:
    in_use = "EADDRINUSE" in str(error) or (isinstance(error, OSError) and error.errno == errno.EADDRINUSE)
    if serves and in_use:
        return SetupError(
            _("port {port} on {address} is in use", port=port, address=address),
            where=f"MASTER_PORT={port}",
            do=_("choose another MASTER_PORT, or start the program with echelon launch, which finds a free port"),
        )
    action = "open its store at" if serves else "reach rank 0 at"
    return SetupError(
        _(
            "this process cannot {action} {address}:{port}: {error}",
            action=action,
            address=address,
            port=port,
            error=_first_line(error),
        ),
        where=f"MASTER_ADDR={address}, MASTER_PORT={port}",
        do=_("check that rank 0 is running and that all ranks use the same address and port"),
    )


def _is_loopback(address: str) -> bool:
    return address in ("localhost", "::1") or address.startswith("127.")


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0]


def serve_store(listener: socket.socket, *, world_size: int | None = None, timeout: timedelta) -> dist.TCPStore:
    """Serve a store on ``listener`` rather than on all interfaces, and return this process's connection to it.

    Args:
        listener: a socket that is bound and listening; this function takes ownership of it.
        world_size: number of processes that will connect; None if unknown.
        timeout: how long to wait for keys.
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
        # The libuv server accepts a socket since torch 2.8 (pytorch/pytorch#150215), which also added clone().
        use_libuv=hasattr(dist.TCPStore, "clone"),
    )


_BACKLOG = 512
_LOOPBACK_TIMEOUT = timedelta(minutes=5)


class LoopbackStore:
    """A ``TCPStore`` that listens only on loopback. It has no password, so any user on this machine can reach it.

    The store receives a socket that is already bound. torch itself would listen on all addresses, and another process
    could take a free port between its lookup and its use.

    Args:
        port: port to listen on; 0 for any free port.

    Raises:
        LaunchError: the port is in use.
    """

    def __init__(self, port: int = 0) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind((LOOPBACK, port))
            except (OSError, OverflowError) as error:
                raise LaunchError(
                    _("cannot listen on {loopback}:{port}: {error}", loopback=LOOPBACK, port=port, error=error),
                    do=_("use another --main_process_port, or 0 for any free port"),
                ) from error
            listener.listen(_BACKLOG)
            self.port: int = listener.getsockname()[1]
            self.store = serve_store(listener, timeout=_LOOPBACK_TIMEOUT)
