"""What lint looks for in a file of transformers' TrainingArguments."""

from __future__ import annotations

from tightfit.formats.rules import rules

RULES = rules(
    ("hf-unknown", "error", "a misspelt field of TrainingArguments: refused"),
    ("hf-foreign", "warning", "a key that is no field of TrainingArguments (`lora_r`, `zero_stage`)"),
)

IN_ANY_TRAINER = rules(
    ("hf-gone", "error", "a field that transformers no longer has (`evaluation_strategy`)"),
    ("hf-number-text", "error", "a number as text: in quotes, or `1e-4` where YAML takes it for text"),
    ("hf-not-whole", "error", "a fraction, or `1e3`, where a whole number belongs"),
    ("hf-text-switch", "error", 'the text `"false"`, which counts as true'),
    ("hf-two-precisions", "error", "fp16 and bf16 both on"),
    ("hf-best-model", "error", "`load_best_model_at_end` with evaluation and saving out of step"),
    ("pair-mismatch", "error", "a value that differs from the DeepSpeed file's: refused"),
    ("pair-clipping", "error", "a `max_grad_norm` that never reaches DeepSpeed, whose own default counts"),
    ("pair-optimizer", "error", "an `optim` that offloading replaces by Adam without a word"),
    ("pair-optim-ignored", "warning", "an `optim` or scheduler that the DeepSpeed file overrules"),
)
"""Also for trainers that hand their keys on to TrainingArguments."""
