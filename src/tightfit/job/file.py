"""The door for jobs: a job file, or flags over one, become a `Job`; and a `Job` becomes levers and hardware.

A job file is the one input that a user writes for us alone, so nothing in it is guessed silently: an unknown field
is an error that names the nearest one, a value is what its field takes or an error that says what it takes, and
what was read leniently comes back as a sentence beside the job. `text.py` reads the file, `fields.py` holds the types
and their sentences, `training.py` the form of file that other training scripts use. What only shows between two fields
is checked here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal

from tightfit.hardware.named import is_this, read_hardware
from tightfit.hardware.words import connect, parse_link, parse_network, parse_size
from tightfit.inputs.flags import LEVERS, MOST_BATCH, is_auto, levers_from_flags, spelt
from tightfit.inputs.layouts import find_stream_obstacle
from tightfit.inputs.spelling import LARGEST, as_number, nearest, seconds_in, shown
from tightfit.job import Adapters, Job
from tightfit.job.fields import (
    FREE_LEVERS,
    Source,
    default_of,
    faults_in_tree,
    job_fields,
    job_from_tree,
    wrong,
)
from tightfit.job.text import JobText, is_json, name_in, read_job_text
from tightfit.job.training import FIELDS as EVERY_FIELDS
from tightfit.job.training import Translated, translate, translate_saving
from tightfit.messages import Choice, Language, Listing, Message, Said, text
from tightfit.model.load import load_model, shape_from_fields
from tightfit.types import (
    COMPRESSING,
    FSDP2,
    STREAM,
    ZERO3,
    ConfigError,
    Engine,
    Hardware,
    HardwareError,
    Levers,
    ModelError,
    ModelShape,
    UserError,
)

JOB_FLAGS: Mapping[str, str] = {
    "model": "model",
    **{lever.flag: lever.path for lever in LEVERS.values() if not lever.free},
    "effective_batch": "effective_batch",
    "gpus": "hardware.gpus",
    "host_ram": "hardware.host_ram",
    "nvme": "hardware.nvme",
    "nvme_path": "hardware.nvme_path",
    "network": "hardware.network",
    "link": "hardware.link",
    "gpu_ids": "hardware.gpu_ids",
    "margin": "limits.margin",
    "allow": "limits.allow",
    "epochs": "epochs",
    "max_steps": "max_steps",
    "samples": "data.samples",
    "tier": "tier",
    "for": "trainer",
    "data": "data.path",
    **{name: f"data.{name}" for name in ("format", "template", "packing", "tokenizer", "recipe", "ablation")},
    "max_samples": "max_samples",
    "output": "saving.folder",
    "save_every": "saving.every",
    **{name: f"saving.{name}" for name in ("keep_last", "keep_every", "async_save")},
    "learning_rate": "learning_rate",
    "lr_scheduler": "schedule",
    "warmup_steps": "warmup",
    "warmup_ratio": "warmup",
    "weight_decay": "weight_decay",
    "max_grad_norm": "clip",
    "seed": "seed",
    "lora_alpha": "lora.alpha",
    "save_steps": "saving.every_steps",
    "logging_steps": "logging_steps",
    **{lever: f"levers.{lever}" for lever in FREE_LEVERS},
}
"""Flags of the command line → the field of the job that each sets."""

_SIZES = ("hardware.host_ram", "hardware.nvme", "limits.gpu_memory", "limits.host_ram")
_FOREIGN = {
    "model_name_or_path": Message("job.is-llamafactory"),
    "zero_optimization": Message("job.is-deepspeed"),
    "distributed_type": Message("job.is-accelerate"),
    "predicted": Message("job.is-workers"),
}
"""A key that only another program's file has, and what that file is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFile:
    """What a job file said."""

    job: Job
    said: tuple[Said, ...] = ()  # what was read leniently or is without effect, a sentence each
    num_gpus: int | None = None  # GPUs of a node to use, where the file gives a number and need not name a card
    explicit: frozenset[str] = frozenset()  # the fields that it sets, also those set to their defaults, by dotted name


def read_job(path: Path, *, model: str | None = None) -> JobFile:
    """The job of a YAML or JSON file. `model`: what a flag says, for a file that names none."""
    return job_from_text(read_job_text(path), model=model)


