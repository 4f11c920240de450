"""What LLaMA-Factory's releases know: keys and chat templates that came and went, read in their sources."""

from __future__ import annotations

from tightfit.inputs.versions import release

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
