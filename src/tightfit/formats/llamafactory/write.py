"""The plan as a LLaMA-Factory YAML, and the `dataset_info.json` that its `dataset` key refers to.

LLaMA-Factory can do most of what a plan may ask for, by keys that moved between its releases. What it cannot
do is decided here, case by case, by one rule: a difference that leaves the result of the training alone is
written and said at the top of the file; anything else is refused, and the caller leaves the file out.

written, and said:
- `layers:K` checkpointing: it checkpoints all layers or none, so all; slower, and within the predicted memory;
- `full+offload`: its `use_unsloth_gc` keeps layer inputs on the host in the same way;
- the fused loss: Liger's, which LLaMA-Factory applies to the families that Liger knows;
- adapters: it keeps them in fp32, which is more than bf16 ones under ZeRO-3; below, DeepSpeed casts them anyway;
- samples that are to be left out because they are too long: it cuts them;
- a time limit: it has none;
- a job without data: a file name to be filled.

refused:
- FSDP2: `llamafactory-cli` starts torchrun without accelerate's FSDP settings, and would run plain data parallel;
- Mamba: neither our scan kernels nor a checkpointing of its own;
- the fused loss for a family without it: LLaMA-Factory would warn, go on, and run out of memory;
- frozen layers: its `freeze` leaves the final norm and the head untrained as well;
- embeddings alone: its `freeze` with no layer and an extra module might do it, but we have never run that;
- pure 16-bit training under ZeRO-3, or in fp16: its own check refuses the first and has no key for the second;
- adapters on a model in fp32: it loads the frozen model in the format of its files, whatever the YAML says;
- ZeRO-3 on the CPU: with `use_cpu` transformers sets up DeepSpeed too late, and it counts one rank;
- a model without weights (a block of shape fields, our Mamba presets): it loads checkpoints only;
- a DeepSpeed newer than the release accepts.

The keys, templates and limits below were read from the released packages 0.9.2 to 0.9.5; the slow test reads
them again.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any

import yaml

from tightfit.formats.beside import change_in_place, scalar
from tightfit.formats.huggingface.write import OPTIM, liger_unproven, say_need
from tightfit.formats.llamafactory.keys import FIELD_OF
from tightfit.formats.llamafactory.read import Original
from tightfit.formats.target import Target
from tightfit.formats.worker import write as worker
from tightfit.formats.worker.write import require_way
from tightfit.inputs.flags import checkpointing_word
from tightfit.inputs.versions import release
from tightfit.job import Job
from tightfit.job.file import field_at
from tightfit.memory import estimate
from tightfit.messages import Message, Said, text
from tightfit.model.presets import PRESETS, checkpoint_of, find_checkpoint
from tightfit.planner.plan import Plan, Way
from tightfit.planner.trainers import OLDEST_LLAMAFACTORY, check_llamafactory, fuses_under_llamafactory
from tightfit.priced import amounts, strategy_name
from tightfit.types import ConfigError, ModelShape

DATASET_INFO = "dataset_info.json"
DATASET = "train"  # what the data is called in `dataset_info.json`
PLACEHOLDER_DATA = "train.json"  # where a job without data expects it
DATA_FILES = (".json", ".jsonl", ".csv", ".parquet", ".arrow", ".txt")

DEEPSPEED_LIMITS = {(0, 9, 3): "0.16.9", (0, 9, 4): "0.16.9"}
"""The newest DeepSpeed that a release starts with; the others do not look."""

TRANSFORMERS_LIMITS = {(0, 9, 2): "4.49.0", (0, 9, 3): "4.52.4", (0, 9, 4): "4.57.1", (0, 9, 5): "5.6.0"}
"""The newest transformers that a release starts with."""

_TEMPLATES: tuple[tuple[str, str, dict[tuple[int, ...], str]], ...] = (
    (r"deepseek-r1", r".*", {(0, 9, 2): "deepseek3", (0, 9, 3): "deepseekr1"}),
    (r"deepseek-coder", r"llama", {(0, 9, 2): "deepseekcoder"}),
    (r"deepseek-(llm|math)", r"llama", {(0, 9, 2): "deepseek"}),
    (r"(^|/)yi-", r"llama", {(0, 9, 2): "yi"}),
    (r"smollm2", r"llama", {(0, 9, 3): "smollm2"}),
    (r"smollm-", r"llama", {(0, 9, 3): "smollm"}),
    (r"vicuna", r"llama", {(0, 9, 2): "vicuna"}),
    (r"llama-?3", r"llama", {(0, 9, 2): "llama3"}),
    (r"llama-2", r"llama", {(0, 9, 2): "llama2"}),
    (r"instruct-2507", r"qwen3(_moe)?", {(0, 9, 3): "qwen3", (0, 9, 4): "qwen3_nothink"}),
    (r"", r"qwen3(_moe)?", {(0, 9, 3): "qwen3"}),
    (r"", r"qwen2(_moe)?", {(0, 9, 2): "qwen"}),
    (r"gemma-3-1b", r"gemma3_text", {(0, 9, 3): "gemma", (0, 9, 4): "gemma2"}),
    (r"", r"gemma3(_text)?", {(0, 9, 3): "gemma3"}),
    (r"", r"gemma2", {(0, 9, 2): "gemma", (0, 9, 4): "gemma2"}),
    (r"", r"gemma", {(0, 9, 2): "gemma"}),
    (r"zephyr", r"mistral", {(0, 9, 2): "zephyr"}),
    (r"ministral|mistral-nemo", r"mistral", {(0, 9, 2): "ministral"}),
    (r"mistral-small", r"mistral", {(0, 9, 2): "mistral_small"}),
    (r"", r"mistral|mixtral", {(0, 9, 2): "mistral"}),
    (r"phi-4-mini", r"phi3", {(0, 9, 5): "phi4_mini"}),
    (r"phi-4", r"phi3", {(0, 9, 2): "phi4"}),
    (r"", r"phi3", {(0, 9, 2): "phi"}),
    (r"", r"granite", {(0, 9, 2): "granite3"}),
    (r"", r"olmo2?", {(0, 9, 2): "olmo"}),
    (r"", r"falcon", {(0, 9, 2): "falcon"}),
)
"""A pattern in the model's name, its type, and the template by the release that began it; the first row wins."""

