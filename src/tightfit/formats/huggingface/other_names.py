"""What other trainers and scripts call the keys of LLaMA-Factory and TrainingArguments.

Spelling does not find these: `lora_target_modules` looks like `optim_target_modules` and means `lora_target`. Only
names with one meaning are here. What two trainers use for two things is left to the nearest spelling.
"""

from __future__ import annotations

from tightfit.inputs.spelling import shown
from tightfit.job.training_arguments import TRAINING_ARGUMENTS

_SAME = {
    "per_device_train_batch_size": "batch_size micro_batch_size train_batch_size train_micro_batch_size_per_gpu",
    "per_device_eval_batch_size": "eval_batch_size",
    "gradient_accumulation_steps": "accumulation_steps grad_accum gradient_accumulation grad_accumulation_steps",
    "num_train_epochs": "epochs num_epochs n_epochs",
    "learning_rate": "lr",
    "lr_scheduler_type": "lr_scheduler scheduler",
    "optim": "optimizer optimizer_type",
    "max_grad_norm": "gradient_clipping grad_clip clip_grad_norm",
    "save_steps": "save_interval checkpoint_interval",
    "logging_steps": "log_interval log_steps",
    "eval_steps": "eval_interval",
    "model_name_or_path": "base_model model model_name model_path model_id",
    "lora_rank": "lora_r",
    "lora_target": "lora_target_modules lora_targets target_modules lora_modules",
    "cutoff_len": "max_seq_length max_seq_len seq_length sequence_len sequence_length model_max_length block_size",
    "val_size": "val_set_size",
    "dataset": "dataset_name data_path dataset_path train_file",
    "template": "chat_template prompt_template",
    "packing": "sample_packing",
}
"""The key of LLaMA-Factory, and what it is called elsewhere."""

_WITH_VALUE = {
    "load_in_4bit": "quantization_bit: 4",
    "load_in_8bit": "quantization_bit: 8",
    "use_lora": "finetuning_type: lora",
    "use_peft": "finetuning_type: lora",
    "use_flash_attention": "flash_attn: fa2",
    "use_flash_attention_2": "flash_attn: fa2",
    "attn_implementation": "flash_attn",
}

_ZERO = {
    "deepspeed_stage": "stage",
    "zero_stage": "stage",
    "zero_optimization": "",
    "cpu_offload": "offload_optimizer",
    "offload_optimizer": "offload_optimizer",
    "offload_optimizer_device": "offload_optimizer",
    "offload_param": "offload_param",
    "offload_param_device": "offload_param",
}
"""Keys about ZeRO → where they belong in the `zero_optimization` block of a DeepSpeed file."""

_PEFT = {
    "lora_r": "r of peft's LoraConfig",
    "lora_rank": "r of peft's LoraConfig",
    "lora_alpha": "lora_alpha of peft's LoraConfig",
    "lora_dropout": "lora_dropout of peft's LoraConfig",
    **dict.fromkeys([*_SAME["lora_target"].split(), "lora_target"], "target_modules of peft's LoraConfig"),
    **dict.fromkeys([*_SAME["cutoff_len"].split(), "cutoff_len"], "the tokenizer's max_length"),
    "load_in_4bit": "load_in_4bit of transformers' BitsAndBytesConfig",
    "load_in_8bit": "load_in_8bit of transformers' BitsAndBytesConfig",
    "attn_implementation": "attn_implementation of from_pretrained",
    "use_flash_attention_2": 'attn_implementation="flash_attention_2" of from_pretrained',
}
"""Where a script around transformers' Trainer must put them."""

_MEANT = {name: key for key, names in _SAME.items() for name in names.split()} | _WITH_VALUE


def meant_by_llamafactory(key: str, value: object) -> str | None:
    """What to write for another trainer's name in a LLaMA-Factory file; None where the name is nobody's."""
    return _in_deepspeed(key, value) or (f"write {_MEANT[key]}" if key in _MEANT else None)


def meant_by_arguments(key: str, value: object) -> tuple[str, str] | None:
    """What a name is that TrainingArguments has not, and what to do about it; None where the name is nobody's."""
    theirs = _MEANT.get(key)
    if zero := _in_deepspeed(key, value):
        return f"{key} is no field of TrainingArguments: ZeRO is set in the file that `deepspeed` names", zero
    if theirs in TRAINING_ARGUMENTS:
        what = f"{key} is no field of TrainingArguments: transformers refuses the file, unless your script reads it"
        return what, f"write {theirs}"
    if theirs is None and key not in _PEFT:
        return None
    what = f"{key} is no field of TrainingArguments: transformers refuses the file, unless your script reads it"
    if key not in _PEFT:
        return what, f"delete it if your script does not; LLaMA-Factory calls it {theirs}"
    aside = f"; LLaMA-Factory calls it {theirs}" if theirs else ""
    return what, f"have your script hand it to {_PEFT[key]}{aside}"


def _in_deepspeed(key: str, value: object) -> str | None:
    if key not in _ZERO:
        return None
    inner = _ZERO[key]
    if inner == "stage":
        return f'write "zero_optimization": {{"stage": {shown(value)}}} into the DeepSpeed file'
    if not inner:
        return "move it into a JSON file, and name that file as deepspeed"
    return f'write "{inner}": {{"device": "cpu"}} into zero_optimization of the DeepSpeed file'
