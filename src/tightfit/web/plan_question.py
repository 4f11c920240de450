"""The address of the Plan view ↔ what is asked of `tightfit plan`.

The names in the address are those of the flags. Three differ: the cards of `--gpus` are three fields (`nodes`, `gpus`,
`card`), since each has a slider of its own; `allow` may come several times; and `config` is a pasted config.json. No
flag that names a file can come from an address: whoever follows a link must not make the page read what the link's
maker chose.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlencode

from tightfit.desk.request import Request, read_request
from tightfit.inputs.flags import spelt
from tightfit.job.fields import FREE_LEVERS
from tightfit.messages import Message
from tightfit.model import families
from tightfit.model.presets import PRESETS, find_checkpoint
from tightfit.types import ConfigError, ModelError

DEFAULTS: dict[str, str] = {"model": "7b_mamba", "gpus": "6", "card": "32GB", "host_ram": "256GB", "seq": "2048"}
"""What is asked where the address says nothing at all."""
PINS = tuple(
    lever
    for lever in FREE_LEVERS.values()
    if lever.group in ("the training", "what saves memory") and lever.type is not bool
)
"""The free levers that the form shows; what DeepSpeed's buffers are is for the command line."""
WORDS = (
    *("for", "method", "precision", "optimizer", "host_ram", "nvme", "margin"),
    *(lever.flag for lever in PINS if lever.type is not int),
    *("lora_targets", "epochs", "tier"),
)
NUMBERS = (
    *("lora_rank", "seq", "effective_batch"),
    *(lever.flag for lever in PINS if lever.type is int),
    *("max_steps", "samples"),
)
FIELDS = (*dict.fromkeys(("for", "model", "config", "gpus", "card", "nodes", *WORDS, *NUMBERS, "allow")),)
"""All that an address can say."""
THIS = "this"  # the card: whatever this machine has
MOST_GPUS, MOST_BATCH = 1024, 16_384  # more would keep the search busy for long
MOST_CONFIG_BYTES = 2**20
MOST_WORD = 200
SAVED_AS = "config.json"
_SEVERAL = re.compile(r"(?:(\d{1,6})\s*[x×])?\s*(\d{1,6})\s*[x×]\s*(\S.*)", re.IGNORECASE)
_ID = re.compile(r"[\w.-]{1,96}(/[\w.-]{1,96})?")


@dataclass(frozen=True, slots=True, kw_only=True)
class AddressQuestion:
    """What the address says, as text; what it leaves out is not there."""

    said: tuple[tuple[str, str], ...]  # name and value, in the order of `FIELDS`, none empty
    allow: tuple[str, ...] = ()
    block: Mapping[str, object] | None = field(default=None, compare=False)
    """The model as a block of shape fields, where a config was pasted."""

    def get(self, name: str) -> str:
        return dict(self.said).get(name, "")

    def address(self, **changes: str) -> str:
        """The canonical query, with some values replaced; empty: left out."""
        values = dict(self.said) | changes
        pairs = [(name, values[name]) for name in FIELDS if values.get(name)]
        if "allow" not in changes:
            pairs += [("allow", each) for each in self.allow]
        return urlencode([(name.replace("_", "-"), value) for name, value in pairs])

    def request(self) -> Request:
        return read_request(self.said_flags())

    def said_flags(self) -> dict[str, object]:
        """The flags of `tightfit plan`, only those that were given."""
        given: dict[str, object] = {"model": self.block if self.block is not None else self.get("model")}
        card, count, nodes = self.get("card"), self.get("gpus"), whole("nodes", self.get("nodes") or "1")
        if card.lower() == THIS:
            if nodes != 1:
                raise ConfigError(Message("web.one-node"))
            given |= {"gpus": THIS} | ({"num_gpus": whole("gpus", count)} if count else {})
        else:
            gpus = whole("gpus", count or "1")
            if gpus < 1 or nodes < 1 or gpus * nodes > MOST_GPUS:
                raise ConfigError(Message("web.most-gpus", most=MOST_GPUS, gpus=nodes * gpus))
            given["gpus"] = f"{nodes}x{gpus}x{card}" if nodes > 1 else f"{gpus}x{card}"
        given |= {name: value for name, value in self.said if name in WORDS}
        given |= {name: whole(name, value) for name, value in self.said if name in NUMBERS}
        if whole("effective_batch", self.get("effective_batch") or "1") > MOST_BATCH:
            raise ConfigError(Message("web.most-sequences", most=MOST_BATCH))
        if self.get("tier").lower() == "all":
            raise ConfigError(Message("web.tier-all"))
        if self.allow:
            given["allow"] = ",".join(self.allow)
        return given

    def command(self, verb: str = "plan", *more: str) -> str:
        words = []
        for name, value in self.said_flags().items():
            words += [spelt(name), SAVED_AS if name == "model" and self.block is not None else str(value)]
        return shlex.join(["tightfit", verb, *words, *more])


