"""An answer as it is drawn: bars, tables of phases, figures and sentences, in the words of a language."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from tightfit.desk.svg_bars import Bar, BarLine, bars_svg, fullest, gpu_parts, key_svg, parts_of, scale_of
from tightfit.inputs.flags import checkpointing_word
from tightfit.messages import Language, Said, id_of
from tightfit.planner.plan import Plan, Way
from tightfit.planner.reasons import further, hours, lacking_bytes, missing
from tightfit.priced import GIB, amounts, billions, strategy_name
from tightfit.types import Phase, PhaseName
from tightfit.web.plan_answer import Answered
from tightfit.web.words import Sentence, sentence_in

ADVICE = {
    *("plan.mildest-change", "plan.other-change", "plan.no-change-fits"),
    *("plan.gpus-would-do", "plan.gpus-would-do-pinned", "plan.no-gpus-would-do", "plan.no-gpus-would-do-pinned"),
}
"""The messages that the page shows as what would make it fit."""

Words = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseTable:
    """Bytes by component and phase."""

    phases: tuple[str, ...]
    peak: int
    """The phase that decides."""
    rows: tuple[tuple[str, tuple[int, ...]], ...]
    totals: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnWay:
    ident: str
    name: Sentence
    is_chosen: bool
    fits: bool
    levers: tuple[tuple[str, str], ...]
    """Name in the words, and value."""
    gpu: Markup
    host: Markup
    needs: str
    card: str
    host_needs: str
    host_has: str | None
    """None: the RAM is not known."""
    nvme_needs: str | None
    tokens_per_s: float
    step_s: float
    hours: float | None
    lacks: Sentence | None
    places: tuple[str, ...]
    """Where it does not fit: GPU, RAM, NVMe."""
    gpu_table: PhaseTable
    host_table: PhaseTable


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnRemedy:
    allowance: str
    cost: Sentence
    effect: Sentence
    way: Sentence
    tokens_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnPlan:
    """All that the answer's template shows."""

    fits: bool
    is_changed: bool
    model: str
    parameters: str
    hardware: str
    gpus: int
    used: int
    batch: int
    sequence: int
    considered: int
    ways: tuple[DrawnWay, ...]
    legend: tuple[tuple[str, Markup], ...]
    because: tuple[Sentence, ...]
    changes: tuple[Sentence, ...]
    remedies: tuple[DrawnRemedy, ...]
    gpus_needed: int | None
    is_advised: bool
    unproven: tuple[Sentence, ...]
    notes: tuple[Sentence, ...]


def draw(answer: Answered, words: Words, language: Language, *, advice: bool) -> DrawnPlan:
    """`advice`: whether it was asked for what would make it fit."""
    plan, ways = answer.plan, answer.ways
    first = ways[0] if ways else None
    shape = first.shape if first else plan.shape
    pen = _Pen(plan, words, language)
    bars = [pen.bars(way, is_first=way is first) for way in ways]
    return DrawnPlan(
        fits=plan.fits,
        is_changed=bool(plan.chosen and plan.chosen.changes),
        model=shape.name,
        parameters=billions(shape.parameters),
        hardware=sentence_in(language, plan.hardware.gpu.name).text,
        gpus=plan.hardware.world,
        used=first.world if first else plan.hardware.world,
        batch=plan.effective_batch,
        sequence=first.levers.sequence if first else plan.job.sequence,
        considered=plan.considered,
        ways=pen.ways(ways, bars),
        legend=_legend(bars),
        because=pen.said(reason_lines(plan)),
        changes=pen.said(plan.chosen.changes if plan.chosen else ()),
        remedies=pen.remedies(),
        gpus_needed=plan.gpus_needed,
        is_advised=advice,
        unproven=pen.said(plan.unproven),
        notes=pen.said(shape.notes),
    )


def reason_lines(plan: Plan) -> list[Said]:
    """The sentences that say something which the page does not say elsewhere."""
    if plan.chosen is not None:
        return further(plan)
    return [each for each in further(plan) if id_of(each) not in ADVICE]


def gib(size_bytes: int) -> str:
    """A cell of a table; a dot: nothing."""
    return f"{size_bytes / GIB:.1f}" if size_bytes >= GIB / 20 else ("·" if not size_bytes else "<0.1")


