"""Provides the names in ``accelerate.utils.other``, implemented by echelon."""

from echelon.accelerator.compile import (
    compile_regions as compile_regions,
    compile_regions_deepspeed as compile_regions_deepspeed,
    compile_regions_fsdp2 as compile_regions_fsdp2,
    has_compiled_regions as has_compiled_regions,
    has_repeated_blocks as has_repeated_blocks,
    is_compiled_module as is_compiled_module,
    is_repeated_blocks as is_repeated_blocks,
)
from echelon.accelerator.models.model_facts import (
    get_model_tp_size as get_model_tp_size,
    get_module_children_bottom_up as get_module_children_bottom_up,
    model_has_dtensor as model_has_dtensor,
    recursive_getattr as recursive_getattr,
)
from echelon.accelerator.models.save_objects import (
    clean_state_dict_for_safetensors as clean_state_dict_for_safetensors,
    extract_model_from_parallel as extract_model_from_parallel,
    save as save,
)
from echelon.checkpoint.formats.torch_files import load as load
from echelon.compat.machine import (
    check_os_kernel as check_os_kernel,
    convert_bytes as convert_bytes,
    get_free_port as get_free_port,
    get_pretty_name as get_pretty_name,
    is_port_in_use as is_port_in_use,
    merge_dicts as merge_dicts,
)
from echelon.distributed.control import barrier as _barrier

wait_for_everyone = _barrier
