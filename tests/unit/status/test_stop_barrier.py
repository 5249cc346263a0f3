"""The agreement about one step (HOLD): in every order in which ranks and coordinator may come to their shared words.

The program of a rank is the turns of a loop: a collective that waits for all ranks, then a boundary. A state of the search is
where each rank, the coordinator and the words are; from each, everybody who can make his next single access does.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from echelon.launch.coordinator import joined_run
from echelon.launch.interrupts import Interrupted, Interrupts
from echelon.launch.node import AttemptRanks, GenerationResult, Node, RunRules
from echelon.launch.supervisor import StallRules
from echelon.status.board import Board, Slot
from echelon.status.run_recorder import RunRecorder
from echelon.status.stop_barrier import (
    EXIT_CODE,
    BarrierCoordinator,
    BarrierMember,
    BarrierOutcome,
    RankState,
    StopCommand,
    all_stopped,
    boundary_protocol,
    command_word,
    first_unpassed_boundary,
)

# Whether each boundary of the loop is a whole one. The last turn is followed by no boundary: the program ends.
LOOP = (True, False, True)
SHORT = (False, True)
_START = RankState.PAST.value


@dataclass(frozen=True)
class Rank:
    """Where a rank is: in the collective of turn ``turn``, or (``answers``) in the boundary after it."""

    turn: int = 0
    answers: tuple[int | None, ...] | None = None
    """What the accesses in this boundary have given so far; None: it has not come to the boundary."""
    ended: str = ""


@dataclass(frozen=True)
class World:
    loop: tuple[bool, ...]
    ranks: tuple[Rank, ...]
    positions: tuple[int, ...]
    command: int = 0
    leader: tuple[int, tuple[int, ...]] = (0, ())
    """The coordinator's boundary in its program, and the positions that it has read in this look."""
    saved: tuple[int, ...] = ()


@cache
def _resumed(boundary: int, is_whole: bool, answers: tuple[int | None, ...]) -> tuple[Any, bool]:
    """Return the next access of a boundary after ``answers``, or (its verdict, True)."""
    protocol = boundary_protocol(boundary, is_whole=is_whole)
    try:
        access = next(protocol)
        for answer in answers:
            access = protocol.send(answer)  # type: ignore[arg-type]
    except StopIteration as end:
        return end.value, True
    return access, False


def _moves_of_rank(world: World, i: int) -> Iterator[World]:
    rank = world.ranks[i]
    if rank.ended:
        return

    def become(new: Rank, **more: Any) -> World:
        return replace(world, ranks=(*world.ranks[:i], new, *world.ranks[i + 1 :]), **more)

    if rank.answers is None:  # a collective lets nobody through before all have come to it
        if all(other.turn >= rank.turn for other in world.ranks):
            yield become(replace(rank, ended="ran out") if rank.turn == len(world.loop) else replace(rank, answers=()))
        return
    boundary = (rank.turn + 1) << 24
    access, _ = _resumed(boundary, world.loop[rank.turn], rank.answers)
    more: dict[str, Any] = {}
    if access is None:
        answers = (*rank.answers, world.command)
        # A rank that spins is in the state in which it was.
        if (
            len(rank.answers) > 1
            and rank.answers[-1] == world.command
            and _resumed(boundary, world.loop[rank.turn], answers) == (None, False)
        ):
            return
    else:
        answers = (*rank.answers, None)
        more["positions"] = (*world.positions[:i], access, *world.positions[i + 1 :])
    verdict, is_over = _resumed(boundary, world.loop[rank.turn], answers)
    if not is_over:
        yield become(replace(rank, answers=_shortest(boundary, world.loop[rank.turn], answers)), **more)
    elif verdict:
        yield become(replace(rank, ended=f"stopped at {rank.turn}"), saved=(*world.saved, rank.turn), **more)
    else:
        yield become(Rank(turn=rank.turn + 1), **more)


