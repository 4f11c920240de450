"""The settings of somebody else's training: read from where they stand, and written beside for the next attempt.

A setting can stand on the command line, in a file of arguments (LLaMA-Factory's YAML, TRL's `--config`), in a DeepSpeed
JSON and in an accelerate YAML; the first of these that says it counts. It is changed wherever it stands, so that no two
places come to contradict each other. What stands nowhere is added only where the trainer is known to take it.

The batch decides what is trained. It is changed only where every place that could say it was read, so that micro batch
× accumulation is the same before and after; `batch_of` says why not.

Where the model is known, the planner finds the next config and says how much less it holds. Where it is not, the order
is fixed, the cheapest first: smaller micro batches (with as much accumulation more, so that the effective batch stays),
activations computed again, the next ZeRO stage, the optimizer on the host, the weights too, little gathered at a time.
What changes the training comes last, and only where it was allowed: 4-bit weights under adapters, then shorter
sequences.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from tightfit.formats.accelerate.dialect import known as known_accelerate
from tightfit.formats.beside import beside, json_with, write_beside, yaml_text_with, yaml_tree_with
from tightfit.formats.deepspeed.dialect import known as known_deepspeed
from tightfit.formats.document import Document, read_document
from tightfit.inputs.spelling import as_number
from tightfit.job.known import KnownConfig, block_in, whole
from tightfit.job.training import TRAINING_ARGUMENTS
from tightfit.messages import Message, Said
from tightfit.runs.external.command import CONFIG, CONFIG_ENDS, NAMES, Command, Flag
from tightfit.runs.external.script import ACCUMULATION, MICRO, TrainingScript
from tightfit.types import ConfigError, Hardware, UserError

USUAL_MICRO, USUAL_ACCUMULATION = 8, 1  # what transformers takes where nothing is said
_SOURCE_BYTES = 2**20
DEEPSPEED_FLAGS = ("deepspeed", "deepspeed_config", "ds_config")
_JSON = (".json", ".hjson")
_CONFIGS = re.compile(r"config|recipe|args|settings|hparams")
_ACROSS_STAGES = ("kto", "ppo")
"""Stages of LLaMA-Factory whose loss compares the samples of one micro batch, or counts them otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Knobs(KnownConfig):
    """How a training is computed, as far as it can be read. None: not known, and never touched."""

    quantised: bool | None = None  # the frozen weights have 4 bits
    buckets: tuple[tuple[str, int | bool], ...] = ()
    """Keys of `zero_optimization` that a plan has chosen, with their values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExternalTraining:
    command: Command
    settings: Document | None = None  # the trainer's arguments in a file
    hints: Document | None = None
    """A config that the script reads in a way of its own: worth a prediction, and never changed."""
    deepspeed: Document | None = None
    accelerate: Document | None = None
    script: TrainingScript = field(default_factory=TrainingScript)
    environment: Mapping[str, str] = field(default_factory=dict)  # what the next attempt needs beyond what it inherits

    @property
    def is_llamafactory(self) -> bool:
        return self.command.launcher == "llamafactory"

    @property
    def is_hugging_face(self) -> bool:
        """Whether it is transformers' Trainer that trains."""
        return self.is_llamafactory or self.script.is_hugging_face

    @property
    def takes_arguments(self) -> bool:
        """Whether every field of TrainingArguments can be said to it."""
        return self.is_llamafactory or self.script.takes_arguments

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(each.path for each in (self.settings, self.deepspeed, self.accelerate) if each is not None)

    @property
    def name(self) -> Said:
        command = self.command
        return Path(command.script).name if command.script is not None else NAMES[command.launcher]

    def said(self, *names: str) -> Any:
        """A setting of the trainer: from the command line, else from its file; None: not said."""
        flag = self.command.flag(*names)
        if flag is not None:
            return True if flag.value is None else _value(flag.value)
        values = _values(self.settings)
        return next((_value(values[name]) for name in names if values.get(name) is not None), None)

    def said_text(self, *names: str) -> str | None:
        """Likewise a setting that is text, whatever it looks like: a folder may be called 20240501."""
        flag = self.command.flag(*names)
        if flag is not None:
            return flag.value
        values = _values(self.settings)
        return next((str(values[name]) for name in names if values.get(name) is not None), None)

    def takes(self, name: str) -> bool:
        """Whether the trainer would understand this setting."""
        return self.takes_arguments or self.command.flag(name) is not None or self.script.mentions(f"--{name}")


