"""DistributedDataParallel whose two processes on one machine average gradients through shared memory instead of gloo's sockets."""

from __future__ import annotations

from functools import partial
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch.nn import parallel

from echelon.base.errors import DesyncError
from echelon.distributed.ddp.rebuild_reducer import rebuild_reducer
from echelon.distributed.ddp.shared_pages import share_pages

__all__ = ["DistributedDataParallel"]

_ALIGNMENT = 64  # bytes
_NUM_RANKS = 2
_NUM_TURNS = 2
_MARK = 0x6563_6865_6C6F_6E  # "echelon"
_DTYPES = (torch.float32, torch.float64)  # in which gloo adds as torch does


class DistributedDataParallel(parallel.DistributedDataParallel):
    """torch's, which can average the gradients of two processes through memory that they share; the results are bit-equal.

    A sum of two numbers does not depend on their order, so that no other number of ranks can have the same bits as with gloo.
    """

    exchanges = False
    """Whether gradients are averaged through shared memory."""

    def exchange_in_memory(self, *, wanted: bool, limit: int) -> bool:
        """Average gradients through shared memory from now on, if both ranks want it; return whether they will.

        Not if the gradients are of another dtype than float32 and float64, or sparse, or if the model has communication hooks already.

        Args:
            wanted: whether this rank wants it.
            limit: the largest number of bytes to share. It takes four times those of the gradients.

        Collective: call on both ranks of the process group.
        """
        assert dist.get_world_size(self.process_group) == _NUM_RANKS
        trained, is_sparse = self._build_params_for_reducer()  # type: ignore[no-untyped-call]
        part = sum(-(-p.numel() * p.element_size() // _ALIGNMENT) * _ALIGNMENT for p in trained) + _ALIGNMENT
        num_bytes = _NUM_RANKS * _NUM_TURNS * part
        can = (
            not self.exchanges
            and num_bytes <= limit
            and not any(is_sparse)
            and all(p.dtype in _DTYPES for p in trained)
            and not self._comm_hooks
            and self.mixed_precision is None
            and not self._use_python_reducer
            and not getattr(self, "_delay_all_reduce_params", None)
        )
        memory = share_pages(num_bytes, wanted=wanted and can, group=self.process_group)
        if memory is None:
            return False
        dist._register_comm_hook(self.reducer, _Exchange(memory, self), _Exchange.average)
        self.exchanges = True
        return True

    def register_comm_hook(self, state: object, hook: Any) -> None:
        self._end_exchange()
        super().register_comm_hook(state, hook)

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        self._end_exchange()
        super()._register_builtin_comm_hook(comm_hook_type)  # type: ignore[no-untyped-call]

    def _register_fused_optim(self, *args: Any, **options: Any) -> None:
        self._end_exchange()
        super()._register_fused_optim(*args, **options)

    def _end_exchange(self) -> None:
        if self.exchanges:
            rebuild_reducer(self)  # a reducer cannot replace its hook

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "exchanges": False}  # type: ignore[no-untyped-call]  # a copy gets a new reducer


class _Exchange:
    """The shared memory of one model's gradients.

    Each rank writes its gradients into its own part, and reads both parts after one small collective. The ranks write alternately into two
    halves of their parts, so that a rank may already write while the other one still reads.
    """

    def __init__(self, memory: torch.Tensor, wrapper: DistributedDataParallel) -> None:
        self._rank, self._group = dist.get_rank(wrapper.process_group), wrapper.process_group
        # Not the wrapper itself: the reducer holds this where the garbage collector cannot see it.
        self._wrapper = ref(wrapper)
        parts = memory.view(_NUM_TURNS, _NUM_RANKS, -1)
        self._turns = [[(part[:_ALIGNMENT], part[_ALIGNMENT:]) for part in turn] for turn in parts]
        self._num_done = 0
        self._offset = 0
        self._pending: list[tuple[torch.futures.Future[torch.Tensor], torch.Tensor, list[torch.Tensor]]] = []

    @torch.no_grad()
    def average(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Return the future of the averaged bucket; a communication hook of DDP, which calls it in the order of the buckets."""
        if bucket.index() == 0:
            self._offset = 0
            self._pending.clear()
        gradients, future = bucket.buffer(), torch.futures.Future[torch.Tensor]()
        begin, end = self._offset, self._offset + gradients.numel() * gradients.element_size()
        self._offset = -(-end // _ALIGNMENT) * _ALIGNMENT
        turn = self._turns[self._num_done % _NUM_TURNS]
        parts = [part[begin:end].view(gradients.dtype) for _, part in turn]
        assert parts[0].numel() == gradients.numel(), "the gradients take more memory than when it was shared"
        is_scaled_later = self._counts_ranks()
        if is_scaled_later:
            parts[self._rank].copy_(gradients)
        else:
            torch.mul(gradients, 1 / _NUM_RANKS, out=parts[self._rank])
        self._pending.append((future, gradients, parts))
        if bucket.is_last():
            self._meet(turn, counts_ranks=is_scaled_later)
        return future

    def _meet(self, turn: Any, *, counts_ranks: bool) -> None:
        """Wait for the other rank where DDP waits: after all local gradients are computed, in a callback of autograd."""
        # A rank without batches left contributes zeros outside of a backward pass.
        is_backward = torch._C._current_graph_task_id() >= 0
        turn[self._rank][0][0] = is_backward
        # Another collective of the other rank must not pass for this one: gloo rejects other sizes, and _finish other values.
        mine = [_MARK, self._num_done, self._offset]
        total = torch.tensor(mine)
        work = self._group.allreduce([total])
        finish = partial(self._finish, work, turn, counts_ranks=counts_ranks, mine=mine, total=total)
        wrapper: Any = self._wrapper()
        # With a static graph, DDP itself calls this in a callback, and then waits for the futures.
        if is_backward and not wrapper.static_graph:
            queue: Any = torch.autograd.Variable._execution_engine.queue_callback
            queue(finish)
        else:
            finish()

    @torch.no_grad()
    def _finish(self, work: Any, turn: Any, *, counts_ranks: bool, mine: list[int], total: torch.Tensor) -> None:
        # work.wait() would leave this function innermost on the stack, where code that torch calls seems to compute (status/call_site.py).
        torch.futures.wait_all([work.get_future()])
        if total.tolist() != [_NUM_RANKS * value for value in mine]:
            raise DesyncError(
                f"rank {self._rank} exchanges the gradients of backward pass {self._num_done + 1} of a prepared model, but the other "
                "rank is in another backward pass, or calls another collective operation",
                do="make the ranks call backward() and collective operations in the same order; echelon doctor shows where each rank is",
            )
        self._num_done += 1
        for future, gradients, (first, second) in self._pending:
            if counts_ranks:
                factor = 1 / sum(int(head[0]) for head, _ in turn)
                first, second = first * factor, second * factor
            torch.add(first, second, out=gradients)
            future.set_result(gradients)
        self._pending.clear()

    def _counts_ranks(self) -> bool:
        """Return whether to divide by the number of ranks that still have batches."""
        wrapper: Any = self._wrapper()
        return wrapper._join_config.enable and not wrapper._divide_by_initial_world_size
