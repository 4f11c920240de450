"""One rank of `checkpoint_speed.py cpu`: the same states saved and loaded by us, by torch.save, by torch's DCP.

The states are those of a small Llama: bf16 weights, fp32 copies, two moments, cut in halves along the first dimension
as FSDP2 cuts them. Our side is the `Saver` and `resume.load` that the worker uses; only the engine is a stand-in that
holds tensors and never steps. The others get what suits them: DCP the same tensors as DTensors, `torch.save` a dict of
this rank's halves, or on rank 0 a dict of whole tensors that nobody had to gather.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from tightfit.runs import checkpoints, disk
from tightfit.runs.checkpoints import Keeping
from tightfit.train import resume
from tightfit.train.checkpoint import Saver
from tightfit.train.engines import MASTER, Counters, State
from tightfit.train.events import Events
from tightfit.train.nodes import NodeDisks
from tightfit.train.place import Place
from tightfit.train.safetensors_files import Files, tensors_of
from tightfit.train.saved_model import FileStyle, TensorPiece, TensorSet
from tightfit.train.shards import outline, shards

BYTES_A_PARAMETER = 2 + 4 + 4 + 4
KINDS = (MASTER, "exp_avg", "exp_avg_sq")
STEP = 1


class Halves:
    """Stands for an engine: this rank's half of every state, in plain memory."""

    def __init__(self, model: nn.Module, rank: int) -> None:
        self.model, self._rank = model, rank
        self.held = {kind: {one.path: torch.randn(one.size) for one in outline(model, rank)} for kind in KINDS}

    def states(self, *, write: bool) -> Iterator[State]:
        del write  # they are where they are
        for kind, tensors in self.held.items():
            for one in outline(self.model, self._rank):
                yield State(kind, one.path, one.shape, one.start, tensors[one.path], alike=False)

    def shapes(self) -> dict[str, dict[str, tuple[int, ...]]]:
        return {kind: {one.path: one.shape for one in outline(self.model, self._rank)} for kind in KINDS}

    def counters(self) -> Counters:
        return Counters(optimizer_steps=STEP, scale=None)

    def go_on(self, counters: Counters, step: int) -> None:
        assert counters == self.counters()
        assert step == STEP


class Weights:
    """The weights of a checkpoint by name, as `resume.load` asks for them."""

    def __init__(self, folder: Path) -> None:
        self._stored, self._files = tensors_of(folder), Files()

    def read(self, name: str, shape: tuple[int, ...], start: int, stop: int) -> Tensor:
        assert self._stored[name].shape == shape
        return self._files.read(self._stored[name], start, stop)


def small_llama(total_bytes: int) -> nn.Module:
    """On the meta device, with about so many bytes of states: more layers, then wider ones."""
    from transformers import LlamaConfig, LlamaForCausalLM

    wanted = total_bytes / BYTES_A_PARAMETER
    hidden, vocab = (512, 32_000) if wanted > 4e7 else (64, 1_000)
    layer = 4 * hidden * hidden + 3 * hidden * hidden * 11 // 4 + 2 * hidden
    layers = max(1, round((wanted - 2 * hidden * vocab) / layer))
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=vocab,
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config)


def cut(model: nn.Module, rank: int, world: int) -> None:
    """Every parameter as a DTensor in bf16, of which this rank has its rows."""
    mesh = init_device_mesh("cpu", (world,))
    for name, param in list(model.named_parameters()):
        path, _, leaf = name.rpartition(".")
        rows = param.shape[0] // world
        assert rows * world == param.shape[0], name
        held = torch.randn(rows, *param.shape[1:], dtype=torch.bfloat16)
        setattr(model.get_submodule(path), leaf, nn.Parameter(DTensor.from_local(held, mesh, [Shard(0)])))


