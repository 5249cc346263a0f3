"""The reporter of a rank: a thread that looks at the main thread twice a second, and writes down the stacks when asked.

The program pays nothing for it but these looks, some twenty microseconds each, and need not use echelon. The launcher's
worker loads this file by its path and hands it what it needs of ``board`` and ``place``: standard library only.
"""

from __future__ import annotations

import _thread
import faulthandler
import json
import os
import signal
import sys
import time
import traceback
from types import FrameType, ModuleType
from typing import IO, Any

__all__ = ["ABORT_FILE", "ANSWER_FILE", "DUMP_SIGNAL", "Reporter"]

ANSWER_FILE = "stacks_{}.json"
"""In the folder of the rank, with the number of the question."""

ABORT_FILE = "abort.json"
"""The same, of a rank that native code ends by ``std::terminate``."""

# One that no program uses: a rank whose interpreter is held by native code writes its stacks when it gets it.
DUMP_SIGNAL = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else None

_PERIOD_S = 0.5
_NUM_ENTRIES = 200  # of torch's flight recorder, for each group


class Reporter:
    """Watches the thread that makes it.

    Args:
        board: the module ``echelon.status.board``, under whatever name it was loaded.
        place: the module ``echelon.status.call_site``.
        where: path and slot of the board, as ``PATH:INDEX``.
        folder: of this rank, for answers.
        stack_file: gets the stacks when the launcher sends ``DUMP_SIGNAL``.
    """

    def __init__(self, board: ModuleType, place: ModuleType, where: str, folder: str, stack_file: IO[str]) -> None:
        path, _, index = where.rpartition(":")
        self._slot = board.Slot(path, int(index))
        self._board, self._place, self._folder = board, place, folder
        self._subject = _thread.get_ident()
        self._pid = os.getpid()
        self._answered = 0
        self._end = board.Doing.NOTHING
        self._closing = _thread.allocate_lock()  # held until close: the thread sleeps in it
        self._closing.acquire()
        self._looking = _thread.allocate_lock()
        self._terminate: list[Any] = []  # what native code is to call: it must live as long as the process
        self._dumps = board.Doing.NOTHING
        if DUMP_SIGNAL is not None:
            faulthandler.register(DUMP_SIGNAL, file=stack_file, all_threads=True, chain=False)
            self._dumps = board.Doing.DUMPS

    def start(self) -> None:
        """Begin; the thread is no ``threading.Thread``, so that programs do not meet it when they list theirs."""
        _thread.start_new_thread(self._run, ())

    def close(self, *, finished: bool) -> None:
        """Stop; ``finished``: the program has ended well, and what the interpreter does now is not its failure.

        Native code that ends while the interpreter does would abort the process: no look is under way when this returns.
        """
        if os.getpid() != self._pid:
            return  # a child that the program has forked
        kinds = self._board.Doing
        self._end = kinds.ENDED | (kinds.FINISHED if finished else 0)
        self._closing.release()
        with self._looking:
            self._look()

    def _run(self) -> None:
        while not self._closing.acquire(timeout=_PERIOD_S):
            with self._looking:
                self._look()

    def _look(self) -> None:
        frame = sys._current_frames().get(self._subject)
        if frame is None:
            return
        sight = self._place.sight_of(frame)
        kinds = self._board.Doing
        doing = self._dumps | self._end
        doing |= kinds.COMMUNICATES if sight.communicates else 0
        doing |= kinds.TRAINS if sight.trains else 0
        doing |= kinds.COMPILES if sight.compiles else 0
        doing |= kinds.IMPORTS if sight.imports else 0
        doing |= kinds.DEBUGS if sight.debugs else 0
        doing |= kinds.ELSEWHERE if sight.is_elsewhere else 0
        question = self._slot.question
        if question != self._answered and not self._end:
            self._write(ANSWER_FILE.format(question), frame)
            self._answered = question
        if not self._terminate and "torch._C._distributed_c10d" in sys.modules and sys.platform == "linux":
            self._write_at_terminate()
        self._slot.watch(
            self._board.Watch(
                time_ns=time.monotonic_ns(),
                pid=self._pid,
                signature=sight.signature,
                num_collectives=_num_collectives(),
                doing=doing,
                answered=self._answered,
                line=sight.line,
                file=sight.file,
            )
        )

    def collectives(self) -> dict[str, Any]:
        """Return what this rank has begun (``_recorded``); never raises."""
        try:
            return _recorded()
        except Exception as error:  # noqa: BLE001 - torch's private call: what it lacks must not hide the user's own error
            return {"missing": f"torch's flight recorder failed: {type(error).__name__}: {error}"}

    def _write(self, name: str, frame: FrameType | None) -> None:
        place = self._place.place_of_thread(self._subject)
        own = _thread.get_ident()
        answer = {
            "place": None if place is None else json.loads(place.to_json()),
            "trains": frame is not None and self._place.sight_of(frame).trains,
            "stack": traceback.format_stack(frame) if frame is not None else [],
            "threads": [
                traceback.format_stack(f) for i, f in sys._current_frames().items() if i not in (self._subject, own)
            ],
            "collectives": self.collectives(),
        }
        path = os.path.join(self._folder, name)
        try:
            with open(f"{path}.tmp", "w", encoding="utf-8", errors="backslashreplace") as file:
                json.dump(answer, file)
            os.replace(f"{path}.tmp", path)
        except OSError as problem:  # a full disk: the report says that this rank gave no answer
            print(f"echelon: cannot write {path}: {problem}", file=sys.stderr)

    def _write_at_terminate(self) -> None:
        """Write down which collective this rank is in before gloo aborts it: by then it is often an innocent one.

        gloo throws in a thread of its own when ranks bring different sizes, and C++ then calls ``std::terminate``.
        """
        import ctypes  # noqa: PLC0415 - a few milliseconds, when torch has been imported anyway

        try:
            set_terminate = ctypes.CDLL("libstdc++.so.6")._ZSt13set_terminatePFvvE
        except (OSError, AttributeError):  # torch was built with another library of C++
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
    """Return how many collectives (on gloo also messages) this process has begun, in all its groups together."""
    torch_groups = sys.modules.get("torch.distributed.distributed_c10d")
    world = getattr(torch_groups, "_world", None)  # None: torch is being imported
    if world is None:
        return 0
    total = 0
    for group in list(world.pg_map):
        try:
            total += sum(group._get_backend(d)._get_sequence_number_for_group() for d in group._device_types)
        except RuntimeError:  # a backend that does not count (mpi), or a group that is just being made or ended
            continue
    return total


