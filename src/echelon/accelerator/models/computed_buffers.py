"""Computes buffers that no weight file stores, such as the frequencies of rotary embeddings."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from echelon.accelerator.models.weight_check import shortened
from echelon.accelerator.models.weight_sources import joined
from echelon.base.errors import CheckpointError

__all__ = ["compute_buffers"]


def compute_buffers(model: nn.Module, names: list[str]) -> None:
    """Compute the allocated buffers ``names`` with their modules' initializers.

    The initializer runs twice, on memory filled with zeros and with ones; equal results prove that it sets the buffer.

    Raises:
        CheckpointError: some of the buffers are not set by any initializer.
    """
    left = []
    for path in dict.fromkeys(name.rpartition(".")[0] for name in names):
        module = model.get_submodule(path)
        mine = [name.rpartition(".")[2] for name in names if name.rpartition(".")[0] == path]
        results = [_initialized(model, path, mine, fill) for fill in (0, 1)]
        for name in mine:
            buffer, (first, second) = module._buffers[name], (result[name] for result in results)
            assert buffer is not None
            if torch.equal(first, second):
                buffer.copy_(first)
            else:
                left.append(joined(path, name))
    if left:
        raise CheckpointError(
            f"buffers {shortened(left)} of {type(model).__name__} were on the meta device, but no checkpoint file contains them, "
            "and neither reset_parameters() nor the model's _init_weights() initializes them",
            do="build the model with echelon.init_empty_weights(), which keeps the values of buffers",
        )


def _initialized(model: nn.Module, path: str, names: list[str], fill: int) -> dict[str, torch.Tensor]:
    """Return the buffers ``names`` as the module at ``path`` initializes them, without changing the module."""
    stand_in = _without_values(model.get_submodule(path))
    stand_in._buffers |= {name: torch.full_like(model.get_buffer(joined(path, name)), fill) for name in names}
    reset = getattr(stand_in, "reset_parameters", None)
    if reset is not None and not stand_in._modules:
        reset()
    else:
        # The innermost enclosing model that initializes modules (in transformers, models may contain models).
        parts = path.split(".") if path else []
        around = [model.get_submodule(".".join(parts[:depth])) for depth in range(len(parts), -1, -1)]
        owner: Any = next((one for one in around if callable(getattr(one, "_init_weights", None))), None)
        if owner is not None:
            owner._init_weights(stand_in)
    return {name: tensor for name, tensor in stand_in._buffers.items() if name in names and tensor is not None}


def _without_values(module: nn.Module) -> nn.Module:
    """Return a copy of ``module`` and its submodules on the meta device; everything except tensors is shared."""
    # copy.copy does not work, because torch gives the classes of sharded modules a constructor that returns a new object.
    copied: nn.Module = object.__new__(type(module))
    copied.__dict__.update(module.__dict__)
    copied._parameters = {
        name: None if p is None else nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device="meta"), p.requires_grad)
        for name, p in module._parameters.items()
    }
    copied._buffers = {
        name: None if b is None else torch.empty_like(b, device="meta") for name, b in module._buffers.items()
    }
    copied._modules = {
        name: None if inner is None else _without_values(inner) for name, inner in module._modules.items()
    }
    return copied
