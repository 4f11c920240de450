"""A system that lets too little memory be locked: a real worker is told how much it takes, and what helps. And nothing
stays locked that is not in use any more."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from forking import Server, small_plan
from running import edit
from torch import Tensor

from tightfit.train import host_memory
from tightfit.train.host_memory import HUGE
from tightfit.train.place import Place
from tightfit.train.streaming import Streams
from tightfit.train.walk import Kept

pytestmark = pytest.mark.thorough

HERE = Place(rank=0, local_rank=0, world=1, device=torch.device("cpu"), launcher="python")
LIMITED = """
from tightfit.train import host_memory
HostMemory, locked = host_memory.HostMemory, 0
begin = HostMemory.__init__
def lock_too(self, *args, **kwargs):
    begin(self, *args, **kwargs)
    self._locks = True
def register(memory, device):
    global locked
    locked += memory.numel()
    return locked <= 10 * 2**20
HostMemory.__init__, host_memory.register = lock_too, register
"""
"""As if there were a GPU, whose driver refuses to lock more than 10 MiB."""


def test_too_little_lockable_memory_is_one_sentence_with_the_amount_and_the_fix(tmp_path: Path) -> None:
    plan = small_plan(tmp_path, 1, steps=2, engine="stream")
    edit(plan, predicted__host__peak_bytes_per_rank=3 * 2**30)
    refused = Server().run(plan, "--no-probe", meddle=LIMITED)
    assert refused.codes == [2]
    assert refused.stderr[0].count("\n") == 1
    assert "3.0 GiB of host memory have to be locked for the GPU, and the system refuses after 0.0" in refused.stderr[0]
    assert "`ulimit -l unlimited`" in refused.stderr[0]
    assert refused.losses == []


def test_a_host_that_would_swap_is_refused_whoever_starts_the_ranks(tmp_path: Path) -> None:
    """`tightfit train` has looked before; a launch script of a plan, or srun, has not."""
    plan = small_plan(tmp_path, 2, steps=2, engine="stream")
    edit(plan, predicted__host__peak_bytes_per_rank=3 * 2**30)
    little = "from tightfit.runs import free_ram\nfree_ram.free_ram = lambda: 5 * 2**30\n"
    refused = Server().run(plan, "--no-probe", meddle=little)
    assert refused.codes[0] == 2
    assert refused.codes[1] != 0
    assert "6.0 GiB are needed and 5.0 GiB are free now" in refused.stderr[0]
    assert refused.losses == []


def test_all_that_is_locked_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(limit=5 * HUGE)
    monkeypatch.setattr(host_memory, "register", driver.register)
    monkeypatch.setattr(host_memory.HostMemory, "locked", 0)
    first, second = (host_memory.HostMemory(HERE, shared=False) for _ in range(2))
    first._locks = second._locks = True
    held = [first.take(3 * HUGE), first.take(HUGE, lock=False), second.take(HUGE)]
    with pytest.raises(host_memory.NotLocked) as refused:
        second.take(2 * HUGE)
    assert (refused.value.locked_bytes, refused.value.needed_bytes) == (4 * HUGE, 6 * HUGE)
    assert "--resident" not in str(refused.value)
    assert "--resident" in str(host_memory.NotLocked(1, 2, may_stay=True))
    assert len(held) == 3


@pytest.mark.parametrize("shared", [False, True])
def test_what_is_given_back_the_system_has(shared: bool) -> None:
    place = replace(HERE, world=2, rehearsal=True) if shared else HERE
    memory, size = host_memory.HostMemory(place, shared=shared), 64 * 2**20
    name = "RssShmem" if shared else "RssAnon"
    before = read_status(name)
    held = memory.take(size, lock=False)
    assert read_status(name) - before > 0.9 * size
    memory.give_back(held, locked=False)
    del held
    assert read_status(name) - before < 0.1 * size


def read_status(name: str) -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return 1024 * int(line.split()[1])


class Driver:
    """As a GPU's: it knows what is locked, and locks no page twice."""

    def __init__(self, limit: int = 2**60) -> None:
        self.locked, self.limit = dict[int, int](), limit

    def register(self, memory: Tensor, _: torch.device) -> bool:
        begin, end = memory.data_ptr(), memory.data_ptr() + memory.numel()
        held = sum(after - start for start, after in self.locked.items())
        if held + end - begin > self.limit or any(begin < b and a < end for a, b in self.locked.items()):
            return False
        self.locked[begin] = end
        return True

    def unregister(self, memory: Tensor, _: torch.device) -> None:
        del self.locked[memory.data_ptr()]


def test_what_a_longer_row_takes_the_place_of_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of other lengths in each window: what lay on the host for the last one is too short, and must not stay
    locked when the system has its pages again, where the next may come to lie."""
    driver = Driver()
    monkeypatch.setattr(host_memory, "register", driver.register)
    monkeypatch.setattr(host_memory, "unregister", driver.unregister)
    memory = host_memory.HostMemory(HERE, shared=False)
    memory._locks, before = True, host_memory.HostMemory.locked
    kept = Kept(Streams(HERE.device), memory)
    for width in (100, 3 * HUGE, 50, 5 * HUGE, 4 * HUGE, 9 * HUGE):
        kept.clear()
        sent = [torch.full((width + number,), number, dtype=torch.uint8) for number in range(3)]
        numbers = [kept.put(each) for each in sent]
        for number, each in zip(reversed(numbers), reversed(sent), strict=True):
            assert torch.equal(kept.take(number), each)
    assert len(driver.locked) == 3
    assert host_memory.HostMemory.locked - before == sum(end - begin for begin, end in driver.locked.items())
