"""What of the user's environment a run needs: the language, where to keep things, and what the ranks inherit."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from tightfit.messages import LANGUAGES, Choice, Language, Message, speak
from tightfit.types import ConfigError

LANGUAGE = "TIGHTFIT_LANG"
CODE_FOLDER = "TORCHINDUCTOR_CACHE_DIR"  # torch's variable for where its compiler keeps code

_noted: frozenset[str] | None = None
"""The variables that the user had set; None: nobody has looked yet."""


def choose_language(asked: str | None = None) -> None:
    """Speak what `--lang` asks for, else what TIGHTFIT_LANG or the locale says. So do processes that it starts."""
    said = (os.environ.get(name) for name in ("LC_ALL", "LC_MESSAGES", "LANG"))
    speak("zh" if next(filter(None, said), "").startswith("zh") else "en")
    if os.environ.get(LANGUAGE) and asked is None:
        speak(_read_language(os.environ[LANGUAGE], LANGUAGE))
    if asked is not None:
        speak(_read_language(asked, "--lang"))
        os.environ[LANGUAGE] = asked


def _read_language(word: str, name: str) -> Language:
    for language in LANGUAGES:
        if word == language:
            return language
    raise ConfigError(Message("cli.wrong-language", name=name, languages=Choice(LANGUAGES), word=repr(word)))


def cache_folder() -> Path:
    """Where things lie that can be made again; a relative XDG_CACHE_HOME counts for nothing, as its makers want."""
    said = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (said if said.is_absolute() else Path.home() / ".cache") / "tightfit"


def data_folder() -> Path:
    """Where things lie that took time to find out; a relative XDG_DATA_HOME counts for nothing either."""
    said = Path(os.environ.get("XDG_DATA_HOME", ""))
    return (said if said.is_absolute() else Path.home() / ".local/share") / "tightfit"


def faults_are_injected() -> bool:
    """Whether a run of these surroundings fails as a test wants it, and measures what never was."""
    return bool(os.environ.get("TIGHTFIT_FAULTS"))


def inherited(changes: Mapping[str, str | None]) -> dict[str, str]:
    """The user's environment with these variables set, or taken away where the value is None.

    Ranks start in another folder, so folders that Python is to search are made absolute.
    """
    env = dict(os.environ)
    if env.get("PYTHONPATH"):
        env["PYTHONPATH"] = os.pathsep.join(os.path.abspath(place) for place in env["PYTHONPATH"].split(os.pathsep))
    for name, value in changes.items():
        if value is None:
            env.pop(name, None)
        else:
            env[name] = value
    return env


def note_variables() -> None:
    """Take what is set now for the user's. To be called before libraries are loaded, since some set variables of their
    own."""
    global _noted  # noqa: PLW0603
    _noted = _list_variables()


def _list_variables() -> frozenset[str]:
    """Those that somebody wished for. Torch's own choice of a folder is none of them, though a program that has loaded
    torch, such as a notebook, hands it on to those that it starts: where it lies anybody may have made it first."""
    code = Path(os.environ.get(CODE_FOLDER, ""))
    is_torchs = code.parent == Path(tempfile.gettempdir()) and code.name.startswith("torchinductor_")
    return frozenset(os.environ) - ({CODE_FOLDER} if is_torchs else set())


def is_set_by_user(name: str) -> bool:
    return name in (_list_variables() if _noted is None else _noted)


def set_variable(name: str, value: str) -> None:
    """Tell a library that is loaded into this process something by its variable; what the user set stays."""
    if not is_set_by_user(name):
        os.environ[name] = value


def processors() -> set[int]:
    """The CPU cores that this process may use, by their numbers."""
    try:
        return os.sched_getaffinity(0)
    except AttributeError:  # not on macOS
        return set(range(os.cpu_count() or 1))


def cores() -> int:
    """How many these are."""
    return len(processors())


def is_installed(package: str) -> bool:
    """Whether a package could be imported, without importing it."""
    try:
        return find_spec(package) is not None
    except (ImportError, ValueError):
        return False
