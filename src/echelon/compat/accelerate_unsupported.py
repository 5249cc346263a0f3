"""What this version does not offer: Accelerate's names, so that imports work; using one says so, and what to do instead."""

from __future__ import annotations

from echelon.base.unsupported import not_offered_class, not_offered_function, tpu_instead

__all__ = [
    "AbstractTrainStep",
    "AlignDevicesHook",
    "BaseConfig",
    "BertTrainStep",
    "BnbQuantizationConfig",
    "CpuOffload",
    "DeepSpeedSequenceParallelConfig",
    "FP8RecipeKwargs",
    "GPTTrainStep",
    "LayerwiseCastingHook",
    "MSAMPRecipeKwargs",
    "MegatronEngine",
    "MegatronLMDummyDataLoader",
    "MegatronLMDummyScheduler",
    "MegatronLMOptimizerWrapper",
    "MegatronLMPlugin",
    "MegatronLMSchedulerWrapper",
    "ModelHook",
    "OffloadedWeightsLoader",
    "PrefixedDataset",
    "PrepareForLaunch",
    "SageMakerConfig",
    "SequentialHook",
    "T5TrainStep",
    "TERecipeKwargs",
    "TorchContextParallelConfig",
    "TorchTensorParallelConfig",
    "TorchTensorParallelPlugin",
    "UserCpuOffloadHook",
    "add_hook_to_module",
    "add_model_config_to_megatron_parser",
    "align_module_device",
    "apply_fp8_autowrap",
    "attach_align_device_hook",
    "attach_align_device_hook_on_blocks",
    "attach_execution_device_hook",
    "attach_layerwise_casting_hooks",
    "avg_losses_across_data_parallel_group",
    "build_pipeline",
    "calculate_maximum_sizes",
    "check_device_map",
    "check_tied_parameters_on_same_device",
    "clean_device_map",
    "contextual_fp8_autocast",
    "convert_model",
    "cpu_offload",
    "cpu_offload_with_hook",
    "disk_offload",
    "dispatch_model",
    "ensure_weights_retied",
    "env_var_path_add",
    "extract_submodules_state_dict",
    "fallback_allocate",
    "find_pippy_batch_size",
    "finish_mpu_init",
    "fsdp2_apply_ac",
    "fsdp2_canonicalize_names",
    "fsdp2_load_full_state_dict",
    "fsdp2_prepare_auto_wrap_policy",
    "fsdp2_prepare_model",
    "fsdp2_switch_optimizer_parameters",
    "gather_across_data_parallel_groups",
    "generate_device_map",
    "get_balanced_memory",
    "get_fsdp2_grad_scaler",
    "get_keys_to_not_convert",
    "get_max_layer_size",
    "get_max_memory",
    "get_module_class_from_name",
    "get_module_size_with_ties",
    "get_parameter_device",
    "get_parameters_from_modules",
    "get_quantized_model_device_map",
    "get_state_dict_from_offload",
    "get_state_dict_offloaded_model",
    "has_4bit_bnb_layers",
    "has_offloaded_params",
    "has_transformer_engine_layers",
    "infer_auto_device_map",
    "install_xla",
    "load_and_quantize_model",
    "load_fsdp_model",
    "load_fsdp_optimizer",
    "load_offloaded_weight",
    "load_offloaded_weights",
    "megatron_lm_initialize",
    "megatron_lm_prepare_data_loader",
    "megatron_lm_prepare_model_optimizer_scheduler",
    "megatron_lm_prepare_optimizer",
    "megatron_lm_prepare_scheduler",
    "model_provider_func",
    "offload_state_dict",
    "offload_weight",
    "override_numa_affinity",
    "parse_bert_config",
    "parse_glm4_moe_config",
    "parse_gpt2_config",
    "parse_llama_config",
    "parse_t5_config",
    "pippy_forward",
    "prepare_deepspeed_cmd_env",
    "prepare_extend_env_parallelism_config",
    "prepare_multi_gpu_env",
    "prepare_pippy",
    "prepare_sagemager_args_inputs",
    "prepare_simple_launcher_cmd_env",
    "prepare_tpu",
    "quantize_and_offload_8bit",
    "remove_hook_from_module",
    "remove_hook_from_submodules",
    "replace_with_bnb_layers",
    "save_fsdp_model",
    "save_fsdp_optimizer",
    "save_offload_index",
    "set_module_tensor_to_device",
    "set_numa_affinity",
    "setup_fp8_env",
]

