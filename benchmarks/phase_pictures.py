"""The pictures of docs/footprint.md: what one GPU holds in each phase, by component.

python benchmarks/phase_pictures.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tightfit
from tightfit.desk.svg_bars import bars_of_phases, bars_svg, key_svg

IMAGES = Path(__file__).parents[1] / "docs" / "images"
WIDTH, EDGE, ROW, COLUMN, COLUMNS = 760, 16, 20, 182, 4

PICTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "phases-lora": (
        "Qwen2.5-7B, LoRA on one 24 GB card",
        {"gpus": "1x24GB", "engine": "zero0", "method": "lora"},
    ),
    "phases-zero2": ("Qwen2.5-7B, all parameters, ZeRO-2 on 8 GPUs", {"gpus": "8x40GB", "engine": "zero2"}),
    "phases-zero3": ("Qwen2.5-7B, all parameters, ZeRO-3 on 8 GPUs", {"gpus": "8x40GB", "engine": "zero3"}),
}
ALIKE = {"model": "qwen2.5-7b", "seq": 4096, "micro_batch": 1, "checkpointing": "full"}


def picture(name: str) -> str:
    """One drawing on white, as it may be shown on any ground, with its legend below."""
    title, flags = PICTURES[name]
    bars = bars_of_phases(tightfit.estimate(**ALIKE, **flags).priced)
    drawn = bars_svg(bars, title=title, ids=name)
    height = int(drawn.partition('height="')[2].partition('"')[0])
    keys = _keys({part.kind: part.label for bar in bars for part in bar.parts}, name)
    below = EDGE + 2 * ROW + height
    whole = below + ROW * (len(keys) // COLUMNS + bool(len(keys) % COLUMNS)) + EDGE
    legend = "".join(
        f'<g transform="translate({EDGE + COLUMN * (number % COLUMNS)} {below + ROW * (number // COLUMNS)})">{key}</g>'
        for number, key in enumerate(keys)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {whole}" color="#111111" '
        'font-family="system-ui, sans-serif">'
        f'<rect width="{WIDTH}" height="{whole}" fill="#ffffff"/>'
        f'<text x="{EDGE}" y="{EDGE + 10}" font-size="15" font-weight="600" fill="currentColor">{title}</text>'
        f'<svg x="{EDGE}" y="{EDGE + ROW}" width="{WIDTH - 2 * EDGE}" height="{height}">{drawn}</svg>{legend}</svg>\n'
    )


def _keys(kinds: dict[str, str], name: str) -> list[str]:
    return [
        f'{key_svg(kind, name + "-key")}<text x="24" y="10" font-size="12" fill="currentColor">{label}</text>'
        for kind, label in kinds.items()
    ]


def main() -> None:
    for name in PICTURES:
        (IMAGES / f"{name}.svg").write_text(picture(name), encoding="utf-8")


if __name__ == "__main__":
    main()
