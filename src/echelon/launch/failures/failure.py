"""The first error of a run: from how each rank ended, which one began it, and a report of a few lines.

Sorting by time alone blames the innocent: when a rank dies, its sockets close before its exit can be seen, so the
others' "connection closed" is stamped first. So the class of an end decides before its time.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from types import MappingProxyType

from echelon.base.printable import printable
from echelon.diagnose.stall import Answer, Class, Stall, disagreement, name_ranks
from echelon.launch.failures.error_advice import advice_for

__all__ = [
    "Cause",
    "ErrorRecord",
    "Frame",
    "RankEnd",
    "cause_of",
    "exit_status",
    "explain",
    "first_failure",
    "is_settled",
    "lost_each_other",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One line of a stack."""

    file: str
    line: int
    function: str
    source: str = ""
    user: bool = True
    """Whether the file is the user's own, not an installed package."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorRecord:
    """An exception as the rank itself wrote it down."""

    time_ns: int
    """``time.monotonic_ns``, comparable between the processes of one machine."""
    type: str
    message: str
    frames: tuple[Frame, ...] = ()
    """Outermost first, as in a traceback."""
    chain: tuple[str, ...] = ()
    """The causes and contexts, each as ``type: message``."""
    thread: str | None = None
    """The thread's name; None: the main thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnd:
    """How one rank ended, noted before the launcher stops any; one that still runs has ``exit_code`` None."""

    rank: int
    exit_code: int | None
    """Negative: the number of the signal that ended it."""
    ended_ns: int | None = None
    """When the launcher saw the exit."""
    record: ErrorRecord | None = None
    stack: tuple[Frame, ...] = ()
    """What a crash in native code left of the Python stack, innermost first."""
    last_words: Answer | None = None
    """Where it was, and which collectives it had begun, when it failed or when it was asked after that."""

    @property
    def failed(self) -> bool:
        """Whether it ended badly, or is about to: Python takes half a second from an exception to its exit."""
        if self.exit_code is None:
            return self.record is not None and self.record.thread is None
        return self.exit_code != 0


class Cause(IntEnum):
    """The class of an end; the lower one is the likelier origin of the failure."""

    OWN = 0  # a signal, an exception of its own, sys.exit, os._exit
    LEFT_EARLY = 1  # exit code 0 while the others still needed it
    COMMUNICATION = 2  # lost the others: nearly always the effect of another rank's end
    NONE = 3  # ended well, or runs still


# As gloo, NCCL and the store word it (torch 2.7 to 2.13). Only in errors of the types below: a script's own
# ConnectionResetError from a download is its own failure.
_COMMUNICATION_TEXT = re.compile(
    r"Connection (closed|reset) by peer|Broken pipe|Connection refused|Timed out waiting|timed out connecting"
    r"|connectFullMesh|failed to pass monitoredBarrier|client socket has (timed out|failed)|[Ss]ocket [Tt]imeout"
    r"|wait timeout after|ncclRemoteError|ncclSystemError|remote process exited|Failed to recv|failed to recv"
    r"|Watchdog caught collective operation timeout|Stop_waiting response is expected"
)
_COMMUNICATION_TYPE = re.compile(
    r"(^|\.)(RuntimeError|DistBackendError|DistNetworkError|DistStoreError|RankTimeoutError)$"
)


def _is_communication(record: ErrorRecord) -> bool:
    errors = (f"{record.type}: {record.message}", *record.chain)
    return any(_COMMUNICATION_TYPE.search(e.partition(": ")[0]) and _COMMUNICATION_TEXT.search(e) for e in errors)


def cause_of(end: RankEnd, ends: Sequence[RankEnd]) -> Cause:
    """Return the class of ``end`` among the ``ends`` of all ranks."""
    if end.failed:
        lost = end.record is not None and _is_communication(end.record) and (end.exit_code is None or end.exit_code > 0)
        return Cause.COMMUNICATION if lost else Cause.OWN
    if end.exit_code == 0 and any(o.failed and o.record is not None and _is_communication(o.record) for o in ends):
        return Cause.LEFT_EARLY
    return Cause.NONE


def _time_of(end: RankEnd) -> int | None:
    return end.record.time_ns if end.record is not None else end.ended_ns


