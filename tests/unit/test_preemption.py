"""The agreement about one step (HOLD): in every order in which ranks and coordinator may come to their shared words.

The program of a rank is the turns of a loop: a collective that waits for all ranks, then a boundary. A state of the search is
where each rank, the coordinator and the words are; from each, everybody who can make his next single access does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest

from echelon.status import hold
from echelon.status.board import Board, Slot
from echelon.status.hold import Coordinator, Member, Order, Outcome, State, common_place, have_met, stop_here, word

# Whether each boundary of the loop is a whole one. The last turn is followed by no boundary: the program ends.
LOOP = (True, False, True)
_START = State.PAST.value


@dataclass(frozen=True)
class Rank:
    """Where a rank is: in the collective of turn ``turn``, or (``answers``) in the boundary after it."""

    turn: int = 0
    answers: tuple[int | None, ...] | None = None
    """What the accesses in this boundary have given so far; None: it has not come to the boundary."""
    ended: str = ""


@dataclass(frozen=True)
class World:
    ranks: tuple[Rank, ...]
    stands: tuple[int, ...]
    command: int = 0
    leader: tuple[int, tuple[int, ...]] = (0, ())
    """The coordinator's place in its program, and the stands that it has read in this look."""
    saved: tuple[int, ...] = ()


def _resumed(place: int, is_whole: bool, answers: tuple[int | None, ...]) -> tuple[Any, bool]:
    """Return the next access of a boundary after ``answers``, or (its verdict, True)."""
    protocol = stop_here(place, is_whole=is_whole)
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
            yield become(replace(rank, ended="ran out") if rank.turn == len(LOOP) else replace(rank, answers=()))
        return
    place = (rank.turn + 1) << 24
    access, _ = _resumed(place, LOOP[rank.turn], rank.answers)
    more: dict[str, Any] = {}
    if access is None:
        answers = (*rank.answers, world.command)
        # A rank that spins is in the state in which it was.
        if len(rank.answers) > 1 and rank.answers[-1] == world.command and _resumed(place, LOOP[rank.turn], answers) == (None, False):
            return
    else:
        answers = (*rank.answers, None)
        more["stands"] = (*world.stands[:i], access, *world.stands[i + 1 :])
    verdict, is_over = _resumed(place, LOOP[rank.turn], answers)
    if not is_over:
        yield become(replace(rank, answers=_shortest(place, LOOP[rank.turn], answers)), **more)
    elif verdict:
        yield become(replace(rank, ended=f"stopped at {rank.turn}"), saved=(*world.saved, rank.turn), **more)
    else:
        yield become(Rank(turn=rank.turn + 1), **more)


def _shortest(place: int, is_whole: bool, answers: tuple[int | None, ...]) -> tuple[int | None, ...]:
    """Leave out reads of a spin that were followed by another one: they change nothing."""
    kept = [a for j, a in enumerate(answers) if not (a is not None and j + 1 < len(answers) and answers[j + 1] is not None)]
    return tuple(kept)


# The coordinator: nothing; HOLD; read each; command; look until all have met; once, in between, HOLD again for any boundary.
def _moves_of_leader(world: World, *, hold_first: bool = True) -> Iterator[World]:
    step, read = world.leader
    size = len(world.ranks)
    if step in (0, 3):  # begins at any moment; the second round may begin at any moment of the first
        yield replace(world, command=word(Order.HOLD) if hold_first else world.command, leader=(step + 1, ()))
    if step in (1, 4):
        if len(read) < size:
            yield replace(world, leader=(step, (*read, world.stands[len(read)])))
        else:
            order = Order.TO_WHOLE if step == 1 else Order.TO_ANY
            target = common_place(list(read)) if hold_first else max(read) // 4 + (2 << 24)
            yield replace(world, command=word(order, target), leader=(3 if step == 1 else 6, ()))
    # A look reads one stand after another, and only then decides: between, the ranks go on.
    if step in (3, 6) and have_met(list(world.stands)):
        yield replace(world, command=word(Order.END), leader=(9, ()))


def _search(size: int, *, hold_first: bool = True) -> tuple[int, set[str]]:
    """Return the number of states, and how the runs have ended: a set of verdicts."""
    first = World(ranks=(Rank(),) * size, stands=(_START,) * size)
    seen, waiting, ends = {first}, [first], set()
    while waiting:
        world = waiting.pop()
        following = [*_moves_of_leader(world, hold_first=hold_first)]
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


@pytest.mark.parametrize("size", [1, 2, 3])
def test_in_every_order_all_ranks_save_the_same_step_or_the_run_ends(size: int) -> None:
    num_states, ends = _search(size)
    assert num_states > 50 * 5 ** (size - 1)
    assert ends == {"same", "ran out"}
