"""Provides the names in ``accelerate.utils.dataclasses``, implemented by echelon."""

from echelon.accelerator.models.quantize import BnbQuantizationConfig as BnbQuantizationConfig
from echelon.accelerator.plugins.configuration import (
    DataLoaderConfiguration as DataLoaderConfiguration,
    GradientAccumulationPlugin as GradientAccumulationPlugin,
    TorchDynamoPlugin as TorchDynamoPlugin,
)
from echelon.accelerator.plugins.deepspeed_plugin import DeepSpeedPlugin as DeepSpeedPlugin
from echelon.accelerator.plugins.fsdp_plugin import FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin
from echelon.accelerator.plugins.kwargs_handlers import (
    AORecipeKwargs as AORecipeKwargs,
    AutocastKwargs as AutocastKwargs,
    DistributedDataParallelKwargs as DistributedDataParallelKwargs,
    GradScalerKwargs as GradScalerKwargs,
    InitProcessGroupKwargs as InitProcessGroupKwargs,
    KwargsHandler as KwargsHandler,
    ProfileKwargs as ProfileKwargs,
    ProfilerActivity as ProfilerActivity,
)
from echelon.accelerator.plugins.parallelism_config import (
    DeepSpeedSequenceParallelConfig as DeepSpeedSequenceParallelConfig,
    TorchContextParallelConfig as TorchContextParallelConfig,
    TorchTensorParallelConfig as TorchTensorParallelConfig,
)
from echelon.accelerator.plugins.project_configuration import ProjectConfiguration as ProjectConfiguration
from echelon.compat import unsupported as _unsupported
from echelon.compat.enums import *
from echelon.distributed.structure import TensorInformation as TensorInformation

_unsupported.add_names(globals())
