"""How one machine takes part in a run: alone (``LocalNode``) or with others (``MultinodeNode``); the agent knows only ``Node``."""

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
"""What follows a generation; ``lost``: this node lost the coordinator and tries to rejoin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRules:
    """What the user asked for, on one machine or several."""

    max_restarts: int
    stall: StallRules
    preemption_grace: timedelta
    """Time the ranks get to agree on a step and save when preempted; zero: they are stopped at once."""
    logs: str
    """Where logs are, or how to get some: for the report."""
    directory: Path
    """For records and logs; one folder for each attempt and rank below it."""
    began_ns: int
    """When the launcher started, on ``time.monotonic_ns``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGeneration:
    """One start of all ranks, as one node sees it."""

    number: int
    group_rank: int
    group_world_size: int
    first_rank: int
    world_size: int
    port: int
    """Port of the store if it is on this machine, else 0."""
    num_restarts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationResult:
    """How a generation ends."""

    then: Then
    code: int = 0
    """Exit code of the launcher, if it ends."""
    failed_ns: int | None = field(default=None, compare=False)
    """First sign of the failure, on ``time.monotonic_ns``; None: there was none."""
    noticed_ns: int | None = field(default=None, compare=False)
    """When the failure was noticed; None: now."""


class RunOver(BaseException):  # not an Exception: no caller may take it for a failure
    """The run ended while this node waited for a generation; ``result`` says how."""

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
    """Global ranks, in the order of the board's slots."""


class Node(ABC):
    """Decides for the ranks of one machine: when a generation starts, how it ends, and what the launcher exits with."""

    goodput: GoodputReport | None = None
    """Goodput of all machines, at the end of the run, on the rendezvous host."""

    @abstractmethod
    def next_generation(self) -> NodeGeneration:
        """Wait for the next generation.

        Raises:
            Interrupted: a signal came.
            LaunchError: this node cannot take part.
            RunOver: no generation follows.
        """

    @abstractmethod
    def watch(self, ranks: AttemptRanks | None) -> None:
        """Watch the ranks of a new attempt; None: forget the last ones, whose board is closed now."""

    @abstractmethod
    def poll(self) -> GenerationResult | None:
        """Return how the generation ends; None: it goes on.

        Raises:
            Interrupted: signals came that stop the run.
        """

    @property
    @abstractmethod
    def may_restart(self) -> bool:
        """Whether another generation may follow this one."""

    @property
    @abstractmethod
    def is_preempting(self) -> bool:
        """Whether the ranks were asked to save and exit."""

    @abstractmethod
    def connect_to_store(self) -> socket.socket:
        """Open a connection to the store of this generation, if it is on another machine."""

    @abstractmethod
    def leave(self, reason: str, code: int) -> None:
        """Tell the other machines, if any, that this one leaves the run."""

    @abstractmethod
    def report_end(self) -> int:
        """Print how the run ended, if nobody has; return the launcher's exit code."""
