"""Provides the names in ``accelerate.utils.deepspeed``, implemented by echelon."""

from echelon.accelerator.plugins.deepspeed_plugin import (
    DeepSpeedEngineWrapper as DeepSpeedEngineWrapper,
    DeepSpeedOptimizerWrapper as DeepSpeedOptimizerWrapper,
    DeepSpeedSchedulerWrapper as DeepSpeedSchedulerWrapper,
    get_active_deepspeed_plugin as get_active_deepspeed_plugin,
    map_pytorch_optim_to_deepspeed as map_pytorch_optim_to_deepspeed,
)
from echelon.engines.deepspeed.config import HfDeepSpeedConfig as HfDeepSpeedConfig
from echelon.engines.deepspeed.options import DummyOptim as DummyOptim, DummyScheduler as DummyScheduler
