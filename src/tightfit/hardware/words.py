"""Hardware from a word: `6x32GB`, `4xRTX4090`, `2x8xA100-80GB`.

A word is counts and a card. The card may be spelt as people write it (`4090`, `rtx-4090`), as a
driver prints it (`NVIDIA A100-SXM4-80GB`), or be no more than its size (`32GB`): then its rates are
unknown, but whether a job fits is not. We never guess between two sizes of one card, since that is
the very number the answer hangs on; between two forms (SXM, PCIe) we take the usual one and say so.

GB in a hardware word means GiB, as cards are sold.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import replace
from difflib import get_close_matches
from functools import cache
from typing import NamedTuple

from tightfit.hardware.catalogue import CARDS, GIB, MIB, CatalogueCard
from tightfit.messages import Choice, Listing, Message, Said
from tightfit.types import Gpu, Hardware, HardwareError

MAX_GPUS_PER_NODE = 1024
MAX_NODES = 16384

_MAX_WORD = 100
_MAX_MEMORY = 16 * 1024 * GIB
_MAX_SIZE = 1024 * 1024 * GIB
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
    if size > _MAX_SIZE:
        raise HardwareError(Message("machine.size-too-large", word=_quote(text), most=_MAX_SIZE // 1024**4))
    return size


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
    if len(text) > _MAX_WORD:
        raise HardwareError(Message("machine.word-too-long", word=_quote(text)))
    return unicodedata.normalize("NFKC", text).replace("×", "x").replace("\u0445", "x").strip()


def _quote(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:40]}…")
