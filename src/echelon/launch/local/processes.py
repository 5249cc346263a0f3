"""The processes in one attempt: starts them, records how they end, and stops them within a deadline."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import BinaryIO, Literal

from echelon.base.errors import LaunchError
from echelon.base.messages.terminal import say
from echelon.base.messages.translation import gettext as _
from echelon.launch.failures.failure import RankEnd
from echelon.launch.local import worker
from echelon.launch.local.output import Outputs, log_file, relay
from echelon.launch.local.parents import Guardian, own_identity
from echelon.launch.local.rank_errors import read_last_words, read_record, read_stack
from echelon.launch.local.warm_start import Process, WarmStarter
from echelon.launch.script import Script
from echelon.status.board import Board, Doing

_POLL = timedelta(milliseconds=10)
_CRASHES = frozenset({signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV})


@dataclass(slots=True)
class _Worker:
    rank: int
    local_rank: int
    directory: Path
    process: Process
    ended_ns: int | None = None
    is_finished: bool = False
    """Whether the program succeeded before its process ended."""
    relays: list[threading.Thread] = field(default_factory=list)


class Workers:
    """The ranks' processes. Each one leads a separate session, so that Ctrl-C in a terminal reaches only the launcher.

    Args:
        script: the program that each rank runs.
        directory: contains ``rank_<n>/`` with the rank's error record, crash stacks and logs.
        outputs: where stdout and stderr go.
        board: the ranks' status board.
        warm: forks the ranks if it is ready; otherwise, ranks are started as new programs.
        guardian: kills the ranks with all their children if this launcher is killed.
        check: called before each start; raises an exception if the launcher must stop.
    """

    def __init__(
        self,
        script: Script,
        *,
        directory: Path,
        outputs: Outputs,
        board: Board,
        warm: WarmStarter,
        guardian: Guardian,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._script = script
        self._board = board
        self._warm = warm
        self._guardian = guardian
        self._check = check
        self._directory = directory
        self._outputs = outputs
        self._workers: list[_Worker] = []
        self._lock = threading.RLock()

    def start(self, environments: Mapping[int, Mapping[str, str]]) -> dict[int, int]:
        """Start one process for each local rank with its environment; return a dict from local rank to process id.

        Raises:
            LaunchError: a process could not be started; processes that had already started have been stopped.
            Interrupted: the launcher must stop; processes that have already started keep running.
        """
        self._guardian.open()
        for local_rank, environment in environments.items():
            self._check()
            rank = int(environment["RANK"])
            directory = self._directory / f"rank_{rank}"
            directory.mkdir(parents=True)
            self._guardian.announce_start()
            try:
                self._workers.append(self._start_one(local_rank, rank, directory, environment))
            except OSError as error:
                self.stop(signal.SIGKILL, grace=timedelta())
                raise LaunchError(
                    _(
                        "cannot start rank {rank}: {strerror}: {filename}",
                        rank=rank,
                        strerror=error.strerror,
                        filename=error.filename,
                    ),
                    do=_(
                        "check that the program is executable, and check the limits on processes and open files "
                        "(ulimit -a)"
                    ),
                ) from error
            self._guardian.add_rank(self._workers[-1].process.pid)
        return {i: w.process.pid for i, w in enumerate(self._workers)}

    def running(self) -> dict[int, tuple[int, int | None]]:
        """Return a dict from rank to (process id, exit code or None), in slot order."""
        return {w.rank: (w.process.pid, self._exit_code(w)) for w in self._workers}

    def _start_one(self, local_rank: int, rank: int, directory: Path, environment: Mapping[str, str]) -> _Worker:
        streams: dict[str, int | BinaryIO | None] = {}
        pipes: list[tuple[int, BinaryIO, Literal["stdout", "stderr"]]] = []
        child_ends: list[BinaryIO | int] = []  # closed here after the start
        names: tuple[Literal["stdout", "stderr"], ...] = ("stdout", "stderr")
        for name in names:
            destination = self._outputs.destination(local_rank, name)
            if destination == "terminal":
                streams[name] = None
                continue
            file = log_file(directory, name)
            if destination == "file":
                streams[name] = file
                child_ends.append(file)
                continue
            read_end, write_end = os.pipe()
            streams[name] = write_end
            child_ends.append(write_end)
            pipes.append((read_end, file, name))
        stdin = None
        if self._outputs.debugged not in (None, local_rank):
            stdin, environment = subprocess.DEVNULL, {**environment, "PYTHONBREAKPOINT": "0"}
        try:
            process = self._start_process(
                self._command(directory, local_rank, environment), environment, streams, stdin
            )
        finally:
            for end in child_ends:
                os.close(end) if isinstance(end, int) else end.close()
        relays = [relay(pipe, file, name, prefix=f"[rank{rank}]: ") for pipe, file, name in pipes]
        return _Worker(rank, local_rank, directory, process, relays=relays)

    def _start_process(
        self,
        command: list[str],
        environment: Mapping[str, str],
        streams: Mapping[str, int | BinaryIO | None],
        stdin: int | None,
    ) -> Process:
        if self._script.kind != "program" and self._warm.is_ready:
            stdout, stderr = (_number(streams[name], default) for name, default in (("stdout", 1), ("stderr", 2)))
            forked = self._warm.start(command[3:], environment, stdout=stdout, stderr=stderr, check=self._check)
            if forked is not None:
                return forked
        return subprocess.Popen(
            command,
            env=dict(environment),
            stdin=stdin,
            stdout=streams["stdout"],
            stderr=streams["stderr"],
            start_new_session=True,
        )

    def _command(self, directory: Path, local_rank: int, environment: Mapping[str, str]) -> list[str]:
        script = self._script
        args = script.args_of(local_rank)
        if script.kind == "program":
            return [script.target, *args]
        destination = self._outputs.destination(local_rank, "stdout")
        is_shared = destination == "terminal" and environment.get("LOCAL_WORLD_SIZE") != "1"
        mode = "shared" if is_shared else "line" if destination == "both" else "default"
        mode = "debug" if self._outputs.debugged == local_rank else mode
        # Run the worker by its path; with `-m`, a json.py in the current directory would shadow the standard module.
        slot = f"{self._board.path}:{local_rank}"
        settings = [own_identity(), str(directory), slot, mode]
        return [sys.executable, worker.__file__, *settings, script.kind, script.target, *args]

    def ends(self) -> list[RankEnd]:
        """Return how each rank has ended, or that it is still running."""
        return [self._end(w) for w in self._workers]

    def _end(self, one: _Worker) -> RankEnd:
        code = self._exit_code(one)
        # The record is written at the exception, up to half a second before the exit.
        record = read_record(one.directory / worker.ERROR_FILE) if code != 0 else None
        stack = read_stack(one.directory / worker.STACK_FILE) if code is not None and code < 0 else ()
        return RankEnd(
            rank=one.rank,
            exit_code=code,
            ended_ns=one.ended_ns,
            record=record,
            stack=stack,
            last_words=read_last_words(one.directory),
            note=self._board.note(one.local_rank),
            watch=self._board.watch(one.local_rank),
        )

    def exit_codes(self) -> list[int | None]:
        """Return each rank's exit code, or None while it is running, without reading any file."""
        return [self._exit_code(w) for w in self._workers]

    def _exit_code(self, one: _Worker) -> int | None:
        with self._lock:  # on several machines, threads of the connection also call this method
            return self._exit_code_locked(one)

    def _exit_code_locked(self, one: _Worker) -> int | None:
        code = one.process.poll()
        if code is not None and one.ended_ns is None:
            one.ended_ns = time.monotonic_ns()
            watch = self._board.watch(one.local_rank)
            one.is_finished = watch is not None and bool(watch.doing & Doing.FINISHED)
            if one.is_finished and -code in _CRASHES:
                name = signal.Signals(-code).name
                say(
                    _(
                        "rank {rank} succeeded, but the interpreter crashed at exit ({name}); this is not an error",
                        rank=one.rank,
                        name=name,
                    )
                )
        return 0 if code is not None and code < 0 and one.is_finished else code

    def stop(self, number: int, *, grace: timedelta, is_impatient: Callable[[], bool] = lambda: False) -> None:
        """Send signal ``number``, wait up to ``grace``, and then kill the remaining processes and all their children.

        Args:
            number: signal to send.
            grace: maximum time to wait.
            is_impatient: polled during the wait; the wait ends when it returns True.
        """
        running = [w for w in self._workers if self._exit_code(w) is None]
        for one in running:
            # A script stops its children (DataLoader workers) itself. A shell waits for its children, so signal the group.
            _send(one.process.pid, number, to_group=self._script.kind == "program")
        deadline = time.monotonic() + grace.total_seconds()
        while any(self._exit_code(w) is None for w in running) and time.monotonic() < deadline and not is_impatient():
            time.sleep(_POLL.total_seconds())
        for one in self._workers:
            # Also for ranks that have ended, because leftover children may hold memory or a device.
            _send(one.process.pid, signal.SIGKILL, to_group=True)
        for one in running:
            try:
                one.process.wait(timeout=1.0)
            except subprocess.TimeoutExpired:
                say(
                    _(
                        "rank {rank} (process {value}) hangs in the kernel and cannot be killed",
                        rank=one.rank,
                        value=one.process.pid,
                    ),
                    kind="warning",
                )
        self.drain()
        for one in self._workers:
            self._guardian.remove_rank(one.process.pid)

    def drain(self) -> None:
        """Wait at most one second for the output of ended ranks to be shown."""
        deadline = time.monotonic() + 1.0
        for one in self._workers:
            for thread in one.relays:
                thread.join(max(0.0, deadline - time.monotonic()))


def _number(stream: int | BinaryIO | None, default: int) -> int:
    if stream is None:
        return default
    return stream if isinstance(stream, int) else stream.fileno()


def _send(pid: int, number: int, *, to_group: bool) -> None:
    # It has ended; macOS raises PermissionError for a group of zombies. ``stop`` reports a process that keeps running.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number) if to_group else os.kill(pid, number)
