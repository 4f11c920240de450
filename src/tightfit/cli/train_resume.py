"""Where a training begins: at its newest checkpoint, at one that was named, or at the beginning.

Which checkpoint is whole is the worker's to find out, since it has to read them anyway. The desk asks only what costs
nothing: whether there is a checkpoint at a path that was named.
"""

from __future__ import annotations

from pathlib import Path

from tightfit.cli.train_flags import TrainOptions
from tightfit.formats.worker.read import WORKER_FILE, find_worker, parse_worker
from tightfit.messages import Message, text
from tightfit.runs.checkpoints import (
    CHECKPOINTS,
    MANIFEST,
    Torn,
    folder_of,
    newest_first,
    read_manifest,
    states_folder,
    step_of,
    written_first,
)
from tightfit.runs.folder import AUTO, NONE, goes_on
from tightfit.runs.own import Resume
from tightfit.types import ConfigError


def sentence_of(resume: Resume, folder: Path, *, more: bool = False) -> str | None:
    """What a start in this folder does that its user may not expect; None: it begins at the beginning. `more`: it
    asks for more than a finished run there made."""
    if resume.place not in (AUTO, NONE):
        return text("cli.resumes-from", place=resume.place)
    step = goes_on(folder, resume.place, more=more)
    if step is None:
        return None
    if (folder / "model").exists():
        return text("cli.holds-finished-run", folder=folder, step=step)
    held = text("cli.holds-checkpoints-up", folder=folder, step=step)
    return text("cli.run-goes-newest", held=held)


def how_to_go_on(resume: Resume, *, wrote: bool) -> str:
    """After a run from which there is a checkpoint; `wrote`: it is one of its own."""
    if resume.place == AUTO or not wrote:
        return text("cli.same-command-goes")
    return text("cli.same-command-without", place=resume.place)


def resume_of(options: TrainOptions) -> Resume:
    """What was asked, or the sentence for what is not there."""
    anyway, trust_pickle, word = options.resume_anyway, options.trust_pickle, options.resume
    if word.lower() in (AUTO, NONE):
        if trust_pickle:
            raise ConfigError(Message("cli.trust-pickle-deepspeed-checkpoint"))
        if anyway and word.lower() == NONE:
            raise ConfigError(Message("cli.resume-none-goes"))
        return Resume(place=word.lower(), anyway=anyway)
    if not word.strip():
        raise ConfigError(Message("cli.resume-takes-auto"))
    place = _check_place(Path(word).expanduser().absolute())
    return Resume(place=str(place), anyway=anyway, trust_pickle=trust_pickle)


def asks_for_more(folder: Path, worker: str) -> bool:
    """Whether this plan's `worker.json` has more steps or epochs than that of the run that lies in the folder."""
    old = find_worker(folder / "plan").get("training")
    if not isinstance(old, dict):
        return False
    new, steps, epochs = parse_worker(worker, WORKER_FILE)["training"], old.get("max_steps"), old.get("epochs")
    if new["max_steps"] is not None:
        newest = written_first(folder)
        made = steps if isinstance(steps, int) else step_of(newest) if newest is not None else None
        return made is not None and new["max_steps"] > made
    if steps is not None:
        return False  # how many steps an epoch has, nobody has counted yet
    return bool((new["epochs"] or 1) > (epochs if isinstance(epochs, int | float) else 1))


def _check_place(path: Path) -> Path:
    """The checkpoint, or the run that has one."""
    if not path.exists():
        raise ConfigError(Message("cli.nothing-to-resume-at", path=path))
    if path.name == CHECKPOINTS and step_of(path) is None:
        path = path.parent
    if (path / MANIFEST).is_file() and step_of(path) is None:
        raise ConfigError(Message("cli.checkpoint-under-another", path=path, path2=_own_name(path)))
    if (path / MANIFEST).is_file() or written_first(path) is not None:
        return path
    if (states := states_folder(path)) is not None:
        return states
    if newest_first(path):
        raise ConfigError(Message("cli.checkpoint-finished-tightfit", path=path))
    if step_of(path) is not None:
        raise ConfigError(Message("cli.so-never-finished", path=path, manifest=MANIFEST))
    raise ConfigError(Message("cli.checkpoint-run-checkpoints", path=path))


def _own_name(path: Path) -> str:
    try:
        return folder_of(path, read_manifest(path).step).name
    except Torn:
        return text("cli.step-number-step")
