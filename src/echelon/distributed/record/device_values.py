"""Losses and gradient norms that a device is still computing, which the records receive without waiting for it."""

from __future__ import annotations

import time
from typing import TypeAlias, final

import torch

from echelon.base.device import is_capturing
from echelon.status.step_records import StepRecorder

_MAX_STEPS = 64
_MAX_LOSSES = 1024
_EVERY_NS = 10**9
_LONGEST_WAIT_S = 1.0
_POLL_S = 0.001
_Place: TypeAlias = tuple[int, int, int, bool]
"""Place of a step's record; how many of the values are losses, or sums of losses; number of losses; whether a norm follows."""


@final
class DeviceValues:
    """Values of the last steps. They are copied to the host at most once a second; a copy is read after it has arrived."""

    def __init__(self) -> None:
        self._device: torch.device | None = None
        """Device of the first value. Others may be elsewhere: a model spread over devices has its loss on the last one."""
        self._losses: list[torch.Tensor] = []
        self._num_losses = 0
        self._norm: torch.Tensor | None = None
        self._places: list[_Place] = []
        self._values: list[torch.Tensor] = []
        self._copy: _Copy | None = None
        self._next_ns = 0

    def add_loss(self, loss: torch.Tensor) -> None:
        """Add the loss of a micro-step of the current step."""
        if (value := self._copied(loss)) is None:
            return
        self._losses.append(value)
        self._num_losses += 1
        if len(self._losses) >= _MAX_LOSSES:  # the program may not step any optimizer that is recorded
            self._losses = [torch.stack(self._losses).sum()]

    def set_norm(self, norm: torch.Tensor) -> None:
        """Set the norm of the current step's gradients."""
        self._norm = self._copied(norm)

    def _copied(self, value: torch.Tensor) -> torch.Tensor | None:
        if is_capturing(value.device):
            return None  # a graph that is captured computes nothing, and reading the results would end the capture
        if self._device is None:
            self._device = value.device
        # A copy, because the next replay of a CUDA graph writes its loss into the same memory.
        return value.detach().to(self._device, torch.float32, non_blocking=True, copy=True)

    def end_step(self, steps: StepRecorder, place: int) -> None:
        """Assign the current step's values to the record at ``place``, and fill in those that have arrived."""
        if self._losses or self._norm is not None:
            self._places.append((place, len(self._losses), self._num_losses, self._norm is not None))
            self._values += self._losses
            if self._norm is not None:
                self._values.append(self._norm)
            self._losses, self._num_losses, self._norm = [], 0, None
        if self._device is None or is_capturing(self._device):
            return
        now = time.monotonic_ns()
        if self._copy is not None and self._copy.is_finished():
            self._copy.fill_in(steps)
            self._copy = None
        if self._copy is None and self._places and (len(self._places) >= _MAX_STEPS or now >= self._next_ns):
            self._next_ns = now + _EVERY_NS
            self._copy, self._places, self._values = _Copy(self._places, self._values), [], []

    def fill_in_all(self, steps: StepRecorder) -> None:
        """Fill in everything. Waits for the device, but not for long: a failed collective may occupy it forever."""
        deadline = time.monotonic() + _LONGEST_WAIT_S
        for copy in (self._copy, _Copy(self._places, self._values) if self._places else None):
            while copy is not None and not (is_finished := copy.is_finished()) and time.monotonic() < deadline:
                time.sleep(_POLL_S)
            if copy is not None and is_finished:
                copy.fill_in(steps)
        self._copy, self._places, self._values = None, [], []


class _Copy:
    """A copy of the values of several steps to the host. A CUDA device writes it while the program continues."""

    def __init__(self, places: list[_Place], values: list[torch.Tensor]) -> None:
        self._places = places
        self._event: torch.Event | None = None
        stacked = torch.stack(values) if values else torch.empty(0)
        if stacked.device.type != "cuda":
            self._host = stacked.cpu()
            return
        self._host = torch.empty(len(values), pin_memory=True)
        self._host.copy_(stacked, non_blocking=True)
        self._event = torch.Event(stacked.device)
        self._event.record()

    def is_finished(self) -> bool:
        """Return whether the values have arrived."""
        return self._event is None or bool(self._event.query())

    def fill_in(self, steps: StepRecorder) -> None:
        """Complete the records with the values, which have arrived."""
        numbers = iter(self._host.tolist())
        for place, num_sums, num_losses, has_norm in self._places:
            losses = [next(numbers) for _ in range(num_sums)]
            if num_losses:
                steps.fill_loss(place, sum(losses) / num_losses, num_losses)
            if has_norm:
                steps.fill_norm(place, next(numbers))
