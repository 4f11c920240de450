"""Whose command is it? What stands on a command line that starts somebody else's trainer.

Nothing is run and no file is opened here: from words to the launcher, the script and the places of the config files
that it names. `config.py` reads those.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePath
from typing import Literal

from tightfit.messages import Message, Said
from tightfit.types import ConfigError

Launcher = Literal["llamafactory", "trl", "deepspeed", "accelerate", "torchrun", "python", "other"]

NAMES: dict[Launcher, Said] = {
    "llamafactory": "LLaMA-Factory",
    "trl": "TRL",
    "deepspeed": Message("external.deepspeeds-launcher"),
    "accelerate": "accelerate",
    "torchrun": "torchrun",
    "python": Message("external.a-script"),
    "other": Message("external.unknown-program"),
}

_MODULES: dict[str, Launcher] = {
    "llamafactory.cli": "llamafactory",
    "llamafactory": "llamafactory",
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "deepspeed": "deepspeed",
    "deepspeed.launcher.runner": "deepspeed",
    "accelerate.commands.launch": "accelerate",
}
_LAUNCHERS: dict[str, Launcher] = {
    "deepspeed": "deepspeed",
    "ds": "deepspeed",
    "torchrun": "torchrun",
    "torchrun.exe": "torchrun",
    "accelerate-launch": "accelerate",
}
_BEFORE = {"nohup": 1, "time": 1, "nice": 1, "stdbuf": 1, "env": 1, "uv": 2, "poetry": 2, "pdm": 2}
"""Programs that start another one, and how many words of theirs come first: `uv run`."""
_SWITCHES: dict[Launcher, frozenset[str]] = {  # flags of a launcher that take no value: what follows may be the script
    "deepspeed": frozenset(
        """--force_multi --save_pid --enable_each_rank_log --elastic_training --no_local_rank --no_python --module
        --no_ssh --no_ssh_check --bind_cores_to_rank -m""".split()
    ),
    "torchrun": frozenset("--standalone -m --module --no-python --run-path --no_python --run_path".split()),
    "accelerate": frozenset(
        """--cpu --multi_gpu --tpu --ipex --use_deepspeed --use_fsdp --use_megatron_lm --use_xpu -m --module
        --no_python --quiet -q --debug --same_network --enable_cpu_affinity --use_parallelism_config""".split()
    ),
    "python": frozenset("-u -B -E -I -O -OO -s -S -v -q -P -x -b -bb -d -i".split()),
}
_TRAIN = ("train", "sft", "pt")
_TRL = ("sft", "dpo", "grpo", "kto", "reward", "rloo")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_PYTHON = re.compile(r"python[\d.]*(\.exe)?$|pypy\d*$")
_TRAINING_ENTRY = re.compile(r"(^|/)(src/)?(train|train_bash|llamafactory/(cli|launcher))\.py$")
CONFIG_ENDS = (".yaml", ".yml", ".json")
CONFIG = "config"  # the flag by which TRL and many scripts take a file of arguments


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    name: str  # without dashes, with underscores
    value: str | None  # None: a switch
    at: int  # of its first word
    words: int  # 1 or 2
    bare: bool = False  # `name=value`, as LLaMA-Factory takes them after its YAML


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    words: tuple[str, ...]
    launcher: Launcher
    script: str | None  # the Python file, where there is one
    script_at: int  # where the trainer's own arguments begin: after the script or the verb
    settings: str | None  # a file that may hold the trainer's arguments, as the command names it
    settings_at: int | None  # its place; None: there is none, or it is the value of `--config`
    starter: Launcher  # who starts the processes: accelerate may start LLaMA-Factory
    own: tuple[Flag, ...]  # the launcher's
    flags: tuple[Flag, ...]  # the trainer's

    def flag(self, *names: str) -> Flag | None:
        """The last one of these names among the trainer's: it is the one that counts."""
        return next((each for each in reversed(self.flags) if each.name in names), None)

    def launcher_flag(self, *names: str) -> Flag | None:
        return next((each for each in reversed(self.own) if each.name in names), None)

    def launcher_value(self, *names: str) -> str | None:
        flag = self.launcher_flag(*names)
        return None if flag is None else flag.value

    @property
    def variables(self) -> dict[str, str]:
        """What `env A=B …` in front of the program sets."""
        pairs = (word.partition("=") for word in self.words[: _program(self.words)] if _ASSIGNMENT.match(word))
        return {name: value for name, _, value in pairs}

    @property
    def line(self) -> str:
        return " ".join(self.words)

    def with_flag(self, name: str, value: str) -> Command:
        """The same with a setting: in its place where it is there, at the end where it is not."""
        there = self.flag(name)
        if there is None:
            return recognise((*self.words, f"--{name}", value))
        dashes = name if there.bare else self.words[there.at].partition("=")[0]
        new = [self.words[there.at], value] if there.words == 2 else [f"{dashes}={value}"]
        return recognise((*self.words[: there.at], *new, *self.words[there.at + there.words :]))

    def without_flag(self, name: str) -> Command:
        there = self.flag(name)
        if there is None:
            return self
        return recognise((*self.words[: there.at], *self.words[there.at + there.words :]))

    def with_word(self, at: int, word: str) -> Command:
        return recognise((*self.words[:at], word, *self.words[at + 1 :]))

    def with_settings(self, name: str) -> Command:
        return self.with_flag(CONFIG, name) if self.settings_at is None else self.with_word(self.settings_at, name)

    def with_launcher_flag(self, flag: Flag, value: str) -> Command:
        if flag.words == 2:
            return self.with_word(flag.at + 1, value)
        return self.with_word(flag.at, f"{self.words[flag.at].partition('=')[0]}={value}")