@dataclass(frozen=True, slots=True)
class _Pen:
    plan: Plan
    words: Words
    language: Language

    def said(self, sentences: Sequence[Said]) -> tuple[Sentence, ...]:
        return tuple(sentence_in(self.language, each) for each in sentences)

    def remedies(self) -> tuple[DrawnRemedy, ...]:
        return tuple(
            DrawnRemedy(
                allowance=each.allowance,
                cost=sentence_in(self.language, each.cost),
                effect=sentence_in(self.language, each.effect),
                way=sentence_in(self.language, strategy_name(each.way.levers)),
                tokens_per_s=each.way.pace.tokens_per_s,
            )
            for each in self.plan.remedies
        )

    def ways(self, ways: Sequence[Way], bars: Sequence[tuple[Bar, Bar]]) -> tuple[DrawnWay, ...]:
        """All to the same two scales."""
        scales = scale_of([gpu for gpu, _ in bars]), scale_of([host for _, host in bars])
        return tuple(self.way(way, f"way{number}", bars[number], scales) for number, way in enumerate(ways))

    def way(self, way: Way, ident: str, bars: tuple[Bar, Bar], scales: tuple[int, int]) -> DrawnWay:
        host, ram = way.footprint.host, way.hardware.host_ram_bytes
        name = sentence_in(self.language, strategy_name(way.levers))
        needs, card = amounts(way.footprint.gpu.required_bytes, way.hardware.gpu.memory_bytes)
        levers = way.levers
        rank = (("lora_rank", str(levers.lora.rank)),) if levers.lora is not None else ()
        return DrawnWay(
            ident=ident,
            name=name,
            is_chosen=way is self.plan.chosen,
            fits=way.fits,
            levers=(
                (
                    ("micro_batch", str(levers.micro_batch)),
                    ("accum", str(levers.accumulation)),
                    ("checkpointing", checkpointing_word(levers.checkpointing)),
                    ("loss", levers.loss),
                    *rank,
                    ("used", str(way.world)),
                )
            ),
            gpu=_svg(bars[0], f"{name.text}: {self.words['gpu_title']}", f"{ident}-gpu", scales[0]),
            host=_svg(bars[1], f"{name.text}: {self.words['host_title']}", f"{ident}-host", scales[1]),
            needs=needs,
            card=card,
            host_needs=amounts(host.peak_bytes_per_node)[0],
            host_has=None if ram is None else amounts(ram)[0],
            nvme_needs=amounts(host.nvme_bytes_per_node)[0] if host.nvme_bytes_per_node else None,
            tokens_per_s=way.pace.tokens_per_s,
            step_s=way.pace.step_s,
            hours=hours(self.plan.job, self.plan.effective_batch, way),
            lacks=None if way.fits else sentence_in(self.language, missing(way)),
            places=() if way.fits else tuple(lacking_bytes(way)),
            gpu_table=_table(way.footprint.gpu.phases, fullest(way.footprint), way.footprint.gpu.overhead),
            host_table=_table(host.phases, _largest(host.phases), {}),
        )

    def bars(self, way: Way, *, is_first: bool) -> tuple[Bar, Bar]:
        """GPU and host. Only the first names its lines: all have the same."""
        host, names = way.footprint.host, self.words["components"]
        card, ram = way.hardware.gpu.memory_bytes, way.hardware.host_ram_bytes
        ends = [BarLine(at_bytes=card, label=self._line("card_line", card) if is_first else "")]
        if way.gpu_limit_bytes < card:
            ends.append(BarLine(at_bytes=way.gpu_limit_bytes, label="", is_dashed=True))
        beside = () if ram is None else (BarLine(at_bytes=ram, label=self._line("ram_line", ram) if is_first else ""),)
        ranks = way.hardware.gpus_per_node
        on_host = {name: size * ranks for name, size in host.phases[_largest(host.phases)].components.items()}
        on_host["other"] = max(0, host.peak_bytes_per_node - sum(on_host.values()))
        return (
            Bar(parts=gpu_parts(way.footprint, fullest(way.footprint), names), lines=tuple(ends)),
            Bar(parts=parts_of(on_host, names), lines=beside, is_slim=True),
        )

    def _line(self, key: str, size_bytes: int) -> str:
        return str(self.words[key]).format(size=amounts(size_bytes)[0])


def _svg(bar: Bar, title: str, ids: str, scale: int) -> Markup:
    return Markup(bars_svg([bar], title=title, ids=ids, scale_bytes=scale))  # noqa: S704 (it escapes what it is given)


def _legend(bars: Sequence[tuple[Bar, Bar]]) -> tuple[tuple[str, Markup], ...]:
    """Only what can be seen: a part of less than a pixel needs no name."""
    kinds: dict[str, str] = {}
    for side in zip(*bars, strict=True):
        scale = scale_of(side)
        kinds |= {part.kind: part.label for bar in side for part in bar.parts if part.size_bytes > scale / 500}
    return tuple((label, Markup(key_svg(kind, "key"))) for kind, label in kinds.items())  # noqa: S704 (as above)


# --- phases ---------------------------------------------------------------------------------------


def _largest(phases: Mapping[PhaseName, Phase]) -> PhaseName:
    return max(phases, key=lambda name: phases[name].total_bytes)


def _table(phases: Mapping[PhaseName, Phase], peak: PhaseName, beside: Mapping[str, int]) -> PhaseTable:
    """`beside`: what every phase holds as well."""
    names = list(dict.fromkeys(name for phase in phases.values() for name in phase.components))
    rows = [(name, tuple(phase.components.get(name, 0) for phase in phases.values())) for name in names]
    rows = [(name, sizes) for name, sizes in rows if any(sizes)]
    rows += [(name, (size,) * len(phases)) for name, size in beside.items() if size]
    totals = tuple(phase.total_bytes + sum(beside.values()) for phase in phases.values())
    return PhaseTable(phases=tuple(phases), peak=list(phases).index(peak), rows=tuple(rows), totals=totals)
