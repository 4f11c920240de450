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
from collections.abc import Iterable
from dataclasses import replace
from difflib import get_close_matches
from functools import cache
from typing import NamedTuple

from tightfit.hardware.catalogue import ALIASES, CARDS, GIB, MIB, Card
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
    nodes, gpus = ([1, 1] + [_count(count, word) for count in counts])[-2:]
    card, gpu, because = _read_card(card_word)
    if card is not None and card.devices > 1:
        because = (*because, _dies_sentence(card, gpus))
        gpus *= card.devices
    _check_counts(nodes, gpus, word)
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
        raise HardwareError(f"{_quoted(text)} is not a size: write a number with its unit, like 512GB or 2TB.")
    size = round(float(match[1]) * _UNITS[match[2].upper()])
    if size < 1:
        raise HardwareError(f"A size of {_quoted(text)} holds nothing: write something like 512GB.")
    if size > _MAX_SIZE:
        raise HardwareError(f"No machine has {_quoted(text)}: a size is at most {_MAX_SIZE // 1024**4}TB.")
    return size


def recognise(name: str, memory_bytes: int | None) -> tuple[Gpu | None, str | None]:
    """The catalogue's card for a name that a driver printed, with the memory that the driver reports.

    Among the sizes of a family the reported total decides. The sentence, if there is one, tells of
    a card whose memory is not what it is sold with. (None, None): not in the catalogue.
    """
    cards = [card for spelling in _spellings(name) for card in _matching(_take_apart(spelling))]
    if not cards:
        return None, None
    if memory_bytes is None:
        sizes = {card.gpu.memory_bytes for card in cards}
        return (cards[0].gpu, None) if len(sizes) == 1 else (None, None)
    card = min(cards, key=lambda card: abs(card.gpu.memory_bytes - memory_bytes))
    sold, reported = card.gpu.memory_bytes, memory_bytes
    gpu = replace(card.gpu, memory_bytes=reported)
    if abs(sold - reported) > 0.12 * sold:
        return gpu, (
            f"{card.family} is sold with {sold / GIB:.0f} GiB, but the driver reports {reported / GIB:.1f} GiB: "
            "taken as reported."
        )
    return gpu, None


# --- the counts ---------------------------------------------------------------------------------


def _split(word: str) -> tuple[list[str], str]:
    """The counts before the card, and the card. `7900 XTX` is a card, not 7900 of something."""
    splits: list[tuple[list[str], str]] = [([], word)]
    while len(splits) <= 2 and (match := _COUNT.match(splits[-1][1])):
        counts, rest = splits[-1]
        splits.append(([*counts, match[1]], rest[match.end() :]))
    for counts, rest in splits:
        if rest and _is_card(rest):
            return counts, rest
    if (match := _COUNT_BEHIND.fullmatch(word)) and _is_card(match[1]):
        return [match[2]], match[1]
    if _COUNT.match(splits[-1][1]):
        raise HardwareError(f"{_quoted(word)} has more than two counts: write nodes x GPUs x card, like 2x8xA100-80GB.")
    return splits[-1]


def _count(digits: str, word: str) -> int:
    if len(digits) > 9:
        raise HardwareError(f"{_quoted(word)} asks for more GPUs than there are in the world.")
    return int(digits)


def _check_counts(nodes: int, gpus: int, word: str) -> None:
    if nodes < 1 or gpus < 1:
        raise HardwareError(f"{_quoted(word)} has no GPU in it: the least is one, like 1x24GB.")
    if gpus > MAX_GPUS_PER_NODE:
        raise HardwareError(
            f"{_quoted(word)} puts {gpus} GPUs into one machine; write several machines as nodes x GPUs, "
            "like 16x8xH100."
        )
    if nodes > MAX_NODES:
        raise HardwareError(f"{_quoted(word)} has {nodes} nodes, and we plan for at most {MAX_NODES}.")


# --- the card -----------------------------------------------------------------------------------


def _read_card(word: str) -> tuple[Card | None, Gpu, tuple[str, ...]]:
    name = _take_apart(word)
    if not name.key and name.size_gib is not None:
        return None, *_generic(word, name.size_gib)
    cards = _matching(name)
    if not cards:
        raise HardwareError(_unknown(word, name))
    family, sizes = cards[0].family, _sizes(cards)
    if name.size_gib is not None:
        cards = [card for card in cards if card.size_gib == name.size_gib]
        if not cards:
            raise HardwareError(
                f"{family} comes with {_or(sizes.values())}, not {name.size_gib:g}GB; for a card of another size "
                f"write the size alone, like 1x{name.size_gib:g}GB."
            )
    elif len(sizes) > 1:
        raise HardwareError(f"{family} comes with {_or(sizes.values())}: write {_dashed(family)}-{max(sizes)}GB, say.")
    return cards[0], cards[0].gpu, _form_because(name, cards)


def _form_because(name: _Name, cards: list[Card]) -> tuple[str, ...]:
    others = sorted({card.form for card in cards[1:]} - {cards[0].form})
    if name.form is not None or not others:
        return ()
    family = cards[0].family
    spelt = _or(f"{_dashed(family)}-{form}-{cards[0].size_gib}GB" for form in others)
    return (f"{family} is taken to be the {cards[0].form} form; write {spelt} if it is not.",)


