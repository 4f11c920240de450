"""Predicted beside published: writes the generated parts of docs/published.md.

    python benchmarks/published.py            write them
    python benchmarks/published.py --check    exit 1 if the page is stale
    python benchmarks/published.py --quick    print every row with the causes of its step, and every group
    python benchmarks/published.py --json     the same as JSON lines

`--rows FILE` takes other measurements of the same form for the last two. `published_rows.py` reads the rows.

A published pace is compared as it is. A published peak depends on what its publisher logs: `max_memory_allocated` is
what we predict; what PyTorch reserved and what the driver shows lie above it by what the allocator keeps, which differs
from run to run. For those a range is predicted, from what the allocator kept in our own runs.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from blocks import fill, write_or_check
from published_rows import ROWS, InexpressibleError, PeakKind, PublishedRow, Reading, read, read_rows
from rows import DATA, GIB, GIVEN, OWN, PACE, PACE_LATER

from tightfit.inputs.flags import checkpointing_word
from tightfit.memory.overhead import COMMUNICATOR_BYTES
from tightfit.priced import strategy_name
from tightfit.types import UserError

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "published.md"
RESERVED = DATA / "h200-reserved.jsonl"
"""What the allocator kept under its default setting, and for lengths that vary."""
APART = 1.15
"""Rows that differ less than this are in no order."""
WITHIN = 0.25
CLOSE = 0.05
"""A choice this near to the fastest is as good as it."""
TIGHT = 0.03
CONTEXT_GIB = (0.4, 0.9)
"""What the driver counts beside the allocator: our runs had 0.6 to 0.9, older CUDA versions load fewer kernels."""
DECIMAL_GIB = 1e9 / GIB
"""A publisher who prints GB may mean either."""

SECTIONS: Mapping[str, str] = {
    "llm_foundry": r"llm-foundry",
    "torchtitan": r"pytorch/torchtitan|^torchtitan",
    "torchtune": r"torchtune",
    "torchao": r"^pytorch/ao",
    "llama_factory": r"llmq",
    "qwen": r"^QwenLM/",
    "swift": r"ms-swift",
    "litgpt": r"litgpt",
    "peft": r"huggingface/peft",
    "others": "",
}
"""The parts of the page that list rows, by words of their source; the first that is found holds."""


# --- everything ---------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Every row, read or left out."""

    readings: tuple[Reading, ...]
    left_out: tuple[tuple[PublishedRow, str], ...]

    @cached_property
    def alike(self) -> list[Reading]:
        """Those that figures are made of: the others differ in something that we have not."""
        return [reading for reading in self.readings if not reading.differs]

    @cached_property
    def paces(self) -> list[Reading]:
        return [reading for reading in self.alike if reading.has_pace]

    @cached_property
    def peaks(self) -> list[Reading]:
        return [reading for reading in self.alike if reading.has_peak]

    @cached_property
    def remarks(self) -> list[str]:
        """In the order in which they are first made: the page numbers them."""
        return list(dict.fromkeys(remark for reading in self.readings for remark in reading.remarks))


def compare(rows: Iterable[PublishedRow]) -> Comparison:
    readings, left_out = [], []
    for row in rows:
        try:
            readings.append(read(row))
        except InexpressibleError as reason:
            left_out.append((row, str(reason)))
        except UserError as refused:
            left_out.append((row, f"refused: {refused}"))
    return Comparison(readings=tuple(readings), left_out=tuple(left_out))


Key = Callable[[Reading], Any]


def grid_of(reading: Reading) -> tuple[str, str]:
    """Same source, same hardware."""
    return reading.row.source, reading.row.hardware


def job_of(reading: Reading) -> tuple[Any, ...]:
    """What somebody asked for in a grid; its rows are ways to compute it."""
    row = reading.row
    return *grid_of(reading), row.model, row.gpus, row.sequence, reading.levers.method


def group_of(reading: Reading) -> tuple[str, str, str, str]:
    """Project, card, engine and method: what shares its causes."""
    nodes, world = reading.hardware.nodes, reading.hardware.world
    size = "one GPU" if world == 1 else "one node" if nodes == 1 else "several nodes"
    levers = reading.levers
    return reading.row.project, f"{reading.hardware.gpu.name}, {size}", str(strategy_name(levers)), levers.method


