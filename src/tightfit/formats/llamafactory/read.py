"""The door for a LLaMA-Factory YAML: what it would train, in tightfit's words, or one clear sentence; and the same as a
job, for `tightfit plan FILE.yaml`.

LLaMA-Factory is a trainer of its own: it takes every field of transformers' TrainingArguments beside its own, brings
defaults that differ from both (LoRA on every linear layer, gradient checkpointing on), and casts what trains to fp32
unless `pure_bf16` says no. Those defaults are applied here, so that the estimate is of the run that `llamafactory-cli
train` would start.

A key that is almost a known one is refused, as LLaMA-Factory would do. A key that resembles nothing is kept in
`ignored`: it may belong to a newer release. Numbers are read as OmegaConf reads them, so `1e-4`, which plain YAML takes
for text, is a number. What would change the memory and cannot be priced yet is an error; what changes it a little is a
sentence in `because`.

Of a job, what changes the result is taken over. How it is computed (DeepSpeed file, kernels, checkpointing, how the
batch is split) is what a plan chooses, so those keys are left aside, and the plan says which. What a LLaMA-Factory run
has no field of ours for is named too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from tightfit.formats.deepspeed.read import DeepSpeedSettings
from tightfit.formats.llamafactory.keys import CHOSEN, FIELD_OF, KNOWN, READ
from tightfit.inputs.flags import LEVERS
from tightfit.inputs.spelling import Fields, nearest, shown, unknown_key
from tightfit.job import Job, Schedule
from tightfit.job.fields import Source, job_from_tree
from tightfit.job.text import JobText
from tightfit.job.training import OPTIMIZERS, UNPRICED_OPTIMIZERS
from tightfit.messages import Choice, Message, Said
from tightfit.types import (
    ZERO3,
    AttentionKernel,
    Checkpointing,
    ConfigError,
    Levers,
    Lora,
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
    model: str  # `model_name_or_path`: a Hugging Face id or a folder
    levers: Levers  # as its YAML alone would have it: unsharded
    trainable_layers: int | None  # for `finetuning_type: freeze`: the uppermost layers, which alone train
    max_grad_norm: float
    deepspeed: Path | None
    ignored: tuple[str, ...]  # keys that we do not know, in the order of the file
    because: tuple[Message, ...]  # what is to be said of the training that it describes
    computing_because: tuple[Message, ...]  # likewise of how it is computed, which a plan chooses anew


def settings_from(file: JobText) -> LlamaFactorySettings:
    """What a LLaMA-Factory YAML says. Its DeepSpeed file is found, and left to `read_deepspeed`."""
    values, path = file.values, file.path
    said = Fields(values=values, file=path.name, text_numbers=True)
    ignored: list[str] = []  # they resemble nothing: one that is almost right is an error
    for key in values:
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
        targets = _names(said, "lora_target")
        lora = Lora(
            rank=said.integer("lora_rank", least=1) or 8,
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
    norm = said.number("max_grad_norm")
    levers = Levers(
        method=method,
        lora=lora,
        sequence=said.integer("cutoff_len", least=1, most=LEVERS["seq"].most) or 2048,
        micro_batch=said.integer("per_device_train_batch_size", least=1, most=LEVERS["micro_batch"].most) or 8,
        accumulation=said.integer("gradient_accumulation_steps", least=1, most=LEVERS["accum"].most) or 1,
        precision=_precision(said, method, pure, because),
        master_weights=not pure,
        optimizer=_optimizer(said),
        attention=_attention(said),
        packed=bool(said.switch("neat_packing")),  # documents of plain `packing` see each other
        padded=not ((said.values.get("stage") == "pt" if asked is None else asked) or said.switch("neat_packing")),
        loss="fused" if said.switch("enable_liger_kernel") or said.switch("use_liger_kernel") else "plain",
        checkpointing=_checkpointing(said, computing_because),
        gradient_clipping=norm is None or norm > 0,
        dataloader_workers=said.integer("dataloader_num_workers") or 0,
        trainer="llamafactory",
    )
    return LlamaFactorySettings(
        file=path.name,
        model=model,
        levers=levers,
        trainable_layers=layers,
        max_grad_norm=1.0 if norm is None else norm,
        deepspeed=deepspeed,
        ignored=tuple(ignored),
        because=tuple(because),
        computing_because=tuple(computing_because),
    )


def to_levers(settings: LlamaFactorySettings, n_layers: int, deepspeed_version: str) -> Levers:
    """The levers of a model that has so many layers."""
    trained = n_layers if settings.trainable_layers is None else settings.trainable_layers
    return replace(settings.levers, frozen_layers=max(0, n_layers - trained), deepspeed_version=deepspeed_version)


def check_deepspeed(settings: LlamaFactorySettings, deepspeed: DeepSpeedSettings) -> None:
    """Raise where the YAML and its DeepSpeed file contradict each other, as the Hugging Face layer would."""
    ours, the_precision = settings.levers, Message("llamafactory.the-precision")
    pairs = (
        ("per_device_train_batch_size", ours.micro_batch, "train_micro_batch_size_per_gpu", deepspeed.micro_batch),
        ("gradient_accumulation_steps", ours.accumulation, "gradient_accumulation_steps", deepspeed.accumulation),
        ("max_grad_norm", settings.max_grad_norm, "gradient_clipping", deepspeed.gradient_clipping),
        (the_precision, ours.precision, the_precision, deepspeed.precision),
    )
    files = {"file": settings.file, "other_file": deepspeed.file}
    for key, value, theirs, other in pairs:
        if other is not None and other != value:
            said = Message("llamafactory.contradicts", ours=key, value=value, theirs=theirs, other=other, **files)
            raise ConfigError(said)
    if deepspeed.engine == ZERO3 and not ours.master_weights:
        raise ConfigError(Message("llamafactory.pure-with-zero3", **files))


# --- the fields ---------------------------------------------------------------------------------


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


# --- as a job -----------------------------------------------------------------------------------

PLACES = ("model_name_or_path", "adapter_name_or_path", "dataset_dir", "media_dir", "tokenized_path")
"""The keys that may name something on this machine."""
DATA = frozenset(("dataset", "dataset_dir"))
DATA_FOLDER, DATA_LIST = "data", "dataset_info.json"
"""Where LLaMA-Factory looks for its data sets, where nothing is said, and the file there that lists them."""

USUAL_EPOCHS = 3.0
USUAL: Mapping[str, Any] = {"learning_rate": 5e-5, "schedule": "linear", "warmup": 0}
"""What Hugging Face's trainer takes where nothing is said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaFactoryJob:
    """Such a file in our words."""

    settings: LlamaFactorySettings
    job: Job
    tree: Mapping[str, Any]  # the fields of the job that the file sets
    said: tuple[Said, ...]
    batch_per_gpu: int  # sequences a step of one GPU: micro batch × accumulation


