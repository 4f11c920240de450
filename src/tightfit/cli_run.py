"""`tightfit run -- COMMAND…`: another trainer, watched, diagnosed, and started again where that may help.

Exit code: the command's own, of its last start (128 and the signal's number where a signal ended it); 2 for what the
user has to change before anything is started.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

from tightfit.cli_flags import Parser, whole_number
from tightfit.cli_run_plan import Known, Planner, file_of, known_of, prediction
from tightfit.inputs.flags import meant
from tightfit.job import Allowance
from tightfit.runs.attempts import ATTEMPTS
from tightfit.runs.decide import MAX_ATTEMPTS, Policy
from tightfit.runs.foreign import NAMES, recognise
from tightfit.runs.foreign_config import Foreign, read_foreign
from tightfit.runs.foreign_group import Streams
from tightfit.runs.foreign_loop import Ended, Orders, Rescue, write_run
from tightfit.runs.run import Signals
from tightfit.types import ConfigError, Hardware

EXAMPLE = """tightfit run -- llamafactory-cli train qwen32b_lora.yaml
  tightfit run --allow quantize,shorter-seq -- llamafactory-cli train qwen32b_lora.yaml
  tightfit run --max-attempts 3 -- deepspeed --num_gpus 4 train.py --deepspeed ds.json
  tightfit run --dry-run -- accelerate launch --config_file acc.yaml train.py
  tightfit run --output runs/a -- python train.py --output_dir out"""
FOLDER = "tightfit-run"
ALLOWED = ("quantize", "shorter-seq")
"""The costly changes that a config of another trainer can be given."""
_MOST_FOLDERS = 10_000
_MOST_FIXES = 4


def run(argv: Sequence[str]) -> int:
    """The verb."""
    args, words = _parsed(argv)
    command = recognise(words)
    if shutil.which(words[0]) is None and not hasattr(args, "dry_run"):
        raise ConfigError(f"there is no program {words[0]} here: see that it is installed, and in this environment")
    foreign = read_foreign(command)
    hardware = _hardware(args)
    allow = _allow(args)
    known = known_of(foreign, hardware, allow)
    if hasattr(args, "dry_run"):
        return _dry_run(args, foreign, known)
    folder = _folder(args)
    _say_start(foreign, known, folder)
    as_json = hasattr(args, "json")
    streams = Streams(out=(sys.stderr if as_json else sys.stdout).buffer, err=sys.stderr.buffer)
    orders = Orders(
        policy=Policy(max_attempts=_attempts(args), allow=frozenset(allow)), retry_anyway=hasattr(args, "retry_anyway")
    )
    with Signals() as signals:
        rescue = Rescue(
            foreign=foreign,
            folder=folder,
            streams=streams,
            say=_say,
            advisor=Planner(hardware, allow),
            orders=orders,
            signals=signals,
        )
        _record(folder, foreign, known, None)
        ended = rescue.run()
    _record(folder, foreign, known, ended)
    _say_end(ended, folder)
    if as_json:
        print(json.dumps(_report(folder, foreign, known, ended), indent=2, ensure_ascii=False))
    return ended.code


# --- the command line ---------------------------------------------------------------------------


def _parser() -> Parser:
    made = Parser(
        "run",
        "Run another trainer with the care that tightfit gives its own: LLaMA-Factory, DeepSpeed, accelerate, "
        "torchrun or a Python script. Says before the start whether it fits, where its config can be read; passes its "
        "output on and keeps it; ends every process of it; when it fails, says why, and where a smaller config may "
        "help, writes one beside the old and starts it again from its last checkpoint. The exit code is the "
        "command's own.",
        EXAMPLE,
        "[flags] -- COMMAND…",
    )
    made.add_argument("--output", metavar="DIR", help=f"the folder for logs and records ({FOLDER}-1, -2 …)")
    made.add_argument(
        "--max-attempts", metavar="N", type=whole_number("max_attempts"),
        help=f"starts in a row that keep no new step ({MAX_ATTEMPTS}); 1: it is never started again",
    )  # fmt: skip
    made.add_argument("--allow", metavar="A,B", help=f"changes of the training that may be made: {', '.join(ALLOWED)}")
    made.add_argument(
        "--retry-anyway", action="store_true", help="start again even where no checkpoint can be gone on from"
    )
    made.add_argument("--gpus", metavar="HARDWARE", help="predict for these cards (this machine's)")
    made.add_argument("--host-ram", metavar="SIZE", help="RAM of the machine, 256GB say; with --gpus")
    made.add_argument("--dry-run", action="store_true", help="say what is recognised and predicted; start nothing")
    made.add_argument("--json", action="store_true", help="a JSON object at the end; the command writes to stderr then")
    return made


def _parsed(argv: Sequence[str]) -> tuple[argparse.Namespace, tuple[str, ...]]:
    words = list(argv)
    cut = words.index("--") if "--" in words else None
    parser = _parser()
    if cut is None:
        asked = [word for word in words if word in ("-h", "--help")]
        if asked:
            parser.parse(asked)
        raise ConfigError("a -- is missing before the command: write `tightfit run -- python train.py`")
    args = parser.parse(words[:cut])
    _attempts(args)
    _allow(args)
    return args, tuple(words[cut + 1 :])


def _attempts(args: argparse.Namespace) -> int:
    many: int = getattr(args, "max_attempts", MAX_ATTEMPTS)
    if many < 1:
        raise ConfigError(f"--max-attempts must be at least 1, not {many}: 1 starts the command once")
    return many


def _allow(args: argparse.Namespace) -> tuple[Allowance, ...]:
    names = [name.strip() for name in getattr(args, "allow", "").split(",") if name.strip()]
    for name in names:
        if name not in ALLOWED:
            also = " (only tightfit train can do that)" if name in get_args(Allowance) else meant(name, ALLOWED)
            raise ConfigError(f"--allow knows no {name!r} here{also}: it takes {' and '.join(ALLOWED)}")
    return tuple(name for name in get_args(Allowance) if name in names)


def _hardware(args: argparse.Namespace) -> Hardware:
    ram: str | None = getattr(args, "host_ram", None)
    if hasattr(args, "gpus"):
        from tightfit.inputs.hardware import parse_hardware

        return parse_hardware(args.gpus, host_ram=ram)
    from tightfit.inputs.machine import this_machine

    return this_machine(host_ram=ram)


def _folder(args: argparse.Namespace) -> Path:
    """A folder that nobody has used; made here, so that two runs never share one."""
    if hasattr(args, "output"):
        path = Path(args.output)
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise ConfigError(f"--output {path} is there already: name a new folder, for old logs are never replaced")
        names = [path]
    else:
        names = [Path(f"{FOLDER}-{number}") for number in range(1, _MOST_FOLDERS)]
    for path in names:
        try:
            (path / ATTEMPTS).mkdir(parents=True, exist_ok=hasattr(args, "output"))
        except FileExistsError:
            continue
        except OSError as error:
            what = (error.strerror or str(error)).lower()
            raise ConfigError(f"{path} cannot be made ({what}): name another folder with --output") from None
        return path
    raise ConfigError(f"there are {_MOST_FOLDERS} folders {FOLDER}-N here: remove some, or name one with --output")


# --- telling ------------------------------------------------------------------------------------


def _say(text: str) -> None:
    """On stderr: the command's own output stays what it is."""
    try:
        print(f"tightfit: {' '.join(text.split())}", file=sys.stderr, flush=True)
    except OSError:  # a terminal that has closed must not cost the run
        return


