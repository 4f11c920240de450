"""Torch's lock on what is compiled, left by a process that was killed: found, named, and removed where it is ours."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
from faulty_training import train
from recorded_attempts import recorded

import patience
from tightfit.runs import build_lock
from tightfit.runs.build_lock import build_folder, clear, describe, find_left_locks, remove
from tightfit.runs.cause import find_cause
from tightfit.runs.hang import Hung, Stand, read_stand
from tightfit.runs.heartbeat import DUMP, Beat

BATON = """
import faulthandler, signal, sys, time
from importlib.util import module_from_spec, spec_from_file_location
faulthandler.register(signal.SIGUSR2, all_threads=True)
spec = spec_from_file_location("file_baton", sys.argv[1])
module = module_from_spec(spec)
spec.loader.exec_module(module)
baton = module.FileBaton(sys.argv[2])
if baton.try_acquire():
    time.sleep(600)
print("waiting", flush=True)
baton.wait()
print("went on", flush=True)
"""


def torchs_own() -> str:
    found = find_spec("torch")
    if found is None or found.origin is None:
        pytest.skip("torch is not installed")
    return str(Path(found.origin).parent / "utils/file_baton.py")


@contextmanager
def compiling(lock: Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process with torch's own lock: it holds it, or waits for it."""
    with log.open("wb") as file:
        command = [sys.executable, "-c", BATON, torchs_own(), str(lock)]
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def wait_until(condition: object) -> None:
    deadline = patience.now() + 30
    while not condition():  # type: ignore[operator]
        assert patience.now() < deadline
        time.sleep(0.02)


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    path = tmp_path / "parts/py311_cpu/cpu_adam/lock"
    path.parent.mkdir(parents=True)
    return path


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {"TORCH_EXTENSIONS_DIR": str(tmp_path / "parts")}


def aged(lock: Path) -> None:
    past = time.time() - 2 * build_lock.OLD_S
    os.utime(lock, (past, past))


def test_where_torch_compiles() -> None:
    assert build_folder({"TORCH_EXTENSIONS_DIR": "/x", "XDG_CACHE_HOME": "/c"}) == Path("/x")
    assert build_folder({"XDG_CACHE_HOME": "/c", "HOME": "/home/anna"}) == Path("/c/torch_extensions")
    assert build_folder({"HOME": "/home/anna"}) == Path("/home/anna/.cache/torch_extensions")


def test_a_lock_is_left_when_its_maker_was_killed(lock: Path, environment: dict[str, str], tmp_path: Path) -> None:
    began = time.time() - 1
    with compiling(lock, tmp_path / "log") as process:
        wait_until(lock.exists)
        aged(lock)
        assert find_left_locks(environment) == (), "its maker holds it"
        assert find_left_locks(environment, ours_since=0) == ()
        process.kill()
        process.wait()
        assert find_left_locks(environment) == (lock,)
    os.utime(lock)
    assert find_left_locks(environment) == (), "too young to be judge_health, unless it is ours"
    assert find_left_locks(environment, ours_since=began) == (lock,)
    assert find_left_locks(environment, ours_since=time.time() + 5) == (), "it was there before"


