"""Runs a script in float64: the same steps, from which the rounding error of the script's own dtype is measured."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from echelon.distributed.tree import map_tensors
from echelon.verify.recorders.batches import Batches
from echelon.verify.recording import Recording

_LOW = frozenset({torch.float32, torch.float16, torch.bfloat16})
_CASTS = frozenset({torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16})
# Functions that draw. They draw in float32 as they do in the script's own dtype: in float64 they would draw other numbers.
_DRAWS_NEW = frozenset({torch.rand, torch.randn, torch.rand_like, torch.randn_like})
_DRAWS_FROM = frozenset(
    {torch.normal, torch.bernoulli, torch.Tensor.bernoulli, torch.multinomial, torch.Tensor.multinomial}
)
_DRAWS_IN_PLACE = frozenset(
    getattr(torch.Tensor, name)
    for name in ("normal_", "uniform_", "exponential_", "cauchy_", "log_normal_", "geometric_", "bernoulli_")
)


class Float64:
    """Converts models, batches and optimizer states to float64 when the first forward pass of a model begins, and turns autocast off.

    Parameters and buffers stay the same objects, so optimizers that were built before keep working. They stay in float64.

    Args:
        batches: hands the batches to the script.
    """

    def __init__(self, recording: Recording, batches: Batches) -> None:
        self._converted: WeakSet[nn.Module] = WeakSet()
        self._mode = _InFloat64()
        self._is_on = False
        self._default = torch.get_default_dtype()
        recording.on_model.append(self._begin)
        recording.input_transforms.append(self._transform)
        batches.transform = _cast
        batches.while_reading = self._pause
        recording.wrap(DistributedDataParallel, "__init__", self._wrap_model)
        recording.wrap(torch.autocast, "__init__", _begin_autocast)
        recording.undo.callback(register_optimizer_step_pre_hook(_convert_state).remove)
        recording.undo.callback(self._end)

    def _wrap_model(self, construct: Any, wrapper: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        self._convert_modules(module)  # its buckets have the dtype of the parameters
        construct(wrapper, module, *args, **kwargs)

    def _end(self) -> None:
        if self._is_on:
            self._is_on = False
            self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            torch.set_default_dtype(self._default)

    def _begin(self, root: nn.Module) -> None:
        self._convert_modules(root)
        if not self._is_on:
            self._is_on = True
            torch.set_default_dtype(torch.float64)
            self._mode.__enter__()  # type: ignore[no-untyped-call]

    @contextmanager
    def _pause(self) -> Iterator[None]:
        """Let the script's dataset compute in its own dtype."""
        if not self._is_on:
            yield
            return
        self._mode.is_paused = True
        torch.set_default_dtype(self._default)
        try:
            yield
        finally:
            self._mode.is_paused = False
            torch.set_default_dtype(torch.float64)

    def _convert_modules(self, root: nn.Module) -> None:
        if root in self._converted:
            return
        # Also the other modules that exist: averaged copies of the model, teachers, weights of losses.
        for one in gc.get_objects():
            # A wrapper that is being built has no parameters yet.
            if issubclass(type(one), nn.Module) and "_parameters" in vars(one) and one not in self._converted:
                self._converted.add(one)
                _convert(one)

    def _transform(
        self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self._begin(root)
        return _cast(args), _cast(kwargs)


class _InFloat64(TorchFunctionMode):
    """Replaces lower precisions by float64 wherever a dtype is passed or chosen by a method such as ``float()``."""

    is_paused = False

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.is_paused:
            return function(*args, **kwargs)
        if function in _CASTS:
            return args[0].double()
        if function in _DRAWS_IN_PLACE and args[0].dtype is torch.float64:
            drawn = torch.empty_like(args[0], dtype=torch.float32)
            function(drawn, *args[1:], **kwargs)
            with torch.no_grad():
                return args[0].copy_(drawn)
        if function in _DRAWS_NEW:
            return _cast(function(*args, **{**kwargs, "dtype": kwargs.get("dtype") or torch.float32}))
        if function in _DRAWS_FROM:
            return _cast(function(*_lowered(args), **_lowered(kwargs)))
        if any(type(one) is torch.dtype for one in args) or "dtype" in kwargs:
            args = tuple(_raised(one) for one in args)
            kwargs = {name: _raised(value) for name, value in kwargs.items()}
        return function(*args, **kwargs)


def _begin_autocast(begin: Any, context: Any, *args: Any, **kwargs: Any) -> None:
    begin(context, *args, **kwargs)
    context._enabled = False


def _lowered(data: Any) -> Any:
    return map_tensors(lambda tensor: tensor.float() if tensor.dtype is torch.float64 else tensor, data)


def _raised(value: Any) -> Any:
    return torch.float64 if type(value) is torch.dtype and value in _LOW else value


def _cast(data: Any) -> Any:
    """Return ``data`` with each floating-point tensor in float64."""
    return map_tensors(lambda tensor: tensor.to(torch.float64) if tensor.dtype in _LOW else tensor, data)


def _convert(module: nn.Module) -> None:
    """Convert the tensors of ``module`` itself in place."""
    tensors = [*module._parameters.values(), *module._buffers.values()]
    for tensor in tensors:
        if tensor is None or tensor.dtype not in _LOW or is_lazy(tensor):
            continue
        gradient = tensor.grad if tensor.is_leaf else None
        tensor.grad = None
        tensor.data = tensor.data.double()
        if gradient is not None:
            tensor.grad = gradient.double()


def _convert_state(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Convert optimizer state that was loaded before the parameters were converted; step counts stay."""
    for parameter, state in optimizer.state.items():
        if isinstance(parameter, torch.Tensor) and parameter.dtype is torch.float64:
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and value.dtype in _LOW and value.dim() > 0:
                    state[name] = value.double()
