"""Mixed precision: autocast in the forward pass, outputs in float32, and a loss scaler for fp16."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch import nn

from echelon.base.messages.translation import gettext as _
from echelon.base.warnings import warn
from echelon.config.schema import Precision
from echelon.distributed.tree import contents, leaves, map_tensors

LOW_PRECISION = (torch.bfloat16, torch.float16)
# Layers that are not converted to fp8 (norms, the first and last layer) run in bf16.
_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionPolicy:
    """The implementation of ``mixed_precision`` on one device.

    Source: torch.amp (autocast, GradScaler).
    """

    mode: Precision
    device_type: str
    autocast_options: Mapping[str, Any] = field(default_factory=dict)
    """Values of ``enabled`` and ``cache_enabled`` for ``torch.autocast``."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype for matrix products in the forward pass."""
        return _DTYPES.get(self.mode, torch.float32)

    def autocast(self, options: Mapping[str, Any] | None = None) -> AbstractContextManager[Any]:
        """Return the forward pass's context; ``options`` (enabled, cache_enabled) override the policy's options."""
        if self.mode == "no":
            return nullcontext()
        chosen = self.autocast_options if options is None else options
        return torch.autocast(self.device_type, dtype=self.dtype, **chosen)

    def make_scaler(self, options: Mapping[str, Any] | None = None) -> torch.amp.GradScaler | None:
        """Return a ``torch.amp.GradScaler`` with these options for fp16, or None for other modes."""
        if self.mode != "fp16":
            return None
        return torch.amp.GradScaler(self.device_type, **(options or {}))

    def wrap_forward(self, model: nn.Module) -> None:
        """Make ``model.forward`` run under autocast and return float32, so that losses are computed in float32.

        The unwrapped forward remains available as ``model.forward.__wrapped__``; ``unwrap_forward`` restores it.
        """
        if self.mode == "no" or is_wrapped(model):
            return
        model.forward = _Autocast(model.forward, self, replaces=model.__dict__.get("forward"))


def is_wrapped(model: nn.Module) -> bool:
    """Return whether ``wrap_forward`` was applied to ``model``."""
    return isinstance(model.__dict__.get("forward"), _Autocast)


def unwrap_forward(model: nn.Module) -> None:
    """Restore the model's original forward."""
    forward = model.__dict__.get("forward")
    if isinstance(forward, _Autocast):
        del model.__dict__["forward"]  # exposes the method of the class
        if forward.replaces is not None:
            model.__dict__["forward"] = forward.replaces


def rebind_forward(model: nn.Module, *, original: nn.Module) -> None:
    """If ``model`` copied a wrapped forward from ``original``, rebind it to ``model``."""
    forward = model.__dict__.get("forward")
    if isinstance(forward, _Autocast) and getattr(forward.__wrapped__, "__self__", None) is original:
        wrapped: Any = forward.__wrapped__
        method = MethodType(wrapped.__func__, model)
        replaces = None if forward.replaces is None else method
        model.__dict__["forward"] = _Autocast(method, forward.policy, replaces=replaces)


class _Autocast:
    """A picklable bound forward that runs under autocast and returns float32 outputs."""

    def __init__(
        self, forward: Callable[..., Any], policy: PrecisionPolicy, *, replaces: Callable[..., Any] | None = None
    ) -> None:
        self.__wrapped__ = forward
        self.policy = policy
        self.replaces = replaces  # a forward that was set on the object, for example by compilation
        self._has_warned = False
        functools.update_wrapper(self, forward, assigned=("__doc__", "__name__", "__qualname__"), updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.policy.autocast():
            outputs = self.__wrapped__(*args, **kwargs)
        converted = map_tensors(_to_float32, outputs)
        if converted is outputs and not self._has_warned and contents(outputs) is None:
            self._warn_of_object(outputs)
        return converted

    def _warn_of_object(self, outputs: Any) -> None:
        """Warn once that an output object's tensors stay in half precision."""
        held = (
            leaves(dict(getattr(outputs, "__dict__", {}))) if not isinstance(outputs, (torch.Tensor, nn.Module)) else ()
        )
        if any(isinstance(one, torch.Tensor) and one.requires_grad and _to_float32(one) is not one for one in held):
            self._has_warned = True
            model = getattr(self.__wrapped__, "__self__", None)
            warn(
                _(
                    "the forward pass of {name} returned a {outputs}. Mixed precision does not convert the attributes "
                    "of such an object to float32, so its tensors stay {dtype}. Return a dict, a named tuple or a "
                    "dataclass, or call .float() on the loss's inputs",
                    name=type(model).__name__,
                    outputs=type(outputs).__name__,
                    dtype=self.policy.dtype,
                )
            )


def _to_float32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
