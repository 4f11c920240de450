"""What the memory model says about a run that failed, beside what its log says, or about one that has no log yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tightfit.diagnose.catalogue import catalogue
from tightfit.diagnose.judge import fixes_of
from tightfit.diagnose.tracebacks import PLACES
from tightfit.diagnose.verdict import Line, Verdict
from tightfit.job.known import KnownConfig
from tightfit.memory.components import name_component
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
        node, parts = footprint.host.peak_bytes_per_node, _sort_parts(worst)
        sentence = Message("diagnose.predicted-host", size=_gib(node), parts=_name_largest(parts))
        return MemoryPrediction(phase=worst.name, bytes=node, components=parts, sentence=sentence)
    if verdict.kind not in _MEMORY:
        return None
    phase, oom = footprint.gpu.phases[verdict.phase or footprint.gpu.peak_phase], verdict.oom
    log = None
    if oom is not None and oom.allocated is not None:
        wanted = oom.allocated + (oom.asked or 0)
        is_known = wanted <= phase.total_bytes * 1.1
        log = Message("diagnose.in-the-log" if is_known else "diagnose.in-the-log-unknown", size=_gib(wanted))
    where, parts, size = PLACES[phase.name], _sort_parts(phase), phase.total_bytes
    return MemoryPrediction(
        phase=phase.name,
        bytes=size,
        components=parts,
        sentence=Message("diagnose.predicted", where=where, size=_gib(size), parts=_name_largest(parts), log=log),
        required_bytes=footprint.gpu.required_bytes,
        fits=None if oom is None or oom.total is None else footprint.gpu.required_bytes <= oom.total,
    )


def predict_training(footprint: Footprint, hardware: Hardware | None, world: int) -> MemoryPrediction:
    """What a training would take of each GPU, of which no log says anything yet."""
    gpu = footprint.gpu
    phase = gpu.phases["init" if gpu.init_peak_bytes > gpu.peak_bytes else gpu.peak_phase]
    parts = _sort_parts(phase)
    said, fits = None, None
    if hardware is not None:
        name, card, ram = hardware.gpu.name, hardware.gpu.memory_bytes, hardware.host_ram_bytes
        node = footprint.host.peak_bytes_per_node
        fits = gpu.required_bytes <= card and (ram is None or node <= ram)
        if gpu.required_bytes > card:
            said = Message("diagnose.does-not-fit", card=name, size=_gib(card), part=name_component(parts[0][0]))
        elif ram is not None and node > ram:
            said = Message("diagnose.host-does-not-fit", need=_gib(node), size=_gib(ram))
        else:
            said = Message("diagnose.fits", card=name, size=_gib(card))
    fields: dict[str, object] = {
        "size": _gib(phase.total_bytes),
        "where": PLACES[phase.name],
        "parts": _name_largest(parts),
        "need": _gib(gpu.required_bytes),
        "fits": said,
    }
    one, many = Message("diagnose.predicted-gpu", **fields), Message("diagnose.predicted-gpus", world=world, **fields)
    return MemoryPrediction(
        phase=phase.name,
        bytes=phase.total_bytes,
        components=parts,
        sentence=one if world == 1 else many,
        required_bytes=gpu.required_bytes,
        fits=fits,
    )


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


def _sort_parts(phase: Phase) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(phase.components.items(), key=lambda part: -part[1]))


def _name_largest(parts: Sequence[tuple[str, int]]) -> Listing:
    return Listing(Message("diagnose.part", name=name_component(name), size=_gib(size)) for name, size in parts[:_MOST])


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}"
