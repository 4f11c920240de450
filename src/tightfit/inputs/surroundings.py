"""What of the user's environment a run needs: the language, where to keep things, and what the ranks inherit."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from tightfit.messages import LANGUAGES, Choice, Language, Message, speak
from tightfit.types import ConfigError

LANGUAGE = "TIGHTFIT_LANG"


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


def set_variable(name: str, value: str) -> str:
    """Tell a library that is loaded into this process something by its variable; what the user set stays. What holds
    now."""
    return os.environ.setdefault(name, value)


def cores() -> int:
    """The CPU cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        return os.cpu_count() or 1


def is_installed(package: str) -> bool:
    """Whether a package could be imported, without importing it."""
    try:
        return find_spec(package) is not None
    except (ImportError, ValueError):
        return False
