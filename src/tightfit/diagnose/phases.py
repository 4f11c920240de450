"""In which phase of the training an exception was raised, told by the frames of its traceback."""

from __future__ import annotations

import re
from collections.abc import Mapping

from tightfit.messages import Message
from tightfit.types import PhaseName

PLACES: Mapping[PhaseName, Message] = {
    "init": Message("diagnose.at-init"),
    "forward": Message("diagnose.at-forward"),
    "loss": Message("diagnose.at-loss"),
    "backward": Message("diagnose.at-backward"),
    "step": Message("diagnose.at-step"),
    "eval": Message("diagnose.at-eval"),
    "save": Message("diagnose.at-save"),
}
"""As the end of a sentence."""
_LOSS = re.compile(
    r"cross_entropy|nll_loss|log_softmax|loss_fct|ForCausalLMLoss|self\.loss_function|logits\.float|logits\.to\(torch\.float|"
    r"loss_utils|selective_log_softmax|compute_logprobs|get_batch_log_?ps|lm_head\(|= logits"
)
_OUTER: tuple[tuple[PhaseName, re.Pattern[str]], ...] = (
    ("save", re.compile(
        r"_save_checkpoint|save_checkpoint|save_pretrained|in save_model|save_16bit|_zero3_consolidated|torch\.save\(|"
        r"in _save\b|save_state|save_adapter|get_model_state_dict|full_state_dict|in save\b")),
    ("eval", re.compile(
        r"evaluation_loop|prediction_loop|in evaluate\b|prediction_step|in validate\b|eval_step|nested_concat|"
        r"gather_for_metrics|in predict\b|compute_metrics|_evaluate\(|validation_step")),
    ("step", re.compile(
        r"engine\.step\(|optimizer\.step\(|_take_model_step|in step\b|/optim/\w+\.py|_optimizer_step|unscale_|"
        r"clip_grad_norm|scaler\.step|optim\.step\(")),
    ("backward", re.compile(r"\.backward\(|in backward\b|run_backward")),
)  # fmt: skip
_INIT = re.compile(
    r"from_pretrained|load_model|deepspeed\.initialize|_prepare_deepspeed|in prepare\b|_wrap_model|in initialize\b|"
    r"\.to\((?:device|[\"']cuda|self\.device|rank|local_rank|args\.device)|\.cuda\(|get_peft_model|"
    r"prepare_model_for_kbit|load_checkpoint|_load_optimizer|_load_from_checkpoint|load_state_dict|in _apply\b|"
    r"_configure_\w*optimizer|DistributedDataParallel\(|fully_shard\("
)
_TRAINING = re.compile(
    r"training_step|compute_loss|train_step|in train_one|in forward\b|_call_impl|model\(\*\*|forward\("
)


def phase_of(frames: list[str]) -> PhaseName | None:
    """None: the frames do not tell."""
    if not frames:
        return None
    text = "\n".join(frames)
    for phase, pattern in _OUTER:
        if pattern.search(text):
            return phase
    if _LOSS.search("\n".join(frames[-8:])):
        return "loss"
    if _INIT.search(text) and not re.search(r"training_step|compute_loss|train_step", text):
        return "init"
    return "forward" if _TRAINING.search(text) else None
