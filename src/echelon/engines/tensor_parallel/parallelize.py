"""Splits the layers of a model over the ranks of a 1-D mesh."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module
from torch.distributed.tensor.parallel.style import ParallelStyle

from echelon.engines.tensor_parallel.canonical_chunks import CanonicalChunks
from echelon.engines.tensor_parallel.canonical_layers import compute_in_chunks
from echelon.engines.tensor_parallel.options import TensorParallelOptions
from echelon.engines.tensor_parallel.plan import resolve_plan
from echelon.engines.tensor_parallel.rng import separate_split_regions
from echelon.engines.tensor_parallel.styles import mask_padding

__all__ = ["divide_into_chunks", "parallelize"]


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
        separate_split_regions(model, plan, options.mesh)


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