def job_from_text(text: JobText, *, model: str | None = None) -> JobFile:
    """The same of a file that was read already."""
    file = text.path.name
    ours = translate(_check_own(text.tree, file), file)
    source = Source(file=file, names=ours.names, kind="json" if is_json(text.path) else "yaml")
    explicit = names_in(ours.tree)
    if model is not None:
        ours.tree.setdefault("model", model)
    job, mended = job_from_tree(ours.tree, source)
    said = (*ours.said, *mended, *_check(job, source))
    return JobFile(job=job, said=said, num_gpus=ours.num_gpus, explicit=explicit)


def names_in(tree: Mapping[str, Any], before: str = "") -> frozenset[str]:
    """The dotted names of a tree of fields."""
    found = {before + key for key in tree}
    for key, value in tree.items():
        found |= names_in(value, f"{before}{key}.") if isinstance(value, Mapping) else set()
    return frozenset(found)


def job_faults(path: Path) -> tuple[UserError, ...]:
    """Every error for which `read_job` would refuse the file, where it can go on after the first."""
    try:
        ours, found = _translate_all(_check_own(read_job_text(path).tree, path.name), path.name)
    except UserError as error:
        return (error,)
    if ours is None:
        return found
    source = Source(file=path.name, names=ours.names, kind="json" if is_json(path) else "yaml")
    job, wrong_fields = faults_in_tree(ours.tree, source)
    found += wrong_fields
    if job is None:
        return found
    # What shows between fields is asked only where every field is there to be asked.
    for check in (
        _check_words,
        _check_counts,
        *(() if found else (_check_levers, _check_model, _check_ids, _check_stages)),
    ):
        found += tuple(check(job, source))
    return found


def _check_own(tree: Mapping[str, Any], file: str) -> Mapping[str, Any]:
    for key, what in _FOREIGN.items():
        if key in tree:
            raise ConfigError(Message("job.no-job-file", where=file, what=what))
    return tree


def _translate_all(tree: Mapping[str, Any], file: str) -> tuple[Translated | None, tuple[UserError, ...]]:
    """The file in our own form, less what is wrong in its `training` and `saving` blocks, and the errors for it."""
    found: list[UserError] = []
    while True:
        try:
            return translate(tree, file), tuple(found)
        except UserError as error:
            found.append(error)
            name, _, wrong_key = error.at.partition(".")
            block = tree.get(name)
            if name not in ("training", "saving") or not isinstance(block, Mapping) or wrong_key not in block:
                return None, tuple(found)
            tree = {**tree, name: {key: value for key, value in block.items() if key != wrong_key}}


def job_from_flags(values: Mapping[str, Any], base: Job | None = None) -> Job:
    """The job that flags mean, over what a job file said. Names are those of `JOB_FLAGS`; None was not said."""
    given = {name: value for name, value in values.items() if value is not None}
    for name in given:
        if name not in JOB_FLAGS:
            close = nearest(name, JOB_FLAGS)
            raise ConfigError(Message("job.no-such-flag", flag=spelt(name), close=spelt(close) if close else None))
    tree = dump_job(base) if base is not None else {}
    for ending, other in (("epochs", "max_steps"), ("max_steps", "epochs")):
        if ending in given and other not in given:
            tree.pop(other, None)
    # a job has one field for both, in which the size tells a count from a share
    if "warmup_steps" in given and "warmup_ratio" in given:
        both, fix = {"name": "--warmup-steps", "other": "--warmup-ratio"}, Message("job.keep-one")
        raise ConfigError(Message("job.said-twice", **both, file=None, fix=fix))
    if "warmup_steps" in given and 0 < (as_number(str(given["warmup_steps"])) or 0) < 1:
        steps, must = shown(given["warmup_steps"]), Message("inputs.whole-number")
        raise ConfigError(Message("inputs.flag-must-be", flag="--warmup-steps", must=must, value=steps))
    share = str(given.get("warmup_ratio", 0)).strip()
    if (as_number(share.removesuffix("%")) or 0) >= (100 if share.endswith("%") else 1):
        ratio, must = shown(given["warmup_ratio"]), Message("job.share")
        raise ConfigError(Message("inputs.flag-must-be", flag="--warmup-ratio", must=must, value=ratio))
    if "save_every" in given or "save_steps" in given:
        for field in EVERY_FIELDS:
            tree.get("saving", {}).pop(field, None)
    for name, value in given.items():
        block, _, key = JOB_FLAGS[name].rpartition(".")
        inside = tree.setdefault(block, {}) if block else tree
        inside[key] = list(value) if isinstance(value, tuple) else value
    names = {JOB_FLAGS[name]: spelt(name) for name in given}
    if "saving" in tree:
        tree["saving"], more = translate_saving(tree["saving"], names, None)
        names |= more
    source = Source(names=names)
    job, _ = job_from_tree(tree, source)
    _check(job, source)
    adapters = next((name for name in given if JOB_FLAGS[name].startswith("lora.")), None)
    if adapters and _adapters_idle(job):
        raise ConfigError(Message("inputs.no-adapters", flag=spelt(adapters)))
    return job


