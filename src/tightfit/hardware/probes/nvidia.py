"""NVIDIA's cards: NVML, where nvidia-ml-py is installed, and `nvidia-smi`.

NVML is a library, and a wedged driver would hold whoever calls it; so it is called in a process of its own, which
prints one JSON object. `nvidia-smi` refuses a whole question for one field that it does not know: that field is left
out, and the question asked again.
"""

from __future__ import annotations

import csv
import re
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from tightfit.hardware.probes.card import Answer, Card, CardProcess, Driver, complete_sizes
from tightfit.hardware.probes.readings import celsius, pci_address, percent, process_id, size, total, watts, words
from tightfit.hardware.probes.shapes import split_lines, tree_of
from tightfit.hardware.probes.tools import HungTool, Silent, ask_by, place_of, run
from tightfit.messages import Message

FIELDS = (
    "index",
    "pci.bus_id",
    "uuid",
    "memory.total",
    "memory.used",
    "memory.free",
    "utilization.gpu",
    "temperature.gpu",
    "power.draw",
    "driver_version",
    "compute_cap",
    "name",
)
"""The name comes last, for it may hold commas, quoted or not."""
_NAMES = ("index", "uuid", "memory.total", "compute_cap", "name")
_CSV = "--format=csv,noheader,nounits"
_REFUSED = re.compile(r'Field "([^"]+)" is not a valid field')
_MOST_REFUSALS = 4
_RUNTIME = re.compile(r"CUDA(?: UMD)? Version\s*:\s*([0-9]{1,2}\.[0-9]{1,2})")
_CHILD = Path(__file__).with_name("nvml_child.py")


def nvidia_smi(deadline: float, *, whole: bool = True) -> Answer:
    """What `nvidia-smi` says, by `deadline` of the monotonic clock; not `whole`: which cards there are, in one
    question."""
    try:
        cards, version = _cards(deadline, FIELDS if whole else _NAMES)
    except Silent as silence:
        return Answer(tool="nvidia-smi", problem=silence.said, hung=isinstance(silence, HungTool))
    if not cards:
        return Answer(tool="nvidia-smi", problem=Message("machine.tool-without-cards", tool="nvidia-smi"))
    if not whole:
        return Answer(tool="nvidia-smi", cards=cards)
    runtime = None
    with suppress(Silent):
        apps = processes(deadline)
        cards = tuple(
            replace(card, processes=tuple(each for uuid, each in apps if uuid == card.uuid)) for card in cards
        )
        runtime = parse_runtime(ask_by(deadline, "nvidia-smi"))
    return Answer(tool="nvidia-smi", cards=cards, driver=Driver(version=version, runtime=runtime))


def processes(deadline: float) -> tuple[tuple[str, CardProcess], ...]:
    """Who computes on the cards, each with the name of its card."""
    return parse_apps(ask_by(deadline, "nvidia-smi", "--query-compute-apps=gpu_uuid,pid,used_memory", _CSV))


def repeating(interval_s: float) -> list[str] | None:
    """The command that prints all `FIELDS` again and again; None: the tool is not there."""
    place = place_of("nvidia-smi")
    often = str(max(100, round(interval_s * 1000)))
    return None if place is None else [place, f"--query-gpu={','.join(FIELDS)}", _CSV, "-lms", often]


def _cards(deadline: float, asked: tuple[str, ...]) -> tuple[tuple[Card, ...], str | None]:
    for _ in range(_MOST_REFUSALS):
        try:
            return parse_cards(ask_by(deadline, "nvidia-smi", f"--query-gpu={','.join(asked)}", _CSV), asked)
        except Silent as silence:
            refused = _REFUSED.search(silence.complaint)
            if refused is None or refused[1] not in asked:
                raise
            asked = tuple(name for name in asked if name != refused[1])
    raise Silent(Message("machine.tool-refuses"))


def parse_cards(text: str, asked: Sequence[str] = FIELDS) -> tuple[tuple[Card, ...], str | None]:
    """The rows of a query, and the driver's version. A row that is too short, or without a number, is no card."""
    cards: dict[int, Card] = {}
    version: str | None = None
    for line in text.splitlines():
        row = [cell.strip() for cell in next(csv.reader([line], skipinitialspace=True), [])]
        if len(row) < len(asked) or not re.fullmatch("[0-9]{1,4}", row[0]):
            continue
        told = dict(zip(asked[:-1], row, strict=False))
        if any(_is_odd(name, cell) for name, cell in told.items()):
            card = Card(index=int(row[0]), vendor="nvidia")
        else:
            card = _card(told, ", ".join(row[len(asked) - 1 :]))
            version = version or words(told.get("driver_version"))
        cards.setdefault(card.index, card)
    return tuple(cards.values()), version


_KINDS = {
    "pci.bus_id": r"[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7]",
    "uuid": r"(?:GPU|MIG)-[0-9A-Za-z/-]+",
    "driver_version": r"[0-9]+(?:\.[0-9]+)+",
    "compute_cap": r"[0-9]{1,2}\.[0-9]",
}
_AMOUNT = r"-?[0-9]+(?:\.[0-9]+)?"


def _is_odd(name: str, cell: str) -> bool:
    """A cell that is not what belongs there: cells of a torn row stand in each other's places."""
    is_known = words(cell) is not None and not re.fullmatch(r"\[.*\]|ERR!", cell)
    return is_known and not re.fullmatch(_KINDS.get(name, _AMOUNT), cell)


