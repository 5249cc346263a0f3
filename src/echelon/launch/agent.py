"""The launcher's elastic agent: torch manages the generations; echelon starts, monitors and stops the ranks."""

from __future__ import annotations

import signal
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
from echelon.launch.failures.failure import RankEnd
from echelon.launch.interrupts import Interrupted, Interrupts
from echelon.launch.job_token import TOKEN_FILE_VARIABLE, TOKEN_VARIABLE
from echelon.launch.local.goodput_recorder import GOODPUT_FILE, GoodputRecorder, GoodputReport, times_on
from echelon.launch.local.guardian import LAUNCHER_VARIABLE
from echelon.launch.local.output import Outputs
from echelon.launch.local.parents import Guardian, own_identity
from echelon.launch.local.processes import Workers
from echelon.launch.local.warm_start import WARM_VARIABLE, WarmStarter, own_warm_server
from echelon.launch.multinode.rendezvous import NodeRendezvous
from echelon.launch.node import AttemptRanks, Node, RunOver, RunRules
from echelon.launch.script import Script
from echelon.status.board import Board
from echelon.world.launch_variables import BOARD_VARIABLE, NO_RECORD_VARIABLE, RECORD_VARIABLE

__all__ = ["Job", "run_job"]

# Modules that the warm server imports. The first optimizer imports torch._dynamo, which takes as long as importing torch.
_TORCH_MODULES = ("torch", "torch.distributed", "torch._dynamo")
# Imported for programs that use echelon, which are those that write notes on the board.
_ECHELON_MODULES = (
    "echelon.accelerator.accelerator",
    "echelon.trainer",
    "echelon.checkpoint.save",
    "safetensors.torch",
)
# Not SIGTERM, which means preemption; ranks that stop because another rank failed do not save. The short grace period lets
# signal handlers clean up.
_STOP_SIGNAL = signal.SIGHUP if hasattr(signal, "SIGHUP") else signal.SIGTERM
_GRACE_AFTER_FAILURE = timedelta(seconds=1)
# After a signal from the user or the scheduler, scripts may save, but the run ends within 5 s.
_GRACE_AFTER_SIGNAL = timedelta(seconds=3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One machine's part of a run."""

    script: Script
    num_processes: int
    environment: Mapping[str, str]
    """Environment variables for every rank, in addition to the launcher's own environment."""
    outputs: Outputs
    run_id: str
    monitor_interval: timedelta
    is_warm: bool = True
    """Whether restarted ranks are forked from a process that has already imported torch, rather than started as new
    programs."""
    rules: RunRules


def run_job(job: Job, interrupts: Interrupts, node: Node) -> GoodputReport:
    """Run ``job`` until it ends and return this machine's goodput. ``node`` reports how the run ended.

    Args:
        job: this machine's part of the run.
        interrupts: the signals that the launcher has received.
        node: the interface to the run.

    Raises:
        Interrupted: the launcher received a signal and stopped the processes.
        LaunchError: the processes could not be started.
    """
    handler = NodeRendezvous(node, job.run_id)
    spec = WorkerSpec(
        role="default",
        local_world_size=job.num_processes,
        rdzv_handler=handler,
        entrypoint=job.script.target,  # for torch's event log; _start_workers knows how to run it
        max_restarts=job.rules.max_restarts,
        monitor_interval=job.monitor_interval.total_seconds(),
    )
    agent = _Agent(spec, job, interrupts, node, handler)
    try:
        agent.run()
    except RunOver:
        pass  # the normal end of a run for a waiting node; its report_end() reports how the run ended
    finally:
        goodput = agent.close()
        handler.shutdown()
    return goodput


@final
class _Agent(SimpleElasticAgent):
    """Implements torch's abstract elastic agent.

    It does not derive from ``LocalElasticAgent``, which takes up to 30 s to stop ranks and replaces our signal
    handlers.
    """

    def __init__(self, spec: WorkerSpec, job: Job, interrupts: Interrupts, node: Node, handler: NodeRendezvous) -> None:
        super().__init__(spec, exit_barrier_timeout=5)
        self._job, self._interrupts, self._node, self._handler = job, interrupts, node, handler
        self._attempt = -1
        self._workers: Workers | None = None
        self._board: Board | None = None
        server = own_warm_server()
        self._warm = WarmStarter(None if server is None else int(server))
        self._guardian = Guardian()
        self._environments: dict[int, dict[str, str]] = {}
        self._goodput = GoodputRecorder(job.rules.directory / GOODPUT_FILE, began_ns=job.rules.began_ns)

    def close(self) -> GoodputReport:
        """Stop the helper processes, remove the last attempt's board, and return the goodput."""
        self._warm.close()
        self._guardian.close()
        self._end_attempt(noticed_ns=time.monotonic_ns())  # if the attempt was interrupted
        self._remove_board()
        return self._goodput.finish()

    def _end_attempt(self, *, failed_ns: int | None = None, noticed_ns: int) -> None:
        if self._board is not None:
            times = times_on(self._board, self._rank_numbers)
            self._goodput.end_attempt(times, failed_ns=failed_ns, noticed_ns=noticed_ns)
            self._job.rules.record.breakdown(self._goodput.breakdown())

    @property
    def _rank_numbers(self) -> list[int]:
        return [int(variables["RANK"]) for variables in self._environments.values()]

    def _remove_board(self) -> None:
        self._node.watch(None)
        if self._board is not None:
            self._board.close()
            self._board = None

    def _assign_worker_ranks(
        self, store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        """Assign the ranks that the node chose; torch would use a store and wait minutes for a lost agent."""
        first, size = self._handler.generation.first_rank, self._handler.generation.world_size
        return [
            Worker(local_rank=i, global_rank=first + i, role_rank=first + i, world_size=size, role_world_size=size)
            for i in range(spec.local_world_size)
        ]

    def _exit_barrier(self) -> None:
        """Do nothing, because a generation ends on all machines at the same time."""

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        job, generation = self._job, self._handler.generation
        # A restarted rendezvous host counts from 0.
        self._attempt = max(generation.number, self._attempt + 1)
        self._interrupts.check()
        directory = job.rules.directory / f"attempt_{self._attempt}"
        directory.mkdir(parents=True)
        self._remove_board()
        self._board = Board(job.num_processes, folder=str(directory))
        self._board.set_grace(int(job.rules.preemption_grace.total_seconds() * 1000))
        self._workers = Workers(
            job.script,
            directory=directory,
            outputs=job.outputs,
            board=self._board,
            warm=self._warm,
            guardian=self._guardian,
            check=self._interrupts.check,
        )
        self._environments = self._rank_environments(worker_group, generation.num_restarts, directory, self._board)
        self._goodput.start_attempt()
        started = self._workers.start(self._environments)
        ranks = AttemptRanks(board=self._board, workers=self._workers, directory=directory, numbers=self._rank_numbers)
        self._node.watch(ranks)
        job.rules.record.start_attempt(
            self._attempt,
            board=self._board.path,
            num_processes=generation.world_size,
            num_machines=generation.group_world_size,
            run_id=generation.run_name or None,
        )
        return started

    def _rank_environments(
        self, group: WorkerGroup, num_restarts: int, directory: Path, board: Board
    ) -> dict[int, dict[str, str]]:
        """Map each local rank to its environment: the variables that torchrun sets, and the job's own variables."""
        common = {
            **environ.snapshot(),
            **self._job.environment,
            "GROUP_RANK": str(group.group_rank),
            "GROUP_WORLD_SIZE": str(group.group_world_size),
            "LOCAL_WORLD_SIZE": str(self._job.num_processes),
            "MASTER_ADDR": str(group.master_addr),
            "MASTER_PORT": str(group.master_port),
            "ROLE_NAME": group.spec.role,
            "TORCHELASTIC_MAX_RESTARTS": str(self._job.rules.max_restarts),
            "TORCHELASTIC_RESTART_COUNT": str(num_restarts),
            "TORCHELASTIC_RUN_ID": self._job.run_id,
            "TORCHELASTIC_USE_AGENT_STORE": str(group.spec.rdzv_handler.use_agent_store),
        }
        common.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
        if (folder := self._job.rules.record.folder) is not None:
            common[RECORD_VARIABLE] = f"{self._attempt}:{folder}"
        else:
            common[NO_RECORD_VARIABLE] = "1"
        for own in (TOKEN_VARIABLE, TOKEN_FILE_VARIABLE, WARM_VARIABLE):
            common.pop(own, None)  # programs may print their environment, which must not hold a secret
        return {
            worker.local_rank: {
                **common,
                "RANK": str(worker.global_rank),
                "LOCAL_RANK": str(worker.local_rank),
                "WORLD_SIZE": str(worker.world_size),
                BOARD_VARIABLE: f"{board.path}:{worker.local_rank}",
                LAUNCHER_VARIABLE: own_identity(),
                "ROLE_RANK": str(worker.role_rank),
                "ROLE_WORLD_SIZE": str(worker.role_world_size),
                # For scripts that use torch's @record decorator.
                "TORCHELASTIC_ERROR_FILE": str(directory / f"rank_{worker.global_rank}" / "torchelastic_error.json"),
            }
            for worker in group.workers
        }

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        assert self._workers is not None
        result = self._node.poll()
        if result is None:
            self._prepare_warm()
            return RunResult(state=WorkerState.HEALTHY)
        ends = self._workers.ends()
        self._end_attempt(failed_ns=result.failed_ns, noticed_ns=result.noticed_ns or time.monotonic_ns())
        if result.then == "preempted" and None in self._workers.exit_codes():
            self._workers.stop(signal.SIGKILL, grace=timedelta())  # not all ranks reached the stop barrier in time
        if result.then in ("done", "preempted"):
            self._workers.drain()
            return RunResult(state=WorkerState.SUCCEEDED, return_values=dict.fromkeys(end.rank for end in ends))
        self._remaining_restarts = 1 if result.then in ("restart", "lost") else 0
        self._stop_workers(worker_group)
        return _failed(worker_group, ends)

    def _prepare_warm(self) -> None:
        """Let the warm server import torch after all ranks have called a collective; until then, they need the CPU."""
        if not self._job.is_warm or not self._node.may_restart or not self._have_communicated():
            return
        assert self._board is not None
        uses_echelon = self._board.note(0) is not None
        modules = (*_TORCH_MODULES, *_ECHELON_MODULES) if uses_echelon else _TORCH_MODULES
        self._warm.prepare(next(iter(self._environments.values())), modules)

    def _have_communicated(self) -> bool:
        """Return whether all ranks have called a collective, which implies that they have imported torch."""
        assert self._board is not None
        watches = [self._board.watch(index) for index in range(self._board.num_slots)]
        return all(watch is not None and watch.num_collectives > 0 for watch in watches)

    def _stop_workers(self, worker_group: WorkerGroup, *_args: object, **_kwargs: object) -> None:
        # torch 2.7 also passes is_restart.
        if self._workers is not None:
            self._workers.stop(
                _STOP_SIGNAL, grace=_GRACE_AFTER_FAILURE, is_impatient=lambda: self._interrupts.count > 0
            )
            self._workers = None

    def _shutdown(self, *_args: object, **_kwargs: object) -> None:
        """Stop any processes that are still running when ``run`` ends with an exception."""
        if self._workers is None or all(code is not None for code in self._workers.exit_codes()):
            return
        number: int = _STOP_SIGNAL
        try:
            self._interrupts.check()
        except Interrupted as stop:
            number = stop.number  # scripts may handle Ctrl-C or the scheduler's SIGTERM by saving
            # Before the ranks end, because the other machines would report them as the cause.
            self._node.leave(f"interrupted by {signal.Signals(number).name}", 128 + number)
        if self._node.is_preempting:
            number = signal.SIGKILL  # a second signal stops the ranks immediately
        seen = self._interrupts.count
        self._workers.stop(number, grace=_GRACE_AFTER_SIGNAL, is_impatient=lambda: self._interrupts.count > seen)
        self._workers = None


def _failed(group: WorkerGroup, ends: list[RankEnd]) -> RunResult:
    ids = {worker.global_rank: worker for worker in group.workers}
    # torch requires at least one failure, but after a stall no rank has failed.
    failed = [end for end in ends if end.failed] or ends[:1]
    return RunResult(
        state=WorkerState.FAILED,
        failures={
            end.rank: ProcessFailure(ids[end.rank].local_rank, ids[end.rank].id, end.exit_code or 1, "")
            for end in failed
        },
    )