def test_a_compiler_in_its_folder_still_works(lock: Path, environment: dict[str, str], tmp_path: Path) -> None:
    lock.touch()
    aged(lock)
    compiler = tmp_path / "cc1plus"
    shutil.copy(shutil.which("sleep") or "sleep", compiler)
    with subprocess.Popen([str(compiler), "600"], cwd=lock.parent) as process:
        try:
            wait_until(lambda: find_left_locks(environment) == ())
        finally:
            process.kill()
    assert find_left_locks(environment) == (lock,)


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kinds of file systems around the parts: of the root, and the one that a test adds."""
    kinds = ["ext4"]
    places = ["/", os.path.realpath(tmp_path)]
    monkeypatch.setattr(
        "psutil.disk_partitions",
        lambda **_: [SimpleNamespace(mountpoint=at, fstype=kind) for at, kind in zip(places, kinds, strict=True)],
    )
    return kinds


@pytest.mark.parametrize("kind", ["nfs4", "lustre", "fuse.sshfs", "9p"])
def test_a_lock_on_a_shared_disk_may_be_another_machines(
    lock: Path, environment: dict[str, str], disk: list[str], kind: str
) -> None:
    disk.append(kind)
    lock.touch()
    assert clear(environment) == [], "whoever made it may have only just begun"
    assert clear(environment, since=0.0) == [describe([lock])], "after an attempt it is named, and stays"
    assert lock.exists()
    aged(lock)
    assert clear(environment) == [describe([lock])]
    assert lock.exists()


def test_a_lock_on_a_disk_of_this_machine_is_removed(
    lock: Path, environment: dict[str, str], disk: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    disk.append("xfs")
    with lock.open("w"):
        assert clear(environment) == [], "somebody holds it"
    with monkeypatch.context() as other:
        other.setattr("os.geteuid", lambda: lock.stat().st_uid + 1)
        assert clear(environment) == [], "another user's processes do not show what they hold"
    assert list(map(str, clear(environment))) == [
        f"a process that was killed while it compiled had left {lock}: removed"
    ]
    assert not lock.exists()


def test_the_sentences_name_the_file_and_what_to_type(lock: Path) -> None:
    lock.touch()
    assert str(describe([lock])).endswith(f"if nobody does, rm {lock}")
    assert str(remove([lock])) == f"a process that was killed while it compiled had left {lock}: removed"
    assert not lock.exists()


@pytest.mark.thorough
def test_a_rank_that_waits_for_it_is_told_so(lock: Path, environment: dict[str, str], tmp_path: Path) -> None:
    """The stack is that of torch's own code, which waits for a real lock."""
    lock.touch()
    aged(lock)
    log = tmp_path / "rank-0.log"
    with compiling(lock, log) as process:
        wait_until(lambda: b"waiting" in log.read_bytes())
        time.sleep(0.3)
        os.kill(process.pid, DUMP)
        wait_until(lambda: b"file_baton" in log.read_bytes())
        time.sleep(0.3)
        stand = read_stand(0, log, 0)
        assert stand is not None
        assert stand.waits_for_a_build
        verdict = _judged(stand, environment)
        assert verdict.kind == "hang"
        assert f"Rank 0 waits for torch's lock on a part that is compiled at its first use ({lock})" in str(
            verdict.cause
        )
        assert str(verdict.cause).endswith(f"killed while it compiled: rm {lock}.")
        assert verdict.fixes[0].command == f"rm {lock}"
        remove([lock])
        wait_until(lambda: b"went on" in log.read_bytes())
    assert "whoever holds it has not finished" in str(_judged(stand, environment).cause)


def _judged(stand: Stand, environment: dict[str, str]):  # type: ignore[no-untyped-def]
    known = recorded("kill")
    beats = tuple(Beat(rank=rank, count=2, stage="init", step=0) for rank in (0, 1))
    hung = Hung(silent_s=1812.0, beats=beats, stands=(stand,))
    starts = [dataclasses.replace(start, environment=environment) for start in known.starts]
    return find_cause(dataclasses.replace(known, starts=starts, outcome=dataclasses.replace(known.outcome, hung=hung)))


@pytest.mark.slow
def test_a_training_does_not_wait_for_a_process_that_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = build_folder(dict(os.environ))
    parts = next((path.parents[1] for path in usual.glob("**/cpu_adam/cpu_adam.so")), None)
    if parts is None:
        pytest.skip("DeepSpeed has not compiled here yet")
    shutil.copytree(parts / "cpu_adam", tmp_path / "parts/cpu_adam")
    left = tmp_path / "parts/cpu_adam/lock"
    left.touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "parts"))
    trained = train(tmp_path, "--engine", "zero2", "--offload-optimizer", "cpu")
    assert trained.code == 0, trained.err
    assert f"had left {left}: removed" in trained.out
    assert [record.state for record in trained.records] == ["done"]
