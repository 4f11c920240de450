"""The cards that people train on, as data.

Where the figures come from. NVIDIA: the data sheets of the data centre and workstation cards, the
architecture white papers of Turing, Ampere GA102, Ada and Blackwell, the CUDA GPU list for `arch`.
AMD: the data sheets of Instinct and Radeon, ROCm's table of GPUs for `arch`. Hygon publishes no data
sheet, so its cards carry what their own tools report (size, `arch`) and nothing else. A figure that
its maker does not state is None: a wrong rate would be worse than an unknown one.

*Memory* is what the driver reports as total, as seen in `nvidia-smi`, `rocm-smi` or `hy-smi` output;
where we have not seen one it is the number on the box, in GiB. ECC on GDDR cards (A10, A40, L4, L40,
T4, P40) takes a sixteenth, and is on as they are delivered.

*Rates* are dense peaks with fp32 accumulation, since that is how training multiplies. GeForce cards
accumulate in fp32 at half the rate that is printed for fp16. For GeForce, NVIDIA prints the rate of
the first cards of a generation only; it is always the multiprocessors × boost clock ×
`_GEFORCE_FLOPS_PER_CLOCK`, so that is what the table holds and a test compares the products with the
printed rates. GTX cards have no matrix units: 16-bit products run on the fp32 units, at their rate.
Nothing before sm_80 multiplies bf16 natively. A laptop's clocks and memory speed are its maker's
choice and NVIDIA states ranges, so laptop cards have no rates.

*Links* are to another GPU of the node, one direction, all lanes together: NVLink's and Infinity
Fabric's halves of the printed totals, PCIe by its lanes after encoding. A bridge that is sold apart
(RTX 3090, A40, H100 NVL, MI210 …) is not assumed. Where links differ inside a node (MI250), it is
the slowest hop.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from tightfit.types import Gpu, Vendor

GIB = 2**30
MIB = 2**20

_Link = Literal["nvlink", "xgmi", "pcie3", "pcie4", "pcie5"]

_PCIE_LANE_GB_S: dict[_Link, float] = {"pcie3": 0.985, "pcie4": 1.969, "pcie5": 3.938}
_GEFORCE_FLOPS_PER_CLOCK = 512
"""Of one multiprocessor's matrix units, fp32 accumulation: the same from Turing to Blackwell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueCard:
    """One card as it is sold: several of them may share a family (A100: two sizes, two forms)."""

    family: str
    """The name without size and form: 'A100', 'RTX 3050 Laptop'."""
    size_gib: int
    """The number on the box."""
    form: str
    """'SXM', 'PCIe' …; empty where there is only one."""
    devices: int
    """GPUs that the driver shows for one card: 2 for MI250's two dies, each with its own memory."""
    gpu: Gpu
    """One device of it."""


class _Row(NamedTuple):
    family: str
    gib: int
    mib: int | None = None
    """What the driver reports, where seen and not gib × 1024."""
    bf16: float | None = None
    """TFLOP/s."""
    fp16: float | None = None
    gb_s: float | None = None
    form: str = ""
    link: _Link | None = None
    link_gb_s: float | None = None
    """None: PCIe with 16 lanes."""
    devices: int = 1


def _cards(vendor: Vendor, arch: str, *rows: _Row) -> list[CatalogueCard]:
    def scale(value: float | None, unit: float) -> float | None:
        return None if value is None else value * unit

    cards = []
    for row in rows:
        link_gb_s = row.link_gb_s
        if link_gb_s is None and row.link in _PCIE_LANE_GB_S:
            link_gb_s = 16 * _PCIE_LANE_GB_S[row.link]
        gpu = Gpu(
            name=row.family,
            vendor=vendor,
            memory_bytes=(row.mib or row.gib * 1024) * MIB,
            arch=arch,
            bf16_flops=scale(row.bf16, 1e12),
            fp16_flops=scale(row.fp16, 1e12),
            memory_bytes_per_s=scale(row.gb_s, 1e9),
            link=row.link,
            link_bytes_per_s=scale(link_gb_s, 1e9),
        )
        cards.append(CatalogueCard(family=row.family, size_gib=row.gib, form=row.form, devices=row.devices, gpu=gpu))
    return cards


