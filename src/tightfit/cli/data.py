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

from tightfit.cli.flags import ANSWERED, Parser, print_json, whole_number
from tightfit.desk.plan_request import placed
from tightfit.inputs.records import parse_json
from tightfit.inputs.spelling import nearest
from tightfit.job.file import JOB_FLAGS, job_from_flags, model_of, read_job
from tightfit.messages import Message, text
from tightfit.model.presets import PRESETS
from tightfit.owned import replace_file
from tightfit.screen.data import draw_preview
from tightfit.types import ConfigError

EXAMPLE = "tightfit data preview --data shipped:dialogues --ablation profile_and_context"
NEEDED = ("transformers", "jinja2")
USER_ERROR = 2
NO_MODEL = "tiny_mamba"
"""Stands in where no model is named: a preview needs its tokenizer alone."""

FLAGS = {
    "data": ("PATH", Message("help.data")),
    "format": ("FORMAT", Message("help.format")),
    "template": ("NAME", Message("help.template")),
    "tokenizer": ("NAME", Message("help.tokenizer")),
    "recipe": ("FILE", Message("help.recipe")),
    "ablation": ("NAME", Message("help.ablation")),
    "model": ("MODEL", Message("help.data-model")),
}


def data(argv: Sequence[str]) -> int:
    """The verb."""
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
    from tightfit.screen import open_console

    draw_preview(open_console(), **shown)
    return 0


def parser() -> Parser:
    made = Parser("data preview", text("help.data-does"), EXAMPLE, "[JOB] [--data PATH] [flags]")
    made.add_file("JOB", text("help.data-file"))
    for name, (metavar, meaning) in FLAGS.items():
        made.add_argument(f"--{name}", metavar=metavar, help=str(meaning))
    made.add_argument("--seq", metavar="N", type=whole_number("seq"), help=text("help.data-seq"))
    made.add_argument("--count", metavar="N", type=whole_number("count"), help=text("help.count"))
    made.add_argument("--json", action="store_true", help=text("help.json"))
    return made.ends_with(ANSWERED)


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
