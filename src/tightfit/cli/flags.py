"""What the verbs share: a parser that answers in one sentence, and the flags of the levers.

The flags are made from what stands on the levers' own fields, so that the help and the check cannot differ.
None has a default here: what was not said stays unsaid until `levers_from_flags`.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, NoReturn, TypeVar, get_args

from tightfit.inputs.flags import LEVERS, spelt, words_of
from tightfit.inputs.spelling import nearest, seconds_in
from tightfit.messages import Message, explain_field, text, texts_of
from tightfit.messages.wide import wrap
from tightfit.types import ConfigError, Group

Options = TypeVar("Options")

OTHER_NAMES = {
    "batch-size": "micro_batch",
    "nproc-per-node": "world",
    "num-gpus": "world",
    "quantization-bit": "method",
    "sequence": "seq",
    "sequence-length": "seq",
    "stage": "engine",
    "zero-stage": "engine",
}
"""What other programs call our flags, where the spelling alone would not show it."""


ALIASES = {
    "preset": "model",
    "load_checkpoint": "resume",
    "output_dir": "output",
    "ablation_config": "ablation",
    "lr": "learning_rate",
    "lr_scheduler_type": "lr_scheduler",
    "num_train_epochs": "epochs",
    "save_total_limit": "keep_last",
    **{other: lever.flag for lever in LEVERS.values() for other in lever.also},
}
"""Names that people know from other training scripts, and what they are here."""

WHOLE = frozenset(
    "count effective_batch keep_every keep_last max_attempts max_gpus max_steps micro_batch node_rank nodes num_gpus "
    "on only_stage port samples seq steps vocab world".split()
)
"""The flags that take a whole number. Those of a job's other fields are read with the job."""

HARDWARE = "gpus=HARDWARE world=N host_ram=SIZE nvme=SIZE"
CONNECTIONS = "network=400Gb|8x400Gb link=nvlink|pcie3|pcie4|pcie5|50GB/s"
CONFIG = "config_file"  # where `--config` is kept until it becomes the file


ARGPARSE = {
    "usage: ": Message("help.usage"),
    "positional arguments": Message("help.positional"),
    "options": Message("help.options"),
    "show this help message and exit": Message("help.help"),
    "argument %(argument_name)s: %(message)s": Message("cli.about-argument"),
    "the following arguments are required: %s": Message("cli.required"),
    "expected one argument": Message("cli.one-argument"),
    "expected at most one argument": Message("cli.most-one-argument"),
    "expected at least one argument": Message("cli.least-one-argument"),
    "ignored explicit argument %r": Message("cli.explicit-argument"),
    "invalid %(type)s value: %(value)r": Message("cli.invalid-value"),
    "invalid choice: %(value)r (choose from %(choices)s)": Message("cli.invalid-choice"),
}
"""What argparse itself says. It asks gettext for the words, whose catalogues are not ours."""
argparse._ = lambda words: str(ARGPARSE.get(words, words))  # type: ignore[attr-defined]


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    def _split_lines(self, text: str, width: int) -> list[str]:
        return wrap(" ".join(text.split()), width).split("\n")


