"""`tightfit data`: what the training will see.

The examples are rendered by a worker process, which knows tokenizers; the desk asks it with a file and draws the
JSON lines that it prints.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from tightfit.cli.flags import Parser, print_json
from tightfit.desk.plan_request import placed
from tightfit.inputs.records import parse_json
from tightfit.inputs.spelling import nearest
from tightfit.job.file import JOB_FLAGS, job_from_flags, model_of, read_job
from tightfit.messages import Listing, Message, text
from tightfit.model.presets import PRESETS
from tightfit.owned import replace_file
from tightfit.screen import open_console, say, table_of, widen
from tightfit.types import ConfigError

NEEDED = ("transformers", "jinja2")
USER_ERROR = 2
OPEN, CLOSE = "⟦", "⟧"
NO_MODEL = "tiny_mamba"  # stands in where no model is named: a preview needs its tokenizer alone


def data(argv: Sequence[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        parser().print_help()
        return 0
    if argv[0] != "preview":
        close = nearest(argv[0], ["preview"])
        raise ConfigError(Message("cli.no-data-verb-but" if close else "cli.no-data-verb", word=repr(argv[0])))
    args = parser().parse(argv[1:])
    count = getattr(args, "count", 3)
    if not 0 <= count <= 1000:
        raise ConfigError(Message("cli.count-must-0", count=count))
    if any(find_spec(name) is None for name in NEEDED):
        raise ConfigError(Message("cli.preview-needs-training"))
    spec = {**_read_spec(vars(args)), "count": count}
    with tempfile.TemporaryDirectory(prefix="tightfit-preview-") as folder:
        path = Path(folder) / "preview.json"
        replace_file(path, json.dumps(spec).encode())
        done = subprocess.run(
            [sys.executable, "-m", "tightfit.train", "preview", str(path)],
            capture_output=True,
            text=True,
            encoding="utf-8",
            check=False,
        )
    if done.returncode:
        said = [line.removeprefix("tightfit: ") for line in done.stderr.splitlines() if line.startswith("tightfit: ")]
        if done.returncode == USER_ERROR and said:
            raise ConfigError(said[-1])
        raise RuntimeError(Message("cli.preview-ended-exit", code=done.returncode, stderr=done.stderr))
    lines = [parse_json(line) for line in done.stdout.splitlines()]
    kinds = {kind: [line for line in lines if line["kind"] == kind] for kind in ("head", "example", "summary")}
    shown: dict[str, Any] = {"head": kinds["head"][0], "examples": kinds["example"], "summaries": kinds["summary"]}
    if hasattr(args, "json"):
        print_json(shown)
        return 0
    draw_preview(open_console(), **shown)
    return 0


def parser() -> Parser:
    example = "tightfit data preview --data shipped:dialogues --ablation profile_and_context"
    made = Parser("data preview", "[JOB] [--data PATH] [flags]", example)
    made.add_file("JOB")
    made.takes("data=PATH format=FORMAT template=NAME tokenizer=NAME recipe=FILE ablation=NAME model=MODEL")
    made.takes("seq=N count=N json")
    return made.ends_with("0", "2")


def _read_spec(args: Mapping[str, Any]) -> dict[str, Any]:
    """What file and flags ask the worker for; the paths of a file count from its folder."""
    given = {name: value for name, value in args.items() if name in JOB_FLAGS}
    if "file" in args:
        path = Path(args["file"])
        job, folder = job_from_flags(given, read_job(path, model=given.get("model") or NO_MODEL).job), path.parent
    else:
        job, folder = job_from_flags({"model": NO_MODEL, **given}), None
    values = asdict(job.data) | {"max_samples": job.max_samples, "sequence": job.sequence, "seed": job.seed}
    for key in ("path", "template", "tokenizer", "recipe"):
        values[key] = values[key] if folder is None else placed(values[key], folder)
    known = not isinstance(job.model, str) or job.model.lower() in PRESETS or Path(job.model).expanduser().exists()
    if values["tokenizer"] is None and isinstance(job.model, str) and job.model.lower() not in PRESETS:
        model = Path(job.model).expanduser()
        values["tokenizer"] = str(model if model.is_dir() else model.parent) if model.exists() else job.model
    return {
        "data": values,
        "vocab_size": model_of(job).vocab_size if ("model" in args or "file" in args) and known else None,
        "trust_remote_code": job.trust_remote_code,
    }


def draw_preview(
    console: Console,
    head: Mapping[str, Any],
    examples: Sequence[Mapping[str, Any]],
    summaries: Sequence[Mapping[str, Any]],
) -> None:
    """Examples with their loss mask, then what was counted, as the worker printed them. What is learned stands in
    ⟦brackets⟧, and in colour where there is any."""
    console.print(
        Text(text("screen.sequences-of", source=head["source"], n=head["sequence"]), style="bold"), soft_wrap=True
    )
    layout = "" if head["format"] == "text" else Message("screen.laid-out-by", template=head["template"])
    say(console, text("screen.tokenizer", name=head["tokenizer"], layout=layout))
    for sentence in head["said"]:
        say(console, sentence, style="italic")
    if examples:
        say(console, text("screen.counts-in-loss", open=OPEN, close=CLOSE), style="dim")
    for example in examples:
        console.print()
        cut = example["whole_tokens"] - example["tokens"]
        about = {"name": example["name"], "tokens": example["tokens"], "learned": example["loss_tokens"]}
        words = text("screen.example", **about, cut=Message("screen.cut-off", n=cut) if cut > 0 else "")
        console.print(Text(words, style="bold"), soft_wrap=True)
        pieces = Text()
        for piece in example["pieces"]:
            if piece["loss"]:
                pieces.append(f"{OPEN}{piece['text']}{CLOSE}", "green")
            else:
                pieces.append(piece["text"])
        console.print(pieces, soft_wrap=True)
        if example["sections"]:
            parts = [
                f"{each['field']} {each['tokens']}{text('screen.lost', n=each['lost']) if each['lost'] else ''}"
                for each in example["sections"]
            ]
            say(console, text("screen.by-section", parts=Listing(parts)), style="dim")
    console.print()
    widen(console)
    named = any(summary["ablation"] for summary in summaries)
    heads = ("screen.examples", "screen.samples", "tokens", "screen.learned", "screen.cut", "screen.skipped")
    table = table_of("screen.ablation" if named else "", *heads)
    for summary in summaries:
        counts = ("examples", "samples", "tokens", "loss_tokens", "cut", "skipped")
        table.add_row(summary["ablation"] or text("screen.seen"), *(f"{summary[name]:,}" for name in counts))
    console.print(table)
    if any(summary["sections"] for summary in summaries):
        console.print()
        numbers = ("screen.tokens-each", "screen.lost-head", "screen.cut-in", "screen.gone-in")
        table = table_of("screen.ablation", "screen.section", *numbers)
        for summary in summaries:
            for at, each in enumerate(summary["sections"]):
                whole = max(1, each["tokens"] + each["lost"])
                lost, mean = 100 * each["lost"] / whole, each["tokens"] / max(1, each["examples"])
                named_once = "" if at else summary["ablation"] or ""
                shares = (f"{mean:.0f}", f"{lost:.1f} %")
                table.add_row(named_once, each["field"], *shares, str(each["cut"]), str(each["dropped"]))
        console.print(table)
        say(console, text("screen.sections-note"), style="dim")
