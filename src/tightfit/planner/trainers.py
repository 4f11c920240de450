"""What the trainers can do that a plan may be for: our own worker, LLaMA-Factory, and scripts around Hugging Face's
Trainer.

Other trainers recompute every layer or none, have no scan of ours, and borrow the fused loss from Liger, for the models
that Liger knows. A trainer that is told to use Liger for another model goes on without a word, with the plain loss, and
runs out of memory. Granite is a trap of its own: Liger patches it, but its loss still takes whole logits.

The types were read in liger-kernel 0.8.5 and in LLaMA-Factory 0.9.2 to 0.9.5; slow tests read them again.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from tightfit.inputs.flags import checkpointing_word
from tightfit.inputs.versions import LLAMAFACTORY_VERSION, release
from tightfit.memory.operations import LIGER_MODELS
from tightfit.messages import Message
from tightfit.types import DDP, FSDP2, STREAM, ZERO3, ConfigError, Engine, Hardware, Levers, ModelShape, Trainer

OLDEST_LLAMAFACTORY = (0, 9, 2)
_TYPES_SINCE = {"qwen3": (0, 9, 3), "qwen3_moe": (0, 9, 3), "gemma3": (0, 9, 3), "gemma3_text": (0, 9, 3)}
"""Model types that the transformers of an older LLaMA-Factory cannot load."""

NAMES: dict[Trainer, Message] = {
    "tightfit": Message("plan.trainer-ours"),
    "llamafactory": Message("plan.trainer-llamafactory"),
    "trainer": Message("plan.trainer-hugging-face"),
}

STARTS: dict[Trainer, str] = {"llamafactory": "llamafactory", "trainer": "accelerate"}
"""The launcher that starts the files of another trainer."""

LIGER_UNDER_THE_TRAINER = LIGER_MODELS - {"granite"}
"""The model types, of those that we know, whose loss Liger fuses when Hugging Face's Trainer asks it to."""

_LIGER_UNDER_LLAMAFACTORY = {
    (0, 9, 2): "gemma gemma2 llama mistral mixtral mllama phi3 qwen2 qwen2_vl qwen2_5_vl",
    (0, 9, 3): "gemma3 gemma3_text glm4 llava olmo2 paligemma qwen3 qwen3_moe",
    (0, 9, 4): "glm4v gpt_oss",
    (0, 9, 5): "glm qwen3_next qwen3_5",
}
"""The same for LLaMA-Factory, which has a list of its own, by the release that began it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Abilities:
    """What a search may use of one trainer."""

    trainer: Trainer = "tightfit"
    llamafactory_version: str = LLAMAFACTORY_VERSION
    has_liger: bool = False  # Liger is installed, so that our own worker may borrow its kernels

    @property
    def is_ours(self) -> bool:
        return self.trainer == "tightfit"

    def starts(self, engine: Engine, levers: Levers, hardware: Hardware) -> bool:
        """Whether it runs this engine. `llamafactory-cli` starts torchrun without accelerate's settings for FSDP2; it
        refuses `pure_bf16` under ZeRO-3, and counts one rank of it where there is no GPU."""
        if self.trainer != "llamafactory":
            return self.is_ours or engine != STREAM
        if engine == ZERO3:
            return levers.master_weights and hardware.gpu.vendor != "cpu"
        return engine not in (FSDP2, STREAM)

    def fuses(self, shape: ModelShape) -> bool:
        """Whether the loss of this model can be fused."""
        if self.trainer == "llamafactory":
            return shape.model_type in fuses_under_llamafactory(release(self.llamafactory_version))
        return self.is_ours or shape.model_type in LIGER_UNDER_THE_TRAINER

    def compiles_on(self, hardware: Hardware) -> bool:
        """Whether layers are compiled without being told to: by our own worker, on cards for which PyTorch has a
        compiler. What that brings a CPU was never measured, and a DCU's PyTorch is too old."""
        return self.selects_on(hardware) and hardware.gpu.runs_triton

    def selects_on(self, hardware: Hardware) -> bool:
        """Likewise whether parts of layers recompute."""
        return self.is_ours and hardware.gpu.vendor not in ("cpu", "hygon")

    def borrows_kernels(self, shape: ModelShape, hardware: Hardware) -> bool:
        """Whether Liger's kernels may run in our own worker's layers without being asked for."""
        return self.is_ours and self.has_liger and shape.model_type in LIGER_MODELS and hardware.gpu.runs_triton

    def offloads_inputs(self, engine: Engine) -> bool:
        """Whether layer inputs can wait on the host: for the Trainer, accelerate's FSDP2 does that alone."""
        return self.trainer != "trainer" or engine == FSDP2


