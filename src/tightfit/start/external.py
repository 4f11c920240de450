"""What the memory model says about somebody else's training: before it starts, and after memory ran out."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import yaml

from tightfit.desk.plan import DEEPSPEED
from tightfit.diagnose.verdict import Verdict
from tightfit.formats.deepspeed import read as deepspeed_file
from tightfit.formats.llamafactory.read import llamafactory_job_from, to_levers
from tightfit.inputs.flags import LEVERS, flags_from_levers
from tightfit.inputs.surroundings import inherited
from tightfit.inputs.versions import choose_deepspeed
from tightfit.job import Adapters, Allowance, Job
from tightfit.job.text import read_job_text
from tightfit.job.training import OPTIMIZERS
from tightfit.memory import estimate
from tightfit.messages import Listing, Message, text
from tightfit.model.load import load_model
from tightfit.owned import replace_file
from tightfit.planner.calibration import COMPONENT, Calibration, Entry, correct
from tightfit.planner.plan import Bounds, Plan
from tightfit.planner.step_down import NoWay, Shortfall, StepDown, Tried, locate, step_down
from tightfit.priced import GIB, Priced, strategy_name, verdict
from tightfit.runs.calibration import learn_from_failure
from tightfit.runs.external.config import ExternalTraining, NextConfig, batch_of, knobs_of, ranks_of, visible_gpus
from tightfit.runs.external.process import MemoryPeak
from tightfit.runs.external.script import ACCUMULATION, MICRO
from tightfit.start.train import plan_as_it_is
from tightfit.types import STRATEGY, Checkpointing, Hardware, Levers, Mamba1, ModelShape, Precision, UserError

MODELS = (
    "model_name_or_path", "model", "model_name", "model_id", "base_model", "pretrained_model_name_or_path", "preset"
)  # fmt: skip
BATCHES = ("train_micro_batch_size_per_gpu", MICRO, "micro_batch_size", "batch_size")
ADAPTERS = ("use_lora", "use_peft", "lora_r", "lora_rank", "peft", "load_in_4bit", "load_in_8bit")
LENGTHS = (
    *("cutoff_len", "max_seq_length", "max_length", "block_size", "model_max_length", "seq_length", "max_seq_len"),
    "sequence_length",
)
PINS = ("loss", *(flag for flag, lever in LEVERS.items() if lever.kept))
"""What a config cannot be told to change without knowing which packages are installed there."""
BUCKETS = tuple(flag for flag, lever in LEVERS.items() if lever.block == "buckets")
_KEYS = {LEVERS[flag].name: LEVERS[flag].deepspeed for flag in BUCKETS} | {"sub_group_size": "sub_group_size"}
_BELOW_3 = tuple(flag for flag in BUCKETS if not LEVERS[flag].deepspeed.startswith("stage3_"))
SCHEME_TOKENS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownTraining:
    """A training whose memory can be predicted."""

    job: Job
    shape: ModelShape
    levers: Levers
    hardware: Hardware  # as much of it as the command uses
    calibration: Calibration | None = None  # what earlier runs have measured; None: it is not wanted
    assumed: tuple[str, ...] = ()  # what the command does not say, in sentences

    @property
    def priced(self) -> Priced:
        footprint = estimate(self.shape, self.levers, self.hardware.world, self.hardware)
        if self.calibration is not None:
            found = self.calibration.correction(self.shape, self.levers, self.hardware)
            footprint = correct(footprint, found, self.hardware)
        return Priced(
            shape=self.shape, levers=self.levers, world=self.hardware.world, hardware=self.hardware, footprint=footprint
        )

    @property
    def plan(self) -> Plan:
        """What runs now, as a plan."""
        priced = self.priced
        return plan_as_it_is(self.job, self.shape, self.levers, self.hardware, priced.footprint, fits=bool(priced.fits))


def _environment(external: ExternalTraining) -> Mapping[str, str]:
    return inherited({**external.command.variables, **external.environment})


def machine_of(external: ExternalTraining, hardware: Hardware) -> Hardware:
    """As many of the machines and GPUs as the command takes."""
    ranks = ranks_of(external, hardware, _environment(external))
    return replace(hardware, nodes=ranks.machines, gpus_per_node=ranks.on_each)


def _why_unpriced(external: ExternalTraining, hardware: Hardware) -> str | None:
    """Why the memory model does not know such a training."""
    accelerate = external.accelerate.values if external.accelerate is not None else {}
    kind = accelerate.get("distributed_type")
    sharded = external.command.launcher_flag("use_fsdp") is not None or bool(external.said("fsdp", "fsdp_config"))
    if kind == "FSDP" or sharded:
        return text("cli.fsdp-accelerate-sets")
    if kind in ("MEGATRON_LM", "XLA") or external.command.launcher_flag("use_megatron_lm", "tpu") is not None:
        return text("cli.not-priced", value=kind or "Megatron")
    if external.command.launcher_flag("use_deepspeed", "zero_stage") is not None and external.deepspeed is None:
        return text("cli.deepspeed-set-up")
    if (trainer := external.script.preference_trainer) is not None:
        return text("cli.holds-more-than", trainer=trainer)
    if external.command.launcher == "trl" or external.script.is_trl:
        return text("cli.trl-chooses-dtype")
    several = external.command.starter == "python" and hardware.gpus_per_node > 1
    if not several or not external.script.is_hugging_face or external.deepspeed is not None:
        return None
    many = visible_gpus(hardware, _environment(external))
    return text("cli.plain-python-gpus", many=many) if many > 1 else None


def _read_llamafactory(external: ExternalTraining, machine: Hardware) -> tuple[Job, ModelShape, Levers] | str:
    """Its YAML with what the command line says instead, as LLaMA-Factory merges the two."""
    values = dict(external.settings.values) if external.settings is not None else {}
    values |= {flag.name: external.said(flag.name) for flag in external.command.flags}
    if external.deepspeed is not None:
        values["deepspeed"] = str(external.deepspeed.path.absolute())
    if _mixed_precision(external) in ("bf16", "fp16") and not {"bf16", "fp16", "pure_bf16"} & set(values):
        values[str(_mixed_precision(external))] = True
    name = external.settings.path.name if external.settings is not None else text("cli.command-line")
    with tempfile.TemporaryDirectory(prefix="tightfit-") as folder:
        path = Path(folder) / name
        replace_file(path, yaml.safe_dump(values, sort_keys=False).encode())
        said = llamafactory_job_from(read_job_text(path), None)
    shape = load_model(said.settings.model)
    levers = to_levers(said.settings, shape.n_layers, choose_deepspeed(machine)[0])
    return replace(said.job, trainer="llamafactory"), shape, _with_engine(external, levers, shape, machine)


def _mixed_precision(external: ExternalTraining) -> object:
    """What accelerate is told, which counts where the trainer is told nothing."""
    flag = external.command.launcher_flag("mixed_precision")
    if flag is not None:
        return flag.value
    return external.accelerate.values.get("mixed_precision") if external.accelerate is not None else None


def _with_engine(external: ExternalTraining, levers: Levers, shape: ModelShape, machine: Hardware) -> Levers:
    """The levers under the DeepSpeed file that is named, or the block of it in accelerate's YAML."""
    now = knobs_of(external)
    if external.deepspeed is not None:
        settings = deepspeed_file.read_deepspeed(
            external.deepspeed.path, hidden_size=shape.hidden_size, version=levers.deepspeed_version
        )
        return deepspeed_file.to_levers(settings, levers, world=machine.world)
    if now.stage is None:
        return levers
    return replace(
        levers,
        engine=f"zero{now.stage}",  # type: ignore[arg-type]
        offload_optimizer=now.offload_optimizer,  # type: ignore[arg-type]
        offload_param=now.offload_param,  # type: ignore[arg-type]
    )


