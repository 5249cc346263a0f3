"""Sparse gradients under DistributedDataParallel, which would scale those of other layers with them."""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["copy_sparse_gradients"]


def copy_sparse_gradients(model: nn.Module) -> None:
    """Let the gradient of each sparse embedding of ``model`` be a copy before DDP reduces it.

    DDP divides a gradient by the number of ranks in place. The values of a sparse one may be the very tensor that other
    layers still have to backpropagate (``embedding(ids) + other(x)``), whose gradients it then divides, too, in silence.
    Seen in torch 2.13; without it ``test_sparse_gradients_do_not_scale_those_of_other_layers`` fails.
    """
    for module in model.modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse and module.weight.requires_grad:
            hooks = module.weight._backward_hooks
            if hooks is None or _copied not in hooks.values():
                module.weight.register_hook(_copied)  # type: ignore[no-untyped-call]


def _copied(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.clone() if gradient.is_sparse else gradient


_copied.__torch_unserializable__ = True  # type: ignore[attr-defined]  # torch.save need not warn of it
