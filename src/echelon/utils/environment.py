"""Provides the names in ``accelerate.utils.environment``, implemented by echelon."""

from echelon.compat import unsupported as _unsupported
from echelon.compat.machine import (
    check_cuda_fp8_capability as check_cuda_fp8_capability,
    check_cuda_p2p_ib_support as check_cuda_p2p_ib_support,
    get_current_device_type as get_current_device_type,
    get_driver_version as get_driver_version,
    get_gpu_info as get_gpu_info,
)
from echelon.compat.variables import (
    are_libraries_initialized as are_libraries_initialized,
    clear_environment as clear_environment,
    convert_dict_to_env_variables as convert_dict_to_env_variables,
    get_int_from_env as get_int_from_env,
    parse_choice_from_env as parse_choice_from_env,
    parse_flag_from_env as parse_flag_from_env,
    patch_environment as patch_environment,
    purge_accelerate_environment as purge_accelerate_environment,
    str_to_bool as str_to_bool,
)
from echelon.world.environment import (
    CPUInformation as CPUInformation,
    get_cpu_distributed_information as get_cpu_distributed_information,
)

_unsupported.add_names(globals())
