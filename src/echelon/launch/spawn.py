"""``spawn``: like ``torch.multiprocessing.spawn``, but sets each rank's environment variables."""

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
from echelon.launch.local.parents import own_identity
from echelon.launch.local.rank_errors import read_record
from echelon.launch.local.worker import ERROR_FILE, Recorder, die_with
from echelon.launch.rank_arguments import arguments_of_rank

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

    from torch.multiprocessing import ProcessContext

    from echelon.launch.loopback_store import LoopbackStore

__all__ = ["SpawnContext", "StartMethod", "spawn"]

# This layer must be importable without torch, which is imported inside the functions.

StartMethod = Literal["spawn", "fork", "forkserver"]

# How long the other ranks may run after a failure. Their errors show which rank failed first.
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
    """Call ``fn(rank, *args)`` in ``nprocs`` new processes on this machine.

    RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set, so that ``fn`` can call
    ``setup()`` without arguments. The store runs on loopback in this process.

    Args:
        fn: a function defined at module level, so that the new processes can import it.
        args: arguments to pass after the rank. A missing ``world_size`` argument is filled in.
        nprocs: number of processes.
        join: wait for all processes and raise an error if one fails.
        daemon: make the processes daemonic, so that they end with this process and cannot have children.
        start_method: ``fork`` can also run notebook functions, if this process has not used a device.

    Returns: None if ``join``, otherwise a context to join later.

    Raises:
        UsageError: ``nprocs`` is below 1, or ``args`` do not match the signature of ``fn``.
        LaunchError: a rank failed (only if ``join``); includes the first failed rank's traceback.

    Source: torch.multiprocessing.spawn.
    """
    if nprocs < 1:
        raise UsageError(
            f"spawn(nprocs={nprocs}) starts no process",
            where="code spawn(nprocs=)",
            do="pass nprocs=1 or more",
        )
    arguments_of_rank(fn, args, rank=0, world_size=nprocs, caller="spawn", rank_first=True)  # validates args
    import torch.multiprocessing as mp  # noqa: PLC0415 - imports torch

    from echelon.launch.loopback_store import LOOPBACK, LoopbackStore  # noqa: PLC0415 - imports torch

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
        # With join=False, ranks may outlive this thread; torch would kill them when it ends.
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
        context.terminate()  # for example after Ctrl-C
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
    die_with(parent, by_thread=by_thread)  # torch sends SIGINT, which native code ignores
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
    """The ranks started by ``spawn(join=False)``, and their store."""

    def __init__(self, processes: ProcessContext, store: LoopbackStore, directory: Path) -> None:
        self._context = processes
        self._store: LoopbackStore | None = store
        self._directory = directory

    @property
    def processes(self) -> list[BaseProcess]:
        """The processes, in rank order."""
        return list(self._context.processes)

    def pids(self) -> list[int]:
        """Return the process ids, in rank order."""
        return [process.pid for process in self._context.processes]

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        """Wait until at least one rank ends. Return True if all ranks have ended; otherwise, call this method again.

        Args:
            timeout: maximum number of seconds to wait; None for no limit.
            grace_period: seconds to wait after a rank fails before the other ranks are stopped.

        Raises:
            LaunchError: a rank failed, and the other ranks were stopped.
        """
        from torch.multiprocessing.spawn import ProcessException  # noqa: PLC0415 - imports torch

        grace = _GRACE.total_seconds() if grace_period is None else grace_period
        try:
            done = bool(self._context.join(timeout, grace))
        except ProcessException as error:
            raise self._explained(error) from error
        if done:
            self._close()
        return done

    def terminate(self) -> None:
        """Kill the ranks that are still running."""
        for process in self._context.processes:
            if process.is_alive():
                process.kill()
            process.join()
        self._close()

    def _explained(self, error: Any) -> LaunchError:
        # Ranks that torch killed were still running, or had failed but not exited yet.
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
            return f"rank {rank} recorded no traceback"
        return f"traceback of rank {rank}:\n{textwrap.indent(text.rstrip(), '    ')}"

    def _close(self) -> None:
        self._store = None
        shutil.rmtree(self._directory, ignore_errors=True)
