"""An answer as it is drawn: bars, tables of phases and figures; and the map of sequence × micro batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

from markupsafe import Markup

from tightfit.desk.calibration import calibration_of
from tightfit.desk.svg_bars import Bar, bars_svg, end_line, fullest, gpu_bar, key_svg, parts_of, scale_of
from tightfit.inputs.flags import MOST_BATCH, checkpointing_word
from tightfit.job.file import pinned
from tightfit.messages import id_of
from tightfit.planner import SEQUENCES_A_GPU
from tightfit.planner.plan import Way
from tightfit.planner.question import Question, excess_bytes, weigh
from tightfit.planner.reasons import CAUSES, further, hours, lacking_bytes, missing, time_words
from tightfit.planner.search import something_fits
from tightfit.priced import GIB, amounts, billions, seconds_words, strategy_name
from tightfit.types import Phase, PhaseName
from tightfit.web.plan_answer import KEPT, Answered, way_ident
from tightfit.web.words import Words

ADVICE = {
    *("plan.mildest-change", "plan.other-change", "plan.no-change-fits"),
    *("plan.gpus-would-do", "plan.gpus-would-do-pinned", "plan.no-gpus-would-do", "plan.no-gpus-would-do-pinned"),
}
"""The messages that the page shows as what would make it fit."""
MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)
SEQUENCES = tuple(2**power for power in range(7, 18))
COLUMNS, BEFORE = 8, 4
STEPS = 10  # shades of a cell

Drawn = dict[str, Any]  # what a template shows, by name


def draw(answer: Answered, words: Words, *, advice: bool, compare: str = "") -> Drawn:
    """All that the answer's template shows. `advice`: whether it was asked for what would make it fit; `compare`: the
    way that is to stand beside the first, by `way_ident`."""
    plan, ways = answer.plan, answer.ways
    first = ways[0] if ways else None
    bars = [bars_of(way, words["plan"], is_first=way is first) for way in ways]
    sides = list(zip(*bars, strict=True)) or [(), ()]
    scales = [scale_of(side) for side in sides]  # all ways to the same two
    legend = {  # only what can be seen: a part of less than a pixel needs no name
        part.kind: part.label
        for side, scale in zip(sides, scales, strict=True)
        for bar in side
        for part in bar.parts
        if part.size_bytes > scale / 500
    }
    shape = first.shape if first else plan.shape
    return {
        "plan": plan,
        "shape": shape,
        "is_changed": bool(plan.chosen and plan.chosen.changes),
        "parameters": billions(shape.parameters),
        "sequence": first.levers.sequence if first else plan.job.sequence,
        "card": card_of(answer, first, words) if first else None,
        "ways": [_way(answer, way, words, f"way{number}", bars[number], scales) for number, way in enumerate(ways)],
        "compared": _compare(ways, bars, compare, words),
        "freed": answer.freed,
        "legend": [(label, Markup(key_svg(kind, "key"))) for kind, label in legend.items()],  # noqa: S704 (ours)
        # What the page does not say elsewhere.
        "because": [
            each
            for each in further(plan)
            if (plan.chosen is not None or id_of(each) not in ADVICE) and each != plan.chosen_for
        ],
        "changes": plan.chosen.changes if plan.chosen else (),
        "name_way": strategy_name,
        "is_advised": advice,
    }


def gib(size_bytes: int) -> str:
    """A cell of a table; a dot: nothing."""
    return f"{size_bytes / GIB:.1f}" if size_bytes >= GIB / 20 else ("·" if not size_bytes else "<0.1")


class Fact(NamedTuple):
    name: str  # in the words
    value: str  # empty: what it hangs on was not said
    note: str = ""
    is_bad: bool = False


def card_of(answer: Answered, way: Way, words: Words) -> Drawn:
    """What a reader wants to know first: whether it fits, how much room is left, how long it takes."""
    plan, pace, spare, lacking = answer.plan, way.pace, way.gpu_spare_bytes, lacking_bytes(way)
    host, ram = way.footprint.host.peak_bytes_per_node, way.hardware.host_ram_bytes
    needs, card = amounts(way.footprint.gpu.required_bytes, way.hardware.gpu.memory_bytes)
    held = f"{amounts(host)[0]} GiB" if ram is None else "{} / {} GiB".format(*amounts(host, ram))
    facts = [Fact("spare", f"{amounts(max(spare, 1))[0]} GiB", f"{spare / way.hardware.gpu.memory_bytes:.0%}")]
    if plan.chosen is None:
        facts = [Fact("gpu_held", f"{needs} / {card} GiB", is_bad="GPU" in lacking)]
    facts.append(Fact("host_held", held, is_bad="RAM" in lacking))
    if plan.chosen is not None and not way.is_paced:
        facts.append(Fact("tokens_fact", "–"))
    elif plan.chosen is not None:
        seconds, taken = seconds_words(pace), hours(plan.job, plan.effective_batch, way)
        tokens = pace.tokens_per_s * pace.step_s
        between = f"{tokens / pace.high_s:,.0f}–{tokens / pace.low_s:,.0f}" if seconds["range"] else ""
        facts.append(Fact("tokens_fact", f"{pace.tokens_per_s:,.0f}", between))
        facts.append(Fact("step_fact", f"{seconds['step']} s", seconds["range"] or ""))
        facts.append(Fact("hours", "" if taken is None else words.say(time_words(taken))))
    return {
        "kind": "not" if plan.chosen is None else "changed" if way.changes else "fits",
        "name": strategy_name(way.levers),
        "needs": needs,
        "card": card,
        "used": way.world,
        "short": [place.lower() for place in lacking] if plan.chosen is None else [],
        "facts": facts,
        "lacks": None if way.fits else missing(way),
    }


def _compare(ways: Sequence[Way], bars: Sequence[tuple[Bar, Bar]], ident: str, words: Words) -> Drawn | None:
    """The first way and another side by side: the fullest moment of GPU and host by component, and what a step takes
    its time for. None: there is no such other."""
    number = next((number for number, way in enumerate(ways[1:], 1) if way_ident(way) == ident), None)
    if number is None:
        return None
    pair = ways[0], ways[number]
    tables = []
    for place, first, other in zip(("gpu", "host"), bars[0], bars[number], strict=True):
        names = {part.kind: part.label for part in (*first.parts, *other.parts)}
        held = [{part.kind: part.size_bytes for part in bar.parts} for bar in (first, other)]
        rows = [(name, _gibs(*(sizes.get(kind, 0) for sizes in held))) for kind, name in names.items()]
        tables.append((place, rows, _gibs(first.size_bytes, other.size_bytes)))
    causes = dict.fromkeys(cause for way in pair for cause in way.pace.causes)
    taken = [(words.say(CAUSES[cause]), [way.pace.causes.get(cause, 0.0) for way in pair]) for cause in causes]
    is_paced = all(way.is_paced for way in pair)
    return {
        "names": [strategy_name(way.levers) for way in pair],
        "peaks": [fullest(way.footprint) for way in pair],
        "tables": tables,
        "seconds": [(name, _seconds(*both)) for name, both in taken] if is_paced else [],
        "step": _seconds(*(way.pace.step_s for way in pair)),
    }


def _gibs(first: int, other: int) -> tuple[str, str, str]:
    """Both, and what the other has more; a component of a megabyte is no difference."""
    more = other - first
    return gib(first), gib(other), f"{more / GIB:+.1f}".replace("-", "−") if abs(more) >= GIB / 20 else "·"


def _seconds(first: float, other: float) -> tuple[str, str, str]:
    decimals = 3 if max(first, other) < 0.1 else 2
    said = [f"{each:.{decimals}f}" if abs(each) >= 0.5 / 10**decimals else "·" for each in (first, other)]
    more = other - first
    return said[0], said[1], f"{more:+.{decimals}f}".replace("-", "−") if abs(more) >= 0.5 / 10**decimals else "·"


def _way(answer: Answered, way: Way, words: Words, ident: str, bars: tuple[Bar, Bar], scales: Sequence[int]) -> Drawn:
    plan = answer.plan
    gpu, host, ram = way.footprint.gpu, way.footprint.host, way.hardware.host_ram_bytes
    name, levers = strategy_name(way.levers), way.levers
    needs, card = amounts(gpu.required_bytes, way.hardware.gpu.memory_bytes)
    drawn = {
        side: Markup(  # noqa: S704 (it escapes what it is given)
            bars_svg(
                [bar],
                title=f"{words.say(name)}: {words['plan'][f'{side}_title']}",
                ids=f"{ident}-{side}",
                scale_bytes=scale,
            )
        )
        for side, bar, scale in zip(("gpu", "host"), bars, scales, strict=True)
    }
    return {
        **drawn,
        "ident": ident,
        "called": way_ident(way),
        "choosing": answer.choosing(way),
        "name": name,
        "is_chosen": way is plan.chosen,
        "is_as_fast": way.is_as_fast,
        "chosen_for": plan.chosen_for if way is plan.chosen else "",
        "fits": way.fits,
        "levers": [  # the name in the words, and the value
            ("micro_batch", str(levers.micro_batch)),
            ("accum", str(levers.accumulation)),
            ("checkpointing", checkpointing_word(levers.checkpointing)),
            ("loss", levers.loss),
            *([("mlp", levers.mlp)] if levers.mlp != "plain" else []),
            *([("compile", levers.compile)] if levers.compile != "off" else []),
            *([("kernels", levers.kernels)] if levers.kernels != "plain" else []),
            *([("lora_rank", str(levers.lora.rank))] if levers.lora is not None else []),
            ("used", str(way.world)),
        ],
        "needs": needs,
        "card": card,
        "host_needs": amounts(host.peak_bytes_per_node)[0],
        "host_has": None if ram is None else amounts(ram)[0],
        "nvme_needs": amounts(host.nvme_bytes_per_node)[0] if host.nvme_bytes_per_node else None,
        "tokens_per_s": way.pace.tokens_per_s if way.is_paced else None,
        "seconds": seconds_words(way.pace),
        "hours": hours(plan.job, plan.effective_batch, way),
        "lacks": None if way.fits else missing(way),
        "places": () if way.fits else tuple(lacking_bytes(way)),  # where it does not fit: GPU, RAM, NVMe
        "gpu_table": _table(gpu.phases, fullest(way.footprint), gpu.overhead),
        "host_table": _table(host.phases, _largest(host.phases), {}),
    }


def bars_of(way: Way, words: Mapping[str, Any], *, is_first: bool) -> tuple[Bar, Bar]:
    """GPU and host. Only the first names its lines: all have the same."""
    host, names = way.footprint.host, words["components"]
    ram, ranks = way.hardware.host_ram_bytes, way.hardware.gpus_per_node
    on_host = {name: size * ranks for name, size in host.phases[_largest(host.phases)].components.items()}
    on_host["other"] = max(0, host.peak_bytes_per_node - sum(on_host.values()))
    beside = () if ram is None else (end_line(ram, words["ram_line"] if is_first else ""),)
    gpu = gpu_bar(way, names, words["card_line"] if is_first else "")
    return gpu, Bar(parts=parts_of(on_host, names), lines=beside, is_slim=True)


def _largest(phases: Mapping[PhaseName, Phase]) -> PhaseName:
    return max(phases, key=lambda name: phases[name].total_bytes)


def _table(phases: Mapping[PhaseName, Phase], peak: PhaseName, beside: Mapping[str, int]) -> Drawn:
    """Bytes by component and phase. `peak`: the phase that decides; `beside`: what every phase holds as well."""
    names = dict.fromkeys(name for phase in phases.values() for name in phase.components)
    rows = [(name, tuple(phase.components.get(name, 0) for phase in phases.values())) for name in names]
    rows = [(name, sizes) for name, sizes in rows if any(sizes)]
    rows += [(name, (size,) * len(phases)) for name, size in beside.items() if size]
    totals = [phase.total_bytes + sum(beside.values()) for phase in phases.values()]
    return {"phases": list(phases), "peak": list(phases).index(peak), "rows": rows, "totals": totals}


# --- the map --------------------------------------------------------------------------------------
# What the chosen way would need at each sequence and micro batch, and where another way would fit. More tokens never
# need less memory, so what fits is a staircase: whether another way fits is asked only along its edge.


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    sequence: int
    micro_batch: int
    share: float  # of the card, that the chosen way needs here
    fits: bool
    lacks_card: bool  # what is short is the GPU's memory; otherwise it is the host's
    fits_otherwise: bool | None  # another way would; None: nobody asked
    is_chosen: bool
    address: str  # the question with these values

    @property
    def shade(self) -> int:
        return min(int(self.share * STEPS), STEPS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Heat:
    sequences: tuple[int, ...]
    rows: tuple[tuple[int, tuple[Cell, ...]], ...]  # by micro batch
    is_whole: bool  # other ways were asked as well


@lru_cache(maxsize=KEPT)
def heat_of(answer: Answered, *, others: bool) -> Heat | None:
    """None: no engine runs what was asked for. `others`: ask for other ways as well, which takes a while."""
    if not answer.ways:
        return None
    way = answer.ways[0]
    # Powers of two around the one that is asked for, and that one.
    below = sum(length < way.levers.sequence for length in SEQUENCES)
    first = max(0, min(below - BEFORE, len(SEQUENCES) - COLUMNS))
    columns = tuple(sorted({*SEQUENCES[first : first + COLUMNS], way.levers.sequence}))
    lines = tuple(sorted({*MICRO_BATCHES, way.levers.micro_batch}))
    question = Question(
        shape=way.shape,
        base=way.levers,
        pinned=pinned(answer.plan.job) | {"micro_batch"},
        hardware=answer.plan.hardware,
        effective_batch=way.effective_batch,
        margin=answer.plan.job.limits.margin,
        calibration=calibration_of(answer.asked.request(), answer.plan.job),
    )
    asked = replace(question, hardware=way.hardware)
    here: dict[tuple[int, int], tuple[float, bool, bool]] = {}
    """The share of the card that the chosen way needs, whether it fits, whether it is the card that is too small."""
    for size in lines:
        for length in columns:
            footprint = weigh(asked, replace(way.levers, sequence=length, micro_batch=size))
            share = footprint.gpu.required_bytes / way.hardware.gpu.memory_bytes
            lacks_card = "GPU" in lacking_bytes(replace(way, footprint=footprint))
            here[size, length] = share, excess_bytes(asked, footprint) == 0, lacks_card
    edge: dict[int, int] = {}  # for each sequence the largest micro batch with which any way fits; 0: none does
    top = len(lines)
    for length in columns if others else ():
        while top and not here[lines[top - 1], length][1] and not _fits_otherwise(question, length, lines[top - 1]):
            top -= 1
        edge[length] = lines[top - 1] if top else 0

    def cell(length: int, size: int) -> Cell:
        share, fits, lacks_card = here[size, length]
        # A batch that was asked for grows to the next one that the micro batch divides.
        changes = {"seq": str(length), "micro_batch": str(size), "accum": ""}
        if answer.asked.get("effective_batch"):
            steps = size * way.levers.data_ranks(answer.plan.hardware.world)
            changes["effective_batch"] = str(steps * max(1, -(-answer.plan.effective_batch // steps)))
        return Cell(
            sequence=length,
            micro_batch=size,
            share=share,
            fits=fits,
            lacks_card=lacks_card,
            fits_otherwise=not fits and size <= edge[length] if others else None,
            is_chosen=(length, size) == (way.levers.sequence, way.levers.micro_batch),
            address=answer.asked.address(**changes),
        )

    rows = tuple((size, tuple(cell(length, size) for length in columns)) for size in lines)
    return Heat(sequences=columns, rows=rows, is_whole=others)


def _fits_otherwise(question: Question, length: int, size: int) -> bool:
    """A step is as many sequences as `plan` would take where none were asked for."""
    each = SEQUENCES_A_GPU * question.base.pipeline_parallel
    batch = question.base.data_ranks(question.hardware.world) * size * -(-each // size)
    if batch > MOST_BATCH:
        return False
    base = replace(question.base, sequence=length, micro_batch=size, accumulation=1)
    fixed = question.pinned - {"accumulation"}
    return something_fits(replace(question, base=base, pinned=fixed, effective_batch=batch))