def recognise(words: tuple[str, ...]) -> Command:
    """What the command starts; an unknown program is one that is only watched."""
    if not words:
        raise ConfigError(Message("external.no-command"))
    if _ASSIGNMENT.match(words[0]):
        raise ConfigError(Message("external.assignment", word=words[0]))
    at = _program(words)
    name = PurePath(words[at]).name
    if name in ("llamafactory-cli", "lmf"):
        return _llamafactory(words, at + 1)
    if name == "trl" and words[at + 1 : at + 2] and words[at + 1] in _TRL:
        return _take_apart(words, "trl", None, at + 2, (at + 2, at + 2))
    if name in _LAUNCHERS:
        return _parse_launcher(words, at + 1, _LAUNCHERS[name])
    if name == "accelerate" and words[at + 1 : at + 2] == ("launch",):
        return _parse_launcher(words, at + 2, "accelerate")
    if _PYTHON.search(name):
        return _python(words, at + 1)
    if name.endswith(".py"):
        return _of_script(words, at, "python", at)
    return _take_apart(words, "other", None, len(words), (len(words), len(words)))


def _program(words: tuple[str, ...]) -> int:
    """Where the program stands, behind those that only start it."""
    at = 0
    while at < len(words) - 1 and PurePath(words[at]).name in _BEFORE:
        name = PurePath(words[at]).name
        if name in ("uv", "poetry", "pdm") and words[at + 1] != "run":
            break
        after = at + _BEFORE[name]
        while after < len(words) - 1 and (words[after].startswith("-") or _ASSIGNMENT.match(words[after])):
            after += 2 if words[after] in ("-n", "-u", "--with", "--extra") and name != "uv" else 1
        at = min(after, len(words) - 1)
    return at


def _python(words: tuple[str, ...], at: int) -> Command:
    began = at
    while at < len(words) and words[at].startswith("-"):
        if words[at] == "-m" and at + 1 < len(words):
            launcher = _MODULES.get(words[at + 1])
            if launcher == "llamafactory":
                return _llamafactory(words, at + 2)
            if launcher is not None:
                return _parse_launcher(words, at + 2, launcher)
            return _take_apart(words, "python", None, at + 2, (began, at))
        if words[at] == "-c":
            return _take_apart(words, "python", None, len(words), (began, at))
        at += 1 if words[at] in _SWITCHES["python"] or "=" in words[at] else 2
    if at >= len(words):
        return _take_apart(words, "other", None, at, (at, at))
    return _of_script(words, at, "python", began)


