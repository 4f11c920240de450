"""`tightfit diagnose` and `tightfit explain`: what went wrong in a run, to judge by what it left behind.

Exit codes: 0 nothing is wrong; 1 a cause was found; 2 something that the user has to change.
"""

from __future__ import annotations

import argparse
import os
import stat
import sys
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tightfit.cli.flags import Parser, pick, print_json
from tightfit.cli.progress import ProgressLine
from tightfit.desk.estimate import price_config
from tightfit.diagnose.catalogue import catalogue
from tightfit.diagnose.judge import fixes_of, judge
from tightfit.diagnose.predicted import MemoryPrediction, predict_failure, predict_training, predict_verdict
from tightfit.diagnose.reading import is_printed, looks_like_log
from tightfit.diagnose.verdict import Diagnosis, Evidence, Fix, LogSource, RankExit, Verdict
from tightfit.formats.recognise import read_known_config
from tightfit.inputs.spelling import nearest
from tightfit.job.known import KnownConfig
from tightfit.messages import Message, say_why, text
from tightfit.owned import name_errors
from tightfit.runs.cause import RunQuestion, of_run, rank_of, read_planned_footprint
from tightfit.runs.watching import find_damaged
from tightfit.types import ConfigError, UserError

FOUND = 1
LARGE_BYTES = 2**28  # of a log that takes long enough to say how far it is
COPIED_BYTES = 2**20
MOST_PIPED_BYTES = 2**32  # a pipe may have no end, and what comes through it lies on disk while it is read
_NAMED = ("model", "gpus")
_PACKED = {".gz": "zcat", ".xz": "xzcat", ".zst": "zstdcat", ".bz2": "bzcat", ".zip": "unzip -p"}


def diagnose(argv: Sequence[str]) -> int:
    args = parser().parse(argv)
    with ExitStack() as stack:
        question = _question(args, stack)
        found = judge(question.evidence) if _has_evidence(question.evidence) else Diagnosis(verdict=None)
    logs, is_told = question.evidence.logs, bool(question.ending or question.evidence.exits)
    if logs and not (is_told or found.verdict or found.also or any(map(is_printed, logs))):
        raise ConfigError(Message("cli.not-printed", name=logs[0].name))
    found, expected = _predict(args, question, found)
    ending = question.ending
    if hasattr(args, "json"):
        print_json(as_json(found, expected) | ({} if ending is None else {"run": asdict(ending)}))
    else:
        from tightfit.screen import open_console, say
        from tightfit.screen.diagnose import draw_diagnosis

        console = open_console()
        if ending is not None:
            say(console, ending.sentence, style="bold" if ending.well else "bold red")
        if ending is None or ending.well or found.verdict is not None or found.also:
            names = [source.name for source in question.evidence.logs]
            draw_diagnosis(console, found, None if expected is None else expected.sentence, names)
    return FOUND if found.verdict is not None or (ending is not None and not ending.well) else 0


def _has_evidence(evidence: Evidence) -> bool:
    return bool(evidence.logs or evidence.exits or evidence.kernel)


def _predict(
    args: argparse.Namespace, question: RunQuestion, found: Diagnosis
) -> tuple[Diagnosis, MemoryPrediction | None]:
    """What the memory model says: of the failure; or, where nothing has happened yet, of what is going to."""
    told = found.verdict
    alone = not _has_evidence(question.evidence)
    if hasattr(args, "config"):
        known, words = question.evidence.config or KnownConfig(), {name: getattr(args, name, None) for name in _NAMED}
        try:
            priced = price_config(Path(args.config), known, **words)
        except UserError:
            if alone:
                raise
            return found, None  # who asks about a log wants no complaint about what else could be known
        if not alone:
            return found, predict_failure(priced.footprint, told) if told else None
        said = predict_training(priced.footprint, priced.hardware, priced.world)
        if priced.planned:
            said = replace(said, sentence=Message("diagnose.priced-as-planned", sentence=said.sentence))
        card = priced.hardware.gpu.memory_bytes if priced.hardware else 0
        return replace(found, verdict=predict_verdict(said, card, known, args.config)), said
    footprint = read_planned_footprint(question.plan) if question.plan and (told or alone) else None
    if footprint is None:
        return found, None
    if told is not None:
        return found, predict_failure(footprint, told)
    world = question.evidence.config.world if question.evidence.config else None
    return found, predict_training(footprint, None, world or 1)


