"""Stacked bars of memory as one SVG that stands alone: for a page, a saved file, a notebook.

Colours are those of Okabe and Ito, and each kind has a pattern of its own as well, so that neither colour-blindness nor
black-and-white print hides anything. There is no stylesheet and no `style` attribute: everything is a presentation
attribute, words outside the bars take the colour of the text around them, and lengths are shares of the width, so that
the words stay legible however narrow the drawing is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple
from xml.sax.saxutils import escape

from tightfit.planner.plan import Plan, Way
from tightfit.planner.reasons import worth_showing
from tightfit.priced import GIB, Priced, amounts, billions, spell_component, strategy_line, strategy_name
from tightfit.types import Footprint, PhaseName

MOST_OVER = 1.5  # a bar ends at this multiple of the line; what is longer is told by its number
BAR, SLIM, HEAD, FOOT, GAP = 26, 16, 20, 16, 12  # pixels: a bar, a slim one, words above, words of lines, room between
EDGE = 3  # by how much a line stands out of its bar
TELLING_SHARE = 0.09  # a part that is narrower than this share of the drawing has no word in it
DARK, LIGHT = "#111111", "#ffffff"
CARD_LINE = "{size} GiB card"
OVERHEAD = "overhead"  # allocator slack, context and communicator, as one part


class BarLook(NamedTuple):
    colour: str
    pattern: str = "plain"
    ink: str = LIGHT


LOOKS: dict[str, BarLook] = {
    "weights": BarLook("#0072b2"),
    "gathered_weights": BarLook("#56b4e9", "rising", DARK),
    "master_weights": BarLook("#cc79a7", "plain", DARK),
    "optimizer_states": BarLook("#d55e00", "plain", DARK),
    "gradients": BarLook("#e69f00", "falling", DARK),
    "buckets": BarLook("#e69f00", "dots", DARK),
    "activations": BarLook("#009e73", "plain", DARK),
    "recompute": BarLook("#009e73", "rising", DARK),
    "logits": BarLook("#f0e442", "plain", DARK),
    "temporaries": BarLook("#f0e442", "falling", DARK),
    "overhead": BarLook("#9a9a9a", "cross", DARK),
    "process": BarLook("#9a9a9a", "upright", DARK),
    "libraries": BarLook("#9a9a9a", "dots", DARK),
    "other": BarLook("#6b6b6b", "dots"),
}
"""By the names of components; any other is drawn as `other`."""

_STROKES = {
    "rising": '<path d="M-2 2 2 -2M0 8 8 0M6 10 10 6" stroke="#000" stroke-opacity=".45" stroke-width="1.3"/>',
    "falling": '<path d="M-2 6 2 10M0 0 8 8M6 -2 10 2" stroke="#000" stroke-opacity=".45" stroke-width="1.3"/>',
    "dots": '<circle cx="2" cy="2" r="1.2" fill="#000" fill-opacity=".5"/>'
    '<circle cx="6" cy="6" r="1.2" fill="#000" fill-opacity=".5"/>',
    "upright": '<path d="M2 0V8M6 0V8" stroke="#000" stroke-opacity=".35" stroke-width="1"/>',
    "cross": '<path d="M0 0 8 8M8 0 0 8" stroke="#000" stroke-opacity=".3" stroke-width="1"/>',
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BarPart:
    kind: str  # the component's name: decides colour and pattern
    label: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BarLine:
    """Where the card, or the RAM, ends."""

    at_bytes: int
    label: str
    is_dashed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    parts: tuple[BarPart, ...]
    lines: tuple[BarLine, ...] = ()  # the first is the end of what there is
    name: str = ""  # said above the bar; empty: nothing is
    note: str = ""  # the same, at the other end
    is_slim: bool = False

    @property
    def size_bytes(self) -> int:
        return sum(part.size_bytes for part in self.parts)

    @property
    def thickness(self) -> int:
        return SLIM if self.is_slim else BAR


# --- what there is to draw ------------------------------------------------------------------------


def plan_bars(plan: Plan) -> str:
    """A plan as HTML: what each way holds on one GPU at its fullest moment, against the card."""
    bars: list[Bar] = []
    for way in worth_showing(plan):
        needs, has = amounts(way.footprint.gpu.required_bytes, way.hardware.gpu.memory_bytes)
        mark = "→ " if way is plan.chosen else "" if way.fits else "× "
        name = f"{mark}{strategy_name(way.levers)}"
        note = f"{needs} of {has} GiB" + (f", {way.pace.tokens_per_s:,.0f} tokens/s" if way.is_paced else "")
        bars.append(replace(gpu_bar(way, {}, "" if bars else CARD_LINE), name=name, note=note))
    hardware = plan.hardware
    title = f"{plan.shape.name} ({billions(plan.shape.parameters)}) on {hardware.world} × {hardware.gpu.name}"
    return _with_legend(bars, title, "plan")


def phase_bars(priced: Priced) -> str:
    """An estimate as HTML: what one GPU holds in each phase."""
    return _with_legend(bars_of_phases(priced), f"{priced.shape.name}: {strategy_line(priced)}", "phases")


def bars_of_phases(priced: Priced) -> list[Bar]:
    bars: list[Bar] = []
    for name in priced.footprint.gpu.phases:
        ends = (end_line(priced.hardware.gpu.memory_bytes, "" if bars else CARD_LINE),) if priced.hardware else ()
        parts = gpu_parts(priced.footprint, name, {})
        size = sum(part.size_bytes for part in parts)
        bars.append(Bar(name=name, note=f"{amounts(size)[0]} GiB", parts=parts, lines=ends, is_slim=True))
    return bars


def gpu_bar(way: Way, names: Mapping[str, str], line: str) -> Bar:
    """What a GPU holds at its fullest moment. `line`: see `end_line`."""
    ends = [end_line(way.hardware.gpu.memory_bytes, line)]
    if way.gpu_limit_bytes < way.hardware.gpu.memory_bytes:
        ends.append(BarLine(at_bytes=way.gpu_limit_bytes, label="", is_dashed=True))
    return Bar(parts=gpu_parts(way.footprint, fullest(way.footprint), names), lines=tuple(ends))


def end_line(size_bytes: int, line: str) -> BarLine:
    """`line`: what is said at the end of what there is; empty: nothing, since it is the same for all."""
    return BarLine(at_bytes=size_bytes, label=line.format(size=amounts(size_bytes)[0]))


def fullest(footprint: Footprint) -> PhaseName:
    """The phase that decides whether the GPU has room."""
    gpu = footprint.gpu
    return "init" if gpu.init_peak_bytes > gpu.peak_bytes else gpu.peak_phase


def gpu_parts(footprint: Footprint, phase: PhaseName, names: Mapping[str, str]) -> tuple[BarPart, ...]:
    """What one GPU holds in a phase, all that the card must have room for. `names`: the components' in words."""
    held = dict(footprint.gpu.phases[phase].components)
    return parts_of(held | {OVERHEAD: sum(footprint.gpu.overhead.values())}, names)


