"""Predicted against measured: writes docs/accuracy.md, the README's sentence about it, and the figures that the page
says it with.

    python benchmarks/accuracy.py            write them
    python benchmarks/accuracy.py --check    exit 1 if one is stale

Beside our prediction stand the two estimators that people know, as plain arithmetic from their sources:
DeepSpeed's `estimate_zero2_model_states_mem_needs` and `estimate_zero3_model_states_mem_needs`, and
accelerate's `estimate-memory` ("Training using Adam").
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from rows import GIB, RESIDENT, Row, error, levers_of, predict, read_rehearsed, read_rows, shape_of

from tightfit.inputs.flags import checkpointing_word
from tightfit.priced import strategy_name
from tightfit.types import Footprint, Levers, ModelShape

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "accuracy.md"
README = ROOT / "README.md"
CHINESE = ROOT / "README.zh-CN.md"
FIGURES = ROOT / "src" / "tightfit" / "web" / "accuracy.json"
BLOCK = re.compile(r"(<!-- accuracy -->\n).*?(<!-- /accuracy -->)", re.DOTALL)
CLOSE = 0.02
REHEARSALS = ROOT / "benchmarks" / "data" / "h200-rehearsed.jsonl"

ENGINES = {
    "zero0": "DeepSpeed unsharded",
    "zero1": "ZeRO-1",
    "zero2": "ZeRO-2",
    "zero3": "ZeRO-3",
    "fsdp2": "FSDP2",
}


@dataclass(frozen=True, slots=True)
class Compared:
    row: Row
    footprint: Footprint
    deepspeed_bytes: int | None
    accelerate_bytes: int

    @property
    def peak_error(self) -> float:
        return self.footprint.gpu.peak_bytes / self.row.peak_bytes - 1


# --- the other estimators -----------------------------------------------------------------------


def deepspeed_bytes(levers: Levers, world: int, parameters: int, largest_layer: int) -> int | None:
    """A GPU of one node with `world` of them. There is none for stages 0 and 1, nor for FSDP2."""
    offloaded, params_offloaded = levers.offload_optimizer != "none", levers.offload_param != "none"
    if levers.engine == "zero2":
        return 2 * parameters + (0 if offloaded else int(18 * parameters / world))
    if levers.engine == "zero3":
        layer = 4 * largest_layer
        if not offloaded:
            return layer + int(18 * parameters / world)
        return layer if params_offloaded else layer + int(2 * parameters / world)
    return None


def largest_layer(shape: ModelShape) -> int:
    """The most parameters that one module owns directly."""
    owned: dict[str, int] = {}
    for tensor in shape.tensors:
        module = tensor.name.rpartition(".")[0]
        owned[module] = owned.get(module, 0) + tensor.numel
    return max(owned.values())


def accelerate_bytes(levers: Levers, shape: ModelShape) -> int:
    """Its largest figure: two fp32 copies of the model in mixed precision, four in fp32; on any number of GPUs."""
    return 4 * shape.parameters * (4 if levers.precision == "fp32" else 2)


def compare(row: Row) -> Compared:
    levers, shape = levers_of(row.scenario), shape_of(row.scenario)
    theirs = deepspeed_bytes(levers, row.scenario["world"], row.parameters, largest_layer(shape))
    return Compared(row, predict(row), theirs, accelerate_bytes(levers, shape))


# --- words --------------------------------------------------------------------------------------


def words_of(row: Row) -> str:
    """The run in words."""
    words = way_words(shape_of(row.scenario), levers_of(row.scenario), row.scenario["world"])
    if cap := row.scenario.get("cap_gib"):
        words += f"; on a card with {cap} GiB free"
    return words


def way_words(shape: ModelShape, levers: Levers, world: int) -> str:
    words = [
        f"{shape.model_type} {shape.parameters / 1e9:.1f}B, {shape.n_layers} layers",
        _method(levers),
        f"{ENGINES[levers.engine]}, {world} GPU{'s' if world > 1 else ''}",
        f"{levers.micro_batch}×{levers.sequence} tokens",
        *_unusual(levers),
    ]
    return "; ".join(words)


def _method(levers: Levers) -> str:
    if levers.lora is None:
        return "full"
    where = "+".join(levers.lora.targets) if levers.lora.targets else "all linear layers"
    return f"{'QLoRA' if levers.method == 'qlora' else 'LoRA'} rank {levers.lora.rank} on {where}"


def _unusual(levers: Levers) -> Iterable[str]:
    """What differs from the common run."""
    plain = Levers()
    if levers.offload_param != "none":
        yield f"optimizer and weights on {_place(levers.offload_param)}"
    elif levers.offload_optimizer != "none":
        yield f"optimizer on {_place(levers.offload_optimizer)}"
    if levers.checkpointing != plain.checkpointing:
        yield f"checkpointing {checkpointing_word(levers.checkpointing)}"
    if levers.accumulation > 1:
        yield f"accumulation {levers.accumulation}"
    for lever in ("precision", "optimizer", "attention"):
        if getattr(levers, lever) != getattr(plain, lever):
            yield getattr(levers, lever)
    if levers.loss != plain.loss:
        yield f"{levers.loss} loss"
    if levers.scan != plain.scan:
        yield f"{levers.scan} scan"
    if levers.buckets != plain.buckets:
        yield "other buckets"


def _place(offload: str) -> str:
    return {"cpu": "the host", "nvme": "NVMe"}[offload]


def gib(size: int) -> str:
    return f"{size / GIB:.2f}"


def percent(share: float | None) -> str:
    if share is None:
        return "–"
    digits = 1 if abs(share) < 1 else 0
    text = f"{100 * share:+.{digits}f} %".replace("-", "−")
    return text.replace("−0.0", "0.0").replace("+0.0", "0.0")


def pair(measured: int | None, predicted: int) -> str:
    """Measured, predicted and the error in one cell."""
    if measured is None:
        return f"– → {gib(predicted)}"
    return f"{gib(measured)} → {gib(predicted)} ({percent(error(predicted, measured))})"


# --- the page -----------------------------------------------------------------------------------

INTRODUCTION = """\
<!-- Generated by benchmarks/accuracy.py from benchmarks/data; do not edit. -->
# Predicted against measured

