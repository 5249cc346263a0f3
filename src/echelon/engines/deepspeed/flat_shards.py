"""Accesses, by parameter, the flat tensors in which DeepSpeed stores and updates this rank's shards."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from echelon.base.errors import UsageError
from echelon.distributed.alone import is_alone
from echelon.distributed.small_messages import host_wire
from echelon.engines.gather_state import gather_state
from echelon.engines.state_dicts import plain_parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatShard:
    """Where this rank's shard of a parameter is."""

    flat: torch.Tensor
    """Float32 tensor that contains this shard and the shards of other parameters."""
    flat_offset: int
    offset: int
    """Offset of the shard in the flattened parameter."""
    numel: int

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the shard's elements from a tensor that has the same layout as ``self.flat``."""
        return flat.view(-1).narrow(0, self.flat_offset, self.numel)

    def has_layout(self, value: Any) -> bool:
        """Return whether ``value`` is a tensor with the same layout as ``self.flat``."""
        return isinstance(value, torch.Tensor) and value.dim() > 0 and value.numel() == self.flat.numel()


class FlatShards:
    """Reads and writes the float32 weights and optimizer state of ZeRO stages 1 to 3 by parameter.

    The library's own functions (``safe_get_full_optimizer_state``) send every tensor to all ranks and do not support scalars
    or state that does not exist yet.

    Source: deepspeed.runtime.zero (0.19.8).
    """

    def __init__(
        self, library: Any, engine: Any, groups: Sequence[Sequence[nn.Parameter]], *, rank: int, world_size: int
    ) -> None:
        self._zero_module = library.zero
        self._engine = engine
        self._groups = groups
        self._rank = rank
        self._world_size = world_size
        self._stage = int(engine.zero_optimization_stage())
        self._module: nn.Module = engine.module
        self._places: dict[
            int, tuple[int, int]
        ] = {}  # of parameters by id: group, and offset in its flat tensor on all ranks
        if self._stage < 3:
            # The library's own mapping (_hp_mapping) is wrong with round_robin_gradients (0.19.8).
            layout = zip(engine.optimizer.round_robin_bit16_groups, engine.optimizer.round_robin_bit16_offsets)
            for number, (group, offsets) in enumerate(layout):
                self._places |= {id(p): (number, offset) for p, offset in zip(group, offsets)}
        self._hooks = hook_loading(self._module, self.load_parameter)

    def release(self) -> None:
        """Remove the hooks from the module."""
        for hook in self._hooks:
            hook.remove()

    @property
    def parameter_groups(self) -> list[list[torch.Tensor]]:
        """The parameters in each of the optimizer's groups, in the order of their numbers."""
        return [list(group) for group in self._groups]

    # ---- layout ------------------------------------------------------------------------------------------------------

    @property
    def _optimizer(self) -> Any:
        return self._engine.optimizer

    def shard(self, parameter: nn.Parameter) -> FlatShard | None:
        """Return this rank's shard of ``parameter``, or None if the shard is empty or the parameter is frozen."""
        own: Any = parameter
        if not parameter.requires_grad:
            return None
        if self._stage < 3:
            number, begin = self._places[id(parameter)]
            flat = self._optimizer.single_partition_of_fp32_groups[number]
            start = self._rank * flat.numel()
            first, end = max(begin, start), min(begin + parameter.numel(), start + flat.numel())
            if first >= end:
                return None
            return FlatShard(flat=flat, flat_offset=first - start, offset=first - begin, numel=end - first)
        number, start, size = self._optimizer.grad_position[self._optimizer.get_param_id(parameter)]
        offset = self._rank * own.partition_numel()
        numel = max(0, min(size, own.ds_numel - offset))  # the rest is padding
        if numel == 0:
            return None
        flat = self._optimizer.fp32_partitioned_groups_flat[number]
        return FlatShard(flat=flat, flat_offset=start, offset=offset, numel=numel)

    @property
    def _is_swapped(self) -> bool:
        """Whether the float32 weights and the optimizer state are on NVMe."""
        return bool(getattr(self._optimizer, "swap_optimizer", False))

    def require_in_memory(self) -> None:
        """Raise UsageError if the optimizer state is on NVMe, where only DeepSpeed's own checkpointing can read it."""
        if self._is_swapped:
            raise UsageError(
                "the optimizer state is on NVMe (zero_optimization.offload_optimizer.device) and cannot be gathered",
                do="offload it to the CPU, or save it with the DeepSpeed engine's model.save_checkpoint(folder)",
            )

    # ---- weights -----------------------------------------------------------------------------------------------------

    def full_weights(self) -> dict[str, torch.Tensor] | None:
        """Return the float32 trained parameters by name on rank zero's CPU, or None on other ranks. Collective: call on every rank."""
        named = [(name, p) for name, p in plain_parameters(self._module) if p.requires_grad]
        mine = {i: part.of(part.flat) for i, (_, p) in enumerate(named) if (part := self.shard(p)) is not None}
        full = self._gather([p for _, p in named], {i: {"value": value} for i, value in mine.items()})
        return None if full is None else {name: full[i]["value"] for i, (name, _) in enumerate(named)}

    def full_weight(self, parameter: nn.Parameter, *, to: int) -> torch.Tensor | None:
        """Return a parameter on the CPU of the rank ``to``, None on other ranks: float32 if it is trained. Collective: call on every rank."""
        if not parameter.requires_grad:
            with self.gathered([parameter]):
                return parameter.detach().to("cpu", copy=True) if self._rank == to else None
        part = self.shard(parameter)
        full = self._gather([parameter], {} if part is None else {0: {"value": part.of(part.flat)}}, to=to)
        return None if full is None else full[0]["value"]

    def frozen_weights(self) -> dict[str, torch.Tensor]:
        """Return the frozen parameters by name on the CPU. Collective with stage 3."""
        frozen = [(name, p) for name, p in plain_parameters(self._module) if not p.requires_grad]
        found = {}
        for name, parameter in frozen:
            with self.gathered([parameter]):
                found[name] = parameter.detach().to("cpu", copy=True)
        return found

    def gathered(self, parameters: list[nn.Parameter]) -> Any:
        """Return a context in which ``parameters`` are unsharded. Collective with stage 3."""
        return self._zero_module.GatheredParameters([p for p in parameters if hasattr(p, "ds_id")])

    def load_parameter(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        """Set ``parameter`` to the unsharded ``value``, which must be the same on every rank. Collective with stage 3."""
        part = self.shard(parameter)
        if part is not None:
            own = value.detach().reshape(-1).narrow(0, part.offset, part.numel)
            part.of(part.flat).data.copy_(own)
        if self._stage == 3:
            write_full(self._zero_module, parameter, value, rank=self._rank)

    def adopt_changes(self) -> None:
        """Copy what the program has changed in the model's weights (clamped, pruned, ...) to the float32 shards.

        The library computes the next weights from the shards, and would lose the change.
        """
        if self._is_swapped:
            return
        for parameter in self._module.parameters():
            part = self.shard(parameter)
            if part is None:
                continue
            own: Any = parameter
            if self._stage < 3:
                weights = parameter.detach().reshape(-1).narrow(0, part.offset, part.numel)
            elif own.ds_tensor.numel() < part.numel:  # on NVMe
                continue
            else:
                weights = own.ds_tensor.detach().narrow(0, 0, part.numel)
            high = part.of(part.flat.detach())
            weights = weights.to(high.device)
            high.copy_(torch.where(weights == high.to(weights.dtype), high, weights.to(high.dtype)))

    def clear_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Zero what stage 3 would take for the gradients of ``parameters``, which got none: those of the last update."""
        if self._stage < 3 or not parameters:
            return
        optimizer, chosen = self._optimizer, {id(parameter) for parameter in parameters}
        for number, group in enumerate(optimizer.fp16_groups):
            for parameter, gradient in zip(group, optimizer.averaged_gradients.get(number) or ()):
                if id(parameter) in chosen:
                    gradient.zero_()
        if optimizer.offload_optimizer:
            for parameter in parameters:
                part = self.shard(parameter)
                optimizer.norm_for_param_grads.pop(optimizer.get_param_id(parameter), None)
                if part is not None and part.flat.grad is not None:
                    part.of(part.flat.grad).zero_()

    # ---- optimizer ---------------------------------------------------------------------------------------------------

    def own_state(self) -> dict[int, dict[str, Any]]:
        """Return this rank's part of the optimizer state by parameter number."""
        self.require_in_memory()
        found = {}
        for number, parameter in self._numbered():
            part = self.shard(parameter)
            entries = {} if part is None else self._optimizer.optimizer.state.get(part.flat, {})
            if part is not None and entries:
                found[number] = {
                    key: part.of(value) if part.has_layout(value) else value for key, value in entries.items()
                }
        return found

    def full_state(self) -> dict[int, dict[str, Any]] | None:
        """Return the optimizer state by parameter number on rank zero's CPU, or None on other ranks. Collective: call on every rank."""
        return self._gather([p for _, p in self._numbered()], self.own_state())

    def load_state(self, state: Mapping[int, Mapping[str, Any]]) -> None:
        """Load this rank's part of the full optimizer state."""
        self.require_in_memory()
        for number, parameter in self._numbered():
            part = self.shard(parameter)
            if part is None or number not in state:
                continue
            shape = full_shape(parameter)
            entries = self._optimizer.optimizer.state[part.flat]
            for key, value in state[number].items():
                if not (isinstance(value, torch.Tensor) and value.shape == shape and value.dim() > 0):
                    entries[key] = value.clone() if isinstance(value, torch.Tensor) else value
                    continue
                if key not in entries:
                    entries[key] = torch.zeros_like(part.flat)
                part.of(entries[key]).copy_(value.reshape(-1).narrow(0, part.offset, part.numel))

    def groups(self) -> list[dict[str, Any]]:
        """Return the optimizer's groups with parameter numbers, as in torch's state dicts."""
        numbers = {id(p): number for number, p in self._numbered()}
        settings = [
            {key: value for key, value in group.items() if key != "params"} for group in self._optimizer.param_groups
        ]
        return [{**own, "params": [numbers[id(p)] for p in group]} for own, group in zip(settings, self._groups)]

    def load_groups(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Load the parameter groups' settings, such as learning rates.

        Raises:
            UsageError: the group sizes differ from this optimizer's group sizes.
        """
        own = [len(group) for group in self._groups]
        given = [len(group["params"]) for group in groups]
        if own != given:
            raise UsageError(
                f"expected parameter groups of sizes {own} in the saved optimizer state, but got sizes {given}",
                do="load it into an optimizer with the same parameter groups",
            )
        for mine, theirs in zip(self._optimizer.param_groups, groups):
            mine.update({key: value for key, value in theirs.items() if key != "params"})

    def _numbered(self) -> Iterator[tuple[int, nn.Parameter]]:
        yield from enumerate(p for group in self._groups for p in group)

    def _gather(
        self, parameters: Sequence[nn.Parameter], mine: Mapping[int, Mapping[str, Any]], *, to: int = 0
    ) -> dict[int, dict[str, Any]] | None:
        """Assemble all ranks' shards on the rank ``to``."""
        located = {}
        for number, entries in mine.items():
            part = self.shard(parameters[number])
            assert part is not None
            located[number * self._world_size + self._rank] = {"offset": part.offset, "entries": dict(entries)}
        found = gather_state(located, to=to)
        if found is None:
            return None
        full: dict[int, dict[str, Any]] = {}
        for key, located_shard in found.items():
            number = key // self._world_size
            shape = full_shape(parameters[number])
            whole = full.setdefault(number, {})
            for name, value in located_shard["entries"].items():
                if not isinstance(value, torch.Tensor) or value.dim() == 0:
                    whole[name] = value
                    continue
                target = whole.setdefault(name, torch.zeros(shape, dtype=value.dtype))
                target.view(-1).narrow(0, located_shard["offset"], value.numel()).copy_(value)
        return full


def full_shape(parameter: torch.Tensor) -> torch.Size:
    """Return the unsharded shape of a parameter. In stage 3, the parameter itself is empty."""
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape


def write_full(zero_module: Any, parameter: nn.Parameter, value: torch.Tensor, *, rank: int) -> None:
    """Set the weights that the model computes with to rank zero's ``value`` (in stage 3). Collective: call on every rank."""
    with zero_module.GatheredParameters([parameter], modifier_rank=0), torch.no_grad():
        if rank == 0:
            parameter.copy_(value)


def hook_loading(module: nn.Module, load_parameter: Callable[[nn.Parameter, torch.Tensor], None]) -> list[Any]:
    """Make ``module.load_state_dict`` call ``load_parameter`` for each full parameter; return the hook handles."""
    modules: Iterator[Any] = module.modules()  # the hook method has no type annotations
    return [each.register_load_state_dict_pre_hook(partial(_load_parameters, load_parameter)) for each in modules]


def _load_parameters(
    load_parameter: Callable[[nn.Parameter, torch.Tensor], None],
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    *_rest: Any,
) -> None:
    """Copy the values that ``load_state_dict`` loads into ``module`` to DeepSpeed's shards.

    In stage 3 the parameters are empty, so their values in the state dict are replaced with empty tensors.
    """
    for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
        value = state_dict.get(prefix + name)
        if not isinstance(value, torch.Tensor) or value.shape != full_shape(parameter):
            continue  # torch reports missing values and size mismatches
        load_parameter(parameter, value)
        if hasattr(parameter, "ds_id"):
            state_dict[prefix + name] = parameter.data


# ---- the parameters that an update has used --------------------------------------------------------------------------


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
