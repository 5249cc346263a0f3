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
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from echelon.base import environ
from echelon.launch.failure import RankEnd, explain, is_settled
from echelon.launch.interrupts import Interrupted, Interrupts
from echelon.launch.output import Outputs
from echelon.launch.processes import Workers
from echelon.launch.rendezvous import LoopbackRendezvous
from echelon.launch.script import Script

__all__ = ["Job", "run_job"]

# A rank that fails takes its exit up to 1.7 s to show, its victims' errors come before: who failed is known after this.
_STRAGGLERS = timedelta(seconds=1.5)
_SETTLE_POLL = timedelta(milliseconds=20)
# Victims of another rank's failure have nothing to save; the short grace lets ordinary cleanup (temporary files) happen.
_GRACE_AFTER_FAILURE = timedelta(seconds=1)
# The user or the scheduler asked: scripts may save, but all is over within 5 s.
_GRACE_AFTER_SIGNAL = timedelta(seconds=3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Everything that is needed to run a script on this machine."""

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


def run_job(job: Job, interrupts: Interrupts) -> list[RankEnd]:
    """Run ``job`` to its end and return how the ranks of its last attempt ended.

    Raises:
        Interrupted: a signal came; the processes are stopped.
        LaunchError: the processes cannot be started.
    """
    spec = WorkerSpec(
        role="default",
        local_world_size=job.num_processes,
        rdzv_handler=LoopbackRendezvous(run_id=job.run_id, port=job.port),
        entrypoint=job.script.target,  # for torch's event log; _start_workers knows how to run it
        max_restarts=job.max_restarts,
        monitor_interval=job.monitor_interval.total_seconds(),
    )
    agent = _Agent(spec, job, interrupts)
    agent.run()
    return agent.ends


@final
class _Agent(SimpleElasticAgent):
    """The four members that torch leaves to an agent.

    Not ``LocalElasticAgent``: that one stops ranks for up to 30 s, in three places, and takes over our signals.
    """

    def __init__(self, spec: WorkerSpec, job: Job, interrupts: Interrupts) -> None:
        super().__init__(spec, exit_barrier_timeout=5)
        self._job = job
        self._interrupts = interrupts
        self._workers: Workers | None = None
        self.ends: list[RankEnd] = []

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        job = self._job
        attempt = job.max_restarts - self._remaining_restarts
        if attempt:
            what, _, _ = explain(self.ends, logs=job.logs)
            print(f"echelon: {what}\n  restart {attempt} of {job.max_restarts}", file=sys.stderr, flush=True)
        self._interrupts.check()
        directory = job.directory / f"attempt_{attempt}"
        self._workers = Workers(job.script, directory=directory, outputs=job.outputs)
        return self._workers.start(self._environments(worker_group, attempt, directory))

    def _environments(self, group: WorkerGroup, attempt: int, directory: Path) -> dict[int, dict[str, str]]:
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
            "TORCHELASTIC_RESTART_COUNT": str(attempt),
            "TORCHELASTIC_RUN_ID": self._job.run_id,
            "TORCHELASTIC_USE_AGENT_STORE": str(group.spec.rdzv_handler.use_agent_store),
        }
        common.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
        return {
            worker.local_rank: {
                **common,
                "RANK": str(worker.global_rank),
                "LOCAL_RANK": str(worker.local_rank),
                "WORLD_SIZE": str(worker.world_size),
                "ROLE_RANK": str(worker.role_rank),
                "ROLE_WORLD_SIZE": str(worker.role_world_size),
                # For scripts that decorate their main with torch's @record.
                "TORCHELASTIC_ERROR_FILE": str(directory / f"rank_{worker.global_rank}" / "torchelastic_error.json"),
            }
            for worker in group.workers
        }

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._interrupts.check()
        assert self._workers is not None
        codes = self._workers.exit_codes()
        if all(code == 0 for code in codes):
            self._workers.drain()
            self.ends = self._workers.ends()
            return RunResult(state=WorkerState.SUCCEEDED, return_values=dict.fromkeys(e.rank for e in self.ends))
        if all(code in (None, 0) for code in codes):
            return RunResult(state=WorkerState.HEALTHY)
        self.ends = self._settled_ends(self._workers)
        self._stop_workers(worker_group)
        ids = {worker.global_rank: worker for worker in worker_group.workers}
        failures = {
            end.rank: ProcessFailure(ids[end.rank].local_rank, ids[end.rank].id, end.exit_code or 1, "")
            for end in self.ends
            if end.failed
        }
        return RunResult(state=WorkerState.FAILED, failures=failures)

    def _settled_ends(self, workers: Workers) -> list[RankEnd]:
        deadline = time.monotonic() + _STRAGGLERS.total_seconds()
        while not is_settled(ends := workers.ends()) and time.monotonic() < deadline:
            time.sleep(_SETTLE_POLL.total_seconds())
            self._interrupts.check()
        return ends

    def _stop_workers(self, worker_group: WorkerGroup, *_args: object, **_kwargs: object) -> None:
        # torch 2.7 passes is_restart as well.
        if self._workers is not None:
            self._workers.stop(signal.SIGTERM, grace=_GRACE_AFTER_FAILURE, is_impatient=self._is_interrupted)
            self._workers = None

    def _shutdown(self, *_args: object, **_kwargs: object) -> None:
        """Stop what still runs at the end of ``run``: nothing, unless it ends by an exception."""
        if self._workers is None or all(code is not None for code in self._workers.exit_codes()):
            return
        number: int = signal.SIGTERM
        try:
            self._interrupts.check()
        except Interrupted as stop:
            number = stop.number  # a script that saves at Ctrl-C, or at the scheduler's SIGTERM, sees that signal
        seen = self._interrupts.count
        self._workers.stop(number, grace=_GRACE_AFTER_SIGNAL, is_impatient=lambda: self._interrupts.count > seen)
        self._workers = None

    def _is_interrupted(self) -> bool:
        return self._interrupts.count > 0