# Models that are spread over devices and disk.
_BIG = (
    "load the whole model on one device, or build it on torch.device('meta') and load its state dict with assign=True"
)
AlignDevicesHook = not_offered_class("AlignDevicesHook", instead=_BIG)
CpuOffload = not_offered_class("CpuOffload", instead=_BIG)
LayerwiseCastingHook = not_offered_class("LayerwiseCastingHook", instead=_BIG)
ModelHook = not_offered_class("ModelHook", instead=_BIG)
OffloadedWeightsLoader = not_offered_class("OffloadedWeightsLoader", instead=_BIG)
PrefixedDataset = not_offered_class("PrefixedDataset", instead=_BIG)
SequentialHook = not_offered_class("SequentialHook", instead=_BIG)
UserCpuOffloadHook = not_offered_class("UserCpuOffloadHook", instead=_BIG)
add_hook_to_module = not_offered_function("add_hook_to_module", instead=_BIG)
align_module_device = not_offered_function("align_module_device", instead=_BIG)
attach_align_device_hook = not_offered_function("attach_align_device_hook", instead=_BIG)
attach_align_device_hook_on_blocks = not_offered_function("attach_align_device_hook_on_blocks", instead=_BIG)
attach_execution_device_hook = not_offered_function("attach_execution_device_hook", instead=_BIG)
attach_layerwise_casting_hooks = not_offered_function("attach_layerwise_casting_hooks", instead=_BIG)
calculate_maximum_sizes = not_offered_function("calculate_maximum_sizes", instead=_BIG)
check_device_map = not_offered_function("check_device_map", instead=_BIG)
check_tied_parameters_on_same_device = not_offered_function("check_tied_parameters_on_same_device", instead=_BIG)
clean_device_map = not_offered_function("clean_device_map", instead=_BIG)
cpu_offload = not_offered_function("cpu_offload", instead=_BIG)
cpu_offload_with_hook = not_offered_function("cpu_offload_with_hook", instead=_BIG)
disk_offload = not_offered_function("disk_offload", instead=_BIG)
dispatch_model = not_offered_function("dispatch_model", instead=_BIG)
extract_submodules_state_dict = not_offered_function("extract_submodules_state_dict", instead=_BIG)
fallback_allocate = not_offered_function("fallback_allocate", instead=_BIG)
get_balanced_memory = not_offered_function("get_balanced_memory", instead=_BIG)
get_max_layer_size = not_offered_function("get_max_layer_size", instead=_BIG)
get_max_memory = not_offered_function("get_max_memory", instead=_BIG)
get_module_size_with_ties = not_offered_function("get_module_size_with_ties", instead=_BIG)
get_state_dict_from_offload = not_offered_function("get_state_dict_from_offload", instead=_BIG)
get_state_dict_offloaded_model = not_offered_function("get_state_dict_offloaded_model", instead=_BIG)
has_offloaded_params = not_offered_function("has_offloaded_params", instead=_BIG)
infer_auto_device_map = not_offered_function("infer_auto_device_map", instead=_BIG)
load_offloaded_weight = not_offered_function("load_offloaded_weight", instead=_BIG)
load_offloaded_weights = not_offered_function("load_offloaded_weights", instead=_BIG)
offload_state_dict = not_offered_function("offload_state_dict", instead=_BIG)
offload_weight = not_offered_function("offload_weight", instead=_BIG)
remove_hook_from_module = not_offered_function("remove_hook_from_module", instead=_BIG)
remove_hook_from_submodules = not_offered_function("remove_hook_from_submodules", instead=_BIG)
save_offload_index = not_offered_function("save_offload_index", instead=_BIG)
set_module_tensor_to_device = not_offered_function("set_module_tensor_to_device", instead=_BIG)

# Pipelines for inference.
_PIPELINE = "split the batch instead: accelerator.split_between_processes"
build_pipeline = not_offered_function("build_pipeline", instead=_PIPELINE)
find_pippy_batch_size = not_offered_function("find_pippy_batch_size", instead=_PIPELINE)
generate_device_map = not_offered_function("generate_device_map", instead=_PIPELINE)
pippy_forward = not_offered_function("pippy_forward", instead=_PIPELINE)
prepare_pippy = not_offered_function("prepare_pippy", instead=_PIPELINE)

