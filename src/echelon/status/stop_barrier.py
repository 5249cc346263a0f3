"""The stop barrier: how all ranks stop at the same boundary of the program, at almost no cost while nobody asks them to.

A program passes *boundaries*, at which its state can be saved, in the same order on every rank; each has an increasing
number. A rank has a *position* (a shared word that it alone writes), the coordinator a *command*, likewise.

* A rank writes that it has passed a boundary, and only then reads the command. Without a command it continues.
* The coordinator writes HOLD. Every rank that reaches a boundary writes that it is held there, and waits. The coordinator
  reads all positions, and commands: stop at the first boundary that no rank has passed. Ranks held before it proceed to
  it, so nobody waits in a collective for a held rank, and none can pass it: all stop at the same boundary.
* Both sides write before they read: a rank that did not see HOLD had written its position before the coordinator read it.
* A rank at that boundary writes that it has stopped. When all have stopped, the coordinator writes END: they save.

A boundary is *whole* if a run that resumes from it does all that the program would have done; a boundary within an
evaluation is not. The first command is to stop at a whole boundary; after half the grace, a second HOLD leads to any.
("The highest step + 2" instead of HOLD fails: a rank that is further ahead of the reader is waited for in vain.)

The protocol is written as generators of its single accesses to shared words, so that a test can run them in every order.
Standard library only.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Generator, Sequence
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
    "all_stopped",
    "boundary_protocol",
    "command_word",
    "first_unpassed_boundary",
    "state_of",
]

SIGNALS = (signal.SIGTERM, *((signal.SIGUSR1,) if hasattr(signal, "SIGUSR1") else ()))
"""Signals that ask a run to save and exit."""

EXIT_CODE = 128 + signal.SIGTERM
"""Exit code of a preempted process or run, whatever the signal, whether or not it could save."""

_MINOR_BITS = 24
_STATE_BITS = 2
_BOUNDARY_BITS = 56
_POLL_S = 0.001
_SETTLE_S = 0.002  # longer than any processor delays a store


class RankState(IntEnum):
    """What a rank does at the boundary in its position."""

    HELD = 0
    PAST = 1
    STOPPED = 2


class StopCommand(IntEnum):
    """What the coordinator commands."""

    NONE = 0
    HOLD = 1
    TO_WHOLE = 2
    """Proceed to the first whole boundary at or after the one in the command."""
    TO_ANY = 3
    """Proceed to the first boundary at or after it."""
    END = 4
    """All have stopped: save, and exit."""


Access: TypeAlias = int | None
"""A position to write, or None: read the command."""


def command_word(command: StopCommand, boundary: int = 0) -> int:
    """Return the shared word of a command."""
    return command << _BOUNDARY_BITS | boundary


def _position(boundary: int, state: RankState) -> int:
    return boundary << _STATE_BITS | state


def state_of(position: int) -> RankState:
    """Return what the rank at this position does."""
    return RankState(position & ((1 << _STATE_BITS) - 1))


def boundary_protocol(boundary: int, *, is_whole: bool) -> Generator[Access, int, bool]:
    """Reach ``boundary``; return whether this rank must save here and exit.

    Yields each access to a shared word; the command that was read is sent in.
    """
    yield _position(boundary, RankState.PAST)
    command = yield None
    if command == 0:
        return False
    while True:
        yield _position(boundary, RankState.HELD)
        command = yield None
        while command >> _BOUNDARY_BITS == StopCommand.HOLD:
            command = yield None
        kind, target = StopCommand(command >> _BOUNDARY_BITS), command & ((1 << _BOUNDARY_BITS) - 1)
        if kind is StopCommand.END:
            return True
        if boundary >= target and (is_whole or kind is StopCommand.TO_ANY):
            yield _position(boundary, RankState.STOPPED)
            while (answer := (yield None)) == command:
                pass
            if answer >> _BOUNDARY_BITS == StopCommand.END:
                return True
        else:
            yield _position(boundary, RankState.PAST)
            if (yield None) == command:
                return False
        # There was another HOLD meanwhile.


class CommandSlot(Protocol):
    """The shared words that a member accesses."""

    def write_position(self, position: int) -> None:
        """Show ``position`` to the coordinator."""

    def read_command(self) -> int:
        """Return the coordinator's command."""


