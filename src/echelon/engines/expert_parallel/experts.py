"""Divides the experts of a model among the ranks of a mesh axis."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from echelon.base.errors import ConfigError
from echelon.engines.expert_parallel.dispatch import run_experts
from echelon.engines.expert_parallel.moe import find_experts

__all__ = ["divide_experts", "shard_experts"]


def divide_experts(model: nn.Module, mesh: DeviceMesh) -> list[nn.Module]:
    """Give each rank of the one-dimensional ``mesh`` its part of the experts, in place, and return the modules that hold them.

    The parameters become DTensors with ``Shard(0)``; their names and full shapes stay. ``forward`` gets and returns this rank's tokens,
    as before, and sends them to their experts. Gradients are divided by the size of ``mesh``: every expert gets the tokens of all ranks,
    so a later average over the other ranks makes it the average over all ranks.

    Raises:
        ConfigError: there are no experts, the ranks cannot have equally many, or the experts are already divided.
    """
    experts = find_experts(model)
    if not experts:
        raise ConfigError(
            f"no experts were found in {type(model).__name__}",
            where=f"ParallelismConfig(ep_size={mesh.size()})",
            do="use a model with stacked experts (Mixtral, Qwen2-MoE or Qwen3-MoE of transformers 5, or "
            "echelon.MixtureOfExperts), or set ep_size=1",
        )
    for name, module in experts.items():
        _check(name, module, mesh)
        _divide(module, mesh)
    return list(experts.values())


def shard_experts(experts: Sequence[nn.Module], mesh: DeviceMesh, settings: Mapping[str, Any]) -> None:
    """Shard the divided ``experts`` over the other axes of ``mesh`` (dp_replicate, efsdp, ep) with ``fully_shard``.

    Args:
        experts: result of ``divide_experts``.
        mesh: ranks that hold experts.
        settings: of ``fully_shard``, but for the mesh.
    """
    own: Any = mesh["dp_replicate", "efsdp"] if mesh.size(0) > 1 else mesh["efsdp"]
    reshard = settings["reshard_after_forward"]
    for module in experts:
        # A part of the ranks would have to be a part of the smaller efsdp.
        fully_shard(module, **{**settings, "mesh": own, "reshard_after_forward": bool(reshard)})


def _check(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
    num: Any = module.num_experts
    if num % mesh.size():
        raise ConfigError(
            f"the {num} experts of {name} cannot be divided among {mesh.size()} ranks",
            where=f"ParallelismConfig(ep_size={mesh.size()})",
            do=f"set ep_size to a divisor of {num}",
        )
    if getattr(module, "_is_expert_parallel", False) or any(isinstance(p, DTensor) for p in module.parameters()):
        raise ConfigError(
            f"the experts of {name} are already divided among ranks",
            where=f"ParallelismConfig(ep_size={mesh.size()})",
            do="load the model without DistributedConfig(enable_expert_parallel=True) and without a tensor parallel plan for the "
            "experts, or set ep_size=1",
        )
    if list(module.children()) and any(True for child in module.children() for _ in child.parameters()):
        raise ConfigError(
            f"{name} ({type(module).__name__}) has parameters in submodules, which all experts share",
            where=f"ParallelismConfig(ep_size={mesh.size()})",
            do="set ep_size=1",
        )


def _divide(module: nn.Module, mesh: DeviceMesh) -> None:
    rank, world_size = mesh.get_local_rank(), mesh.size()
    for name, parameter in list(module.named_parameters(recurse=False)):
        num_local = parameter.shape[0] // world_size
        local = parameter.detach()[rank * num_local : (rank + 1) * num_local].clone()
        whole = DTensor.from_local(
            local, mesh, (Shard(0),), run_check=False, shape=parameter.shape, stride=parameter.stride()
        )
        made = nn.Parameter(whole, requires_grad=parameter.requires_grad)
        made.__dict__.update(parameter.__dict__)
        setattr(module, name, made)
    module.forward = partial(_forward, module, module.forward, mesh)


def _forward(
    module: nn.Module,
    forward: Any,
    mesh: DeviceMesh,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    num_experts: Any = module.num_experts

    def compute(rows: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        with _local_experts(module, mesh):
            if not len(rows):
                # A slice without elements: every parameter gets a gradient of zeros, which the other ranks' reduction expects.
                nothing = sum(parameter.flatten()[:0].sum() for parameter in module.parameters(recurse=False))
                return rows + nothing
            weights = torch.ones(len(rows), 1, dtype=rows.dtype, device=rows.device)
            found: torch.Tensor = forward(rows, experts.unsqueeze(1), weights)
            return found

    return run_experts(
        hidden_states, top_k_index, top_k_weights, compute, num_experts=num_experts, group=mesh.get_group()
    )


@contextmanager
def _local_experts(module: Any, mesh: DeviceMesh) -> Iterator[None]:
    """Let ``module`` be one with only this rank's experts."""
    parameters, num_experts = dict(module._parameters), module.num_experts
    try:
        for name, parameter in parameters.items():
            if parameter is not None:
                module._parameters[name] = _ScaleGradient.apply(parameter.to_local(), 1 / mesh.size())  # type: ignore[no-untyped-call]
        module.num_experts = num_experts // mesh.size()
        yield
    finally:
        module._parameters.update(parameters)
        module.num_experts = num_experts


class _ScaleGradient(torch.autograd.Function):
    """The identity; the gradient is multiplied by a factor."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * ctx.factor, None
