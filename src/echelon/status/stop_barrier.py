"""HOLD: how ranks agree on one place of the program at which all of them stop, at no cost to those who are not asked.

A program passes *boundaries*, at which its state can be saved, in one order on every rank; each has a number that only
grows. A rank has a *stand* (a word that it alone writes: where it is), the coordinator a *command*, likewise.

* A rank writes that it has passed a boundary, and only then reads the command. Nothing there: it goes on, and that is all it costs.
* The coordinator writes HOLD. Every rank that comes to a boundary writes that it is held there, and waits. The
  coordinator reads all stands and commands: stop at the first boundary that no rank has passed. Ranks held before it go
  on to it, so nobody waits in a collective for one that is held, and none can pass it: all stop at the same one.
* Writing before reading, on both sides: a rank that did not see HOLD had shown where it is before the coordinator looked.
* A rank that has come there writes that it has stopped. When all have, at one place, the coordinator writes END: they save.

Boundaries are *whole* where a run that goes on from there does all that the program would have done, and others, within an
evaluation, say. The first command is to stop at a whole one; when half the grace is over, a second HOLD leads to any. ("The
highest step + 2" instead of HOLD was tried: a rank that runs ahead of the reader by more than that is waited for in vain.)

The protocol is written as generators of its single accesses to shared words, so that a test can run them in every order.
Standard library only.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Protocol, TypeAlias, final

__all__ = [
    "EXIT_CODE",
    "SIGNALS",
    "BarrierCoordinator",
    "SharedCommands",
    "BarrierMember",
    "StopCommand",
    "BarrierOutcome",
    "CommandSlot",
    "RankState",
    "common_place",
    "have_met",
    "state_of",
    "stop_here",
    "word",
]

SIGNALS = (signal.SIGTERM, *((signal.SIGUSR1,) if hasattr(signal, "SIGUSR1") else ()))
"""What asks a run to save and end."""

EXIT_CODE = 128 + signal.SIGTERM
"""Of a process, and of a run, that was asked to end: whatever the signal, and whether it could save or had saved before."""

_MINOR_BITS = 24
_STATE_BITS = 2
_PLACE_BITS = 56
_NAP_S = 0.001
_SETTLE_S = 0.002  # longer than any processor keeps a store to itself


class RankState(IntEnum):
    """What a rank is doing about the boundary in its stand."""

    HELD = 0
    PAST = 1
    STOPPED = 2


class StopCommand(IntEnum):
    """What a command says."""

    NONE = 0
    HOLD = 1
    TO_WHOLE = 2
    """Go on to the first whole boundary that is not before the place in the command."""
    TO_ANY = 3
    """Go on to the first boundary that is not before it."""
    END = 4
    """All have come: save, and end."""


Access: TypeAlias = int | None
"""A stand to write, or None: read the command."""


def word(order: StopCommand, place: int = 0) -> int:
    """Return a command."""
    return order << _PLACE_BITS | place


def _stand(place: int, state: RankState) -> int:
    return place << _STATE_BITS | state


def state_of(stand: int) -> RankState:
    """Return what the rank with this stand is doing."""
    return RankState(stand & ((1 << _STATE_BITS) - 1))


def stop_here(place: int, *, is_whole: bool) -> Generator[Access, int, bool]:
    """Come to the boundary ``place``; return whether this rank is to save here and end.

    Yields each access to a shared word; a command is sent in.
    """
    yield _stand(place, RankState.PAST)
    command = yield None
    if command == 0:
        return False
    while True:
        yield _stand(place, RankState.HELD)
        command = yield None
        while command >> _PLACE_BITS == StopCommand.HOLD:
            command = yield None
        order, target = StopCommand(command >> _PLACE_BITS), command & ((1 << _PLACE_BITS) - 1)
        if order is StopCommand.END:
            return True
        if place >= target and (is_whole or order is StopCommand.TO_ANY):
            yield _stand(place, RankState.STOPPED)
            while (told := (yield None)) == command:
                pass
            if told >> _PLACE_BITS == StopCommand.END:
                return True
        else:
            yield _stand(place, RankState.PAST)
            if (yield None) == command:
                return False
        # Another HOLD came meanwhile.


class CommandSlot(Protocol):
    """Where a member writes and reads."""

    def write_stand(self, stand: int) -> None:
        """Show ``stand`` to the coordinator."""

    def read_command(self) -> int:
        """Return the coordinator's command."""