def _recognised(foreign: Foreign) -> str:
    files = ", ".join(path.name for path in foreign.files)
    return f"{NAMES[foreign.command.launcher]}{f', configured by {files}' if files else ''}"


def _say_start(foreign: Foreign, known: Known | str, folder: Path) -> None:
    _say(f"{_recognised(foreign)}; logs and records in {folder}")
    _say(_predicted(foreign, known))


def _predicted(foreign: Foreign, known: Known | str) -> str:
    if isinstance(known, str):
        return known
    said, file = prediction(known), file_of(foreign)
    if known.priced.fits is False and file is not None:
        said += f" It is started all the same; `tightfit plan {shlex.quote(str(file))}` finds a way that fits."
    return said


def _dry_run(args: argparse.Namespace, foreign: Foreign, known: Known | str) -> int:
    if hasattr(args, "json"):
        print(json.dumps(_start_report(foreign, known), indent=2, ensure_ascii=False))
        return 0
    print(f"{_recognised(foreign)}: {shlex.join(foreign.command.words)}")
    print(_predicted(foreign, known))
    return 0


def _say_end(ended: Ended, folder: Path) -> None:
    gpus = "".join(f", GPU {word} {size / 2**30:.1f} GiB" for word, size in sorted(ended.peak.gpu_bytes.items()))
    peak = f"most memory seen: host {ended.peak.host_bytes / 2**30:.1f} GiB{gpus}"
    many = len(ended.records)
    times = "at the first attempt" if many == 1 else f"after {many} attempts"
    if ended.state == "done":
        _say(f"done {times}; {peak}")
    elif ended.state == "interrupted":
        _say(f"stopped as asked; {peak}")
    else:
        _say_failure(ended, folder, f"it failed {times}; {peak}")
    if ended.files:
        _say(f"configs written: {', '.join(str(path) for path in ended.files)}")


