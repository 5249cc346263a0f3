"""DistributedDataParallel whose two processes on one machine average gradients through shared memory instead of gloo's sockets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple
from weakref import ref

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn import parallel

from echelon.base.errors import DesyncError
from echelon.distributed.ddp.shared_pages import SharedPages, share_pages
from echelon.distributed.uncompiled import uncompiled

__all__ = ["DistributedDataParallel"]

_ALIGNMENT = 64  # bytes
_NUM_RANKS = 2
_NUM_TURNS = 2
_DTYPES = (torch.float32, torch.float64)  # in which gloo adds as torch does
_BUILT_IN: dict[Any, Any] = {
    dist.BuiltinCommHookType.ALLREDUCE: default_hooks.allreduce_hook,
    dist.BuiltinCommHookType.FP16_COMPRESS: default_hooks.fp16_compress_hook,
}
_Future = torch.futures.Future[torch.Tensor]


class DistributedDataParallel(parallel.DistributedDataParallel):
    """torch's, which can average the gradients of two processes through memory that they share; the results are bit-equal.

    A sum of two numbers does not depend on their order, so that no other number of ranks can have the same bits as with gloo.
    """

    exchange: _Exchange | None = None
    """What averages the gradients through shared memory; None if gloo does, or a hook of the script."""

    def exchange_in_memory(self, *, wanted: bool, limit: int) -> bool:
        """Average gradients through shared memory from now on, if both ranks want it; return whether that was begun.

        Nothing changes if the process group does not have two ranks, if the model has a communication hook, or if any gradient is sparse, is
        not on the CPU, or has another dtype than float32 and float64.

        Args:
            wanted: whether this rank wants it.
            limit: the largest number of bytes to share. It takes four times those of the gradients.

        Collective: call on every rank of the process group.
        """
        if dist.get_world_size(self.process_group) != _NUM_RANKS:
            return False
        trained, is_sparse = self._build_params_for_reducer()  # type: ignore[no-untyped-call]
        part = sum(-(-p.numel() * p.element_size() // _ALIGNMENT) * _ALIGNMENT for p in trained) + _ALIGNMENT
        num_bytes = _NUM_RANKS * _NUM_TURNS * part
        can = (
            self.exchange is None
            and num_bytes <= limit
            and not any(is_sparse)
            and all(p.dtype in _DTYPES and p.device.type == "cpu" for p in trained)
            and not self._comm_hooks
            and self.mixed_precision is None
            and not self._use_python_reducer
            and not getattr(self, "_delay_all_reduce_params", None)
            and not getattr(self, "skip_all_reduce_unused_params", False)  # it leaves out buckets
        )
        pages = share_pages(num_bytes, wanted=wanted and can, group=self.process_group)
        if pages is None:
            return False
        self.exchange = _Exchange(pages, self, num_elements=sum(p.numel() for p in trained))
        dist._register_comm_hook(self.reducer, self.exchange, _Exchange.average)
        return True

    def register_comm_hook(self, state: object, hook: Any) -> None:
        """See torch's method. Also after ``exchange_in_memory``: the hook takes its place."""
        if self.exchange is None:
            super().register_comm_hook(state, hook)
            return
        self._check_comm_hook(hook)  # type: ignore[no-untyped-call]
        self._replace_exchange(state, hook)
        assert self.logger is not None
        self.logger._set_comm_hook_name(hook.__qualname__)
        self._comm_hooks.append((hook, state))

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        if self.exchange is None:
            super()._register_builtin_comm_hook(comm_hook_type)  # type: ignore[no-untyped-call]
        else:
            self._replace_exchange(self.process_group, _BUILT_IN[comm_hook_type])

    def _replace_exchange(self, state: object, hook: Callable[[Any, dist.GradBucket], _Future]) -> None:
        # The reducer keeps its hook: it cannot replace it, and a new reducer would forget a forward pass that has been made.
        assert self.exchange is not None
        self.exchange.end(partial(hook, state))
        self.exchange = None

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        state.pop("exchange", None)  # a copy gets a new reducer
        return state


class _Part(NamedTuple):
    """The shared memory of one rank in one turn."""

    is_live: torch.Tensor
    """uint8 [1]: whether the rank still has batches (torch's ``join``)."""
    gradients: torch.Tensor


class _Pending(NamedTuple):
    """A bucket whose average is not known yet."""

    future: _Future
    gradients: torch.Tensor
    parts: list[torch.Tensor]
    """The gradients of each rank in the shared memory."""


class _Meeting(NamedTuple):
    """A small collective after which both ranks have written their gradients."""

    turn: list[_Part]
    work: Any
    mine: list[int]
    total: torch.Tensor
    counts_ranks: bool


