"""The head of a run on several machines, and nodes that only say that they have ranks: rounds, refusals, ends, departures."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from echelon.base.errors import LaunchError
from echelon.launch.failures.failure import ErrorRecord, RankEnd
from echelon.launch.interrupts import Interrupts
from echelon.launch.multinode import coordinator as conductor_module
from echelon.launch.multinode.coordinator import Coordinator, CoordinatorRules
from echelon.launch.multinode.hub import listen
from echelon.launch.multinode.messages import encode
from echelon.launch.multinode.node import GenerationResult, Node, NodeGeneration, RunOver
from echelon.launch.multinode.roster import NodeInfo
from echelon.launch.supervisor import StallRules
from echelon.status.stop_barrier import EXIT_CODE, RankState, StopCommand as HoldOrder

TOKEN = b"sixteen bytes at least"
_LIMIT_S = 60.0
SECOND = timedelta(seconds=1)


class Ranks:
    """What a node answers for ranks that are not there; the stand follows the commands as a rank's would."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self.ends: list[RankEnd] = []
        self.stand = 0
        self.reports: list[str] = []

    def answer(self, kind: str, content: Mapping[str, Any]) -> Any:
        if kind == "stands":
            return [(rank, self.stand) for rank in self.ranks]
        if kind == "command":
            order, place = content["word"] >> 56, content["word"] & ((1 << 56) - 1)
            if order in (HoldOrder.TO_WHOLE, HoldOrder.TO_ANY):
                self.stand = place << 2 | RankState.STOPPED
            elif order == HoldOrder.END:
                self._node.report(dict.fromkeys(self.ranks, EXIT_CODE))
            return True
        return {"views": [], "times": [], "ask": [], "ends": encode(self.ends)}[kind]

    def keep(self, report: str) -> None:
        self.reports.append(report)

    ranks: range = range(0)


