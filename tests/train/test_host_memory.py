"""A system that lets too little memory be locked: a real worker is told how much it takes, and what helps. And nothing
stays locked that is not in use any more."""

from __future__ import annotations

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


class Driver:
    """As a GPU's: it knows what is locked, and locks no page twice."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}

    def register(self, memory: Tensor, _: torch.device) -> bool:
        begin, end = memory.data_ptr(), memory.data_ptr() + memory.numel()
        if any(begin < after and start < end for start, after in self.locked.items()):
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
    place = Place(rank=0, local_rank=0, world=1, device=torch.device("cpu"), launcher="python")
    memory = host_memory.HostMemory(place, shared=False)
    memory._locks = True
    kept = Kept(Streams(place.device), memory)
    for width in (100, 3 * HUGE, 50, 5 * HUGE, 4 * HUGE, 9 * HUGE):
        kept.clear()
        sent = [torch.full((width + number,), number, dtype=torch.uint8) for number in range(3)]
        numbers = [kept.put(each) for each in sent]
        for number, each in zip(reversed(numbers), reversed(sent), strict=True):
            assert torch.equal(kept.take(number), each)
    assert len(driver.locked) == 3
    assert memory.taken == sum(end - begin for begin, end in driver.locked.items())