def read_address(pairs: Sequence[tuple[str, str]]) -> AddressQuestion:
    """What an address asks. A UserError says what of it makes no sense."""
    values: dict[str, str] = {}
    allow: list[str] = []
    for name, value in ((name.replace("-", "_"), value.strip()) for name, value in pairs):
        if name not in FIELDS or not value:
            continue
        if len(value) > (MOST_CONFIG_BYTES if name == "config" else MOST_WORD):
            raise ConfigError(Message("web.too-long", name=spelt(name), most=MOST_WORD))
        if name == "allow":
            allow += [each.strip() for each in value.split(",") if each.strip()]
        else:
            values[name] = value
    if not values:
        values = dict(DEFAULTS)
    _take_apart(values)
    block = None
    if "config" in values:
        block = block_of(values["config"])
        values["config"] = json.dumps(block, separators=(",", ":"), ensure_ascii=False)
        values.pop("model", None)
    else:
        word = values.setdefault("model", DEFAULTS["model"])
        # The command line takes paths as well; a page that did would read whatever a link names.
        is_ours = word.lower() in PRESETS or find_checkpoint(word) is not None
        if not is_ours and (
            not _ID.fullmatch(word)
            or os.path.exists(os.path.expanduser(word))
            or word.endswith((".json", ".yaml", ".yml"))
        ):
            raise ModelError(Message("web.no-model", word=word[:60]))
    said = tuple((name, values[name]) for name in FIELDS if name in values)
    return AddressQuestion(said=said, allow=tuple(dict.fromkeys(allow)), block=block)


def fill_form(pairs: Sequence[tuple[str, str]]) -> dict[str, str]:
    """What the form shows, also where it makes no sense."""
    given = {name.replace("-", "_"): value.strip()[:MOST_CONFIG_BYTES] for name, value in pairs}
    values = {name: given[name] for name in FIELDS if given.get(name) and name != "allow"} or dict(DEFAULTS)
    _take_apart(values)
    return {name: values.get(name, "") for name in FIELDS}


def _take_apart(values: dict[str, str]) -> None:
    """`gpus=2x8xA100`, as the flag has it, becomes three fields."""
    found = _SEVERAL.fullmatch(values.get("gpus", ""))
    if found and "card" not in values:
        nodes, values["gpus"], values["card"] = found.groups()
        if nodes:
            values["nodes"] = nodes
    values.setdefault("card", DEFAULTS["card"])
    if values.get("nodes") == "1":
        del values["nodes"]


def block_of(text: str) -> dict[str, object]:
    """A pasted config.json as a block of shape fields: only what decides the shape is kept."""
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        said = Message("web.nested-too-deep") if isinstance(error, RecursionError) else str(error)
        raise ModelError(Message("web.no-json", why=said)) from None
    if not isinstance(config, dict):
        raise ModelError(Message("web.no-config"))
    if isinstance(config.get("text_config"), dict) and "model_type" not in config:
        config = config["text_config"]
    _, reader = families.read(config, "pasted")
    return {key: value for key, value in config.items() if key in reader.asked or key == "model_type"}


def whole(name: str, text: str) -> int:
    if not re.fullmatch(r"[+-]?[0-9]{1,18}", text.replace("_", "").replace(",", "")):
        raise ConfigError(Message("web.no-whole-number", name=spelt(name), text=text[:40]))
    return int(text.replace("_", "").replace(",", ""))
