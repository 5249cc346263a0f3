"""Records gradients: what each backward pass adds on this rank, and what the optimizer receives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from echelon.base.sharded import is_dtensor
from echelon.verify.recorders.loss_scales import LossScales
from echelon.verify.recorders.models import RecordedModel
from echelon.verify.recorders.shards import NamedSketches, sketch_named, together
from echelon.verify.recording import Recording
from echelon.verify.sketch import Sketch, Sketches
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
        self._copies: dict[
            tuple[int, str], torch.Tensor
        ] = {}  # used again in each pass: fresh memory takes longer than the copy
        # Large gradients of the latest backward pass, until the next one.
        self._latest: dict[tuple[int, str], tuple[torch.Tensor, Sketch]] = {}
        self._hooks: dict[int, Any] = {}
        self._nodes: list[Any] = []  # torch keeps them only while a graph needs them
        self._frozen: list[tuple[int, str, nn.Parameter]] = []
        self._added: dict[int, NamedSketches] = {}  # by model: what the latest backward pass has added
        self._reduced: dict[tuple[int, str], _Recorded] = {}

    def install(self, recording: Recording) -> Callable[[], None]:
        self._recording = recording
        recording.on_model_recorded(self._watch)
        recording.on_training_forward(lambda *_: self._watch_unfrozen())
        recording.on_forward_end(lambda model, *_: self._watch_gathered(recording.models[model]))
        recording.on_backward(lambda *_: self._forget())
        recording.on_micro_step_end(self._end_micro_step)
        recording.on_step(self._before_step)

        def remove() -> None:
            for hook in self._hooks.values():
                hook.remove()
            self._hooks.clear()
            self._nodes.clear()

        return remove

    def _forget(self) -> None:
        self._latest.clear()
        self._added.clear()

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
        own = gradient.detach()
        if owner in self._local:  # of another checkpointed block in the same pass
            self._local[owner] = self._local[owner] + own
            return
        copy = self._copies.get(owner)
        if copy is None or not _is_alike(copy, own):
            self._local[owner] = self._copies[owner] = own.clone()
        else:
            self._local[owner] = copy.copy_(own)

    def _end_micro_step(self) -> None:
        recording, scale = self._recording, self._scales.take()
        local, self._local = self._local, {}
        if not local:
            recording.note("A backward pass reached no parameter of a recorded model.")
        for owner in local:
            self._reduced.pop(owner, None)  # a clipping function in an earlier micro-step does not count
        ordered = {owner: local[owner] for owner in sorted(local, key=self._order.__getitem__)}
        found = self._add("local", ordered, 1 / scale)
        if recording.world_size == 1 and scale == 1:
            self._added = dict(found)
            self._latest = {
                (model, name): (local[model, name], sketches.whole[place])
                for model, sketches in found
                for place, name in enumerate(sketches.whole_names)
                if local[model, name].numel() > _LARGE
            }

    # ---- in the optimizer ----------------------------------------------------------------------------------------------

    def record_reduced(self, parameters: Sequence[torch.Tensor], loss_scale: float | None = None) -> None:
        """Record the gradients of ``parameters`` that were not recorded since the last backward pass."""
        loss_scale = self._scales.of(parameters) if loss_scale is None else loss_scale
        gradients = self._gradients(parameters, recorded=False)
        self._add("reduced", gradients, 1 / loss_scale, into=self._reduced)

    def _before_step(self, optimizer: Optimizer, loss_scale: float) -> None:
        parameters = [one for group in optimizer.param_groups for one in group["params"]]
        clipped = self._gradients(parameters, recorded=True)
        self._add("reduced", self._gradients(parameters, recorded=False), 1 / loss_scale)
        self._add("clipped", clipped, 1 / loss_scale, unless=self._reduced)
        for owner in clipped:
            del self._reduced[owner]
        self._forget()

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
        unless: dict[tuple[int, str], _Recorded] | None = None,
        into: dict[tuple[int, str], _Recorded] | None = None,
    ) -> list[tuple[int, NamedSketches]]:
        """Record the gradients, times ``factor``, unless all have the bits in ``unless``; return their sketches, by model.

        Args:
            into: receives what was recorded of each gradient.
        """
        recording, found = self._recording, []
        for model in sorted({model for model, _ in gradients}):
            names = [name for owner, name in gradients if owner == model]
            tensors = [one for (owner, _), one in gradients.items() if owner == model]
            if factor != 1:
                tensors = [one * factor for one in tensors]
            sketches = self._sketches(model, names, tensors, may_be_local=stage == "reduced" and factor == 1)
            found.append((model, sketches))
            if unless is not None and _are_recorded(sketches, {name: unless[model, name] for name in names}):
                continue
            if into is not None:
                for place, name in enumerate(sketches.whole_names):
                    into[model, name] = _Recorded(sketches.whole, place)
                for place, name in enumerate(sketches.shard_names):
                    into[model, name] = _Recorded(sketches.shards, place)
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
        return found

    def _sketches(
        self, model: int, names: list[str], tensors: list[torch.Tensor], *, may_be_local: bool
    ) -> NamedSketches:
        known = self._unchanged(model, names, tensors) if may_be_local and self._latest else {}
        if not known:
            found, added = sketch_named(names, tensors), self._added.get(model)
            if (
                may_be_local
                and added is not None
                and found.whole.raw is not None
                and found.whole_names == added.whole_names
                and found.whole.has_bits_of(added.whole)
            ):
                return added
            return found
        others = [place for place, name in enumerate(names) if name not in known]
        rest = sketch_named([names[place] for place in others], [tensors[place] for place in others])
        return together(NamedSketches(list(known), Sketches.of(list(known.values())), [], Sketches.of([])), rest)

    def _unchanged(self, model: int, names: list[str], gradients: list[torch.Tensor]) -> dict[str, Sketch]:
        """Return the sketches of gradients that are what the latest backward pass has added: in one process, most are."""
        found = {}
        for name, gradient in zip(names, gradients, strict=True):
            local, sketch = self._latest.get((model, name), (None, None))
            if local is not None and sketch is not None and _have_equal_bits(local, gradient):
                found[name] = sketch
        return found


class _Recorded(NamedTuple):
    """Where the sketch of a recorded gradient is."""

    sketches: Sketches
    place: int


def _are_recorded(found: NamedSketches, recorded: dict[str, _Recorded]) -> bool:
    """Return whether all gradients have the bits of the ``recorded`` ones."""
    whole = [recorded[name] for name in found.whole_names]
    first = whole[0].sketches if whole else None
    if (
        first is not None
        and not found.shard_names
        and len(first) == len(whole)
        and all(one.sketches is first and one.place == place for place, one in enumerate(whole))
    ):
        return found.whole.has_bits_of(first)
    places = [*whole, *(recorded[name] for name in found.shard_names)]
    return [*found.whole.bits, *found.shards.bits] == [one.sketches.bits[one.place] for one in places]


def _is_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        type(one) is type(other)
        and one.dtype is other.dtype
        and one.shape == other.shape
        and one.layout is torch.strided
        and other.layout is torch.strided
        and one.device == other.device
    )


def _have_equal_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype != other.dtype or one.is_complex() or one.layout is not other.layout or is_dtensor(other):
        return False
    kind = _INTEGERS[one.element_size()]
    ours, theirs = one.view(kind), other.view(kind)
    if one.device.type == "cpu" and other.device.type == "cpu":
        return bool((ours.numpy() == theirs.numpy()).all())  # torch.equal takes several times as long
    return torch.equal(ours, theirs)
