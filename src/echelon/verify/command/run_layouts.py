"""Runs the script once on one layout, with its steps recorded, and says in a few lines why it failed if it did."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from echelon.base.printable import printable
from echelon.launch.environment import inherited, is_of_rank
from echelon.launch.interrupts import Interrupts, end_launcher
from echelon.launch.local.warm_start import WARM_VARIABLE, WarmStarter
from echelon.verify.command.layouts import Layout
from echelon.verify.trace import RUN_FILE, RecordingSettings, file_of_rank
from echelon.world.launch_variables import NO_RECORD_VARIABLE

PLACEHOLDER = "{layout}"
"""In the script's arguments: becomes the name of the layout, so that each run writes to a folder of its own."""

_CHILD = "echelon.verify.child"
WARM_MODULES = ("numpy", "torch", _CHILD)
"""What a process imports from which ranks are forked."""
_POLL_S = 0.05
_GRACE_S = 10.0
_WARM_S = 60.0
_STALL_S = 60.0
_SHOWN_LINES = 24
_STACKS_BEFORE_S = 3.0
_OUTPUT = "output.txt"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """One recorded run."""

    name: str
    """What the progress bar and messages call it."""
    layout: Layout
    script: str
    arguments: tuple[str, ...]
    folder: Path
    """Where the traces are written; created if it does not exist."""
    run: RecordingSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLimits:
    """What is equal for all runs."""

    seed: int
    timeout_s: float
    num_threads: int
    """CPU threads of each process; equal in all runs, because sums depend on it."""
    launch_flags: tuple[str, ...] = ()
    """Further flags of ``echelon launch``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFailure:
    """Why a run has no complete trace."""

    what: str
    """One sentence or a few lines, as the launcher reports it."""
    details: tuple[str, ...] = ()
    """Further lines: where each rank is."""
    do: str = ""
    output: str = ""
    """Path of the file with the run's output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutRun:
    """How a run ended."""

    request: RunRequest
    num_updates: int
    seconds: float
    failure: RunFailure | None = None


class LayoutRunner:
    """Starts the recorded runs, one after the other.

    Args:
        limits: what is equal for all runs.
        interrupts: signals to this program; the processes are stopped if there is one.
        on_update: called with the number of updates recorded so far.
        start: the command that runs ``echelon launch``.
        warm: forks the ranks from a process that has imported torch once; None: each rank imports it.
    """

    def __init__(
        self,
        limits: RunLimits,
        interrupts: Interrupts,
        *,
        on_update: Callable[[RunRequest, int], None] = lambda request, count: None,
        start: Sequence[str] = (sys.executable, "-m", "echelon"),
        warm: WarmStarter | None = None,
    ) -> None:
        self._limits, self._interrupts, self._on_update = limits, interrupts, on_update
        self._start = tuple(start)
        self._warm = warm

    def record(self, request: RunRequest) -> LayoutRun:
        """Run the script, and return how it ended.

        Raises:
            Interrupted: this program received a signal. The processes have been stopped.
        """
        request.folder.mkdir(parents=True, exist_ok=True)
        arguments = tuple(one.replace(PLACEHOLDER, request.layout.slug) for one in request.arguments)
        request = replace(request, arguments=arguments)
        limit = self._limits.timeout_s
        stacks_after_s = max(limit - _STACKS_BEFORE_S, limit / 2)
        run = replace(request.run, seed=self._limits.seed, stacks_after_s=stacks_after_s)
        (request.folder / RUN_FILE).write_text(json.dumps(asdict(run)), encoding="utf-8")
        output = request.folder / _OUTPUT
        began = time.monotonic()
        counter = _UpdateCounter(request)
        with output.open("wb") as file, self._lent() as (variables, files):
            process = subprocess.Popen(
                self.command(request),
                env={**run_environment(), **variables},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                pass_fds=files,
            )
            try:
                is_late = self._wait(process, request, counter, deadline=began + limit)
            finally:
                end_launcher(process, grace_s=_GRACE_S)
        count = counter.count()
        self._on_update(request, count)
        seconds = time.monotonic() - began
        failure = self._failure(request, process.returncode, count, output, is_late=is_late)
        return LayoutRun(request=request, num_updates=count, seconds=seconds, failure=failure)

    @contextmanager
    def _lent(self) -> Iterator[tuple[dict[str, str], list[int]]]:
        """Yield the variables and the file descriptors by which the launcher finds a server that forks its ranks, if there is one."""
        if self._warm is None or not self._warm.wait_until_ready(_WARM_S, check=self._interrupts.check):
            yield {}, []
            return
        server = self._warm.lend()
        if server is None:
            yield {}, []
            return
        with server:  # the launcher's copy keeps it open
            yield {WARM_VARIABLE: str(server.fileno())}, [server.fileno()]

    def command(self, request: RunRequest) -> list[str]:
        """Return the command that starts the run's processes."""
        limits = self._limits
        launch = ["launch", "--cpu", "--no_record", "--quiet", "--oversubscribe", "--no_warm", "--tee", "0"]
        stall_s = min(_STALL_S, max(limits.timeout_s / 2, 1.0))
        launch += ["--stall_timeout", f"{stall_s:g}", "--on_stall", "stop", "--max_restarts", "0"]
        launch += [
            "--num_cpu_threads_per_process",
            str(limits.num_threads),
            *request.layout.flags,
            *limits.launch_flags,
        ]
        return [*self._start, *launch, "-m", _CHILD, str(request.folder), request.script, *request.arguments]

    def _wait(
        self, process: subprocess.Popen[bytes], request: RunRequest, counter: _UpdateCounter, *, deadline: float
    ) -> bool:
        """Return whether the run exceeded its time."""
        while process.poll() is None:
            self._interrupts.check()
            self._on_update(request, counter.count())
            if time.monotonic() > deadline:
                return True
            time.sleep(_POLL_S)
        return False

    def _failure(self, request: RunRequest, code: int, count: int, output: Path, *, is_late: bool) -> RunFailure | None:
        if is_late:
            steps = f"{count} of {request.run.steps} updates"
            return RunFailure(
                what=f"not finished after {self._limits.timeout_s:g} s: {steps} recorded",
                details=tuple(_positions(request)),
                do=f"if a rank hangs, look at its line above; if the script is slow, pass --timeout "
                f"{2 * self._limits.timeout_s:g}, fewer --steps or a smaller model",
                output=str(output),
            )
        if code != 0:
            text = output.read_text(encoding="utf-8", errors="replace")
            return _reported(text, code=code, output=output)
        if count == 0:
            return RunFailure(
                what="the script ended without an optimizer step",
                do="pass arguments with which the script trains; a step is a call of step() on a torch optimizer",
                output=str(output),
            )
        return None