def native_bf16(arch: str | None) -> bool | None:
    """Whether the card multiplies bf16 in hardware; None where we do not know.

    A missing bf16 rate does not answer this: Hygon states no rates at all.
    """
    if arch is None:
        return None
    if arch.startswith("sm_") and arch[3:].isdigit():
        return int(arch[3:]) >= 80
    if arch in {"gfx900", "gfx906"}:
        return False
    if arch in {"gfx908", "gfx90a", "gfx928", "gfx936", "gfx942", "gfx950"} or arch.startswith(("gfx11", "gfx12")):
        return True
    return None


# --- GeForce ------------------------------------------------------------------------------------


def _gtx(arch: str, *rows: tuple[str, int, int, int, float]) -> list[CatalogueCard]:
    """Rows: family, GiB, cores, boost MHz, GB/s. Two operations a core and clock."""

    def row(family: str, gib: int, cores: int, mhz: int, gb_s: float) -> _Row:
        return _Row(family, gib, fp16=round(2e-6 * cores * mhz, 1), gb_s=gb_s, link="pcie3")

    return _cards("nvidia", arch, *(row(*values) for values in rows))


def _rtx(arch: str, link: _Link, *rows: tuple[str, int, int | None, int, int, float, int]) -> list[CatalogueCard]:
    """Rows: family, GiB, driver's MiB, multiprocessors, boost MHz, GB/s, PCIe lanes."""

    def row(family: str, gib: int, mib: int | None, units: int, mhz: int, gb_s: float, lanes: int) -> _Row:
        rate = round(1e-6 * units * mhz * _GEFORCE_FLOPS_PER_CLOCK, 1)
        bf16 = rate if native_bf16(arch) else None
        return _Row(family, gib, mib, bf16, rate, gb_s, "", link, lanes * _PCIE_LANE_GB_S[link])

    return _cards("nvidia", arch, *(row(*values) for values in rows))


def _laptops(arch: str, *rows: tuple[str, int, int | None]) -> list[CatalogueCard]:
    """Rows: family, GiB, driver's MiB. One GPU a laptop, so no link either."""
    return _cards("nvidia", arch, *(_Row(f"{name} Laptop", gib, mib) for name, gib, mib in rows))


