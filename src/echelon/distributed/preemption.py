"""Handles preemption on a rank: the signals that request it, and the agreement between ranks (``status/stop_barrier.py``).

Under ``echelon launch``, the launcher coordinates through the status board, and ranks forward their signals to it. Otherwise
the ranks use their process group's store: a rank that receives a signal notifies the others through their ``Watcher``, each
rank starts a thread, and rank zero's thread coordinates. In both cases a step only writes and reads one word in memory.
"""

from __future__ import annotations

import _thread
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import FrameType
from typing import Any, NoReturn, final

import torch.distributed as dist
from torch.utils.data import get_worker_info

from echelon.base.messages.terminal import say
from echelon.base.messages.translation import gettext as _, gettext_noop as N_
from echelon.distributed.peer_responder import Watcher, responder_store
from echelon.distributed.stores import common_store
from echelon.status.board import Slot
from echelon.status.stop_barrier import (
    EXIT_CODE,
    SIGNALS,
    BarrierCoordinator,
    BarrierMember,
    BarrierOutcome,
    StopCommand,
    command_word,
)
from echelon.world.launch_variables import board_slot

_GRACE_S = 25.0  # Kubernetes, Slurm and torchrun kill 30 s after SIGTERM
_POLL_S = 0.005
_STORE_LIMIT_S = 5.0  # how long the end waits for a call to a store that does not answer


class Preempted(SystemExit):
    """Raised when a run stops after SIGTERM or SIGUSR1; if it is not caught, the process exits with code 143."""

    def __init__(self) -> None:
        super().__init__(EXIT_CODE)


def member_of_launch() -> BarrierMember | None:
    """Return this rank's member of the stop barrier that ``echelon launch`` coordinates, or None under other launchers.

    After the first call, the launcher waits for this rank at a stop barrier, and this rank forwards SIGTERM and SIGUSR1 to
    the launcher (unless the program has its own handlers).
    """
    place = board_slot()
    return None if place is None else _member_of_slot(place, os.getpid())


@lru_cache(maxsize=1)
def _member_of_slot(place: str, _pid: int) -> BarrierMember | None:
    path, _, index = place.rpartition(":")
    try:
        slot = Slot(path, int(index))
    except (OSError, ValueError):
        return None  # the launcher has exited, or an unrelated program inherited the variable
    if not slot.grace_ms:
        return None
    _install_handlers(slot.write_preemption_signal)
    return BarrierMember(slot)


def should_stop() -> bool:
    """Return whether the run must save and exit now; call it once per step on every rank.

    It returns True on all ranks after the same step. Use it in programs without an Accelerator under ``echelon launch``.
    Under other launchers and inside ``Accelerator.epochs``, which saves automatically, it returns False.

    Examples:
        >>> if should_stop():
        ...     torch.save(model.state_dict(), "model.pt")
    """
    member = member_of_launch()
    return member is not None and member.pass_boundary(is_new_step=True, is_whole=True)


@contextmanager
def on_signals(watcher: Watcher | None) -> Iterator[BarrierMember | None]:
    """Handle SIGTERM and SIGUSR1 inside the ``with`` block, and yield this rank's member of the stop barrier.

    It yields None if the program has its own handlers or this is not the main thread.

    Args:
        watcher: receives notifications from other ranks; None if there are no other ranks.
    """
    agreement = _StopAgreement()
    handled = _install_handlers(agreement.on_signal)
    if not handled:
        yield None
        return
    if watcher is not None:
        watcher.on_call = agreement.begin
    has_failed = True
    try:
        yield agreement.member
        has_failed = False
    except GeneratorExit:  # the caller has left its loop
        has_failed = False
        raise
    finally:
        if watcher is not None:
            watcher.on_call = None
        for number in handled:
            signal.signal(number, signal.SIG_DFL)
        agreement.end()
        if agreement.is_pending and not has_failed:  # the signal arrived after the last boundary
            os.kill(os.getpid(), signal.SIGTERM)


def _install_handlers(on_stop_signal: Any) -> list[int]:
    """Call ``on_stop_signal(number)`` on each preemption signal that has no handler yet; return these signals."""
    if threading.current_thread() is not threading.main_thread():
        return []  # Python allows signal handlers to be set only in the main thread
    pid = os.getpid()
    spared: set[int] = set()

    def handle(number: int, _frame: FrameType | None) -> None:
        if os.getpid() == pid:
            on_stop_signal(number)
        elif get_worker_info() is not None and number not in spared:
            # Slurm signals every process of a job. If a DataLoader worker exited, its rank would fail before it saves.
            spared.add(number)
        else:  # a forked child of the program: apply the default action
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    handled = [number for number in SIGNALS if signal.getsignal(number) is signal.SIG_DFL]
    for number in handled:
        signal.signal(number, handle)
    return handled


@final
class _LocalSlot:
    """The command and position of this process, in memory."""

    def __init__(self) -> None:
        self.command = self.position = 0

    def write_position(self, position: int) -> None:
        self.position = position

    def read_command(self) -> int:
        return self.command


