"""The optimizer's states of streamed layers on a disk: real workers, whose runs are those with states in memory, and
what a disk that fills up does to them."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from forking import PARAMETERS, Forked, Kill, Server, checkpoints_of, contents, small_plan
from running import edit
from test_bad_disks import mount, small_disk

from tightfit.runs.heartbeat import DISK_FULL
from tightfit.runs.records import RunFolder, read_last_words

pytestmark = pytest.mark.thorough
STEPS = 4

FULL = """
import os
from tightfit.train import updates
launch, steps = updates.Updates.launch, 0
def launch_then_fill(self, *args):
    global steps
    steps += 1
    if steps == 3:
        os.dup2(os.open("/dev/full", os.O_RDWR), self._file._file)
    launch(self, *args)
updates.Updates.launch = launch_then_fill
"""
"""A file system that writes elsewhere whatever it changes has no room left from the third step on."""

EATEN = """
import os, shutil
from tightfit.train import updates
launch = updates.Updates.launch
def eat(self, *args):
    if not os.path.exists({eater!r}):
        file = os.open({eater!r}, os.O_CREAT | os.O_WRONLY)
        os.posix_fallocate(file, 0, shutil.disk_usage({disk!r}).free)
        os.close(file)
    launch(self, *args)
updates.Updates.launch = eat
"""
"""Somebody else takes all the space that is left."""


@pytest.fixture(scope="module")
def server() -> Server:
    return Server()


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.slow)])
def in_memory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, server: Server) -> Forked:
    plan = small_plan(tmp_path_factory.mktemp("plan"), request.param, steps=STEPS, engine="stream")
    ran = server.run(plan, "--no-probe")
    assert ran.codes == [0] * request.param, ran.stderr
    return ran


def write(in_memory: Forked, folder: Path, disk: Path | None, engine: str = "stream") -> Path:
    """The same job, with states on this disk if any."""
    data, flags = in_memory.folder.parent / "examples.jsonl", dict[str, str]()
    if disk is not None:
        flags = {"nvme": "100GB", "nvme_path": str(disk), "offload_optimizer": "nvme"}
    plan = small_plan(folder, len(in_memory.codes), steps=STEPS, data=data, engine=engine, **flags)
    if disk is not None:  # and all of them there, although there is room in memory
        edit(plan, predicted__host__nvme_bytes_per_node=12 * PARAMETERS, buckets__optimizer_buffer_count=2)
    return plan


@pytest.fixture(scope="module")
def in_file(in_memory: Forked, tmp_path_factory: pytest.TempPathFactory, server: Server) -> Forked:
    folder = tmp_path_factory.mktemp("in-file")
    ran = server.run(write(in_memory, folder / "plan", folder / "disk"))
    assert ran.codes == in_memory.codes, ran.stderr
    assert list((folder / "disk").iterdir()) == []
    return ran


def tensors(folder: Path) -> dict[str, object]:
    return {name: data for name, data in contents(folder).items() if name.endswith(".safetensors")}


def test_a_run_is_the_one_with_states_in_memory(in_memory: Forked, in_file: Forked) -> None:
    assert in_file.losses == in_memory.losses
    assert len(in_memory.losses) == STEPS
    for step, folder in checkpoints_of(in_memory.folder).items():
        assert tensors(checkpoints_of(in_file.folder)[step]) == tensors(folder)
    assert tensors(in_file.folder / "model") == tensors(in_memory.folder / "model")


@pytest.mark.parametrize("after", [180, pytest.param(300, marks=pytest.mark.slow)])
def test_a_killed_run_leaves_nothing_on_the_disk(in_memory: Forked, tmp_path: Path, server: Server, after: int) -> None:
    if len(in_memory.codes) > 1:
        pytest.skip("the other rank would wait for this one")
    disk = tmp_path / "disk"
    plan = write(in_memory, tmp_path / "plan", disk)
    killed = server.run(plan, "--no-probe", kill=Kill(0, after))
    assert killed.codes == [-signal.SIGKILL]
    assert 0 < len(checkpoints_of(killed.folder)) < STEPS
    assert list(disk.iterdir()) == []
    ran = server.run(plan, "--no-probe")
    assert ran.codes == [0], ran.stderr
    assert ran.of("resumed")
    assert tensors(ran.folder / "model") == tensors(in_memory.folder / "model")


@pytest.mark.parametrize("engine", ["stream", "fsdp2"])
def test_checkpoints_cross(in_memory: Forked, in_file: Forked, tmp_path: Path, server: Server, engine: str) -> None:
    """To states in memory, or to another engine, after two steps, and back after the third."""
    expected, ran = in_memory.losses, in_file
    for step, disk in ((2, None), (3, tmp_path / "disk")):
        plan = write(in_memory, tmp_path / f"after-{step}", disk, "stream" if disk else engine)
        taken = checkpoints_of(ran.folder)[step]
        shutil.copytree(taken, plan / "run/checkpoints" / taken.name)
        ran = server.run(plan, "--no-probe")
        assert ran.codes == in_memory.codes, ran.stderr
        exactly = engine == "stream"
        assert ran.losses == (expected[step:] if exactly else pytest.approx(expected[step:], rel=2e-3))


def test_a_disk_that_is_too_small_is_refused_at_once(in_memory: Forked, tmp_path: Path, server: Server) -> None:
    with small_disk(tmp_path / "disk", "64k") as disk:
        refused = server.run(write(in_memory, tmp_path / "plan", disk), "--no-probe")
        assert list(disk.iterdir()) == []
    assert refused.codes == [2] * len(in_memory.codes)
    assert refused.stderr[0].count("\n") == 1
    assert f"the swap files need 0.0 GiB and nvme_path {disk} has 0.0 GiB free: make room" in refused.stderr[0]
    assert refused.events == []


@contextmanager
def thin_disk(folder: Path) -> Iterator[tuple[Path, Path]]:
    """A disk that says it has 32 MB, and the one that holds it, which has no more than 48 kB left."""
    if shutil.which("mkfs.ext4") is None:
        pytest.skip("there is no `mkfs.ext4` here")
    with small_disk(folder / "below", "8m") as below:
        image, disk = below / "image", folder / "disk"
        with image.open("wb") as file:
            file.truncate(32 * 2**20)
        subprocess.run(["mkfs.ext4", "-q", "-O", "^has_journal", str(image)], check=True)
        disk.mkdir()
        mount("-o", "loop", str(image), str(disk))
        try:
            used = shutil.disk_usage(below).used // 1024
            mount("-o", f"remount,size={used + 48}k", str(below))
            yield disk, below
        finally:
            subprocess.run(["umount", str(disk)], check=True)


def test_a_disk_that_has_less_than_it_says(in_memory: Forked, in_file: Forked, tmp_path: Path, server: Server) -> None:
    """Room is claimed, and not there: the checkpoint stands, and serves when there is room again."""
    if len(in_memory.codes) > 1:
        pytest.skip("the other rank would wait for this one")
    with thin_disk(tmp_path) as (disk, below):
        plan, taken = write(in_memory, tmp_path / "plan", disk), checkpoints_of(in_file.folder)[2]
        place = plan / "run/checkpoints" / taken.name
        shutil.copytree(taken, place)
        failed = server.run(plan, "--no-probe")
        assert failed.codes == [2]
        assert re.search(r"the states at nvme_path .* failed \(.*\): make room there", failed.stderr[0])
        assert failed.stderr[0].count("\n") == 1
        assert failed.losses == []
        assert contents(place) == contents(taken)
        mount("-o", "remount,size=8m", str(below))
        ran = server.run(plan, "--no-probe")
        assert ran.codes == [0], ran.stderr
        assert ran.losses == in_memory.losses[2:]
        assert [path.name for path in disk.iterdir()] == ["lost+found"]
    assert tensors(ran.folder / "model") == tensors(in_memory.folder / "model")


def test_a_disk_that_others_fill_has_room_for_what_was_claimed(
    in_memory: Forked, tmp_path: Path, server: Server
) -> None:
    with small_disk(tmp_path / "disk", "8m") as disk:
        meddle = EATEN.format(eater=str(disk / "eater"), disk=str(disk))
        ran = server.run(write(in_memory, tmp_path / "plan", disk), "--no-probe", meddle=meddle)
        assert shutil.disk_usage(disk).free > 0, "what the run had is free again"
    assert ran.codes == in_memory.codes, ran.stderr
    assert ran.losses == in_memory.losses


def test_a_disk_that_fails_in_the_middle_costs_no_checkpoint(in_memory: Forked, tmp_path: Path, server: Server) -> None:
    if len(in_memory.codes) > 1:
        pytest.skip("the other rank would wait for this one")
    disk = tmp_path / "disk"
    plan = write(in_memory, tmp_path / "plan", disk)
    failed = server.run(plan, "--no-probe", meddle=FULL)
    assert failed.codes == [2]
    assert failed.stderr[0].count("\n") == 1
    assert f"the states at nvme_path {disk} failed (no space left on device): make room there" in failed.stderr[0]
    (words,) = read_last_words(RunFolder(failed.folder).errors, 0.0)
    assert words.kind == DISK_FULL
    assert sorted(checkpoints_of(failed.folder)) == [1, 2]
    for step, folder in checkpoints_of(failed.folder).items():
        assert tensors(folder) == tensors(checkpoints_of(in_memory.folder)[step])
    assert list(disk.iterdir()) == []
    ran = server.run(plan, "--no-probe")
    assert ran.codes == [0], ran.stderr
    assert ran.of("resumed")[-1]["step"] == 2
    assert ran.losses[-2:] == in_memory.losses[-2:]
    assert tensors(ran.folder / "model") == tensors(in_memory.folder / "model")
