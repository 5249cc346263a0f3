"""Records calls of clipping functions: torch's, Accelerate's and those of echelon's engines."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from echelon.base.sharded import is_dtensor
from echelon.engines.base import Engine
from echelon.verify.recorders.gradients import GradientRecorder
from echelon.verify.recorders.user_code import line_of_user
from echelon.verify.recording import Recording
from echelon.verify.trace import Clip

_FUNCTIONS = ("clip_grad_norm_", "clip_grad_value_", "clip_grad_norm")
_METHODS = ("clip_grad_norm_", "clip_grad_value_", "clip_grad_norm", "clip_grad_value")
_CLASSES = (("accelerate.accelerator", "Accelerator"), ("torch.distributed.fsdp", "FullyShardedDataParallel"))


class ClipRecorder:
    """Wraps the functions, and the methods of libraries and of echelon's engines as soon as these are imported."""

    def __init__(self, recording: Recording, gradients: GradientRecorder) -> None:
        self._recording = recording
        self._gradients = gradients
        self._wrapped_engines: set[type] = set()
        self._is_inside = False
        self._wrap_functions()
        for module, owner in _CLASSES:
            for name in _METHODS:
                recording.wrap_when_imported(module, owner, name, self._call)
        self._wrap_engines()
        recording.on_model_recorded.append(lambda _: self._wrap_engines())

    def _wrap_functions(self) -> None:
        """Replace torch's functions in all modules that have imported them."""
        for name in _FUNCTIONS:
            original = getattr(torch.nn.utils, name, None)
            for module in list(sys.modules.values()) if original is not None else ():
                if getattr(module, "__dict__", {}).get(name) is original:
                    self._recording.wrap(module, name, self._call)

    def _wrap_engines(self) -> None:
        new = [kind for kind in _with_subclasses(Engine) if kind not in self._wrapped_engines]
        self._wrapped_engines.update(new)
        for kind in new:
            for name in _METHODS:
                if name in vars(kind):
                    self._recording.wrap(kind, name, self._call)

    def _call(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        names = _names_of_arguments(original)
        given = {**dict(zip(names, args)), **kwargs}
        limit = given.get("max_norm", given.get("clip_value", math.inf))
        if self._is_inside:
            return original(*args, **kwargs)
        if (
            given.get("unsynced") and limit == math.inf
        ):  # an exact mode of echelon computes the norm so far, without clipping
            return self._call_inside(original, *args, **kwargs)
        if "parameters" in given:
            parameters = given["parameters"]
            parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
            given["parameters"] = parameters
            if "parameters" in kwargs:
                kwargs["parameters"] = parameters
            else:
                place = names.index("parameters")
                args = (*args[:place], parameters, *args[place + 1 :])
        if "unsynced" in names and not given.get("unsynced"):
            _reduce(next(iter(given.values())), given.get("parameters", []))
        self._gradients.record_reduced(given.get("parameters", []))
        result = self._call_inside(original, *args, **kwargs)
        self._recording.add(
            Clip(
                update=self._recording.update,
                micro_step=self._recording.micro_step,
                norm=math.nan if "clip_value" in given else _number(result),
                max_norm=_number(limit),
                line=line_of_user(),
            )
        )
        return result

    def _call_inside(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``original``, which may call other functions that clip: those are not recorded."""
        self._is_inside = True
        try:
            return original(*args, **kwargs)
        finally:
            self._is_inside = False


@cache
def _names_of_arguments(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


def _number(value: Any) -> float:
    if isinstance(value, torch.Tensor):
        value = value.detach()
        if is_dtensor(value):
            value = value.full_tensor()  # all ranks clip
        return float(value)
    return math.nan if value is None else float(value)


def _reduce(engine: Any, parameters: list[torch.Tensor]) -> None:
    """Reduce gradients as the clipping method of ``engine`` is about to (step guard): the recorded ones must be the reduced ones."""
    module = sys.modules.get("echelon.accelerator.current")
    ids = set(map(id, parameters))
    for accelerator in () if module is None else module.living_accelerators():
        for optimizer in accelerator.session.objects.optimizers:
            own = [one for group in optimizer.param_groups for one in group["params"]]
            if accelerator.session.engine is engine and any(id(one) in ids for one in own):
                engine.reduce_gradients(optimizer.optimizer)


def _with_subclasses(kind: Any) -> list[type]:
    found: list[type] = [kind]
    for inner in kind.__subclasses__():
        found += _with_subclasses(inner)
    return found
