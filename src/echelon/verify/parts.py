"""All parts of a recording, and which of them a child process installs."""

from __future__ import annotations

import json
from pathlib import Path

from echelon.verify.recorders.batches import Batches
from echelon.verify.recorders.float64 import Float64
from echelon.verify.recorders.forwards import Forwards
from echelon.verify.recorders.keyed_dropout import KeyedDropout
from echelon.verify.recorders.losses import Losses
from echelon.verify.recorders.merged_batches import MergedBatches
from echelon.verify.recorders.rng_states import RngStates
from echelon.verify.recorders.updates import UpdateRecorder
from echelon.verify.recording import Part
from echelon.verify.reference_parts.merged_schedules import MergedSchedules
from echelon.verify.reference_parts.perturbation import GradientPerturbation, Perturbation
from echelon.verify.reference_parts.unprepared_lengths import UnpreparedLengths
from echelon.verify.sync_batch_norm import SyncBatchNormOnCpu

__all__ = ["default_parts"]


def default_parts(*, perturbation: int = 0, gradient_errors: Path | None = None) -> list[Part]:
    """Return new parts that record everything.

    Args:
        perturbation: seed of a change of all weights by one rounding, and of all gradients; 0: none.
        gradient_errors: JSON file with the change of each gradient, as a part of its norm.
    """
    parts = [
        SyncBatchNormOnCpu(),
        *_parts_of_data(),
        Perturbation(perturbation),
        MergedSchedules(),
        UnpreparedLengths(),
        UpdateRecorder(),
    ]
    if perturbation and gradient_errors is not None:
        # After the recorder of updates: the gradients are recorded before they are changed.
        parts.append(GradientPerturbation(perturbation, json.loads(gradient_errors.read_text(encoding="utf-8"))))
    return parts


def _parts_of_data() -> list[Part]:
    batches = Batches()
    dropout = KeyedDropout(batches)
    # Samples are recognized before they are cast to float64.
    return [MergedBatches(), batches, Float64(batches), dropout, Forwards(batches), RngStates(dropout), Losses()]
