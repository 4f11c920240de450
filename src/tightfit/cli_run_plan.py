"""What the memory model says about somebody else's training: before it starts, and after memory ran out."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import yaml

from tightfit.desk.llamafactory_job import read_llamafactory_job
from tightfit.desk.plan_files import DEEPSPEED, deepspeed_version
from tightfit.diagnose.verdict import Verdict
from tightfit.inputs import deepspeed_file, llamafactory_file
from tightfit.inputs.flags import flags_from_levers
from tightfit.inputs.models import load_model
from tightfit.job import Adapters, Allowance, Job
from tightfit.memory import estimate
from tightfit.pace import pace
from tightfit.planner.calibration import COMPONENT, Calibration, Entry, corrected
from tightfit.planner.plan import Bounds, Plan, Way
from tightfit.planner.step_down import NoWay, Shortfall, StepDown, Tried, located, step_down
from tightfit.priced import GIB, Priced, strategy_name, verdict
from tightfit.runs.calibration import learned_from_failure
from tightfit.runs.foreign_config import Foreign, knobs_of
from tightfit.runs.foreign_group import Peak
from tightfit.runs.foreign_loop import Step
from tightfit.types import Buckets, Checkpointing, Hardware, Levers, ModelShape, Precision, UserError

MODELS = ("model_name_or_path", "model", "model_name", "model_id", "base_model", "pretrained_model_name_or_path")
LENGTHS = ("cutoff_len", "max_seq_length", "max_length", "block_size", "model_max_length", "seq_length")
PINS = ("loss", "attention", "scan", "dataloader_workers", "deepspeed_version")
"""What a config cannot be told to change without knowing which packages are installed there."""
STAYS = ("engine", "offload_optimizer", "offload_param")
_KEYS = {
    "reduce_bucket": "reduce_bucket_size",
    "allgather_bucket": "allgather_bucket_size",
    "prefetch_bucket": "stage3_prefetch_bucket_size",
    "persistence_threshold": "stage3_param_persistence_threshold",
    "max_live_parameters": "stage3_max_live_parameters",
    "max_reuse_distance": "stage3_max_reuse_distance",
    "sub_group_size": "sub_group_size",
    "overlap_comm": "overlap_comm",
}
BUCKETS = tuple(name for name in _KEYS if name != "sub_group_size")
_BELOW_3 = ("reduce_bucket", "allgather_bucket", "overlap_comm")
SCHEME_TOKENS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """A training whose memory can be predicted."""

    job: Job
    shape: ModelShape
    levers: Levers
    hardware: Hardware
    """As much of it as the command uses."""
    calibration: Calibration | None = None
    """What earlier runs have measured; None: it is not wanted."""

    @property
    def priced(self) -> Priced:
        footprint = estimate(self.shape, self.levers, self.hardware.world, self.hardware)
        if self.calibration is not None:
            found = self.calibration.correction(self.shape, self.levers, self.hardware)
            footprint = corrected(footprint, found, self.hardware)
        return Priced(
            shape=self.shape, levers=self.levers, world=self.hardware.world, hardware=self.hardware, footprint=footprint
        )


def known_of(
    foreign: Foreign, hardware: Hardware, allow: tuple[Allowance, ...], calibration: Calibration | None = None
) -> Known | str:
    """The training in our words; or what is missing, in a sentence."""
    machine = replace(hardware, nodes=1, gpus_per_node=world_of(foreign, hardware))
    try:
        found = _llamafactory(foreign, machine) if foreign.is_llamafactory else _script(foreign, machine)
        if isinstance(found, str):
            return found
        job, shape, levers = found
        pins: dict[str, Any] = {
            name: flags_from_levers(levers)[name] for name in PINS if name in flags_from_levers(levers)
        }
        pins["deepspeed_version"] = levers.deepspeed_version
        batch = levers.micro_batch * levers.accumulation * machine.world
        job = replace(job, levers=pins, effective_batch=batch, limits=replace(job.limits, allow=allow))
        return Known(job=job, shape=shape, levers=levers, hardware=machine, calibration=calibration)
    except UserError as error:
        return f"nothing is predicted: {error}"


def world_of(foreign: Foreign, hardware: Hardware) -> int:
    """How many ranks the command starts on this machine."""
    there = 1 if hardware.gpu.vendor == "cpu" and foreign.is_llamafactory else hardware.gpus_per_node
    command = foreign.command
    own = command.launcher_flag("num_gpus", "nproc_per_node", "num_processes")
    if own is not None and own.value is not None and own.value.isdigit():
        return max(1, int(own.value))
    include = command.launcher_flag("include", "i")
    if include is not None and include.value is not None and ":" in include.value:
        return include.value.count(",") + 1
    if foreign.accelerate is not None and isinstance(count := foreign.accelerate.values.get("num_processes"), int):
        return max(1, count)
    return 1 if command.launcher == "torchrun" and own is None else there


def _llamafactory(foreign: Foreign, machine: Hardware) -> tuple[Job, ModelShape, Levers] | str:
    """Its YAML with what the command line says instead, as LLaMA-Factory merges the two."""
    values = dict(foreign.settings.values) if foreign.settings is not None else {}
    values |= {flag.name: foreign.said(flag.name) for flag in foreign.command.flags}
    if foreign.deepspeed is not None:
        values["deepspeed"] = str(foreign.deepspeed.path.absolute())
    name = foreign.settings.path.name if foreign.settings is not None else "the command line"
    with tempfile.TemporaryDirectory(prefix="tightfit-") as folder:
        path = Path(folder) / name
        path.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
        settings = llamafactory_file.read_llamafactory(path)
        job = read_llamafactory_job(path, None).job
    shape = load_model(settings.model)
    version = deepspeed_version(machine)[0]
    levers = llamafactory_file.to_levers(
        settings, replace(Levers(), deepspeed_version=version), n_layers=shape.n_layers
    )
    return job, shape, _with_deepspeed(foreign, levers, shape, machine, version)


def _with_deepspeed(foreign: Foreign, levers: Levers, shape: ModelShape, machine: Hardware, version: str) -> Levers:
    if foreign.deepspeed is None:
        return levers
    settings = deepspeed_file.read_deepspeed(foreign.deepspeed.path, hidden_size=shape.hidden_size, version=version)
    return deepspeed_file.to_levers(settings, levers, world=machine.world)


def _script(foreign: Foreign, machine: Hardware) -> tuple[Job, ModelShape, Levers] | str:
    """A script with the usual flags: transformers' own, and the usual names of model and length."""
    model = next((value for name in MODELS if isinstance(value := foreign.said(name), str)), None)
    if model is None:
        return "nothing is predicted: the command does not say which model it trains"
    length = next((value for name in LENGTHS if isinstance(value := foreign.said(name), int)), None)
    if length is None:
        return "nothing is predicted: the command does not say how long its sequences are"
    shape, now, version = load_model(model), knobs_of(foreign), deepspeed_version(machine)[0]
    adapters = any(foreign.said(name) for name in ("use_lora", "use_peft", "lora_r", "lora_rank", "peft"))
    if adapters:
        return "nothing is predicted: the script trains adapters in a way of its own"
    half: Precision = "fp16" if foreign.said("fp16") is True else "fp32"
    levers = replace(
        Levers(),
        sequence=length,
        micro_batch=now.micro_batch or 1,
        accumulation=now.accumulation or 1,
        precision="bf16" if foreign.said("bf16") is True else half,
        checkpointing=Checkpointing(layers=None if now.checkpointing else 0),
        deepspeed_version=version,
    )
    levers = _with_deepspeed(foreign, levers, shape, machine, version)
    if foreign.deepspeed is None and now.stage is not None:
        levers = replace(
            levers,
            engine=f"zero{now.stage}",  # type: ignore[arg-type]
            offload_optimizer=now.offload_optimizer,  # type: ignore[arg-type]
            offload_param=now.offload_param,  # type: ignore[arg-type]
        )
    job = Job(model=model, sequence=length, precision=levers.precision, lora=Adapters())
    return job, shape, levers