_ATTENTION = {"sdpa": "sdpa", "flash": "fa2", "eager": "disabled"}
_PROCESS_GROUP_TIMEOUT_S = 180_000_000
"""While one rank tokenises the data the others wait, far longer than torch's half hour."""


def llamafactory_yaml(plan: Plan, target: Target, deepspeed_file: str | None) -> str:
    """The file for `llamafactory-cli train`; an error where it would train something else."""
    way, original = require_way(plan), target.original
    version, levers, shape = target.llamafactory_version, way.levers, way.shape
    check_llamafactory(levers, shape, version)
    pure, zero3 = not levers.master_weights, levers.stage == 3
    theirs, limit = target.deepspeed_version, DEEPSPEED_LIMITS.get(release(version))
    fuses = shape.model_type in fuses_under_llamafactory(release(version))
    refused = (
        (levers.streams, Message("planfile.stream-is-ours", program="LLaMA-Factory")),
        (levers.is_fsdp2, Message("llamafactory.llamafactory-cli-cannot-start-fsdp2")),
        (
            levers.loss == "fused" and not fuses,
            Message("llamafactory.no-fused-loss", version=version, model_type=shape.model_type),
        ),
        (pure and zero3, Message("llamafactory.no-pure-zero3")),
        (pure and levers.precision != "bf16", Message("llamafactory.no-pure-precision", precision=levers.precision)),
        (zero3 and way.hardware.gpu.vendor == "cpu", Message("llamafactory.no-zero3-on-cpu")),
        (
            limit and release(theirs) > release(limit),
            Message("llamafactory.refuses-deepspeed", version=version, deepspeed_version=theirs, limit=limit),
        ),
    )
    for holds, why in refused:
        if holds:
            raise ConfigError(why)
    _name(plan, way)
    sections = {
        title: {key: value for key, value in values.items() if value is not None}
        for title, values in _sections(plan, way, target, deepspeed_file).items()
    }
    known = {"version": version, "strategy": strategy_name(levers), "world": way.world, "gpu": way.hardware.gpu.name}
    if original is not None:
        values = {key: value for section in sections.values() for key, value in section.items()}
        return write_edits(plan, original, values, Message("llamafactory.head-edited", **known))
    head = [
        Message("llamafactory.head", **known),
        Message("llamafactory.start-here"),
        *(Message("llamafactory.note", note=note) for note in llamafactory_notes(plan, target)),
    ]
    lines = [f"# {' '.join(str(line).split())}" for line in head]
    for title, values in sections.items():
        lines += ["", f"# {text(title)}", *(f"{key}: {scalar(value)}" for key, value in values.items())]
    return "\n".join(lines) + "\n"


