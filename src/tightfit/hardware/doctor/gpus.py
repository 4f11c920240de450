"""The cards: what they have free and who holds the rest; whether driver, toolkit and torch go together."""

from __future__ import annotations

from pathlib import Path

from tightfit.hardware.doctor.packages import TorchBuild
from tightfit.hardware.doctor.row import Light, Row, gib
from tightfit.hardware.machine import read_text
from tightfit.hardware.probes.card import Card, CardProcess, Cards
from tightfit.inputs.versions import release
from tightfit.messages import Listing, Message, Said

_HOT_C = 87
_MINE = 0.05
"""Share of a card that may be taken without a word: a desktop, a context."""
_VENDORS = {"0x10de": "NVIDIA", "0x1002": "AMD", "0x1d94": "Hygon"}
_NEEDS = {"sm_100": ((2, 7), (12, 8)), "sm_120": ((2, 7), (12, 8))}
"""Architecture → the first torch and the first CUDA with kernels for it."""


def gpu_rows(found: Cards, build: TorchBuild | None, root: Path = Path("/")) -> list[Row]:
    """A row a card, one for the driver, and what the tools complain of."""
    rows = [_card_row(card) for card in found.cards]
    if found.unplaced:
        what = Message("doctor.unplaced", who=Listing(map(describe_process, found.unplaced), ";"))
        rows.append(Row(id="gpu-processes", group="GPUs", light="yellow", what=what))
    if found.cards or found.problems:
        light: Light = "yellow" if found.cards else "red"
        for problem in found.problems if found.cards else found.problems[:1]:
            what = Message("doctor.gpu-tool", problem=problem)
            rows.append(Row(id="gpu-tool", group="GPUs", light=light, what=what, fix=Message("doctor.gpu-tool-fix")))
        return rows + _driver_rows(found, build, root)
    # No card: because there is none, or because nobody can reach it.
    if maker := _on_the_bus(root):
        what, fix = Message("doctor.no-driver", maker=maker), Message("doctor.no-driver-fix")
        return [*rows, Row(id="no-driver", group="GPUs", light="red", what=what, fix=fix)]
    what, fix = Message("doctor.no-gpu"), Message("doctor.no-gpu-fix")
    return [*rows, Row(id="no-gpu", group="GPUs", light="yellow", what=what, fix=fix)]


def _card_row(card: Card) -> Row:
    light: Light = "green"
    fix: Message | None = None
    others = card.processes or ()
    held = sum(process.held_bytes or 0 for process in others)
    total, free = card.total_bytes, card.free_bytes
    if total is None:
        facts: list[Said] = [Message("doctor.memory-unknown", used=card.memory_percent or None)]
        light, fix = "yellow", Message("doctor.memory-unknown-fix")
    elif free is None:
        facts = [Message("doctor.free-unknown", total=gib(total))]
    else:
        facts = [Message("doctor.free", free=gib(free), total=gib(total))]
        if (total - free) > _MINE * total:
            light = "yellow"
            fix = Message("doctor.wait" if others or card.processes is None else "doctor.held-unseen")
    if card.use_percent is not None:
        facts.append(Message("doctor.busy", percent=card.use_percent))
    if card.temperature_c is not None:
        facts.append(f"{card.temperature_c:.0f} °C")
    if card.power_w is not None:
        facts.append(f"{card.power_w:.0f} W")
    if card.temperature_c is not None and card.temperature_c >= _HOT_C:
        light, fix = "yellow", fix or Message("doctor.hot")
    if others:
        facts.append(Message("doctor.used-by", who=Listing(map(describe_process, others), ";")))
    elif card.processes is not None and not held:
        facts.append(Message("doctor.used-by-nobody"))
    name = card.name or Message("doctor.nameless-card")
    what = Message("doctor.card", index=card.index, name=name, facts=Listing(facts))
    return Row(id=f"gpu-{card.index}", group="GPUs", light=light, what=what, fix=fix)


def describe_process(process: CardProcess) -> Message:
    """`4711 (anna, python train.py, 12.0 GiB)`; a process that cannot be seen from here is a number."""
    held = None if process.held_bytes is None else gib(process.held_bytes)
    known: list[Said] = [word for word in (process.user, process.command, held) if word]
    if process.user is None:
        known.insert(0, Message("doctor.unseen"))
    return Message("doctor.process", pid=process.pid, known=Listing(known))


def _on_the_bus(root: Path) -> str | None:
    """The maker of a display or compute device on the PCI bus."""
    for device in sorted(root.glob("sys/bus/pci/devices/*")):
        kind, vendor = _line(device / "class"), _line(device / "vendor")
        if kind.startswith(("0x0300", "0x0302", "0x0380", "0x1200", "0x0b40")) and vendor in _VENDORS:
            return _VENDORS[vendor]
    return None


# --- driver, toolkit, torch ---------------------------------------------------------------------


def _driver_rows(found: Cards, build: TorchBuild | None, root: Path) -> list[Row]:
    if not found.cards:
        return []
    vendors = {card.vendor for card in found.cards}
    # The kernel module of AMD's or Hygon's driver may say its version, too.
    told = (_line(root / "sys/module" / name / "version") for name in ("hycu", "hydcu", "amdgpu"))
    version = found.driver.version if found.driver else next(filter(None, told), None)
    driver = Message("doctor.driver", version=version) if version else Message("doctor.driver-unknown")
    how = Message("doctor.torch-build-fix")
    if build is None:
        return [_build_row("yellow", Message("doctor.no-torch", driver=driver), how)]
    if not build.for_gpus:
        return [_build_row("red", Message("doctor.torch-cpu", torch=build.version), how)]
    if ("nvidia" in vendors and build.cuda is None) or (vendors <= {"amd", "hygon"} and build.hip is None):
        other = "ROCm" if build.hip else "CUDA"
        return [_build_row("red", Message("doctor.torch-other-maker", torch=build.version, other=other), how)]
    rows = [_runtime_row(driver, build, found.driver.runtime if found.driver else None)]
    for arch in sorted({card.arch for card in found.cards if card.arch in _NEEDS}, key=str):
        assert arch is not None
        torch, cuda = _NEEDS[arch]
        if release(build.version)[:2] < torch or (build.cuda and release(build.cuda)[:2] < cuda):
            what = Message(
                "doctor.arch",
                arch=arch,
                torch=f"{torch[0]}.{torch[1]}",
                cuda=f"{cuda[0]}.{cuda[1]}",
                has_torch=build.version,
                has_cuda=build.cuda,
            )
            rows.append(Row(id=f"arch-{arch}", group="GPUs", light="red", what=what, fix=how))
    return rows


def _build_row(light: Light, what: Message, fix: Message | None = None) -> Row:
    return Row(id="torch-build", group="GPUs", light=light, what=what, fix=fix)


def _runtime_row(driver: Message, build: TorchBuild, runtime: str | None) -> Row:
    if build.cuda is None or runtime is None:
        kind = f"ROCm {build.hip}" if build.cuda is None else f"CUDA {build.cuda}"
        return _build_row("green", Message("doctor.torch-for", torch=build.version, kind=kind, driver=driver))
    has, wants = release(runtime), release(build.cuda)
    what = Message("doctor.torch-runtime", torch=build.version, cuda=build.cuda, driver=driver, runtime=runtime)
    if wants[:1] > has[:1]:
        return _build_row("red", what, Message("doctor.old-driver", cuda=has[0]))
    if wants[:2] > has[:2]:
        return _build_row("yellow", what, Message("doctor.older-driver"))
    return _build_row("green", what)


def _line(path: Path) -> str:
    return read_text(path).strip()