T = TypeVar("T", str, int)


def _first(external: ExternalTraining, names: Iterable[str], kind: type[T]) -> T | None:
    """The first of these settings that is said: by the command, else in a config that the script reads itself."""
    for name in names:
        if isinstance(value := external.said(name), kind) and not isinstance(value, bool):
            return value
    hints: Mapping[str, Any] = external.hints.values if external.hints is not None else {}
    blocks = [hints, *(block for block in hints.values() if isinstance(block, dict))]
    found = (block[name] for name in names for block in blocks if name in block)
    return next((value for value in found if isinstance(value, kind) and not isinstance(value, bool)), None)


def prediction(known: KnownTraining) -> str:
    """One line: whether it fits, and where it is highest."""
    priced = known.priced
    gpu, levers = priced.footprint.gpu, known.levers
    batch = {"micro_batch": levers.micro_batch, "accumulation": levers.accumulation}
    where = text("cli.micro-batch", levers=strategy_name(levers), **batch)
    added = gpu.phases[gpu.peak_phase].components.get(COMPONENT, 0)
    measured = text("cli.earlier-runs-held", added=added / GIB) if added > 0 else ""
    said = text("cli.peak-phase", priced=verdict(priced), peak_phase=gpu.peak_phase, where=where, measured=measured)
    return " ".join((said, *known.assumed))


