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
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any

from tightfit.formats.beside import scalar
from tightfit.formats.huggingface.write import OPTIM, liger_unproven, say_need
from tightfit.formats.llamafactory.edit import keeps_data, write_edits
from tightfit.formats.target import Target
from tightfit.formats.worker.write import (
    clip,
    epochs,
    learning_rate,
    logging_steps,
    lora_alpha,
    require_way,
    save_steps,
    time_limit_s,
)
from tightfit.inputs.flags import checkpointing_word
from tightfit.inputs.versions import release
from tightfit.job import Job
from tightfit.memory import estimate
from tightfit.messages import Message, Said, text
from tightfit.model.presets import PRESETS, checkpoint_of, find_checkpoint
from tightfit.planner.plan import Plan, Way
from tightfit.planner.trainers import OLDEST_LLAMAFACTORY, check_llamafactory, fuses_under_llamafactory
from tightfit.priced import amounts, strategy_name
from tightfit.types import ConfigError, ModelShape

DATASET_INFO = "dataset_info.json"
DATASET = "train"
"""What the data is called in `dataset_info.json`."""
PLACEHOLDER_DATA = "train.json"
"""Where a job without data expects it."""
DATA_FILES = (".json", ".jsonl", ".csv", ".parquet", ".arrow", ".txt")

DEEPSPEED_LIMITS = {(0, 9, 3): "0.16.9", (0, 9, 4): "0.16.9"}
"""The newest DeepSpeed that a release starts with; the others do not look."""

TRANSFORMERS_LIMITS: dict[tuple[int, ...], str] = {
    (0, 9, 2): "4.49.0",
    (0, 9, 3): "4.52.4",
    (0, 9, 4): "4.57.1",
    (0, 9, 5): "5.6.0",
}
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
    at = release(version)
    check_llamafactory(levers, shape, version)
    if levers.is_fsdp2:
        raise ConfigError(Message("llamafactory.llamafactory-cli-cannot-start-fsdp2"))
    if levers.loss == "fused" and shape.model_type not in fuses_under_llamafactory(at):
        raise ConfigError(Message("llamafactory.no-fused-loss", version=version, model_type=shape.model_type))
    if not levers.master_weights and (levers.stage == 3 or levers.precision != "bf16"):
        if levers.stage == 3:
            raise ConfigError(Message("llamafactory.no-pure-zero3"))
        raise ConfigError(Message("llamafactory.no-pure-precision", precision=levers.precision))
    if way.hardware.gpu.vendor == "cpu" and levers.stage == 3:
        raise ConfigError(Message("llamafactory.no-zero3-on-cpu"))
    limit = next((most for known, most in DEEPSPEED_LIMITS.items() if at[:3] == known), None)
    if limit and release(target.deepspeed_version) > release(limit):
        raise ConfigError(
            Message(
                "llamafactory.refuses-deepspeed",
                version=version,
                deepspeed_version=target.deepspeed_version,
                limit=limit,
            )
        )
    _name(plan, way)
    sections = {
        title: {key: value for key, value in values.items() if value is not None}
        for title, values in _sections(plan, way, target, deepspeed_file).items()
    }
    known: dict[str, object] = {
        "version": target.llamafactory_version,
        "strategy": strategy_name(way.levers),
        "world": way.world,
        "gpu": way.hardware.gpu.name,
    }
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


MESSAGE_TAGS = {
    "role_tag": "role",
    "content_tag": "content",
    "user_tag": "user",
    "assistant_tag": "assistant",
    "system_tag": "system",
}
"""How OpenAI's layout of a conversation calls its parts."""


def dataset_info_json(plan: Plan) -> str:
    """Where LLaMA-Factory finds the data, and how a sample is laid out."""
    data = plan.job.data
    entry: dict[str, Any] = {}
    assert listed(data.path) is None, "what is in a dataset_info.json already needs no second one"
    if data.path is not None and not names_a_file(data.path):
        entry["hf_hub_url"] = data.path
    else:
        entry["file_name"] = data.path or PLACEHOLDER_DATA
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


def newest_transformers(version: str) -> str | None:
    """The newest transformers that this LLaMA-Factory starts with; None: a release that we have not read."""
    return TRANSFORMERS_LIMITS.get(release(version)[:3])


