"""The door for a LLaMA-Factory YAML: what it would train, in tightfit's words, or one clear sentence.

LLaMA-Factory is a trainer of its own: it takes every field of transformers' TrainingArguments beside
its own, brings defaults that differ from both (LoRA on every linear layer, gradient checkpointing on),
and casts what trains to fp32 unless `pure_bf16` says no. Those defaults are applied here, so that the
estimate is of the run that `llamafactory-cli train` would start.

A key that is almost a known one is refused, as LLaMA-Factory would do. A key that resembles nothing is
kept in `ignored`: it may belong to a newer release. Numbers are read as OmegaConf reads them, so
`1e-4`, which plain YAML takes for text, is a number. What would change the memory and cannot be priced
yet is an error; what changes it a little is a sentence in `because`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from tightfit.formats.deepspeed.read import DeepSpeedSettings
from tightfit.formats.llamafactory.keys import KNOWN
from tightfit.inputs.flags import LEVERS
from tightfit.inputs.spelling import Fields, nearest, read_text, shown, unknown_key
from tightfit.job.training_arguments import (
    OPTIMIZERS,
    UNPRICED_OPTIMIZERS,
)
from tightfit.messages import Choice, Message
from tightfit.types import (
    ZERO3,
    AttentionKernel,
    Checkpointing,
    ConfigError,
    Levers,
    Lora,
    Loss,
    Method,
    Optimizer,
    Precision,
)

_ATTENTION: dict[str, AttentionKernel] = {
    "auto": "sdpa",
    "sdpa": "sdpa",
    "fa2": "flash",
    "fa3": "flash",
    "disabled": "eager",
    "off": "eager",
}
_UNPRICED_SWITCHES = """use_dora use_galore use_apollo use_badam use_adam_mini use_muon use_unsloth use_llama_pro
    use_mca use_hyper_parallel use_kt use_asft_loss shift_attn fp8""".split()
"""Each changes the memory by much and in a way of its own."""
_UNPRICED_TEXTS = ("additional_target", "mixture_of_depths")
_SMALL_SWITCHES = ("upcast_layernorm", "upcast_lmhead_output", "resize_vocab", "torch_compile", "pissa_init")
"""Each changes the memory by little, or only for a moment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaFactorySettings:
    """What a LLaMA-Factory file trains, its defaults applied."""

    file: str
    model: str
    """`model_name_or_path`: a Hugging Face id or a folder."""
    method: Method
    lora: Lora | None
    trainable_layers: int | None
    """For `finetuning_type: freeze`: the uppermost layers, which alone train."""
    sequence: int
    micro_batch: int
    accumulation: int
    precision: Precision
    master_weights: bool
    optimizer: Optimizer
    attention: AttentionKernel
    packed: bool
    """`neat_packing`: documents in one sequence are kept apart. Those of plain `packing` see each other."""
    padded: bool
    """Rows are padded, and attention gets a mask for it: without packing of either kind."""
    loss: Loss
    checkpointing: Checkpointing
    max_grad_norm: float
    dataloader_workers: int
    deepspeed: Path | None
    ignored: tuple[str, ...]
    """Keys that we do not know, in the order of the file."""
    because: tuple[Message, ...]
    """What is to be said of the training that it describes."""
    computing_because: tuple[Message, ...]
    """Likewise of how it is computed, which a plan chooses anew."""


def read_llamafactory(path: str | Path) -> LlamaFactorySettings:
    """Read a LLaMA-Factory YAML. Its DeepSpeed file is found, and left to `read_deepspeed`."""
    path = Path(path)
    text = read_text(path, "YAML")
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        values = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else None
        problem = error.problem or error.context
        raise ConfigError(Message("llamafactory.no-yaml", file=path.name, problem=problem, line=line)) from None
    except (yaml.YAMLError, ValueError, TypeError, RecursionError, AttributeError) as error:
        # PyYAML lets dates, numbers and keys that Python cannot hold fall through as plain errors.
        problem = (str(error) or "unreadable").splitlines()[0]
        raise ConfigError(Message("llamafactory.no-yaml", file=path.name, problem=problem, line=None)) from None
    if not isinstance(values, dict) or not isinstance(node, yaml.MappingNode):
        raise ConfigError(Message("llamafactory.no-lines", name=path.name))
    seen: set[str] = set()
    for key, _ in node.value:
        if isinstance(key, yaml.ScalarNode):
            if key.value in seen:
                raise ConfigError(Message("llamafactory.key-twice", value=shown(key.value), name=path.name))
            seen.add(key.value)
    return settings_from(values, path)


