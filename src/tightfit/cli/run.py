"""`tightfit run -- COMMAND…`: another trainer, watched, diagnosed, and started again where that may help.

Exit code: the command's own, of its last start (128 and the signal's number where a signal ended it; 1 where it was 0
and the loss was NaN to the end); 2 for what the user has to change before anything is started.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, get_args

from tightfit.cli.flags import CHANGE, Parser, whole_number
from tightfit.cli.run_plan import Known, Planner, RunSetting, UserSaid, file_of, prediction
from tightfit.cli.run_wait import wait_for_gpus
from tightfit.cli.train_flags import hang_timeout_s
from tightfit.desk.calibration import Calibrations
from tightfit.diagnose.verdict import Verdict
from tightfit.inputs.flags import LEVERS, meant
from tightfit.inputs.surroundings import cache_folder, inherited
from tightfit.job import Allowance
from tightfit.messages import Message, Said, text
from tightfit.planner.calibration import Entry
from tightfit.runs.build_lock import describe, find_left_locks
from tightfit.runs.external.command import NAMES, recognise
from tightfit.runs.external.config import ExternalTraining, read_training
from tightfit.runs.external.process import Streams
from tightfit.runs.external.record import FOLDER, ClaimedRun, ExternalRecord, begin_record, claim
from tightfit.runs.external.trainer import ExternalTrainer
from tightfit.runs.run import Signals
from tightfit.runs.supervise import MAX_ATTEMPTS, Orders, Policy, RunResult, Supervisor
from tightfit.types import ConfigError, Hardware, UserError

EXAMPLE = """tightfit run -- llamafactory-cli train qwen32b_lora.yaml
  tightfit run --allow quantize,shorter-seq -- llamafactory-cli train qwen32b_lora.yaml
  tightfit run --max-attempts 3 -- deepspeed --num_gpus 4 train.py --deepspeed ds.json
  tightfit run --dry-run -- accelerate launch --config_file acc.yaml train.py
  tightfit run --output runs/a -- python train.py --output_dir out"""
EXIT_CODES = {
    "0 … 255": Message("help.run-exit-0-255"),
    **CHANGE,
}
WRITES = Message("help.run-writes")
ALLOWED = ("quantize", "shorter-seq")
"""The costly changes that a config of another trainer can be given."""
_MOST_FIXES = 4


def run(argv: Sequence[str]) -> int:
    """The verb."""
    args, words = _parse(argv)
    command = recognise(words)
    if shutil.which(words[0]) is None and not hasattr(args, "dry_run"):
        raise ConfigError(Message("cli.there-program-here", words=words[0]))
    external = read_training(command)
    planner = Planner(_setting(args))
    known = planner.known(external)
    if hasattr(args, "dry_run"):
        return _dry_run(args, external, known, planner.warning(external))
    if hasattr(args, "wait_for_gpu"):
        planner.wait_for_room(external, lambda: False)
    named = Path(args.output) if hasattr(args, "output") else None
    place = claim(named, words, take_over=hasattr(args, "take_over"))
    try:
        return _run(args, place, _as_last(external, place), planner)
    finally:
        place.lock.release()


def _run(args: argparse.Namespace, place: ClaimedRun, external: ExternalTraining, planner: Planner) -> int:
    folder, as_json = place.path, hasattr(args, "json")
    known = planner.known(external)
    _say_start(external, known, place)
    if warning := planner.warning(external):
        _say(warning)
    out = sys.stderr if as_json else sys.stdout
    with Signals() as signals:
        orders = Orders(
            policy=Policy(max_attempts=_attempts(args), allow=frozenset(_allow(args))),
            hang_timeout_s=hang_timeout_s(getattr(args, "hang_timeout", None)),
        )
        trainer = ExternalTrainer(
            external=external,
            folder=folder,
            streams=Streams(out=out.buffer, err=sys.stderr.buffer),
            say=_say,
            advisor=planner,
            orders=orders,
            signals=signals,
            retry_anyway=hasattr(args, "retry_anyway"),
        )
        words = external.command.words if place.before is None else place.before.command
        note = _Note(folder, begin_record(words, trainer.mark), external, known)
        trainer.begun = note.begun
        if place.before is not None:
            _say(str(trainer.go_on()))
        ended = Supervisor(trainer=trainer, folder=folder, policy=orders.policy, signals=signals).run()
    report = {**_start_report(external, known), **_end_report(folder, trainer, ended)}
    note.ended(report)
    _say_end(trainer, ended)
    if as_json:
        print(json.dumps(report, indent=2, default=str, ensure_ascii=False))
    return trainer.exit_code


def _as_last(external: ExternalTraining, place: ClaimedRun) -> ExternalTraining:
    """The command as it was started last, where a run is taken over and its config is still there."""
    if place.before is None or place.before.last_command == external.command.words:
        return external
    try:
        return read_training(recognise(place.before.last_command))
    except UserError:
        return external


def _setting(args: argparse.Namespace) -> RunSetting:
    """What is learned of cards that were only named is not written down."""
    calibrations = Calibrations(cache_folder())
    wait: Callable[[int | None, int, Callable[[], bool]], bool] | None = None
    if hasattr(args, "wait_for_gpu"):

        def wait(need_bytes: int | None, count: int, give_up: Callable[[], bool]) -> bool:
            return wait_for_gpus(need_bytes, count, _say, give_up)

    return RunSetting(
        hardware=_hardware(args),
        allow=_allow(args),
        calibration=None if hasattr(args, "no_calibration") else calibrations.read(),
        keep=calibrations.add if not hasattr(args, "gpus") else _forget,
        wait=wait,
        said=UserSaid(
            model=getattr(args, "model", None),
            sequence=getattr(args, "seq", None),
            micro_batch=getattr(args, "micro_batch", None),
        ),
    )


def _forget(entry: Entry) -> None:
    """Nothing is written down."""


# --- the command line ---------------------------------------------------------------------------


def parser() -> Parser:
    made = Parser(
        "run",
        text("help.run-does"),
        EXAMPLE,
        "[flags] -- COMMAND…",
    )
    made.add_argument("--output", metavar="DIR", help=text("help.run-output", folder=FOLDER))
    made.add_argument(
        "--take-over", action="store_true",
        help=text("help.take-over"),
    )  # fmt: skip
    made.add_argument(
        "--max-attempts", metavar="N", type=whole_number("max_attempts"),
        help=text("help.run-max-attempts", max_attempts=MAX_ATTEMPTS),
    )  # fmt: skip
    made.add_argument("--allow", metavar="A,B", help=text("help.run-allow", allowed=", ".join(ALLOWED)))
    made.add_argument("--retry-anyway", action="store_true", help=text("help.retry-anyway"))
    made.add_argument(
        "--hang-timeout", metavar="300s|10m|1h",
        help=text("help.run-hang-timeout"),
    )  # fmt: skip
    made.add_argument("--wait-for-gpu", action="store_true", help=text("help.run-wait-for-gpu"))
    made.add_argument("--no-calibration", action="store_true", help=text("help.run-no-calibration"))
    made.add_argument(
        "--model", metavar="MODEL",
        help=text("help.run-model"),
    )  # fmt: skip
    made.add_argument("--seq", metavar="N", type=whole_number("seq"), help=text("help.seq"))
    made.add_argument("--micro-batch", metavar="N", type=whole_number("micro_batch"), help=text("help.micro-batch"))
    made.add_argument("--gpus", metavar="HARDWARE", help=text("help.run-gpus"))
    made.add_argument("--host-ram", metavar="SIZE", help=text("help.run-host-ram"))
    made.add_argument("--dry-run", action="store_true", help=text("help.run-dry-run"))
    made.add_argument("--json", action="store_true", help=text("help.run-json"))
    return made.ends_with(EXIT_CODES, WRITES)


def _parse(argv: Sequence[str]) -> tuple[argparse.Namespace, tuple[str, ...]]:
    words = list(argv)
    cut = words.index("--") if "--" in words else None
    made = parser()
    if cut is None:
        asked = [word for word in words if word in ("-h", "--help")]
        if asked:
            made.parse(asked)
        raise ConfigError(Message("cli.missing-before"))
    args = made.parse(words[:cut])
    _attempts(args)
    _allow(args)
    hang_timeout_s(getattr(args, "hang_timeout", None))
    for name in ("seq", "micro_batch"):
        most = LEVERS[name].most or 0
        if not 1 <= getattr(args, name, 1) <= most:
            raise ConfigError(Message("cli.takes-1", value=name.replace("_", "-"), most=most, args=getattr(args, name)))
    return args, tuple(words[cut + 1 :])


def _attempts(args: argparse.Namespace) -> int:
    many: int = getattr(args, "max_attempts", MAX_ATTEMPTS)
    if many < 1:
        raise ConfigError(Message("cli.run-attempts-at-least-one", many=many))
    return many


def _allow(args: argparse.Namespace) -> tuple[Allowance, ...]:
    names = [name.strip() for name in getattr(args, "allow", "").split(",") if name.strip()]
    for name in names:
        if name not in ALLOWED:
            also = text("cli.only-tightfit-train") if name in get_args(Allowance) else meant(name, ALLOWED)
            raise ConfigError(
                Message("cli.allow-knows-here", name=repr(name), also=also, allowed=" and ".join(ALLOWED))
            )
    return tuple(name for name in get_args(Allowance) if name in names)


def _hardware(args: argparse.Namespace) -> Hardware:
    ram: str | None = getattr(args, "host_ram", None)
    if hasattr(args, "gpus"):
        from tightfit.hardware.words import parse_hardware

        return parse_hardware(args.gpus, host_ram=ram)
    from tightfit.hardware.machine import this_machine

    return this_machine(host_ram=ram)


# --- telling ------------------------------------------------------------------------------------


def _say(said: Said) -> None:
    """On stderr: the command's own output stays what it is. The two words keep what is told apart from the sentence of
    a `tightfit` that was refused, for a diagnosis of the log."""
    try:
        print(f"tightfit run: {' '.join(str(said).split())}", file=sys.stderr, flush=True)
    except OSError:  # a terminal that has closed must not cost the run
        return


def _describe(external: ExternalTraining) -> str:
    files = ", ".join(path.name for path in external.files)
    name = NAMES[external.command.launcher]
    return text("cli.configured", name=name, files=files) if files else str(name)


def _say_start(external: ExternalTraining, known: Known | str, place: ClaimedRun) -> None:
    _say(text("cli.logs-records", external=_describe(external), path=place.path))
    if place.before is not None:
        _say(text("cli.run-taken-over", path=place.path, pid=place.before.pid))
    _say(_describe_prediction(external, known))
    if external.command.launcher != "other" and (left := find_left_locks(inherited(external.environment))):
        _say(str(describe(left)))


def _describe_prediction(external: ExternalTraining, known: Known | str) -> str:
    if isinstance(known, str):
        return known
    said, file = prediction(known), file_of(external)
    if known.priced.fits is False and file is not None:
        return text("cli.started-all-same", said=said, file=shlex.quote(str(file)))
    return said


def _dry_run(args: argparse.Namespace, external: ExternalTraining, known: Known | str, warning: str | None) -> int:
    if hasattr(args, "json"):
        print(
            json.dumps(
                {**_start_report(external, known), "warning": warning}, indent=2, default=str, ensure_ascii=False
            )
        )
        return 0
    print(f"{_describe(external)}: {shlex.join(external.command.words)}")
    print(_describe_prediction(external, known))
    if warning is not None:
        print(warning)
    return 0


def _say_end(trainer: ExternalTrainer, ended: RunResult) -> None:
    most = trainer.peak
    gpus = "".join(f", GPU {word} {size / 2**30:.1f} GiB" for word, size in sorted(most.gpu_bytes.items()))
    peak = text("cli.most-memory-seen", host_bytes=most.host_bytes / 2**30, gpus=gpus)
    many = len(ended.records)
    times = text("cli.at-first-attempt") if many == 1 else text("cli.after-attempts", many=many)
    if ended.outcome.state == "done":
        _say(text("cli.run-done", times=times, peak=peak))
        if ended.verdict is not None:
            _say(text("cli.but-look-at", cause=ended.verdict.cause))
    elif ended.outcome.state == "interrupted":
        _say(text("cli.stopped-asked", peak=peak))
    else:
        own = ended.records[-1].exit_codes
        well = own and not any(own)
        first = text("cli.ended-if-all" if well else "cli.it-failed", times=times, peak=peak)
        _say_failure(ended, trainer.folder, first)
    if trainer.files:
        _say(text("cli.configs-written", files=", ".join(str(path) for path in trainer.files)))


def _say_failure(ended: RunResult, folder: Path, first: str) -> None:
    _say(first)
    found = ended.verdict
    if found is None:
        return
    _say(str(found.cause))
    if ended.because:
        _say(text("cli.started-again", because=ended.because))
    for fix in found.fixes[:_MOST_FIXES]:
        costly = text("cli.changes-in-brackets") if fix.is_costly else ""
        _say(f"  - {fix.text}{f' [{fix.command}]' if fix.command else ''}{costly}")
    _say(text("cli.more-tightfit-diagnose", folder=folder, which=found.id))


# --- records ------------------------------------------------------------------------------------


def _start_report(external: ExternalTraining, known: Known | str) -> dict[str, Any]:
    predicted: dict[str, Any] = {"fits": None, "said": _describe_prediction(external, known)}
    if isinstance(known, Known):
        gpu = known.priced.footprint.gpu
        predicted |= {
            "fits": known.priced.fits, "required_bytes": gpu.required_bytes, "peak_phase": gpu.peak_phase
        }  # fmt: skip
    return {
        "command": list(external.command.words),
        "trainer": external.command.launcher,
        "configs": [str(path) for path in external.files],
        "predicted": predicted,
    }


def _end_report(folder: Path, trainer: ExternalTrainer, ended: RunResult) -> dict[str, Any]:
    return {
        "folder": str(folder),
        "state": ended.outcome.state,
        "exit_code": trainer.exit_code,
        "last_command": list(trainer.external.command.words),
        "written": [str(path) for path in trainer.files],
        "because": str(ended.because) or None,
        "verdict": None if ended.verdict is None else _verdict_report(ended.verdict),
        "peak": {"host_bytes": trainer.peak.host_bytes, "gpu_bytes": dict(trainer.peak.gpu_bytes)},
        "attempts": [asdict(record) for record in ended.records],
    }


def _verdict_report(verdict: Verdict) -> dict[str, Any]:
    """Without the step, which only our own ranks know."""
    return {key: value for key, value in asdict(verdict).items() if key != "step"}


class _Note:
    """`run.json`, written anew with every start and at the end."""

    def __init__(self, folder: Path, record: ExternalRecord, external: ExternalTraining, known: Known | str) -> None:
        self._folder, self._record = folder, record
        self._first, self._known = external, known

    def begun(self, external: ExternalTraining) -> None:
        self._record = replace(self._record, last_command=external.command.words)
        more = _leave_out_records(_start_report(self._first, self._known))
        self._record.write_report(self._folder, more, state="running", exit_code=None)

    def ended(self, report: dict[str, Any]) -> None:
        more = _leave_out_records(report)
        self._record.write_report(self._folder, more, state=report["state"], exit_code=report["exit_code"])


def _leave_out_records(report: dict[str, Any]) -> dict[str, Any]:
    """A report without what the record or the attempts' records say."""
    return {key: value for key, value in report.items() if key not in ("attempts", "state", "exit_code", "command")}
