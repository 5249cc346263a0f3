"""The stop barrier makes all ranks stop at the same point in the program, at almost no cost until it is requested.

A *boundary* is a point in the program where its state can be saved. Boundaries are numbered, and all ranks pass them in
increasing order. Each rank has a *position* and the coordinator has a *command*, which are shared words with a single writer
each.

* A rank writes that it has passed a boundary, and then reads the command. If there is no command, it continues.
* The coordinator writes HOLD. Each rank that reaches a boundary writes that it is held there, and waits. The coordinator
  reads all positions and commands the ranks to stop at the first boundary that no rank has passed. Ranks held at an earlier
  boundary proceed to this boundary, so that no rank waits in a collective for a held rank. No rank can pass this boundary, so
  all ranks stop at the same one.
* Both sides write before they read. If a rank does not see HOLD, it has written its position before the coordinator reads it.
* A rank at this boundary writes that it has stopped. Once all ranks have stopped, the coordinator writes END, and the ranks
  save.

A boundary is *whole* if a run that resumes from it executes everything that the original program would have executed. A
boundary within an evaluation is not whole. The first command is to stop at a whole boundary. After half of the grace period,
a second HOLD makes the ranks stop at any boundary. (Stopping at "the highest step + 2" without HOLD would be wrong, because a
rank may already be further ahead than the position that the coordinator has read.)

The protocol is implemented as generators that yield each access to a shared word, so that tests can run the accesses in every
possible order. This file uses only the standard library.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Protocol, TypeAlias, final

SIGNALS = (signal.SIGTERM, *((signal.SIGUSR1,) if hasattr(signal, "SIGUSR1") else ()))
"""Signals that request a run to save and exit."""

EXIT_CODE = 128 + signal.SIGTERM
"""Exit code of a preempted process or run, whichever signal it received and even if it could not save."""

_MINOR_BITS = 24
_STATE_BITS = 2
_BOUNDARY_BITS = 56
_POLL_S = 0.001
_SETTLE_S = 0.002  # longer than a processor delays a store


class RankState(IntEnum):
    """A rank's state at the boundary given by its position."""

    HELD = 0
    PAST = 1
    STOPPED = 2


class StopCommand(IntEnum):
    """A command from the coordinator."""

    NONE = 0
    HOLD = 1
    TO_WHOLE = 2
    """Proceed to the first whole boundary at or after the one in the command."""
    TO_ANY = 3
    """Proceed to the first boundary at or after the one in the command."""
    END = 4
    """Save and exit, because all ranks have stopped."""


Access: TypeAlias = int | None
"""A position to write, or None to read the command."""


def command_word(command: StopCommand, boundary: int = 0) -> int:
    """Return the shared word for a command."""
    return command << _BOUNDARY_BITS | boundary


def _position(boundary: int, state: RankState) -> int:
    return boundary << _STATE_BITS | state


def state_of(position: int) -> RankState:
    """Return the rank state that a position encodes."""
    return RankState(position & ((1 << _STATE_BITS) - 1))


def boundary_protocol(boundary: int, *, is_whole: bool) -> Generator[Access, int, bool]:
    """Run the protocol at ``boundary``. Return whether this rank must save there and exit.

    Yields each access to a shared word. The caller sends back the command that it read.
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
        # The coordinator has written another HOLD.


class CommandSlot(Protocol):
    """The shared words that a rank accesses."""

    def write_position(self, position: int) -> None:
        """Write this rank's position for the coordinator to read."""

    def read_command(self) -> int:
        """Return the coordinator's command."""


@final
class BarrierMember:
    """One rank's side of the stop barrier."""

    def __init__(self, slot: CommandSlot) -> None:
        self._slot = slot
        self._boundary = 0
        slot.write_position(_position(0, RankState.PAST))

    def pass_boundary(self, *, is_new_step: bool, is_whole: bool) -> bool:
        """Pass a boundary, waiting while this rank is held there. Return whether this rank must save there and exit.

        Args:
            is_new_step: whether this is the first boundary after a step. Steps are counted separately, so that ranks that
                pass different numbers of boundaries within a step (for example, if one rank runs an evaluation) agree again
                after the next step.
            is_whole: whether a run that resumes from here executes everything that the original program would have executed.
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
    """The shared words that the coordinator accesses."""

    def write_command(self, command: int) -> None:
        """Write ``command`` for all ranks to read."""

    def read_positions(self) -> Sequence[int]:
        """Return each rank's position, read after the last command was written; 0 if the rank has not joined yet."""


class BarrierOutcome(Enum):
    """State of a stop barrier."""

    PENDING = "pending"
    MET = "met"
    """All ranks have stopped at the same boundary and have been commanded to save."""
    LATE = "late"
    """The grace period has ended."""


@final
@dataclass(slots=True)
class BarrierCoordinator:
    """Makes all ranks stop at the same boundary.

    Args:
        shared: the shared words of all ranks.
        grace_s: time limit for stopping all ranks, in seconds.
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
        """Hold the ranks at their next boundary, and then command them to stop at a boundary that no rank has passed."""
        self.shared.write_command(command_word(StopCommand.HOLD))
        time.sleep(_SETTLE_S)
        self.shared.write_command(command_word(command, first_unpassed_boundary(self.shared.read_positions())))

    def poll(self) -> BarrierOutcome:
        """Read the positions, write the next command if necessary, and return the state."""
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
    """Return whether all ranks have stopped at the same boundary."""
    return len(set(positions)) == 1 and state_of(positions[0]) is RankState.STOPPED