def section_of(row: PublishedRow) -> str:
    return next(name for name, pattern in SECTIONS.items() if re.search(pattern, row.source))


def grouped(readings: Iterable[Reading], key: Key) -> dict[Any, list[Reading]]:
    found: dict[Any, list[Reading]] = {}
    for reading in readings:
        found.setdefault(key(reading), []).append(reading)
    return found


# --- the pace -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PaceScore:
    """How far predicted paces are from published ones."""

    ratios: tuple[float, ...]
    apart: int
    right: int
    grid_choices: tuple[float, ...]
    """Of each grid, the published pace of the row that we predict to be fastest, over the fastest published."""
    job_choices: tuple[float, ...]
    """The same of each job that a grid has several ways for."""

    @property
    def error(self) -> float:
        return median(abs(ratio - 1) for ratio in self.ratios)

    @property
    def within(self) -> int:
        return sum(abs(ratio - 1) <= WITHIN for ratio in self.ratios)


def score(readings: Sequence[Reading]) -> PaceScore:
    grids = [group for group in grouped(readings, grid_of).values() if len(group) > 1]
    jobs = [group for group in grouped(readings, job_of).values() if len(group) > 1]
    pairs = [pair for group in grids for pair in combinations(group, 2) if _apart(*pair)]
    return PaceScore(
        ratios=tuple(reading.pace_ratio for reading in readings),
        apart=len(pairs),
        right=sum(_in_order(*pair) for pair in pairs),
        grid_choices=tuple(map(_choice, grids)),
        job_choices=tuple(map(_choice, jobs)),
    )


def _published(reading: Reading) -> float:
    return reading.row.tokens_per_s or 0.0


def _apart(one: Reading, other: Reading) -> bool:
    slower, faster = sorted((_published(one), _published(other)))
    return faster > APART * slower


def _in_order(one: Reading, other: Reading) -> bool:
    return (_published(one) > _published(other)) == (one.tokens_per_s > other.tokens_per_s)


def _choice(group: Sequence[Reading]) -> float:
    chosen = max(group, key=lambda reading: reading.tokens_per_s)
    return _published(chosen) / max(map(_published, group))


# --- the peak -----------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def reserved_shares() -> Mapping[bool, float]:
    """The most that PyTorch reserved over what tensors held, in our own runs; True: of engines that gather weights."""
    shares: dict[bool, float] = {}
    for path in (GIVEN, OWN, PACE, *PACE_LATER, RESERVED):
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        for gathers, share in filter(None, map(_reserved_share, map(json.loads, lines))):
            shares[gathers] = max(shares.get(gathers, 1.0), share)
    return shares


def _reserved_share(raw: Mapping[str, Any]) -> tuple[bool, float] | None:
    if "scenario" not in raw:
        return (False, raw["reserved"] / max(raw["allocated"], raw["init_allocated"])) if raw.get("reserved") else None
    if not (raw.get("reserved") and raw.get("peak")):
        return None
    start = max(raw["phases"]["model"]["peak"], raw["phases"]["engine"]["peak"])
    scenario = raw["scenario"]
    engine = scenario.get("engine") or f"zero{scenario['stage']}"
    return engine in ("zero3", "fsdp2"), raw["reserved"] / max(raw["peak"], start)


def peak_range(reading: Reading) -> tuple[float, float]:
    """GiB that the allocator or the driver may show for our peak."""
    peak = reading.peak_bytes / GIB
    start = reading.footprint.gpu.init_peak_bytes / GIB if reading.levers.stage else 0.0
    high = max(peak, start) * reserved_shares()[reading.levers.shards_parameters]
    if reading.peak_kind == "reserved":
        return peak, high
    communicator = COMMUNICATOR_BYTES / GIB if reading.hardware.world > 1 else 0.0
    return peak + CONTEXT_GIB[0], high + CONTEXT_GIB[1] + communicator


def is_explained(reading: Reading) -> bool:
    low, high = peak_range(reading)
    printed = reading.peak_gib
    least = printed * DECIMAL_GIB if reading.peak_kind == "nvidia-smi" else printed
    return least <= high and (reading.bounded or printed >= low)


# --- for the model's makers ---------------------------------------------------------------------


