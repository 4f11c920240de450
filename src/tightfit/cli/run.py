"""`tightfit run -- COMMAND…`: another trainer, watched, diagnosed, and started again where that may help.

Exit code: the command's own, of its last start (128 and the signal's number where a signal ended it; 1 where it was 0
and the loss was NaN to the end); 2 for what the user has to change before anything is started.
"""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, get_args

from tightfit.cli.flags import Parser, hang_timeout_s, print_json, read_options
from tightfit.desk.calibration import Calibrations, known_here
from tightfit.hardware.named import read_hardware
from tightfit.inputs.flags import LEVERS, meant
from tightfit.inputs.surroundings import cache_folder, inherited
from tightfit.job import Allowance
from tightfit.messages import Message, Said, text
from tightfit.runs.build_lock import describe, find_left_locks
from tightfit.runs.external.command import NAMES, recognise
from tightfit.runs.external.config import ExternalTraining, read_training
from tightfit.runs.external.record import FOLDER, ClaimedRun, begin_record, claim
from tightfit.runs.external.trainer import ExternalTrainer
from tightfit.runs.run import Signals
from tightfit.runs.supervise import MAX_ATTEMPTS, Policy, Supervisor
from tightfit.start.external import KnownTraining, Planner, prediction
from tightfit.start.machine import wait_for_gpus
from tightfit.types import ConfigError, UserError

EXAMPLE = """tightfit run -- llamafactory-cli train qwen32b_lora.yaml
  tightfit run --allow quantize,shorter-seq -- llamafactory-cli train qwen32b_lora.yaml
  tightfit run --max-attempts 3 -- deepspeed --num_gpus 4 train.py --deepspeed ds.json
  tightfit run --dry-run -- accelerate launch --config_file acc.yaml train.py
  tightfit run --output runs/a -- python train.py --output_dir out"""
ALLOWED = ("quantize", "shorter-seq")  # the costly changes that a config of another trainer can be given
MOST_FIXES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """The flags before the command."""

    output: str | None = None
    take_over: bool = False
    max_attempts: int = MAX_ATTEMPTS
    allow: str = ""
    retry_anyway: bool = False
    hang_timeout: str | None = None
    wait_for_gpu: bool = False
    no_calibration: bool = False
    model: str | None = None
    seq: int | None = None
    micro_batch: int | None = None
    gpus: str | None = None
    host_ram: str | None = None
    dry_run: bool = False
    json: bool = False

    def read_allowed(self) -> tuple[Allowance, ...]:
        names = [name.strip() for name in self.allow.split(",") if name.strip()]
        for name in names:
            if name not in ALLOWED:
                also = text("cli.only-tightfit-train") if name in get_args(Allowance) else meant(name, ALLOWED)
                known = " and ".join(ALLOWED)
                raise ConfigError(Message("cli.allow-knows-here", name=repr(name), also=also, allowed=known))
        return tuple(name for name in get_args(Allowance) if name in names)

    def check(self) -> None:
        """What the user has to change is said before anything is looked at."""
        if self.max_attempts < 1:
            raise ConfigError(Message("cli.run-attempts-at-least-one", many=self.max_attempts))
        self.read_allowed()
        hang_timeout_s(self.hang_timeout)
        for name, value in (("seq", self.seq), ("micro_batch", self.micro_batch)):
            most = LEVERS[name].most or 0
            if value is not None and not 1 <= value <= most:
                raise ConfigError(Message("cli.takes-1", value=name.replace("_", "-"), most=most, args=value))


def run(argv: Sequence[str]) -> int:
    if "--" not in argv:
        parser().parse([word for word in argv if word in ("-h", "--help")])
        raise ConfigError(Message("cli.missing-before"))
    cut = list(argv).index("--")
    options, words = read_options(RunOptions, vars(parser().parse(argv[:cut]))), tuple(argv[cut + 1 :])
    options.check()
    command = recognise(words)
    if shutil.which(words[0]) is None and not options.dry_run:
        raise ConfigError(Message("cli.there-program-here", words=words[0]))
    external = read_training(command)
    calibrations, ram = Calibrations(cache_folder()), options.host_ram
    wait: Callable[[int | None, int, Callable[[], bool]], bool] | None = None
    if options.wait_for_gpu:

        def wait(need_bytes: int | None, count: int, give_up: Callable[[], bool]) -> bool:
            return wait_for_gpus(need_bytes, count, _say, give_up)

    planner = Planner(
        hardware=read_hardware(options.gpus, host_ram=ram),
        allow=options.read_allowed(),
        calibration=None if options.no_calibration else known_here(),
        wait=wait,
        model=options.model,
        sequence=options.seq,
        micro_batch=options.micro_batch,
    )
    if options.gpus is None:  # what is learned of cards that were only named is not written down
        planner.keep = calibrations.add
    if options.dry_run:
        known, warning = planner.known(external), planner.warning(external)
        if options.json:
            print_json({**_start_report(external, known), "warning": warning})
            return 0
        print(f"{_describe(external)}: {shlex.join(words)}")
        print(_describe_prediction(external, known))
        if warning is not None:
            print(warning)
        return 0
    if options.wait_for_gpu:
        planner.wait_for_room(external, lambda: False)
    place = claim(None if options.output is None else Path(options.output), words, take_over=options.take_over)
    try:
        if place.before is not None and place.before.last_command != command.words:
            with suppress(UserError):  # as it was started last, where its config is still there
                external = read_training(recognise(place.before.last_command))
        return _run(options, place, external, planner)
    finally:
        place.lock.release()


