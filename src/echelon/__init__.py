"""One PyTorch training script, three levels of abstraction, any number of ranks, provably the same run."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from echelon._version import __version__

if TYPE_CHECKING:
    from echelon import distributed
    from echelon.accelerator import (
        Accelerator,
        AutocastKwargs,
        DataLoaderConfiguration,
        DistributedDataParallelKwargs,
        DistributedType,
        GradientAccumulationPlugin,
        GradScalerKwargs,
        InitProcessGroupKwargs,
        PartialState,
    )
    from echelon.accelerator.loaders import skip_first_batches
    from echelon.accelerator.local_sgd import LocalSGD
    from echelon.base.errors import EchelonError
    from echelon.data.share import share_dataset
    from echelon.launch.notebook import debug_launcher, notebook_launcher
    from echelon.trainer import (
        CallbackHandler,
        DefaultFlowCallback,
        EarlyStoppingCallback,
        EvalLoopOutput,
        EvalPrediction,
        HubStrategy,
        IntervalStrategy,
        OptimizerNames,
        ParallelMode,
        PredictionOutput,
        PrinterCallback,
        ProgressCallback,
        SaveStrategy,
        SchedulerType,
        Trainer,
        TrainerCallback,
        TrainerControl,
        TrainerState,
        TrainingArguments,
        TrainOutput,
        default_data_collator,
        get_scheduler,
    )
    from echelon.utils import (
        DDPCommunicationHookType,
        ProfileKwargs,
        find_executable_batch_size,
        synchronize_rng_states,
    )
    from echelon.world.seed import set_seed
    from echelon.world.world import World

# Public name -> module that holds it ("" = the name is itself a module). Loaded on first use (PEP 562): `import echelon`
# costs milliseconds, and `echelon --help` never pays for torch.
_LAZY = {
    "Accelerator": "echelon.accelerator",
    "AutocastKwargs": "echelon.accelerator",
    "CallbackHandler": "echelon.trainer",
    "DDPCommunicationHookType": "echelon.utils",
    "DataLoaderConfiguration": "echelon.accelerator",
    "DefaultFlowCallback": "echelon.trainer",
    "DistributedDataParallelKwargs": "echelon.accelerator",
    "DistributedType": "echelon.accelerator",
    "EarlyStoppingCallback": "echelon.trainer",
    "EchelonError": "echelon.base.errors",
    "EvalLoopOutput": "echelon.trainer",
    "EvalPrediction": "echelon.trainer",
    "GradScalerKwargs": "echelon.accelerator",
    "GradientAccumulationPlugin": "echelon.accelerator",
    "HubStrategy": "echelon.trainer",
    "InitProcessGroupKwargs": "echelon.accelerator",
    "IntervalStrategy": "echelon.trainer",
    "LocalSGD": "echelon.accelerator.local_sgd",
    "OptimizerNames": "echelon.trainer",
    "ParallelMode": "echelon.trainer",
    "PartialState": "echelon.accelerator",
    "PredictionOutput": "echelon.trainer",
    "PrinterCallback": "echelon.trainer",
    "ProfileKwargs": "echelon.utils",
    "ProgressCallback": "echelon.trainer",
    "SaveStrategy": "echelon.trainer",
    "SchedulerType": "echelon.trainer",
    "TrainOutput": "echelon.trainer",
    "Trainer": "echelon.trainer",
    "TrainerCallback": "echelon.trainer",
    "TrainerControl": "echelon.trainer",
    "TrainerState": "echelon.trainer",
    "TrainingArguments": "echelon.trainer",
    "World": "echelon.world.world",
    "debug_launcher": "echelon.launch.notebook",
    "default_data_collator": "echelon.trainer",
    "distributed": "",
    "find_executable_batch_size": "echelon.utils",
    "get_scheduler": "echelon.trainer",
    "notebook_launcher": "echelon.launch.notebook",
    "set_seed": "echelon.world.seed",
    "share_dataset": "echelon.data.share",
    "skip_first_batches": "echelon.accelerator.loaders",
    "synchronize_rng_states": "echelon.utils",
}

__all__ = [
    "Accelerator",
    "AutocastKwargs",
    "CallbackHandler",
    "DDPCommunicationHookType",
    "DataLoaderConfiguration",
    "DefaultFlowCallback",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "EarlyStoppingCallback",
    "EchelonError",
    "EvalLoopOutput",
    "EvalPrediction",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "HubStrategy",
    "InitProcessGroupKwargs",
    "IntervalStrategy",
    "LocalSGD",
    "OptimizerNames",
    "ParallelMode",
    "PartialState",
    "PredictionOutput",
    "PrinterCallback",
    "ProfileKwargs",
    "ProgressCallback",
    "SaveStrategy",
    "SchedulerType",
    "TrainOutput",
    "Trainer",
    "TrainerCallback",
    "TrainerControl",
    "TrainerState",
    "TrainingArguments",
    "World",
    "__version__",
    "debug_launcher",
    "default_data_collator",
    "distributed",
    "find_executable_batch_size",
    "get_scheduler",
    "notebook_launcher",
    "set_seed",
    "share_dataset",
    "skip_first_batches",
    "synchronize_rng_states",
]


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module 'echelon' has no attribute {name!r}")
    module = _LAZY[name]
    value: object = getattr(import_module(module), name) if module else import_module(f"echelon.{name}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
