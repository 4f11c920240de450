"""The figures that circulate in users' how-to notes, beside ours: writes the tables of docs/notes-against-truth.md.

    python benchmarks/notes_table.py            write the page
    python benchmarks/notes_table.py --check    exit 1 if the page is stale

A claim is a sentence, what the note says, and the commands that price the same training. Each command is run
as a user would run it, so the page can hold no figure that the tool does not print. A measured run stands
beside a prediction when its levers and its model are the same; only the number of accumulated micro batches
may differ, which is said, and fp16 stands for bf16, since both are two bytes wide.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from string import ascii_lowercase
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from rows import GIB, GIVEN, OWN, levers_of, shape_of

from tightfit.cli import main as tightfit
from tightfit.inputs.flags import flags_from_levers
from tightfit.model.load import load_model, shape_from_fields

PAGE = Path(__file__).parents[1] / "docs" / "notes-against-truth.md"
GB = 10**9
CARDS_GIB = (4, 6, 8, 11, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 141, 180, 192)
"""Sizes that cards are sold in."""

Report = Mapping[str, Any]
"""What `tightfit estimate --json` prints."""
Words = Callable[[Sequence[Report]], str]


@dataclass(frozen=True, slots=True)
class Measured:
    """The same training, run."""

    peak_bytes: int
    device_bytes: int | None
    """What the driver said, context included."""
    host_bytes: int
    accumulation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    claim: str
    says: str
    commands: tuple[str, ...]
    """The first is the one that a measured run is looked up for."""
    predicted: Words
    so: Callable[[Sequence[Report], Measured | None], str]


# --- asking -------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def report(command: str) -> Report:
    """Run one command line as a user would, and read its answer."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = tightfit([*shlex.split(command)[1:], "--json"])
    if code:
        raise SystemExit(f"`{command}` exits with {code}")
    answer: Report = json.loads(printed.getvalue())
    return answer


@lru_cache(maxsize=1)
def _runs() -> tuple[tuple[int, Mapping[str, object], Measured], ...]:
    """Every measured run: its model's parameters, its levers in the words of the command line, its figures."""
    found = []
    for path in (GIVEN, OWN):
        for line in path.read_text(encoding="utf-8").splitlines():
            raw = json.loads(line)
            scenario = raw["scenario"]
            if "peak" not in raw or scenario.get("cap_gib"):
                continue
            levers = levers_of(scenario)
            measured = Measured(
                peak_bytes=round(raw["peak"] * GIB),
                device_bytes=round(raw["device"] * GIB) if "device" in raw else None,
                host_bytes=round(raw["host_rss"] * GIB),
                accumulation=levers.accumulation,
            )
            flags = flags_from_levers(levers) | {"world": scenario["world"]}
            found.append((shape_of(scenario).parameters, _comparable(flags), measured))
    return tuple(found)


def _comparable(flags: Mapping[str, object]) -> Mapping[str, object]:
    narrow = {"precision": "16-bit"} if flags["precision"] in ("bf16", "fp16") else {}
    return {key: value for key, value in (dict(flags) | narrow).items() if key != "accum"}


def measured_for(answer: Report) -> Measured | None:
    wanted = (answer["model"]["parameters"], _comparable(answer["levers"]))
    runs = [run for parameters, flags, run in _runs() if (parameters, flags) == wanted]
    return min(runs, key=lambda run: abs(run.accumulation - answer["levers"]["accum"]), default=None)


# --- words --------------------------------------------------------------------------------------


def gib(size: float) -> str:
    return f"{size / GIB:.1f}"


def peak(reports: Sequence[Report]) -> str:
    gpu = reports[0]["gpu"]
    return f"{gib(gpu['peak_bytes'])} peak, {gib(gpu['required_bytes'])} needed"


def peak_and_host(reports: Sequence[Report]) -> str:
    rank, node = (gib(reports[0]["host"][f"peak_bytes_per_{whose}"]) for whose in ("rank", "node"))
    return f"{peak(reports)}; host {rank} per process, {node} per node"


