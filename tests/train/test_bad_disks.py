"""Disks that are full or may not be written to, and folders that another run holds: training goes on where it can, what
stands stays, and whoever asked is told."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from forking import Forked, Kill, Server, checkpoints_of, contents, small_plan
from running import edit

import patience
import warm_desk
from tightfit.cli import main
from tightfit.runs.lock import LOCK, FolderLock, InUse
from tightfit.runs.processes import this_host
from tightfit.train.events import EVENTS, Events

pytestmark = pytest.mark.thorough

EATEN = """
import os
from tightfit.runs import disk
room, asked = disk.room, 0
def eaten(path):
    global asked
    asked += 1
    free = room(path)
    eater = {eater!r}
    if asked == 2:
        file = os.open(eater, os.O_CREAT | os.O_WRONLY)
        os.posix_fallocate(file, 0, free - {left})
        os.close(file)
    elif asked == 3:
        os.unlink(eater)
        free = room(path)
    return free
disk.room = eaten
"""
"""Somebody else takes the space after it was found sufficient for the second save, and returns it before the third."""


@pytest.fixture(scope="module")
def server() -> Server:
    return Server()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, server: Server) -> Callable[[int], Forked]:
    """Three steps on a good disk, on so many ranks; the plan lies beside the run."""

    @cache
    def train(world: int) -> Forked:
        ran = server.run(small_plan(tmp_path_factory.mktemp("plan"), world, steps=3), "--no-probe")
        assert ran.codes == [0] * world, ran.stderr
        return ran

    return train


@pytest.fixture
def reference(request: pytest.FixtureRequest, trained: Callable[[int], Forked]) -> Forked:
    return trained(request.param)


@pytest.fixture
def alone(trained: Callable[[int], Forked]) -> Forked:
    return trained(1)


def start(reference: Forked, run: Path, server: Server, *, background: bool = False, **asked: object) -> Forked:
    """The same job in another folder."""
    plan = Path(f"{reference.folder.parent}-{'-'.join(run.parts[-2:])}")
    plan.mkdir(exist_ok=True)
    shutil.copy(reference.folder.parent / "worker.json", plan)
    edit(plan, saving__folder=str(run), saving__async_save=background)
    return server.run(plan, "--no-probe", cache=reference.folder.parent / "cache", **asked)  # type: ignore[arg-type]


def mount(*words: str) -> None:
    try:
        done = subprocess.run(["mount", *words], check=False, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("there is no `mount` here")
    if done.returncode:
        pytest.skip(f"nothing may be mounted here: {done.stderr.strip()}")


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    folder.mkdir()
    mount("-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder))
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Root may write wherever a mode forbids it, but not to a disk that is read-only."""
    if os.geteuid():
        mode = folder.stat().st_mode
        folder.chmod(0o555)
        try:
            yield
        finally:
            folder.chmod(mode)
        return
    mount("--bind", str(folder), str(folder))
    try:
        mount("-o", "remount,ro,bind", str(folder))
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


TWO = pytest.mark.parametrize("reference", [pytest.param(1, marks=pytest.mark.slow), 2], indirect=True)
"""What one rank does too."""
ONE = pytest.mark.parametrize("reference", [1, pytest.param(2, marks=pytest.mark.slow)], indirect=True)
"""What is the first rank's alone."""


# --- full ----------------------------------------------------------------------------------------


@TWO
def test_too_small_a_disk_is_seen_before_the_save(reference: Forked, tmp_path: Path, server: Server) -> None:
    with small_disk(tmp_path / "disk", "32m") as disk:
        ran = start(reference, disk / "run", server)
        assert ran.codes == [0] * len(ran.codes), ran.stderr
        assert ran.losses == reference.losses
        failed = ran.of("checkpoint_failed")
        assert [each["step"] for each in failed] == [1, 2, 3]
        said = re.search(r"it needs (\S+) GB and (\S+) has (\S+) GB left; make room", failed[0]["text"])
        assert said is not None, failed[0]["text"]
        assert (float(said[1]), float(said[3])) == (0.07, 0.03)
        assert ran.of("checkpoint") == []
        assert not (disk / "run/checkpoints").exists()
        assert contents(disk / "run/model") == contents(reference.folder / "model")


def test_the_disk_of_the_checkpoints_is_the_one_that_counts(alone: Forked, tmp_path: Path, server: Server) -> None:
    """They may lie on another than the run's folder."""
    with small_disk(tmp_path / "disk", "32m") as disk:
        run = tmp_path / "run"
        run.mkdir()
        (run / "checkpoints").symlink_to(disk)
        ran = start(alone, run, server)
        assert ran.codes == [0], ran.stderr
        assert "it needs 0.07 GB" in ran.of("checkpoint_failed")[0]["text"]


QUICKLY = {(1, False): (24_576, 122_880), (1, True): (0, 65_536), (2, False): (65_536,), (2, True): (24_576,)}
"""By ranks and whether it saves in the background."""


