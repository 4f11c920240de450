"""A system that lets too little memory be locked: a real worker is told how much it takes, and what helps."""

from __future__ import annotations

from pathlib import Path

import pytest
from forking import Server, small_plan
from running import edit

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