def _say_failure(ended: Ended, folder: Path, first: str) -> None:
    _say(first)
    found = ended.verdict
    if found is None:
        return
    _say(found.cause)
    if ended.because:
        _say(f"not started again: {ended.because}")
    for fix in found.fixes[:_MOST_FIXES]:
        costly = " (changes the training)" if fix.is_costly else ""
        _say(f"  - {fix.text}{f' [{fix.command}]' if fix.command else ''}{costly}")
    _say(f"more: `tightfit diagnose {folder}`, `tightfit explain {found.id}`")


# --- records ------------------------------------------------------------------------------------


def _start_report(foreign: Foreign, known: Known | str) -> dict[str, Any]:
    predicted: dict[str, Any] = {"fits": None, "said": _predicted(foreign, known)}
    if isinstance(known, Known):
        gpu = known.priced.footprint.gpu
        predicted |= {
            "fits": known.priced.fits, "required_bytes": gpu.required_bytes, "peak_phase": gpu.peak_phase
        }  # fmt: skip
    return {
        "command": list(foreign.command.words),
        "trainer": foreign.command.launcher,
        "configs": [str(path) for path in foreign.files],
        "predicted": predicted,
    }


def _report(folder: Path, foreign: Foreign, known: Known | str, ended: Ended) -> dict[str, Any]:
    return {
        **_start_report(foreign, known),
        "folder": str(folder),
        "state": ended.state,
        "exit_code": ended.code,
        "last_command": list(ended.foreign.command.words),
        "written": [str(path) for path in ended.files],
        "because": ended.because or None,
        "verdict": None if ended.verdict is None else asdict(ended.verdict),
        "peak": {"host_bytes": ended.peak.host_bytes, "gpu_bytes": dict(ended.peak.gpu_bytes)},
        "attempts": [asdict(record) for record in ended.records],
    }


def _record(folder: Path, foreign: Foreign, known: Known | str, ended: Ended | None) -> None:
    values: dict[str, Any] = {"schema": 1, "kind": "foreign", "state": "running", **_start_report(foreign, known)}
    if ended is not None:
        values |= {key: value for key, value in _report(folder, foreign, known, ended).items() if key != "attempts"}
    write_run(folder, values)
