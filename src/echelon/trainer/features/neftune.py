"""NEFTune: uniform noise on the embeddings of a language model while it is trained."""

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
        """Return the module that turns tokens into vectors."""
        ...


@contextmanager
def noisy_embeddings(model: nn.Module, alpha: float | None) -> Iterator[None]:
    """Inside, add noise from [-m, m], m = alpha / sqrt(length * size), to the embeddings; not in evaluation mode.

    Args:
        model: it has ``get_input_embeddings``, as those of transformers.
        alpha: None: no noise.

    Raises:
        UsageError: the model does not say what its embeddings are.

    Source: Jain et al., NEFTune: Noisy Embeddings Improve Instruction Finetuning, algorithm 1.
    """
    if alpha is None:
        yield
        return
    if not isinstance(model, _HasEmbeddings):
        raise UsageError(
            f"neftune_noise_alpha={alpha}, but {type(model).__name__} does not say what its embeddings are",
            where="TrainingArguments.neftune_noise_alpha",
            do="give the model a method get_input_embeddings() that returns the module",
        )

    def _add_noise(module: nn.Module, _: Any, output: torch.Tensor) -> torch.Tensor | None:
        if not module.training:
            return None
        most = alpha / math.sqrt(output.shape[1] * output.shape[2])
        return output + torch.zeros_like(output).uniform_(-most, most)

    handle = model.get_input_embeddings().register_forward_hook(_add_noise)
    try:
        yield
    finally:
        handle.remove()
