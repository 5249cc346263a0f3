"""A rank's reporter: a thread that samples the main thread twice a second and saves all stacks on request.

A sample takes about 20 microseconds, and the program does not have to use echelon. The launcher's worker loads this file by
path and passes it the modules ``board`` and ``call_site``, so this file uses only the standard library.
"""

from __future__ import annotations

import _thread
import dataclasses
import faulthandler
import json
import os
import pickle
import signal
import sys
import time
import traceback
from types import FrameType, ModuleType
from typing import IO, Any

ANSWER_FILE = "stacks_{}.json"
"""File in the rank's folder; the placeholder is the number of the request."""

ABORT_FILE = "abort.json"
"""File with the same contents, written when native code aborts the rank with ``std::terminate``."""

END_FILE = "end.json"
"""File with the same contents, written at the exit of a program that succeeded: its last line and its collectives."""

# Makes a rank write its stacks even if native code holds the GIL. Programs do not use this signal.
DUMP_SIGNAL = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else None

_PERIOD_S = 0.5
_NUM_ENTRIES = 200  # per group, from torch's flight recorder


class Reporter:
    """Samples the thread that creates it.

    Args:
        board: the module ``echelon.status.board``, which may have been loaded under another name.
        call_site: module ``echelon.status.call_site``, likewise.
        where: the board's path and this rank's slot, as ``PATH:INDEX``.
        folder: this rank's folder, where answers are written.
        stack_file: file to write the stacks to when the launcher sends ``DUMP_SIGNAL``.
    """

    def __init__(self, board: ModuleType, call_site: ModuleType, where: str, folder: str, stack_file: IO[str]) -> None:
        path, _, index = where.rpartition(":")
        self._slot = board.Slot(path, int(index))
        self._board, self._call_site, self._folder = board, call_site, folder
        self._subject = _thread.get_ident()
        self._pid = os.getpid()
        self._answered = 0
        self._last_line: tuple[str, int] = ("", 0)
        self._end = board.Doing.NOTHING
        self._closing = _thread.allocate_lock()  # held until close; the thread sleeps on it
        self._closing.acquire()
        self._sampling = _thread.allocate_lock()
        self._terminate: list[Any] = []  # native code calls it, so it must live as long as the process
        self._dumps = board.Doing.NOTHING
        if DUMP_SIGNAL is not None:
            faulthandler.register(DUMP_SIGNAL, file=stack_file, all_threads=True, chain=False)
            self._dumps = board.Doing.DUMPS

    def start(self) -> None:
        """Start the reporter thread. ``threading`` does not list this thread."""
        _thread.start_new_thread(self._run, ())

    def close(self, *, finished: bool, exit_line: dict[str, Any] | None = None) -> None:
        """Stop sampling, and record for ranks that still wait for this one how it ended.

        Waits for any sample in progress to finish, because sampling during interpreter exit could abort the process.

        Args:
            finished: whether the program succeeded, so a crash at interpreter exit does not count as a failure.
            exit_line: the user's line (``CallSite``) that called ``sys.exit``; None if the program reached its end.
        """
        if os.getpid() != self._pid:
            return  # a forked child of the program
        kinds = self._board.Doing
        self._end = kinds.ENDED | (kinds.FINISHED if finished else 0)
        self._closing.release()
        if finished and "torch._C._distributed_c10d" in sys.modules:
            ending = "end" if exit_line is None else "exit"
            own: dict[str, Any] = {"call_site": exit_line, "trains": False, "stack": [], "ending": ending}
            self._save(END_FILE, {**own, "collectives": self.collectives(has_ended=True)})
        with self._sampling:
            self._sample()

    def _run(self) -> None:
        while not self._closing.acquire(timeout=_PERIOD_S):
            with self._sampling:
                if not self._end:  # close() may have taken the last sample since the time was up
                    self._sample()

    def _sample(self) -> None:
        frame = sys._current_frames().get(self._subject)
        if frame is None:
            return
        stack = self._call_site.summarize_stack(frame)
        kinds = self._board.Doing
        doing = self._dumps | self._end
        doing |= kinds.COMMUNICATES if stack.communicates else 0
        doing |= kinds.TRAINS if stack.trains else 0
        doing |= kinds.COMPILES if stack.compiles else 0
        doing |= kinds.IMPORTS if stack.imports else 0
        doing |= kinds.DEBUGS if stack.debugs else 0
        doing |= kinds.ELSEWHERE if stack.is_elsewhere else 0
        request = self._slot.request
        if request != self._answered and not self._end:
            self._write(ANSWER_FILE.format(request), frame)
            self._answered = request
        if self._end:  # this thread runs functions of Python's exit
            line_of_program = self._last_line
        else:
            line_of_program = self._last_line = stack.file, stack.line
        if not self._terminate and "torch._C._distributed_c10d" in sys.modules and sys.platform == "linux":
            self._write_at_terminate()
        self._slot.watch(
            self._board.Watch(
                time_ns=time.monotonic_ns(),
                pid=self._pid,
                signature=stack.signature,
                num_collectives=_num_collectives(),
                doing=doing,
                answered=self._answered,
                line=line_of_program[1],
                file=line_of_program[0],
            )
        )

    def collectives(self, *, has_ended: bool = False) -> dict[str, Any]:
        """Return the collectives that this rank has started (see ``_recorded``). Never raises an error."""
        try:
            return _recorded(self._call_site, has_ended=has_ended)
        except Exception as error:  # noqa: BLE001 - a failure of torch's private function must not hide the user's error
            return {"missing": f"torch's flight recorder failed: {type(error).__name__}: {error}"}

    def _write(self, name: str, frame: FrameType | None) -> None:
        call_site = self._call_site.call_site_of_thread(self._subject)
        own = _thread.get_ident()
        answer = {
            "call_site": None if call_site is None else dataclasses.asdict(call_site),
            "trains": frame is not None and self._call_site.summarize_stack(frame).trains,
            "stack": traceback.format_stack(frame) if frame is not None else [],
            "threads": [
                traceback.format_stack(f) for i, f in sys._current_frames().items() if i not in (self._subject, own)
            ],
            "collectives": self.collectives(),
        }
        self._save(name, answer)

    def _save(self, name: str, answer: dict[str, Any]) -> None:
        path = os.path.join(self._folder, name)
        try:
            with open(f"{path}.tmp", "w", encoding="utf-8", errors="backslashreplace") as file:
                json.dump(answer, file)
            os.replace(f"{path}.tmp", path)
        except OSError as problem:  # for example a full disk; the report shows that this rank did not answer
            print(f"echelon: cannot write {path}: {problem}", file=sys.stderr)

    def _write_at_terminate(self) -> None:
        """Record which collective this rank is in before gloo aborts the rank. The aborted rank is often not the cause.

        If ranks pass different sizes, gloo throws an exception in its own thread, and C++ calls ``std::terminate``.
        """
        import ctypes  # noqa: PLC0415 - takes a few milliseconds

        try:
            set_terminate = ctypes.CDLL("libstdc++.so.6")._ZSt13set_terminatePFvvE
        except (OSError, AttributeError):  # torch was built with another C++ library
            self._terminate = [None]
            return
        kind = ctypes.CFUNCTYPE(None)
        set_terminate.restype, set_terminate.argtypes = ctypes.c_void_p, [kind]

        def terminate() -> None:
            if os.getpid() == self._pid:
                self._write(ABORT_FILE, sys._current_frames().get(self._subject))
            if previous:
                kind(previous)()

        self._terminate = [kind(terminate)]
        previous = set_terminate(self._terminate[0])