@cache
def _shortest(boundary: int, is_whole: bool, answers: tuple[int | None, ...]) -> tuple[int | None, ...]:
    """Leave out reads of a spin that were followed by another one: they change nothing."""
    kept = [
        a for j, a in enumerate(answers) if not (a is not None and j + 1 < len(answers) and answers[j + 1] is not None)
    ]
    return tuple(kept)


# The coordinator: nothing; HOLD; read each; command; look until all have met; once, in between, HOLD again for any boundary.
def _moves_of_leader(world: World, *, holds: bool) -> Iterator[World]:
    step, read = world.leader
    size = len(world.ranks)
    if step in (0, 3) and not read:  # begins at any moment; the second round may begin at any moment of the first
        yield replace(world, command=command_word(StopCommand.HOLD) if holds else world.command, leader=(step + 1, ()))
    if step in (1, 4):
        if len(read) < size:
            yield replace(world, leader=(step, (*read, world.positions[len(read)])))
        else:
            order = StopCommand.TO_WHOLE if step == 1 else StopCommand.TO_ANY
            target = first_unpassed_boundary(list(read)) + (0 if holds else 1 << 24)
            yield replace(world, command=command_word(order, target), leader=(3 if step == 1 else 6, ()))
    # A look reads one stand after another, and only then decides: between, the ranks go on. (One that finds nothing is none.)
    if step in (3, 6) and len(read) < size and all_stopped([world.positions[len(read)]] * size):
        yield replace(world, leader=(step, (*read, world.positions[len(read)])))
    if step in (3, 6) and len(read) == size:
        yield (
            replace(world, command=command_word(StopCommand.END), leader=(9, ()))
            if all_stopped(list(read))
            else replace(world, leader=(step, ()))
        )


def _search(size: int, loop: tuple[bool, ...], *, holds: bool = True) -> tuple[int, set[str]]:
    """Return the number of states, and how the runs have ended: a set of verdicts."""
    first = World(loop=loop, ranks=(Rank(),) * size, positions=(_START,) * size)
    seen, waiting, ends = {first}, [first], set()
    while waiting and "deadlock" not in ends:
        world = waiting.pop()
        following = [*_moves_of_leader(world, holds=holds)]
        for i in range(size):
            following += _moves_of_rank(world, i)
        if not following:
            ends.add(_verdict(world))
        for new in following:
            if new not in seen:
                seen.add(new)
                waiting.append(new)
    return len(seen), ends


def _verdict(world: World) -> str:
    if all(rank.ended == "ran out" for rank in world.ranks):
        return "ran out"
    if all(rank.ended.startswith("stopped") for rank in world.ranks):
        return "same" if len(set(world.saved)) == 1 else f"different: {sorted(set(world.saved))}"
    return "deadlock"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "loop"),
    [
        (1, LOOP),
        (2, SHORT),
        pytest.param(2, LOOP, marks=pytest.mark.soak),
        pytest.param(3, LOOP, marks=pytest.mark.soak),
    ],
)
def test_in_every_interleaving_all_ranks_save_the_same_step_or_the_run_ends(size: int, loop: tuple[bool, ...]) -> None:
    num_states, ends = _search(size, loop)
    assert num_states > 40 * 5 ** (size - 1)
    assert ends == {"same", "ran out"}


def test_without_the_barrier_some_interleaving_misses_the_step() -> None:
    _, ends = _search(2, (True, True, True), holds=False)
    assert "deadlock" in ends


class Words:
    """A board of ranks that are not there, and a clock."""

    def __init__(self, *positions: int) -> None:
        self.positions, self.commands, self.now = list(positions), [0], 0.0

    def write_command(self, command: int) -> None:
        self.commands.append(command)

    def read_positions(self) -> list[int]:
        return self.positions

    def clock(self) -> float:
        return self.now