def settings_from(values: Mapping[Any, Any], path: Path) -> LlamaFactorySettings:
    """The same of a file that was parsed already."""
    said = Fields(values=values, file=path.name, text_numbers=True)
    ignored: list[str] = []  # they resemble nothing: one that is almost right is an error
    for key in values:
        if not isinstance(key, str):
            raise ConfigError(Message("llamafactory.not-a-key", key=shown(key), file=path.name))
        if key not in KNOWN:
            if nearest(key, KNOWN, cutoff=0.8):
                raise unknown_key(key, KNOWN, path.name, aside=str(Message("llamafactory.would-refuse")))
            ignored.append(key)
    because: list[Message] = []
    computing_because: list[Message] = []
    model = said.text("model_name_or_path")
    if model is None:
        raise ConfigError(Message("llamafactory.no-model", name=path.name))
    # the files of LLaMA-Factory's other verbs hold no optimizer and no gradients
    verbs = [key for key in ("do_train", "do_eval", "do_predict") if said.switch(key)]
    if said.says("export_dir"):
        raise ConfigError(Message("llamafactory.exports", file=said.file))
    if said.values.get("do_train") is False or (verbs and "do_train" not in verbs):
        raise ConfigError(Message("llamafactory.only-evaluates", file=said.file))
    if said.says("infer_backend") and not said.says("dataset"):
        raise ConfigError(Message("llamafactory.is-inference", file=said.file))
    _check_priced(said, because)
    method = _method(said, because)
    pure = bool(said.switch("pure_bf16"))
    deepspeed = _deepspeed(said, path)
    if deepspeed is None:
        computing_because.append(Message("llamafactory.no-deepspeed", name=path.name))
    # left out, pre-training packs and fine-tuning does not
    asked = said.switch("packing")
    lora = layers = None
    if method != "full":
        rank, targets = said.integer("lora_rank", least=1) or 8, _names(said, "lora_target")
        lora = Lora(
            rank=rank,
            targets=None if targets in ((), ("all",)) else targets,
            dtype="bf16" if pure else "fp32",
            dropout=said.number("lora_dropout", most=1.0) or 0.0,
        )
    if said.values.get("finetuning_type") == "freeze":
        layers = said.integer("freeze_trainable_layers", least=None)
        layers = 2 if layers is None else layers
        if layers < 1:
            raise ConfigError(Message("llamafactory.trains-lowest", layers=layers, file=said.file))
        if _names(said, "freeze_trainable_modules") not in ((), ("all",)) or said.says("freeze_extra_modules"):
            because.append(Message("llamafactory.trains-modules", file=said.file))
        because.append(Message("llamafactory.freezes-head", file=said.file))
    return LlamaFactorySettings(
        file=path.name,
        model=model,
        method=method,
        lora=lora,
        trainable_layers=layers,
        sequence=said.integer("cutoff_len", least=1, most=LEVERS["seq"].most) or 2048,
        micro_batch=said.integer("per_device_train_batch_size", least=1, most=LEVERS["micro_batch"].most) or 8,
        accumulation=said.integer("gradient_accumulation_steps", least=1, most=LEVERS["accum"].most) or 1,
        precision=_precision(said, method, pure, because),
        master_weights=not pure,
        optimizer=_optimizer(said),
        attention=_attention(said),
        packed=bool(said.switch("neat_packing")),
        padded=not ((said.values.get("stage") == "pt" if asked is None else asked) or said.switch("neat_packing")),
        loss="fused" if said.switch("enable_liger_kernel") or said.switch("use_liger_kernel") else "plain",
        checkpointing=_checkpointing(said, computing_because),
        max_grad_norm=1.0 if (norm := said.number("max_grad_norm")) is None else norm,
        dataloader_workers=said.integer("dataloader_num_workers") or 0,
        deepspeed=deepspeed,
        ignored=tuple(ignored),
        because=tuple(because),
        computing_because=tuple(computing_because),
    )