def prediction(known: Known) -> str:
    """One line: whether it fits, and where it is highest."""
    priced = known.priced
    where = f"{strategy_name(known.levers)}, micro batch {known.levers.micro_batch} × {known.levers.accumulation}"
    added = priced.footprint.gpu.phases[priced.footprint.gpu.peak_phase].components.get(COMPONENT, 0)
    measured = f" Earlier runs held {added / GIB:.1f} GiB more than predicted: counted in." if added > 0 else ""
    return f"{verdict(priced)} The peak is in the {priced.footprint.gpu.peak_phase} phase ({where}).{measured}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What holds for all attempts of a run."""

    hardware: Hardware
    allow: tuple[Allowance, ...] = ()
    calibration: Calibration | None = None
    """What was known at the start; None: nothing is learned or used."""
    keep: Callable[[Entry], object] = lambda entry: None
    """Writes down what was learned."""
    wait: Callable[[int | None, int, Callable[[], bool]], bool] | None = None
    """Waits for room on the GPUs; None: nobody asked for that."""


class Planner:
    """The next way by prices, for as long as the model is known."""

    def __init__(self, setting: Setting) -> None:
        self._setting, self._calibration = setting, setting.calibration
        self._tried: list[Tried] = []
        self._last: Tried | None = None

    def known(self, foreign: Foreign) -> Known | str:
        return known_of(foreign, self._setting.hardware, self._setting.allow, self._calibration)

    def learn(self, foreign: Foreign, peak: Peak) -> None:
        """More than was predicted is a lesson. Less is none: the longest samples may not have come, and what a program
        holds is looked at from time to time only."""
        known = self.known(foreign)
        if self._calibration is None or isinstance(known, str) or not peak.own_bytes:
            return
        gpu = known.priced.footprint.gpu
        held = peak.own_bytes - sum(gpu.overhead.values())
        self._taught(learned_from_failure(_plan(known), Shortfall(where="gpu", phase=gpu.peak_phase), held))

    def _taught(self, entry: Entry | None, *, failed: bool = False) -> None:
        known = self._calibration
        if entry is not None and known is not None:
            self._calibration = known.after_failure(entry) if failed else known.with_entry(entry)
            self._setting.keep(entry)

    def wait_for_room(self, foreign: Foreign, give_up: Callable[[], bool]) -> bool:
        if self._setting.wait is None:
            return False
        known = self.known(foreign)
        need = None if isinstance(known, str) else known.priced.footprint.gpu.required_bytes
        return self._setting.wait(need, world_of(foreign, self._setting.hardware), give_up)

    def smaller(self, foreign: Foreign, shortfall: Shortfall, verdict: Verdict, *, same_engine: bool) -> Step | None:
        known = self.known(foreign)
        if isinstance(known, str):
            return None
        now = _plan(known)
        assert now.chosen is not None
        shortfall = located(shortfall, now.chosen)
        if (numbers := verdict.oom) is not None and numbers.allocated is not None and numbers.asked is not None:
            self._taught(learned_from_failure(now, shortfall, numbers.allocated + numbers.asked), failed=True)
            known = replace(known, calibration=self._calibration)
        for job in _tries(known, same_engine=same_engine):
            last = _plan(replace(known, job=job))
            assert last.chosen is not None
            try:
                found = step_down(last, shortfall, bounds=_bounds(foreign, known), before=tuple(self._tried))
            except UserError:  # pins that this batch or this engine cannot have
                continue
            step = None if isinstance(found, NoWay) else _step(foreign, known, found)
            if step is not None:
                self._last = Tried(way=last.chosen, shortfall=shortfall)
                return step
        return None

    def took(self, step: Step) -> None:
        self._tried += [] if self._last is None else [self._last]
        self._last = None