@final
class BarrierMember:
    """A rank's part in the agreement."""

    def __init__(self, seat: CommandSlot) -> None:
        self._seat = seat
        self._place = 0
        seat.write_stand(_stand(0, RankState.PAST))

    def at_boundary(self, *, is_new_step: bool, is_whole: bool) -> bool:
        """Come to a boundary; return whether this rank is to save here and end. It waits while a decision is pending.

        Args:
            is_new_step: the boundary is the first one after a step. Steps are counted apart, so that ranks that make
                another number of boundaries between two (an evaluation on one rank alone) agree again after the next.
            is_whole: a run that goes on from here does all that the program would have done.
        """
        self._place = ((self._place >> _MINOR_BITS) + 1) << _MINOR_BITS if is_new_step else self._place + 1
        seat = self._seat
        protocol = stop_here(self._place, is_whole=is_whole)
        answer: int | None = None
        num_reads = 0
        try:
            while True:
                access = protocol.send(answer)  # type: ignore[arg-type]
                if access is not None:
                    seat.write_stand(access)
                    answer, num_reads = None, 0
                    continue
                if num_reads:
                    time.sleep(_NAP_S)
                answer = seat.read_command()
                num_reads += 1
        except StopIteration as end:
            return bool(end.value)


class SharedCommands(Protocol):
    """Where a coordinator writes and reads."""

    def write_command(self, command: int) -> None:
        """Give ``command`` to every rank."""

    def read_stands(self) -> list[int]:
        """Return every rank's stand as it is after the last command; 0: it takes no part yet."""


class BarrierOutcome(Enum):
    """How far an agreement is."""

    PENDING = "pending"
    MET = "met"
    """All ranks have stopped at one place, and were told to save."""
    LATE = "late"
    """The grace is over."""


@final
@dataclass(slots=True)
class BarrierCoordinator:
    """Leads the ranks to one place.

    Args:
        desk: of all ranks.
        grace_s: they have so long to come.
    """

    desk: SharedCommands
    grace_s: float
    clock: Callable[[], float] = time.monotonic
    _deadline: float = field(init=False)
    _any_from: float = field(init=False)
    _outcome: BarrierOutcome = field(init=False, default=BarrierOutcome.PENDING)

    def __post_init__(self) -> None:
        now = self.clock()
        self._deadline, self._any_from = now + self.grace_s, now + self.grace_s / 2
        self.lead(StopCommand.TO_WHOLE)

    def lead(self, order: StopCommand) -> None:
        """Let no rank pass a boundary, and send all to one that none has passed."""
        self.desk.write_command(word(StopCommand.HOLD))
        time.sleep(_SETTLE_S)
        self.desk.write_command(word(order, common_place(self.desk.read_stands())))

    def look(self) -> BarrierOutcome:
        """Look whether all have come, and go on accordingly."""
        if self._outcome is not BarrierOutcome.PENDING:
            return self._outcome
        now = self.clock()
        if have_met(self.desk.read_stands()):
            self.desk.write_command(word(StopCommand.END))
            self._outcome = BarrierOutcome.MET
        elif now >= self._deadline:
            self._outcome = BarrierOutcome.LATE
        elif now >= self._any_from:
            self._any_from = self._deadline
            self.lead(StopCommand.TO_ANY)
        return self._outcome


def common_place(stands: list[int]) -> int:
    """Return the first place that no rank has passed, as far as is known: one that has not read HOLD yet may come back."""
    return max((stand >> _STATE_BITS) + (state_of(stand) is RankState.PAST) for stand in stands)


def have_met(stands: list[int]) -> bool:
    """Have all ranks stopped, at one place?"""
    return len(set(stands)) == 1 and state_of(stands[0]) is RankState.STOPPED