def _card(told: dict[str, str], name: str) -> Card:
    uuid = words(told.get("uuid"))
    capability = re.fullmatch(r"([0-9]{1,2})\.([0-9])", told.get("compute_cap", ""))
    return complete_sizes(
        Card(
            index=int(told["index"]),
            vendor="nvidia",
            name=words(name),
            pci=pci_address(told.get("pci.bus_id")),
            uuid=uuid if uuid and re.match("GPU-|MIG-", uuid) else None,
            arch=f"sm_{capability[1]}{capability[2]}" if capability else None,
            total_bytes=total(told.get("memory.total"), "MiB"),
            used_bytes=size(told.get("memory.used"), "MiB"),
            free_bytes=size(told.get("memory.free"), "MiB"),
            use_percent=percent(told.get("utilization.gpu")),
            temperature_c=celsius(told.get("temperature.gpu")),
            power_w=watts(told.get("power.draw")),
        )
    )


def parse_apps(text: str) -> tuple[tuple[str, CardProcess], ...]:
    """The processes, each with the name of its card. `No running processes found` has none."""
    found = []
    for line in text.splitlines(keepends=True):
        row = [cell.strip() for cell in next(csv.reader([line], skipinitialspace=True), [])]
        pid = process_id(row[1]) if len(row) == 3 and row[0].startswith(("GPU-", "MIG-")) else None
        if pid is not None:
            held = total(row[2], "MiB") if line.endswith("\n") else None
            found.append((row[0], CardProcess(pid=pid, held_bytes=held)))
    return tuple(found)


def parse_runtime(text: str) -> str | None:
    """The newest CUDA that the driver runs, from the head of the plain table."""
    found = _RUNTIME.search(text)
    return found[1] if found else None


# --- NVML ---------------------------------------------------------------------------------------


def nvml(deadline: float, *, whole: bool = True) -> Answer:
    """What NVML says; nothing, where nvidia-ml-py is not installed or finds no driver. It tells all at once."""
    left = deadline - time.monotonic()
    if not _has_nvml() or left <= 0:
        return Answer(tool="NVML")
    try:
        text = run("NVML", [sys.executable, str(_CHILD)], timeout_s=left)
    except HungTool as silence:
        return Answer(tool="NVML", problem=silence.said, hung=True)
    except Silent:
        return Answer(tool="NVML")
    return parse_nvml(text)


def _has_nvml() -> bool:
    try:
        return find_spec("pynvml") is not None
    except (ImportError, ValueError):
        return False


def parse_nvml(text: str) -> Answer:
    """What the process prints, as an answer."""
    tree = tree_of(text)
    if not isinstance(tree, dict) or not isinstance(tree.get("cards"), list):
        return Answer(tool="NVML")
    cards = [_nvml_card(each) for each in tree["cards"] if isinstance(each, dict)]
    raw = tree.get("cuda")
    runtime = f"{raw // 1000}.{raw % 1000 // 10}" if isinstance(raw, int) and 1000 <= raw < 100_000 else None
    driver = Driver(version=words(tree.get("driver")), runtime=runtime)
    kept = {card.index: card for card in reversed(cards) if card is not None}
    return Answer(tool="NVML", cards=tuple(kept[index] for index in sorted(kept)), driver=driver if kept else None)


def _nvml_card(told: dict[str, object]) -> Card | None:
    index = told.get("index")
    if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < 1024:
        return None
    listed = told.get("processes")
    processes = None
    if isinstance(listed, list):
        pairs = [each for each in listed if isinstance(each, list) and len(each) == 2]
        known = ((process_id(pid), total(held, "B")) for pid, held in pairs)
        processes = tuple(CardProcess(pid=pid, held_bytes=held) for pid, held in known if pid is not None)
    power = told.get("power_mw")
    capability = told.get("capability")
    arch = "".join(map(str, capability)) if isinstance(capability, list) and len(capability) == 2 else ""
    return complete_sizes(
        Card(
            index=index,
            vendor="nvidia",
            name=words(told.get("name")),
            pci=pci_address(told.get("pci")),
            uuid=words(told.get("uuid")),
            arch=f"sm_{arch}" if re.fullmatch("[0-9]{2,3}", arch) else None,
            total_bytes=total(told.get("total"), "B"),
            used_bytes=size(told.get("used"), "B"),
            free_bytes=size(told.get("free"), "B"),
            use_percent=percent(told.get("use")),
            temperature_c=celsius(told.get("temperature")),
            power_w=watts(power / 1000) if isinstance(power, (int, float)) and not isinstance(power, bool) else None,
            processes=processes,
        )
    )


# --- links --------------------------------------------------------------------------------------


def links(deadline: float) -> tuple[tuple[str, str, str], ...]:
    """How the cards reach each other: pairs of cards, and NVIDIA's word for the way between them."""
    try:
        return parse_links(ask_by(deadline, "nvidia-smi", "topo", "-m"))
    except Silent:
        return ()


def parse_links(text: str) -> tuple[tuple[str, str, str], ...]:
    """The matrix of `nvidia-smi topo -m`, or of what `rocm_smi.show_links` gives, above its diagonal."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    header: list[str] = []
    found = []
    for line, whole in split_lines(plain):
        cells = line.split() if whole else []
        cards = [cell for cell in cells if re.fullmatch(r"(?:GPU|HCU|DCU)[0-9]{1,3}", cell)]
        if len(cards) > 1:
            header = cards
        elif header and cards and cells[0] == cards[0] and cells[0] in header and len(cells) > len(header):
            own = header.index(cells[0])
            for place in range(own + 1, len(header)):
                if re.fullmatch(r"NV[0-9]{1,2}|PIX|PXB|PHB|NODE|SYS|XGMI|PCIE", cells[1 + place]):
                    found.append((cells[0], header[place], cells[1 + place]))
    return tuple(found)
