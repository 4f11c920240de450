"""States in a file on a real disk: the same training as in memory, and what a bad disk does."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tightfit.memory import stream
from tightfit.memory.job import make_job
from tightfit.memory.units import count_kept, units_of
from tightfit.model.load import load_model
from tightfit.train.host_adam import Step
from tightfit.train.host_states import HostStates, count_bytes
from tightfit.train.nvme import NvmeError, open_nameless
from tightfit.train.state_file import ALIGNMENT, StateFile, align
from tightfit.types import Levers, States

UNITS = (
    5000,
    300,
    70_000,
    12_345,
    256,
)  # elements; an odd number of them, so that the last and the first share a buffer


def allocate(size: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    probe = tmp_path / "probe"
    probe.touch()
    try:
        os.close(os.open(probe, os.O_RDWR | os.O_DIRECT))
    except OSError:
        pytest.skip("this file system takes no direct I/O")
    return tmp_path / "nvme"


def make(states: States, file: StateFile | None) -> list[HostStates]:
    return [
        HostStates([(count, 0.1)], states, master=True, allocate=allocate if file is None else file.room(number))
        for number, count in enumerate(UNITS)
    ]


def start(count: int) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(count)).to(torch.bfloat16)


def gradients(count: int, step: int) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(count + step))


@pytest.mark.parametrize("states", ["fp32", "8bit"])
@pytest.mark.parametrize("backwards", [False, True])
def test_a_training_from_a_file_is_the_same(folder: Path, states: States, backwards: bool) -> None:
    file = StateFile(folder, [count_bytes(count, states, master=True) for count in UNITS], allocate)
    in_memory, in_file = make(states, None), make(states, file)
    here, there = [start(count) for count in UNITS], [start(count) for count in UNITS]
    numbers = list(range(len(UNITS)))[:: -1 if backwards else 1]
    for number in numbers:
        in_memory[number].start(here[number])
        with file.resident(number, write=True):
            in_file[number].start(there[number])
    for step in (1, 2, 3):
        for number, then in zip(numbers, [*numbers[1:], numbers[0]], strict=True):
            given = gradients(UNITS[number], step)
            in_memory[number].update(given, here[number], Step(1e-2, step, 1.0))
            with file.resident(number, write=True, then=then):
                in_file[number].update(given, there[number], Step(1e-2, step, 1.0))
    for number, count in enumerate(UNITS):
        assert torch.equal(here[number], there[number])
        with file.resident(number, write=False):
            for kind in in_memory[number].kinds:
                assert torch.equal(in_memory[number].read(kind, 0, count), in_file[number].read(kind, 0, count))
    file.close()
    assert not any(folder.iterdir())


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("states", ["fp32", "bf16", "8bit"])
@pytest.mark.parametrize("master", [True, False])
def test_the_file_is_as_large_as_was_predicted(states: States, master: bool, ranks: int) -> None:
    shape = load_model("llama-3.1-8b")  # all of whose units are whole blocks
    levers = Levers(engine="stream", offload_optimizer="nvme", states=states, master_weights=master)
    units = units_of(shape, levers)
    counts = [unit.trained // ranks for unit in (units.before, *units.layers, units.after)][count_kept(levers, 34) :]
    sizes = [align(count_bytes(count, states, master=master)) for count in counts]
    assert stream.file_sizes(make_job(shape, levers, ranks, None)) == sizes


def test_what_is_only_read_changes_nothing(folder: Path) -> None:
    file = StateFile(folder, [count_bytes(count, "fp32", master=True) for count in UNITS], allocate)
    held = make("fp32", file)
    with file.resident(0, write=True):
        held[0].start(start(UNITS[0]))
    with file.resident(0, write=False):
        held[0].write("exp_avg", 0, torch.ones(UNITS[0]))
    with file.resident(2, write=False):  # in the same buffer
        pass
    with file.resident(0, write=False):
        assert not held[0].read("exp_avg", 0, UNITS[0]).any()
    file.close()


def test_room_is_claimed_before_anything_starts(folder: Path) -> None:
    file = StateFile(folder, [64 * 2**20], allocate)
    assert os.fstat(file._file).st_blocks * 512 >= 64 * 2**20
    file.close()


def test_a_disk_without_room_is_said_in_one_sentence(folder: Path) -> None:
    with pytest.raises(NvmeError, match=r"the swap files need .* GiB free: make room"):
        StateFile(folder, [2**62], allocate)
    assert not any(folder.iterdir())


def test_a_write_that_fails_is_not_lost(folder: Path) -> None:
    file = StateFile(folder, [ALIGNMENT, ALIGNMENT], allocate)
    kept = os.dup(file._file)
    with file.resident(0, write=True):
        os.dup2(os.open("/dev/full", os.O_WRONLY), file._file)
    told = pytest.raises(NvmeError, match=r"failed .no space left.* goes on from its last checkpoint")
    with told, file.resident(0, write=False):
        pass
    os.dup2(kept, file._file)
    with told, file.resident(0, write=False):  # not the first alone who asks
        pass
    with told:
        file.close()


def test_a_folder_that_cannot_be_written_is_said(folder: Path) -> None:
    folder.write_text("a file")
    with pytest.raises(NvmeError, match="cannot write to nvme_path"):
        StateFile(folder, [ALIGNMENT], allocate)


def test_the_page_cache_has_no_part_in_it(folder: Path) -> None:
    """RAM is what is short: the system is to keep nothing of the file there."""
    number = open_nameless(folder)
    try:
        assert fcntl.fcntl(number, fcntl.F_GETFL) & os.O_DIRECT
        assert list(folder.iterdir()) == []
    finally:
        os.close(number)


def test_a_file_system_without_direct_io_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = os.open

    def refuse(path: str, flags: int, *rest: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return begin(path, flags, *rest)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(NvmeError, match=f"{folder}"):
        open_nameless(folder)
    assert list(folder.iterdir()) == []