class _UpdateCounter:
    """Counts the recorded updates of rank 0 while its file grows, without parsing the events."""

    def __init__(self, request: RunRequest) -> None:
        self._path = file_of_rank(request.folder, 0)
        self._position, self._last = 0, request.run.first_update - 1
        self._first = request.run.first_update

    def count(self) -> int:
        """Return how many updates have ended."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._position)
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    self._position += len(line)
                    if line.startswith(_STEP) and (match := _UPDATE.search(line[:200])):
                        self._last = max(self._last, int(match[1]))
        except FileNotFoundError:
            return 0
        return self._last + 1 - self._first


_STEP = b'{"kind":"optimizer_step"'
_UPDATE = re.compile(rb'"update":(\d+)')


def run_environment() -> dict[str, str]:
    """Return this program's environment without the variables of a rank, and with what makes runs repeatable."""
    values = inherited(without=is_of_rank)
    values |= {NO_RECORD_VARIABLE: "1", "TORCHDYNAMO_DISABLE": "1"}
    values.setdefault("PYTHONHASHSEED", "0")
    return values


_REPORT = re.compile(r"^echelon: ", re.MULTILINE)
_LOGS = re.compile(r"^  (logs|stacks): .*\n?", re.MULTILINE)
_DO = re.compile(r"^  do:    (.*(?:\n         .*)*)\n?", re.MULTILINE)
_OWN_FRAME = re.compile(r"^.*\bechelon/verify/child\.py:\d+ in .*\n?", re.MULTILINE)


def _reported(text: str, *, code: int, output: Path) -> RunFailure:
    """Return the launcher's report of the rank that failed first, which is the last of its messages in ``text``."""
    starts = [match.end() for match in _REPORT.finditer(text)]
    if not starts:
        lines = [printable(line) for line in text.splitlines()[-_SHOWN_LINES:]]
        return RunFailure(
            what=f"the processes exited with code {code}; the end of their output:",
            details=tuple(lines),
            do="read the complete output in the file",
            output=str(output),
        )
    report = _OWN_FRAME.sub("", _LOGS.sub("", text[starts[-1] :]))
    do = _DO.search(report)
    first, *rest = _DO.sub("", report).rstrip().splitlines()
    return RunFailure(
        what=printable(first),
        details=tuple(printable(line) for line in rest[:_SHOWN_LINES]),
        do=" ".join(do[1].split()) if do else "read the complete output in the file",
        output=str(output),
    )


def _positions(request: RunRequest) -> Iterator[str]:
    """Yield a line for each rank: the last thing that it recorded, and where it was shortly before the limit."""
    for rank in range(request.layout.num_processes):
        event = _last_event(file_of_rank(request.folder, rank))
        did = "recorded nothing"
        if event is not None:
            kind = event.get("content", event["kind"])
            did = f"last recorded: {_KINDS.get(kind, kind)} of update {event.get('update', 0)}"
        line = _line_of(request.folder / f"rank_{rank}.stacks")
        yield f"rank {rank}: {did}" + (f"; now at {line}" if line else "")


_KINDS: Mapping[str, str] = {
    "run": "start",
    "model": "first forward pass",
    "batch": "batch",
    "forward": "forward pass",
    "loss": "loss",
    "local": "gradients",
    "reduced": "gradients",
    "clipped": "gradients",
    "clip": "clipping",
    "optimizer_step": "optimizer step",
    "weights": "weights",
    "buffers": "buffers",
    "optimizer_state": "optimizer state",
    "rng": "random number generators",
    "saved": "checkpoint",
    "loaded": "checkpoint",
}


def _last_event(path: Path) -> dict[str, Any] | None:
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except OSError:
        return None
    for line in reversed(lines):
        if line.endswith(b"\n"):
            event: dict[str, Any] = json.loads(line)
            return event
    return None


_FRAME = re.compile(r'  File "(.+)", line (\d+) in (.+)')
_NOT_USERS = ("/site-packages/", "/dist-packages/", "/echelon/", "<frozen", "/lib/python")


def _line_of(path: Path) -> str:
    """Return the user's line in the stack that faulthandler wrote for the main thread (its last), or the innermost one."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    frames = [match for match in map(_FRAME.match, text.split("\n\n")[-1].splitlines()) if match]
    users = [match for match in frames if not any(part in match[1] for part in _NOT_USERS)]
    if not frames:
        return ""
    frame = (users or frames)[0]
    return printable(f"{frame[1]}:{frame[2]} in {frame[3]}")