def dump_job(block: Any) -> dict[str, Any]:
    """A job, or a block of one, as plain values: only the fields that differ from their defaults."""
    plain: dict[str, Any] = {}
    for each in fields(block):
        value = getattr(block, each.name)
        if value != default_of(each):
            plain[each.name] = dump_job(value) if is_dataclass(value) else _copy(value)
    return plain


# --- from a job to what is computed -------------------------------------------------------------


def model_of(job: Job, *, trust_trace: bool = False) -> ModelShape:
    """The shape of the job's model, whichever way it was given."""
    if isinstance(job.model, str):
        return load_model(job.model, trust_trace=trust_trace)
    # `mamba 4864×45`: what a block of shape fields is called on screen
    family = job.model.get("family", job.model.get("model_type", "model"))
    wide = job.model.get("d_model", job.model.get("hidden_size"))
    deep = next((job.model[key] for key in ("n_layers", "n_layer", "num_hidden_layers") if key in job.model), None)
    sizes = f" {wide}×{deep}" if isinstance(wide, int) and isinstance(deep, int) else ""
    return shape_from_fields(job.model, f"{family if isinstance(family, str) else 'model'}{sizes}")


def levers_of(job: Job, shape: ModelShape, *, file: str | None = None) -> Levers:
    """The user's part of the levers: what changes the result, and the free levers that were pinned.

    The rest has its defaults, for the planner to change. Where the engine is not pinned but an offload is, it
    stands at zero3, which does every kind; where groups or rows of GPUs are, or layers or experts that they share, at
    fsdp2. With `file`, sentences name its fields instead of flags.
    """
    said = {lever.flag: field_at(job, lever.path) for lever in LEVERS.values() if not (lever.free or lever.block)}
    if job.method != "full":
        said |= {lever.flag: getattr(job.lora, lever.name) for lever in LEVERS.values() if lever.block == "lora"}
        said["lora_targets"] = job.lora.targets if isinstance(job.lora.targets, str) else ",".join(job.lora.targets)
        said["adapter_dtype"] = adapter_dtype_of(job)
    offloads = {job.levers.get(name, "none") for name in ("offload_optimizer", "offload_param")}
    engine: Engine = "zero0" if offloads == {"none"} else ZERO3
    if job.levers.get("shard_within") or job.levers.get("tensor_parallel", 1) != 1:
        engine = FSDP2 if job.trainer == "tightfit" else ZERO3
    if any(job.levers.get(name, 1) != 1 for name in ("pipeline_parallel", "expert_parallel")):
        engine = FSDP2
    engine = COMPRESSING.get(job.compress, engine)
    if job.states != "fp32" or job.levers.get("resident") not in (None, 0, "auto"):
        engine = STREAM
    base = Levers(engine=engine)
    try:
        levers = levers_from_flags({**said, **job.levers}, shape, base)
    except ConfigError as error:
        if file is None:
            raise
        raise ConfigError(_InFields("job.in-this-file", file=file, problem=error.said)) from None
    packing, ours = job.data.packing, job.trainer == "tightfit"
    return replace(
        levers,
        gradient_clipping=job.clip > 0,
        # LLaMA-Factory lets the documents of plain text see each other, and needs no mask for that
        packed=packing and not (job.trainer == "llamafactory" and job.data.format == "text"),
        padded=not (packing or ours),
        trainer=job.trainer,
    )