def first_failure(ends: Sequence[RankEnd]) -> RankEnd | None:
    """Return the rank that began the failure: the lowest class, inside a class the earliest; None: none failed."""
    failed = [(cause_of(end, ends), _time_of(end) or 0, end.rank, end) for end in ends]
    failed = [entry for entry in failed if entry[0] is not Cause.NONE]
    return min(failed, key=lambda entry: entry[:3])[3] if failed else None


def is_settled(ends: Sequence[RankEnd]) -> bool:
    """Tell whether waiting for more ranks to end could not change the verdict.

    Only an end of the class OWN with its exit code settles it: the others' ends come later by nature.
    """
    first = first_failure(ends)
    if first is None or all(end.exit_code is not None for end in ends):
        return True
    return cause_of(first, ends) is Cause.OWN and first.exit_code is not None


def exit_status(ends: Sequence[RankEnd]) -> int:
    """Return the launcher's exit code: that of the first failing rank, 128 + n for signal n, 0 when none failed."""
    first = first_failure(ends)
    if first is None:
        return 0
    code = first.exit_code
    if not code:  # left early with 0, or its exit was not seen in time: the failure must show all the same
        code = next((end.exit_code for end in ends if end.failed and end.exit_code), None) or 1
    return _shell_code(code)


def _shell_code(code: int) -> int:
    return 128 - code if code < 0 else code & 0xFF or 1


_MAX_FRAMES = 4
_MAX_MESSAGE_LINES = 6


def explain(
    ends: Sequence[RankEnd], *, logs: str, places: Mapping[int, str] = MappingProxyType({})
) -> tuple[str, str, str]:
    """Return what happened, where, and what to do, each of a few lines.

    Args:
        ends: of all ranks; at least one failed.
        logs: where the output of the ranks is, or how to keep it.
        places: for each rank the name of its machine; empty: there is but one.
    """
    first = first_failure(ends)
    assert first is not None, ends
    differing = _disagreement(first, ends)
    if differing is not None:
        return _explain_disagreement(differing, first, ends, logs=logs, places=places)
    what, do = _verdict(first, ends)
    lines = [f"rank {first.rank} of {len(ends)}{_on([first.rank], places)}"]
    lines += [_frame_line(frame) for frame in _told_frames(first)]
    others = _others(first, ends)
    if others:
        what = f"{what}\n  others: {others}"
    return what, "\n         ".join(lines), f"{do}\n  logs:  {logs}"


def lost_each_other(ends: Sequence[RankEnd]) -> bool:
    """Tell whether no rank failed by itself as far as is known: they lost contact, or gloo has aborted one."""
    first = first_failure(ends)
    return first is not None and (cause_of(first, ends) is Cause.COMMUNICATION or first.exit_code == -signal.SIGABRT)


def _disagreement(first: RankEnd, ends: Sequence[RankEnd]) -> Stall | None:
    if not lost_each_other(ends):
        return None
    found = disagreement({end.rank: end.last_words for end in ends if end.last_words is not None})
    # An abort while one rank is merely behind is something else's.
    return None if found is not None and found.kind is Class.MISSING and first.exit_code == -signal.SIGABRT else found


def _explain_disagreement(
    found: Stall, first: RankEnd, ends: Sequence[RankEnd], *, logs: str, places: Mapping[int, str]
) -> tuple[str, str, str]:
    aborted = f"; gloo aborted rank {first.rank} for it" if first.exit_code == -signal.SIGABRT else ""
    lines = "".join(f"\n    {line}" for line in found.lines())
    what = f"{found.kind.value}: {found.what}{lines}\n  others: the ranks lost each other{aborted}"
    culprits = found.culprits or tuple(sorted(found.ranks))
    return what, f"{name_ranks(culprits)} of {len(ends)}{_on(culprits, places)}", f"{found.do}\n  logs:  {logs}"


def _on(ranks: Sequence[int], places: Mapping[int, str]) -> str:
    names = list(dict.fromkeys(places[rank] for rank in ranks if rank in places))
    return f", on {' and '.join(names[:2])}" if names else ""