def to_levers(settings: LlamaFactorySettings, base: Levers, *, n_layers: int | None = None) -> Levers:
    """The base with what the YAML says. `n_layers`, the model's depth, is needed for `freeze` only."""
    frozen = 0
    if settings.trainable_layers is not None:
        if n_layers is None:
            raise ConfigError(Message("llamafactory.freeze-needs-layers", file=settings.file))
        frozen = max(0, n_layers - settings.trainable_layers)
    return replace(
        base,
        method=settings.method,
        engine="zero0",
        sequence=settings.sequence,
        micro_batch=settings.micro_batch,
        accumulation=settings.accumulation,
        precision=settings.precision,
        optimizer=settings.optimizer,
        master_weights=settings.master_weights,
        offload_optimizer="none",
        offload_param="none",
        checkpointing=settings.checkpointing,
        loss=settings.loss,
        attention=settings.attention,
        packed=settings.packed,
        padded=settings.padded,
        trainer="llamafactory",
        lora=settings.lora,
        frozen_layers=frozen,
        gradient_clipping=settings.max_grad_norm > 0,
        dataloader_workers=settings.dataloader_workers,
    )


def check_deepspeed(settings: LlamaFactorySettings, deepspeed: DeepSpeedSettings) -> None:
    """Raise where the YAML and its DeepSpeed file contradict each other, as the Hugging Face layer would."""
    pairs = (
        ("per_device_train_batch_size", settings.micro_batch, "train_micro_batch_size_per_gpu", deepspeed.micro_batch),
        ("gradient_accumulation_steps", settings.accumulation, "gradient_accumulation_steps", deepspeed.accumulation),
        ("max_grad_norm", settings.max_grad_norm, "gradient_clipping", deepspeed.gradient_clipping),
        (
            Message("llamafactory.the-precision"),
            settings.precision,
            Message("llamafactory.the-precision"),
            deepspeed.precision,
        ),
    )
    for ours, value, theirs, other in pairs:
        if other is not None and other != value:
            raise ConfigError(
                Message(
                    "llamafactory.contradicts",
                    ours=ours,
                    value=value,
                    file=settings.file,
                    theirs=theirs,
                    other=other,
                    other_file=deepspeed.file,
                )
            )
    if deepspeed.engine == ZERO3 and not settings.master_weights:
        raise ConfigError(Message("llamafactory.pure-with-zero3", file=settings.file, other_file=deepspeed.file))


# --- the file -----------------------------------------------------------------------------------


def _deepspeed(said: Fields, path: Path) -> Path | None:
    """The DeepSpeed file: from here, as LLaMA-Factory looks for it, or else from where the YAML lies."""
    if isinstance(said.values.get("deepspeed"), Mapping):
        raise ConfigError(Message("llamafactory.deepspeed-is-block", file=said.file))
    name = said.text("deepspeed")
    if name is None:
        return None
    try:
        places = dict.fromkeys((Path(name).expanduser().absolute(), path.absolute().parent / name))
        found = next((place for place in places if place.is_file()), None)
    except (ValueError, RuntimeError):  # a path that no file system can hold, a home that nobody has
        found = None
    if found is None:
        raise ConfigError(Message("llamafactory.deepspeed-missing", file=said.file, name=shown(name)))
    return found


# --- the fields ---------------------------------------------------------------------------------


def _check_priced(said: Fields, because: list[Message]) -> None:
    """Refuse what would make the estimate wrong; mention what would make it a little wrong."""
    stage = said.word("stage", ("pt", "sft", "rm", "ppo", "dpo", "kto")) or "sft"
    if stage not in ("pt", "sft"):
        raise ConfigError(Message("llamafactory.stage-not-priced", stage=stage, file=said.file))
    large = [key for key in _UNPRICED_SWITCHES if said.switch(key)] + [key for key in _UNPRICED_TEXTS if said.says(key)]
    if large:
        raise ConfigError(Message("llamafactory.leave-out", large=large[0], file=said.file))
    small = [key for key in _SMALL_SWITCHES if said.switch(key)]
    if said.switch("double_quantization") is False:
        small.append("double_quantization")
    if said.values.get("fsdp") or said.values.get("fsdp_config"):
        raise ConfigError(Message("llamafactory.fsdp-not-read", file=said.file))
    batch = said.values.get("per_device_eval_batch_size")
    if batch is not None and batch != said.values.get("per_device_train_batch_size", 1):
        because.append(Message("llamafactory.evaluation-as-training", file=said.file))
    because += [Message("llamafactory.not-priced", key=key, file=said.file) for key in small]