@dataclass(kw_only=True)
class Bench:
    """Everything that a contestant needs."""

    folder: Path
    place: Place
    model: nn.Module
    engine: Halves
    events: Events
    whole: Mapping[str, Tensor] | None
    """Rank 0: every state whole, for a torch.save of all."""
    blocked_s: float = 0.0
    """Of the last save in the background: until training could have gone on."""

    def __post_init__(self) -> None:
        self.saver, self.behind = self._saver("sync", background=False), self._saver("behind", background=True)
        self.dcp_group = dist.new_group(backend="gloo")
        self.copied = torch.empty(self.share_bytes, dtype=torch.uint8).fill_(0)

    @property
    def share_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.halves().values())

    def _saver(self, run: str, *, background: bool) -> Saver:
        return Saver(
            run=self.folder / run,
            engine=self.engine,  # type: ignore[arg-type]
            model=self.weights_set(),
            place=self.place,
            keeping=Keeping(last=1),
            background=background,
            ranks_here=self.place.world,
            masters=True,
            nodes=NodeDisks.together(self.place),
        )

    def weights_set(self) -> TensorSet:
        names = {one.path: (one.shape, torch.bfloat16) for one in outline(self.model, self.place.rank)}

        def pieces() -> Iterator[TensorPiece]:
            for one in shards(self.model, self.place.rank):
                yield TensorPiece(one.path, one.shape, one.start, one.tensor)

        return TensorSet(names=names, pieces=pieces, style=FileStyle())

    def halves(self) -> dict[str, Tensor]:
        """This rank's, flat and by name."""
        found = {f"model/{one.path}": one.tensor for one in outline(self.model, self.place.rank)}
        return found | {f"{state.kind}/{state.path}": state.tensor for state in self.engine.states(write=False)}

    def distributed(self) -> dict[str, Tensor]:
        """The same as DTensors."""
        found: dict[str, Tensor] = {}
        for name, param in self.model.named_parameters():
            assert isinstance(param, DTensor)
            found[f"model/{name}"] = param.detach()
            local = param._local_tensor.shape
            for kind in KINDS:
                held = self.engine.held[kind][name].view(local)
                found[f"{kind}/{name}"] = DTensor.from_local(held, param.device_mesh, param.placements)
        return found

    # --- ours ------------------------------------------------------------------------------------

    @property
    def ours(self) -> Path:
        return checkpoints.folder_of(self.folder / "sync", STEP)

    def save(self) -> None:
        self.saver.save(STEP, self.state(), self.events)
        assert self.saver.last == STEP, self.events.path.read_text(encoding="utf-8")

    def save_unsynced(self) -> None:
        with unsynced():
            self.save()

    def save_behind(self) -> None:
        began = time.monotonic()
        self.behind.save(STEP, self.state(), self.events)
        self.blocked_s = time.monotonic() - began
        self.behind.wait(self.events)
        assert self.behind.last == STEP, self.events.path.read_text(encoding="utf-8")

    def state(self) -> dict[str, Any]:
        return {"step": STEP, "loss_scale": None, "optimizer": {"steps": STEP}}

    def verify(self) -> None:
        problem = resume._problem(self.ours, self.place, self.events)
        assert problem is None, problem

    def load(self) -> None:
        found = resume.FoundCheckpoint(folder=self.ours, step=STEP, state=checkpoints.read_state(self.ours))
        states = resume.CheckpointFiles(self.ours)
        resume.load(found, self.engine, Weights(self.ours), states, self.place, filled=False)  # type: ignore[arg-type]

    def verify_and_load(self) -> None:
        self.verify()
        self.load()

    # --- torch.save ------------------------------------------------------------------------------

    @property
    def half(self) -> Path:
        return self.folder / "torch" / f"half-{self.place.rank}.pt"

    def torch_halves(self) -> None:
        torch.save(self.halves(), self.half)

    def torch_halves_synced(self) -> None:
        self.torch_halves()
        disk.sync_path(self.half)

    def torch_whole(self) -> None:
        if self.whole is not None:
            torch.save(self.whole, self.folder / "torch-whole" / "whole.pt")

    def torch_whole_synced(self) -> None:
        self.torch_whole()
        if self.whole is not None:
            disk.sync_path(self.folder / "torch-whole" / "whole.pt")

    def torch_load(self) -> None:
        loaded = torch.load(self.half, weights_only=True)  # noqa: TID251 - what ours is compared with
        for name, tensor in self.halves().items():
            tensor.copy_(loaded[name])

    # --- DCP -------------------------------------------------------------------------------------

    def dcp_save(self) -> None:
        writer = dcp.FileSystemWriter(self.folder / "dcp")
        dcp.save(self.distributed(), storage_writer=writer, process_group=self.dcp_group)

    def dcp_save_unsynced(self) -> None:
        writer = dcp.FileSystemWriter(self.folder / "dcp", sync_files=False)
        dcp.save(self.distributed(), storage_writer=writer, process_group=self.dcp_group)

    def dcp_behind(self) -> None:
        began = time.monotonic()
        writer = dcp.FileSystemWriter(self.folder / "dcp-behind")
        written: Any = dcp.async_save(self.distributed(), storage_writer=writer, process_group=self.dcp_group)
        self.blocked_s = time.monotonic() - began
        written.result()

    def dcp_load(self) -> None:
        dcp.load(self.distributed(), checkpoint_id=self.folder / "dcp", process_group=self.dcp_group)

    # --- neither ---------------------------------------------------------------------------------

    def copy(self) -> None:
        """What saving in the background cannot hide."""
        begin = 0
        for tensor in self.halves().values():
            self.copied[begin : begin + tensor.nbytes].view(tensor.dtype).copy_(tensor)
            begin += tensor.nbytes


@contextmanager
def unsynced() -> Iterator[None]:
    """Ours without its fsync, to be set beside those that have none."""
    kept = disk.sync
    disk.sync = lambda _: None
    try:
        yield
    finally:
        disk.sync = kept


@dataclass(frozen=True)
class Contestant:
    name: str
    run: Callable[[Bench], None]
    writes: str | None = None
    """The folder that is removed first."""
    reads: str | None = None
    """The folder whose pages are dropped first, where the cache shall be cold."""