MESSAGE_TAGS = {f"{part}_tag": part for part in ("role", "content", "user", "assistant", "system")}
"""How OpenAI's layout of a conversation calls its parts."""


def dataset_info_json(plan: Plan) -> str:
    """Where LLaMA-Factory finds the data, and how a sample is laid out."""
    data = plan.job.data
    assert listed(data.path) is None, "what is in a dataset_info.json already needs no second one"
    is_file = data.path is None or names_a_file(data.path)
    entry: dict[str, Any] = {"file_name" if is_file else "hf_hub_url": data.path or PLACEHOLDER_DATA}
    if data.format == "text":
        entry["columns"] = {"prompt": "text"}
    elif data.format == "messages":
        entry |= {"formatting": "sharegpt", "columns": {"messages": "messages"}, "tags": MESSAGE_TAGS}
    else:
        entry["formatting"] = "sharegpt" if data.format == "sharegpt" else "alpaca"
    return json.dumps({DATASET: entry}, indent=2, ensure_ascii=False) + "\n"


def names_its_data(plan: Plan, target: Target) -> bool:
    """Whether the data is in a `dataset_info.json` already, so that no second one is needed."""
    kept = target.original is not None and keeps_data(plan, target.original)
    return kept or listed(plan.job.data.path) is not None


def llamafactory_wanted(target: Target) -> Said:
    """The release that the file is for, and which transformers that takes."""
    version = target.llamafactory_version
    newest = TRANSFORMERS_LIMITS.get(release(version))
    if newest is None:  # a release that we have not read
        return f"LLaMA-Factory {version}"
    return Message("llamafactory.wanted", version=version, newest=newest)


def names_a_file(path: str) -> bool:
    """Whether a job's data is a file or folder rather than a data set's name; told from the text alone."""
    return path.startswith(("/", ".", "~")) or path.endswith(("/", *DATA_FILES)) or listed(path) is not None


def listed(path: str | None) -> tuple[str, str] | None:
    """Of `FOLDER/dataset_info.json:NAME` the folder and the name; None: the data is something else."""
    folder, found, name = (path or "").rpartition(f"{DATASET_INFO}:")
    return (folder.rstrip("/") or ("/" if folder else "."), name) if found and name else None