@dataclass(kw_only=True)
class Planner:
    """The next way by prices, for as long as the model is known."""

    hardware: Hardware
    allow: tuple[Allowance, ...] = ()
    calibration: Calibration | None = None
    """What earlier runs and attempts have measured; None: nothing is learned or used."""
    keep: Callable[[Entry], object] = lambda entry: None  # writes down what was learned
    wait: Callable[[int | None, int, Callable[[], bool]], bool] | None = None
    """Waits for room on the GPUs; None: nobody asked for that."""
    model: str | None = None
    """This, the sequence and the micro batch: what the user says of a command that does not say it itself."""
    sequence: int | None = None
    micro_batch: int | None = None

    def __post_init__(self) -> None:
        self._tried: list[Tried] = []
        self._last: Tried | None = None

    def known(self, external: ExternalTraining) -> KnownTraining | str:
        """The training in our words; or what is missing, in a sentence."""
        try:
            machine = machine_of(external, self.hardware)
            if (reason := _why_unpriced(external, self.hardware)) is not None:
                return text("cli.not-predicted", reason=reason)
            found = (_read_llamafactory if external.is_llamafactory else self._read_script)(external, machine)
            if isinstance(found, str):
                return text("cli.nothing-predicted-2", found=found)
            job, shape, levers = found
            pins = {name: value for name, value in flags_from_levers(levers).items() if name in PINS}
            pins["deepspeed_version"] = levers.deepspeed_version
            batch = levers.micro_batch * levers.accumulation * machine.world
            job = replace(job, levers=pins, effective_batch=batch, limits=replace(job.limits, allow=self.allow))
            scans = any(isinstance(block.mixer, Mamba1) for block in shape.blocks)
            unsaid = scans and not external.script.mentions("mamba_ssm")
            assumed = (text("cli.scan-taken-hold", name=external.name),) if unsaid else ()
            known = KnownTraining(job=job, shape=shape, levers=levers, hardware=machine, assumed=assumed)
            return replace(known, calibration=self.calibration)
        except UserError as error:
            return text("cli.nothing-predicted-3", error=error)

    def _read_script(self, external: ExternalTraining, machine: Hardware) -> tuple[Job, ModelShape, Levers] | str:
        """A script with the usual flags: transformers' own, and the usual names of model and length."""
        model = self.model or _first(external, MODELS, str)
        if model is None:
            return text("cli.command-does-say")
        length = self.sequence or _first(external, LENGTHS, int)
        if length is None:
            return text("cli.command-does-say-2")
        if any(external.said(name) for name in ADAPTERS):
            return text("cli.script-trains-adapters")
        now, batch = knobs_of(external), batch_of(external)
        in_file = external.deepspeed.values if external.deepspeed is not None else {}
        micro = self.micro_batch or batch.micro or _first(external, BATCHES, int)
        if micro is None and not isinstance(in_file.get("train_micro_batch_size_per_gpu"), int):
            return text("cli.micro-batch-known", because=batch.because)
        optimizer = external.said("optim") or "adamw_torch"
        if optimizer not in OPTIMIZERS:
            return text("cli.optim-priced", optimizer=optimizer)
        shape = load_model(model)
        accelerates = _mixed_precision(external)
        precision: Precision = accelerates if accelerates in ("bf16", "fp16") else "fp32"
        precision = "bf16" if external.said("bf16") is True else "fp16" if external.said("fp16") is True else precision
        levers = Levers(
            sequence=length,
            micro_batch=micro or 1,
            accumulation=batch.accumulation or _first(external, (ACCUMULATION,), int) or 1,
            precision=precision,
            optimizer=OPTIMIZERS[optimizer],
            loss="fused" if external.said("use_liger_kernel") is True else "plain",
            checkpointing=Checkpointing(layers=None if now.checkpointing else 0),
            deepspeed_version=choose_deepspeed(machine)[0],
        )
        levers = _with_engine(external, levers, shape, machine)
        if self.micro_batch is not None:
            levers = replace(levers, micro_batch=self.micro_batch)
        job = Job(model=model, sequence=length, precision=levers.precision, lora=Adapters())
        return job, shape, levers

    def warning(self, external: ExternalTraining) -> str | None:
        """One process with a DeepSpeed file on a machine with several GPUs: it shards nothing."""
        alone = external.command.starter == "python" and not external.script.starts_processes
        if not alone or external.deepspeed is None or self.hardware.gpu.vendor == "cpu":
            return None
        many = visible_gpus(self.hardware, _environment(external))
        if many < 2 or external.command.script is None:
            return None
        words = " ".join(external.command.words[external.command.script_at - 1 :])
        return text("cli.python-starts-one", many=many - 1, many2=many, words=words)

    def learn(self, external: ExternalTraining, peak: MemoryPeak) -> None:
        """More than was predicted is a lesson. Less is none: the longest samples may not have come, and what a program
        holds is looked at from time to time only."""
        known = self.known(external)
        if self.calibration is None or isinstance(known, str) or not peak.own_bytes:
            return
        gpu = known.priced.footprint.gpu
        held = peak.own_bytes - sum(gpu.overhead.values())
        self._learn(learn_from_failure(known.plan, Shortfall(where="gpu", phase=gpu.peak_phase), held))

    def _learn(self, entry: Entry | None, *, failed: bool = False) -> None:
        known = self.calibration
        if entry is not None and known is not None:
            self.calibration = known.after_failure(entry) if failed else known.with_entry(entry)
            self.keep(entry)

    def wait_for_room(self, external: ExternalTraining, give_up: Callable[[], bool]) -> bool:
        if self.wait is None:
            return False
        known = self.known(external)
        need = None if isinstance(known, str) else known.priced.footprint.gpu.required_bytes
        return self.wait(need, machine_of(external, self.hardware).gpus_per_node, give_up)

    def smaller(
        self, external: ExternalTraining, shortfall: Shortfall, verdict: Verdict, *, same_engine: bool
    ) -> NextConfig | None:
        known = self.known(external)
        if isinstance(known, str):
            return None
        now = known.plan
        assert now.chosen is not None
        shortfall = locate(shortfall, now.chosen)
        if (numbers := verdict.oom) is not None and numbers.allocated is not None and numbers.asked is not None:
            self._learn(learn_from_failure(now, shortfall, numbers.allocated + numbers.asked), failed=True)
            known = replace(known, calibration=self.calibration)
        # What this command could start with another config, on as many GPUs as it takes now.
        engines: frozenset[str] = DEEPSPEED if known.levers.engine == "zero0" else DEEPSPEED - {"zero0"}
        if external.deepspeed is None and not external.accelerate:
            adds = external.is_llamafactory and known.hardware.world > 1
            engines = DEEPSPEED if adds else frozenset({known.levers.engine})
        bounds = Bounds(partial=False, engines=engines, every_gpu=True, calibration=known.calibration, advice=False)
        for job in _tries(known, same_engine=same_engine):
            last = replace(known, job=job).plan
            assert last.chosen is not None
            try:
                found = step_down(last, shortfall, bounds=bounds, before=tuple(self._tried))
            except UserError:  # pins that this batch or this engine cannot have
                continue
            step = None if isinstance(found, NoWay) else _step(external, known, found)
            if step is not None:
                self._last = Tried(way=last.chosen, shortfall=shortfall)
                return step
        return None

    def took(self, step: NextConfig) -> None:
        self._tried += [] if self._last is None else [self._last]
        self._last = None


