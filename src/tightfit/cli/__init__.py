"""The verbs: parse, call, print.

Each verb is a plain function from its arguments to an exit code, in a module that is loaded only when
the verb is used: `tightfit estimate` must answer in the blink of an eye, and `tightfit --help` sooner.
"""

from __future__ import annotations

import codecs
import errno
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from tightfit.inputs.surroundings import choose_language
from tightfit.messages import Listing, Message, text
from tightfit.types import ConfigError, UserError

SHARED = {"explain": "diagnose", "models": "estimate", "gpus": "estimate"}
VERBS = {
    verb: f"tightfit.cli.{SHARED.get(verb, verb)}"
    for verb in (
        *("estimate", "plan", "train", "run", "rehearse", "data", "checkpoints", "export", "lint", "doctor"),
        "measure",
        *("diagnose", "explain", "watch", "ui", "clean", "schema", "models", "gpus", "completion"),
    )
}
"""Verb → the module that has it. What it does is the message `help.verb-VERB`."""

USER_ERROR = 2
INTERRUPTED = 130

PLAIN_LETTERS = "tightfit-plain"
STAND_INS = str.maketrans("█▓▒░▚▞│─×·←→…–−≈", "WGDOMA|-x-<>.--=")
"""For terminals without these characters: a picture's fills must still differ from each other."""


def _plainly(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lost = error.object[error.start : error.end].translate(STAND_INS)
    return "".join(letter if letter.isascii() else "?" for letter in lost), error.end


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line. What the user got wrong is one sentence; a bug shows its traceback."""
    words = list(sys.argv[1:] if argv is None else argv)
    codecs.register_error(PLAIN_LETTERS, _plainly)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors=PLAIN_LETTERS)
    try:
        for word in words:
            # Bytes that are no text reach Python as half letters, which no file, JSON or screen can hold.
            if any("\ud800" <= letter <= "\udfff" for letter in word):
                raise ConfigError(Message("cli.not-utf8", word=ascii(word)[:48]))
        # What `--lang` says, wherever it stands; it is taken out. What follows `--` is another program's.
        asked = None
        for place in reversed(range(words.index("--") if "--" in words else len(words))):
            flag, equals, value = words[place].partition("=")
            if flag == "--lang":
                asked = asked if asked is not None else value if equals else "".join(words[place + 1 : place + 2])
                del words[place : place + (1 if equals else 2)]
        choose_language(asked)
        code = _dispatch(words)
        sys.stdout.flush()
        return code
    except UserError as error:
        print(f"tightfit: {' '.join(str(error).split())}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as error:
        reader_left = isinstance(error, BrokenPipeError)
        if not reader_left:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            if not full or (error.filename is None and not _output_is_stuck()):
                raise
            what = Message("cli.the-output") if error.filename is None else error.filename
            print(f"tightfit: {text('cli.disk-full', what=what)}", file=sys.stderr)
        if error.filename is None:
            # The reader has gone (`| head`): nothing is wrong, and Python must not try to flush again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0 if reader_left else USER_ERROR


def _output_is_stuck() -> bool:
    """Whether standard output takes nothing, so that the error was its own."""
    try:
        sys.stdout.write("\n")  # of what failed it need not have kept anything back
        sys.stdout.flush()
    except OSError:
        return True
    return False


def _dispatch(words: list[str]) -> int:
    first = words[0] if words else "--help"
    if first in ("-h", "--help", "help"):
        verbs = [f"  {verb:<13}{text(f'help.verb-{verb}')}" for verb in VERBS]
        print(text("help.main", verbs="\n".join(verbs)))
        return 0
    if first in ("-V", "--version", "version"):
        # Ours, and those of what trains, as far as it is installed; nothing is imported for it.
        import platform
        from importlib.metadata import PackageNotFoundError, version

        from tightfit.inputs.versions import find_installed

        found = [f"Python {platform.python_version()}"]
        for name in ("torch", "deepspeed", "transformers", "accelerate", "peft", "bitsandbytes", "triton"):
            try:
                found.append(f"{name} {version(name)}")
            except PackageNotFoundError:
                continue
        print(f"tightfit {find_installed('tightfit') or text('cli.not-installed')}\n{', '.join(found)}")
        return 0
    if first not in VERBS:
        from tightfit.inputs.spelling import nearest

        if first.startswith("-"):
            hint = Message("cli.begin-with-verb")
        elif close := nearest(first, VERBS):
            hint = Message("cli.meant", close=close)
        else:
            hint = Message("cli.there-are", names=Listing(VERBS, "and"))
        raise ConfigError(Message("cli.no-verb", word=repr(first), hint=hint))
    run: Callable[[Sequence[str]], int] = getattr(import_module(VERBS[first]), first)
    return run(words[1:])
