"""Level 2: the user's own loop on any number of ranks. Floor 8."""

from echelon.accelerator.accelerator import Accelerator
from echelon.accelerator.deepspeed_plugin import DeepSpeedPlugin
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
from echelon.engines.deepspeed_options import DummyOptim, DummyScheduler

__all__ = [
    "AcceleratedOptimizer",
    "AcceleratedScheduler",
    "Accelerator",
    "AutocastKwargs",
    "DataLoaderConfiguration",
    "DeepSpeedPlugin",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "DummyOptim",
    "DummyScheduler",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "GradientState",
    "InitProcessGroupKwargs",
    "PartialState",
]
