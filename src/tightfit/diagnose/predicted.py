"""What the memory model says about a run that failed, beside what its log says, or about one that has no log yet."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tightfit.diagnose.catalogue import catalogue
from tightfit.diagnose.judge import fixes_of
from tightfit.diagnose.tracebacks import PLACES
from tightfit.diagnose.verdict import Line, Verdict
from tightfit.job.known import KnownConfig
from tightfit.memory.overhead import name_component
from tightfit.messages import Listing, Message
from tightfit.priced import GIB
from tightfit.types import Footprint, Hardware, Phase, PhaseName

_MEMORY = ("device-oom", "fragmentation", "other-process")
_MOST = 3  # components that are named
_GPU, _HOST = "device-oom", "host-alloc"  # what a log would say of a job that does not fit


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPrediction:
    """The prediction for the phase in which a run failed, or for the largest one."""

    phase: PhaseName
    bytes: int
    components: tuple[tuple[str, int], ...]  # the largest first
    sentence: Message
    required_bytes: int | None = None  # what a card must have for all phases; None: it is the host that is spoken of
    fits: bool | None = None  # None: no card is named to compare with

    @property
    def blame(self) -> str | None:
        return self.components[0][0] if self.components else None


def predict_failure(footprint: Footprint, verdict: Verdict) -> MemoryPrediction | None:
    """What was to be expected of the phase that failed; None: it is no matter of memory."""
    if verdict.kind == "host-oom":
        worst = max(footprint.host.phases.values(), key=lambda phase: phase.total_bytes)
        return _predict(worst, footprint.host.peak_bytes_per_node, "diagnose.predicted-host")
    if verdict.kind not in _MEMORY:
        return None
    phase, oom = footprint.gpu.phases[verdict.phase or footprint.gpu.peak_phase], verdict.oom
    log, required = None, footprint.gpu.required_bytes
    if oom is not None and oom.allocated is not None:
        wanted = oom.allocated + (oom.asked or 0)
        is_known = wanted <= phase.total_bytes * 1.1
        log = Message("diagnose.in-the-log" if is_known else "diagnose.in-the-log-unknown", size=_gib(wanted))
    told = _predict(phase, phase.total_bytes, "diagnose.predicted", where=PLACES[phase.name], log=log)
    fits = None if oom is None or oom.total is None else required <= oom.total
    return replace(told, required_bytes=required, fits=fits)


def predict_training(footprint: Footprint, hardware: Hardware | None, world: int) -> MemoryPrediction:
    """What a training would take of each GPU, of which no log says anything yet."""
    gpu = footprint.gpu
    phase = gpu.phases["init" if gpu.init_peak_bytes > gpu.peak_bytes else gpu.peak_phase]
    said, fits = None, None
    if hardware is not None:
        name, card, ram = hardware.gpu.name, hardware.gpu.memory_bytes, hardware.host_ram_bytes
        node = footprint.host.peak_bytes_per_node
        fits = gpu.required_bytes <= card and (ram is None or node <= ram)
        if gpu.required_bytes > card:
            largest = name_component(max(phase.components, key=lambda part: phase.components[part]))
            said = Message("diagnose.does-not-fit", card=name, size=_gib(card), part=largest)
        elif ram is not None and node > ram:
            said = Message("diagnose.host-does-not-fit", need=_gib(node), size=_gib(ram))
        else:
            said = Message("diagnose.fits", card=name, size=_gib(card))
    fields: dict[str, object] = {"where": PLACES[phase.name], "need": _gib(gpu.required_bytes), "fits": said}
    if world == 1:
        told = _predict(phase, phase.total_bytes, "diagnose.predicted-gpu", **fields)
    else:
        told = _predict(phase, phase.total_bytes, "diagnose.predicted-gpus", world=world, **fields)
    return replace(told, required_bytes=gpu.required_bytes, fits=fits)


def predict_verdict(told: MemoryPrediction, card_bytes: int, config: KnownConfig, file: str) -> Verdict | None:
    """The failure that such a job would run into; None: it fits."""
    if told.fits is not False:
        return None
    on_gpu = (told.required_bytes or 0) > card_bytes
    symptom, where = catalogue().by_id[_GPU if on_gpu else _HOST], PLACES[told.phase]
    needs = Message("diagnose.card-needs", need=_gib(told.required_bytes or 0), size=_gib(card_bytes))
    return Verdict(
        id=symptom.id,
        kind=symptom.kind,
        cause=Message("diagnose.will-run-out-gpu", file=file, where=where)
        if on_gpu
        else Message("diagnose.will-run-out-host", file=file, where=where),
        confidence="likely",
        evidence=(Line(source=file, number=None, text=needs),) if on_gpu else (),
        fixes=tuple(fixes_of(symptom, config, {})),
        phase=told.phase,
    )


def _predict(phase: Phase, size: int, said: str, **fields: object) -> MemoryPrediction:
    parts = sorted(phase.components.items(), key=lambda part: -part[1])
    named = (Message("diagnose.part", name=name_component(name), size=_gib(held)) for name, held in parts[:_MOST])
    sentence = Message(said, size=_gib(size), parts=Listing(named), **fields)
    return MemoryPrediction(phase=phase.name, bytes=size, components=tuple(parts), sentence=sentence)


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}"