def facts(reading: Reading) -> dict[str, Any]:
    row, levers, step, hardware = reading.row, reading.levers, reading.pace, reading.hardware
    return {
        "place": row.place,
        "source": row.project,
        "model": row.model.split(" (")[0],
        "gpus": f"{hardware.nodes}x{hardware.gpus_per_node}x{hardware.gpu.name}",
        "method": levers.method,
        "strategy": str(strategy_name(levers)),
        "seq": levers.sequence,
        "micro": levers.micro_batch,
        "accum": levers.accumulation,
        "checkpointing": checkpointing_word(levers.checkpointing),
        "published": row.tokens_per_s,
        "predicted": round(reading.tokens_per_s, 1),
        "ratio": round(reading.pace_ratio, 3),
        "step_s": round(step.step_s, 4),
        "causes": {cause: round(seconds / step.step_s, 3) for cause, seconds in step.causes.items()},
        "remarks": list(reading.remarks),
    }


def group_facts(name: Sequence[str], group: Sequence[Reading]) -> dict[str, Any]:
    found = score(group)
    return {
        "group": " | ".join(name),
        "rows": len(group),
        "median_error": round(found.error, 3),
        "median_ratio": round(median(found.ratios), 3),
        "lowest": round(min(found.ratios), 3),
        "highest": round(max(found.ratios), 3),
        "within": found.within,
    }


def print_quick(comparison: Comparison) -> None:
    groups = grouped(comparison.paces, group_of)
    for name, group in groups.items():
        print(f"\n{' | '.join(name)}")
        for known in map(facts, group):
            causes = ", ".join(
                f"{cause} {100 * share:.0f}" for cause, share in known["causes"].items() if share >= CLOSE
            )
            print(
                f"  {known['place']:>4} {known['model']:<14} {known['gpus']:<16} seq {known['seq']:>6}"
                f" micro {known['micro']:>3} accum {known['accum']:>3} {known['checkpointing']:<9}"
                f" published {known['published']:>8.0f} predicted {known['predicted']:>8.0f}"
                f" ratio {known['ratio']:.2f} | {causes}"
            )
    print()
    for name, group in groups.items():
        known = group_facts(name, group)
        print(
            f"{known['rows']:>4} rows  median ratio {known['median_ratio']:.2f}"
            f" ({known['lowest']:.2f}–{known['highest']:.2f})"
            f"  median error {100 * known['median_error']:.0f} %  within {known['within']}  {known['group']}"
        )
    found = score(comparison.paces)
    print(
        f"\nall: {len(found.ratios)} rows, median error {found.error:.1%},"
        f" within 25 %: {found.within / len(found.ratios):.1%}, in order {found.right}/{found.apart}"
        f" = {found.right / max(found.apart, 1):.1%}, choices within 5 %:"
        f" grids {_near(found.grid_choices)}, jobs {_near(found.job_choices)}"
    )


def print_json(comparison: Comparison) -> None:
    for reading in comparison.paces:
        print(json.dumps(facts(reading), ensure_ascii=False))
    for name, group in grouped(comparison.paces, group_of).items():
        print(json.dumps(group_facts(name, group), ensure_ascii=False))


# --- words --------------------------------------------------------------------------------------


