"""Weights that the first and the last stage share, such as tied embeddings: each has a copy, and gradients are summed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

__all__ = ["add_gradients"]


def add_gradients(weights: Sequence[tuple[nn.Parameter, int]], *, group: dist.ProcessGroup) -> None:
    """Add to each weight's gradient that of its copy on another rank, so that both are equal, bit by bit.

    Args:
        weights: this rank's copies, each with the rank in ``group`` of the other copy; in the same order on both ranks.
        group: the ranks of the pipeline.

    Collective: call on every rank with a copy, after gradients were reduced.
    """
    for parameter, other in weights:
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradient = parameter.grad
        own = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        sent, received = own.contiguous(), torch.empty_like(own)
        works = [dist.isend(sent, group=group, group_dst=other), dist.irecv(received, group=group, group_src=other)]
        for work in works:
            assert work is not None
            work.wait()
        own.add_(received)
