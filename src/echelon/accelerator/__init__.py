"""Level 2: the user's own loop on any number of ranks. Floor 9."""

from echelon.accelerator.accelerator import Accelerator
from echelon.accelerator.enums import DistributedType
from echelon.accelerator.gradient_state import GradientState
from echelon.accelerator.handlers import (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
)
from echelon.accelerator.optimizer import AcceleratedOptimizer
from echelon.accelerator.plugins import DataLoaderConfiguration, GradientAccumulationPlugin
from echelon.accelerator.scheduler import AcceleratedScheduler
from echelon.accelerator.state import PartialState

__all__ = [
    "AcceleratedOptimizer",
    "AcceleratedScheduler",
    "Accelerator",
    "AutocastKwargs",
    "DataLoaderConfiguration",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "GradientState",
    "InitProcessGroupKwargs",
    "PartialState",
]
