"""Finds out which parameters an update has used, and keeps DeepSpeed from changing the others."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from echelon.base.errors import UsageError
from echelon.distributed.alone import is_alone
from echelon.distributed.small_messages import host_wire
from echelon.engines.deepspeed.flat_shards import FlatShard, FlatShards

__all__ = ["UsedParameters", "count_ranks"]

_REMEDY = "use every layer in each update (for example, add 0 times its output to the loss), or use engine='fsdp2', 'ddp' or ZeRO stage 0"
_DIGEST_BITS = 32


class UsedParameters:
    """Notes the trained parameters that get gradients, for ZeRO stages 1 to 3.

    A plain loop leaves a parameter without a gradient as it is. The library steps flat tensors that contain it, which decays it or
    moves it by its momentum or, in stage 3, by its previous gradient. If ranks use different parameters, it adds up gradients of
    different parameters. With ``is_ordered`` (stages 2 and 3), it also does so if ranks use the same parameters in different
    orders, because it sends gradients in the order in which a backward pass computes them. (0.19.8.)
    """

    def __init__(
        self,
        optimizer: Any,
        shards: FlatShards,
        parameters: Sequence[tuple[str, nn.Parameter]],
        *,
        is_ordered: bool,
    ) -> None:
        self._optimizer = optimizer
        self._shards = shards
        self._parameters = parameters
        self._is_ordered = is_ordered
        self._order = 0  # digest of the order in which this rank's backward passes have computed gradients
        self._used: set[int] = set()  # indices of parameters, on this rank
        self._unused: list[int] = []  # on all ranks, in the update that is finished
        self._left_out: set[int] = set()  # in an earlier update
        self._held: list[tuple[FlatShard, torch.Tensor, dict[str, torch.Tensor]]] = []
        inner: torch.optim.Optimizer = optimizer.optimizer
        self._hooks: list[Any] = [
            parameter.register_post_accumulate_grad_hook(partial(self._note, index))  # type: ignore[no-untyped-call]
            for index, (_, parameter) in enumerate(parameters)
        ]
        self._hooks += [inner.register_step_pre_hook(self._hold), inner.register_step_post_hook(self._put_back)]

    def release(self) -> None:
        """Remove the hooks from the parameters and the optimizer."""
        for hook in self._hooks:
            hook.remove()

    def _note(self, index: int, _parameter: torch.Tensor) -> None:
        self._used.add(index)
        if self._is_ordered:
            self._order = zlib.crc32(index.to_bytes(4, "little"), self._order)

    def finish(self) -> None:
        """Compare the ranks, and clear what the library left in place of gradients. Collective: call on every rank.

        Raises:
            UsageError: ranks used different parameters, or used them in different orders, or one that an earlier update left out is
                used again and the optimizer counts its steps.
        """
        order = [bool(self._order >> bit & 1) for bit in range(_DIGEST_BITS)]
        used_here = [index in self._used for index in range(len(self._parameters))]
        counts = count_ranks([*order, self._counts_steps(), *used_here])
        of_order, counts_steps, used = counts[:_DIGEST_BITS], counts[_DIGEST_BITS], counts[_DIGEST_BITS + 1 :]
        world_size = 1 if is_alone() else dist.get_world_size()
        names = [name for name, _ in self._parameters]
        differing = [name for name, count in zip(names, used) if 0 < count < world_size]
        if differing:
            raise UsageError(
                f"some ranks used {_listed(differing)} in this update, and others did not, but DeepSpeed would mix up the gradients",
                where="optimizer step, deepspeed engine",
                do=_REMEDY,
            )
        if any(0 < count < world_size for count in of_order):
            raise UsageError(
                "ranks used the model's layers in different orders in this update, but DeepSpeed would mix up the gradients",
                where="optimizer step, deepspeed engine",
                do="use the layers in the same order on every rank, or use engine='fsdp2', 'ddp' or ZeRO stage 0 or 1",
            )
        again = [names[index] for index in sorted(self._left_out) if used[index]]
        if again and counts_steps:
            raise UsageError(
                f"{_listed(again)} got no gradients in an earlier update, and is used again now, but DeepSpeed counts the steps of "
                f"{type(self._optimizer.optimizer).__name__} for all parameters together, which would make its step size wrong",
                where="optimizer step, deepspeed engine",
                do=_REMEDY,
            )
        self._unused = [index for index, count in enumerate(used) if not count]
        self._shards.clear_gradients([self._parameters[index][1] for index in self._unused])

    def end_update(self, *, is_taken: bool) -> None:
        """Begin the next update; ``is_taken`` says whether the optimizer has stepped."""
        if is_taken:
            self._left_out |= set(self._unused)
        self._order = 0
        self._used.clear()
        self._unused.clear()

    def _counts_steps(self) -> bool:
        states = self._optimizer.optimizer.state.values()
        return any(_is_number(value) for state in states for value in state.values())

    def _hold(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        stepped = {id(flat) for group in optimizer.param_groups for flat in group["params"]}
        for index in self._unused:
            part = self._shards.shard(self._parameters[index][1])
            if part is not None and id(part.flat) in stepped:
                entries = _entries(optimizer, part)
                held = {name: part.of(value).clone() for name, value in entries.items()}
                self._held.append((part, part.of(part.flat.detach()).clone(), held))

    def _put_back(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for part, weights, held in self._held:
            part.of(part.flat.detach()).copy_(weights)
            for name, value in _entries(optimizer, part).items():
                if name in held:
                    part.of(value).copy_(held[name])
                else:  # the first step has created it
                    part.of(value).zero_()
        self._held.clear()


def count_ranks(flags: Sequence[bool]) -> list[int]:
    """Return, for each flag, on how many ranks it is set. Collective: call on every rank, with as many flags."""
    counts = torch.tensor(flags, dtype=torch.int32, device=host_wire() if not is_alone() else None)
    if not is_alone():
        dist.all_reduce(counts)
    return [int(count) for count in counts.tolist()]


def _entries(optimizer: torch.optim.Optimizer, part: FlatShard) -> Mapping[str, torch.Tensor]:
    """Return the optimizer state that has one value for each element of the flat tensor."""
    state = optimizer.state.get(part.flat, {})
    return {name: value for name, value in state.items() if part.has_layout(value)}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and value.dim() == 0)


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:3])}{f' and {len(names) - 3} more parameters' if len(names) > 3 else ''}"