def filling(world: int) -> list[Any]:
    """Every way in which a disk of so many ranks fills up; each place and each kind of save is met in `make test`."""
    ways = itertools.product((False, True), (0, 24_576, 65_536, 122_880))
    return [
        pytest.param(world, background, left, marks=[] if left in QUICKLY[world, background] else [pytest.mark.slow])
        for background, left in ways
    ]


@pytest.mark.parametrize(("reference", "background", "left"), [*filling(1), *filling(2)], indirect=["reference"])
def test_a_disk_that_fills_up_in_the_middle_of_a_save(
    reference: Forked, tmp_path: Path, server: Server, left: int, background: bool
) -> None:
    with small_disk(tmp_path / "disk", "80m") as disk:
        run = disk / "run"
        meddle = EATEN.format(eater=str(disk / "eater"), left=left)
        ran = start(reference, run, server, background=background, meddle=meddle)
        assert ran.codes == [0] * len(ran.codes), ran.stderr
        assert ran.losses == reference.losses
        (failed,) = ran.of("checkpoint_failed")
        assert failed["step"] == 2
        assert "no room" in failed["text"] or "No space left" in failed["text"], failed["text"]
        assert [each["step"] for each in ran.of("checkpoint")] == [1, 3]
        assert names(run / "checkpoints") == ["step-00000001", "step-00000003"]
        for step, folder in checkpoints_of(run).items():
            assert contents(folder) == contents(checkpoints_of(reference.folder)[step])


def test_events_go_out_when_there_is_room_again(alone: Forked, tmp_path: Path, server: Server) -> None:
    """The disk is full from the second save on, for fifteen steps."""
    plan = alone.folder.parent.with_name("many-steps")
    shutil.copytree(alone.folder.parent, plan)
    shutil.rmtree(plan / "run")
    with small_disk(tmp_path / "disk", "80m") as disk:
        edit(plan, saving__folder=str(disk / "run"), training__max_steps=45, saving__every_steps=15)
        ran = server.run(plan, "--no-probe", meddle=EATEN.format(eater=str(disk / "eater"), left=0))
    assert ran.codes == [0], ran.stderr
    assert [each["step"] for each in ran.of("step")] == list(range(1, 46))
    assert [each["step"] for each in ran.of("checkpoint_failed")] == [30]
    assert [each["step"] for each in ran.of("checkpoint")] == [15, 45]


# --- not to be written to ------------------------------------------------------------------------


@ONE
def test_a_read_only_folder_stops_no_training(reference: Forked, tmp_path: Path, server: Server) -> None:
    """It goes on from what lies there, orphans included, which cannot be removed now."""
    run = tmp_path / "run"
    shutil.copytree(checkpoints_of(reference.folder)[1], run / "checkpoints/step-00000001")
    (run / "checkpoints/.step-00000002.partial").mkdir()
    with read_only(run / "checkpoints"):
        ran = start(reference, run, server)
    assert ran.codes == [0] * len(ran.codes), ran.stderr
    assert ran.of("resumed")[0]["step"] == 1
    assert ran.losses == reference.losses[1:]
    failed = ran.of("checkpoint_failed")
    assert [each["step"] for each in failed] == [2, 3]
    assert all(f"cannot write {run / 'checkpoints/step-0000000'}" in each["text"] for each in failed), failed
    assert names(run / "checkpoints") == [".step-00000002.partial", "step-00000001"]
    assert contents(checkpoints_of(run)[1]) == contents(checkpoints_of(reference.folder)[1])


@TWO
def test_a_run_in_a_read_only_folder_is_refused(reference: Forked, tmp_path: Path, server: Server) -> None:
    run = tmp_path / "run"
    run.mkdir()
    with read_only(run):
        ran = start(reference, run, server)
    assert ran.codes == [2] * len(ran.codes), ran.stderr
    why = "read-only file system" if os.geteuid() == 0 else "permission denied"
    assert ran.stderr[0] == f"tightfit: {run} cannot be written ({why}): name another --output\n"
    assert names(run) == []


def test_a_line_that_was_not_finished_costs_no_other(tmp_path: Path) -> None:
    (tmp_path / EVENTS).write_text('{"event": "step", "st')
    for number in range(2):
        events = Events(tmp_path, speaks=True)
        events.write("warning", text=str(number))
        events.close()
    torn, *lines = (tmp_path / EVENTS).read_text().splitlines()
    assert torn == '{"event": "step", "st'
    assert [json.loads(line)["text"] for line in lines] == ["0", "1"]


# --- held by another run -------------------------------------------------------------------------


