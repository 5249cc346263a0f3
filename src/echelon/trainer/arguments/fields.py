"""The fields of TrainingArguments: names, order and defaults of transformers, then echelon's own, which are keyword-only."""

# ruff: noqa: RUF009, RUF036 - `setting` is `dataclasses.field` with the help text behind the default; argument parsers of
# others read the second part of a union

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, ClassVar, TypeVar

from echelon.trainer.arguments.enums import HubStrategy, IntervalStrategy, OptimizerNames, SaveStrategy, SchedulerType

__all__ = ["TrainingFields", "setting"]

_Value = TypeVar("_Value")


def setting(default: _Value, meaning: str) -> _Value:
    """Declare a field; ``meaning`` is also the help text of an argument parser made from the dataclass."""
    return field(default=default, metadata={"help": meaning})


def extra(default: _Value, meaning: str) -> _Value:
    """Declare a field that transformers has not; it is given by name only."""
    return field(default=default, kw_only=True, metadata={"help": meaning})


@dataclass
class TrainingFields:
    """The values of ``TrainingArguments``, without what is derived from them."""

    # Where the results go, and how long to train.
    output_dir: str | None = setting(None, "Folder for checkpoints and results; none given: trainer_output.")
    per_device_train_batch_size: int = setting(8, "Samples of one device in one forward pass of the training.")
    num_train_epochs: float = setting(3.0, "Passes over the training data; may be a fraction.")
    max_steps: int = setting(-1, "Optimizer steps in all; if positive, it decides instead of num_train_epochs.")
    # The optimizer and its schedule.
    learning_rate: float = setting(5e-5, "The peak of the learning-rate schedule.")
    lr_scheduler_type: SchedulerType | str = setting("linear", "The shape of the learning-rate schedule.")
    lr_scheduler_kwargs: dict[str, Any] | str | None = setting(None, "More arguments of the schedule, as a dict.")
    warmup_steps: float = setting(0, "Steps in which the rate rises from 0; below 1: a part of all steps.")
    optim: OptimizerNames | str = setting("adamw_torch_fused", "The optimizer, by name.")
    optim_args: str | None = setting(None, "More arguments of the optimizer, as 'name=value,name=value'.")
    weight_decay: float = setting(0.0, "Decay of all weights but biases and those of normalisation layers.")
    adam_beta1: float = setting(0.9, "Decay rate of Adam's average of the gradients.")
    adam_beta2: float = setting(0.999, "Decay rate of Adam's average of the squared gradients.")
    adam_epsilon: float = setting(1e-8, "Keeps Adam from dividing by zero.")
    optim_target_modules: None | str | list[str] = setting(None, "Modules that a low-rank optimizer treats.")
    # One update.
    gradient_accumulation_steps: int = setting(1, "Forward and backward passes of one optimizer step.")
    average_tokens_across_devices: bool = setting(True, "Divide a loss over tokens by the tokens of all processes.")
    max_grad_norm: float = setting(1.0, "Scale gradients down to this norm; 0: leave them.")
    label_smoothing_factor: float = setting(0.0, "Part of the target that is spread over all classes.")
    # Precision.
    bf16: bool = setting(False, "Compute in bfloat16 where that is safe, keep weights in float32.")
    fp16: bool = setting(False, "Compute in float16 where that is safe, with loss scaling.")
    bf16_full_eval: bool = setting(False, "Cast the whole model to bfloat16 for evaluation.")
    fp16_full_eval: bool = setting(False, "Cast the whole model to float16 for evaluation.")
    tf32: bool | None = setting(None, "Allow TF32 matrix products; none given: torch's default.")
    # Memory and speed.
    activation_checkpointing: bool | None = setting(None, "Compute activations twice in place of keeping them.")
    activation_checkpointing_kwargs: dict[str, Any] | str | None = setting(None, "How to, as a dict.")
    gradient_checkpointing: bool | None = setting(None, "Another name of activation_checkpointing.")
    gradient_checkpointing_kwargs: dict[str, Any] | str | None = setting(
        None, "Another name of activation_checkpointing_kwargs."
    )
    torch_compile: bool = setting(False, "Compile the model.")
    torch_compile_backend: str | None = setting(None, "The compiler's backend; switches torch_compile on.")
    torch_compile_mode: str | None = setting(None, "The compiler's mode; switches torch_compile on.")
    use_liger_kernel: bool = setting(False, "Use the Liger kernels.")
    liger_kernel_config: dict[str, Any] | None = setting(None, "Which of the Liger kernels, as a dict.")
    use_cache: bool = setting(False, "Let a language model keep keys and values; of no use in training.")
    neftune_noise_alpha: float | None = setting(None, "Strength of the noise on embeddings (NEFTune).")
    torch_empty_cache_steps: int | None = setting(None, "Empty the device's memory cache every so many steps.")
    auto_find_batch_size: bool = setting(False, "Try smaller batches when the memory is too small.")
    # Logs.
    logging_strategy: IntervalStrategy | str = setting("steps", "When to log: no, steps, epoch.")
    logging_steps: float = setting(500, "Log every so many optimizer steps; below 1: a part of all steps.")
    logging_first_step: bool = setting(False, "Log the first step, too.")
    log_on_each_node: bool = setting(True, "One process of every machine speaks, not one in all.")
    logging_nan_inf_filter: bool = setting(True, "Leave infinite losses out of the logged mean; training sees them.")
    include_num_input_tokens_seen: str | bool = setting("no", "Count tokens: no, all, non_padding.")
    log_level: str = setting("passive", "What the main process says: debug ... critical; passive: as it is set.")
    log_level_replica: str = setting("warning", "What the other processes say.")
    disable_tqdm: bool | None = setting(None, "No progress bars; none given: by the log level.")
    report_to: None | str | list[str] = setting("none", "Where the logs go beside the screen.")
    run_name: str | None = setting(None, "A name of the run for those.")
    project: str = setting("huggingface", "A project of theirs.")
    trackio_space_id: str | None = setting(None, "Where Trackio shows the run.")
    trackio_bucket_id: str | None = setting(None, "Where Trackio keeps the run.")
    trackio_static_space_id: str | None = setting(None, "Where Trackio keeps a fixed view of the run.")
    # Evaluation.
    eval_strategy: IntervalStrategy | str = setting("no", "When to evaluate: no, steps, epoch.")
    eval_steps: float | None = setting(None, "Evaluate every so many optimizer steps; none given: logging_steps.")
    eval_delay: float = setting(0, "Epochs or steps (by eval_strategy) before the first evaluation.")
    per_device_eval_batch_size: int = setting(8, "Samples of one device in one forward pass of an evaluation.")
    prediction_loss_only: bool = setting(False, "Gather the loss only, no predictions.")
    eval_on_start: bool = setting(False, "Evaluate before the first step.")
    eval_do_concat_batches: bool = setting(True, "Join the predictions of all batches; else a list of batches.")
    eval_use_gather_object: bool = setting(False, "Gather objects that are no tensors.")
    eval_accumulation_steps: int | None = setting(None, "Move predictions to the CPU every so many batches.")
    include_for_metrics: list[str] = field(
        default_factory=list, metadata={"help": "What else compute_metrics gets: inputs, loss."}
    )
    batch_eval_metrics: bool = setting(False, "Call compute_metrics for each batch.")
    # Checkpoints.
    save_only_model: bool = setting(False, "Save the weights, not what a resumed training needs.")
    save_strategy: SaveStrategy | str = setting("steps", "When to save: no, steps, epoch, best.")
    save_steps: float = setting(500, "Save every so many optimizer steps; below 1: a part of all steps.")
    save_on_each_node: bool = setting(False, "Save on every machine.")
    save_total_limit: int | None = setting(None, "Keep so many checkpoints: the newest, and the best one always.")
    enable_jit_checkpoint: bool = setting(False, "Save when the process is asked to end.")
    # Upload.
    push_to_hub: bool = setting(False, "Upload the model when it is saved.")
    hub_token: str | None = setting(None, "The secret for it.")
    hub_private_repo: bool | None = setting(None, "Whether others may see the upload.")
    hub_model_id: str | None = setting(None, "Its name there.")
    hub_strategy: HubStrategy | str = setting("every_save", "What to upload, and when.")
    hub_always_push: bool = setting(False, "Start an upload while another one runs.")
    hub_revision: str | None = setting(None, "The branch to upload to.")
    # The best model.
    load_best_model_at_end: bool = setting(False, "Go back to the best checkpoint after the training.")
    metric_for_best_model: str | None = setting(None, "What makes it the best: a name of the evaluation's metrics.")
    greater_is_better: bool | None = setting(None, "Whether more of it is better; none given: unless it is a loss.")
    # Going on after a stop, and chance.
    ignore_data_skip: bool = setting(False, "Start the data anew in a resumed training.")
    restore_callback_states_from_checkpoint: bool = setting(False, "Give callbacks their saved state back.")
    full_determinism: bool = setting(False, "Deterministic algorithms only; slower.")
    seed: int = setting(42, "The seed of everything.")
    data_seed: int | None = setting(None, "The seed of the data order; none given: seed.")
    # Where it runs.
    use_cpu: bool = setting(False, "Use the CPU even where there is an accelerator.")
    accelerator_config: dict[str, Any] | str | None = setting(None, "Settings of the Accelerator: a dict or a file.")
    parallelism_config: dict[str, Any] | str | Any | None = setting(None, "How to split the model.")
    # Data.
    dataloader_drop_last: bool = setting(False, "Leave a short last batch out.")
    dataloader_num_workers: int = setting(0, "Processes that read data; 0: this one.")
    dataloader_pin_memory: bool = setting(True, "Keep batches in pinned memory.")
    dataloader_persistent_workers: bool = setting(False, "Keep those processes between passes.")
    dataloader_prefetch_factor: int | None = setting(None, "Batches that each of them reads ahead.")
    dataloader_multiprocessing_context: str | None = setting(None, "How they are started: fork, spawn, forkserver.")
    dataloader_in_order: bool = setting(True, "Take batches in order, not as they come.")
    remove_unused_columns: bool = setting(True, "Leave out columns that the model's forward does not take.")
    label_names: list[str] | None = setting(None, "The keys of a batch that are labels; none given: by forward.")
    train_sampling_strategy: str = setting("random", "The order of the data: random, sequential, group_by_length.")
    length_column_name: str = setting("length", "The column that holds the length of each sample.")
    # Several processes.
    ddp_find_unused_parameters: bool | None = setting(None, "As DistributedDataParallel's.")
    ddp_bucket_cap_mb: int | None = setting(None, "As DistributedDataParallel's.")
    ddp_broadcast_buffers: bool | None = setting(None, "As DistributedDataParallel's.")
    ddp_static_graph: bool | None = setting(None, "As DistributedDataParallel's.")
    ddp_backend: str | None = setting(None, "The backend of torch.distributed.")
    ddp_timeout: int = setting(1800, "Seconds before a collective fails.")
    fsdp: None | str | list[str] = setting(
        None, "Shard the model: True, or full_shard, shard_grad_op, offload, auto_wrap."
    )
    fsdp_config: dict[str, Any] | str | None = setting(None, "How: a dict or a file.")
    deepspeed: dict[str, Any] | str | None = setting(None, "Settings of DeepSpeed: a dict or a file.")
    # Finding faults.
    debug: str | list[str] = setting("", "underflow_overflow: find where numbers stop being finite.")
    skip_memory_metrics: bool = setting(True, "Leave memory out of the metrics.")
    # Not read by the Trainer; for scripts.
    do_train: bool = setting(False, "For scripts: whether to train.")
    do_eval: bool = setting(False, "For scripts: whether to evaluate.")
    do_predict: bool = setting(False, "For scripts: whether to predict.")
    resume_from_checkpoint: str | None = setting(None, "A checkpoint to go on from; True or auto: the newest.")
    local_rank: int = setting(-1, "Of old launchers; see local_process_index.")
    # Echelon's own.
    engine: str | None = extra(
        None, "single, dp, ddp, zero1, fsdp2 or deepspeed; none given: by processes and devices."
    )
    max_time: float | str | timedelta | None = extra(None, "End after this time: seconds, 90m, 12h, or h:mm:ss.")
    fast_dev_run: int = extra(0, "Try everything out: so many steps and batches (True: 1), no checkpoints, no reports.")
    limit_train_batches: float | None = extra(None, "Batches of a pass; below 1: a part of them.")
    limit_eval_batches: float | None = extra(None, "Batches of an evaluation; below 1: a part of them.")
    stop_on_nan: bool = extra(False, "End at the first loss or gradient that is not finite, and name the tensor.")
    checkpoint_format: str | None = extra(
        None, "How checkpoints are written: echelon, transformers; none given: echelon."
    )
    max_failed_saves: int = extra(3, "So many checkpoints in a row that the disk did not take end the training.")
    save_on_exception: bool = extra(False, "Save what was trained when an error ends the training.")
    save_on_signal: bool = extra(False, "On SIGTERM or SIGUSR1 save after the step, and end with exit code 143.")
    parity: str | None = extra(None, "exact: the same updates on any number of processes; bitwise: the same bits.")
    global_batch_size: int | None = extra(None, "With parity: samples of one optimizer step, over all processes.")
    max_micro_batch_size: int | None = extra(None, "With parity: most samples in one pass; none given: per device.")
    canonical_shards: int | None = extra(None, "With parity='bitwise': parts of an update, summed in a fixed order.")
    already_sharded: str | None = extra(  # not also bool: transformers' argument parser takes one type and None
        None, "Each process is given its own share: True, train, eval; False: never; none given: as it is recognised."
    )
    allow_changed_data: bool = extra(
        False, "Go on from the middle of an epoch although the data are others now; from where is told."
    )
    log_throughput: bool = extra(False, "Log samples and steps per second of the steps since the last log.")

    logging_dir: ClassVar[str | None] = None
