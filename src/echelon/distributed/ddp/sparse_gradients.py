"""Sparse gradients under DistributedDataParallel: which parameters have them, and what torch does not do for them."""

from __future__ import annotations

import torch
from torch import nn

from echelon.base.errors import UsageError

__all__ = ["copy_sparse_gradients", "refuse_to_join_sparse", "sparse_parameters", "sparse_zeros_like"]


def sparse_parameters(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return the layers of ``model`` whose gradients are sparse, by name, each with its parameter."""
    return [
        (name or str(type(module).__name__), module.weight)
        for name, module in model.named_modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse and module.weight.requires_grad
    ]


def sparse_zeros_like(parameter: torch.Tensor) -> torch.Tensor:
    """Return a sparse gradient of ``parameter`` that has no rows."""
    indices = torch.empty((1, 0), dtype=torch.int64, device=parameter.device)
    values = parameter.new_empty((0, *parameter.shape[1:]))
    return torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=False)


def refuse_to_join_sparse(model: nn.Module) -> None:
    """Raise where ``model`` has sparse gradients: a rank that has ended can bring no zeros to those of the others.

    Torch's DDP makes them of buckets, which sparse gradients do not have (torch 2.13: "Expected a proper Tensor but got None").

    Raises:
        UsageError: the first such layer is named.
    """
    for name, _ in sparse_parameters(model):
        raise UsageError(
            f"{name} is an embedding with sparse=True, and DistributedDataParallel cannot join ranks that have run out of batches "
            "where gradients are sparse",
            where="join_uneven_inputs()",
            do="use even_batches=True or parity='exact' and leave join_uneven_inputs() out, or make the embedding with sparse=False",
        )


def copy_sparse_gradients(model: nn.Module) -> None:
    """Let the gradient of each sparse embedding of ``model`` be a copy before DDP reduces it.

    DDP divides a gradient by the number of ranks in place. The values of a sparse one may be the very tensor that other
    layers still have to backpropagate (``embedding(ids) + other(x)``), whose gradients it then divides, too, in silence.
    Seen in torch 2.13; without it ``test_sparse_gradients_do_not_scale_those_of_other_layers`` fails.
    """
    for _, parameter in sparse_parameters(model):
        hooks = parameter._backward_hooks
        if hooks is None or _copied not in hooks.values():
            parameter.register_hook(_copied)  # type: ignore[no-untyped-call]


def _copied(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.clone() if gradient.is_sparse else gradient


_copied.__torch_unserializable__ = True  # type: ignore[attr-defined]  # torch.save need not warn of it
