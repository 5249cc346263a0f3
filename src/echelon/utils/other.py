"""The names of ``accelerate.utils.other``, so that its scripts run: re-exports only."""

from __future__ import annotations

from echelon.accelerator.models.model_sizes import (
    get_model_tp_size,
    get_module_children_bottom_up,
    model_has_dtensor,
    recursive_getattr,
)
from echelon.accelerator.models.save_objects import (
    clean_state_dict_for_safetensors,
    extract_model_from_parallel,
    save,
)
from echelon.accelerator.prepare.compile import (
    compile_regions,
    compile_regions_deepspeed,
    compile_regions_fsdp2,
    has_compiled_regions,
    has_repeated_blocks,
    is_compiled_module,
    is_repeated_blocks,
)
from echelon.checkpoint.formats.torch_files import load
from echelon.compat.machine import (
    check_os_kernel,
    convert_bytes,
    get_free_port,
    get_pretty_name,
    is_port_in_use,
    merge_dicts,
)
from echelon.distributed.control import barrier as wait_for_everyone

__all__ = [
    "check_os_kernel",
    "clean_state_dict_for_safetensors",
    "compile_regions",
    "compile_regions_deepspeed",
    "compile_regions_fsdp2",
    "convert_bytes",
    "extract_model_from_parallel",
    "get_free_port",
    "get_model_tp_size",
    "get_module_children_bottom_up",
    "get_pretty_name",
    "has_compiled_regions",
    "has_repeated_blocks",
    "is_compiled_module",
    "is_port_in_use",
    "is_repeated_blocks",
    "load",
    "merge_dicts",
    "model_has_dtensor",
    "recursive_getattr",
    "save",
    "wait_for_everyone",
]
