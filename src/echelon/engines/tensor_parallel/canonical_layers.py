"""Layers that compute each of their canonical chunks by itself, so that their results do not depend on the number of ranks.

Every matrix product has the shape of one chunk, and its operands are contiguous and aligned, so that it has the same bits wherever
the chunk is. Sums over chunks are those of ``CanonicalChunks``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.distributed.tensor.parallel.style import ParallelStyle
from torch.nn.utils.parametrize import is_parametrized

from echelon.base.errors import ConfigError, UsageError
from echelon.base.sharded import is_dtensor
from echelon.engines.tensor_parallel.canonical_chunks import CanonicalChunks
from echelon.engines.tensor_parallel.chunked_tensor import ChunkedTensor
from echelon.engines.tensor_parallel.styles import ReplicatedPartialGradient, split_dim

_WHERE = "prepare(), parity='bitwise'"
_ALIGNMENT = 64  # in bytes; torch's own allocations on a CPU have it


def compute_in_chunks(model: nn.Module, plan: Mapping[str, ParallelStyle], chunks: CanonicalChunks) -> None:
    """Make the layers in ``plan`` compute their canonical chunks, and split their parameters over the ranks of ``chunks.mesh``.

    Every rank must have the same values, or none (the meta device). Weights that were tied are no longer.

    Args:
        model: the model whose layers are changed in place.
        plan: the style of each module, by name. Sizes must be divisible by the number of chunks.
        chunks: the chunks, and the ranks that share them.

    Raises:
        ConfigError: a style or a kind of layer is not supported.
    """
    forwards = {name: _forward_of(name, model.get_submodule(name), style) for name, style in plan.items()}
    for name, forward in forwards.items():
        if forward is None:
            continue
        module = model.get_submodule(name)
        if chunks.mesh is not None:
            _split_parameters(module, plan[name], chunks.mesh)
        module.forward = partial(forward, module, chunks)


def exchanges_chunks(module: nn.Module) -> bool:
    """Return whether the input or the output of ``module`` is a ``ChunkedTensor``."""
    forward = vars(module).get("forward")
    return isinstance(forward, partial) and forward.func in (_colwise, _rowwise)


def _forward_of(name: str, module: nn.Module, style: ParallelStyle) -> Callable[..., torch.Tensor] | None:
    """Return the forward function of ``module`` in chunks; None for a module that stays whole, whose parameters' gradients are
    summed over the chunks that they are used with.
    """
    if isinstance(style, ReplicatedPartialGradient):
        return None
    found: Callable[..., torch.Tensor] | None = None
    if isinstance(module, nn.Linear):
        if isinstance(style, ColwiseParallel) and style.input_layouts == (Replicate(),) and style.use_local_output:
            found = {(Shard(-1),): _colwise, (Replicate(),): _colwise_gathered}.get(style.output_layouts)
        elif isinstance(style, RowwiseParallel) and style.output_layouts == (Replicate(),) and style.use_local_output:
            found = {(Shard(-1),): _rowwise, (Replicate(),): _rowwise_of_whole}.get(style.input_layouts)
    elif isinstance(module, nn.Embedding) and style.input_layouts == style.output_layouts == (Replicate(),):  # type: ignore[attr-defined]
        found = {ColwiseParallel: _embedding_of_columns, RowwiseParallel: _embedding_of_rows}.get(type(style))
    if found is None:
        raise ConfigError(
            f"{name} ({type(module).__name__}) has the style {_shown(style)} in the plan for tensor parallelism, whose results depend on "
            "the number of ranks",
            where=_WHERE,
            do="use 'colwise', 'rowwise', 'colwise_gather_output', 'rowwise_split_input' (Linear), 'embedding_rowwise' or "
            "'embedding_colwise' (Embedding), or parity='exact'",
        )
    own = type(module).forward
    if own not in (nn.Linear.forward, nn.Embedding.forward) or is_parametrized(module):
        raise ConfigError(
            f"{name} ({type(module).__name__}) computes something else than nn.{'Linear' if isinstance(module, nn.Linear) else 'Embedding'}, "
            "which would be lost if its chunks were computed one by one",
            where=_WHERE,
            do=f"set {name!r}: 'replicate' in TorchTensorParallelConfig(plan=), or use parity='exact'",
        )
    return found


def _shown(style: ParallelStyle) -> str:
    layouts = {key: value for key, value in vars(style).items() if key.endswith("layouts") or key == "use_local_output"}
    return f"{type(style).__name__}({', '.join(f'{key}={value}' for key, value in layouts.items())})"


def _split_parameters(module: nn.Module, style: ParallelStyle, mesh: DeviceMesh) -> None:
    """Replace the parameters of ``module`` by this rank's chunks of them, as DTensors.

    Source: torch.distributed.tensor.parallel.ColwiseParallel and RowwiseParallel.
    """
    dim = split_dim(style, module)
    assert dim is not None
    for name, parameter in list(module.named_parameters(recurse=False)):
        is_split = name == "weight" or dim == 0  # the bias of a layer with split input is added after the sum
        placement = Shard(dim) if is_split else Replicate()
        parts = distribute_tensor(parameter, mesh, [placement], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(parts, requires_grad=parameter.requires_grad))


# ---- forward passes --------------------------------------------------------------------------------------------------


def _colwise(module: nn.Linear, chunks: CanonicalChunks, x: torch.Tensor) -> torch.Tensor:
    return ChunkedTensor(_outputs_of_columns(module, chunks, x), chunks)


def _colwise_gathered(module: nn.Linear, chunks: CanonicalChunks, x: torch.Tensor) -> torch.Tensor:
    gather: Any = _Gather.apply  # untyped, as the others
    out: torch.Tensor = gather(chunks, *_outputs_of_columns(module, chunks, x))
    return out


def _rowwise(module: nn.Linear, chunks: CanonicalChunks, x: torch.Tensor) -> torch.Tensor:
    if not isinstance(x, ChunkedTensor):
        raise UsageError(
            f"a layer with split input (style 'rowwise', in_features={module.in_features}) got a whole activation of shape {tuple(x.shape)}",
            where="parity='bitwise', forward pass",
            do="give the layer before it the style 'colwise', or this one the style 'rowwise_split_input'",
        )
    return _sum_of_rows(module, chunks, x.chunks)


def _rowwise_of_whole(module: nn.Linear, chunks: CanonicalChunks, x: torch.Tensor) -> torch.Tensor:
    cut: Any = _Cut.apply
    return _sum_of_rows(module, chunks, cut(chunks, _whole(module, x)))


def _embedding_of_rows(module: nn.Embedding, chunks: CanonicalChunks, tokens: torch.Tensor) -> torch.Tensor:
    """Look up the tokens of this rank's part of the vocabulary; the others' rows are zeros in the sum."""
    weight = _local(module.weight)
    own = tokens - chunks.rank * weight.shape[0]
    if chunks.num_ranks > 1:
        is_own = ((own >= 0) & (own < weight.shape[0])).unsqueeze(-1)
        rows = F.embedding(own.where(is_own.squeeze(-1), 0), weight)
        rows = torch.where(is_own, rows, 0.0)
    else:
        rows = F.embedding(own, weight)
    if module.padding_idx is not None:  # its row gets no gradient from lookups
        rows = torch.where((tokens == module.padding_idx).unsqueeze(-1), rows.detach(), rows)
    add: Any = _AddZeros.apply
    out: torch.Tensor = add(chunks, rows)
    return out


def _embedding_of_columns(module: nn.Embedding, chunks: CanonicalChunks, tokens: torch.Tensor) -> torch.Tensor:
    gather: Any = _Gather.apply
    out: torch.Tensor = gather(chunks, F.embedding(tokens, _local(module.weight), module.padding_idx))
    return out


def _outputs_of_columns(module: nn.Linear, chunks: CanonicalChunks, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    product: Any = _ColumnProducts.apply
    bias = None if module.bias is None else _autocast(_local(module.bias))
    out: tuple[torch.Tensor, ...] = product(
        chunks, _autocast(_whole(module, x)), _autocast(_local(module.weight)), bias
    )
    return out


def _sum_of_rows(module: nn.Linear, chunks: CanonicalChunks, parts: tuple[torch.Tensor, ...]) -> torch.Tensor:
    product: Any = _RowProducts.apply
    out: torch.Tensor = product(chunks, _autocast(_local(module.weight)), *map(_autocast, parts))
    return out if module.bias is None else out + _local(module.bias).to(out.dtype)


def _whole(module: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """Return ``x``.

    Raises:
        UsageError: it is divided into chunks.
    """
    if isinstance(x, ChunkedTensor):
        raise UsageError(
            f"a layer with whole input (in_features={module.in_features}) got an activation that is divided into chunks of shape "
            f"{tuple(x.shape)}",
            where="parity='bitwise', forward pass",
            do="give the layer the style 'rowwise' in TorchTensorParallelConfig(plan=)",
        )
    return x


def _local(parameter: torch.Tensor) -> torch.Tensor:
    """Return this rank's chunks of ``parameter``."""
    return parameter.to_local() if is_dtensor(parameter) else parameter


