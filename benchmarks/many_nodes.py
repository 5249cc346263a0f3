"""Measures how a run grows with its number of machines: 16, 256 and 1,024 simulated nodes of 8 ranks each.

The coordinator is the real one, with the real node of its own launcher, in a process of its own. The other nodes are tasks of one
process that speak the launchers' protocol over loopback: they authenticate, join, send heartbeats, and answer the coordinator's
requests from a status board of 8 ranks, whose records change as in training. No program runs. Measured:

- join: from the first connection until every node has been told to start its ranks;
- quiet: CPU time of the coordinator's process per second while all ranks train, its memory and its threads;
- verdict: from the failure of one rank, upon which all others lose contact, to the report on the machine that it ran on;
- restart: from the failure until every node has been told to start its ranks again;
- report: the time that `echelon report` takes for a run of 1,024 ranks, and Chromium to open the page;
- watch: the time that the live view of as many ranks takes to read and draw them once, which it does twice a second.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import multiprocessing
import os
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import psutil
from results import footer, publish, verdict
from rich.console import Console

from echelon.diagnose.stall import RankView
from echelon.launch.coordinator import joined_run
from echelon.launch.failures.failure import ErrorRecord, Frame, RankEnd
from echelon.launch.interrupts import Interrupts
from echelon.launch.local.goodput_recorder import times_on
from echelon.launch.local.processes import Workers
from echelon.launch.multinode.connections import NODE, connect
from echelon.launch.multinode.machines import MultinodePlan
from echelon.launch.multinode.messages import encode
from echelon.launch.multinode.network import listen
from echelon.launch.multinode.roster import NodeInfo, RendezvousTimes
from echelon.launch.node import AttemptRanks, RunRules
from echelon.launch.supervisor import StallRules
from echelon.report.live_run import LiveRun
from echelon.report.terminal import draw
from echelon.status.board import Board, Doing, Mark, Phase, Slot, StatusNote, StepPart, Times, Watch
from echelon.status.run_files import read_info, write_info
from echelon.status.run_recorder import RunRecorder

sys.path.append(str(Path(__file__).parents[1]))  # the tests have a browser and made-up runs
from tests.browser import CHROMIUM, open_browser
from tests.recorded_runs import write_run

NUM_NODES = (16, 256, 1024)
RANKS_PER_NODE = 8
NUM_REPORTED = 1024
JOIN_LIMIT_S, VERDICT_LIMIT_S, QUIET_LIMIT = 10.0, 2.0, 0.2
REPORT_LIMIT_S, OPEN_LIMIT_S = 10.0, 2.0
TOKEN = b"the token of a benchmark"
HEARTBEAT_S, LOST_AFTER_S = 2.0, 10.0  # the launcher's defaults
BOARD_S = 0.5
"""Interval at which the simulated ranks write their boards; real reporters write as often."""
STEP_NS = 300_000_000
SIZE = struct.Struct(">I")
SCRIPT = "/home/user/project/train.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    num_nodes: int
    join_s: float
    quiet_cpu: float
    """CPU seconds of the coordinator's process per second."""
    memory_mb: float
    num_threads: int
    verdict_s: float
    verdict_cpu_s: float
    """CPU seconds of the coordinator's process from the failure to the verdict."""
    restart_s: float


def node_info(number: int, num_nodes: int) -> NodeInfo:
    return NodeInfo(
        uid=f"{number:016x}",
        host=f"node{number:04}",
        address=f"10.0.{number // 256}.{number % 256}",
        machine_rank=number,
        num_processes=RANKS_PER_NODE,
        min_nodes=num_nodes,
        max_nodes=num_nodes,
        run_id="many-nodes",
        versions={"echelon": "0.1.0", "torch": "2.13.0"},
        settings={"seed": "42 (from flag --seed)", "mixed_precision": "bf16 (from flag --mixed_precision)"},
    )


