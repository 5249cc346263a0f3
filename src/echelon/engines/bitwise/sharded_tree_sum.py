"""The fixed summation tree for sharded parameters, in which each rank sums its shard of all batch shards' gradients."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from echelon.base.errors import UsageError
from echelon.data.global_batch_slices import Contribution
from echelon.distributed.uncompiled import uncompiled
from echelon.engines.bitwise.tree_sum import (
    EarlierGradients,
    ReplicatedUpdate,
    ShardedUpdate,
    SumNode,
    subtree_sum,
    top_of,
)
from echelon.engines.param_groups import fsdp_groups


class ShardedTreeSum(ShardedUpdate):
    """Sums the gradients of ``fully_shard`` modules; after each micro-step, a rank has its shard of all ranks' gradients.

    Source: FSDPModule.set_custom_reduce_scatter.
    """

    def __init__(
        self,
        parameters: Callable[[], Sequence[torch.Tensor]],
        *,
        num_shards: int,
        rank: int,
        world_size: int,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """Create the sum for ``parameters()``, which returns the parameters that get gradients, in the same order on every rank.

        ``group`` has the ranks with different shards (None: the default group), of which this one is number ``rank``.

        Raises:
            UsageError: this version of torch does not support reducing unused parameters.
        """
        if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
            raise UsageError(
                f"torch {torch.__version__} cannot reduce gradients if batch shards use different parameters",
                where="parity='bitwise', fsdp2 engine",
                do="use torch 2.13 or newer, the ddp or zero1 engine, or parity='exact'",
            )
        self._parameters = parameters
        self._num_shards, self._world_size, self._group = num_shards, world_size, group
        self._scatters: list[_Scatter] = []
        self._unwatched: list[Any] = []  # torch's records of parameters that have not been all-gathered yet
        self._used: set[int] = set()  # ids of parameters with a gradient from a batch shard of this rank
        self._reached: set[int] = set()  # ids of parameters with a gradient in this micro-step, also of padding
        self._replicated = ReplicatedUpdate(  # for unsharded parameters
            lambda: [p for p in parameters() if not isinstance(p, DTensor)],
            num_shards=num_shards,
            rank=rank,
            world_size=world_size,
            group=group,
        )
        self._contribution: Contribution | None = None
        self._earlier = EarlierGradients()
        self._sums: list[torch.Tensor | None] = []  # of each sharded parameter, over the backward passes of the update

    def attach(self, root: FSDPModule) -> None:
        """Replace the gradient reduction for ``root`` and its submodules.

        Raises:
            UsageError: the user sharded the module, but not by rows across all ranks.
        """
        module: Any = root
        for name, parameter in module.named_parameters():
            if not isinstance(parameter, DTensor):
                continue
            # A later axis of the mesh divides layers (tensor parallelism). torch's strided shards are not always instances of Shard.
            placement: Any = parameter.placements[0]
            is_by_row = not placement.is_replicate() and placement.dim == 0
            if not is_by_row or parameter.device_mesh.size(0) != self._world_size:
                raise UsageError(
                    f"expected {name} to be sharded along its first dim across {self._world_size} ranks, but it is sharded as "
                    f"{parameter.placements} across {parameter.device_mesh.size(0)} ranks",
                    where="parity='bitwise', fsdp2 engine",
                    do=f"shard it along its first dim across all {self._world_size} ranks, or use parity='exact'",
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
        self._replicated.begin(contribution)
        self._contribution = contribution
        sharded = self._sharded()
        if contribution.micro_step == 0:
            self._earlier.begin_update()
            self._used.clear()
            self._sums = [None] * len(sharded)
        else:
            self._earlier.take(sharded)
            self._take_sums(sharded)
        self._reached.clear()
        for scatter in self._scatters:
            scatter.begin(contribution)

    def _take_sums(self, sharded: Sequence[torch.Tensor]) -> None:
        """Move the sums out of the gradients; the last backward pass need not reach all models."""
        self._sums = [kept if p.grad is None else p.grad for p, kept in zip(sharded, self._sums)]
        for parameter in sharded:
            parameter.grad = None  # torch would add to it

    def before_backward(self) -> None:
        self._replicated.before_backward()
        sharded = self._sharded()
        self._earlier.take(sharded)
        if self._contribution is not None and self._contribution.ends_update:
            for parameter in sharded:
                parameter.grad = None  # ``finish`` has taken the sums; gradients of earlier updates were added to these
        else:
            self._take_sums(sharded)
        if self._unwatched:
            self._unwatched = [part for part in self._unwatched if not self._watch(part)]

    def _watch(self, part: Any) -> bool:
        """Hook the unsharded parameter's gradient; return False if the parameter does not exist yet or needs no gradient."""
        unsharded = getattr(part, "_unsharded_param", None)
        if unsharded is None or not unsharded.requires_grad:
            return False
        unsharded.register_post_accumulate_grad_hook(partial(self._record_use, part))
        return True

    @uncompiled
    def _record_use(self, part: Any, _unsharded: torch.Tensor) -> None:
        self._reached.add(id(part.sharded_param))
        if self._contribution is not None and not self._contribution.is_padding:
            self._used.add(id(part.sharded_param))

    def finish(self) -> None:
        self._replicated.finish()
        sharded = self._sharded()
        self._take_sums(sharded)
        is_used = torch.tensor([id(p) in self._used for p in sharded], dtype=torch.uint8, device=_device_of(sharded))
        dist.all_reduce(is_used, op=dist.ReduceOp.MAX, group=self._group)
        for parameter, total, used in zip(sharded, self._sums, is_used.tolist()):
            parameter.grad = total if used else None
        self._earlier.add_to(sharded)

    def has_reached(self, parameters: Collection[int]) -> bool:
        return not self._reached.isdisjoint(parameters) or self._replicated.has_reached(parameters)

    def forget_earlier(self, parameters: Collection[int]) -> None:
        self._earlier.forget(self._sharded(), parameters)
        self._replicated.forget_earlier(parameters)

    def discard(self) -> None:
        self._replicated.discard()
        for scatter in self._scatters:
            scatter.discard()
        self._earlier.discard()
        self._contribution, self._sums = None, []

    def release(self) -> None:
        """Drop all references to models."""
        self.discard()
        self._scatters.clear()
        self._unwatched.clear()

    def _sharded(self) -> list[torch.Tensor]:
        return [p for p in self._parameters() if isinstance(p, DTensor)]


