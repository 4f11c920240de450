"""Files that are not ours: beside, inside and behind links of everything that is moved, replaced or removed.

Every test lays the same strangers out, does what it does, and finds them as they were, byte for byte.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).with_name("runs")))

from stored import left_behind, store

from tightfit import owned
from tightfit.cli import main
from tightfit.owned import Listed, NotOurs, Patterns, find_strangers, move_file, open_own, remove_folder, replace_file
from tightfit.runs.checkpoints import remove
from tightfit.runs.external.record import claim
from tightfit.runs.folder import AUTO, NONE, ClaimedFolder, RunFiles, is_run
from tightfit.runs.leftovers import leftovers
from tightfit.runs.lock import LOCK, FolderLock
from tightfit.runs.processes import this_host
from tightfit.runs.records import RunRecord
from tightfit.types import ConfigError

Capsys = pytest.CaptureFixture[str]
TINY = ("--model", "tiny_mamba", "--seq", "64", "--max-steps", "2")
GONE = 2**22 + 7
"""No process has this number."""


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """What links lead to."""
    place = tmp_path / "elsewhere"
    (place / "data").mkdir(parents=True)
    (place / "thesis.tex").write_text("years of work")
    (place / "data" / "model.safetensors").write_text("weights")
    return place


def seen(folder: Path) -> dict[str, bytes]:
    """Every file below, what it holds, and where every link leads."""
    return {
        str(path.relative_to(folder)): os.readlink(path).encode() if path.is_symlink() else path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


def put(stranger: Path, elsewhere: Path) -> None:
    """A file, a folder, or a link to a file, to a folder or to nothing, as it is called."""
    stranger.parent.mkdir(parents=True, exist_ok=True)
    if stranger.name == "notes.txt":
        stranger.write_text("mine")
    elif stranger.name == ".git":
        stranger.mkdir()
        (stranger / "HEAD").write_text("ref: refs/heads/main")
    else:
        stranger.symlink_to(
            {"link": elsewhere / "thesis.tex", "linked": elsewhere / "data", "dangling": elsewhere / "nowhere"}[
                stranger.name
            ]
        )


KINDS = ("notes.txt", ".git", "link", "linked", "dangling")
kinds = pytest.mark.parametrize("kind", KINDS)


def finished(run: Path) -> Path:
    """What a training leaves that has ended well, and one attempt before it."""
    run.mkdir(parents=True, exist_ok=True)
    store(run, 100)
    saved = {"event": "saved", "at": 2.0, "folder": str(run / "model"), "bytes": 2, "files": ["config.json"]}
    first = {"event": "start", "at": 1.0, "model": "x", "engine": "zero2", "world": 1, "launcher": "tightfit"}
    (run / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (first, saved)))
    for name in ("plan/worker.json", "logs/rank-0.log", "attempts/001.json", "attempts/001/rank-0.log", "loss.png"):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text(name)
    (run / "model").mkdir()
    (run / "model" / "config.json").write_text("{}")
    RunRecord.begin(("tightfit", "train")).write(run, state="done", exit_code=0)
    return run


def killed(run: Path) -> Path:
    """What a training leaves that was killed."""
    finished(run)
    (run / "model" / "config.json").unlink()
    (run / "model").rmdir()
    record = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**record, "pid": GONE, "state": "running", "ended": None}))
    return run


def refused(capsys: Capsys, *words: object) -> str:
    assert main([str(word) for word in words]) == 2
    err = capsys.readouterr().err
    assert err.startswith("tightfit: ")
    assert err.count("\n") == 1
    return err


# --- train --------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [(), ("--overwrite",), ("--resume", "none"), ("--dry-run",)])
def test_a_project_is_no_run_whatever_its_folders_are_called(
    tmp_path: Path, capsys: Capsys, words: tuple[str, ...]
) -> None:
    project = tmp_path / "project"
    names = ("model", "checkpoints", "checkpoints/step-00000100", "errors", "plan", "logs", "earlier", "attempts")
    files = (".git/HEAD", "src/main.py", "thesis.tex", "data.txt", "events.jsonl", "run.json")
    for path in (*files, *(f"{name}/mine.bin" for name in names)):
        (project / path).parent.mkdir(parents=True, exist_ok=True)
        (project / path).write_text('{"event": "click", "state": "ours"}\n')
    before = seen(project)
    said = refused(capsys, "train", *TINY, "--output", project, *words)
    assert "holds '.git' and is no run's folder" in said
    assert seen(project) == before


@kinds
@pytest.mark.parametrize("inside", ["", "model", "checkpoints", "checkpoints/step-00000100", "logs", "attempts/001"])
def test_a_finished_run_with_somebodys_file_is_not_replaced(
    tmp_path: Path, elsewhere: Path, inside: str, kind: str
) -> None:
    run = finished(tmp_path / "run")
    put(run / inside / kind, elsewhere)
    before = seen(tmp_path)
    with pytest.raises(NotOurs, match=rf"{kind} was not written by tightfit: move it away"):
        ClaimedFolder.claim(run, overwrite=True, resume=NONE)
    assert seen(tmp_path) == before


@kinds
@pytest.mark.parametrize("inside", ["model", "logs", "plan", "attempts"])
@pytest.mark.parametrize("resume", [AUTO, NONE])
def test_what_has_to_make_way_holds_nothing_of_somebodys(
    tmp_path: Path, elsewhere: Path, inside: str, kind: str, resume: str
) -> None:
    run = killed(tmp_path / "run")
    put(run / inside / kind, elsewhere)
    before = seen(tmp_path)
    with pytest.raises((NotOurs, ConfigError), match=kind if inside != "model" else "finished run"):
        ClaimedFolder.claim(run, overwrite=False, resume=resume)
    assert seen(tmp_path) == before


@kinds
@pytest.mark.parametrize("inside", ["", "checkpoints", "checkpoints/step-00000100"])
def test_a_run_goes_on_beside_somebodys_files(tmp_path: Path, elsewhere: Path, inside: str, kind: str) -> None:
    """A log that a shell keeps in the folder must not cost the restart in the night."""
    run = killed(tmp_path / "run")
    put(run / inside / kind, elsewhere)
    before = seen(run)
    claimed = ClaimedFolder.claim(run, overwrite=False, resume=AUTO)
    claimed.begin({"worker.json": "{}"}, RunRecord.begin(("x",)))
    assert {name: data for name, data in seen(run).items() if kind in name} == {
        name: data for name, data in before.items() if kind in name
    }
    claimed.discard()
    assert seen(run) == before


@kinds
def test_what_comes_meanwhile_stays(tmp_path: Path, elsewhere: Path, kind: str) -> None:
    """While a run was prepared in vain, and in what a finished one has replaced."""
    run = tmp_path / "run"
    claimed = ClaimedFolder.claim(run, overwrite=False)
    claimed.begin({"worker.json": "{}"}, RunRecord.begin(("x",)))
    mine = [run / place / kind for place in ("", "plan", "logs", "model")]
    for each in mine:
        put(each, elsewhere)
    before = seen(tmp_path)
    claimed.discard()
    assert seen(tmp_path) == {name: data for name, data in before.items() if kind in name or "elsewhere" in name}

    run = finished(tmp_path / "other")
    claimed = ClaimedFolder.claim(run, overwrite=True)
    for place in ("", "model", "checkpoints/step-00000100"):
        put(run / "earlier" / "1" / place / kind, elsewhere)
    before = seen(run)
    claimed.release(done=True)
    assert seen(run) == {name: data for name, data in before.items() if kind in name}


def test_what_came_in_the_place_of_what_made_way_is_not_replaced(tmp_path: Path) -> None:
    run = finished(tmp_path / "run")
    claimed = ClaimedFolder.claim(run, overwrite=True)
    claimed.begin({"worker.json": "{}"}, RunRecord.begin(("x",)))
    (run / "plan" / "thesis.tex").write_text("mine")
    claimed.discard()
    assert (run / "plan" / "thesis.tex").read_text() == "mine"
    assert (run / "earlier" / "1" / "plan" / "worker.json").read_text() == "plan/worker.json"
    assert (run / "model" / "config.json").exists()


@pytest.mark.parametrize("name", ["run.json", "events.jsonl", "logs", "plan", "attempts", LOCK, "earlier"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_nothing_is_written_behind_a_link(tmp_path: Path, elsewhere: Path, name: str, overwrite: bool) -> None:
    run = killed(tmp_path / "run")
    place = elsewhere / name
    if (run / name).exists():
        (run / name).rename(place)
    elif name == LOCK:
        place.write_text("")
    else:
        place.mkdir()
    (run / name).symlink_to(place)
    before = seen(tmp_path)
    with pytest.raises(NotOurs, match=rf"{name} was not written by tightfit"):
        ClaimedFolder.claim(run, overwrite=overwrite, resume=AUTO)
    assert seen(tmp_path) == before


@pytest.mark.parametrize("text", ["my notes", "{}", "[1]", "\x00\x01", '{"lock": 1}'])
def test_a_file_that_is_called_lock_is_no_lock(tmp_path: Path, text: str) -> None:
    (tmp_path / LOCK).write_text(text)
    with pytest.raises(NotOurs, match="lock was not written by tightfit"):
        FolderLock.take(tmp_path)
    assert (tmp_path / LOCK).read_text() == text


def test_checkpoints_may_lie_behind_a_link_of_the_users(tmp_path: Path) -> None:
    run = killed(tmp_path / "run")
    (run / "checkpoints").rename(tmp_path / "large-disk")
    (run / "checkpoints").symlink_to(tmp_path / "large-disk")
    before = seen(tmp_path / "large-disk")
    ClaimedFolder.claim(run, overwrite=False, resume=AUTO).release()
    assert (run / "checkpoints").is_symlink()
    assert seen(tmp_path / "large-disk") == before
    with pytest.raises(NotOurs, match="checkpoints was not written by tightfit"):
        ClaimedFolder.claim(run, overwrite=False, resume=NONE)


# --- an old run is still ours -------------------------------------------------------------------


def test_runs_of_earlier_versions_are_known(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    old = {
        "command": ["tightfit", "train"], "pid": GONE, "host": "here", "started": "2026-02-03T04:05:06+00:00",
        "ended": None, "state": "done", "exit_code": 0,
    }  # fmt: skip
    (run / "run.json").write_text(json.dumps(old))
    assert is_run(run)
    (run / "model").mkdir()
    for name in ("config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json", "tokenizer.json"):
        (run / "model" / name).write_text("{}")
    assert find_strangers(run, RunFiles(run)) == []
    (run / "model" / "README.md").write_text("my model card")
    assert find_strangers(run, RunFiles(run)) == [run / "model" / "README.md"]
    (run / "run.json").write_text(json.dumps({**old, "mine": 1}))
    assert not is_run(run)


# --- checkpoints --------------------------------------------------------------------------------


@kinds
def test_a_checkpoint_with_somebodys_file_is_neither_rotated_nor_pruned(
    tmp_path: Path, elsewhere: Path, capsys: Capsys, kind: str
) -> None:
    run = killed(tmp_path / "run")
    for step in (200, 300):
        store(run, step)
    left_behind(run, ".step-00000400.partial")
    for place in ("step-00000100", ".step-00000400.partial"):
        stranger = run / "checkpoints" / place / kind
        put(stranger, elsewhere)
        before = seen(tmp_path)
        said = refused(capsys, "checkpoints", run, "--prune")
        assert f"{stranger} was not written by tightfit" in said
        with pytest.raises(NotOurs):
            remove(stranger.parent)
        assert seen(tmp_path) == before
        stranger.unlink() if kind != ".git" else remove_folder(stranger, Listed(["HEAD"]))


def test_a_folder_that_is_called_like_a_checkpoint_is_not_pruned(tmp_path: Path, capsys: Capsys) -> None:
    run = killed(tmp_path / "run")
    mine = run / "checkpoints" / "step-00000050"
    mine.mkdir()
    (mine / "weights.bin").write_text("mine")
    before = seen(tmp_path)
    assert "step-00000050 is no checkpoint that tightfit wrote" in refused(capsys, "checkpoints", run, "--prune")
    assert seen(tmp_path) == before


# --- clean --------------------------------------------------------------------------------------


@kinds
def test_what_is_half_written_stays_where_it_holds_somebodys_file(tmp_path: Path, elsewhere: Path, kind: str) -> None:
    run = killed(tmp_path / "run")
    for place in ("checkpoints/.step-00000400.partial", ".model.partial", "plan/.tightfit-staging"):
        put(run / place / kind, elsewhere)
    before = seen(tmp_path)
    found = leftovers([run], tmp_path / "cache")
    assert [each for each in found.leftovers if each.kind == "staging"] == []
    assert sum(kind in str(sentence) for sentence in found.unsure) == 3
    main(["clean", "--yes", str(run)])
    assert seen(tmp_path) == before


@kinds
def test_a_cache_that_is_a_project_stays(tmp_path: Path, elsewhere: Path, capsys: Capsys, kind: str) -> None:
    """`XDG_CACHE_HOME` may be the folder of somebody's projects, one of which has our name."""
    project = tmp_path / "cache" / "tightfit"
    for name in ("data", "weights"):
        put(project / name / kind, elsewhere)
        (project / name / f"{'a' * 32}").mkdir()
    (project / "calibration.json").write_text('{"camera": 1}')
    before = seen(tmp_path)
    assert main(["clean", "--yes", "--caches", str(tmp_path)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert out.count("was not written by tightfit") == 2
    assert seen(tmp_path) == before


# --- run ----------------------------------------------------------------------------------------


@kinds
def test_a_command_is_not_taken_over_where_its_records_hold_somebodys_file(
    tmp_path: Path, elsewhere: Path, kind: str
) -> None:
    run = tmp_path / "run"
    (run / "attempts" / "001").mkdir(parents=True)
    (run / "attempts" / "001" / "command.log").write_text("log")
    record = {
        "schema": 1, "kind": "foreign", "command": ["x"], "pid": GONE, "host": this_host(), "started": None,
        "ended": None, "state": "running", "exit_code": None, "mark": None, "last_command": ["x"],
    }  # fmt: skip
    (run / "run.json").write_text(json.dumps(record))
    put(run / "attempts" / kind, elsewhere)
    before = seen(tmp_path)
    with pytest.raises(NotOurs, match=f"{kind} was not written by tightfit"):
        claim(run, ["x"])
    assert seen(tmp_path) == before


# --- the ways themselves ------------------------------------------------------------------------


def test_a_file_that_appears_during_the_removal_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "folder"
    (folder / "in").mkdir(parents=True)
    for name in ("a", "in/b"):
        (folder / name).write_text("ours")
    really = os.unlink

    def unlink(name: str, *, dir_fd: int | None = None) -> None:
        (folder / "in" / "late").write_text("mine")
        really(name, dir_fd=dir_fd)

    monkeypatch.setattr(owned.os, "unlink", unlink)
    assert remove_folder(folder, Listed(["a", "in/b"])) == [folder / "in" / "late"]
    assert seen(folder) == {"in/late": b"mine"}


def test_a_folder_that_becomes_a_link_is_not_entered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, other = tmp_path / "folder", tmp_path / "other"
    for place in (folder / "in", other):
        place.mkdir(parents=True)
        (place / "b").write_text("ours by its name")
    really: Callable[..., os.stat_result] = os.stat

    def stat(name: str, **options: object) -> os.stat_result:
        found = really(name, **options)
        if name == "in":
            (folder / "in").rename(tmp_path / "away")
            (folder / "in").symlink_to(other)
        return found

    monkeypatch.setattr(owned.os, "stat", stat)
    with pytest.raises(OSError, match="in"):
        remove_folder(folder, Listed(["in/b"]))
    assert (other / "b").exists()
    assert (tmp_path / "away" / "b").exists()


def test_what_is_mounted_there_is_a_stranger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the kernel lists it, with a blank in its name: nothing else tells a folder bound from the same disk."""
    folder = tmp_path / "the folder"
    (folder / "in").mkdir(parents=True)
    (folder / "in" / "b").write_text("ours by its name")
    table = tmp_path / "mountinfo"
    place = str(folder / "in").replace(" ", "\\040")
    table.write_text(f"36 35 98:0 /there {place} rw,noatime master:1 - ext4 /dev/root rw\n")
    monkeypatch.setattr(owned, "MOUNTS", table)
    assert find_strangers(folder, Listed(["in/b"])) == [folder / "in"]
    assert remove_folder(folder, Listed(["in/b"])) == [folder / "in"]
    assert (folder / "in" / "b").exists()


def test_a_rename_replaces_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("old", "new"):
        (tmp_path / name).write_text(name)
        (tmp_path / f"{name}-folder").mkdir()
        (tmp_path / f"{name}-folder" / "x").write_text(name)
    before = seen(tmp_path)
    for ending in ("", "-folder"):
        with pytest.raises(OSError, match="exist"):
            move_file(tmp_path / f"old{ending}", tmp_path / f"new{ending}")
    assert seen(tmp_path) == before

    def no_links(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(owned.os, "link", no_links)
    with pytest.raises(FileExistsError):
        move_file(tmp_path / "old", tmp_path / "new")
    move_file(tmp_path / "old", tmp_path / "moved")
    assert (tmp_path / "moved").read_text() == "old"


def test_a_link_is_not_written_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, link = tmp_path / "mine", tmp_path / "log"
    mine.write_text("mine")
    link.symlink_to(mine)
    for mode in ("ab", "wb"):
        with pytest.raises(NotOurs, match="log is a link"):
            open_own(link, mode)
    replace_file(link, b"ours")
    assert (mine.read_text(), link.read_bytes()) == ("mine", b"ours")
    monkeypatch.setattr(owned, "fresh_beside", lambda _: tmp_path / "guessed")
    (tmp_path / "guessed").symlink_to(mine)
    with pytest.raises(FileExistsError):
        replace_file(link, b"again")
    assert mine.read_text() == "mine"
    assert (tmp_path / "guessed").is_symlink()


def test_patterns_are_for_whole_names() -> None:
    names = Patterns(r"a\.json|in/b", "in")
    assert names.has_file("a.json")
    assert not names.has_file("a.json.mine")
    assert not names.has_folder("in/mine")
