"""Runs this machine's ranks: starts them for each generation, watches them, and stops them when it ends.

torchrun's elastic agent is not used: it numbers ranks and agrees on ends through a store, which the coordinator does, it takes up to
30 s to stop ranks, and it replaces the launcher's signal handlers (docs/architecture.md).
"""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, final

from echelon.base import environ
from echelon.base.messages.translation import gettext as _
from echelon.launch.interrupts import Interrupted, Interrupts
from echelon.launch.job_token import TOKEN_FILE_VARIABLE, TOKEN_VARIABLE
from echelon.launch.local.goodput_recorder import GOODPUT_FILE, GoodputRecorder, GoodputReport, times_on
from echelon.launch.local.guardian import LAUNCHER_VARIABLE
from echelon.launch.local.output import Outputs
from echelon.launch.local.parents import Guardian, own_identity
from echelon.launch.local.processes import Workers
from echelon.launch.local.warm_start import WARM_VARIABLE, WarmStarter, own_warm_server
from echelon.launch.node import AttemptRanks, GenerationResult, Node, NodeGeneration, RunOver, RunRules
from echelon.launch.script import Script
from echelon.status.board import Board
from echelon.world.launch_variables import BOARD_VARIABLE, NO_RECORD_VARIABLE, RECORD_VARIABLE

if TYPE_CHECKING:
    from echelon.launch.multinode.connections import Tunnel

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
_LOOPBACK = "127.0.0.1"


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
    agent = _Agent(job, interrupts, node)
    try:
        agent.run()
    except RunOver:
        pass  # the normal end of a run for a waiting node; its report_end() reports how the run ended
    finally:
        goodput = agent.close()
    return goodput


