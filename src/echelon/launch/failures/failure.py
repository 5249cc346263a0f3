"""A run's first error: finds the rank that failed first, and explains the failure in a few lines.

Sorting by time alone would blame the wrong rank. When a rank dies, its sockets close before its exit is visible, so
that "connection closed" errors on other ranks appear earlier. Causes are therefore compared before times.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from functools import lru_cache
from types import MappingProxyType
from typing import TypeAlias

from echelon.base.messages.translation import gettext as _, gettext_noop as N_
from echelon.base.printable import printable
from echelon.diagnose.collectives import CollectiveCall, History
from echelon.diagnose.stall import EARLY_EXIT, Answer, Class, Stall, describe_ending, disagreement, name_ranks
from echelon.status.board import StatusNote, Watch
from echelon.status.call_site import CallSite


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One stack frame."""

    file: str
    line: int
    function: str
    source: str = ""
    user: bool = True
    """Whether the file is user code rather than part of an installed package."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorRecord:
    """An exception, as recorded by the rank that raised it."""

    time_ns: int
    """``time.monotonic_ns()`` when it was raised; comparable between processes on the same machine."""
    type: str
    message: str
    """The whole text, in English."""
    what: str = ""
    """The parts of an error of echelon, in the user's language; empty for other errors."""
    where: str = ""
    do: str = ""
    frames: tuple[Frame, ...] = ()
    """Stack frames, outermost first as in a traceback."""
    chain: tuple[str, ...] = ()
    """Chained causes and contexts, as ``type: message``."""
    thread: str | None = None
    """Thread name, or None for the main thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnd:
    """How a rank ended, recorded before the launcher stops any rank."""

    rank: int
    exit_code: int | None
    """Exit code; None while the rank is running, -n if signal n killed it."""
    ended_ns: int | None = None
    """``time.monotonic_ns()`` when the launcher saw the exit."""
    record: ErrorRecord | None = None
    stack: tuple[Frame, ...] = ()
    """Python stack when native code crashed, innermost frame first."""
    last_words: Answer | None = None
    """The rank's call site and the collectives that it had started when it ended or, if it was still running after
    another rank's failure, when the launcher requested them."""
    note: StatusNote | None = None
    """The last record of its program: its step and phase."""
    watch: Watch | None = None
    """The last heartbeat: its line, up to half a second before."""

    @property
    def failed(self) -> bool:
        """Whether the rank has failed. An exception counts even before the rank exits (half a second later)."""
        if self.exit_code is None:
            return self.record is not None and self.record.thread is None
        return self.exit_code != 0


class Cause(IntEnum):
    """Why a rank ended. The rank with the lowest value is the most likely origin of a failure."""

    OWN = 0  # signal, exception not caused by another rank, sys.exit, os._exit
    LEFT_EARLY = 1  # exit code 0 while other ranks still waited for it
    COMMUNICATION = 2  # lost contact, nearly always because another rank ended
    NONE = 3  # succeeded, or is running


# Messages of gloo, NCCL and the store (torch 2.7 to 2.13), searched only in errors of the types below. For example, a
# ConnectionResetError of a download is a failure of the script.
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
    return any(map(_is_communication_error, (f"{record.type}: {record.message}", *record.chain)))


@lru_cache(maxsize=1024)  # a thousand ranks that lost contact have few different errors
def _is_communication_error(error: str) -> bool:
    return bool(_COMMUNICATION_TYPE.search(error.partition(": ")[0]) and _COMMUNICATION_TEXT.search(error))


def cause_of(end: RankEnd, ends: Sequence[RankEnd]) -> Cause:
    """Return the cause of ``end``, given how all ranks ended (``ends``)."""
    if end.failed:
        lost = end.record is not None and _is_communication(end.record) and (end.exit_code is None or end.exit_code > 0)
        return Cause.COMMUNICATION if lost else Cause.OWN
    if end.exit_code == 0 and any(o.failed and o.record is not None and _is_communication(o.record) for o in ends):
        return Cause.LEFT_EARLY
    return Cause.NONE