def adapter_dtype_of(job: Job) -> Literal["fp32", "bf16"]:
    """The number format that the adapters have: PEFT makes them fp32 under 16-bit weights, and other trainers leave
    them so; pure_bf16 keeps LLaMA-Factory from it."""
    if job.trainer == "tightfit":
        return job.lora.dtype
    return "bf16" if job.trainer == "llamafactory" and not job.master_weights else "fp32"


def pinned(job: Job) -> frozenset[str]:
    """The fields of `Levers` that the user fixed and the planner leaves alone."""
    said = [LEVERS[flag] for flag, value in job.levers.items() if not is_auto(LEVERS[flag], value)]
    return frozenset(lever.block or lever.name for lever in said)


def left_open(job: Job) -> frozenset[str]:
    """The fields of the job that say `auto`."""
    return frozenset(f"levers.{flag}" for flag, value in job.levers.items() if is_auto(LEVERS[flag], value))


def hardware_of(job: Job, num_gpus: int | None = None) -> Hardware:
    """What the job may use: the cards it names or this machine's, less what its limits and numbers leave out."""
    machine = job.hardware
    sizes = {"host_ram": machine.host_ram, "nvme": machine.nvme}
    hardware = read_hardware(machine.gpus, **sizes)
    hardware = connect(_fewer(hardware, machine.gpu_ids, num_gpus), machine.network, machine.link)
    # no more of each card and of the RAM than the limits allow
    because = list(hardware.because)
    gpu, ram = hardware.gpu, hardware.host_ram_bytes
    if (size := job.limits.gpu_memory) is not None:
        most = parse_size(size)
        if most < gpu.memory_bytes:
            because.append(Message("job.card-capped", size=size, card=gpu.name))
            gpu = replace(gpu, memory_bytes=most)
        else:
            because.append(Message("job.card-not-capped", size=size))
    if (size := job.limits.host_ram) is not None:
        most = parse_size(size)
        if ram is None or most < ram:
            because.append(Message("job.ram-capped", size=size))
            ram = most
        else:
            because.append(Message("job.ram-not-capped", size=size))
    return replace(hardware, gpu=gpu, host_ram_bytes=ram, because=tuple(because))


def timeout_s(text: str) -> int:
    """Seconds in `12h`, `90m`, `3600s`, `1h30m`."""
    seconds = seconds_in(text)
    if seconds is None:
        raise ConfigError(Message("job.not-a-time", word=shown(text), fix=Message("job.write-time")))
    if not 1 <= seconds <= LARGEST:
        raise ConfigError(Message("job.no-time", word=shown(text), fix=Message("job.write-time")))
    return int(seconds)


class _InFields(Message):
    """What is said about flags, with the fields of a job file instead."""

    __slots__ = ()

    def text(self, language: Language) -> str:
        def field(match: re.Match[str]) -> str:
            return JOB_FLAGS.get(match[1].replace("-", "_"), match[0])

        return re.sub(r"--([a-z][a-z-]*)", field, super().text(language))


def _fewer(hardware: Hardware, ids: tuple[int, ...] | None, num_gpus: int | None) -> Hardware:
    """The part of every node that is to be used."""
    there = hardware.gpus_per_node
    if num_gpus is not None and num_gpus > there:
        if hardware.gpu.vendor == "cpu":
            raise HardwareError(Message("job.no-gpus-there", wanted=num_gpus))
        raise HardwareError(Message("job.fewer-gpus-there", wanted=num_gpus, there=there, card=hardware.gpu.name))
    if ids is not None and max(ids) >= there:
        raise HardwareError(Message("job.no-such-gpu", number=max(ids), last=there - 1))
    if ids is not None and num_gpus not in (None, len(ids)):
        raise ConfigError(Message("job.gpus-twice", ids=len(ids), count=num_gpus))
    count = len(ids) if ids is not None else num_gpus
    if count is None or (count == there and ids is None):
        return hardware
    which = Message("job.gpus-used", count=count, there=there)
    if ids is not None:
        which = Message("job.gpus-used-by-number", numbers=Listing(map(str, ids)), there=there)
    return replace(hardware, gpus_per_node=count, because=(*hardware.because, which))


# --- what shows between fields ------------------------------------------------------------------


