"""The names of ``accelerate.utils.deepspeed``, so that its scripts run: re-exports only."""

from __future__ import annotations

from echelon.accelerator.plugins.deepspeed_plugin import (
    DeepSpeedEngineWrapper,
    DeepSpeedOptimizerWrapper,
    DeepSpeedSchedulerWrapper,
    get_active_deepspeed_plugin,
    map_pytorch_optim_to_deepspeed,
)
from echelon.engines.deepspeed.ds_config import (
    HfDeepSpeedConfig,
)
from echelon.engines.deepspeed.options import (
    DummyOptim,
    DummyScheduler,
)

__all__ = [
    "DeepSpeedEngineWrapper",
    "DeepSpeedOptimizerWrapper",
    "DeepSpeedSchedulerWrapper",
    "DummyOptim",
    "DummyScheduler",
    "HfDeepSpeedConfig",
    "get_active_deepspeed_plugin",
    "map_pytorch_optim_to_deepspeed",
]
