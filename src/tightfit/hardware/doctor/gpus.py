"""The cards: what they have free and who holds the rest; how they reach each other and the host; whether driver,
toolkit and torch go together."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from tightfit.hardware.doctor.row import Check, Light, gib
from tightfit.hardware.doctor.software import TorchBuild
from tightfit.hardware.machine import driver_here, read_count, read_text
from tightfit.hardware.numa import find_node_of
from tightfit.hardware.probes.card import Card, CardProcess, Cards
from tightfit.hardware.probes.nvidia import Link
from tightfit.inputs.versions import release
from tightfit.messages import Listing, Message, Said

_HOT_C = 87
_MINE = 0.05  # share of a card that may be taken without a word: a desktop, a context
_VENDORS = {"0x10de": "NVIDIA", "0x1002": "AMD", "0x1d94": "Hygon"}
_CLASSES = ("0x0300", "0x0302", "0x0380", "0x1200", "0x0b40")  # of display and compute devices on the PCI bus
_MOST_LANES = 32
_NEEDS = {"sm_100": ((2, 7), (12, 8)), "sm_120": ((2, 7), (12, 8))}
"""Architecture → the first torch and the first CUDA with kernels for it."""


def gpu_rows(found: Cards, build: TorchBuild | None, root: Path = Path("/")) -> list[Check]:
    """A row a card, one for the driver, and what the tools complain of."""
    rows = list(map(_card_row, found.cards))
    if found.unplaced:
        what = Message("doctor.unplaced", who=Listing(map(describe_process, found.unplaced), ";"))
        rows.append(Check("gpu-processes", "GPUs", "yellow", what))
    for problem in found.problems if found.cards else found.problems[:1]:
        what, fix = Message("doctor.gpu-tool", problem=problem), Message("doctor.gpu-tool-fix")
        rows.append(Check("gpu-tool", "GPUs", "yellow" if found.cards else "red", what, fix))
    if found.cards:
        return [*rows, *_driver_rows(found, build, root)]
    if found.problems:
        return rows
    # No card: because there is none, or because nobody can reach it.
    for device in sorted(root.glob("sys/bus/pci/devices/*")):
        maker = _VENDORS.get(_line(device / "vendor"))
        if maker and _line(device / "class").startswith(_CLASSES):
            what = Message("doctor.no-driver", maker=maker)
            return [*rows, Check("no-driver", "GPUs", "red", what, Message("doctor.no-driver-fix"))]
    return [*rows, Check("no-gpu", "GPUs", "yellow", Message("doctor.no-gpu"), Message("doctor.no-gpu-fix"))]


def _card_row(card: Card) -> Check:
    light: Light = "green"
    fix: Message | None = None
    others = card.processes or ()
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
    amounts = ((card.temperature_c, "°C"), (card.power_w, "W"))
    facts += [f"{amount:.0f} {unit}" for amount, unit in amounts if amount is not None]
    if (card.temperature_c or 0) >= _HOT_C:
        light, fix = "yellow", fix or Message("doctor.hot")
    if others:
        facts.append(Message("doctor.used-by", who=Listing(map(describe_process, others), ";")))
    elif card.processes is not None:
        facts.append(Message("doctor.used-by-nobody"))
    name = card.name or Message("doctor.nameless-card")
    what = Message("doctor.card", index=card.index, name=name, facts=Listing(facts))
    return Check(f"gpu-{card.index}", "GPUs", light, what, fix)


def describe_process(process: CardProcess) -> Message:
    """`4711 (anna, python train.py, 12.0 GiB)`; a process that cannot be seen from here is a number."""
    held = None if process.held_bytes is None else gib(process.held_bytes)
    known: list[Said] = [word for word in (process.user, process.command, held) if word]
    if process.user is None:
        known.insert(0, Message("doctor.unseen"))
    return Message("doctor.process", pid=process.pid, known=Listing(known))


def _driver_rows(found: Cards, build: TorchBuild | None, root: Path) -> Iterator[Check]:
    """Driver, toolkit and torch."""

    def row(light: Light, what: Message, fix: Message | None = None) -> Check:
        return Check("torch-build", "GPUs", light, what, fix)

    vendors = {card.vendor for card in found.cards}
    # The kernel module of AMD's or Hygon's driver may say its version, too.
    version = found.driver.version if found.driver else driver_here(root)
    driver = Message("doctor.driver", version=version) if version else Message("doctor.driver-unknown")
    how = Message("doctor.torch-build-fix")
    if build is None:
        yield row("yellow", Message("doctor.no-torch", driver=driver), how)
        return
    if not build.for_gpus:
        yield row("red", Message("doctor.torch-cpu", torch=build.version), how)
        return
    if ("nvidia" in vendors and build.cuda is None) or (vendors <= {"amd", "hygon"} and build.hip is None):
        other = "ROCm" if build.hip else "CUDA"
        yield row("red", Message("doctor.torch-other-maker", torch=build.version, other=other), how)
        return
    runtime = found.driver.runtime if found.driver else None
    if build.cuda is None or runtime is None:
        kind = f"ROCm {build.hip}" if build.cuda is None else f"CUDA {build.cuda}"
        yield row("green", Message("doctor.torch-for", torch=build.version, kind=kind, driver=driver))
    else:
        has, wants = release(runtime), release(build.cuda)
        what = Message("doctor.torch-runtime", torch=build.version, cuda=build.cuda, driver=driver, runtime=runtime)
        if wants[:1] > has[:1]:
            yield row("red", what, Message("doctor.old-driver", cuda=has[0]))
        elif wants[:2] > has[:2]:
            yield row("yellow", what, Message("doctor.older-driver"))
        else:
            yield row("green", what)
    arches = {card.arch for card in found.cards}
    for arch, (torch, cuda) in _NEEDS.items():
        too_old = release(build.version)[:2] < torch or (build.cuda and release(build.cuda)[:2] < cuda)
        if arch in arches and too_old:
            first = {"torch": "{}.{}".format(*torch), "cuda": "{}.{}".format(*cuda)}
            what = Message("doctor.arch", arch=arch, **first, has_torch=build.version, has_cuda=build.cuda)
            yield Check(f"arch-{arch}", "GPUs", "red", what, how)


_WAYS: dict[str, Said] = {
    "PIX": Message("doctor.pix"),
    "PXB": Message("doctor.pxb"),
    "PHB": Message("doctor.phb"),
    "NODE": Message("doctor.node"),
    "SYS": Message("doctor.sys"),
    "PCIE": "PCIe",
}


def link_rows(cards: Sequence[Card], links: Sequence[Link], root: Path = Path("/")) -> list[Check]:
    """Links between cards, and each card's link to the host."""
    rows = []
    if len(cards) > 1 and not links:
        rows.append(Check("links", "links", "green", Message("doctor.links-unknown")))
    elif len(cards) > 1:
        ways = Listing(
            Message(
                "doctor.so-many",
                count=count,
                what=Message("doctor.nvlink", links=way[2:]) if way.startswith("NV") else _WAYS.get(way, way),
            )
            for way, count in Counter(way for _, _, way in links).most_common()
        )
        apart = next((link for link in links if link[2] == "SYS"), None)
        if apart is None:
            rows.append(Check("links", "links", "green", Message("doctor.links", pairs=len(links), ways=ways)))
        else:
            what = Message("doctor.links-apart", pairs=len(links), ways=ways, one=apart[0], other=apart[1])
            rows.append(Check("links", "links", "yellow", what, Message("doctor.links-apart-fix")))

    # PCIe width and NUMA node, of the kernel. A card at rest lowers its speed by itself, but not its width.
    narrow, known, nodes = [], Counter[tuple[int, str]](), set()
    for card in cards:
        place = root / "sys/bus/pci/devices" / (card.pci or "unknown")
        now, most = read_count(place / "current_link_width"), read_count(place / "max_link_width")
        speed = re.match(r"[0-9.]+ GT/s", _line(place / "max_link_speed"))
        if now and most and now < most <= _MOST_LANES:
            narrow.append(Message("doctor.few-lanes", index=card.index, now=now, most=most))
        if speed and most and most <= _MOST_LANES:
            known[most, speed[0]] += 1
        if (node := find_node_of(card.pci or "unknown", root)) is not None:
            nodes.add(node)
    if narrow:
        what = Message("doctor.pcie-narrow", which=Listing(narrow))
        rows.append(Check("pcie", "links", "yellow", what, Message("doctor.pcie-narrow-fix")))
    elif known:
        lanes = Listing(
            Message("doctor.lanes", count=count, speed=speed, lanes=most) for (most, speed), count in known.items()
        )
        what = Message("doctor.pcie", links=lanes, nodes=Listing(map(str, sorted(nodes))) if nodes else None)
        rows.append(Check("pcie", "links", "green", what))
    return rows


def _line(path: Path) -> str:
    return read_text(path).strip()
