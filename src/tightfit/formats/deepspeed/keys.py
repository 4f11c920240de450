"""The keys of a DeepSpeed config, block by block; a test watches which ones the installed DeepSpeed asks for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tightfit.inputs.versions import Release, release
from tightfit.messages import Message
from tightfit.types import ConfigError

_WORDS: dict[str, str] = {
    "": """train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps managed_gradient_accumulation
        optimizer scheduler zero_allow_untested_optimizer zero_force_ds_cpu_optimizer zero_optimization
        fp16 bf16 bfloat16 torch_autocast data_types communication_data_type seq_parallel_communication_data_type
        gradient_clipping prescale_gradients gradient_predivide_factor gradient_allreduce_op disable_allgather
        activation_checkpointing aio checkpoint datastates_ckpt pipeline compile tensor_parallel expert_parallel
        sequence_parallel_size data_parallel_size use_data_before_expert_parallelism hybrid_engine
        weight_quantization data_efficiency dataloader_drop_last vocabulary_size steps_per_print dump_state
        disable_python_gc wall_clock_breakdown memory_breakdown log_level timers flops_profiler autotuning
        comms_logger tensorboard wandb csv_monitor comet""",
    "optimizer": "type params legacy_fusion",
    "optimizer.params": """lr betas eps weight_decay amsgrad bias_correction adam_w_mode torch_adam set_grad_none
        fp32_optimizer_states momentum dampening nesterov beta2_decay d foreach fused maximize capturable
        differentiable""",
    "scheduler": "type params",
    "scheduler.params": """warmup_min_lr warmup_max_lr warmup_num_steps warmup_type total_num_steps warmup_min_ratio
        cos_min_ratio last_batch_iteration lr_range_test_min_lr lr_range_test_step_size lr_range_test_step_rate
        lr_range_test_staircase cycle_min_lr cycle_max_lr decay_lr_rate cycle_first_step_size cycle_second_step_size
        cycle_first_stair_count cycle_second_stair_count decay_step_size cycle_momentum cycle_min_mom cycle_max_mom
        decay_mom_rate""",
    "zero_optimization": """stage contiguous_gradients reduce_scatter reduce_bucket_size allgather_partitions
        allgather_bucket_size use_multi_rank_bucket_allreduce overlap_comm compute_grad_norm load_from_fp32_weights
        elastic_checkpoint offload_param offload_optimizer zenflow sub_group_size cpu_offload cpu_offload_param
        cpu_offload_use_pin_memory stage3_gather_fp16_weights_on_model_save ignore_unused_parameters legacy_stage1
        round_robin_gradients parameter_alignment zero_hpz_partition_size zero_quantized_weights
        zero_quantized_nontrainable_weights zero_quantized_gradients memory_efficient_linear
        pipeline_loading_checkpoint override_module_apply log_trace_cache_warnings enable_sanity_checks
        save_muon_momentum_buffer_in_memory leaf_module""",
    "zero_optimization.offload_param": "device nvme_path buffer_count buffer_size max_in_cpu pin_memory",
    "zero_optimization.offload_optimizer": """device nvme_path buffer_count pin_memory pipeline_read pipeline_write
        fast_init ratio super_offload cpuadam_cores_perc""",
    "zero_optimization.zenflow": """topk_ratio select_strategy select_interval update_interval overlap_step offload
        auto_ratio full_warm_up_rounds pt_reserved_cores_perc steps_per_epoch""",
    "zero_optimization.leaf_module": "classes names name_suffixes",
    "fp16": """enabled auto_cast loss_scale initial_scale_power loss_scale_window hysteresis consecutive_hysteresis
        min_loss_scale fp16_master_weights_and_grads""",
    "bf16": "enabled immediate_grad_update check_grad_overflow bf16_master_weights_and_grads bf16_optimizer_states",
    "torch_autocast": "enabled dtype lower_precision_safe_modules",
    "data_types": "grad_accum_dtype param_dtype buffer_dtype keep_in_fp32_modules",
    "activation_checkpointing": """partition_activations number_checkpoints contiguous_memory_optimization
        synchronize_checkpoint_boundary profile cpu_checkpointing""",
    "aio": "block_size queue_depth intra_op_parallelism single_submit overlap_events use_gds",
    "checkpoint": "tag_validation load_universal use_node_local_storage parallel_write checkpoint_serialization writer",
    "checkpoint.parallel_write": "pipeline_stage",
    "checkpoint.writer": "type io_buffer_size io_buffer_double show_statistics data_parallel decoupled io_multiplier",
    "pipeline": """stages partition seed_layers activation_checkpoint_interval pipe_partitioned grad_partitioned
        use_reentrant""",
    "compile": """deepcompile autoep_non_moe free_activation free_activation_threshold offload_activation
        offload_activation_pin_memory offload_opt_states double_buffer symmetric_memory debug_log offload_parameters
        sync_before_reduce sync_after_reduce sync_before_allgather sync_after_allgather keep_int_input_tensors
        keep_all_input_tensors passes""",
    "tensor_parallel": """dtype autotp_size tp_overlap_comm vocab_parallel_lm_head vocab_parallel_ce_backend
        tensor_parallel tp injection_policy_tuple partition_config preset_model keep_module_on_host
        replace_with_kernel_inject kernel_inject""",
    "tensor_parallel.tp": "tp_size tp_grain_size mpu tp_group",
    "expert_parallel": """enabled autoep_size expert_tensor_parallel_size validate_folding_routing async_split_plan
        preset_model moe_layer_pattern expert_pattern router_pattern use_grouped_mm disable_triton_grouped_mm
        route_norm route_scale score_apply combine_impl row_weighting_impl gate_up_impl comm_backend comm_num_sm
        comm_qp_margin comm_max_tokens_per_rank num_expert_groups num_limited_groups score_func top_k
        load_balance_coeff routed_scaling_factor expert_w1 expert_w2 expert_w3 num_experts_attr top_k_attr
        has_shared_experts shared_experts_pattern shared_experts_gate_pattern expert_activation""",
    "hybrid_engine": """enabled max_out_tokens inference_tp_size release_inference_cache pin_parameters
        tp_gather_partition_size enable_cuda_graph""",
    "weight_quantization": "enabled num_bits q_type q_groups quantized_initialization post_init_quant",
    "data_efficiency": "enabled seed data_sampling data_routing",
    "data_efficiency.data_sampling": "enabled num_epochs num_workers pin_memory curriculum_learning dynamic_batching",
    "data_efficiency.data_sampling.dynamic_batching": """enabled metrics_path lr_scaling_method min_batch_size
        max_batch_size sequence_picking_order max_tokens verbose""",
    "data_efficiency.data_routing": "enabled random_ltd",
    "timers": "throughput",
    "timers.throughput": "enabled synchronized",
    "flops_profiler": "enabled recompute_fwd_factor profile_step module_depth top_modules detailed output_file",
    "autotuning": """enabled fast results_dir exps_dir overwrite start_profile_step end_profile_step metric
        metric_path tuner_type tuner_early_stopping tuner_num_trials arg_mappings model_info model_info_path mp_size
        max_train_batch_size min_train_batch_size max_train_micro_batch_size_per_gpu
        min_train_micro_batch_size_per_gpu num_tuning_micro_batch_sizes""",
    "autotuning.model_info": "profile num_params hidden_size num_layers",
    "comms_logger": "enabled prof_all prof_ops verbose debug",
    "tensorboard": "enabled output_path job_name",
    "csv_monitor": "enabled output_path job_name",
    "wandb": "enabled group team project",
    "comet": "enabled samples_log_interval project workspace api_key experiment_name experiment_key online mode",
}

PREFIXED = """prefetch_bucket_size param_persistence_threshold model_persistence_threshold max_live_parameters
    max_reuse_distance gather_16bit_weights_on_model_save module_granularity_threshold allgather_sequential
    use_all_reduce_for_fetch_params""".split()
"""Keys of zero_optimization that may be written with `stage3_` in front or without, but not both."""

KEYS: dict[str, frozenset[str]] = {path: frozenset(words.split()) for path, words in _WORDS.items()}
"""Every key that DeepSpeed reads, by the path of its block. Blocks that are not listed take anything."""
KEYS["zero_optimization"] = KEYS["zero_optimization"].union(PREFIXED, (f"stage3_{key}" for key in PREFIXED))
KEYS["bfloat16"] = KEYS["bf16"]
KEYS["tensor_parallel.tensor_parallel"] = KEYS["tensor_parallel.tp"]

LOUD = frozenset(
    """fp16 bf16 bfloat16 compile tensor_parallel tensor_parallel.tp tensor_parallel.tensor_parallel hybrid_engine
    weight_quantization timers.throughput comms_logger tensorboard csv_monitor wandb comet optimizer.params
    scheduler.params""".split()
).union(path for path in KEYS if path.startswith("zero_optimization"))
"""Blocks in which DeepSpeed itself refuses an unknown key. In the others it says nothing."""

REMOVED = frozenset(
    """nebula compression_training amp quantize_training sparse_gradients eigenvalue sparse_attention elasticity
    graph_harvesting curriculum_learning progressive_layer_drop""".split()
)
"""Top-level keys of older DeepSpeeds that `REMOVED_IN` refuses."""

REMOVED_FROM_ZERO = frozenset(("mics_shard_size", "mics_hierarchical_params_gather", "zeropp_loco_param"))

REMOVED_IN = "0.19.8"

SCHEDULERS = ("LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR")


# --------------------------------------------------------------------------------------------------
# What changed in DeepSpeed's config between 0.14.0 and 0.19.8: one table, and the questions to ask of it.
#
# Read from the sources of all 47 releases in that range (`runtime/zero/config.py`, `zero/offload_config.py`,
# `precision_config.py`, `config.py`, `constants.py`, `swap_tensor/constants.py` of each sdist): a row stands here
# when a key appeared, disappeared, or took another default on the way. A key without a row is known to every release,
# with one and the same default.
#
# Why it matters: `zero_optimization` and its offload blocks refuse a key that they do not know, so one key too many
# stops a training at its start; a key that is left out takes whatever default that release has. A release between two
# of these is read as the nearest lower one, and one that is newer than all of them as the newest.

OLDEST, NEWEST = "0.14.0", "0.19.8"
"""The range whose sources were read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """The life of one key."""

    path: str
    """`zero_optimization.leaf_module`, as it stands in the file."""
    since: str = OLDEST
    """The first release that knows it."""
    gone: str | None = None
    """The first release that refuses it."""
    defaults: tuple[tuple[str, object], ...] = ()
    """Where the default moved: from which release on it is what."""