def llamafactory_notes(plan: Plan, target: Target) -> tuple[Message, ...]:
    """What differs from the plan, or has to be known, a sentence each."""
    way, job, levers = require_way(plan), plan.job, require_way(plan).levers
    entry, known, fused = listed(job.data.path), names_its_data(plan, target), levers.loss == "fused"
    unnamed = entry is not None and not entry[0].startswith("/") and target.original is None
    word, folder = checkpointing_word(levers.checkpointing), entry and entry[0]
    notes = (
        (levers.checkpointing.layers, Message("llamafactory.recomputes-all", word=word)),
        (levers.checkpointing.offload, Message("llamafactory.unsloth-gc")),
        (fused, Message("llamafactory.liger-loss")),
        (fused, liger_unproven(way.hardware)),
        (levers.lora is not None, _adapters_grow(way)),
        (_packs_apart(job), Message("llamafactory.neat-packing")),
        (levers.attention == "flash", Message("llamafactory.needs-flash-attn")),
        (way.skips_long, Message("llamafactory.cuts-long", sequence=levers.sequence)),
        (job.timeout is not None, Message("llamafactory.no-time-limit", timeout=job.timeout)),
        (job.saving.every_minutes is not None, Message("llamafactory.saves-by-steps", steps=worker.save_steps(job))),
        (job.saving.keep_every is not None, Message("llamafactory.keeps-newest")),
        (
            job.data.recipe is not None or (job.data.path or "").startswith("shipped:"),
            Message("llamafactory.needs-samples"),
        ),
        (job.data.path is None and not known, Message("llamafactory.put-samples", file=PLACEHOLDER_DATA)),
        (unnamed, Message("llamafactory.looked-for-in", file=DATASET_INFO, folder=folder)),
        (job.data.format == "auto" and not known, Message("llamafactory.taken-for-alpaca", file=DATASET_INFO)),
        (
            job.data.format != "text" and _template(plan, way, target) is None,
            Message("llamafactory.template-of-tokenizer"),
        ),
    )
    return tuple(note for holds, note in notes if holds and note)


def _adapters_grow(way: Way) -> Message | None:
    """Where no DeepSpeed casts its adapters back, they are larger than those of the plan."""
    levers, planned = way.levers, way.footprint.gpu.required_bytes
    if levers.lora is None or levers.lora.dtype == "fp32":
        return None
    run = replace(levers, lora=replace(levers.lora, dtype="fp32"))
    need = estimate(way.shape, run, way.world, way.hardware).gpu.required_bytes
    if need <= planned:
        return None
    needed, there = amounts(need, planned)
    size = say_need(Message("huggingface.gib", gib=needed), fits=need <= way.hardware.gpu.memory_bytes)
    return Message("llamafactory.adapters-fp32", dtype=levers.lora.dtype, needed=size, planned=there)


# --- the sections -------------------------------------------------------------------------------


def _name(plan: Plan, way: Way) -> str:
    """A Hugging Face id or a folder."""
    model = plan.job.model if way.shape is plan.shape else way.shape.name
    if not isinstance(model, str):
        raise ConfigError(Message("llamafactory.loads-weights"))
    preset, path = model.strip().lower(), PurePosixPath(model)
    if preset not in PRESETS:
        return str(path.parent) if path.name == "config.json" else find_checkpoint(model) or model
    weights = checkpoint_of(preset)
    if weights is None:
        raise ConfigError(Message("llamafactory.preset-has-no-weights", preset=preset))
    return weights


