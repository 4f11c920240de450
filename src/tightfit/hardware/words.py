"""Hardware from a word: `6x32GB`, `4xRTX4090`, `2x8xA100-80GB`.

A word is counts and a card. The card may be spelt as people write it (`4090`, `rtx-4090`), as a
driver prints it (`NVIDIA A100-SXM4-80GB`), or be no more than its size (`32GB`): then its rates are
unknown, but whether a job fits is not. We never guess between two sizes of one card, since that is
the very number the answer hangs on; between two forms (SXM, PCIe) we take the usual one and say so.

GB in a hardware word means GiB, as cards are sold. In a rate it means what networks and links are sold by: 10^9 bytes.

What joins the GPUs has words of its own: `8x400Gb` is a network, `nvlink`, `pcie4` and `50GB/s` are links.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import replace
from difflib import get_close_matches
from functools import cache
from typing import Literal, NamedTuple, cast

from tightfit.hardware.catalogue import CARDS, GIB, MIB, PCIE_LANE_GB_S, CatalogueCard
from tightfit.inputs.spelling import nearest
from tightfit.messages import Choice, Listing, Message, Said
from tightfit.types import Gpu, Hardware, HardwareError

MAX_GPUS_PER_NODE = 1024
MAX_NODES = 16384

MAX_WORD = 100
_MAX_MEMORY = 16 * 1024 * GIB
MAX_SIZE = 1024 * 1024 * GIB
_UNITS = {"K": 2**10, "M": MIB, "G": GIB, "T": 2**40, "P": 2**50}
_SIZE = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*([KMGTP])(?:i?B)?", re.IGNORECASE)
_COUNT = re.compile(r"\s*([0-9]+)\s*[x*]\s*", re.IGNORECASE)
_COUNT_BEHIND = re.compile(r"(.+?)\s*[x*]\s*([0-9]+)", re.IGNORECASE)

# In a card's name a lone G needs a gap before the number, or A10G would be a card of 10 GB.
_SIZE_IN_NAME = re.compile(
    r"(?<![0-9.])([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*([MGT]i?B)(?![a-z0-9])"
    r"|(?:^|(?<=[\s_-]))([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*(G)(?![a-z0-9])",
    re.IGNORECASE,
)
_NETWORK = re.compile(r"(?:([0-9]{1,4})\s*[xX*]\s*)?([0-9]{1,6}(?:\.[0-9]{1,6})?)\s*([MGTmgt]?)([A-Za-z/]*)")
_BITS = re.compile(r"|b|bits?", re.IGNORECASE)
_LINK_RATE = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,6})?)\s*([MGT]?)(.*)", re.IGNORECASE)
_RATES = {"M": 1e6, "G": 1e9, "T": 1e12}
_MOST_NETWORK = 12.5e12
"""Of a node: 250 NICs of 400 Gb/s, more than anything that is built."""
_MOST_LINK = 10e12
_LINKS = ("nvlink", "xgmi", "pcie3", "pcie4", "pcie5")
_LINK_SPELLINGS = {
    **{name: name for name in _LINKS},
    **{f"pcie{dot}{gen}{zero}": f"pcie{gen}" for gen in "345" for dot in ("", "gen", "x16gen") for zero in ("", ".0")},
    "infinityfabric": "xgmi",
}
_SIZE_WITHOUT_UNIT = re.compile(r"[\s_-]([0-9]{1,3})\s*$")
_MAKERS = re.compile(r"nvidia|geforce|instinct|radeon|hygon", re.IGNORECASE)
_LAPTOP = re.compile(r"with max-?q design|mobile", re.IGNORECASE)
_GLUED_FORM = re.compile(r"sxm[2-6]?|pcie")
_NOISE = re.compile(
    "ac|amd|blackwell|cards?|[dh]cu|edition|generation|gpus?|graphics|hbm[23]e?|mba|mcm|oam|series|tesla|tm"
)
_FORMS = {"maxq": "Max-Q", "server": "Server", "workstation": "Workstation", "pcie": "PCIe"} | {
    f"sxm{n}": "SXM" for n in ("", 2, 3, 4, 5, 6)
}


class _Name(NamedTuple):
    """A card's name taken apart."""

    key: str
    size_gib: float | None
    form: str | None


