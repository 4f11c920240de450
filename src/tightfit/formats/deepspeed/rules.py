"""What lint looks for in a DeepSpeed config."""

from __future__ import annotations

from tightfit.formats.rules import KEY_TWICE, NOT_FINITE, rules

RULES = rules(
    ("ds-typo", "error", "a misspelt key that DeepSpeed ignores without a word (`zero_optimisation`)"),
    ("ds-misplaced", "error", "a key that belongs into another block"),
    ("ds-refused-key", "error", "an unknown key in a block where DeepSpeed refuses those"),
    ("ds-unknown", "warning", "a key that DeepSpeed does not read and that resembles none"),
    ("ds-removed", "error", "a block that this release has removed and refuses (`elasticity`, `amp` …)"),
    ("ds-too-new", "error", "a key that this release does not know yet and refuses (`zenflow` on 0.14.2)"),
    ("ds-not-yet", "warning", "a key that this release does not know yet and ignores"),
    ("ds-moved-default", "note", "a key left out whose default is another since some release"),
    ("ds-deprecated", "warning", "an old spelling (`cpu_offload`)"),
    ("ds-same-key", "error", "two spellings of one key (`x` and `stage3_x`, `cpu_offload` and its heir)"),
    ("ds-not-a-block", "error", "a value where a block in braces belongs (`zero_optimization: true`)"),
    ("ds-number-text", "error", 'a number in quotes that DeepSpeed cannot use (`"5e8"`)'),
    ("ds-quoted", "warning", "a number or a switch in quotes that DeepSpeed takes and the Hugging Face layer misreads"),
    ("ds-text-switch", "error", 'the text `"false"`, which counts as true'),
    ("ds-stage", "error", "a ZeRO stage that is none, or `auto`, which ends as stage 0"),
    ("ds-value", "error", "a value that DeepSpeed refuses, or cannot work with (`-1`, `1.5`, `gpu`)"),
    ("ds-auto", "note", "`auto` values: without the Hugging Face layer DeepSpeed fails on them"),
    ("ds-auto-unfilled", "error", "`auto` in a key that nobody fills in"),
    ("ds-hjson", "note", "comments or other Hjson, which only DeepSpeed itself reads"),
    ("ds-offload-param-stage", "error", "`offload_param` below stage 3: ignored"),
    ("ds-offload-stage0", "error", "`offload_optimizer` at stage 0: ignored"),
    ("ds-nvme-stage", "error", "the optimizer on NVMe below stage 3: goes into host memory instead"),
    ("ds-nvme-path", "error", "NVMe without `nvme_path`"),
    ("ds-super-offload-stage", "error", "`super_offload` below stage 3: ignored"),
    ("ds-ratio-stage", "error", "a partial offload (`ratio`) below stage 3"),
    ("ds-stage3-keys", "warning", "keys of stage 3 at another stage: no effect"),
    ("ds-round-robin", "warning", "`round_robin_gradients` outside stages 1 and 2: no effect"),
    ("ds-buckets", "warning", "overlapped communication with buckets of gigabytes, which it doubles"),
    ("ds-gather", "note", "stage 3 without 16-bit weights gathered on saving: no usable model is saved"),
    ("ds-two-precisions", "error", "fp16 and bf16 both enabled"),
    ("ds-no-precision", "note", "no word of fp16 or bf16: fp32, unless a trainer says otherwise"),
    ("ds-static-scale", "warning", "a fixed `loss_scale` beside keys of the dynamic one: no effect"),
    ("ds-first-scale", "note", "fp16 that begins at a scale of 65,536: the first steps are skipped"),
    ("ds-master-weights", "error", "16-bit master weights without what they need"),
    ("ds-optimizer", "error", "an optimizer that neither DeepSpeed nor torch.optim has"),
    ("ds-untested-optimizer", "error", "an optimizer that ZeRO refuses without permission"),
    ("ds-slow-offload", "warning", "an offloaded optimizer without a CPU kernel"),
    ("ds-adam-is-adamw", "note", "`Adam`, which DeepSpeed runs as AdamW"),
    ("ds-scheduler", "error", "a scheduler that DeepSpeed does not have"),
    ("ds-scheduler-params", "error", "a scheduler without what it needs, or with what it does not take"),
    ("ds-no-batch", "error", "neither `train_batch_size` nor `train_micro_batch_size_per_gpu`"),
    ("ds-batch", "error", "batch sizes that do not multiply"),
    ("ds-activation-checkpointing", "warning", "an `activation_checkpointing` block: Hugging Face models never use it"),
)

CHECKED = (KEY_TWICE, NOT_FINITE, *RULES)