def llamafactory_job_from(file: JobText, model: str | None, *, stays: bool = False) -> LlamaFactoryJob:
    """Such a file as a job. `model`: what a flag says, which wins. `stays`: LLaMA-Factory will run it, so that its
    kernels are kept, and so is what we have no field for."""
    path, written = file.path, file.tree
    settings = settings_from(file)
    tree, names = _tree(settings, written)
    tree["model"] = model or settings.model
    if settings.trainable_layers is not None:
        from tightfit.model.load import load_model

        tree["frozen_layers"] = max(0, load_model(tree["model"]).n_layers - settings.trainable_layers)
    # the kernels that it names, which are its author's choice
    if stays and settings.levers.loss == "fused":
        tree.setdefault("levers", {})["loss"] = "fused"
    if stays and written.get("flash_attn", "auto") != "auto":
        tree.setdefault("levers", {})["attention"] = settings.levers.attention
    job, _ = job_from_tree(tree, Source(file=path.name, names=names, kind="yaml"))
    taken = {*READ, *names.values(), *(DATA if "path" in tree.get("data", {}) else ())}
    chosen = [key for key in written if key in CHOSEN]
    rest = [key for key in written if key not in taken and key not in CHOSEN]
    aside = []
    if chosen and not stays:
        aside.append(Message("llamafactory.chooses-anew", file=path.name, chosen=", ".join(chosen)))
    if rest and not stays:
        aside.append(Message("llamafactory.left-aside", file=path.name, rest=", ".join(rest)))
    return LlamaFactoryJob(
        settings=settings,
        job=job,
        tree=tree,
        said=(*(Message("llamafactory.said", said=said) for said in settings.because), *aside),
        batch_per_gpu=settings.levers.micro_batch * settings.levers.accumulation,
    )