[中文](zh/accuracy.md)

Every run below is a real one: the real engine and the real Hugging Face model with random weights on one NVIDIA
H200 that posed as rank 0 of the job, three steps or more. Its process group was torch's fake one, so every buffer
was allocated as in the whole job and nothing was communicated. `benchmarks/measure_peaks.py` makes such rows.

*Peak* is `torch.cuda.max_memory_allocated` over the training steps, *init* the same while the model was built
and the engine started, *host* the peak resident memory of the process (not compared where runs were forks of one
process: a fork does not count all that it shares). All in GiB, measured → predicted. Unless the description says
otherwise: bf16, AdamW with fp32 states, every layer checkpointed, SDPA attention, plain loss, the official scan
for Mamba, DeepSpeed's defaults for every bucket.

No term of the model is fitted to a row: each is a buffer in PyTorch's, transformers' or DeepSpeed's source."""

LEARNT = """\
## Rows that the model was written with

They were there to learn from: a row that disagreed sent us back to the engine's source."""

FROZEN = """\
## Rows that were predicted first

What decides these runs was written down before they were measured, and nothing in it was changed because of
them. Runs of the first batch of this kind that did disagree (FSDP2's layout, ZeRO-3 with adapters, experts) stand
above: they taught us something. The runs without a host figure were made for their times; some of them repeat a
run from above. One figure is younger: the RAM of runs with experts counts the kernels of their grouped products since
`moe-z2` was run again and its pages were counted."""

REHEARSED = """\
## Plans, rehearsed

`tightfit plan` chose each of these; `benchmarks/rehearse_plans.py` then ran the choice as one rank of the job, with
PyTorch's allocator capped to the promised card less context and communicator. All of them ran. *Retries*: how
often the allocator had to give blocks back before it could go on."""

WORKER = """\
## Plans that our own worker ran

`benchmarks/rehearse_held.py` rehearsed these, several at once on one GPU, and wrote down who held the memory when it
was highest: a row that disagreed named its buffer. Those marked *predicted first* were predicted, and the prediction
committed, before they ran; of five such, four agreed, and the fifth (`mixtral-s-z3-off`, 2.6 % too little) taught us
where the gradient of a fused loss's head goes. All in GiB, measured → predicted."""

RAM = """\
## RAM of our own worker

`benchmarks/host_pages.py` rehearsed these and counted the resident pages of each process by kind of mapping. *RAM* is
the most that the kernel counted of the process, pinned memory included; *pinned* and *files* are what of it was pinned
and what were pages of files, libraries above all, at the end. Those marked *predicted first* were predicted before they
ran. All in GiB, measured → predicted."""

OTHERS = """\
## The other estimators on the same runs

DeepSpeed's own (`estimate_zero2_model_states_mem_needs` and its ZeRO-3 sibling) counts weights, gradients and
optimizer states of every parameter, trained or not; it has no activations, logits, buckets or gathered weights,
and there is none for the stages 0 and 1. accelerate's `estimate-memory` knows neither sharding nor sequences
nor adapters. Both are set here against the measured peak of the training steps."""


