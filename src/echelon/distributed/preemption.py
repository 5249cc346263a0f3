"""A rank's part in a preemption: the signals that ask for it, and the agreement with the other ranks (``status/stop_barrier.py``).

Under ``echelon launch`` the launcher coordinates, over the status board: a signal to a rank is only passed on to it. Without it
the processes do so themselves, over the store of their group: each that gets a signal tells the others (their ``Watcher``
looks there), each then starts a thread, and that of rank zero coordinates. A step costs the same either way: one word is
written and one is read, in memory.
"""

from __future__ import annotations

import _thread
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import FrameType
from typing import Any, NoReturn, final

import torch.distributed as dist
from torch.utils.data import get_worker_info

from echelon.base import environ
from echelon.distributed.responder import Watcher, desk_of
from echelon.distributed.stores import common_store
from echelon.status.board import Slot
from echelon.status.notes import BOARD_VARIABLE
from echelon.status.stop_barrier import (
    EXIT_CODE,
    SIGNALS,
    BarrierCoordinator,
    BarrierMember,
    BarrierOutcome,
    StopCommand,
    command_word,
)

__all__ = ["Preempted", "member_of_launch", "on_signals", "should_stop"]

_GRACE_S = 25.0  # Kubernetes, Slurm and torchrun kill 30 s after SIGTERM
_POLL_S = 0.005


class Preempted(SystemExit):
    """The run was asked to end (SIGTERM or SIGUSR1) and stops here; not caught, the process ends with exit code 143."""

    def __init__(self) -> None:
        super().__init__(EXIT_CODE)


def member_of_launch() -> BarrierMember | None:
    """Return this rank's part in the preemptions that our launcher leads; None: none of ours started it, or it leads none.

    From the first call on the launcher counts on this rank, and SIGTERM and SIGUSR1 to it are passed on to the launcher
    (unless the program has handlers of its own).
    """
    place = environ.own(BOARD_VARIABLE)
    return None if place is None else _open(place, os.getpid())


@lru_cache(maxsize=1)
def _open(place: str, _pid: int) -> BarrierMember | None:
    path, _, index = place.rpartition(":")
    try:
        slot = Slot(path, int(index))
    except (OSError, ValueError):
        return None  # a program that has outlived its launcher, or a variable that somebody else's program inherited
    if not slot.grace_ms:
        return None
    _take_signals(slot.write_preemption_signal)
    return BarrierMember(slot)


def should_stop() -> bool:
    """Tell whether the run was asked to end, and is to be saved here: call it once a step, on every rank.

    It returns True on all ranks after the same step; the program then saves, and ends. For programs without an Accelerator,
    under ``echelon launch``; elsewhere, and inside of ``Accelerator.epochs`` (which saves by itself), it is False.
    """
    member = member_of_launch()
    return member is not None and member.pass_boundary(is_new_step=True, is_whole=True)


@contextmanager
def on_signals(watcher: Watcher | None) -> Iterator[BarrierMember | None]:
    """Take SIGTERM and SIGUSR1 inside the ``with`` block, and give this rank's part in the agreement about them.

    None: the program has handlers of its own, or this is not its main thread.

    Args:
        watcher: by which other ranks tell this one; None: nobody does.
    """
    talk = _Talk()
    taken = _take_signals(talk.on_signal)
    if not taken:
        yield None
        return
    if watcher is not None:
        watcher.on_call = talk.begin
    has_failed = True
    try:
        yield talk.member
        has_failed = False
    except GeneratorExit:  # a loop that was left
        has_failed = False
        raise
    finally:
        if watcher is not None:
            watcher.on_call = None
        for number in taken:
            signal.signal(number, signal.SIG_DFL)
        talk.end()
        if talk.is_pending and not has_failed:  # it came after the last boundary
            os.kill(os.getpid(), signal.SIGTERM)


def _take_signals(told: Any) -> list[int]:
    """Let ``told(number)`` be called by the signals that ask for preemption; return those that could be taken."""
    if threading.current_thread() is not threading.main_thread():
        return []  # Python lets no other thread take signals
    pid = os.getpid()
    spared: set[int] = set()

    def handle(number: int, _frame: FrameType | None) -> None:
        if os.getpid() == pid:
            told(number)
        elif get_worker_info() is not None and number not in spared:
            # Slurm signals every process of a job. A worker of a DataLoader that ended would fail its rank before it has saved.
            spared.add(number)
        else:  # a child that the program has forked: it is to end as it would without us
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    taken = [number for number in SIGNALS if signal.getsignal(number) is signal.SIG_DFL]
    for number in taken:
        signal.signal(number, handle)
    return taken


