"""Runs a test's function on several gloo ranks, in worker processes that live as long as the pytest session.

Example::

    def _sum(x: float) -> float:  # at module level, because it is pickled by reference
        total = torch.tensor(x + dist.get_rank())
        dist.all_reduce(total)
        return total.item()


    def test_every_rank_gets_the_sum() -> None:
        assert run_on_ranks(_sum, 1.0, world_size=2) == [3.0, 3.0]
"""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

from tests import rank_worker
from tests.quiet import QuietTime, with_children
from tests.rank_nursery import Nursery

ROOT = Path(__file__).resolve().parent.parent
START_LIMIT_S = 180.0  # for a cold `import torch` on a busy machine; not part of a test's timeout
# After a failure or a timeout, the remaining ranks are waited for until they have been quiet for this long (tests/quiet.py): on a
# busy machine a rank is late, but not quiet.
GRACE_S = 1.0
BUSY_S = 30.0  # ranks that keep polling or computing for this long count as silent, too
TEARDOWN_S = 60.0
STACK_S = 30.0
# Groups that a library keeps, such as DeepSpeed's: each has three polling threads, and a hundred groups slow down every test.
MAX_THREADS = 40
_OF_A_RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
_OF_A_WORKER = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "CUDA_VISIBLE_DEVICES": "",
    "HIP_VISIBLE_DEVICES": "",
    "ROCR_VISIBLE_DEVICES": "",
    "ZE_AFFINITY_MASK": "",
}


class RanksFailed(AssertionError):
    """Some ranks raised or died; ``errors`` maps each of them to its exception (RankDied for a dead process)."""

    def __init__(self, text: str, errors: dict[int, BaseException]) -> None:
        super().__init__(text)
        self.errors = errors


class RanksHung(AssertionError):
    """Some ranks did not answer in time; ``silent`` lists them."""

    def __init__(self, text: str, silent: list[int]) -> None:
        super().__init__(text)
        self.silent = silent


class RankDied(RuntimeError):
    """The process of a rank exited without an answer."""


def run_on_ranks(
    fn: Callable[..., Any],
    *args: Any,
    world_size: int = 2,
    timeout: float = 60,
    init_group: bool = True,
    **kwargs: Any,
) -> list[Any]:
    """Call ``fn(*args, **kwargs)`` on each of ``world_size`` ranks and return their results in rank order.

    Args:
        fn: a module-level function of a test module; arguments and results are pickled.
        timeout: seconds for the call, not including the start of workers.
        init_group: True creates a new default gloo group for the call. False leaves that to ``fn``: the environment
            (the caller's, plus the variables that torchrun sets) works with ``init_process_group("env://")``.
    Raises:
        RanksFailed: a rank raised or died. The first failure ends the call on all ranks.
        RanksHung: a rank did not answer in time. The message contains its stack.
    """
    work = pickle.dumps((fn, args, kwargs))
    workers = _POOL.workers(world_size)
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder, rendezvous(init_group) as variables:
        for rank, worker in enumerate(workers):
            worker.send(
                rank_worker.Call(
                    work=work,
                    rank=rank,
                    world_size=world_size,
                    timeout=timedelta(seconds=timeout),
                    store_path=os.path.join(folder, "store") if init_group else None,
                    environ=_environment(variables, rank=rank, world_size=world_size),
                )
            )
        try:
            answers, silent_too_long = _collect(workers, timeout=timeout)
        except BaseException:  # Ctrl-C, or a time limit of a plugin: the workers are still running
            shut_down()
            raise
        failed = sorted(r for r, answer in answers.items() if not isinstance(answer, rank_worker.Returned))
        silent = [r for r in range(world_size) if r not in answers]
        stacks = {r: workers[r].stack() for r in silent}
        for rank in silent:
            workers[rank].kill()
        for worker in workers:
            worker.finish()
        printed = "".join(worker.new_output(f"[rank {rank}] ") for rank, worker in enumerate(workers))
        sys.stdout.write(printed)
    if failed:
        _raise_failed(answers, failed, silent)
    if silent_too_long:
        _raise_hung(stacks, silent, world_size=world_size, timeout=timeout)
    return [pickle.loads(answers[rank].value) for rank in range(world_size)]