def page(compared: Sequence[Compared]) -> str:
    learnt = [each for each in compared if not each.row.frozen]
    frozen = [each for each in compared if each.row.frozen]
    parts = [INTRODUCTION, summary(learnt, frozen), LEARNT, rows_table(learnt)]
    if frozen:
        parts += [FROZEN, rows_table(frozen)]
    notes = [f"- `{each.row.id}`: {each.row.note}" for each in compared if each.row.note]
    if notes:
        parts.append("\n".join(["## Notes", "", *notes]))
    parts += [REHEARSED, rehearsed_table(), WORKER, worker_table(), RAM, ram_table()]
    parts += [OTHERS, others_table(compared)]
    return "\n\n".join(parts) + "\n"


def worker_table() -> str:
    lines = ["| plan | peak | init | |", "|---|---|---|---|"]
    for row in read_rehearsed():
        gpu = row.footprint.gpu
        cells = pair(row.peak_bytes, gpu.peak_bytes), pair(row.init_bytes, gpu.init_peak_bytes)
        lines.append(f"| {row.id} | {' | '.join(cells)} | {'predicted first' if row.predicted_first else ''} |")
    return "\n".join(lines)


def ram_table() -> str:
    lines = ["| run | what | RAM | pinned | files | |", "|---|---|---|---|---|---|"]
    for row in read_rehearsed(RESIDENT):
        end = row.raw["phases"][-1]
        cells = (
            f"`{row.id}`",
            way_words(row.shape, row.levers, row.raw["world"]["ranks"]),
            pair(row.host_bytes, row.footprint.host.peak_bytes_per_rank),
            f"{end['shared'] / 1024:.2f}",
            f"{end['files'] / 1024:.2f}",
            "predicted first" if row.predicted_first else "",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def rehearsed_table() -> str:
    lines = [
        "| plan | way | card | cap | peak: measured → predicted | retries | step, on the H200 |",
        "|---|---|---|---|---|---|---|",
    ]
    for line in REHEARSALS.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        wanted = row["scenario"]
        predicted = wanted["predicted"]["peak_gib"]
        peak = (
            f"{row['peak']:.2f} → {predicted:.2f} ({predicted / row['peak'] - 1:+.1%})" if "peak" in row else "failed"
        )
        lines.append(
            f"| {row['id']} | {_way_words(levers_of(wanted), wanted['world'])} | {wanted['promised_gib']:.1f} "
            f"| {wanted['cap_gib']:.2f} | {peak} | {row.get('retries', '')} | {row.get('median_s', 0):.2f} s |"
        )
    return "\n".join(lines)


def _way_words(levers: Levers, world: int) -> str:
    recomputed = f"checkpointing {checkpointing_word(levers.checkpointing)}"
    words = [str(strategy_name(levers)), recomputed, f"{levers.loss} loss"]
    batch = f"{levers.micro_batch} × {levers.accumulation} × {levers.sequence} tokens"
    return ", ".join([*words, batch if world == 1 else f"{batch}, rank of {world}"])


def summary(learnt: Sequence[Compared], frozen: Sequence[Compared]) -> str:
    lines = ["| rows | | count | worst | median | within 2 % |", "|---|---|---|---|---|---|"]
    groups = [("learnt from", learnt), ("predicted first", frozen)] if frozen else [("all", learnt)]
    for name, group in groups:
        for figure, errors in _errors(group).items():
            sizes = [abs(each) for each in errors]
            worst = percent(max(errors, key=abs))
            lines.append(
                f"| {name} | {figure} | {len(sizes)} | {worst} | {100 * median(sizes):.1f} % | {_share(sizes)} |"
            )
    return "\n".join(lines)


def _errors(group: Sequence[Compared]) -> dict[str, list[float]]:
    pairs = {
        "peak": [(each.footprint.gpu.peak_bytes, each.row.peak_bytes) for each in group],
        "init": [(each.footprint.gpu.init_peak_bytes, each.row.init_bytes) for each in group],
        "host": [(each.footprint.host.peak_bytes_per_rank, each.row.host_bytes) for each in group],
    }
    found = {name: [error(*both) for both in values] for name, values in pairs.items()}
    return {name: [each for each in errors if each is not None] for name, errors in found.items()}


def _share(sizes: Sequence[float]) -> str:
    return f"{100 * sum(size <= CLOSE for size in sizes) / len(sizes):.0f} %"


def rows_table(group: Sequence[Compared]) -> str:
    lines = ["| run | what | peak | init | host |", "|---|---|---|---|---|"]
    for each in group:
        row, gpu, host = each.row, each.footprint.gpu, each.footprint.host
        cells = (
            f"`{row.id}`",
            words_of(row),
            pair(row.peak_bytes, gpu.peak_bytes),
            pair(row.init_bytes, gpu.init_peak_bytes),
            pair(row.host_bytes, host.peak_bytes_per_rank),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def others_table(compared: Sequence[Compared]) -> str:
    lines = ["| run | measured | tightfit | DeepSpeed's | accelerate's |", "|---|---|---|---|---|"]
    for each in compared:
        measured = each.row.peak_bytes
        theirs = [
            "–" if size is None else f"{gib(size)} ({percent(size / measured - 1)})"
            for size in (each.footprint.gpu.peak_bytes, each.deepspeed_bytes, each.accelerate_bytes)
        ]
        lines.append(f"| `{each.row.id}` | {gib(measured)} | {' | '.join(theirs)} |")
    return "\n".join(lines)


# --- the README's sentences ---------------------------------------------------------------------


def figures(compared: Sequence[Compared]) -> dict[str, int | float | None]:
    """Errors of the predicted peak, in percent as they are printed."""
    errors = [abs(each.peak_error) for each in compared]
    frozen = [abs(each.peak_error) for each in compared if each.row.frozen]
    theirs = [each.deepspeed_bytes / each.row.peak_bytes - 1 for each in compared if each.deepspeed_bytes is not None]
    return {
        "runs": len(errors),
        "worst": round(100 * max(errors), 1),
        "median": round(100 * median(errors), 2),
        "predicted_first": len(frozen),
        "worst_predicted_first": round(100 * max(frozen), 1) if frozen else None,
        "deepspeeds_least": min(theirs),
        "deepspeeds_most": max(theirs),
    }


def sentences(said: dict[str, Any]) -> str:
    text = (
        f"On {said['runs']} measured runs on an H200, the predicted peak is at most {said['worst']:.1f} % off"
        f" the measured one, {said['median']:.2f} % in the median"
    )
    if said["predicted_first"]:
        text += (
            f"; on the {said['predicted_first']} of them that were predicted before they were measured, at most"
            f" {said['worst_predicted_first']:.1f} %"
        )
    text += (
        f". DeepSpeed's own estimator is off by {percent(said['deepspeeds_least'])} …"
        f" {percent(said['deepspeeds_most'])} where it has an answer."
        " [Every run](docs/accuracy.md)."
    )
    return text


def chinese_sentences(said: dict[str, Any]) -> str:
    text = (
        f"在 H200 上实测的 {said['runs']} 次运行中，预测的峰值与实测相差最多 {said['worst']:.1f} %，"
        f"中位数 {said['median']:.2f} %"
    )
    if said["predicted_first"]:
        text += f"；其中 {said['predicted_first']} 次是先预测、后测量，相差最多 {said['worst_predicted_first']:.1f} %"
    return text + (
        f"。DeepSpeed 自带的估算在能给出答案的地方相差 {percent(said['deepspeeds_least'])} …"
        f" {percent(said['deepspeeds_most'])}。"
        "[全部运行](docs/zh/accuracy.md)。"
    )


def readme(text: str, said: str) -> str:
    if not BLOCK.search(text):
        raise SystemExit("the README has no <!-- accuracy --> … <!-- /accuracy --> block")
    return BLOCK.sub(lambda found: f"{found[1]}{said}\n{found[2]}", text)


def files(compared: Sequence[Compared]) -> dict[Path, str]:
    """What each file should hold."""
    said = figures(compared)
    shown = {name: value for name, value in said.items() if not name.startswith("deepspeeds")}
    return {
        PAGE: page(compared),
        README: readme(README.read_text(encoding="utf-8"), sentences(said)),
        CHINESE: readme(CHINESE.read_text(encoding="utf-8"), chinese_sentences(said)),
        FIGURES: json.dumps(shown, indent=2) + "\n",
    }


def stale(wanted: dict[Path, str]) -> list[Path]:
    return [path for path, text in wanted.items() if not path.exists() or path.read_text(encoding="utf-8") != text]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a file is stale")
    args = parser.parse_args(argv)
    wanted = files([compare(row) for row in read_rows()])
    old = stale(wanted)
    for path in old:
        if not args.check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(wanted[path], encoding="utf-8")
        print(f"{path.relative_to(ROOT)} {'is stale: run benchmarks/accuracy.py' if args.check else 'written'}")
    return 1 if args.check and old else 0


if __name__ == "__main__":
    sys.exit(main())
