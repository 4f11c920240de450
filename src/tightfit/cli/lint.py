"""`tightfit lint`: what a config file really does, before a GPU is kept waiting for it."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tightfit.cli.flags import CHANGE, Parser, whole_number
from tightfit.formats.lint import examine
from tightfit.formats.registry import kinds
from tightfit.formats.rules import Finding, Report, Severity
from tightfit.formats.target import Target
from tightfit.inputs.versions import is_version
from tightfit.messages import Listing, Message, Said, bare, end_sentence, text
from tightfit.messages.wide import wrap
from tightfit.types import ConfigError

FOUND_ERRORS = 1
SEVERITIES: dict[Severity, Message] = {
    "error": Message("cli.error"),
    "warning": Message("cli.warning"),
    "note": Message("cli.note"),
}
COUNTS: dict[Severity, tuple[str, str]] = {
    "error": ("cli.some-errors", "cli.no-errors"),
    "warning": ("cli.some-warnings", "cli.no-warnings"),
    "note": ("cli.some-notes", "cli.no-notes"),
}
_VERSIONS = ("deepspeed_version", "transformers_version", "llamafactory_version")


def lint(argv: Sequence[str]) -> int:
    """Check one file, and the DeepSpeed file that it names."""
    args = parser().parse(argv)
    kind: str | None = getattr(args, "kind", None)
    if kind is not None and kind not in kinds():
        raise ConfigError(Message("cli.kind-knows-takes", kind=repr(kind), kinds=", ".join(kinds())))
    world = getattr(args, "world", None)
    if world is not None and world < 1:
        raise ConfigError(Message("cli.world-takes-at", world=world))
    report = examine(Path(args.file), _target(args), kind=kind, world=world)
    if getattr(args, "json", False):
        print(json.dumps(_as_json(report), indent=2, default=str, ensure_ascii=False))
    else:
        print(_as_text(report))
    return FOUND_ERRORS if report.count("error") else 0


def parser() -> Parser:
    *others, last = [each.one for each in kinds().values()]
    parser = Parser(
        "lint",
        text("help.lint-does", others=Listing(others), last=last),
        "tightfit lint ds_config.json --world 8",
        "FILE [--world N] [flags]",
    )
    defaults = Target()
    parser.add_argument("file", metavar="FILE", help=text("help.lint-file"))
    parser.add_argument("--kind", metavar="|".join(kinds()), help=text("help.kind"))
    parser.add_argument("--world", metavar="N", type=whole_number("world"), help=text("help.lint-world"))
    for version in _VERSIONS:
        tool = {"deepspeed": "DeepSpeed", "llamafactory": "LLaMA-Factory"}.get(
            version.partition("_")[0], "transformers"
        )
        flag = f"--{version.replace('_', '-')}"
        parser.add_argument(
            flag, metavar="V", help=text("help.reader-version", tool=tool, version=getattr(defaults, version))
        )
    parser.add_argument("--json", action="store_true", help=text("help.json"))
    codes = {"0": Message("help.lint-exit-0"), "1": Message("help.lint-exit-1"), **CHANGE}
    return parser.ends_with(codes)


def _target(args: argparse.Namespace) -> Target:
    given = {name: getattr(args, name) for name in _VERSIONS if hasattr(args, name)}
    for name, version in given.items():
        if not is_version(version):
            raise ConfigError(
                Message(
                    "cli.takes-version",
                    value=name.replace("_", "-"),
                    target=getattr(Target(), name),
                    version=repr(version),
                )
            )
    return Target(**given)


# --- printing -----------------------------------------------------------------------------------


def _as_json(report: Report) -> dict[str, object]:
    return {
        "file": report.file,
        "kind": report.kind,
        "findings": [{**asdict(each), "what": str(each.what), "fix": str(each.fix)} for each in report.findings],
        "errors": report.count("error"),
        "warnings": report.count("warning"),
        "notes": report.count("note"),
    }


def _as_text(report: Report) -> str:
    width = max(40, min(shutil.get_terminal_size().columns, 120))
    blocks = [_block(finding, width) for finding in report.findings]
    counts = [(many, none, report.count(severity)) for severity, (many, none) in COUNTS.items()]
    words = Listing(Message(many, n=count) if count else Message(none) for many, none, count in counts)
    blocks.append(text("cli.linted", file=report.file, kind=report.kind, counts=words))
    return "\n\n".join(blocks)


def _block(finding: Finding, width: int) -> str:
    where = finding.file if finding.line is None else f"{finding.file}:{finding.line}"
    first = "  ".join(part for part in (where, finding.place) if part)
    lines = [f"{first}  {SEVERITIES[finding.severity]} [{finding.rule}]"]
    lines.append(wrap(_sentence(finding.what, finding.place), width, "  ", "  "))
    lines.append(wrap(text("lint.fix", fix=finding.fix), width, "  ", " " * 7))
    return "\n".join(lines)


def _sentence(what: Said, place: str) -> str:
    """A full stop, and a capital unless the first word is a key of the file."""
    sentence = end_sentence(what)
    first = bare(sentence.split(maxsplit=1)[0])
    is_key = first in place.split(".") or not first.isalpha()
    return sentence if is_key else sentence[:1].upper() + sentence[1:]
