"""Keeps torch from warning on every rank that the search for unused parameters found none."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

_MESSAGE = "find_unused_parameters=True was specified"


def silence_unused_parameters_warning(device: torch.device) -> None:
    """Discard DDP's warning that ``find_unused_parameters=True`` found no unused parameters, for the rest of this process.

    The reducer writes it from C++ to stderr, once per process. Its first occurrence is therefore provoked here, with a
    reducer for a single number, and inside an autograd function, where torch turns C++ warnings into Python ones. It does
    not communicate.

    Source: TORCH_WARN_ONCE in torch/csrc/distributed/c10d/reducer.cpp, search_unused_parameters.
    """
    group = dist.group.WORLD
    assert group is not None
    parameter = nn.Parameter(torch.zeros(1, device=device))
    reducer = dist.Reducer(
        [parameter],
        [[0]],
        [1024],
        group,
        find_unused_parameters=True,
        param_to_name_mapping={0: "parameter"},  # used with TORCH_DISTRIBUTED_DEBUG=DETAIL
    )
    outputs = [parameter * 2]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=_MESSAGE)
        _WithPythonWarnings.apply(torch.zeros(1), lambda: reducer.prepare_for_backward(outputs))  # type: ignore[no-untyped-call]


class _WithPythonWarnings(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, call: Callable[[], None]) -> torch.Tensor:
        call()
        return tensor.clone()
