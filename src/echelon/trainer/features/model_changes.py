"""Changes of a model before it is trained: activation checkpointing, and the layers of liger_kernel."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from torch import nn

from echelon.base.errors import UsageError
from echelon.base.optional import require

__all__ = ["apply_liger_kernel", "enable_activation_checkpointing"]


@runtime_checkable
class _Enables(Protocol):
    def activation_checkpointing_enable(self, activation_checkpointing_kwargs: Any = None, **more: Any) -> Any:
        """Switch it on."""
        ...


@runtime_checkable
class _EnablesByOldName(Protocol):
    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: Any = None) -> Any:
        """Switch it on."""
        ...


# Not of torch.utils.checkpoint, but of the method itself.
_OF_THE_METHOD = ("every_n_layers", "offload")


def enable_activation_checkpointing(model: nn.Module, options: Any) -> None:
    """Switch it on by the model's own method.

    Args:
        model: of transformers, or with ``gradient_checkpointing_enable``.
        options: of ``torch.utils.checkpoint.checkpoint``, and ``every_n_layers`` and ``offload``; None: the model's own.

    Raises:
        UsageError: the model has no such method, or an older one without these options.
    """
    given = dict(options or {})
    more = {name: given.pop(name) for name in _OF_THE_METHOD if name in given}
    if isinstance(model, _Enables):
        model.activation_checkpointing_enable(given or None, **more)
        return
    if isinstance(model, _EnablesByOldName) and not more:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=given or None)
        return
    raise UsageError(
        f"activation_checkpointing=True, and {type(model).__name__} cannot switch it on"
        + (f" with {', '.join(more)}" if more else ""),
        where="TrainingArguments.activation_checkpointing",
        do="wrap the layers with torch.utils.checkpoint in the model, or give it a method gradient_checkpointing_enable",
    )


def apply_liger_kernel(model: nn.Module, options: dict[str, Any] | None) -> None:
    """Replace layers of ``model`` by those of the package liger_kernel.

    Raises:
        MissingExtraError: it is not installed.
    """
    package: Any = require("liger_kernel.transformers", extra="liger", purpose="use_liger_kernel=True")
    package._apply_liger_kernel_to_instance(model=model, **(options or {}))
