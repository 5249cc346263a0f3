"""Which waits can never end, by who has joined which call; each claim is checked against a plain simulation of the ranks."""

from __future__ import annotations

import random

import pytest

from echelon.diagnose.collectives import CollectiveCall, History
from echelon.diagnose.deadlock import find_deadlocked_ranks


def simulate(programs: list[list[str]]) -> tuple[list[int], set[int]]:
    """Return how many calls of its program each rank has ended when no rank can move, and the ranks that wait.

    A call is the letter of a group and the kind; ranks meet in the n-th call of a group if all its ranks make the same there.
    """
    at = [0] * len(programs)

    def turn(rank: int) -> int:
        group = programs[rank][at[rank]][0]
        return sum(call[0] == group for call in programs[rank][: at[rank] + 1])

    def may_move(rank: int) -> bool:
        call = programs[rank][at[rank]]
        return all(
            [one for one in programs[other][: at[other] + 1] if one[0] == call[0]][turn(rank) - 1 : turn(rank)]
            == [call]
            for other in members(call[0], len(programs))
        )

    while moving := [rank for rank, program in enumerate(programs) if at[rank] < len(program) and may_move(rank)]:
        for rank in moving:
            at[rank] += 1
    return at, {rank for rank, program in enumerate(programs) if at[rank] < len(program)}


def members(group: str, num_ranks: int) -> tuple[int, ...]:
    return tuple(range(num_ranks)) if group == "a" else tuple(range(1, num_ranks))


def histories_of(programs: list[list[str]], at: list[int]) -> dict[int, dict[str, History]]:
    found: dict[int, dict[str, History]] = {}
    for rank, program in enumerate(programs):
        started: dict[str, list[CollectiveCall]] = {}
        for index, call in enumerate(program[: at[rank] + 1]):
            calls = started.setdefault(call[0], [])
            calls.append(CollectiveCall(number=len(calls) + 1, kind=call[1], is_over=index < at[rank]))
        found[rank] = {
            name: History(ranks=members(name, len(programs)), started=tuple(calls)) for name, calls in started.items()
        }
    return found


@pytest.mark.parametrize("seeds", [range(300), pytest.param(range(300, 30_000), marks=pytest.mark.soak)])
def test_ranks_that_no_longer_move_wait_in_vain_and_no_others(seeds: range) -> None:
    for seed in seeds:
        check(random.Random(seed))


def check(draw: random.Random) -> None:
    num_ranks = draw.randint(2, 4)
    common = [draw.choice(["ar", "ag", "br"]) for _ in range(4)]
    programs = [[call for call in common if call[0] == "a" or rank > 0] for rank in range(num_ranks)]
    odd = draw.randrange(num_ranks)
    index = draw.randrange(len(programs[odd]) or 1)
    if programs[odd] and draw.random() < 0.8:
        programs[odd][index : index + draw.randint(0, 1)] = draw.choice([[], ["ag"], ["ar"]])
    at, waiting = simulate(programs)
    ended = set(range(num_ranks)) - waiting
    found = find_deadlocked_ranks(waiting, at_barrier=set(), ended=ended, histories=histories_of(programs, at))
    assert set(found) == waiting
    # While one of them still computes, only those that do not depend on it wait in vain.
    if waiting:
        free = draw.choice(sorted(waiting))
        histories = histories_of(programs, [n - (rank == free) for rank, n in enumerate(at)])
        found = find_deadlocked_ranks(waiting - {free}, at_barrier=set(), ended=ended, histories=histories)
        for rank, never in found.items():
            assert free not in never, (programs, rank)


def test_a_barrier_of_echelon_waits_in_vain_for_an_ended_rank_and_for_one_in_another_call() -> None:
    call = CollectiveCall(number=2, kind="all_reduce")
    both = (0, 1)
    behind = {"0": History(ranks=both, started=(CollectiveCall(number=1, kind="all_reduce", is_over=True),))}
    waits = {0: {"0": History(ranks=both, started=(call,))}, 1: behind}
    assert find_deadlocked_ranks({1}, at_barrier={1}, ended={0}, histories={}) == {1: {0}}
    assert find_deadlocked_ranks({0, 1}, at_barrier={1}, ended=set(), histories=waits) == {0: {1}, 1: {0}}
    assert find_deadlocked_ranks({0, 1}, at_barrier={0, 1}, ended=set(), histories={}) == {}
    joined = {0: waits[0], 1: {"0": History(ranks=both, started=(call,))}}
    assert find_deadlocked_ranks({0, 1}, at_barrier={1}, ended=set(), histories=joined) == {}
