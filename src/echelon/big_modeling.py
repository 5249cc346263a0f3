"""Provides the names in ``accelerate.big_modeling``, implemented by echelon."""

from echelon.accelerator.models.load_pretrained import load_checkpoint_and_dispatch as load_checkpoint_and_dispatch
from echelon.big_models.cpu_offload import cpu_offload_with_hook as cpu_offload_with_hook
from echelon.big_models.device_map import check_device_map as check_device_map
from echelon.big_models.dispatch import (
    cpu_offload as cpu_offload,
    disk_offload as disk_offload,
    dispatch_model as dispatch_model,
)
from echelon.big_models.empty_weights import init_empty_weights as init_empty_weights, init_on_device as init_on_device
from echelon.big_models.layerwise_casting import attach_layerwise_casting_hooks as attach_layerwise_casting_hooks