def errors_on_ranks(
    kind: type[BaseException], fn: Callable[..., Any], *args: Any, num_errors: int | None = None, **options: Any
) -> list[str]:
    """Call ``run_on_ranks(fn, *args, **options)``, which must fail with errors of ``kind``, and return their texts.

    Args:
        num_errors: the number of ranks that must raise; None: one or more.
    """
    import pytest  # tests/side_by_side/run.py uses this module without it

    with pytest.raises(RanksFailed) as caught:
        run_on_ranks(fn, *args, **options)
    errors = caught.value.errors
    assert all(isinstance(error, kind) for error in errors.values()), caught.value
    assert len(errors) == (num_errors or len(errors)), caught.value
    return [str(errors[rank]) for rank in sorted(errors)]


def shut_down(*, for_good: bool = False) -> None:
    """Kill every worker; the next call starts new ones.

    Args:
        for_good: also kill the process that forks the workers, at the end of the session.
    """
    _POOL.close()
    if for_good and _POOL.nursery is not None:
        _POOL.nursery.close()
        _POOL.nursery = None


def import_ahead(*modules: str) -> None:
    """Import ``modules`` in the process that forks the ranks, for modules that a test file imports on every rank.

    Workers that were started without them are killed.
    """
    if not _POOL.modules.issuperset(modules):
        _POOL.modules.update(modules)
        shut_down()


def open_files() -> set[int]:
    """Return the descriptors that stay open in this process for the ranks, and do not count as leaks."""
    _open_store_pipe()
    kept = set() if _POOL.nursery is None else {_POOL.nursery.fileno()}
    return (
        kept
        | _POOL.store_pipe
        | {worker.connection.fileno() for worker in _POOL.started if not worker.connection.closed}
    )


def _collect(workers: list[_Worker], *, timeout: float) -> tuple[dict[int, Any], bool]:
    """Return the answers by rank (RankDied for a dead process), and whether ranks were still silent at the timeout."""
    answers: dict[int, Any] = {}
    deadline = time.monotonic() + timeout
    ending = False
    quiet: QuietTime | None = None
    while len(answers) < len(workers):
        pending = {worker.connection: rank for rank, worker in enumerate(workers) if rank not in answers}
        left = deadline - time.monotonic()
        if ending or left <= 0:
            quiet = quiet or QuietTime()
            is_quiet = quiet.look(workers[rank].process.pid for rank in pending.values()) > GRACE_S
            # Check for answers since the last poll, as the ranks may be quiet because they have answered.
            if (is_quiet or left < -BUSY_S) and not wait(list(pending), timeout=0):
                return answers, not ending
        readable = wait(list(pending), timeout=0.05 if quiet is not None else min(left, 0.5))
        # The socket of a dead rank stays open while a forked child lives, so check its exit code as well.
        dead = [c for c, rank in pending.items() if c not in readable and workers[rank].process.poll() is not None]
        for connection in [*readable, *dead]:
            assert isinstance(connection, Connection)
            rank = pending[connection]
            answers[rank] = workers[rank].receive()
            if not ending and not isinstance(answers[rank], rank_worker.Returned):
                ending = True
                deadline = min(deadline, time.monotonic())
    return answers, False