class SimulatedRank:
    """A rank that trains, as far as its status board shows."""

    def __init__(self, slot: Slot, index: int) -> None:
        self._slot, self._index = slot, index
        self._began_ns = time.monotonic_ns()
        for step in range(8):
            slot.mark(Mark(100 * step, (10**9,) * len(StepPart)))

    def train(self) -> int:
        """Write the records of a rank that trains now, and return its step."""
        now, slot, spent = time.monotonic_ns(), self._slot, len(StepPart)
        step = (now - self._began_ns) // STEP_NS
        doing = Doing.COMMUNICATES | Doing.TRAINS | Doing.DUMPS
        signature = hash((step, self._index)) & (2**64 - 1)
        slot.watch(Watch(now, os.getpid(), signature, 20 * step, doing, 0, 57, SCRIPT))
        slot.note(StatusNote(now, step, 4 * step, 57, Phase.TRAIN, True, "backward", "", "", SCRIPT))
        slot.times(Times(self._began_ns, now, -1, step, StepPart.BACKWARD, (step * 10**7,) * spent))
        return step


class SimulatedRanks:
    """A status board of one machine whose ranks train, and how they end."""

    def __init__(self, folder: Path) -> None:
        self.board = Board(RANKS_PER_NODE, folder=str(folder))
        self._ranks = [SimulatedRank(Slot(self.board.path, index), index) for index in range(RANKS_PER_NODE)]
        self.train()

    def train(self) -> None:
        """Write the records of ranks that train now."""
        self.steps = [rank.train() for rank in self._ranks]

        # As JSON, made once for all simulated machines, which would do this at the same time.
        views = [
            RankView(
                rank=index,
                watch=self.board.watch(index),
                note=self.board.note(index),
                cpu_s=time.monotonic(),
                times=self.board.times(index),
            )
            for index in range(RANKS_PER_NODE)
        ]
        self._answers = {"views": encode(views), "times": encode(times_on(self.board, range(RANKS_PER_NODE)))}

    def answer(self, kind: str, first_rank: int) -> Any:
        return [{**answer, "rank": first_rank + answer["rank"]} for answer in self._answers[kind]]


def ends_after(failed_ns: int, first_rank: int, *, failed_rank: int) -> list[RankEnd]:
    """Return how the ranks of a node ended: one with an error of its own, and all others because they lost contact."""
    frames = tuple(Frame(file=SCRIPT, line=line, function="main", source="loss.backward()") for line in (80, 57))
    ends = []
    for rank in range(first_rank, first_rank + RANKS_PER_NODE):
        if rank == failed_rank:
            record = ErrorRecord(time_ns=failed_ns, type="ValueError", message="the loss is nan", frames=frames)
        else:
            text = "[Rank 3] Connection closed by peer [10.0.0.7]:29500"
            record = ErrorRecord(time_ns=failed_ns - 10**6, type="RuntimeError", message=text, frames=frames)
        ends.append(RankEnd(rank=rank, exit_code=1, ended_ns=failed_ns + 10**6, record=record))
    return ends


