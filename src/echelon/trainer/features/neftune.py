"""NEFTune: adds uniform noise to a language model's embeddings during training."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from echelon.base.errors import UsageError

__all__ = ["noisy_embeddings"]


@runtime_checkable
class _HasEmbeddings(Protocol):
    def get_input_embeddings(self) -> nn.Module:
        """Return the token embedding module."""
        ...


@contextmanager
def noisy_embeddings(model: nn.Module, alpha: float | None) -> Iterator[None]:
    """Add uniform noise from [-m, m], m = alpha / sqrt(length * size), to the embeddings in training mode.

    Args:
        model: a model with ``get_input_embeddings``, as in transformers.
        alpha: None disables the noise.

    Raises:
        UsageError: the model has no ``get_input_embeddings``.

    Source: Jain et al., NEFTune: Noisy Embeddings Improve Instruction Finetuning, algorithm 1.
    """
    if alpha is None:
        yield
        return
    if not isinstance(model, _HasEmbeddings):
        raise UsageError(
            f"neftune_noise_alpha={alpha}, but {type(model).__name__} has no method get_input_embeddings()",
            where="TrainingArguments.neftune_noise_alpha",
            do="give the model a get_input_embeddings() method that returns its embedding module",
        )

    def _add_noise(module: nn.Module, _: Any, output: torch.Tensor) -> torch.Tensor | None:
        if not module.training:
            return None
        bound = alpha / math.sqrt(output.shape[1] * output.shape[2])
        return output + torch.zeros_like(output).uniform_(-bound, bound)

    handle = model.get_input_embeddings().register_forward_hook(_add_noise)
    try:
        yield
    finally:
        handle.remove()
