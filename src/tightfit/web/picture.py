"""The verdict with its bars as one SVG that stands alone: for a chat, a slide, an issue. The browser makes a PNG of it.

No font comes along and nothing measures text here: what may be long is drawn smaller, by how wide letters mostly are.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from tightfit.desk.svg_bars import Bar, bars_svg, key_svg, scale_of
from tightfit.priced import amounts, billions
from tightfit.web.plan_answer import Answered
from tightfit.web.plan_drawing import bars_of, card_of
from tightfit.web.words import Words

WIDTH, EDGE = 1200, 56
ROOM = WIDTH - 2 * EDGE
SCALE = 1.7  # of the bars, whose words are made for a page
INK, QUIET, PAPER, GOOD, BAD = "#1b1f24", "#57606a", "#ffffff", "#00694d", "#b3261e"
FONTS = "system-ui, 'Segoe UI', Roboto, 'Noto Sans', 'PingFang SC', 'Microsoft YaHei', 'Noto Sans CJK SC', sans-serif"
A_ROW = 4  # keys of the legend


@cache
def read_accuracy() -> dict[str, Any]:
    """How far our peaks were off what was measured, as benchmarks/accuracy.py found it."""
    found: dict[str, Any] = json.loads(Path(__file__).with_name("accuracy.json").read_text(encoding="utf-8"))
    return found


def draw_picture(answer: Answered, words: Words) -> str | None:
    """None: no engine runs what was asked for."""
    if not answer.ways:
        return None
    said, way, plan = words["plan"], answer.ways[0], answer.plan
    card = card_of(answer, way, words)
    levers, gpu, ram = way.levers, way.hardware.gpu, way.hardware.host_ram_bytes
    model = f"{way.shape.name} ({billions(way.shape.parameters)}) · {said['methods'][levers.method]}"
    machine = [f"{plan.hardware.world} × {gpu.name}"]
    machine += [] if ram is None else [said["ram_line"].format(size=amounts(ram)[0])]
    machine.append(said["picture_step"].format(batch=plan.effective_batch, sequence=f"{levers.sequence:,}"))
    machine += [] if plan.job.trainer == "tightfit" else [said["trainers"][plan.job.trainer]]
    colour, mark = (GOOD, "✓") if plan.fits else (BAD, "✗")
    drawn = [
        _line(EDGE, 82, model, size=40, weight=700),
        _line(EDGE, 124, " · ".join(machine), size=24, colour=QUIET),
        _line(EDGE, 214, f"{mark} {said['card_' + card['kind']]}", size=72, weight=700, colour=colour),
        _line(EDGE, 256, words.say(card["name"] if plan.fits else card["lacks"]), size=24),
    ]
    facts = [fact for fact in card["facts"] if fact.value]
    for number, fact in enumerate(facts):
        left, room = EDGE + number * ROOM // len(facts), ROOM // len(facts) - 16
        ink = BAD if fact.is_bad else INK
        drawn.append(_line(left, 320, fact.value, size=32, weight=700, colour=ink, room=room))
        drawn.append(_line(left, 346, said[fact.name], size=18, colour=QUIET, room=room))
        drawn.append(_line(left, 370, fact.note, size=18, colour=QUIET, room=room))
    top, kinds = 402, dict[str, str]()
    for bar, name in zip(bars_of(way, said, is_first=False), ("gpu", "host"), strict=True):
        top += _draw_bar(drawn, bar, top, name, said[f"{name}_title"])
        kinds |= {part.kind: part.label for part in bar.parts if part.size_bytes > scale_of([bar]) / 200}
    for number, (kind, label) in enumerate(kinds.items()):
        left, below = EDGE + number % A_ROW * ROOM // A_ROW, top + 34 * (number // A_ROW)
        drawn.append(f'<g transform="translate({left} {below + 6}) scale(1.5)">{key_svg(kind, "picture")}</g>')
        drawn.append(_line(left + 36, below + 21, label, size=19, colour=QUIET, room=ROOM // A_ROW - 48))
    top += 34 * -(-len(kinds) // A_ROW) + 20
    drawn.append(f'<rect x="{EDGE}" y="{top}" width="{ROOM}" height="1" fill="{QUIET}" fill-opacity=".4"/>')
    drawn.append(_line(EDGE, top + 44, "tightfit", size=30, weight=700))
    accuracy = said["picture_accuracy"].format(**read_accuracy())
    drawn.append(_line(EDGE + 150, top + 42, accuracy, size=18, colour=QUIET, room=ROOM - 150))
    height = top + 74
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        f'color="{INK}" font-family="{FONTS}"><title>{escape(model)}</title>'
        f'<rect width="100%" height="100%" fill="{PAPER}"/><rect width="14" height="100%" fill="{colour}"/>'
        f"{''.join(drawn)}</svg>"
    )


def _draw_bar(drawn: list[str], bar: Bar, top: int, ids: str, title: str) -> int:
    """How much room it takes."""
    needs = [amounts(bar.size_bytes)[0], *(amounts(line.at_bytes)[0] for line in bar.lines[:1])]
    drawn.append(_line(EDGE, top + 20, title, size=20, weight=600))
    drawn.append(_line(WIDTH - EDGE, top + 20, f"{' / '.join(needs)} GiB", size=20, weight=600))
    inside = bars_svg([bar], title=title, ids=f"picture-{ids}")
    place = f'transform="translate({EDGE} {top + 28}) scale({SCALE})"'
    drawn.append(f'<g {place}><svg width="{ROOM / SCALE:.1f}" height="70">{inside}</svg></g>')
    return 28 + round(SCALE * (bar.thickness + 20))


def _line(x: int, y: int, text: str, *, size: int, weight: int = 400, colour: str = INK, room: int = ROOM) -> str:
    """What is placed at the right edge ends there."""
    wide = sum(1.0 if ord(letter) > 0x2E80 else 0.55 + weight / 10_000 for letter in text)
    size, anchor = min(size, int(room / max(wide, 1))), "end" if x == WIDTH - EDGE else "start"
    return (
        f'<text x="{x}" y="{y}" font-size="{size}" font-weight="{weight}" fill="{colour}" text-anchor="{anchor}">'
        f"{escape(text)}</text>"
    )
