"""Builds models with parameters on the meta device (without values) or on another device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from echelon.config.variables import library_flag


@contextmanager
def init_empty_weights(include_buffers: bool | None = None) -> Iterator[None]:
    """Inside the block, create model parameters on the meta device, with shapes but without values.

    Args:
        include_buffers: create buffers on that device as well. False keeps the values of buffers that are in no weight file, such
            as rotary embedding frequencies. None: use ``ACCELERATE_INIT_INCLUDE_BUFFERS``, else False.

    Examples:
        >>> with init_empty_weights():
        ...     model = torch.nn.Linear(1000, 1000)
        >>> model.weight.device
        device(type='meta')
    """
    with init_on_device(torch.device("meta"), include_buffers=include_buffers):
        yield


@contextmanager
def init_on_device(device: torch.device, include_buffers: bool | None = None) -> Iterator[None]:
    """Inside the block, create model parameters on ``device``.

    Args:
        include_buffers: create buffers on that device as well. None: use ``ACCELERATE_INIT_INCLUDE_BUFFERS``, else False.

    Examples:
        >>> with init_on_device("cpu"):
        ...     model = torch.nn.Linear(8, 8)
    """
    device = torch.device(device)
    if include_buffers is None:
        include_buffers = library_flag("ACCELERATE_INIT_INCLUDE_BUFFERS", default=False)

    def place(_module: nn.Module, _name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.device == device:  # a tied parameter must not be copied again
            return None
        placed = nn.Parameter(parameter.detach().to(device), requires_grad=parameter.requires_grad)
        placed.__dict__.update(parameter.__dict__)
        return placed

    if include_buffers:
        with device:
            yield
        return
    handle = register_module_parameter_registration_hook(place)  # type: ignore[arg-type]
    try:
        yield
    finally:
        handle.remove()