def measured_words(run: Measured, answer: Report, *, host: bool) -> str:
    device = f", {gib(run.device_bytes)} on the device" if run.device_bytes else ""
    memory = f"; host {gib(run.host_bytes)} per process" if host else ""
    ours = answer["levers"]["accum"]
    tail = "" if run.accumulation == ours else f" (accumulation {run.accumulation}, not {ours})"
    return f"{gib(run.peak_bytes)} peak{device}{memory}{tail}"


def component(answer: Report, *names: str, phase: str = "step") -> int:
    held = answer["gpu"]["phases"][phase]["components"]
    return sum(held.get(name, 0) for name in names)


def times(low_gb: float, high_gb: float | None = None) -> Callable[[Sequence[Report], Measured | None], str]:
    """How far off a claimed peak is: measured where we can, else predicted."""

    def so(reports: Sequence[Report], run: Measured | None) -> str:
        truth = (run.peak_bytes if run else reports[0]["gpu"]["peak_bytes"]) / GB
        ratios = [f"{truth / said:.1f}" for said in sorted({low_gb, high_gb or low_gb}, reverse=True)]
        return f"{'–'.join(dict.fromkeys(ratios))} times the claim"

    return so


def cards(low: int, high: int | None) -> Callable[[Sequence[Report], Measured | None], str]:
    """Does a tier run on the cards that it is meant for?"""

    def so(reports: Sequence[Report], run: Measured | None) -> str:
        needed = reports[0]["gpu"]["required_bytes"] / GIB
        if needed <= low:
            return "fits all of them"
        if high is not None and needed > high:
            return f"fits none of them; {smallest_card(reports, run)}"
        return smallest_card(reports, run)

    return so


def smallest_card(reports: Sequence[Report], run: Measured | None) -> str:
    del run
    needed = reports[0]["gpu"]["required_bytes"] / GIB
    size = next((size for size in CARDS_GIB if size >= needed), None)
    article = "an" if size in (8, 11, 80) else "a"
    return f"takes {article} {size} GB card" if size else "fits no single card"


def fits(reports: Sequence[Report], run: Measured | None) -> str:
    del run
    return "fits" if reports[0]["fits"] else "does not fit"


def share_of_card(reports: Sequence[Report], run: Measured | None) -> str:
    held = run.device_bytes if run and run.device_bytes else reports[0]["gpu"]["required_bytes"]
    return f"{100 * held / reports[0]['card']['memory_bytes']:.0f} % of the card"


def said(words: str) -> Callable[[Sequence[Report], Measured | None], str]:
    return lambda reports, run: words


# --- the claims ---------------------------------------------------------------------------------

EXTREME = "--engine zero3 --offload-optimizer cpu --offload-param cpu"
TIER = "--method lora --lora-rank 16 --lora-targets q_proj,k_proj,v_proj,o_proj --precision fp16"


def _weights(reports: Sequence[Report]) -> str:
    return gib(component(reports[0], "weights"))


def _weights_so(reports: Sequence[Report], run: Measured | None) -> str:
    del run
    return f"{component(reports[0], 'weights') / GB / 26:.1f} times the claim; its own table has 13"


def _piece_by_piece(reports: Sequence[Report]) -> str:
    weights = component(reports[0], "weights")
    gradients = weights + component(reports[0], "gradients")
    optimizer = gradients + component(reports[0], "master_weights", "optimizer_states")
    return " / ".join(gib(size) for size in (weights, gradients, optimizer, reports[0]["gpu"]["peak_bytes"]))


def _whole_table(model: str, says: str, total_gb: float, called: str) -> Claim:
    return Claim(
        claim=f"{called}, all on one GPU: weights / with gradients / with optimizer / everything",
        says=says,
        commands=(f"tightfit estimate --model {model}",),
        predicted=_piece_by_piece,
        so=times(total_gb),
    )


