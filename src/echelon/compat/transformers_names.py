"""Names that the Trainer and related classes define in transformers 5.23; checked by ``tests/side_by_side``.

A subclass that defines one of these names expects the Trainer to use it (``trainer/unread_members.py``).
"""

from __future__ import annotations

TRAINER_MEMBERS = frozenset(
    """
    _attn_mask_causal_checked _build_accelerator_args _clip_grad_norm _created_lr_scheduler
    _defer_fsdp_gradient_reduction _determine_best_metric _eval_dataloaders _evaluate _finalize_training
    _finish_current_push _get_collator_with_removed_columns _get_dataloader _get_eval_sampler _get_grad_norm
    _get_learning_rate _get_num_items_in_batch _get_output_dir _get_train_sampler _globalstep_last_logged
    _has_mixed_mesh_grads _hp_search_setup _init_training_state _initial_global_step
    _initial_num_input_tokens_seen _inner_training_loop _issue_warnings_after_load _load_best_model
    _load_callback_state _load_from_checkpoint _load_optimizer_and_scheduler _load_rng_state _load_scaler
    _loggers_initialized _loss_shifts_labels _maybe_log_save_evaluate _memory_tracker _mixed_mesh_grad_norm
    _mixed_mesh_grads _move_model_to_device _prepare_context_parallel_inputs _prepare_for_training
    _prepare_input _prepare_inputs _push_from_checkpoint _remove_unused_columns _report_to_hp_search _run_epoch
    _save _save_checkpoint _save_optimizer_and_scheduler _save_rng_state _save_scaler
    _set_signature_columns_if_needed _signature_columns _sync_replicated_trainable_parameters _total_loss_scalar
    _tr_loss _track_num_input_tokens _train_batch_size _trial _tune_save_checkpoint _update_auto_batch_size
    _validate_args _wrap_model accelerator add_callback args autocast_smart_context_manager call_model_init
    callback_handler can_return_loss compute_loss compute_loss_context_manager compute_loss_func compute_metrics
    compute_objective control create_accelerator_and_postprocess create_model_card create_optimizer
    create_optimizer_and_scheduler create_scheduler current_flos current_gradient_accumulation_steps
    data_collator deepspeed end eval_dataset evaluate evaluation_loop floating_point_ops gather_function
    get_batch_samples get_cp_size get_decay_parameter_names get_eval_dataloader get_learning_rates
    get_num_trainable_parameters get_optimizer_cls_and_kwargs get_optimizer_group get_sp_size
    get_test_dataloader get_total_train_batch_size get_tp_size get_train_dataloader hp_name hp_search_backend
    hp_space hub_model_id hyperparameter_search init_hf_repo is_deepspeed_enabled
    is_distributed_loading_by_transformers is_fsdp_enabled is_fsdp_xla_enabled is_fsdp_xla_v1_enabled
    is_fsdp_xla_v2_enabled is_in_train is_local_process_zero is_model_parallel is_world_process_zero label_names
    label_smoother log log_metrics loss_is_scaled_for_ga lr_scheduler metrics_format model
    model_accepts_loss_kwargs model_init model_preparation_time model_wrapped neftune_hook_handle
    neftune_noise_alpha num_examples objective optimizer optimizer_cls_and_kwargs place_model_on_device
    pop_callback predict prediction_step preprocess_logits_for_metrics processing_class push_in_progress
    push_to_hub remove_callback save_metrics save_model save_state set_initial_training_values state store_flos
    train train_dataset training_step
    """.split()  # noqa: SIM905 - one name a line would be three pages
)
"""``Trainer`` methods, and the attributes that they set."""

ARGUMENTS_MEMBERS = frozenset(
    """
    _VALID_DICT_FIELDS _apply_legacy_fsdp_to_config _dict_dtype_to_str _n_gpu _no_sync_in_gradient_accumulation
    _process_fsdp_args _setup_devices _validate_args accelerator_config activation_checkpointing
    activation_checkpointing_kwargs adam_beta1 adam_beta2 adam_epsilon auto_find_batch_size
    average_tokens_across_devices batch_eval_metrics bf16 bf16_full_eval data_seed dataloader_drop_last
    dataloader_in_order dataloader_multiprocessing_context dataloader_num_workers dataloader_persistent_workers
    dataloader_pin_memory dataloader_prefetch_factor ddp_backend ddp_broadcast_buffers ddp_bucket_cap_mb
    ddp_find_unused_parameters ddp_static_graph ddp_timeout ddp_timeout_delta debug deepspeed deepspeed_plugin
    default_optim device disable_tqdm distributed_state do_eval do_predict do_train enable_jit_checkpoint
    eval_accumulation_steps eval_batch_size eval_delay eval_do_concat_batches eval_on_start eval_steps
    eval_strategy eval_use_gather_object fp16 fp16_full_eval fsdp fsdp_config fsdp_plugin_args full_determinism
    get_process_log_level get_warmup_steps gradient_accumulation_steps gradient_checkpointing
    gradient_checkpointing_kwargs greater_is_better hf_deepspeed_config hub_always_push hub_model_id
    hub_private_repo hub_revision hub_strategy hub_token ignore_data_skip include_for_metrics
    include_num_input_tokens_seen label_names label_smoothing_factor learning_rate length_column_name
    liger_kernel_config load_best_model_at_end local_process_index local_rank log_level log_level_replica
    log_on_each_node logging_first_step logging_nan_inf_filter logging_steps logging_strategy
    lr_scheduler_kwargs lr_scheduler_type main_process_first max_grad_norm max_steps metric_for_best_model
    mixed_precision n_gpu neftune_noise_alpha num_train_epochs optim optim_args optim_target_modules output_dir
    parallel_mode parallelism_config per_device_eval_batch_size per_device_train_batch_size
    place_model_on_device prediction_loss_only process_index project push_to_hub remove_unused_columns report_to
    restore_callback_states_from_checkpoint resume_from_checkpoint run_name save_on_each_node save_only_model
    save_steps save_strategy save_total_limit seed set_dataloader set_evaluate set_logging set_lr_scheduler
    set_optimizer set_push_to_hub set_save set_testing set_training should_log should_save skip_memory_metrics
    tf32 to_dict to_json_string to_sanitized_dict torch_compile torch_compile_backend torch_compile_mode
    torch_empty_cache_steps trackio_bucket_id trackio_space_id trackio_static_space_id train_batch_size
    train_sampling_strategy use_cache use_cpu use_liger_kernel warmup_steps weight_decay world_size
    xla_fsdp_config
    """.split()  # noqa: SIM905 - one name a line would be three pages
)
"""``TrainingArguments`` fields, properties and methods, and the attributes that they set."""

HANDLER_MEMBERS = frozenset(
    """
    add_callback call_event callback_list callbacks eval_dataloader lr_scheduler model on_epoch_begin
    on_epoch_end on_evaluate on_init_end on_log on_optimizer_step on_pre_optimizer_step on_predict
    on_prediction_step on_push_begin on_save on_step_begin on_step_end on_substep_end on_train_begin
    on_train_end optimizer pop_callback processing_class remove_callback train_dataloader
    """.split()  # noqa: SIM905 - one name a line would be three pages
)
"""``CallbackHandler`` methods and attributes."""
