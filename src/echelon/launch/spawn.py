"""``spawn``: run a function on several processes, as ``torch.multiprocessing.spawn``, with the environment set up."""

from __future__ import annotations

import os
import shutil
import tempfile
import textwrap
import threading
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, final

from echelon.base import environ
from echelon.base.errors import LaunchError, UsageError
from echelon.launch.environment import loopback_variables
from echelon.launch.failures.failure import RankEnd, explain, first_failure
from echelon.launch.failures.rank_errors import read_record
from echelon.launch.local.parents import own_identity
from echelon.launch.local.worker import ERROR_FILE, Recorder, die_with
from echelon.launch.rank_arguments import arguments_of_rank

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

    from torch.multiprocessing import ProcessContext

    from echelon.launch.multinode.rendezvous import LoopbackStore

__all__ = ["SpawnContext", "StartMethod", "spawn"]

# torch is imported inside the functions: this layer must import without it.

StartMethod = Literal["spawn", "fork", "forkserver"]

# How long the other ranks may take after a failure: their errors tell which rank failed first.
_GRACE = timedelta(seconds=1)
_TRACEBACK_FILE = "traceback.txt"


def spawn(
    fn: Callable[..., object],
    args: Sequence[object] = (),
    nprocs: int = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: StartMethod = "spawn",
) -> SpawnContext | None:
    """Call ``fn(rank, *args)`` on ``nprocs`` new processes of this machine.

    RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set, so ``setup()`` needs no arguments in
    ``fn``; the store lives in this process, on loopback.

    Args:
        fn: at the top level of a module, so that the new processes can import it.
        args: passed after the rank. A parameter ``world_size`` of ``fn`` that they lack is filled in.
        nprocs: number of processes.
        join: wait for all processes, and raise if one fails.
        daemon: the processes end with this one, and may not have children.
        start_method: ``fork`` also runs functions of a notebook, if no device was used before.

    Returns:
        None with ``join``, else the context to join later.

    Raises:
        UsageError: ``nprocs`` below 1, or ``args`` that do not fit ``fn``.
        LaunchError: a rank failed (with ``join``); includes the traceback of the first failed rank.

    Source: torch.multiprocessing.spawn.
    """
    if nprocs < 1:
        raise UsageError(
            f"spawn(nprocs={nprocs}): at least one process is needed",
            where="code spawn(nprocs=)",
            do="give nprocs=1 or more",
        )
    arguments_of_rank(fn, args, rank=0, world_size=nprocs, caller="spawn", rank_first=True)  # check that they fit
    import torch.multiprocessing as mp  # noqa: PLC0415 - torch-free layer

    from echelon.launch.multinode.rendezvous import LOOPBACK, LoopbackStore  # noqa: PLC0415 - imports torch

    store = LoopbackStore()
    directory = Path(tempfile.mkdtemp(prefix="echelon-spawn-"))
    common = {
        **loopback_variables(),
        "WORLD_SIZE": str(nprocs),
        "LOCAL_WORLD_SIZE": str(nprocs),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    start: Any = mp.start_processes  # torch has no types for it
    processes = start(
        _run_rank,
        # With join=False ranks may outlive this thread, with which torch would kill them.
        args=(fn, tuple(args), common, str(directory), own_identity(), not join and not _is_main_thread()),
        nprocs=nprocs,
        join=False,
        daemon=daemon,
        start_method=start_method,
    )
    context = SpawnContext(processes, store, directory)
    if not join:
        return context
    try:
        while not context.join():
            pass
    except BaseException:
        context.terminate()  # for example Ctrl-C: leave no process behind
        raise
    return None


def _run_rank(
    rank: int,
    fn: Callable[..., object],
    args: tuple[object, ...],
    common: dict[str, str],
    directory: str,
    parent: str,
    by_thread: bool,
) -> None:
    die_with(parent, by_thread=by_thread)  # torch uses SIGINT, which native code ignores
    environ.write({**common, "RANK": str(rank), "LOCAL_RANK": str(rank)})
    own = os.path.join(directory, str(rank))
    os.makedirs(own)
    try:
        size = int(common["WORLD_SIZE"])
        given, by_name = arguments_of_rank(fn, args, rank=rank, world_size=size, caller="spawn", rank_first=True)
        fn(*given, **by_name)
    except Exception as error:
        (Path(own) / _TRACEBACK_FILE).write_text(traceback.format_exc(), encoding="utf-8", errors="backslashreplace")
        Recorder(own).add(error, where="main")
        raise


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


@final
class SpawnContext:
    """The running ranks of ``spawn(join=False)``, and their store."""

    def __init__(self, processes: ProcessContext, store: LoopbackStore, directory: Path) -> None:
        self._context = processes
        self._store: LoopbackStore | None = store
        self._directory = directory

    @property
    def processes(self) -> list[BaseProcess]:
        """The processes, by rank."""
        return list(self._context.processes)

    def pids(self) -> list[int]:
        """Return the process ids, by rank."""
        return [process.pid for process in self._context.processes]

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        """Wait for one or more ranks to end; return True when all have ended, else call it again.

        Args:
            timeout: seconds to wait; None: until a rank ends.
            grace_period: seconds that the other ranks get after a failure.

        Raises:
            LaunchError: a rank failed; the others are stopped.
        """
        from torch.multiprocessing.spawn import ProcessException  # noqa: PLC0415 - torch-free layer

        grace = _GRACE.total_seconds() if grace_period is None else grace_period
        try:
            done = bool(self._context.join(timeout, grace))
        except ProcessException as error:
            raise self._explained(error) from error
        if done:
            self._close()
        return done

    def terminate(self) -> None:
        """Kill the ranks that still run."""
        for process in self._context.processes:
            if process.is_alive():
                process.kill()
            process.join()
        self._close()

    def _explained(self, error: Any) -> LaunchError:
        # Ranks that torch killed were still running, or had failed and were slow to exit.
        ends = []
        for rank, process in enumerate(self._context.processes):
            record, code = read_record(self._directory / str(rank) / ERROR_FILE), process.exitcode
            if rank != error.error_index and (code or 0) < 0:
                code = None if record is None else 1
            ends.append(RankEnd(rank=rank, exit_code=code, record=record))
        first = first_failure(ends)
        assert first is not None, ends
        what, where, do = explain(ends, logs=self._traceback(first.rank))
        self._close()
        return LaunchError(what, where=where, do=do)

    def _traceback(self, rank: int) -> str:
        try:
            text = (self._directory / str(rank) / _TRACEBACK_FILE).read_text(encoding="utf-8")
        except OSError:
            return f"rank {rank} left no traceback"
        return f"traceback of rank {rank}:\n{textwrap.indent(text.rstrip(), '    ')}"

    def _close(self) -> None:
        self._store = None
        shutil.rmtree(self._directory, ignore_errors=True)
