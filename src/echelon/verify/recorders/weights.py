"""Records weights, buffers and averages of weights after each update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from echelon.base.sharded import is_dtensor
from echelon.distributed.checks.named_sketches import shard_layout, sketch_named
from echelon.verify.recorders.models import RecordedModel, plain_name
from echelon.verify.recording import Recording

_NUM_MARKED = 16


class WeightRecorder:
    """Records all weights once, before the first update, and then the trainable ones after each update.

    Frozen ones may be an average that the script updates (a teacher inside the model). They are recorded, too, unless they are more than
    the trainable ones, as those of a large model that is only fine-tuned; of these only the ones that change are.
    """

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._seen: set[int] = set()
        self._averages: list[tuple[nn.Module, RecordedModel]] = []
        self._frozen: dict[int, dict[str, bytes]] = {}
        """By model: a few values of each frozen parameter before the first update."""
        recording.on_model_recorded.append(self._record_first)
        recording.on_update_closed.append(self._record)
        recording.on_other_forward.append(self._note_copy)
        recording.wrap(AveragedModel, "update_parameters", self._update_average)

    def _update_average(self, update: Callable[..., Any], averaged: AveragedModel, source: nn.Module) -> Any:
        result = update(averaged, source)
        for model in self._recording.models:
            if any(model.name_of(one) is not None for one in source.parameters()):
                self._add_average(averaged.module, model)
        return result

    def _note_copy(self, root: nn.Module) -> None:
        """Remember a module that is not trained and has the parameters of a model: an average that the script computes by hand."""
        shapes = {plain_name(name): one.shape for name, one in root.named_parameters()}
        for model in self._recording.models if shapes else ():
            own = {name: one.shape for name, one in model.parameters.items()}
            if shapes == own and all(model.name_of(one) is None for one in root.parameters()):
                self._add_average(root, model)
                return

    def _add_average(self, root: nn.Module, model: RecordedModel) -> None:
        if all(one is not root for one, _ in self._averages):
            self._averages.append((root, model))

    def _record_first(self, model: RecordedModel) -> None:
        if model.index in self._seen:
            return
        self._seen.add(model.index)
        self._add_weights(model, self._recording.update - 1, only_trainable=False)
        self._unchanged(model, [name for name, one in model.parameters.items() if not one.requires_grad])
        self._add_buffers(model, self._recording.update - 1)

    def _record(self, update: int) -> None:
        for model in self._recording.models:
            self._add_weights(model, update, only_trainable=True)
            self._add_buffers(model, update)

    def _add_weights(self, model: RecordedModel, update: int, *, only_trainable: bool) -> None:
        frozen = [name for name, parameter in model.parameters.items() if not parameter.requires_grad]
        left_out = self._unchanged(model, frozen) if frozen and only_trainable else ()
        chosen = {f"{model.index}:{name}": one for name, one in model.parameters.items() if name not in left_out}
        self._recording.add_tensors("weights", sketch_named(list(chosen), list(chosen.values())), update=update)

    def _unchanged(self, model: RecordedModel, frozen: list[str]) -> set[str]:
        """Return the frozen parameters that are not recorded."""
        sizes = {name: parameter.numel() for name, parameter in model.parameters.items()}
        if 2 * sum(sizes[name] for name in frozen) <= sum(sizes.values()):
            return set()
        marks = {name: _mark(model.parameters[name]) for name in frozen}
        first = self._frozen.setdefault(model.index, marks)
        return {name for name in frozen if first.get(name) == marks[name]}

    def _add_buffers(self, model: RecordedModel, update: int) -> None:
        tensors = list(model.buffers().items())
        averages = [root for root, source in self._averages if source is model]
        for number, root in enumerate(averages):
            prefix = "averaged" if number == 0 else f"averaged {number + 1}"
            tensors += [(f"{prefix}.{plain_name(name)}", value) for name, value in root.state_dict().items()]
        named = {f"{model.index}:{name}": one for name, one in tensors if not _is_sharded(one)}
        if named:
            self._recording.add_tensors("buffers", sketch_named(list(named), list(named.values())), update=update)


def _is_sharded(tensor: torch.Tensor) -> bool:
    layout = shard_layout(tensor)
    return layout is not None and layout.replica is not None


def _mark(parameter: nn.Parameter) -> bytes:
    """Return the bits of a few values of ``parameter``, from which a change of all of them is seen."""
    local = parameter.detach()
    flat = (local.to_local() if is_dtensor(local) else local).reshape(-1)
    few = flat[:: max(flat.numel() // _NUM_MARKED, 1)][: 2 * _NUM_MARKED]
    return few.to("cpu", torch.complex128 if few.is_complex() else torch.float64).contiguous().numpy().tobytes()