def llamafactory_wanted(target: Target) -> Said:
    """The release that the file is for, and which transformers that takes."""
    asked, version = target.transformers_version, target.llamafactory_version
    newest = newest_transformers(version)
    if newest is None:
        return f"LLaMA-Factory {version}"
    if release(asked) <= release(newest):
        return Message("llamafactory.wanted", version=version, newest=newest)
    return Message("llamafactory.wanted-older", version=version, newest=newest)


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
    notes = []
    if levers.checkpointing.layers:
        word = checkpointing_word(levers.checkpointing)
        notes.append(Message("llamafactory.recomputes-all", word=word))
    if levers.checkpointing.offload:
        notes.append(Message("llamafactory.unsloth-gc"))
    if levers.loss == "fused":
        notes.append(Message("llamafactory.liger-loss"))
        notes += filter(None, [liger_unproven(way.hardware)])
    if levers.lora is not None and levers.lora.dtype != "fp32":
        # where no DeepSpeed casts them back, its adapters are larger than those of the plan
        run = replace(levers, lora=replace(levers.lora, dtype="fp32"))
        need = estimate(way.shape, run, way.world, way.hardware).gpu.required_bytes
        planned = way.footprint.gpu.required_bytes
        if need > planned:
            needed, there = amounts(need, planned)
            fits = need <= way.hardware.gpu.memory_bytes
            size = say_need(Message("huggingface.gib", gib=needed), fits=fits)
            notes.append(Message("llamafactory.adapters-fp32", dtype=levers.lora.dtype, needed=size, planned=there))
    if _packs_apart(job):
        notes.append(Message("llamafactory.neat-packing"))
    if levers.attention == "flash":
        notes.append(Message("llamafactory.needs-flash-attn"))
    if way.skips_long:
        notes.append(Message("llamafactory.cuts-long", sequence=levers.sequence))
    if job.timeout is not None:
        notes.append(Message("llamafactory.no-time-limit", timeout=job.timeout))
    if job.saving.every_minutes is not None:
        notes.append(Message("llamafactory.saves-by-steps", steps=save_steps(job)))
    if job.saving.keep_every is not None:
        notes.append(Message("llamafactory.keeps-newest"))
    if job.data.recipe is not None or (job.data.path or "").startswith("shipped:"):
        notes.append(Message("llamafactory.needs-samples"))
    known = names_its_data(plan, target)
    if job.data.path is None and not known:
        notes.append(Message("llamafactory.put-samples", file=PLACEHOLDER_DATA))
    entry = listed(job.data.path)
    if entry is not None and not entry[0].startswith("/") and target.original is None:
        notes.append(Message("llamafactory.looked-for-in", file=DATASET_INFO, folder=entry[0]))
    if job.data.format == "auto" and not known:
        notes.append(Message("llamafactory.taken-for-alpaca", file=DATASET_INFO))
    if job.data.format != "text" and _template(plan, way, target) is None:
        notes.append(Message("llamafactory.template-of-tokenizer"))
    return tuple(notes)


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
    alpha = lora_alpha(job, levers) or 0.0
    # On the host DeepSpeed's own Adam takes the place of torch's, which must not be the fused one then.
    on_host = levers.optimizer == "adamw" and levers.offload_optimizer != "none"
    rounds, every, judged = epochs(job), save_steps(job), job.evaluation.split > 0
    judged_every = job.evaluation.every_steps if judged else None
    time_limit_s(job)  # a time that cannot be read is an error in every file
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
            "learning_rate": learning_rate(job, levers),
            "lr_scheduler_type": job.schedule,
            "weight_decay": float(job.weight_decay),
            "max_grad_norm": clip(job, levers),
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
            "logging_steps": logging_steps(job),
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
    since = min(
        (since for _, _, names in _TEMPLATES for since, name in names.items() if name == asked),
        default=OLDEST_LLAMAFACTORY,
    )
    if at < since:
        first = ".".join(map(str, since))
        usual = template_of(_name(plan, way), way.shape, at)
        version = target.llamafactory_version
        if usual:
            raise ConfigError(Message("llamafactory.template-is-there", asked=asked, version=version, usual=usual))
        raise ConfigError(Message("llamafactory.template-since", asked=asked, version=version, first=first))
    return asked


def template_of(name: str, shape: ModelShape, at: tuple[int, ...]) -> str | None:
    """The chat template of a model's family; None: this release has none for it."""
    for pattern, kind, names in _TEMPLATES:
        if re.search(pattern, name.lower()) and re.fullmatch(kind, shape.model_type):
            known = [template for since, template in sorted(names.items()) if since <= at]
            return known[-1] if known else None
    return None