def _generic(word: str, size_gib: float) -> tuple[Gpu, tuple[str, ...]]:
    memory = round(size_gib * GIB)
    if not 1 <= memory <= _MAX_MEMORY:
        raise HardwareError(
            f"No card has {_quoted(word)} of memory: write a size like 24GB, at most {_MAX_MEMORY // GIB}GB."
        )
    gpu = Gpu(name=f"{size_gib:g}GB card", vendor="unknown", memory_bytes=memory)
    return gpu, ()


def _dies_sentence(card: Card, cards: int) -> str:
    each = round(card.gpu.memory_bytes / GIB)
    return (
        f"The driver shows one {card.family} card as {card.devices} GPUs of {each} GiB, "
        f"so {cards} of them are {cards * card.devices} GPUs."
    )


def _unknown(word: str, name: _Name) -> str:
    if re.fullmatch(r"[0-9]{1,3}", word.strip()):
        return f"{_quoted(word)} is neither a card nor a size: did you mean {int(word)}GB?"
    if not name.key:
        return f"{_quoted(word)} names no card: write something like 4xRTX4090, 8xA100-80GB or 6x32GB."
    if word.lstrip().startswith("-"):
        return f"{_quoted(word)} begins with a minus: write a count of at least one and a card, like 4xRTX4090."
    families = _families()
    if name.key in families:
        cards = families[name.key]
        return f"{cards[0].family} comes as {_or(dict.fromkeys(card.form for card in cards))}, not as {name.form}."
    close = get_close_matches(name.key, families, n=6, cutoff=0.6)
    names = list(dict.fromkeys(families[key][0].family for key in close))[:3]
    if not names:
        return f"We know no card {_quoted(word)}: `tightfit gpus` lists them, and a plain size such as 24GB works too."
    return f"We know no card {_quoted(word)}: did you mean {_or(names)} (or a plain size such as 24GB)?"


def _sizes(cards: list[Card]) -> dict[int, str]:
    """The sizes to choose from, smallest first, each as it is told."""
    told = {card.size_gib: f"{card.size_gib}GB" for card in sorted(cards, key=lambda card: card.size_gib)}
    for card in cards:
        if card.devices > 1:
            told[card.size_gib] += f" (the whole card, which is {card.devices} GPUs)"
    return told


def _or(words: Iterable[str]) -> str:
    """'A', 'A or B', 'A, B or C'."""
    *most, last = words
    return f"{', '.join(most)} or {last}" if most else last


def _dashed(family: str) -> str:
    return family.replace(" ", "")


# --- names --------------------------------------------------------------------------------------


@cache
def _families() -> dict[str, list[Card]]:
    """Every spelling's key, and the cards that it may mean. `4090` stands for `RTX 4090`."""
    families: dict[str, list[Card]] = {}
    for card in CARDS:
        families.setdefault(_key(card.family), []).append(card)
    for key in list(families):
        short = re.sub(r"^(rtx|gtx|rx)(?=.*[0-9]{3})", "", key)
        families.setdefault(short, families[key])
    return families


@cache
def _aliases() -> dict[str, tuple[str, int | None, str | None]]:
    return {_key(alias): target for alias, target in ALIASES.items()}


def _is_card(word: str) -> bool:
    name = _take_apart(word)
    return bool(_matching(name)) or (not name.key and name.size_gib is not None)


def _take_apart(word: str) -> _Name:
    """Size and form out of a name; what is left, without the maker and other trimmings, is its key."""
    whole = _key(word)
    if whole in _aliases():
        family, size, form = _aliases()[whole]
        return _Name(_key(family), size, form)
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


def _matching(name: _Name) -> list[Card]:
    """The cards of that name and form, whatever their size."""
    cards = _families().get(name.key, [])
    if name.form is None:
        return cards
    if all(not card.form for card in cards):
        return cards
    return [card for card in cards if card.form == name.form]


def _spellings(name: str) -> list[str]:
    """What a driver may mean: 'Navi 31 [Radeon RX 7900 XT/7900 XTX]' is one of two cards."""
    inside = re.findall(r"\[([^\]]+)\]", name)
    return [name, *(part for text in inside for part in text.split("/"))]


def _words(text: str) -> list[str]:
    text = _MAKERS.sub(" ", _LAPTOP.sub(" laptop", text)).lower().replace("max-q", "maxq")
    text = _GLUED_FORM.sub(r" \g<0> ", text)
    return [part for part in re.split(r"[^a-z0-9]+", text) if part and not _NOISE.fullmatch(part)]


def _key(text: str) -> str:
    return "".join(_words(text))


def _plain(text: str) -> str:
    """One way to write each character: full-width digits and letters, and × or the Cyrillic х for x."""
    if len(text) > _MAX_WORD:
        raise HardwareError(f"{_quoted(text)} is too long to be hardware: write something like 4xRTX4090.")
    return unicodedata.normalize("NFKC", text).replace("×", "x").replace("\u0445", "x").strip()


def _quoted(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:40]}…")