_ZERO = "zero_optimization"
_OPTIMIZER = f"{_ZERO}.offload_optimizer"

TABLE = (
    Key(path=f"{_ZERO}.stage3_use_all_reduce_for_fetch_params", since="0.14.3"),
    Key(path=f"{_ZERO}.stage3_module_granularity_threshold", since="0.16.0"),
    Key(path=f"{_ZERO}.log_trace_cache_warnings", since="0.16.4"),
    Key(path=f"{_ZERO}.zenflow", since="0.17.5"),
    Key(path=f"{_ZERO}.enable_sanity_checks", since="0.17.6"),
    Key(path=f"{_ZERO}.leaf_module", since="0.18.0"),
    Key(path=f"{_ZERO}.stage3_allgather_sequential", since="0.18.5"),
    Key(path=f"{_ZERO}.save_muon_momentum_buffer_in_memory", since="0.18.9"),
    Key(path=f"{_ZERO}.compute_grad_norm", since="0.19.7"),
    Key(path=f"{_ZERO}.parameter_alignment", since="0.19.7"),
    Key(path=f"{_ZERO}.zeropp_loco_param", since="0.16.2", gone="0.19.8"),
    Key(path=f"{_ZERO}.mics_shard_size", gone="0.19.7"),
    Key(path=f"{_ZERO}.mics_hierarchical_params_gather", gone="0.19.7"),
    Key(path=f"{_OPTIMIZER}.super_offload", since="0.18.0"),
    Key(path=f"{_OPTIMIZER}.cpuadam_cores_perc", since="0.18.0"),
    Key(path=f"{_OPTIMIZER}.pin_memory", defaults=((OLDEST, False), ("0.19.5", True))),
    Key(path=f"{_ZERO}.offload_param.pin_memory", defaults=((OLDEST, False), ("0.19.5", True))),
    Key(path="bf16.immediate_grad_update", defaults=((OLDEST, False), ("0.16.5", True), ("0.17.1", False))),
    Key(path="bf16.check_grad_overflow", since="0.17.1", defaults=(("0.17.1", False), ("0.19.3", True))),
    Key(path="bf16.bf16_master_weights_and_grads", since="0.18.3"),
    Key(path="bf16.bf16_optimizer_states", since="0.18.3"),
    Key(path="gradient_clipping", defaults=((OLDEST, 0.0), ("0.19.3", 1.0))),
    Key(path="steps_per_print", defaults=((OLDEST, 10), ("0.15.2", None))),
    Key(path="aio.use_gds", since="0.15.0"),
    Key(path="aio.thread_count", gone="0.16.4"),  # still accepted, and ignored without a word
    Key(path="aio.intra_op_parallelism", since="0.16.4"),
    Key(path="nebula", gone="0.19.7"),
    Key(path="compression_training", gone="0.19.7"),
    Key(path="quantize_training", gone="0.19.7"),
    Key(path="sparse_attention", gone="0.19.7"),
    Key(path="amp", gone="0.19.8"),
    Key(path="sparse_gradients", gone="0.19.8"),
    Key(path="eigenvalue", gone="0.19.8"),
    Key(path="elasticity", gone="0.19.8"),
    Key(path="graph_harvesting", gone="0.19.8"),
    Key(path="curriculum_learning", gone="0.19.8"),
    Key(path="progressive_layer_drop", gone="0.19.8"),
)

