"""Functions on several processes of this machine: ``spawn``, and ``notebook_launcher`` and ``debug_launcher`` for notebooks.

A function defined in a cell cannot be imported, and a notebook's data may be large; a process forked from the kernel has both.
However, a forked process has only one thread and cannot use a device that the kernel has used. Therefore:

* Each child computes on one thread, because torch's CPU threads do not exist in it and an operation that needs them
  would hang. Thread pools in other libraries, such as scikit-learn, can still hang; use these libraries only in the
  children, or with one thread.
* If the kernel has used the device, or the system cannot fork, new processes are started. They receive the function,
  its arguments and the globals that these use by value (cloudpickle).
* If the kernel has run a backward pass on the device, the child raises an error, because autograd's device threads do not exist
  in it.
"""

from __future__ import annotations

import codecs
import inspect
import os
import shutil
import signal
import sys
import tempfile
import textwrap
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, final

from echelon.base import environ
from echelon.base.device import num_devices
from echelon.base.errors import LaunchError, UsageError
from echelon.base.messages.translation import gettext as _
from echelon.base.optional import install_command
from echelon.base.warnings import warn
from echelon.config.resolve import Resolved
from echelon.config.schema import RunConfig
from echelon.config.sources import current, from_code
from echelon.launch.environment import LOOPBACK_INTERFACE, interface_variables, rank_variables
from echelon.launch.failures.failure import RankEnd, explain, first_failure
from echelon.launch.local.parents import own_identity
from echelon.launch.local.rank_errors import read_record
from echelon.launch.local.worker import ERROR_FILE, Recorder, die_with

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

    from torch.multiprocessing import ProcessContext

    from echelon.world.group import LoopbackStore

# This layer must be importable without torch, which is imported inside the functions.

_StartMethod = Literal["spawn", "fork", "forkserver"]

# How long the other ranks may run after a failure. Their errors show which rank failed first.
_GRACE = timedelta(seconds=1)
# How long to wait for the last output of a child whose own children (DataLoader workers) keep the pipe open.
_DRAIN = timedelta(seconds=1)
_TRACEBACK_FILE = "traceback.txt"
# Parameter names that tutorials use.
_RANK = frozenset({"rank", "local_rank"})
_WORLD_SIZE = frozenset({"world_size", "num_processes", "nprocs"})


