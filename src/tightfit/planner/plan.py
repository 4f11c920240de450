"""What a search hands back: ways to run one job, and the one that was chosen. Data only."""

from __future__ import annotations

from dataclasses import dataclass

from tightfit.inputs.versions import LLAMAFACTORY_VERSION
from tightfit.job import Allowance, Job
from tightfit.messages import Message, Said
from tightfit.pace.failures import FailureCosts
from tightfit.planner.calibration import Calibration, Correction
from tightfit.priced import why_no_pace
from tightfit.types import Footprint, Hardware, Levers, ModelShape, Pace


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to run the job: levers on a number of GPUs, with both prices."""

    shape: ModelShape  # the job's model, or the smaller one that was allowed
    levers: Levers
    hardware: Hardware  # the part of the hardware that is used
    footprint: Footprint
    pace: Pace
    fits: bool  # within the card less its margin, the host's RAM and the NVMe
    gpu_limit_bytes: int  # what may be used of each card: its size less the margin
    because: tuple[Said, ...] = ()
    changes: tuple[Said, ...] = ()  # what it changes in the result of the training; empty: nothing
    is_as_fast: bool = False  # as the chosen way, within what is known: see `certainty.py`
    skips_long: bool = False  # samples longer than the sequence are left out, not cut
    correction: Correction | None = None
    """What an earlier run has taught about it, which the footprint has as a component; None: nothing."""

    @property
    def world(self) -> int:
        return self.hardware.world

    @property
    def is_paced(self) -> bool:
        """Whether its pace is claimed; otherwise it orders the ways and no more."""
        return why_no_pace(self.shape, self.hardware) is None

    @property
    def assumed(self) -> tuple[Said, ...]:
        """What its pace had to assume, or why there is none."""
        why = why_no_pace(self.shape, self.hardware)
        return self.pace.because if why is None else (why,)

    @property
    def pace_words(self) -> Said:
        """`, 11,128 tokens/s` for the end of a sentence; empty where no pace is claimed."""
        return Message("plan.with-pace", tokens=self.pace.tokens_per_s) if self.is_paced else ""

    @property
    def gpu_spare_bytes(self) -> int:
        """What stays free of each card, the margin included; negative: what is missing."""
        return self.hardware.gpu.memory_bytes - self.footprint.gpu.required_bytes

    @property
    def effective_batch(self) -> int:
        return self.levers.micro_batch * self.levers.accumulation * self.levers.data_ranks(self.world)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What bounds a search, beside the job."""

    partial: bool = True
    """Some layers may recompute while others do not, as our own worker can; other trainers know all or none."""
    engines: frozenset[str] | None = None  # those that can be started; None: any
    llamafactory_version: str = LLAMAFACTORY_VERSION  # of the LLaMA-Factory that a job may be for
    every_gpu: bool = False  # no way that leaves GPUs idle
    has_liger: bool = False  # Liger is installed, so that its kernels may be chosen
    calibration: Calibration | None = None  # None: predictions are taken as they are
    advice: bool = True
    """Where nothing fits, find out as well what would make it fit, which takes several searches more."""
    saving_is_open: bool = False  # nobody said how often a checkpoint is written


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """A costly change that would make the job fit, with the way that it opens."""

    allowance: Allowance
    cost: Said  # what it changes in the result
    effect: Said  # what that does to the result, and so why it stands where it stands among the changes
    way: Way


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoints:
    """What checkpoints and failures cost the chosen way, and how often one is best written."""

    bytes: int  # of one checkpoint
    in_background: bool  # training waits for a copy alone
    costs: FailureCosts
    best_steps: int  # between two checkpoints, with which least is lost
    best_lost_share: float  # of all time
    every_s: float | None  # between two checkpoints as they will be written; None: there are none on the way
    because: Said = ""

    @property
    def lost_share(self) -> float | None:
        """Of all time, as checkpoints will be written."""
        return None if self.every_s is None else self.costs.lost_share(self.every_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The answer: how to run a job, or how far it is from running."""

    job: Job
    shape: ModelShape
    hardware: Hardware  # all that there is; a way may use fewer GPUs
    effective_batch: int
    chosen: Way | None  # None: nothing that was allowed fits
    alternatives: tuple[Way, ...]  # the best of each other strategy, those that fit first, each group the fastest first
    considered: int  # candidates compared
    search_s: float
    because: tuple[Said, ...]  # why this one; or why none
    remedies: tuple[Remedy, ...] = ()
    """When nothing free fits: costly changes that would, first what does least to the result."""
    gpus_needed: int | None = None
    """When nothing free fits: the smallest number of these GPUs that would do; None: not known or none."""
    hours: float | None = None  # hours to finish with the chosen way, where steps or epochs are known
    unproven: tuple[Said, ...] = ()  # what of this was only rendered and never run by us (several nodes, DCUs)
    checkpoints: Checkpoints | None = None  # None: nothing was chosen, or no pace is claimed
    chosen_for: Said = ""  # why this one, where others are as fast within what is known; empty: none is

    @property
    def fits(self) -> bool:
        return self.chosen is not None
