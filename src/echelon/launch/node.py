"""The interface between the agent and a run on one machine (``LocalNode``) or several (``MultinodeNode``)."""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Literal, TypeAlias

from echelon.launch.local.goodput_recorder import GoodputReport
from echelon.launch.local.processes import Workers
from echelon.launch.local.run_recorder import RunRecorder
from echelon.launch.supervisor import StallRules
from echelon.status.board import Board

__all__ = ["AttemptRanks", "GenerationResult", "Node", "NodeGeneration", "RunOver", "RunRules", "Then"]

Then: TypeAlias = Literal["done", "restart", "stop", "preempted", "lost"]
"""What follows a generation. ``lost`` means that this node has lost the coordinator and is trying to rejoin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRules:
    """The rules that the user sets for a run, on one machine or several."""

    max_restarts: int
    stall: StallRules
    preemption_grace: timedelta
    """How long preempted ranks may take to agree on a step; if zero, they are stopped immediately."""
    logs: str
    """For reports: where the logs are, or how to get them."""
    directory: Path
    """Directory for records and logs, with a subdirectory for each attempt and rank."""
    began_ns: int
    """``time.monotonic_ns()`` when the launcher started."""
    record: RunRecorder
    """The launcher's record of the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGeneration:
    """One start of all ranks, as seen by one node."""

    number: int
    group_rank: int
    group_world_size: int
    first_rank: int
    world_size: int
    port: int
    """The store's port if the store is on this machine, otherwise 0."""
    num_restarts: int
    run_name: str = ""
    """The name that all machines record for the run; empty on a single machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationResult:
    """How a generation ended."""

    then: Then
    code: int = 0
    """The launcher's exit code if the run ends."""
    failed_ns: int | None = field(default=None, compare=False)
    """``time.monotonic_ns()`` at the first sign of a failure; None if nothing failed."""
    noticed_ns: int | None = field(default=None, compare=False)
    """``time.monotonic_ns()`` when the failure was detected; None for the current time."""


class RunOver(BaseException):  # not an Exception, because it is not a failure
    """Raised if the run ends while this node waits for a generation; ``result`` says how it ended."""

    def __init__(self, result: GenerationResult) -> None:
        super().__init__(result)
        self.result = result


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRanks:
    """One attempt's running ranks on this machine."""

    board: Board
    workers: Workers
    directory: Path
    numbers: list[int]
    """Global ranks, in the order of the board's slots."""


class Node(ABC):
    """Decides when a generation starts and ends on this machine, and the launcher's exit code."""

    goodput: GoodputReport | None = None
    """Goodput of all machines, set on the rendezvous host at the end of the run."""

    @abstractmethod
    def next_generation(self) -> NodeGeneration:
        """Wait for the next generation.

        Raises:
            Interrupted: the launcher received a signal.
            LaunchError: this node cannot join the run.
            RunOver: no generation follows.
        """

    @abstractmethod
    def watch(self, ranks: AttemptRanks | None) -> None:
        """Watch the ranks in a new attempt; None stops watching the last attempt, whose board is being closed."""

    @abstractmethod
    def poll(self) -> GenerationResult | None:
        """Return how the generation ended, or None if it is still running.

        Raises:
            Interrupted: a signal stopped the run.
        """

    @property
    @abstractmethod
    def may_restart(self) -> bool:
        """Whether another generation may follow this one."""

    @property
    @abstractmethod
    def is_preempting(self) -> bool:
        """Whether the ranks have been asked to save and exit."""

    @abstractmethod
    def connect_to_store(self) -> socket.socket:
        """Open a connection to this generation's store if it is on another machine."""

    @abstractmethod
    def leave(self, reason: str, code: int) -> None:
        """Notify any other machines that this machine is leaving the run."""

    @abstractmethod
    def report_end(self) -> int:
        """Print how the run ended, unless this has been reported already, and return the launcher's exit code."""