def test_the_coordinator_tries_update_boundaries_then_any_boundary_then_gives_up() -> None:
    past, stopped = 5 << 2 | RankState.PAST, 6 << 2 | RankState.STOPPED
    words = Words(past, stopped)
    coordinator = BarrierCoordinator(words, 10.0, clock=words.clock)
    assert words.commands[1:] == [command_word(StopCommand.HOLD), command_word(StopCommand.TO_WHOLE, 6)]
    words.now = 4.9
    assert coordinator.poll() is BarrierOutcome.PENDING
    words.now = 5.0
    assert coordinator.poll() is BarrierOutcome.PENDING
    assert words.commands[3:] == [command_word(StopCommand.HOLD), command_word(StopCommand.TO_ANY, 6)]
    words.now = 10.0
    assert coordinator.poll() is BarrierOutcome.LATE
    words.positions = [stopped, stopped]
    assert coordinator.poll() is BarrierOutcome.LATE
    again = BarrierCoordinator(words, 10.0, clock=words.clock)
    assert again.poll() is BarrierOutcome.MET
    assert words.commands[-1] == command_word(StopCommand.END)


@contextmanager
def run_of(board: Board, *, grace_s: float) -> Iterator[tuple[Node, Callable[[int], None]]]:
    """The node of a run whose ranks only have ``board``, and a function with which its launcher receives a signal."""
    directory = Path(board.path).parent
    rules = RunRules(
        max_restarts=0,
        stall=StallRules(timeout=timedelta(), on_stall="report"),
        preemption_grace=timedelta(seconds=grace_s),
        logs="above",
        directory=directory,
        began_ns=0,
        record=RunRecorder(None, began_ns=0),
    )
    interrupts = Interrupts()
    interrupts.hold()
    workers: Any = SimpleNamespace(exit_codes=lambda: [None] * board.num_slots, running=dict)
    # torch's store opens a pipe that lasts as long as the process.
    store = mock.patch("echelon.world.group.LoopbackStore", return_value=SimpleNamespace(port=1))
    with store, joined_run(None, rules, interrupts, num_processes=board.num_slots, port=0) as node:
        node.next_generation()
        node.watch(AttemptRanks(board=board, workers=workers, directory=directory, numbers=[*range(board.num_slots)]))
        try:
            yield node, lambda number: interrupts.on_signal(number, None)
        finally:
            node.watch(None)
            board.remove()


def test_the_launcher_coordinates_the_ranks_and_names_missing_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    board = Board(2, folder=str(tmp_path))
    with run_of(board, grace_s=0.05) as (node, receive):
        assert node.poll() is None
        slots = [Slot(board.path, rank) for rank in range(2)]
        BarrierMember(slots[0])
        slots[1].write_position(7 << 2 | RankState.STOPPED)
        slots[1].write_preemption_signal(signal.SIGUSR1)
        assert node.poll() is None
        assert node.is_preempting
        receive(signal.SIGTERM)  # a scheduler tells all processes: this is still the first one
        assert node.poll(timedelta(seconds=60)) == GenerationResult(then="preempted", code=EXIT_CODE)
        assert node.report_end() == EXIT_CODE
        error = capsys.readouterr().err
        assert "SIGUSR1 to rank 1: all ranks save at the same step and exit (within 0.05 s; a second signal" in error
        assert "the ranks did not reach a common step within 0.05 s and were stopped" in error
        assert "where: rank 0: no step yet; rank 1: no step yet (at the stop barrier)" in error
        receive(signal.SIGTERM)
        with pytest.raises(Interrupted):
            node.poll()


@pytest.mark.parametrize(
    ("grace_s", "takes_part", "number"), [(0.0, True, "SIGTERM"), (9.0, False, "SIGUSR1"), (9.0, True, "SIGINT")]
)
def test_a_signal_stops_a_run_that_cannot_be_saved(
    tmp_path: Path, grace_s: float, takes_part: bool, number: str
) -> None:
    board = Board(1, folder=str(tmp_path))
    with run_of(board, grace_s=grace_s) as (node, receive):
        if takes_part:
            BarrierMember(Slot(board.path, 0))
        receive(signal.Signals[number])
        with pytest.raises(Interrupted):
            node.poll()
