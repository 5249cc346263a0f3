"""Records optimizer steps, and the optimizers' state after each update; follows loss scalers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any
from zlib import crc32

import torch
from torch.optim import Optimizer, optimizer as torch_optimizer

from echelon.distributed.checks.named_sketches import NamedSketches, as_shards, sketch_named
from echelon.verify.recorders.user_code import line_of_user
from echelon.verify.recording import Recording
from echelon.verify.trace import OptimizerStep

_LARGE = 2**13
"""Elements. The state of larger tensors is summarized in a part of the updates: in an update in which it is wrong, the weights, which are
summarized in each update, are wrong, too."""
_EVERY = 4
"""Each large tensor of the state is summarized once in so many updates, a part of them in each update."""
_ALL_AT_FIRST = 2
"""Updates at the beginning in which all are, as in the last one."""


class OptimizerRecorder:
    """Follows every ``torch.optim.Optimizer`` of the process. An optimizer inside another one is part of it.

    It also knows by which factor ``torch.amp.GradScaler`` has multiplied gradients, so that they are recorded without it.
    """

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._scale = 1.0
        self._scale_of_backward = 1.0
        self._unscaled: set[int] = set()  # ids of parameters
        self._optimizers: list[Optimizer] = []
        """In the order of their first steps."""
        self._outermost: Optimizer | None = None
        self._is_in_scaler = False
        self._has_stepped = False
        self._takes_closure = False
        self._stepped: set[int] = set()  # in this update
        recording.wrap(torch.amp.GradScaler, "scale", self._scale_loss)
        recording.wrap(torch.amp.GradScaler, "unscale_", self._unscale)
        recording.wrap(torch.amp.GradScaler, "step", self._step_by_scaler)
        recording.wrap(torch.amp.GradScaler, "update", self._update_scale)
        before = torch_optimizer.register_optimizer_step_pre_hook(self._before_step)
        recording.undo.callback(before.remove)
        recording.undo.callback(torch_optimizer.register_optimizer_step_post_hook(self._after_step).remove)
        hooks: Any = torch_optimizer._global_optimizer_pre_hooks

        def begin_forward(*_: Any) -> None:
            if not self._takes_closure:
                self._outermost = None  # also after a step that has failed
            hooks.move_to_end(before.id)  # after echelon's hook, which reduces the gradients of unprepared optimizers

        recording.on_training_forward.append(begin_forward)
        recording.on_update_closed.append(self._record_states)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._outermost is not None:
            return
        self._outermost = optimizer
        self._takes_closure = (args[1] if len(args) > 1 else kwargs.get("closure")) is not None
        if not self._takes_closure:
            self._record_step(optimizer)

    def _after_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if self._outermost is not optimizer:
            return
        if self._takes_closure:  # the gradients were computed inside the step, and the update has begun in it
            self._record_step(optimizer)
        self._outermost, self._takes_closure = None, False
        self._has_stepped = True
        self._recording.complete_update()

    def _record_step(self, optimizer: Optimizer) -> None:
        if not self._is_in_scaler:
            self._recording.begin_step(optimizer, self.scale_of(parameters_of(optimizer)))
        found: Any = getattr(optimizer, "found_inf", None)  # a fused optimizer skips in its kernel
        self._add_step(optimizer, is_skipped=found is not None and bool(found))

    # ---- loss scalers --------------------------------------------------------------------------------------------------

    def take_scale(self) -> float:
        """Return the scale of the loss of the backward pass that has just ended."""
        scale, self._scale_of_backward = self._scale_of_backward, 1.0
        return scale

    def scale_of(self, parameters: Sequence[torch.Tensor]) -> float:
        """Return the factor that the gradients of ``parameters`` still have."""
        return 1.0 if any(id(one) in self._unscaled for one in parameters) else self._scale

    def _scale_loss(self, scale: Callable[..., Any], scaler: torch.amp.GradScaler, outputs: Any) -> Any:
        scaled = scale(scaler, outputs)
        if scaler.is_enabled():
            self._scale = self._scale_of_backward = float(scaler.get_scale())
        return scaled

    def _unscale(self, unscale: Callable[..., None], scaler: torch.amp.GradScaler, optimizer: Optimizer) -> None:
        unscale(scaler, optimizer)
        if scaler.is_enabled():
            self._unscaled.update(map(id, parameters_of(optimizer)))

    def _update_scale(self, update: Callable[..., None], scaler: torch.amp.GradScaler, new_scale: Any = None) -> None:
        update(scaler, new_scale)
        self._scale = 1.0
        self._unscaled.clear()

    def _step_by_scaler(
        self, step: Callable[..., Any], scaler: torch.amp.GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any
    ) -> Any:
        if not scaler.is_enabled():
            return step(scaler, optimizer, *args, **kwargs)
        self._recording.begin_step(optimizer, self.scale_of(parameters_of(optimizer)))
        self._is_in_scaler, self._has_stepped = True, False
        try:
            result = step(scaler, optimizer, *args, **kwargs)
        finally:
            self._is_in_scaler = False
        if not self._has_stepped:
            self._add_step(optimizer, is_skipped=True)
            self._recording.complete_update()
        return result

    # ---- events --------------------------------------------------------------------------------------------------------

    def _add_step(self, optimizer: Optimizer, *, is_skipped: bool) -> None:
        groups = optimizer.param_groups
        group_of = {
            name: number
            for number, group in enumerate(groups)
            for name in map(self._recording.name_of, group["params"])
            if name is not None
        }
        if all(one is not optimizer for one in self._optimizers):
            self._optimizers.append(optimizer)
        number = next(number for number, one in enumerate(self._optimizers) if one is optimizer)
        self._stepped.add(number)
        self._recording.add(
            OptimizerStep(
                update=self._recording.update,
                lrs=[float(group.get("lr", 0.0)) for group in groups],
                settings=[dict(_settings(group)) for group in groups],
                group_of=group_of,
                is_skipped=is_skipped,
                line=line_of_user(),
            )
        )

    def _record_states(self, update: int) -> None:
        run = self._recording.run
        begun = update - run.first_update
        is_whole = begun < _ALL_AT_FIRST or begun + 1 >= run.steps
        for number in sorted(self._stepped):
            sketches = sketch_optimizer_state(
                self._recording, self._optimizers[number], update=None if is_whole else update
            )
            self._recording.add_tensors("optimizer_state", sketches, update=update)
        self._stepped.clear()


def parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return the parameters of all groups."""
    return [one for group in optimizer.param_groups for one in group["params"]]


