"""A thread that reports this rank's position to other ranks on request, even while the main thread is blocked."""

from __future__ import annotations

import atexit
import json
import os
import pickle
import select
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from functools import cache
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.distributed.distributed_c10d import _world

from echelon.base.logging import get_logger
from echelon.base.messages.translation import gettext_noop as N_
from echelon.distributed.stores import base_store, common_store, store_of
from echelon.status.call_site import call_site_of_thread

WatchedGroups: TypeAlias = Mapping[str, tuple[dist.ProcessGroup, torch.device]]
"""Process groups and their devices, by a key that is the same on every rank of the group."""

_logger = get_logger(__name__)
_PERIOD_S = 0.25  # a poll takes 0.2 ms, mostly spent waiting for the store
_FAST_PERIOD_S = 0.05
_FAST_POLL_S = 3.0
_STORE_LIMIT = timedelta(seconds=10)


class Watcher:
    """Answers requests about the thread that created it, until it is closed or the process group is destroyed.

    It polls the group's store for requests a few times per second, over its own connection (a connection serves one thread at
    a time). It inspects the watched thread only on request, so training is not slowed down. It does not run if the group's
    store has no server (a FileStore).
    """

    def __init__(self, device: torch.device) -> None:
        group = dist.group.WORLD
        assert group is not None
        self._group = weakref.ref(group)  # a strong reference would keep the connections of a destroyed group open
        self._rank = dist.get_rank()
        self._device = device
        self._watched: WatchedGroups = {}
        self._subject = threading.get_ident()
        self._process = os.getpid()
        self._closing = threading.Event()
        self._end = {"reason": "it has destroyed its process group", "failed": False}
        self._polls_fast_until = 0.0
        self.on_call: Callable[[], None] | None = None
        """Called in the watcher's thread after another rank has set the key ``call``."""
        self._since_ns = time.time_ns()
        self._thread: _ResponderThread | None = None
        server = _server_of(store_of(group))
        if server is None:
            return
        store = responder_store(common_store(group, own_connection=True))
        store.set_timeout(_STORE_LIMIT)
        self.watch([group])
        self._thread = _ResponderThread(self, store, server)
        self._thread.start()
        _close_all_at_exit()

    @classmethod
    def of_process(cls, device: torch.device) -> Watcher:
        """Return this process's running watcher, or a new one."""
        return next((watcher for watcher in _watchers() if watcher.runs), None) or cls(device)

    @property
    def runs(self) -> bool:
        """Whether this watcher answers requests in the current group."""
        return self._thread is not None and self._thread.is_alive() and self._group() is dist.group.WORLD

    def watch(self, groups: Iterable[dist.ProcessGroup]) -> None:
        """Also count the collectives in ``groups``, which only the watched thread may use, in program order."""
        self._watched = {**self._watched, **{_key(group, self._device): (group, self._device) for group in groups}}

    def close(self, reason: str, *, failed: bool = False) -> None:
        """Stop, and publish why this rank exits and whether it failed, so that waiting ranks can report it."""
        if self._thread is None or self._process != os.getpid():  # a forked child is not this rank
            return
        self._end = {"reason": reason, "failed": failed}
        self._closing.set()
        self._thread.join(_STORE_LIMIT.total_seconds())

    def _run(self, store: dist.Store, server: socket.socket) -> None:
        try:
            while self._group() is dist.group.WORLD and not self._closing.wait(self._pause()):
                if _has_ended(server):
                    break
                self._answer(store)
            if not _has_ended(server):
                store.set(f"ended/{self._rank}", json.dumps(self._end))
        except (dist.DistError, RuntimeError) as error:  # the store's server exited during a request
            _logger.debug("the watcher stops: %s", error, all_ranks=True)
        finally:
            server.close()
            self._watched = {}

    def _pause(self) -> float:
        return _FAST_PERIOD_S if time.monotonic() < self._polls_fast_until else _PERIOD_S

    def _answer(self, store: dist.Store) -> None:
        if self.on_call is not None and store.check(["call"]):
            self.on_call()
        request = f"ask/{self._rank}"
        if not store.check([request]):
            return
        message = store.get(request).decode()
        self._polls_fast_until = time.monotonic() + _FAST_POLL_S
        place = call_site_of_thread(self._subject)
        started = count_collectives(self._watched, since_ns=self._since_ns)
        if place is None or not place.communicates:  # gloo blocks, so a pending collective belongs to another thread
            started = {key: number for key, number in started.items() if not key.endswith("gloo")}
        answer = {"place": None if place is None else str(place), "started": started}
        store.set(f"place/{self._rank}", json.dumps(answer))
        store.delete_key(request)
        if message:
            _logger.error("%s", message, all_ranks=True)


