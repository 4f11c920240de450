"""TRL's files: TrainingArguments with more fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_TRLS_OWN = frozenset(
    """dataset_name dataset_config dataset_train_split dataset_test_split dataset_mixer dataset_mixture dataset_splits
    dataset_text_field dataset_kwargs use_peft lora_task_type lora_modules_to_save assistant_only_loss
    completion_only_loss packing_strategy padding_free max_prompt_length max_completion_length num_generations
    precompute_ref_log_probs steps_per_generation use_vllm model_init_kwargs chat_template_path""".split()
)
"""Keys that no script has by chance."""

TRL_ARGUMENTS = _TRLS_OWN | frozenset(
    """model_name_or_path model_revision trust_remote_code attn_implementation dtype torch_dtype load_in_4bit
    load_in_8bit bnb_4bit_quant_type bnb_4bit_quant_storage use_bnb_nested_quant lora_r lora_alpha lora_dropout
    lora_target_modules lora_target_parameters use_rslora use_dora datasets streaming dataset_streaming test_split_size
    dataset_num_proc dataset_configs dataset_batch_size preprocessing_num_workers auto_insert_empty_system_msg
    chat_template eos_token pad_token pad_to_multiple_of max_length max_seq_length packing eval_packing truncation_mode
    activation_offloading shuffle_dataset loss_type loss_weights beta label_smoothing ld_alpha rpo_alpha
    f_divergence_type f_alpha_divergence_coef reference_free disable_dropout use_logits_to_keep use_liger_loss
    force_use_ref_model ref_model_init_kwargs ref_adapter_name model_adapter_name sync_ref_model ref_model_mixup_alpha
    ref_model_sync_steps precompute_ref_batch_size base_model_attribute_name discopop_tau generate_during_eval
    desirable_weight undesirable_weight simpo_gamma cpo_alpha alpha gamma is_encoder_decoder label_pad_token_id
    padding_value center_rewards_coefficient reward_model_path reward_weights reward_funcs scale_rewards
    generation_batch_size generation_kwargs num_generations_eval num_iterations epsilon epsilon_high delta
    importance_sampling_level mask_truncated_completions top_entropy_quantile temperature top_p top_k min_p
    repetition_penalty cache_implementation ds3_gather_for_generation log_completions num_completions_to_print
    wandb_log_unique_prompts log_unique_prompts cast_lm_head_to_fp32 max_new_tokens missing_eos_penalty judge
    vllm_mode vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout vllm_gpu_memory_utilization
    vllm_tensor_parallel_size vllm_model_impl vllm_max_model_length vllm_enable_sleep_mode
    vllm_importance_sampling_correction vllm_importance_sampling_cap vllm_guided_decoding_regex vllm_group_port
    use_transformers_paged router_aux_loss_coef overwrite_output_dir hub_model_revision env ignore_bias_buffers
    accelerate_config num_processes""".split()
)
"""Fields that TRL 0.24's and 1.16's classes, and the alignment handbook's scripts around them, have beside those of
TrainingArguments."""


def is_trls(values: Mapping[str, Any]) -> bool:
    """Whether the file is for a script around TRL's parser."""
    return bool(_TRLS_OWN & set(values)) and not {"finetuning_type", "cutoff_len", "template"} & set(values)