_GEFORCE = [
    *_gtx(
        "sm_61",
        ("GTX 1050", 2, 640, 1455, 112),
        ("GTX 1050", 3, 768, 1518, 84),
        ("GTX 1050 Ti", 4, 768, 1392, 112),
        ("GTX 1060", 3, 1152, 1708, 192),
        ("GTX 1060", 6, 1280, 1708, 192),
        ("GTX 1070", 8, 1920, 1683, 256),
        ("GTX 1070 Ti", 8, 2432, 1683, 256),
        ("GTX 1080", 8, 2560, 1733, 320),
        ("GTX 1080 Ti", 11, 3584, 1582, 484),
        ("TITAN X Pascal", 12, 3584, 1531, 480),
        ("TITAN Xp", 12, 3840, 1582, 547.7),
    ),
    *_gtx(
        "sm_75",
        ("GTX 1650", 4, 896, 1665, 128),
        ("GTX 1650 SUPER", 4, 1280, 1725, 192),
        ("GTX 1660", 6, 1408, 1785, 192),
        ("GTX 1660 SUPER", 6, 1408, 1785, 336),
        ("GTX 1660 Ti", 6, 1536, 1770, 288),
    ),
    *_rtx(
        "sm_75",
        "pcie3",
        ("RTX 2060", 6, None, 30, 1680, 336, 16),
        ("RTX 2060", 12, None, 34, 1650, 336, 16),
        ("RTX 2060 SUPER", 8, None, 34, 1650, 448, 16),
        ("RTX 2070", 8, None, 36, 1620, 448, 16),
        ("RTX 2070 SUPER", 8, None, 40, 1770, 448, 16),
        ("RTX 2080", 8, None, 46, 1710, 448, 16),
        ("RTX 2080 SUPER", 8, None, 48, 1815, 496, 16),
        ("RTX 2080 Ti", 11, None, 68, 1545, 616, 16),
    ),
    *_rtx(
        "sm_86",
        "pcie4",
        ("RTX 3050", 6, None, 18, 1470, 168, 8),
        ("RTX 3050", 8, None, 20, 1777, 224, 8),
        ("RTX 3060", 8, None, 28, 1777, 240, 16),
        ("RTX 3060", 12, None, 28, 1777, 360, 16),
        ("RTX 3060 Ti", 8, None, 38, 1665, 448, 16),
        ("RTX 3070", 8, None, 46, 1725, 448, 16),
        ("RTX 3070 Ti", 8, None, 48, 1770, 608, 16),
        ("RTX 3080", 10, None, 68, 1710, 760, 16),
        ("RTX 3080", 12, None, 70, 1710, 912, 16),
        ("RTX 3080 Ti", 12, None, 80, 1665, 912, 16),
        ("RTX 3090", 24, None, 82, 1695, 936, 16),
        ("RTX 3090 Ti", 24, 24564, 84, 1860, 1008, 16),
    ),
    *_rtx(
        "sm_89",
        "pcie4",
        ("RTX 4060", 8, 8188, 24, 2460, 272, 8),
        ("RTX 4060 Ti", 8, 8188, 34, 2535, 288, 8),
        ("RTX 4060 Ti", 16, 16380, 34, 2535, 288, 8),
        ("RTX 4070", 12, 12282, 46, 2475, 504, 16),
        ("RTX 4070 SUPER", 12, 12282, 56, 2475, 504, 16),
        ("RTX 4070 Ti", 12, 12282, 60, 2610, 504, 16),
        ("RTX 4070 Ti SUPER", 16, 16376, 66, 2610, 672, 16),
        ("RTX 4080", 16, 16376, 76, 2505, 716.8, 16),
        ("RTX 4080 SUPER", 16, 16376, 80, 2550, 736, 16),
        ("RTX 4090", 24, 24564, 128, 2520, 1008, 16),
        ("RTX 4090 D", 24, 24564, 114, 2520, 1008, 16),
    ),
    *_rtx(
        "sm_120",
        "pcie5",
        ("RTX 5050", 8, 8151, 20, 2572, 320, 8),
        ("RTX 5060", 8, 8151, 30, 2497, 448, 8),
        ("RTX 5060 Ti", 8, 8151, 36, 2572, 448, 8),
        ("RTX 5060 Ti", 16, 16311, 36, 2572, 448, 8),
        ("RTX 5070", 12, 12227, 48, 2512, 672, 16),
        ("RTX 5070 Ti", 16, 16303, 70, 2452, 896, 16),
        ("RTX 5080", 16, 16303, 84, 2617, 960, 16),
        ("RTX 5090", 32, 32607, 170, 2407, 1792, 16),
    ),
    # Its matrix rate is cut to an unstated share of the RTX 5090's.
    *_cards("nvidia", "sm_120", _Row("RTX 5090 D", 32, 32607, gb_s=1792, link="pcie5")),
    *_laptops("sm_75", ("GTX 1650", 4, None), ("GTX 1650 Ti", 4, None), ("GTX 1660 Ti", 6, None)),
    *_laptops("sm_75", ("RTX 2060", 6, None), ("RTX 2070", 8, None), ("RTX 2080", 8, None)),
    *_laptops(
        "sm_86",
        ("RTX 3050", 4, None),
        ("RTX 3050", 6, None),
        ("RTX 3050 Ti", 4, None),
        ("RTX 3060", 6, None),
        ("RTX 3070", 8, None),
        ("RTX 3070 Ti", 8, None),
        ("RTX 3080", 8, None),
        ("RTX 3080", 16, None),
        ("RTX 3080 Ti", 16, None),
    ),
    *_laptops(
        "sm_89",
        ("RTX 4050", 6, 6141),
        ("RTX 4060", 8, 8188),
        ("RTX 4070", 8, 8188),
        ("RTX 4080", 12, 12282),
        ("RTX 4090", 16, 16376),
    ),
    *_laptops(
        "sm_120",
        ("RTX 5050", 8, 8151),
        ("RTX 5060", 8, 8151),
        ("RTX 5070", 8, 8151),
        ("RTX 5070 Ti", 12, 12227),
        ("RTX 5080", 16, 16303),
        ("RTX 5090", 24, 24463),
    ),
]