def _tree(settings: LlamaFactorySettings, written: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The fields of the job, and the key that each was written under, where it was taken as it is."""
    levers, lora = settings.levers, settings.levers.lora
    tree = {name: getattr(levers, name) for name in ("method", "sequence", "optimizer", "master_weights")}
    tree["clip"] = settings.max_grad_norm
    if levers.precision != "bf16" or any(written.get(key) for key in ("bf16", "pure_bf16")):
        tree["precision"] = levers.precision
    if levers.dataloader_workers:
        tree["levers"] = {"dataloader_workers": levers.dataloader_workers}
    if lora is not None:
        tree["lora"] = {"rank": lora.rank, "targets": list(lora.targets or ()) or "all", "dtype": lora.dtype}
    names = {}
    for key, field in FIELD_OF.items():
        value = written.get(key)
        if value is None or not _is_ours(key, value) or (field.startswith("lora.") and lora is None):
            continue
        block, _, name = field.rpartition(".")
        (tree.setdefault(block, {}) if block else tree)[name] = value
        names[field] = key
    place = data_path(written)
    if place is not None:
        tree.setdefault("data", {})["path"] = place
    if "epochs" not in tree and "max_steps" not in tree:
        tree["epochs"] = USUAL_EPOCHS
    return {**USUAL, **tree}, names


@dataclass(frozen=True, slots=True, kw_only=True)
class Original:
    """The LLaMA-Factory file that a plan was made from, of which everything is kept that needs no change."""

    name: str
    text: str
    written: Mapping[str, Any]  # its keys, as YAML reads them
    settings: LlamaFactorySettings
    job: Job  # what it asks for, before flags
    paths: Mapping[str, str]  # keys that name what lies on this machine, with the path that leads there from anywhere


def original_of(file: JobText, place: Callable[[Job], Job]) -> Original:
    """The file as the writer of its successor needs it. `place`: makes the paths of a job lead there from anywhere."""
    path, written = file.path, file.tree
    folders = {"dataset_dir": DATA_FOLDER, **written}
    paths = {}
    for key in PLACES:
        name = folders.get(key)
        found = [place / name for place in (Path(), path.parent) if isinstance(name, str) and (place / name).exists()]
        if found:
            paths[key] = str(found[0].absolute())
    said = llamafactory_job_from(file, None, stays=True)
    return Original(
        name=path.name,
        text=file.text,
        written=written,
        settings=said.settings,
        job=place(said.job),
        paths=paths,
    )


def data_path(written: Mapping[str, Any]) -> str | None:
    """The data set in our words; None: there is none, or there are several, of which a job takes one."""
    name, folder = written.get("dataset"), written.get("dataset_dir") or DATA_FOLDER
    if not isinstance(name, str) or not name.strip() or "," in name:
        return None
    if not isinstance(folder, str) or folder.startswith(("REMOTE:", "ONLINE")):
        return None
    return f"{Path(folder, DATA_LIST)}:{name.strip()}"


def _is_ours(key: str, value: object) -> bool:
    """Whether the field of the job takes this value, which has other meanings in the YAML."""
    if key == "max_steps":
        return value != -1  # Hugging Face's word for: as the epochs say
    if key in ("warmup_steps", "warmup_ratio"):
        return value != 0  # where both are nothing, `_tree` says so
    if key == "neat_packing":
        return bool(value)  # false says nothing about packing itself
    if key == "lr_scheduler_type":
        return value in get_args(Schedule)
    if key in ("val_size", "save_steps", "eval_steps"):  # a share or a count, as its size tells
        return not isinstance(value, int | float) or (0 <= value < 1 if key == "val_size" else value >= 1)
    return True
