"""`tightfit plan FILE.yaml` where the file is LLaMA-Factory's: the training that it describes, as a job.

What changes the result is taken over. How it is computed (DeepSpeed file, kernels, checkpointing, how the batch is
split) is what a plan chooses, so those keys are left aside, and the plan says which. What a LLaMA-Factory run has no
field of ours for is named too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from tightfit.formats.llamafactory.keys import FIELD_OF
from tightfit.formats.llamafactory.read import LlamaFactorySettings, settings_from
from tightfit.formats.target import Original
from tightfit.job import Job, Schedule
from tightfit.job.fields import Source, job_from_tree
from tightfit.job.text import JobText, read_job_text
from tightfit.messages import Message, Said

READ = frozenset(
    """model_name_or_path stage do_train finetuning_type quantization_bit quantization_method pure_bf16 bf16 fp16
    lora_rank lora_target cutoff_len per_device_train_batch_size gradient_accumulation_steps optim max_grad_norm
    dataloader_num_workers freeze_trainable_layers""".split()
)
"""The keys that the reader of these files understands, and whose meaning becomes the job's."""

CHOSEN = frozenset(
    """deepspeed flash_attn enable_liger_kernel use_liger_kernel gradient_checkpointing use_unsloth_gc
    disable_gradient_checkpointing""".split()
)
"""What the plan chooses anew."""

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

    job: Job
    tree: Mapping[str, Any]
    """The fields of the job that the file sets."""
    said: tuple[Said, ...]
    batch_per_gpu: int
    """Sequences a step of one GPU: micro batch × accumulation."""


def read_llamafactory_job(path: Path, model: str | None, *, stays: bool = False) -> LlamaFactoryJob:
    """Read such a file. `model`: what a flag says, which wins. `stays`: LLaMA-Factory will run it, so that its kernels
    are kept, and so is what we have no field for."""
    return llamafactory_job_from(read_job_text(path), model, stays=stays)


def llamafactory_job_from(file: JobText, model: str | None, *, stays: bool = False) -> LlamaFactoryJob:
    """The same of a file that was read already."""
    path, written = file.path, file.tree
    settings = settings_from(file.values, path)
    tree, names = _tree(settings, written)
    tree["model"] = model or settings.model
    if settings.trainable_layers is not None:
        from tightfit.model.load import load_model

        tree["frozen_layers"] = max(0, load_model(tree["model"]).n_layers - settings.trainable_layers)
    # the kernels that it names, which are its author's choice
    if stays and settings.loss == "fused":
        tree.setdefault("levers", {})["loss"] = settings.loss
    if stays and written.get("flash_attn", "auto") != "auto":
        tree.setdefault("levers", {})["attention"] = settings.attention
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
        job=job,
        tree=tree,
        said=(*(Message("llamafactory.said", said=said) for said in settings.because), *aside),
        batch_per_gpu=settings.micro_batch * settings.accumulation,
    )


def _tree(settings: LlamaFactorySettings, written: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The fields of the job, and the key that each was written under, where it was taken as it is."""
    tree: dict[str, Any] = {
        "method": settings.method,
        "sequence": settings.sequence,
        "optimizer": settings.optimizer,
        "master_weights": settings.master_weights,
        "clip": settings.max_grad_norm,
    }
    if settings.precision != "bf16" or any(written.get(key) for key in ("bf16", "pure_bf16")):
        tree["precision"] = settings.precision
    if settings.dataloader_workers:
        tree["levers"] = {"dataloader_workers": settings.dataloader_workers}
    if settings.lora is not None:
        targets = list(settings.lora.targets) if settings.lora.targets else "all"
        tree["lora"] = {"rank": settings.lora.rank, "targets": targets, "dtype": settings.lora.dtype}
    names = {}
    for key, field in FIELD_OF.items():
        value = written.get(key)
        if value is None or not _is_ours(key, value) or (field.startswith("lora.") and settings.lora is None):
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
    return Original(
        name=path.name,
        text=file.text,
        written=written,
        settings=settings_from(file.values, path),
        job=place(llamafactory_job_from(file, None, stays=True).job),
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