def read_training(command: Command) -> ExternalTraining:
    """The files that the command names. One that cannot be read is an error: its program would stumble over it too."""
    script = TrainingScript(_source(_script_file(command)))
    settings = hints = None
    if command.settings is not None:
        positional = command.settings_at is not None and script.takes_arguments
        if command.launcher == "llamafactory" or positional or script.reads_argument_files:
            settings = read_document(Path(command.settings))
        else:
            with suppress(UserError):  # a file that only the script understands need not be one that we do
                hints = read_document(Path(command.settings))
    accelerate = None
    if command.starter == "accelerate" and (flag := command.launcher_flag("config_file")) and flag.value is not None:
        accelerate = read_document(Path(flag.value))
    made = ExternalTraining(command=command, settings=settings, hints=hints, accelerate=accelerate, script=script)
    named = deepspeed_name(made)
    if named is None:
        return made
    # from here, as the trainer looks for it, or from where the file lies that names it
    by = made.settings or made.accelerate
    places = [Path(named).expanduser(), *([] if by is None else [by.path.parent / named])]
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        who = by.path.name if by is not None else Message("runs.the-command")
        raise ConfigError(Message("external.no-deepspeed-file", who=who, name=named))
    return replace(made, deepspeed=read_document(found))


def _deepspeed_flag(external: ExternalTraining) -> Flag | None:
    """The flag that names the DeepSpeed JSON; `--deepspeed` may stand beside it as a switch."""
    named = [flag for flag in external.command.flags if flag.value is not None and flag.value.endswith(_JSON)]
    found = next((flag for flag in reversed(named) if flag.name in DEEPSPEED_FLAGS), None)
    if found is None and external.hints is not None and "zero_optimization" in external.hints.values:
        return next((flag for flag in reversed(named) if flag.name == CONFIG), None)
    return found


def deepspeed_name(external: ExternalTraining) -> str | None:
    """The DeepSpeed JSON as the user wrote it; None: there is none."""
    flag = _deepspeed_flag(external)
    own = external.command.launcher_flag("deepspeed_config_file")
    inside = _accelerate_block(external).get("deepspeed_config_file")
    for place in (flag and flag.value, own and own.value, _values(external.settings).get("deepspeed"), inside):
        if isinstance(place, str) and place.endswith(_JSON):
            return place
    return None


def _script_file(command: Command) -> str | None:
    """The Python file that trains; TRL's lies where the program `trl` was installed."""
    if command.launcher != "trl":
        return command.script
    program, verb = command.words[command.script_at - 2 : command.script_at]
    found = shutil.which(program)
    places = [] if found is None else Path(found).resolve().parent.parent.glob("lib/python3*/site-packages/trl/scripts")
    return next((str(place / f"{verb}.py") for place in places if (place / f"{verb}.py").is_file()), None)


def _source(script: str | None) -> str:
    if script is None:
        return ""
    path = Path(script)
    if not path.is_file():
        if script.endswith(".py"):
            raise ConfigError(Message("external.no-script", script=script))
        return ""
    try:
        with path.open("rb") as file:
            return file.read(_SOURCE_BYTES).decode("utf-8", errors="replace")
    except OSError:
        return ""


