"""Provides the names in ``accelerate.utils.modeling``, implemented by echelon."""

from echelon.accelerator.models.load_pretrained import load_checkpoint_in_model as load_checkpoint_in_model
from echelon.accelerator.models.model_facts import (
    get_grad_scaler as get_grad_scaler,
    get_mixed_precision_context_manager as get_mixed_precision_context_manager,
    is_peft_model as is_peft_model,
    load_state_dict as load_state_dict,
)
from echelon.accelerator.models.save_objects import id_tensor_storage as id_tensor_storage
from echelon.big_models.align_devices import (
    align_module_device as align_module_device,
    has_offloaded_params as has_offloaded_params,
)
from echelon.big_models.device_map import (
    check_device_map as check_device_map,
    clean_device_map as clean_device_map,
    fallback_allocate as fallback_allocate,
    get_module_size_with_ties as get_module_size_with_ties,
    infer_auto_device_map as infer_auto_device_map,
)
from echelon.big_models.device_memory import (
    get_balanced_memory as get_balanced_memory,
    get_max_memory as get_max_memory,
)
from echelon.big_models.module_sizes import (
    calculate_maximum_sizes as calculate_maximum_sizes,
    compute_module_sizes as compute_module_sizes,
    compute_module_total_buffer_size as compute_module_total_buffer_size,
    dtype_byte_size as dtype_byte_size,
    get_max_layer_size as get_max_layer_size,
    get_module_leaves as get_module_leaves,
    get_non_persistent_buffers as get_non_persistent_buffers,
    named_module_tensors as named_module_tensors,
)
from echelon.big_models.offloaded_state import (
    get_state_dict_from_offload as get_state_dict_from_offload,
    get_state_dict_offloaded_model as get_state_dict_offloaded_model,
    load_offloaded_weights as load_offloaded_weights,
)
from echelon.big_models.set_tensor import (
    check_device_same as check_device_same,
    set_module_tensor_to_device as set_module_tensor_to_device,
)
from echelon.big_models.tied_parameters import (
    check_tied_parameters_in_config as check_tied_parameters_in_config,
    check_tied_parameters_on_same_device as check_tied_parameters_on_same_device,
    find_tied_parameters as find_tied_parameters,
    retie_parameters as retie_parameters,
)
from echelon.compat.byte_sizes import convert_file_size_to_int as convert_file_size_to_int
from echelon.compat.constants import WEIGHTS_INDEX_NAME as WEIGHTS_INDEX_NAME