class SimulatedNode:
    """One launcher, as the coordinator sees it."""

    def __init__(self, number: int, num_nodes: int, ranks: SimulatedRanks, progress: Progress) -> None:
        self.info = node_info(number, num_nodes)
        self.first_rank = number * RANKS_PER_NODE
        self.generation = -1
        self._ranks, self._progress = ranks, progress
        self._ends: list[dict[str, Any]] = []
        self._codes: list[tuple[int, int | None]] = []
        self._writer: asyncio.StreamWriter | None = None

    async def run(self, port: int, threads: ThreadPoolExecutor) -> None:
        loop = asyncio.get_running_loop()
        sock = await loop.run_in_executor(
            threads, lambda: connect("127.0.0.1", port, TOKEN, purpose=NODE, timeout_s=60.0)
        )
        sock.setblocking(False)
        reader, self._writer = await asyncio.open_connection(sock=sock)
        heartbeats = asyncio.create_task(self._send_heartbeats())
        self._send("hello", info=encode(self.info))
        try:
            while True:
                (size,) = SIZE.unpack(await reader.readexactly(SIZE.size))
                self._handle(json.loads(await reader.readexactly(size)))
        finally:
            heartbeats.cancel()
            self._writer.close()

    def prepare_failure(self, failed_ns: int, failed_rank: int) -> None:
        self._ends = encode(ends_after(failed_ns, self.first_rank, failed_rank=failed_rank))
        self._codes = [(end["rank"], end["exit_code"]) for end in self._ends]

    def _send(self, kind: str, **content: Any) -> None:
        self._write({"kind": kind, "content": content})

    def _write(self, message: Mapping[str, Any]) -> None:
        assert self._writer is not None
        text = json.dumps(message, separators=(",", ":")).encode()
        self._writer.write(SIZE.pack(len(text)) + text)

    async def _send_heartbeats(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            self._write({"kind": "heartbeat"})

    def send_codes(self) -> None:
        self._send("codes", generation=self.generation, codes=self._codes)

    def _handle(self, message: Mapping[str, Any]) -> None:
        kind, content = message["kind"], message.get("content", {})
        if "request" in message:
            answer = self._answer(kind)
            self._write({"kind": "answer", "request": message["request"], "answer": answer})
        elif kind == "welcome":
            self._send("join", after=self.generation)
        elif kind == "generation":
            self.generation = content["number"]
            self._codes = [(rank, None) for rank in range(self.first_rank, self.first_rank + RANKS_PER_NODE)]
            self._progress.started(self.generation)
            self.send_codes()
        elif kind == "end":
            self._progress.ended(self, content)
            self._send("join", after=self.generation)
        elif kind == "refused":
            raise RuntimeError(content)

    def _answer(self, kind: str) -> Any:
        if kind == "clock":
            return time.monotonic_ns()
        if kind == "ends":
            return self._ends
        if kind == "steps":
            return self._ranks.steps
        if kind in ("views", "times"):
            return self._ranks.answer(kind, self.first_rank)
        raise RuntimeError(f"the simulation does not answer {kind!r}")


class Progress:
    """When the simulated nodes reached each point."""

    def __init__(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes
        self._num_started: dict[int, int] = {}
        self.all_started = {generation: asyncio.Event() for generation in (0, 1)}
        self.failed_node: SimulatedNode | None = None
        self.has_report = asyncio.Event()
        self.report = ""
        self.verdict_at = 0.0

    def started(self, generation: int) -> None:
        self._num_started[generation] = self._num_started.get(generation, 0) + 1
        if self._num_started[generation] == self._num_nodes:
            self.all_started[generation].set()

    def ended(self, node: SimulatedNode, content: Mapping[str, Any]) -> None:
        if node is self.failed_node and not self.report:
            self.report, self.verdict_at = content["error"], time.monotonic()
            self.has_report.set()


async def simulate(pipe: Connection, port: int, num_nodes: int, folder: Path) -> None:
    """Run all nodes but the first, as the commands in ``pipe`` say."""
    ranks = SimulatedRanks(folder)
    progress = Progress(num_nodes - 1)
    nodes = [SimulatedNode(number, num_nodes, ranks, progress) for number in range(1, num_nodes)]
    began = time.monotonic()
    with ThreadPoolExecutor(num_nodes) as threads:
        tasks = [asyncio.create_task(node.run(port, threads)) for node in nodes]
        tasks.append(asyncio.create_task(train(ranks)))
        await first_of(progress.all_started[0], tasks)
        pipe.send(time.monotonic() - began)
        await asyncio.to_thread(pipe.recv)
        node = progress.failed_node = nodes[len(nodes) // 2]
        failed_rank = node.first_rank + 3
        for other in nodes:
            other.prepare_failure(time.monotonic_ns(), failed_rank)
        failed_at = time.monotonic()
        for other in [node, *(other for other in nodes if other is not node)]:
            other.send_codes()
        await first_of(progress.has_report, tasks)
        pipe.send(progress.verdict_at - failed_at)
        await first_of(progress.all_started[1], tasks)
        restarted_at = time.monotonic()
        assert f"rank {failed_rank} failed first: ValueError: the loss is nan" in progress.report, progress.report
        pipe.send(restarted_at - failed_at)
        await asyncio.to_thread(pipe.recv)
        for task in tasks:
            task.cancel()


async def first_of(event: asyncio.Event, tasks: Sequence[asyncio.Task[None]]) -> None:
    """Wait for ``event``, or raise the error of a node that ended before."""
    waiting = asyncio.create_task(event.wait())
    done, _ = await asyncio.wait([waiting, *tasks], return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()
    assert waiting in done


async def train(ranks: SimulatedRanks) -> None:
    while True:
        ranks.train()
        await asyncio.sleep(BOARD_S)


def run_nodes(pipe: Connection, port: int, num_nodes: int, folder: Path) -> None:
    asyncio.run(simulate(pipe, port, num_nodes, folder))


class RunningWorkers:
    """The processes of the coordinator's own machine, of which none ends."""

    def exit_codes(self) -> list[int | None]:
        return [None] * RANKS_PER_NODE

    def running(self) -> dict[int, tuple[int, int | None]]:
        return dict.fromkeys(range(RANKS_PER_NODE), (multiprocessing.current_process().pid or 0, None))

    def ends(self) -> list[RankEnd]:
        return [RankEnd(rank=rank, exit_code=None) for rank in range(RANKS_PER_NODE)]


def coordinate(pipe: Connection, num_nodes: int, folder: Path) -> None:
    """Run the coordinator and its own node until the process is terminated."""
    listener = listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    began_ns = time.monotonic_ns()
    plan = MultinodePlan(
        info=node_info(0, num_nodes),
        host="127.0.0.1",
        port=port,
        where="the benchmark",
        token=TOKEN,
        listener=listener,
        interface=None,
        times=RendezvousTimes(
            join_timeout=timedelta(minutes=10),
            last_call=timedelta(seconds=30),
            heartbeat=timedelta(seconds=HEARTBEAT_S),
            lost_after=timedelta(seconds=LOST_AFTER_S),
        ),
    )
    rules = RunRules(
        max_restarts=1,
        stall=StallRules(timeout=timedelta(seconds=60), on_stall="report"),
        preemption_grace=timedelta(seconds=60),
        logs="none",
        directory=folder,
        began_ns=began_ns,
        record=RunRecorder(folder / "run", began_ns=began_ns),
    )
    (folder / "run").mkdir()
    ranks = SimulatedRanks(folder)
    sys.stderr = (folder / "coordinator.txt").open("w")
    with joined_run(plan, rules, Interrupts(), num_processes=RANKS_PER_NODE, port=0) as node:
        pipe.send(port)
        while True:
            node.next_generation()
            numbers = list(range(RANKS_PER_NODE))
            workers = cast(Workers, RunningWorkers())
            node.watch(AttemptRanks(board=ranks.board, workers=workers, directory=folder, numbers=numbers))
            wrote = 0.0
            while node.poll(timedelta(seconds=0.1)) is None:
                if time.monotonic() - wrote > BOARD_S:
                    ranks.train()
                    wrote = time.monotonic()


@contextlib.contextmanager
def process_of(function: Any, *arguments: Any) -> Iterator[tuple[Connection, int]]:
    """Run ``function`` with a pipe in a new process; yield the pipe's other end and the process id."""
    context = multiprocessing.get_context("spawn")
    pipe, its_pipe = context.Pipe()
    process = context.Process(target=function, args=(its_pipe, *arguments), daemon=True)
    process.start()
    its_pipe.close()  # so that the end of the process ends a receive
    try:
        assert process.pid is not None
        yield pipe, process.pid
    finally:
        process.terminate()
        process.join()


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def measure(num_nodes: int, *, quiet_s: float) -> Result:
    with tempfile.TemporaryDirectory() as temporary, contextlib.ExitStack() as stack:
        folder = Path(temporary)
        coordinator, pid = stack.enter_context(process_of(coordinate, num_nodes, folder))
        port = coordinator.recv()
        nodes, _ = stack.enter_context(process_of(run_nodes, port, num_nodes, folder))
        join_s = nodes.recv()
        time.sleep(2 * HEARTBEAT_S)  # what follows the start, such as the first codes, is over
        process = psutil.Process(pid)
        before_s, began = cpu_s(process), time.monotonic()
        time.sleep(quiet_s)
        quiet_cpu = (cpu_s(process) - before_s) / (time.monotonic() - began)
        memory, num_threads = process.memory_info().rss, process.num_threads()
        nodes.send("fail")
        before_s = cpu_s(process)
        verdict_s = nodes.recv()
        verdict_cpu_s = cpu_s(process) - before_s
        restart_s = nodes.recv()
        return Result(
            num_nodes=num_nodes,
            join_s=join_s,
            quiet_cpu=quiet_cpu,
            memory_mb=memory / 1e6,
            num_threads=num_threads,
            verdict_s=verdict_s,
            verdict_cpu_s=verdict_cpu_s,
            restart_s=restart_s,
        )


def report_times(folder: Path) -> tuple[float, float | None, float]:
    """Return the seconds that the report of a run takes, and those to open it (None without a browser), and its size in MB."""
    began = time.monotonic()
    subprocess.run([sys.executable, "-m", "echelon", "report", str(folder)], check=True, stdout=subprocess.DEVNULL)
    write_s = time.monotonic() - began
    page = folder / "report.html"
    if CHROMIUM is None:
        return write_s, None, page.stat().st_size / 1e6
    with open_browser() as browser:
        return write_s, browser.open(page), page.stat().st_size / 1e6


def watch_s(folder: Path) -> float:
    """Return the seconds of CPU time that the live view of a run takes to read and draw its ranks once."""
    board = Board(NUM_REPORTED, folder=str(folder))
    info = read_info(folder)
    machine = {**info["machine"], "host": socket.gethostname()}
    write_info(folder, {**info, "outcome": "running", "board": board.path, "machine": machine})
    ranks = [SimulatedRank(Slot(board.path, rank), rank) for rank in range(NUM_REPORTED)]
    live, console = LiveRun(folder), Console(file=io.StringIO(), width=120)
    times = []
    for _ in range(5):
        for rank in ranks:
            rank.train()
        began = time.process_time()
        console.print(draw(live.read(), console, height=50))
        times.append(time.process_time() - began)
    live.close()
    board.remove()
    return statistics.median(times)


def section(results: Sequence[Result], *, report: tuple[float, float | None, float], watched_s: float) -> str:
    written_s, opened_s, size_mb = report
    opened = (
        "not opened, without Chromium"
        if opened_s is None
        else (f"opened in {opened_s:.1f} s (target: {OPEN_LIMIT_S:g}, {verdict(opened_s <= OPEN_LIMIT_S)})")
    )
    rows = "".join(
        f"| {r.num_nodes:,} | {r.num_nodes * RANKS_PER_NODE:,} | {r.join_s:.2f} | {r.quiet_cpu:.1%} | {r.memory_mb:.0f} "
        f"| {r.num_threads} | {r.verdict_s:.2f} | {r.verdict_cpu_s:.2f} | {r.restart_s:.2f} |\n"
        for r in results
    )
    most = results[-1]
    return f"""## Many machines

One real coordinator in a process of its own, and simulated nodes, all in one other process, that speak the launchers' protocol with it over
loopback; each has {RANKS_PER_NODE} ranks, and the coordinator reads their status boards as in training. One rank fails, and all others lose contact;
"verdict" is when the report has arrived on the machine of that rank, and the CPU time beside it is the coordinator's. Both processes share
the cores of this machine with other programs (the load is below), so the seconds are upper limits.

| machines | ranks | join, s | CPU while quiet | memory, MB | threads | verdict, s | CPU for it, s | restart, s |
|---:|---:|---:|---:|---:|---:|---:|---:|---:|
{rows}
- {most.num_nodes:,} machines: join in {most.join_s:.1f} s (target: {JOIN_LIMIT_S:g}, {verdict(most.join_s <= JOIN_LIMIT_S)}); \
verdict after {most.verdict_s:.1f} s (target: {VERDICT_LIMIT_S:g}, {verdict(most.verdict_s <= VERDICT_LIMIT_S)}); \
{most.quiet_cpu:.0%} of a core while quiet (target: {QUIET_LIMIT:.0%}, {verdict(most.quiet_cpu <= QUIET_LIMIT)})
- a report of {NUM_REPORTED:,} ranks: {size_mb:.1f} MB, written in {written_s:.1f} s (target: {REPORT_LIMIT_S:g}, \
{verdict(written_s <= REPORT_LIMIT_S)}), {opened}
- the live view of {NUM_REPORTED:,} ranks takes {1e3 * watched_s:.0f} ms of CPU time to read and draw them, twice a second

{footer("many_nodes.py")}"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num_nodes", type=int, nargs="+", default=NUM_NODES)
    parser.add_argument("--quiet_s", type=float, default=30.0, help="how long to measure the coordinator while quiet")
    parser.add_argument("--write", action="store_true", help="write the section of RESULTS.md")
    options = parser.parse_args()
    results = []
    for num_nodes in options.num_nodes:
        results.append(measure(num_nodes, quiet_s=options.quiet_s))
        print(results[-1], flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = write_run(Path(temporary), "run", num_ranks=NUM_REPORTED, kills=(90,), slow_rank=17)
        report = report_times(folder)
        watched_s = watch_s(folder)
    publish(section(results, report=report, watched_s=watched_s), is_written=options.write)


if __name__ == "__main__":
    main()