def _same_peak(reports: Sequence[Report]) -> str:
    few, many = (each["gpu"]["peak_bytes"] for each in reports)
    return f"{gib(few)} peak at 6, {gib(many)} at 48"


def _same_peak_so(reports: Sequence[Report], run: Measured | None) -> str:
    del run
    few, many = (each["gpu"]["peak_bytes"] for each in reports)
    return "accumulating costs nothing here" if few == many else f"{gib(many - few)} GiB more"


NOTE_000 = (
    Claim(
        claim="The weights of a 7B model in 16 bits",
        says="about 26 GB",
        commands=("tightfit estimate --model 7b_mamba",),
        predicted=_weights,
        so=_weights_so,
    ),
    _whole_table("7b_mamba", "13 / 26 / 52 / 60 GB", 60, "7B"),
    _whole_table("3b_mamba", "6 / 12 / 24 / 30 GB", 30, "3B"),
    _whole_table("1b_mamba", "2 / 4 / 8 / 12 GB", 12, "1B"),
    Claim(
        claim="7B on 6 GPUs, ZeRO-3 with everything offloaded, 512 tokens",
        says="25–28 GB per GPU",
        commands=(f"tightfit estimate --model 7b_mamba {EXTREME} --seq 512 --gpus 6x32GB",),
        predicted=peak_and_host,
        so=times(25, 28),
    ),
    Claim(
        claim="The same with a global batch of 48 instead of 6, one sequence per GPU at a time",
        says="needs more memory",
        commands=(
            f"tightfit estimate --model 7b_mamba {EXTREME} --seq 512 --gpus 6x32GB",
            f"tightfit estimate --model 7b_mamba {EXTREME} --seq 512 --accum 8 --gpus 6x32GB",
        ),
        predicted=_same_peak,
        so=_same_peak_so,
    ),
    Claim(
        claim="A 7B model on 6×32 GB without offload, ZeRO-3, 2048 tokens",
        says="impossible",
        commands=("tightfit estimate --model 7b_mamba --engine zero3 --gpus 6x32GB",),
        predicted=peak,
        so=fits,
    ),
)

TIERS = (
    ("`deepspeed`", "over 12 GB", (12, None), "--engine zero2 --micro-batch 4 --accum 4 --seq 2048"),
    (
        "`stage2_offload`",
        "6–12 GB",
        (6, 12),
        "--engine zero2 --offload-optimizer cpu --micro-batch 3 --accum 6 --seq 1792",
    ),
    ("`stage3`", "4–6 GB", (4, 6), "--engine zero3 --micro-batch 2 --accum 8 --seq 1536"),
    (
        "`minimal`",
        "under 4 GB",
        (0, 4),
        f"{EXTREME} --micro-batch 1 --accum 16 --seq 1024",
    ),
)


def _tiers() -> Iterator[Claim]:
    """Each tier as it is written, for both sizes; then with the two free levers that the note leaves out."""
    for saving, tail in (("--checkpointing none", ""), ("--checkpointing full --loss fused", ", free levers pulled")):
        for name, says, bounds, flags in TIERS:
            for model, size in (("qwen1.5-0.5b", "0.5B"), ("qwen1.5-1.8b", "1.8B")):
                yield Claim(
                    claim=f"{name}, {size}{tail}",
                    says=says,
                    commands=(f"tightfit estimate --model {model} {TIER} {flags} {saving}",),
                    predicted=peak,
                    so=cards(*bounds),
                )


NOTE_001 = tuple(_tiers())


def _saved_states(reports: Sequence[Report]) -> str:
    whole, shared = (component(each, "optimizer_states") for each in reports)
    return f"{gib(whole - shared)} of {gib(whole)}"


def _saved_states_so(reports: Sequence[Report], run: Measured | None) -> str:
    del run
    shared = component(reports[1], "optimizer_states")
    return f"the claim is all of the states; {gib(shared)} stay on each GPU"


