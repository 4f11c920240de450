"""The lease of a run's folder: across machines, on disks without the kernel's locks, and against two takers at once."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import pytest

import warm_desk
from tightfit.runs import lock as locks
from tightfit.runs.lock import LOCK, FolderLock, InUse, Owner, check_unlocked

GONE = 2**22 + 7
"""No process has this number."""
HOLD = (
    "import errno, fcntl, sys, time\n"
    "from pathlib import Path\n"
    "from tightfit.runs import lock\n"
    "def none(*_): raise OSError(int(sys.argv[3]), 'no locks')\n"
    "if int(sys.argv[3]): fcntl.flock = none\n"
    "lock.BEAT_S = 0.05\n"
    "lock.this_host = lambda: sys.argv[2]\n"
    "if sys.argv[2] != 'here': lock.boot_id = lambda: 'another boot'; lock._space = lambda: 'another space'\n"
    "held = lock.FolderLock.take(Path(sys.argv[1]))\n"
    "print('held', flush=True)\n"
    "time.sleep(600)\n"
)
"""A run: its folder, its machine, and what the kernel answers to a question for its lock."""


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "this_host", lambda: "here")
    monkeypatch.setattr(locks, "BEAT_S", 0.05)
    monkeypatch.setattr(locks, "EXPIRES_S", 0.3)
    monkeypatch.setattr(locks, "TAKE_OVER_S", 0.2)
    monkeypatch.setattr(locks, "_LOOK_S", 0.05)


@contextmanager
def holder(folder: Path, host: str, no_flock: int = 0) -> Iterator[warm_desk.Process]:
    process = warm_desk.Process(str(folder), host, str(no_flock), code=HOLD)
    try:
        assert process.first_line() == "held"
        yield process
    finally:
        process.kill()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the other run lives: however busy this machine is, its next beat comes in time."""
    monkeypatch.setattr(locks, "EXPIRES_S", 120.0)
    monkeypatch.setattr(locks, "TAKE_OVER_S", 120.0)