def _verdict(end: RankEnd, ends: Sequence[RankEnd]) -> tuple[str, str]:
    record, who = end.record, f"rank {end.rank}"
    if end.exit_code is not None and end.exit_code < 0:
        name, hint = _signal(-end.exit_code)
        return f"{who} failed first: killed by {name}", hint
    if cause_of(end, ends) is Cause.LEFT_EARLY:
        return (
            f"{who} failed first: it ended (exit code 0) while other ranks still waited for it",
            "let every rank make the same number of steps and collective calls; look for an early return or break on one rank",
        )
    if record is None:
        return (
            f"{who} failed first: exit code {end.exit_code}, without a Python exception",
            "look for os._exit, a native library that ends the process, or the program's own output above",
        )
    message = _shorten(record.message)
    if record.type == "SystemExit":
        return (
            f"{who} failed first: sys.exit({message})",
            "see the line above; exit code 0 means success, any other a failure",
        )
    thread = f" (in thread {record.thread!r})" if record.thread else ""
    if cause_of(end, ends) is Cause.COMMUNICATION:
        return (
            f"{who} lost contact with another rank{thread}: {record.type}: {message}",
            "no rank failed by itself: look for a rank that hangs, skips a collective call, or is slower than the timeout",
        )
    return (
        f"{who} failed first{thread}: {record.type}: {message}",
        advice_for(record.message) or "correct this error; the whole traceback is in the output of the rank",
    )


def _shorten(message: str) -> str:
    lines = printable(message).splitlines() or [""]
    if len(lines) > _MAX_MESSAGE_LINES:
        lines = [*lines[:_MAX_MESSAGE_LINES], f"... ({len(lines) - _MAX_MESSAGE_LINES} more lines)"]
    return "\n         ".join(line[:400] for line in lines)


_SIGNAL_HINTS = {
    "SIGKILL": "often the system ran out of memory (see dmesg): use fewer processes or smaller batches; or someone ran kill -9",
    "SIGSEGV": "a native library crashed at the line above; update it, or leave it out to see",
    "SIGABRT": "a native library gave up; gloo does so when ranks call different collectives or sizes: try --debug",
    "SIGBUS": "often shared memory is full: enlarge /dev/shm, or use fewer DataLoader workers",
    "SIGTERM": "someone or the scheduler stopped this process; echelon did not",
    "SIGINT": "someone interrupted this process; echelon did not",
}


def _signal(number: int) -> tuple[str, str]:
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = "an unknown signal"
    return f"{name} (signal {number})", _SIGNAL_HINTS.get(name, "find out who sends this signal")


def _told_frames(end: RankEnd) -> list[Frame]:
    """Return the last frames of the user's own code, innermost first; without any, the innermost of all."""
    if end.record is not None and (end.exit_code is None or end.exit_code >= 0):
        frames = list(reversed(end.record.frames))
    else:
        frames = list(end.stack)
    return ([frame for frame in frames if frame.user] or frames[:1])[:_MAX_FRAMES]


def _frame_line(frame: Frame) -> str:
    near = os.path.relpath(frame.file)
    name = frame.file if near.startswith("..") else near
    line = f"{name}:{frame.line} in {frame.function}" + (f": {frame.source}" if frame.source else "")
    return line.replace("\n", "\\n")  # what is in a name must not look like a line of the report


def _others(first: RankEnd, ends: Sequence[RankEnd]) -> str:
    ranks: dict[str, list[int]] = {}
    for end in ends:
        if end.rank != first.rank:
            ranks.setdefault(_end_in_words(end, first, ends), []).append(end.rank)
    return "; ".join(f"{name_ranks(numbers)} {words}" for words, numbers in ranks.items())


def _end_in_words(end: RankEnd, first: RankEnd, ends: Sequence[RankEnd]) -> str:
    cause = cause_of(end, ends)
    if cause is Cause.COMMUNICATION:
        return "then lost contact"
    if end.exit_code == 0:
        return "ended normally"
    if not end.failed:
        return "stopped by echelon"
    began, ended = _time_of(first), _time_of(end)
    later = f" {timedelta(microseconds=(ended - began) // 1000).total_seconds():.1f} s later" if began and ended else ""
    if end.record is not None:
        return f"failed{later} with {end.record.type}"
    assert end.exit_code is not None, end
    return (
        f"was killed by {_signal(-end.exit_code)[0]}{later}"
        if end.exit_code < 0
        else f"ended with exit code {end.exit_code}{later}"
    )
