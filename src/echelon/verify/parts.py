"""All parts of a recording. Each registers its callbacks, and patches torch, when it is constructed."""

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
from echelon.verify.recorders.sync_batch_norm import run_sync_batch_norm_on_cpu
from echelon.verify.recorders.weights import WeightRecorder
from echelon.verify.recording import Recording


def record_everything(recording: Recording) -> None:
    """Record all aspects of a run, as its settings say."""
    run_sync_batch_norm_on_cpu(recording)
    if recording.run.batch_factor > 1:
        MergedBatches(recording)
    batches = Batches(recording)  # samples are recognized before they are cast to float64
    if recording.run.is_float64:
        Float64(recording, batches)
    KeyedDropout(recording, batches)
    Forwards(recording, batches)
    Losses(recording)
    WeightRecorder(recording)
    optimizers = OptimizerRecorder(recording)
    gradients = GradientRecorder(recording, optimizers)
    ClipRecorder(recording, gradients)
    SavedStateRecorder(recording)
    if recording.run.perturbation:
        Perturbation(recording)  # gradients are recorded before they are changed