DEFAULTS: dict[str, object] = {
    "zero_allow_untested_optimizer": False,
    "zero_force_ds_cpu_optimizer": True,
    "bf16.bf16_master_weights_and_grads": False,
    "bf16.bf16_optimizer_states": False,
    "fp16.fp16_master_weights_and_grads": False,
    f"{_ZERO}.contiguous_gradients": True,
    f"{_ZERO}.reduce_bucket_size": 500_000_000,
    f"{_ZERO}.allgather_bucket_size": 500_000_000,
    f"{_ZERO}.sub_group_size": 1_000_000_000,
    f"{_ZERO}.stage3_prefetch_bucket_size": 50_000_000,
    f"{_ZERO}.stage3_param_persistence_threshold": 100_000,
    f"{_ZERO}.stage3_max_live_parameters": 1_000_000_000,
    f"{_ZERO}.stage3_max_reuse_distance": 1_000_000_000,
    f"{_ZERO}.stage3_gather_16bit_weights_on_model_save": False,
    f"{_OPTIMIZER}.buffer_count": 4,
    f"{_ZERO}.offload_param.buffer_count": 5,
}
"""Of the keys that a plan may set: what every release takes where the file says nothing."""

_BY_PATH = {key.path: key for key in TABLE}


def check_version(version: str) -> Release:
    """The release, or the sentence that says why nothing can be written for it."""
    asked = release(version)
    if asked < release(OLDEST):
        raise ConfigError(Message("deepspeed.version-too-old", version=version, oldest=OLDEST))
    if asked[0] > release(NEWEST)[0]:
        raise ConfigError(Message("deepspeed.version-unknown", version=version, newest=NEWEST))
    return asked


