"""The keys of a LLaMA-Factory YAML: its own, and every field of transformers' TrainingArguments."""

from __future__ import annotations

from tightfit.inputs.versions import release
from tightfit.job.training_arguments import OLDER_TRAINING_ARGUMENTS, TRAINING_ARGUMENTS

OWN_KEYS = frozenset(
    """model_name_or_path adapter_name_or_path adapter_folder cache_dir use_fast_tokenizer resize_vocab
    split_special_tokens add_tokens add_special_tokens new_special_tokens_config init_special_tokens model_revision
    low_cpu_mem_usage rope_scaling flash_attn shift_attn mixture_of_depths use_unsloth use_unsloth_gc
    enable_liger_kernel moe_aux_loss_coef disable_gradient_checkpointing use_reentrant_gc upcast_layernorm
    upcast_lmhead_output train_from_scratch infer_backend offload_folder use_kv_cache use_v1_kernels infer_dtype
    hf_hub_token ms_hub_token om_hub_token print_param_status trust_remote_code quantization_method quantization_bit
    quantization_type double_quantization quantization_device_map image_max_pixels image_min_pixels
    image_do_pan_and_scan crop_to_patches video_max_pixels video_min_pixels video_fps video_maxlen use_audio_in_video
    audio_sampling_rate image_resolution video_resolution export_dir export_size export_device
    export_quantization_bit export_quantization_dataset export_quantization_nsamples export_quantization_maxlen
    export_legacy_format export_hub_model_id vllm_maxlen vllm_gpu_util vllm_enforce_eager vllm_max_lora_rank
    vllm_config sglang_maxlen sglang_mem_fraction sglang_tp_size sglang_config sglang_lora_backend use_kt
    kt_weight_path kt_expert_checkpoint_path kt_use_lora_experts kt_lora_expert_num kt_lora_expert_intermediate_size
    kt_optimize_rule cpu_infer chunk_size mode kt_maxlen kt_use_cuda_graph kt_mode kt_force_think
    template dataset eval_dataset dataset_dir media_dir cutoff_len train_on_prompt mask_history streaming
    buffer_size mix_strategy interleave_probs overwrite_cache preprocessing_batch_size preprocessing_num_workers
    max_samples eval_num_beams ignore_pad_token_for_loss val_size eval_on_each_dataset packing neat_packing
    tool_format default_system enable_thinking preserve_thinking tokenized_path data_shared_file_system
    freeze_trainable_layers freeze_trainable_modules freeze_extra_modules additional_target lora_alpha lora_dropout
    lora_rank lora_target loraplus_lr_ratio loraplus_lr_embedding use_rslora use_dora pissa_init pissa_iter
    pissa_convert create_new_adapter module_dropout oft_rank oft_block_size oft_target pref_beta pref_ftx
    pref_bco_weight pref_loss dpo_label_smoothing kto_chosen_weight kto_rejected_weight simpo_gamma ppo_buffer_size
    ppo_epochs ppo_score_norm ppo_target ppo_whiten_rewards ref_model ref_model_adapters ref_model_quantization_bit
    reward_model reward_model_adapters reward_model_quantization_bit reward_model_type ld_alpha use_galore
    galore_target galore_rank galore_update_interval galore_scale galore_proj_type galore_layerwise use_apollo
    apollo_target apollo_rank apollo_update_interval apollo_scale apollo_proj apollo_proj_type apollo_scale_type
    apollo_layerwise apollo_scale_front use_badam badam_mode badam_start_block badam_switch_mode
    badam_switch_interval badam_update_ratio badam_mask_mode badam_verbose use_swanlab swanlab_project
    swanlab_workspace swanlab_run_name swanlab_mode swanlab_api_key swanlab_logdir swanlab_lark_webhook_url
    swanlab_lark_secret pure_bf16 stage finetuning_type use_llama_pro use_adam_mini use_mca use_hyper_parallel
    hyper_parallel_args use_muon use_dft_loss use_asft_loss asft_alpha use_eaft_loss eaft_alpha freeze_vision_tower
    freeze_multi_modal_projector freeze_language_model compute_accuracy disable_shuffling early_stopping_steps
    plot_loss include_effective_tokens_per_second do_sample temperature top_p top_k num_beams max_length
    max_new_tokens repetition_penalty length_penalty skip_special_tokens ray_num_workers ray_init_kwargs ray_run_name
    ray_storage_path ray_storage_filesystem resources_per_worker placement_strategy master_addr master_port
    enable_torch_profiler profiler_output_dir profiler_wait_steps profiler_warmup_steps profiler_active_steps
    profiler_repeat profiler_record_shapes profiler_profile_memory profiler_with_stack profile_modules fp8
    fp8_backend fp8_enable_fsdp_float8_all_gather overwrite_output_dir""".split()
)
"""LLaMA-Factory's own keys, from 0.9.0 to 0.9.6."""

KNOWN = TRAINING_ARGUMENTS | OLDER_TRAINING_ARGUMENTS | OWN_KEYS

FIELD_OF = {
    "lora_alpha": "lora.alpha",
    "lora_dropout": "lora.dropout",
    "max_samples": "max_samples",
    "learning_rate": "learning_rate",
    "lr_scheduler_type": "schedule",
    "warmup_ratio": "warmup",
    "warmup_steps": "warmup",
    "num_train_epochs": "epochs",
    "max_steps": "max_steps",
    "weight_decay": "weight_decay",
    "seed": "seed",
    "val_size": "evaluation.split",
    "eval_steps": "evaluation.every_steps",
    "output_dir": "saving.folder",
    "save_steps": "saving.every_steps",
    "save_total_limit": "saving.keep_last",
    "template": "data.template",
    "packing": "data.packing",
    "neat_packing": "data.packing",
    "trust_remote_code": "trust_remote_code",
}
"""A key of the YAML → the field of the job that takes its value as it is."""


