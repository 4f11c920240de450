"""Every rule, in one table: the docs' table and the findings' severities are made from it."""

from __future__ import annotations

from tightfit.formats.finding import Kind, Rule, Severity

_TABLE: tuple[tuple[str, str, Severity, str], ...] = (
    # keys
    ("key-twice", "deepspeed accelerate llamafactory huggingface job", "error", "a key that stands twice in a block"),
    (
        "not-finite",
        "deepspeed accelerate llamafactory huggingface",
        "error",
        "a number that is infinite or not a number (`.inf`, `NaN`, `1e999`)",
    ),
    (
        "json-comments",
        "accelerate llamafactory huggingface job",
        "error",
        "comments or a trailing comma in JSON, which all but DeepSpeed refuse",
    ),
    ("ds-typo", "deepspeed", "error", "a misspelt key that DeepSpeed ignores without a word (`zero_optimisation`)"),
    ("ds-misplaced", "deepspeed", "error", "a key that belongs into another block"),
    ("ds-refused-key", "deepspeed", "error", "an unknown key in a block where DeepSpeed refuses those"),
    ("ds-unknown", "deepspeed", "warning", "a key that DeepSpeed does not read and that resembles none"),
    ("ds-removed", "deepspeed", "error", "a block that this release has removed and refuses (`elasticity`, `amp` …)"),
    ("ds-too-new", "deepspeed", "error", "a key that this release does not know yet and refuses (`zenflow` on 0.14.2)"),
    ("ds-not-yet", "deepspeed", "warning", "a key that this release does not know yet and ignores"),
    ("ds-moved-default", "deepspeed", "note", "a key left out whose default is another since some release"),
    ("ds-deprecated", "deepspeed", "warning", "an old spelling (`cpu_offload`)"),
    ("ds-same-key", "deepspeed", "error", "two spellings of one key (`x` and `stage3_x`, `cpu_offload` and its heir)"),
    # values
    ("ds-not-a-block", "deepspeed", "error", "a value where a block in braces belongs (`zero_optimization: true`)"),
    ("ds-number-text", "deepspeed", "error", 'a number in quotes that DeepSpeed cannot use (`"5e8"`)'),
    (
        "ds-quoted",
        "deepspeed",
        "warning",
        "a number or a switch in quotes that DeepSpeed takes and the Hugging Face layer misreads",
    ),
    ("ds-text-switch", "deepspeed", "error", 'the text `"false"`, which counts as true'),
    ("ds-stage", "deepspeed", "error", "a ZeRO stage that is none, or `auto`, which ends as stage 0"),
    ("ds-value", "deepspeed", "error", "a value that DeepSpeed refuses, or cannot work with (`-1`, `1.5`, `gpu`)"),
    ("ds-auto", "deepspeed", "note", "`auto` values: without the Hugging Face layer DeepSpeed fails on them"),
    ("ds-auto-unfilled", "deepspeed", "error", "`auto` in a key that nobody fills in"),
    ("ds-hjson", "deepspeed", "note", "comments or other Hjson, which only DeepSpeed itself reads"),
    # ZeRO
    ("ds-offload-param-stage", "deepspeed", "error", "`offload_param` below stage 3: ignored"),
    ("ds-offload-stage0", "deepspeed", "error", "`offload_optimizer` at stage 0: ignored"),
    ("ds-nvme-stage", "deepspeed", "error", "the optimizer on NVMe below stage 3: goes into host memory instead"),
    ("ds-nvme-path", "deepspeed", "error", "NVMe without `nvme_path`"),
    ("ds-super-offload-stage", "deepspeed", "error", "`super_offload` below stage 3: ignored"),
    ("ds-ratio-stage", "deepspeed", "error", "a partial offload (`ratio`) below stage 3"),
    ("ds-stage3-keys", "deepspeed", "warning", "keys of stage 3 at another stage: no effect"),
    ("ds-round-robin", "deepspeed", "warning", "`round_robin_gradients` outside stages 1 and 2: no effect"),
    ("ds-buckets", "deepspeed", "warning", "overlapped communication with buckets of gigabytes, which it doubles"),
    ("ds-gather", "deepspeed", "note", "stage 3 without 16-bit weights gathered on saving: no usable model is saved"),
    # precision, optimizer, batch
    ("ds-two-precisions", "deepspeed", "error", "fp16 and bf16 both enabled"),
    ("ds-no-precision", "deepspeed", "note", "no word of fp16 or bf16: fp32, unless a trainer says otherwise"),
    ("ds-static-scale", "deepspeed", "warning", "a fixed `loss_scale` beside keys of the dynamic one: no effect"),
    ("ds-first-scale", "deepspeed", "note", "fp16 that begins at a scale of 65,536: the first steps are skipped"),
    ("ds-master-weights", "deepspeed", "error", "16-bit master weights without what they need"),
    ("ds-optimizer", "deepspeed", "error", "an optimizer that neither DeepSpeed nor torch.optim has"),
    ("ds-untested-optimizer", "deepspeed", "error", "an optimizer that ZeRO refuses without permission"),
    ("ds-slow-offload", "deepspeed", "warning", "an offloaded optimizer without a CPU kernel"),
    ("ds-adam-is-adamw", "deepspeed", "note", "`Adam`, which DeepSpeed runs as AdamW"),
    ("ds-scheduler", "deepspeed", "error", "a scheduler that DeepSpeed does not have"),
    ("ds-scheduler-params", "deepspeed", "error", "a scheduler without what it needs, or with what it does not take"),
    ("ds-no-batch", "deepspeed", "error", "neither `train_batch_size` nor `train_micro_batch_size_per_gpu`"),
    ("ds-batch", "deepspeed", "error", "batch sizes that do not multiply"),
    (
        "ds-activation-checkpointing",
        "deepspeed",
        "warning",
        "an `activation_checkpointing` block: Hugging Face models never use it",
    ),
    # accelerate
    ("acc-unknown", "accelerate", "error", "an unknown key at the top level: refused"),
    ("acc-typo", "accelerate", "error", "a misspelt key in a block: ignored without a word"),
    ("acc-distributed-type", "accelerate", "error", "no `distributed_type`, or one that does not exist"),
    ("acc-block-unused", "accelerate", "error", "a DeepSpeed or FSDP block that `distributed_type` leaves unused"),
    ("acc-bare-no", "accelerate", "error", "a bare `no`, which YAML reads as false and accelerate dies on"),
    ("acc-mixed-precision", "accelerate", "error", "a `mixed_precision` that does not exist"),
    ("acc-gpu-ids", "accelerate", "error", "`gpu_ids` that is no text, or does not match the number of processes"),
    ("acc-idle-gpus", "accelerate", "warning", "more `gpu_ids` than processes"),
    (
        "acc-processes",
        "accelerate",
        "error",
        "a `num_processes` that the machines do not divide, or not that of the job",
    ),
    ("acc-no-processes", "accelerate", "note", "no `num_processes`: the command line must give it"),
    ("acc-machines", "accelerate", "error", "several machines without an address, or a rank beyond their number"),
    ("acc-hostfile", "accelerate", "error", "DeepSpeed on several machines without a hostfile: runs on one, silently"),
    (
        "acc-config-file",
        "accelerate",
        "error",
        "`deepspeed_config_file` beside keys or a precision that it must hold itself",
    ),
    ("acc-nvme-path", "accelerate", "error", "an NVMe path, which accelerate does not pass on"),
    ("acc-offload-stage", "accelerate", "error", "an offload that the stage ignores"),
    ("acc-save-16bit", "accelerate", "warning", "ZeRO-3 without `zero3_save_16bit_model`: saving the model fails"),
    (
        "acc-zero-init",
        "accelerate",
        "warning",
        "ZeRO-3 with `zero3_init_flag: false`: every process loads the whole model",
    ),
    ("acc-fsdp1-key", "accelerate", "warning", "a key of FSDP2 where FSDP1 runs: ignored"),
    ("acc-fsdp2-key", "accelerate", "warning", "a key of FSDP1 where FSDP2 runs: ignored"),
    ("acc-fsdp-value", "accelerate", "error", "a value that FSDP refuses"),
    (
        "acc-fsdp-sync",
        "accelerate",
        "error",
        "`fsdp_sync_module_states: false` with efficient loading, which is the default",
    ),
    ("acc-fsdp-unwrapped", "accelerate", "warning", "FSDP without a wrap policy: the whole model is gathered at once"),
    # LLaMA-Factory
    ("lf-unknown", "llamafactory", "error", "a misspelt key, or another trainer's (`lora_r`): refused"),
    ("lf-foreign", "llamafactory", "warning", "a key that we do not know and that resembles none"),
    ("lf-version", "llamafactory", "error", "a key that this release does not take"),
    ("lf-json-file", "llamafactory", "error", "a JSON file, which 0.9.5 cannot read"),
    ("lf-template", "llamafactory", "error", "a chat template that this release does not have"),
    (
        "lf-reasoning-template",
        "llamafactory",
        "warning",
        "a DeepSeek-R1 distillation under the template of another release",
    ),
    ("lf-no-template", "llamafactory", "warning", "supervised training without a template"),
    ("lf-not-training", "llamafactory", "error", "no `do_train`: the model is loaded and nothing is trained"),
    ("lf-no-dataset", "llamafactory", "error", "training without a data set"),
    ("lf-evaluation", "llamafactory", "error", "evaluation without data, or data and `val_size` together"),
    ("lf-streaming", "llamafactory", "error", "streaming without `max_steps`, or with what it refuses"),
    ("lf-quantization", "llamafactory", "error", "quantisation that the method or the library refuses"),
    ("lf-method-keys", "llamafactory", "warning", "keys of LoRA where no LoRA is trained: no effect"),
    ("lf-method", "llamafactory", "error", "a method, or a combination of methods, that is refused"),
    ("lf-attention", "llamafactory", "error", "a `flash_attn` that does not exist (a bare `off` is false)"),
    ("lf-checkpointing", "llamafactory", "warning", "`gradient_checkpointing: false`: no effect"),
    ("lf-lora-alpha", "llamafactory", "note", "no `lora_alpha`: twice the rank"),
    ("lf-packing", "llamafactory", "note", "`packing` without `neat_packing`: packed samples see each other"),
    ("lf-force-torchrun", "llamafactory", "note", "DeepSpeed on one GPU: needs FORCE_TORCHRUN=1"),
    # TrainingArguments
    ("hf-unknown", "huggingface", "error", "a misspelt field of TrainingArguments: refused"),
    ("hf-foreign", "huggingface", "warning", "a key that is no field of TrainingArguments (`lora_r`, `zero_stage`)"),
    ("hf-gone", "llamafactory huggingface", "error", "a field that transformers no longer has (`evaluation_strategy`)"),
    (
        "hf-number-text",
        "llamafactory huggingface",
        "error",
        "a number as text: in quotes, or `1e-4` where YAML takes it for text",
    ),
    ("hf-not-whole", "llamafactory huggingface", "error", "a fraction, or `1e3`, where a whole number belongs"),
    ("hf-text-switch", "llamafactory huggingface", "error", 'the text `"false"`, which counts as true'),
    ("hf-two-precisions", "llamafactory huggingface", "error", "fp16 and bf16 both on"),
    (
        "hf-best-model",
        "llamafactory huggingface",
        "error",
        "`load_best_model_at_end` with evaluation and saving out of step",
    ),
    # a trainer's config and its DeepSpeed file together
    (
        "pair-missing",
        "accelerate llamafactory huggingface",
        "error",
        "a DeepSpeed file that is not there, or cannot be read",
    ),
    (
        "pair-hjson",
        "accelerate llamafactory huggingface",
        "error",
        "a DeepSpeed file with comments, which the Hugging Face layer refuses",
    ),
    ("pair-mismatch", "llamafactory huggingface", "error", "a value that differs from the DeepSpeed file's: refused"),
    (
        "pair-clipping",
        "llamafactory huggingface",
        "error",
        "a `max_grad_norm` that never reaches DeepSpeed, whose own default counts",
    ),
    (
        "pair-optimizer",
        "llamafactory huggingface",
        "error",
        "an `optim` that offloading replaces by Adam without a word",
    ),
    (
        "pair-optim-ignored",
        "llamafactory huggingface",
        "warning",
        "an `optim` or scheduler that the DeepSpeed file overrules",
    ),
    ("pair-quantization", "llamafactory", "error", "quantisation that LLaMA-Factory refuses under ZeRO-3 or FSDP"),
    ("pair-zero3", "llamafactory", "error", "what LLaMA-Factory refuses under ZeRO-3 (`pure_bf16`, Unsloth, PiSSA …)"),
    ("pair-deepspeed", "llamafactory", "error", "what LLaMA-Factory refuses under DeepSpeed (GaLore, APOLLO, BAdam)"),
    ("pair-no-zero", "accelerate", "error", "a DeepSpeed file without `zero_optimization`, which accelerate refuses"),
    # job files
    ("job-refused", "job", "error", "whatever a plan would refuse"),
    ("job-generated", "job", "note", "our worker's config, which a plan wrote: nothing to lint"),
    ("job-said", "job", "note", "what was understood from another form of job file"),
)


def _kinds(words: str) -> tuple[Kind, ...]:
    known: tuple[Kind, ...] = ("deepspeed", "accelerate", "llamafactory", "huggingface", "job")
    return tuple(kind for kind in known if kind in words.split())


RULES: dict[str, Rule] = {
    name: Rule(id=name, kinds=_kinds(kinds), severity=severity, finds=finds) for name, kinds, severity, finds in _TABLE
}
"""Rule by id, in the order of the docs."""


def rule_table() -> str:
    """The rules as a Markdown table."""
    rows = [f"| `{rule.id}` | {', '.join(rule.kinds)} | {rule.severity} | {rule.finds} |" for rule in RULES.values()]
    return "\n".join(["| rule | kind of file | severity | what it finds |", "|---|---|---|---|", *rows])
