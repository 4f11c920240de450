"""Whose loss Liger fuses. Other trainers have no fused loss of their own; they borrow Liger's, where it has one.

A trainer that is told to use Liger for a model which Liger does not know goes on without a word, with the plain loss,
and runs out of memory. Granite is a trap of its own: Liger patches it, but its loss still takes whole logits.

The types were read in liger-kernel 0.8.5 and in LLaMA-Factory 0.9.2 to 0.9.5; slow tests read them again.
"""

from __future__ import annotations

from tightfit.render.environment import HIP
from tightfit.types import Hardware

UNDER_THE_TRAINER = frozenset(
    "gemma gemma2 gemma3_text llama ministral mistral mixtral olmo2 olmo3 phi3 qwen2 qwen3 qwen3_moe smollm3".split()
)
"""The model types, of those that we know, whose loss Liger fuses when Hugging Face's Trainer asks it to."""

_LLAMAFACTORY_SINCE = {
    (0, 9, 2): "gemma gemma2 llama mistral mixtral mllama phi3 qwen2 qwen2_vl qwen2_5_vl",
    (0, 9, 3): "gemma3 gemma3_text glm4 llava olmo2 paligemma qwen3 qwen3_moe",
    (0, 9, 4): "glm4v gpt_oss",
    (0, 9, 5): "glm qwen3_next qwen3_5",
}
"""The same for LLaMA-Factory, which has a list of its own, by the release that began it."""


def under_llamafactory(at: tuple[int, ...]) -> set[str]:
    """The model types whose loss is fused in this release."""
    return {kind for since, kinds in _LLAMAFACTORY_SINCE.items() if since <= at for kind in kinds.split()}


def unproven(hardware: Hardware) -> str:
    """A sentence where Liger's kernels meet cards on which nobody here ran them; empty: they did."""
    if hardware.gpu.vendor not in HIP:
        return ""
    return f"Liger's kernels are Triton's, and on the {hardware.gpu.name} we never ran them"