class Stage:
    """A conductor and the nodes that have come to it."""

    def __init__(self, tmp_path: Path) -> None:
        self._tmp_path = tmp_path
        self._nodes: list[Node] = []
        self._conductor: Coordinator | None = None
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
            min_nodes=self.rules.min_nodes,
            max_nodes=self.rules.max_nodes,
            run_id="r",
            versions={},
            settings={},
        )
        return replace(info, **changes)

    def open(self, *, least: int = 2, most: int = 2, max_restarts: int = 0, join: timedelta = 60 * SECOND) -> None:
        self.rules = CoordinatorRules(
            min_nodes=least,
            max_nodes=most,
            join_timeout=join,
            last_call=0.2 * SECOND,
            beat=0.1 * SECOND,
            lost_after=60 * SECOND,
            max_restarts=max_restarts,
            stall=StallRules(timeout=timedelta(), on_stall="report"),
            preemption_grace=10 * SECOND,
            logs="above",
            directory=self._tmp_path,
            began_ns=time.monotonic_ns(),
        )
        self._conductor = Coordinator(
            self.info("head"), listener=self._listener, token=TOKEN, rules=self.rules, new_store=self._store
        )

    def _store(self) -> Any:
        self.num_stores += 1
        return SimpleNamespace(port=self.num_stores)

    def node(self, name: str, **changes: Any) -> Node:
        node = Node(
            self.info(name, **changes),
            host="127.0.0.1",
            port=self._port,
            where="test",
            token=TOKEN,
            join_timeout=60 * SECOND,
            beat=0.1 * SECOND,
            lost_after=60 * SECOND,
            interrupts=Interrupts(),
        )
        self._nodes.append(node)
        node.come_in()
        return node

    def rounds(self, *nodes: Node) -> list[NodeGeneration]:
        """The next round of each."""
        found: dict[int, NodeGeneration] = {}
        threads = [
            threading.Thread(target=lambda i=i, n=n: found.update({i: n.next_round()})) for i, n in enumerate(nodes)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(_LIMIT_S)
        assert len(found) == len(nodes)
        for i, node in enumerate(nodes):
            ranks = Ranks(node)
            ranks.ranks = range(found[i].first_rank, found[i].first_rank + node.info.num_processes)
            ranks.stand = 5 << 2 | RankState.PAST
            node.served = ranks
        return [found[i] for i in range(len(nodes))]

    def end(self, code: int = 1) -> None:
        for node in self._nodes:
            node.close()
        assert self._conductor is not None
        self._conductor.close("the test is over", code)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    found = Stage(tmp_path)
    yield found
    found.end()


def wait_for(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + _LIMIT_S
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


def order(node: Node) -> GenerationResult:
    found: GenerationResult = wait_for(node.order)
    return found


def ranks_of(node: Node) -> Ranks:
    assert isinstance(node.served, Ranks)
    return node.served


def test_two_machines_make_a_round_and_end_together(stage: Stage) -> None:
    stage.open()
    other, head = stage.node("other"), stage.node("head")
    mine, its = stage.rounds(head, other)
    assert (mine.group_rank, mine.first_rank, mine.world_size, mine.port) == (0, 0, 4, 1)
    assert (its.group_rank, its.first_rank, its.world_size, its.port) == (1, 2, 4, 0)
    head.report({0: 0, 1: 0})
    other.report({2: None, 3: 0})
    assert head.order() is None
    other.report({2: 0, 3: 0})
    assert order(head) == order(other) == GenerationResult(then="done", code=0)


def test_a_failure_is_told_with_its_machine_and_restarts_as_often_as_was_asked(
    stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    stage.open(max_restarts=1)
    head, other = stage.node("head"), stage.node("other")
    for number in range(2):
        mine, its = stage.rounds(head, other)
        assert (mine.number, its.num_restarts) == (number, number)
        record = ErrorRecord(time_ns=time.monotonic_ns(), type="ValueError", message="bad sample 17")
        lost = ErrorRecord(time_ns=1, type="RuntimeError", message="Connection closed by peer")
        ranks_of(head).ends = [RankEnd(rank=0, exit_code=1, record=lost), RankEnd(rank=1, exit_code=1, record=lost)]
        ranks_of(other).ends = [RankEnd(rank=2, exit_code=None), RankEnd(rank=3, exit_code=1, record=record)]
        other.report({2: None, 3: 1})
        assert order(head) == order(other) == GenerationResult(then=("restart", "stop")[number], code=number)
    told = capsys.readouterr().err
    assert told.count("rank 3 failed first: ValueError: bad sample 17") == 4  # on both machines, twice
    assert "rank 3 of 4, on other (127.0.0.1)" in told
    assert "restart 1 of 1" in told
    assert "the run ends" in told


def test_a_machine_that_goes_is_done_without_when_enough_are_left(
    stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    stage.open(least=1)
    head, other = stage.node("head"), stage.node("other")
    stage.rounds(head, other)
    assert other._peer is not None
    other._peer.close()
    assert order(head).then == "restart"
    (alone,) = stage.rounds(head)
    assert (alone.number, alone.world_size, alone.num_restarts) == (1, 2, 0)
    assert "lost contact with other (127.0.0.1)" in capsys.readouterr().err


def test_a_machine_that_goes_ends_a_run_that_needs_it(stage: Stage) -> None:
    stage.open()
    head, other = stage.node("head"), stage.node("other")
    stage.rounds(head, other)
    other.leave("interrupted by SIGINT", 130)
    assert order(head) == GenerationResult(then="stop", code=130)


def test_one_that_comes_later_is_taken_in_after_all_have_saved(stage: Stage) -> None:
    stage.open(least=1)
    head = stage.node("head")
    stage.rounds(head)
    other = stage.node("other")
    joins = threading.Thread(target=other.next_round)
    joins.start()
    assert order(head).then == "restart"
    assert ranks_of(head).stand & 3 == RankState.STOPPED
    (mine,) = stage.rounds(head)
    joins.join(_LIMIT_S)
    assert mine.world_size == 4


def test_one_that_is_asked_to_end_leaves_after_all_have_saved_and_the_others_go_on(stage: Stage) -> None:
    stage.open(least=1)
    head, other = stage.node("head"), stage.node("other")
    stage.rounds(head, other)
    other.ask_to_end("SIGTERM")
    assert order(other) == GenerationResult(then="preempted", code=EXIT_CODE)
    assert order(head).then == "restart"


def test_all_end_with_the_head_as_nobody_can_do_without_it(stage: Stage) -> None:
    stage.open(least=1)
    head, other = stage.node("head"), stage.node("other")
    stage.rounds(head, other)
    head.ask_to_end("SIGTERM")
    assert order(head) == order(other) == GenerationResult(then="preempted", code=EXIT_CODE)


def test_a_message_that_cannot_be_read_costs_its_sender_and_nobody_else(
    stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    stage.open(least=1)
    head = stage.node("head")
    stage.rounds(head)
    stranger = stage.node("other")
    assert stranger._peer is not None
    stranger._peer.tell("hello", info={"uid": "x", "a field of the next version": 1})
    with pytest.raises(LaunchError, match="it does not speak as the launcher here does"):
        stranger.next_round()
    assert "install the same version of echelon" in capsys.readouterr().err
    assert head.order() is None
    head.report({0: 0, 1: 0})
    assert order(head) == GenerationResult(then="done")


def test_one_that_waits_when_the_run_ends_well_ends_well(stage: Stage) -> None:
    stage.open()
    head, other, spare = stage.node("head"), stage.node("other"), stage.node("spare")
    stage.rounds(head, other)
    over: list[RunOver] = []

    def wait() -> None:
        try:
            spare.next_round()
        except RunOver as error:
            over.append(error)

    waits = threading.Thread(target=wait)
    waits.start()
    assert stage._conductor is not None
    wait_for(lambda: any(member.waits for member in stage._conductor._members))  # type: ignore[union-attr]
    head.report({0: 0, 1: 0})
    other.report({2: 0, 3: 0})
    waits.join(_LIMIT_S)
    assert [error.order.code for error in over] == [0]


def test_all_end_at_one_step_when_none_can_be_done_without(stage: Stage) -> None:
    stage.open()
    head, other = stage.node("head"), stage.node("other")
    stage.rounds(head, other)
    other.ask_to_end("SIGTERM")
    assert order(head) == order(other) == GenerationResult(then="preempted", code=EXIT_CODE)


def test_who_does_not_fit_is_refused_and_who_is_missing_is_named(
    stage: Stage, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conductor_module, "_MISSING_AFTER_S", 0.2)
    stage.open()
    head = stage.node("head", machine_rank=0)
    waits = threading.Thread(target=head.next_round)
    waits.start()
    with pytest.raises(LaunchError, match="machine rank 0 is there twice"):
        stage.node("other", machine_rank=0)
    with pytest.raises(LaunchError, match="different settings: a is 1 there and not given on head"):
        stage.node("other", settings={"a": "1"})
    told = ""

    def is_told() -> bool:
        nonlocal told
        told += capsys.readouterr().err
        return "1 of 2 machines is there: head (127.0.0.1, machine rank 0); nobody has come with machine rank 1" in told

    wait_for(is_told)
    right = stage.node("other", machine_rank=1)
    assert right.next_round().world_size == 4
    waits.join(_LIMIT_S)


def test_what_ends_the_run_while_torch_is_imported_is_not_lost(stage: Stage) -> None:
    stage.open(join=0.2 * SECOND)
    head = stage.node("head")
    assert order(head) == GenerationResult(then="stop", code=1)  # before it waits for a round
    with pytest.raises(RunOver) as caught:
        head.next_round()
    assert caught.value.order == GenerationResult(then="stop", code=1)


def test_machines_that_are_there_and_import_torch_are_waited_for(stage: Stage) -> None:
    stage.open(join=0.2 * SECOND)
    head, other = stage.node("head"), stage.node("other")
    time.sleep(0.5)
    assert head.order() is None
    assert [found.world_size for found in stage.rounds(head, other)] == [4, 4]


def test_a_round_that_does_not_come_about_ends_the_run(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    stage.open(join=0.2 * SECOND)
    with pytest.raises(RunOver):
        stage.node("head").next_round()
    assert "1 of 2 machines is there" in capsys.readouterr().err