def knows(version: str, path: str) -> bool:
    """Whether this release takes the key at `path`."""
    key = _BY_PATH.get(path)
    if key is None:
        return True
    asked = release(version)
    return release(key.since) <= asked and (key.gone is None or asked < release(key.gone))


def without_defaults(values: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """The same without what every release takes anyway, and without blocks that say nothing then."""
    kept: dict[str, Any] = {}
    for name, value in values.items():
        where = f"{path}.{name}" if path else name
        if isinstance(value, Mapping):
            if inside := without_defaults(value, where):
                kept[name] = inside
        elif where not in DEFAULTS or DEFAULTS[where] != value:
            kept[name] = value
    return kept


def newer_than_known(version: str) -> Message | None:
    """The sentence for a release whose source we have not read; None: we have."""
    if release(version) <= release(NEWEST):
        return None
    return Message("deepspeed.newer-than-known", version=version, newest=NEWEST)


def defaults_that_moved(version: str) -> dict[str, object]:
    """What this release assumes where the file says nothing, for each key whose default moved in the range."""
    asked, found = release(version), {}
    for key in TABLE:
        if key.defaults and knows(version, key.path):
            found[key.path] = [value for since, value in key.defaults if release(since) <= asked][-1]
    return found


_LIVES = {key.path: key for key in TABLE}

ARRIVED = {
    alias: key.since
    for path, key in _LIVES.items()
    for alias in (path, path.replace(".stage3_", "."))
    if key.since != OLDEST
}
"""DeepSpeed's key → the first release that knows it."""

LEARNT_AFTER = {
    "torch_autocast": "0.17.0",
    "log_level": "0.19.2",
    "managed_gradient_accumulation": "0.19.3",
    "disable_python_gc": "0.19.5",
    "gradient_allreduce_op": "0.19.5",
}
"""DeepSpeed's key at the top level → the newest release seen without it."""

GONE = {path: key.gone for path, key in _LIVES.items() if key.gone is not None}
"""DeepSpeed's key → the first release that no longer takes it."""

MOVED_DEFAULTS = tuple(
    (path, _LIVES[path].defaults[-1][0], _LIVES[path].defaults[-2][1], _LIVES[path].defaults[-1][1])
    for path in (
        "gradient_clipping",
        "bf16.check_grad_overflow",
        "zero_optimization.offload_optimizer.pin_memory",
        "zero_optimization.offload_param.pin_memory",
    )
)
"""DeepSpeed's key, the release since which its default is another, the default before and since."""

PYDANTIC_BF16 = "0.17.1"
"""From here on DeepSpeed reads fp16 and bf16 with pydantic; before, it took any key there, and any text for true."""

WARMUP_CHECKED_SINCE = "0.19.6"
"""From here on DeepSpeed refuses a warmup_num_steps that is no whole number above 0; before, it took 2 at least."""
