"""A worker process of ``run_on_ranks``: waits for calls, runs each one as a rank, and answers with the result."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import logging
import os
import pickle
import random
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

from tests.garbage import freeze_new_modules

ENOUGH_THREADS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A message of the parent: a function (pickled by reference), and the rank of this process in the call."""

    work: bytes  # pickle of (fn, args, kwargs)
    rank: int
    world_size: int
    timeout: timedelta
    store_path: str | None  # None: create no process group
    environ: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Returned:
    value: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Raised:
    error: bytes | None  # None: the exception cannot be pickled
    text: str


class Ready:
    """The worker has imported everything and waits for its first call."""


class Finish:
    """Message that every rank has answered: destroy the process group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Idle:
    """Message that the call is finished and cleaned up."""

    num_threads: int  # of the system, including those started by torch's libraries
    has_own_torch: bool  # False: a library has left functions of its own in torch, as DeepSpeed's stage 3 does


def main(connection_fd: int, stacks_path: str) -> None:
    """Serve calls until the parent closes the connection."""
    die_with_parent()
    connection = Connection(connection_fd)
    with open(stacks_path, "w") as stacks:
        faulthandler.register(signal.SIGUSR2, file=stacks, all_threads=True)
        _send(connection, Ready())
        while True:
            try:
                call = pickle.loads(connection.recv_bytes())
            except EOFError:
                return
            _serve(connection, call)


def _serve(connection: Connection, call: Call) -> None:
    import torch
    import torch.distributed as dist

    from echelon.world.group import close_group

    before = dict(os.environ)
    loggers = [(logger, logger.level, list(logger.handlers)) for logger in map(logging.getLogger, (None, "echelon"))]
    os.environ.clear()
    os.environ.update(call.environ)
    try:
        answer = _answer(call)
        sys.stdout.flush()
        sys.stderr.flush()
        _send(connection, answer)
        # Only after all ranks are done, because closing the sockets could break a collective that is still running.
        assert isinstance(pickle.loads(connection.recv_bytes()), Finish)
        close_group()
        # torch also counts a group that could not be created, and would look for the ranks of the next one under another number.
        dist.distributed_c10d._world.group_count = 0
        if _num_threads() > ENOUGH_THREADS:
            gc.collect()  # threads of a group in a reference cycle poll a hundred times a second
    finally:
        os.environ.clear()
        os.environ.update(before)
        for logger, level, handlers in loggers:  # otherwise a Trainer with log_level="info" prints in later tests, too
            logger.setLevel(level)
            logger.handlers[:] = handlers
    has_own_torch = torch.nn.functional.linear is torch._C._nn.linear
    _send(connection, Idle(num_threads=_num_threads(), has_own_torch=has_own_torch))


def _num_threads() -> int:
    tasks = "/proc/self/task"
    return len(os.listdir(tasks)) if os.path.exists(tasks) else threading.active_count()


def _answer(call: Call) -> Returned | Raised:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            fn, args, kwargs = pickle.loads(call.work)
            freeze_new_modules()
            # After the import of the test file, which may draw random numbers, and only on ranks that have just been started.
            random.seed(0)
            torch.manual_seed(0)
            if call.store_path is not None:
                dist.init_process_group(
                    "gloo",
                    store=dist.FileStore(call.store_path, call.world_size),
                    rank=call.rank,
                    world_size=call.world_size,
                    # The parent's time limit must expire first, because the parent can name every silent rank.
                    timeout=call.timeout + timedelta(seconds=30),
                )
            result = fn(*args, **kwargs)
            if call.store_path is None and dist.is_initialized():
                raise AssertionError(f"{fn.__qualname__} left its process group behind")
            return Returned(value=pickle.dumps(result))
    except BaseException as error:  # noqa: BLE001 - SystemExit and KeyboardInterrupt are results of a rank, too
        return Raised(error=_pickled(error), text="".join(traceback.format_exception(_without_our_frames(error))))


def _without_our_frames(error: BaseException) -> BaseException:
    inner = error.__traceback__
    while inner is not None and inner.tb_frame.f_code.co_filename == __file__:
        inner = inner.tb_next
    return error.with_traceback(inner) if inner is not None else error


def _pickled(error: BaseException) -> bytes | None:
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:  # noqa: BLE001 - __reduce__ of the exception may raise anything; the text of the traceback is still sent
        return None
    return data


def _send(connection: Connection, message: object) -> None:
    # Not Connection.send: its pickler would put tensors into shared memory.
    connection.send_bytes(pickle.dumps(message))


def import_heavy() -> None:
    """Import and freeze the modules that every call needs."""
    import torch
    import torch._dynamo  # otherwise imported by the first optimizer, which takes seconds of a timed call
    import torch.distributed

    import echelon.accelerator.accelerator
    import echelon.engines.fsdp.fsdp2
    import echelon.engines.zero1
    import echelon.trainer.trainer  # noqa: F401 - takes 0.4 s, including the Accelerator

    torch.set_num_threads(1)
    call: Callable[..., Any] = torch.optim.AdamW
    call([torch.nn.Parameter(torch.zeros(1))])
    freeze_new_modules()


def die_with_parent() -> None:
    """Make this process die with its parent."""
    # Otherwise a worker that hangs in a collective outlives a pytest killed with -9.
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