@final
class BarrierMember:
    """A rank's part in the stop barrier."""

    def __init__(self, slot: CommandSlot) -> None:
        self._slot = slot
        self._boundary = 0
        slot.write_position(_position(0, RankState.PAST))

    def pass_boundary(self, *, is_new_step: bool, is_whole: bool) -> bool:
        """Reach a boundary; return whether this rank must save here and exit. Waits while a decision is pending.

        Args:
            is_new_step: the boundary is the first one after a step. Steps are counted apart, so that ranks that pass a
                different number of boundaries in between (an evaluation on one rank alone) agree again after the next.
            is_whole: a run that resumes from here does all that the program would have done.
        """
        self._boundary = ((self._boundary >> _MINOR_BITS) + 1) << _MINOR_BITS if is_new_step else self._boundary + 1
        slot = self._slot
        protocol = boundary_protocol(self._boundary, is_whole=is_whole)
        answer: int | None = None
        num_reads = 0
        try:
            while True:
                access = protocol.send(answer)  # type: ignore[arg-type]
                if access is not None:
                    slot.write_position(access)
                    answer, num_reads = None, 0
                    continue
                if num_reads:
                    time.sleep(_POLL_S)
                answer = slot.read_command()
                num_reads += 1
        except StopIteration as end:
            return bool(end.value)


class SharedCommands(Protocol):
    """The shared words that a coordinator accesses."""

    def write_command(self, command: int) -> None:
        """Give ``command`` to every rank."""

    def read_positions(self) -> Sequence[int]:
        """Return every rank's position, read after the last command; 0: it takes no part yet."""


class BarrierOutcome(Enum):
    """The state of a stop barrier."""

    PENDING = "pending"
    MET = "met"
    """All ranks have stopped at the same boundary, and were commanded to save."""
    LATE = "late"
    """The grace is over."""


@final
@dataclass(slots=True)
class BarrierCoordinator:
    """Leads the ranks to the same boundary.

    Args:
        shared: the shared words of all ranks.
        grace_s: how long the ranks may take.
    """

    shared: SharedCommands
    grace_s: float
    clock: Callable[[], float] = time.monotonic
    _deadline: float = field(init=False)
    _any_from: float = field(init=False)
    _outcome: BarrierOutcome = field(init=False, default=BarrierOutcome.PENDING)

    def __post_init__(self) -> None:
        now = self.clock()
        self._deadline, self._any_from = now + self.grace_s, now + self.grace_s / 2
        self._redirect(StopCommand.TO_WHOLE)

    def _redirect(self, command: StopCommand) -> None:
        """Hold the ranks at their next boundary, then send all to one that none has passed."""
        self.shared.write_command(command_word(StopCommand.HOLD))
        time.sleep(_SETTLE_S)
        self.shared.write_command(command_word(command, first_unpassed_boundary(self.shared.read_positions())))

    def poll(self) -> BarrierOutcome:
        """Read the positions, and command what follows."""
        if self._outcome is not BarrierOutcome.PENDING:
            return self._outcome
        now = self.clock()
        if all_stopped(self.shared.read_positions()):
            self.shared.write_command(command_word(StopCommand.END))
            self._outcome = BarrierOutcome.MET
        elif now >= self._deadline:
            self._outcome = BarrierOutcome.LATE
        elif now >= self._any_from:
            self._any_from = self._deadline
            self._redirect(StopCommand.TO_ANY)
        return self._outcome


def first_unpassed_boundary(positions: Sequence[int]) -> int:
    """Return the first boundary that no rank is known to have passed."""
    return max((position >> _STATE_BITS) + (state_of(position) is RankState.PAST) for position in positions)


def all_stopped(positions: Sequence[int]) -> bool:
    """Tell whether all ranks have stopped at the same boundary."""
    return len(set(positions)) == 1 and state_of(positions[0]) is RankState.STOPPED