def _recorded() -> dict[str, Any]:
    """Return what torch's flight recorder knows: ``{"groups": {name: {"ranks", "entries"}}}``, or ``{"missing": why}``.

    An entry is ``[number, kind, input sizes, dtypes, whether it is over]``, the oldest first; messages between two ranks
    are left out.
    """
    native = sys.modules.get("torch._C._distributed_c10d")
    torch_groups = sys.modules.get("torch.distributed.distributed_c10d")
    world = getattr(torch_groups, "_world", None)
    if native is None or world is None:
        return {"missing": "the program has not imported torch.distributed"}
    dump = getattr(native, "_dump_fr_trace_json", None)
    if dump is None:
        return {"missing": "this torch has no flight recorder for collectives (2.13 has)"}
    trace = json.loads(dump())
    if "entries" not in trace:
        return {"missing": "torch's flight recorder is off (TORCH_FR_BUFFER_SIZE=0)"}
    ranks = {group.group_name: sorted(world.pg_group_ranks.get(group, {})) for group in list(world.pg_map)}
    groups: dict[str, Any] = {name: {"ranks": members, "entries": []} for name, members in ranks.items()}
    for entry in trace["entries"]:
        name = entry["process_group"][0]
        if name in groups and not entry["is_p2p"]:
            groups[name]["entries"].append(
                [
                    entry["collective_seq_id"],
                    entry["profiling_name"].rpartition(":")[2],
                    entry["input_sizes"],
                    entry["input_dtypes"],
                    entry["retired"],
                ]
            )
    for group in groups.values():
        del group["entries"][:-_NUM_ENTRIES]
    return {"groups": groups}
