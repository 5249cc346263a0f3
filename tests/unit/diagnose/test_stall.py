"""Why a run stands still: the right class and the right ranks from what the boards show, and no alarm while it moves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from echelon.diagnose.collectives import CollectiveCall, History, first_divergence, read_history
from echelon.diagnose.stall import Answer, Class, RankView, Stall, StallClock, diagnose, disagreement, name_ranks
from echelon.status.board import Doing, Phase, StatusNote, Watch
from echelon.status.call_site import CallSite

ALL = tuple(range(4))


def view(rank: int, *, waits: bool = True, signature: int = 1, seen: float = 100.0, doing: int = 0) -> RankView:
    kind = Doing(doing) | (Doing.COMMUNICATES if waits else Doing.NOTHING)
    return RankView(rank=rank, watch=Watch(int(seen * 1e9), 1, signature, 33, kind, 0, 12, "train.py"))


def note(**fields: object) -> StatusNote:
    return StatusNote(0, 0, 0, 0, Phase.NONE, False, "", "", "", "")._replace(**fields)  # type: ignore[arg-type]


def history(*kinds: str, size: int = 4, pending: bool = True, ranks: tuple[int, ...] = ALL) -> dict[str, History]:
    started = tuple(
        CollectiveCall(number=i, kind=kind, sizes=((size,),), dtypes=("Float",), is_over=not pending or i < len(kinds))
        for i, kind in enumerate(kinds, 1)
    )
    return {"0": History(ranks=ranks, started=started)}


def answer(*kinds: str, line: int = 12, trains: bool = False, loops: tuple[str, ...] = (), **more: object) -> Answer:
    place = CallSite(file="train.py", line=line, source="dist.all_reduce(x)")
    return Answer(call_site=place, trains=trains, loops=loops, histories=history(*kinds, **more))  # type: ignore[arg-type]


def verdict(views: list[RankView], answers: Mapping[int, Answer], *, stands_s: float = 61.0) -> Stall | None:
    """Let the run stand, as the supervisor sees it: a look at the beginning, and one ``stands_s`` later."""
    clock = StallClock(60.0)
    alive = [replace(v, watch=v.watch and v.watch._replace(time_ns=int(100e9))) for v in views]
    clock.update([replace(v, is_stopped=False, cpu_s=0.0) for v in alive], 100.0)
    now = 100.0 + stands_s
    if not clock.update(views, now):
        return None
    return diagnose(views, answers, clock, now=now)


def stalled(views: list[RankView], answers: Mapping[int, Answer]) -> Stall:
    found = verdict(views, answers)
    assert found is not None
    return found


def seen_now(rank: int, **more: object) -> RankView:
    return view(rank, seen=161.0, **more)  # type: ignore[arg-type]


REDUCE = ("all_reduce", "all_reduce")
TOGETHER = {rank: answer(*REDUCE) for rank in ALL}


EVERY = [seen_now(rank) for rank in ALL]
OTHERS = [seen_now(rank) for rank in (0, 1, 3)]
BUSY = replace(seen_now(2, waits=False), cpu_s=30.0)
LINES = {
    rank: Answer(call_site=CallSite(file="train.py", line=31 if rank == 2 else 12), no_histories="off") for rank in ALL
}
# Rank 1 hangs in a signal handler in the middle of a wait.
HANDLER = [
    replace(
        seen_now(rank, waits=False, doing=Doing.ELSEWHERE if rank == 1 else 0),
        note=note(waits=True, operation="save_state()"),
    )
    for rank in (0, 1, 2)
]


@pytest.mark.parametrize(
    ("views", "answers", "kind", "culprits"),
    [
        pytest.param([*OTHERS, BUSY], TOGETHER, Class.SLOW, (2,), id="one computes"),
        pytest.param([replace(view(0), exit_code=0), *EVERY[1:]], TOGETHER, Class.EXITED, (0,), id="one ended"),
        pytest.param(
            EVERY,
            {**TOGETHER, 3: answer("all_reduce", "broadcast")},
            Class.OTHER_OPERATION,
            (3,),
            id="another collective",
        ),
        pytest.param(EVERY, {**TOGETHER, 1: answer(*REDUCE, size=9)}, Class.OTHER_SHAPE, (1,), id="another shape"),
        pytest.param(EVERY, LINES, Class.OTHER_OPERATION, (2,), id="without a flight recorder"),
        pytest.param(HANDLER, {}, Class.MISSING, (1,), id="in a signal handler"),
    ],
)
def test_the_class_and_the_ranks(
    views: list[RankView], answers: dict[int, Answer], kind: Class, culprits: tuple[int, ...]
) -> None:
    found = stalled(views, answers)
    assert (found.kind, found.culprits, found.is_alarm) == (kind, culprits, kind is not Class.SLOW)


def test_a_computing_backward_pass_is_not_waiting() -> None:
    views = [replace(one, cpu_s=55.0) for one in EVERY]
    assert not stalled(views, {rank: answer(*REDUCE, pending=False, trains=True) for rank in ALL}).is_alarm


def test_a_rank_outside_the_collective_is_missing() -> None:
    views = [seen_now(rank, waits=rank != 2) for rank in ALL]
    found = stalled(views, {**TOGETHER, 2: answer("all_reduce", line=31, pending=False)})
    assert (found.kind, found.culprits) == (Class.MISSING, (2,))
    assert found.what == "rank 2 has not reached the collective, and ranks 0-1, 3 wait for other ranks"
    assert found.ranks[2] == "at train.py:31: dist.all_reduce(x)"
    assert found.ranks[0] == "in all_reduce number 2 of float[4]; at train.py:12: dist.all_reduce(x)"
    assert found.is_alarm


@pytest.mark.parametrize(
    "long",
    [
        {"slow": "tokenising"},
        {"phase": Phase.SAVE},
        {"phase": Phase.LOAD},
    ],
)
def test_a_declared_long_operation_is_not_a_stall(long: dict[str, object]) -> None:
    clock = StallClock(60.0)
    for now in range(100, 690):
        waiting = [view(rank, seen=float(now)) for rank in (0, 1, 3)]
        elsewhere = replace(view(2, waits=False, seen=float(now)), note=note(**long))
        assert not clock.update([*waiting, elsewhere], float(now)), now


@pytest.mark.parametrize("doing", [Doing.COMPILES, Doing.IMPORTS, Doing.DEBUGS, Doing.DEBUGS | Doing.COMMUNICATES])
def test_a_compiler_or_debugger_is_not_a_stall_and_restarts_the_clock(doing: Doing) -> None:
    clock = StallClock(60.0)

    def waiting(now: float) -> list[RankView]:
        return [view(0, seen=now), view(1, seen=now)]

    def held(now: float) -> list[RankView]:
        return [view(0, seen=now), view(1, seen=now, waits=bool(doing & Doing.COMMUNICATES), doing=doing)]

    assert not clock.update(held(100.0), 100.0)
    assert not clock.update(held(190.0), 190.0)
    assert not clock.update(waiting(191.0), 191.0)
    assert not clock.update(waiting(249.0), 249.0)
    assert clock.update(waiting(251.0), 251.0)


def test_a_stopped_process_is_named() -> None:
    views = [seen_now(rank) for rank in (0, 1, 3)] + [replace(view(2), is_stopped=True)]
    found = stalled(views, TOGETHER)
    assert (found.kind, found.culprits) == (Class.STOPPED, (2,))
    assert found.ranks[2].startswith("stopped; ")


def test_a_rank_with_a_silent_reporter_is_blocked_in_native_code() -> None:
    found = stalled([seen_now(0), seen_now(1), view(2, waits=False), seen_now(3)], {r: TOGETHER[r] for r in (0, 1, 3)})
    assert (found.kind, found.culprits) == (Class.SILENT, (2,))
    assert found.ranks[2] == "silent; last seen at train.py:12"


def test_an_exiting_rank_is_not_silent() -> None:
    ending = view(2, doing=Doing.ENDED | Doing.COMMUNICATES)
    assert verdict([ending], {}) is None


BATCHES, EPOCHS = "train.py:10", "train.py:8"


def _beside_training(loops: tuple[str, ...], loops_of_training: tuple[str, ...]) -> Stall:
    answers = {rank: answer("all_reduce", trains=True, loops=loops_of_training) for rank in (1, 2, 3)}
    views = [seen_now(rank) for rank in ALL]
    found = stalled(views, {0: answer("barrier", line=14, loops=loops), **answers})
    assert found.culprits == (0,)
    return found


@pytest.mark.parametrize("loops", [(), (EPOCHS,)])
def test_a_rank_behind_the_training_loop_is_uneven_data(loops: tuple[str, ...]) -> None:
    found = _beside_training(loops, (BATCHES, EPOCHS))
    assert found.kind is Class.UNEVEN
    assert found.what == "rank 0 has left the training loop (train.py:10), but ranks 1-3 are still training"


def test_a_collective_of_one_rank_inside_the_training_loop_is_not_uneven_data() -> None:
    found = _beside_training((BATCHES, EPOCHS), (BATCHES, EPOCHS))
    assert found.kind is Class.OTHER_OPERATION
    assert found.what == (
        "rank 0 calls barrier number 1 of float[4] in the training loop (train.py:10), but ranks 1-3 do not: "
        "they are in a forward or backward pass"
    )
    assert "`if accelerator.is_main_process:`" in found.do
    assert "drop_last" not in found.do


@pytest.mark.parametrize("loops_of_training", [(), ("/env/lib/python3.11/site-packages/lib/loop.py:9", EPOCHS)])
def test_both_causes_are_named_where_the_training_loop_is_unknown(loops_of_training: tuple[str, ...]) -> None:
    found = _beside_training((EPOCHS,), loops_of_training)
    assert found.kind is Class.OTHER_OPERATION
    assert found.what == (
        "rank 0 calls barrier number 1 of float[4], but ranks 1-3 do not: they are in a forward or backward pass"
    )
    assert "`if accelerator.is_main_process:`" in found.do
    assert "drop_last" in found.do


def test_two_ranks_have_no_majority_and_both_are_shown() -> None:
    found = stalled([seen_now(0), seen_now(1)], {0: answer("all_reduce"), 1: answer("broadcast", line=20)})
    assert (found.kind, found.culprits) == (Class.OTHER_OPERATION, ())
    assert "rank 0 in all_reduce number 1 of float[4], rank 1 in broadcast number 1 of float[4]" in found.what
    assert set(found.ranks) == {0, 1}


def test_an_echelon_operation_counts_as_a_wait_for_any_stack() -> None:
    waiting = [
        replace(view(rank, waits=False, signature=rank), note=note(waits=True, operation="save_state()"))
        for rank in (0, 1)
    ]
    clock = StallClock(60.0)
    clock.update(waiting, 100.0)
    missing = seen_now(2, waits=False)
    views = [*waiting, missing]
    for now in (100.5, 130.0, 161.0):  # it looks around: its stack is another one each time
        seen = [v.watch and v.watch._replace(signature=int(now), time_ns=int(now * 1e9)) for v in waiting]
        views = [*(replace(v, watch=watch) for v, watch in zip(waiting, seen)), missing]
        is_stuck = clock.update(views, now)
    assert is_stuck
    found = diagnose(views, {}, clock, now=161.0)
    assert found is not None
    assert found.culprits == (2,)
    assert found.ranks[0].startswith("in save_state()")


def test_a_single_waiting_process_is_not_a_stall() -> None:
    assert verdict([seen_now(0)], {0: answer("all_reduce", ranks=(0,))}) is None


BARRIER = note(waits=True, operation="barrier", awaits_all=True)
FINISHED = Doing.ENDED | Doing.FINISHED
GONE = replace(view(0, waits=False), exit_code=0)
COMPUTES = seen_now(2, waits=False)


@pytest.mark.parametrize(
    ("views", "answers", "is_certain"),
    [
        pytest.param([GONE, *EVERY[1:]], {rank: answer(*REDUCE) for rank in (1, 2, 3)}, True, id="in a call of torch"),
        pytest.param([GONE, replace(EVERY[1], note=BARRIER)], {}, True, id="in a barrier of echelon"),
        pytest.param([GONE, replace(EVERY[1], note=BARRIER), COMPUTES], {}, True, id="although a rank computes"),
        pytest.param(
            [seen_now(0, waits=False, doing=FINISHED), replace(EVERY[1], note=BARRIER)], {}, True, id="not yet gone"
        ),
        pytest.param(
            [seen_now(0, waits=False, doing=Doing.ENDED), replace(EVERY[1], note=BARRIER)], {}, False, id="has failed"
        ),
        pytest.param(
            [GONE, replace(EVERY[1], note=note(waits=True, operation="main_first"))], {}, False, id="other wait"
        ),
        pytest.param([GONE, EVERY[1]], {1: answer(*REDUCE, ranks=(1, 2))}, False, id="in a group without it"),
        pytest.param([GONE, EVERY[1]], {0: answer(*REDUCE), 1: answer(*REDUCE)}, False, id="has done its part"),
        pytest.param([GONE, EVERY[1]], {1: answer(*REDUCE, pending=False)}, False, id="in no collective"),
        pytest.param([EVERY[1], COMPUTES], {1: answer(*REDUCE), 2: answer("all_reduce")}, False, id="late"),
        pytest.param(EVERY, TOGETHER, False, id="a slow network"),
        pytest.param(EVERY, {**TOGETHER, 1: answer(*REDUCE, size=9)}, True, id="another shape"),
        pytest.param(
            [EVERY[1], replace(EVERY[2], note=BARRIER)],
            {1: answer(*REDUCE), 2: answer("all_reduce")},
            True,
            id="deadlock",
        ),
    ],
)
def test_a_stall_is_certain_only_if_no_rank_can_end_it(
    views: list[RankView], answers: dict[int, Answer], is_certain: bool
) -> None:
    clock = StallClock(60.0)
    clock.update([replace(v, watch=v.watch and v.watch._replace(time_ns=int(100e9))) for v in views], 155.0)
    clock.update(views, 161.0)
    assert bool(clock.deadlocked_ranks(views, answers, 161.0)) is is_certain
    found = diagnose(views, answers, clock, now=161.0)
    assert (found is not None and found.is_certain) is is_certain
    if found is not None and views[0] is GONE:
        assert found.kind is Class.EXITED
        assert found.culprits == (0,)


def test_a_wait_is_looked_at_after_two_seconds_beside_a_rank_that_has_ended() -> None:
    for others, limit_s in (([GONE], 2.0), ([view(2, signature=5)], 5.0)):
        clock = StallClock(60.0)
        clock.update([*others, view(1)], 100.0)
        for now in (100.5, 99.9 + limit_s, 100.0 + limit_s):
            views = [*others, view(1, seen=now)]
            assert not clock.update(views, now)
            assert bool(clock.may_be_deadlocked(views, now)) is (now == 100.0 + limit_s)


def test_ranks_that_wait_for_each_other_are_shown_with_their_calls() -> None:
    clock = StallClock(60.0)
    views = [EVERY[1], replace(EVERY[2], note=BARRIER), EVERY[3]]
    clock.update([replace(v, watch=v.watch and v.watch._replace(time_ns=int(100e9))) for v in views], 155.0)
    answers = {1: answer(*REDUCE), 2: answer("all_reduce", pending=False, line=31), 3: answer(*REDUCE)}
    found = diagnose(views, answers, clock, now=161.0)
    assert found is not None
    assert (found.kind, found.culprits) == (Class.OTHER_OPERATION, (2,))
    assert found.what == (
        "the ranks wait for each other in different calls: ranks 1, 3 in all_reduce number 2 of float[4], rank 2 in barrier"
    )
    assert found.lines()[0] == "rank 2: in barrier; at train.py:31: dist.all_reduce(x)"


def test_the_first_difference_is_reported() -> None:
    found = first_divergence(
        {0: history("all_reduce", "barrier", "broadcast"), 1: history("all_reduce", "reduce", "gather")}
    )
    assert found is not None
    assert {rank: str(c) for rank, c in found.at.items()} == {
        0: "barrier number 2 of float[4]",
        1: "reduce number 2 of float[4]",
    }


def test_gathers_of_unlike_sizes_do_not_differ() -> None:
    assert first_divergence({0: history("all_to_all", size=3), 1: history("all_to_all", size=5)}) is None


def test_separated_ranks_disagree_only_on_known_operations() -> None:
    assert disagreement({0: answer(*REDUCE), 1: answer(*REDUCE)}) is None
    found = disagreement({**TOGETHER, 2: answer(*REDUCE, size=9, line=25)})
    assert found is not None
    assert (found.kind, found.culprits) == (Class.OTHER_SHAPE, (2,))
    behind = disagreement({**TOGETHER, 2: answer("all_reduce", line=40)})
    assert behind is not None
    assert (behind.kind, behind.culprits) == (Class.MISSING, (2,))


def test_reports_of_ranks_are_parsed_as_data() -> None:
    groups = {"0": {"ranks": [0, 1], "entries": [[1, "all_reduce", [[4, 2]], ["Float"], True, "a.py:3: f()"]]}}
    collective = CollectiveCall(number=1, kind="all_reduce", sizes=((4, 2),), dtypes=("Float",), is_over=True)
    found = read_history({"groups": groups})
    assert found == {"0": History(ranks=(0, 1), started=(collective,))}
    assert found["0"].started[0].place == "a.py:3: f()"
    assert read_history({"missing": "off"}) == {}


def test_names_of_ranks() -> None:
    assert [name_ranks(r) for r in ([3], [0, 1, 2, 5], range(0, 40, 2))] == [
        "rank 3",
        "ranks 0-2, 5",
        "ranks 0, 2, 4, 6, 8, 10, 12, 14, ...",
    ]