@final
class _Agent:
    """The ranks of one machine, in one attempt after another."""

    def __init__(self, job: Job, interrupts: Interrupts, node: Node) -> None:
        self._job, self._interrupts, self._node = job, interrupts, node
        self._attempt = -1
        self._workers: Workers | None = None
        self._board: Board | None = None
        self._tunnel: Tunnel | None = None
        server = own_warm_server()
        self._warm = WarmStarter(None if server is None else int(server))
        self._guardian = Guardian()
        self._environments: dict[int, dict[str, str]] = {}
        self._goodput = GoodputRecorder(job.rules.directory / GOODPUT_FILE, began_ns=job.rules.began_ns)

    def run(self) -> None:
        """Run generations until one of them is the last.

        Raises:
            Interrupted: the launcher received a signal.
            LaunchError: the processes could not be started.
            RunOver: the run ended while this machine waited for a generation.
        """
        try:
            while True:
                generation = self._node.next_generation()
                workers = self._start(generation)
                result = self._watch(generation)
                self._end_attempt(failed_ns=result.failed_ns, noticed_ns=result.noticed_ns or time.monotonic_ns())
                if result.then == "preempted" and None in workers.exit_codes():
                    workers.stop(signal.SIGKILL, grace=timedelta())  # not all ranks reached the stop barrier in time
                if result.then in ("done", "preempted"):
                    workers.drain()
                    return
                self._stop(_STOP_SIGNAL, _GRACE_AFTER_FAILURE)
                if result.then == "stop":
                    return
        finally:
            self._stop_after_error()

    def close(self) -> GoodputReport:
        """Stop the helper processes, remove the last attempt's board, and return the goodput."""
        self._warm.close()
        self._guardian.close()
        self._end_attempt(noticed_ns=time.monotonic_ns())  # if the attempt was interrupted
        self._end_connections()
        return self._goodput.finish()

    def _end_attempt(self, *, failed_ns: int | None = None, noticed_ns: int) -> None:
        if self._board is not None:
            times = times_on(self._board, self._rank_numbers)
            self._goodput.end_attempt(times, failed_ns=failed_ns, noticed_ns=noticed_ns)
            breakdown = self._goodput.breakdown()
            self._job.rules.record.breakdown(wall_s=breakdown.wall_s, seconds=breakdown.seconds)

    @property
    def _rank_numbers(self) -> list[int]:
        return [int(variables["RANK"]) for variables in self._environments.values()]

    def _end_connections(self) -> None:
        """Close what the last attempt's ranks were connected with: their board, and the tunnel to their store."""
        self._node.watch(None)
        if self._board is not None:
            self._board.remove()
            self._board = None
        if self._tunnel is not None:
            self._tunnel.close()
            self._tunnel = None

    def _start(self, generation: NodeGeneration) -> Workers:
        job = self._job
        # A restarted rendezvous host counts from 0.
        self._attempt = max(generation.number, self._attempt + 1)
        self._interrupts.check()
        directory = job.rules.directory / f"attempt_{self._attempt}"
        directory.mkdir(parents=True)
        self._end_connections()
        port = generation.port
        if not port:
            from echelon.launch.multinode.connections import Tunnel  # noqa: PLC0415 - only for several machines

            self._tunnel = Tunnel(self._node.open_store)
            port = self._tunnel.port
        board = self._board = Board(job.num_processes, folder=str(directory))
        board.set_grace(int(job.rules.preemption_grace.total_seconds() * 1000))
        workers = self._workers = Workers(
            job.script,
            directory=directory,
            outputs=job.outputs,
            board=board,
            warm=self._warm,
            guardian=self._guardian,
            check=self._interrupts.check,
        )
        self._environments = self._rank_environments(generation, port, directory, board)
        self._goodput.start_attempt()
        workers.start(self._environments)
        self._node.watch(AttemptRanks(board=board, workers=workers, directory=directory, numbers=self._rank_numbers))
        job.rules.record.start_attempt(
            self._attempt,
            board=board.path,
            num_processes=generation.world_size,
            num_machines=generation.group_world_size,
            run_id=generation.run_name,
        )
        return workers

    def _rank_environments(
        self, generation: NodeGeneration, port: int, directory: Path, board: Board
    ) -> dict[int, dict[str, str]]:
        """Map each local rank to its environment: the variables that torchrun sets, and the job's own variables."""
        common = {
            **environ.snapshot(),
            **self._job.environment,
            "GROUP_RANK": str(generation.group_rank),
            "GROUP_WORLD_SIZE": str(generation.group_world_size),
            "LOCAL_WORLD_SIZE": str(self._job.num_processes),
            "WORLD_SIZE": str(generation.world_size),
            "MASTER_ADDR": _LOOPBACK,
            "MASTER_PORT": str(port),
            "ROLE_NAME": "default",
            "ROLE_WORLD_SIZE": str(generation.world_size),
            "TORCHELASTIC_MAX_RESTARTS": str(self._job.rules.max_restarts),
            "TORCHELASTIC_RESTART_COUNT": str(generation.num_restarts),
            "TORCHELASTIC_RUN_ID": self._job.run_id,
            # Ranks join the store as clients; otherwise, rank 0 would listen on all addresses.
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            LAUNCHER_VARIABLE: own_identity(),
        }
        common.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
        if (folder := self._job.rules.record.folder) is not None:
            common[RECORD_VARIABLE] = f"{self._attempt}:{folder}"
        else:
            common[NO_RECORD_VARIABLE] = "1"
        for own in (TOKEN_VARIABLE, TOKEN_FILE_VARIABLE, WARM_VARIABLE):
            common.pop(own, None)  # programs may print their environment, which must not hold a secret
        environments = {}
        for local_rank in range(self._job.num_processes):
            rank = generation.first_rank + local_rank
            environments[local_rank] = {
                **common,
                "RANK": str(rank),
                "LOCAL_RANK": str(local_rank),
                "ROLE_RANK": str(rank),
                BOARD_VARIABLE: f"{board.path}:{local_rank}",
                # For scripts that use torch's @record decorator.
                "TORCHELASTIC_ERROR_FILE": str(directory / f"rank_{rank}" / "torchelastic_error.json"),
            }
        return environments

    def _watch(self, generation: NodeGeneration) -> GenerationResult:
        """Wait until the generation ends."""
        while (result := self._node.poll(self._job.monitor_interval)) is None:
            if self._job.is_warm and generation.may_restart and not self._node.is_preempting:
                self._prepare_warm()
        return result

    def _prepare_warm(self) -> None:
        """Let the warm server import torch after all ranks have called a collective; until then, they need the CPU."""
        assert self._board is not None
        watches = [self._board.watch(index) for index in range(self._board.num_slots)]
        if not all(watch is not None and watch.num_collectives > 0 for watch in watches):
            return  # a rank may not even have imported torch
        uses_echelon = self._board.note(0) is not None
        modules = (*_TORCH_MODULES, *_ECHELON_MODULES) if uses_echelon else _TORCH_MODULES
        self._warm.prepare(next(iter(self._environments.values())), modules)

    def _stop(self, number: int, grace: timedelta, *, num_signals: int = 0) -> None:
        """Send signal ``number`` to the ranks; the launcher does not wait once it has received more than ``num_signals``."""
        if self._workers is not None:
            self._workers.stop(number, grace=grace, is_impatient=lambda: self._interrupts.count > num_signals)
            self._workers = None

    def _stop_after_error(self) -> None:
        """Stop any processes that are still running when ``run`` ends with an exception."""
        if self._workers is None or all(code is not None for code in self._workers.exit_codes()):
            return
        number: int = _STOP_SIGNAL
        try:
            self._interrupts.check()
        except Interrupted as stop:
            number = stop.number  # scripts may handle Ctrl-C or the scheduler's SIGTERM by saving
            # Before the ranks end, because the other machines would report them as the cause.
            self._node.leave(_("interrupted by {name}", name=signal.Signals(number).name), 128 + number)
        if self._node.is_preempting:
            number = signal.SIGKILL  # a second signal stops the ranks immediately
        self._stop(number, _GRACE_AFTER_SIGNAL, num_signals=self._interrupts.count)