def _raise_failed(answers: dict[int, Any], failed: list[int], silent: list[int]) -> NoReturn:
    errors: dict[int, BaseException] = {}
    parts = []
    for rank in failed:
        answer = answers[rank]
        if isinstance(answer, RankDied):
            errors[rank] = answer
            parts.append(f"----- rank {rank}: {answer}\n")
            continue
        if answer.error is not None:
            errors[rank] = pickle.loads(answer.error)
        parts.append(f"----- rank {rank} raised\n{answer.text}")
    if silent:
        parts.append(f"----- still running when the others were stopped: {_ranks(silent)}\n")
    raise RanksFailed(f"{_ranks(failed)} of {len(answers) + len(silent)} failed\n" + "".join(parts), errors)


def _raise_hung(stacks: dict[int, str], silent: list[int], *, world_size: int, timeout: float) -> NoReturn:
    shown = "".join(f"----- stack of rank {rank}\n{stack}" for rank, stack in stacks.items())
    raise RanksHung(f"{_ranks(silent)} of {world_size} did not answer within {timeout:g} s\n{shown}", silent)


def _ranks(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _environment(variables: dict[str, str], *, rank: int, world_size: int) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name not in _OF_A_RANK}
    place = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world_size}
    return {**inherited, **_OF_A_WORKER, **{name: str(value) for name, value in place.items()}, **variables}


def _open_store_pipe() -> None:
    """Make libuv, which torch's TCPStore uses, open the pipe that it keeps for the whole process."""
    if _POOL.store_pipe or "torch.distributed" not in sys.modules or not Path("/proc/self/fd").exists():
        return
    from torch.distributed import TCPStore

    before = set(os.listdir("/proc/self/fd"))
    store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
    del store
    # Both ends of the pipe are in this process; the sockets of the server were closed with it.
    new = {int(fd) for fd in set(os.listdir("/proc/self/fd")) - before}
    _POOL.store_pipe |= {fd for fd in new if os.path.exists(f"/proc/self/fd/{fd}")}


