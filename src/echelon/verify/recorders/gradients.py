"""Records gradients: what each backward pass adds on this rank, and what the optimizer receives."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Literal

import torch
from torch import nn
from torch.optim import Optimizer

from echelon.distributed.checks.gradient_hook import GradientHook
from echelon.distributed.checks.named_sketches import sketch_named
from echelon.distributed.checks.sketch import LatestSketches
from echelon.verify.recorders.models import RecordedModel
from echelon.verify.recorders.optimizers import OptimizerRecorder, parameters_of
from echelon.verify.recording import Recording


class GradientRecorder:
    """Records the stages ``local``, ``reduced`` and ``clipped``.

    Under ``fully_shard``, a local gradient is that of the gathered parameter.
    """

    def __init__(self, recording: Recording, optimizers: OptimizerRecorder) -> None:
        self._recording = recording
        self._optimizers = optimizers
        self._order: dict[str, int] = {}
        self._local: dict[str, torch.Tensor] = {}
        self._hooks: dict[int, GradientHook] = {}
        """By the id of the parameter, which the hook keeps alive."""
        self._frozen: list[tuple[str, nn.Parameter]] = []
        self._latest = LatestSketches()
        """In one process, reduced gradients are the local ones, and clipping changes few."""
        self._reduced: dict[str, int] = {}
        """Bits of the gradients that were recorded before a clipping call, since the last backward pass."""
        recording.on_model_recorded.append(self._watch)
        recording.on_training_forward.append(lambda *_: self._watch_unfrozen())
        recording.on_forward_end.append(lambda model, *_: self._watch_gathered(recording.models[model]))
        recording.on_micro_step_end.append(self._end_micro_step)
        recording.on_step.append(self._before_step)
        recording.undo.callback(self._remove_hooks)

    def _remove_hooks(self) -> None:
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()

    # ---- local ---------------------------------------------------------------------------------------------------------

    def _watch(self, model: RecordedModel) -> None:
        for key, parameter in model.parameters.items():
            name = f"{model.index}:{key}"
            self._order.setdefault(name, len(self._order))
            if parameter.requires_grad:
                self._hook(parameter, name)
            else:
                self._frozen.append((name, parameter))

    def _watch_unfrozen(self) -> None:
        if any(parameter.requires_grad for _, parameter in self._frozen):
            for name, parameter in self._frozen:
                if parameter.requires_grad:
                    self._hook(parameter, name)
            self._frozen = [one for one in self._frozen if not one[1].requires_grad]

    def _watch_gathered(self, model: RecordedModel) -> None:
        for shard, whole in model.unsharded_parameters():
            name = self._recording.name_of(shard)
            if whole.requires_grad and name is not None:
                self._hook(whole, name)

    def _hook(self, parameter: nn.Parameter, name: str) -> None:
        if id(parameter) not in self._hooks:
            self._hooks[id(parameter)] = GradientHook(parameter, partial(self._keep, name))

    def _keep(self, name: str, gradient: torch.Tensor) -> None:
        earlier = self._local.get(name)  # of another checkpointed block in the same pass
        self._local[name] = gradient.clone() if earlier is None else earlier + gradient

    def _end_micro_step(self) -> None:
        local, self._local = self._local, {}
        if not local:
            self._recording.note("A backward pass reached no parameter of a recorded model.")
        for name in local:
            self._reduced.pop(name, None)  # a clipping function in an earlier micro-step does not count
        in_order = sorted(local, key=self._order.__getitem__)
        self._add("local", {name: local[name] for name in in_order}, self._optimizers.take_scale())

    # ---- in the optimizer ----------------------------------------------------------------------------------------------

    def record_reduced(self, parameters: Sequence[torch.Tensor]) -> None:
        """Record the gradients of ``parameters`` that were not recorded since the last backward pass."""
        gradients = self._gradients(parameters, recorded=False)
        self._reduced |= self._add("reduced", gradients, self._optimizers.scale_of(parameters))

    def _before_step(self, optimizer: Optimizer, loss_scale: float) -> None:
        parameters = parameters_of(optimizer)
        clipped = self._gradients(parameters, recorded=True)
        self._add("reduced", self._gradients(parameters, recorded=False), loss_scale)
        self._add("clipped", clipped, loss_scale)
        for name in clipped:
            del self._reduced[name]

    def _gradients(self, parameters: Iterable[torch.Tensor], *, recorded: bool) -> dict[str, torch.Tensor]:
        """Return the gradients that were recorded since the last backward pass, or those that were not."""
        gradients = ((self._recording.name_of(one), one.grad) for one in parameters)
        return {
            name: gradient.detach()
            for name, gradient in gradients
            if name is not None and gradient is not None and (name in self._reduced) is recorded
        }

    def _add(
        self, stage: Literal["local", "reduced", "clipped"], gradients: dict[str, torch.Tensor], loss_scale: float
    ) -> dict[str, int]:
        """Record the gradients, divided by ``loss_scale``, and return their bits; clipped ones only if clipping has changed some."""
        if not gradients:
            return {}
        tensors = [one / loss_scale if loss_scale != 1 else one for one in gradients.values()]
        sketches = sketch_named(list(gradients), tensors, self._latest)
        bits = dict(zip(sketches.names, sketches.sketches.bits))
        if stage != "clipped" or any(self._reduced[name] != one for name, one in bits.items()):
            recording = self._recording
            recording.add_tensors(stage, sketches, update=recording.update, micro_step=recording.micro_step)
        return bits