def _check(job: Job, source: Source) -> tuple[Said, ...]:
    """Raise what is wrong beyond single types; give back what is odd but can be lived with."""
    for check in (_check_words, _check_counts, _check_levers, _check_model, _check_ids, _check_stages):
        for fault in check(job, source):
            raise fault
    said: list[Said] = []
    if job.epochs is not None and job.max_steps is not None:
        said.append(Message("job.steps-win", place=source.place("max_steps"), steps=job.max_steps))
    if job.lora != Adapters() and _adapters_idle(job):
        said.append(Message("job.lora-idle", place=source.place("lora")))
    if job.evaluation.every_steps is not None and not job.evaluation.split:
        said.append(Message("job.evaluation-idle", place=source.place("evaluation.every_steps")))
    return tuple(said)


def _check_model(job: Job, source: Source) -> Iterator[UserError]:
    if not isinstance(job.model, str):
        try:
            model_of(job)
        except ModelError as error:
            yield ModelError(Message("job.in-this-file", file=source.file, problem=error.said), at="model")


def _check_ids(job: Job, source: Source) -> Iterator[UserError]:
    ids = job.hardware.gpu_ids or ()
    if len(set(ids)) < len(ids):
        place, name = source.place("hardware.gpu_ids"), source.name("hardware.gpu_ids")
        fix = Message("job.name-each-once")
        yield ConfigError(Message("job.gpu-twice", place=place, ids=shown(list(ids)), fix=fix), at=name)


def _check_stages(job: Job, source: Source) -> Iterator[UserError]:
    for number in range(1, len(job.stages) + 1):
        try:
            stage_of(job, number, source.file)
        except UserError as error:
            yield error


def _check_words(job: Job, source: Source) -> Iterator[UserError]:
    """Text that has a form: sizes, times, rates, hardware."""
    for path, field in job_fields().items():
        value = field_at(job, path)
        if field.takes.kind == "text" and isinstance(value, str) and not value.strip():
            yield wrong(path, value, source)
    forms: dict[str, Callable[[str], Any]] = {**dict.fromkeys(_SIZES, parse_size), "timeout": timeout_s}
    forms |= {"hardware.network": parse_network, "hardware.link": parse_link}
    if not is_this(job.hardware.gpus):
        forms["hardware.gpus"] = read_hardware
    sizes = {}
    for path, reader in forms.items():
        text = field_at(job, path)
        if not isinstance(text, str) or not text.strip():
            continue
        try:
            sizes[path] = reader(text)
        except UserError as error:
            said = Message("job.at-field", field=source.place(path), problem=error.said)
            yield type(error)(said, at=source.name(path))
    most, there = sizes.get("limits.host_ram"), sizes.get("hardware.host_ram")
    if most is not None and there is not None and most > there:
        path, other = "limits.host_ram", source.name("hardware.host_ram")
        place, fix = source.place(path), Message("job.lower-or-leave-out")
        size, there = job.limits.host_ram, job.hardware.host_ram
        said = Message("job.more-ram-than-there", place=place, size=size, there=there, other=other, fix=fix)
        yield ConfigError(said, at=source.name(path))


def _check_counts(job: Job, source: Source) -> Iterator[UserError]:
    bounds = {JOB_FLAGS[flag]: lever.most for flag, lever in LEVERS.items() if lever.most is not None}
    for path, most in {**bounds, "effective_batch": MOST_BATCH}.items():
        value = field_at(job, path)
        if isinstance(value, int) and value > most:
            must = Message("inputs.at-most", most=most)
            said = Message("inputs.must-be", name=source.place(path), must=must, value=value, hint=None)
            yield ConfigError(said, at=source.name(path))