def _causes_of(ends: Sequence[RankEnd]) -> list[Cause]:
    """Return the cause of each end."""
    # Whether another rank lost contact is the same question for all ranks that exited with code 0.
    exited = next((end for end in ends if end.exit_code == 0), None)
    cause_of_exits = Cause.NONE if exited is None else cause_of(exited, ends)
    return [cause_of_exits if end.exit_code == 0 else cause_of(end, ends) for end in ends]


def _time_of(end: RankEnd) -> int | None:
    return end.record.time_ns if end.record is not None else end.ended_ns


def first_failure(ends: Sequence[RankEnd]) -> RankEnd | None:
    """Return the end of the rank that failed first (lowest cause, then earliest time), or None if no rank failed."""
    failed = [(cause, _time_of(end) or 0, end.rank, end) for cause, end in zip(_causes_of(ends), ends)]
    failed = [entry for entry in failed if entry[0] is not Cause.NONE]
    return min(failed, key=lambda entry: entry[:3])[3] if failed else None


def is_settled(ends: Sequence[RankEnd]) -> bool:
    """Return whether it is already certain which rank failed first, even if more ranks end later.

    It is certain once a rank that failed by itself has an exit code, because other ranks end later.
    """
    first = first_failure(ends)
    if first is None or all(end.exit_code is not None for end in ends):
        return True
    if _mismatch(first) is not None and any(end.exit_code is None and end.record is None for end in ends):
        return False  # the others are about to raise the same, each with its own call
    return cause_of(first, ends) is Cause.OWN and first.exit_code is not None


def exit_status(ends: Sequence[RankEnd]) -> int:
    """Return the launcher's exit code: the first failed rank's code, 128 + n for signal n, or 0 if no rank failed."""
    first = first_failure(ends)
    if first is None:
        return 0
    code = first.exit_code
    if not code:  # it exited early with 0, or its exit was not seen in time; the run has failed nevertheless
        code = next((end.exit_code for end in ends if end.failed and end.exit_code), None) or 1
    return 128 - code if code < 0 else code & 0xFF or 1


_MAX_FRAMES = 4
_MAX_OTHERS = 3
"""Maximum number of other errors that are shown with their lines."""
_MAX_TEXT = 160
_MAX_MESSAGE_LINES = 6


def explain(
    ends: Sequence[RankEnd], *, logs: str, machines: Mapping[int, str] = MappingProxyType({})
) -> tuple[str, str, str | None]:
    """Return what happened, where, and what to do, in a few lines each; None if the error itself says all that is known.

    Args:
        ends: how each rank ended; at least one rank failed.
        logs: where the ranks' output is saved, or how to save it.
        machines: maps each rank to its machine's name; empty on a single machine.
    """
    first = first_failure(ends)
    assert first is not None, ends
    differing = _disagreement(first, ends)
    if differing is not None:
        return _explain_disagreement(differing, first, ends, logs=logs, machines=machines)
    what, do = _verdict(first, ends)
    rank, place = _("rank {rank}", rank=first.rank), _place_of(first)
    lines = [_of_all(rank, len(ends), _on([first.rank], machines)) + place + _step_of(first)]
    if cause_of(first, ends) is Cause.LEFT_EARLY:
        lines.append(describe_ending(first.last_words, None, first.watch))
    frames = _shown_frames(first)
    aborted = (
        first.last_words if first.exit_code == -signal.SIGABRT and not any(frame.user for frame in frames) else None
    )
    if aborted is not None and aborted.call_site is not None:
        lines.append(str(aborted.call_site))  # a thread of a native library aborted; the main thread waits there
    else:
        lines += map(_frame_line, frames)
    others = _others(first, ends)
    if others:
        what = _("{what}\n  others: {others}", what=what, others=others)
    remedies = [do] if do else []
    for ranks in _other_errors(first, ends)[:_MAX_OTHERS]:
        other, names = ranks[0], name_ranks([end.rank for end in ranks])
        lines += [f"{names}{_place_of(other)}", *map(_frame_line, _shown_frames(other)[:1])]
        remedy = _verdict(other, ends)[1]
        if remedy and remedy != do:
            remedies.append(_("{ranks}: {state}", ranks=names, state=remedy))
    where = "\n         ".join(lines)
    if not remedies:
        return what, _("{where}\n  logs:  {logs}", where=where, logs=logs), None
    return what, where, _("{do}\n  logs:  {logs}", do="\n         ".join(remedies), logs=logs)