def parser() -> Parser:
    made = Parser("diagnose", "FILE…|RUN|- [flags]", "tightfit diagnose train.log --config ds_config.json")
    made.takes("inputs:FILE…|RUN|-* config=FILE model=MODEL gpus=HARDWARE")
    made.add_argument("--exit-code", metavar="N", type=_exit_code, help=made.explain("exit-code"))
    made.takes("vocab=N json")
    return made.ends_with("0", "1", "2")


def _exit_code(text: str) -> int:
    try:
        code = int(text)
    except ValueError:
        code = 1000
    if not -64 <= code <= 255:
        raise argparse.ArgumentTypeError(Message("cli.exit-code-takes-number", text=repr(text)))
    return code


def _question(args: argparse.Namespace, stack: ExitStack) -> RunQuestion:
    given = getattr(args, "exit_code", None)
    config = read_known_config(Path(args.config)) if hasattr(args, "config") else None
    words = getattr(args, "inputs", [])
    if not words and given is None and config is None:
        raise ConfigError(Message("cli.there-nothing-judge"))
    for name in _NAMED:
        if hasattr(args, name) and config is None:
            raise ConfigError(Message("cli.goes-config", name=name))
    if len(words) == 1 and words[0] != "-" and _is_folder(words[0]):
        question = of_run(Path(words[0]))
        for record in find_damaged(Path(words[0])):
            print(f"tightfit: {text('cli.damaged-passed-over', record=record)}", file=sys.stderr)
    else:
        sources = tuple(_find_log(word, stack) for word in words)
        sized = [source.path for source in sources if source.path is not None and source.path.is_file()]
        is_empty = len(sized) == len(sources) and not any(path.stat().st_size for path in sized)
        if given is None and sources and is_empty:
            names = sources[0].name if len(sources) == 1 else text("cli.each-these-files")
            raise ConfigError(Message("cli.empty-add-exit-code", names=names))
        question = RunQuestion(evidence=Evidence(logs=sources))
    evidence = question.evidence
    if given is not None:
        evidence = replace(evidence, exits=(RankExit(rank=None, code=given, at=0.0),))
    if config is not None:
        evidence = replace(evidence, config=config)
    if hasattr(args, "vocab"):
        evidence = replace(evidence, vocabulary=args.vocab)
    return replace(question, evidence=evidence)


