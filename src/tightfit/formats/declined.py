"""Configs of trainers that lint does not know, told by keys that are theirs alone.

Their keys overlap with those of LLaMA-Factory and TrainingArguments, so that a file would be taken for one of these
and every other line of it for a mistake. Such a file is declined in one sentence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Declined(NamedTuple):
    """A trainer whose config is not checked."""

    name: str
    needs: frozenset[str]
    """Keys that such a file always has."""
    telling: frozenset[str]
    """Keys of its own, of which it has some."""
    least: int
    """So many of them."""


def _decline(name: str, needs: str, telling: str, least: int) -> Declined:
    return Declined(name, frozenset(needs.split()), frozenset(telling.split()), least)


DECLINED = (
    _decline(
        "Axolotl",
        "base_model",
        """sequence_len datasets micro_batch_size num_epochs val_set_size sample_packing dataset_prepared_path adapter
        special_tokens lora_target_linear lora_model_dir saves_per_epoch evals_per_epoch optimizer lr_scheduler
        pretraining_dataset pad_to_sequence_len rl plugins wandb_entity""",
        3,
    ),
    _decline(
        "LLaMA-Factory v1",
        "model",
        """model_class kernel_config dist_config quant_config peft_config train_dataset sample_backend init_config
        optim_config lr_scheduler_config batching_strategy export_config""",
        1,
    ),
    _decline(
        "ms-swift",
        "model",
        """tuner_type train_type rlhf_type split_dataset_ratio model_author model_name dataset_num_proc target_modules
        torch_dtype sampler_type num_return_sequences add_version infer_backend adapters load_from_cache_file
        val_dataset lazy_tokenize use_hf attn_impl enable_thinking truncation_strategy global_batch_size""",
        2,
    ),
    _decline(
        "ms-swift",
        "",
        "train_type tuner_type rlhf_type split_dataset_ratio sampler_type rollout_group train_group device_groups",
        2,
    ),
    _decline(
        "open-instruct",
        "model_name_or_path",
        """with_tracking checkpointing_steps use_slow_tokenizer dataset_mix_dir dataset_mixer keep_last_n_checkpoints
        hf_metadata_dataset try_launch_beaker_eval_jobs add_bos use_qlora""",
        2,
    ),
    _decline(
        "Megatron",
        "",
        """tensor_model_parallel_size pipeline_model_parallel_size num_layers num_attention_heads hidden_size
        ffn_hidden_size seq_length global_batch_size train_iters lr_decay_style no_load_optim language_model
        model_parallel transformer_impl""",
        3,
    ),
    _decline("NeMo", "trainer exp_manager", "model trainer exp_manager", 1),
    _decline("torchtune", "tokenizer model", "checkpointer loss metric_logger batch_size compile", 3),
    _decline("LLM Foundry", "max_duration", "train_loader global_train_batch_size callbacks algorithms", 1),
    _decline("LitGPT", "checkpoint_dir", "lora_r lora_query train eval out_dir devices", 3),
)

_LLAMAFACTORYS = frozenset("template stage cutoff_len lora_target quantization_bit do_train".split())


def name_declined_program(values: Mapping[str, Any]) -> str | None:
    """Whose config it is, where it is somebody's whom lint does not know."""
    keys = set(values)
    if "finetuning_type" in keys or ("model_name_or_path" in keys and keys & _LLAMAFACTORYS):
        return None
    return next((each.name for each in DECLINED if each.needs <= keys and len(each.telling & keys) >= each.least), None)