def lost_each_other(ends: Sequence[RankEnd]) -> bool:
    """Return whether ranks only lost contact or gloo aborted one, so no rank is known to have failed by itself."""
    first = first_failure(ends)
    return first is not None and (cause_of(first, ends) is Cause.COMMUNICATION or first.exit_code == -signal.SIGABRT)


def _disagreement(first: RankEnd, ends: Sequence[RankEnd]) -> Stall | None:
    if _mismatch(first) is not None:
        return disagreement({end.rank: words for end in ends if (words := _mismatch(end)) is not None})
    left_early = cause_of(first, ends) is Cause.LEFT_EARLY
    if not lost_each_other(ends) and not left_early:
        return None
    found = disagreement({end.rank: end.last_words for end in ends if end.last_words is not None})
    # If a rank is only behind, that is not the cause of an abort; and a rank that has left is behind in any case.
    is_behind = found is not None and found.kind is Class.MISSING
    return None if is_behind and (left_early or first.exit_code == -signal.SIGABRT) else found


# What torch raises on every rank with TORCH_DISTRIBUTED_DEBUG=DETAIL (echelon launch --debug); the rank's own call comes first.
_MISMATCH = re.compile(
    r"Detected mismatch between collectives on ranks\. Rank \d+ is running collective: CollectiveFingerPrint\("
    r"SequenceNumber=(?P<number>\d+),? ?OpType=_?(?P<kind>\w+)(?:, TensorShape=\[(?P<sizes>[\d, ]*)\], TensorDtypes=(?P<dtype>\w+))?"
)
_KINDS = {
    "ALLREDUCE": "all_reduce",
    "ALLREDUCE_COALESCED": "all_reduce_coalesced",
    "ALLGATHER": "all_gather",
    "ALLGATHER_BASE": "all_gather_into_tensor",
    "REDUCE_SCATTER_BASE": "reduce_scatter_tensor",
    "ALLTOALL": "all_to_all",
    "ALLTOALL_BASE": "all_to_all_single",
}


def _mismatch(end: RankEnd) -> Answer | None:
    """Return the call that torch compared with those of the other ranks and refused, or None if the rank did not end so."""
    record = end.record
    found = None if record is None else _MISMATCH.search(record.message)
    if record is None or found is None:
        return None
    kind = _KINDS.get(found["kind"], found["kind"].lower())
    sizes = (tuple(map(int, re.findall(r"\d+", found["sizes"]))),) if found["sizes"] is not None else ()
    dtypes = (found["dtype"],) if found["dtype"] else ()
    call = CollectiveCall(number=int(found["number"]) + 1, kind=kind, sizes=sizes, dtypes=dtypes, is_refused=True)
    site = next((frame for frame in reversed(record.frames) if frame.user), None)
    words = end.last_words or Answer()
    return Answer(
        call_site=None if site is None else CallSite(file=site.file, line=site.line, source=site.source),
        trains=words.trains,
        loops=words.loops,
        histories={"": History(ranks=(), started=(call,))},
    )


def _explain_disagreement(
    found: Stall, first: RankEnd, ends: Sequence[RankEnd], *, logs: str, machines: Mapping[int, str]
) -> tuple[str, str, str]:
    what, where, do = explain_collectives(found, world_size=len(ends), logs=logs, machines=machines)
    if _mismatch(first) is None:
        aborted = ""
        if first.exit_code == -signal.SIGABRT:
            aborted = _("; gloo aborted rank {rank} as a result", rank=first.rank)
        what = _("{what}\n  others: the ranks lost contact with each other{aborted}", what=what, aborted=aborted)
    return what, where, do