def _autocast(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` in the dtype in which autocast multiplies matrices, also in the backward pass."""
    kind = tensor.device.type
    return tensor.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else tensor


# ---- autograd functions ----------------------------------------------------------------------------------------------


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` as a matrix of rows, contiguous and aligned: kernels may round differently for other addresses."""
    return _aligned(tensor.reshape(-1, tensor.shape[-1]))


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % _ALIGNMENT else tensor


class _ColumnProducts(Function):
    """The outputs of a linear layer for each own chunk of the output features."""

    @staticmethod
    def forward(
        context: Any, chunks: CanonicalChunks, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        context.chunks, context.has_bias = chunks, bias is not None
        context.save_for_backward(x, weight)
        rows = _rows(x)
        weights = weight.chunk(chunks.num_own)
        biases = [None] * chunks.num_own if bias is None else bias.chunk(chunks.num_own)
        return tuple(
            F.linear(rows, _aligned(own), None if added is None else _aligned(added)).view(*x.shape[:-1], own.shape[0])
            for own, added in zip(weights, biases)
        )

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = context.saved_tensors
        chunks: CanonicalChunks = context.chunks
        of_rows = [_rows(gradient) for gradient in gradients]
        of_x = of_weight = of_bias = None
        if context.needs_input_grad[2]:
            rows = _rows(x)
            of_weight = torch.cat([gradient.T @ rows for gradient in of_rows])
        if context.has_bias and context.needs_input_grad[3]:
            of_bias = torch.cat([gradient.sum(0) for gradient in of_rows])
        if context.needs_input_grad[1]:
            weights = weight.chunk(chunks.num_own)
            of_x = chunks.sum(gradient @ _aligned(own) for gradient, own in zip(of_rows, weights)).view(x.shape)
        return None, of_x, of_weight, of_bias


class _RowProducts(Function):
    """The output of a linear layer, without bias, as the sum over the chunks of its input features."""

    @staticmethod
    def forward(context: Any, chunks: CanonicalChunks, weight: torch.Tensor, *parts: torch.Tensor) -> torch.Tensor:
        context.chunks = chunks
        context.save_for_backward(weight, *parts)
        weights = weight.chunk(chunks.num_own, dim=1)
        total = chunks.sum(F.linear(_rows(part), _aligned(own)) for part, own in zip(parts, weights))
        return total.view(*parts[0].shape[:-1], weight.shape[0])

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        weight, *parts = context.saved_tensors
        rows = _rows(gradient)
        of_weight = None
        if context.needs_input_grad[1]:
            of_weight = torch.cat([rows.T @ _rows(part) for part in parts], dim=1)
        of_parts: list[torch.Tensor | None] = [None] * len(parts)
        if any(context.needs_input_grad[2:]):
            weights = weight.chunk(context.chunks.num_own, dim=1)
            of_parts = [(rows @ _aligned(own)).view(part.shape) for own, part in zip(weights, parts)]
        return None, of_weight, *of_parts


class _Gather(Function):
    """The parts of all ranks, concatenated along the last dimension."""

    @staticmethod
    def forward(context: Any, chunks: CanonicalChunks, *parts: torch.Tensor) -> torch.Tensor:
        context.chunks, context.num_parts = chunks, len(parts)
        return chunks.gather(torch.cat(parts, dim=-1))

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        chunks: CanonicalChunks = context.chunks
        own = gradient.chunk(chunks.num_ranks, dim=-1)[chunks.rank]
        return None, *own.chunk(context.num_parts, dim=-1)


class _Cut(Function):
    """The own chunks of the last dimension."""

    @staticmethod
    def forward(context: Any, chunks: CanonicalChunks, whole: torch.Tensor) -> tuple[torch.Tensor, ...]:
        context.chunks = chunks
        parts = whole.chunk(chunks.num_chunks, dim=-1)
        return tuple(parts[number].contiguous() for number in chunks.own)

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[None, torch.Tensor]:
        chunks: CanonicalChunks = context.chunks
        return None, chunks.gather(torch.cat(gradients, dim=-1))


class _AddZeros(Function):
    """The sum over ranks of tensors of which all but one are zero at each element."""

    @staticmethod
    def forward(context: Any, chunks: CanonicalChunks, own: torch.Tensor) -> torch.Tensor:
        return chunks.add_zeros(own)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, gradient
