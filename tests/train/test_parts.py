"""Parts of a checkpoint on the disks of two nodes with two ranks each: threads stand for the ranks."""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tightfit.runs import checkpoints, disk
from tightfit.runs.checkpoints import MANIFEST, STATE, Manifest, Part, Span, StoredFile, digest
from tightfit.train.nodes import NodeDisks
from tightfit.train.saved_model import FileStyle, PartWriter, SaveError, TensorPiece
from tightfit.types import ConfigError, UserError

SHAPES = {"a": (7, 5), "b": (33,), "c": (2, 3, 4)}
NAMES = {name: (shape, torch.float32) for name, shape in SHAPES.items()}
STEP = 5
OF_RANK = (0, 0, 1, 1)


def values(name: str) -> torch.Tensor:
    return torch.arange(torch.Size(SHAPES[name]).numel(), dtype=torch.float32) + ord(name)


class Ranks:
    """Four of them; the runs of the two nodes are folders of their own."""

    def __init__(self, folder: Path) -> None:
        self.runs = (folder / "alpha", folder / "beta")
        self.barrier = threading.Barrier(len(OF_RANK), timeout=60)
        self.said = [""] * len(OF_RANK)
        self.problems: dict[int, Exception] = {}

    def tell(self, rank: int, text: str) -> list[str]:
        self.said[rank] = text
        self.barrier.wait()
        heard = list(self.said)
        self.barrier.wait()
        return heard

    def write(self, rank: int) -> None:
        """`a` is cut between all ranks, `b` is held by all, `c` by one rank of each node."""
        nodes = NodeDisks(rank=rank, of_rank=OF_RANK, hosts=("alpha", "beta"))
        folder = checkpoints.part_folder_of(self.runs[nodes.here], STEP, nodes.here + 1, 2)
        pieces, quarter = [], values("a").numel() // 4
        start, stop = rank * quarter, values("a").numel() if rank == 3 else (rank + 1) * quarter
        pieces.append(TensorPiece("a", SHAPES["a"], start, values("a")[start:stop]))
        for number, (name, holders) in enumerate({"b": range(4), "c": (1, 3)}.items()):
            if turn := nodes.turn(number, holders):
                pieces.append(TensorPiece(name, SHAPES[name], 0, values(name), turn == "again"))
        try:
            writer = PartWriter(folder, nodes=nodes, barrier=self.barrier.wait, tell=lambda text: self.tell(rank, text))
            writer.write(NAMES, pieces, FileStyle(stem="model"))

            def seal(staging: Path, spans: object) -> None:
                files = {}
                for path in sorted(staging.rglob("*")):
                    if path.is_file():
                        data, name = path.read_bytes(), path.relative_to(staging).as_posix()
                        files[name] = StoredFile(len(data), (Span(0, len(data), digest(data)),))
                ranges = {name: tuple(held) for name, held in writer.ranges.items()}
                part = Part(id="one", number=nodes.here + 1, hosts=nodes.hosts, sizes=writer.sizes, ranges=ranges)
                disk.write_text(staging / MANIFEST, Manifest(step=STEP, written="now", files=files, part=part).text())

            writer.commit(lambda staging: disk.write_text(staging / STATE, json.dumps({"step": STEP})), seal)
        except Exception as error:
            self.problems[rank] = error

    def run(self) -> Ranks:
        threads = [threading.Thread(target=self.write, args=(rank,)) for rank in range(len(OF_RANK))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return self

    @property
    def left(self) -> list[str]:
        return [path.name for run in self.runs for path in run.glob("checkpoints/*")]


def test_parts_are_a_checkpoint_when_they_lie_together(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path).run()
    assert ranks.problems == {}
    assert ranks.left == ["step-00000005.part-1-of-2", "step-00000005.part-2-of-2"]
    alpha, beta = ranks.runs
    lone = checkpoints.inventory(alpha).checkpoints[0]
    assert (lone.problem, lone.lacking) == (None, (2,))
    with pytest.raises(ConfigError, match=r"step 5 needs part 2, which beta wrote as well: copy its folder from there"):
        checkpoints.put_together(alpha, checkpoints.inventory(alpha), lambda *_: None)
    (beta / "checkpoints/step-00000005.part-2-of-2").rename(alpha / "checkpoints/step-00000005.part-2-of-2")
    there = checkpoints.inventory(alpha)
    assert [found.lacking for found in there.checkpoints] == [(), ()]
    whole = checkpoints.put_together(alpha, there, lambda *_: None)
    stored = load_file(whole / "model.safetensors")
    assert all(torch.equal(stored[name].reshape(-1), values(name)) for name in SHAPES)
    manifest = checkpoints.checked(whole)
    checkpoints.verify(whole, checkpoints.spans_of(manifest))
    gone = checkpoints.goners(checkpoints.inventory(alpha), checkpoints.Keeping(last=2))
    assert [goner.path.name for goner in gone] == ["step-00000005.part-2-of-2", "step-00000005.part-1-of-2"]


def test_what_several_nodes_hold_is_written_by_two_of_them() -> None:
    three = [NodeDisks(rank=rank, of_rank=(0, 0, 1, 1, 2, 2), hosts=("a", "b", "c")) for rank in range(6)]
    one = [NodeDisks(rank=rank, of_rank=(0,) * 6, hosts=("a",)) for rank in range(6)]
    for number in range(12):
        turns = [disks.turn(number, range(6)) for disks in three]
        assert sorted(filter(None, turns)) == ["again", "first"]
        assert three[turns.index("first")].here != three[turns.index("again")].here
        assert sorted(str(disks.turn(number, (2, 3))) for disks in three[2:4]) == ["None", "first"]
        assert [turn for disks in one if (turn := disks.turn(number, range(6)))] == ["first"]


def fail_on(monkeypatch: pytest.MonkeyPatch, name: str, fails: Callable[..., bool], code: int) -> None:
    real = getattr(disk, name)

    def fail(*words: object) -> object:
        if fails(*words):
            raise OSError(code, os.strerror(code))
        return real(*words)

    monkeypatch.setattr(disk, name, fail)


def test_a_disk_that_is_full_on_one_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a rank's bytes: no node has anything of it."""
    ranks = Ranks(tmp_path)

    def is_full(descriptor: int, data: memoryview, offset: int) -> bool:
        return offset > 0 and os.readlink(f"/proc/self/fd/{descriptor}").endswith("rank-3.bin")

    fail_on(monkeypatch, "put", is_full, errno.ENOSPC)
    ranks.run()
    assert ranks.left == []
    assert isinstance(ranks.problems[3], UserError)
    for rank in (0, 1, 2):
        assert isinstance(ranks.problems[rank], SaveError)
        assert str(ranks.problems[rank]).startswith(f"on beta: there is no room to write {ranks.runs[1]}")


def test_a_part_that_cannot_be_put_in_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other node, whose part stands already, removes it again."""
    ranks = Ranks(tmp_path)
    fail_on(monkeypatch, "rename", lambda old, new: new.name.endswith("part-2-of-2"), errno.EIO)
    ranks.run()
    assert ranks.left == []
    assert "on beta: cannot write" in str(ranks.problems[0])