LLAMAFACTORY_ADDED = {
    "0.9.3": """add_special_tokens add_tokens audio_sampling_rate crop_to_patches data_shared_file_system
        early_stopping_steps enable_thinking eval_on_each_dataset image_do_pan_and_scan ld_alpha ray_init_kwargs
        sglang_config sglang_lora_backend sglang_maxlen sglang_mem_fraction sglang_tp_size swanlab_lark_secret
        swanlab_lark_webhook_url use_audio_in_video use_muon""",
    "0.9.4": """fp8 fp8_backend fp8_enable_fsdp_float8_all_gather init_special_tokens module_dropout
        new_special_tokens_config oft_block_size oft_rank oft_target pref_bco_weight use_dft_loss use_kt use_kv_cache
        use_mca use_v1_kernels""",
    "0.9.5": """asft_alpha eaft_alpha enable_torch_profiler hyper_parallel_args kt_expert_checkpoint_path
        kt_lora_expert_intermediate_size kt_lora_expert_num kt_use_lora_experts kt_weight_path master_addr master_port
        preserve_thinking profile_modules profiler_active_steps profiler_output_dir profiler_profile_memory
        profiler_record_shapes profiler_repeat profiler_wait_steps profiler_warmup_steps profiler_with_stack
        use_asft_loss use_eaft_loss use_hyper_parallel""",
}
"""LLaMA-Factory's release → the keys that it brought."""

LLAMAFACTORY_GONE = {
    "image_resolution": ("0.9.2", "image_max_pixels"),
    "video_resolution": ("0.9.2", "video_max_pixels"),
    "new_special_tokens": ("0.9.3", "add_special_tokens"),
    "chunk_size": ("0.9.5", None),
    "cpu_infer": ("0.9.5", None),
    "kt_force_think": ("0.9.5", None),
    "kt_maxlen": ("0.9.5", None),
    "kt_mode": ("0.9.5", None),
    "kt_optimize_rule": ("0.9.5", None),
    "kt_use_cuda_graph": ("0.9.5", None),
    "mode": ("0.9.5", None),
    "placement_strategy": ("0.9.5", None),
    "ray_run_name": ("0.9.5", None),
    "ray_storage_filesystem": ("0.9.5", None),
    "ray_storage_path": ("0.9.5", None),
    "resources_per_worker": ("0.9.5", None),
}
"""LLaMA-Factory's key → the release that no longer takes it, and what took its place."""

TEMPLATES_SINCE = {
    "0.9.2": """alpaca aquila atom baichuan baichuan2 bailing belle bluelm breeze chatglm2 chatglm3 chatml chatml_de
        codegeex2 codegeex4 cohere cpm cpm3 custom dbrx deepseek deepseek3 deepseekcoder default empty exaone falcon
        fewshot gemma glm4 granite3 index intern intern2 llama2 llama2_zh llama3 llava llava_next llava_next_llama3
        llava_next_mistral llava_next_qwen llava_next_video llava_next_video_mistral llava_next_video_yi llava_next_yi
        marco minicpm_o minicpm_v ministral mistral mistral_small mllama moonlight olmo openchat openchat-3.6 opencoder
        orion paligemma paligemma_chat phi phi4 phi_small pixtral qwen qwen2_audio qwen2_vl sailor skywork_o1 solar
        starchat telechat telechat2 vicuna video_llava xuanyuan xverse yayi yi yi_vl yuan zephyr ziya""",
    "0.9.3": """cpm4 deepseekr1 gemma3 glmz1 granite3_vision hunyuan intern_vl kimi_vl llama4 mimo mimo_vl qwen2_omni
        qwen3 seed_coder smollm smollm2""",
    "0.9.4": """bailing_v2 dots_ocr ernie ernie_nothink ernie_vl falcon_h1 gemma2 gemma3n glm4_5v glm4_moe glm4v gpt_oss
        granite4 intern_s1 keye_vl mimo_v2 minimax1 minimax2 ministral3 qwen3_nothink qwen3_omni qwen3_omni_nothink
        qwen3_vl qwen3_vl_nothink seed_oss""",
    "0.9.5": """aeva gemma4 gemma4n glm4_7 glm_ocr hunyuan_small hy3 lfm2 lfm2_vl minicpm_v_4_6 phi4_mini qwen3_5
        qwen3_5_nothink qwen3_6 youtu youtu_vl""",
}
"""LLaMA-Factory's release → the chat templates that it brought."""

TEMPLATES_GONE = {
    "0.9.5": """aquila atom baichuan baichuan2 belle bluelm chatglm2 codegeex2 codegeex4 cpm cpm3 intern marco orion
        skywork_o1 telechat xverse yayi ziya""",
}

TEMPLATES_READ = ("0.9.2", "0.9.5")
"""The first and the last release whose templates are listed here."""

OMEGACONF_SINCE = "0.9.4"
"""From here on LLaMA-Factory reads YAML with OmegaConf, for which `1e-4` is a number; before, with PyYAML."""

BROKEN_JSON_SINCE = "0.9.5"
"""From here on `llamafactory-cli train FILE.json` dies in `json.load` of a path."""


def templates(version: str) -> frozenset[str] | None:
    """The chat templates of a LLaMA-Factory release; None where nobody looked."""
    first, last = map(release, TEMPLATES_READ)
    if not first <= release(version) <= last:
        return None
    known: set[str] = set()
    for since, names in TEMPLATES_SINCE.items():
        if release(version) >= release(since):
            known.update(names.split())
    for gone, names in TEMPLATES_GONE.items():
        if release(version) >= release(gone):
            known.difference_update(names.split())
    return frozenset(known)
