"""The address of the Plan view ↔ what is asked of `tightfit plan`; the answer, kept for a while; a first guess at it;
and the most that fits.

The names in the address are those of the flags. Three differ: the cards of `--gpus` are three fields (`nodes`, `gpus`,
`card`), since each has a slider of its own; `allow` may come several times; and `config` is a pasted config.json. No
flag that names a file can come from an address: whoever follows a link must not make the page read what the link's
maker chose. Measured machines that `tightfit ui --gpus FILE` offers are cards by the names of their files.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property
from pathlib import Path
from urllib.parse import urlencode

from tightfit.desk.calibration import calibration_of
from tightfit.desk.plan import answered, files_of
from tightfit.desk.plan_request import resolve_request
from tightfit.desk.request import REPLACES, Request, read_request
from tightfit.hardware.machine import this_machine
from tightfit.hardware.measured import read_measured
from tightfit.hardware.named import names_file
from tightfit.hardware.words import parse_hardware, split_counts
from tightfit.inputs.flags import LEVERS, check_levers, meant, spelt
from tightfit.job.fields import FREE_LEVERS
from tightfit.messages import Message, Said
from tightfit.model import families
from tightfit.model.load import load_model
from tightfit.model.presets import PRESETS, find_checkpoint
from tightfit.pace import pace
from tightfit.planner import Tiered, question_of
from tightfit.planner.certainty import choose
from tightfit.planner.limits import Limit
from tightfit.planner.plan import Bounds, Plan, Way
from tightfit.planner.question import Question, excess_bytes, weigh
from tightfit.planner.reasons import worth_showing
from tightfit.priced import GIB
from tightfit.types import (
    STRATEGY,
    Checkpointing,
    ConfigError,
    Gpu,
    HardwareError,
    Levers,
    ModelError,
    UserError,
)

MODEL = "meta-llama/Llama-3.1-8B-Instruct"
"""What most people have seen: planned for where the address names none."""
PINS = tuple(
    lever
    for lever in FREE_LEVERS.values()
    if lever.group in ("the training", "what saves memory") and lever.type is not bool
)
"""The free levers that the form shows; what DeepSpeed's buffers are is for the command line."""
WORDS = (
    *("for", "method", "precision", "optimizer", "host_ram", "nvme", "network", "link", "margin"),
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
OFFERED: dict[str, Path] = {}
"""The card: a machine that was measured → its file. Filled once, when the server starts."""
MOST_GPUS, MOST_BATCH = 1024, 16_384  # more would keep the search busy for long
MOST_CONFIG_BYTES = 2**20
MOST_WORD = 200
SAVED_AS = "config.json"
_ID = re.compile(r"[\w.-]{1,96}(/[\w.-]{1,96})?")


@dataclass(frozen=True, slots=True, kw_only=True)
class AddressQuestion:
    """What the address says, as text; what it leaves out is not there."""

    said: tuple[tuple[str, str], ...]  # name and value, in the order of `FIELDS`, none empty
    allow: tuple[str, ...] = ()
    block: Mapping[str, object] | None = field(default=None, compare=False)  # the shape fields of a pasted config

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
        if card.lower() == THIS or card in OFFERED:
            if nodes != 1:
                raise ConfigError(Message("web.one-node"))
            given |= {"gpus": str(OFFERED.get(card, THIS))} | ({"num_gpus": whole("num_gpus", count)} if count else {})
        else:
            gpus = whole("num_gpus", count or "1")
            if gpus < 1 or nodes < 1 or gpus * nodes > MOST_GPUS:
                raise ConfigError(Message("web.most-gpus", most=MOST_GPUS, gpus=nodes * gpus))
            if "/" in card or names_file(card):
                raise HardwareError(
                    Message("machine.unknown-card", word=repr(card[:40]), fix=Message("machine.see-gpus"))
                )
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


def offer_machine(path: Path) -> None:
    """Have the page know a machine that was measured, by the name of its file; HardwareError where it is none."""
    read_measured(path)
    OFFERED[path.name] = path.absolute()


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
    _take_apart(values)
    block = None
    if "config" in values:
        block = block_of(values["config"])
        values["config"] = json.dumps(block, separators=(",", ":"), ensure_ascii=False)
        values.pop("model", None)
    else:
        word = values.setdefault("model", MODEL)
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
    values = {name: given[name] for name in FIELDS if given.get(name) and name != "allow"}
    _take_apart(values)
    return {name: values.get(name, "") for name in FIELDS}


def _take_apart(values: dict[str, str]) -> None:
    """What nothing is said of is filled in, and `gpus=2x8xA100`, as the flag has it, becomes three fields. So does a
    card of that kind: its counts are what was written last, so they win over the sliders."""
    if not values:
        values |= {"model": MODEL, "method": "lora", "seq": "2048", **usual_machine()}
    word = values.get("card", values.get("gpus", ""))
    with suppress(HardwareError):  # the answer will say so
        counts, card = split_counts(word)
        if counts and word not in OFFERED:
            values |= dict(zip(("gpus", "nodes"), map(str, reversed(counts)), strict=False)) | {"card": card}
    if "card" not in values:
        values |= {**usual_machine(), **values}
    if values.get("nodes") == "1":
        del values["nodes"]


def usual_machine() -> dict[str, str]:
    """The fields for this machine, or for a card that many have where it has none."""
    return {"card": THIS} if find_machine() else {"gpus": "1", "card": "RTX4090", "host_ram": "64GB"}


@cache
def find_machine() -> str:
    """`2 × RTX 4090`; empty: this machine has no GPU."""
    try:
        here = this_machine()
    except UserError:
        return ""
    return "" if here.gpu.vendor == "cpu" else f"{here.gpus_per_node} × {here.gpu.name}"


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


# --- the answer -----------------------------------------------------------------------------------

KEPT = 64
KEPT_S = 60.0  # answers are forgotten after a while: a run that ends meanwhile may have taught something
_FREE = {lever.block or lever.name for lever in LEVERS.values() if lever.free}
_OWN = tuple(each.name for each in fields(Levers) if each.name not in _FREE - {"deepspeed_version"})
"""The levers that the question decides: the user's, and what follows from the job and what is installed."""


@dataclass(frozen=True, eq=False)
class Answered:
    asked: AddressQuestion
    plan: Plan
    tiered: Tiered | None = None  # where a tier was asked for: what the command line would answer

    @cached_property
    def ways(self) -> tuple[Way, ...]:
        """What is drawn: the chosen way first, or the one that would be of those that were guessed, then its rivals; of
        a tier's, what would be chosen without it."""
        first = self.plan.chosen or choose(self.plan.alternatives)
        rivals = [way for way in worth_showing(self.plan) if way is not first]
        free = self.tiered.free.chosen if self.tiered is not None and self.tiered.free is not None else None
        return (*((first,) if first else ()), *rivals, *((free,) if free else ()))

    def choosing(self, way: Way) -> str:
        """The question whose answer is this way: what its strategy is made of is fixed, and all else stays open."""
        changes = {"tier": "", **dict.fromkeys(STRATEGY_PINS, ""), **strategy_pins(way)}
        if way.world != self.plan.hardware.world:
            used = way.hardware
            changes |= {"gpus": str(used.gpus_per_node), "nodes": str(used.nodes) if used.nodes > 1 else ""}
            changes |= {"effective_batch": str(way.effective_batch)}
        return self.asked.address(**changes)

    @property
    def freed(self) -> str:
        """The question without a fixed strategy; empty: none is."""
        if not any(self.asked.get(name) for name in STRATEGY_PINS):
            return ""
        return self.asked.address(**dict.fromkeys(STRATEGY_PINS, ""))

    @cached_property
    def portable(self) -> AddressQuestion:
        """The question as any machine understands it: this one, or one that was measured, is named by its cards."""
        asked, hardware = self.asked, self.plan.hardware
        word = asked.get("card")
        if (word.lower() != THIS and word not in OFFERED) or hardware.gpu.vendor == "cpu":
            return asked
        values = dict(asked.said) | {"card": card_word(hardware.gpu), "gpus": str(hardware.gpus_per_node)}
        if hardware.nodes > 1:
            values["nodes"] = str(hardware.nodes)
        for name, size in (("host_ram", hardware.host_ram_bytes), ("nvme", hardware.nvme_bytes)):
            if size is not None:
                values.setdefault(name, f"{round(size / GIB, 1):g}GB")
        return replace(asked, said=tuple((name, values[name]) for name in FIELDS if name in values))

    @cached_property
    def files(self) -> dict[str, str] | Said:
        """The files that `--write` would write, by name; or the sentence that says why there are none."""
        if self.plan.chosen is None:
            return {}
        try:
            return files_of(self.plan)
        except UserError as error:
            why: Said = error.said
            return why


STRATEGY_PINS = (
    *STRATEGY,
    *("shard_within", "sequence_parallel", "tensor_parallel", "pipeline_parallel", "stages_per_gpu", "expert_parallel"),
)
"""The fields of which a strategy is made; of each strategy the planner shows the best way."""


def strategy_pins(way: Way) -> dict[str, str]:
    plain = Levers()
    said = {name: getattr(way.levers, name) for name in STRATEGY_PINS}
    return {name: str(value) for name, value in said.items() if name in STRATEGY or value != getattr(plain, name)}


def way_ident(way: Way) -> str:
    """By which an address names one of the ways that are shown: `zero2-cpu-none-8`."""
    return "-".join((*strategy_pins(way).values(), str(way.world)))


def card_word(gpu: Gpu) -> str:
    """What others call a card that this machine has: its name, or no more than its size where we have none for it."""
    size, spelt = f"{round(gpu.memory_bytes / GIB, 1):g}GB", gpu.name.replace(" ", "-")
    for word in (gpu.name.replace(" ", ""), spelt, f"{spelt}-{size}"):
        with suppress(HardwareError):
            if parse_hardware(word).gpu.name == gpu.name:
                return word
    return size


_kept: OrderedDict[tuple[str, bool], tuple[float, Answered]] = OrderedDict()
_lock = threading.Lock()


def answer_to(asked: AddressQuestion, *, advice: bool) -> Answered:
    """The answer, from the last minute or anew. `advice`: also what would make it fit, where nothing does."""
    address = asked.address()
    if known := recall(address, advice=advice):
        return known
    found, _ = answered(asked.request(), advice=advice)
    if isinstance(found, Plan):
        made = Answered(asked, found)
    else:
        assert isinstance(found, Tiered), "neither all tiers nor a limit can be asked for in an address"
        plan = found.plan
        assert plan is not None, "what a tier cannot run is an error before"
        about = Message("web.tier", name=found.tier.name, about=found.tier.about)
        made = Answered(asked, replace(plan, because=(about, *found.because, *plan.because)), found)
    with _lock:
        _kept[address, advice] = (time.monotonic(), made)
        if made.plan.fits:  # there is nothing to advise, so it is the answer to both questions
            _kept[address, True] = _kept[address, advice]
        while len(_kept) > KEPT:
            _kept.popitem(last=False)
    return made


def recall(address: str, *, advice: bool = False) -> Answered | None:
    """An answer of the last minute, which has to be advised where that is asked."""
    with _lock:
        for key in [(address, True)] if advice else [(address, False), (address, True)]:
            since, known = _kept.get(key, (0.0, None))
            if known is not None and time.monotonic() - since <= KEPT_S:
                _kept.move_to_end(key)
                return known
    return None


def is_at_hand(asked: AddressQuestion) -> bool:
    """No network has to be asked for the model."""
    return asked.block is not None or asked.get("model").lower() in PRESETS or bool(find_checkpoint(asked.get("model")))


def check_model(asked: AddressQuestion) -> None:
    """Fetch the config of a Hugging Face id, which may take as long as the network lets it."""
    if not is_at_hand(asked):
        load_model(asked.get("model"))


def guessed(asked: AddressQuestion, last: Answered) -> Answered:
    """A first word while every way is priced: the ways that were shown last, for the new question, of which nobody has
    chosen any yet. An estimate takes milliseconds and a search some tenths of a second, and whoever moves a slider
    looks at it meanwhile. A UserError: the question makes no sense."""
    request = asked.request()
    settled = resolve_request(request, for_others=True)
    known = Bounds(calibration=calibration_of(request, settled.job))
    question = question_of(settled.job, settled.shape, settled.hardware).within(known)
    shown = [way.levers for way in last.ways] or [question.base]
    ways = [_price(question, shown[0])]
    for levers in shown[1:]:
        with suppress(UserError):  # it does not go with what was just named
            ways.append(_price(question, levers))
    plan = replace(
        last.plan,
        job=settled.job,
        shape=question.shape,
        hardware=question.hardware,
        effective_batch=question.effective_batch,
        chosen=None,
        alternatives=tuple(ways),
        because=(),
        remedies=(),
    )
    return Answered(asked, plan)


def prepare(answer: Answered) -> None:
    """Price the ways that are shown here as well, where other processes have found them: what is learned from that is
    what bars at the slider's next stop need."""
    with suppress(UserError):
        guessed(answer.asked, answer)


def _price(question: Question, last: Levers) -> Way:
    levers = replace(last, **{name: getattr(question.base, name) for name in (*_OWN, *question.pinned)})
    if (levers.checkpointing.layers or 0) > question.shape.n_layers:
        levers = replace(levers, checkpointing=Checkpointing(layers=None))
    each = max(1, question.effective_batch // levers.data_ranks(question.hardware.world))
    micro = next(size for size in range(min(levers.micro_batch, each), 0, -1) if each % size == 0)
    levers = replace(levers, micro_batch=micro, accumulation=each // micro)
    check_levers(levers, question.shape)
    footprint = weigh(question, levers)
    return Way(
        shape=question.shape,
        levers=levers,
        hardware=question.hardware,
        footprint=footprint,
        pace=pace(question.shape, levers, question.hardware, ranged=False),
        fits=excess_bytes(question, footprint) == 0,
        gpu_limit_bytes=question.gpu_limit_bytes,
    )


def most_of(asked: AddressQuestion, wanted: str) -> dict[str, str]:
    """The question turned round, as `tightfit plan --max` answers it: the longest sequence, the largest micro batch or
    preset that fits. The answer is the fields of the form to set, so that what the page shows stays an ordinary
    question. A UserError: there is no such question, or nothing fits."""
    replaced = next((flags for word, flags in REPLACES.items() if word == wanted), None)
    if replaced is None:
        raise ConfigError(Message("web.unknown-max", wanted=wanted[:40], hint=meant(wanted, REPLACES)))
    said = {name: value for name, value in asked.said_flags().items() if name not in {*replaced, "tier", "allow"}}
    found, _ = answered(read_request({**said, "max": wanted}), advice=False)
    assert isinstance(found, Limit)
    if found.value is None:
        raise ConfigError(Message("web.nothing-fits"))
    if wanted == "model":
        return {"model": str(found.value), "config": "", "tier": ""}
    if wanted == "seq":
        return {"seq": str(found.value), "tier": ""}
    return {"micro-batch": str(found.value), "effective-batch": str(found.plan.effective_batch), "tier": ""}