@final
class _OwnSeat:
    """Words of this process."""

    def __init__(self) -> None:
        self.command = self.position = 0

    def write_position(self, position: int) -> None:
        self.position = position

    def read_command(self) -> int:
        return self.command


@final
class _Talk:
    """The agreement of ranks that no launcher of ours leads, from the signal on."""

    def __init__(self) -> None:
        self._seat = _OwnSeat()
        self.member = BarrierMember(self._seat)
        self._is_begun = self._is_over = False
        self._num_signals = 0

    @property
    def is_pending(self) -> bool:
        return self._is_begun and self._seat.command != command_word(StopCommand.END)

    def on_signal(self, number: int) -> None:
        self._num_signals += 1
        is_alone = not (dist.is_initialized() and dist.get_world_size() > 1)
        # Of several processes repeats count once: torchrun passes on what its ranks got already.
        if is_alone and self._num_signals > 1:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.begin()

    def begin(self) -> None:
        """Begin to agree, in a thread (not one of ``threading``, whose locks the interrupted code may hold)."""
        if not self._is_begun:
            self._is_begun = True
            self._seat.command = command_word(
                StopCommand.HOLD
            )  # the next boundary is not passed before the thread has come to lead
            _thread.start_new_thread(self._run, ())

    def end(self) -> None:
        """Let the thread end."""
        self._is_over = True

    def _run(self) -> None:
        deadline = time.monotonic() + _GRACE_S
        try:
            if not (dist.is_initialized() and dist.get_world_size() > 1):
                self._lead(_OwnDesk(self._seat))
                return
            group = dist.group.WORLD
            assert group is not None
            store = common_store(group, own_connection=True)
            desk_of(store).set("call", "")
            words = dist.PrefixStore("echelon/preemption", store)
            if dist.get_rank() == 0:
                self._lead(_StoreDesk(self._seat, words, deadline))
            else:
                self._follow(words, deadline)
        except (dist.DistError, RuntimeError, TimeoutError) as error:
            if not self._is_over:
                _give_up(f"the other ranks do not answer ({type(error).__name__})")

    def _lead(self, desk: _OwnDesk | _StoreDesk) -> None:
        coordinator = BarrierCoordinator(desk, _GRACE_S)
        while (outcome := coordinator.poll()) is BarrierOutcome.PENDING and not self._is_over:
            time.sleep(_POLL_S)
        if outcome is BarrierOutcome.LATE:
            _give_up("not all ranks came to one step")

    def _follow(self, words: dist.Store, deadline: float) -> None:
        rank, shown = dist.get_rank(), ""
        while not self._is_over and self._seat.command != command_word(StopCommand.END):
            if time.monotonic() > deadline + _POLL_S:
                _give_up("not all ranks came to one step")
            number = 0
            if words.check(["command"]):
                number, self._seat.command = json.loads(words.get("command"))
            # After the command is there for the main thread: what it shows now is what it does with it.
            post = json.dumps([number, self._seat.position])
            if post != shown:
                words.set(f"stand/{rank}", post)
                shown = post
            time.sleep(_POLL_S)


@final
class _OwnDesk:
    def __init__(self, seat: _OwnSeat) -> None:
        self._seat = seat

    def write_command(self, command: int) -> None:
        self._seat.command = command

    def read_positions(self) -> list[int]:
        return [self._seat.position]


@final
class _StoreDesk:
    """Words of all ranks in the store: ``command`` has its number and the word, ``stand/R`` the number that R has seen, and its word."""

    def __init__(self, seat: _OwnSeat, words: dist.Store, deadline: float) -> None:
        self._seat, self._words, self._deadline = seat, words, deadline
        self._number = 0
        self._size = dist.get_world_size()

    def write_command(self, command: int) -> None:
        self._number += 1
        self._seat.command = command
        self._words.set("command", json.dumps([self._number, command]))

    def read_positions(self) -> list[int]:
        return [self._seat.position, *(self._stand_of(rank) for rank in range(1, self._size))]

    def _stand_of(self, rank: int) -> int:
        key = f"stand/{rank}"
        while True:
            if self._words.check([key]):
                number, stand = json.loads(self._words.get(key))
                if number == self._number:
                    return int(stand)
            if time.monotonic() > self._deadline:
                raise TimeoutError
            time.sleep(_POLL_S)


def _give_up(why: str) -> NoReturn:
    """End the process: it was asked to, and its main thread cannot."""
    print(
        f"echelon: asked to end by a signal, and after {_GRACE_S:g} s {why}: the process ends with exit code {EXIT_CODE}; the "
        "next start goes on from the last checkpoint",
        file=sys.stderr,
        flush=True,
    )
    sys.stdout.flush()
    os._exit(EXIT_CODE)
