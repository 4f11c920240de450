"""transformers' TrainingArguments: its fields, and its names for the optimizers. Job files may be in that form too."""

from __future__ import annotations

from tightfit.types import Optimizer

TRAINING_ARGUMENTS = frozenset(
    """output_dir per_device_train_batch_size num_train_epochs max_steps learning_rate lr_scheduler_type
    lr_scheduler_kwargs warmup_steps optim optim_args weight_decay adam_beta1 adam_beta2 adam_epsilon
    optim_target_modules gradient_accumulation_steps average_tokens_across_devices max_grad_norm
    label_smoothing_factor bf16 fp16 bf16_full_eval fp16_full_eval tf32 gradient_checkpointing
    gradient_checkpointing_kwargs torch_compile torch_compile_backend torch_compile_mode use_liger_kernel
    liger_kernel_config use_cache neftune_noise_alpha torch_empty_cache_steps auto_find_batch_size logging_strategy
    logging_steps logging_first_step log_on_each_node logging_nan_inf_filter include_num_input_tokens_seen log_level
    log_level_replica disable_tqdm report_to run_name project trackio_space_id trackio_bucket_id
    trackio_static_space_id eval_strategy eval_steps eval_delay per_device_eval_batch_size prediction_loss_only
    eval_on_start eval_do_concat_batches eval_use_gather_object eval_accumulation_steps include_for_metrics
    batch_eval_metrics save_only_model save_strategy save_steps save_on_each_node save_total_limit
    enable_jit_checkpoint push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push
    hub_revision load_best_model_at_end metric_for_best_model greater_is_better ignore_data_skip
    restore_callback_states_from_checkpoint full_determinism seed data_seed use_cpu accelerator_config
    parallelism_config dataloader_drop_last dataloader_num_workers dataloader_pin_memory
    dataloader_persistent_workers dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order
    remove_unused_columns label_names train_sampling_strategy length_column_name ddp_find_unused_parameters
    ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend ddp_timeout fsdp fsdp_config deepspeed debug
    skip_memory_metrics do_train do_eval do_predict resume_from_checkpoint local_rank sortish_sampler
    predict_with_generate generation_max_length generation_num_beams generation_config""".split()
)
"""The fields of transformers' Seq2SeqTrainingArguments, which LLaMA-Factory's own class extends."""

OLDER_TRAINING_ARGUMENTS = frozenset(
    """evaluation_strategy warmup_ratio logging_dir save_safetensors no_cuda use_mps_device jit_mode_eval use_ipex
    fp16_opt_level half_precision_backend fp16_backend tpu_num_cores tpu_metrics_debug past_index fsdp_min_num_params
    fsdp_transformer_layer_cls_to_wrap adafactor group_by_length include_inputs_for_metrics include_tokens_per_second
    per_gpu_train_batch_size per_gpu_eval_batch_size push_to_hub_model_id push_to_hub_organization push_to_hub_token
    mp_parameters torchdynamo ray_scope use_legacy_prediction_loop dispatch_batches split_batches""".split()
)
"""Fields of the transformers that LLaMA-Factory's older releases are used with."""

OPTIMIZERS: dict[str, Optimizer] = {
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw",
    "adamw_torch_xla": "adamw",
    "adamw_torch_npu_fused": "adamw",
    "adamw_apex_fused": "adamw",
    "adamw_hf": "adamw",
    "adamw_bnb_8bit": "adamw8bit",
    "adamw_8bit": "adamw8bit",
    "paged_adamw_8bit": "paged_adamw8bit",
    "adafactor": "adafactor",
    "sgd": "sgd",
}

UNPRICED_OPTIMIZERS = frozenset(
    """adamw_anyprecision adamw_torch_4bit adamw_torch_8bit ademamix ademamix_8bit adagrad lion_8bit lion_32bit
    paged_adamw_32bit paged_ademamix_32bit paged_ademamix_8bit paged_lion_32bit paged_lion_8bit rmsprop rmsprop_bnb
    rmsprop_bnb_8bit rmsprop_bnb_32bit galore_adamw galore_adamw_8bit galore_adafactor galore_adamw_layerwise
    galore_adamw_8bit_layerwise galore_adafactor_layerwise lomo adalomo grokadamw schedule_free_radam
    schedule_free_adamw schedule_free_sgd apollo_adamw apollo_adamw_layerwise stable_adamw""".split()
)
