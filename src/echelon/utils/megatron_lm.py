"""The names of ``accelerate.utils.megatron_lm``, so that its scripts run: re-exports only."""

from __future__ import annotations

from echelon.compat.accelerate_unsupported import (
    AbstractTrainStep,
    BertTrainStep,
    GPTTrainStep,
    MegatronEngine,
    MegatronLMDummyDataLoader,
    MegatronLMDummyScheduler,
    MegatronLMOptimizerWrapper,
    MegatronLMSchedulerWrapper,
    T5TrainStep,
    avg_losses_across_data_parallel_group,
    finish_mpu_init,
    gather_across_data_parallel_groups,
    model_provider_func,
)
from echelon.compat.accelerate_unsupported import megatron_lm_initialize as initialize
from echelon.compat.accelerate_unsupported import megatron_lm_prepare_data_loader as prepare_data_loader
from echelon.compat.accelerate_unsupported import (
    megatron_lm_prepare_model_optimizer_scheduler as prepare_model_optimizer_scheduler,
)
from echelon.compat.accelerate_unsupported import megatron_lm_prepare_optimizer as prepare_optimizer
from echelon.compat.accelerate_unsupported import megatron_lm_prepare_scheduler as prepare_scheduler

__all__ = [
    "AbstractTrainStep",
    "BertTrainStep",
    "GPTTrainStep",
    "MegatronEngine",
    "MegatronLMDummyDataLoader",
    "MegatronLMDummyScheduler",
    "MegatronLMOptimizerWrapper",
    "MegatronLMSchedulerWrapper",
    "T5TrainStep",
    "avg_losses_across_data_parallel_group",
    "finish_mpu_init",
    "gather_across_data_parallel_groups",
    "initialize",
    "model_provider_func",
    "prepare_data_loader",
    "prepare_model_optimizer_scheduler",
    "prepare_optimizer",
    "prepare_scheduler",
]
