"""`tightfit export`: what was trained, as a plain Hugging Face folder."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from threading import Thread
from typing import Any

from tightfit.cli.flags import Parser, print_json
from tightfit.cli.progress import ProgressLine
from tightfit.inputs.records import parse_json
from tightfit.messages import Message, text
from tightfit.owned import replace_file
from tightfit.runs.checkpoints import written_first
from tightfit.types import ConfigError, ModelError, UserError

WORKER = (sys.executable, "-m", "tightfit.train", "export")
DTYPES = ("bf16", "fp16", "fp32")
FAILED = 3
INTERRUPTED = 130
KEPT_LINES = 60


def export(argv: Sequence[str]) -> int:
    """Export one folder."""
    args = parser().parse(argv)
    dtype: str | None = getattr(args, "dtype", None)
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(Message("cli.dtype-knows-takes", dtype=repr(dtype), dtypes=", ".join(DTYPES)))
    source = Path(args.source)
    if hasattr(args, "to"):
        target = Path(args.to)
    elif (source / "run.json").exists() or (source / "plan").is_dir():
        target = source / "export"  # a run keeps its export inside; what is no run of ours gets a neighbour
    else:
        target = source.resolve().with_name(f"{source.resolve().name}-export")
    newest = written_first(source)
    if newest is not None and (source / "run.json").exists() and not (source / "model").exists():
        # A run that was stopped has no model of its own yet, but what it has saved can be had.
        raise ModelError(Message("cli.run-not-ended", source=source, newest=newest))
    if target.is_dir() and any(target.iterdir()):
        raise ConfigError(Message("cli.exists-empty-name", target=target))
    if target.exists() and not target.is_dir():
        raise ConfigError(Message("cli.file-name-folder", target=target))
    as_json = hasattr(args, "json")
    spec = {
        "source": str(source.expanduser().absolute()),
        "to": str(target.expanduser().absolute()),
        "dtype": dtype,
        "merge": getattr(args, "merge", False),
        "base": getattr(args, "base", None),
        "config": getattr(args, "config", None),
        "trust_pickle": getattr(args, "trust_pickle", False),
        "trust_remote_code": getattr(args, "trust_remote_code", False),
    }
    with tempfile.TemporaryDirectory(prefix="tightfit-export-") as folder:
        path = Path(folder, "export.json")
        replace_file(path, json.dumps(spec).encode())
        code, end = _follow([*WORKER, str(path)], quiet=as_json)
    if end is not None and as_json:
        print_json(end)
    elif end is not None:
        kinds = {"adapter": "cli.adapter-merged", "deepspeed": "cli.the-checkpoint", "model": "cli.the-model"}
        size = end["bytes"]  # as files are counted; what is small would be nought in GB
        size = f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"
        what, where = text(kinds[end["kind"]]), end["folder"]
        print(text("cli.exported", what=what, folder=where, size=size, dtype=end["dtype"]))
        for note in end["notes"]:
            print(f"  {note}")
        print(text("cli.use-automodelforcausallm-pretrained", end=where))
    return code


def parser() -> Parser:
    example = "tightfit export runs/my-lora --to my-model --dtype bf16"
    made = Parser("export", "RUN_OR_FOLDER [--to DIR] [flags]", example)
    made.takes(f"source:RUN_OR_FOLDER to=DIR dtype={'|'.join(DTYPES)} merge base=DIR|ID config=DIR|ID")
    made.takes("trust_pickle trust_remote_code json")
    return made.ends_with("0", "2", "3", "130")


def _follow(command: Sequence[str], *, quiet: bool) -> tuple[int, dict[str, Any] | None]:
    """Exit code, and what the worker said at its end."""
    started = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with started as worker, ProgressLine(quiet=quiet) as line:
        assert worker.stdout is not None
        assert worker.stderr is not None
        last: deque[str] = deque(maxlen=KEPT_LINES)
        listener = Thread(target=last.extend, args=(worker.stderr,), daemon=True)
        listener.start()
        end: dict[str, Any] | None = None
        try:
            for printed in worker.stdout:
                try:
                    event = parse_json(printed)
                except ValueError:
                    continue
                if event.get("event") == "progress":
                    line.say(f"{event['what']}: {100 * event['done'] // max(event['total'], 1)} %")
                elif event.get("event") in ("end", "error"):
                    end = event
            code = worker.wait()
        except KeyboardInterrupt:
            worker.wait()  # it has had the same Ctrl-C, and clears up what it began
            return INTERRUPTED, None
        listener.join()
    if end is not None and end.get("event") == "error":
        raise UserError(str(end["text"]))
    if code == 0 and end is not None:
        return 0, end
    if code == INTERRUPTED:
        return INTERRUPTED, None
    sys.stderr.writelines(last)
    print(f"tightfit: {text('cli.export-failed-exit', code=code)}", file=sys.stderr)
    return FAILED, None