@contextmanager
def rendezvous(init_group: bool) -> Iterator[dict[str, str]]:
    """Yield the variables for ``env://``, with a store in this process, so that no other process can take its port."""
    if init_group:
        yield {}
        return
    from echelon.world.group import serve_store

    _open_store_pipe()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        port = listener.getsockname()[1]
        store = serve_store(listener, timeout=timedelta(seconds=60))
    try:
        yield {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    finally:
        del store


def _catches(pid: int, number: int) -> bool:
    """Return whether the process handles the signal: a forked process has its parent's handlers, a new program has none."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


class _Worker:
    """A process, its connection, and the files for its output and stack dumps."""

    def __init__(self, folder: Path, number: int, nursery: Nursery, modules: Collection[str]) -> None:
        self._output = folder / f"{number}.out"
        self._stacks = folder / f"{number}.stacks"
        self._read = 0
        self._ready = False
        self._answered = False
        ours, theirs = socket.socketpair()
        with theirs, self._output.open("wb") as output:
            end = folder / f"{number}.end"
            self.process = nursery.start(
                connection=theirs.fileno(), output=output.fileno(), stacks=self._stacks, end=end, modules=modules
            )
        self.connection = Connection(ours.detach())

    @property
    def is_alive(self) -> bool:
        """Whether it can be called."""
        return not self.connection.closed and self.process.poll() is None

    def wait_ready(self, deadline: float) -> None:
        if self._ready:
            return
        if not self.connection.poll(max(0.0, deadline - time.monotonic())):
            self.kill()
            raise RuntimeError(f"a rank worker did not start within {START_LIMIT_S:g} s:\n{self.new_output('  ')}")
        answer = self.receive()
        if not isinstance(answer, rank_worker.Ready):
            self.kill()
            raise RuntimeError(f"a rank worker did not start ({answer}):\n{self.new_output('  ')}")
        self._ready = True

    def send(self, call: rank_worker.Call) -> None:
        self._answered = False
        with suppress(BrokenPipeError):  # it died after its last call; receive() reports how
            self.connection.send_bytes(pickle.dumps(call))

    def receive(self) -> Any:
        """Return the next message, or RankDied if the process is dead."""
        try:
            if self.process.poll() is not None and not self.connection.poll():
                raise EOFError
            message = pickle.loads(self.connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            return self._death()
        self._answered = True
        return message

    def finish(self) -> None:
        """Let the worker clean up after its answer. If it cannot, it is killed, and the next call starts a new one."""
        if not self._answered or self.process.poll() is not None:
            self.kill()
            return
        try:
            self.connection.send_bytes(pickle.dumps(rank_worker.Finish()))
            last = self.receive() if self.connection.poll(TEARDOWN_S) else None
            cleaned = isinstance(last, rank_worker.Idle) and last.has_own_torch and last.num_threads <= MAX_THREADS
        except BrokenPipeError:
            cleaned = False
        if not cleaned:
            self.kill()

    def stack(self) -> str:
        """Return the Python stacks of the unresponsive process and of its loader workers."""
        own, *children = with_children([self.process.pid])
        text = self._dump(own)
        for pid in children:
            if _catches(pid, signal.SIGUSR2):
                text += f"----- its process {pid}\n{self._dump(pid)}"
        return text

    def _dump(self, pid: int) -> str:
        deadline = time.monotonic() + STACK_S
        already = len(self._stacks.read_text())
        try:
            os.kill(pid, signal.SIGUSR2)
        except ProcessLookupError:
            return ""
        # faulthandler does not mark the end. It writes the main thread last, which ends with the line of `python -c`, or with
        # dots after the hundredth frame.
        while not (text := self._stacks.read_text()[already:]).endswith((" in <module>\n", "  ...\n")):
            if time.monotonic() > deadline or self.process.poll() is not None:
                break
            time.sleep(0.01)
        return text

    def new_output(self, prefix: str) -> str:
        """Return the output of the worker since the last call, with ``prefix`` before each line."""
        with self._output.open("rb") as file:
            file.seek(self._read)
            data = file.read()
        self._read += len(data)
        return "".join(f"{prefix}{line}\n" for line in data.decode(errors="replace").splitlines())

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.connection.close()

    def _death(self) -> RankDied:
        try:
            code = self.process.wait(timeout=TEARDOWN_S)
        except subprocess.TimeoutExpired:
            return RankDied("closed its connection but is alive")
        if code < 0:
            return RankDied(f"died of signal {signal.Signals(-code).name}")
        return RankDied(f"died with exit code {code}")


@dataclass
class _Pool:
    started: list[_Worker]
    folder: Path | None = None
    number: int = 0
    nursery: Nursery | None = None
    store_pipe: set[int] = field(default_factory=set)
    modules: set[str] = field(default_factory=set)
    """Modules that every worker has imported at its start."""

    def workers(self, count: int) -> list[_Worker]:
        """Return ``count`` workers that wait for a call; start missing ones at the same time.

        A process keeps its rank, because torch caches device meshes without regard to the rank.
        """
        if self.folder is None:
            self.folder = Path(tempfile.mkdtemp(prefix="rank-workers-"))
        if self.nursery is None:
            # Each call passes its own environment; the variables of the current test must not stay in the workers.
            environ = {n: v for n, v in _AT_IMPORT.items() if n not in _OF_A_RANK}
            self.nursery = Nursery({**environ, **_OF_A_WORKER})
        for rank in range(count):
            if rank < len(self.started) and self.started[rank].is_alive:
                continue
            self.started[rank : rank + 1] = [_Worker(self.folder, self.number, self.nursery, self.modules)]
            self.number += 1
        deadline = time.monotonic() + START_LIMIT_S
        for worker in self.started[:count]:
            worker.wait_ready(deadline)
        return self.started[:count]

    def close(self) -> None:
        for worker in self.started:
            worker.kill()
        self.started.clear()
        if self.folder is not None:
            shutil.rmtree(self.folder)
            self.folder = None


_AT_IMPORT = dict(os.environ)
_POOL = _Pool(started=[])
