"""The cards: what they have free and who holds the rest; whether driver, toolkit and torch go together."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tightfit.hardware.doctor.packages import TorchBuild
from tightfit.hardware.doctor.row import Light, Row, gib
from tightfit.hardware.probes.card import Card, CardProcess, Cards
from tightfit.inputs.versions import release

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
        who = "; ".join(process_words(process) for process in found.unplaced)
        rows.append(
            Row(id="gpu-processes", group="GPUs", light="yellow", what=f"on some GPU, nobody says which: {who}")
        )
    if not found.cards:
        rows.append(_nothing(found, root))
    rows += [_complaint(problem, bool(found.cards)) for problem in found.problems if found.cards]
    rows += _driver_rows(found, build, root)
    return rows


def _card_row(card: Card) -> Row:
    name = f"GPU {card.index}: {card.name or 'a card without a name'}"
    light: Light = "green"
    fix: str | None = None
    others = card.processes or ()
    held = sum(process.held_bytes or 0 for process in others)
    total, free = card.total_bytes, card.free_bytes
    if total is None:
        memory = "its memory is not told" + (f", {card.memory_percent:.0f} % of it used" if card.memory_percent else "")
        light, fix = "yellow", "say its size to the other verbs with --gpus, like 8x64GB"
    elif free is None:
        memory = f"{gib(total)}, nobody says how much of it is free"
    else:
        memory = f"{gib(free)} of {gib(total)} free"
        if (total - free) > _MINE * total:
            light = "yellow"
            fix = (
                "wait with `tightfit train --wait-for-gpu`, or choose other cards with --gpu-ids"
                if others or card.processes is None
                else "nobody holds it that can be seen from here: another container, or a process that died badly"
            )
    facts = [memory, *_facts(card)]
    if card.temperature_c is not None and card.temperature_c >= _HOT_C:
        light, fix = "yellow", fix or "look after its cooling: hot cards slow down"
    if others:
        facts.append(f"used by {'; '.join(process_words(process) for process in others)}")
    elif card.processes is not None and not held:
        facts.append("used by nobody")
    return Row(id=f"gpu-{card.index}", group="GPUs", light=light, what=f"{name}, {', '.join(facts)}", fix=fix)


def _facts(card: Card) -> list[str]:
    facts = []
    if card.use_percent is not None:
        facts.append(f"{card.use_percent:.0f} % busy")
    if card.temperature_c is not None:
        facts.append(f"{card.temperature_c:.0f} °C")
    if card.power_w is not None:
        facts.append(f"{card.power_w:.0f} W")
    return facts


def process_words(process: CardProcess) -> str:
    """`4711 (anna, python train.py, 12.0 GiB)`; a process that cannot be seen from here is a number."""
    held = None if process.held_bytes is None else gib(process.held_bytes)
    known = [word for word in (process.user, process.command, held) if word]
    if process.user is None:
        known.insert(0, "not to be seen from here")
    return f"{process.pid} ({', '.join(known)})"


def _nothing(found: Cards, root: Path) -> Row:
    """No card: because there is none, or because nobody can reach it."""
    hidden = _on_the_bus(root)
    if found.problems:
        return _complaint(found.problems[0], False)
    if hidden:
        return Row(
            id="no-driver",
            group="GPUs",
            light="red",
            what=f"the machine has {hidden} GPU hardware, and no driver or tool here shows it",
            fix="install the driver; in a container start it with --gpus all (NVIDIA) or --device /dev/kfd --device "
            "/dev/dri (AMD and Hygon)",
        )
    return Row(
        id="no-gpu",
        group="GPUs",
        light="yellow",
        what="no GPU: everything works, with the CPU as two small ranks",
        fix="name the cards of another machine with --gpus, like 8xA100-80GB",
    )


def _on_the_bus(root: Path) -> str | None:
    """The maker of a display or compute device on the PCI bus."""
    for device in sorted(root.glob("sys/bus/pci/devices/*")):
        kind, vendor = _line(device / "class"), _line(device / "vendor")
        if kind.startswith(("0x0300", "0x0302", "0x0380", "0x1200", "0x0b40")) and vendor in _VENDORS:
            return _VENDORS[vendor]
    return None


def _complaint(problem: str, others: bool) -> Row:
    return Row(
        id="gpu-tool",
        group="GPUs",
        light="yellow" if others else "red",
        what=problem.rstrip("."),
        fix="restart the machine if the driver was updated or hangs (`dmesg` says which); in a container see that it "
        "was started with the GPUs",
    )


# --- driver, toolkit, torch ---------------------------------------------------------------------


def _driver_rows(found: Cards, build: TorchBuild | None, root: Path) -> list[Row]:
    if not found.cards:
        return []
    vendors = {card.vendor for card in found.cards}
    version = found.driver.version if found.driver else _module_version(root)
    runtime = found.driver.runtime if found.driver else None
    driver = f"driver {version}" if version else "a driver of unknown version"
    if build is None:
        return [Row(id="torch-build", group="GPUs", light="yellow", what=f"{driver}, and no torch to use it", fix=_HOW)]
    made = f"torch {build.version}"
    if not build.for_gpus:
        return [_build("red", f"{made} is built for the CPU alone, and there are GPUs", _HOW)]
    if ("nvidia" in vendors and build.cuda is None) or (vendors <= {"amd", "hygon"} and build.hip is None):
        other = "ROCm" if build.hip else "CUDA"
        return [_build("red", f"{made} is built for {other}, and the cards are of another maker", _HOW)]
    rows = [_runtime_row(made, driver, build, runtime)]
    rows += _arch_rows(found.cards, build)
    return rows


def _module_version(root: Path) -> str | None:
    """The kernel module of AMD's or Hygon's driver, where it says so."""
    told = (_line(root / "sys/module" / name / "version") for name in ("hycu", "hydcu", "amdgpu"))
    return next((version for version in told if version), None)


_HOW = "install the build of torch for these cards, as pytorch.org or the card's maker says"


def _build(light: Light, what: str, fix: str | None = None) -> Row:
    return Row(id="torch-build", group="GPUs", light=light, what=what, fix=fix)


def _runtime_row(made: str, driver: str, build: TorchBuild, runtime: str | None) -> Row:
    if build.cuda is None:
        return _build("green", f"{made} for ROCm {build.hip}, {driver}")
    if runtime is None:
        return _build("green", f"{made} for CUDA {build.cuda}, {driver}")
    has, wants = release(runtime), release(build.cuda)
    what = f"{made} for CUDA {build.cuda}, {driver} runs CUDA up to {runtime}"
    if wants[:1] > has[:1]:
        return _build("red", what, f"update the driver, or install a torch built for CUDA {has[0]}")
    if wants[:2] > has[:2]:
        return _build("yellow", what, "update the driver if a kernel that is compiled at run time fails to load")
    return _build("green", what)


def _arch_rows(cards: Sequence[Card], build: TorchBuild) -> list[Row]:
    rows = []
    for arch in sorted({card.arch for card in cards if card.arch in _NEEDS}, key=str):
        assert arch is not None
        torch, cuda = _NEEDS[arch]
        if release(build.version)[:2] < torch or (build.cuda and release(build.cuda)[:2] < cuda):
            wanted = f"torch {torch[0]}.{torch[1]} for CUDA {cuda[0]}.{cuda[1]}"
            what = f"{arch} cards need {wanted} or later, and torch {build.version} for CUDA {build.cuda} is installed"
            rows.append(Row(id=f"arch-{arch}", group="GPUs", light="red", what=what, fix=_HOW))
    return rows


def _line(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
