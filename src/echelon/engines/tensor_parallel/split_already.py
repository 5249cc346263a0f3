"""Models whose layers are already split when they come to ``prepare``, as transformers loads them with a ``tp_plan``."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from echelon.base.errors import ConfigError
from echelon.engines.tensor_parallel.options import TensorParallelOptions

__all__ = ["adopt_split_layers", "has_split_layers"]


def has_split_layers(model: nn.Module) -> bool:
    """Return whether a parameter of ``model`` is a DTensor."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def adopt_split_layers(model: nn.Module, options: TensorParallelOptions | None, *, data_mesh: DeviceMesh) -> None:
    """Move the split parameters of ``model`` to the mesh of this run, and broadcast all values to the ranks with the same parts.

    Collective: call on every rank.

    Args:
        model: not sharded yet; its forward passes handle the split layers.
        options: how this run splits layers. None: it does not.
        data_mesh: the mesh of the ranks that hold the same parts.

    Raises:
        ConfigError: the model is split over other ranks than this run's ``tp`` axis, or this run computes canonical chunks.
    """
    split = {name: p for name, p in model.named_parameters() if isinstance(p, DTensor)}
    for name, parameter in split.items():
        mesh = parameter.device_mesh
        if options is None or mesh.ndim != 1 or mesh.mesh.tolist() != options.mesh.mesh.tolist():
            shown = "none" if options is None else str(options.mesh.mesh.tolist())
            raise ConfigError(
                f"{name} is already split over the ranks {mesh.mesh.tolist()}, but the tp axis of this run has {shown}",
                where="prepare()",
                do=f"pass ParallelismConfig(tp_size={mesh.size()}), or load the model without tp_plan",
            )
    assert options is not None
    if options.num_chunks is not None:
        raise ConfigError(
            f"{min(split)} was split while the model was loaded, and the model's own forward pass computes a rank's part at once, which "
            "rounds differently on another number of ranks",
            where="prepare(), parity='bitwise'",
            do="load the model without tp_plan (echelon splits it by the same plan), or use parity='exact'",
        )
    moved: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for attribute, own in module._parameters.items():
            if isinstance(own, DTensor):
                if id(own) not in moved:
                    moved[id(own)] = _on_mesh(own, options.mesh)
                module._parameters[attribute] = moved[id(own)]
    for tensor in [*model.parameters(), *model.buffers()]:
        groups = [data_mesh.get_group(axis) for axis in range(data_mesh.ndim)]
        if not isinstance(tensor, DTensor):
            groups.append(options.mesh.get_group())
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        for group in groups:
            dist.broadcast(local.detach(), group=group, group_src=0)


def _on_mesh(parameter: DTensor, mesh: DeviceMesh) -> nn.Parameter:
    moved = DTensor.from_local(
        parameter.to_local().detach(),
        mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    assert isinstance(moved, torch.Tensor)
    return nn.Parameter(moved, requires_grad=parameter.requires_grad)
