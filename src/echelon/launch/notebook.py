"""``notebook_launcher`` and ``debug_launcher``: run a notebook function in multiple processes forked from the kernel.

A function defined in a cell cannot be imported, and a notebook's data may be large; a forked process has both. However,
a forked process has only one thread and cannot use a device that the kernel has used. Therefore:

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
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.reduction import DupFd
from typing import IO, Any, Literal

from echelon.base import environ
from echelon.base.device import num_devices
from echelon.base.errors import LaunchError, UsageError
from echelon.base.optional import install_command
from echelon.base.warnings import warn
from echelon.config.resolve import Resolved
from echelon.config.schema import RunConfig
from echelon.config.sources import current, from_code
from echelon.launch.environment import rank_variables
from echelon.launch.rank_arguments import arguments_of_rank
from echelon.launch.spawn import StartMethod, spawn

__all__ = ["debug_launcher", "notebook_launcher"]

# This layer must be importable without torch, which is imported inside the functions.

# How long to wait for the last output of a child whose own children (DataLoader workers) keep the pipe open.
_DRAIN = timedelta(seconds=1)


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
    first, by_name = arguments_of_rank(
        function, args, rank=0, world_size=1, caller="notebook_launcher", rank_first=False
    )
    with environ.patch(variables):
        function(*first, **by_name)


def debug_launcher(function: Callable[..., object], args: Sequence[object] = (), num_processes: int = 2) -> None:
    """Call ``function(*args)`` in ``num_processes`` forked processes on the CPU, for a trial run.

    Raises:
        LaunchError: a rank failed, and the other ranks were stopped; includes the failed rank's traceback.

    Source: accelerate.debug_launcher.
    """
    resolved = current(from_code("debug_launcher", {"num_processes": num_processes, "cpu": True}))
    _run_ranks(
        function, args, resolved, num_processes=num_processes, num_accelerators=0, interval=0.1, caller="debug_launcher"
    )


def _check_supported(**settings: tuple[int, int]) -> None:
    for name, (value, only) in settings.items():
        if value != only:
            raise UsageError(
                f"notebook_launcher({name}={value}) is not supported, because the function runs once, on this machine",
                where=f"code notebook_launcher({name}=)",
                do=f"remove {name}, or move the function to a script and run it with echelon launch",
            )


def _warn_ignored(**settings: tuple[object, object]) -> None:
    names = [name for name, (value, default) in settings.items() if value != default]
    if names:
        warn(
            f"notebook_launcher ignores {', '.join(names)}, because processes on one machine use a free port on "
            "loopback"
        )


def _count_devices() -> int:
    # Otherwise torch initializes the CUDA runtime, which processes that are forked later could not use.
    with environ.patch({"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}):
        return num_devices()


def _start_method(*, uses_device: bool) -> StartMethod:
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
                "the function needs new processes because the kernel has used the device (or the system cannot fork), "
                "but cloudpickle, which sends notebook functions to new processes, is not installed",
                where="notebook_launcher or debug_launcher",
                do=f"{install_command('notebook')}, or restart the kernel and use the device only in the function",
            ) from error
        self._load: Callable[[bytes], object] = cloudpickle.loads
        try:
            self._data: bytes = cloudpickle.dumps(value)
        except Exception as error:  # a user's __reduce__ may raise any exception
            raise UsageError(
                f"the function, its arguments or its globals cannot be sent to new processes: {type(error).__name__}: "
                f"{error}",
                where="notebook_launcher or debug_launcher; ranks cannot be forked because the kernel has used the device or the system cannot fork",
                do="create the object inside the function, or restart the kernel and use the device only in the function",
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
    # Validates args.
    arguments_of_rank(function, args, rank=0, world_size=num_processes, caller=caller, rank_first=False)
    uses_device = num_accelerators > 0 and not resolved.value.cpu
    method = _start_method(uses_device=uses_device)
    num_threads = 1 if method == "fork" else None
    variables = rank_variables(
        resolved, num_processes=num_processes, num_threads=num_threads, has_accelerator=num_accelerators > 0
    )
    call: Any = (function, tuple(args))
    if method == "spawn":
        call = _ByValue(call)
    output = _Output.open(num_processes)
    try:
        child = _Child(
            call=call,
            variables=variables,
            is_forked=method == "fork",
            uses_device=uses_device,
            output=output,
            caller=caller,
        )
        with warnings.catch_warnings(), environ.patch({} if method == "fork" else variables):
            # Python >= 3.12 warns about every fork of a process with threads; see the docstring of this file.
            warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
            context = spawn(child, nprocs=num_processes, join=False, start_method=method)
        assert context is not None
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
            "this kernel has initialized a process group, which forked processes can neither use nor leave",
            do="call echelon.distributed.cleanup() or torch.distributed.destroy_process_group() first",
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
class _Child:
    """The function that each process runs after ``spawn`` has set its rank."""

    call: tuple[Callable[..., object], tuple[object, ...]]
    variables: Mapping[str, str]
    is_forked: bool
    uses_device: bool
    output: _Output
    caller: str

    def __call__(self, rank: int) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the kernel's handler would not run inside a collective
        self.output.redirect(rank)
        environ.write(self.variables)
        if self.is_forked:
            _limit_to_one_thread()
            if self.uses_device:
                _check_device()
        function, args = self.call
        given, by_name = arguments_of_rank(
            function, args, rank=rank, world_size=len(self.output.pipes), caller=self.caller, rank_first=False
        )
        function(*given, **by_name)


def _limit_to_one_thread() -> None:
    import torch  # noqa: PLC0415 - torch-free layer

    set_num_threads = torch.set_num_threads
    set_num_threads(1)

    def ignore(nthreads: int) -> None:
        if nthreads > 1:
            warn(
                f"torch.set_num_threads({nthreads}) is ignored, because the kernel's threads do not exist in a forked "
                "process and torch would hang; a script started by echelon launch can use more threads"
            )

    torch.set_num_threads = ignore


def _check_device() -> None:
    """Raise a clear error if the kernel has used the device, because any use of it in a forked process would fail."""
    import torch  # noqa: PLC0415 - torch-free layer

    module: Any = torch.get_device_module()
    is_in_bad_fork: Callable[[], bool] = getattr(module, "_is_in_bad_fork", lambda: False)
    reason = ""
    if is_in_bad_fork():
        reason = "a cell has used it (for example, created a tensor on it or called torch.cuda.is_available())"
    else:
        try:
            torch.ones((), requires_grad=True).backward()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            if "fork" not in str(error):
                raise
            reason = "a cell has run a backward pass, which starts torch's device threads"
    if reason:
        raise LaunchError(
            f"the {torch.accelerator.current_accelerator()} device cannot be used in a process forked from this kernel: {reason}",
            do="restart the kernel and use the device only in the function, or train on the CPU (ECHELON_CPU=1)",
        )