def table(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    return "\n".join([_line(heads), "|---" * len(heads) + "|", *map(_line, lines)])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _near(choices: Sequence[float]) -> str:
    """How many are as good as the fastest, and the worst."""
    if not choices:
        return "–"
    near = sum(choice >= 1 - CLOSE for choice in choices)
    return f"{near} of {len(choices)}, worst {min(choices):.2f}"


def pace_table(comparison: Comparison) -> str:
    sets: dict[str, list[Reading]] = {"all": comparison.paces}
    for grade in "ABC":
        sets[f"grade {grade}"] = [each for each in comparison.paces if each.row.note.startswith(f"grade {grade}")]
    sets |= grouped(comparison.paces, lambda each: each.row.project)
    heads = ("rows of", "rows", "median error", "median ratio", "worst", "within 25 %", "in our range")
    return table((*heads, "pairs in order", "our choice in a grid", "our choice for a job"), _pace_lines(sets))


def _pace_lines(sets: Mapping[str, Sequence[Reading]]) -> Iterator[tuple[str, ...]]:
    for name, readings in sets.items():
        if readings:
            found = score(readings)
            worst = max(found.ratios, key=lambda ratio: abs(ratio - 1))
            yield (
                name,
                str(len(readings)),
                f"{100 * found.error:.1f} %",
                f"{median(found.ratios):.2f}",
                f"{worst:.2f}",
                f"{100 * found.within / len(readings):.0f} %",
                f"{100 * sum(each.in_range for each in readings) / len(readings):.0f} %",
                f"{found.right} of {found.apart}" if found.apart else "–",
                _near(found.grid_choices),
                _near(found.job_choices),
            )


def peak_table(comparison: Comparison) -> str:
    kinds: Mapping[PeakKind, str] = {
        "allocated": "tensors (`max_memory_allocated`, or active)",
        "reserved": "what PyTorch reserved",
        "nvidia-smi": "what the driver shows, or not said",
    }
    lines = []
    for bounded in (False, True):
        for kind, words in kinds.items():
            readings = [each for each in comparison.peaks if each.peak_kind == kind and each.bounded == bounded]
            if readings:
                lines.append(_peak_line(words + (", lengths vary" if bounded else ""), kind, readings))
    heads = ("the publisher logs", "rows", "peak over published, median", "error, median", "within 3 %", "in the range")
    return table(heads, lines)


def _peak_line(words: str, kind: PeakKind, readings: Sequence[Reading]) -> tuple[str, ...]:
    ratios = [reading.peak_ratio for reading in readings]
    explained = f"{sum(map(is_explained, readings))} of {len(readings)}"
    return (
        words,
        str(len(readings)),
        f"{median(ratios):.2f}",
        f"{100 * median(abs(ratio - 1) for ratio in ratios):.1f} %",
        str(sum(abs(ratio - 1) <= TIGHT for ratio in ratios)),
        "–" if kind == "allocated" else explained,
    )


def fits_table(comparison: Comparison) -> str:
    """Whether what ran is predicted to fit, and what ran out of memory is not."""
    judged = [each for each in comparison.alike if not each.peak_not and each.pace_not != "the card is not stated"]
    ran = [each for each in judged if not each.row.ran_out and not each.bounded]
    out = [each for each in judged if each.row.ran_out]
    host = [each for each in out if "host" in each.row.other.lower()]
    gpu = [each for each in out if each not in host]
    lines = [
        ("ran on its card", len(ran), "fits", sum(_fits(each) for each in ran)),
        ("ran out of the card's memory", len(gpu), "does not fit", sum(not _fits(each) for each in gpu)),
        ("ran out of the host's memory", len(host), "does not fit", sum(not _fits_host(each) for each in host)),
    ]
    return table(("published", "rows", "ours should be", "is"), [tuple(map(str, line)) for line in lines])


def _fits(reading: Reading) -> bool:
    return reading.required_bytes <= reading.hardware.gpu.memory_bytes


def _fits_host(reading: Reading) -> bool:
    said = re.search(r"(\d+)\s*GB RAM", reading.row.hardware)
    return said is None or reading.footprint.host.peak_bytes_per_node <= float(said[1]) * 1e9


def host_table(comparison: Comparison) -> str:
    """Of a node's memory, where a log has it."""
    lines = []
    for reading in comparison.alike:
        if found := re.search(r"host used ([\d.]+) GB", reading.row.other):
            ours = reading.footprint.host.peak_bytes_per_node / 1e9
            gpus = f"{reading.hardware.gpus_per_node}×{reading.hardware.gpu.name}"
            lines.append(
                (reading.shape.name, gpus, way(reading), found[1], f"{ours:.1f}", f"{ours / float(found[1]):.2f}")
            )
    return table(("model", "GPUs", "way", "published GB", "predicted", "ratio"), lines)


def rows_table(comparison: Comparison, section: str) -> str:
    heads = ("row", "model", "GPUs", "way", "published tokens/s", "predicted", "ratio")
    lines = [
        _row_line(comparison, each)
        for each in comparison.readings
        if section_of(each.row) == section and (each.has_pace or each.has_peak)
    ]
    return table((*heads, "published GiB", "predicted", "ratio", "remarks"), lines)


def _row_line(comparison: Comparison, reading: Reading) -> tuple[str, ...]:
    row, hardware = reading.row, reading.hardware
    nodes = f"{hardware.nodes}×" if hardware.nodes > 1 else ""
    pace = peak = ("–", "–", "–")
    ratio = "({:.2f})" if reading.differs else "{:.2f}"
    if reading.has_pace:
        pace = f"{_published(reading):,.0f}", f"{reading.tokens_per_s:,.0f}", ratio.format(reading.pace_ratio)
    if reading.has_peak:
        peak = f"{reading.peak_gib:.1f}", _predicted_peak(reading), ratio.format(reading.peak_ratio)
    remarks = ", ".join(str(comparison.remarks.index(remark) + 1) for remark in reading.remarks)
    return (
        str(row.place),
        reading.shape.name,
        f"{nodes}{hardware.gpus_per_node}×{hardware.gpu.name}",
        way(reading),
        *pace,
        *peak,
        remarks or "–",
    )


def _predicted_peak(reading: Reading) -> str:
    peak = f"{reading.peak_bytes / GIB:.1f}"
    if reading.peak_kind == "allocated":
        return peak
    low, high = peak_range(reading)
    least = "0" if reading.bounded else f"{low:.1f}"
    return f"{peak} ({least}–{high:.1f}{'' if is_explained(reading) else ': outside'})"


def way(reading: Reading) -> str:
    levers = reading.levers
    words = [levers.method, str(strategy_name(levers)), f"{levers.micro_batch}×{levers.sequence}"]
    if levers.accumulation > 1:
        words[-1] += f"×{levers.accumulation}"
    words.append(f"checkpointing {checkpointing_word(levers.checkpointing)}")
    words += [word for word in (levers.optimizer,) if word != "adamw"]
    return ", ".join(words + (["fused loss"] if levers.loss == "fused" else []))


def remarks_table(comparison: Comparison) -> str:
    counts = Counter(remark for reading in comparison.readings for remark in reading.remarks)
    lines = [(str(place), remark, str(counts[remark])) for place, remark in enumerate(comparison.remarks, 1)]
    return table(("number", "remark", "rows"), lines)


def left_out_table(comparison: Comparison) -> str:
    """By project and reason: what is not expressed at all, then what is expressed in part."""
    counts: Counter[tuple[str, str, str]] = Counter()
    for row, reason in comparison.left_out:
        counts[row.project, "all of it", reason] += 1
    for reading in comparison.readings:
        row = reading.row
        for part, there, reason in (
            ("its pace", row.tokens_per_s, reading.pace_not),
            ("its peak", row.peak_gib, reading.peak_not),
        ):
            if there and reason:
                counts[row.project, part, reason] += 1
    lines = [(*named, str(count)) for named, count in sorted(counts.items())]
    return table(("project", "what is left out", "because", "rows"), lines)


# --- the page -----------------------------------------------------------------------------------


def page(text: str, comparison: Comparison) -> str:
    """The page with everything between its markers made anew."""
    shares = reserved_shares()
    parts = {
        "counts": table(
            ("rows", "expressed", "with a pace", "with a peak", "expressed but for something else", "left out"),
            [
                tuple(
                    str(len(group))
                    for group in (
                        (*comparison.readings, *comparison.left_out),
                        comparison.alike,
                        comparison.paces,
                        comparison.peaks,
                        [each for each in comparison.readings if each.differs],
                        comparison.left_out,
                    )
                )
            ],
        ),
        "pace": pace_table(comparison),
        "peaks": peak_table(comparison),
        "shares": table(
            ("weights", "most that was reserved, over the peak"),
            [("whole on each GPU", f"{shares[False]:.2f}"), ("sharded and gathered", f"{shares[True]:.2f}")],
        ),
        "fits": fits_table(comparison),
        "host": host_table(comparison),
        "remarks": remarks_table(comparison),
        "left_out": left_out_table(comparison),
        **{section: rows_table(comparison, section) for section in SECTIONS},
    }
    return fill(text, parts, PAGE)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the page is stale")
    parser.add_argument("--quick", action="store_true", help="print every row and every group as text")
    parser.add_argument("--json", action="store_true", help="print every row and every group as JSON lines")
    parser.add_argument("--rows", type=Path, default=ROWS, help="another file of the same form")
    args = parser.parse_args(argv)
    comparison = compare(read_rows(args.rows))
    if args.quick or args.json:
        (print_json if args.json else print_quick)(comparison)
        return 0
    text = PAGE.read_text(encoding="utf-8")
    return write_or_check(PAGE, text, page(text, comparison), __file__, check=args.check)


if __name__ == "__main__":
    sys.exit(main())