def _llamafactory(words: tuple[str, ...], at: int) -> Command:
    if at < len(words) and words[at] in _TRAIN:
        return _take_apart(words, "llamafactory", None, at + 1, (at, at))
    return _take_apart(words, "other", None, len(words), (at, at))


def _parse_launcher(words: tuple[str, ...], at: int, launcher: Launcher) -> Command:
    began = at
    while at < len(words) and words[at].startswith("-"):
        at += 1 if words[at] in _SWITCHES[launcher] or "=" in words[at] else 2
    if at >= len(words):
        return _take_apart(words, launcher, None, len(words), (began, len(words)))
    return _of_script(words, at, launcher, began)


def _of_script(words: tuple[str, ...], at: int, launcher: Launcher, began: int) -> Command:
    """LLaMA-Factory's own entry may be started by any launcher."""
    script, after = words[at], words[at + 1 : at + 2]
    configured = bool(after) and after[0].endswith(CONFIG_ENDS)
    if configured and _TRAINING_ENTRY.search(script) and "train" in PurePath(script).stem:
        own: Launcher = "llamafactory" if PurePath(script).parent.name == "src" else launcher
        return _take_apart(words, own, script, at + 1, (began, at), starter=launcher)
    return _take_apart(words, launcher, script, at + 1, (began, at))


def _take_apart(
    words: tuple[str, ...],
    launcher: Launcher,
    script: str | None,
    at: int,
    own: tuple[int, int],
    *,
    starter: Launcher | None = None,
) -> Command:
    starter = starter or launcher
    is_file = at < len(words) and words[at].endswith(CONFIG_ENDS) and not words[at].startswith("-")
    settings_at = at if is_file else None
    flags = _flags(words, at, len(words), bare=launcher == "llamafactory")
    settings = None if settings_at is None else words[settings_at]
    if settings is None and launcher != "llamafactory":
        # TRL looks for the word `--config` alone: it does not read the file of `--config=x.yaml`.
        named = [flag.value for flag in flags if flag.name == CONFIG and flag.value is not None and flag.words == 2]
        settings = next((value for value in reversed(named) if value.endswith(CONFIG_ENDS)), None)
    return Command(
        words=words,
        launcher=launcher,
        script=script,
        script_at=at,
        settings=settings,
        settings_at=settings_at,
        starter=starter,
        own=_flags(words, own[0], own[1], bare=False, alone=_SWITCHES.get(starter, frozenset())),
        flags=flags,
    )


def _flags(
    words: tuple[str, ...], start: int, end: int, *, bare: bool, alone: frozenset[str] = frozenset()
) -> tuple[Flag, ...]:
    """`--name value`, `--name=value`, `--switch`; with `bare` also `name=value`."""
    found, at = [], start
    while at < end:
        word = words[at]
        name, equals, value = word.partition("=")
        plain = name.lstrip("-").replace("-", "_")
        if word.startswith("-") and not _is_number(word):
            follows = at + 1 < end and (not words[at + 1].startswith("-") or _is_number(words[at + 1]))
            if equals:
                found.append(Flag(name=plain, value=value, at=at, words=1))
            elif follows and word not in alone:
                found.append(Flag(name=plain, value=words[at + 1], at=at, words=2))
                at += 1
            else:
                found.append(Flag(name=plain, value=None, at=at, words=1))
        elif bare and equals and name.isidentifier():
            found.append(Flag(name=name, value=value, at=at, words=1, bare=True))
        at += 1
    return tuple(found)


def _is_number(word: str) -> bool:
    return re.fullmatch(r"-?\d+(\.\d*)?([eE][+-]?\d+)?", word) is not None
