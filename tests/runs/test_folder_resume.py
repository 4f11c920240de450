"""A folder whose run goes on from a checkpoint: what stays in place, what makes way, and that nothing is lost."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from stored import left_behind, store

from tightfit.runs.events import Follower, Step
from tightfit.runs.folder import AUTO, NONE, ClaimedFolder, check_folder, goes_on
from tightfit.runs.lock import LOCK
from tightfit.runs.records import RunRecord
from tightfit.types import ConfigError

OLD = '{"event": "step", "step": 1}\n{"event": "step", "step": 2}\n'


def unfinished(run: Path, *steps: int) -> Path:
    """What a run leaves that was killed."""
    run.mkdir(exist_ok=True)
    for step in steps:
        store(run, step)
    for name in ("plan/worker.json", "logs/rank-0.log", "errors/rank-0.json"):
        (run / name).parent.mkdir()
        (run / name).write_text(name)
    RunRecord.begin(("tightfit", "train")).write(run)
    (run / "loss.png").write_text("picture")
    (run / "events.jsonl").write_text(OLD)
    return run


def everything(run: Path) -> dict[str, bytes]:
    return {str(path.relative_to(run)): path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file()}


def begun(run: Path, *, resume: str, overwrite: bool = False, more: bool = False) -> ClaimedFolder:
    claimed = ClaimedFolder.claim(run, overwrite=overwrite, resume=resume, more=more)
    claimed.begin({"worker.json": "{}"}, RunRecord.begin(("x",)))
    with claimed.folder.events.open("a") as events:
        events.write('{"event": "start"}\n')
    claimed.folder.log("rank-0").parent.mkdir()
    claimed.folder.log("rank-0").write_text("new")
    return claimed


def steps_in(run: Path) -> list[str]:
    place = run / "checkpoints"
    return sorted(os.listdir(place)) if place.exists() else []


def test_what_is_gone_on_with_stays_and_the_rest_makes_way(tmp_path: Path) -> None:
    run = unfinished(tmp_path / "run", 100, 200)
    claimed = ClaimedFolder.claim(run, overwrite=False, resume=AUTO)
    assert sorted(os.listdir(run)) == ["checkpoints", "earlier", "events.jsonl", LOCK]
    assert steps_in(run) == ["step-00000100", "step-00000200"]
    assert (run / "events.jsonl").read_text() == OLD
    assert sorted(os.listdir(run / "earlier/1")) == ["errors", "logs", "loss.png", "plan", "run.json"]
    claimed.release()


def test_begun_anew_everything_makes_way(tmp_path: Path) -> None:
    run = unfinished(tmp_path / "run", 100, 200)
    ClaimedFolder.claim(run, overwrite=False, resume=NONE).release()
    assert os.listdir(run) == ["earlier"]
    assert steps_in(run / "earlier/1") == ["step-00000100", "step-00000200"]


def test_without_checkpoints_it_is_a_new_run(tmp_path: Path) -> None:
    run = unfinished(tmp_path / "run")
    left_behind(run, ".step-00000100.partial")
    before = everything(run)
    claimed = begun(run, resume=AUTO)
    assert (run / "events.jsonl").read_text() == '{"event": "start"}\n'
    assert (run / "earlier/1/events.jsonl").read_text() == OLD
    assert steps_in(run) == [".step-00000100.partial"], "the worker clears it away"
    claimed.discard()
    assert everything(run) == before


@pytest.mark.parametrize("resume", [AUTO, NONE, "run", "newest", "oldest", "elsewhere"])
def test_a_start_in_vain_leaves_everything_as_it_was(tmp_path: Path, resume: str) -> None:
    run = unfinished(tmp_path / "run", 100, 200, 300)
    other = store(tmp_path / "other", 50)
    before = everything(run)
    names = {
        "run": run,
        "newest": run / "checkpoints/step-00000300",
        "oldest": run / "checkpoints/step-00000100",
        "elsewhere": other,
    }
    claimed = begun(run, resume=str(names.get(resume, resume)))
    assert everything(run) != before
    claimed.discard()
    assert everything(run) == before
    assert sorted(os.listdir(run)) == sorted(
        ["checkpoints", "errors", "events.jsonl", "logs", "loss.png", "plan", "run.json"]
    )


def test_an_older_checkpoint_of_the_same_run_sets_the_newer_ones_aside(tmp_path: Path) -> None:
    run = unfinished(tmp_path / "run", 100, 200, 300)
    begun(run, resume=str(run / "checkpoints/step-00000200")).release()
    assert steps_in(run) == ["step-00000100", "step-00000200"]
    assert steps_in(run / "earlier/1") == ["step-00000300"]
    assert goes_on(run, AUTO) == 200


def test_a_checkpoint_of_another_run_goes_on_with_nothing_here(tmp_path: Path) -> None:
    run, other = unfinished(tmp_path / "run", 100), unfinished(tmp_path / "other", 50)
    begun(run, resume=str(other)).release()
    assert steps_in(run) == []
    assert steps_in(run / "earlier/1") == ["step-00000100"]
    assert steps_in(other) == ["step-00000050"]


def test_a_checkpoint_that_was_made_is_never_discarded(tmp_path: Path) -> None:
    run = unfinished(tmp_path / "run", 100)
    for resume, kept in ((AUTO, ["step-00000100", "step-00000150"]), (NONE, ["step-00000150"])):
        claimed = begun(run, resume=resume)
        store(run, 150)
        claimed.discard()
        assert steps_in(run) == kept
        assert not (run / LOCK).exists()
    assert steps_in(run / "earlier/2") == ["step-00000100", "step-00000150"]


def test_a_line_that_was_torn_does_not_spoil_the_next(tmp_path: Path) -> None:
    run = unfinished(tmp_path / "run", 100)
    (run / "events.jsonl").write_text(OLD + '{"event": "step", "st')
    before = everything(run)
    claimed = begun(run, resume=AUTO)
    assert (run / "events.jsonl").read_text().splitlines()[-1] == '{"event": "start"}'
    claimed.discard()
    assert everything(run) == before


def test_a_follower_sees_what_comes_after_the_old_events(tmp_path: Path) -> None:
    run = unfinished(tmp_path / "run", 100)
    claimed = ClaimedFolder.claim(run, overwrite=False, resume=AUTO)
    follower = Follower(claimed.folder.events)
    assert follower.poll() == []
    with claimed.folder.events.open("a") as events:
        events.write('{"event": "step", "step": 101}\n')
    assert [event.step for event in follower.poll() if isinstance(event, Step)] == [101]
    claimed.release()


@pytest.mark.parametrize("resume", [AUTO, NONE])
def test_a_finished_run_is_still_refused(tmp_path: Path, resume: str) -> None:
    run = unfinished(tmp_path / "run", 100)
    (run / "model").mkdir()
    before = everything(run)
    with pytest.raises(ConfigError, match="holds a finished run: name another --output, say --overwrite, or ask for"):
        ClaimedFolder.claim(run, overwrite=False, resume=resume)
    assert everything(run) == before
    assert goes_on(run, resume) is None


def test_a_finished_run_that_is_replaced_is_not_gone_on_with(tmp_path: Path) -> None:
    run = unfinished(tmp_path / "run", 100)
    (run / "model").mkdir()
    claimed = begun(run, resume=AUTO, overwrite=True)
    assert steps_in(run) == []
    claimed.release(done=True)
    assert not (run / "earlier").exists()


def test_a_checkpoint_of_the_finished_run_that_is_replaced_stays_in_place(tmp_path: Path) -> None:
    run = unfinished(tmp_path / "run", 100)
    (run / "model").mkdir()
    claimed = begun(run, resume=str(run / "checkpoints/step-00000100"), overwrite=True)
    assert steps_in(run) == ["step-00000100"]
    assert (run / "earlier/1/model").is_dir()
    claimed.release()


def test_a_folder_of_checkpoints_alone_is_a_runs(tmp_path: Path) -> None:
    store(tmp_path / "run", 100)
    check_folder(tmp_path / "run")
    assert goes_on(tmp_path / "run", AUTO) == 100


def test_a_finished_run_of_which_more_is_asked_goes_on(tmp_path: Path) -> None:
    """The old model stays aside for good: nobody said that it may go."""
    run = unfinished(tmp_path / "run", 100)
    (run / "model").mkdir()
    (run / "model" / "config.json").write_text("{}")
    before = everything(run)
    claimed = ClaimedFolder.claim(run, overwrite=False, resume=AUTO, more=True)
    assert goes_on(run, AUTO) == 100
    assert steps_in(run) == ["step-00000100"]
    assert (run / "events.jsonl").read_text() == OLD
    claimed.discard()
    assert everything(run) == before
    begun(run, resume=AUTO, more=True).release(done=True)
    assert (run / "earlier/1/model/config.json").exists()
    (run / "model").mkdir()
    with pytest.raises(ConfigError, match="holds a finished run"):
        ClaimedFolder.claim(run, overwrite=False, resume=NONE, more=True)


def test_a_finished_run_without_a_checkpoint_cannot_go_on(tmp_path: Path) -> None:
    run = unfinished(tmp_path / "run")
    (run / "model").mkdir()
    with pytest.raises(ConfigError, match="holds a finished run"):
        ClaimedFolder.claim(run, overwrite=False, resume=AUTO, more=True)
