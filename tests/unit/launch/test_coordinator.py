"""The coordinator of a run on several machines, with nodes that only pretend to have ranks: generations, refusals, ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from echelon.base.errors import LaunchError
from echelon.launch import coordinator as coordinator_module, node as node_module
from echelon.launch.coordinator import Coordinator
from echelon.launch.failures.failure import ErrorRecord, RankEnd
from echelon.launch.interrupts import Interrupts
from echelon.launch.local.processes import Workers
from echelon.launch.multinode.machines import MultinodePlan
from echelon.launch.multinode.network import listen
from echelon.launch.multinode.remote_coordinator import RemoteCoordinator
from echelon.launch.multinode.roster import NodeInfo, RendezvousTimes
from echelon.launch.node import AttemptRanks, GenerationResult, Node, NodeGeneration, RunOver, RunRules
from echelon.launch.supervisor import StallRules
from echelon.status.board import Board, Mark
from echelon.status.run_files import read_lines
from echelon.status.run_recorder import RunRecorder
from echelon.status.stop_barrier import EXIT_CODE, RankState, StopCommand

TOKEN = b"sixteen bytes at least"
_LIMIT_S = 60.0
SECOND = timedelta(seconds=1)


class Ranks:
    """A board and workers of ranks that do not exist; the position follows the commands as a rank's would."""

    def __init__(self, node: Node, numbers: range, directory: Path) -> None:
        self._node, self._numbers = node, numbers
        self._ends: list[RankEnd] = []
        self.is_stuck = False
        """Whether the ranks come to no boundary."""
        self.position = 5 << 2 | RankState.PAST
        self.attempt = AttemptRanks(
            board=cast(Board, self), workers=cast(Workers, self), directory=directory, numbers=list(numbers)
        )

    def fail(self, *ends: RankEnd) -> None:
        self._ends = list(ends)

    def ends(self) -> list[RankEnd]:
        return self._ends

    def running(self) -> dict[int, tuple[int, int | None]]:
        return {}

    def read_positions(self) -> list[int]:
        return [self.position] * len(self._numbers)

    def preemption_signals(self) -> list[int]:
        return [0] * len(self._numbers)

    def write_command(self, command: int) -> None:
        kind, boundary = command >> 56, command & ((1 << 56) - 1)
        if kind in (StopCommand.TO_WHOLE, StopCommand.TO_ANY) and not self.is_stuck:
            self.position = boundary << 2 | RankState.STOPPED
        elif kind == StopCommand.END:
            self._node.report(dict.fromkeys(self._numbers, EXIT_CODE))

    def request_stacks(self) -> int:
        return 1

    def watch(self, index: int) -> None:
        return None

    times = watch

    def marks(self, index: int) -> list[Mark]:
        return []


