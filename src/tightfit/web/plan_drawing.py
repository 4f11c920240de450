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
Drawn = dict[str, Any]  # what a template shows, by name


def draw(answer: Answered, words: Words, language: Language, *, advice: bool) -> Drawn:
    """All that the answer's template shows. `advice`: whether it was asked for what would make it fit."""
    plan, ways = answer.plan, answer.ways
    first = ways[0] if ways else None
    shape = first.shape if first else plan.shape
    pen = _Pen(plan, words, language)
    bars = [pen.bars(way, is_first=way is first) for way in ways]
    sides = list(zip(*bars, strict=True)) or [(), ()]
    scales = [scale_of(side) for side in sides]  # all ways to the same two
    legend = {  # only what can be seen: a part of less than a pixel needs no name
        part.kind: part.label
        for side, scale in zip(sides, scales, strict=True)
        for bar in side
        for part in bar.parts
        if part.size_bytes > scale / 500
    }
    return {
        "fits": plan.fits,
        "is_changed": bool(plan.chosen and plan.chosen.changes),
        "model": shape.name,
        "parameters": billions(shape.parameters),
        "hardware": sentence_in(language, plan.hardware.gpu.name).text,
        "gpus": plan.hardware.world,
        "used": first.world if first else plan.hardware.world,
        "batch": plan.effective_batch,
        "sequence": first.levers.sequence if first else plan.job.sequence,
        "considered": plan.considered,
        "ways": [pen.way(way, f"way{number}", bars[number], scales) for number, way in enumerate(ways)],
        "legend": [(label, Markup(key_svg(kind, "key"))) for kind, label in legend.items()],  # noqa: S704 (ours)
        "because": pen.said(reason_lines(plan)),
        "changes": pen.said(plan.chosen.changes if plan.chosen else ()),
        "remedies": [
            {
                "allowance": each.allowance,
                "cost": sentence_in(language, each.cost),
                "effect": sentence_in(language, each.effect),
                "way": sentence_in(language, strategy_name(each.way.levers)),
                "tokens_per_s": each.way.pace.tokens_per_s,
            }
            for each in plan.remedies
        ],
        "gpus_needed": plan.gpus_needed,
        "is_advised": advice,
        "unproven": pen.said(plan.unproven),
        "notes": pen.said(shape.notes),
    }


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

    def said(self, sentences: Sequence[Said]) -> list[Sentence]:
        return [sentence_in(self.language, each) for each in sentences]

    def way(self, way: Way, ident: str, bars: tuple[Bar, Bar], scales: Sequence[int]) -> Drawn:
        gpu, host, ram = way.footprint.gpu, way.footprint.host, way.hardware.host_ram_bytes
        name = sentence_in(self.language, strategy_name(way.levers))
        needs, card = amounts(gpu.required_bytes, way.hardware.gpu.memory_bytes)
        levers = way.levers
        drawn = {
            side: Markup(  # noqa: S704 (it escapes what it is given)
                bars_svg([bar], title=f"{name.text}: {self.words[title]}", ids=f"{ident}-{side}", scale_bytes=scale)
            )
            for side, title, bar, scale in zip(("gpu", "host"), ("gpu_title", "host_title"), bars, scales, strict=True)
        }
        return {
            **drawn,
            "ident": ident,
            "name": name,
            "is_chosen": way is self.plan.chosen,
            "fits": way.fits,
            "levers": [  # the name in the words, and the value
                ("micro_batch", str(levers.micro_batch)),
                ("accum", str(levers.accumulation)),
                ("checkpointing", checkpointing_word(levers.checkpointing)),
                ("loss", levers.loss),
                *([("lora_rank", str(levers.lora.rank))] if levers.lora is not None else []),
                ("used", str(way.world)),
            ],
            "needs": needs,
            "card": card,
            "host_needs": amounts(host.peak_bytes_per_node)[0],
            "host_has": None if ram is None else amounts(ram)[0],
            "nvme_needs": amounts(host.nvme_bytes_per_node)[0] if host.nvme_bytes_per_node else None,
            "tokens_per_s": way.pace.tokens_per_s,
            "step_s": way.pace.step_s,
            "hours": hours(self.plan.job, self.plan.effective_batch, way),
            "lacks": None if way.fits else sentence_in(self.language, missing(way)),
            "places": () if way.fits else tuple(lacking_bytes(way)),  # where it does not fit: GPU, RAM, NVMe
            "gpu_table": _table(gpu.phases, fullest(way.footprint), gpu.overhead),
            "host_table": _table(host.phases, _largest(host.phases), {}),
        }

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


def _largest(phases: Mapping[PhaseName, Phase]) -> PhaseName:
    return max(phases, key=lambda name: phases[name].total_bytes)


def _table(phases: Mapping[PhaseName, Phase], peak: PhaseName, beside: Mapping[str, int]) -> Drawn:
    """Bytes by component and phase. `peak`: the phase that decides; `beside`: what every phase holds as well."""
    names = list(dict.fromkeys(name for phase in phases.values() for name in phase.components))
    rows = [(name, tuple(phase.components.get(name, 0) for phase in phases.values())) for name in names]
    rows = [(name, sizes) for name, sizes in rows if any(sizes)]
    rows += [(name, (size,) * len(phases)) for name, size in beside.items() if size]
    totals = [phase.total_bytes + sum(beside.values()) for phase in phases.values()]
    return {"phases": list(phases), "peak": list(phases).index(peak), "rows": rows, "totals": totals}
