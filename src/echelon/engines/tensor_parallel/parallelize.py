"""Splits the layers of a model over the ranks of a 1-D mesh."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.distributed.tensor.parallel.style import ParallelStyle
from torch.nn.modules.dropout import _DropoutNd

from echelon.base.errors import ConfigError
from echelon.engines.output_hooks import output_tensors, replace_output_tensors
from echelon.engines.random_numbers import restore_states, save_states
from echelon.engines.tensor_parallel.canonical_chunks import CanonicalChunks
from echelon.engines.tensor_parallel.canonical_layers import compute_in_chunks
from echelon.engines.tensor_parallel.options import TensorParallelOptions
from echelon.engines.tensor_parallel.plan import resolve_plan
from echelon.engines.tensor_parallel.styles import mask_padding


def parallelize(
    model: nn.Module, options: TensorParallelOptions, *, plan: Mapping[str, ParallelStyle] | None = None
) -> None:
    """Split the layers of ``model`` in place.

    Every rank of a layer must have the same values, or none (the meta device). Tied weights stay tied.

    Args:
        model: the model, or a part of it.
        options: how layers are split.
        plan: the style of each module. None: by the plan of the model and of ``options``.

    Raises:
        ConfigError: see ``resolve_plan`` and ``compute_in_chunks``.
    """
    if plan is None:
        plan = resolve_plan(model, options.plan, tp_size=options.mesh.size(), num_chunks=options.num_chunks)
    tied = list(_tied_weights(model))
    if options.num_chunks is None:
        _split(model, plan, options)
    else:
        compute_in_chunks(model, plan, CanonicalChunks(num_chunks=options.num_chunks, mesh=options.mesh))
    for first, *others in tied:
        # Each module has got a parameter of its own.
        owner, attribute = first
        for other, its in others:
            setattr(other, its, getattr(owner, attribute))
    if options.num_chunks is None:
        _separate_split_regions(model, plan, options.mesh)


def divide_into_chunks(model: nn.Module, given: Mapping[str, Any], *, num_chunks: int) -> None:
    """Make one process compute the layers of ``model`` in the chunks of ranks that share them, with whole parameters.

    Args:
        model: the model, changed in place.
        given: styles by pattern of module names, added to the model's own plan.
        num_chunks: number of chunks of each split dimension.

    Raises:
        ConfigError: see ``resolve_plan`` and ``compute_in_chunks``.
    """
    plan = resolve_plan(model, given, tp_size=1, num_chunks=num_chunks)
    compute_in_chunks(model, plan, CanonicalChunks(num_chunks=num_chunks))


def _split(model: nn.Module, plan: Mapping[str, ParallelStyle], options: TensorParallelOptions) -> None:
    for name, style in plan.items():
        module = model.get_submodule(name)
        with warnings.catch_warnings():
            # distribute_module's own notes; parallelize_module warns of nothing else for a single style.
            warnings.simplefilter("ignore", FutureWarning)
            parallelize_module(module, options.mesh, style, src_data_rank=None)
        if isinstance(module, nn.Embedding) and isinstance(style, RowwiseParallel):
            mask_padding(module, style.output_layouts)


def _tied_weights(model: nn.Module) -> Iterator[list[tuple[nn.Module, str]]]:
    """Return, for each parameter that several modules share, the modules and the attributes."""
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(id(parameter), []).append((module, name))
    return iter([places for places in owners.values() if len(places) > 1])


# ---- layers that are already split -----------------------------------------------------------------------------------


def has_split_layers(model: nn.Module) -> bool:
    """Return whether a parameter of ``model`` is a DTensor, as transformers loads it with a ``tp_plan``."""
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
            "rounds differently if the number of ranks changes",
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


# ---- outputs of units whose last layer is split ----------------------------------------------------------------------


def return_no_views(unit: nn.Module) -> None:
    """Make ``unit`` return tensors that are no views; call this before ``fully_shard``.

    Torch returns the gathered output of a split layer as a view of a DTensor. ``fully_shard`` attaches a backward hook to the outputs of
    each unit; an in-place operation on a view (``logits /= temperature``) would silently drop it, and with it the gather of the
    parameters in the backward pass.
    """
    unit.register_forward_hook(_replace_views)


def _replace_views(_unit: nn.Module, _args: Any, output: Any) -> Any:
    if not torch.is_grad_enabled():
        return None
    tensors = output_tensors(output)
    if not any(map(_is_dtensor_view, tensors)):
        return None
    without_view: Any = _NoView.apply  # untyped
    return replace_output_tensors(output, [without_view(t) if _is_dtensor_view(t) else t for t in tensors])


def _is_dtensor_view(tensor: torch.Tensor) -> bool:
    return tensor.requires_grad and tensor._is_view() and not isinstance(tensor, DTensor)


class _NoView(torch.autograd.Function):
    """The identity, whose result shares the memory of its input without being a view of it."""

    @staticmethod
    def forward(_context: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.new_empty(0).set_(tensor.detach())  # type: ignore[call-overload, no-any-return]

    @staticmethod
    def backward(_context: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


# ---- random numbers --------------------------------------------------------------------------------------------------


def _separate_split_regions(model: nn.Module, plan: Mapping[str, ParallelStyle], mesh: DeviceMesh) -> None:
    """Give each rank its own random numbers between the first layer with split output and the one that takes split input.

    All ranks have the same RNG state, so masks of whole activations are equal. In between, each rank has other heads or features, and
    needs other masks: the state there is derived from the shared one and the rank. After it the shared state continues. Nothing is kept
    between steps: activation checkpointing, which restores the shared state, recomputes the same masks.

    The two belong together if they have the same parent module. Under sequence parallelism, ranks hold other tokens everywhere
    else, so the whole model is one region. Models without dropout are left alone.
    """
    if not any(map(_draws, model.modules())):
        return
    rank = mesh.get_local_rank()
    if any(isinstance(style, SequenceParallel) for style in plan.values()):
        region = _Region(rank)
        model.register_forward_pre_hook(region.begin)
        model.register_forward_pre_hook(region.enter)
        model.register_forward_hook(region.leave, always_call=True)
        return
    regions: dict[str, tuple[list[nn.Module], list[nn.Module]]] = {}
    for name, style in plan.items():
        starts, ends = regions.setdefault(name.rpartition(".")[0], ([], []))
        if isinstance(style, ColwiseParallel) and style.output_layouts == (Shard(-1),):
            starts.append(model.get_submodule(name))
        elif isinstance(style, RowwiseParallel) and style.input_layouts == (Shard(-1),):
            ends.append(model.get_submodule(name))
    for parent, (starts, ends) in regions.items():
        if starts and ends:
            region = _Region(rank)
            model.get_submodule(parent).register_forward_pre_hook(region.begin)
            for module in starts:
                module.register_forward_hook(region.enter)
            for module in ends:
                module.register_forward_pre_hook(region.leave, prepend=True)


def _draws(module: nn.Module) -> bool:
    """Return whether ``module`` may drop activations, in its own forward or in functions that it calls."""
    return any("drop" in name and isinstance(rate, float) and rate > 0 for name, rate in vars(module).items()) or (
        isinstance(module, _DropoutNd) and module.p > 0
    )


class _Region:
    """The part of a module's forward pass in which activations are split."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._outside: list[torch.Tensor] | None = None

    def begin(self, _module: nn.Module, _args: Any) -> None:
        """Forget a region that was not left: recomputation for activation checkpointing stops anywhere."""
        self._outside = None

    def enter(self, module: nn.Module, *_: Any) -> None:
        if not module.training or self._outside is not None:
            return
        device = next(module.parameters()).device
        seed = int(torch.randint(2**31, (), device="cpu"))  # on the CPU: no wait for the device
        self._outside = save_states(device)
        torch.manual_seed((seed << 16) + self._rank)

    def leave(self, module: nn.Module, *_: Any) -> None:
        if self._outside is not None:
            restore_states(next(module.parameters()).device, self._outside)
            self._outside = None