NOTE_002 = (
    Claim(
        claim="7B on each of 4 GPUs, nothing sharded (DataParallel; priced as DeepSpeed stage 0, with its temporaries)",
        says="87.5 GB",
        commands=("tightfit estimate --model 7b_mamba --gpus 4x24GB",),
        predicted=peak,
        so=times(87.5),
    ),
    Claim(
        claim="ZeRO-2 on 4×24 GB",
        says="23.1 GB, just fits",
        commands=("tightfit estimate --model 7b_mamba --engine zero2 --gpus 4x24GB",),
        predicted=peak,
        so=times(23.1),
    ),
    Claim(
        claim="ZeRO-2 on 6×24 GB",
        says="16.1 GB, safe",
        commands=("tightfit estimate --model 7b_mamba --engine zero2 --gpus 6x24GB",),
        predicted=peak,
        so=times(16.1),
    ),
    Claim(
        claim="ZeRO-2 on 8×24 GB",
        says="12.6 GB, very safe",
        commands=("tightfit estimate --model 7b_mamba --engine zero2 --gpus 8x24GB",),
        predicted=peak,
        so=times(12.6),
    ),
    Claim(
        claim="ZeRO-2 on 4×32 GB",
        says="23.1 GB, fits",
        commands=("tightfit estimate --model 7b_mamba --engine zero2 --gpus 4x32GB",),
        predicted=peak,
        so=times(23.1),
    ),
    Claim(
        claim="ZeRO-2 on 4×24 GB with the note's own YAML (4096 tokens, 8 accumulated)",
        says="23.1 GB",
        commands=("tightfit estimate --model 7b_mamba --engine zero2 --seq 4096 --accum 8 --gpus 4x24GB",),
        predicted=peak,
        so=times(23.1),
    ),
    Claim(
        claim="ZeRO-3 on 4×24 GB",
        says="15.0 GB",
        commands=("tightfit estimate --model 7b_mamba --engine zero3 --gpus 4x24GB",),
        predicted=peak,
        so=times(15),
    ),
    Claim(
        claim="What sharding Adam's states over 4 GPUs saves on each",
        says="55 GB",
        commands=(
            "tightfit estimate --model 7b_mamba --gpus 4x24GB",
            "tightfit estimate --model 7b_mamba --engine zero2 --gpus 4x24GB",
        ),
        predicted=_saved_states,
        so=_saved_states_so,
    ),
    Claim(
        claim="Model parallel on 4 GPUs",
        says="25.0 GB",
        commands=(),
        predicted=lambda reports: "–",
        so=said("not run by us"),
    ),
    Claim(
        claim="What does fit 4×24 GB: ZeRO-2, optimizer on the host",
        says="–",
        commands=("tightfit estimate --model 7b_mamba --engine zero2 --offload-optimizer cpu --gpus 4x24GB",),
        predicted=peak_and_host,
        so=fits,
    ),
    Claim(
        claim="What does fit 4×24 GB: ZeRO-3, optimizer on the host",
        says="–",
        commands=("tightfit estimate --model 7b_mamba --engine zero3 --offload-optimizer cpu --gpus 4x24GB",),
        predicted=peak_and_host,
        so=fits,
    ),
)

R1 = "tightfit estimate --model qwen2.5-32b --deepspeed-version 0.19.8"
"""With the DeepSpeed of the measured runs; Hygon's cards have another."""


def _one_matrix(reports: Sequence[Report]) -> str:
    del reports
    shape = load_model("qwen2.5-32b")
    return f"{shape.vocab_size * shape.hidden_size * 2 / GIB:.2f}"


def _grows_with_tokens(answer: Report) -> int:
    names = ("activations", "recompute", "logits")
    return max(component(answer, *names, phase=phase) for phase in ("forward", "loss", "backward"))


def _halved(reports: Sequence[Report]) -> str:
    before, after = (_grows_with_tokens(each) for each in reports)
    peaks = [each["gpu"]["peak_bytes"] for each in reports]
    return f"{gib(before)} → {gib(after)}; the peak {gib(peaks[0])} → {gib(peaks[1])}"