class _ResponderThread(threading.Thread):
    def __init__(self, watcher: Watcher, store: dist.Store, server: socket.socket) -> None:
        super().__init__(target=watcher._run, args=(store, server), name="echelon-watcher", daemon=True)
        self.watcher = watcher


def _watchers() -> list[Watcher]:
    """Return the watchers whose threads have not ended."""
    return [thread.watcher for thread in threading.enumerate() if isinstance(thread, _ResponderThread)]


@cache
def _close_all_at_exit() -> None:
    # A daemon thread that returns from native code after the interpreter has shut down aborts the process.
    atexit.register(_close_all)


def _close_all() -> None:
    error = getattr(sys, "last_value", None)  # the uncaught exception that ended the program
    reason = "its program has ended" if error is None else f"{type(error).__name__}: {error}".split("\n", 1)[0]
    for watcher in _watchers():
        watcher.close(reason, failed=error is not None)


def responder_store(store: dist.Store) -> dist.Store:
    """Return the default group's ``common_store`` with the prefix for requests to other ranks.

    Keys: ``call`` makes every rank call its ``Watcher.on_call``. ``ask/R`` is a request to rank R with an optional message,
    which rank R deletes after reading it; ``place/R`` is its last answer, and ``ended/R`` says why it no longer answers.
    """
    return dist.PrefixStore("echelon/responder", store)


def groups_of_process() -> WatchedGroups:
    """Return every process group that this process belongs to, once for each device it supports."""
    pairs = [(group, device) for group in _world.pg_map for device in group._device_types]
    return {_key(group, device): (group, device) for group, device in pairs}


def count_collectives(groups: WatchedGroups, *, since_ns: int = 0) -> dict[str, int]:
    """Return how many collectives this process has started in each of ``groups``, by key.

    Gloo's sequence number includes point-to-point messages, so gloo's collectives are read from torch's flight recorder. If
    the recorder is off (TORCH_FR_BUFFER_SIZE=0, or an older torch), gloo groups are omitted. Backends other than gloo and
    nccl are always omitted.

    Args:
        since_ns: time as in ``time.time_ns``; older gloo records are ignored, because they belong to former groups.
    """
    recorded = _flight_recorder_counts(since_ns)
    started: dict[str, int] = {}
    for key, (group, device) in groups.items():
        if key.endswith("gloo") and group.group_name in recorded:
            started[key] = recorded[group.group_name]
        elif key.endswith("nccl"):
            backend: Any = group._get_backend(device)
            started[key] = backend._get_sequence_number_for_group()
    return started


def _flight_recorder_counts(since_ns: int) -> dict[str, int]:
    dump: Any = getattr(_distributed_c10d, "_dump_fr_trace", None)
    # Of this process. Its stacks are left out, because torch imports its compiler to read them.
    entries = pickle.loads(dump(includeStackTraces=False)).get("entries", []) if dump is not None else []
    # Entries are ordered oldest first, so the last one of each group remains.
    return {
        entry["process_group"][0]: entry["collective_seq_id"]
        for entry in entries
        if entry["time_created_ns"] >= since_ns
    }


def _key(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return a name for the group and its ``device`` backend that is the same on every rank of the group."""
    backend = group._get_backend(torch.device(device.type)).name()
    return f"{group.group_name} {dist.get_process_group_ranks(group)} {backend}"


def _server_of(store: dist.Store) -> socket.socket | None:
    """Return an idle connection to the server behind ``store``, or None if it has no server or cannot be reached.

    If the server process exits first, TCPStore prints a page of warnings in every other process at its next request. This
    connection detects the exit before such a request is made.
    """
    store = base_store(store)
    if not isinstance(store, dist.TCPStore):
        return None
    try:
        return socket.create_connection((store.host, store.port), timeout=_STORE_LIMIT.total_seconds())
    except OSError as error:
        _logger.warning(
            N_("cannot connect to the store, so other ranks cannot query this rank's position: %s"),
            error,
            all_ranks=True,
        )
        return None


def _has_ended(server: socket.socket) -> bool:
    return bool(select.select([server], [], [], 0)[0])