# --- NVIDIA workstation -------------------------------------------------------------------------

_WORKSTATION = [
    *_cards("nvidia", "sm_70", _Row("TITAN V", 12, None, None, 110, 653, link="pcie3")),
    *_cards(
        "nvidia",
        "sm_75",
        _Row("TITAN RTX", 24, None, None, 130.5, 672, link="pcie3"),
        _Row("Quadro RTX 6000", 24, None, None, 130.5, 672, link="pcie3"),
        _Row("Quadro RTX 8000", 48, None, None, 130.5, 672, link="pcie3"),
    ),
    *_cards(
        "nvidia",
        "sm_86",
        _Row("RTX A4000", 16, 16376, 76.7, 76.7, 448, link="pcie4"),
        _Row("RTX A4500", 20, None, 94.6, 94.6, 640, link="pcie4"),
        _Row("RTX A5000", 24, 24564, 111.1, 111.1, 768, link="pcie4"),
        _Row("RTX A6000", 48, 49140, 154.8, 154.8, 768, link="pcie4"),
    ),
    *_cards(
        "nvidia",
        "sm_89",
        _Row("RTX 4000 Ada", 20, None, 106.9, 106.9, 360, link="pcie4"),
        _Row("RTX 4500 Ada", 24, None, 158.5, 158.5, 432, link="pcie4"),
        _Row("RTX 5000 Ada", 32, None, 261.1, 261.1, 576, link="pcie4"),
        _Row("RTX 6000 Ada", 48, 49140, 364.2, 364.2, 960, link="pcie4"),
    ),
    *_cards(
        "nvidia",
        "sm_120",
        _Row("RTX PRO 6000", 96, 97887, 503.8, 503.8, 1792, "Workstation", "pcie5"),
        _Row("RTX PRO 6000", 96, 97887, 438.9, 438.9, 1792, "Max-Q", "pcie5"),
        # Four times its printed fp32 rate, as on the other two.
        _Row("RTX PRO 6000", 96, 97887, 480, 480, 1597, "Server", "pcie5"),
    ),
]

# --- NVIDIA data centre -------------------------------------------------------------------------

