"""The names that the scripts call, read from their source, and the list of names that they must cover (docs: rows C)."""

from __future__ import annotations

import ast
from pathlib import Path

_FACTS = "device num_processes process_index local_process_index is_main_process is_local_main_process is_last_process"


def _named(form: str, words: str) -> list[str]:
    return [form.format(word) for word in words.split()]


# `Class(argument)`, `Class.member`, `Class.method(argument)`, `function`, `function(argument)`.
NAMES = {
    "Accelerator": [
        *_named(
            "Accelerator({})",
            "mixed_precision gradient_accumulation_steps cpu log_with project_dir project_config kwargs_handlers "
            "dataloader_config",
        ),
        *_named(
            "Accelerator.{}",
            f"{_FACTS} distributed_type mixed_precision use_distributed state sync_gradients gradient_accumulation_steps "
            "optimizer_step_was_skipped prepare backward accumulate clip_grad_norm_ gather gather_for_metrics print "
            "wait_for_everyone unwrap_model save_state load_state save init_trackers log end_training main_process_first "
            "local_main_process_first",
        ),
        *_named("Accelerator.{} =", "sync_gradients gradient_accumulation_steps"),
        *_named(
            "Accelerator.{}",
            "prepare(device_placement) clip_grad_norm_(max_norm) clip_grad_norm_(norm_type) "
            "gather_for_metrics(use_gather_object) unwrap_model(keep_fp32_wrapper) unwrap_model(keep_torch_compile) "
            "save_state(output_dir) save_state(safe_serialization) load_state(input_dir) save(safe_serialization) "
            "init_trackers(config) init_trackers(init_kwargs) log(step) log(log_kwargs)",
        ),
    ],
    "PartialState": _named("PartialState{}", "(cpu) .split_between_processes(apply_padding)")
    + _named(
        "PartialState.{}",
        f"{_FACTS} backend distributed_type debug fork_launched initialized use_distributed default_device "
        "wait_for_everyone split_between_processes main_process_first local_main_process_first on_main_process "
        "on_local_main_process on_last_process on_process on_local_process print set_device destroy_process_group",
    ),
    "utils": _named(
        "{}",
        "set_seed set_seed(device_specific) set_seed(deterministic) gather gather_object broadcast broadcast(from_process) "
        "broadcast_object_list broadcast_object_list(from_process) reduce reduce(reduction) reduce(scale) "
        "pad_across_processes pad_across_processes(dim) pad_across_processes(pad_index) pad_across_processes(pad_first) "
        "send_to_device send_to_device(non_blocking) send_to_device(skip_keys) find_executable_batch_size "
        "find_executable_batch_size(starting_batch_size) find_executable_batch_size(reduce_batch_size_fn)",
    ),
    "handlers and configurations": [
        name
        for kind, arguments in {
            "AutocastKwargs": "enabled cache_enabled",
            "DistributedDataParallelKwargs": "dim broadcast_buffers bucket_cap_mb find_unused_parameters check_reduction "
            "gradient_as_bucket_view static_graph comm_hook comm_wrapper comm_state_option",
            "GradScalerKwargs": "init_scale growth_factor backoff_factor growth_interval enabled",
            "InitProcessGroupKwargs": "backend init_method timeout",
            "ProjectConfiguration": "project_dir logging_dir automatic_checkpoint_naming total_limit iteration "
            "save_on_each_node",
            "DataLoaderConfiguration": "split_batches dispatch_batches even_batches use_seedable_sampler data_seed "
            "non_blocking use_stateful_dataloader",
            "GradientAccumulationPlugin": "num_steps adjust_scheduler sync_with_dataloader sync_each_batch",
        }.items()
        for name in _named(f"{kind}({{}})", arguments)
    ],
    "logging, trackers, launchers": _named(
        "{}",
        "get_logger get_logger(log_level) get_logger.info(main_process_only) get_logger.info(in_order) "
        "get_logger.warning_once GeneralTracker notebook_launcher notebook_launcher(args) notebook_launcher(num_processes) "
        "notebook_launcher(mixed_precision) notebook_launcher(use_port)",
    ),
}

# Behavior without a name of its own: the script, and a value that it prints (on any rank of two processes).
BEHAVIOURS = {
    "each rank takes every n-th batch": ("08_loader_shards", "default:batch"),
    "the last batch of a loader is detected": ("08_loader_shards", "default:end#3"),
    "even_batches=False: uneven last round": ("08_loader_shards", "uneven:batch#3"),
    "isinstance(loader, DataLoader)": ("08_loader_shards", "default:is a DataLoader"),
    "gather_for_metrics returns each sample once": ("07_metrics", "samples"),
    "the same random order on all ranks": ("10_random_order", "own generator"),
    "step and zero_grad take effect at the end of a window": ("04_accumulation", "stepped"),
    "backward divides the loss, even outside accumulate": ("04_accumulation", "gradient by hand"),
    "num_processes scheduler steps per optimizer step": ("13_schedulers", "linear"),
    "a skipped step skips the scheduler": ("12_loss_scaling", "lr#2"),
    "outputs are converted to float32": ("11_mixed_precision", "outputs"),
    "file names of a checkpoint": ("14_checkpoints", "files"),
    "tensorboard event file": ("16_trackers", "tensorboard loss"),
    "wandb run": ("16_trackers", "wandb history"),
    "ACCELERATE_LOG_LEVEL": ("17_logging", "level from the environment"),
}


def uses(script: Path) -> set[str]:
    """Return the names of accelerate that a script uses, in the notation of NAMES.

    The class of a variable is known from an assignment such as ``accelerator = Accelerator(...)`` anywhere in the file;
    ``state = accelerator.state`` is ignored.
    """
    tree = ast.parse(script.read_text())
    imported = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "accelerate"
        for alias in node.names
    }
    made = {
        target.id: node.value.func.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Name)
        for target in node.targets
        if isinstance(target, ast.Name) and node.value.func.id in imported
    }

    def name_of(node: ast.expr) -> str | None:
        if isinstance(node, ast.Name) and node.id in imported:
            return node.id
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in made:
            return f"{made[node.value.id]}.{node.attr}"
        return None

    found = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Name, ast.Attribute)) and (name := name_of(node)):
            found.add(f"{name} =" if isinstance(node.ctx, ast.Store) else name)
        if isinstance(node, ast.Call) and (name := name_of(node.func)):
            found |= {f"{name}({keyword.arg})" for keyword in node.keywords}
    return found
