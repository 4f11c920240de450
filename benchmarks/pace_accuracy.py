"""Predicted against measured step times: writes the generated parts of docs/pace.md.

    python benchmarks/pace_accuracy.py            write them
    python benchmarks/pace_accuracy.py --check    exit 1 if the page is stale

Two questions. How far is a predicted time from the measured one? And does the model put two ways to compute the
same job in the right order, which is what the choice of a plan rests on?

Runs that were measured after the constants had been set are judged by what was predicted then, which a file
keeps: what such a run teaches may change the model, and what is predicted of it afterwards proves nothing.

The same job is what a user asked for: model, sequence, sequences a step of each GPU, method, precision,
optimizer, adapters, number of GPUs. Two runs of it differ only in levers that leave the training what it is:
engine, offload, checkpointing, loss, micro batch against accumulation, attention, scan, buckets. Pairs that are
less than `APART` apart are left out: that is within what the same run differs by from one machine to the next.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent))

from accuracy import percent, words_of
from blocks import fill, write_or_check
from rows import DATA, GIVEN, OWN, PACE, PACE_LATER, Row, levers_of, read_rows, shape_of

from tightfit.hardware.measured import read_measured
from tightfit.hardware.words import parse_hardware
from tightfit.model.load import load_model
from tightfit.pace import pace, rates
from tightfit.types import Hardware, Levers, Pace

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "pace.md"
MACHINE = DATA / "h200-machine.json"
"""What `tightfit measure` found on the machine of the newest runs, before they ran."""
APART = 1.2
ENOUGH_STEPS = 10
CAUSE_SHOWN = 0.1
"""Causes that are less of a step than this are not named in the table."""


# --- rows ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Timed:
    """A measured run and its prediction, both without communication."""

    row: Row
    pace: Pace
    first_s: float | None
    """What was predicted before it was measured; None: it was there to learn from."""

    @property
    def error(self) -> float:
        return self.pace.step_s / self.row.step_s - 1

    @property
    def first_error(self) -> float:
        return (self.first_s or self.pace.step_s) / self.row.step_s - 1

    @property
    def counts(self) -> bool:
        """Its time is a median of enough steps, and the card had room: a full one makes the allocator retry."""
        return self.row.timed_steps >= ENOUGH_STEPS and not self.row.scenario.get("cap_gib")


def _hardware(row: Row) -> Hardware:
    """Rows whose loss was fused before it had a kernel are those of a machine without Triton."""
    hardware = parse_hardware(f"{row.scenario['world']}xH200")
    return replace(hardware, gpu=replace(hardware.gpu, triton=row.scenario.get("triton", True)))


def timed(row: Row) -> Timed:
    hardware = _hardware(row)
    predicted = pace(shape_of(row.scenario), levers_of(row.scenario), hardware, rehearsal=True)
    return Timed(row, predicted, _predicted_first()[row.id] if row.pace_frozen else None)


def with_measurement(row: Row) -> float:
    """The error of the prediction for the machine as it was measured."""
    hardware = replace(_hardware(row), measured=read_measured(MACHINE).measured)
    predicted = pace(shape_of(row.scenario), levers_of(row.scenario), hardware, rehearsal=True)
    return predicted.step_s / row.step_s - 1


@lru_cache(maxsize=1)
def _predicted_first() -> dict[str, float]:
    found: dict[str, float] = {}
    for path in PACE_LATER:
        found |= json.loads(path.with_name(f"{path.stem}-predicted.json").read_text(encoding="utf-8"))["step_s"]
    return found


def all_runs() -> list[Timed]:
    return [timed(row) for row in read_rows(GIVEN, OWN, PACE, *PACE_LATER)]


# --- ranking ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Pair:
    """Two runs of the same job, clearly apart as measured."""

    slower: Timed
    faster: Timed

    @property
    def right(self) -> bool:
        return self.slower.pace.step_s > self.faster.pace.step_s

    @property
    def later(self) -> bool:
        """Whether both were measured after the constants had been set."""
        return self.slower.first_s is not None and self.faster.first_s is not None

    @property
    def right_first(self) -> bool:
        """Whether the order was right as predicted then."""
        return (self.slower.first_s or 0.0) > (self.faster.first_s or 0.0)


def job_of(row: Row) -> tuple[str, int, Levers]:
    """What the user asked for: the run with every free lever put back to its default."""
    levers, plain = levers_of(row.scenario), Levers()
    asked = replace(
        levers,
        engine=plain.engine,
        offload_optimizer=plain.offload_optimizer,
        offload_param=plain.offload_param,
        checkpointing=plain.checkpointing,
        loss=plain.loss,
        micro_batch=1,
        accumulation=levers.micro_batch * levers.accumulation,
        attention=plain.attention,
        scan=plain.scan,
        buckets=plain.buckets,
        master_weights=True,  # that some loops left them out made no difference to the job
    )
    return json.dumps(row.scenario["config"], sort_keys=True), row.scenario["world"], asked


def jobs(runs: Iterable[Timed]) -> list[list[Timed]]:
    """Runs that count, by their job, where there are at least two."""
    found: dict[tuple[str, int, Levers], list[Timed]] = {}
    for each in runs:
        if each.counts:
            found.setdefault(job_of(each.row), []).append(each)
    return [group for group in found.values() if len(group) > 1]


def pairs(group: Sequence[Timed]) -> Iterator[Pair]:
    for one, other in combinations(group, 2):
        faster, slower = sorted((one, other), key=lambda each: each.row.step_s)
        if slower.row.step_s > APART * faster.row.step_s:
            yield Pair(slower, faster)


# --- other people's figures ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """Tokens a second that somebody else measured, and our levers for it."""

    what: str
    source: str
    model: str
    gpus: str
    levers: Levers
    tokens_per_s: float

    @property
    def predicted(self) -> float:
        return pace(load_model(self.model), self.levers, parse_hardware(self.gpus)).tokens_per_s


_OFFLOADED = Levers(engine="zero3", offload_optimizer="cpu", offload_param="cpu", sequence=1024)

PUBLISHED = (
    Published(
        what="LLaMA-Factory, Liger, 32 sequences of 1024 tokens, 16 times a step",
        source="LLMQ",
        model="qwen2.5-7b",
        gpus="1xRTX4090",
        levers=replace(_OFFLOADED, micro_batch=32, accumulation=16, loss="fused"),
        tokens_per_s=2523,
    ),
    *(
        Published(
            what=f"{sequences} sequences of 1024 tokens per step",
            source="SlideFormer",
            model="llama-3.1-8b",
            gpus="1xRTX4090",
            levers=replace(_OFFLOADED, micro_batch=sequences),
            tokens_per_s=measured,
        )
        for sequences, measured in ((8, 914), (16, 1373), (32, 1791))
    ),
)


# --- words --------------------------------------------------------------------------------------


def seconds(value: float) -> str:
    return f"{value:.3f}" if value < 10 else f"{value:.1f}"


def causes(predicted: Pace) -> str:
    """The causes of most of a step, largest first."""
    shares = [(cause, each / predicted.step_s) for cause, each in predicted.causes.items()]
    return ", ".join(f"{cause} {100 * share:.0f} %" for cause, share in shares if share >= CAUSE_SHOWN)


def rows_table(runs: Sequence[Timed]) -> str:
    """Of runs that were measured later, with what was predicted first."""
    later = any(each.first_s is not None for each in runs)
    heads = ["run", "what", "measured s", *(["predicted first"] if later else []), "predicted s", "error", "of which"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for each in runs:
        cells = [f"`{each.row.id}`", words_of(each.row), seconds(each.row.step_s)]
        if later:
            cells.append("–" if each.first_s is None else f"{seconds(each.first_s)} ({percent(each.first_error)})")
        cells += [seconds(each.pace.step_s), percent(each.error), causes(each.pace)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def errors_line(name: str, errors: Sequence[float]) -> str:
    sizes = [abs(each) for each in errors]
    within = sum(size <= APART - 1 for size in sizes)
    return (
        f"| {name} | {len(sizes)} | {100 * median(sizes):.1f} % | {percent(median(errors))} |"
        f" {percent(max(errors, key=abs))} | {within} |"
    )


def summary(runs: Sequence[Timed]) -> str:
    learnt, later, short = _groups(runs)
    last = [each for each in later if each.row.source == PACE_LATER[-1].name]
    groups = {
        "there when the constants were first set": [each.error for each in learnt],
        **{
            f"{name}, as predicted before they were measured": [
                each.first_error for each in later if each.row.source == path.name
            ]
            for name, path in zip(("measured afterwards", "later", "last"), PACE_LATER, strict=True)
        },
        "the last, with what `tightfit measure` had found before": [with_measurement(each.row) for each in last],
        "all of these as predicted now": [each.error for each in later],
        "fewer than ten steps, for information": [each.error for each in short],
    }
    lines = [
        "| runs | count | error, median of its size | median | worst | within 20 % |",
        "|---|---|---|---|---|---|",
        *[errors_line(name, group) for name, group in groups.items() if group],
    ]
    found = [pair for group in jobs(runs) for pair in pairs(group)]
    first = [pair for pair in found if pair.later]
    lines += [
        "",
        "| pairs of runs in the right order | right | of |",
        "|---|---|---|",
        f"| all, as predicted now | {sum(pair.right for pair in found)} | {len(found)} |",
    ]
    if first:
        right = sum(pair.right_first for pair in first)
        lines.append(f"| both measured later, as predicted before they were | {right} | {len(first)} |")
    return "\n".join(lines)


def _groups(runs: Sequence[Timed]) -> tuple[list[Timed], list[Timed], list[Timed]]:
    """Runs to learn from, runs that were measured later, and those of too few steps."""
    counted = [each for each in runs if each.counts]
    later = [each for each in counted if each.first_s is not None]
    return [each for each in counted if each.first_s is None], later, [each for each in runs if not each.counts]


def ranking(runs: Sequence[Timed]) -> str:
    lines = [
        "| job | runs | pairs | right | slowest over fastest | our choice over the fastest |",
        "|---|---|---|---|---|---|",
    ]
    wrong: list[Pair] = []
    for group in jobs(runs):
        found = list(pairs(group))
        wrong += [pair for pair in found if not pair.right]
        fastest = min(each.row.step_s for each in group)
        chosen = min(group, key=lambda each: each.pace.step_s)
        cells = (
            _job_words(group[0].row),
            str(len(group)),
            str(len(found)),
            str(sum(pair.right for pair in found)),
            f"{max(each.row.step_s for each in group) / fastest:.1f}×",
            f"{chosen.row.step_s / fastest:.2f}× (`{chosen.row.id}`)",
        )
        lines.append(f"| {' | '.join(cells)} |")
    if wrong:
        lines += ["", "Wrong:", ""]
        lines += [f"- `{pair.faster.row.id}` is faster than `{pair.slower.row.id}`" for pair in wrong]
    return "\n".join(lines)


def _job_words(row: Row) -> str:
    model, method, engine, _, *_ = words_of(row).split("; ")
    *_, asked = job_of(row)
    return f"{model}; {method}; {engine.rpartition(', ')[2]}; {asked.accumulation}×{asked.sequence} tokens"


def published() -> str:
    lines = ["| what | source | published | predicted | ratio |", "|---|---|---|---|---|"]
    for each in PUBLISHED:
        where = f"{each.model}, {each.gpus.removeprefix('1x')}, ZeRO-3 with all on the host, {each.what}"
        ratio = each.predicted / each.tokens_per_s
        lines.append(f"| {where} | {each.source} | {each.tokens_per_s:,.0f} | {each.predicted:,.0f} | {ratio:.2f} |")
    return "\n".join(lines)


def constants() -> str:
    """Every constant of the pace model as its source file has it."""
    source = inspect.getsource(rates)
    body = ast.parse(source).body
    lines = ["| constant | value | what it is, and where it comes from |", "|---|---|---|"]
    for node, following in zip(body, [*body[1:], None], strict=True):
        if not isinstance(node, ast.Assign):
            continue
        said = ""
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            said = " ".join(str(following.value.value).split())
        name, value = (ast.get_source_segment(source, part) for part in (node.targets[0], node.value))
        lines.append(f"| `{name}` | `{' '.join(str(value).split())}` | {said} |")
    return "\n".join(lines)


# --- the page -----------------------------------------------------------------------------------


def page(text: str, runs: Sequence[Timed]) -> str:
    """The page with everything between its markers made anew."""
    learnt, later, short = _groups(runs)
    parts = {
        "summary": summary(runs),
        "ranking": ranking(runs),
        "rows": rows_table(learnt),
        "later": rows_table(later) if later else "None yet.",
        "short": rows_table(short),
        "published": published(),
        "constants": constants(),
    }
    return fill(text, parts, PAGE)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the page is stale")
    args = parser.parse_args(argv)
    text = PAGE.read_text(encoding="utf-8")
    return write_or_check(PAGE, text, page(text, all_runs()), __file__, check=args.check)


if __name__ == "__main__":
    sys.exit(main())