def _num_collectives() -> int:
    """Return the number of collectives (with gloo, also messages) that this process has started in all groups."""
    torch_groups = sys.modules.get("torch.distributed.distributed_c10d")
    world = getattr(torch_groups, "_world", None)  # None while torch is being imported
    if world is None:
        return 0
    total = 0
    for group in list(world.pg_map):
        try:
            total += sum(group._get_backend(d)._get_sequence_number_for_group() for d in group._device_types)
        except RuntimeError:  # the backend does not count (mpi), or the group is being created or destroyed
            continue
    return total


def _recorded(call_site: ModuleType, *, has_ended: bool) -> dict[str, Any]:
    """Return the contents of torch's flight recorder: ``{"groups": {name: {"ranks", "entries"}}}``, or ``{"missing": why}``.

    Each entry is ``[number, kind, input sizes, dtypes, whether it is complete, the user's line]``. The oldest entry comes first, and
    point-to-point messages are omitted. If the program has ended, groups that it has destroyed are included, without their ranks.
    """
    native = sys.modules.get("torch._C._distributed_c10d")
    torch_groups = sys.modules.get("torch.distributed.distributed_c10d")
    world = getattr(torch_groups, "_world", None)
    if native is None or world is None:
        return {"missing": "the program has not imported torch.distributed"}
    dump = getattr(native, "_dump_fr_trace", None)  # unlike the JSON, with the Python stacks
    if dump is None:
        return {
            "missing": "this version of torch has no flight recorder for collectives (it is available in torch 2.13)"
        }
    # To name the lines of a stack, torch looks into its compiler, which it imports for that. This would take seconds, and disturb an
    # import of the main thread.
    with_lines = "_inductor" in vars(sys.modules["torch"])
    trace = pickle.loads(dump(includeStackTraces=with_lines))  # of this process
    # Without entries, the recorder is off, or no collective has started yet.
    if "entries" not in trace and os.environ.get("TORCH_FR_BUFFER_SIZE") == "0":  # noqa: TID251 - only the standard library
        return {"missing": "torch's flight recorder is disabled (TORCH_FR_BUFFER_SIZE=0)"}
    ranks = {group.group_name: sorted(world.pg_group_ranks.get(group, {})) for group in list(world.pg_map)}
    groups: dict[str, Any] = {name: {"ranks": members, "entries": []} for name, members in ranks.items()}
    found: dict[str, list[Any]] = {}
    for entry in trace.get("entries", ()):
        name = entry["process_group"][0]
        if has_ended and name:
            groups.setdefault(name, {"ranks": [], "entries": []})
        if name in groups and not entry["is_p2p"]:
            found.setdefault(name, []).append(entry)
    for name, entries in found.items():
        groups[name]["entries"] = [
            [
                entry["collective_seq_id"],
                entry["profiling_name"].rpartition(":")[2],
                entry["input_sizes"],
                entry["input_dtypes"],
                entry["retired"],
                call_site.user_line(entry.get("frames", ())),
            ]
            for entry in entries[-_NUM_ENTRIES:]
        ]
    return {"groups": groups}