def explain_collectives(
    found: Stall, *, world_size: int, logs: str, machines: Mapping[int, str]
) -> tuple[str, str, str]:
    """Return what happened, where, and what to do, for ranks that have called different collectives (``disagreement``)."""
    lines = "".join(f"\n    {line}" for line in found.lines())
    what = _("{kind}: {what}{lines}", kind=_(found.kind.value), what=found.what, lines=lines)
    culprits = found.culprits or tuple(sorted(found.ranks))
    where = _of_all(name_ranks(culprits), world_size, _on(culprits, machines))
    return what, where, _("{do}\n  logs:  {logs}", do=found.do, logs=logs)


def _of_all(ranks: str, number: int, machines: str) -> str:
    return _("{ranks} of {number}{machines}", ranks=ranks, number=number, machines=machines)


def _on(ranks: Sequence[int], machines: Mapping[int, str]) -> str:
    names = list(dict.fromkeys(machines[rank] for rank in ranks if rank in machines))
    return _(", on {names}", names=_(" and ").join(names[:2])) if names else ""


def _verdict(end: RankEnd, ends: Sequence[RankEnd]) -> tuple[str, str]:
    """Return what happened to the rank, and what to do; an empty string if its error itself says all that is known."""
    record, who = end.record, _("rank {rank}", rank=end.rank)
    if end.exit_code is not None and end.exit_code < 0:
        name, hint = _signal(-end.exit_code)
        return _("{who} failed first: killed by {name}", who=who, name=name), hint
    if cause_of(end, ends) is Cause.LEFT_EARLY:
        return (
            _("{who} failed first: it exited (code 0) while other ranks were still waiting for it", who=who),
            _(EARLY_EXIT),
        )
    if record is None:
        return (
            _(
                "{who} failed first: exit code {exit_code}, without a Python exception",
                who=who,
                exit_code=end.exit_code,
            ),
            _("look for os._exit or a native library that ends the process, and read the program's output above"),
        )
    message = _shorten(record.what or record.message)
    if record.type == "SystemExit":
        return (
            _("{who} failed first: sys.exit({message})", who=who, message=message),
            _(
                "the program chose this exit code, and its last lines above may say why; argparse exits with 2 if it does not know an "
                "argument. Only code 0 means success"
            ),
        )
    thread = _(" (in thread {thread!r})", thread=record.thread) if record.thread else ""
    if cause_of(end, ends) is Cause.COMMUNICATION:
        return (
            _(
                "{who} lost contact with another rank{thread}: {type}: {message}",
                who=who,
                thread=thread,
                type=record.type,
                message=message,
            ),
            _("no rank failed by itself; look for a rank that hangs, skips a collective or exceeds the timeout"),
        )
    return (
        _("{who} failed first{thread}: {type}: {message}", who=who, thread=thread, type=record.type, message=message),
        record.do or next((_(advice) for part, advice in _ADVICE if part in record.message), ""),
    )


def _place_of(end: RankEnd) -> str:
    where = "" if end.record is None else _RANK.sub("", end.record.where)
    return _(", {place}", place=where) if where else ""


_RANK = re.compile("^rank \\d+(, |\uff0c|$)")


def _step_of(end: RankEnd) -> str:
    note = end.note
    if note is None or not (note.step or note.phase):
        return ""
    step = _("step {step}", step=note.step)
    return _(", ") + step + (_(", ") + _(str(note.phase)) if note.phase else "")


def _shorten(message: str) -> str:
    lines = printable(message).splitlines() or [""]
    if len(lines) > _MAX_MESSAGE_LINES:
        lines = [*lines[:_MAX_MESSAGE_LINES], _("... ({number} more lines)", number=len(lines) - _MAX_MESSAGE_LINES)]
    return "\n         ".join(line[:400] for line in lines)


_SIGNAL_HINTS = {
    "SIGKILL": N_(
        "if dmesg shows an out-of-memory kill, use fewer processes or smaller batches; otherwise, someone ran kill -9"
    ),
    "SIGSEGV": N_("a native library crashed at the line above; update it, or run without it"),
    "SIGABRT": N_(
        "read the text that the native library printed above. gloo aborts if ranks pass different sizes to a collective, or to send() "
        "and recv(): compare what each rank calls at this point"
    ),
    "SIGBUS": N_("enlarge /dev/shm, which is probably full, or use fewer DataLoader workers"),
    "SIGTERM": N_("find out whether a user or the scheduler stopped this process; echelon did not stop it"),
    "SIGINT": N_("find out who interrupted this process; echelon did not interrupt it"),
}


