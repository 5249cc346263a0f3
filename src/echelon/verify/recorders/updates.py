"""Records what happens between a backward pass and the next forward pass."""

from __future__ import annotations

from collections.abc import Callable

from echelon.verify.recorders.clipping import ClipRecorder
from echelon.verify.recorders.gradients import GradientRecorder
from echelon.verify.recorders.loss_scales import LossScales
from echelon.verify.recorders.optimizers import OptimizerRecorder
from echelon.verify.recorders.saved_states import SavedStateRecorder
from echelon.verify.recorders.weights import WeightRecorder
from echelon.verify.recording import Part, Recording

__all__ = ["UpdateRecorder"]


class UpdateRecorder:
    """Gradients, clipping, optimizers, weights and saved states, which share what they know."""

    def install(self, recording: Recording) -> Callable[[], None]:
        scales = LossScales()
        gradients = GradientRecorder(scales)
        parts: list[Part] = [
            WeightRecorder(),
            gradients,
            ClipRecorder(gradients),
            OptimizerRecorder(scales),
            SavedStateRecorder(),
        ]
        removals = [scales.install(), *(part.install(recording) for part in parts)]

        def remove() -> None:
            for one in reversed(removals):
                one()

        return remove
