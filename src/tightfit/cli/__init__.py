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
from tightfit.types import ConfigError, UserError

VERBS = {
    "estimate": ("tightfit.cli.estimate", "what every GPU and the host will hold, before anything runs"),
    "plan": ("tightfit.cli.plan", "the fastest way that fits, and the configs for it"),
    "train": ("tightfit.cli.train", "the training itself: planned, started, followed to its end"),
    "run": ("tightfit.cli.run", "another trainer: watched, diagnosed, and started again where that helps"),
    "rehearse": ("tightfit.cli.rehearse", "one rank of many on one GPU: what it really holds, and its pace"),
    "data": ("tightfit.cli.data", "what the training will see, and what of it counts in the loss"),
    "checkpoints": ("tightfit.cli.checkpoints", "the checkpoints of a run: list, verify, prune"),
    "export": ("tightfit.cli.export", "a run or an adapter as one plain model folder"),
    "lint": ("tightfit.cli.lint", "what a config file of DeepSpeed, accelerate or LLaMA-Factory gets wrong"),
    "doctor": ("tightfit.cli.doctor", "this machine, and a job for it, looked over before anything starts"),
    "diagnose": ("tightfit.cli.diagnose", "what went wrong in a run, from its logs, and what helps"),
    "explain": ("tightfit.cli.diagnose", "a symptom that `tightfit diagnose` names, or all of them"),
    "watch": ("tightfit.cli.watch", "a run, or this machine, live: memory, pace, and what is about to go wrong"),
    "ui": ("tightfit.cli.ui", "the page in the browser: plans, runs as they go, what went wrong in a log"),
    "clean": ("tightfit.cli.clean", "what dead runs left behind: shown, and removed on a yes"),
    "schema": ("tightfit.cli.schema", "the fields of a job file"),
    "models": ("tightfit.cli.lists", "the models known by name, and what they need"),
    "gpus": ("tightfit.cli.lists", "the cards known by name"),
    "completion": ("tightfit.cli.completion", "a script with which your shell completes all this"),
}
"""Verb → the module that has it, and what it does."""

USER_ERROR = 2
INTERRUPTED = 130


PLAIN_LETTERS = "tightfit-plain"
STAND_INS = str.maketrans("█▓▒░▚▞│─×·←→…–−", "WGDOMA|-x-<>.--")
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
        _check_letters(words)
        choose_language(_take_language(words))
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
            what = "the output" if error.filename is None else error.filename
            print(f"tightfit: {what} could not be written: the disk is full", file=sys.stderr)
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


def _check_letters(words: Sequence[str]) -> None:
    """Bytes that are no text reach Python as half letters, which no file, JSON or screen can hold."""
    for word in words:
        if any("\ud800" <= letter <= "\udfff" for letter in word):
            raise ConfigError(f"{ascii(word)[:48]} on the command line is not text in UTF-8: write it in plain letters")


def _take_language(words: list[str]) -> str | None:
    """What `--lang` says, wherever it stands; it is taken out. What follows `--` is another program's."""
    asked = None
    for place in reversed(range(words.index("--") if "--" in words else len(words))):
        flag, equals, value = words[place].partition("=")
        if flag == "--lang":
            asked = asked if asked is not None else value if equals else "".join(words[place + 1 : place + 2])
            del words[place : place + (1 if equals else 2)]
    return asked


def _dispatch(words: list[str]) -> int:
    first = words[0] if words else "--help"
    if first in ("-h", "--help", "help"):
        print(_help())
        return 0
    if first in ("-V", "--version", "version"):
        print(_version())
        return 0
    if first not in VERBS:
        raise ConfigError(f"there is no verb {first!r}{_meant(first)}")
    run: Callable[[Sequence[str]], int] = getattr(import_module(VERBS[first][0]), first)
    return run(words[1:])


def _meant(word: str) -> str:
    from tightfit.inputs.spelling import listed, nearest

    if word.startswith("-"):
        return ": begin with a verb, as in `tightfit estimate --help`"
    close = nearest(word, VERBS)
    return f": did you mean {close}?" if close else f": there are {listed(VERBS).replace(' or ', ' and ')}"


def _version() -> str:
    """Ours, and those of what trains, as far as it is installed; nothing is imported for it."""
    import platform
    from importlib.metadata import PackageNotFoundError, version

    from tightfit import __version__

    found = [f"Python {platform.python_version()}"]
    for name in ("torch", "deepspeed", "transformers", "accelerate", "peft", "bitsandbytes", "triton"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return f"tightfit {__version__}\n{', '.join(found)}"


def _help() -> str:
    verbs = "\n".join(f"  {verb:<13}{what}" for verb, (_, what) in VERBS.items())
    return f"""usage: tightfit VERB [flags]

Makes large-model training fit the GPUs you have, and stay fitted.

verbs:
{verbs}

  tightfit VERB --help   its flags
  tightfit --version     the version, and those of what it found
  tightfit --lang zh …   in Chinese; so does TIGHTFIT_LANG=zh, or a Chinese locale

example:
  tightfit estimate --model llama-3.1-8b --method lora --gpus 1xRTX4090"""
