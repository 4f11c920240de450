"""Two real ranks on a machine that says it has two NUMA nodes: each keeps to its own, and trains as ever."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from forking import Server, small_plan

pytestmark = pytest.mark.thorough

WATCHED = """
import json, os, pathlib
from tightfit.train import numa, streaming, updates
folder = pathlib.Path({folder!r})
def bind(place):
    os.sched_setaffinity(0, {processors})
    cores = numa.bind_to_nodes(place, folder)
    threads = [sorted(os.sched_getaffinity(int(task)))  for task in os.listdir("/proc/self/task")]
    (folder / f"bound-{{place.rank}}.json").write_text(json.dumps([cores, threads]))
    return cores
streaming.bind_to_nodes = bind
begin = updates.Updates.__init__
def watch(self, *args, **kwargs):
    begin(self, *args, **kwargs)
    where = self._thread.submit(os.sched_getaffinity, 0).result()
    (folder / f"updates-{{self._rank}}.json").write_text(json.dumps(sorted(where)))
updates.Updates.__init__ = watch
"""


def test_each_rank_keeps_to_its_own_node(tmp_path: Path) -> None:
    processors = sorted(os.sched_getaffinity(0))[:2]
    if len(processors) < 2:
        pytest.skip("one processor cannot be two nodes")
    (tmp_path / "plain").mkdir()
    plain = Server().run(small_plan(tmp_path / "plain", 2, steps=3, engine="stream"), "--no-probe")
    told = {}
    for name, nodes in {"two": processors, "one": [f"{processors[0]},{processors[1]}"]}.items():
        folder = tmp_path / name
        for number, listed in enumerate(nodes):
            place = folder / f"sys/devices/system/node/node{number}"
            place.mkdir(parents=True)
            (place / "cpulist").write_text(str(listed))
        watched = WATCHED.format(folder=str(folder), processors=set(processors))
        (folder / "plan").mkdir()
        ran = Server().run(small_plan(folder / "plan", 2, steps=3, engine="stream"), "--no-probe", meddle=watched)
        assert ran.codes == [0, 0], ran.stderr
        assert ran.losses == plain.losses
        told[name] = [
            [json.loads((folder / f"{kind}-{rank}.json").read_text()) for kind in ("bound", "updates")]
            for rank in range(2)
        ]
    for rank, processor in enumerate(processors):
        (cores, threads), updates = told["two"][rank]
        assert cores == 1
        assert len(threads) > 1  # those that were there before, too
        assert all(each == [processor] for each in threads)
        assert updates == [processor]
        (cores, threads), updates = told["one"][rank]
        assert cores == 1
        assert updates == processors