def sketch_optimizer_state(recording: Recording, optimizer: Optimizer, *, update: int | None = None) -> NamedSketches:
    """Return sketches of an optimizer's state, by ``model:parameter/key``.

    Args:
        update: leave out large tensors that are not summarized in this update; None: all are.
    """
    inner: Any = getattr(optimizer, "optim", None)
    if not isinstance(inner, Optimizer):
        return sketch_named(*_state(recording, optimizer.state, update))
    return as_shards(
        sketch_named(*_state(recording, inner.state, update))
    )  # of a ZeroRedundancyOptimizer: the parameters of this rank


def _state(recording: Recording, state: Any, update: int | None) -> tuple[list[str], list[torch.Tensor]]:
    names, tensors = [], []
    for parameter, entries in state.items():
        of_parameter = recording.name_of(parameter)
        if of_parameter is None or not isinstance(entries, dict):
            continue
        for key, value in entries.items():
            name = f"{of_parameter}/{key}"
            if isinstance(value, torch.Tensor):
                if update is not None and value.numel() > _LARGE and (_phase(name) + update) % _EVERY:
                    continue
                tensors.append(value)
            elif isinstance(value, (bool, int, float)):
                tensors.append(torch.tensor(value, dtype=torch.float64))
            else:
                continue
            names.append(name)
    return names, tensors


@cache
def _phase(name: str) -> int:
    """Return a number that is the same on all ranks and in all runs."""
    return crc32(name.encode())


def _settings(group: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in group.items():
        if name in ("params", "lr", "initial_lr", "param_names"):
            continue
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()
        if isinstance(value, (tuple, list)):
            value = [float(one) if isinstance(one, torch.Tensor) else one for one in value]
        if value is None or isinstance(value, (bool, int, float, str, list)):
            yield name, value