def spawn(
    fn: Callable[..., object],
    args: Sequence[object] = (),
    nprocs: int = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: _StartMethod = "spawn",
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

    Examples:
        >>> def train(rank, epochs):
        ...     with process_group():
        ...         ...
        >>> spawn(train, args=(2,), nprocs=2)  # doctest: +SKIP
    """
    if nprocs < 1:
        raise UsageError(
            _("spawn(nprocs={nprocs}) starts no process", nprocs=nprocs),
            where=_("code {name}", name="spawn(nprocs=)"),
            do=_("pass nprocs=1 or more"),
        )
    call = _Call(function=fn, args=tuple(args), caller="spawn", has_rank_first=True)
    call.arguments(rank=0, world_size=nprocs)  # validates them
    # With join=False, ranks may outlive this thread; torch would kill them when it ends.
    outlives = not join and threading.current_thread() is not threading.main_thread()
    context = _start(call, nprocs, variables={}, daemon=daemon, start_method=start_method, outlives_thread=outlives)
    if not join:
        return context
    try:
        while not context.join():
            pass
    except BaseException:
        context.terminate()  # for example after Ctrl-C
        raise
    return None


def notebook_launcher(
    function: Callable[..., object],
    args: Sequence[object] = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
    use_port: str | int = "29500",
    master_addr: str = "127.0.0.1",
    node_rank: int = 0,
    num_nodes: int = 1,
    rdzv_backend: str = "static",
    rdzv_endpoint: str = "",
    rdzv_conf: Mapping[str, object] | None = None,
    rdzv_id: str = "none",
    max_restarts: int = 0,
    monitor_interval: float = 0.1,
    log_line_prefix_template: str | None = None,
) -> None:
    """Call ``function(*args)`` in multiple processes on this machine, and show their output in the cell.

    The processes are forked, so they have everything that the cells have defined and loaded. Pass models and data
    as arguments or globals. To return a result, write it to a file on one rank. If a cell has used the device, new
    processes are started, which receive copies of the function, its arguments and the globals that these use.

    Args:
        function: the training function, which creates its own Accelerator.
        args: arguments for ``function``. Missing parameters named ``rank`` and ``world_size`` are filled in.
        num_processes: number of processes (default: one per accelerator, or 1 without accelerators). With 1, the
            function runs in this process.
        mixed_precision: ``no``, ``fp16`` or ``bf16``; the default for Accelerators that the function creates.
        use_port, master_addr, rdzv_backend, rdzv_endpoint, rdzv_conf, rdzv_id, log_line_prefix_template: ignored with a
            warning; the processes use a free port on loopback.
        node_rank, num_nodes: must be 0 and 1; several machines are not supported.
        max_restarts: must be 0; restarts are not supported.
        monitor_interval: seconds between checks of the processes.

    Raises:
        ConfigError: ``mixed_precision`` or ``num_processes`` is invalid.
        UsageError: an argument is not supported, the kernel has a process group, or ``args`` do not match ``function``.
        LaunchError: a rank failed, and the other ranks were stopped; includes the failed rank's traceback.

    Source: accelerate.notebook_launcher. Unlike in Accelerate, ``mixed_precision`` takes effect.

    Examples:
        >>> def train(learning_rate):
        ...     accelerator = Accelerator()
        ...     ...
        >>> notebook_launcher(train, args=(0.1,), num_processes=2)  # doctest: +SKIP
    """
    _check_supported(num_nodes=(num_nodes, 1), node_rank=(node_rank, 0), max_restarts=(max_restarts, 0))
    _warn_ignored(
        use_port=(str(use_port), "29500"),
        master_addr=(master_addr, "127.0.0.1"),
        rdzv_backend=(rdzv_backend, "static"),
        rdzv_endpoint=(rdzv_endpoint, ""),
        rdzv_conf=(rdzv_conf or None, None),
        rdzv_id=(rdzv_id, "none"),
        log_line_prefix_template=(log_line_prefix_template, None),
    )
    # "no" is also the default, with which the environment decides.
    given = {"num_processes": num_processes, "mixed_precision": mixed_precision if mixed_precision != "no" else None}
    resolved = current(from_code("notebook_launcher", given))
    count = _count_devices()
    number = resolved.value.num_processes or max(1, count)
    if number > 1:
        _run_ranks(
            function,
            args,
            resolved,
            num_processes=number,
            num_accelerators=count,
            interval=monitor_interval,
            caller="notebook_launcher",
        )
        return
    variables = rank_variables(resolved, num_processes=1, num_threads=None, has_accelerator=count > 0)
    call = _Call(function=function, args=tuple(args), caller="notebook_launcher")
    with environ.patch(variables):
        call(rank=0, world_size=1)


def debug_launcher(function: Callable[..., object], args: Sequence[object] = (), num_processes: int = 2) -> None:
    """Call ``function(*args)`` in ``num_processes`` forked processes on the CPU, for a trial run.

    Raises:
        LaunchError: a rank failed, and the other ranks were stopped; includes the failed rank's traceback.

    Source: accelerate.debug_launcher.

    Examples:
        >>> debug_launcher(train, args=(0.1,), num_processes=2)  # doctest: +SKIP
    """
    resolved = current(from_code("debug_launcher", {"num_processes": num_processes, "cpu": True}))
    _run_ranks(
        function, args, resolved, num_processes=num_processes, num_accelerators=0, interval=0.1, caller="debug_launcher"
    )


def _check_supported(**settings: tuple[int, int]) -> None:
    for name, (value, only) in settings.items():
        if value != only:
            raise UsageError(
                _(
                    "notebook_launcher({name}={value}) is not supported, because the function runs once, on this "
                    "machine",
                    name=name,
                    value=value,
                ),
                where=_("code notebook_launcher({name}=)", name=name),
                do=_("remove {name}, or move the function to a script and run it with echelon launch", name=name),
            )


def _warn_ignored(**settings: tuple[object, object]) -> None:
    names = [name for name, (value, default) in settings.items() if value != default]
    if names:
        warn(
            _(
                "notebook_launcher ignores {names}, because processes on one machine use a free port on loopback",
                names=", ".join(names),
            )
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """A function, and its arguments as the user gave them."""

    function: Callable[..., object]
    args: tuple[object, ...]
    caller: str
    """Name of the function that the user called, for error messages."""
    has_rank_first: bool = False
    """Whether ``caller`` passes the rank before ``args``, like torch's spawn."""

    def __call__(self, *, rank: int, world_size: int) -> None:
        """Call the function on ``rank``."""
        args, by_name = self.arguments(rank=rank, world_size=world_size)
        self.function(*args, **by_name)

    def arguments(self, *, rank: int, world_size: int) -> tuple[tuple[object, ...], Mapping[str, object]]:
        """Return the positional and keyword arguments on ``rank``: ``args``, and the rank and world size that are missing.

        Raises:
            UsageError: ``args`` do not match the signature of the function.
        """
        given = (rank, *self.args) if self.has_rank_first else self.args
        try:
            signature = inspect.signature(self.function)
        except (TypeError, ValueError):  # for example a C function
            return given, {}
        if _fits(signature, given, {}):
            return given, {}
        parameters = {
            name: parameter
            for name, parameter in signature.parameters.items()
            if parameter.kind is not inspect.Parameter.POSITIONAL_ONLY
        }
        filled = {name: rank if name in _RANK else world_size for name in parameters if name in _RANK | _WORLD_SIZE}
        # ``args`` are the other parameters, in order.
        others = [
            name
            for name, parameter in parameters.items()
            if name not in filled and parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        ]
        by_name = {**filled, **dict(zip(others, self.args))}
        if filled and len(self.args) <= len(others) and _fits(signature, (), by_name):
            return (), by_name
        name = getattr(self.function, "__qualname__", repr(self.function))
        first = _("the rank and then ") if self.has_rank_first else ""
        raise UsageError(
            _(
                "{name}{signature} cannot be called by {caller}(args={args!r}), which passes {first}args",
                name=name,
                signature=signature,
                caller=self.caller,
                args=self.args,
                first=first,
            ),
            where=_("code {caller}(args=)", caller=self.caller),
            do=_(
                "pass one value per parameter in args, except for parameters named rank and world_size, which are "
                "filled in"
            ),
        )


def _fits(signature: inspect.Signature, args: tuple[object, ...], by_name: Mapping[str, object]) -> bool:
    try:
        signature.bind(*args, **by_name)
    except TypeError:
        return False
    return True


def _start(
    call: _Call | _ByValue,
    num_processes: int,
    *,
    variables: Mapping[str, str],
    daemon: bool = False,
    start_method: _StartMethod,
    outlives_thread: bool = False,
    cell: _Cell | None = None,
) -> SpawnContext:
    """Start processes that make ``call`` with a store on this process's loopback.

    Args:
        call: the user's call.
        num_processes: number of processes.
        variables: environment variables of all processes.
        daemon: as in ``spawn``.
        start_method: as in ``spawn``.
        outlives_thread: whether the processes may outlive this thread.
        cell: the notebook's cell that shows the output; None for a process with its own.
    """
    import torch.multiprocessing as mp  # noqa: PLC0415 - imports torch

    from echelon.world.group import LOOPBACK, LoopbackStore  # noqa: PLC0415 - imports torch

    store = LoopbackStore()
    directory = tempfile.mkdtemp(prefix="echelon-spawn-")
    common = {
        **interface_variables(LOOPBACK_INTERFACE),
        **variables,
        "WORLD_SIZE": str(num_processes),
        "LOCAL_WORLD_SIZE": str(num_processes),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    start: Any = mp.start_processes  # torch has no types for it
    processes = start(
        _run_rank,
        args=(call, common, directory, own_identity(), outlives_thread, cell),
        nprocs=num_processes,
        join=False,
        daemon=daemon,
        start_method=start_method,
    )
    return SpawnContext(processes, store, Path(directory))


def _run_rank(
    rank: int,
    call: _Call,
    variables: Mapping[str, str],
    directory: str,
    parent: str,
    outlives_thread: bool,
    cell: _Cell | None,
) -> None:
    die_with(parent, by_thread=outlives_thread)  # torch sends SIGINT, which native code ignores
    environ.write({**variables, "RANK": str(rank), "LOCAL_RANK": str(rank)})
    own = os.path.join(directory, str(rank))
    os.makedirs(own)
    try:
        if cell is not None:
            cell.prepare(rank)
        call(rank=rank, world_size=int(variables["WORLD_SIZE"]))
    except Exception as error:
        (Path(own) / _TRACEBACK_FILE).write_text(traceback.format_exc(), encoding="utf-8", errors="backslashreplace")
        Recorder(own).add(error, where="main")
        raise


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
            return _("rank {rank} recorded no traceback", rank=rank)
        return _("traceback of rank {rank}:\n{text}", rank=rank, text=textwrap.indent(text.rstrip(), "    "))

    def _close(self) -> None:
        self._store = None
        shutil.rmtree(self._directory, ignore_errors=True)


def _count_devices() -> int:
    # Otherwise torch initializes the CUDA runtime, which processes that are forked later could not use.
    with environ.patch({"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}):
        return num_devices()


def _start_method(*, uses_device: bool) -> _StartMethod:
    if not hasattr(os, "fork"):
        return "spawn"
    if uses_device:
        import torch  # noqa: PLC0415 - torch-free layer

        is_used: Callable[[], bool] = getattr(torch.get_device_module(), "is_initialized", lambda: False)
        if is_used():
            return "spawn"
    return "fork"


class _ByValue:
    """A value that is pickled with cloudpickle, so that the other process does not need to import it.

    Raises:
        LaunchError: cloudpickle is not installed.
        UsageError: the value cannot be pickled.
    """

    def __init__(self, value: object) -> None:
        try:
            import cloudpickle  # noqa: PLC0415 - an optional package, needed only here
        except ImportError as error:
            raise LaunchError(
                _(
                    "the function needs new processes because the kernel has used the device (or the system cannot "
                    "fork), but cloudpickle, which sends notebook functions to new processes, is not installed"
                ),
                where=_("notebook_launcher or debug_launcher"),
                do=_(
                    "{install}, or restart the kernel and use the device only in the function",
                    install=install_command("notebook"),
                ),
            ) from error
        self._load: Callable[[bytes], object] = cloudpickle.loads
        try:
            self._data: bytes = cloudpickle.dumps(value)
        except Exception as error:  # a user's __reduce__ may raise any exception
            raise UsageError(
                _(
                    "the function, its arguments or its globals cannot be sent to new processes: {name}: {error}",
                    name=type(error).__name__,
                    error=error,
                ),
                where=_(
                    "notebook_launcher or debug_launcher; ranks cannot be forked because the kernel has used the "
                    "device or the system cannot fork"
                ),
                do=_(
                    "create the object inside the function, or restart the kernel and use the device only in the "
                    "function"
                ),
            ) from error

    def __reduce__(self) -> tuple[Callable[[bytes], object], tuple[bytes]]:
        return self._load, (self._data,)


def _run_ranks(
    function: Callable[..., object],
    args: Sequence[object],
    resolved: Resolved[RunConfig],
    *,
    num_processes: int,
    num_accelerators: int,
    interval: float,
    caller: str,
) -> None:
    _refuse_process_group()
    call = _Call(function=function, args=tuple(args), caller=caller)
    call.arguments(rank=0, world_size=num_processes)  # validates them
    uses_device = num_accelerators > 0 and not resolved.value.cpu
    method = _start_method(uses_device=uses_device)
    num_threads = 1 if method == "fork" else None
    variables = rank_variables(
        resolved, num_processes=num_processes, num_threads=num_threads, has_accelerator=num_accelerators > 0
    )
    output = _Output.open(num_processes)
    try:
        cell = _Cell(output=output, is_forked=method == "fork", uses_device=uses_device)
        with warnings.catch_warnings(), environ.patch({} if method == "fork" else variables):
            # Python >= 3.12 warns about every fork of a process with threads; see the docstring of this file.
            warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
            context = _start(
                call if method == "fork" else _ByValue(call),
                num_processes,
                variables=variables,
                start_method=method,
                cell=cell,
            )
        output.close_write_ends()
        try:
            while not context.join(timeout=0 if output.is_open else interval):
                output.relay(timeout=interval)
        except BaseException:
            context.terminate()  # the cell was interrupted, or a rank failed
            raise
        finally:
            output.drain()
    finally:
        output.close()


def _refuse_process_group() -> None:
    import torch.distributed as dist  # noqa: PLC0415 - torch-free layer

    if dist.is_available() and dist.is_initialized():
        raise UsageError(
            _("this kernel has initialized a process group, which forked processes can neither use nor leave"),
            do=_("call echelon.distributed.cleanup() or torch.distributed.destroy_process_group() first"),
        )


@dataclass(slots=True, kw_only=True)
class _Output:
    """Pipes from the children: (read end, write end) for each rank's stdout and stderr."""

    pipes: list[dict[Literal["stdout", "stderr"], tuple[int, int]]]
    readers: dict[int, tuple[Literal["stdout", "stderr"], codecs.IncrementalDecoder]] = field(default_factory=dict)
    writers: set[int] = field(default_factory=set)

    @classmethod
    def open(cls, num_processes: int) -> _Output:
        output = cls(pipes=[{"stdout": os.pipe(), "stderr": os.pipe()} for _ in range(num_processes)])
        for pipes in output.pipes:
            for name, (read_end, write_end) in pipes.items():
                output.readers[read_end] = (name, codecs.getincrementaldecoder("utf-8")("replace"))
                output.writers.add(write_end)
        return output

    def __getstate__(self) -> list[dict[str, Any]]:
        # For a spawned process, which inherits only the file descriptors that are passed to it.
        return [{name: DupFd(write_end) for name, (_, write_end) in pipes.items()} for pipes in self.pipes]

    def __setstate__(self, state: list[dict[Literal["stdout", "stderr"], Any]]) -> None:
        self.pipes = [{name: (-1, end.detach()) for name, end in pipes.items()} for pipes in state]
        self.readers, self.writers = {}, {end for pipes in self.pipes for _, end in pipes.values()}

    @property
    def is_open(self) -> bool:
        return bool(self.readers)

    def redirect(self, rank: int) -> None:
        """Redirect all output from Python and native code to ``rank``'s pipes; called in the child."""
        for name, number in (("stdout", 1), ("stderr", 2)):
            os.dup2(self.pipes[rank][name][1], number)  # type: ignore[index]
            stream = open(  # noqa: SIM115 - for the life of the process
                number, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False
            )
            setattr(sys, name, stream)
        self.close()

    def relay(self, *, timeout: float) -> None:
        """Show the output that is available within ``timeout`` seconds."""
        for end in wait(list(self.readers), timeout):
            assert isinstance(end, int), end
            name, decoder = self.readers[end]
            data = os.read(end, 1 << 16)
            target: IO[str] = sys.stdout if name == "stdout" else sys.stderr
            target.write(decoder.decode(data, final=not data))
            target.flush()
            if not data:
                del self.readers[end]
                os.close(end)

    def drain(self) -> None:
        """Show the remaining output without waiting long for pipes that stay open."""
        deadline = time.monotonic() + _DRAIN.total_seconds()
        while self.readers and (left := deadline - time.monotonic()) > 0:
            self.relay(timeout=left)

    def close_write_ends(self) -> None:
        while self.writers:
            os.close(self.writers.pop())

    def close(self) -> None:
        self.close_write_ends()
        while self.readers:
            os.close(self.readers.popitem()[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cell:
    """The notebook's cell that shows the ranks' output."""

    output: _Output
    is_forked: bool
    uses_device: bool

    def prepare(self, rank: int) -> None:
        """Prepare the process of ``rank``."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the kernel's handler would not run inside a collective
        self.output.redirect(rank)
        if self.is_forked:
            _limit_to_one_thread()
            if self.uses_device:
                _check_device()


def _limit_to_one_thread() -> None:
    import torch  # noqa: PLC0415 - torch-free layer

    set_num_threads = torch.set_num_threads
    set_num_threads(1)

    def ignore(nthreads: int) -> None:
        if nthreads > 1:
            warn(
                _(
                    "torch.set_num_threads({nthreads}) is ignored, because the kernel's threads do not exist in a "
                    "forked process and torch would hang; a script started by echelon launch can use more threads",
                    nthreads=nthreads,
                )
            )

    torch.set_num_threads = ignore


def _check_device() -> None:
    """Raise a clear error if the kernel has used the device, because any use of it in a forked process would fail."""
    import torch  # noqa: PLC0415 - torch-free layer

    module: Any = torch.get_device_module()
    is_in_bad_fork: Callable[[], bool] = getattr(module, "_is_in_bad_fork", lambda: False)
    reason = ""
    if is_in_bad_fork():
        reason = _("a cell has used it (for example, created a tensor on it or called torch.cuda.is_available())")
    else:
        try:
            torch.ones((), requires_grad=True).backward()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            if "fork" not in str(error):
                raise
            reason = _("a cell has run a backward pass, which starts torch's device threads")
    if reason:
        raise LaunchError(
            _(
                "the {current_accelerator} device cannot be used in a process forked from this kernel: {reason}",
                current_accelerator=torch.accelerator.current_accelerator(),
                reason=reason,
            ),
            do=_("restart the kernel and use the device only in the function, or train on the CPU (ECHELON_CPU=1)"),
        )