@final
class _StopAgreement:
    """Makes the ranks agree on a step to stop at when they run without ``echelon launch``."""

    def __init__(self) -> None:
        self._slot = _LocalSlot()
        self.member = BarrierMember(self._slot)
        self._has_started = self._is_over = False
        self._running = _thread.allocate_lock()  # held by the thread, and from the end on
        self._num_signals = 0

    @property
    def is_pending(self) -> bool:
        return self._has_started and self._slot.command != command_word(StopCommand.END)

    def on_signal(self, number: int) -> None:
        self._num_signals += 1
        is_alone = not (dist.is_initialized() and dist.get_world_size() > 1)
        # With several processes repeated signals are ignored: torchrun forwards signals that its ranks already received.
        if is_alone and self._num_signals > 1:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.begin()

    def begin(self) -> None:
        """Start the agreement in a raw thread, because the interrupted code may hold ``threading`` locks."""
        if self._has_started or not self._running.acquire(blocking=False):
            return
        self._has_started = True
        # Blocks the next boundary until the thread coordinates.
        self._slot.command = command_word(StopCommand.HOLD)
        _thread.start_new_thread(self._run, ())

    def end(self) -> None:
        """Stop the thread, and wait for it: in a call to the store while the interpreter exits, it would abort the process."""
        self._is_over = True
        self._running.acquire(timeout=_STORE_LIMIT_S)

    def _run(self) -> None:
        try:
            self._agree()
        finally:
            self._running.release()

    def _agree(self) -> None:
        deadline = time.monotonic() + _GRACE_S
        try:
            if not (dist.is_initialized() and dist.get_world_size() > 1):
                self._lead(_LocalSlots(self._slot))
                return
            store = common_store(own_connection=True)
            responder_store(store).set("call", "")
            words = dist.PrefixStore("echelon/preemption", store)
            if dist.get_rank() == 0:
                self._lead(_StoreSlots(self._slot, words, lambda: self._is_over or time.monotonic() > deadline))
            else:
                self._follow(words, deadline)
        except (dist.DistError, RuntimeError, TimeoutError) as error:
            if not self._is_over:
                _exit_now(_("the other ranks did not answer ({kind})", kind=type(error).__name__))

    def _lead(self, slots: _LocalSlots | _StoreSlots) -> None:
        coordinator = BarrierCoordinator(slots, _GRACE_S)
        while (outcome := coordinator.poll()) is BarrierOutcome.PENDING and not self._is_over:
            time.sleep(_POLL_S)
        if outcome is BarrierOutcome.LATE:
            _exit_now(_("not all ranks reached the same step"))

    def _follow(self, words: dist.Store, deadline: float) -> None:
        rank, shown = dist.get_rank(), ""
        while not self._is_over and self._slot.command != command_word(StopCommand.END):
            if time.monotonic() > deadline + _POLL_S:
                _exit_now(_("not all ranks reached the same step"))
            number = 0
            if words.check(["command"]):
                number, self._slot.command = json.loads(words.get("command"))
            # Read the position after writing the command, so that it is the main thread's response to the command.
            post = json.dumps([number, self._slot.position])
            if post != shown:
                words.set(f"position/{rank}", post)
                shown = post
            time.sleep(_POLL_S)


@final
class _LocalSlots:
    def __init__(self, slot: _LocalSlot) -> None:
        self._slot = slot

    def write_command(self, command: int) -> None:
        self._slot.command = command

    def read_positions(self) -> list[int]:
        return [self._slot.position]


@final
class _StoreSlots:
    """Keys in the store: ``command`` holds (number, command), ``position/R`` (last number rank R has seen, position)."""

    def __init__(self, slot: _LocalSlot, words: dist.Store, has_given_up: Callable[[], bool]) -> None:
        self._slot, self._words, self._has_given_up = slot, words, has_given_up
        self._number = 0
        self._size = dist.get_world_size()

    def write_command(self, command: int) -> None:
        self._number += 1
        self._slot.command = command
        self._words.set("command", json.dumps([self._number, command]))

    def read_positions(self) -> list[int]:
        return [self._slot.position, *(self._position_of(rank) for rank in range(1, self._size))]

    def _position_of(self, rank: int) -> int:
        key = f"position/{rank}"
        while True:
            if self._words.check([key]):
                number, position = json.loads(self._words.get(key))
                if number == self._number:
                    return int(position)
            if self._has_given_up():
                raise TimeoutError
            time.sleep(_POLL_S)


def _exit_now(why: str) -> NoReturn:
    """Exit the process because its main thread has not stopped within the grace period."""
    text = N_(
        "{why} within {seconds:g} s of the stop signal. The process exits with code {code}, and the next run resumes from the "
        "last checkpoint"
    )
    say(_(text, why=why, seconds=_GRACE_S, code=EXIT_CODE))
    sys.stdout.flush()
    # From a thread, sys.exit() ends only the thread, and the main thread hangs, so that Python could not end either.
    os._exit(EXIT_CODE)
