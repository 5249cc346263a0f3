"""Control flow across ranks: ``rank_zero_only``, ``main_first``, ``agree``, and a barrier that names the missing ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Literal, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from echelon.base.errors import DesyncError
from echelon.base.rank import known_rank
from echelon.distributed.alone import is_alone, while_others_wait
from echelon.distributed.monitored_barrier import monitored_barrier, note_wait
from echelon.distributed.small_messages import ranks_of, wire_device
from echelon.distributed.stores import control_store
from echelon.distributed.uncompiled import uncompiled
from echelon.status.notes import slow, waiting
from echelon.world.environment import detect
from echelon.world.group import DEFAULT_TIMEOUT

P = ParamSpec("P")
T = TypeVar("T")


def rank_zero_only(function: Callable[P, T]) -> Callable[P, T | None]:
    """Make ``function`` run only on rank zero and return None on other ranks. It must not call collectives.

    Examples:
        >>> @rank_zero_only
        ... def report(loss):
        ...     print(f"loss {loss:.1f}")
        >>> report(0.5)
        loss 0.5
    """

    @functools.wraps(function)
    def on_rank_zero(*args: P.args, **kwargs: P.kwargs) -> T | None:
        return function(*args, **kwargs) if known_rank() in (None, 0) else None

    return on_rank_zero


@uncompiled
def agree(flag: bool, *, how: Literal["any", "all"] = "any", mesh: DeviceMesh | None = None) -> bool:
    """Return, on every rank, whether ``flag`` is True on any rank (``how="any"``) or on all ranks (``how="all"``).

    Collective: call on every rank of ``mesh``.

    Examples:
        >>> if agree(loss.isnan().item()):  # on all ranks, if the loss is NaN on any
        ...     raise RuntimeError("the loss is NaN")
    """
    group = None if mesh is None else mesh.get_group()
    if is_alone(group):
        return bool(flag)
    vote = torch.tensor(int(flag), dtype=torch.int32, device=wire_device(torch.device("cpu"), group))
    dist.all_reduce(vote, op=dist.ReduceOp.MAX if how == "any" else dist.ReduceOp.MIN, group=group)
    return bool(vote.item())


@uncompiled
@contextmanager
def raise_on_all_ranks(what: str) -> Iterator[None]:
    """Run the block on every rank; if it fails on any rank, raise on all ranks, so that no rank continues alone and hangs.

    Collective: call on every rank; the block itself must not call collectives.

    Raises:
        DesyncError: some ranks failed; the message lists their errors. If all ranks failed, each raises its own error.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:  # noqa: BLE001 - raised below, once the other ranks know
        failure = error
    if not agree(failure is not None):
        return
    if is_alone() or agree(failure is not None, how="all"):
        assert failure is not None
        raise failure
    notes: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(notes, None if failure is None else f"{type(failure).__name__}: {failure}")
    listing = "\n".join(f"    rank {rank}: {note}" for rank, note in enumerate(notes) if note is not None)
    raise DesyncError(f"{what} failed on some ranks\n{listing}", do="fix the errors on the listed ranks") from failure


@uncompiled
def barrier(timeout: timedelta | float | None = None, *, mesh: DeviceMesh | None = None) -> None:
    """Wait until every rank calls this function; if that times out, the error names the missing ranks.

    It uses the group's store, not the device, and does not synchronize streams.

    Args:
        timeout: longest wait, as a timedelta or in seconds (default: 30 minutes).
        mesh: 1-D device mesh (default: all ranks).

    Collective: call on every rank of ``mesh``.

    Raises:
        RankTimeoutError: some ranks did not arrive; the message names them.
        DesyncError: a rank will never arrive, because it has passed this call or exited (see ``monitored_barrier``).

    Examples:
        >>> barrier(timeout=60)
    """
    limit = timedelta(seconds=timeout) if isinstance(timeout, (int, float)) else (timeout or DEFAULT_TIMEOUT)
    monitored_barrier("barrier", group=None if mesh is None else mesh.get_group(), timeout=limit)


@uncompiled
@contextmanager
def main_first(
    *, scope: Literal["run", "machine"] = "run", mesh: DeviceMesh | None = None, name: str = ""
) -> Iterator[None]:
    """Run the ``with`` block on the first rank before the others, which can then use the files it downloaded or cached.

    The other ranks wait without a timeout for as long as the first rank is alive.

    Args:
        scope: whether one rank of the run or one rank on each machine goes first (for files that machines do not share).
        mesh: 1-D device mesh (default: all ranks).
        name: only calls with the same name wait for each other. The first rank may also enter a context alone; a later one
            of the same name then no longer makes the other ranks wait.

    Collective: enter the context on every rank of ``mesh``, except for a context of the first rank alone.

    Raises:
        DesyncError: raised on the other ranks if the block failed on the first rank.

    Examples:
        >>> with main_first(scope="machine"):
        ...     dataset = download()
    """
    group = None if mesh is None else mesh.get_group()
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        yield
        return
    store, rank, first = control_store(group), dist.get_rank(), ranks_of(group)[0]
    if scope == "machine":
        place = detect()
        first = rank - place.local_rank  # every launcher numbers the ranks of one machine consecutively
        name = f"machine/{place.node_rank}/{name}"
    turn = store.add(f"main_first/{name}/turn/{rank}", 1)
    key = f"main_first/{name}/{turn}/outcome"
    if rank == first:
        try:
            # Ranks outside of the mesh do not wait.
            with slow("main_first"), while_others_wait() if mesh is None else nullcontext():
                yield
        except BaseException as error:
            store.set(key, f"failed: {type(error).__name__}: {error}")
            raise
        store.set(key, "done")
        return
    if mesh is None:
        note_wait(store, rank, first=first, outcome=key)
    with waiting("main_first"):
        while not _wait_for_key(store, key, within=timedelta(seconds=10)):
            continue
    outcome = store.get(key).decode()
    if outcome != "done":
        raise DesyncError(f"main_first: rank {first} {outcome}", do=f"fix the error on rank {first}")
    yield


def _wait_for_key(store: dist.Store, key: str, *, within: timedelta) -> bool:
    """Wait for ``key``; return False on timeout. Raise if the store's server dies, so that no rank waits forever."""
    try:
        store.wait([key], within)
    except dist.DistNetworkError:
        raise
    except RuntimeError as error:  # TCPStore: DistStoreError; FileStore and HashStore: RuntimeError("Wait timeout")
        if "timeout" not in str(error).lower():
            raise
        return False
    return True
