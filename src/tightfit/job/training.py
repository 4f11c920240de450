"""Job files in the form that training scripts use: `model_type`, `num_gpus`, a `model` and a `training` block, or the
same fields without a block, as `TrainingArguments` are kept in a JSON.

People have such files already, and they say the same things under other names. They are turned into the fields of
a job here, before anything is checked, and each field remembers the name that it was written under, so that a
sentence about it names what the user sees. What such a file calls its batch is one GPU's share of one forward pass:
how the sequences of a step are split is the planner's to choose, so only their product is kept.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, cast

from tightfit.hardware.named import is_this, read_hardware
from tightfit.hardware.words import MAX_GPUS_PER_NODE
from tightfit.inputs.spelling import LARGEST, Fields, as_number, nearest, read_tables, seconds_in, shown
from tightfit.job import Job
from tightfit.job.text import name_in
from tightfit.messages import Listing, Message, Said
from tightfit.types import READ_TOGETHER, ConfigError, HardwareError, Optimizer

_TABLES = read_tables(Path(__file__).with_name("arguments.txt"))
ARGUMENT_MARKS, OLDER_ARGUMENT_MARKS = _TABLES["now"], _TABLES["older"]
TRAINING_ARGUMENTS, OLDER_TRAINING_ARGUMENTS = frozenset(ARGUMENT_MARKS), frozenset(OLDER_ARGUMENT_MARKS)
UNPRICED_OPTIMIZERS = frozenset(_TABLES["optimizers not priced"])

OPTIMIZERS = cast(dict[str, Optimizer], _TABLES["optimizers"])
FIELD_OF = _TABLES["fields"]  # a field of the `training` block → the field of the job

MARKS = ("training", "model_type", "num_gpus", "preset")  # the top-level fields that our own form does not have

ARGUMENTS = ("per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs", "deepspeed_stage")
"""Fields by which a file without any block is known to be a trainer's arguments."""

_BATCH = ("batch_size", "micro_batch_size", "per_device_train_batch_size")
_ACCUMULATION = ("gradient_accumulation_steps", "accumulation_steps")
_SWITCHES = ("fp16", "bf16", "gradient_checkpointing")
_STAGE, _OFFLOAD = "deepspeed_stage", "cpu_offload"
_WARM_UPS = ("warmup_steps", "warmup_ratio")
_NO_MATTER = ("report_to",)
KNOWN = (*FIELD_OF, *_BATCH, *_ACCUMULATION, *_SWITCHES, _STAGE, _OFFLOAD, *_NO_MATTER)


@dataclass(frozen=True, slots=True, kw_only=True)
class Translated:
    """The same file in our own form."""

    tree: dict[str, Any]
    names: Mapping[str, str]  # dotted path → the name that the file has for it
    said: tuple[Said, ...] = ()
    num_gpus: int | None = None


def translate(tree: Mapping[str, Any], file: str) -> Translated:
    """Our own form of a file that may be in the other one, with every field of `saving` under its own name."""
    found = _translate_form(tree, file)
    saving = found.tree.get("saving")
    if not isinstance(saving, Mapping):
        return found
    block, names = translate_saving(saving, found.names, file)
    return replace(found, tree={**found.tree, "saving": block}, names={**found.names, **names})


def is_arguments(tree: Mapping[str, Any]) -> bool:
    """Whether these are a trainer's arguments without a block around them: what no job file has at its top."""
    return not any(mark in tree for mark in MARKS) and any(key in tree for key in ARGUMENTS)


def _translate_form(tree: Mapping[str, Any], file: str) -> Translated:
    if is_arguments(tree):
        own = {each.name for each in fields(Job)} - set(KNOWN)
        arguments = {key: value for key, value in tree.items() if key not in own}
        return _Translation({key: tree[key] for key in tree if key in own}, arguments, file, block="").run()
    if not any(mark in tree for mark in MARKS):
        return Translated(tree=dict(tree), names={})
    training = tree.get("training")
    if training is not None and not isinstance(training, Mapping):
        must, name = Message("job.training-block"), Message("inputs.in-file", name="training", file=file)
        raise ConfigError(Message("inputs.must-be", name=name, must=must, value=shown(training), hint=None))
    return _Translation(tree, training or {}, file).run()