def _halved_so(reports: Sequence[Report], run: Measured | None) -> str:
    del run
    peaks = [each["gpu"]["peak_bytes"] for each in reports]
    return f"true of that part; the peak falls by {100 * (1 - peaks[1] / peaks[0]):.0f} %"


def _two_peaks(reports: Sequence[Report]) -> str:
    first, second = (each["gpu"]["peak_bytes"] / GIB for each in reports)
    return f"{first:.2f} → {second:.2f} peak"


def _two_peaks_so(reports: Sequence[Report], run: Measured | None) -> str:
    del run
    first, second = (each["gpu"]["peak_bytes"] for each in reports)
    return f"saves {100 * (1 - second / first):.1f} %"


def _against_sharded(reports: Sequence[Report], run: Measured | None) -> str:
    packed = run.peak_bytes if run else reports[0]["gpu"]["peak_bytes"]
    sharded = reports[1]["gpu"]["peak_bytes"]
    return f"{packed / sharded:.1f} times the bf16 weights under ZeRO-3 ({gib(sharded)})"


NOTE_003 = (
    Claim(
        claim="32B LoRA on 8×64 GB, ZeRO-3, 1024 tokens",
        says="76–80 % of the card",
        commands=(f"{R1} --method lora --engine zero3 --seq 1024 --gpus 8xK100-64GB",),
        predicted=peak,
        so=share_of_card,
    ),
    Claim(
        claim="The allocation that failed",
        says="1.45 GiB",
        commands=(),
        predicted=_one_matrix,
        so=said("the embedding, or the head, whole in 16 bits"),
    ),
    Claim(
        claim="Its cure: ZeRO-3 with everything offloaded, 512 tokens",
        says="60–70 % of the card",
        commands=(f"{R1} --method lora {EXTREME} --seq 512 --gpus 8xK100-64GB",),
        predicted=peak_and_host,
        so=share_of_card,
    ),
    Claim(
        claim="512 tokens instead of 1024: activations and logits",
        says="half",
        commands=(
            f"{R1} --method lora {EXTREME} --seq 1024 --gpus 8xK100-64GB",
            f"{R1} --method lora {EXTREME} --seq 512 --gpus 8xK100-64GB",
        ),
        predicted=_halved,
        so=_halved_so,
    ),
    Claim(
        claim="4-bit weights under ZeRO-2, 512 tokens",
        says="far less",
        commands=(
            f"{R1} --method qlora --engine zero2 --seq 512 --gpus 8xK100-64GB",
            f"{R1} --method lora --engine zero3 --seq 512 --gpus 8xK100-64GB",
        ),
        predicted=peak,
        so=_against_sharded,
    ),
    Claim(
        claim="The last resort: 4-bit, ZeRO-2, 256 tokens, 64 accumulated",
        says="the least",
        commands=(
            f"{R1} --method qlora --engine zero2 --seq 256 --accum 64 --gpus 8xK100-64GB",
            f"{R1} --method lora --engine zero3 --seq 256 --accum 64 --gpus 8xK100-64GB",
        ),
        predicted=peak,
        so=_against_sharded,
    ),
    Claim(
        claim="LoRA rank 4 instead of 8",
        says="a saving",
        commands=(
            f"{R1} --method lora --engine zero3 --seq 1024 --gpus 8xK100-64GB",
            f"{R1} --method lora --lora-rank 4 --engine zero3 --seq 1024 --gpus 8xK100-64GB",
        ),
        predicted=_two_peaks,
        so=_two_peaks_so,
    ),
)

GEMMA = f"tightfit estimate --model gemma-3-27b {EXTREME}"

