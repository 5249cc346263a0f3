"""The folder of the run that this process belongs to: the launcher's, or one that rank 0 creates if there is no launcher."""

from __future__ import annotations

import os
import socket
import sys
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from multiprocessing import parent_process
from pathlib import Path
from typing import final

import torch.distributed as dist

from echelon.diagnose.goodput import Attempt, RankTimes, break_down_time
from echelon.distributed.stores import store_of
from echelon.status.notes import notes_of_process
from echelon.status.run_facts import process_start_ns
from echelon.status.run_files import DEFAULT_PARENT
from echelon.status.run_recorder import RunOutcome, RunRecorder, new_folder, run_name
from echelon.world.environment import LaunchEnvironment, detect
from echelon.world.launch_variables import has_elastic_agent

_KEY = "echelon/run"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlace:
    """Where this process writes its records."""

    folder: Path
    attempt: int
    rank: int
    world_size: int


class Run(ABC):
    """The run that this process belongs to."""

    @abstractmethod
    def place(self) -> RunPlace | None:
        """Return the place of this process's records, or None if it is not known yet.

        Raises:
            OSError: the folder cannot be created.
        """

    @abstractmethod
    def publish(self) -> None:
        """On rank 0, tell the other ranks the run's name. Called before the training starts."""

    @abstractmethod
    def update(self) -> None:
        """Record what has become known. Called about once a second."""

    @abstractmethod
    def end(self) -> None:
        """Record how the run ended."""


@final
class LaunchedRun(Run):
    """A run whose folder the launcher has created.

    Args:
        place: the value of ``RECORD_VARIABLE``.
    """

    def __init__(self, place: str) -> None:
        attempt, _, folder = place.partition(":")
        self._folder, self._attempt = Path(folder), int(attempt)

    def place(self) -> RunPlace:
        """Return the place of this process's records."""
        here = detect()
        return RunPlace(folder=self._folder, attempt=self._attempt, rank=here.rank, world_size=here.world_size)

    def publish(self) -> None:
        """Do nothing: the launcher has chosen the folder."""

    def update(self) -> None:
        """Do nothing: the launcher does it."""

    def end(self) -> None:
        """Do nothing: the launcher does it."""


@final
class RunWithoutLauncher(Run):
    """A run that torchrun, Slurm, Python or a notebook started. Its folder is created at the first optimizer step.

    Rank 0 tells the other ranks the run's name through the process group's store, without a collective. The first process on each
    machine describes the run.
    """

    def __init__(self) -> None:
        self._began_ns = process_start_ns()
        self._place: RunPlace | None = None
        self._recorder: RunRecorder | None = None
        name = sys.argv[0] if sys.argv and sys.argv[0] not in ("", "-c", "-m") else ""
        is_notebook = "ipykernel" in sys.modules
        self._script = "notebook" if is_notebook else name
        self._name = run_name(Path(self._script).stem, str(os.getpid()))
        self._is_published = False

    def publish(self) -> None:
        """On rank 0, tell the other ranks the run's name."""
        if not self._is_published and dist.is_initialized() and dist.get_rank() == 0 and (group := dist.group.WORLD):
            store_of(group).set(_KEY, self._name)
            self._is_published = True

    def place(self) -> RunPlace | None:
        """Create the folder, or return None if rank 0 has not told the run's name yet."""
        if self._place is not None:
            return self._place
        here = _environment()
        if here.rank:
            name = _published_name()
            if name is None:
                return None
            self._name = name
        is_other_machine = here.rank >= here.local_world_size
        folder = Path(DEFAULT_PARENT).absolute() / (
            f"{self._name}-{socket.gethostname()}" if is_other_machine else self._name
        )
        if here.world_size == 1:
            folder = new_folder(folder)
            self._name = folder.name
        else:  # another rank on this machine may have created it
            folder.mkdir(parents=True, exist_ok=True)
        if here.local_rank == 0:
            self._recorder = RunRecorder(folder, began_ns=self._began_ns, raises=True)
            size, num_machines = here.world_size, -(-here.world_size // here.local_world_size)
            self._recorder.describe(
                command=["python", *sys.argv],
                script=self._script,
                arguments=sys.argv[1:],
                num_processes=size,
                num_machines=num_machines,
                launcher=_launcher(here),
                run_id=self._name,
            )
            self._recorder.start_attempt(0, board=None, num_processes=size, num_machines=num_machines)
        self._place = RunPlace(folder=folder, attempt=0, rank=here.rank, world_size=here.world_size)
        return self._place

    def update(self) -> None:
        """Record the commit of the code if it has become known."""
        if self._recorder is not None:
            self._recorder.update()

    def end(self) -> None:
        """Record how the program ended, and where its time went."""
        if self._recorder is None:
            return
        outcome, code = _end_of_program()
        notes, now = notes_of_process(), time.monotonic_ns()
        if notes is not None:
            times = RankTimes(rank=0, times=notes.times)
            attempt = Attempt(started_ns=self._began_ns, failed_ns=now, noticed_ns=now, ranks=[times])
            breakdown = break_down_time([attempt], began_ns=self._began_ns, ended_ns=now)
            self._recorder.breakdown(wall_s=breakdown.wall_s, seconds=breakdown.seconds)
        self._recorder.end(outcome, code)


def _end_of_program() -> tuple[RunOutcome, int | None]:
    """Return how the program ends, as far as the interpreter tells: not the code of ``sys.exit`` in the main process."""
    # A process of multiprocessing ends while the exception is being handled.
    error = sys.exc_info()[1]
    kind = getattr(sys, "last_type", None) if error is None else type(error)
    if isinstance(error, SystemExit):
        if error.code in (None, 0):
            return "succeeded", 0
        return "failed", error.code if isinstance(error.code, int) else 1
    if kind is None:
        return "succeeded", None
    return "interrupted" if issubclass(kind, KeyboardInterrupt) else "failed", None


def _environment() -> LaunchEnvironment:
    here = detect()
    if here.starter == "single" and dist.is_initialized():  # the program has created the group itself, on this machine
        rank, size = dist.get_rank(), dist.get_world_size()
        return LaunchEnvironment(starter="single", rank=rank, world_size=size, local_rank=rank, local_world_size=size)
    return here


def _published_name() -> str | None:
    if not dist.is_initialized() or (group := dist.group.WORLD) is None:
        return None
    store = store_of(group)
    return store.get(_KEY).decode() if store.check([_KEY]) else None


def _launcher(here: LaunchEnvironment) -> str:
    if parent_process() is not None:
        return "python" if hasattr(sys.modules["__main__"], "__file__") else "notebook_launcher"
    if here.starter == "torchrun":
        return "torchrun" if has_elastic_agent() else "python"
    return "srun" if here.starter == "slurm" else "mpirun" if here.starter == "mpi" else "python"