def _sections(plan: Plan, way: Way, target: Target, deepspeed_file: str | None) -> dict[str, dict[str, Any]]:
    """The keys of the file, under the messages that stand above them; None: left out."""
    job, levers, lora = plan.job, way.levers, way.levers.lora
    folder, name = listed(job.data.path) or (".", DATASET)
    quantised, adapted = levers.method == "qlora", lora is not None
    alpha = worker.lora_alpha(job, levers) or 0.0
    # On the host DeepSpeed's own Adam takes the place of torch's, which must not be the fused one then.
    on_host = levers.optimizer == "adamw" and levers.offload_optimizer != "none"
    rounds, every, judged = worker.epochs(job), worker.save_steps(job), job.evaluation.split > 0
    judged_every = job.evaluation.every_steps if judged else None
    worker.time_limit_s(job)  # a time that cannot be read is an error in every file
    return {
        "llamafactory.about-model": {
            "model_name_or_path": _name(plan, way),
            "trust_remote_code": job.trust_remote_code,
            "flash_attn": _ATTENTION[levers.attention],
            "quantization_bit": 4 if quantised else None,
            "quantization_method": "bnb" if quantised else None,
            "quantization_type": "nf4" if quantised else None,
            "double_quantization": True if quantised else None,
        },
        "llamafactory.about-method": {
            "stage": "pt" if job.data.format == "text" else "sft",
            "do_train": True,
            "finetuning_type": "lora" if adapted else "full",
            "lora_rank": lora and lora.rank,
            "lora_alpha": (int(alpha) if alpha.is_integer() else alpha) if adapted else None,
            "lora_dropout": job.lora.dropout if adapted else None,
            "lora_target": lora and ("all" if lora.targets is None else ",".join(lora.targets)),
        },
        "llamafactory.about-data": {
            "dataset": name,
            "dataset_dir": folder,
            "template": (_template(plan, way, target) or None) if job.data.format != "text" else None,
            "cutoff_len": levers.sequence,
            "packing": job.data.packing,
            "neat_packing": True if _packs_apart(job) else None,
            "max_samples": job.max_samples,
            "dataloader_num_workers": levers.dataloader_workers,
        },
        "llamafactory.about-optimizer": {
            "optim": "adamw_torch" if on_host else OPTIM[levers.optimizer],
            "learning_rate": worker.learning_rate(job, levers),
            "lr_scheduler_type": job.schedule,
            "weight_decay": float(job.weight_decay),
            "max_grad_norm": worker.clip(job, levers),
            "per_device_train_batch_size": levers.micro_batch,
            "gradient_accumulation_steps": levers.accumulation,
            # Every transformers that these releases accept has it; only the newest take a share as warmup_steps.
            "warmup_ratio": float(job.warmup) if 0 < job.warmup < 1 else None,
            "warmup_steps": None if 0 < job.warmup < 1 else math.ceil(job.warmup),
            "max_steps": job.max_steps if rounds is None else None,
            "num_train_epochs": rounds,
            "seed": job.seed,
        },
        "llamafactory.about-memory": {
            "bf16": levers.precision == "bf16",
            "fp16": levers.precision == "fp16",
            "pure_bf16": None if levers.master_weights else True,
            "disable_gradient_checkpointing": levers.checkpointing.layers == 0,
            "use_unsloth_gc": True if levers.checkpointing.offload else None,
            "enable_liger_kernel": levers.loss == "fused",
            "deepspeed": deepspeed_file,
            "ddp_timeout": _PROCESS_GROUP_TIMEOUT_S,
            "use_cpu": True if way.hardware.gpu.vendor == "cpu" else None,
        },
        "llamafactory.about-evaluation": {
            "val_size": float(job.evaluation.split) if judged else None,
            "do_eval": True if judged else None,
            "per_device_eval_batch_size": levers.micro_batch if judged else None,
            "prediction_loss_only": True if judged else None,
            "eval_strategy": "no" if judged_every is None else "steps",
            "eval_steps": judged_every,
        },
        "llamafactory.about-saving": {
            "output_dir": job.saving.folder,
            "logging_steps": worker.logging_steps(job),
            "report_to": "none",
            "save_strategy": "no" if every is None else "steps",
            "save_steps": every,
            "save_total_limit": None if every is None else job.saving.keep_last,
        },
    }


def _packs_apart(job: Job) -> bool:
    """Its plain packing lets the samples of a sequence see each other; text of stage pt is never kept apart."""
    return job.data.packing and job.data.format != "text"


# --- the template -------------------------------------------------------------------------------


def _template(plan: Plan, way: Way, target: Target) -> str | None:
    """The job's, or the family's in this release; None: the tokenizer's own."""
    at = release(target.llamafactory_version)
    asked = plan.job.data.template
    if asked is None:
        return template_of(_name(plan, way), way.shape, at)
    began = (since for _, _, names in _TEMPLATES for since, name in names.items() if name == asked)
    since = min(began, default=OLDEST_LLAMAFACTORY)
    if at < since:
        usual, version = template_of(_name(plan, way), way.shape, at), target.llamafactory_version
        if usual:
            raise ConfigError(Message("llamafactory.template-is-there", asked=asked, version=version, usual=usual))
        first = ".".join(map(str, since))
        raise ConfigError(Message("llamafactory.template-since", asked=asked, version=version, first=first))
    return asked