class Parser(argparse.ArgumentParser):
    """argparse, with its errors as one sentence, the nearest right spelling of a flag, and its texts by their names.

    What a flag means is the message `help.VERB-FLAG`, or `help.FLAG`; what the verb does, how it ends and what it
    writes is `help.VERB-does`, `help.VERB-exit-CODE` and `help.VERB-writes`. `like`: a verb whose flags it has too.
    """

    def __init__(self, verb: str, usage: str, example: str, *, like: str = "", **fields: object) -> None:
        self._verb, self._like, self._fields = verb.partition(" ")[0], like, fields
        super().__init__(
            prog=f"tightfit {verb}",
            usage=f"tightfit {verb} {usage}",
            description=wrap(self.explain("does"), 79),
            epilog=f"{text('help.example')}\n  {example}",
            formatter_class=HelpFormatter,
            allow_abbrev=False,
            argument_default=argparse.SUPPRESS,
        )

    def explain(self, name: str, *others: str) -> str:
        """What is said of it for this verb; or of the others, where this verb has no text of its own."""
        name = re.sub(r"\W+|_", "-", name.lower())
        names = (f"{self._verb}-{name}", *(others or (f"{self._like}-{name}", name)))
        return text(f"help.{next(each for each in names if each in texts_of('help'))}", **self._fields)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(Message("cli.see-help", problem=message, prog=self.prog))

    def takes(self, words: str, group: str | None = None) -> argparse._ActionsContainer:
        """Make it take `seq=N`, a flag with a value, `json`, a flag without, or `run:RUN`, a place: with `?` or `*`
        behind it as argparse has it. Hands back what has them: the parser, or the group of that title."""
        holder = self if group is None else self.add_argument_group(self.explain(group))
        for word in words.split():
            name, kind, metavar = re.split("([=:])", word, maxsplit=1) if re.search("[=:]", word) else (word, "", "")
            about = self.explain(name)
            if kind == ":":
                nargs = metavar[-1] if metavar[-1] in "?*" else None
                holder.add_argument(name, metavar=metavar.rstrip("?*"), nargs=nargs, help=about)
            elif kind:
                read: Callable[[str], Any] = whole_number(name) if name in WHOLE else str
                holder.add_argument(spelt(name), metavar=metavar, type=read, help=about)
            else:
                holder.add_argument(spelt(name), action="store_true", help=about)
        return holder

    def add_file(self, metavar: str) -> None:
        """The file that a question starts from, with or without `--config` before it."""
        self.takes(f"file:{metavar}?")
        self.add_argument("--config", dest=CONFIG, metavar=metavar, help=text("help.config"))

    def ends_with(self, *codes: str, well: str = "exit-0") -> Parser:
        """Itself, with its exit codes and what it writes at the end of its help, before the example."""
        self.takes("lang=en|zh")  # taken out before: see `main`
        wide, lines = max(map(len, codes)), [text("help.exit-codes")]
        for code in codes:
            about = self.explain(f"exit-{code}", well if code == "0" else f"exit-{code}")
            lines.append(wrap(about, 79, f"  {code:<{wide}}  ", " " * (wide + 4)))
        if f"{self._verb}-writes" in texts_of("help"):
            lines = [text("help.writes"), wrap(self.explain("writes"), 79, "  ", "  "), "", *lines]
        self.epilog = "\n".join([*lines, "", str(self.epilog)])
        return self

    def knows_as(self, names: Mapping[str, str]) -> None:
        """Other names for flags that it has, understood and not shown."""
        known = {action.dest: action for action in self._actions}
        for other, ours in names.items():
            if ours in known and spelt(other) not in self._option_string_actions:
                self.add_argument(spelt(other), dest=ours, type=known[ours].type or str, help=argparse.SUPPRESS)

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse, or say which flag was meant. `--micro_batch` is the same as `--micro-batch`."""
        dashed = [re.sub("^--[^=]*", lambda flag: flag[0].replace("_", "-"), word) for word in argv]
        namespace, unknown = self.parse_known_args(dashed)
        for word in unknown:
            flag = word.partition("=")[0]
            if flag.startswith("-"):
                known = [name for name in self._option_string_actions if name.startswith("--")]
                other = spelt(OTHER_NAMES.get(flag.lstrip("-"), ""))
                close = other if other in known else nearest(flag, known)
                if close is None:
                    raise ConfigError(Message("cli.no-flag", prog=self.prog, flag=flag))
                raise ConfigError(Message("cli.no-flag-but", prog=self.prog, flag=flag, close=close))
        if unknown:
            raise ConfigError(Message("cli.stray-word", prog=self.prog, word=repr(unknown[0])))
        if hasattr(namespace, CONFIG):
            if hasattr(namespace, "file"):
                raise ConfigError(Message("cli.two-files", file=namespace.file))
            namespace.file = getattr(namespace, CONFIG)
            delattr(namespace, CONFIG)
        return namespace


def pick(thing: object, *names: str) -> dict[str, Any]:
    """What a report tells of it: these attributes, by their names."""
    return {name: getattr(thing, name) for name in names}


def print_json(tree: object, *, allow_nan: bool = True) -> None:
    """What `--json` asks for; messages and paths are printed as their texts."""
    print(json.dumps(tree, indent=2, default=str, ensure_ascii=False, allow_nan=allow_nan))


def hang_timeout_s(text: str | None) -> float | None:
    """Seconds; None: nothing was said."""
    if text is None:
        return None
    seconds = float(text) if text.isdecimal() and len(text) < 9 else seconds_in(text)
    if not seconds:
        raise ConfigError(Message("cli.hang-timeout-takes-time", text=repr(text)))
    return seconds


def read_options(record: type[Options], given: Mapping[str, Any]) -> Options:
    """A verb's own options, a dataclass with a field for each: what was given, and the others' defaults."""
    names = [each.name for each in fields(record)]  # type: ignore[arg-type]
    return record(**{name: given[name] for name in names if name in given})


def add_lever_flags(parser: Parser, only: Iterable[str] | None = None) -> None:
    """Every flag of the levers, or those named."""
    wanted = set(LEVERS if only is None else only)
    for title in get_args(Group):
        chosen = [lever for lever in LEVERS.values() if lever.group == title and lever.flag in wanted]
        if chosen:
            group = parser.add_argument_group(parser.explain(title))
            for lever in chosen:
                flag, words, help_ = spelt(lever.flag), words_of(lever), explain_field("levers", lever.flag, lever.help)
                if lever.type is bool:
                    off = spelt(f"no_{lever.flag}")
                    name, action = (off, "store_false") if lever.default else (flag, "store_true")
                    group.add_argument(name, dest=lever.flag, action=action, help=help_)
                    continue
                taken: dict[Any, tuple[str, Callable[[str], Any]]] = {
                    int: ("N|auto" if lever.auto else "N", whole_number(lever.flag, or_auto=lever.auto)),
                    float: ("SHARE", share(lever.flag)),
                    str: (lever.form[0] if lever.form else "TEXT", str),
                }
                metavar, read = taken.get(lever.type, ("|".join(words) or "all|a,b,c", str))
                group.add_argument(flag, metavar=metavar, type=read, help=help_)


def whole_number(flag: str, *, or_auto: bool = False) -> Callable[[str], int | str]:
    """A reader of `2048`, `500_000_000` and, as DeepSpeed's own files have it, `5e8`."""

    def read(word: str) -> int | str:
        if or_auto and word.lower() == "auto":
            return "auto"
        if re.fullmatch(r"[+-]?\d{1,18}", word.replace("_", "")):
            return int(word.replace("_", ""))
        if re.fullmatch(r"\d+(\.\d+)?[eE]\+?1?\d", word) and float(word).is_integer():
            return int(float(word))
        auto = "auto" if or_auto else None
        raise ConfigError(Message("cli.takes-whole-number", flag=spelt(flag), auto=auto, word=repr(word)))

    return read


def share(flag: str) -> Callable[[str], float]:
    """A reader of `0.05`."""

    def read(word: str) -> float:
        try:
            return float(word)
        except ValueError:
            raise ConfigError(Message("cli.takes-share", flag=spelt(flag), word=repr(word))) from None

    return read


def without_default(help_: str) -> str:
    """The help of a lever without the value in brackets behind it, which is `estimate`'s."""
    return re.sub(r" ?[(（][^()（）]*[)）]$", "", help_)