@TWO
def test_a_worker_without_a_desk_is_told_who_holds_the_folder(
    reference: Forked, tmp_path: Path, server: Server
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    lock = FolderLock.take(run)
    began = patience.now()
    refused = start(reference, run, server)
    assert refused.codes == [2] * len(refused.codes)
    assert patience.now() - began < 60, "the other ranks are told at once"
    assert f"{run} is in use by the run of process {os.getpid()} on {this_host()} since 2" in refused.stderr[0]
    assert [said.count("\n") for said in refused.stderr] == [1, 0][: len(refused.codes)]
    assert names(run) == [LOCK], "nothing is written into a folder that another holds"
    assert start(reference, run, server, launcher="tightfit").codes == [0] * len(refused.codes), "its desk holds it"
    lock.release()


def test_a_lock_lives_as_long_as_its_worker(alone: Forked, tmp_path: Path, server: Server) -> None:
    run = tmp_path / "run"
    killed = start(alone, run, server, kill=Kill(0, 200))
    assert killed.codes == [-signal.SIGKILL]
    assert LOCK in names(run)
    ran = start(alone, run, server)
    assert ran.codes == [0], ran.stderr
    assert LOCK not in names(run)


def test_two_at_once(alone: Forked, tmp_path: Path, server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    """A real worker trains; neither a second one nor `tightfit train` comes near its folder."""
    plan = alone.folder.parent.with_name("long")
    shutil.copytree(alone.folder.parent, plan)
    run = tmp_path / "run"
    edit(plan, saving__folder=str(run), training__max_steps=100_000, saving__every_steps=None)
    ended: list[Forked] = []
    worker = threading.Thread(target=lambda: ended.append(server.run(plan, "--no-probe")))
    worker.start()
    try:
        wait_for(lambda: (run / "events.jsonl").exists() and '"event": "step"' in (run / "events.jsonl").read_text())
        owner = json.loads((run / LOCK).read_text())
        sentence = f"{run} is in use by the run of process {owner['pid']} on {this_host()} since "
        second = warm_desk.Process(str(plan / "worker.json"), worker=True)
        _, said = second.communicate()
        second.kill()
        assert (second.returncode, said.count("\n")) == (2, 1), said
        assert sentence in said
        assert main(["train", "--model", "tiny_llama", "--seq", "32", "--max-steps", "2", "--output", str(run)]) == 2
        assert sentence in capsys.readouterr().err
        assert names(run) == ["events.jsonl", LOCK]
        os.kill(owner["pid"], signal.SIGTERM)
    finally:
        worker.join(timeout=120)
    assert ended[0].codes == [4], ended[0].stderr
    assert len(ended[0].of("start")) == 1
    assert names(run) == ["checkpoints", "events.jsonl"]


def wait_for(what: Callable[[], bool]) -> None:
    end = patience.now() + 60
    while not what():
        assert patience.now() < end
        time.sleep(0.05)


def test_a_job_that_is_started_again_elsewhere_has_its_own_lock(tmp_path: Path) -> None:
    """SLURM starts a job again on another node when the first is lost, and the lock names that one."""
    (tmp_path / LOCK).write_text(json.dumps({"pid": 1, "host": "elsewhere", "since": "yesterday", "job": "17"}))
    for other in (None, "18"):
        with pytest.raises(InUse, match="process 1 on elsewhere"):
            FolderLock.take(tmp_path, other)
    FolderLock.take(tmp_path, "17").release()


# --- what a killed run leaves --------------------------------------------------------------------


def test_orphans_go_and_nothing_else_does(alone: Forked, tmp_path: Path, server: Server) -> None:
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    place = run / "checkpoints"
    shutil.copytree(checkpoints_of(alone.folder)[1], place / "step-00000001")
    shutil.copytree(place / "step-00000001", elsewhere)
    for name in (".step-00000002.partial", ".step-00000001.old", ".step-00000000.gone"):
        shutil.copytree(elsewhere, place / name)
    (place / ".step-00000009.partial").symlink_to(elsewhere)
    (place / ".step-00000009.old").write_text("a file")
    shutil.copytree(elsewhere, place / ".step-00000008.partial")
    (place / ".step-00000008.partial" / "thesis.tex").write_text("mine")
    for name in ("best", ".mine", "step-00000001.copy", "step-1", ".step-00000002.partial.kept"):
        shutil.copytree(elsewhere, place / name)
    (place / "notes.txt").write_text("mine")
    (run / ".step-00000009.partial").mkdir()
    others = ("best", ".mine", "step-1", ".step-00000008.partial")
    kept = {path: contents(path) for path in (elsewhere, *(place / name for name in others))}
    ran = start(alone, run, server)
    assert ran.codes == [0], ran.stderr
    assert ran.losses == alone.losses[1:]
    assert names(place) == [
        ".mine",
        ".step-00000002.partial.kept",
        ".step-00000008.partial",
        ".step-00000009.old",
        ".step-00000009.partial",
        "best",
        "notes.txt",
        "step-00000001",
        "step-00000001.copy",
        "step-00000002",
        "step-00000003",
        "step-1",
    ]
    assert {path: contents(path) for path in kept} == kept
    assert (run / ".step-00000009.partial").is_dir()