def _check_levers(job: Job, source: Source) -> Iterator[UserError]:
    for name in ("offload_optimizer", "offload_param"):
        if job.levers.get(name) == "nvme" and job.hardware.nvme is None:
            if (obstacle := _find_unread(job, name)) is not None:  # of any size
                if source.file:
                    obstacle = _InFields("job.in-this-file", file=source.file, problem=obstacle)
                yield ConfigError(obstacle, at=source.name(f"levers.{name}"))
            path, fix = f"levers.{name}", Message("job.add-nvme" if source.file else "job.add-nvme-flag")
            yield ConfigError(Message("job.no-nvme", place=source.place(path), fix=fix), at=source.name(path))
    micro, accum = job.levers.get("micro_batch", 1), job.levers.get("accum", 1)
    if job.effective_batch is not None and job.effective_batch % (micro * accum):
        pins = [name for name in ("micro_batch", "accum") if name in job.levers]
        product = " × ".join(f"{source.name('levers.' + name)} {job.levers[name]}" for name in pins)
        place, fix = source.place("effective_batch"), Message("job.write-multiple", factor=micro * accum)
        said = Message("job.not-divided", place=place, batch=job.effective_batch, product=product, fix=fix)
        yield ConfigError(said, at=source.name("effective_batch"))


def _find_unread(job: Job, name: str) -> Message | None:
    """Why layers that stream would have nothing on an NVMe; None: they would, or another engine trains."""
    if job.levers.get("engine") != STREAM:
        return None
    return find_stream_obstacle(Levers().change(engine=STREAM, method=job.method, **{name: "nvme"}))


def _adapters_idle(job: Job) -> bool:
    return job.method == "full" and not {"lora", "quantize"} & set(job.limits.allow)


def field_at(job: Job, path: str) -> Any:
    """The value of a field, by its dotted name."""
    value: Any = job
    for step in path.split("."):
        value = value.get(step) if isinstance(value, Mapping) else getattr(value, step)
    return value


def _copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copy(inside) for key, inside in value.items()}
    return [_copy(inside) for inside in value] if isinstance(value, list | tuple) else value


# --------------------------------------------------------------------------------------------------
# Several trainings in one job file: `stages`, each from the model that the one before it left.
#
# A stage is a block of the job's own fields, which win over those outside it:
#
#     model: Qwen/Qwen2.5-0.5B
#     method: lora
#     stages:
#       - {trains: embeddings, max_steps: 200}
#       - {max_steps: 2000}
#
# The first trains the embeddings alone, the second adapters on the model that came out. Every stage is a run with a
# folder of its own below the job's: `output/stage-1`, `output/stage-2`.

FOR_ALL = ("model", "stages", "hardware", "saving.folder")  # what belongs to the whole job: no stage has its own


def stage_of(job: Job, number: int, file: str | None = None) -> Job:
    """The job of one of its stages, counted from 1."""
    block = job.stages[number - 1]
    for path in FOR_ALL:
        outer, _, inner = path.rpartition(".")
        inside = block.get(outer) if outer else block
        if isinstance(inside, Mapping) and inner in inside:
            name, fix = name_in(f"stages[{number}].{path}", file), Message("job.stand-outside", names=Choice(FOR_ALL))
            raise ConfigError(Message("job.for-all-stages", name=name, fix=fix))
    merged = _lay_over({key: value for key, value in dump_job(job).items() if key != "stages"}, block)
    for length, other in (("epochs", "max_steps"), ("max_steps", "epochs")):
        if length in block and other not in block:
            merged.pop(other, None)
    if block.get("trains") == "embeddings" and "method" not in block:
        merged.pop("method", None)  # adapters train nothing but themselves: this stage comes before them
        merged.pop("lora", None)
    names = {path: f"stages[{number}].{path}" for path in job_fields()}
    ours = translate(merged, file or text("job.the-job"))
    made, _ = job_from_tree(ours.tree, Source(file=file, names={**names, **ours.names}, kind="yaml"))
    return made


def stage_folder(root: str | Path, number: int) -> Path:
    """Where a stage of a job runs."""
    return Path(root) / f"stage-{number}"


def folder_of_merged_model(root: str | Path, number: int) -> Path:
    """The model of a stage that trained adapters, with these in its weights."""
    return Path(root) / f"stage-{number}-merged"


def model_left_by(root: str | Path, number: int) -> Path | None:
    """The model with which the next stage begins; None: it is not there yet."""
    for folder in (folder_of_merged_model(root, number), stage_folder(root, number) / "model"):
        if (folder / "config.json").is_file():
            return folder
    return None


def _lay_over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        under = merged.get(key)
        both = isinstance(value, Mapping) and isinstance(under, Mapping)
        merged[key] = _lay_over(under, value) if both else value  # type: ignore[arg-type]
    return merged