def parts_of(held: Mapping[str, int], names: Mapping[str, str]) -> tuple[BarPart, ...]:
    return tuple(
        BarPart(kind=name, label=names.get(name, spell_component(name)), size_bytes=size)
        for name, size in held.items()
        if size > 0
    )


def _with_legend(bars: Sequence[Bar], title: str, ids: str) -> str:
    kinds = {part.kind: part.label for bar in bars for part in bar.parts}
    keys = " ".join(f"<span>{key_svg(kind, ids + '-key')} {escape(label)}</span>" for kind, label in kinds.items())
    return f"<div><p>{escape(title)}</p>{bars_svg(bars, title=title, ids=ids)}<p>{keys}</p></div>"


# --- the drawing ----------------------------------------------------------------------------------


def scale_of(bars: Sequence[Bar]) -> int:
    """The bytes that the whole width stands for: the longest bar or line, within reason."""
    ends = [line.at_bytes for bar in bars for line in bar.lines]
    longest = max((bar.size_bytes for bar in bars), default=0)
    if not ends:
        return max(longest, 1)
    return max(*ends, min(longest, round(MOST_OVER * max(ends))), 1)


def bars_svg(bars: Sequence[Bar], *, title: str, ids: str, scale_bytes: int | None = None) -> str:
    """All bars, one under the other. `ids`: what the names in this drawing begin with, unlike others of the page."""
    scale = scale_bytes or scale_of(bars)
    top, inside, said = 0, [], []
    for bar in bars:
        parts = ", ".join(f"{part.label} {part.size_bytes / GIB:.1f} GiB" for part in bar.parts)
        ends = "".join(f", {line.label}" for line in bar.lines if line.label)
        said.append(f"{bar.name}{': ' if bar.name else ''}{parts}{ends}")
        inside.append(_draw(bar, top, scale, ids))
        foot = FOOT if any(line.label for line in bar.lines) else 0
        top += (HEAD if bar.name or bar.note else 0) + bar.thickness + 2 * EDGE + foot + GAP
    kinds = dict.fromkeys(part.kind for bar in bars for part in bar.parts)
    description = "; ".join(filter(None, said))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="100%" height="{max(top - GAP, 1)}" role="img" '
        f'aria-labelledby="{ids}-title {ids}-desc" font-family="system-ui, sans-serif" font-size="12">'
        f'<title id="{ids}-title">{escape(title)}</title><desc id="{ids}-desc">{escape(description)}</desc>'
        f"<defs>{''.join(_pattern(kind, ids) for kind in kinds)}</defs>{''.join(inside)}</svg>"
    )