def _run(options: RunOptions, place: ClaimedRun, external: ExternalTraining, planner: Planner) -> int:
    folder, known = place.path, planner.known(external)
    _say(text("cli.logs-records", external=_describe(external), path=folder))
    if place.before is not None:
        _say(text("cli.run-taken-over", path=folder, pid=place.before.pid))
    _say(_describe_prediction(external, known))
    if external.command.launcher != "other" and (left := find_left_locks(inherited(external.environment))):
        _say(str(describe(left)))
    if warning := planner.warning(external):
        _say(warning)
    out = sys.stderr if options.json else sys.stdout
    with Signals() as signals:
        policy = Policy(
            max_attempts=options.max_attempts,
            allow=frozenset(options.read_allowed()),
            hang_timeout_s=hang_timeout_s(options.hang_timeout),
        )
        trainer = ExternalTrainer(
            external=external,
            folder=folder,
            streams=(out.buffer, sys.stderr.buffer),
            say=_say,
            advisor=planner,
            policy=policy,
            signals=signals,
            retry_anyway=options.retry_anyway,
        )
        words = external.command.words if place.before is None else place.before.command
        record, first = begin_record(words, trainer.mark), _start_report(external, known)

        def write(report: dict[str, Any], state: str, exit_code: int | None) -> None:
            """`run.json`, without what the record or the attempts' records say themselves."""
            said_there = ("attempts", "state", "exit_code", "command")
            more = {key: value for key, value in report.items() if key not in said_there}
            record.write_report(folder, more, state=state, exit_code=exit_code)

        def begun(started: ExternalTraining) -> None:
            nonlocal record
            record = replace(record, last_command=started.command.words)
            write(first, "running", None)

        trainer.begun = begun
        if place.before is not None:
            _say(str(trainer.go_on()))
        ended = Supervisor(trainer=trainer, folder=folder, policy=policy, signals=signals).run()
    verdict = None
    if ended.verdict is not None:  # without the step, which only our own ranks know
        verdict = {key: value for key, value in asdict(ended.verdict).items() if key != "step"}
    report = {
        **first,
        "folder": str(folder),
        "state": ended.outcome.state,
        "exit_code": trainer.exit_code,
        "last_command": list(trainer.external.command.words),
        "written": [str(path) for path in trainer.files],
        "because": str(ended.because) or None,
        "verdict": verdict,
        "peak": {"host_bytes": trainer.peak.host_bytes, "gpu_bytes": dict(trainer.peak.gpu_bytes)},
        "attempts": [asdict(each) for each in ended.records],
    }
    write(report, ended.outcome.state, trainer.exit_code)
    most, found = trainer.peak, ended.verdict
    gpus = "".join(f", GPU {word} {size / 2**30:.1f} GiB" for word, size in sorted(most.gpu_bytes.items()))
    peak = text("cli.most-memory-seen", host_bytes=most.host_bytes / 2**30, gpus=gpus)
    many = len(ended.records)
    times = text("cli.at-first-attempt") if many == 1 else text("cli.after-attempts", many=many)
    if ended.outcome.state == "done":
        _say(text("cli.run-done", times=times, peak=peak))
        if found is not None:
            _say(text("cli.but-look-at", cause=found.cause))
    elif ended.outcome.state == "interrupted":
        _say(text("cli.stopped-asked", peak=peak))
    else:
        own = ended.records[-1].exit_codes
        well = own and not any(own)
        _say(text("cli.ended-if-all" if well else "cli.it-failed", times=times, peak=peak))
        if found is not None:
            _say(str(found.cause))
            if ended.because:
                _say(text("cli.started-again", because=ended.because))
            for fix in found.fixes[:MOST_FIXES]:
                costly = text("cli.changes-in-brackets") if fix.is_costly else ""
                _say(f"  - {fix.text}{f' [{fix.command}]' if fix.command else ''}{costly}")
            _say(text("cli.more-tightfit-diagnose", folder=trainer.folder, which=found.id))
    if trainer.files:
        _say(text("cli.configs-written", files=", ".join(str(path) for path in trainer.files)))
    if options.json:
        print_json(report)
    return trainer.exit_code


def parser() -> Parser:
    usage, allowed = "[flags] -- COMMAND…", ", ".join(ALLOWED)
    made = Parser("run", usage, EXAMPLE, folder=FOLDER, max_attempts=MAX_ATTEMPTS, allowed=allowed)
    made.takes("output=DIR take_over max_attempts=N allow=A,B retry_anyway hang_timeout=300s|10m|1h wait_for_gpu")
    made.takes("no_calibration model=MODEL seq=N micro_batch=N gpus=HARDWARE host_ram=SIZE dry_run json")
    return made.ends_with("0 … 255", "2")


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


def _describe_prediction(external: ExternalTraining, known: KnownTraining | str) -> str:
    if isinstance(known, str):
        return known
    said = prediction(known)
    if known.priced.fits is False and external.is_llamafactory and external.settings is not None:
        return text("cli.started-all-same", said=said, file=shlex.quote(str(external.settings.path)))
    return said


def _start_report(external: ExternalTraining, known: KnownTraining | str) -> dict[str, Any]:
    predicted: dict[str, Any] = {"fits": None, "said": _describe_prediction(external, known)}
    if isinstance(known, KnownTraining):
        gpu = known.priced.footprint.gpu
        predicted |= {"fits": known.priced.fits, "required_bytes": gpu.required_bytes, "peak_phase": gpu.peak_phase}
    return {
        "command": list(external.command.words),
        "trainer": external.command.launcher,
        "configs": [str(path) for path in external.files],
        "predicted": predicted,
    }