class Stage:
    """A coordinator and the nodes that have joined it."""

    def __init__(self, tmp_path: Path) -> None:
        self._tmp_path = tmp_path
        self._nodes: list[Node] = []
        self._ranks: dict[Node, Ranks] = {}
        self._coordinator: Coordinator | None = None
        self._listener = listen("127.0.0.1", 0)
        self._port = self._listener.getsockname()[1]
        self.num_stores = 0

    def info(self, name: str, **changes: Any) -> NodeInfo:
        info = NodeInfo(
            uid=name,
            host=name,
            address="127.0.0.1",
            machine_rank=None,
            num_processes=2,
            min_nodes=self.min_nodes,
            max_nodes=self.max_nodes,
            run_id="r",
            versions={},
            settings={},
        )
        return replace(info, **changes)

    def open(self, *, least: int = 2, most: int = 2, max_restarts: int = 0, grace: timedelta = 10 * SECOND) -> None:
        self.min_nodes, self.max_nodes = least, most
        times = RendezvousTimes(
            join_timeout=60 * SECOND, last_call=0.2 * SECOND, heartbeat=0.1 * SECOND, lost_after=60 * SECOND
        )
        rules = RunRules(
            max_restarts=max_restarts,
            stall=StallRules(timeout=timedelta(), on_stall="report"),
            preemption_grace=grace,
            logs="above",
            directory=self._tmp_path,
            began_ns=time.monotonic_ns(),
            record=RunRecorder(self._tmp_path, began_ns=time.monotonic_ns()),
        )
        self._coordinator = Coordinator(self.info("head"), times=times, rules=rules, new_store=self._store)
        self._coordinator.listen(self._listener, TOKEN)

    def _store(self) -> Any:
        self.num_stores += 1
        return SimpleNamespace(port=self.num_stores)

    def node(self, name: str, **changes: Any) -> Node:
        info = self.info(name, **changes)
        times = RendezvousTimes(
            join_timeout=60 * SECOND, last_call=SECOND, heartbeat=0.1 * SECOND, lost_after=60 * SECOND
        )
        where = {"host": "127.0.0.1", "port": self._port, "where": "test", "token": TOKEN}
        plan = MultinodePlan(info=info, times=times, listener=None, interface=None, **where)  # type: ignore[arg-type]
        assert self._coordinator is not None
        coordinator = self._coordinator if name == "head" else RemoteCoordinator(plan)
        node = Node(info, coordinator, Interrupts())
        self._nodes.append(node)
        node.join()
        return node

    def generations(self, *nodes: Node) -> list[NodeGeneration]:
        """The next generation of each."""
        found: dict[int, NodeGeneration] = {}
        threads = [
            threading.Thread(target=lambda i=i, n=n: found.update({i: n.next_generation()}))
            for i, n in enumerate(nodes)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(_LIMIT_S)
        assert len(found) == len(nodes)
        for i, node in enumerate(nodes):
            first = found[i].first_rank
            ranks = self._ranks[node] = Ranks(node, range(first, first + node.info.num_processes), self._tmp_path)
            node.watch(ranks.attempt)
        return [found[i] for i in range(len(nodes))]

    def ranks_of(self, node: Node) -> Ranks:
        return self._ranks[node]

    def end(self, code: int = 1) -> None:
        for node in self._nodes:
            node.close()
        assert self._coordinator is not None
        self._coordinator.close("the test is over", code)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    found = Stage(tmp_path)
    yield found
    found.end()


class Clock:
    """The coordinator's time, which a test can move forward."""

    def __init__(self) -> None:
        self.ahead_s = 0.0
        self.num_reads = 0

    def monotonic(self) -> float:
        self.num_reads += 1
        return time.monotonic() + self.ahead_s

    def monotonic_ns(self) -> int:
        return time.monotonic_ns() + int(self.ahead_s * 1e9)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(coordinator_module, "time", found)
    return found


def wait_for(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + _LIMIT_S
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


def result(node: Node) -> GenerationResult:
    found: GenerationResult = wait_for(node.result)
    return found


def test_two_machines_start_a_generation_and_end_together(stage: Stage) -> None:
    stage.open()
    other, head = stage.node("other"), stage.node("head")
    mine, its = stage.generations(head, other)
    assert (mine.group_rank, mine.first_rank, mine.world_size, mine.port) == (0, 0, 4, 1)
    assert (its.group_rank, its.first_rank, its.world_size, its.port) == (1, 2, 4, 0)
    head.report({0: 0, 1: 0})
    other.report({2: None, 3: 0})
    assert head.result() is None
    other.report({2: 0, 3: 0})
    assert result(head) == result(other) == GenerationResult(then="done", code=0)


def test_a_failure_is_reported_with_its_machine_and_restarted_max_restarts_times(
    stage: Stage, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stage.open(max_restarts=1)
    head, other = stage.node("head"), stage.node("other")
    for number in range(2):
        mine, its = stage.generations(head, other)
        assert (mine.number, its.num_restarts) == (number, number)
        assert mine.run_name == its.run_name == tmp_path.name
        record = ErrorRecord(time_ns=time.monotonic_ns(), type="ValueError", message="bad sample 17")
        lost = ErrorRecord(time_ns=1, type="RuntimeError", message="Connection closed by peer")
        stage.ranks_of(head).fail(RankEnd(rank=0, exit_code=1, record=lost), RankEnd(rank=1, exit_code=1, record=lost))
        stage.ranks_of(other).fail(RankEnd(rank=2, exit_code=None), RankEnd(rank=3, exit_code=1, record=record))
        other.report({2: None, 3: 1})
        assert result(head) == result(other) == GenerationResult(then=("restart", "stop")[number], code=number)
    assert (head.report_end(), other.report_end()) == (1, 1)
    told = capsys.readouterr().err
    assert told.count("rank 3 failed first: ValueError: bad sample 17") == 4  # on both machines, twice
    assert "rank 3 of 4, on other (127.0.0.1)" in told
    assert "restart 1 of 1" in told
    assert "the run ends" in told
    events = [(event["kind"], event["rank"]) for event in read_lines(tmp_path / "events.jsonl")]
    assert events == [("failure", 3), ("failure", 3)]


def test_a_machine_restarts_also_if_nobody_reads_its_messages(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise BrokenPipeError

    stage.open(max_restarts=1)
    head, other = stage.node("head"), stage.node("other")
    stage.generations(head, other)
    record = ErrorRecord(time_ns=1, type="ValueError", message="bad sample 17")
    stage.ranks_of(head).fail(RankEnd(rank=0, exit_code=None), RankEnd(rank=1, exit_code=None))
    stage.ranks_of(other).fail(RankEnd(rank=2, exit_code=1, record=record), RankEnd(rank=3, exit_code=None))
    other.report({2: 1, 3: None})
    assert result(other).then == "restart"
    monkeypatch.setattr(node_module, "say", broken)
    mine, its = stage.generations(head, other)
    assert mine.number == its.number == 1


def test_a_run_continues_without_a_lost_machine_if_enough_are_left(
    stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    stage.open(least=1)
    head, other = stage.node("head"), stage.node("other")
    stage.generations(head, other)
    assert other._peer is not None
    other._peer.close()
    assert result(head).then == "restart"
    (alone,) = stage.generations(head)
    assert (alone.number, alone.world_size, alone.num_restarts) == (1, 2, 0)
    assert "lost contact with other (127.0.0.1)" in capsys.readouterr().err


def test_a_lost_machine_ends_a_run_that_needs_it(stage: Stage) -> None:
    stage.open()
    head, other = stage.node("head"), stage.node("other")
    stage.generations(head, other)
    other.leave("interrupted by SIGINT", 130)
    assert result(head) == GenerationResult(then="stop", code=130)


def test_a_late_machine_is_admitted_after_all_have_saved(stage: Stage) -> None:
    stage.open(least=1)
    head = stage.node("head")
    stage.generations(head)
    other = stage.node("other")
    joins = threading.Thread(target=other.next_generation)
    joins.start()
    assert result(head).then == "restart"
    assert stage.ranks_of(head).position & 3 == RankState.STOPPED
    (mine,) = stage.generations(head)
    joins.join(_LIMIT_S)
    assert mine.world_size == 4


@pytest.mark.parametrize(
    ("least", "who", "ends"),
    [
        (1, "other", {"other": "preempted", "head": "restart"}),  # it leaves, and enough machines remain
        (1, "head", {"other": "preempted", "head": "preempted"}),  # the run cannot continue without its host
        (2, "other", {"other": "preempted", "head": "preempted"}),  # all are needed
    ],
)
def test_a_preempted_machine_ends_at_the_step_at_which_all_have_saved(
    stage: Stage, least: int, who: str, ends: dict[str, str]
) -> None:
    stage.open(least=least)
    nodes = {"head": stage.node("head"), "other": stage.node("other")}
    stage.generations(*nodes.values())
    nodes[who].request_preemption("SIGTERM")
    found = {name: result(node) for name, node in nodes.items()}
    assert {name: end.then for name, end in found.items()} == ends
    assert {end.code for end in found.values() if end.then == "preempted"} == {EXIT_CODE}


def test_ranks_that_do_not_stop_in_time_are_told_on_every_machine(
    stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    stage.open(grace=0.05 * SECOND)
    head, other = stage.node("head"), stage.node("other")
    stage.generations(head, other)
    stage.ranks_of(other).is_stuck = True
    other.request_preemption("SIGTERM")
    assert result(head) == result(other) == GenerationResult(then="preempted", code=EXIT_CODE)
    capsys.readouterr()
    assert (head.report_end(), other.report_end()) == (EXIT_CODE, EXIT_CODE)
    told = capsys.readouterr().err
    assert told.count("the ranks did not reach a common step within 0.05 s and were stopped") == 2
    assert "all ranks stopped at the same step" not in told


def test_an_invalid_message_disconnects_its_sender_only(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    stage.open(least=1)
    head = stage.node("head")
    stage.generations(head)
    stranger = stage.node("other")
    assert stranger._peer is not None
    stranger._peer.send("hello", info={"uid": "x", "a field of the next version": 1})
    with pytest.raises(LaunchError, match="protocol mismatch: unexpected message"):
        stranger.next_generation()
    assert "install the same version of echelon" in capsys.readouterr().err
    assert head.result() is None
    head.report({0: 0, 1: 0})
    assert result(head) == GenerationResult(then="done")


def test_a_waiting_machine_ends_well_with_the_run(stage: Stage) -> None:
    stage.open()
    head, other, spare = stage.node("head"), stage.node("other"), stage.node("spare")
    stage.generations(head, other)
    over: list[RunOver] = []

    def wait() -> None:
        try:
            spare.next_generation()
        except RunOver as error:
            over.append(error)

    waits = threading.Thread(target=wait)
    waits.start()
    assert stage._coordinator is not None
    wait_for(lambda: any(member.is_waiting for member in stage._coordinator._members))  # type: ignore[union-attr]
    head.report({0: 0, 1: 0})
    other.report({2: 0, 3: 0})
    waits.join(_LIMIT_S)
    assert [error.result.code for error in over] == [0]


def test_mismatches_are_refused_and_missing_machines_named(
    stage: Stage, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator_module, "_MISSING_AFTER_S", 0.2)
    stage.open()
    head = stage.node("head", machine_rank=0)
    waits = threading.Thread(target=head.next_generation)
    waits.start()
    with pytest.raises(LaunchError, match="already has machine rank 0"):
        stage.node("other", machine_rank=0)
    with pytest.raises(LaunchError, match="different settings: a is 1 on the joining machine and not set on head"):
        stage.node("other", settings={"a": "1"})
    output = ""

    def is_reported() -> bool:
        nonlocal output
        output += capsys.readouterr().err
        return "1 of 2 machines have joined: head (127.0.0.1, machine rank 0); missing machine ranks: 1" in output

    wait_for(is_reported)
    right = stage.node("other", machine_rank=1)
    assert right.next_generation().world_size == 4
    waits.join(_LIMIT_S)


def test_an_incomplete_rendezvous_ends_the_run_also_during_the_import_of_torch(
    stage: Stage, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    stage.open()
    head = stage.node("head")
    clock.ahead_s = 61.0  # over the limit
    assert result(head) == GenerationResult(then="stop", code=1)  # before it waits for a generation
    with pytest.raises(RunOver) as caught:
        head.next_generation()
    assert caught.value.result == GenerationResult(then="stop", code=1)
    assert "1 of 2 machines have joined" in capsys.readouterr().err


def test_a_machine_that_connects_after_the_end_of_the_run_is_told(
    stage: Stage, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    clock.ahead_s = -61.0
    stage.open()
    clock.ahead_s = 0.0  # nobody has joined in time
    output = ""

    def is_over() -> bool:
        nonlocal output
        output += capsys.readouterr().err
        return "0 of 2 machines have joined" in output

    wait_for(is_over)
    with pytest.raises(RunOver) as caught:
        stage.node("late")
    assert caught.value.result == GenerationResult(then="stop", code=1)


def test_machines_that_import_torch_are_waited_for(stage: Stage, clock: Clock) -> None:
    stage.open()
    head, other = stage.node("head"), stage.node("other")
    clock.ahead_s = 61.0
    num_reads = clock.num_reads
    wait_for(lambda: clock.num_reads > num_reads + 20)  # it has seen that the time is up
    assert head.result() is None
    assert [found.world_size for found in stage.generations(head, other)] == [4, 4]
