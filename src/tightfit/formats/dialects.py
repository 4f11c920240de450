"""Configs of trainers that lint does not know, told by keys that are theirs alone.

Their keys overlap with those of LLaMA-Factory and TrainingArguments, so that a file would be taken for one of these
and every other line of it for a mistake. Such a file is declined in one sentence. TRL's files are TrainingArguments
with more fields, which are known here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Dialect(NamedTuple):
    """A trainer whose config is not checked."""

    name: str
    needs: frozenset[str]
    """Keys that such a file always has."""
    telling: frozenset[str]
    """Keys of its own, of which it has some."""
    least: int
    """So many of them."""


def _dialect(name: str, needs: str, telling: str, least: int) -> Dialect:
    return Dialect(name, frozenset(needs.split()), frozenset(telling.split()), least)


DIALECTS = (
    _dialect(
        "Axolotl",
        "base_model",
        """sequence_len datasets micro_batch_size num_epochs val_set_size sample_packing dataset_prepared_path adapter
        special_tokens lora_target_linear lora_model_dir saves_per_epoch evals_per_epoch optimizer lr_scheduler
        pretraining_dataset pad_to_sequence_len rl plugins wandb_entity""",
        3,
    ),
    _dialect(
        "LLaMA-Factory v1",
        "model",
        """model_class kernel_config dist_config quant_config peft_config train_dataset sample_backend init_config
        optim_config lr_scheduler_config batching_strategy export_config""",
        1,
    ),
    _dialect(
        "ms-swift",
        "model",
        """tuner_type train_type rlhf_type split_dataset_ratio model_author model_name dataset_num_proc target_modules
        torch_dtype sampler_type num_return_sequences add_version infer_backend adapters load_from_cache_file
        val_dataset lazy_tokenize use_hf attn_impl enable_thinking truncation_strategy global_batch_size""",
        2,
    ),
    _dialect(
        "ms-swift",
        "",
        "train_type tuner_type rlhf_type split_dataset_ratio sampler_type rollout_group train_group device_groups",
        2,
    ),
    _dialect(
        "open-instruct",
        "model_name_or_path",
        """with_tracking checkpointing_steps use_slow_tokenizer dataset_mix_dir dataset_mixer keep_last_n_checkpoints
        hf_metadata_dataset try_launch_beaker_eval_jobs add_bos use_qlora""",
        2,
    ),
    _dialect(
        "Megatron",
        "",
        """tensor_model_parallel_size pipeline_model_parallel_size num_layers num_attention_heads hidden_size
        ffn_hidden_size seq_length global_batch_size train_iters lr_decay_style no_load_optim language_model
        model_parallel transformer_impl""",
        3,
    ),
    _dialect("NeMo", "trainer exp_manager", "model trainer exp_manager", 1),
    _dialect("torchtune", "tokenizer model", "checkpointer loss metric_logger batch_size compile", 3),
    _dialect("LLM Foundry", "max_duration", "train_loader global_train_batch_size callbacks algorithms", 1),
    _dialect("LitGPT", "checkpoint_dir", "lora_r lora_query train eval out_dir devices", 3),
)

_LLAMAFACTORYS = frozenset("template stage cutoff_len lora_target quantization_bit do_train".split())


def dialect_of(values: Mapping[str, Any]) -> str | None:
    """Whose config it is, where it is somebody's whom lint does not know."""
    keys = set(values)
    if "finetuning_type" in keys or ("model_name_or_path" in keys and keys & _LLAMAFACTORYS):
        return None
    return next((each.name for each in DIALECTS if each.needs <= keys and len(each.telling & keys) >= each.least), None)


# --- TRL ----------------------------------------------------------------------------------------

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