class _Translation:
    """One file on its way. Every step takes from what was written and adds to `tree`."""

    def __init__(
        self, written: Mapping[str, Any], training: Mapping[str, Any], file: str, block: str = "training"
    ) -> None:
        """`block`: what the block of `training` is called; empty: its fields stand at the top."""
        self.file, self.prefix = file, f"{block}." if block else ""
        self.tree = {key: value for key, value in written.items() if key not in MARKS}
        self.names: dict[str, str] = {}
        self.said: list[Said] = []
        self.top = Fields(values=written, file=file, text_numbers=True)
        self.training = Fields(values=training, file=file, path=block, text_numbers=True)

    def run(self) -> Translated:
        num_gpus = self.top.integer("num_gpus", least=1)
        if num_gpus is not None and num_gpus > MAX_GPUS_PER_NODE:
            raise self.top.wrong("num_gpus", Message("inputs.at-most", most=MAX_GPUS_PER_NODE))
        if (preset := self.top.text("preset")) is not None:
            self._put("model", preset, "preset")
        family, model = self.top.text("model_type"), self.tree.get("model")
        if family is not None and isinstance(model, Mapping):
            for key in ("family", "model_type"):
                if model.get(key, family) != family:
                    raise _twice("model_type", f"model.{key}", self.file, at=f"model.{key}", said="job.two-families")
            rest = {key: value for key, value in model.items() if key != "model_type"}
            self.tree["model"] = {"family": family, **rest}
        elif family is not None and model is not None:
            self.said.append(Message("job.needless-model-type", key="model_type", file=self.file))
        aside: list[str] = []
        for key, value in self.training.values.items():
            if key == "max_steps" and value == -1:
                continue  # Hugging Face's word for: as the epochs say
            if key in _WARM_UPS and value == 0 and all(other in self.training.values for other in _WARM_UPS):
                continue  # transformers writes both, and the one that is not 0 counts
            if key == "optim" and value in OPTIMIZERS:
                self._put("optimizer", OPTIMIZERS[value], self.prefix + key)
            elif key in FIELD_OF:
                self._put(FIELD_OF[key], value, self.prefix + key)
            elif key in _NO_MATTER or (key not in KNOWN and key in TRAINING_ARGUMENTS | OLDER_TRAINING_ARGUMENTS):
                aside.append(self.prefix + key)
            elif key not in KNOWN:
                close, name = nearest(key, KNOWN), self.prefix + key
                meant = Message("inputs.did-you-mean", close=f"{self.prefix}{close}")
                hint = meant if close else Message("job.leave-out-or-see")
                raise ConfigError(Message("job.unknown-field", field=shown(name), file=self.file, hint=hint), at=name)
        if aside:
            self.said.append(Message("job.left-aside", where=self.file, names=Listing(aside)))
        if "method" not in self.tree and any(FIELD_OF.get(key, "").startswith("lora.") for key in self.training.values):
            self.tree["method"] = "lora"
            self.said.append(Message("job.adapters-meant", where=self.file))
        if (self.training.number("warmup_ratio") or 0) >= 1:
            raise self.training.wrong("warmup_ratio", Message("job.below-one"))
        if 0 < (self.training.number("warmup_steps") or 0) < 1:
            raise self.training.wrong("warmup_steps", Message("inputs.whole-number"))
        formats = [key for key in ("fp16", "bf16") if self.training.switch(key)]
        if len(formats) == 2:
            raise _twice(self.prefix + "fp16", self.prefix + "bf16", self.file, said="job.both-formats")
        if formats:
            self._put("precision", formats[0], self.prefix + formats[0])
        if (recompute := self.training.switch("gradient_checkpointing")) is not None:
            word = "full" if recompute else "none"
            self._put("levers.checkpointing", word, f"{self.prefix}gradient_checkpointing")
        if (stage := self.training.integer(_STAGE, most=3)) is not None:
            self._put("levers.engine", f"zero{stage}", self.prefix + _STAGE)
        if self.training.switch(_OFFLOAD):
            self._put("levers.offload_optimizer", "cpu", self.prefix + _OFFLOAD)
        model = self.tree.get("model")
        if "sequence" not in self.tree and isinstance(model, Mapping) and model.get("max_seq_length") is not None:
            self._put("sequence", model["max_seq_length"], "model.max_seq_length")
        self._batch(num_gpus)
        if num_gpus is not None and not isinstance(self._machine("gpus"), str):
            self.said.append(Message("job.gpus-of-this-machine", key="num_gpus", file=self.file, count=num_gpus))
        return Translated(tree=self.tree, names=self.names, said=tuple(self.said), num_gpus=num_gpus)

    def _batch(self, num_gpus: int | None) -> None:
        """The sequences of a step, where the file says how many each GPU does and how often."""
        parts = [self._one_of(_BATCH), self._one_of(_ACCUMULATION)]
        given = [part for part in parts if part is not None]
        if not given:
            return
        if "effective_batch" in self.tree:
            name, fix = given[0][0], Message("job.keep-one")
            raise ConfigError(Message("job.batch-twice", name=name, file=self.file, fix=fix), at=name)
        factors = [f"{name} {count}" for name, count in given]
        # the GPUs that train, as far as the file says
        word, ids = self._machine("gpus"), self._machine("gpu_ids")
        chosen = ids.split(",") if isinstance(ids, str) else ids
        world = len(chosen) if num_gpus is None and isinstance(chosen, list) else num_gpus
        if isinstance(word, str) and not is_this(word):
            try:
                hardware = read_hardware(word)
                world = hardware.nodes * (world or hardware.gpus_per_node)
            except HardwareError:  # the check of that field will say it
                world = 1
        if world is None:
            # Without a number of GPUs there is no product to keep, so its factors stay as they are.
            for lever, part in zip(("micro_batch", "accum"), parts, strict=True):
                name, count = part or (f"levers.{lever}", 1)
                self._put(f"levers.{lever}", count, name)
            self.said.append(Message("job.batch-kept", where=self.file, factors=Listing(factors, "and")))
            return
        levers = self.tree.get("levers")
        for name in READ_TOGETHER:
            shared = levers.get(name) if isinstance(levers, Mapping) else None
            if isinstance(shared, int) and shared > 0 and world % shared == 0:
                world //= shared
        batch = world * math.prod(count for _, count in given)
        self._put("effective_batch", batch, given[0][0])
        self.said.append(Message("job.batch-is", factors=" × ".join(factors), gpus=world, file=self.file, batch=batch))

    def _one_of(self, keys: tuple[str, ...]) -> tuple[str, int] | None:
        given = [key for key in keys if self.training.says(key)]
        if len(given) > 1:
            raise _twice(self.prefix + given[0], self.prefix + given[1], self.file)
        count = self.training.integer(given[0], least=1) if given else None
        return None if count is None else (self.prefix + given[0], count)

    def _machine(self, key: str) -> Any:
        hardware = self.tree.get("hardware")
        return hardware.get(key) if isinstance(hardware, Mapping) else None

    def _put(self, path: str, value: Any, name: str) -> None:
        block, _, key = path.rpartition(".")
        inside = self.tree.setdefault(block, {}) if block else self.tree
        if inside is None:
            inside = self.tree[block] = {}
        if not isinstance(inside, dict):
            return  # the check of the block will say it
        if key in inside:
            raise _twice(self.names.get(path, path), name, self.file, at=name)
        inside[key] = value
        self.names[path] = name


