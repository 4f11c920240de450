"""What a machine reaches where nothing was measured on it: shares of what its maker states, and what nodes of such
cards usually are. The figures, with their ranges and sources, are data, in `reached.txt`.

A data sheet's peak says little about two cards: an L4 reaches half of it before 72 W end its clocks, an RTX 5090 more
than all of it, because its real clock is above the stated boost. So there is one share for each card that somebody
measured, and one for each kind and architecture. The same holds for links: eight H100s gather at four fifths of
NVLink's rate, while GeForce cards have to go through the host's memory.

`tightfit measure` replaces all of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path

from tightfit.hardware.catalogue import CARDS, PCIE_LANE_GB_S, CatalogueCard
from tightfit.types import Gpu, Hardware

FULL_NODE = 8  # GPUs of the usual server; its NICs and its mesh of links are shared out by it
FEW = 2  # as many cards as a desktop board takes
MESHED = ("gfx942", "gfx950")  # GPUs that have one link to each of the seven others instead of a switch


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One default: what is expected, the range that was seen, and where it comes from."""

    value: float
    low: float
    high: float
    source: str

    @property
    def spread(self) -> float:
        """It may be off by this share of itself, either way: half of the range over its middle, and so below 1."""
        return (self.high - self.low) / (self.high + self.low)

    def times(self, factor: float) -> Figure:
        return replace(self, value=self.value * factor, low=self.low * factor, high=self.high * factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """What to expect of a machine. Rates are bytes/s, in one direction where there are two."""

    products: Figure  # share of the card's stated dense 16-bit peak, by large products one by one
    memory: Figure  # share of the stated bandwidth of the card's memory, by copies
    link: Figure  # bus bandwidth of large collectives inside a node
    link_through_host: bool  # they pass through the host's memory, as its own copies do
    network: Figure  # what one node is joined to the others by, as sold or as the user says
    network_share: Figure  # of that, reached by large collectives across nodes
    host_link: Figure  # pinned copies between the host and one GPU, while the others are quiet
    gpus_per_root: Figure  # GPUs that share one such way when all of them copy
    host_memory: Figure  # all channels of a node together, as sold
    host_memory_share: Figure  # of that, reached by all cores together
    core_bytes_per_s: Figure  # host memory that one core reads and writes in an optimizer step
    cores: Figure  # of a node


def reached(hardware: Hardware) -> Reached:
    return _reached(hardware.gpu, hardware.gpus_per_node, hardware.network_bytes_per_s, hardware.link_given)


@lru_cache(maxsize=256)
def _reached(gpu: Gpu, gpus: int, network_bytes_per_s: float | None, link_given: bool) -> Reached:
    card = next((card for card in CARDS if card.gpu.name == gpu.name), None)
    names = [f"{card.family} {card.form}", card.family, f"{card.kind} {gpu.arch}"] if card else []
    keys = [*names, gpu.arch or "", card.kind if card else "", "*"]
    by_count = [each for key in keys for each in ((f"{key} few", key) if gpus <= FEW else (key,))]
    return Reached(
        products=_find("products", keys),
        memory=_find("memory", keys),
        link=_find_link(gpu, card, gpus, link_given=link_given),
        link_through_host=(gpu.link or "pcie4") in PCIE_LANE_GB_S and not _is_peer(card),
        network=_find_network(card, keys, gpus, network_bytes_per_s),
        network_share=_find("network share", keys),
        host_link=_find_host_link(gpu, card, keys, gpus),
        gpus_per_root=_at_most(_find("root", keys), gpus),
        host_memory=_find("host memory", by_count).times(1e9),
        host_memory_share=_find("host memory share", keys),
        core_bytes_per_s=_find("core", keys).times(1e9),
        cores=_find("cores", by_count),
    )


def _find_link(gpu: Gpu, card: CatalogueCard | None, gpus: int, *, link_given: bool) -> Figure:
    link, rate = gpu.link or "pcie4", gpu.link_bytes_per_s or 16e9 * PCIE_LANE_GB_S["pcie4"]
    if link in PCIE_LANE_GB_S:
        return _table()["link"]["pcie peer" if _is_peer(card) else "pcie host"].times(rate)
    if link == "nvlink" and card is not None and card.gpu.link != "nvlink" and card.nvlink_bytes_per_s is not None:
        return _table()["link"]["bridge"].times(rate)
    if gpu.arch in MESHED and not link_given:  # a GPU has one link to each of the others, and uses those that take part
        rate *= min(max(gpus, 2), FULL_NODE) - 1
        rate /= FULL_NODE - 1
    return _table()["link"][link].times(rate)


def _is_peer(card: CatalogueCard | None) -> bool:
    """Whether the driver lets such cards copy to each other over PCIe."""
    return card is not None and card.kind in ("server", "workstation")


def _find_network(card: CatalogueCard | None, keys: list[str], gpus: int, said: float | None) -> Figure:
    if said is not None:
        return Figure(value=said, low=said, high=said, source="said by the user")
    if card is not None and (card.gpu.link in ("nvlink", "xgmi") or card.family == "GH200"):
        rows = _table()["network"]
        if found := next((rows[f"{key} a GPU"] for key in keys if f"{key} a GPU" in rows), None):
            return found.times(1e9 * min(gpus, FULL_NODE))
    return _find("network", keys).times(1e9)


def _find_host_link(gpu: Gpu, card: CatalogueCard | None, keys: list[str], gpus: int) -> Figure:
    rows = _table()["host link"]
    if own := next((rows[key] for key in keys if key in rows), None):
        return own.times(1e9)
    share = _find("host link share", keys)
    if gpu.link in PCIE_LANE_GB_S and gpu.link_bytes_per_s:
        found = share.times(gpu.link_bytes_per_s)
    else:
        found = share.times(16e9 * PCIE_LANE_GB_S[_find_pcie(gpu.arch or "")])
    if gpus == FEW and card is not None and card.kind == "desktop":
        return replace(found, low=found.low / 2, source=f"{found.source}; a desktop's board may give each card 8 lanes")
    return found


def _find_pcie(arch: str) -> str:
    """The generation by which a card of that architecture is joined to its host. Data sheets; where the maker's word
    tells nothing, the fourth."""
    number = arch.removeprefix("sm_").rstrip("a")
    if number.isdigit():
        return "pcie3" if int(number) < 80 else "pcie4" if int(number) < 90 else "pcie5"
    return "pcie5" if arch in MESHED else "pcie4"


def _at_most(figure: Figure, most: float) -> Figure:
    return replace(figure, value=min(figure.value, most), low=min(figure.low, most), high=min(figure.high, most))


def _find(section: str, keys: list[str]) -> Figure:
    rows = _table()[section]
    return next(rows[key] for key in keys if key in rows)


@cache
def _table() -> dict[str, dict[str, Figure]]:
    return {section: dict(rows) for section, rows in _read(Path(__file__).with_name("reached.txt"))}


def _read(path: Path) -> Iterator[tuple[str, list[tuple[str, Figure]]]]:
    for part in re.split(r"^\[", path.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        section, _, body = part.partition("]\n")
        rows = [re.split(" {2,}", line, maxsplit=4) for line in body.splitlines() if line and not line.startswith("#")]
        yield (
            section,
            [
                (name, Figure(value=float(value), low=float(low), high=float(high), source=source))
                for name, value, low, high, source in rows
            ],
        )