def template_of(name: str, shape: ModelShape, at: tuple[int, ...]) -> str | None:
    """The chat template of a model's family; None: this release has none for it."""
    for pattern, kind, names in _TEMPLATES:
        if re.search(pattern, name.lower()) and re.fullmatch(kind, shape.model_type):
            known = [template for since, template in sorted(names.items()) if since <= at]
            return known[-1] if known else None
    return None


# --------------------------------------------------------------------------------------------------
# The user's own YAML with what a plan changes in it, and a head that says each change with its reason.
#
# The text is kept, with its comments and the order of its keys: values are replaced where they stand, and keys that
# were not there come at the end. A key is changed only where what it means, be it by LLaMA-Factory's default, differs
# from the plan.

HEAD = "# tightfit: "
"""How each line of ours begins, so that those of an earlier plan are known."""
AS_SAID = Message("llamafactory.as-said")
UNFUSED, FUSED = ("adamw_torch", "adamw_hf"), "adamw_torch_fused"
PAIRS = (("warmup_steps", "warmup_ratio"), ("num_train_epochs", "max_steps"))
"""Two keys for one thing: where one is written, the other goes."""


def write_edits(plan: Plan, original: Original, values: Mapping[str, Any], head: Message) -> str:
    """The file; `values`: what a file written from nothing would say; `head`: what stands at its top."""
    edits, written = edits_of(plan, original, values), original.written
    lines = [str(head), text("llamafactory.made-from", name=original.name)]
    for key, (_, reason) in edits.items():
        if key not in written:
            lines.append(text("llamafactory.was-not-there", key=key, reason=reason))
        else:
            lines.append(text("llamafactory.was", key=key, before=scalar(written[key]), reason=reason))
    kept = "\n".join(line for line in original.text.splitlines() if not line.startswith(HEAD)).strip("\n")
    changes = {key: value for key, (value, _) in edits.items()}
    wanted = {key: value for key, value in {**written, **changes}.items() if value is not None or key not in changes}
    body = None
    if (changed := change_in_place(kept, changes)) is not None:
        body, added = changed
        body = "\n".join([body.rstrip("\n"), *(["", *added] if added else [])])
    if body is None or yaml.safe_load(body) != wanted:  # a form that cannot be changed in place
        body = yaml.safe_dump(wanted, sort_keys=False, allow_unicode=True, width=10**6).rstrip("\n")
    return "\n".join([*(HEAD + " ".join(line.split()) for line in lines), "", body]) + "\n"


def keeps_data(plan: Plan, original: Original) -> bool:
    """Whether it trains on what the file names."""
    return plan.job.data.path == original.job.data.path


# --- what changes -------------------------------------------------------------------------------


