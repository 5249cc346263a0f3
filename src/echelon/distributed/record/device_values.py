"""Losses and gradient norms that a device is still computing, which the records receive without waiting for it."""

from __future__ import annotations

import time
from typing import final

import torch

from echelon.status.step_records import StepRecorder

__all__ = ["DeviceValues"]

_MAX_STEPS = 64
_EVERY_NS = 10**9
_LONGEST_WAIT_S = 1.0
_POLL_S = 0.001


@final
class DeviceValues:
    """Values of the last steps. They are copied to the host at most once a second; a copy is read after it has arrived."""

    def __init__(self) -> None:
        self._losses: list[torch.Tensor] = []
        self._norm: torch.Tensor | None = None
        self._places: list[tuple[int, int, bool]] = []
        """Place, number of losses, and whether there is a norm, for each step with ``_values``."""
        self._values: list[torch.Tensor] = []
        self._copy: _Copy | None = None
        self._next_ns = 0

    def add_loss(self, loss: torch.Tensor) -> None:
        """Add the loss of a micro-step of the current step."""
        # A copy, because the next replay of a CUDA graph writes its loss into the same memory.
        self._losses.append(loss.detach().to(torch.float32, copy=True))

    def set_norm(self, norm: torch.Tensor) -> None:
        """Set the norm of the current step's gradients."""
        self._norm = norm.detach().to(torch.float32, copy=True)

    def end_step(self, steps: StepRecorder, place: int) -> None:
        """Assign the current step's values to the record at ``place``, and fill in those that have arrived."""
        self._places.append((place, len(self._losses), self._norm is not None))
        self._values += self._losses
        if self._norm is not None:
            self._values.append(self._norm)
        self._losses, self._norm = [], None
        now = time.monotonic_ns()
        if self._copy is not None and self._copy.is_finished():
            self._copy.fill_in(steps)
            self._copy = None
        if self._copy is None and (len(self._places) >= _MAX_STEPS or now >= self._next_ns):
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

    def __init__(self, places: list[tuple[int, int, bool]], values: list[torch.Tensor]) -> None:
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
        for place, num_losses, has_norm in self._places:
            losses = [next(numbers) for _ in range(num_losses)]
            if losses:
                steps.fill_loss(place, sum(losses) / num_losses, num_losses)
            if has_norm:
                steps.fill_norm(place, next(numbers))
