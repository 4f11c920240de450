"""The keys of an accelerate config."""

from __future__ import annotations

KEYS = frozenset(
    """compute_environment distributed_type mixed_precision use_cpu debug num_processes machine_rank num_machines
    gpu_ids main_process_ip main_process_port rdzv_backend same_network main_training_function enable_cpu_affinity
    fp8_config deepspeed_config fsdp_config parallelism_config megatron_lm_config mpirun_config downcast_bf16
    tpu_name tpu_zone tpu_use_cluster tpu_use_sudo command_file commands tpu_vm tpu_env dynamo_config fp16
    dynamo_backend""".split()
)
"""What ClusterConfig takes, and two old keys that it converts."""

TYPES = tuple(
    """NO MULTI_CPU MULTI_GPU MULTI_NPU MULTI_MLU MULTI_SDAA MULTI_MUSA MULTI_XPU DEEPSPEED FSDP XLA MEGATRON_LM
    MULTI_HPU MULTI_NEURON""".split()
)

BLOCKS = {
    "deepspeed_config": """deepspeed_config_file zero_stage offload_optimizer_device offload_param_device
        offload_optimizer_nvme_path offload_param_nvme_path gradient_accumulation_steps gradient_clipping
        zero3_init_flag zero3_save_16bit_model deepspeed_hostfile deepspeed_exclusion_filter deepspeed_inclusion_filter
        deepspeed_multinode_launcher deepspeed_moe_layer_cls_names""".split(),
    "fsdp_config": """fsdp_version fsdp_offload_params fsdp_min_num_params fsdp_sharding_strategy
        fsdp_reshard_after_forward fsdp_auto_wrap_policy fsdp_transformer_layer_cls_to_wrap fsdp_backward_prefetch
        fsdp_state_dict_type fsdp_forward_prefetch fsdp_use_orig_params fsdp_cpu_ram_efficient_loading
        fsdp_sync_module_states fsdp_activation_checkpointing fsdp_activation_checkpointing_offload
        fsdp_ignored_modules""".split(),
    "dynamo_config": """dynamo_backend dynamo_mode dynamo_use_fullgraph dynamo_use_dynamic
        dynamo_use_regional_compilation""".split(),
}
"""The keys of the blocks that are checked."""

DEEPSPEED_AT = "deepspeed_config.deepspeed_config_file"
"""Where it names a DeepSpeed file."""