def _signal(number: int) -> tuple[str, str]:
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = _("an unknown signal")
    hint = _SIGNAL_HINTS.get(name, N_("find out which process sent this signal"))
    return _("{name} (signal {number})", name=name, number=number), _(hint)


def _shown_frames(end: RankEnd) -> list[Frame]:
    """Return the last user code frames, innermost first, or the innermost frame if none is user code."""
    if end.record is not None and (end.exit_code is None or end.exit_code >= 0):
        frames = list(reversed(end.record.frames))
    else:
        frames = list(end.stack)
    return ([frame for frame in frames if frame.user] or frames[:1])[:_MAX_FRAMES]


def _frame_line(frame: Frame) -> str:
    near = os.path.relpath(frame.file)
    name = frame.file if near.startswith("..") else near
    line = f"{name}:{frame.line} in {frame.function}" + (f": {frame.source}" if frame.source else "")
    return line.replace("\n", "\\n")  # a file name must not look like a line of the report


def _others(first: RankEnd, ends: Sequence[RankEnd]) -> str:
    ranks: dict[str, list[int]] = {}
    shown = {end.rank: same[0] for same in _other_errors(first, ends) for end in same}
    for end, cause in zip(ends, _causes_of(ends)):
        if end.rank != first.rank:
            ranks.setdefault(_describe_end(shown.get(end.rank, end), cause, first), []).append(end.rank)
    return _("; ").join(f"{name_ranks(numbers)} {text}" for text, numbers in ranks.items())


def _other_errors(first: RankEnd, ends: Sequence[RankEnd]) -> list[list[RankEnd]]:
    """Return the ranks that failed by themselves with errors other than the first one, grouped by error, in the order of time."""
    groups: dict[_ErrorKey | None, list[RankEnd]] = {}
    own = [end for end, cause in zip(ends, _causes_of(ends)) if cause is Cause.OWN and end.record is not None]
    for end in sorted(own, key=lambda end: (_time_of(end) or 0, end.rank)):
        groups.setdefault(_error_key(end), []).append(end)
    groups.pop(_error_key(first), None)
    return list(groups.values())


_ErrorKey: TypeAlias = tuple[str, str, tuple[tuple[str, int], ...]]


def _error_key(end: RankEnd) -> _ErrorKey | None:
    """Return what is equal for exceptions of one type in one line whose texts differ at most in numbers; None without a record."""
    record = end.record
    if record is None:
        return None
    return record.type, _NUMBER.sub("#", record.message), tuple((frame.file, frame.line) for frame in record.frames)


_NUMBER = re.compile(r"0x[0-9a-fA-F]+|\d+")


