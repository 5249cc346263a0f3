"""Broadcasts a model from rank zero."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from echelon.engines.quantized_weights import plain_tensors


def broadcast_model(model: nn.Module, device: torch.device) -> None:
    """Broadcast rank zero's parameters and buffers. Collective: call on every rank."""
    for tensor in plain_tensors(model):
        values = tensor.data
        if values.dtype.itemsize == 1:
            values = values.view(torch.uint8)  # backends have no float8
        if values.device.type == device.type:
            dist.broadcast(values, src=0)
        else:
            sent = values.to(device)
            dist.broadcast(sent, src=0)
            values.copy_(sent)