def without_flock(monkeypatch: pytest.MonkeyPatch, number: int = errno.ENOSYS) -> None:
    def flock(file: int, what: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", flock)


def signed(folder: Path, **said: object) -> Owner:
    """A lease that a run on another machine left when it was killed, or one of this machine."""
    owner = replace(Owner.ours(None), **{"pid": GONE, "host": "elsewhere", "boot": "another boot", **said})
    (folder / LOCK).write_bytes(owner.text())
    return owner


@pytest.mark.thorough
def test_the_run_of_a_pod_that_is_gone_is_taken_over_when_its_lease_expires(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After kill −9, under another hostname."""
    monkeypatch.setattr(locks, "EXPIRES_S", 1.0)
    with holder(tmp_path, "elsewhere"):
        pass
    said: list[str] = []
    check_unlocked(tmp_path, here=True)
    with pytest.raises(InUse, match=r"on elsewhere since .* another machine"):
        check_unlocked(tmp_path)
    began = time.monotonic()
    FolderLock.take(tmp_path, say=said.append).release()
    assert time.monotonic() - began >= 1.0
    assert "elsewhere" in said[0]
    assert "watching for 1 s whether it still lives" in said[0]
    assert os.listdir(tmp_path) == []


@pytest.mark.thorough
@pytest.mark.usefixtures("patient")
def test_a_run_that_lives_on_another_machine_is_never_taken_over(tmp_path: Path) -> None:
    """Where the kernel's lock does not reach: this process finds it free."""
    with holder(tmp_path, "elsewhere", errno.ENOLCK) as process:
        before = (tmp_path / LOCK).stat().st_ino
        for take_over in (False, True):
            with pytest.raises(InUse, match=rf"process {process.pid} on elsewhere since .*, and it lives"):
                FolderLock.take(tmp_path, take_over=take_over)
        assert (tmp_path / LOCK).stat().st_ino == before
        assert os.listdir(tmp_path) == [LOCK]


@pytest.mark.thorough
@pytest.mark.parametrize("skew_s", [-86_400, 86_400])
@pytest.mark.usefixtures("patient")
def test_clocks_do_not_matter(tmp_path: Path, skew_s: int) -> None:
    """The other machine's disk, and its clock, are a day off."""
    with holder(tmp_path, "elsewhere", errno.ENOSYS):
        stop = threading.Event()

        def shift() -> None:
            while not stop.wait(0.01):
                os.utime(tmp_path / LOCK, (time.time() + skew_s,) * 2)

        shifting = threading.Thread(target=shift)
        shifting.start()
        try:
            with pytest.raises(InUse, match="and it lives"):
                FolderLock.take(tmp_path)
        finally:
            stop.set()
            shifting.join()


@pytest.mark.usefixtures("patient")
def test_ranks_that_still_write_are_signs_of_life(tmp_path: Path) -> None:
    """Of a run whose desk is stopped."""
    signed(tmp_path)
    (tmp_path / "heartbeats").mkdir()
    stop = threading.Event()

    def beat() -> None:
        count = 0
        while not stop.wait(0.02):
            count += 1
            (tmp_path / "heartbeats" / "rank-0").write_text(f"{count} forward 4 1")

    beating = threading.Thread(target=beat)
    beating.start()
    try:
        with pytest.raises(InUse, match="and it lives"):
            FolderLock.take(tmp_path)
    finally:
        stop.set()
        beating.join()


def test_a_run_of_this_machine_that_was_killed_is_followed_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "EXPIRES_S", 600.0)
    for number in (0, errno.ENOSYS):
        with holder(tmp_path, "here", number):
            pass
        with monkeypatch.context() as patch:
            if number:
                without_flock(patch, number)
            lock = FolderLock.take(tmp_path)
            assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()
            lock.release()


@pytest.mark.thorough
def test_the_same_name_after_another_boot_may_be_another_machine(tmp_path: Path) -> None:
    """Pods of a set keep their names wherever they run."""
    signed(tmp_path, host="here")
    said: list[str] = []
    FolderLock.take(tmp_path, say=said.append).release()
    assert "watching" in said[0]


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_a_disk_without_flock_has_the_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    said: list[str] = []
    with holder(tmp_path, "here", number) as process:
        without_flock(monkeypatch, number)
        with pytest.raises(InUse, match=f"process {process.pid} on here"):
            FolderLock.take(tmp_path)
        with pytest.raises(InUse, match=f"process {process.pid} on here"):
            check_unlocked(tmp_path)
    lock = FolderLock.take(tmp_path, say=said.append)
    assert said == [f"{tmp_path} is on a file system without flock: a heartbeat in its lock keeps other runs out"]
    with pytest.raises(InUse, match=f"process {os.getpid()} on here"):
        FolderLock.take(tmp_path)
    lock.release()
    assert os.listdir(tmp_path) == []


@pytest.mark.thorough
def test_one_of_many_takers_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All see at the same moment that the lease has expired, and no kernel keeps them apart."""
    without_flock(monkeypatch)
    for round_ in range(5):
        folder = tmp_path / str(round_)
        folder.mkdir()
        signed(folder)
        won: list[FolderLock] = []
        gate = threading.Barrier(8)

        def take(folder: Path = folder, won: list[FolderLock] = won, gate: threading.Barrier = gate) -> None:
            gate.wait()
            try:
                won.append(FolderLock.take(folder, say=lambda _: None))
            except InUse:
                return

        takers = [threading.Thread(target=take) for _ in range(8)]
        for taker in takers:
            taker.start()
        for taker in takers:
            taker.join()
        assert len(won) == 1
        assert os.listdir(folder) == [LOCK]
        won[0].release()


def test_a_holder_that_was_only_asleep_leaves(tmp_path: Path) -> None:
    with holder(tmp_path, "elsewhere", errno.ENOSYS) as process:
        other = replace(Owner.ours(None), host="third")
        fresh = tmp_path / "fresh"
        fresh.write_bytes(other.text())
        fresh.replace(tmp_path / LOCK)
        _, err = process.communicate(60)
        assert process.returncode == locks.LOST
        assert f"on third since {other.since} has taken {tmp_path} over" in err
    assert json.loads((tmp_path / LOCK).read_bytes()) == asdict(other)


@pytest.mark.thorough
def test_an_earlier_versions_lock_needs_a_word(tmp_path: Path) -> None:
    """It has no heartbeat, so standing still says nothing."""
    (tmp_path / LOCK).write_text(json.dumps({"pid": 1, "host": "elsewhere", "since": "yesterday"}))
    with pytest.raises(InUse, match=r"process 1 on elsewhere since yesterday, another machine.*say --take-over"):
        FolderLock.take(tmp_path)
    FolderLock.take(tmp_path, take_over=True).release()


@pytest.mark.thorough
def test_whoever_was_killed_while_taking_over_blocks_nobody_here(tmp_path: Path) -> None:
    owner = signed(tmp_path)
    turn = tmp_path / f".lock.{owner.id}.next"
    turn.write_bytes(replace(Owner.ours(None), pid=GONE, mark="another").text())
    FolderLock.take(tmp_path).release()
    assert os.listdir(tmp_path) == []


def test_a_disk_without_second_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(locks.os, "link", link)
    lock = FolderLock.take(tmp_path)
    with pytest.raises(InUse, match=f"process {os.getpid()} on here"):
        FolderLock.take(tmp_path)
    lock.release()
    assert os.listdir(tmp_path) == []
