"""All parts of a recording."""

from __future__ import annotations

from echelon.verify.recorders.batches import Batches
from echelon.verify.recorders.clipping import ClipRecorder
from echelon.verify.recorders.float64 import Float64
from echelon.verify.recorders.forwards import Forwards
from echelon.verify.recorders.gradients import GradientRecorder
from echelon.verify.recorders.keyed_dropout import KeyedDropout
from echelon.verify.recorders.losses import Losses
from echelon.verify.recorders.merged_batches import MergedBatches
from echelon.verify.recorders.optimizers import OptimizerRecorder
from echelon.verify.recorders.perturbation import Perturbation
from echelon.verify.recorders.saved_states import SavedStateRecorder
from echelon.verify.recorders.sync_batch_norm import SyncBatchNormOnCpu
from echelon.verify.recorders.weights import WeightRecorder
from echelon.verify.recording import Part


def default_parts() -> list[Part]:
    """Return new parts that record everything."""
    batches = Batches()
    return [
        SyncBatchNormOnCpu(),
        MergedBatches(),
        batches,  # samples are recognized before they are cast to float64
        Float64(batches),
        KeyedDropout(batches),
        Forwards(batches),
        Losses(),
        *parts_of_updates(),
        Perturbation(),
    ]


def parts_of_updates() -> list[Part]:
    """Return those that record what happens between a backward pass and the next forward pass."""
    optimizers = OptimizerRecorder()
    gradients = GradientRecorder(optimizers)
    return [WeightRecorder(), gradients, ClipRecorder(gradients), optimizers, SavedStateRecorder()]
