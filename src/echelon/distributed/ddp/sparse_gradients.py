"""Finds parameters with sparse gradients under DistributedDataParallel, and works around torch's limitations."""

from __future__ import annotations

import torch
from torch import nn

from echelon.base.errors import UsageError


def sparse_parameters(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return (name, weight) for each layer in ``model`` that has sparse gradients."""
    return [
        (name or str(type(module).__name__), module.weight)
        for name, module in model.named_modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse and module.weight.requires_grad
    ]


def sparse_zeros_like(parameter: torch.Tensor) -> torch.Tensor:
    """Return an empty sparse gradient for ``parameter``."""
    indices = torch.empty((1, 0), dtype=torch.int64, device=parameter.device)
    values = parameter.new_empty((0, *parameter.shape[1:]))
    return torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=False)


def refuse_to_join_sparse(model: nn.Module) -> None:
    """Raise an error if ``model`` has sparse gradients, to which a joined rank cannot contribute zeros.

    DDP takes the zeros from its buckets, but sparse gradients have no bucket (torch 2.13: "Expected a proper Tensor but
    got None").

    Raises:
        UsageError: a layer has sparse gradients; the message names the first one.
    """
    for name, _ in sparse_parameters(model):
        raise UsageError(
            f"{name} is an embedding with sparse=True, but DistributedDataParallel does not support sparse gradients when ranks "
            "have uneven numbers of batches",
            where="join_uneven_inputs()",
            do="remove join_uneven_inputs() and set even_batches=True or parity='exact', or create the embedding with "
            "sparse=False",
        )


def copy_sparse_gradients(model: nn.Module) -> None:
    """Copy the gradient of each sparse embedding in ``model`` before DDP reduces it.

    DDP divides gradients by the number of ranks in place. A sparse gradient's values may share memory with a tensor that other
    layers still have to backpropagate (``embedding(ids) + other(x)``), so DDP would silently divide their gradients, too. This
    happens in torch 2.13; without the copy, ``test_sparse_gradients_do_not_scale_those_of_other_layers`` fails.
    """
    for _, parameter in sparse_parameters(model):
        hooks = parameter._backward_hooks
        if hooks is None or _clone_sparse not in hooks.values():
            parameter.register_hook(_clone_sparse)  # type: ignore[no-untyped-call]


def _clone_sparse(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.clone() if gradient.is_sparse else gradient


_clone_sparse.__torch_unserializable__ = True  # type: ignore[attr-defined]  # torch.save need not warn about it
