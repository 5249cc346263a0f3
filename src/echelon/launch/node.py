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
from echelon.launch.supervisor import StallRules
from echelon.status.board import Board

__all__ = ["AttemptRanks", "GenerationResult", "Node", "NodeGeneration", "RunOver", "RunRules", "Then"]

Then: TypeAlias = Literal["done", "restart", "stop", "preempted", "lost"]
"""What follows a generation. ``lost`` means that this node lost the coordinator and tries to rejoin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRules:
    """Rules of a run that the user sets, on one machine or several."""

    max_restarts: int
    stall: StallRules
    preemption_grace: timedelta
    """Time the ranks get to agree on a step when preempted; with zero, they are stopped immediately."""
    logs: str
    """Location of the logs, or how to get logs, for reports."""
    directory: Path
    """Folder for records and logs, with a subfolder for each attempt and rank."""
    began_ns: int
    """``time.monotonic_ns()`` at the start of the launcher."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGeneration:
    """One start of all ranks, from the view of one node."""

    number: int
    group_rank: int
    group_world_size: int
    first_rank: int
    world_size: int
    port: int
    """Port of the store if the store is on this machine, else 0."""
    num_restarts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationResult:
    """How a generation ended."""

    then: Then
    code: int = 0
    """Exit code of the launcher if the run ends."""
    failed_ns: int | None = field(default=None, compare=False)
    """``time.monotonic_ns()`` of the first sign of a failure; None without a failure."""
    noticed_ns: int | None = field(default=None, compare=False)
    """``time.monotonic_ns()`` when the failure was detected; None for now."""


class RunOver(BaseException):  # not an Exception, because it is not a failure
    """Raised if the run ends while this node waits for a generation; ``result`` tells how it ended."""

    def __init__(self, result: GenerationResult) -> None:
        super().__init__(result)
        self.result = result


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRanks:
    """The running ranks of one attempt on this machine."""

    board: Board
    workers: Workers
    directory: Path
    numbers: list[int]
    """Global ranks in the order of the board's slots."""


class Node(ABC):
    """Decides when a generation starts and ends on this machine, and the launcher's exit code."""

    goodput: GoodputReport | None = None
    """Goodput of all machines; set at the end of the run on the rendezvous host."""

    @abstractmethod
    def next_generation(self) -> NodeGeneration:
        """Wait for the next generation.

        Raises:
            Interrupted: a signal was received.
            LaunchError: this node cannot join the run.
            RunOver: no generation follows.
        """

    @abstractmethod
    def watch(self, ranks: AttemptRanks | None) -> None:
        """Watch the ranks of a new attempt; None stops watching the last attempt, whose board is being closed."""

    @abstractmethod
    def poll(self) -> GenerationResult | None:
        """Return how the generation ended, or None if it continues.

        Raises:
            Interrupted: a signal stops the run.
        """

    @property
    @abstractmethod
    def may_restart(self) -> bool:
        """Whether another generation may follow this one."""

    @property
    @abstractmethod
    def is_preempting(self) -> bool:
        """Whether the ranks have been requested to save and exit."""

    @abstractmethod
    def connect_to_store(self) -> socket.socket:
        """Open a connection to the store of this generation if the store is on another machine."""

    @abstractmethod
    def leave(self, reason: str, code: int) -> None:
        """Notify the other machines, if any, that this machine leaves the run."""

    @abstractmethod
    def report_end(self) -> int:
        """Print how the run ended, unless that has been reported, and return the launcher's exit code."""
