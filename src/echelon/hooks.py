"""Provides the names in ``accelerate.hooks``, implemented by echelon."""

from echelon.big_models.align_devices import (
    AlignDevicesHook as AlignDevicesHook,
    attach_align_device_hook as attach_align_device_hook,
    attach_align_device_hook_on_blocks as attach_align_device_hook_on_blocks,
    attach_execution_device_hook as attach_execution_device_hook,
)
from echelon.big_models.cpu_offload import CpuOffload as CpuOffload, UserCpuOffloadHook as UserCpuOffloadHook
from echelon.big_models.hooks import (
    ModelHook as ModelHook,
    SequentialHook as SequentialHook,
    add_hook_to_module as add_hook_to_module,
    remove_hook_from_module as remove_hook_from_module,
    remove_hook_from_submodules as remove_hook_from_submodules,
)
from echelon.big_models.layerwise_casting import LayerwiseCastingHook as LayerwiseCastingHook