def parse_hardware(word: str, host_ram: str | None = None, nvme: str | None = None) -> Hardware:
    """Read `[nodes x] [GPUs x] card`, where card is a name, a size or both.

    `host_ram` and `nvme` are a node's, as `parse_size` reads them.
    """
    counts, card_word = _split(_plain(word))
    if any(len(count) > 9 for count in counts):
        raise HardwareError(Message("machine.too-many-gpus", word=_quote(word)))
    nodes, gpus = [1, 1, *map(int, counts)][-2:]
    card, gpu, because = _read_card(card_word)
    if card is not None and card.devices > 1:
        each, cards = round(card.gpu.memory_bytes / GIB), gpus
        gpus *= card.devices
        because += (Message("machine.dies", card=card.family, dies=card.devices, size=each, cards=cards, gpus=gpus),)
    if nodes < 1 or gpus < 1:
        raise HardwareError(Message("machine.no-gpu-in-word", word=_quote(word)))
    if gpus > MAX_GPUS_PER_NODE:
        raise HardwareError(Message("machine.too-many-in-one", word=_quote(word), gpus=gpus))
    if nodes > MAX_NODES:
        raise HardwareError(Message("machine.too-many-nodes", word=_quote(word), nodes=nodes, most=MAX_NODES))
    return Hardware(
        gpu=gpu,
        nodes=nodes,
        gpus_per_node=gpus,
        host_ram_bytes=None if host_ram is None else parse_size(host_ram),
        nvme_bytes=None if nvme is None else parse_size(nvme),
        because=because,
    )


