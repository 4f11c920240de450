"""The folder of a run: whose it is, what it keeps, and what a failed start leaves."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tightfit.runs.folder import ClaimedFolder, check_folder
from tightfit.runs.lock import LOCK, FolderLock
from tightfit.runs.processes import this_host
from tightfit.runs.records import RunRecord
from tightfit.types import ConfigError

HOLD = (
    "import sys, time\n"
    "from pathlib import Path\n"
    "from tightfit.runs.lock import FolderLock\n"
    "lock = FolderLock.take(Path(sys.argv[1]))\n"
    "print('held', flush=True)\n"
    "time.sleep(600)\n"
)


@contextmanager
def holder(folder: Path) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.thorough
def test_a_second_run_is_told_who_holds_the_folder(tmp_path: Path) -> None:
    with holder(tmp_path) as process:
        for attempt in (lambda: ClaimedFolder.claim(tmp_path, overwrite=True), lambda: check_folder(tmp_path)):
            with pytest.raises(ConfigError) as refused:
                attempt()
            assert f"process {process.pid} on {this_host()} since 2" in str(refused.value)
            assert "--output" in str(refused.value)


@pytest.mark.thorough
def test_the_lock_of_a_dead_run_is_taken_over(tmp_path: Path) -> None:
    with holder(tmp_path):
        pass
    assert (tmp_path / LOCK).exists()
    claimed = ClaimedFolder.claim(tmp_path, overwrite=False)
    assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()
    claimed.release()
    assert not (tmp_path / LOCK).exists()


def test_a_lock_of_another_machine_is_believed(tmp_path: Path) -> None:
    (tmp_path / LOCK).write_text(json.dumps({"pid": 1, "host": "elsewhere", "since": "yesterday"}))
    with pytest.raises(ConfigError, match="process 1 on elsewhere since yesterday, another machine"):
        FolderLock.take(tmp_path)


@pytest.mark.thorough
@pytest.mark.parametrize("text", ["", '{"pid": ', '{"pid": "x"}', "\x00\x00"])
def test_a_torn_lock_is_nobodys(tmp_path: Path, text: str) -> None:
    (tmp_path / LOCK).write_text(text)
    lock = FolderLock.take(tmp_path)
    assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()
    lock.release()


def finished(folder: Path) -> None:
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")
    (folder / "events.jsonl").write_text("old")
    RunRecord.begin(("tightfit", "train")).write(folder, state="done", exit_code=0)


def test_a_finished_run_is_not_overwritten_by_accident(tmp_path: Path) -> None:
    finished(tmp_path)
    with pytest.raises(ConfigError, match="--overwrite"):
        check_folder(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["events.jsonl", "model", "run.json"]


def test_a_finished_run_goes_when_the_new_one_is_done(tmp_path: Path) -> None:
    finished(tmp_path)
    claimed = ClaimedFolder.claim(tmp_path, overwrite=True)
    assert sorted(os.listdir(tmp_path)) == ["earlier", LOCK]
    claimed.release(done=True)
    assert os.listdir(tmp_path) == []


def test_a_start_in_vain_gives_the_finished_run_back(tmp_path: Path) -> None:
    finished(tmp_path)
    claimed = ClaimedFolder.claim(tmp_path, overwrite=True)
    claimed.begin({"worker.json": "{}"}, RunRecord.begin(("x",)))
    claimed.discard()
    assert sorted(os.listdir(tmp_path)) == ["events.jsonl", "model", "run.json"]
    assert (tmp_path / "model" / "config.json").exists()


def test_a_new_run_that_fails_leaves_the_finished_one_aside(tmp_path: Path) -> None:
    finished(tmp_path)
    claimed = ClaimedFolder.claim(tmp_path, overwrite=True)
    claimed.begin({"worker.json": "{}"}, RunRecord.begin(("x",)))
    claimed.release()
    assert (tmp_path / "earlier" / "1" / "model" / "config.json").exists()


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_of_something_else_is_left_alone(tmp_path: Path, overwrite: bool) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match=r"'thesis.tex' and is no run's folder"):
        ClaimedFolder.claim(tmp_path, overwrite=overwrite)
    assert os.listdir(tmp_path) == ["thesis.tex"]


def test_a_file_where_the_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("")
    for path in (tmp_path / "a", tmp_path / "a" / "b"):
        with pytest.raises(ConfigError, match="is a file"):
            check_folder(path)


def test_what_an_unfinished_run_left_is_kept_aside(tmp_path: Path) -> None:
    for number in (1, 2):
        claimed = ClaimedFolder.claim(tmp_path, overwrite=False)
        claimed.begin({"worker.json": f"{number}"}, RunRecord.begin(("x",)))
        RunRecord.begin(("tightfit", "train")).write(claimed.folder.path)
        claimed.release()
    claimed = ClaimedFolder.claim(tmp_path, overwrite=False)
    claimed.release()
    assert sorted(os.listdir(tmp_path)) == ["earlier"]
    assert [(tmp_path / "earlier" / str(n) / "plan" / "worker.json").read_text() for n in (1, 2)] == ["1", "2"]


def test_a_discarded_run_leaves_no_folder(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"
    claimed = ClaimedFolder.claim(path, overwrite=False)
    claimed.begin({"worker.json": "{}"}, RunRecord.begin(("x",)))
    claimed.folder.log("rank-0").parent.mkdir()
    claimed.discard()
    assert os.listdir(tmp_path) == []


def test_a_discarded_run_leaves_what_was_there(tmp_path: Path) -> None:
    claimed = ClaimedFolder.claim(tmp_path, overwrite=False)
    RunRecord.begin(("x",)).write(claimed.folder.path)
    claimed.release()
    again = ClaimedFolder.claim(tmp_path, overwrite=False)
    again.begin({"worker.json": "{}"}, RunRecord.begin(("x",)))
    again.discard()
    assert os.listdir(tmp_path) == ["run.json"]


def test_the_record_says_how_it_ended(tmp_path: Path) -> None:
    claimed = ClaimedFolder.claim(tmp_path / "run", overwrite=False)
    record = RunRecord.begin(("tightfit", "train", "--model", "tiny_mamba"))
    record.write(claimed.folder.path)
    told = json.loads(claimed.folder.record.read_text())
    assert (told["state"], told["ended"], told["exit_code"]) == ("running", None, None)
    record.write(claimed.folder.path, state="failed", exit_code=3)
    told = json.loads(claimed.folder.record.read_text())
    assert (told["state"], told["exit_code"], told["pid"]) == ("failed", 3, os.getpid())
    assert told["ended"] >= told["started"]
    claimed.release()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    for path in (tmp_path, tmp_path / "new"):
        with pytest.raises(ConfigError, match="may not be written to"):
            check_folder(path)
    tmp_path.chmod(0o700)


@contextmanager
def full_disk() -> Iterator[None]:
    """A new file takes nothing."""

    def refuse(file: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tightfit.owned.os.write", refuse)
        yield


def test_a_full_disk_is_said_in_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "run"
    claimed = ClaimedFolder.claim(path, overwrite=False)
    with full_disk(), pytest.raises(ConfigError, match=r"no space left on device\): make room, or name another"):
        claimed.begin({"worker.json": "{}"}, RunRecord.begin(("x",)))
    assert sorted(os.listdir(path)) == [LOCK, "plan"]
    claimed.discard()
    assert not path.exists()


def test_a_plan_that_cannot_be_written_names_the_flag_of_a_run(tmp_path: Path) -> None:
    claimed = ClaimedFolder.claim(tmp_path / "run", overwrite=False)
    with pytest.raises(ConfigError, match="name another folder with --output"):
        claimed.begin({"x" * 300: ""}, RunRecord.begin(("x",)))
    claimed.discard()


def test_a_full_disk_at_the_end_is_written_down_in_the_room_that_there_is(tmp_path: Path) -> None:
    claimed = ClaimedFolder.claim(tmp_path / "run", overwrite=False)
    record = RunRecord.begin(("x",))
    claimed.begin({}, record)
    with full_disk():
        record.close(claimed.folder.path, state="failed", exit_code=3)
    told = json.loads(claimed.folder.record.read_text())
    assert (told["state"], told["exit_code"]) == ("failed", 3)
    assert sorted(os.listdir(claimed.folder.path)) == [LOCK, "plan", "run.json"]
    claimed.release()


def test_a_full_disk_at_the_end_hides_nothing(tmp_path: Path) -> None:
    """A record that needs another block stays as it is, and nothing is raised."""
    claimed = ClaimedFolder.claim(tmp_path / "run", overwrite=False)
    record = RunRecord.begin(("x" * 5000,))
    claimed.begin({}, record)
    with full_disk():
        record.close(claimed.folder.path, state="failed", exit_code=3)
    assert json.loads(claimed.folder.record.read_text())["state"] == "running"
    claimed.release()


def test_a_lock_that_cannot_be_signed_is_not_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(file: int, data: bytes, offset: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("tightfit.runs.lock.os.pwrite", refuse)
    with pytest.raises(ConfigError, match="cannot be written"):
        ClaimedFolder.claim(tmp_path, overwrite=False)
    assert os.listdir(tmp_path) == []