def _find_log(word: str, stack: ExitStack) -> LogSource:
    """One log, looked at before it is read."""
    if word == "-":
        # Standard input as a file: a pipe can be read once only.
        if sys.stdin is None:
            raise ConfigError(Message("cli.there-standard-input"))
        kept = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tightfit-"))) / "stdin.log"
        source = LogSource(name=text("cli.standard-input"), path=kept)
        copied = 0
        with name_errors(kept), kept.open("wb", buffering=0) as file:
            while portion := sys.stdin.buffer.read(COPIED_BYTES):
                file.write(portion)
                if copied == 0:
                    _check_text(source)
                copied += len(portion)
                if copied > MOST_PIPED_BYTES:
                    raise ConfigError(Message("cli.standard-input-gave", most_piped_bytes=MOST_PIPED_BYTES >> 30))
        return source
    if _is_folder(word):
        raise ConfigError(Message("cli.folder-name-log", word=word))
    path = Path(word)
    packed = _PACKED.get(path.suffix.lower())
    if packed is not None:
        raise ConfigError(Message("cli.packed-pipe-tightfit", word=word, packed=packed))
    if not path.is_file():
        raise ConfigError(Message("cli.pipe-device-pipe", word=word))
    source = LogSource(name=word, path=path, rank=rank_of(path))
    _check_text(source)
    size_bytes = path.stat().st_size
    if size_bytes < LARGE_BYTES or not sys.stderr.isatty():
        return source
    line, size = stack.enter_context(ProgressLine()), f"{size_bytes / 2**30:.1f} GiB"

    def tell(done_bytes: int) -> None:
        percent = min(100, 100 * done_bytes // max(1, size_bytes))
        line.say(text("cli.reading-log", name=word, percent=percent, size=size))

    return replace(source, on_read=tell)


def _is_folder(word: str) -> bool:
    """Whether it is a folder; what is not there at all, or cannot be reached, is said in one sentence."""
    try:
        return stat.S_ISDIR(os.stat(word).st_mode)
    except (FileNotFoundError, ValueError):  # ValueError: a name that no file can have
        raise ConfigError(Message("cli.there-file-name", word=repr(word))) from None
    except OSError as error:
        raise ConfigError(Message("cli.cannot-read", word=word, lower=say_why(error))) from None


def _check_text(source: LogSource) -> None:
    assert source.path is not None
    try:
        with source.path.open("rb"):
            pass
    except OSError as error:
        raise ConfigError(Message("cli.cannot-read", word=source.name, lower=say_why(error))) from None
    if not looks_like_log(source):
        raise ConfigError(Message("cli.not-a-log", name=source.name))


def as_json(found: Diagnosis, expected: MemoryPrediction | None = None) -> dict[str, Any]:
    """What `--json` prints; a verdict of null means that nothing is wrong."""
    tree: dict[str, Any] = {
        "verdict": None if found.verdict is None else _verdict_json(found.verdict),
        "also": [_verdict_json(verdict) for verdict in found.also],
    }
    if expected is not None:
        tree["predicted"] = {**asdict(expected), "blame": expected.blame}
    return tree


def _verdict_json(verdict: Verdict) -> dict[str, Any]:
    tree = asdict(verdict)
    del tree["step"]  # only our own ranks know it, and no log is asked
    tree["fixes"] = _fixes_json(verdict.fixes)
    return tree


def _fixes_json(fixes: Iterable[Fix]) -> list[dict[str, Any]]:
    return [{**pick(fix, "text", "command"), "costly": fix.is_costly} for fix in fixes]


def explain_parser() -> Parser:
    made = Parser("explain", "ID|list [--json]", "tightfit explain oom-logits")
    made.takes("id:ID|list json")
    return made.ends_with("0", "2")


def explain(argv: Sequence[str]) -> int:
    args = explain_parser().parse(argv)
    known = catalogue()
    if args.id != "list" and args.id not in known.by_id:
        close = nearest(args.id, known.by_id)
        meant = text("cli.meant", close=close) if close else text("cli.tightfit-explain-list")
        raise ConfigError(Message("cli.there-symptom", name=repr(args.id), meant=meant))
    wanted = known.symptoms if args.id == "list" else (known.by_id[args.id],)
    if hasattr(args, "json"):
        listed = [
            {
                **pick(symptom, "id", "kind", "role", "title"),
                "cause": symptom.cause.fill_any(),
                **pick(symptom, "confidence", "refines"),
                "fixes": _fixes_json(fixes_of(symptom, KnownConfig(), {})),
                "sources": symptom.sources,
            }
            for symptom in wanted
        ]
        print_json(listed)
        return 0
    from tightfit.screen import open_console
    from tightfit.screen.diagnose import draw_symptom, draw_symptoms

    if args.id == "list":
        draw_symptoms(open_console(), wanted)
    else:
        draw_symptom(open_console(), wanted[0], tuple(fixes_of(wanted[0], KnownConfig(), {})))
    return 0
