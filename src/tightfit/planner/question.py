"""What is asked of the search, and how far a prediction is from fitting.

A floor is what a way holds in any case, for a fraction of the price: what does not fit by its floor does not fit.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import ceil
from typing import NamedTuple

from tightfit.inputs.layouts import divisors
from tightfit.memory import Scale, Totals, estimate, required_bytes, totals_of
from tightfit.memory.overhead import ALLOCATOR_SLACK
from tightfit.planner.calibration import Calibration, Correction, Place, correct, phase_bytes
from tightfit.planner.candidates import Pinned
from tightfit.planner.plan import Bounds
from tightfit.planner.taught import teach
from tightfit.planner.trainers import Abilities
from tightfit.types import Checkpointing, Footprint, Hardware, Levers, Lora, ModelShape, PhaseName

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
    base: Levers  # the user's training; the free levers that are pinned have their values here
    pinned: Pinned
    hardware: Hardware
    effective_batch: int
    margin: float
    adapters: Lora = field(default_factory=Lora)  # what LoRA would be, should full training be allowed to become that
    trainer: Abilities = field(default_factory=Abilities)  # what the one can do that will run it
    partial: bool = True
    """Some layers may recompute while others do not, as our own worker can; other trainers know all or none."""
    engines: frozenset[str] | None = None  # those that can be started; None: any
    every_gpu: bool = False  # no way that leaves GPUs idle
    calibration: Calibration | None = None  # what earlier runs have taught; None: predictions are taken as they are
    caps: tuple[Cap, ...] = ()  # what a plan has to stay below, since another one failed above it

    def within(self, bounds: Bounds) -> Question:
        return replace(
            self,
            hardware=teach(self.hardware, bounds.calibration, self.shape, self.base),
            trainer=replace(
                self.trainer,
                llamafactory_version=bounds.llamafactory_version,
                has_liger=bounds.has_liger,
            ),
            partial=bounds.partial and self.trainer.is_ours,
            engines=bounds.engines,
            every_gpu=self.every_gpu or bounds.every_gpu,
            calibration=bounds.calibration,
        )

    @property
    def ours(self) -> bool:
        """Our own worker runs it, and saves it."""
        return self.partial

    @property
    def without_compiler(self) -> Question:
        return replace(self, base=replace(self.base, compile="off"), pinned=self.pinned | {"compile"})

    def splits_over(self, hardware: Hardware) -> bool:
        """Whether these GPUs, or groups that read the same samples, have as many sequences of the batch each; groups
        may be chosen, where it has fewer sequences than there are GPUs."""
        groups, left = divmod(hardware.world, self.base.ranks_per_sample)
        if left or self.effective_batch % groups == 0:
            return not left
        return self.effective_batch < groups and bool(self.sharing_sizes(hardware))

    def sharing_sizes(self, hardware: Hardware) -> list[int]:
        """How many neighbours in a node may read the same samples, so that the batch can be shared evenly."""
        stage, left = divmod(hardware.world, self.base.pipeline_parallel)
        if self.base.row_parts > 1 or left:
            return []
        sizes = [size for size in divisors(hardware.gpus_per_node) if stage % size == 0]
        return [size for size in sizes if self.effective_batch % (stage // size) == 0]

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
    return footprint if correction is None else correct(footprint, correction, question.hardware)


def correction_of(question: Question, levers: Levers) -> Correction | None:
    known = question.calibration
    return None if known is None else known.correction(question.shape, levers, question.hardware)


class Weight(NamedTuple):
    """What a search has to know of a prediction."""

    excess: int  # see `excess_bytes`
    share: float  # see `excess_share`
    is_hopeless: bool
    """Too much on the host, while the model is built, or at the optimizer's step: no depth of checkpointing changes
    these, except that offloading adds to the host."""
    required: int
    host: int


def weight_of(question: Question, scale: Scale, depth: Checkpointing) -> Weight:
    """Of one way at one depth. What is asked of single phases, or learned about them, takes the whole footprint."""
    if totals_tell(question):
        return _weight(question, scale.totals(depth), None)
    footprint = weigh(question, replace(scale.levers, checkpointing=depth))
    return _weight(question, totals_of(footprint), footprint)


def totals_tell(question: Question) -> bool:
    """Whether nothing is asked of single phases, or learned about them."""
    return not question.caps and (question.calibration is None or not question.calibration.entries)


def _weight(question: Question, totals: Totals, footprint: Footprint | None) -> Weight:
    hardware = question.hardware
    held = []
    if footprint:
        held = [(phase_bytes(footprint, cap.where, cap.phase, hardware), cap.most_bytes) for cap in question.caps]
    over = [_over(need, most) for need, most in held]
    steady = any(more and cap in question.steady_caps for cap, more in zip(question.caps, over, strict=False))
    on_host = _over(totals.host, hardware.host_ram_bytes) + _over(totals.nvme, hardware.nvme_bytes)
    hopeless = steady or on_host > 0 or totals.require(totals.init) > hardware.gpu.memory_bytes
    return Weight(
        excess=max(0, _required_bytes(totals, hardware) - question.gpu_limit_bytes) + on_host + sum(over),
        share=_share(totals, hardware, question.gpu_limit_bytes, held),
        is_hopeless=hopeless or totals.require(totals.step) > question.gpu_limit_bytes,
        required=totals.required,
        host=totals.host,
    )


def excess_bytes(question: Question, footprint: Footprint) -> int:
    """How far a footprint is from fitting: the sum of what is missing on the GPU, in RAM and on NVMe; 0: it fits."""
    return _weight(question, totals_of(footprint), footprint).excess


def excess_of(question: Question, totals: Totals) -> int:
    """The same, where totals tell."""
    return _weight(question, totals, None).excess


def excess_share(footprint: Footprint, hardware: Hardware, limit_bytes: int) -> float:
    """The same as a share of what there is, of that which is shortest: a GiB of the GPU is not one of the host."""
    return _share(totals_of(footprint), hardware, limit_bytes, [])


def _share(totals: Totals, hardware: Hardware, limit_bytes: int, capped: list[tuple[int, int]]) -> float:
    beside = ((totals.host, hardware.host_ram_bytes), (totals.nvme, hardware.nvme_bytes))
    missing = [(_required_bytes(totals, hardware), limit_bytes), *beside, *capped]
    return max([_over(need, have) / max(have or 1, 1) for need, have in missing])


def _over(need: int, have: int | None) -> int:
    return 0 if have is None else max(0, need - have)


def needed_bytes(footprint: Footprint, hardware: Hardware) -> int:
    """What must stay within the card less its margin. The margin is for the steps: building the model is the same every
    time, and must fit the card alone. Where even that does not, it is what counts."""
    return _required_bytes(totals_of(footprint), hardware)


def _required_bytes(totals: Totals, hardware: Hardware) -> int:
    if totals.init <= totals.peak or totals.required > hardware.gpu.memory_bytes:
        return totals.required
    return totals.require(totals.peak)


def least_weight(question: Question, scale: Scale, depth: Checkpointing, over: int) -> tuple[float, int]:
    """No less than this are the share and the excess of a way's weight. `over`: its `floor_excess`."""
    hardware, limit, steady = question.hardware, question.gpu_limit_bytes, scale.steady(depth)
    if question.caps or question.calibration is not None:
        return over / max(limit, 1), over
    building = required_bytes(steady.init, hardware, scale.levers.groups)
    if building > hardware.gpu.memory_bytes:
        over = max(over, building - limit)
    beside = [(steady.host, hardware.host_ram_bytes), (steady.nvme, hardware.nvme_bytes)]
    shares = [_over(need, have) / max(have or 1, 1) for need, have in beside]
    return max(over / max(limit, 1), *shares), over + sum([_over(need, have) for need, have in beside])


def floor_excess(question: Question, scale: Scale, depth: Checkpointing) -> int:
    """How far what is held in any case is from fitting: never more than the excess of all."""
    at_loss, at_top = scale.floor.held(depth)
    held = max(at_loss, at_top, scale.floor.after)
    taken = 0
    if question.calibration is not None and question.calibration.entries:
        correction = correction_of(question, replace(scale.levers, checkpointing=depth))
        taken = 0 if correction is None else correction.most_taken_bytes
    least = required_bytes(held, question.hardware, scale.levers.groups) - ceil(taken * (1 + ALLOCATOR_SLACK))
    over = max(0, least - question.gpu_limit_bytes)
    for cap in question.caps:
        capped = {None: held, "loss": at_loss, "backward": at_top}.get(cap.phase, 0) if cap.where == "gpu" else 0
        over += max(0, capped - taken - cap.most_bytes)
    return over
