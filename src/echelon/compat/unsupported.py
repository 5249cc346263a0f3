"""Accelerate names that echelon does not support; importing one works, but using it raises an error."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from typing import Any, NoReturn

from echelon.base.errors import UsageError
from echelon.base.messages.translation import gettext as _

TPU_ALTERNATIVE = (
    "train on CPUs or on accelerators that torch.accelerator supports (CUDA, ROCm, XPU, NPU, MPS), or implement an "
    "Engine for torch_xla and pass it as Accelerator(engine=MyEngine(...)) or, after registering it under the entry "
    "point 'echelon.engines', by name"
)

# Alternative -> module path -> names. In `a=b`, `b` is the name in the module and `a` the name in `echelon.utils`.
_NAMES: dict[str, dict[str, str]] = {
    "split the batch instead: accelerator.split_between_processes": {
        "inference": "build_pipeline find_pippy_batch_size generate_device_map pippy_forward",
    },
    "pass FullyShardedDataParallelPlugin() to the Accelerator; prepare() then shards the model": {
        "utils.dataclasses": "get_module_class_from_name",
        "utils.fsdp_utils": """
            ensure_weights_retied fsdp2_apply_ac fsdp2_canonicalize_names fsdp2_load_full_state_dict
            fsdp2_prepare_auto_wrap_policy fsdp2_prepare_model fsdp2_switch_optimizer_parameters get_fsdp2_grad_scaler
            get_parameters_from_modules load_fsdp_model load_fsdp_optimizer save_fsdp_model save_fsdp_optimizer
        """,
    },
    "remove it; data parallelism, sharded or not, runs on any number of processes": {
        "utils.dataclasses": """
            TorchTensorParallelPlugin
        """,
    },
    "remove it; to shard the model, use FullyShardedDataParallelPlugin or DeepSpeedPlugin": {
        "utils.dataclasses": """
            MegatronLMPlugin add_model_config_to_megatron_parser parse_bert_config parse_glm4_moe_config parse_gpt2_config
            parse_llama_config parse_t5_config
        """,
        "utils.megatron_lm": """
            AbstractTrainStep BertTrainStep GPTTrainStep MegatronEngine MegatronLMDummyDataLoader MegatronLMDummyScheduler
            MegatronLMOptimizerWrapper MegatronLMSchedulerWrapper T5TrainStep avg_losses_across_data_parallel_group
            finish_mpu_init gather_across_data_parallel_groups megatron_lm_initialize=initialize model_provider_func
            megatron_lm_prepare_data_loader=prepare_data_loader
            megatron_lm_prepare_model_optimizer_scheduler=prepare_model_optimizer_scheduler
            megatron_lm_prepare_optimizer=prepare_optimizer megatron_lm_prepare_scheduler=prepare_scheduler
        """,
    },
    "call load_and_quantize_model": {
        "utils.bnb": """
            get_keys_to_not_convert get_parameter_device get_quantized_model_device_map quantize_and_offload_8bit
            replace_with_bnb_layers
        """,
    },
    "use mixed_precision='bf16', or fp8 through torchao (AORecipeKwargs)": {
        "utils.dataclasses": "FP8RecipeKwargs MSAMPRecipeKwargs TERecipeKwargs",
        "utils.transformer_engine": """
            apply_fp8_autowrap contextual_fp8_autocast convert_model has_transformer_engine_layers
        """,
    },
    "start the script with echelon launch, or use notebook_launcher": {
        "utils.launch": """
            PrepareForLaunch env_var_path_add prepare_deepspeed_cmd_env prepare_extend_env_parallelism_config
            prepare_multi_gpu_env prepare_sagemager_args_inputs prepare_simple_launcher_cmd_env setup_fp8_env
        """,
    },
    TPU_ALTERNATIVE: {"utils.launch": "prepare_tpu", "utils.torch_xla": "install_xla"},
    "bind processes to cores with echelon launch --enable_cpu_affinity, or set ACCELERATE_CPU_AFFINITY=1": {
        "utils.environment": "override_numa_affinity set_numa_affinity",
    },
    "pass the settings as echelon launch flags, or in a file with --config_file": {
        "commands.config.config_args": "BaseConfig SageMakerConfig",
    },
}
# Name -> alternative.
ALTERNATIVES: dict[str, str] = {
    entry.partition("=")[0]: do for do, paths in _NAMES.items() for names in paths.values() for entry in names.split()
}


class UnsupportedClass:
    """Base class of unsupported classes; neither they nor their subclasses can be instantiated."""

    _do: str

    def __new__(cls, *args: object, **kwargs: object) -> NoReturn:
        """Raise the error."""
        raise _error(cls.__name__, cls._do)


def __getattr__(name: str) -> Any:
    if name not in ALTERNATIVES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _placeholder(name)


def add_names(namespace: dict[str, Any]) -> None:
    """Add a module's unsupported names to its ``globals()``."""
    path = namespace["__name__"].removeprefix("echelon.")
    namespace.update({alias: _placeholder(name) for name, alias in _entries(path)})


def add_modules(namespace: dict[str, Any], *modules: str) -> None:
    """Create submodules that have only unsupported names, and add the names to the package's ``globals()``.

    ``import package.module`` finds them, because the import system checks ``sys.modules`` after importing the parent.
    """
    for module in modules:
        full_name = f"{namespace['__name__']}.{module}"
        submodule = module_from_spec(ModuleSpec(full_name, loader=None))
        submodule.__doc__ = (
            f"The names in ``{full_name.replace('echelon', 'accelerate', 1)}``, none of which is supported."
        )
        add_names(vars(submodule))
        namespace[module] = sys.modules[full_name] = submodule
        namespace.update({name: _placeholder(name) for name, _ in _entries(full_name.removeprefix("echelon."))})


def _entries(path: str) -> list[tuple[str, str]]:
    """Return, for a module path, pairs of an unsupported name and its name in that module."""
    entries = [entry.partition("=") for paths in _NAMES.values() for entry in paths.get(path, "").split()]
    return [(name, alias or name) for name, _, alias in entries]


@functools.cache
def _placeholder(name: str) -> Any:
    """Return a class (for capitalized names) or a function that raises when used."""
    do = ALTERNATIVES[name]
    doc = f"Raise: {name} is not supported by this version of echelon ({do})."
    if name[0].isupper():
        return type(name, (UnsupportedClass,), {"__doc__": doc, "_do": do})
    function = _raising_function(name, do)
    function.__name__ = function.__qualname__ = name
    function.__doc__ = doc
    return function


def _raising_function(name: str, do: str) -> Callable[..., NoReturn]:
    def unsupported(*args: object, **kwargs: object) -> NoReturn:
        raise _error(name, do)

    return unsupported


def _error(name: str, do: str) -> UsageError:
    return UsageError(_("{name} is not supported by this version of echelon", name=name), do=do)
