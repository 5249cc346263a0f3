"""The fields of TrainingArguments: transformers' fields in their original order, then echelon's keyword-only fields."""

# ruff: noqa: RUF009, RUF036 - `setting` wraps `dataclasses.field`; argument parsers of other libraries read the second
# member of a union

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

from echelon.trainer.arguments.enums import HubStrategy, IntervalStrategy, OptimizerNames, SaveStrategy, SchedulerType

_Value = TypeVar("_Value")


def setting(default: _Value, meaning: str) -> _Value:
    """Declare a field; ``meaning`` is its help text in argument parsers."""
    return field(default=default, metadata={"help": meaning})


def extra(default: _Value, meaning: str) -> _Value:
    """Declare a keyword-only field that transformers does not have."""
    return field(default=default, kw_only=True, metadata={"help": meaning})


@dataclass
class TrainingFields:
    """The fields of ``TrainingArguments``, without derived properties."""

    # Output and length of the run.
    output_dir: str | None = setting(
        None,
        "Directory for checkpoints and results (default: trainer_output), or a URL for checkpoints: s3://bucket/run.",
    )
    per_device_train_batch_size: int = setting(8, "Training samples per device in one forward pass.")
    num_train_epochs: float = setting(3.0, "Number of epochs; may be fractional.")
    max_steps: int = setting(-1, "Number of optimizer steps; if positive, overrides num_train_epochs.")
    # Optimizer and scheduler.
    learning_rate: float = setting(5e-5, "Peak learning rate.")
    lr_scheduler_type: SchedulerType | str = setting("linear", "Learning rate scheduler.")
    lr_scheduler_kwargs: dict[str, Any] | str | None = setting(None, "Extra arguments for the scheduler, as a dict.")
    warmup_steps: float = setting(0, "Linear warm-up steps; a value below 1 is a fraction of all steps.")
    optim: OptimizerNames | str = setting("adamw_torch_fused", "Name of the optimizer.")
    optim_args: str | None = setting(None, "Extra arguments for the optimizer, as 'name=value,name=value'.")
    weight_decay: float = setting(0.0, "Weight decay, not applied to biases and normalization layers.")
    adam_beta1: float = setting(0.9, "Adam's beta1.")
    adam_beta2: float = setting(0.999, "Adam's beta2.")
    adam_epsilon: float = setting(1e-8, "Adam's epsilon.")
    optim_target_modules: None | str | list[str] = setting(None, "Modules to apply a low-rank optimizer to.")
    # Update.
    gradient_accumulation_steps: int = setting(1, "Forward and backward passes per optimizer step.")
    average_tokens_across_devices: bool = setting(
        True, ("Normalize token losses by the token count across all processes.")
    )
    max_grad_norm: float = setting(1.0, "Maximum gradient norm for clipping; 0 disables clipping.")
    label_smoothing_factor: float = setting(0.0, "Label smoothing factor; 0 disables smoothing.")
    # Precision.
    bf16: bool = setting(False, "Train with bfloat16 mixed precision.")
    fp16: bool = setting(False, "Train with float16 mixed precision and loss scaling.")
    bf16_full_eval: bool = setting(False, "Evaluate entirely in bfloat16.")
    fp16_full_eval: bool = setting(False, "Evaluate entirely in float16.")
    tf32: bool | None = setting(None, "Allow TF32 matrix multiplication (default: torch's setting).")
    # Memory and speed.
    activation_checkpointing: bool | None = setting(  # text in code only: the parser takes one type
        None, "Recompute activations in the backward pass: True, or (in code) 'full', 'selective' or 'offload'."
    )
    activation_checkpointing_kwargs: dict[str, Any] | str | None = setting(
        None, "Arguments for activation checkpointing, as a dict."
    )
    gradient_checkpointing: bool | None = setting(None, "Alias of activation_checkpointing.")
    gradient_checkpointing_kwargs: dict[str, Any] | str | None = setting(
        None, "Alias of activation_checkpointing_kwargs."
    )
    torch_compile: bool = setting(False, "Compile the model with torch.compile.")
    torch_compile_backend: str | None = setting(None, "Backend of torch.compile; enables torch_compile.")
    torch_compile_mode: str | None = setting(None, "Mode of torch.compile; enables torch_compile.")
    use_liger_kernel: bool = setting(False, "Apply Liger kernels to the model.")
    liger_kernel_config: dict[str, Any] | None = setting(None, "Which Liger kernels to apply, as a dict.")
    use_cache: bool = setting(False, "Enable the model's key-value cache, which training does not need.")
    neftune_noise_alpha: float | None = setting(None, "Noise alpha of NEFTune.")
    torch_empty_cache_steps: int | None = setting(None, "Empty the device memory cache every N steps.")
    auto_find_batch_size: bool = setting(False, "Retry with a smaller batch size when memory runs out.")
    # Logging.
    logging_strategy: IntervalStrategy | str = setting("steps", "When to log: 'no', 'steps' or 'epoch'.")
    logging_steps: float = setting(500, "Log every N optimizer steps; N below 1 is a fraction of all steps.")
    logging_first_step: bool = setting(False, "Also log the first step.")
    log_on_each_node: bool = setting(True, "Log on one process per machine instead of one process overall.")
    logging_nan_inf_filter: bool = setting(True, "Exclude nan and infinite losses from the logged mean.")
    include_num_input_tokens_seen: str | bool = setting(
        "no", "Which input tokens to count: 'no' (none), 'all' or 'non_padding'."
    )
    log_level: str = setting(
        "passive", ("Log level of the main process, from debug to critical; 'passive' leaves the level unchanged.")
    )
    log_level_replica: str = setting("warning", "Log level of the other processes.")
    disable_tqdm: bool | None = setting(None, "Disable progress bars (default: depends on the log level).")
    report_to: None | str | list[str] = setting("none", "Trackers that receive the logs.")
    run_name: str | None = setting(None, "Run name to show in the trackers.")
    project: str = setting("huggingface", "Project in the trackers.")
    trackio_space_id: str | None = setting(None, "Hugging Face Space in which Trackio shows the run.")
    trackio_bucket_id: str | None = setting(None, "Hugging Face bucket in which Trackio stores the run.")
    trackio_static_space_id: str | None = setting(None, "Hugging Face Space for a static Trackio view of the run.")
    # Evaluation.
    eval_strategy: IntervalStrategy | str = setting("no", "When to evaluate: 'no', 'steps' or 'epoch'.")
    eval_steps: float | None = setting(None, "Evaluate every N optimizer steps (default: logging_steps).")
    eval_delay: float = setting(0, "Epochs or steps (depending on eval_strategy) before the first evaluation.")
    per_device_eval_batch_size: int = setting(8, "Evaluation samples per device in one forward pass.")
    prediction_loss_only: bool = setting(False, "Gather only the loss, not the predictions.")
    eval_on_start: bool = setting(False, "Evaluate before the first step.")
    eval_do_concat_batches: bool = setting(True, "Concatenate the predictions of all batches instead of listing them.")
    eval_use_gather_object: bool = setting(False, "Gather arbitrary objects, not only tensors.")
    eval_accumulation_steps: int | None = setting(None, "Move predictions to the CPU every N batches.")
    include_for_metrics: list[str] = field(
        default_factory=list, metadata={"help": "Additional data to pass to compute_metrics: inputs, loss."}
    )
    batch_eval_metrics: bool = setting(False, "Call compute_metrics for each batch.")
    # Checkpoints.
    save_only_model: bool = setting(False, "Save only the weights, from which training cannot resume.")
    save_strategy: SaveStrategy | str = setting("steps", "When to save: 'no', 'steps', 'epoch' or 'best'.")
    save_steps: float = setting(500, "Save every N optimizer steps; N below 1 is a fraction of all steps.")
    save_on_each_node: bool = setting(False, "Save on every machine.")
    save_total_limit: int | None = setting(None, "Maximum number of checkpoints to keep; the best one is always kept.")
    enable_jit_checkpoint: bool = setting(False, "Save on SIGTERM.")
    # Upload.
    push_to_hub: bool = setting(False, "Upload the model when it is saved.")
    hub_token: str | None = setting(None, "Access token of the Hub.")
    hub_private_repo: bool | None = setting(None, "Make the repository private.")
    hub_model_id: str | None = setting(None, "Name of the repository.")
    hub_strategy: HubStrategy | str = setting("every_save", "What to upload, and when.")
    hub_always_push: bool = setting(False, "Start an upload even if another one is running.")
    hub_revision: str | None = setting(None, "The branch to upload to.")
    # The best model.
    load_best_model_at_end: bool = setting(False, "Load the best checkpoint at the end of training.")
    metric_for_best_model: str | None = setting(None, "Evaluation metric that selects the best checkpoint.")
    greater_is_better: bool | None = setting(
        None, ("Whether a larger metric is better (default: True unless the metric is a loss).")
    )
    # Resuming and reproducibility.
    ignore_data_skip: bool = setting(False, "Restart the epoch when resuming.")
    restore_callback_states_from_checkpoint: bool = setting(False, "Restore the callbacks' state when resuming.")
    full_determinism: bool = setting(False, "Use only deterministic algorithms; slower.")
    seed: int = setting(42, "Random seed.")
    data_seed: int | None = setting(None, "Seed of the data order (default: seed).")
    # Devices.
    use_cpu: bool = setting(False, "Use the CPU even if an accelerator is available.")
    accelerator_config: dict[str, Any] | str | None = setting(None, "Accelerator settings: a dict or a JSON file.")
    parallelism_config: dict[str, Any] | str | Any | None = setting(
        None, "Model parallelism settings: a dict or a ParallelismConfig."
    )
    # Data.
    dataloader_drop_last: bool = setting(False, "Drop an incomplete last batch.")
    dataloader_num_workers: int = setting(
        0, "Number of data loader worker processes; 0 loads data in the main process."
    )
    dataloader_pin_memory: bool = setting(True, "Use pinned memory in data loaders.")
    dataloader_persistent_workers: bool = setting(False, "Keep data loader workers alive between epochs.")
    dataloader_prefetch_factor: int | None = setting(None, "Number of batches that each data loader worker prefetches.")
    dataloader_multiprocessing_context: str | None = setting(
        None, "Start method for data loader workers: fork, spawn or forkserver."
    )
    dataloader_in_order: bool = setting(
        True, ("Return batches in order, not as soon as a data loader worker finishes them.")
    )
    remove_unused_columns: bool = setting(True, "Remove columns that the model's forward does not accept.")
    label_names: list[str] | None = setting(
        None, ("Batch keys that hold labels (default: inferred from the signature of forward).")
    )
    train_sampling_strategy: str = setting("random", "Data order: random, sequential or group_by_length.")
    length_column_name: str = setting("length", "Column that holds the length of each sample.")
    # Distributed training.
    ddp_find_unused_parameters: bool | None = setting(None, "find_unused_parameters of DistributedDataParallel.")
    ddp_bucket_cap_mb: int | None = setting(None, "bucket_cap_mb of DistributedDataParallel.")
    ddp_broadcast_buffers: bool | None = setting(None, "broadcast_buffers of DistributedDataParallel.")
    ddp_static_graph: bool | None = setting(None, "static_graph of DistributedDataParallel.")
    ddp_backend: str | None = setting(None, "Backend of torch.distributed.")
    ddp_timeout: int = setting(1800, "Timeout for collectives, in seconds.")
    fsdp: None | str | list[str] = setting(
        None,
        "Shard the model with FSDP: True, or at most one strategy (full_shard, shard_grad_op, no_shard, hybrid_shard or "
        "hybrid_shard_zero2), optionally combined with offload and auto_wrap.",
    )
    fsdp_config: dict[str, Any] | str | None = setting(None, "FSDP settings: a dict or a JSON file.")
    deepspeed: dict[str, Any] | str | None = setting(None, "DeepSpeed config: a dict or a JSON file.")
    # Debugging.
    debug: str | list[str] = setting("", "underflow_overflow reports the first module with a nonfinite output.")
    skip_memory_metrics: bool = setting(True, "Do not report memory metrics.")
    # For scripts; the Trainer does not read do_*.
    do_train: bool = setting(False, "For scripts: whether to train.")
    do_eval: bool = setting(False, "For scripts: whether to evaluate.")
    do_predict: bool = setting(False, "For scripts: whether to predict.")
    resume_from_checkpoint: str | None = setting(None, "Checkpoint to resume from; True or 'auto' selects the newest.")
    local_rank: int = setting(-1, "Set by old launchers; read local_process_index instead.")
    # Specific to echelon.
    engine: str | None = extra(
        None, ("single, dp, ddp, zero1, fsdp2 or deepspeed (default: chosen from the number of processes and devices).")
    )
    max_time: float | str | timedelta | None = extra(
        None, "Stop training after this time, given in seconds or as 90m, 12h or h:mm:ss."
    )
    fast_dev_run: int = extra(
        0, ("Smoke test: run only N steps and N evaluation batches (True: 1), without checkpoints or trackers.")
    )
    limit_train_batches: float | None = extra(
        None, ("Maximum number of batches per epoch; a value below 1 is a fraction of all batches.")
    )
    limit_eval_batches: float | None = extra(
        None, ("Maximum number of batches per evaluation; a value below 1 is a fraction of all batches.")
    )
    stop_on_nan: bool = extra(False, "Raise at the first nonfinite loss or gradient, and name the tensor.")
    pack_to_length: int | None = extra(
        None,
        "Pack training samples (token lists) into rows of this many tokens; no sample sees another one in its row.",
    )
    loss_chunk: int | None = extra(
        None, "Compute a causal language model's logits and loss for this many tokens at a time, to save memory."
    )
    ema_decay: float | None = extra(
        None,
        "Average the weights exponentially with this decay (such as 0.999); evaluations, model files and the trained model have the "
        "averaged weights.",
    )
    swa_start: int | None = extra(
        None, "Average the weights of all steps from this one on; they are used like those of ema_decay."
    )
    average_every: int = extra(1, "With ema_decay or swa_start: update the average after every N-th optimizer step.")
    checkpoint_format: str | None = extra(None, "Checkpoint format: echelon or transformers (default: echelon).")
    save_best: int | None = extra(
        None, "Keep this many checkpoints with the best metric_for_best_model (default: the best one, if it is set)."
    )
    save_blocking: bool = extra(
        True, "Wait until each checkpoint is written. False: only copy the state, and write it in the background."
    )
    max_failed_saves: int = extra(3, "Stop training after this many consecutive failed saves.")
    save_on_exception: bool = extra(False, "Save a checkpoint when an error ends training.")
    save_on_signal: bool = extra(False, "On SIGTERM or SIGUSR1, save after the current step and exit with code 143.")
    parity: str | None = extra(
        None, ("'exact': the same updates on any number of processes; 'bitwise': bit-identical results.")
    )
    global_batch_size: int | None = extra(None, "With parity: samples per optimizer step across all processes.")
    max_micro_batch_size: int | None = extra(
        None, "With parity: largest micro-batch (default: the batch size per device)."
    )
    canonical_shards: int | None = extra(
        None, ("With parity='bitwise': number of shards per update, summed in a fixed order.")
    )
    verify_every: int | None = extra(
        None, "Check every N-th update against the update that one process makes with the same batch."
    )
    speed: str | None = extra(None, "Faster ways of computing the same updates: 'safe' (default), 'max' or 'off'.")
    verify_action: str | None = extra(None, "If such a check fails: 'stop' the training (default), or 'warn'.")
    spike_guard: str | None = extra(
        None, "If an update's loss is a spike or not finite: 'warn', 'skip' the update, or 'rollback' what caused it."
    )
    spike_factor: float | None = extra(
        None, "Standard deviations above the median of the last losses at which a loss is a spike (default: 10)."
    )
    already_sharded: str | None = extra(  # no bool: transformers' argument parser accepts one type and None
        None, "Datasets that are already sharded by process: True (all), 'train', 'eval' or False (default: detected)."
    )
    allow_changed_data: bool = extra(False, "Allow resuming mid-epoch after the dataset has changed.")
    log_throughput: bool = extra(False, "Log samples, steps and tokens per second and the MFU (where known).")
    plan: bool = extra(
        False, "Before training, print the predicted memory of a step, and stop if it does not fit (docs/plan.md)."
    )
    memory_snapshot: str | None = extra(
        None, "Folder for torch's memory snapshot of each rank, written at the end of the training or after an error."
    )
    pipeline_schedule: str = extra(
        "1F1B",
        "With pp_size: GPipe, 1F1B, Interleaved1F1B, LoopedBFS, InterleavedZeroBubble, ZBVZeroBubble or DualPipeV.",
    )
    pipeline_num_micro_batches: int | None = extra(
        None, "With pp_size: micro-batches of a step (default: twice the number of stages)."
    )
    master_weights: str | None = extra(
        None,
        "With bf16 or fp16, train weights loaded in that dtype as 'float32' (default), 'keep' it, or 'stochastic'.",
    )
    activation_checkpointing_blocks: str | None = extra(
        None, "Class names of the blocks, if activation_checkpointing is 'full', 'selective' or 'offload'."
    )
    # Fields of transformers before 5.15, which argument parsers of programs that were written for it look for.
    logging_dir: str | None = extra(None, "Deprecated: directory of the trackers; see TENSORBOARD_LOGGING_DIR.")
    warmup_ratio: float | None = extra(None, "Old name of warmup_steps, which may be a fraction of all steps.")