def _describe_end(end: RankEnd, cause: Cause, first: RankEnd) -> str:
    if cause is Cause.COMMUNICATION:
        frames = [frame for frame in _shown_frames(end)[:1] if frame.user]
        place = (_frame_line(frames[0]) if frames else "") + _step_of(end)
        return _("then lost contact, waiting at {place}", place=place) if place else _("then lost contact")
    if end.exit_code == 0:
        return _("ended normally")
    if not end.failed:
        return _("stopped by echelon")
    failed, ended = _time_of(first), _time_of(end)
    later = (
        _(" {seconds:.1f} s later", seconds=timedelta(microseconds=(ended - failed) // 1000).total_seconds())
        if failed and ended
        else ""
    )
    if end.record is not None:
        if _error_key(end) == _error_key(first):
            return _("failed with the same error")
        text = _shorten(end.record.what or end.record.message).splitlines()[0][:_MAX_TEXT]
        return _("failed{later} with {type}", later=later, type=end.record.type) + (f": {text}" if text else "")
    assert end.exit_code is not None, end
    return (
        _("was killed by {name}{later}", name=_signal(-end.exit_code)[0], later=later)
        if end.exit_code < 0
        else _("ended with exit code {exit_code}{later}", exit_code=end.exit_code, later=later)
    )


# Advice for errors of torch whose messages do not say what to do: a part of the message, and the advice.
_WHOLE = N_(
    "get full tensors with x.full_tensor() (call it on every rank) and full weights with "
    "accelerator.get_state_dict(model)"
)
_NO_GPU = N_(
    "replace x.cuda() and x.to('cuda') with x.to(accelerator.device) (at Level 1, setup().device), "
    "because this machine has no GPU or torch was built without CUDA; prepare() moves models and batches "
    "itself"
)
_PICKLE = N_(
    "make the object picklable for the DataLoader workers (create files, locks and connections on first "
    "use in __getitem__; define functions at module level), or set num_workers=0"
)
_OUT_OF_MEMORY = N_(
    "use a smaller micro-batch and gradient_accumulation_steps, which keep the batch of an update; store "
    "fewer activations (activation_checkpointing='selective' or 'full'); use mixed_precision='bf16', and "
    "master_weights='keep' if the model was loaded in bf16; with several devices, shard the model and the "
    "optimizer (engine='fsdp2'). If the message says that much memory is reserved but unallocated, set "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
)
_ASYNCHRONOUS = N_(
    "run again with CUDA_LAUNCH_BLOCKING=1: the device reports errors late, so the line above is often "
    "not the one that failed"
)
_ADVICE = (
    # "out of memory" is part of the message of torch.OutOfMemoryError, and of cudaMalloc's for memory outside torch's allocator.
    ("out of memory", _OUT_OF_MEMORY),
    (
        "device-side assert triggered",
        f"{_ASYNCHRONOUS}. The assertion is in the rank's output; most often an index or a label is out of range (token numbers up "
        "to the size of the embedding, class labels up to the number of outputs)",
    ),
    (
        "an illegal memory access was encountered",
        f"{_ASYNCHRONOUS}. A kernel read or wrote outside its tensors: look at custom kernels first; compute-sanitizer names the access",
    ),
    ("CUDA error", _ASYNCHRONOUS),
    ("Torch not compiled with CUDA enabled", _NO_GPU),
    ("Found no NVIDIA driver", _NO_GPU),
    ("No CUDA GPUs are available", _NO_GPU),
    (
        "'AcceleratedOptimizer' object is not callable",
        N_("prepare() returns the objects in the order of its arguments: model, optimizer = prepare(model, optimizer)"),
    ),
    (
        "must have the same dtype, but got",
        N_("convert the model's inputs to the dtype of its weights, for example with x.float()"),
    ),
    (
        "shapes cannot be multiplied",
        N_(
            "the last size of a layer's input must be its number of inputs (in_features); the first pair of sizes is the "
            "input's, the second the transposed weight's"
        ),
    ),
    (
        "num_samples should be a positive integer value, but got num_samples=0",
        N_("the dataset is empty: look at the path and the filters it was made with"),
    ),
    ("cannot pickle", _PICKLE),
    ("Can't pickle", _PICKLE),
    ("Can't get local object", _PICKLE),
    (
        "got mixed torch.Tensor and DTensor",
        "call the model that prepare() returned, not one of its submodules; a sharded tensor (fsdp2 engine) was "
        f"combined with a plain tensor; {_WHOLE}",
    ),
    (
        "is not supported for tensor subclasses",
        f"each rank holds only a shard of this tensor (fsdp2 engine); {_WHOLE}",
    ),
    (
        "out of bounds for storage of size 0",
        N_(
            "use engine='ddp' or 'zero1' for second-order gradients (create_graph=True); the backward pass "
            "needed parameters that the fsdp2 engine had already resharded"
        ),
    ),
    (
        "Expected to mark a variable ready only once",
        N_(
            "a parameter was used twice in one backward pass (for checkpointed layers, use use_reentrant=False "
            "or DistributedDataParallelKwargs(static_graph=True)), or it was frozen in a compiled model after "
            "prepare() (freeze it before prepare())"
        ),
    ),
    (
        "Expected to have finished reduction in the prior iteration",
        N_(
            "some parameters did not contribute to the loss of the previous step; use "
            "Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)]), or "
            "freeze them before the forward pass"
        ),
    ),
)
