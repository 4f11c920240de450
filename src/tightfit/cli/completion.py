"""`tightfit completion`: the shell completes verbs, flags and their words.

The script is made by shtab from the parsers of the verbs, so that it knows what they know.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from importlib import import_module

from tightfit.cli.flags import Parser
from tightfit.inputs.flags import LEVERS, meant, words_of
from tightfit.messages import Message, text
from tightfit.types import Checkpointing, ConfigError

SHELLS = ("bash", "zsh", "fish", "tcsh")
PARSERS = {verb: f"{verb}_parser" for verb in ("models", "gpus", "explain")}
"""Verbs that share a module have each a parser of its own there."""


def parser() -> Parser:
    example = "tightfit completion bash > ~/.local/share/bash-completion/completions/tightfit"
    made = Parser("completion", "|".join(SHELLS), example)
    made.add_argument("shell", metavar="SHELL", help="|".join(SHELLS))
    return made.ends_with("0", "2")


def completion(argv: Sequence[str]) -> int:
    args = parser().parse(argv)
    if args.shell not in SHELLS:
        raise ConfigError(Message("cli.no-shell", shell=repr(args.shell), hint=meant(args.shell, SHELLS)))
    import shtab

    from tightfit.cli import VERBS

    # All verbs as one parser.
    whole = argparse.ArgumentParser(prog="tightfit")
    whole.add_argument("--version", action="store_true", help=text("help.version"))
    verbs = whole.add_subparsers()
    for verb, module in VERBS.items():
        part = verbs.add_parser(verb, help=text(f"help.verb-{verb}"), add_help=False)
        parser_of: Callable[[], Parser] = getattr(import_module(module), PARSERS.get(verb, "parser"))
        for action in parser_of()._actions:
            part._add_action(action)
            lever = LEVERS.get(action.dest)
            if lever is not None and words_of(lever) and lever.type is not Checkpointing:
                action.choices = words_of(lever)
            elif not action.option_strings or {"FILE", "DIR"} & {str(action.metavar)}:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
    print(shtab.complete(whole, args.shell))
    return 0
