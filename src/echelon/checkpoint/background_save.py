"""Background saves: copies tensors to host memory, and writes them in a thread."""

from __future__ import annotations

import atexit
import copy
import json
import threading
import time
import traceback
import weakref
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from echelon.base.errors import CheckpointError
from echelon.base.logging import get_logger
from echelon.base.messages.translation import gettext_noop as N_
from echelon.checkpoint.object_store import ObjectPath
from echelon.checkpoint.plan import Gather
from echelon.checkpoint.save import PendingCheckpoint
from echelon.distributed.stores import store_of

EXIT_CODE = 74
"""Exit code of a process that ends because it cannot write checkpoints (EX_IOERR in sysexits.h)."""

_POLL_S = 0.02
_EXIT_POLL_S = 0.5
_logger = get_logger(__name__)


class TooManyFailedSavesError(CheckpointError):
    """Several consecutive saves failed. Training stops, because a crash would lose all work since the last checkpoint.

    Causes: the same as for SaveFailedError, three times in a row (``ProjectConfiguration(max_failed_saves=)``).
    Do: free disk space and restart; the run resumes from the last complete checkpoint.
    """

    exit_code = EXIT_CODE


class HostBuffers:
    """Host memory for one copy of some tensors, which is reused while their shapes stay the same."""

    def __init__(self) -> None:
        self._kept: dict[str, torch.Tensor] = {}

    def copy(self, values: Any) -> Any:
        """Return a copy of ``values`` (dicts, lists, tuples and other values) whose tensors are in host memory.

        Tensors that are the same memory, such as tied weights, are the same tensor in the copy. The next call overwrites it.
        """
        before, self._kept = self._kept, {}  # buffers of tensors that are no longer copied are freed
        first: dict[Any, torch.Tensor] = {}
        copied = self._copied(values, "", before, first)
        for device in {view[0] for view in first}:
            if device.type not in ("cpu", "meta"):
                torch.accelerator.synchronize(device)
        return copied

    def _copied(self, value: Any, name: str, before: Mapping[str, torch.Tensor], first: dict[Any, torch.Tensor]) -> Any:
        if isinstance(value, Mapping):
            return {key: self._copied(item, f"{name}/{key}", before, first) for key, item in value.items()}
        if type(value) in (list, tuple):
            return type(value)(self._copied(item, f"{name}/{i}", before, first) for i, item in enumerate(value))
        if not isinstance(value, torch.Tensor):
            return copy.deepcopy(value)
        tensor = value.detach()
        if type(tensor) is not torch.Tensor:  # a quantized weight, of which an empty tensor is no copy
            return tensor.clone()
        view = (tensor.device, tensor.data_ptr() or name, tensor.dtype, tensor.shape, tensor.stride())
        if view not in first:
            buffer = before.get(name)
            if buffer is None or (buffer.shape, buffer.dtype) != (tensor.shape, tensor.dtype):
                # Copies from an accelerator overlap only if the memory is page-locked.
                buffer = torch.empty(
                    tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type not in ("cpu", "meta")
                )
            first[view] = self._kept[name] = buffer.copy_(tensor, non_blocking=True)
        return first[view]


class BackgroundSaver:
    """Writes one checkpoint at a time in a thread. Training waits only until the tensors have been copied to host memory.

    The next call to ``start`` or ``wait`` raises any error from the thread. If the program ends during a save, Python joins
    the thread.
    """

    def __init__(self) -> None:
        self._buffers = HostBuffers()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        atexit.register(_report, weakref.ref(self))

    @property
    def is_busy(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def is_idle(self) -> bool:
        """Whether ``wait`` would return immediately and without an error."""
        return self._thread is None and self._error is None

    def start(self, pending: PendingCheckpoint) -> None:
        """Wait for the previous save, copy the tensors of ``pending``, and write them in a thread.

        Args:
            pending: has begun. It is discarded if the previous save failed.

        Collective: call on every rank.

        Raises:
            CheckpointError: the previous checkpoint could not be written.
        """
        with pending.files.discarded_on_error():
            self.wait()
        pending.tensors = list(self._buffers.copy(dict(pending.tensors)).items())
        pending.gather = store_gather(pending.files.token)

        def work() -> None:
            try:
                pending.finish()
            except Exception as error:  # noqa: BLE001 - raised by the next wait()
                self._error = error

        # Not a daemon: Python joins it at exit, so that the checkpoint is finished.
        self._thread = threading.Thread(target=work, name=f"checkpoint {pending.target.name}")
        self._thread.start()
        if isinstance(pending.target, ObjectPath):
            arguments = (self._thread, pending.target)
            threading.Thread(target=_say_at_exit, args=arguments, name="upload at exit", daemon=True).start()

    def wait(self) -> None:
        """Wait for the current save, if any, to finish.

        Raises:
            CheckpointError: the last checkpoint could not be written.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error


def _say_at_exit(upload: threading.Thread, target: ObjectPath) -> None:
    """Say if the program ends before ``upload`` does, because Python then waits for it without a word."""
    while upload.is_alive():
        upload.join(_EXIT_POLL_S)
        if upload.is_alive() and not threading.main_thread().is_alive():
            _logger.warning(N_("the program has ended; it exits when the checkpoint %s is uploaded"), target)
            return


def _report(saver: weakref.ref[BackgroundSaver]) -> None:
    """Print an error that no call has raised. By now, Python has joined the thread."""
    found = saver()
    if found is not None and found._error is not None:
        traceback.print_exception(found._error)


def store_gather(token: str, *, timeout: timedelta = timedelta(minutes=30)) -> Gather:
    """Return a ``gather`` that can run in a thread, because it uses the group's store instead of collectives.

    Args:
        token: unique prefix for the keys of this save.
        timeout: how long to wait for the slowest rank to finish writing.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return lambda payload: [payload]
    group = dist.group.WORLD
    assert group is not None
    store = dist.PrefixStore(f"echelon/save/{token}", store_of(group))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    turn = 0

    def wait_for(key: str, what: str) -> None:
        deadline = time.monotonic() + timeout.total_seconds()
        while not store.check([key]):  # store.wait() would block other threads from using the store
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"{what} within {timeout.total_seconds():g} s",
                    do="check the logs and disks of the other ranks",
                )
            time.sleep(_POLL_S)

    def gather(payload: bytes) -> list[bytes]:
        # Rank zero reads the others' payloads and writes all of them, so that the number of requests does not grow with the
        # square of the number of ranks.
        nonlocal turn
        turn += 1
        own, everyone, read, over = f"{turn}/{rank}", f"{turn}/everyone", f"{turn}/read", f"{turn}/over"
        store.set(own, payload.decode("ascii"))
        if rank == 0:
            keys = [f"{turn}/{other}" for other in range(world_size)]
            for other, key in enumerate(keys):
                wait_for(key, f"rank {other} did not finish writing in time")
            store.set(everyone, json.dumps([store.get(key).decode("ascii") for key in keys]))
        wait_for(everyone, "rank 0 did not finish writing in time")
        found = [text.encode("ascii") for text in json.loads(store.get(everyone))]
        # Rank zero hosts the store and must not exit before all ranks have read. After that the keys are not needed.
        if store.add(read, 1) == world_size:
            store.set(over, "1")
        if rank == 0:
            wait_for(over, "some ranks did not read the other ranks' results in time")
            for key in (*keys, everyone, read, over):
                store.delete_key(key)
        return found

    return gather
