"""The cards that people train on. They are data, in `cards.txt`, whose head says where the figures come from."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

from tightfit.types import Gpu, Vendor

Kind = Literal["desktop", "laptop", "workstation", "server"]

GIB = 2**30
MIB = 2**20

PCIE_LANE_GB_S = {"pcie3": 0.985, "pcie4": 1.969, "pcie5": 3.938}
"""Of one lane, one direction, after encoding. The standard."""
_FLOPS_PER_CLOCK = {"sm": 512, "c": 2}
"""Of one core; of the matrix units of one GeForce multiprocessor with fp32 accumulation, the same since Turing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueCard:
    """One card as it is sold: several of them may share a family (A100: two sizes, two forms)."""

    family: str  # the name without size and form: 'A100', 'RTX 3050 Laptop'
    size_gib: int  # the number on the box
    form: str  # 'SXM', 'PCIe' …; empty where there is only one
    kind: Kind  # the machines that it is made for
    devices: int  # GPUs that the driver shows for one card: 2 for MI250's two dies, each with its own memory
    gpu: Gpu  # one device of it
    nvlink_bytes_per_s: (
        float | None
    )  # of its NVLink or of the bridge that is sold for it, one direction; None: it takes none
    aliases: tuple[str, ...]  # names that the words of its family do not explain, most of them a driver's


def native_bf16(arch: str | None) -> bool | None:
    """Whether the card multiplies bf16 in hardware; None where we do not know.

    A missing bf16 rate does not answer this: Hygon states no rates at all.
    """
    if found := re.fullmatch("sm_([0-9]+)", arch or ""):
        return int(found[1]) >= 80
    if re.fullmatch("gfx(908|90a|928|936|942|950|1[12].*)", arch or ""):
        return True
    return False if arch in ("gfx900", "gfx906") else None


def _read_cards(text: str) -> Iterator[CatalogueCard]:
    for line in text.splitlines():
        if line.startswith("["):
            vendor, arch, kind = cast(tuple[Vendor, str, Kind], line.strip("[]").split())
        elif line and not line.startswith("#"):
            cells: list[Any] = ["" if cell == "-" else cell for cell in re.split(" {2,}", line)]
            family, size, mib, rate, gb_s, link, form, *aliases = cells + [""] * (7 - len(cells))
            devices, gib = map(int, f"1x{size}".split("x")[-2:])
            link, _, bridge = link.partition("+nvlink:")
            link, _, width = link.partition(":")
            nvlink_gb_s = float(width if link == "nvlink" else bridge or 0)
            link_gb_s = PCIE_LANE_GB_S[link] * int(width or 16) if link in PCIE_LANE_GB_S else float(width or 0)
            fp16 = _read_tflops(rate.rpartition("/")[2])
            bf16 = _read_tflops(rate.partition("/")[0]) if native_bf16(arch) else None
            gpu = Gpu(
                name=family,
                vendor=vendor,
                memory_bytes=int(mib or gib * 1024) * MIB,
                arch=arch,
                bf16_flops=bf16 and bf16 * 1e12,
                fp16_flops=fp16 and fp16 * 1e12,
                memory_bytes_per_s=float(gb_s) * 1e9 if gb_s else None,
                link=link or None,
                link_bytes_per_s=link_gb_s * 1e9 or None,
            )
            yield CatalogueCard(
                family=family,
                size_gib=devices * gib,
                form=form,
                kind=kind,
                devices=devices,
                gpu=gpu,
                nvlink_bytes_per_s=nvlink_gb_s * 1e9 or None,
                aliases=tuple(aliases),
            )


def _read_tflops(cell: str) -> float | None:
    if found := re.fullmatch(r"(\d+)(sm|c)\*(\d+)", cell):
        return round(1e-6 * int(found[1]) * int(found[3]) * _FLOPS_PER_CLOCK[found[2]], 1)
    return float(cell) if cell else None


def _name_cards(cards: list[CatalogueCard]) -> Iterator[CatalogueCard]:
    """Give each device a name that tells it from its siblings, and no longer than that needs."""
    sizes: dict[str, set[int]] = {}
    forms: dict[str, set[str]] = {}
    for card in cards:
        sizes.setdefault(card.family, set()).add(round(card.gpu.memory_bytes / GIB))
        forms.setdefault(card.family, set()).add(card.form)
    for card in cards:
        size = f" {card.size_gib}GB" if len(sizes[card.family]) > 1 else ""
        form = f" {card.form}" if len(forms[card.family]) > 1 else ""
        yield replace(card, gpu=replace(card.gpu, name=card.family + size + form))


CARDS = tuple(_name_cards([*_read_cards(Path(__file__).with_name("cards.txt").read_text(encoding="utf-8"))]))
"""In the order in which `tightfit gpus` lists them."""
