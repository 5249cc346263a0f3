"""Re-exports the names of ``accelerate.utils.modeling``."""

from echelon.accelerator.models.load_pretrained import load_checkpoint_in_model as load_checkpoint_in_model
from echelon.accelerator.models.model_sizes import (
    check_device_same as check_device_same,
    check_tied_parameters_in_config as check_tied_parameters_in_config,
    compute_module_sizes as compute_module_sizes,
    compute_module_total_buffer_size as compute_module_total_buffer_size,
    convert_file_size_to_int as convert_file_size_to_int,
    dtype_byte_size as dtype_byte_size,
    find_tied_parameters as find_tied_parameters,
    get_grad_scaler as get_grad_scaler,
    get_mixed_precision_context_manager as get_mixed_precision_context_manager,
    get_module_leaves as get_module_leaves,
    get_non_persistent_buffers as get_non_persistent_buffers,
    is_peft_model as is_peft_model,
    load_state_dict as load_state_dict,
    named_module_tensors as named_module_tensors,
    retie_parameters as retie_parameters,
)
from echelon.accelerator.models.save_objects import id_tensor_storage as id_tensor_storage
from echelon.compat import unsupported as _unsupported
from echelon.compat.constants import WEIGHTS_INDEX_NAME as WEIGHTS_INDEX_NAME

_unsupported.add_names(globals())
