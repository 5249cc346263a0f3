"""Divides the experts of a model among the ranks of a mesh axis."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from echelon.base.errors import ConfigError
from echelon.engines.expert_parallel.moe import find_experts


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

    return _run_experts(
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


# ---- tokens on their way to the experts ------------------------------------------------------------------------------


def _run_experts(
    hidden: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
    compute: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    *,
    num_experts: int,
    group: dist.ProcessGroup,
) -> torch.Tensor:
    """Return the weighted sum of the outputs of each token's experts.

    A token is sent once for each of its experts. Ranks may have different numbers of tokens, also none, and experts may get none.

    Args:
        hidden: tokens of this rank, (tokens, width).
        index: experts of each token, (tokens, top_k), from 0 to ``num_experts`` - 1.
        weights: weights of these experts, (tokens, top_k).
        compute: gets rows for this rank's experts, (rows, width), and the local number of each row's expert, (rows,); returns (rows,
            width). It must use all parameters of the experts even if there are no rows, so that each gets a gradient.
        num_experts: number of experts of all ranks; each rank has the same number of them, in the order of ranks.
        group: ranks among which the experts are divided.

    Returns:
        (tokens, width), with the dtype of ``hidden``.

    Collective: call on every rank of ``group``; the backward pass communicates, too.

    Source: Lepikhin et al., "GShard", 2020, without a capacity: no token is dropped.
    """
    plan, order = _plan(index, num_experts, group)
    top_k = index.shape[1]
    sent = hidden[torch.div(order, top_k, rounding_mode="floor")]
    received = _all_to_all(sent, plan.send, plan.receive, group)
    computed = compute(received, plan.experts)
    returned = _all_to_all(computed, plan.receive, plan.send, group)
    by_token = returned[torch.argsort(order)].view(*index.shape, hidden.shape[-1])
    return (by_token * weights.unsqueeze(-1)).sum(1).to(hidden.dtype)


@dataclass(frozen=True, slots=True)
class _Plan:
    send: list[int]
    """Rows for each rank."""
    receive: list[int]
    """Rows from each rank."""
    experts: torch.Tensor
    """Local number of the expert of each received row."""


def _plan(index: torch.Tensor, num_experts: int, group: dist.ProcessGroup) -> tuple[_Plan, torch.Tensor]:
    """Return what is sent, and the order that sorts the pairs of a token and an expert by expert."""
    world_size = dist.get_world_size(group)
    num_local = num_experts // world_size
    experts = index.reshape(-1)
    order = torch.argsort(experts, stable=True)
    counts = torch.bincount(experts, minlength=num_experts)
    # All ranks' counts for this rank's experts: (world_size, num_local)
    received = torch.empty_like(counts)
    dist.all_to_all_single(received, counts, group=group)
    # One transfer to the host for both; the splits of the exchange must be known there.
    send, receive = torch.stack([counts, received]).view(2, world_size, num_local).sum(2).tolist()
    numbers = torch.arange(num_local, device=index.device).repeat(world_size)
    return _Plan(send, receive, torch.repeat_interleave(numbers, received, output_size=sum(receive))), order


def _all_to_all(rows: torch.Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    result: torch.Tensor = _AllToAll.apply(rows, send, receive, group)  # type: ignore[no-untyped-call]
    return result


class _AllToAll(torch.autograd.Function):
    """Rows are sent to other ranks; their gradients come back the same way."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, send: list[int], receive: list[int], group: Any) -> torch.Tensor:
        ctx.send, ctx.receive, ctx.group = send, receive, group
        return _exchange(rows, send, receive, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _exchange(gradient, ctx.receive, ctx.send, ctx.group), None, None, None


def _exchange(rows: torch.Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    result = rows.new_empty((sum(receive), *rows.shape[1:]))
    dist.all_to_all_single(result, rows.contiguous(), receive, send, group=group)
    return result
