"""What other trainers and scripts call the keys of LLaMA-Factory and TrainingArguments.

Spelling does not find these: `lora_target_modules` looks like `optim_target_modules` and means `lora_target`. Only
names with one meaning are here. What two trainers use for two things is left to the nearest spelling.
"""

from __future__ import annotations

from tightfit.inputs.spelling import shown
from tightfit.job.training_arguments import TRAINING_ARGUMENTS
from tightfit.messages import Message

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
    "lora_r": Message("huggingface.peft-r"),
    "lora_rank": Message("huggingface.peft-r"),
    "lora_alpha": Message("huggingface.peft-alpha"),
    "lora_dropout": Message("huggingface.peft-dropout"),
    **dict.fromkeys([*_SAME["lora_target"].split(), "lora_target"], Message("huggingface.peft-targets")),
    **dict.fromkeys([*_SAME["cutoff_len"].split(), "cutoff_len"], Message("huggingface.tokenizer-length")),
    "load_in_4bit": Message("huggingface.load-4bit"),
    "load_in_8bit": Message("huggingface.load-8bit"),
    "attn_implementation": "attn_implementation of from_pretrained",
    "use_flash_attention_2": 'attn_implementation="flash_attention_2" of from_pretrained',
}
"""Where a script around transformers' Trainer must put them."""

_MEANT = {name: key for key, names in _SAME.items() for name in names.split()} | _WITH_VALUE


def meant_by_llamafactory(key: str, value: object) -> Message | None:
    """What to write for another trainer's name in a LLaMA-Factory file; None where the name is nobody's."""
    return _in_deepspeed(key, value) or (Message("lint.write", what=_MEANT[key]) if key in _MEANT else None)


def meant_by_arguments(key: str, value: object) -> tuple[Message, Message] | None:
    """What a name is that TrainingArguments has not, and what to do about it; None where the name is nobody's."""
    theirs = _MEANT.get(key)
    if zero := _in_deepspeed(key, value):
        return Message("huggingface.zero-elsewhere", key=key), zero
    if theirs in TRAINING_ARGUMENTS:
        what = Message("huggingface.no-field", key=key)
        return what, Message("lint.write", what=theirs)
    if theirs is None and key not in _PEFT:
        return None
    what = Message("huggingface.no-field", key=key)
    if key not in _PEFT:
        return what, Message("huggingface.delete-or-llamafactory", theirs=theirs)
    return what, Message("huggingface.hand-on", to=_PEFT[key], theirs=theirs)


def _in_deepspeed(key: str, value: object) -> Message | None:
    if key not in _ZERO:
        return None
    inner = _ZERO[key]
    if inner == "stage":
        return Message("huggingface.write-stage", value=shown(value))
    if not inner:
        return Message("huggingface.move-into-json")
    return Message("huggingface.write-offload", inner=inner)
