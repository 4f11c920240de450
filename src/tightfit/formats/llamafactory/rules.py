"""What lint looks for in a LLaMA-Factory YAML, beside what it looks for in every file of TrainingArguments."""

from __future__ import annotations

from tightfit.formats.rules import rules

RULES = rules(
    ("lf-unknown", "error", "a misspelt key, or another trainer's (`lora_r`): refused"),
    ("lf-foreign", "warning", "a key that we do not know and that resembles none"),
    ("lf-version", "error", "a key that this release does not take"),
    ("lf-json-file", "error", "a JSON file, which 0.9.5 cannot read"),
    ("lf-template", "error", "a chat template that this release does not have"),
    ("lf-reasoning-template", "warning", "a DeepSeek-R1 distillation under the template of another release"),
    ("lf-no-template", "warning", "supervised training without a template"),
    ("lf-not-training", "error", "no `do_train`: the model is loaded and nothing is trained"),
    ("lf-no-dataset", "error", "training without a data set"),
    ("lf-evaluation", "error", "evaluation without data, or data and `val_size` together"),
    ("lf-streaming", "error", "streaming without `max_steps`, or with what it refuses"),
    ("lf-quantization", "error", "quantisation that the method or the library refuses"),
    ("lf-method-keys", "warning", "keys of LoRA where no LoRA is trained: no effect"),
    ("lf-method", "error", "a method, or a combination of methods, that is refused"),
    ("lf-attention", "error", "a `flash_attn` that does not exist (a bare `off` is false)"),
    ("lf-checkpointing", "warning", "`gradient_checkpointing: false`: no effect"),
    ("lf-lora-alpha", "note", "no `lora_alpha`: twice the rank"),
    ("lf-packing", "note", "`packing` without `neat_packing`: packed samples see each other"),
    ("lf-force-torchrun", "note", "DeepSpeed on one GPU: needs FORCE_TORCHRUN=1"),
    ("pair-quantization", "error", "quantisation that LLaMA-Factory refuses under ZeRO-3 or FSDP"),
    ("pair-zero3", "error", "what LLaMA-Factory refuses under ZeRO-3 (`pure_bf16`, Unsloth, PiSSA …)"),
    ("pair-deepspeed", "error", "what LLaMA-Factory refuses under DeepSpeed (GaLore, APOLLO, BAdam)"),
)