NOTE_004 = (
    Claim(
        claim="27B on 4 GPUs, ZeRO-3 with everything offloaded, 4096 tokens",
        says="too long",
        commands=(f"{GEMMA} --seq 4096 --accum 4 --world 4",),
        predicted=peak_and_host,
        so=smallest_card,
    ),
    Claim(
        claim="The same, 2048 tokens",
        says="recommended",
        commands=(f"{GEMMA} --seq 2048 --accum 4 --world 4",),
        predicted=peak_and_host,
        so=smallest_card,
    ),
    Claim(
        claim="The same on 8 GPUs",
        says="–",
        commands=(f"{GEMMA} --seq 2048 --world 8",),
        predicted=peak_and_host,
        so=smallest_card,
    ),
    Claim(
        claim="4096 tokens on 4 GPUs without holding the logits whole",
        says="–",
        commands=(f"{GEMMA} --seq 4096 --accum 4 --loss fused --world 4",),
        predicted=peak_and_host,
        so=smallest_card,
    ),
)

NOTES: Mapping[str, Sequence[Claim]] = {
    "000": NOTE_000,
    "001": NOTE_001,
    "002": NOTE_002,
    "003": NOTE_003,
    "004": NOTE_004,
}

IMPLIED_7B = {"family": "mamba", "d_model": 4096, "n_layers": 32, "d_state": 16, "d_conv": 4, "expand": 2}
"""Note 000 never gives the shape of its 7B, only what its small model has less of."""


# --- the page -----------------------------------------------------------------------------------


def counts() -> str:
    implied = shape_from_fields({**IMPLIED_7B, "vocab_size": 50257}, "7B of note 000")
    rows = [
        ("002", "`7b_mamba`, 4864 wide and 45 deep", "6.89B", load_model("7b_mamba").parameters),
        ("002", "`3b_mamba`, taken to be the public 2.8B shape", "2.84B", load_model("3b_mamba").parameters),
        ("000", "`3b_mamba_lite`, 2560 wide and 24 deep", "3B", load_model("3b_mamba_lite").parameters),
        ("000", "its 7B, 4096 wide and 32 deep by its own comparison", "7B", implied.parameters),
    ]
    lines = ["| note | model | says | has |", "|---|---|---|---|"]
    lines += [f"| {note} | {model} | {says} | {has / 1e9:.2f}B ({has:,}) |" for note, model, says, has in rows]
    return "\n".join(lines)


def table(claims: Sequence[Claim]) -> str:
    """The claims of one note, and below them the commands."""
    lines = ["| | claim | the note says | predicted, GiB | measured, GiB | so |", "|---|---|---|---|---|---|"]
    commands: dict[str, list[str]] = {}
    for letter, claim in zip(ascii_lowercase, claims, strict=False):
        reports = [report(command) for command in claim.commands]
        run = measured_for(reports[0]) if claim.predicted in (peak, peak_and_host) else None
        measured = measured_words(run, reports[0], host=claim.predicted is peak_and_host) if run else "–"
        cells = (letter, claim.claim, claim.says, claim.predicted(reports), measured, claim.so(reports, run))
        lines.append(f"| {' | '.join(cells)} |")
        for command in claim.commands:
            commands.setdefault(command, []).append(letter)
    shown = [f"{command}  # {', '.join(letters)}" for command, letters in commands.items()]
    return "\n".join([*lines, "", "```bash", *shown, "```"])


def filled(page: str) -> str:
    """The page with every generated part made anew."""
    parts = {"counts": counts} | {name: lambda claims=claims: table(claims) for name, claims in NOTES.items()}
    for name, make in parts.items():
        block = re.compile(rf"(<!-- notes:{name} -->\n).*?(<!-- /notes:{name} -->)", re.DOTALL)
        text = make()
        page, found = block.subn(lambda match, text=text: f"{match[1]}{text}\n{match[2]}", page)
        if found != 1:
            raise SystemExit(f"{PAGE.name} has {found} places for notes:{name}, and should have one")
    return page


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the page is stale")
    args = parser.parse_args(argv)
    now = PAGE.read_text(encoding="utf-8")
    wanted = filled(now)
    if now == wanted:
        return 0
    if args.check:
        print(f"{PAGE.name} is stale: run python benchmarks/notes_table.py", file=sys.stderr)
        return 1
    PAGE.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
