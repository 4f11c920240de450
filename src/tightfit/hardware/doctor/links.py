"""How the cards reach each other and the host."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tightfit.hardware.doctor.row import Row
from tightfit.hardware.probes.card import Card

Link = tuple[str, str, str]
_WAYS = {
    "PIX": "one PCIe switch",
    "PXB": "several PCIe switches",
    "PHB": "the CPU's PCIe bridge",
    "NODE": "PCIe bridges of one NUMA node",
    "SYS": "the link between CPU sockets",
    "PCIE": "PCIe",
    "XGMI": "XGMI",
}


def link_rows(cards: Sequence[Card], links: Sequence[Link], root: Path = Path("/")) -> list[Row]:
    """Links between cards, and each card's link to the host."""
    rows = []
    if len(cards) > 1:
        rows.append(_between(links))
    return rows + _to_host(cards, root)


def _between(links: Sequence[Link]) -> Row:
    if not links:
        return Row(id="links", group="links", light="green", what="nobody says how the GPUs are linked")
    counted = Counter(way for _, _, way in links)
    words = ", ".join(f"{count} × {_way(way)}" for way, count in counted.most_common())
    pairs = f"{len(links)} pair{'' if len(links) == 1 else 's'} of GPUs: {words}"
    if "SYS" in counted:
        first = next(link for link in links if link[2] == "SYS")
        return Row(
            id="links",
            group="links",
            light="yellow",
            what=f"{pairs} ({first[0]} and {first[1]} are apart, for one)",
            fix="where fewer GPUs do, choose those of one socket with --gpu-ids; sharding over a slow link costs time",
        )
    return Row(id="links", group="links", light="green", what=pairs)


def _way(way: str) -> str:
    return f"NVLink ({way[2:]} links)" if way.startswith("NV") else _WAYS.get(way, way)


def _to_host(cards: Sequence[Card], root: Path) -> list[Row]:
    """PCIe width and NUMA node, of the kernel. A card at rest lowers its speed by itself, but not its width."""
    told = [(card, *_pcie(card, root)) for card in cards if card.pci is not None]
    narrow = [(card, now, most) for card, now, most, _, _ in told if now and most and now < most]
    if narrow:
        which = ", ".join(f"GPU {card.index} has {now} of {most} lanes" for card, now, most in narrow)
        fix = "see whether it sits in a slot of full width: offload and loading are that much slower"
        return [Row(id="pcie", group="links", light="yellow", what=f"PCIe: {which}", fix=fix)]
    known = Counter((most, speed) for _, _, most, speed, _ in told if most and speed)
    if not known:
        return []
    words = ", ".join(f"{count} × {speed} with {lanes} lanes" for (lanes, speed), count in known.items())
    nodes = sorted({node for *_, node in told if node is not None})
    at = f"; NUMA node {', '.join(map(str, nodes))}" if nodes else ""
    return [Row(id="pcie", group="links", light="green", what=f"PCIe to the host: {words}{at}")]


def _pcie(card: Card, root: Path) -> tuple[int | None, int | None, str | None, int | None]:
    """Lanes now and at most, the speed at most, and the NUMA node."""
    place = root / "sys/bus/pci/devices" / str(card.pci)
    speed = re.match(r"([0-9.]+) GT/s", _line(place / "max_link_speed"))
    node = re.fullmatch("[0-9]{1,4}", _line(place / "numa_node"))
    return (
        _lanes(place / "current_link_width"),
        _lanes(place / "max_link_width"),
        f"{speed[1]} GT/s" if speed else None,
        int(node[0]) if node else None,
    )


def _lanes(path: Path) -> int | None:
    text = _line(path)
    return int(text) if re.fullmatch("[0-9]{1,2}", text) and 0 < int(text) <= 32 else None


def _line(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
