"""An answer as it is drawn: bars, tables of phases and figures; and the map of sequence × micro batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from markupsafe import Markup

from tightfit.desk.calibration import calibration_of
from tightfit.desk.svg_bars import Bar, bars_svg, end_line, fullest, gpu_bar, key_svg, parts_of, scale_of
from tightfit.inputs.flags import MOST_BATCH, checkpointing_word
from tightfit.job.file import pinned
from tightfit.messages import id_of
from tightfit.planner import SEQUENCES_A_GPU
from tightfit.planner.plan import Plan, Way
from tightfit.planner.question import Question, excess_bytes, weigh
from tightfit.planner.reasons import further, hours, lacking_bytes, missing
from tightfit.planner.search import something_fits
from tightfit.priced import GIB, amounts, billions, seconds_words, strategy_name
from tightfit.types import Phase, PhaseName
from tightfit.web.plan_answer import KEPT, Answered
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


def draw(answer: Answered, words: Words, *, advice: bool) -> Drawn:
    """All that the answer's template shows. `advice`: whether it was asked for what would make it fit."""
    plan, ways = answer.plan, answer.ways
    first = ways[0] if ways else None
    bars = [_bars(way, words["plan"], is_first=way is first) for way in ways]
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
        "used": first.world if first else plan.hardware.world,
        "sequence": first.levers.sequence if first else plan.job.sequence,
        "ways": [_way(plan, way, words, f"way{number}", bars[number], scales) for number, way in enumerate(ways)],
        "legend": [(label, Markup(key_svg(kind, "key"))) for kind, label in legend.items()],  # noqa: S704 (ours)
        # What the page does not say elsewhere.
        "because": [each for each in further(plan) if plan.chosen is not None or id_of(each) not in ADVICE],
        "changes": plan.chosen.changes if plan.chosen else (),
        "name_way": strategy_name,
        "is_advised": advice,
    }


def gib(size_bytes: int) -> str:
    """A cell of a table; a dot: nothing."""
    return f"{size_bytes / GIB:.1f}" if size_bytes >= GIB / 20 else ("·" if not size_bytes else "<0.1")


def _way(plan: Plan, way: Way, words: Words, ident: str, bars: tuple[Bar, Bar], scales: Sequence[int]) -> Drawn:
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
        "name": name,
        "is_chosen": way is plan.chosen,
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


def _bars(way: Way, words: Mapping[str, Any], *, is_first: bool) -> tuple[Bar, Bar]:
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
    here: dict[tuple[int, int], tuple[float, bool]] = {}  # the share of the card that the chosen way needs; if it fits
    for size in lines:
        for length in columns:
            footprint = weigh(asked, replace(way.levers, sequence=length, micro_batch=size))
            share = footprint.gpu.required_bytes / way.hardware.gpu.memory_bytes
            here[size, length] = share, excess_bytes(asked, footprint) == 0
    edge: dict[int, int] = {}  # for each sequence the largest micro batch with which any way fits; 0: none does
    top = len(lines)
    for length in columns if others else ():
        while top and not here[lines[top - 1], length][1] and not _fits_otherwise(question, length, lines[top - 1]):
            top -= 1
        edge[length] = lines[top - 1] if top else 0

    def cell(length: int, size: int) -> Cell:
        share, fits = here[size, length]
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