def fuses_under_llamafactory(at: tuple[int, ...]) -> set[str]:
    """The model types whose loss is fused in this release."""
    return {kind for since, kinds in _LIGER_UNDER_LLAMAFACTORY.items() if since <= at for kind in kinds.split()}


def check_llamafactory(levers: Levers, shape: ModelShape, version: str) -> None:
    """A ConfigError for what it would train otherwise than asked, or not at all, whatever the engine."""
    at = release(version)
    if at < OLDEST_LLAMAFACTORY:
        raise ConfigError(Message("plan.old-llamafactory", version=version))
    if shape.scans:
        raise ConfigError(Message("plan.llamafactory-mamba", name=shape.name))
    if at < _TYPES_SINCE.get(shape.model_type, OLDEST_LLAMAFACTORY):
        first = ".".join(map(str, _TYPES_SINCE[shape.model_type]))
        raise ConfigError(Message("plan.llamafactory-cannot-load", version=version, kind=shape.model_type, first=first))
    if levers.frozen_layers:
        raise ConfigError(Message("plan.llamafactory-freeze"))
    if levers.trains != "all":
        raise ConfigError(Message("plan.llamafactory-trains", trains=levers.trains))
    if levers.precision == "fp32" and levers.method != "full":
        raise ConfigError(Message("plan.llamafactory-frozen-precision", method=levers.method))


def check_pins(trainer: Abilities, levers: Levers, shape: ModelShape, pinned: Collection[str]) -> None:
    """A ConfigError for a lever that was named and that this trainer does not have."""
    if trainer.is_ours:
        return
    name = NAMES[trainer.trainer]
    if trainer.trainer == "llamafactory":
        check_llamafactory(levers, shape, trainer.llamafactory_version)
    if "engine" in pinned and levers.is_fsdp2 and trainer.trainer == "llamafactory":
        raise ConfigError(Message("plan.llamafactory-fsdp2"))
    depth = levers.checkpointing
    for lever, value, is_ours in (
        ("engine", levers.engine, levers.engine in (DDP, STREAM)),
        ("compile", levers.compile, levers.compile != "off"),
        ("kernels", levers.kernels, levers.kernels != "plain"),
        ("mlp", levers.mlp, levers.mlp != "plain"),
        ("checkpointing", checkpointing_word(depth), bool(depth.select)),
    ):
        if lever in pinned and is_ours:
            raise ConfigError(Message("plan.only-our-worker", name=name, flag=f"--{lever} {value}"))
    if "checkpointing" in pinned and levers.checkpointing.layers:
        raise ConfigError(Message("plan.all-layers-or-none", name=name))
    if "checkpointing" in pinned and levers.checkpointing.offload and not trainer.offloads_inputs(levers.engine):
        raise ConfigError(Message("plan.inputs-on-host", name=name))
    if "loss" in pinned and levers.loss == "fused" and not trainer.fuses(shape):
        raise ConfigError(Message("plan.no-fused-loss", name=name, model_type=shape.model_type))
    if "scan" in pinned and levers.scan == "tightfit" and shape.scans:
        raise ConfigError(Message("plan.no-own-scan", name=name))