def parse_size(text: str) -> int:
    """Bytes in '512GB', '1.5TB', '65520 MiB', '80G'. Every unit is a power of 1024: GB reads as GiB."""
    match = _SIZE.fullmatch(_plain(text))
    if match is None:
        raise HardwareError(Message("machine.not-a-size", word=_quote(text), fix=Message("machine.write-size")))
    size = round(float(match[1]) * _UNITS[match[2].upper()])
    if size < 1:
        raise HardwareError(Message("machine.empty-size", word=_quote(text)))
    if size > MAX_SIZE:
        raise HardwareError(Message("machine.size-too-large", word=_quote(text), most=MAX_SIZE // 1024**4))
    return size


def connect(hardware: Hardware, network: str | None, link: str | None) -> Hardware:
    """The same machine with what was said of its network and of the link between its GPUs."""
    if network is not None:
        hardware = replace(hardware, network_bytes_per_s=parse_network(network))
    if link is None:
        return hardware
    gpu, word = hardware.gpu, parse_link(link)
    if word != "nvlink" or gpu.link == "nvlink":
        return replace(hardware, gpu=_relink(gpu, word), link_given=True)
    card = next((card for card in CARDS if card.gpu.name == gpu.name), None)
    if card is None and gpu.vendor in ("nvidia", "unknown"):
        raise HardwareError(Message("machine.unknown-nvlink", card=gpu.name))
    if card is None or card.nvlink_bytes_per_s is None:
        raise HardwareError(Message("machine.no-nvlink", card=gpu.name, own=gpu.link or "pcie4"))
    if (
        hardware.gpus_per_node > 2 and gpu.link is not None
    ):  # a bridge: whoever goes round by all of them takes PCIe too
        said = Message("machine.bridge-of-two", card=gpu.name, gpus=hardware.gpus_per_node, own=gpu.link)
        return replace(hardware, link_given=True, because=(*hardware.because, said))
    gpu = replace(gpu, link="nvlink", link_bytes_per_s=card.nvlink_bytes_per_s)
    return replace(hardware, gpu=gpu, link_given=True)


def parse_network(text: str) -> float:
    """Bytes/s of one node, one direction, in '400Gb' (one NIC), '8x400Gb', '400Gbps', '400Gbit/s', '50GB/s'.

    A small b is a bit and a large B a byte. A byte without a second is no rate: whoever writes 400GB means 400Gb.
    """
    match = _NETWORK.fullmatch(_plain(text))
    if match is None:
        raise HardwareError(Message("machine.not-a-network", word=_quote(text)))
    nics, rate, unit, tail = int(match[1] or 1), float(match[2]), match[3].upper(), match[4]
    letters = re.sub(r"(/s|ps)$", "", tail, flags=re.IGNORECASE)
    in_bytes = letters == "B" and letters != tail
    if not unit or not (in_bytes or (letters != "B" and _BITS.fullmatch(letters))):
        close = f"{f'{nics}x' if match[1] else ''}{match[2]}{unit or 'G'}b"
        raise HardwareError(Message("machine.not-a-network-but", word=_quote(text), close=close))
    carried = nics * rate * _RATES[unit] / (1 if in_bytes else 8)
    if not 0 < carried <= _MOST_NETWORK:
        raise HardwareError(Message("machine.implausible-network", word=_quote(text), most=_MOST_NETWORK * 8 // 1e12))
    return carried


def parse_link(text: str) -> str | float:
    """What joins the GPUs of a node, by name ('nvlink', 'pcie4'), or its bytes/s, one direction, in '50GB/s'."""
    word = _plain(text)
    if name := _LINK_SPELLINGS.get(re.sub(r"[\s_-]", "", word.lower())):
        return name
    match = _LINK_RATE.match(word)
    if match is None:
        kin = [link for link in _LINKS if link.startswith(word.lower())]  # 'pcie': of which generation?
        if len(kin) < 2 and (close := nearest(word, _LINKS)):
            raise HardwareError(Message("machine.not-a-link-but", word=_quote(text), close=close))
        names = Listing(kin if len(kin) > 1 else _LINKS)
        raise HardwareError(Message("machine.not-a-link", word=_quote(text), names=names))
    number, unit, letters = float(match[1]), match[2].upper() or "G", match[3]
    if not match[2] or letters not in ("B/s", "B/S"):  # a small b is a bit, as in a network's rate
        close = f"{number / (8 if letters.startswith('b') else 1):g}{unit}B/s"
        raise HardwareError(Message("machine.not-a-link-but", word=_quote(text), close=close))
    rate = number * _RATES[unit]
    if not 0 < rate <= _MOST_LINK:
        raise HardwareError(Message("machine.implausible-link", word=_quote(text), most=_MOST_LINK // 1e12))
    return rate


def recognise(name: str, memory_bytes: int | None) -> tuple[Gpu | None, Message | None]:
    """The catalogue's card for a name that a driver printed, with the memory that the driver reports.

    Among the sizes of a family the reported total decides. The sentence, if there is one, tells of
    a card whose memory is not what it is sold with. (None, None): not in the catalogue.
    """
    # 'Navi 31 [Radeon RX 7900 XT/7900 XTX]' is one of two cards.
    inside = [part for text in re.findall(r"\[([^\]]+)\]", name) for part in text.split("/")]
    cards = [card for spelling in (name, *inside) for card in _find_cards(_take_apart(spelling))]
    if not cards:
        return None, None
    if memory_bytes is None:
        return (cards[0].gpu if len({card.gpu.memory_bytes for card in cards}) == 1 else None), None
    card = min(cards, key=lambda card: abs(card.gpu.memory_bytes - memory_bytes))
    sold, said = card.gpu.memory_bytes, None
    if abs(sold - memory_bytes) > 0.12 * sold:
        said = Message("machine.odd-size", card=card.family, sold=sold / GIB, reported=memory_bytes / GIB)
    return replace(card.gpu, memory_bytes=memory_bytes), said


# --- the counts ---------------------------------------------------------------------------------


def split_counts(word: str) -> tuple[list[int], str]:
    """How many nodes and GPUs a word names before its card, as far as it does, and the card: `2x8xA100` → [2, 8]."""
    counts, card = _split(_plain(word))
    return [int(count) for count in counts if len(count) <= 9], card


def _split(word: str) -> tuple[list[str], str]:
    """The counts before the card, and the card. `7900 XTX` is a card, not 7900 of something."""
    splits: list[tuple[list[str], str]] = [([], word)]
    while len(splits) <= 2 and (match := _COUNT.match(splits[-1][1])):
        counts, rest = splits[-1]
        splits.append(([*counts, match[1]], rest[match.end() :]))
    if found := next((split for split in splits if split[1] and _is_card(split[1])), None):
        return found
    if (match := _COUNT_BEHIND.fullmatch(word)) and _is_card(match[1]):
        return [match[2]], match[1]
    if _COUNT.match(splits[-1][1]):
        raise HardwareError(Message("machine.too-many-counts", word=_quote(word)))
    return splits[-1]


# --- the card -----------------------------------------------------------------------------------


def _read_card(word: str) -> tuple[CatalogueCard | None, Gpu, tuple[Said, ...]]:
    name = _take_apart(word)
    if not name.key and name.size_gib is not None:
        memory = round(name.size_gib * GIB)
        if not 1 <= memory <= _MAX_MEMORY:
            raise HardwareError(Message("machine.implausible-size", word=_quote(word), most=_MAX_MEMORY // GIB))
        return None, Gpu(name=f"{name.size_gib:g}GB card", vendor="unknown", memory_bytes=memory), ()
    cards = _find_cards(name)
    if not cards:
        raise HardwareError(_explain_unknown(word, name))
    family = cards[0].family
    spelt, devices = family.replace(" ", ""), {card.size_gib: card.devices for card in cards}
    sizes = Listing(
        (
            f"{size}GB" if devices[size] == 1 else Message("machine.whole-card", size=size, gpus=devices[size])
            for size in sorted(devices)
        ),
        "or",
    )
    cards = [card for card in cards if name.size_gib in (None, card.size_gib)]
    if not cards:
        raise HardwareError(Message("machine.no-such-size", card=family, sizes=sizes, size=f"{name.size_gib:g}"))
    if name.size_gib is None and len(devices) > 1:
        example = f"{spelt}-{max(devices)}GB"
        raise HardwareError(Message("machine.several-sizes", card=family, sizes=sizes, example=example))
    first, others = cards[0], sorted({card.form for card in cards[1:]} - {cards[0].form})
    if name.form is not None or not others:
        return first, first.gpu, ()
    instead = Choice(f"{spelt}-{form}-{first.size_gib}GB" for form in others)
    return first, first.gpu, (Message("machine.taken-form", card=family, form=first.form, others=instead),)


def _explain_unknown(word: str, name: _Name) -> Message:
    if re.fullmatch(r"[0-9]{1,3}", word.strip()):
        return Message("machine.bare-number", word=_quote(word), number=int(word))
    if not name.key:
        return Message("machine.no-card-in-word", word=_quote(word))
    if word.lstrip().startswith("-"):
        return Message("machine.minus", word=_quote(word))
    if cards := _families().get(name.key):
        forms = Choice(dict.fromkeys(card.form for card in cards))
        return Message("machine.no-such-form", card=cards[0].family, forms=forms, form=name.form)
    close = get_close_matches(name.key, _families(), n=6, cutoff=0.6)
    names = list(dict.fromkeys(_families()[key][0].family for key in close))[:3]
    if not names:
        return Message("machine.unknown-card", word=_quote(word), fix=Message("machine.see-gpus"))
    return Message("machine.unknown-card-near", word=_quote(word), names=Choice(names))


# --- the link ------------------------------------------------------------------------------------


def _relink(gpu: Gpu, link: str | float) -> Gpu:
    """The card with another link. A rate tells its kind too: what the card's PCIe cannot carry is the maker's own."""
    is_pcie = gpu.link in PCIE_LANE_GB_S
    if isinstance(link, str):
        if link == "xgmi" and gpu.link != "xgmi":
            raise HardwareError(Message("machine.no-xgmi", card=gpu.name))
        if link not in PCIE_LANE_GB_S:
            return gpu
        lanes = round((gpu.link_bytes_per_s or 0) / 1e9 / PCIE_LANE_GB_S[str(gpu.link)]) if is_pcie else 16
        kind, rate = link, PCIE_LANE_GB_S[link] * lanes * 1e9
    else:
        rate = link
        own = str(gpu.link) if is_pcie else "pcie5"
        if rate > 16.1e9 * PCIE_LANE_GB_S[own]:
            kind = "xgmi" if gpu.vendor in ("amd", "hygon") else "nvlink"
        else:
            kind = gpu.link or next(name for name in PCIE_LANE_GB_S if rate <= 16.1e9 * PCIE_LANE_GB_S[name])
    return replace(gpu, link=cast(Literal["nvlink", "xgmi", "pcie3", "pcie4", "pcie5"], kind), link_bytes_per_s=rate)


# --- names --------------------------------------------------------------------------------------


@cache
def _families() -> dict[str, list[CatalogueCard]]:
    """Every spelling's key, and the cards that it may mean. `4090` stands for `RTX 4090`."""
    families: dict[str, list[CatalogueCard]] = {}
    for card in CARDS:
        families.setdefault(_key(card.family), []).append(card)
    for key in list(families):
        short = re.sub(r"^(rtx|gtx|rx)(?=.*[0-9]{3})", "", key)
        families.setdefault(short, families[key])
    return families


@cache
def _aliases() -> dict[str, CatalogueCard]:
    return {_key(alias): card for card in CARDS for alias in card.aliases}


def _is_card(word: str) -> bool:
    name = _take_apart(word)
    return bool(_find_cards(name)) or (not name.key and name.size_gib is not None)


def _take_apart(word: str) -> _Name:
    """Size and form out of a name; what is left, without the maker and other trimmings, is its key."""
    whole = _key(word)
    if card := _aliases().get(whole):
        return _Name(_key(card.family), card.size_gib, card.form or None)
    if whole in _families():
        return _Name(whole, None, None)
    size_gib: float | None = None
    rest = word
    if match := _SIZE_IN_NAME.search(word):
        number, unit = match[1] or match[3], match[2] or match[4]
        size_gib = float(number) * _UNITS[unit[0].upper()] / GIB
        rest = f"{word[: match.start()]} {word[match.end() :]}"
    elif (match := _SIZE_WITHOUT_UNIT.search(word)) and _key(word[: match.start()]) in _families():
        size_gib, rest = float(match[1]), word[: match.start()]
    words = _words(rest)
    forms = [form for spelling, form in _FORMS.items() if spelling in words]
    key = "".join(part for part in words if part not in _FORMS)
    return _Name(key, size_gib, forms[0] if forms else None)


def _find_cards(name: _Name) -> list[CatalogueCard]:
    """The cards of that name and form, whatever their size."""
    return [card for card in _families().get(name.key, []) if name.form in (None, card.form) or not card.form]


def _words(text: str) -> list[str]:
    text = _MAKERS.sub(" ", _LAPTOP.sub(" laptop", text)).lower().replace("max-q", "maxq")
    text = _GLUED_FORM.sub(r" \g<0> ", text)
    return [part for part in re.split(r"[^a-z0-9]+", text) if part and not _NOISE.fullmatch(part)]


def _key(text: str) -> str:
    return "".join(_words(text))


def _plain(text: str) -> str:
    """One way to write each character: full-width digits and letters, and × or the Cyrillic х for x."""
    if len(text) > MAX_WORD:
        raise HardwareError(Message("machine.word-too-long", word=_quote(text)))
    return unicodedata.normalize("NFKC", text).replace("×", "x").replace("\u0445", "x").strip()


def _quote(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:40]}…")