def edits_of(plan: Plan, original: Original, values: Mapping[str, Any]) -> dict[str, tuple[Any, Said]]:
    """Every key that has to change, in the order in which they are said: what it becomes (None: it goes), and why."""
    way, settings, written = require_way(plan), original.settings.levers, original.written
    levers = way.levers
    found: dict[str, tuple[Any, Said]] = {}

    def put(key: str, value: Any, reason: Said) -> None:
        """The first reason for a key counts, and a key that says so already stays."""
        if (key in written and written[key] != value) or (key not in written and value is not None):
            found.setdefault(key, (value, reason))

    # what the command line says instead of the file
    if plan.job.model != original.job.model:
        put("model_name_or_path", values["model_name_or_path"], AS_SAID)
    for key, field in FIELD_OF.items():
        if key in values and field_at(plan.job, field) != field_at(original.job, field):
            put(key, values[key], AS_SAID)
            for other in (other for pair in PAIRS if key in pair for other in pair if other != key):
                put(other, None, AS_SAID)
    if plan.job.clip != original.job.clip:
        put("max_grad_norm", values["max_grad_norm"], AS_SAID)
    for key in () if keeps_data(plan, original) else ("dataset", "dataset_dir"):
        put(key, values[key], AS_SAID)

    # what changes the result: because it was asked for, or allowed and needed
    why: Said = "; ".join(map(str, way.changes)) if way.changes else AS_SAID
    if levers.sequence != settings.sequence:
        put("cutoff_len", levers.sequence, why)
    if levers.method != settings.method:
        quantised = ("quantization_bit", "quantization_method", "quantization_type", "double_quantization")
        for key in ("finetuning_type", *quantised):
            put(key, values.get(key), why)
    adapters, before = levers.lora, settings.lora
    if adapters is not None and (before is None or adapters.rank != before.rank):
        put("lora_rank", values["lora_rank"], why)
        put("lora_alpha", values["lora_alpha"], why)
    if adapters is not None and adapters.targets != (before.targets if before else None):
        put("lora_target", values["lora_target"], why)
    if levers.master_weights != settings.master_weights:
        put("pure_bf16", not levers.master_weights, why)
    if levers.optimizer != settings.optimizer:
        put("optim", values["optim"], why)
    for name in ("bf16", "fp16"):
        wanted = levers.precision == name
        if bool(written.get(name)) != wanted:
            same = levers.precision == settings.precision
            put(name, wanted, Message("llamafactory.both-precisions", precision=levers.precision) if same else why)

    # how it is computed, which is what the plan is for
    each = f"{levers.micro_batch} × {levers.accumulation}"
    split = Message("llamafactory.batch-split", effective_batch=plan.effective_batch, world=way.world, each=each)
    if levers.micro_batch != settings.micro_batch:
        put("per_device_train_batch_size", levers.micro_batch, split)
    if levers.accumulation != settings.accumulation:
        put("gradient_accumulation_steps", levers.accumulation, split)
    if "deepspeed" in values:
        said = Message("llamafactory.sizes-of-plan", strategy=strategy_name(levers))
        put("deepspeed", values["deepspeed"], said)
    room = amounts(way.footprint.gpu.required_bytes)[0]
    keeps_all, offloads = levers.checkpointing.layers == 0, levers.checkpointing.offload
    if keeps_all != (settings.checkpointing.layers == 0):
        said = Message("llamafactory.kept" if keeps_all else "llamafactory.recomputed", room=room)
        put("disable_gradient_checkpointing", keeps_all, said)
    if offloads != settings.checkpointing.offload:
        said = Message("llamafactory.inputs-on-host" if offloads else "llamafactory.inputs-on-gpu", room=room)
        put("use_unsloth_gc", offloads, said)
    if levers.loss != settings.loss:
        said = Message("llamafactory.fused-loss" if levers.loss == "fused" else "llamafactory.plain-loss")
        put("enable_liger_kernel", levers.loss == "fused", said)
    if levers.attention != settings.attention:
        said = Message("llamafactory.counts-on-attention", attention=levers.attention)
        put("flash_attn", values["flash_attn"], said)
    if levers.dataloader_workers != settings.dataloader_workers:
        put("dataloader_num_workers", levers.dataloader_workers, AS_SAID)
    # which of torch's AdamWs: those that are not fused make two copies of what they step, if there is room
    named = written.get("optim", UNFUSED[0])
    if levers.optimizer == settings.optimizer == "adamw":
        copies = 2 * 4 * way.footprint.trainable_parameters // (way.world if levers.engine != "zero0" else 1)
        if levers.offload_optimizer != "none":
            if named == FUSED:
                put("optim", UNFUSED[0], Message("llamafactory.host-adam"))
        elif named in UNFUSED and way.footprint.gpu.required_bytes + copies > way.gpu_limit_bytes:
            put("optim", FUSED, Message("llamafactory.optimizer-copies", named=named, copies=amounts(copies)[0]))

    # this file lies elsewhere than the one that it was made from
    for key, path in original.paths.items():
        if key != "dataset_dir" or keeps_data(plan, original):
            put(key, path, Message("llamafactory.other-folder"))
    return found
