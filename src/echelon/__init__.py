"""One PyTorch training script, three levels of abstraction, any number of ranks, provably the same run."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from echelon._version import __version__

if TYPE_CHECKING:
    from echelon import distributed, ray
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
    from echelon.accelerator.models.load_pretrained import (
        init_empty_weights,
        init_on_device,
        load_checkpoint_and_dispatch,
        load_checkpoint_in_model,
    )
    from echelon.accelerator.plugins.deepspeed_plugin import DeepSpeedPlugin
    from echelon.accelerator.plugins.fsdp_plugin import FullyShardedDataParallelPlugin
    from echelon.accelerator.plugins.parallelism_config import ParallelismConfig
    from echelon.accelerator.prepare.data_loaders import skip_first_batches
    from echelon.accelerator.update.local_sgd import LocalSGD
    from echelon.base.errors import EchelonError
    from echelon.compat.accelerate_unsupported import (
        cpu_offload,
        cpu_offload_with_hook,
        disk_offload,
        dispatch_model,
        infer_auto_device_map,
        prepare_pippy,
    )
    from echelon.data.shared_memory import share_dataset
    from echelon.launch.notebook import debug_launcher, notebook_launcher
    from echelon.trainer import (
        BestRun,
        CallbackHandler,
        DefaultFlowCallback,
        EarlyStoppingCallback,
        EvalLoopOutput,
        EvalPrediction,
        HubStrategy,
        IntervalStrategy,
        NonFiniteError,
        OptimizerNames,
        ParallelMode,
        PredictionOutput,
        PrinterCallback,
        ProgressCallback,
        SaveStrategy,
        SchedulerType,
        Seq2SeqTrainer,
        Seq2SeqTrainingArguments,
        Trainer,
        TrainerCallback,
        TrainerControl,
        TrainerState,
        TrainingArguments,
        TrainOutput,
        default_data_collator,
        get_last_checkpoint,
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
    "BestRun": "echelon.trainer",
    "CallbackHandler": "echelon.trainer",
    "DDPCommunicationHookType": "echelon.utils",
    "DataLoaderConfiguration": "echelon.accelerator",
    "DeepSpeedPlugin": "echelon.accelerator.plugins.deepspeed_plugin",
    "DefaultFlowCallback": "echelon.trainer",
    "DistributedDataParallelKwargs": "echelon.accelerator",
    "DistributedType": "echelon.accelerator",
    "EarlyStoppingCallback": "echelon.trainer",
    "EchelonError": "echelon.base.errors",
    "EvalLoopOutput": "echelon.trainer",
    "EvalPrediction": "echelon.trainer",
    "FullyShardedDataParallelPlugin": "echelon.accelerator.plugins.fsdp_plugin",
    "GradScalerKwargs": "echelon.accelerator",
    "GradientAccumulationPlugin": "echelon.accelerator",
    "HubStrategy": "echelon.trainer",
    "InitProcessGroupKwargs": "echelon.accelerator",
    "IntervalStrategy": "echelon.trainer",
    "LocalSGD": "echelon.accelerator.update.local_sgd",
    "NonFiniteError": "echelon.trainer",
    "OptimizerNames": "echelon.trainer",
    "ParallelMode": "echelon.trainer",
    "ParallelismConfig": "echelon.accelerator.plugins.parallelism_config",
    "PartialState": "echelon.accelerator",
    "PredictionOutput": "echelon.trainer",
    "PrinterCallback": "echelon.trainer",
    "ProfileKwargs": "echelon.utils",
    "ProgressCallback": "echelon.trainer",
    "SaveStrategy": "echelon.trainer",
    "SchedulerType": "echelon.trainer",
    "Seq2SeqTrainer": "echelon.trainer",
    "Seq2SeqTrainingArguments": "echelon.trainer",
    "TrainOutput": "echelon.trainer",
    "Trainer": "echelon.trainer",
    "TrainerCallback": "echelon.trainer",
    "TrainerControl": "echelon.trainer",
    "TrainerState": "echelon.trainer",
    "TrainingArguments": "echelon.trainer",
    "World": "echelon.world.world",
    "accelerator": "",
    "big_modeling": "",
    "checkpointing": "",
    "commands": "",
    "cpu_offload": "echelon.compat.accelerate_unsupported",
    "cpu_offload_with_hook": "echelon.compat.accelerate_unsupported",
    "data_loader": "",
    "debug_launcher": "echelon.launch.notebook",
    "default_data_collator": "echelon.trainer",
    "disk_offload": "echelon.compat.accelerate_unsupported",
    "dispatch_model": "echelon.compat.accelerate_unsupported",
    "distributed": "",
    "find_executable_batch_size": "echelon.utils",
    "get_last_checkpoint": "echelon.trainer",
    "get_scheduler": "echelon.trainer",
    "hooks": "",
    "infer_auto_device_map": "echelon.compat.accelerate_unsupported",
    "inference": "",
    "init_empty_weights": "echelon.accelerator.models.load_pretrained",
    "init_on_device": "echelon.accelerator.models.load_pretrained",
    "launchers": "",
    "load_checkpoint_and_dispatch": "echelon.accelerator.models.load_pretrained",
    "load_checkpoint_in_model": "echelon.accelerator.models.load_pretrained",
    "local_sgd": "",
    "logging": "",
    "notebook_launcher": "echelon.launch.notebook",
    "optimizer": "",
    "parallelism_config": "",
    "prepare_pippy": "echelon.compat.accelerate_unsupported",
    "ray": "",
    "scheduler": "",
    "set_seed": "echelon.world.seed",
    "share_dataset": "echelon.data.shared_memory",
    "skip_first_batches": "echelon.accelerator.prepare.data_loaders",
    "state": "",
    "synchronize_rng_states": "echelon.utils",
    "tracking": "",
    "utils": "",
}

__all__ = [
    "Accelerator",
    "AutocastKwargs",
    "BestRun",
    "CallbackHandler",
    "DDPCommunicationHookType",
    "DataLoaderConfiguration",
    "DeepSpeedPlugin",
    "DefaultFlowCallback",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "EarlyStoppingCallback",
    "EchelonError",
    "EvalLoopOutput",
    "EvalPrediction",
    "FullyShardedDataParallelPlugin",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "HubStrategy",
    "InitProcessGroupKwargs",
    "IntervalStrategy",
    "LocalSGD",
    "NonFiniteError",
    "OptimizerNames",
    "ParallelMode",
    "ParallelismConfig",
    "PartialState",
    "PredictionOutput",
    "PrinterCallback",
    "ProfileKwargs",
    "ProgressCallback",
    "SaveStrategy",
    "SchedulerType",
    "Seq2SeqTrainer",
    "Seq2SeqTrainingArguments",
    "TrainOutput",
    "Trainer",
    "TrainerCallback",
    "TrainerControl",
    "TrainerState",
    "TrainingArguments",
    "World",
    "__version__",
    "cpu_offload",
    "cpu_offload_with_hook",
    "debug_launcher",
    "default_data_collator",
    "disk_offload",
    "dispatch_model",
    "distributed",
    "find_executable_batch_size",
    "get_last_checkpoint",
    "get_scheduler",
    "infer_auto_device_map",
    "init_empty_weights",
    "init_on_device",
    "load_checkpoint_and_dispatch",
    "load_checkpoint_in_model",
    "notebook_launcher",
    "prepare_pippy",
    "ray",
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