_DATA_CENTRE = [
    *_cards(
        "nvidia",
        "sm_60",
        _Row("P100", 16, None, None, 18.7, 732, "PCIe", "pcie3"),
        _Row("P100", 12, None, None, 18.7, 549, "PCIe", "pcie3"),
        _Row("P100", 16, None, None, 21.2, 732, "SXM", "nvlink", 80),
    ),
    *_cards("nvidia", "sm_61", _Row("P40", 24, 22919, None, 12, 346, link="pcie3")),
    *_cards(
        "nvidia",
        "sm_70",
        _Row("V100", 16, None, None, 125, 900, "SXM", "nvlink", 150),
        _Row("V100", 32, None, None, 125, 900, "SXM", "nvlink", 150),
        _Row("V100", 16, None, None, 112, 900, "PCIe", "pcie3"),
        _Row("V100", 32, None, None, 112, 900, "PCIe", "pcie3"),
        _Row("V100S", 32, None, None, 130, 1134, "PCIe", "pcie3"),
    ),
    *_cards("nvidia", "sm_75", _Row("T4", 16, 15360, None, 65, 320, link="pcie3")),
    *_cards(
        "nvidia",
        "sm_80",
        _Row("A30", 24, None, 165, 165, 933, link="pcie4"),
        _Row("A100", 40, None, 312, 312, 1555, "SXM", "nvlink", 300),
        _Row("A100", 80, None, 312, 312, 2039, "SXM", "nvlink", 300),
        _Row("A100", 40, None, 312, 312, 1555, "PCIe", "pcie4"),
        _Row("A100", 80, None, 312, 312, 1935, "PCIe", "pcie4"),
        _Row("A800", 80, None, 312, 312, 2039, "SXM", "nvlink", 200),
        _Row("A800", 80, None, 312, 312, 1935, "PCIe", "pcie4"),
    ),
    *_cards(
        "nvidia",
        "sm_86",
        _Row("A2", 16, 15356, 18, 18, 200, link="pcie4", link_gb_s=8 * _PCIE_LANE_GB_S["pcie4"]),
        _Row("A10", 24, 23028, 125, 125, 600, link="pcie4"),
        # Made for one cloud; its rate is in no public data sheet.
        _Row("A10G", 24, 23028, None, None, 600, link="pcie4"),
        _Row("A40", 48, 46068, 149.7, 149.7, 696, link="pcie4"),
    ),
    *_cards(
        "nvidia",
        "sm_89",
        _Row("L4", 24, 23034, 121, 121, 300, link="pcie4"),
        _Row("L20", 48, 46068, 119.5, 119.5, 864, link="pcie4"),
        _Row("L40", 48, 46068, 181, 181, 864, link="pcie4"),
        _Row("L40S", 48, 46068, 362, 362, 864, link="pcie4"),
    ),
    *_cards(
        "nvidia",
        "sm_90",
        _Row("H100", 80, 81559, 989.4, 989.4, 3350, "SXM", "nvlink", 450),
        _Row("H100", 80, 81559, 756, 756, 2000, "PCIe", "pcie5"),
        _Row("H100 NVL", 94, 95830, 835, 835, 3900, "", "pcie5"),
        _Row("H800", 80, 81559, 989.4, 989.4, 3350, "SXM", "nvlink", 200),
        _Row("H20", 96, 97871, 148, 148, 4000, "SXM", "nvlink", 450),
        _Row("H20", 141, 143771, 148, 148, 4800, "SXM", "nvlink", 450),
        _Row("H200", 141, 143771, 989.4, 989.4, 4800, "SXM", "nvlink", 450),
        _Row("H200 NVL", 141, 143771, 835, 835, 4800, "", "pcie5"),
        # A superchip is a node of its own unless a rack's switches join several.
        _Row("GH200", 96, 97871, 989.4, 989.4, 4000),
        _Row("GH200", 144, None, 989.4, 989.4, 4900),
    ),
    *_cards("nvidia", "sm_100", _Row("B200", 180, 183359, 2250, 2250, 8000, "SXM", "nvlink", 900)),
]

# --- AMD ----------------------------------------------------------------------------------------