# Sharded data parallelism.
_SHARD = "leave it out: ddp runs on any number of processes"
DeepSpeedSequenceParallelConfig = not_offered_class("DeepSpeedSequenceParallelConfig", instead=_SHARD)
TorchContextParallelConfig = not_offered_class("TorchContextParallelConfig", instead=_SHARD)
TorchTensorParallelConfig = not_offered_class("TorchTensorParallelConfig", instead=_SHARD)
TorchTensorParallelPlugin = not_offered_class("TorchTensorParallelPlugin", instead=_SHARD)
ensure_weights_retied = not_offered_function("ensure_weights_retied", instead=_SHARD)
fsdp2_apply_ac = not_offered_function("fsdp2_apply_ac", instead=_SHARD)
fsdp2_canonicalize_names = not_offered_function("fsdp2_canonicalize_names", instead=_SHARD)
fsdp2_load_full_state_dict = not_offered_function("fsdp2_load_full_state_dict", instead=_SHARD)
fsdp2_prepare_auto_wrap_policy = not_offered_function("fsdp2_prepare_auto_wrap_policy", instead=_SHARD)
fsdp2_prepare_model = not_offered_function("fsdp2_prepare_model", instead=_SHARD)
fsdp2_switch_optimizer_parameters = not_offered_function("fsdp2_switch_optimizer_parameters", instead=_SHARD)
get_fsdp2_grad_scaler = not_offered_function("get_fsdp2_grad_scaler", instead=_SHARD)
get_module_class_from_name = not_offered_function("get_module_class_from_name", instead=_SHARD)
get_parameters_from_modules = not_offered_function("get_parameters_from_modules", instead=_SHARD)
load_fsdp_model = not_offered_function("load_fsdp_model", instead=_SHARD)
load_fsdp_optimizer = not_offered_function("load_fsdp_optimizer", instead=_SHARD)
save_fsdp_model = not_offered_function("save_fsdp_model", instead=_SHARD)
save_fsdp_optimizer = not_offered_function("save_fsdp_optimizer", instead=_SHARD)

# Megatron-LM.
_MEGATRON = "leave it out"
AbstractTrainStep = not_offered_class("AbstractTrainStep", instead=_MEGATRON)
BertTrainStep = not_offered_class("BertTrainStep", instead=_MEGATRON)
GPTTrainStep = not_offered_class("GPTTrainStep", instead=_MEGATRON)
MegatronEngine = not_offered_class("MegatronEngine", instead=_MEGATRON)
MegatronLMDummyDataLoader = not_offered_class("MegatronLMDummyDataLoader", instead=_MEGATRON)
MegatronLMDummyScheduler = not_offered_class("MegatronLMDummyScheduler", instead=_MEGATRON)
MegatronLMOptimizerWrapper = not_offered_class("MegatronLMOptimizerWrapper", instead=_MEGATRON)
MegatronLMPlugin = not_offered_class("MegatronLMPlugin", instead=_MEGATRON)
MegatronLMSchedulerWrapper = not_offered_class("MegatronLMSchedulerWrapper", instead=_MEGATRON)
T5TrainStep = not_offered_class("T5TrainStep", instead=_MEGATRON)
add_model_config_to_megatron_parser = not_offered_function("add_model_config_to_megatron_parser", instead=_MEGATRON)
avg_losses_across_data_parallel_group = not_offered_function("avg_losses_across_data_parallel_group", instead=_MEGATRON)
finish_mpu_init = not_offered_function("finish_mpu_init", instead=_MEGATRON)
gather_across_data_parallel_groups = not_offered_function("gather_across_data_parallel_groups", instead=_MEGATRON)
megatron_lm_initialize = not_offered_function("megatron_lm_initialize", instead=_MEGATRON)
megatron_lm_prepare_data_loader = not_offered_function("megatron_lm_prepare_data_loader", instead=_MEGATRON)
megatron_lm_prepare_model_optimizer_scheduler = not_offered_function(
    "megatron_lm_prepare_model_optimizer_scheduler", instead=_MEGATRON
)
megatron_lm_prepare_optimizer = not_offered_function("megatron_lm_prepare_optimizer", instead=_MEGATRON)
megatron_lm_prepare_scheduler = not_offered_function("megatron_lm_prepare_scheduler", instead=_MEGATRON)
model_provider_func = not_offered_function("model_provider_func", instead=_MEGATRON)
parse_bert_config = not_offered_function("parse_bert_config", instead=_MEGATRON)
parse_glm4_moe_config = not_offered_function("parse_glm4_moe_config", instead=_MEGATRON)
parse_gpt2_config = not_offered_function("parse_gpt2_config", instead=_MEGATRON)
parse_llama_config = not_offered_function("parse_llama_config", instead=_MEGATRON)
parse_t5_config = not_offered_function("parse_t5_config", instead=_MEGATRON)

