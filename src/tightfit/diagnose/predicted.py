"""What the memory model says about a run that failed, beside what its log says, or about one that has no log yet."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tightfit.diagnose.catalogue import catalogue
from tightfit.diagnose.phases import PLACES
from tightfit.diagnose.verdict import Line, Verdict
from tightfit.diagnose.wording import fixes_of
from tightfit.formats.known import KnownConfig
from tightfit.formats.worker.read import find_worker
from tightfit.inputs.flags import levers_as_written
from tightfit.memory import estimate
from tightfit.model.load import load_model, shape_from_config
from tightfit.priced import GIB
from tightfit.types import Footprint, Gpu, Hardware, Phase, PhaseName, UserError

_MEMORY = ("device-oom", "fragmentation", "other-process")
_MOST = 3
"""Components that are named."""
_GPU, _HOST = "device-oom", "host-alloc"
"""What a log would say of a job that does not fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """The prediction for the phase in which a run failed, or for the largest one."""

    phase: PhaseName
    bytes: int
    components: tuple[tuple[str, int], ...]
    """The largest first."""
    sentence: str
    required_bytes: int | None = None
    """What a card must have for all phases; None: it is the host that is spoken of."""
    fits: bool | None = None
    """None: no card is named to compare with."""

    @property
    def blame(self) -> str | None:
        """The component that takes most."""
        return self.components[0][0] if self.components else None


def predicted(footprint: Footprint, verdict: Verdict) -> Predicted | None:
    """What was to be expected of the phase that failed; None: it is no matter of memory."""
    if verdict.kind == "host-oom":
        return _of_host(footprint)
    if verdict.kind not in _MEMORY:
        return None
    name = verdict.phase or footprint.gpu.peak_phase
    return _of_phase(footprint, footprint.gpu.phases[name], verdict)


def planned_footprint(plan: Path) -> Footprint | None:
    """What the plan of a run of ours takes; None: there is none, or none that can be read."""
    try:
        return _footprint(find_worker(plan))
    except (ValueError, KeyError, TypeError, AttributeError, UserError):
        return None


def foretold(footprint: Footprint, hardware: Hardware | None, world: int) -> Predicted:
    """What a training would take of each GPU, of which no log says anything yet."""
    gpu = footprint.gpu
    phase = gpu.phases["init" if gpu.init_peak_bytes > gpu.peak_bytes else gpu.peak_phase]
    parts = _parts(phase)
    where = "the GPU" if world == 1 else f"each of the {world} GPUs"
    sentence = (
        f"Predicted for {where}: {phase.total_bytes / GIB:.2f} GiB at its most, {PLACES[phase.name]}, most of it "
        f"{_named(parts)}; a card needs {gpu.required_bytes / GIB:.2f} GiB with all that stands beside."
    )
    if hardware is None:
        return _told(phase, sentence, gpu.required_bytes, None)
    card, ram = hardware.gpu.memory_bytes, hardware.host_ram_bytes
    node = footprint.host.peak_bytes_per_node
    if gpu.required_bytes > card:
        sentence += (
            f" The {hardware.gpu.name} has {card / GIB:.2f} GiB: it does not fit; most goes to {_words(parts[0][0])}."
        )
    elif ram is not None and node > ram:
        sentence += f" The host needs {node / GIB:.2f} GiB and has {ram / GIB:.2f} GiB: it does not fit."
    else:
        sentence += f" The {hardware.gpu.name} has {card / GIB:.2f} GiB: it fits."
    fits = gpu.required_bytes <= card and (ram is None or node <= ram)
    return _told(phase, sentence, gpu.required_bytes, fits)


def foretold_verdict(told: Predicted, card_bytes: int, config: KnownConfig, file: str) -> Verdict | None:
    """The failure that such a job would run into; None: it fits."""
    if told.fits is not False:
        return None
    on_gpu = (told.required_bytes or 0) > card_bytes
    symptom = catalogue().by_id[_GPU if on_gpu else _HOST]
    what = "a GPU" if on_gpu else "the host"
    needs = f"a card needs {(told.required_bytes or 0) / GIB:.2f} GiB, and there are {card_bytes / GIB:.2f} GiB"
    return Verdict(
        id=symptom.id,
        kind=symptom.kind,
        cause=f"The training in {file} will run out of memory on {what}, {PLACES[told.phase]} at the latest.",
        confidence="likely",
        evidence=(Line(source=file, number=None, text=needs),) if on_gpu else (),
        fixes=tuple(fixes_of(symptom, config, {})),
        phase=told.phase,
    )


def _footprint(tree: Mapping[str, Any]) -> Footprint:
    model, world = tree["model"], tree["world"]
    found = model["config"]  # None: it lies beside the weights
    shape = load_model(model["weights"]) if found is None else shape_from_config(found, str(model["name"]))
    card = Gpu(name=world["vendor"], vendor=world["vendor"], memory_bytes=world["gpu_memory_bytes"])
    hardware = Hardware(gpu=card, nodes=world["nodes"], gpus_per_node=world["gpus_per_node"])
    return estimate(shape, levers_as_written(tree), world["ranks"], hardware)


def _of_phase(footprint: Footprint, phase: Phase, verdict: Verdict) -> Predicted:
    parts = _parts(phase)
    sentence = f"Predicted {PLACES[phase.name]}: {phase.total_bytes / GIB:.2f} GiB, most of it {_named(parts)}."
    held = None if verdict.oom is None else verdict.oom.allocated
    if held is not None and verdict.oom is not None:
        wanted = held + (verdict.oom.asked or 0)
        sentence += f" The log says {wanted / GIB:.2f} GiB, with what was asked for."
        if wanted > phase.total_bytes * 1.1:
            sentence += " That is more than the model knows of: something holds memory that no plan has."
    total = None if verdict.oom is None else verdict.oom.total
    fits = None if total is None else footprint.gpu.required_bytes <= total
    return _told(phase, sentence, footprint.gpu.required_bytes, fits)


def _of_host(footprint: Footprint) -> Predicted:
    worst = max(footprint.host.phases.values(), key=lambda phase: phase.total_bytes)
    node = footprint.host.peak_bytes_per_node
    sentence = f"Predicted for the host: {node / GIB:.2f} GiB a node; a rank's share is mostly {_named(_parts(worst))}."
    return Predicted(phase=worst.name, bytes=node, components=_parts(worst), sentence=sentence)


def _told(phase: Phase, sentence: str, required_bytes: int, fits: bool | None) -> Predicted:
    return Predicted(
        phase=phase.name,
        bytes=phase.total_bytes,
        components=_parts(phase),
        sentence=sentence,
        required_bytes=required_bytes,
        fits=fits,
    )


def _parts(phase: Phase) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(phase.components.items(), key=lambda part: -part[1]))


def _named(parts: Iterable[tuple[str, int]]) -> str:
    return ", ".join(f"{_words(name)} {size / GIB:.2f} GiB" for name, size in tuple(parts)[:_MOST])


def _words(component: str) -> str:
    return component.replace("_", " ")
