"""Hangs planted at random instants of a simulated run: the supervisor names the right rank in time, and a clean run never.

The ranks are views on a clock of their own, so an hour of a run takes milliseconds. What a heartbeat says is what the real reporter
would write (``tests/launch/test_hangs.py`` plants the same in real runs); the supervisor and all below it are the real ones.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, get_args

import pytest

from echelon.diagnose.collectives import CollectiveCall, History
from echelon.diagnose.stall import Answer, Class, Ending, RankView, Stall
from echelon.launch.supervisor import OnStall, StallRules, Supervisor
from echelon.status.board import Doing, Phase, StatusNote, Watch

STALL_S, SLOW_S = 10.0, 40.0
TICK_S = 0.5


@dataclass(frozen=True)
class Part:
    """A part of a program, at whose end all ranks meet, or not."""

    name: str
    seconds: float
    doing: Doing = Doing.NOTHING
    phase: Phase = Phase.NONE
    meets: bool = True
    is_moving: bool = True
    holds_lock: bool = False
    """Native code keeps the GIL: no heartbeat."""
    busy: float = 1.0
    faults: bool = False
    """It waits for pages, as a program does that loads libraries from a slow disk."""


IMPORT, COMPILE = Doing.IMPORTS, Doing.COMPILES
PROGRAM = (
    Part("start", 1.5, meets=False),
    Part("import", 12.0, doing=IMPORT, meets=False),
    Part("load libraries", 14.0, doing=IMPORT, meets=False, holds_lock=True, busy=0.02, faults=True, is_moving=False),
    Part("load", 6.0, phase=Phase.LOAD),
    Part("first step", 4.0, doing=IMPORT, phase=Phase.OPTIMIZER),
    Part("compile", 26.0, doing=COMPILE, is_moving=False, busy=0.0),
    *(Part("training", 3.0, phase=Phase.TRAIN) for _ in range(6)),
    Part("evaluation", 5.0, phase=Phase.EVALUATE),
    Part("save", 20.0, phase=Phase.SAVE, busy=0.0, is_moving=False),
    *(Part("training", 3.0, phase=Phase.TRAIN) for _ in range(3)),
)


@dataclass
class Rank:
    """Goes through the program as time passes."""

    number: int
    parts: tuple[Part, ...]
    at: int = 0
    done_s: float = 0.0
    fault: str = ""
    cpu_s: float = 0.0
    num_faults: int = 0
    heartbeat: Watch | None = None
    moves: int = 0
    noted_s: float = 0.0
    clock_s: float = field(default=0.0)

    @property
    def is_over(self) -> bool:
        return self.at == len(self.parts)

    @property
    def part(self) -> Part:
        return self.parts[min(self.at, len(self.parts) - 1)]

    @property
    def waits(self) -> bool:
        return not self.is_over and self.part.meets and self.done_s >= self.part.seconds

    def tick(self, now: float) -> None:
        is_stuck = self.fault in ("stop", "deadlock", "native deadlock")
        if not is_stuck and not self.waits:
            self.cpu_s += TICK_S * (1.0 if self.fault else self.part.busy)
            self.num_faults += self.part.faults
            self.moves += self.part.is_moving or self.fault == "loop"
            if not self.fault:
                self.done_s += TICK_S
                if not self.part.meets and self.done_s >= self.part.seconds:
                    self.go_on(now)
        is_held = self.fault in ("stop", "native deadlock", "native loop") or (
            self.part.holds_lock and not self.waits and not is_stuck
        )
        if not is_held:
            waits = Doing.COMMUNICATES if self.waits else self.part.doing
            self.heartbeat = Watch(int(now * 1e9), 7, self.moves, self.at, waits | Doing.DUMPS, 0, 12, "train.py")

    def go_on(self, now: float) -> None:
        self.at, self.done_s, self.moves = self.at + 1, 0.0, self.moves + 1
        self.noted_s = now

    def view(self) -> RankView:
        note = None
        if self.part.phase:
            note = StatusNote(int(self.noted_s * 1e9), self.at, 0, 12, self.part.phase, False, "", "", "", "train.py")
        return RankView(
            rank=self.number,
            watch=None if self.at == 0 else self.heartbeat,
            note=note,
            exit_code=0 if self.is_over else None,
            is_stopped=self.fault == "stop",
            cpu_s=self.cpu_s,
            num_faults=self.num_faults,
        )


class Run:
    """All ranks, as a supervisor sees them."""

    def __init__(self, num_ranks: int, draw: random.Random, program: tuple[Part, ...] = PROGRAM) -> None:
        self.now = 1000.0
        self.answers: Mapping[int, Answer] = {}
        jitter = [[draw.uniform(0.7, 1.3) for _ in program] for _ in range(num_ranks)]
        self.ranks = [
            Rank(i, tuple(Part(**{**vars(part), "seconds": part.seconds * f}) for part, f in zip(program, jitter[i])))
            for i in range(num_ranks)
        ]

    def views(self) -> list[RankView]:
        return [rank.view() for rank in self.ranks]

    def request_stacks(self) -> Mapping[int, Answer]:
        return self.answers or {
            rank.number: Answer() for rank in self.ranks if rank.fault not in ("stop", "native deadlock", "native loop")
        }

    def stack_of(self, view: RankView) -> Answer:
        return Answer()

    def save_report(self, report: str) -> None:
        pass

    def tick(self) -> None:
        self.now += TICK_S
        for rank in self.ranks:
            if not rank.is_over:
                rank.tick(self.now)
        furthest = min(rank.at for rank in self.ranks)
        if all(rank.at > furthest or rank.waits for rank in self.ranks):
            for rank in self.ranks:
                if rank.at == furthest:
                    rank.go_on(self.now)

    @property
    def others_wait(self) -> bool:
        """Do all the others wait for the rank that has the fault?"""
        return all(rank.waits for rank in self.ranks if not rank.fault)


def watch(run: Run, *, until_s: float, fault: tuple[int, str, float] | None = None) -> list[tuple[float, Stall]]:
    """Return what the supervisor tells, and when."""
    rules = StallRules(timeout=timedelta(seconds=STALL_S), on_stall="report", slow_timeout=timedelta(seconds=SLOW_S))
    supervisor = Supervisor(run, directory=Path("run"), rules=rules, clock=lambda: run.now)  # type: ignore[arg-type]
    begun, told = run.now, []
    while run.now - begun < until_s and not all(rank.is_over for rank in run.ranks):
        if fault is not None and run.now - begun >= fault[2]:
            rank = run.ranks[fault[0]]
            if not rank.waits or fault[1] == "stop":  # the others strike where the rank does something
                rank.fault, fault = fault[1], None
        run.tick()
        stall = supervisor.poll()
        if stall is not None:
            told.append((run.now, stall))
    return told


def first_alarm(run: Run, bad: int, kind: str, at_s: float) -> None:
    """Plant the fault, and see who is named, and when."""
    told: list[tuple[float, Stall]] = []
    rules = StallRules(timeout=timedelta(seconds=STALL_S), on_stall="report", slow_timeout=timedelta(seconds=SLOW_S))
    supervisor = Supervisor(run, directory=Path("run"), rules=rules, clock=lambda: run.now)  # type: ignore[arg-type]
    begun, rank = run.now, run.ranks[bad]
    struck = alone = 0.0
    while not told:
        if not struck and run.now - begun >= at_s and (kind == "stop" or not rank.waits) and not rank.is_over:
            rank.fault, struck = kind, run.now
        if rank.is_over:
            return  # the fault came too late
        run.tick()
        if struck and not alone and run.others_wait:
            alone = run.now
        stall = supervisor.poll()
        if stall is not None:
            assert struck, f"told before anything happened: {stall.what}"
            told.append((run.now, stall))
        # By then it must have been told, whatever the kind.
        assert run.now - begun < at_s + 200, f"{kind} in {rank.part.name}: nothing was told"
    now, stall = told[0]
    where = f"{kind} in {rank.part.name} of rank {bad}, {now - struck:.1f} s after it: {stall.what}"
    assert stall.culprits == (bad,), where
    is_held_busy = kind == "native loop"
    # What it has not come to say before the lock was taken nobody knows.
    is_declared = bool(rank.view().slow_phase)
    if kind in ("stop", "native deadlock") or (is_held_busy and not is_declared):
        assert now - struck <= STALL_S + 5, where
        # That it is silent may show a moment later than that the others wait for it.
        kinds = {Class.STOPPED} if kind == "stop" else {Class.SILENT, Class.SLOW} if is_held_busy else {Class.SILENT}
        assert stall.kind in kinds, where
    elif is_declared:
        assert stall.kind is Class.LONG, where
        assert now - struck <= SLOW_S + 5, where
    else:
        assert alone, where
        assert now - alone <= STALL_S + 5, where
        assert stall.kind is (Class.SLOW if kind == "loop" else Class.MISSING), where


NUM_STEPS = 1_000
KINDS = ("stop", "deadlock", "loop", "native deadlock", "native loop")


@pytest.mark.sample(3)
@pytest.mark.parametrize("seeds", [range(5), pytest.param(range(5, 500), marks=pytest.mark.soak)])
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_a_hang_at_a_random_time_is_reported_with_the_right_rank(kind: str, num_ranks: int, seeds: range) -> None:
    for seed in seeds:
        draw = random.Random(f"{kind} {num_ranks} {seed}")
        # From within the start on: before its first heartbeat a rank that is not stopped cannot be told from one that works.
        first_alarm(Run(num_ranks, draw), draw.randrange(num_ranks), kind, draw.uniform(2.5, 125.0))


@pytest.mark.parametrize("seeds", [range(3), pytest.param(range(3, 300), marks=pytest.mark.soak)])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_correct_run_is_never_reported_as_stalled(num_ranks: int, seeds: range) -> None:
    for seed in seeds:
        told = watch(Run(num_ranks, random.Random(seed)), until_s=400.0)
        assert not [stall.what for _, stall in told]


def test_a_compile_of_ninety_seconds_among_many_steps_raises_no_alarm() -> None:
    compiling = Part("compile", 90.0, doing=COMPILE, is_moving=False, busy=0.0)
    steps = tuple(Part("training", 1.0, phase=Phase.TRAIN) for _ in range(NUM_STEPS))
    run = Run(2, random.Random(0), steps)
    run.ranks[1].parts = (*run.ranks[1].parts[:300], compiling, *run.ranks[1].parts[301:])
    rules = StallRules(timeout=timedelta(seconds=60), on_stall="stop")
    supervisor = Supervisor(run, directory=Path("run"), rules=rules, clock=lambda: run.now)  # type: ignore[arg-type]
    while not all(rank.is_over for rank in run.ranks):
        run.tick()
        assert supervisor.poll() is None


@pytest.mark.parametrize(
    ("on_stall", "max_restarts", "action"), [("auto", 0, "stop"), ("auto", 2, "restart"), ("report", 0, "report")]
)
def test_a_rank_that_leaves_early_is_reported_within_five_seconds(
    on_stall: Any, max_restarts: int, action: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(2, random.Random(0), (Part("training", 1.0, phase=Phase.TRAIN),) * 9)
    run.ranks[1].parts = run.ranks[1].parts[:4]
    rules = StallRules(timeout=timedelta(seconds=60), on_stall=on_stall, max_restarts=max_restarts)
    supervisor = Supervisor(run, directory=Path("run"), rules=rules, clock=lambda: run.now)  # type: ignore[arg-type]
    began = run.now
    while not run.ranks[1].is_over:
        run.tick()
        assert supervisor.poll() is None
    call = CollectiveCall(number=5, kind="all_reduce")
    waiting = Answer(histories={"0": History(ranks=(0, 1), started=(call,))})
    run.answers = {0: waiting, 1: Answer(ending=Ending.END)}
    told: list[tuple[float, Stall]] = []
    alone = 0.0
    while run.now - began < 100.0:
        run.tick()
        alone = alone or (run.now if run.ranks[0].waits else 0.0)
        if (stall := supervisor.poll()) is not None:
            told.append((run.now - alone, stall))
    assert [(stall.kind, stall.is_certain) for _, stall in told] == [(Class.EXITED, True)]  # once
    assert told[0][0] <= 5.0
    assert rules.action(told[0][1]) == action
    ends = {"stop": "the run stops", "restart": "the run restarts", "report": "the run continues"}
    assert f"where: this wait can never end; {ends[action]} (--on_stall)" in capsys.readouterr().err


def test_an_uncertain_stall_is_only_reported_unless_the_user_chooses() -> None:
    stall = Stall(kind=Class.MISSING, culprits=(1,), what="", ranks={}, do="", waited_s=61.0)
    actions = [
        StallRules(timeout=timedelta(60), on_stall=one, max_restarts=1).action(stall) for one in get_args(OnStall)
    ]
    assert dict(zip(get_args(OnStall), actions)) == {
        "auto": "report",
        "report": "report",
        "restart": "restart",
        "stop": "stop",
    }
    assert StallRules(timeout=timedelta(60), on_stall="restart").action(stall) == "stop"  # no restart is left


def test_a_blocking_loop_and_a_second_hang_are_both_reported(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = Run(4, random.Random(1), (Part("training", 1.0, phase=Phase.TRAIN),) * 60)
    told = watch(run, until_s=150.0, fault=(3, "loop", 5.0))
    assert [stall.kind for _, stall in told] == [Class.SLOW, Class.LONG]
    assert [stall.is_alarm for _, stall in told] == [False, True]
    assert told[1][1].what == "rank 3 has been computing for 40 seconds, and ranks 0-2 wait for other ranks"
    # A compile that takes too long is told once; a rank that is gone beside it is told, too.
    compiling = Part("compile", 200.0, doing=COMPILE, is_moving=False, busy=0.0)
    training = Part("training", 1.0, phase=Phase.TRAIN)
    run = Run(4, random.Random(1), (training, training, training))
    run.ranks[0].parts = (compiling, training, training)
    run.ranks[0].at = 0
    for rank in run.ranks:
        rank.parts = (Part("start", 0.5, meets=False), *rank.parts)
    told = watch(run, until_s=140.0, fault=(2, "deadlock", 0.75))
    assert {(stall.kind, stall.culprits) for _, stall in told} == {(Class.MISSING, (2,)), (Class.LONG, (0,))}
    assert len(told) == 2
    err = capsys.readouterr().err
    assert "echelon: stall (a phase that takes too long): rank 0 has been compiling for 40 seconds" in err
    assert "where: limit reached (--slow_timeout 40); the run continues (--on_stall)" in err
