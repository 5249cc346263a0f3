"""Records gradients: what each backward pass adds on this rank, and what the optimizer receives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from echelon.base.sharded import is_dtensor
from echelon.verify.recorders.loss_scales import LossScales
from echelon.verify.recorders.models import RecordedModel
from echelon.verify.recorders.shards import sketch_named
from echelon.verify.recording import Recording
from echelon.verify.sketch import Sketch
from echelon.verify.trace import Gradients

__all__ = ["GradientRecorder"]

_LARGE = 4096  # elements; to compare a larger gradient with an earlier one takes much less time than to summarize it
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class GradientRecorder:
    """Records the stages ``local``, ``reduced`` and ``clipped``.

    A local gradient is read before autograd adds it to ``.grad``: after that, engines reduce it in place. Under ``fully_shard`` it is
    the gradient of the gathered parameter.
    """

    def __init__(self, scales: LossScales) -> None:
        self._scales = scales
        self._recording: Recording
        self._order: dict[tuple[int, str], int] = {}
        self._local: dict[tuple[int, str], torch.Tensor] = {}
        self._latest: dict[
            tuple[int, str], tuple[torch.Tensor, Sketch]
        ] = {}  # large gradients of the latest backward pass
        self._hooks: dict[int, Any] = {}
        self._nodes: list[Any] = []  # torch keeps them only while a graph needs them
        self._frozen: list[tuple[int, str, nn.Parameter]] = []
        self._reduced: dict[tuple[int, str], int] = {}  # hashes of the bits of recorded gradients

    def install(self, recording: Recording) -> Callable[[], None]:
        self._recording = recording
        recording.on_model_recorded(self._watch)
        recording.on_training_forward(lambda *_: self._watch_unfrozen())
        recording.on_forward_end(lambda model, *_: self._watch_gathered(recording.models[model]))
        recording.on_micro_step_end(self._end_micro_step)
        recording.on_step(self._before_step)

        def remove() -> None:
            for hook in self._hooks.values():
                hook.remove()
            self._hooks.clear()
            self._nodes.clear()

        return remove

    # ---- local ---------------------------------------------------------------------------------------------------------

    def _watch(self, model: RecordedModel) -> None:
        for place, name in enumerate(model.parameters):
            self._order[model.index, name] = place
        for name, parameter in model.parameters.items():
            if parameter.requires_grad:
                self._hook(parameter, (model.index, name))
            else:
                self._frozen.append((model.index, name, parameter))

    def _watch_unfrozen(self) -> None:
        if any(parameter.requires_grad for _, _, parameter in self._frozen):
            for model, name, parameter in self._frozen:
                if parameter.requires_grad:
                    self._hook(parameter, (model, name))
            self._frozen = [one for one in self._frozen if not one[2].requires_grad]

    def _watch_gathered(self, model: RecordedModel) -> None:
        for shard, whole in model.unsharded_parameters():
            name = model.name_of(shard)
            if whole.requires_grad and name is not None:
                self._hook(whole, (model.index, name))

    def _hook(self, parameter: nn.Parameter, owner: tuple[int, str]) -> None:
        if id(parameter) in self._hooks:
            return
        accumulator = torch.autograd.graph.get_gradient_edge(parameter).node
        # A hook on the node sees what all hooks on the parameter have made of the gradient.
        self._hooks[id(parameter)] = accumulator.register_prehook(partial(self._keep, owner))
        self._nodes.append((accumulator, parameter))

    def _keep(self, owner: tuple[int, str], gradients: tuple[torch.Tensor | None, ...]) -> None:
        gradient = gradients[0]
        if gradient is None:
            return
        earlier = self._local.get(owner)  # of another checkpointed block in the same pass
        self._local[owner] = gradient.detach().clone() if earlier is None else earlier + gradient.detach()

    def _end_micro_step(self) -> None:
        recording, scale = self._recording, self._scales.take()
        local, self._local = self._local, {}
        if not local:
            recording.note("A backward pass reached no parameter of a recorded model.")
        for owner in local:
            self._reduced.pop(owner, None)  # a clipping function in an earlier micro-step does not count
        ordered = {owner: local[owner] for owner in sorted(local, key=self._order.__getitem__)}
        found = self._add("local", ordered, 1 / scale)
        self._latest = {
            owner: (gradient, found[owner])
            for owner, gradient in local.items()
            if recording.world_size == 1 and scale == 1 and gradient.numel() > _LARGE and owner in found
        }

    # ---- in the optimizer ----------------------------------------------------------------------------------------------

    def record_reduced(self, parameters: Sequence[torch.Tensor], loss_scale: float | None = None) -> None:
        """Record the gradients of ``parameters`` that were not recorded since the last backward pass."""
        loss_scale = self._scales.of(parameters) if loss_scale is None else loss_scale
        found = self._add("reduced", self._gradients(parameters, recorded=False), 1 / loss_scale)
        self._reduced.update({owner: sketch.bits for owner, sketch in found.items()})

    def _before_step(self, optimizer: Optimizer, loss_scale: float) -> None:
        parameters = [one for group in optimizer.param_groups for one in group["params"]]
        clipped = self._gradients(parameters, recorded=True)
        self._add("reduced", self._gradients(parameters, recorded=False), 1 / loss_scale)
        self._add("clipped", clipped, 1 / loss_scale, unless=self._reduced)
        for owner in clipped:
            del self._reduced[owner]
        self._latest.clear()

    def _gradients(self, parameters: Iterable[torch.Tensor], *, recorded: bool) -> dict[tuple[int, str], torch.Tensor]:
        """Return the gradients that were recorded since the last backward pass, or those that were not."""
        found, owner_of = {}, self._recording.owner_of
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is not None:
                owner = owner_of(parameter)
                if owner is not None and (owner in self._reduced) is recorded:
                    found[owner] = gradient.detach()
        return found

    def _add(
        self,
        stage: Literal["local", "reduced", "clipped"],
        gradients: dict[tuple[int, str], torch.Tensor],
        factor: float,
        *,
        unless: dict[tuple[int, str], int] | None = None,
    ) -> dict[tuple[int, str], Sketch]:
        """Record the gradients, times ``factor``, unless all have the bits in ``unless``; return their sketches."""
        recording, all_found = self._recording, {}
        for model in sorted({model for model, _ in gradients}):
            tensors = [(name, one) for (owner, name), one in gradients.items() if owner == model]
            if factor != 1:
                tensors = [(name, one * factor) for name, one in tensors]
            known = self._unchanged(model, tensors) if stage == "reduced" and factor == 1 else {}
            sketches = sketch_named(one for one in tensors if one[0] not in known)
            if known:
                sketches.whole.update(known)
            own = {(model, name): one for part in (sketches.whole, sketches.shards) for name, one in part.items()}
            all_found.update(own)
            if unless is not None and all(unless[owner] == one.bits for owner, one in own.items()):
                continue
            for part in sketches.parts():
                recording.add(
                    Gradients(
                        stage=stage,
                        update=recording.update,
                        micro_step=recording.micro_step,
                        model=model,
                        **part,
                    )
                )
        return all_found

    def _unchanged(self, model: int, gradients: list[tuple[str, torch.Tensor]]) -> dict[str, Sketch]:
        """Return the sketches of gradients that are what the latest backward pass has added: in one process, most are."""
        found = {}
        for name, gradient in gradients:
            local, sketch = self._latest.get((model, name), (None, None))
            if local is not None and sketch is not None and _have_equal_bits(local, gradient):
                found[name] = sketch
        return found


def _have_equal_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype != other.dtype or one.is_complex() or one.layout is not other.layout or is_dtensor(other):
        return False
    kind = _INTEGERS[one.element_size()]
    return torch.equal(one.view(kind), other.view(kind))