_AMD = [
    *_cards(
        "amd",
        "gfx906",
        _Row("MI50", 16, None, None, 26.5, 1024, link="pcie4"),
        _Row("MI50", 32, None, None, 26.5, 1024, link="pcie4"),
        _Row("MI60", 32, None, None, 29.5, 1024, link="pcie4"),
    ),
    *_cards("amd", "gfx908", _Row("MI100", 32, None, 92.3, 184.6, 1229, link="pcie4")),
    *_cards(
        "amd",
        "gfx90a",
        _Row("MI210", 64, 65520, 181, 181, 1638, link="pcie4"),
        # One row a die, which is what the driver counts, and one a card, which is what is sold.
        _Row("MI250", 64, 65520, 181, 181, 1638, "", "xgmi", 50),
        _Row("MI250", 128, 65520, 181, 181, 1638, "", "xgmi", 50, 2),
        _Row("MI250X", 64, 65520, 191.5, 191.5, 1638, "", "xgmi", 50),
        _Row("MI250X", 128, 65520, 191.5, 191.5, 1638, "", "xgmi", 50, 2),
    ),
    *_cards(
        "amd",
        "gfx942",
        _Row("MI300X", 192, 196592, 1307.4, 1307.4, 5300, "", "xgmi", 448),
        _Row("MI325X", 256, None, 1307.4, 1307.4, 6000, "", "xgmi", 448),
    ),
    *_cards(
        "amd",
        "gfx950",
        _Row("MI350X", 288, 294896, 2300, 2300, 8000, "", "xgmi", 537.6),
        _Row("MI355X", 288, 294896, 2500, 2500, 8000, "", "xgmi", 537.6),
    ),
    *_cards(
        "amd",
        "gfx1100",
        _Row("RX 7900 XT", 20, 20464, 103, 103, 800, link="pcie4"),
        _Row("RX 7900 XTX", 24, 24560, 123, 123, 960, link="pcie4"),
        _Row("PRO W7900", 48, None, 122.6, 122.6, 864, link="pcie4"),
    ),
]

# --- Hygon --------------------------------------------------------------------------------------

_HYGON = [
    *_cards("hygon", "gfx906", _Row("Z100", 16), _Row("Z100", 32), _Row("Z100L", 32)),
    *_cards("hygon", "gfx926", _Row("K100", 64)),
    *_cards("hygon", "gfx928", _Row("K100-AI", 64, 65520)),
    *_cards("hygon", "gfx936", _Row("BW1000", 64, 65520)),
]


def _name_cards(cards: list[CatalogueCard]) -> Iterator[CatalogueCard]:
    """Give each device a name that tells it from its siblings, and no longer than that needs."""
    sizes: dict[str, set[int]] = {}
    forms: dict[str, set[str]] = {}
    for card in cards:
        sizes.setdefault(card.family, set()).add(round(card.gpu.memory_bytes / GIB))
        forms.setdefault(card.family, set()).add(card.form)
    for card in cards:
        words = [card.family]
        if len(sizes[card.family]) > 1:
            words.append(f"{card.size_gib}GB")
        if len(forms[card.family]) > 1:
            words.append(card.form)
        yield replace(card, gpu=replace(card.gpu, name=" ".join(words)))


CARDS: tuple[CatalogueCard, ...] = tuple(_name_cards([*_GEFORCE, *_WORKSTATION, *_DATA_CENTRE, *_AMD, *_HYGON]))
"""In the order in which `tightfit gpus` lists them. Within a family the form that is meant when none
is named comes first."""

ALIASES: dict[str, tuple[str, int | None, str | None]] = {
    "NVIDIA GH200 480GB": ("GH200", 96, None),  # the 480 GB are its processor's
    "NVIDIA GH200 120GB": ("GH200", 96, None),
    "NVIDIA GH200 144G HBM3e": ("GH200", 144, None),
    "NVIDIA H100 80GB HBM3": ("H100", 80, "SXM"),
    "NVIDIA H20-3e": ("H20", 141, None),
    "RTX 8000": ("Quadro RTX 8000", None, None),
    "RTX TITAN": ("TITAN RTX", None, None),
    "AMD Instinct MI250X / MI250": ("MI250", 64, None),  # the driver does not know which
    "W7900": ("PRO W7900", None, None),
    "BW": ("BW1000", None, None),
    "BW200, UBB BW1000": ("BW1000", None, None),
}
"""Names that the words of a family do not explain, most of them a driver's: family, size, form."""