# --------------------------------------------------------------------------------------------------
# The short and the older words for how often a checkpoint is written and how many stay.
#
# `every: 500` and `every: 10m` are one field to a person and two to the worker; `keep` and `save_total_limit` are
# names that files have. They are turned into the fields of `Saving` before anything is checked.

FIELDS = ("every_steps", "every_minutes")  # what `every` is short for
OTHER_NAMES = {"keep": "keep_last", "save_total_limit": "keep_last", "async": "async_save"}
NEVER = ("none", "never", "null")


def translate_saving(
    saving: Mapping[str, Any], names: Mapping[str, str], file: str | None
) -> tuple[dict[str, Any], dict[str, str]]:
    """The block in the fields of `Saving`, and how sentences are to call those that had another name.

    `names`: the dotted path of a field → what the user wrote, where that is not the path; `file`: where, if in one.
    """
    block = dict(saving)
    called: dict[str, str] = {}
    for old, new in OTHER_NAMES.items():
        if old in block:
            name = names.get(f"saving.{old}", f"saving.{old}")
            if new in block:
                raise _twice(name, names.get(f"saving.{new}", called.get(new, f"saving.{new}")), file)
            block[new] = block.pop(old)
            called[new] = name
    if "every" in block:
        name = names.get("saving.every", "saving.every")
        for field in FIELDS:
            if field in block:
                raise _twice(name, names.get(f"saving.{field}", f"saving.{field}"), file)
        block["every_steps"], block["every_minutes"] = every(block.pop("every"), name, file)
        called |= dict.fromkeys(FIELDS, name)
    return block, {f"saving.{field}": name for field, name in called.items()}


def every(value: object, name: str, file: str | None = None) -> tuple[int | None, float | None]:
    """Steps and minutes between two checkpoints, of which one is None: of `500`, `10m`, `none`."""
    if value is None or (isinstance(value, str) and value.strip().lower() in NEVER):
        return None, None
    number = as_number(value.replace("_", "")) if isinstance(value, str) else value
    if isinstance(number, int | float) and not isinstance(number, bool) and 1 <= number <= LARGEST:
        if float(number).is_integer():
            return int(number), None
    elif isinstance(value, str):
        seconds = seconds_in(value)
        if seconds is not None and 1 <= seconds <= LARGEST:
            return None, seconds / 60
    called, must = name_in(name, file), Message("job.steps-or-time")
    raise ConfigError(Message("inputs.must-be", name=called, must=must, value=shown(value), hint=None), at=name)


def _twice(
    name: str, other: str, file: str | None, *, at: str | None = None, said: str = "job.said-twice"
) -> ConfigError:
    """The error for two fields of which one is to go."""
    fix = Message("job.keep-one")
    return ConfigError(Message(said, name=name, other=other, file=file, fix=fix), at=at or name)