# Other number formats than bf16, fp16 and torchao's fp8.
_FORMATS = "use mixed_precision='bf16', or fp8 through torchao (AORecipeKwargs)"
BnbQuantizationConfig = not_offered_class("BnbQuantizationConfig", instead=_FORMATS)
FP8RecipeKwargs = not_offered_class("FP8RecipeKwargs", instead=_FORMATS)
MSAMPRecipeKwargs = not_offered_class("MSAMPRecipeKwargs", instead=_FORMATS)
TERecipeKwargs = not_offered_class("TERecipeKwargs", instead=_FORMATS)
apply_fp8_autowrap = not_offered_function("apply_fp8_autowrap", instead=_FORMATS)
contextual_fp8_autocast = not_offered_function("contextual_fp8_autocast", instead=_FORMATS)
convert_model = not_offered_function("convert_model", instead=_FORMATS)
get_keys_to_not_convert = not_offered_function("get_keys_to_not_convert", instead=_FORMATS)
get_parameter_device = not_offered_function("get_parameter_device", instead=_FORMATS)
get_quantized_model_device_map = not_offered_function("get_quantized_model_device_map", instead=_FORMATS)
has_4bit_bnb_layers = not_offered_function("has_4bit_bnb_layers", instead=_FORMATS)
has_transformer_engine_layers = not_offered_function("has_transformer_engine_layers", instead=_FORMATS)
load_and_quantize_model = not_offered_function("load_and_quantize_model", instead=_FORMATS)
quantize_and_offload_8bit = not_offered_function("quantize_and_offload_8bit", instead=_FORMATS)
replace_with_bnb_layers = not_offered_function("replace_with_bnb_layers", instead=_FORMATS)

# Other launchers.
_LAUNCH = "start the script with echelon launch, or use notebook_launcher"
PrepareForLaunch = not_offered_class("PrepareForLaunch", instead=_LAUNCH)
env_var_path_add = not_offered_function("env_var_path_add", instead=_LAUNCH)
install_xla = not_offered_function("install_xla", instead=tpu_instead())
prepare_deepspeed_cmd_env = not_offered_function("prepare_deepspeed_cmd_env", instead=_LAUNCH)
prepare_extend_env_parallelism_config = not_offered_function("prepare_extend_env_parallelism_config", instead=_LAUNCH)
prepare_multi_gpu_env = not_offered_function("prepare_multi_gpu_env", instead=_LAUNCH)
prepare_sagemager_args_inputs = not_offered_function("prepare_sagemager_args_inputs", instead=_LAUNCH)
prepare_simple_launcher_cmd_env = not_offered_function("prepare_simple_launcher_cmd_env", instead=_LAUNCH)
prepare_tpu = not_offered_function("prepare_tpu", instead=tpu_instead())
setup_fp8_env = not_offered_function("setup_fp8_env", instead=_LAUNCH)

# Binding processes to cores.
_CORES = "ask for enable_cpu_affinity: echelon launch --enable_cpu_affinity, or ACCELERATE_CPU_AFFINITY=1"
override_numa_affinity = not_offered_function("override_numa_affinity", instead=_CORES)
set_numa_affinity = not_offered_function("set_numa_affinity", instead=_CORES)

# Accelerate's config file.
_CONFIG = "write the settings as flags of echelon launch, or into a file for its --config_file"
BaseConfig = not_offered_class("BaseConfig", instead=_CONFIG)
SageMakerConfig = not_offered_class("SageMakerConfig", instead=_CONFIG)