class _Exchange:
    """The shared memory of one model's gradients.

    Each rank writes its gradients into its own part, and reads both parts after one small collective. The ranks write alternately into two
    halves of their parts, so that a rank may already write while the other one still reads.
    """

    def __init__(self, pages: SharedPages, wrapper: DistributedDataParallel, *, num_elements: int) -> None:
        self._rank, self._group = dist.get_rank(wrapper.process_group), wrapper.process_group
        # Not the wrapper itself: the reducer holds this where the garbage collector cannot see it.
        self._wrapper = ref(wrapper)
        self._identity, self._num_elements = pages.identity, num_elements
        parts = pages.memory.view(_NUM_TURNS, _NUM_RANKS, -1)
        self._turns = [[_Part(part[:1], part[_ALIGNMENT:]) for part in turn] for turn in parts]
        self._num_done = 0
        self._successor: Callable[[dist.GradBucket], _Future] | None = None
        self._begin_pass()

    def end(self, successor: Callable[[dist.GradBucket], _Future]) -> None:
        """Free the memory, and let ``successor`` average the buckets from now on."""
        self._successor, self._turns = successor, []

    def _begin_pass(self) -> None:
        self._offset, self._num_seen = 0, 0
        self._pending: list[_Pending] = []

    @uncompiled
    @torch.no_grad()
    def average(self, bucket: dist.GradBucket) -> _Future:
        """Return the future of the averaged bucket; a communication hook of DDP, which calls it in the order of the buckets."""
        if self._successor is not None:
            return self._successor(bucket)
        wrapper: Any = self._wrapper()
        # In the first pass of a static graph, DDP numbers each bucket as 0 and none as the last one.
        if bucket.index() == 0 and not wrapper.static_graph:
            self._begin_pass()  # the last one may have ended with an error
        gradients, future = bucket.buffer(), _Future()
        begin, end = self._offset, self._offset + gradients.numel() * gradients.element_size()
        self._offset, self._num_seen = -(-end // _ALIGNMENT) * _ALIGNMENT, self._num_seen + gradients.numel()
        turn = self._turns[self._num_done % _NUM_TURNS]
        parts = [part.gradients[begin:end].view(gradients.dtype) for part in turn]
        # Without a hook, DDP divides by the number of ranks that still have batches if join() says so; it counts them for the first model only.
        join = wrapper._join_config
        counts_ranks = join.enable and join.is_first_joinable and not wrapper._divide_by_initial_world_size
        if counts_ranks:
            parts[self._rank].copy_(gradients)
        elif gradients.requires_grad:  # create_graph=True: the division is part of the graph
            with torch.enable_grad():
                gradients.mul_(1 / _NUM_RANKS)
            parts[self._rank].copy_(gradients)
        else:
            torch.mul(gradients, 1 / _NUM_RANKS, out=parts[self._rank])
        self._pending.append(_Pending(future, gradients, parts))
        if self._num_seen == self._num_elements:
            self._meet(turn, counts_ranks=counts_ranks, is_delayed=wrapper.static_graph and self._num_done == 0)
        return future

    def _meet(self, turn: list[_Part], *, counts_ranks: bool, is_delayed: bool) -> None:
        """Wait for the other rank where DDP waits: after all local gradients are computed, in a callback of autograd.

        Args:
            turn: the parts that the ranks write in this pass.
            counts_ranks: whether to divide by the number of ranks that have batches.
            is_delayed: whether DDP itself calls this in a callback, and then waits for the futures.
        """
        # A rank without batches left contributes zeros outside of a backward pass.
        is_backward = torch._C._current_graph_task_id() >= 0
        turn[self._rank].is_live.fill_(is_backward)
        # Another collective of the other rank must not pass for this one: gloo rejects other sizes, and _finish other values.
        mine = [self._identity, self._num_done, self._num_elements]
        total = torch.tensor(mine, device="cpu")
        finish = partial(
            self._finish, _Meeting(turn, self._group.allreduce([total]), mine, total, counts_ranks), self._pending
        )
        if is_backward and not is_delayed:
            queue: Any = torch.autograd.Variable._execution_engine.queue_callback
            queue(finish)
        else:
            finish()

    @torch.no_grad()
    def _finish(self, meeting: _Meeting, pending: list[_Pending]) -> None:
        # work.wait() would leave this function innermost on the stack, where code that torch calls seems to compute (status/call_site.py).
        torch.futures.wait_all([meeting.work.get_future()])
        if meeting.total.tolist() != [_NUM_RANKS * value for value in meeting.mine]:
            raise DesyncError(
                f"rank {self._rank} exchanges the gradients of backward pass {self._num_done + 1} of a prepared model, but the other "
                "rank is in another backward pass, or calls another collective operation",
                do="make the ranks call backward() and collective operations in the same order; echelon doctor shows where each rank is",
            )
        self._num_done += 1
        self._begin_pass()
        factor = 1 / sum(int(part.is_live) for part in meeting.turn) if meeting.counts_ranks else 1
        with _subnormal_sums():
            for future, gradients, (first, second) in pending:
                if factor != 1:
                    first, second = first * factor, second * factor
                torch.add(first, second, out=gradients.detach())
                future.set_result(gradients)


@contextmanager
def _subnormal_sums() -> Iterator[None]:
    """Do not round subnormal sums to zero even if the script has called ``torch.set_flush_denormal(True)``: gloo's threads do not."""
    flushes = not torch.tensor([1e-310], dtype=torch.float64, device="cpu").mul_(1).any()
    if flushes:
        torch.set_flush_denormal(False)
    try:
        yield
    finally:
        if flushes:
            torch.set_flush_denormal(True)
