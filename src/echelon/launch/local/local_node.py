"""The node for a run on a single machine."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, final

from echelon.base.errors import LaunchError
from echelon.base.messages.terminal import say
from echelon.diagnose.stall import Stall
from echelon.launch.failures.failure import RankEnd, exit_status, explain, first_failure
from echelon.launch.interrupts import Interrupts
from echelon.launch.local.goodput_recorder import first_sign
from echelon.launch.local.ranks import LocalRanks, wait_for_verdict
from echelon.launch.node import AttemptRanks, GenerationResult, Node, NodeGeneration, RunRules
from echelon.launch.preemption import PreemptionRequest, report_preempted, stop_barrier_timeout
from echelon.launch.supervisor import STALLED, Supervisor
from echelon.status.stop_barrier import EXIT_CODE, BarrierCoordinator, BarrierOutcome

if TYPE_CHECKING:
    from echelon.launch.loopback_store import LoopbackStore

__all__ = ["LocalNode"]


@final
class LocalNode(Node):
    """A run's only node.

    Args:
        num_processes: world size.
        port: port of the store; 0 for any free port.
        rules: the rules that the user set.
        interrupts: the signals that the launcher has received.
    """

    def __init__(self, *, num_processes: int, port: int, rules: RunRules, interrupts: Interrupts) -> None:
        self._num_processes, self._port, self._rules = num_processes, port, rules
        self._preemption = PreemptionRequest(interrupts, rules.preemption_grace, self._start_barrier)
        self._barrier: BarrierCoordinator | None = None
        self._timeout: LaunchError | None = None
        self._number = -1
        self._store: LoopbackStore | None = None
        self._attempt: AttemptRanks | None = None
        self._ranks: LocalRanks | None = None
        self._supervisor: Supervisor | None = None
        self._result = GenerationResult(then="done")
        self._stall: Stall | None = None
        self._ends: list[RankEnd] = []

    def next_generation(self) -> NodeGeneration:
        """Open a new store on loopback, because in the old one gloo would find the addresses of dead ranks."""
        from echelon.launch.loopback_store import LoopbackStore  # noqa: PLC0415 - imports torch

        self._number += 1
        if self._number:
            if self._stall is None:  # the supervisor has reported a stall
                self._print_failure()
            say(f"restart {self._number} of {self._rules.max_restarts}")
        self._stall, self._store = None, None  # closes the old socket first, because the port may be fixed
        self._store = LoopbackStore(self._port)
        return NodeGeneration(
            number=self._number,
            group_rank=0,
            group_world_size=1,
            first_rank=0,
            world_size=self._num_processes,
            port=self._store.port,
            num_restarts=self._number,
        )

    def watch(self, ranks: AttemptRanks | None) -> None:
        """Watch the ranks in a new attempt."""
        self._attempt = ranks
        self._preemption.watch(None if ranks is None else ranks.board)
        if ranks is not None:
            self._ranks = LocalRanks(
                ranks.board, directory=ranks.directory, running=ranks.workers.running, check=self._preemption.check
            )
            self._supervisor = Supervisor(self._ranks, directory=self._rules.directory, rules=self._rules.stall)

    @property
    def may_restart(self) -> bool:
        """Whether restarts remain and the run is not being preempted."""
        return self._number < self._rules.max_restarts and not self.is_preempting

    @property
    def is_preempting(self) -> bool:
        """Whether the ranks have been asked to save and exit."""
        return self._barrier is not None

    def poll(self) -> GenerationResult | None:
        """Return how the generation ended, or None if it is still running."""
        assert self._attempt is not None
        self._preemption.check()
        codes = self._attempt.workers.exit_codes()
        if self._barrier is not None and all(code in (None, 0, EXIT_CODE) for code in codes):
            result = self._poll_barrier(self._barrier, codes)
        elif all(code == 0 for code in codes):
            result = GenerationResult(then="done")
        elif all(code in (None, 0) for code in codes):
            result = self._poll_stall()
        else:
            result = self._wait_for_failure(self._attempt)
        self._result = result or self._result
        return result

    def _start_barrier(self, requester: str) -> None:
        assert self._attempt is not None
        grace_s = self._rules.preemption_grace.total_seconds()
        say(
            f"{requester}: all ranks save at the same step and exit (within {grace_s:g} s; a second signal stops "
            "them immediately)"
        )
        self._rules.record.event("preemption", f"{requester}: all ranks save at the same step and exit")
        self._barrier = BarrierCoordinator(self._attempt.board, grace_s)

    def _poll_barrier(self, barrier: BarrierCoordinator, codes: Sequence[int | None]) -> GenerationResult | None:
        """Return how a preempted run without a failed rank ended, or None if it is still running."""
        assert self._attempt is not None
        if None not in codes:
            # If the ranks finished their last step before they could stop, the run is done.
            is_saved = EXIT_CODE in codes or barrier.poll() is BarrierOutcome.MET
            return GenerationResult(then="preempted" if is_saved else "done")
        if barrier.poll() is not BarrierOutcome.LATE:
            return None
        board = self._attempt.board
        positions = dict(enumerate(board.read_positions()))
        notes = {rank: board.note(rank) for rank in positions}
        self._timeout = stop_barrier_timeout(self._preemption.requester, self._rules.preemption_grace, positions, notes)
        return GenerationResult(then="preempted")

    def _poll_stall(self) -> GenerationResult | None:
        assert self._supervisor is not None
        stall = self._supervisor.poll()
        on_stall = self._rules.stall.on_stall
        if stall is not None and stall.is_alarm:
            culprit = next(iter(stall.culprits or stall.ranks), None)
            self._rules.record.event("stall", stall.what, rank=culprit, step=self._last_step())
        if stall is None or not stall.is_alarm or on_stall == "report":
            return None
        self._stall = stall
        noticed_ns = time.monotonic_ns()
        return GenerationResult(
            then="restart" if on_stall == "restart" and self.may_restart else "stop",
            failed_ns=noticed_ns - int(stall.waited_s * 1e9),
            noticed_ns=noticed_ns,
        )

    def _wait_for_failure(self, attempt: AttemptRanks) -> GenerationResult:
        assert self._ranks is not None
        noticed_ns = time.monotonic_ns()
        self._ends = wait_for_verdict(attempt.workers.ends, self._ranks, self._preemption.check)
        failed_ns, first = first_sign(self._ends), first_failure(self._ends)
        self._rules.record.event(
            "failure",
            explain(self._ends, logs=self._rules.logs)[0].partition("\n")[0],
            rank=None if first is None else first.rank,
            step=self._last_step(),
            at_ns=noticed_ns if failed_ns is None else failed_ns,
        )
        return GenerationResult(
            then="restart" if self.may_restart else "stop", failed_ns=failed_ns, noticed_ns=noticed_ns
        )

    def _last_step(self) -> int | None:
        """Return the last optimizer step that a rank has finished, or None if no rank has recorded one."""
        assert self._attempt is not None
        board = self._attempt.board
        return max((note.step for i in range(board.num_slots) if (note := board.note(i)) is not None), default=None)

    def connect_to_store(self) -> socket.socket:
        """Raise an error, because a single machine's store is always local."""
        raise AssertionError("a run on one machine has a local store")

    def leave(self, reason: str, code: int) -> None:
        """Do nothing, because there are no other machines."""

    def report_end(self) -> int:
        """Print how the run ended, and return the launcher's exit code."""
        self._store = None
        if self._stall is not None:
            return STALLED
        if self._result.then == "preempted":
            return report_preempted(self._preemption.requester, self._timeout)
        if self._result.then == "done":
            return 0
        self._print_failure()
        return exit_status(self._ends)

    def _print_failure(self) -> None:
        what, where, do = explain(self._ends, logs=self._rules.logs)
        say(LaunchError(what, where=where, do=do), kind="error")