SAVES = (
    Contestant("ours", Bench.save, "sync"),
    Contestant("ours, no fsync", Bench.save_unsynced, "sync"),
    Contestant("torch.save, halves", Bench.torch_halves, "torch"),
    Contestant("torch.save, halves, then fsync", Bench.torch_halves_synced, "torch"),
    Contestant("torch.save, rank 0 all", Bench.torch_whole, "torch-whole"),
    Contestant("torch.save, rank 0 all, then fsync", Bench.torch_whole_synced, "torch-whole"),
    Contestant("DCP", Bench.dcp_save, "dcp"),
    Contestant("DCP, no fsync", Bench.dcp_save_unsynced, "dcp"),
)
BEHIND = (
    Contestant("ours, in the background", Bench.save_behind, "behind"),
    Contestant("DCP, async_save", Bench.dcp_behind, "dcp-behind"),
)
COPY = Contestant("a copy in memory", Bench.copy)
LOADS = (
    Contestant("ours, verified", Bench.verify_and_load, reads="sync"),
    Contestant("ours, not verified", Bench.load, reads="sync"),
    Contestant("torch.load, halves", Bench.torch_load, reads="torch"),
    Contestant("DCP load", Bench.dcp_load, reads="dcp"),
)


def run_rank(folder: Path, total_bytes: int, rounds: int) -> dict[str, Any] | None:
    """All rounds of all contestants; the seconds of each, from rank 0."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    dist.init_process_group("gloo")
    bench = _made(folder, total_bytes, rank, world)
    clock = Clock()
    for number in range(rounds):
        for one in _turned((*SAVES, *BEHIND, COPY), number):
            _timed(bench, one, clock)
            if one in BEHIND:
                clock.add(f"{one.name}: blocks", bench.blocked_s)
        for one in _turned(LOADS, number):  # what is read was written above
            _timed(bench, one, clock)
            _timed(bench, one, clock, cold=True)
    _check(bench)
    dist.barrier()
    dist.destroy_process_group()
    parameters = sum(param.numel() for param in bench.model.parameters())
    return {"parameters": parameters, "wall_s": clock.wall_s, "cpu_s": clock.cpu_s} if rank == 0 else None


def _made(folder: Path, total_bytes: int, rank: int, world: int) -> Bench:
    model = small_llama(total_bytes)
    cut(model, rank, world)
    engine = Halves(model, rank)
    place = Place(rank=rank, local_rank=rank, world=world, device=torch.device("cpu"), launcher="benchmark")
    whole = None
    if rank == 0:
        whole = {f"model/{one.path}": torch.zeros(one.shape, dtype=torch.bfloat16) for one in outline(model, rank)}
        whole |= {
            f"{kind}/{path}": torch.zeros(shape)
            for kind, held in engine.shapes().items()
            for path, shape in held.items()
        }
    events = Events(folder / f"events-{rank}", speaks=True)
    return Bench(folder=folder, place=place, model=model, engine=engine, events=events, whole=whole)


def _turned(all_of_them: tuple[Contestant, ...], by: int) -> tuple[Contestant, ...]:
    """Each round begins with another, so that nobody always comes after the same one."""
    by = by * 3 % len(all_of_them)
    return all_of_them[by:] + all_of_them[:by]


class Clock:
    """What each contestant took in each round: seconds of the slower rank, processor seconds of both."""

    def __init__(self) -> None:
        self.wall_s: dict[str, list[float]] = {}
        self.cpu_s: dict[str, list[float]] = {}

    def add(self, name: str, wall_s: float, cpu_s: float | None = None) -> None:
        self.wall_s.setdefault(name, []).append(_agreed(wall_s, dist.ReduceOp.MAX))
        if cpu_s is not None:
            self.cpu_s.setdefault(name, []).append(_agreed(cpu_s, dist.ReduceOp.SUM))


def _agreed(seconds: float, how: Any) -> float:
    held = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(held, op=how)
    return round(float(held), 4)


def _timed(bench: Bench, one: Contestant, clock: Clock, *, cold: bool = False) -> None:
    """From the moment when all ranks are ready until all are done. Nothing that others wrote waits for the disk."""
    if bench.place.leads:
        if one.writes is not None:
            shutil.rmtree(bench.folder / one.writes, ignore_errors=True)
            (bench.folder / one.writes).mkdir()
        os.sync()
        if one.reads is not None:
            (forget if cold else remember)(bench.folder / one.reads)
    dist.barrier()
    began, worked = time.monotonic(), time.process_time()
    one.run(bench)
    dist.barrier()
    name = one.name if one.reads is None else f"{one.name}: {'cold' if cold else 'warm'}"
    clock.add(name, time.monotonic() - began, time.process_time() - worked)


def remember(folder: Path) -> None:
    """Its files come into the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.read(2**23):
                    pass


def forget(folder: Path) -> None:
    """Its files leave the page cache; they are on the disk already."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _check(bench: Bench) -> None:
    """What was compared does the same: each brings back every bit."""
    kept = {name: tensor.clone() for name, tensor in bench.halves().items()}
    for load in (bench.verify_and_load, bench.dcp_load, bench.torch_load):
        for tensor in bench.halves().values():
            tensor.zero_()
        dist.barrier()
        load()
        assert all(torch.equal(tensor, kept[name]) for name, tensor in bench.halves().items()), load.__name__
