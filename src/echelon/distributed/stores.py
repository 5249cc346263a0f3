"""Accesses a process group's store with any supported torch version."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from contextlib import suppress

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_process_group_store

_CAN_CLONE = hasattr(dist.Store, "clone")


def store_of(group: dist.ProcessGroup | None = None) -> dist.Store:
    """Return the store of ``group`` (default: all ranks) with its prefix, over this process's existing connection."""
    group = dist.group.WORLD if group is None else group
    assert group is not None
    return _get_process_group_store(group)


def control_store(group: dist.ProcessGroup | None = None) -> dist.Store:
    """Return the store of ``group`` with the prefix of ``main_first``."""
    return dist.PrefixStore("echelon/control", store_of(group))


def base_store(store: dist.Store) -> dist.Store:
    """Return the store without any prefixes."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


def common_store(group: dist.ProcessGroup | None = None, *, own_connection: bool = False) -> dist.Store:
    """Return a store that the ranks of ``group`` share and that any thread can use.

    Args:
        own_connection: open a separate connection for this thread, because a connection serves one thread at a time. A store
            without a server (a FileStore) is returned unchanged.
    """
    store = store_of(group)
    if _CAN_CLONE:
        clone: Callable[[], dist.Store] = store.clone  # type: ignore[attr-defined]
        return clone() if own_connection else store
    # torch 2.7 cannot clone a store (pytorch/pytorch#150966) and does not expose the group's prefix, which a second connection
    # would need. Therefore all ranks use another prefix, drawn by the first rank that gets here.
    base = base_store(store)
    if not isinstance(base, dist.TCPStore):
        return store
    prefix = store.compare_set("echelon/prefix", "", secrets.token_hex(8)).decode()
    if own_connection:
        base = dist.TCPStore(base.host, base.port, is_master=False, wait_for_workers=False)
    return dist.PrefixStore(prefix, base)


def exchange_once(store: dist.Store, mine: bytes, *, rank: int, world_size: int) -> list[bytes] | None:
    """Write ``mine`` to ``store``. The last rank to do so returns the messages of all ranks, the others None; no rank waits.

    Raises:
        DistNetworkError: rank zero, which serves the store without a launcher, has ended.
    """
    store.set(str(rank), mine.hex())
    if store.add("num", 1) != world_size:
        return None
    return [bytes.fromhex(store.get(str(other)).decode()) for other in range(world_size)]


def is_first(store: dist.Store) -> bool:
    """Return whether this is the first call with ``store`` on any rank, or the store is not reachable any more."""
    with suppress(dist.DistNetworkError):
        return store.add("num_reports", 1) == 1
    return True
