"""Stores weights in a small dtype, and converts them to a larger one while their layer runs."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

from echelon.big_models.hooks import ModelHook, add_hook_to_module
from echelon.distributed.uncompiled import uncompiled

SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.Linear,
)


class LayerwiseCastingHook(ModelHook):
    """Stores a module's weights in ``storage_dtype``, and converts them to ``compute_dtype`` for the forward pass.

    The conversion rounds the weights, so outputs change.

    Args:
        non_blocking: convert asynchronously.
    """

    def __init__(self, storage_dtype: torch.dtype, compute_dtype: torch.dtype, non_blocking: bool) -> None:
        self.storage_dtype = storage_dtype
        self.compute_dtype = compute_dtype
        self.non_blocking = non_blocking

    def init_hook(self, module: nn.Module) -> nn.Module:
        return module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)

    @uncompiled
    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        module.to(dtype=self.compute_dtype, non_blocking=self.non_blocking)
        return args, kwargs

    @uncompiled
    def post_forward(self, module: nn.Module, output: Any) -> Any:
        module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)
        return output


def attach_layerwise_casting_hooks(
    module: nn.Module,
    storage_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    skip_modules_pattern: str | tuple[str, ...] | list[str] | None = None,
    skip_modules_classes: tuple[type[nn.Module], ...] | None = None,
    non_blocking: bool = False,
) -> None:
    """Attach ``LayerwiseCastingHook`` to the linear and convolution layers in ``module``.

    Args:
        storage_dtype: dtype of the weights between forward passes, such as ``torch.float8_e4m3fn``.
        skip_modules_pattern: regular expressions; modules whose full name matches one keep their dtype.
        skip_modules_classes: modules of these classes keep their dtype.
    """
    patterns = (skip_modules_pattern,) if isinstance(skip_modules_pattern, str) else skip_modules_pattern or ()
    stack: list[tuple[str, nn.Module]] = [("", module)]
    while stack:
        name, part = stack.pop()
        if isinstance(part, skip_modules_classes or ()) or any(re.search(pattern, name) for pattern in patterns):
            continue
        if isinstance(part, SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING):
            hook = LayerwiseCastingHook(storage_dtype, compute_dtype, non_blocking)
            add_hook_to_module(part, hook, append=True)
        else:
            stack += [(f"{name}.{child}" if name else child, inner) for child, inner in part.named_children()]
