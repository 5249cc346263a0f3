"""Records the training state when the script saves it, and after it has loaded one."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from echelon.distributed.checks.named_sketches import NamedSketches, concat_sketches, sketch_named
from echelon.verify.recorders.models import RecordedModel
from echelon.verify.recorders.optimizers import parameters_of, sketch_optimizer_state
from echelon.verify.recorders.user_code import line_of_user
from echelon.verify.recording import Recording

_SAVES = (
    ("echelon.accelerator.checkpoint.checkpoints", "Checkpoints", "save_state"),
    ("accelerate.accelerator", "Accelerator", "save_state"),
    ("transformers.trainer", "Trainer", "_save_checkpoint"),
)
_LOADS = (
    ("echelon.accelerator.checkpoint.checkpoints", "Checkpoints", "load_state"),
    ("echelon.accelerator.checkpoint.checkpoints", "Checkpoints", "resume"),
    ("accelerate.accelerator", "Accelerator", "load_state"),
    ("transformers.trainer", "Trainer", "_load_optimizer_and_scheduler"),
)
_DEPTH = 6  # of dicts and lists that are searched for a model's weights


class SavedStateRecorder:
    """Follows ``save_state`` and ``load_state`` of echelon and Accelerate, the Trainers' checkpoints, and ``torch.save``.

    In a plain loop, ``torch.save`` counts if it gets weights of a recorded model; ``load_state_dict`` of a model or an optimizer counts
    after a ``torch.load``.
    """

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._is_inside = False
        self._file = ""  # that torch.load has read last
        self._loaded: tuple[str, str, int] | None = None  # path, line, and the first model that it concerns
        self._optimizers: list[weakref.ref[Optimizer]] = []
        for methods, call in ((_SAVES, self._save), (_LOADS, self._load)):
            for module, owner, name in methods:
                recording.wrap_when_imported(module, owner, name, call)
        recording.on_training_forward.append(self._before_forward)
        recording.on_step.append(lambda optimizer, _: self._add_optimizer(optimizer))
        recording.wrap(Optimizer, "__init__", self._note_optimizer)
        recording.wrap(torch, "save", self._save_plain)
        recording.wrap(torch, "load", self._note_file)
        recording.wrap(nn.Module, "load_state_dict", self._load_plain)
        recording.wrap(Optimizer, "load_state_dict", self._load_plain)

    # ---- what is saved -------------------------------------------------------------------------------------------------

    def _save(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._is_inside:
            return original(*args, **kwargs)
        sketches, line = self._state(self._first_model(args[0])), line_of_user()
        result = self._within(original, *args, **kwargs)
        path = _path_in(result, *args[1:], *kwargs.values())
        self._add("saved", sketches, path, line, update=self._recording.last_update)
        return result

    def _save_plain(self, original: Callable[..., Any], obj: Any, f: Any = None, *args: Any, **kwargs: Any) -> Any:
        if f is not None:
            args = (f, *args)
        if self._is_inside or not self._holds_weights(obj, _DEPTH):
            return original(obj, *args, **kwargs)
        sketches, line = self._state(0), line_of_user()
        result = original(obj, *args, **kwargs)
        self._add("saved", sketches, _path_in(f, *kwargs.values()), line, update=self._recording.last_update)
        return result

    def _holds_weights(self, obj: Any, depth: int) -> bool:
        """Return whether ``obj`` contains a parameter of a recorded model, or a view or copy of one that shares its memory."""
        if isinstance(obj, torch.Tensor):
            return obj.layout is torch.strided and obj.data_ptr() in self._addresses()
        if depth == 0:
            return False
        if isinstance(obj, nn.Module):
            return any(self._recording.name_of(one) is not None for one in obj.parameters())
        inner = obj.values() if isinstance(obj, dict) else obj if isinstance(obj, (list, tuple)) else ()
        return any(self._holds_weights(one, depth - 1) for one in inner)

    def _addresses(self) -> set[int]:
        parameters = [one for model in self._recording.models for one in model.parameters.values()]
        return {one.data_ptr() for one in parameters if one.numel()}

    # ---- what is loaded ------------------------------------------------------------------------------------------------

    def _load(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._is_inside:
            return original(*args, **kwargs)
        line = line_of_user()
        result = self._within(original, *args, **kwargs)
        path = _path_in(*args[1:], *kwargs.values())
        if path or result is not False:  # resume() returns False if there is no checkpoint
            self._loaded = path, line, self._first_model(args[0])
        return result

    def _load_plain(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if not self._is_inside and self._file:
            self._loaded = self._file, line_of_user(), 0
        return result

    def _note_file(self, original: Callable[..., Any], f: Any = None, *args: Any, **kwargs: Any) -> Any:
        if f is not None:
            args = (f, *args)
        if not self._is_inside:
            self._file = _path_in(f, *kwargs.values())
        return original(*args, **kwargs)

    def _before_forward(self, *_: Any) -> None:
        if self._loaded is not None:
            (path, line, first), self._loaded = self._loaded, None
            self._add("loaded", self._state(first), path, line, update=self._recording.update - 1)

    # ---- the state -----------------------------------------------------------------------------------------------------

    def _within(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._is_inside = True
        try:
            return original(*args, **kwargs)
        finally:
            self._is_inside = False

    def _note_optimizer(self, original: Callable[..., Any], optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        original(optimizer, *args, **kwargs)
        self._add_optimizer(optimizer)

    def _add_optimizer(self, optimizer: Optimizer) -> None:
        if all(reference() is not optimizer for reference in self._optimizers):
            self._optimizers.append(weakref.ref(optimizer))

    def _first_model(self, owner: Any) -> int:
        """Return the lowest number of the models that an Accelerator has now.

        Earlier ones belong to a part of the script that has ended (a fold of a cross-validation): they are not in its checkpoints.
        """
        prepared = getattr(owner, "models", None) or getattr(owner, "_models", None)
        if not isinstance(prepared, (list, tuple)):
            return 0
        parameters = (one for model in prepared if isinstance(model, nn.Module) for one in model.parameters())
        names = map(self._recording.name_of, parameters)
        return min((_model_of(name) for name in names if name is not None), default=0)

    def _known_optimizers(self, first: int) -> list[Optimizer]:
        """Return the optimizers of recorded models from ``first`` on.

        Of those with the same parameters, only the last one: it contains the others.
        """
        found: dict[int, Optimizer] = {}
        for reference in self._optimizers:
            optimizer = reference()
            parameters = parameters_of(optimizer) if optimizer else []
            name = self._recording.name_of(parameters[0]) if parameters else None
            if optimizer is not None and name is not None and _model_of(name) >= first:
                found[id(parameters[0])] = optimizer
        return list(found.values())

    def _state(self, first: int) -> NamedSketches:
        """Return weights, buffers and optimizer states of the models from ``first`` on."""
        named = dict(_tensors_of(self._recording.models[first:]))
        optimizers = self._known_optimizers(first)
        lrs = [float(group.get("lr", 0.0)) for optimizer in optimizers for group in optimizer.param_groups]
        rates = [torch.tensor(lr, dtype=torch.float64) for lr in lrs]
        return concat_sketches(
            sketch_named(list(named), list(named.values())),
            *(sketch_optimizer_state(self._recording, optimizer) for optimizer in optimizers),
            sketch_named([f"lr {number}" for number in range(len(rates))], rates),
        )

    def _add(
        self, content: Literal["saved", "loaded"], sketches: NamedSketches, path: str, line: str, *, update: int
    ) -> None:
        if self._recording.models:  # else nothing was trained yet
            self._recording.add_tensors(content, sketches, update=update, path=path, line=line)


def _model_of(name: str) -> int:
    return int(name.partition(":")[0])


def _tensors_of(models: list[RecordedModel]) -> Iterator[tuple[str, torch.Tensor]]:
    for model in models:
        for name, parameter in model.parameters.items():
            yield f"{model.index}:{name}", parameter.detach()
        for name, buffer in model.buffers().items():
            yield f"buffer {model.index}:{name}", buffer


def _path_in(*values: Any) -> str:
    """Return the first path among ``values`` (a file object's name counts), or an empty string."""
    for value in values:
        value = value if isinstance(value, os.PathLike) else getattr(value, "name", value)
        if isinstance(value, (str, os.PathLike)):
            return os.path.abspath(os.fspath(value))
    return ""