def _value(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    lowered = value.strip().lower()
    if lowered in ("true", "false"):
        return lowered == "true"
    number = as_number(value)
    return value if number is None else number


# --- reading ------------------------------------------------------------------------------------


def knobs_of(external: ExternalTraining) -> Knobs:
    batch = batch_of(external)
    known = replace(_engine(external), micro_batch=batch.micro, accumulation=batch.accumulation)
    if not external.takes_arguments:
        return known
    off, on = external.said("disable_gradient_checkpointing"), external.said("gradient_checkpointing")
    checkpointing = (
        off is not True if external.is_llamafactory else on is not False if external.script.is_trl else bool(on)
    )
    known = replace(known, checkpointing=checkpointing)
    if not external.is_llamafactory:
        return known
    adapters = external.said("finetuning_type") in (None, "lora")
    sequence = external.said("cutoff_len")
    return replace(
        known,
        checkpointing=off is not True,
        quantised=bool(external.said("quantization_bit")) if adapters else None,
        sequence=sequence if isinstance(sequence, int) else 2048,
    )


def _engine(external: ExternalTraining) -> Knobs:
    if external.deepspeed is not None:
        known = known_deepspeed(external.deepspeed.values)
        known = replace(known, stage=known.stage or 0)
    elif _accelerate_block(external):
        assert external.accelerate is not None
        known = known_accelerate(external.accelerate.values)
        known = replace(known, stage=2 if known.stage is None else known.stage)  # accelerate's own default
    else:
        return Knobs()
    return Knobs(
        stage=known.stage,
        offload_optimizer=known.offload_optimizer or "none",
        offload_param=known.offload_param or "none",
        pin_memory=known.pin_memory,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    micro: int | None = None
    accumulation: int | None = None
    because: Said = ""  # why it is not known, as the end of a sentence; empty: it is


def batch_of(external: ExternalTraining) -> Batch:
    """The batch, where all that decides it can be read; otherwise why not."""
    doubt = _doubt(external)
    if doubt is not None:
        return Batch(because=doubt)
    values = _values(external.deepspeed)
    said = {name: external.said(name) for name in (MICRO, ACCUMULATION)}
    for name, value in said.items():
        if value is not None and whole(value) is None:
            return Batch(because=Message("external.no-whole-number", name=name, value=repr(value)))
    micro, accumulation = whole(said[MICRO]), whole(said[ACCUMULATION])
    in_file = whole(values.get("train_micro_batch_size_per_gpu")), whole(values.get(ACCUMULATION))
    if external.takes_arguments:
        return Batch(
            micro=micro or in_file[0] or USUAL_MICRO,
            accumulation=accumulation
            or in_file[1]
            or whole(_accelerate_block(external).get(ACCUMULATION))
            or USUAL_ACCUMULATION,
        )
    if external.takes(MICRO) or external.takes(ACCUMULATION):
        if micro is None or accumulation is None:
            missing = MICRO if micro is None else ACCUMULATION
            return Batch(because=Message("external.not-said", key=missing, name=external.name))
        return Batch(micro=micro, accumulation=accumulation)
    if in_file[0] is None:
        return Batch(because=Message("external.no-config-says", name=external.name))
    if not external.script.uses_deepspeeds_batch:
        return Batch(because=Message("external.not-from-deepspeed", name=external.name))
    if values.get(ACCUMULATION, values.get("train_batch_size")) is None:
        return Batch(micro=in_file[0], accumulation=1)  # DeepSpeed's own
    if in_file[1] is None:
        return Batch(because=Message("external.left-open", key=ACCUMULATION))
    return Batch(micro=in_file[0], accumulation=in_file[1])


def _doubt(external: ExternalTraining) -> Message | None:
    """What could make the batch another one than the settings say, or a smaller micro batch another training."""
    script, name = external.script, external.name
    if external.said("auto_find_batch_size") is True:
        return Message("external.finds-batch")
    if external.is_llamafactory:
        stage = external.said("stage")
        return Message("external.stage-depends", stage=stage) if stage in _ACROSS_STAGES else None
    if unread := _unread(external):
        return Message("external.own-way", name=name, file=unread)
    beside_it = None if external.command.script is None else Path(external.command.script).with_suffix(".args")
    if script.takes_arguments and beside_it is not None and beside_it.is_file():
        return Message("external.also-takes", name=name, file=beside_it.name)
    if key := script.sets(MICRO, ACCUMULATION, "auto_find_batch_size"):
        return Message("external.sets-itself", name=name, key=key)
    if script.has_own_loss:
        return Message("external.own-loss", name=name)
    if script.across_the_batch is not None:
        return Message("external.loss-depends", trainer=script.across_the_batch)
    if script.generates and (external.said("steps_per_generation") is not None or external.said("loss_type") == "bnpo"):
        return Message("external.generation-depends")
    return None


def _unread(external: ExternalTraining) -> str | None:
    """A config that the command names, and that may say more than we have read."""
    for flag in external.command.flags:
        of_ours = flag.name in DEEPSPEED_FLAGS or flag.name in TRAINING_ARGUMENTS
        of_ours = of_ours or (flag.name == CONFIG and flag.value == external.command.settings)
        if not of_ours and flag.value and flag.value.endswith(CONFIG_ENDS) and _CONFIGS.search(flag.name):
            return flag.value
    named = external.command.settings
    is_deepspeeds = external.deepspeed is not None and named is not None and external.deepspeed.path == Path(named)
    return named if external.settings is None and not is_deepspeeds else None


# --- writing ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Edits:
    """What is written: keys and their values; None takes one away."""

    trainer: Mapping[str, Any] = field(default_factory=dict)
    deepspeed: Mapping[str, Any] = field(default_factory=dict)  # dotted
    accelerate: Mapping[str, Any] = field(default_factory=dict)


def edits_of(external: ExternalTraining, now: Knobs, new: Knobs) -> Edits:
    """The keys that lead from one way to compute to another."""
    trainer: dict[str, Any] = {}
    engine: dict[str, Any] = {}
    yaml_block: dict[str, Any] = {}
    values = _values(external.deepspeed)
    zero = block_in(values, "zero_optimization")
    if new.stage != now.stage and new.stage is not None:
        engine["zero_optimization.stage"] = new.stage
        yaml_block["deepspeed_config.zero_stage"] = new.stage
        if new.stage == 3 and external.accelerate is not None:
            yaml_block["deepspeed_config.zero3_init_flag"] = True
    for kind in ("offload_optimizer", "offload_param"):
        place = getattr(new, kind)
        if place == getattr(now, kind) or place is None:
            continue
        block = {**block_in(zero, kind), "device": place}
        if "pin_memory" not in block or new.pin_memory is False:
            block["pin_memory"] = new.pin_memory is not False
        engine[f"zero_optimization.{kind}"] = None if place == "none" else block
        yaml_block[f"deepspeed_config.{kind}_device"] = place
    # locked memory and buckets, under the spelling that the file has
    if now.pin_memory is not False and new.pin_memory is False:
        for kind in ("offload_optimizer", "offload_param"):
            if kind in zero and getattr(new, kind) == getattr(now, kind):
                engine[f"zero_optimization.{kind}.pin_memory"] = False
    for key, value in new.buckets:
        short = key.removeprefix("stage3_")
        engine[f"zero_optimization.{short if short in zero else key}"] = value
    makes_own = not external.is_hugging_face and "optimizer" not in values
    if makes_own and now.offload_optimizer in (None, "", "none") and new.offload_optimizer == "cpu":
        engine["zero_force_ds_cpu_optimizer"] = False  # or DeepSpeed refuses an optimizer that the script makes
    if (new.micro_batch, new.accumulation) != (now.micro_batch, now.accumulation):
        trainer |= {MICRO: new.micro_batch, ACCUMULATION: new.accumulation}
        # in the DeepSpeed file, where it stands there as a number
        pairs = {"train_micro_batch_size_per_gpu": new.micro_batch, ACCUMULATION: new.accumulation}
        numbers = {key: value for key, value in pairs.items() if whole(values.get(key)) is not None}
        engine |= pairs if numbers and not external.is_hugging_face else numbers
        if whole(_accelerate_block(external).get(ACCUMULATION)) is not None:
            yaml_block[f"deepspeed_config.{ACCUMULATION}"] = new.accumulation
    if new.checkpointing and not now.checkpointing:
        key = "disable_gradient_checkpointing" if external.is_llamafactory else "gradient_checkpointing"
        trainer[key] = not external.is_llamafactory
    if new.quantised and not now.quantised:
        trainer["quantization_bit"] = 4
    if new.sequence != now.sequence and new.sequence is not None:
        trainer["cutoff_len"] = new.sequence
    if external.deepspeed is not None or not yaml_block:
        yaml_block = {key: value for key, value in yaml_block.items() if key.endswith(ACCUMULATION)}
    return Edits(trainer=trainer, deepspeed=engine, accelerate=yaml_block)


def _accelerate_block(external: ExternalTraining) -> Mapping[str, Any]:
    return block_in(_values(external.accelerate), "deepspeed_config")


def _values(document: Document | None) -> Mapping[str, Any]:
    return {} if document is None else document.values


def written(external: ExternalTraining, edits: Edits) -> tuple[ExternalTraining, tuple[Path, ...]]:
    """The next command, and the files that were written for it beside the old ones."""
    files: list[Path] = []
    command, environment, settings = external.command, external.environment, external.settings
    trainer = {key: value for key, value in edits.trainer.items() if external.takes(key)}
    accelerate = dict(edits.accelerate)
    if edits.deepspeed and external.deepspeed is not None:
        made = beside(external.deepspeed.path)
        files.append(write_beside(made, json_with(external.deepspeed.values, edits.deepspeed)))
        new = _name_like(str(deepspeed_name(external)), made)
        own = command.launcher_flag("deepspeed_config_file")
        if (flag := _deepspeed_flag(external)) is not None:
            command = command.with_flag(flag.name, new)
        elif own is not None and own.value is not None:
            command = command.with_launcher_flag(own, new)
        elif settings is not None and isinstance(settings.values.get("deepspeed"), str):
            trainer["deepspeed"] = new
        else:  # accelerate's YAML names it
            accelerate["deepspeed_config.deepspeed_config_file"] = new
    elif edits.deepspeed and external.is_llamafactory and settings is not None:
        made = beside(settings.path, ".json")
        files.append(write_beside(made, json_with(_PLAIN_DEEPSPEED, edits.deepspeed)))
        # LLaMA-Factory starts DeepSpeed under torchrun alone, which it does not take by itself for one GPU.
        trainer["deepspeed"], environment = str(made), {**environment, "FORCE_TORCHRUN": "1"}
    in_file: dict[str, Any] = {}
    for key, value in trainer.items():
        if value is None and command.flag(key) is not None:
            command = command.without_flag(key)
        elif command.flag(key) is not None or (settings is None and value is not None):
            command = command.with_flag(key, str(value))
        else:
            in_file[key] = value
    if in_file and settings is not None:
        made = beside(settings.path)
        is_yaml = settings.syntax == "yaml"
        old = settings.path.read_text(encoding="utf-8") if is_yaml else ""
        files.append(
            write_beside(made, yaml_text_with(old, in_file) if is_yaml else json_with(settings.values, in_file))
        )
        command = command.with_settings(_name_like(str(command.settings), made))
    if accelerate and external.accelerate is not None:
        made = write_beside(beside(external.accelerate.path), yaml_tree_with(external.accelerate.values, accelerate))
        files += [made] if edits.accelerate else []
        flag = command.launcher_flag("config_file")
        assert flag is not None
        command = command.with_launcher_flag(flag, _name_like(str(flag.value), made))
    try:
        again = replace(read_training(command), environment=environment)
    except UserError as error:
        raise ConfigError(Message("external.not-read-back", why=error.said)) from None
    before, after = batch_of(external), batch_of(again)
    if (before.micro or 0) * (before.accumulation or 0) != (after.micro or 0) * (after.accumulation or 0):
        raise ConfigError(Message("external.other-batch"))
    return again, tuple(files)


_PLAIN_DEEPSPEED: dict[str, Any] = {  # what the Hugging Face layer fills in from the trainer's arguments
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_allow_untested_optimizer": True,
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto"},
    "zero_optimization": {"stage": 0},
}


def _name_like(old: str, new: Path) -> str:
    """The new file, named in the way in which the old one was."""
    return str(Path(old).with_name(new.name))


# --- the next rung down -------------------------------------------------------------------------


SHORTEST = 128
FRUGAL: tuple[tuple[str, int | bool], ...] = (
    ("stage3_prefetch_bucket_size", 10_000_000),
    ("stage3_param_persistence_threshold", 10_000),
    ("stage3_max_live_parameters", 100_000_000),
    ("stage3_max_reuse_distance", 100_000_000),
)
LIMIT_TOKENS = 256
_NEXT_SCHEME = Message("external.next-scheme")


@dataclass(frozen=True, slots=True, kw_only=True)
class NextConfig:
    knobs: Knobs
    changed: tuple[Said, ...]
    because: Said = _NEXT_SCHEME
    crosses: bool = False  # a checkpoint of the last way cannot be resumed with its optimizer
    costs: tuple[Said, ...] = ()  # what it changes in the training, as the user allowed


_LAID_OUT_BY = ("stage", "offload_optimizer", "offload_param", "quantised")
"""Knobs by which a trainer lays out its checkpoint: its optimizer cannot be resumed with others."""


def rungs(external: ExternalTraining, now: Knobs, allow: frozenset[str], *, host: bool = False) -> Iterator[NextConfig]:
    """Every next way that this config can be changed to, the cheapest first; `host`: it is RAM that was missing."""

    def step(knobs: Knobs, changed: Message, *costs: Message) -> NextConfig:
        crosses = any(getattr(knobs, name) != getattr(now, name) for name in _LAID_OUT_BY)
        return NextConfig(knobs=knobs, changed=(changed,), crosses=crosses, costs=costs)

    if host:
        if {now.offload_optimizer, now.offload_param} & {"cpu", "nvme"} and now.pin_memory is not False:
            yield step(replace(now, pin_memory=False), Message("external.unpinned"))
        return
    micro, accumulation = now.micro_batch, now.accumulation
    if micro is not None and accumulation is not None and micro >= 2:
        smaller = next(size for size in range(micro // 2, 0, -1) if micro % size == 0)
        more = accumulation * (micro // smaller)
        word = Message(
            "external.smaller-batch",
            micro=micro,
            accumulation=accumulation,
            new_micro=smaller,
            new_accumulation=more,
        )
        yield step(replace(now, micro_batch=smaller, accumulation=more), word)
    if now.checkpointing is False:
        yield step(replace(now, checkpointing=True), Message("external.recomputes"))
    if now.stage is not None:
        live = block_in(_values(external.deepspeed), "zero_optimization").get("stage3_max_live_parameters")
        is_frugal = isinstance(live, int | float) and live <= dict(FRUGAL)["stage3_max_live_parameters"]
        if now.stage < 2:
            yield step(replace(now, stage=2), Message("external.stage", old=now.stage, new=2))
        elif now.offload_optimizer == "none":
            yield step(replace(now, offload_optimizer="cpu"), Message("external.optimizer-on-host"))
        elif now.stage == 2:
            yield step(replace(now, stage=3), Message("external.stage", old=2, new=3))
        elif now.offload_param == "none":
            yield step(replace(now, offload_param="cpu"), Message("external.weights-on-host"))
        elif external.deepspeed is not None and not is_frugal:
            yield step(replace(now, buckets=FRUGAL), Message("external.gathers-little"))
    # what changes the training
    if "quantize" in allow and now.quantised is False:
        costs = Message("external.quantized-cost")
        yield step(replace(now, quantised=True), Message("external.quantized"), costs)
    length = now.sequence
    if "shorter-seq" in allow and external.is_llamafactory and length is not None and length // 2 >= SHORTEST:
        shorter = length // 2
        id_ = "external.shorter-limit" if now.quantised and shorter <= LIMIT_TOKENS else "external.shorter"
        costs = Message("external.shorter-cost", new=shorter, old=length)
        yield step(replace(now, sequence=shorter), Message(id_, old=length, new=shorter), costs)


def would_help(external: ExternalTraining, now: Knobs, allow: frozenset[str]) -> tuple[Message, ...]:
    """What was not allowed, or cannot be written here."""
    said = []
    if now.quantised is False and "quantize" not in allow:
        said.append(Message("external.allow-quantize"))
    if external.is_llamafactory and "shorter-seq" not in allow and (now.sequence or 0) >= 2 * SHORTEST:
        said.append(Message("external.allow-shorter"))
    return tuple(said)


# --- how many processes it starts ---------------------------------------------------------------


VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES")
_SLOTS = re.compile(r"^\s*([^#\s]\S*)\s+slots\s*=\s*(\d+)", re.MULTILINE)


class RankCount(NamedTuple):
    machines: int
    on_each: int


def ranks_of(external: ExternalTraining, hardware: Hardware, environment: Mapping[str, str]) -> RankCount:
    """What the command starts. `environment`: what it will see."""
    there = visible_gpus(hardware, environment)
    command = external.command
    if command.starter == "llamafactory":
        there = 1 if hardware.gpu.vendor == "cpu" else there
        return RankCount(_count(environment.get("NNODES")) or 1, _count(environment.get("NPROC_PER_NODE")) or there)
    if command.starter == "torchrun":
        word = command.launcher_value("nproc_per_node") or environment.get("PET_NPROC_PER_NODE")
        nodes = (command.launcher_value("nnodes") or environment.get("PET_NNODES") or "1").partition(":")[0]
        return RankCount(_count(nodes) or 1, there if word in ("gpu", "auto") else _count(word) or 1)
    if command.starter == "deepspeed":
        include = command.launcher_value("include", "i")
        if include is not None and ":" in include:
            hosts = [host.partition(":")[2] for host in include.split("@")]
            return RankCount(len(hosts), max(gpus.count(",") + 1 for gpus in hosts))
        slots: list[int] = []  # of each host; empty where the file says nothing
        hostfile = command.launcher_value("hostfile", "H")
        if hostfile is not None and Path(hostfile).is_file():
            listed = Path(hostfile).read_text(encoding="utf-8", errors="replace")
            slots = [int(count) for _, count in _SLOTS.findall(listed)]
        machines = _count(command.launcher_value("num_nodes")) or len(slots) or 1
        return RankCount(machines, _count(command.launcher_value("num_gpus")) or min(slots, default=there))
    if command.starter in ("accelerate", "trl"):
        # `num_processes` counts those of all machines
        said = {}
        for name in ("num_machines", "num_processes"):
            value = command.launcher_value(name)
            if value is None and external.command.starter == "trl":
                value = external.said(name)
            if value is None and external.accelerate is not None:
                value = external.accelerate.values.get(name)
            said[name] = _count(str(value))
        machines = said["num_machines"] or 1
        return RankCount(machines, max(1, (said["num_processes"] or there * machines) // machines))
    return RankCount(1, 1 if command.starter == "python" else there)


def visible_gpus(hardware: Hardware, environment: Mapping[str, str]) -> int:
    """Of one machine, as many as the variables leave."""
    for name in VISIBLE:
        if name in environment:
            shown = [word for word in environment[name].split(",") if word.strip()]
            if not shown or shown[0].strip() == "-1":
                raise ConfigError(Message("external.hides-gpus", name=name, value=environment[name]))
            return min(len(shown), hardware.gpus_per_node)
    return hardware.gpus_per_node


def _count(word: str | None) -> int | None:
    return int(word) if word is not None and word.isdigit() and int(word) > 0 else None
