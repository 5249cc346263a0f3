"""Modifies a model before training: enables activation checkpointing and applies Liger kernels."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from torch import nn

from echelon.base.errors import UsageError
from echelon.base.optional import require

__all__ = ["apply_liger_kernel", "enable_activation_checkpointing"]


@runtime_checkable
class _Enables(Protocol):
    def activation_checkpointing_enable(self, activation_checkpointing_kwargs: Any = None, **more: Any) -> Any:
        """Enable activation checkpointing."""
        ...


@runtime_checkable
class _EnablesByOldName(Protocol):
    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: Any = None) -> Any:
        """Enable activation checkpointing."""
        ...


# Options of activation_checkpointing_enable, not of torch.utils.checkpoint.
_METHOD_OPTIONS = ("every_n_layers", "offload")


def enable_activation_checkpointing(model: nn.Module, options: Any) -> None:
    """Enable activation checkpointing by calling the model's own method.

    Args:
        model: a transformers model, or any model with ``gradient_checkpointing_enable``.
        options: options for ``torch.utils.checkpoint.checkpoint``, ``every_n_layers`` and ``offload``; None for the
            model's defaults.

    Raises:
        UsageError: the model has no such method, or its method does not support the options.
    """
    given = dict(options or {})
    more = {name: given.pop(name) for name in _METHOD_OPTIONS if name in given}
    if isinstance(model, _Enables):
        model.activation_checkpointing_enable(given or None, **more)
        return
    if isinstance(model, _EnablesByOldName) and not more:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=given or None)
        return
    raise UsageError(
        f"activation_checkpointing=True, but {type(model).__name__} does not support it"
        + (f" with {', '.join(more)}" if more else ""),
        where="TrainingArguments.activation_checkpointing",
        do="use torch.utils.checkpoint in the model, or add a gradient_checkpointing_enable method to it",
    )


def apply_liger_kernel(model: nn.Module, options: dict[str, Any] | None) -> None:
    """Replace layers in ``model`` with their liger_kernel versions.

    Raises:
        MissingExtraError: liger_kernel is not installed.
    """
    package: Any = require("liger_kernel.transformers", extra="liger", purpose="use_liger_kernel=True")
    package._apply_liger_kernel_to_instance(model=model, **(options or {}))