def _tries(known: Known, *, same_engine: bool) -> Iterator[Job]:
    """The job with pins, one after another: what changes least is asked for first, and costly changes last.

    The micro batch never grows: where memory ran out, the prediction was too low already.
    """
    job, levers, flags = known.job, known.levers, flags_from_levers(known.levers)
    free, allowed = replace(job, limits=replace(job.limits, allow=())), job.limits.allow
    share = levers.micro_batch * levers.accumulation
    sizes = [size for size in range(levers.micro_batch, 0, -1) if levers.micro_batch % size == 0]

    def pinned(job: Job, size: int, names: Iterable[str]) -> Job:
        pins = {name: flags[name] for name in names if flags.get(name) is not None}
        if levers.checkpointing.layers is None:
            pins["checkpointing"] = flags["checkpointing"]
        return replace(job, levers={**job.levers, **pins, "micro_batch": size, "accum": share // size})

    yield from (pinned(free, size, (*STAYS, *BUCKETS)) for size in sizes)
    if same_engine:
        if "shorter-seq" in allowed:
            only = replace(job, limits=replace(job.limits, allow=("shorter-seq",)))
            yield pinned(only, sizes[-1], (*STAYS, *BUCKETS))
        return
    yield from (pinned(free, size, BUCKETS) for size in sizes)
    yield pinned(free, sizes[-1], ())
    if allowed:
        yield pinned(job, sizes[-1], ())


def _plan(known: Known) -> Plan:
    """What runs now, as a plan."""
    priced, job = known.priced, known.job
    way = Way(
        shape=known.shape,
        levers=known.levers,
        hardware=known.hardware,
        footprint=priced.footprint,
        pace=pace(known.shape, known.levers, known.hardware),
        fits=bool(priced.fits),
        gpu_limit_bytes=int(known.hardware.gpu.memory_bytes * (1 - job.limits.margin)),
    )
    return Plan(
        job=job,
        shape=known.shape,
        hardware=known.hardware,
        effective_batch=way.effective_batch,
        chosen=way,
        alternatives=(),
        considered=1,
        search_s=0.0,
        because=(),
    )


def _bounds(foreign: Foreign, known: Known) -> Bounds:
    """What this command could start with another config, on as many GPUs as it takes now."""
    engines = DEEPSPEED
    if foreign.deepspeed is None and not foreign.accelerate:
        adds = foreign.is_llamafactory and known.hardware.world > 1
        engines = DEEPSPEED if adds else frozenset({known.levers.engine})
    else:
        engines = DEEPSPEED - {"zero0"} if known.levers.engine != "zero0" else DEEPSPEED
    return Bounds(partial=False, engines=engines, every_gpu=True, calibration=known.calibration)


def _step(foreign: Foreign, known: Known, found: StepDown) -> Step | None:
    way = found.plan.chosen
    assert way is not None
    old, new, now = known.levers, way.levers, knobs_of(foreign)
    if new.checkpointing.offload:  # Unsloth's, which nobody has run here
        return None
    if (new.lora, new.optimizer, new.precision) != (
        old.lora,
        old.optimizer,
        old.precision,
    ) or way.shape is not known.shape:
        return None
    stage = int(new.engine.removeprefix("zero")) if new.engine.startswith("zero") else None
    moved = stage != (now.stage or 0) or (new.offload_optimizer, new.offload_param) != (
        old.offload_optimizer, old.offload_param
    )  # fmt: skip
    knobs = replace(
        now,
        stage=stage if moved else now.stage,
        offload_optimizer=new.offload_optimizer if moved else now.offload_optimizer,
        offload_param=new.offload_param if moved else now.offload_param,
        pin_memory=False if old.buckets.pin_memory and not new.buckets.pin_memory else now.pin_memory,
        micro_batch=new.micro_batch,
        accumulation=new.accumulation,
        checkpointing=new.checkpointing.layers != 0 if now.checkpointing is not None else None,
        quantised=new.method == "qlora" if now.quantised is not None else None,
        sequence=new.sequence if now.sequence is not None else None,
        buckets=_buckets(old, new),
    )
    because = " ".join(sentence for sentence in found.because if not sentence.startswith("What changes"))
    crosses = moved or (new.method != old.method)
    scheme = scheme_of(new, old)
    changed = (*found.changed, *((f"the scheme {scheme}",) if scheme else ()))
    return Step(knobs=knobs, changed=changed, because=because, crosses=crosses, costs=way.changes)


def _buckets(old: Levers, new: Levers) -> tuple[tuple[str, int | bool], ...]:
    if new.engine == "zero0":
        return ()
    names = [each.name for each in fields(Buckets) if each.name in _KEYS]
    names = names if new.engine == "zero3" else [name for name in names if name in _BELOW_3]
    pairs = [(name, getattr(new.buckets, name)) for name in names]
    return tuple(
        (_KEYS[name], value) for name, value in pairs if value != getattr(old.buckets, name) and value is not None
    )


def scheme_of(new: Levers, old: Levers) -> str | None:
    """What guides call this step: optimized, quantized, limit; None: they have no name for it."""
    if new.method == "qlora":
        if new.sequence < old.sequence and new.sequence <= SCHEME_TOKENS:
            return "limit"
        return "quantized" if old.method != "qlora" else None
    if new.engine == "zero3" and new.offload_param != "none" and old.offload_param == "none":
        return "optimized"
    return None


def file_of(foreign: Foreign) -> Path | None:
    """The file that a plan for this training would begin with."""
    return foreign.settings.path if foreign.is_llamafactory and foreign.settings is not None else None