def _method(said: Fields, because: list[Message]) -> Method:
    kind = said.word("finetuning_type", ("lora", "oft", "freeze", "full")) or "lora"
    if kind == "oft":
        raise ConfigError(Message("llamafactory.oft-not-priced", file=said.file))
    bits = said.integer("quantization_bit")
    if bits is None:
        return "lora" if kind == "lora" else "full"
    library = said.word("quantization_method", ("bnb", "hqq", "eetq", "bitsandbytes")) or "bnb"
    if kind != "lora":
        raise ConfigError(Message("llamafactory.bits-need-lora", file=said.file, kind=kind))
    if bits != 4 or library not in ("bnb", "bitsandbytes"):
        raise ConfigError(Message("llamafactory.bits-not-priced", bits=bits, library=library, file=said.file))
    return "qlora"


def _names(said: Fields, key: str) -> tuple[str, ...]:
    """Names with commas between them, or a YAML list of names."""
    value = said.values.get(key)
    names = value.split(",") if isinstance(value, str) else value if isinstance(value, list) else []
    if (value is not None and not names) or not all(isinstance(name, str) and name.strip() for name in names):
        raise said.wrong(key, str(Message("llamafactory.names-with-commas")))
    return tuple(name.strip() for name in names)


def _precision(said: Fields, method: Method, pure: bool, because: list[Message]) -> Precision:
    bf16, fp16 = said.switch("bf16"), said.switch("fp16")
    if fp16 and (bf16 or pure):
        other = "bf16" if bf16 else "pure_bf16"
        raise ConfigError(Message("llamafactory.both-precisions-on", other=other, file=said.file))
    if fp16:
        return "fp16"
    if bf16 or pure:
        return "bf16"
    if method == "full":
        return "fp32"
    because.append(Message("llamafactory.no-precision", file=said.file))
    return "bf16"


def _optimizer(said: Fields) -> Optimizer:
    name = said.text("optim") or "adamw_torch"
    if name in OPTIMIZERS:
        return OPTIMIZERS[name]
    close = None if name in UNPRICED_OPTIMIZERS else nearest(name, OPTIMIZERS)
    if close:
        raise ConfigError(Message("llamafactory.optim-meant", name=shown(name), file=said.file, close=close))
    names = Choice(OPTIMIZERS)
    if name in UNPRICED_OPTIMIZERS:
        raise ConfigError(Message("llamafactory.optim-not-priced", name=shown(name), file=said.file, names=names))
    raise ConfigError(Message("llamafactory.optim-unknown", name=shown(name), file=said.file, names=names))


def _attention(said: Fields) -> AttentionKernel:
    """YAML reads a bare `off` as false, and old files say true for FlashAttention."""
    value = said.values.get("flash_attn")
    if isinstance(value, bool):
        return "flash" if value else "eager"
    return _ATTENTION[said.word("flash_attn", _ATTENTION) or "auto"]


def _checkpointing(said: Fields, because: list[Message]) -> Checkpointing:
    """On unless switched off by LLaMA-Factory's own key; Unsloth's way keeps the layer inputs on the host."""
    off, hugging_face = said.switch("disable_gradient_checkpointing"), said.switch("gradient_checkpointing")
    if off and hugging_face:
        raise ConfigError(Message("llamafactory.checkpointing-both", file=said.file))
    if off:
        return Checkpointing(layers=0)
    if hugging_face is False:
        because.append(Message("llamafactory.checkpointing-no-effect", file=said.file))
    return Checkpointing(layers=None, offload=bool(said.switch("use_unsloth_gc")))