def key_svg(kind: str, ids: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="18" height="12" aria-hidden="true">'
        f"<defs>{_pattern(kind, ids)}</defs>"
        f'<rect width="18" height="12" fill="url(#{ids}-{_kind_of(kind)})" stroke="currentColor" stroke-opacity=".5"/>'
        "</svg>"
    )


def _kind_of(kind: str) -> str:
    return kind if kind in LOOKS else "other"


def _pattern(kind: str, ids: str) -> str:
    look = LOOKS[_kind_of(kind)]
    return (
        f'<pattern id="{ids}-{_kind_of(kind)}" width="8" height="8" patternUnits="userSpaceOnUse">'
        f'<rect width="8" height="8" fill="{look.colour}"/>{_STROKES.get(look.pattern, "")}</pattern>'
    )


def _draw(bar: Bar, top: int, scale: int, ids: str) -> str:
    pieces = []
    if bar.name or bar.note:
        pieces.append(f'<text x="0" y="{top + 14}" fill="currentColor" font-weight="600">{escape(bar.name)}</text>')
        pieces.append(f'<text x="100%" y="{top + 14}" text-anchor="end" fill="currentColor">{escape(bar.note)}</text>')
        top += HEAD
    top += EDGE
    held = 0
    for part in bar.parts:
        share, kind, look = part.size_bytes / scale, _kind_of(part.kind), LOOKS[_kind_of(part.kind)]
        word = ""
        if share >= TELLING_SHARE:
            # The number first: of what is cut off at the edge it is the last to go. A pattern needs paper of its own.
            halo = "" if look.pattern == "plain" else f' stroke="{look.colour}" stroke-width="4" paint-order="stroke"'
            word = (
                f'<text class="part-label" x="5" y="{bar.thickness // 2 + 4}" font-size="11" fill="{look.ink}"{halo}>'
                f"{part.size_bytes / GIB:.1f} {escape(part.label)}</text>"
            )
        if share > 0:  # a drawing within the drawing: whatever is wider than the part is cut off at its edge
            pieces.append(
                f'<svg x="{_percent(held / scale)}" y="{top}" width="{_percent(share)}" height="{bar.thickness}" '
                f'class="part {kind}"><title>{escape(part.label)} {part.size_bytes / GIB:.1f} GiB</title>'
                f'<rect width="100%" height="100%" fill="url(#{ids}-{kind})" stroke="{LIGHT}" stroke-width="1"/>'
                f"{word}</svg>"
            )
        held += part.size_bytes
    if held > scale:
        middle = top + bar.thickness // 2 + 5
        pieces.append(
            f'<text x="100%" dx="-4" y="{middle}" text-anchor="end" font-size="15" fill="{LIGHT}" stroke="{DARK}" '
            f'stroke-width="3" paint-order="stroke">▸</text>'
        )
    for line in bar.lines:  # as the words are, with a light edge: it has to be seen on any part and on any paper
        share, end = min(line.at_bytes / scale, 1), top + bar.thickness + EDGE
        x, dash = _percent(share), ' stroke-dasharray="4 3"' if line.is_dashed else ""
        ends = f'x1="{x}" x2="{x}" y1="{top - EDGE}" y2="{end}"'
        pieces.append(
            f'<line {ends} stroke="{LIGHT}" stroke-width="4"{dash}/>'
            f'<line {ends} stroke="currentColor" stroke-width="2"{dash}/>'
        )
        if line.label:
            anchor = "end" if share > 0.5 else "start"
            pieces.append(
                f'<text x="{x}" y="{end + FOOT - 4}" text-anchor="{anchor}" font-size="11" '
                f'fill="currentColor">{escape(line.label)}</text>'
            )
    return "".join(pieces)


def _percent(share: float) -> str:
    return f"{100 * share:.3f}%"