def _tries(known: KnownTraining, *, same_engine: bool) -> Iterator[Job]:
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

    yield from (pinned(free, size, (*STRATEGY, *BUCKETS)) for size in sizes)
    if same_engine:
        if "shorter-seq" in allowed:
            only = replace(job, limits=replace(job.limits, allow=("shorter-seq",)))
            yield pinned(only, sizes[-1], (*STRATEGY, *BUCKETS))
        return
    yield from (pinned(free, size, BUCKETS) for size in sizes)
    yield pinned(free, sizes[-1], ())
    if allowed:
        yield pinned(job, sizes[-1], ())


def _step(external: ExternalTraining, known: KnownTraining, found: StepDown) -> NextConfig | None:
    way = found.plan.chosen
    assert way is not None
    old, new, now = known.levers, way.levers, knobs_of(external)
    if new.checkpointing.offload:  # Unsloth's, which nobody has run here
        return None
    if now.micro_batch is None and (new.micro_batch, new.accumulation) != (old.micro_batch, old.accumulation):
        return None  # a batch that is not known is never changed
    same = (new.lora, new.optimizer, new.precision) == (old.lora, old.optimizer, old.precision)
    if not same or way.shape is not known.shape:
        return None
    moved = new.stage != (now.stage or 0) or (new.offload_optimizer, new.offload_param) != (
        old.offload_optimizer, old.offload_param
    )  # fmt: skip
    knobs = replace(
        now,
        stage=new.stage if moved else now.stage,
        offload_optimizer=new.offload_optimizer if moved else now.offload_optimizer,
        offload_param=new.offload_param if moved else now.offload_param,
        pin_memory=False if old.buckets.pin_memory and not new.buckets.pin_memory else now.pin_memory,
        micro_batch=now.micro_batch and new.micro_batch,
        accumulation=now.accumulation and new.accumulation,
        checkpointing=new.checkpointing.layers != 0 if now.checkpointing is not None else None,
        quantised=new.method == "qlora" if now.quantised is not None else None,
        sequence=new.sequence if now.sequence is not None else None,
        buckets=tuple(
            (key, value)
            for name, key in _KEYS.items()
            if new.engine != "zero0" and (new.stage == 3 or name in _BELOW_3)
            if (value := getattr(new.buckets, name)) not in (None, getattr(old.buckets, name))
        ),
    )
    reasons = [said for said in found.because if said.id != "plan.what-changes"]
    scheme = scheme_of(new, old)
    return NextConfig(
        knobs=knobs,
        changed=(*found.changed, *((Message("cli.scheme", scheme=scheme),) if scheme else ())),
        because=Message("runs.several", parts=Listing(reasons, ".")),
        crosses=moved or new.method != old.method,
        costs=tuple(way.changes),
    )


def scheme_of(new: Levers, old: Levers) -> str | None:
    """What guides call this step: optimized, quantized, limit; None: they have no name for it."""
    if new.method == "qlora":
        if new.sequence < old.sequence and new.sequence <= SCHEME_TOKENS:
            return "limit"
        return "quantized" if old.method != "qlora" else None
    if new.stage == 3 and new.offload_param != "none" and old.offload_param == "none":
        return "optimized"
    return None
