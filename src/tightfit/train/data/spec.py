"""What the data of one training is to be: the worker's config, as a typed value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tightfit.messages import Message
from tightfit.types import ConfigError, Scan

FORMATS = ("auto", "text", "alpaca", "sharegpt", "messages")
SHIPPED_DIALOGUES = "shipped:dialogues"
GENERATED_SAMPLES = 1024  # how many samples are made up where the job names no data and no number

STATEFUL = (
    "mamba rwkv recurrent_gemma jamba bamba zamba nemotron_h granitemoehybrid falcon_h1 lfm2 qwen3_next qwen3_5 "
    "olmo_hybrid kimi_linear minimax"
).split()
"""Beginnings of (or words in) the types of models that carry a state from token to token."""

KEPT_APART = ("mamba", "falcon_mamba")
"""Of these, the types whose state stops at the borders of documents where the scan is ours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSpec:
    """The data of one training."""

    path: str | None = None
    """A file, a folder, `dataset_info.json:name`, `shipped:text`; None: generated samples, or the recipe's source."""
    format: str = "auto"
    template: str | None = None
    packing: bool = False
    samples: int | None = None  # how many samples to generate where there is no data
    max_samples: int | None = None
    overlong: Literal["skip", "cut"] = "cut"
    recipe: str | None = None
    ablation: str | None = None
    tokenizer: str | None = None
    evaluation_split: float = 0.0
    sequence: int = 2048
    seed: int = 42
    model_type: str = "llama"
    scan: Scan | None = None  # of a Mamba model; None: nobody knows yet

    @property
    def is_generated(self) -> bool:
        """Nothing is read: the samples are random tokens."""
        return self.path is None and self.recipe is None

    @property
    def by_recipe(self) -> bool:
        """Whether a recipe makes the prompts; the shipped dialogues bring their own."""
        return self.recipe is not None or self.path == SHIPPED_DIALOGUES


def check_spec(spec: DataSpec) -> None:
    """What cannot work, whatever the files hold."""
    if spec.format not in FORMATS:
        raise ConfigError(Message("data.unknown-format", format=spec.format, known=", ".join(FORMATS)))
    if spec.sequence < 2:
        raise ConfigError(Message("data.sequence-too-short", sequence=spec.sequence))
    if spec.packing:
        apart = spec.model_type in KEPT_APART
        if carries_state(spec.model_type) and not (apart and spec.scan == "tightfit"):
            instead = Message("data.use-our-scan") if apart else Message("data.leave-out")
            raise ConfigError(Message("data.packing-leaks", model_type=spec.model_type, instead=instead))
    if spec.ablation is not None and not spec.by_recipe:
        raise ConfigError(Message("data.ablation-needs-recipe", ablation=spec.ablation))


def carries_state(model_type: str) -> bool:
    """Whether a token's state comes from the tokens before it by other ways than attention."""
    return any(word in model_type.lower() for word in STATEFUL)
