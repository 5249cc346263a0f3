"""The launcher's agent on torch's elastic agent: torch decides ranks and restarts, echelon starts, watches and stops."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, final

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from echelon.base import environ
from echelon.base.errors import LaunchError
from echelon.diagnose.stall import RankView, Stall
from echelon.launch.failures.failure import RankEnd, explain
from echelon.launch.interrupts import Interrupted, Interrupts
from echelon.launch.local.goodput_recorder import GOODPUT_FILE, GoodputRecorder, GoodputReport, first_sign, times_on
from echelon.launch.local.guardian import LAUNCHER_VARIABLE
from echelon.launch.local.output import Outputs
from echelon.launch.local.parents import Guardian, own_identity
from echelon.launch.local.processes import Workers
from echelon.launch.local.ranks import LocalRanks, settled
from echelon.launch.local.warm_start import WarmStarter
from echelon.launch.multinode.job_token import TOKEN_FILE_VARIABLE, TOKEN_VARIABLE
from echelon.launch.multinode.messages import decode, encode
from echelon.launch.multinode.node import GenerationResult, Node, RunOver
from echelon.launch.multinode.rendezvous import LoopbackRendezvous, NodeRendezvous
from echelon.launch.preemption import PreemptionCoordinator
from echelon.launch.script import Script
from echelon.launch.supervisor import StallRules, Supervisor
from echelon.status.board import Board
from echelon.status.notes import BOARD_VARIABLE
from echelon.status.stop_barrier import EXIT_CODE

__all__ = ["Job", "RunOutcome", "run_job"]

# What a spare imports. torch._dynamo: the first optimizer imports it, which takes as long as torch itself.
_OF_TORCH = ("torch", "torch.distributed", "torch._dynamo")
# For programs that use echelon: only its loops write notes on the board.
_OF_ECHELON = ("echelon.accelerator.accelerator", "echelon.trainer", "echelon.checkpoint.save", "safetensors.torch")
# Not SIGTERM, which means preemption: victims of another rank's failure have nothing to save, and must not begin to. The
# short grace lets those clean up (temporary files) that handle it.
_STOP_SIGNAL = signal.SIGHUP if hasattr(signal, "SIGHUP") else signal.SIGTERM
_GRACE_AFTER_FAILURE = timedelta(seconds=1)
# The user or the scheduler asked: scripts may save, but all is over within 5 s.
_GRACE_AFTER_SIGNAL = timedelta(seconds=3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Everything that is needed to run a script on this machine, alone or as one of several."""

    script: Script
    num_processes: int
    environment: Mapping[str, str]
    """What every rank gets on top of the launcher's own environment."""
    directory: Path
    """For records and logs; one folder for each attempt and rank below it."""
    outputs: Outputs
    logs: str
    """Where logs are, or how to get some: for the report."""
    run_id: str
    port: int
    """Of the store; 0: a free one."""
    max_restarts: int
    monitor_interval: timedelta
    stall: StallRules
    preemption_grace: timedelta
    """The ranks have so long to come to one step when they are asked to save and end; zero: they are stopped at once."""
    is_warm: bool = True
    """Restarted ranks are forked from a process that has imported torch; False: each is a new program."""
    began_ns: int
    """When the launcher began, on ``time.monotonic_ns``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    """How the last attempt ended."""

    ends: list[RankEnd]
    books: GoodputReport
    """Where the time went."""
    stall: Stall | None = None
    """It was stopped because of this; it has been told."""
    preemption: PreemptionCoordinator | None = None
    """It was asked to end, and has."""
    code: int | None = None
    """The exit code that all machines of the run agree on; what happened has been told. None: it has one machine."""


def run_job(job: Job, interrupts: Interrupts, node: Node | None = None) -> RunOutcome:
    """Run ``job`` to its end and return how its last attempt ended.

    Args:
        job: what runs.
        interrupts: the launcher's signals.
        node: by which this machine takes part in a run on several; None: it has one machine.

    Raises:
        Interrupted: a signal came; the processes are stopped.
        LaunchError: the processes cannot be started.
    """
    handler = LoopbackRendezvous(run_id=job.run_id, port=job.port) if node is None else NodeRendezvous(node)
    spec = WorkerSpec(
        role="default",
        local_world_size=job.num_processes,
        rdzv_handler=handler,
        entrypoint=job.script.target,  # for torch's event log; _start_workers knows how to run it
        max_restarts=job.max_restarts,
        monitor_interval=job.monitor_interval.total_seconds(),
    )
    agent = _Agent(spec, job, interrupts, node)
    try:
        agent.run()
    except RunOver as over:
        agent.order = over.order
        agent.is_preempted = over.order.then == "preempted"
    finally:
        books = agent.close()
        handler.shutdown()
    preemption = agent.preemption if agent.is_preempted else None
    code = None if node is None else agent.order.code if agent.order is not None else 0
    return RunOutcome(ends=agent.ends, books=books, stall=agent.stall, preemption=preemption, code=code)


@final
class _Agent(SimpleElasticAgent):
    """The four members that torch leaves to an agent.

    Not ``LocalElasticAgent``: that one stops ranks for up to 30 s, in three places, and takes over our signals.
    """

    def __init__(self, spec: WorkerSpec, job: Job, interrupts: Interrupts, node: Node | None) -> None:
        super().__init__(spec, exit_barrier_timeout=5)
        self._job = job
        self._interrupts = interrupts
        self._node = node
        self.order: GenerationResult | None = None
        self._attempt = -1
        pass_on = None if node is None else node.ask_to_end
        self.preemption = PreemptionCoordinator(interrupts, job.preemption_grace, pass_on)
        self.is_preempted = False
        self._workers: Workers | None = None
        self._board: Board | None = None
        self._ranks: LocalRanks | None = None
        self._supervisor: Supervisor | None = None
        self._warm = WarmStarter()
        self._guardian = Guardian()
        self._environment_of_ranks: dict[int, dict[str, str]] = {}
        self._accounts = GoodputRecorder(job.directory / GOODPUT_FILE, began_ns=job.began_ns)
        self.ends: list[RankEnd] = []
        self.stall: Stall | None = None

    def close(self) -> GoodputReport:
        """End what forks ranks, and remove the board of the last attempt; return where the time went."""
        self._warm.close()
        self._guardian.close()
        self._close_accounts(noticed_ns=time.monotonic_ns())  # an attempt that was interrupted
        self._remove_board()
        return self._accounts.finish()

    def _close_accounts(self, *, failed_ns: int | None = None, noticed_ns: int) -> None:
        if self._board is not None:
            times = times_on(self._board, self._rank_numbers)
            self._accounts.close(times, failed_ns=failed_ns, noticed_ns=noticed_ns)

    @property
    def _rank_numbers(self) -> list[int]:
        return [int(variables["RANK"]) for variables in self._environment_of_ranks.values()]

    def _remove_board(self) -> None:
        if self._node is not None:
            self._node.served = None
        if self._board is not None:
            self._board.close()
            self._board = None

    def _assign_worker_ranks(
        self, store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        """Number the ranks; of several machines the conductor has said how.

        Torch asks the others through a store, and waits for minutes for one that has gone.
        """
        handler = spec.rdzv_handler
        if isinstance(handler, NodeRendezvous):
            first, size = handler.round.first_rank, handler.round.world_size
        else:
            first, size = 0, spec.local_world_size
        return [
            Worker(local_rank=i, global_rank=first + i, role_rank=first + i, world_size=size, role_world_size=size)
            for i in range(spec.local_world_size)
        ]

    def _exit_barrier(self) -> None:
        """Go: when there are other machines, all were told that all have ended."""

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        job = self._job
        handler = worker_group.spec.rdzv_handler
        if isinstance(handler, NodeRendezvous):
            # The head may have been started again, and count from 0.
            attempt = self._attempt = max(handler.round.number, self._attempt + 1)
            num_restarts = handler.round.num_restarts
        else:
            attempt = num_restarts = job.max_restarts - self._remaining_restarts
        if attempt and self._node is None:
            if self.stall is None:  # that has been told
                what, where, do = explain(self.ends, logs=job.logs)
                print(f"echelon: {LaunchError(what, where=where, do=do)}", file=sys.stderr)
            print(f"echelon: restart {attempt} of {job.max_restarts}", file=sys.stderr, flush=True)
        self._interrupts.check()
        directory = job.directory / f"attempt_{attempt}"
        directory.mkdir(parents=True)
        self._remove_board()
        self.stall = None
        self._board = Board(job.num_processes, folder=str(directory))
        self.preemption.watch(self._board)
        workers = Workers(
            job.script,
            directory=directory,
            outputs=job.outputs,
            board=self._board,
            warm=self._warm,
            guardian=self._guardian,
            check=self._interrupts.check,
        )
        self._ranks = LocalRanks(self._board, directory=directory, running=workers.running, check=self.preemption.check)
        self._supervisor = Supervisor(self._ranks, directory=job.directory, rules=job.stall)
        self._workers = workers
        self._environment_of_ranks = self._environments(worker_group, num_restarts, directory)
        self._accounts.open()
        started = workers.start(self._environment_of_ranks)
        if self._node is not None:
            self._node.served = _ServedRanks(self._board, workers, directory, self._rank_numbers)
        return started

    def _environments(self, group: WorkerGroup, num_restarts: int, directory: Path) -> dict[int, dict[str, str]]:
        """Return for each local rank its environment: what torchrun sets, and what the job adds."""
        common = {
            **environ.snapshot(),
            **self._job.environment,
            "GROUP_RANK": str(group.group_rank),
            "GROUP_WORLD_SIZE": str(group.group_world_size),
            "LOCAL_WORLD_SIZE": str(self._job.num_processes),
            "MASTER_ADDR": str(group.master_addr),
            "MASTER_PORT": str(group.master_port),
            "ROLE_NAME": group.spec.role,
            "TORCHELASTIC_MAX_RESTARTS": str(self._job.max_restarts),
            "TORCHELASTIC_RESTART_COUNT": str(num_restarts),
            "TORCHELASTIC_RUN_ID": self._job.run_id,
            "TORCHELASTIC_USE_AGENT_STORE": str(group.spec.rdzv_handler.use_agent_store),
        }
        assert self._board is not None
        common.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
        for secret in (TOKEN_VARIABLE, TOKEN_FILE_VARIABLE):
            common.pop(secret, None)  # programs print their environment
        return {
            worker.local_rank: {
                **common,
                "RANK": str(worker.global_rank),
                "LOCAL_RANK": str(worker.local_rank),
                "WORLD_SIZE": str(worker.world_size),
                BOARD_VARIABLE: f"{self._board.path}:{worker.local_rank}",
                LAUNCHER_VARIABLE: own_identity(),
                "ROLE_RANK": str(worker.role_rank),
                "ROLE_WORLD_SIZE": str(worker.role_world_size),
                # For scripts that decorate their main with torch's @record.
                "TORCHELASTIC_ERROR_FILE": str(directory / f"rank_{worker.global_rank}" / "torchelastic_error.json"),
            }
            for worker in group.workers
        }

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self.preemption.check()
        assert self._workers is not None
        codes = self._workers.exit_codes()
        if self._node is not None:
            return self._monitor_as_node(worker_group, self._node, codes)
        if self.preemption.is_asked and all(code in (None, 0, EXIT_CODE) for code in codes):
            return self._after_a_hold(codes)
        if all(code == 0 for code in codes):
            return self._succeeded()
        if all(code in (None, 0) for code in codes):
            return self._after_a_look(worker_group)
        if self.preemption.is_asked:
            self._remaining_restarts = 0
        noticed_ns = time.monotonic_ns()
        self.ends = self._settled_ends(self._workers)
        self._close_accounts(failed_ns=first_sign(self.ends), noticed_ns=noticed_ns)
        self._stop_workers(worker_group)
        return _failed(worker_group, self.ends)

    def _monitor_as_node(self, group: WorkerGroup, node: Node, codes: list[int | None]) -> RunResult:
        """Tell how the ranks here are, and do as all machines do."""
        assert self._workers is not None
        node.report(dict(zip(self._rank_numbers, codes)))
        order = node.order()
        if order is None:
            self._prepare_warm()
            return RunResult(state=WorkerState.HEALTHY)
        if order.then == "done":
            return self._succeeded()
        self.ends = self._workers.ends()
        self._close_accounts(failed_ns=first_sign(self.ends), noticed_ns=time.monotonic_ns())
        node.served = None
        if order.then == "preempted":
            self._workers.stop(signal.SIGKILL, grace=timedelta())
            self.is_preempted = True
            return self._succeeded()
        self.order = order
        self._remaining_restarts = 1 if order.then in ("restart", "lost") else 0
        self._stop_workers(group)
        return _failed(group, self.ends)

    def _prepare_warm(self) -> None:
        assert self._board is not None
        may_restart = self._node is not None or self._remaining_restarts > 0
        if may_restart and self._job.is_warm and self._talks():
            # Not before: until then the ranks themselves import, and need the processors.
            modules = _OF_TORCH if self._board.note(0) is None else (*_OF_TORCH, *_OF_ECHELON)
            self._warm.prepare(next(iter(self._environment_of_ranks.values())), modules)

    def _succeeded(self) -> RunResult:
        assert self._workers is not None
        self._close_accounts(noticed_ns=time.monotonic_ns())
        self._workers.drain()
        self.ends = self._workers.ends()
        return RunResult(state=WorkerState.SUCCEEDED, return_values=dict.fromkeys(e.rank for e in self.ends))

    def _after_a_hold(self, codes: list[int | None]) -> RunResult:
        """Return how the run is that was asked to end; no rank has failed."""
        assert self._workers is not None
        if None not in codes:
            # A run whose last step was made before it could stop has ended well.
            self.is_preempted = EXIT_CODE in codes or self.preemption.is_saved
        elif self.preemption.look():
            self._workers.stop(signal.SIGKILL, grace=timedelta())
            self.is_preempted = True
        else:
            return RunResult(state=WorkerState.HEALTHY)
        return self._succeeded()

    def _after_a_look(self, worker_group: WorkerGroup) -> RunResult:
        """Return that the ranks are well; or, when the run stands still and the user wants it to end then, failed."""
        assert self._workers is not None
        assert self._supervisor is not None
        assert self._board is not None
        self._prepare_warm()
        stall = self._supervisor.look()
        if stall is None or not stall.is_alarm or self._job.stall.on_stall == "report":
            return RunResult(state=WorkerState.HEALTHY)
        self.stall = stall
        if self._job.stall.on_stall == "stop":
            self._remaining_restarts = 0
        self.ends = self._workers.ends()
        noticed_ns = time.monotonic_ns()
        self._close_accounts(failed_ns=noticed_ns - int(stall.waited_s * 1e9), noticed_ns=noticed_ns)
        # A stopped process sees no SIGTERM, and one that is held by native code does nothing with it.
        self._stop_workers(worker_group)
        return _failed(worker_group, self.ends)

    def _talks(self) -> bool:
        """Tell whether the ranks have begun to communicate: their script uses torch, and has imported it."""
        assert self._board is not None
        watches = [self._board.watch(index) for index in range(self._board.num_slots)]
        return all(watch is not None and watch.num_collectives > 0 for watch in watches)

    def _settled_ends(self, workers: Workers) -> list[RankEnd]:
        assert self._ranks is not None
        return settled(workers.ends, self._ranks, self.preemption.check)

    def _stop_workers(self, worker_group: WorkerGroup, *_args: object, **_kwargs: object) -> None:
        # torch 2.7 passes is_restart as well.
        if self._workers is not None:
            self._workers.stop(_STOP_SIGNAL, grace=_GRACE_AFTER_FAILURE, is_impatient=self._is_interrupted)
            self._workers = None

    def _shutdown(self, *_args: object, **_kwargs: object) -> None:
        """Stop what still runs at the end of ``run``: nothing, unless it ends by an exception."""
        if self._workers is None or all(code is not None for code in self._workers.exit_codes()):
            return
        number: int = _STOP_SIGNAL
        try:
            self._interrupts.check()
        except Interrupted as stop:
            number = stop.number  # a script that saves at Ctrl-C, or at the scheduler's SIGTERM, sees that signal
            if self._node is not None:  # before its ranks end: the others would take them for the cause
                self._node.leave(f"interrupted by {signal.Signals(number).name}", 128 + number)
        if self.preemption.is_asked:
            number = signal.SIGKILL  # the second one: now
        seen = self._interrupts.count
        self._workers.stop(number, grace=_GRACE_AFTER_SIGNAL, is_impatient=lambda: self._interrupts.count > seen)
        self._workers = None

    def _is_interrupted(self) -> bool:
        return self._interrupts.count > 0


@final
class _ServedRanks:
    """What this node answers for its ranks in a round; called in threads of the connection."""

    def __init__(self, board: Board, workers: Workers, directory: Path, ranks: list[int]) -> None:
        self._board, self._workers, self._numbers = board, workers, ranks
        # Of its own: a signal to the launcher is the main thread's to see.
        self._ranks = LocalRanks(board, directory=directory, running=workers.running, check=lambda: None)

    def answer(self, kind: str, content: Mapping[str, Any]) -> Any:
        """Return the answer to a question."""
        if kind == "views":
            return encode(self._ranks.views())
        if kind == "ask":
            return encode(self._ranks.ask())
        if kind == "stack":
            return encode(self._ranks.stack_of(decode(RankView, content["view"])))
        if kind == "ends":
            return encode(self._workers.ends())
        if kind == "times":
            return encode(times_on(self._board, self._numbers))
        if kind == "command":
            self._board.write_command(int(content["word"]))
            return True
        if kind == "stands":
            return list(zip(self._numbers, self._board.read_stands()))
        raise LaunchError(f"there is no question {kind!r}")

    def keep(self, report: str) -> None:
        """Put a report beside the stacks."""
        self._ranks.keep(report)


def _failed(group: WorkerGroup, ends: list[RankEnd]) -> RunResult:
    ids = {worker.global_rank: worker for worker in group.workers}
    # Torch asks for one at least; after a stall nobody has failed.
    failed = [end for end in ends if end.failed] or ends[:1]
    return RunResult(
        state=WorkerState.FAILED,
        failures={
            end.rank: ProcessFailure(ids[end.rank].local_rank, ids[end.rank].id, end.exit_code or 1, "")
            for end in failed
        },
    )
