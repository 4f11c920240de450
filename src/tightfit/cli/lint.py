"""`tightfit lint`: what a config file really does, before a GPU is kept waiting for it."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tightfit.cli.flags import Parser, print_json
from tightfit.formats.dialect import kinds
from tightfit.formats.lint import examine
from tightfit.formats.rules import Severity
from tightfit.formats.target import Target
from tightfit.inputs.flags import spelt
from tightfit.inputs.versions import is_version
from tightfit.messages import Listing, Message, bare, end_sentence, text
from tightfit.messages.wide import wrap
from tightfit.types import ConfigError

FOUND_ERRORS = 1
SEVERITIES: dict[Severity, tuple[str, str, str]] = {
    "error": ("cli.error", "cli.some-errors", "cli.no-errors"),
    "warning": ("cli.warning", "cli.some-warnings", "cli.no-warnings"),
    "note": ("cli.note", "cli.some-notes", "cli.no-notes"),
}
"""One of them, several and none in words."""
_VERSIONS = {
    "deepspeed_version": "DeepSpeed",
    "transformers_version": "transformers",
    "llamafactory_version": "LLaMA-Factory",
}


def lint(argv: Sequence[str]) -> int:
    """Check one file, and the DeepSpeed file that it names."""
    args = parser().parse(argv)
    kind: str | None = getattr(args, "kind", None)
    if kind is not None and kind not in kinds():
        raise ConfigError(Message("cli.kind-knows-takes", kind=repr(kind), kinds=", ".join(kinds())))
    world = getattr(args, "world", None)
    if world is not None and world < 1:
        raise ConfigError(Message("cli.world-takes-at", world=world))
    given = {name: getattr(args, name) for name in _VERSIONS if hasattr(args, name)}
    for name, version in given.items():
        if not is_version(version):
            about = {"value": name.replace("_", "-"), "target": getattr(Target(), name), "version": repr(version)}
            raise ConfigError(Message("cli.takes-version", **about))
    report = examine(Path(args.file), Target(**given), kind=kind, world=world)
    if hasattr(args, "json"):
        findings = [{**asdict(each), "what": str(each.what), "fix": str(each.fix)} for each in report.findings]
        counts = {f"{severity}s": report.count(severity) for severity in SEVERITIES}
        print_json({"file": report.file, "kind": report.kind, "findings": findings, **counts})
    else:
        width = max(40, min(shutil.get_terminal_size().columns, 120))
        blocks = []
        for finding in report.findings:
            where = finding.file if finding.line is None else f"{finding.file}:{finding.line}"
            first = "  ".join(part for part in (where, finding.place) if part)
            sentence = end_sentence(finding.what)
            word = bare(sentence.split(maxsplit=1)[0])
            if word not in finding.place.split(".") and word.isalpha():  # a capital, unless it is a key of the file
                sentence = sentence[:1].upper() + sentence[1:]
            head = f"{first}  {text(SEVERITIES[finding.severity][0])} [{finding.rule}]"
            fix = wrap(text("lint.fix", fix=finding.fix), width, "  ", " " * 7)
            blocks.append(f"{head}\n{wrap(sentence, width, '  ', '  ')}\n{fix}")
        words = [
            Message(many, n=report.count(severity)) if report.count(severity) else Message(none)
            for severity, (_, many, none) in SEVERITIES.items()
        ]
        last = text("cli.linted", file=report.file, kind=report.kind, counts=Listing(words))
        print("\n\n".join([*blocks, last]))
    return FOUND_ERRORS if report.count("error") else 0


def parser() -> Parser:
    *others, last = [each.one for each in kinds().values()]
    usage, example = "FILE [--world N] [flags]", "tightfit lint ds_config.json --world 8"
    made = Parser("lint", usage, example, others=Listing(others), last=last)
    made.takes(f"file:FILE kind={'|'.join(kinds())} world=N")
    for version, tool in _VERSIONS.items():
        reader = text("help.reader-version", tool=tool, version=getattr(Target(), version))
        made.add_argument(spelt(version), metavar="V", help=reader)
    made.takes("json")
    return made.ends_with("0", "1", "2")
