"""Level 2: the Accelerator, which runs a user's own training loop on any number of ranks."""

from echelon.compat import torch_required as _torch_required  # noqa: F401 - first, for its error

# isort: split
from echelon.accelerator.accelerator import Accelerator
from echelon.accelerator.gradient_state import GradientState
from echelon.accelerator.out_of_memory import explain_out_of_memory
from echelon.accelerator.plugins.configuration import DataLoaderConfiguration, GradientAccumulationPlugin
from echelon.accelerator.plugins.deepspeed_plugin import DeepSpeedPlugin
from echelon.accelerator.plugins.kwargs_handlers import (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
)
from echelon.accelerator.plugins.parallelism_config import ParallelismConfig
from echelon.accelerator.state import AcceleratorState, PartialState
from echelon.accelerator.update.optimizer import AcceleratedOptimizer
from echelon.accelerator.update.scheduler import AcceleratedScheduler
from echelon.accelerator.weight_average import EMA, SWA
from echelon.compat.enums import DistributedType
from echelon.engines.deepspeed.options import DummyOptim, DummyScheduler

__all__ = [
    "EMA",
    "SWA",
    "AcceleratedOptimizer",
    "AcceleratedScheduler",
    "Accelerator",
    "AcceleratorState",
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
    "ParallelismConfig",
    "PartialState",
    "explain_out_of_memory",
]
