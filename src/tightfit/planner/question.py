"""What is asked of the search, and how far a prediction is from fitting.

A floor is what a way holds at the loss alone, for a fraction of the price: what does not fit by its floor does not fit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from math import ceil, floor

from tightfit.memory import estimate, floor_bytes
from tightfit.memory.overhead import ALLOCATOR_SLACK, beside
from tightfit.planner.calibration import Calibration, Correction, Place, corrected, phase_bytes
from tightfit.planner.candidates import Pinned
from tightfit.planner.plan import Bounds
from tightfit.types import Footprint, Hardware, Levers, Lora, ModelShape, PhaseName

AT_ANY_DEPTH: tuple[PhaseName, ...] = ("init", "step", "save")
"""The phases of the GPU that hold the same however many layers recompute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cap:
    """What may be held in one phase, beside what card and host have: see `phase_bytes`."""

    where: Place
    phase: PhaseName | None
    most_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked of the search."""

    shape: ModelShape
    base: Levers
    """The user's training; the free levers that are pinned have their values here."""
    pinned: Pinned
    hardware: Hardware
    effective_batch: int
    margin: float
    adapters: Lora = field(default_factory=Lora)
    """What LoRA would be, should full training be allowed to become that."""
    partial: bool = True
    """Some layers may recompute while others do not, as our own worker can; other trainers know all or none."""
    engines: frozenset[str] | None = None
    """Those that can be started; None: any."""
    every_gpu: bool = False
    """No way that leaves GPUs idle."""
    calibration: Calibration | None = None
    """What earlier runs have taught; None: predictions are taken as they are."""
    caps: tuple[Cap, ...] = ()
    """What a plan has to stay below, since another one failed above it."""

    def within(self, bounds: Bounds) -> Question:
        return replace(
            self,
            partial=bounds.partial,
            engines=bounds.engines,
            every_gpu=self.every_gpu or bounds.every_gpu,
            calibration=bounds.calibration,
        )

    @property
    def ours(self) -> bool:
        """Our own worker runs it, and saves it."""
        return self.partial

    @property
    def gpu_limit_bytes(self) -> int:
        return int(self.hardware.gpu.memory_bytes * (1 - self.margin))

    @property
    def steady_caps(self) -> tuple[Cap, ...]:
        """Those of which no depth of checkpointing is any nearer."""
        aside = self.hardware.gpu.vendor != "cpu"
        return tuple(cap for cap in self.caps if cap.phase in AT_ANY_DEPTH or (cap.where == "host" and aside))


def weigh(question: Question, levers: Levers) -> Footprint:
    """What is predicted for these levers, with what earlier runs have taught."""
    footprint = estimate(question.shape, levers, question.hardware.world, question.hardware)
    correction = correction_of(question, levers)
    return footprint if correction is None else corrected(footprint, correction, question.hardware)


def correction_of(question: Question, levers: Levers) -> Correction | None:
    known = question.calibration
    return None if known is None else known.correction(question.shape, levers, question.hardware)


def excess_bytes(question: Question, footprint: Footprint) -> int:
    """How far a footprint is from fitting: the sum of what is missing on the GPU, in RAM and on NVMe; 0: it fits."""
    gpu = max(0, needed_bytes(footprint, question.hardware) - question.gpu_limit_bytes)
    return gpu + _host_excess_bytes(question, footprint) + sum(_over_caps(question, footprint, question.caps))


def _over_caps(question: Question, footprint: Footprint, caps: Iterable[Cap]) -> Iterator[int]:
    for cap in caps:
        yield max(0, phase_bytes(footprint, cap.where, cap.phase, question.hardware) - cap.most_bytes)


def excess_share(question: Question, footprint: Footprint) -> float:
    """The same as a share of what there is, of that which is shortest: a GiB of the GPU is not one of the host."""
    hardware, host = question.hardware, footprint.host
    missing = (
        (needed_bytes(footprint, hardware), question.gpu_limit_bytes),
        (host.peak_bytes_per_node, hardware.host_ram_bytes),
        (host.nvme_bytes_per_node, hardware.nvme_bytes),
        *((phase_bytes(footprint, cap.where, cap.phase, hardware), cap.most_bytes) for cap in question.caps),
    )
    return max(_over(need, have) / max(have or 1, 1) for need, have in missing)


def _host_excess_bytes(question: Question, footprint: Footprint) -> int:
    hardware, host = question.hardware, footprint.host
    return _over(host.peak_bytes_per_node, hardware.host_ram_bytes) + _over(
        host.nvme_bytes_per_node, hardware.nvme_bytes
    )


def is_hopeless(question: Question, footprint: Footprint) -> bool:
    """Too much on the host, while the model is built, or at the optimizer's step: no depth of checkpointing changes
    these, except that offloading adds to the host."""
    hardware, gpu = question.hardware, footprint.gpu
    if any(_over_caps(question, footprint, question.steady_caps)):
        return True
    if _host_excess_bytes(question, footprint) or _required(gpu.init_peak_bytes, hardware) > hardware.gpu.memory_bytes:
        return True
    return _required(gpu.phases["step"].total_bytes, hardware) > question.gpu_limit_bytes


def _required(held: int, hardware: Hardware) -> int:
    return held + sum(beside(held, hardware.world).values())


def _over(need: int, have: int | None) -> int:
    return 0 if have is None else max(0, need - have)


def needed_bytes(footprint: Footprint, hardware: Hardware) -> int:
    """What must stay within the card less its margin.

    The margin is for the steps: building the model is the same every time, and must fit the card alone. Where even
    that does not, it is what counts.
    """
    gpu = footprint.gpu
    if gpu.init_peak_bytes <= gpu.peak_bytes or gpu.required_bytes > hardware.gpu.memory_bytes:
        return gpu.required_bytes
    return _required(gpu.peak_bytes, hardware)


def floor_excess(question: Question, levers: Levers, *, replayed: bool = False) -> int:
    """How far what is held at the loss is from fitting: never more than the excess of all."""
    least = floor_bytes(question.shape, levers, question.hardware, replayed=replayed)
    correction = correction_of(question, levers)
    taken = 0 if correction is None else correction.most_taken_bytes
    over = max(0, least - ceil(taken * (1 + ALLOCATOR_SLACK)) - question.gpu_limit_bytes)
    if question.caps:
        held = floor((least - _required(0, question.hardware)) / (1 + ALLOCATOR_SLACK)) - taken
        capped = (cap.most_bytes for cap in question.caps if cap.where == "gpu" and cap.phase in (None, "loss"))
        over += sum(max(0, held - most) for most in capped)
    return over
