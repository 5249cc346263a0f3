"""The fixed tree of sums where parameters are sharded: each rank adds up its part of the gradients of every shard."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from echelon.base.errors import UsageError
from echelon.data.exact.batch_slices import Contribution
from echelon.engines.bitwise.tree_sum import ReplicatedUpdate, ShardedUpdate, SumNode, top_of
from echelon.engines.shards import fsdp_groups

__all__ = ["ShardedTreeSum"]


class ShardedTreeSum(ShardedUpdate):
    """Of modules by ``fully_shard``: after each micro-step a rank has its part of the gradients of all ranks' shards.

    Source: FSDPModule.set_custom_reduce_scatter.
    """

    def __init__(
        self, parameters: Callable[[], Sequence[torch.Tensor]], *, num_shards: int, rank: int, world_size: int
    ) -> None:
        """``parameters()``: those that get gradients, now; the same in the same order on every rank.

        Raises:
            UsageError: a torch that sends nothing of a parameter that a shard does not use.
        """
        if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
            raise UsageError(
                f"torch {torch.__version__} cannot sum the gradients of shards that use different parameters",
                where="parity='bitwise', engine fsdp2",
                do="use a newer torch (2.13 can), the engine ddp or zero1, or parity='exact'",
            )
        self._parameters = parameters
        self._num_shards, self._world_size = num_shards, world_size
        self._scatters: list[_Scatter] = []
        self._unwatched: list[Any] = []  # torch's records of parameters that have not been whole yet
        self._used: set[int] = set()  # ids of the parameters to which a shard of this rank brought a gradient
        self._whole = ReplicatedUpdate(  # of what is not sharded
            lambda: [p for p in parameters() if not isinstance(p, DTensor)],
            num_shards=num_shards,
            rank=rank,
            world_size=world_size,
        )
        self._contribution: Contribution | None = None
        self._before: list[torch.Tensor | None] | None = []  # gradients of before the update, which nobody cleared
        self._had: list[bool] = []  # did an earlier backward pass of the last micro-step bring a sum?

    def attach(self, root: FSDPModule) -> None:
        """Take over the sums of ``root`` and the modules in it.

        Raises:
            UsageError: it was sharded by hand, and not by rows over all ranks.
        """
        module: Any = root
        for name, parameter in module.named_parameters():
            if not isinstance(parameter, DTensor):
                continue
            if parameter.placements != (Shard(0),) or parameter.device_mesh.size() != self._world_size:
                raise UsageError(
                    f"{name} is sharded as {parameter.placements} over {parameter.device_mesh.size()} ranks",
                    where="parity='bitwise', engine fsdp2",
                    do=f"shard it along its first dim over all {self._world_size} ranks, or use parity='exact'",
                )
        for part in module.modules():
            if isinstance(part, FSDPModule):
                self._scatters.append(_Scatter(self._num_shards))
                part.set_custom_reduce_scatter(self._scatters[-1])  # type: ignore[arg-type]
                part.set_gradient_divide_factor(1.0)
                part.set_force_sum_reduction_for_comms(True)
        root.set_reduce_scatter_unused_params(True)
        self._unwatched += [part for group in fsdp_groups(root) for part in group.fsdp_params]

    def begin(self, contribution: Contribution) -> None:
        """See ``ShardedUpdate``."""
        self._whole.begin(contribution)
        self._contribution = contribution
        sharded = self._sharded()
        if contribution.micro_step == 0:
            self._before = None  # the loop may still clear them, in this micro-step
            self._used.clear()
        else:
            self._set_aside(sharded)
            for parameter in sharded:
                parameter.grad = None
        for scatter in self._scatters:
            scatter.begin(contribution)
        self._had = [False] * len(sharded)

    def before_backward(self) -> None:
        """See ``ShardedUpdate``."""
        self._whole.before_backward()
        sharded = self._sharded()
        self._set_aside(sharded)
        for parameter in sharded:
            parameter.grad = None  # torch adds to what is there: zeros, or a sum that is made again
        if self._unwatched:
            self._unwatched = [part for part in self._unwatched if not self._watch(part)]

    def _set_aside(self, sharded: Sequence[torch.Tensor]) -> None:
        if self._before is None:
            self._before = [p.grad for p in sharded]

    def _watch(self, part: Any) -> bool:
        """Note when the whole parameter gets a gradient; False: it has not been there yet, or gets none."""
        whole = getattr(part, "_unsharded_param", None)
        if whole is None or not whole.requires_grad:
            return False
        whole.register_post_accumulate_grad_hook(partial(self._note, part))
        return True

    def _note(self, part: Any, _whole: torch.Tensor) -> None:
        if self._contribution is not None and not self._contribution.is_padding:
            self._used.add(id(part.sharded_param))

    def finish(self) -> None:
        """See ``ShardedUpdate``."""
        self._whole.finish()
        sharded = self._sharded()
        lost = sum(had and p.grad is None for p, had in zip(sharded, self._had))
        if lost:
            raise UsageError(
                f"a second backward pass of the last shard left out {lost} sharded parameters, whose sums are gone",
                where="parity='bitwise', engine fsdp2",
                do="add the losses up, and call backward() once",
            )
        is_used = torch.tensor([id(p) in self._used for p in sharded], dtype=torch.uint8, device=_device_of(sharded))
        dist.all_reduce(is_used, op=dist.ReduceOp.MAX)
        assert self._before is not None
        for parameter, used, earlier in zip(sharded, is_used.tolist(), self._before):
            if not used:
                parameter.grad = None
            if earlier is not None:
                parameter.grad = earlier if parameter.grad is None else earlier + parameter.grad
        self._had = [p.grad is not None for p in sharded]

    def drop(self) -> None:
        """See ``ShardedUpdate``."""
        self._whole.drop()
        for scatter in self._scatters:
            scatter.drop()
        self._contribution, self._before, self._had = None, [], []

    def release(self) -> None:
        """Forget the models."""
        self.drop()
        self._scatters.clear()
        self._unwatched.clear()

    def _sharded(self) -> list[torch.Tensor]:
        return [p for p in self._parameters() if isinstance(p, DTensor)]


class _Scatter:
    """In the place of torch's reduce-scatter for one unit: a ``ReduceScatter`` of fully_shard."""

    def __init__(self, num_shards: int) -> None:
        self._num_shards = num_shards
        self._found: dict[SumNode, torch.Tensor] = {}  # sums of this rank's part
        self._last: tuple[Contribution, torch.Tensor] | None = None  # a micro-step, and the parts of its shards by rank
        self._now: Contribution | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return memory for what is sent or received."""
        return torch.empty(*size, dtype=dtype, device=device)

    def begin(self, contribution: Contribution) -> None:
        """Begin a micro-step."""
        if contribution.micro_step == 0:
            self.drop()
        self._now = contribution

    def drop(self) -> None:
        """Forget the update."""
        self._found, self._last = {}, None

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """Send each rank its part of this rank's gradients; what comes back is zero, and in the last micro-step the sum."""
        assert self._now is not None, "a backward pass outside an update"
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        parts = received.view(group.size(), -1)
        if self._last is not None and self._last[0] is self._now:
            parts = parts + self._last[1]  # a second backward pass
        elif self._last is not None:
            self._file(self._found, *self._last)
        self._last = self._now, parts
        output_tensor.zero_()
        if self._now.ends_update:
            found = dict(self._found)
            self._file(found, *self._last)
            total = self._total(found, top_of(self._num_shards))
            if total is not None:
                output_tensor.copy_(total)

    def _file(self, found: dict[SumNode, torch.Tensor], contribution: Contribution, parts: torch.Tensor) -> None:
        """Add the parts of the shards of a micro-step to the sums."""
        num_leaves = min(self._num_shards, len(contribution.update))  # the others have no samples
        top = top_of(self._num_shards)
        for leaf, value in zip(contribution.shards, parts):
            if leaf is None:
                continue
            node = SumNode(0, leaf)
            while node != top:
                if node.sibling.leaves.start < num_leaves:
                    if node.sibling not in found:
                        break
                    value = found.pop(node.sibling) + value
                node = node.parent
            found[node] = value

    def _total(self, found: dict[SumNode, torch.Tensor], node: SumNode) -> torch.Tensor | None:
        """Return the sum over ``node``; None where no shard used the unit."""
        if node in found or not node.level:
            return found.get(node)
        left, right = (self._total(found, child) for child in node.children)
        return left + right if left is not None and right is not None else left if right is None else right


def _device_of(tensors: Sequence[torch.Tensor]) -> torch.device:
    return tensors[0].device if tensors else torch.device("cpu")
