"""What a rank holds of each parameter under ZeRO: where a part of it lies in the flat tensors that DeepSpeed steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from echelon.base.errors import UsageError
from echelon.engines.gather_optimizer_state import gather_parts
from echelon.engines.stepper import plain_parameters

__all__ = ["FlatParts", "follow_loading", "whole_shape", "write_whole"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    flat: torch.Tensor
    """In float32, with other parameters beside it."""
    flat_offset: int
    offset: int
    """In the flattened parameter."""
    numel: int

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the same part of a tensor that lies as ``flat`` does."""
        return flat.view(-1).narrow(0, self.flat_offset, self.numel)


class FlatParts:
    """Reads and writes the float32 weights and the optimizer's state of ZeRO 1 to 3, by parameter.

    The library has functions for the same (``safe_get_full_optimizer_state``), which send every tensor to all ranks and know
    neither numbers nor state that is not there yet.

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
        self._hooks = follow_loading(self._module, self.adopt)

    def release(self) -> None:
        """Let the module load state dicts as it did before."""
        for hook in self._hooks:
            hook.remove()

    @property
    def parameter_groups(self) -> list[list[torch.Tensor]]:
        """The parameters of the optimizer's groups, in the order of their numbers."""
        return [list(group) for group in self._groups]

    # ---- where things are --------------------------------------------------------------------------------------------

    @property
    def _optimizer(self) -> Any:
        return self._engine.optimizer

    def part(self, parameter: nn.Parameter) -> _Part | None:
        """Return this rank's part of a parameter that trains; None: it has none of it."""
        own: Any = parameter
        if not parameter.requires_grad:
            return None
        if self._stage < 3:
            mapping = own._hp_mapping
            if mapping is None:
                return None
            high, low = mapping.hp_fragment_address, mapping.lp_fragment_address
            flat = self._optimizer.single_partition_of_fp32_groups[mapping.param_group_index]
            return _Part(flat=flat, flat_offset=high.start, offset=low.start, numel=high.numel)
        number, start, size = self._optimizer.grad_position[self._optimizer.get_param_id(parameter)]
        offset = self._rank * own.partition_numel()
        numel = max(0, min(size, own.ds_numel - offset))  # what is beyond the last value is padding
        if numel == 0:
            return None
        flat = self._optimizer.fp32_partitioned_groups_flat[number]
        return _Part(flat=flat, flat_offset=start, offset=offset, numel=numel)

    def require_in_memory(self) -> None:
        """Raise where the optimizer's state is on NVMe: only DeepSpeed's own checkpoints reach it."""
        if getattr(self._optimizer, "swap_optimizer", False):
            raise UsageError(
                "the optimizer's state is on NVMe (zero_optimization.offload_optimizer.device), and cannot be gathered",
                do="offload it to the CPU to save it here, or save with model.save_checkpoint(folder) of DeepSpeed's engine",
            )

    # ---- weights -----------------------------------------------------------------------------------------------------

    def whole_weights(self) -> dict[str, torch.Tensor] | None:
        """Return the trained parameters, in float32, by name, on the host of rank zero; None elsewhere.

        Collective: every rank.
        """
        named = [(name, p) for name, p in plain_parameters(self._module) if p.requires_grad]
        mine = {i: part.of(part.flat) for i, (_, p) in enumerate(named) if (part := self.part(p)) is not None}
        wholes = self._joined([p for _, p in named], {i: {"value": value} for i, value in mine.items()})
        return None if wholes is None else {name: wholes[i]["value"] for i, (name, _) in enumerate(named)}

    def frozen_weights(self) -> dict[str, torch.Tensor]:
        """Return the parameters that do not train, by name, on the host. Collective: in stage 3."""
        frozen = [(name, p) for name, p in plain_parameters(self._module) if not p.requires_grad]
        found = {}
        for name, parameter in frozen:
            with self.gathered([parameter]):
                found[name] = parameter.detach().to("cpu", copy=True)
        return found

    def gathered(self, parameters: list[nn.Parameter]) -> Any:
        """Return a context in which ``parameters`` are whole. Collective: in stage 3, every rank."""
        return self._zero_module.GatheredParameters([p for p in parameters if hasattr(p, "ds_id")])

    def adopt(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        """Take ``value``, whole and the same on every rank, as the weights of ``parameter``. Collective: in stage 3."""
        part = self.part(parameter)
        if part is not None:
            own = value.detach().reshape(-1).narrow(0, part.offset, part.numel)
            part.of(part.flat).data.copy_(own)
        if self._stage == 3:
            write_whole(self._zero_module, parameter, value, rank=self._rank)

    def publish(self) -> None:
        """Take what the parts hold over into what the model computes with. Collective: every rank."""
        if self._stage < 3:
            self._optimizer.update_lp_params()
            return
        for name, parameter in plain_parameters(self._module):
            if parameter.requires_grad:
                self._publish(name, parameter)

    def _publish(self, name: str, parameter: nn.Parameter) -> None:
        full = self._optimizer.get_full_hp_param(parameter)
        write_whole(self._zero_module, parameter, full, rank=self._rank)

    # ---- optimizer ---------------------------------------------------------------------------------------------------

    def own_state(self) -> dict[int, dict[str, Any]]:
        """Return this rank's part of the optimizer's state, by the number of the parameter."""
        self.require_in_memory()
        found = {}
        for number, parameter in self._numbered():
            part = self.part(parameter)
            entries = {} if part is None else self._optimizer.optimizer.state.get(part.flat, {})
            if part is not None and entries:
                found[number] = {
                    key: part.of(value) if _lies_as(value, part.flat) else value for key, value in entries.items()
                }
        return found

    def whole_state(self) -> dict[int, dict[str, Any]] | None:
        """Return the optimizer's state by the number of the parameter, on the host of rank zero; None elsewhere.

        Collective: every rank.
        """
        return self._joined([p for _, p in self._numbered()], self.own_state())

    def load_state(self, state: Mapping[int, Mapping[str, Any]], *, is_whole: bool) -> None:
        """Load the optimizer's state: this rank's part of the whole one, or what ``own_state`` returned here."""
        self.require_in_memory()
        for number, parameter in self._numbered():
            part = self.part(parameter)
            if part is None or number not in state:
                continue
            shape = whole_shape(parameter) if is_whole else torch.Size([part.numel])
            entries = self._optimizer.optimizer.state[part.flat]
            for key, value in state[number].items():
                if not (isinstance(value, torch.Tensor) and value.shape == shape and value.dim() > 0):
                    entries[key] = value.clone() if isinstance(value, torch.Tensor) else value
                    continue
                if key not in entries:
                    entries[key] = torch.zeros_like(part.flat)
                flat = value.reshape(-1)
                own = flat.narrow(0, part.offset, part.numel) if is_whole else flat
                part.of(entries[key]).copy_(own)

    def groups(self) -> list[dict[str, Any]]:
        """Return the groups of the optimizer with numbers for their parameters, as torch's state dicts."""
        numbers = {id(p): number for number, p in self._numbered()}
        settings = [
            {key: value for key, value in group.items() if key != "params"} for group in self._optimizer.param_groups
        ]
        return [{**own, "params": [numbers[id(p)] for p in group]} for own, group in zip(settings, self._groups)]

    def load_groups(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Take over the settings (learning rates and the like) of groups.

        Raises:
            UsageError: they are those of another optimizer.
        """
        own = [len(group) for group in self._groups]
        given = [len(group["params"]) for group in groups]
        if own != given:
            raise UsageError(
                f"the optimizer's state has groups of {given} parameters, and this optimizer has groups of {own}",
                do="load it into an optimizer that was made in the same way",
            )
        for mine, theirs in zip(self._optimizer.param_groups, groups):
            mine.update({key: value for key, value in theirs.items() if key != "params"})

    def _numbered(self) -> Iterator[tuple[int, nn.Parameter]]:
        yield from enumerate(p for group in self._groups for p in group)

    def _joined(
        self, parameters: Sequence[nn.Parameter], mine: Mapping[int, Mapping[str, Any]]
    ) -> dict[int, dict[str, Any]] | None:
        """Put the parts of all ranks together on rank zero."""
        located = {}
        for number, entries in mine.items():
            part = self.part(parameters[number])
            assert part is not None
            located[number * self._world_size + self._rank] = {"offset": part.offset, "entries": dict(entries)}
        found = gather_parts(located)
        if found is None:
            return None
        wholes: dict[int, dict[str, Any]] = {}
        for key, part_of_rank in found.items():
            number = key // self._world_size
            shape = whole_shape(parameters[number])
            whole = wholes.setdefault(number, {})
            for name, value in part_of_rank["entries"].items():
                if not isinstance(value, torch.Tensor) or value.dim() == 0:
                    whole[name] = value
                    continue
                target = whole.setdefault(name, torch.zeros(shape, dtype=value.dtype))
                target.view(-1).narrow(0, part_of_rank["offset"], value.numel()).copy_(value)
        return wholes


def _lies_as(value: Any, flat: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.numel() == flat.numel()


def whole_shape(parameter: torch.Tensor) -> torch.Size:
    """Return the shape of a parameter, which in stage 3 is itself empty."""
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape


def write_whole(zero_module: Any, parameter: nn.Parameter, value: torch.Tensor, *, rank: int) -> None:
    """Let the model compute with ``value``, whole on rank zero. Collective: every rank, in stage 3."""
    with zero_module.GatheredParameters([parameter], modifier_rank=0), torch.no_grad():
        if rank == 0:
            parameter.copy_(value)


def follow_loading(module: nn.Module, adopt: Callable[[nn.Parameter, torch.Tensor], None]) -> list[Any]:
    """Give whole values that ``load_state_dict`` of ``module`` brings for its parameters to ``adopt``; return the hooks."""
    modules: Iterator[Any] = module.modules()  # torch has no types for what is called
    return [each.register_load_state_dict_pre_hook(partial(_adopt_values, adopt)) for each in modules]


def _adopt_values(
    adopt: Callable[[nn.Parameter, torch.Tensor], None],
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    *_rest: Any,
) -> None:
    """Before ``load_state_dict`` copies into the parameters of ``module``: into what DeepSpeed steps and shards, too.

    In stage 3 the module holds nothing to copy into, so it is given its own empty tensors; it would say that sizes differ.
    """
    for name, parameter in module._parameters.items():
        value = state_dict.get(prefix + name)
        if parameter is None or not isinstance(value, torch.Tensor) or value.shape != whole_shape(parameter):
            continue  # torch says what is missing or differs in size
        adopt(parameter, value)
        if hasattr(parameter, "ds_id"):
            state_dict[prefix + name] = parameter.data