class _Scatter:
    """Replaces torch's reduce-scatter for one unit (implements the ``ReduceScatter`` protocol of ``fully_shard``)."""

    def __init__(self, num_shards: int) -> None:
        self._num_shards = num_shards
        self._found: dict[SumNode, torch.Tensor] = {}  # sums of this rank's shard
        self._last: tuple[Contribution, torch.Tensor] | None = None  # a micro-step and its gradients by rank
        self._now: Contribution | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Allocate a communication buffer."""
        return torch.empty(*size, dtype=dtype, device=device)

    def begin(self, contribution: Contribution) -> None:
        if contribution.micro_step == 0:
            self.discard()
        self._now = contribution

    def discard(self) -> None:
        self._found, self._last = {}, None

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """Exchange gradient shards, and set ``output_tensor`` to the sum over the update so far."""
        assert self._now is not None, "backward pass outside an update"
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        parts = received.view(group.size(), -1)
        if self._last is not None and self._last[0] is self._now:
            parts = parts + self._last[1]  # a second backward pass
        elif self._last is not None:
            self._add(self._found, *self._last)
        self._last = self._now, parts
        found = dict(self._found)
        self._add(found, *self._last)
        total = subtree_sum(found, top_of(self._num_shards))
        output_tensor.zero_() if total is None else output_tensor.copy_(total)

    def _add(self, found: dict[SumNode, torch.Tensor], contribution: Contribution, parts: torch.Tensor) -> None:
        """Add the gradients from a micro-step's batch shards to ``found``."""
        num_leaves = min(self._num_shards, len(contribution.update))  # other leaves have no samples
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


def _device_of(tensors: Sequence[torch.Tensor]) -> torch.device:
    return tensors[0].device if tensors else torch.device("cpu")
