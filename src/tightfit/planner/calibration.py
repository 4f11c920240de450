"""What earlier runs measured, against what was predicted for them: data, and how it corrects a prediction.

An entry belongs to a *training* (model, card, method, precision, optimizer) that ran in one *way* (engine, offload,
kind of checkpointing). Its error is what was measured less what was predicted, phase by phase. A phase that was not
measured has the error of the largest one that was; building the model stands alone, since it says nothing about the
steps, nor they about it.

How an error is used:

- What was measured above the prediction counts in full for the same training in the same way.
- It counts for the same training in other ways too, the newest entry's: otherwise every way that was never tried would
  look better than those that were.
- What was measured below the prediction counts only for the same training in the same way on the same data and
  sequence: shorter samples take less, and longer ones will not. And a candidate that is smaller than the run was gets
  its share of it only, as what was not there may belong to what the candidate has less of.
- On the host only more than predicted counts, and only in the same way: a process's resident memory leaves out what the
  driver has locked for it, so less proves nothing.

- What is off by more than half of the prediction counts when a second run has measured it so. A single one may have
  shared its card with something that nobody saw; only the rescue from an out of memory takes it as it is.

Errors are bytes and not factors: what a model of memory misses is a buffer, and most buffers keep their size when the
micro batch changes. A correction is a component of its own in each phase, so that what was predicted without it can
still be told, and the next error is not measured against a corrected prediction.

Runs have measured seconds as well. What is kept of them stands here, and `taught.py` has what they say about a machine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import log
from typing import Literal

from tightfit.job import Job
from tightfit.memory import sum_up
from tightfit.memory.overhead import COMMUNICATOR_BYTES, reasons
from tightfit.types import STRATEGY, Footprint, Hardware, Levers, ModelShape, Phase, PhaseName

COMPONENT = "measured_error"
"""The component of a phase that a calibration adds; negative where less was measured than predicted."""

NOISE_BYTES = 2**26
"""An error below this is none: it is what blocks of an allocator round up to, and nobody would plan otherwise."""

Place = Literal["gpu", "host"]
Recomputes = Literal["none", "some", "offload"]
"""What of checkpointing an error depends on. How many layers recompute does not matter: the search asks for one depth
after another, and their order must not change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What must be alike for a measured error to say anything."""

    shape: str  # see `shape_mark`
    gpu: str  # the card's name
    method: str
    precision: str
    optimizer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WayMark:
    """What must be alike for it to count in full."""

    engine: str
    offload_optimizer: str
    offload_param: str
    checkpointing: Recomputes


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPhase:
    """One phase of one run."""

    where: Place  # on the GPU; or on the host, of one rank
    phase: PhaseName
    predicted_bytes: int  # without any calibration
    measured_bytes: int  # of PyTorch's tensors; on the host, resident
    runs: int = 1  # how many in a row have found it so far off

    @property
    def error_bytes(self) -> int:
        return self.measured_bytes - self.predicted_bytes

    @property
    def counts(self) -> bool:
        return self.runs > 1 or not self.is_wild

    @property
    def is_wild(self) -> bool:
        """Whether it is off by more than half of the prediction."""
        return abs(self.error_bytes) > max(NOISE_BYTES, self.predicted_bytes // 2)

    def after(self, old: MeasuredPhase | None) -> MeasuredPhase:
        """The same, when another run has measured this before."""
        again = old is not None and old.is_wild and self.is_wild and (old.error_bytes > 0) == (self.error_bytes > 0)
        return replace(self, runs=old.runs + 1) if again and old is not None else self


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What one run has taught."""

    training: Training
    way: WayMark
    data: str  # see `data_mark`
    sequence: int
    day: str  # `2026-07-01`
    measured: tuple[MeasuredPhase, ...]

    def of(self, where: Place, phase: PhaseName) -> MeasuredPhase | None:
        """What was measured of this phase, or else of the largest one."""
        here = [each for each in self.measured if each.where == where]
        for each in here:
            if each.phase == phase:
                return each
        steps = [each for each in here if each.phase != "init"]
        return None if phase == "init" else max(steps, key=lambda each: each.measured_bytes, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedShare:
    """What of a step hangs on one rate."""

    rate: str
    spread: float  # of the rate, without what any run has taught
    slower_s: float  # the seconds that hang on it where it is slower than believed
    faster_s: float  # likewise where it is faster: what then runs beside something longer saves nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedRun:
    """How long a step of one run took."""

    machine: str  # see `taught.machine_mark`
    training: Training
    way: WayMark
    day: str
    predicted_s: float  # without what any run has taught
    measured_s: float  # in the median
    shares: tuple[TimedShare, ...]
    runs: int = 1  # how many in a row have found it so far off

    @property
    def counts(self) -> bool:
        return self.runs > 1 or not self.is_wild

    @property
    def is_wild(self) -> bool:
        """Whether it is off by more than twice, either way."""
        return abs(self.error) > log(2)

    @property
    def error(self) -> float:
        return log(self.measured_s / self.predicted_s)

    def after(self, old: TimedRun | None) -> TimedRun:
        """The same, when another run has measured this before."""
        again = old is not None and old.is_wild and self.is_wild and (old.error > 0) == (self.error > 0)
        return replace(self, runs=old.runs + 1) if again and old is not None else self


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """An entry as it applies to one candidate."""

    entry: Entry
    same_way: bool
    same_data: bool

    def error_bytes(self, where: Place, phase: PhaseName, predicted_bytes: int) -> int:
        """What to add to a prediction; negative: to take from it."""
        found = self.entry.of(where, phase)
        if found is None or not found.counts or (where == "host" and not self.same_way):
            return 0
        error = found.error_bytes
        if error >= 0 or -error < NOISE_BYTES:
            return error if error >= NOISE_BYTES else 0
        if where == "host" or not (self.same_way and self.same_data):
            return 0
        share = min(1.0, predicted_bytes / found.predicted_bytes)
        return max(int(error * share), -predicted_bytes)

    @property
    def most_taken_bytes(self) -> int:
        """No phase of the GPU is corrected downwards by more than this."""
        if not (self.same_way and self.same_data):
            return 0
        return max((0, *(-each.error_bytes for each in self.entry.measured if each.where == "gpu" and each.counts)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """All that is known, the newest last."""

    entries: tuple[Entry, ...] = ()
    data: str | None = None
    """The mark of the data that is planned for; None: not known, so nothing is taken from any prediction."""
    failed: Entry | None = None
    """What the run that is being rescued has just measured. Nobody knows what it was, so it counts for this model's
    other trainings too: with 4-bit weights, say, it would otherwise seem to be gone."""
    timed: tuple[TimedRun, ...] = ()
    processor: str = ""
    """Of the machine that is planned on: it decides how fast a host launches and steps, so a run beside another one
    says nothing."""

    def correction(self, shape: ModelShape, levers: Levers, hardware: Hardware) -> Correction | None:
        """What applies to this candidate; None: nothing."""
        if not self.entries:
            return None
        training, way = training_of(shape, levers, hardware), way_mark(levers)
        mark = training.shape  # told apart by one word first: this is asked for every candidate
        about = [entry for entry in self.entries if entry.training.shape == mark and entry.training == training]
        for entry in reversed(about):
            if entry.way == way:
                same = entry.data == self.data and entry.sequence == levers.sequence
                return Correction(entry=entry, same_way=True, same_data=same)
        failed = self.failed
        if not about and failed is not None and (failed.training.shape, failed.training.gpu) == (mark, training.gpu):
            about = [failed]
        return Correction(entry=about[-1], same_way=False, same_data=False) if about else None

    def after_failure(self, entry: Entry | None) -> Calibration:
        """The same for the step down from a failure that has taught this."""
        if entry is None:
            return self
        sure = replace(entry, measured=tuple(replace(each, runs=2) for each in entry.measured))
        return replace(self.with_entry(sure), failed=sure)

    def with_entry(self, entry: Entry | None) -> Calibration:
        """The same with what was just learned: one entry a training and way, whose phases have their newest figures."""
        if entry is None:
            return self
        alike = [old for old in self.entries if (old.training, old.way) == (entry.training, entry.way)]
        others = tuple(old for old in self.entries if old not in alike)
        phases = {(each.where, each.phase) for each in entry.measured}
        before = {(each.where, each.phase): each for old in alike for each in old.measured}
        measured = tuple(each.after(before.get((each.where, each.phase))) for each in entry.measured)
        same = [old for old in alike if (old.data, old.sequence) == (entry.data, entry.sequence)]
        kept = [each for old in same for each in old.measured if (each.where, each.phase) not in phases]
        return replace(self, entries=(*others, replace(entry, measured=(*kept, *measured))))

    def with_timed(self, run: TimedRun | None) -> Calibration:
        """Likewise with how long its steps took: one run a machine, training and way."""
        if run is None:
            return self
        key = (run.machine, run.training, run.way)
        alike = [old for old in self.timed if (old.machine, old.training, old.way) == key]
        others = tuple(old for old in self.timed if old not in alike)
        return replace(self, timed=(*others, run.after(alike[-1] if alike else None)))


def training_of(shape: ModelShape, levers: Levers, hardware: Hardware) -> Training:
    """What an entry for this candidate would belong to."""
    return Training(
        shape=shape_mark(shape),
        gpu=hardware.gpu.name,
        method=levers.method,
        precision=levers.precision if levers.master_weights else f"pure {levers.precision}",
        optimizer=levers.optimizer,
    )


def way_mark(levers: Levers) -> WayMark:
    depth = levers.checkpointing
    recomputes: Recomputes = "offload" if depth.offload else "none" if depth.layers == 0 else "some"
    return WayMark(**{name: getattr(levers, name) for name in STRATEGY}, checkpointing=recomputes)


@lru_cache(maxsize=256)
def shape_mark(shape: ModelShape) -> str:
    """The same for every model of this shape, whatever it is called."""
    parts = (shape.model_type, shape.hidden_size, shape.vocab_size, shape.pattern, shape.tied, shape.final_norm)
    flags = (shape.embedding_scale, shape.final_softcap)
    return mark(repr((*parts, *flags, shape.blocks, shape.before, shape.after)))


def data_mark(job: Job) -> str:
    """What the length of the samples depends on, as far as the job says it."""
    reads = job.model if job.data.tokenizer is None else ""
    return mark(repr((replace(job.data, samples=None), job.max_samples, reads)))


def mark(text: str) -> str:
    """A short name for what would be long to compare."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def correct(footprint: Footprint, correction: Correction | None, hardware: Hardware) -> Footprint:
    """The footprint with this correction in place of any other; None: with none."""
    every = (*footprint.gpu.phases.values(), *footprint.host.phases.values())
    if correction is None and not any(COMPONENT in phase.components for phase in every):
        return footprint
    gpu = _phases(footprint.gpu.phases, "gpu", correction)
    host = _phases(footprint.host.phases, "host", correction)
    nvme = footprint.host.nvme_bytes_per_node // _ranks(hardware)
    groups = max(1, footprint.gpu.overhead["communicator"] // COMMUNICATOR_BYTES)
    on_gpu, on_host = sum_up(gpu, host, hardware.world, hardware, nvme, groups)
    # what its phases decide of what was said is said anew
    old = reasons(footprint.gpu.phases, footprint.gpu.peak_phase)
    kept = tuple(sentence for sentence in footprint.because if sentence not in old)
    return replace(footprint, gpu=on_gpu, host=on_host, because=reasons(gpu, on_gpu.peak_phase, kept))


def _phases(phases: Mapping[PhaseName, Phase], where: Place, correction: Correction | None) -> dict[PhaseName, Phase]:
    made: dict[PhaseName, Phase] = {}
    for name, phase in phases.items():
        parts = {part: size for part, size in phase.components.items() if part != COMPONENT}
        error = 0 if correction is None else correction.error_bytes(where, name, sum(parts.values()))
        made[name] = Phase(name, {**parts, COMPONENT: error} if error else parts)
    return made


def uncorrected_bytes(phase: Phase) -> int:
    """What was predicted for a phase without any calibration."""
    return phase.total_bytes - phase.components.get(COMPONENT, 0)


def phase_bytes(footprint: Footprint, where: Place, phase: PhaseName | None, hardware: Hardware) -> int:
    """What is held in a phase on one GPU, or on the host by all ranks of a node; None: at the highest of all peaks.
    Where the CPU stands in for GPUs, its RAM holds what they would."""
    gpu, host = footprint.gpu, footprint.host
    on_gpu = gpu.phases[phase].total_bytes if phase else max(gpu.peak_bytes, gpu.init_peak_bytes)
    if where == "gpu":
        return on_gpu
    steady = host.phases.get(phase, host.phases["step"]).total_bytes if phase else host.peak_bytes_per_rank
    return _ranks(hardware) * (steady + (on_gpu if hardware.gpu.vendor == "cpu" else 0))


def _ranks(hardware: Hardware) -> int:
    """Of one node."""
    return min(hardware.world, hardware.gpus_per_node)
