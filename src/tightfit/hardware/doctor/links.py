"""How the cards reach each other and the host."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tightfit.hardware.doctor.row import Row
from tightfit.hardware.machine import read_text
from tightfit.hardware.probes.card import Card
from tightfit.messages import Listing, Message, Said

Link = tuple[str, str, str]
_WAYS: dict[str, Said] = {
    "PIX": Message("doctor.pix"),
    "PXB": Message("doctor.pxb"),
    "PHB": Message("doctor.phb"),
    "NODE": Message("doctor.node"),
    "SYS": Message("doctor.sys"),
    "PCIE": "PCIe",
    "XGMI": "XGMI",
}


def link_rows(cards: Sequence[Card], links: Sequence[Link], root: Path = Path("/")) -> list[Row]:
    """Links between cards, and each card's link to the host."""
    return ([_between(links)] if len(cards) > 1 else []) + _to_host(cards, root)


def _between(links: Sequence[Link]) -> Row:
    if not links:
        return Row(id="links", group="links", light="green", what=Message("doctor.links-unknown"))
    counted = Counter(way for _, _, way in links)
    ways = Listing(
        Message(
            "doctor.so-many",
            count=count,
            what=Message("doctor.nvlink", links=way[2:]) if way.startswith("NV") else _WAYS.get(way, way),
        )
        for way, count in counted.most_common()
    )
    if "SYS" in counted:
        first = next(link for link in links if link[2] == "SYS")
        what = Message("doctor.links-apart", pairs=len(links), ways=ways, one=first[0], other=first[1])
        return Row(id="links", group="links", light="yellow", what=what, fix=Message("doctor.links-apart-fix"))
    return Row(id="links", group="links", light="green", what=Message("doctor.links", pairs=len(links), ways=ways))


def _to_host(cards: Sequence[Card], root: Path) -> list[Row]:
    """PCIe width and NUMA node, of the kernel. A card at rest lowers its speed by itself, but not its width."""
    told = [(card, *_pcie(card, root)) for card in cards if card.pci is not None]
    narrow = [(card, now, most) for card, now, most, _, _ in told if now and most and now < most]
    if narrow:
        which = Listing(Message("doctor.few-lanes", index=card.index, now=now, most=most) for card, now, most in narrow)
        what, fix = Message("doctor.pcie-narrow", which=which), Message("doctor.pcie-narrow-fix")
        return [Row(id="pcie", group="links", light="yellow", what=what, fix=fix)]
    known = Counter((most, speed) for _, _, most, speed, _ in told if most and speed)
    if not known:
        return []
    links = Listing(
        Message("doctor.lanes", count=count, speed=speed, lanes=lanes) for (lanes, speed), count in known.items()
    )
    nodes = sorted({node for *_, node in told if node is not None})
    what = Message("doctor.pcie", links=links, nodes=Listing(map(str, nodes)) if nodes else None)
    return [Row(id="pcie", group="links", light="green", what=what)]


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
    return read_text(path).strip()
