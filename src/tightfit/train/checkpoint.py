"""Saving where a run stands, so that nothing is lost, under any engine and number of ranks.

At a step's border every rank hands its parts of the weights, of the fp32 copies and of the moments to a `Writer`, which
puts them at their place in files that hold each parameter once and whole. Then come `state.json` and, when every byte
is on the disk and all ranks agree, the manifest; a rename makes it a checkpoint. Older ones go only after that. Where
nodes have disks of their own (`nodes.py`) each writes a part, and older ones go when all parts stand.

In the background: the parts are copied into a buffer on the host, training goes on, and a thread writes them. The
buffer is made while the first steps run, and stays. Without room for it, training waits until the files are written.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tightfit.hardware.machine import free_ram
from tightfit.messages import Message, as_json, from_json, message_of, say_why
from tightfit.owned import NotOurs
from tightfit.runs import checkpoints, disk
from tightfit.runs.checkpoints import (
    MANIFEST,
    OPTIMIZER,
    STATE,
    Keeping,
    Manifest,
    Part,
    Span,
    StoredFile,
    covered,
    digest,
)
from tightfit.train.assemble import Assembled
from tightfit.train.build import DTYPES
from tightfit.train.config import WorkerConfig
from tightfit.train.engines import MASTER, Engine, State
from tightfit.train.events import Events
from tightfit.train.nodes import NodeDisks, Turn
from tightfit.train.place import Place, everyone, make_side_group, meet, totals, words
from tightfit.train.saved_model import (
    ADAPTER,
    HOST_BYTES,
    FileStyle,
    Names,
    PartWriter,
    SaveError,
    TensorPiece,
    TensorSet,
    Writer,
    adapter_files,
    model_files,
)
from tightfit.train.shards import Shard, plain_name, shards
from tightfit.train.sources import adapter_name, name_parts, names_of, rename_pieces

SLACK_BYTES = 64 * 2**20  # for config, tokenizer, manifest, and what a file system needs for itself
ALIGNED = 64
OWN = "rank"  # the kind of state that is a rank's own
SPARE_BYTES = 2 * 2**30  # what must stay free on the host beside the buffers


class Staging:
    """A buffer on the host that holds a rank's part of a checkpoint while it is being written.

    Sized once, for pieces that are the same at every save. The memory is taken and touched in the background while
    training begins, for the system hands out new pages at a few gigabytes a second: an H200 waited 11 s for the first
    save of a 7.6B model's share (13 GB), and 1.4 s for the next. Where there is a GPU the buffer is registered with it,
    so that it writes there by itself: 0.3 s.
    """

    def __init__(self, sets: Iterable[TensorSet]) -> None:
        self.bytes = sum(_room(piece, each) for each in sets for piece in each.pieces())
        self._queued = False  # copies may be queued: the GPU can write to the buffer by itself

    def prepare(self, device: torch.device) -> Staging:
        """Take the memory; from any thread, once. `device`: where the pieces are."""
        self._buffer = buffer = torch.empty(self.bytes, dtype=torch.uint8)
        for low in range(0, self.bytes, HOST_BYTES):  # in parts: others get a turn
            buffer[low : low + HOST_BYTES].zero_()
        if device.type == "cuda" and self.bytes:
            torch.cuda.set_device(device)  # a new thread is on the first GPU, and would open a context there
            refused = torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), self.bytes, 0)  # type: ignore[no-untyped-call]
            self._queued = int(refused) == 0  # a limit on locked memory: copies are slower then, and no less right
        return self

    def take(self, sets: Iterable[TensorSet]) -> dict[str, list[TensorPiece]]:
        """Copies of all pieces, as they will be in the files, by the stem of their set."""
        held: dict[str, list[TensorPiece]] = {}
        begin = 0
        for each in sets:
            copies = held[each.style.stem] = []
            for piece in each.pieces():
                dtype, values = each.names[piece.name][1], piece.tensor.detach().reshape(-1)
                target = self._buffer[begin : begin + values.numel() * dtype.itemsize].view(dtype)
                # In pieces: a change of dtype makes a copy on the GPU first.
                step = HOST_BYTES // max(values.dtype.itemsize, target.dtype.itemsize)
                for low in range(0, values.numel(), step):
                    target[low : low + step].copy_(values[low : low + step], non_blocking=self._queued)
                copies.append(replace(piece, tensor=target))
                begin += _room(piece, each)
        if self._queued:
            torch.cuda.synchronize()
        return held


def _room(piece: TensorPiece, tensors: TensorSet) -> int:
    return -(-piece.tensor.numel() * tensors.names[piece.name][1].itemsize // ALIGNED) * ALIGNED


@dataclass
class Saver:
    """Every rank makes the same calls at the same steps."""

    run: Path
    engine: Engine
    model: TensorSet
    place: Place
    keeping: Keeping
    background: bool
    ranks_here: int  # that share this machine's memory
    masters: bool  # weights train in 16 bits, and their fp32 copies are worth a file of their own
    nodes: NodeDisks
    last: int | None = None  # the step of the newest checkpoint that stands, as far as this run knows

    def __post_init__(self) -> None:
        self._side = make_side_group(self.place)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[tuple[str, dict[str, Any]]] | None = None
        self._preparing: Future[Staging] | None = None
        self._blocked = 0.0

    @cached_property
    def sets(self) -> tuple[TensorSet, ...]:
        model = replace(self.model, style=replace(self.model.style, beside=None))
        states = state_set(self.engine, self.nodes, masters=self.masters)
        return (model,) if states is None else (model, states)

    @cached_property
    def _bytes_here(self) -> int:
        """Of the large files, on this node's disk."""
        if not self.nodes.are_apart:
            return sum(each.total_bytes for each in self.sets)
        own = sum(
            piece.tensor.numel() * each.names[piece.name][1].itemsize for each in self.sets for piece in each.pieces()
        )
        of_ranks = everyone(self.place, own)
        return sum(of_ranks[rank] for rank in self.nodes.ranks_here)

    def save(self, step: int, state: Mapping[str, Any], events: Events) -> None:
        """Begin a checkpoint, or write it all where there is no room to do so in the background."""
        began = time.monotonic()
        self.wait(events)
        # The newest one stays while the next is written, so there must be room for both.
        needed = self._bytes_here + SLACK_BYTES
        where = self.run / checkpoints.CHECKPOINTS  # which may lie on another disk than the rest
        problem = None
        if self.nodes.leads:
            try:
                if (free := disk.room(where)) < needed:
                    said = {"needed": needed / 1e9, "where": where, "free": free / 1e9}
                    problem = Message("train.checkpoint-needs-room", **said)
            except OSError as error:
                problem = Message("train.checkpoint-disk-unseen", where=where, why=say_why(error))
        told = words(self.place, "" if problem is None else json.dumps(as_json(self._name_host(problem))))
        if any(told):
            events.write("checkpoint_failed", step=step, text=from_json(json.loads(next(filter(None, told)))))
            return
        folder, nodes = checkpoints.folder_of(self.run, step), self.nodes
        if nodes.are_apart:
            folder = checkpoints.part_folder_of(self.run, step, nodes.here + 1, len(nodes.hosts))
        self.prepare()
        if self._preparing is None or self._preparing.exception() is not None:
            saved = self._write(folder, step, state, None)
            self._report(saved, events, time.monotonic() - began, background=False)
            return
        held = self._preparing.result().take(self.sets)
        self._writing = self._thread.submit(self._write, folder, step, state, held)
        self._blocked = time.monotonic() - began

    def _name_host(self, problem: Message) -> Message:
        if not self.nodes.are_apart:
            return problem
        return Message("train.other-node-failed", host=self.nodes.hosts[self.nodes.here], why=problem)

    def prepare(self) -> None:
        """Begin to take the memory that saving in the background needs. The optimizer's states must exist."""
        if self.background and self._preparing is None:
            # The buffer on the host, if every rank has room for its own.
            staging, free = Staging(self.sets), free_ram()
            refused = free is None or free < staging.bytes * self.ranks_here + SPARE_BYTES
            self.background = not totals(self.place, float(refused))[0]
            if self.background:
                self._preparing = self._thread.submit(staging.prepare, self.place.device)

    def poll(self, events: Events) -> None:
        """Say how a save in the background went, once it has."""
        if self._writing is not None and self._writing.done():
            writing, self._writing = self._writing, None
            self._report(writing.result(), events, self._blocked, background=True)

    def wait(self, events: Events) -> None:
        """Until nothing is being written."""
        if self._writing is not None:
            self._writing.exception()
            self.poll(events)

    def _write(
        self, folder: Path, step: int, state: Mapping[str, Any], held: Mapping[str, list[TensorPiece]] | None
    ) -> tuple[str, dict[str, Any]]:
        """All files, and the checkpoint in its place; the event that says so, or why not. Touches nothing of the
        training's when `held` is there."""
        began, written = time.monotonic(), 0
        try:
            place, nodes = self.place, self.nodes
            barrier, tell = partial(meet, place, self._side), partial(words, place, group=self._side)
            writer = (
                PartWriter(folder, nodes=nodes, barrier=barrier, tell=tell)
                if nodes.are_apart
                else Writer(folder, rank=place.rank, world=place.world, barrier=barrier, hashes=True)
            )
            id_ = min(tell(secrets.token_hex(8))) if nodes.are_apart else ""
            for each in self.sets:
                pieces = each.pieces() if held is None else held[each.style.stem]
                written += writer.write(each.names, pieces, each.style)

            def write_beside(staging: Path) -> None:
                if self.model.style.beside is not None:
                    self.model.style.beside(staging)
                disk.write_text(staging / STATE, json.dumps(state, indent=1, ensure_ascii=False) + "\n")

            def seal(staging: Path, spans: Mapping[str, Any]) -> None:
                """The manifest: what ranks wrote is hashed already, small files are hashed here."""
                files: dict[str, StoredFile] = {}
                for path in sorted(staging.rglob("*")):
                    if path.is_file():
                        name, size = path.relative_to(staging).as_posix(), path.stat().st_size
                        of_one = tuple(sorted(spans[name], key=lambda span: span.start)) if name in spans else ()
                        files[name] = StoredFile(size, of_one or (Span(0, size, digest(path.read_bytes())),))
                        if not covered(files[name]):
                            raise SaveError(Message("train.bytes-unaccounted", name=name))
                now, part = datetime.now().astimezone().isoformat(timespec="seconds"), None
                if isinstance(writer, PartWriter):
                    ranges = {name: tuple(held) for name, held in writer.ranges.items()}
                    number, hosts = nodes.here + 1, nodes.hosts
                    part = Part(id=id_, number=number, hosts=hosts, sizes=writer.sizes, ranges=ranges)
                disk.write_text(staging / MANIFEST, Manifest(step=step, written=now, files=files, part=part).text())

            writer.commit(write_beside, seal)
            if nodes.leads:
                for old in checkpoints.outdated(self.run, self.keeping, step):
                    with suppress(OSError, NotOurs):  # the new one stands; what holds a user's file stays too
                        checkpoints.remove(old)
        except Exception as error:  # training goes on; whoever follows it is told
            return "checkpoint_failed", {"step": step, "text": message_of(error) or type(error).__name__}
        seconds = round(time.monotonic() - began, 3)
        return "checkpoint", {"step": step, "folder": str(folder), "bytes": written, "seconds": seconds}

    def _report(self, saved: tuple[str, dict[str, Any]], events: Events, blocked_s: float, *, background: bool) -> None:
        event, fields = saved
        if event == "checkpoint":
            self.last = fields["step"]
            fields |= {"blocked_s": round(blocked_s, 3), "background": background}
        events.write(event, **fields)


def turn_of(nodes: NodeDisks, number: int, held: Shard | State, *, alike: bool) -> Turn:
    """Whether this rank writes the range of that number. `alike`: every rank holds it. Ranks that have columns of the
    same rows make pieces of them together, so all or none of them must write: such a part is written once."""
    every = range(len(nodes.of_rank))
    if alike:
        return nodes.turn(number, every)
    if not nodes.are_apart or not held.holders or held.columns is not None:
        return None if held.is_copy else "first"
    return nodes.turn(number, held.holders)


def model_set(made: Assembled, config: WorkerConfig, tokenizer: Any, nodes: NodeDisks) -> TensorSet:
    """What `from_pretrained` reads, or PEFT where adapters train; every rank writes its own part."""
    model = made.engine.model

    def own() -> Iterator[tuple[Shard, Turn]]:
        """This rank's part of what is sharded, and its turn of what every rank holds whole."""
        for number, shard in enumerate(shards(model, nodes.rank)):
            if turn := turn_of(nodes, number, shard, alike=not shard.cut):
                yield shard, turn

    if config.levers.lora is not None:
        base = config.model.weights or config.model.name
        metadata = {"format": "pt"} | ({"base_quantised": "nf4"} if config.levers.method == "qlora" else {})
        beside = adapter_files(made.whole.peft_config["default"], base, tokenizer=tokenizer)
        adapters = made.engine.trained().items()
        return TensorSet(
            names={adapter_name(path): (shape, torch.float32) for path, shape in adapters},
            pieces=lambda: (
                piece_of(adapter_name(shard.path), shard, turn) for shard, turn in own() if ".lora_" in shard.path
            ),
            style=replace(ADAPTER, beside=beside, metadata=metadata),
        )
    dtype = DTYPES[config.levers.precision]
    parts = name_parts(made.twin)
    kinds = dict(made.buffers)
    stage_ranks = config.levers.stage_ranks(len(nodes.of_rank))
    first = nodes.rank // stage_ranks * stage_ranks
    alike = range(first, first + stage_ranks)  # the ranks that have the same layers
    for name, param in made.twin.named_parameters(remove_duplicate=False):
        kinds[name] = dtype if param.dtype.is_floating_point else param.dtype

    def pieces() -> Iterator[TensorPiece]:
        kept = set(made.twin.state_dict())
        turn = nodes.turn(0, alike)  # buffers are the same on every rank that has them
        buffers = (
            TensorPiece(name, tuple(buffer.shape), 0, buffer.detach().reshape(-1), turn == "again")
            for name, buffer in model.named_buffers()
            if turn and name in kept
        )
        mine = (piece_of(shard.name, shard, turn) for shard, turn in own())
        return rename_pieces(chain(buffers, mine), parts)

    beside = model_files(made.hf_config, type(made.twin).__name__, dtype, tokenizer=tokenizer)
    return TensorSet(names=names_of(parts, kinds.__getitem__), pieces=pieces, style=FileStyle(beside=beside))


def piece_of(name: str, held: Shard | State, turn: Turn) -> TensorPiece:
    """What this rank writes of a part: all of it, or if it has some columns alone, a share of these rows whole."""
    start, tensor = held.start, held.tensor
    if held.columns is not None:
        start, tensor = held.columns.join(tensor, start)
    return TensorPiece(name, held.shape, start, tensor, turn == "again")


def state_name(path: str) -> str:
    """A parameter's name in the optimizer's files: as the model's files call it, or PEFT's."""
    return adapter_name(path) if ".lora_" in path else plain_name(path)


def own_shape(tensor: Tensor, world: int) -> tuple[int, int]:
    """Of what each rank has for itself: a row each."""
    return world, tensor.numel()


def state_set(engine: Engine, nodes: NodeDisks, *, masters: bool) -> TensorSet | None:
    """fp32 copies and moments of everything that trains, as `exp_avg/NAME`; None: there are none."""
    shapes = {kind: held for kind, held in engine.shapes().items() if kind != MASTER or masters}
    apart = MASTER in shapes
    if masters and not apart:  # the weights themselves rest in fp32
        shapes = {MASTER: engine.trained(), **shapes}
    own = engine.own_states()
    shaped = {name: own_shape(tensor, len(nodes.of_rank)) for name, tensor in own.items()}
    every = {
        **{f"{kind}/{state_name(path)}": shape for kind, held in shapes.items() for path, shape in held.items()},
        **{f"{OWN}/{name}": shape for name, shape in shaped.items()},
    }
    names: Names = {name: (shape, torch.float32) for name, shape in every.items()}
    if not names:
        return None

    def pieces() -> Iterator[TensorPiece]:
        if masters and not apart:
            for number, shard in enumerate(shards(engine.model, nodes.rank)):
                if shard.parameter.requires_grad and (turn := turn_of(nodes, number, shard, alike=not shard.cut)):
                    yield piece_of(f"{MASTER}/{state_name(shard.path)}", shard, turn)
        for number, state in enumerate(engine.states(write=False)):
            turn = turn_of(nodes, number, state, alike=state.alike)
            if turn and (masters or state.kind != MASTER):
                yield piece_of(f"{state.kind}/{state_name(state.path)}", state, turn)
        for name, tensor in own.items():
            yield TensorPiece(f"{OWN}/{name}", shaped[name], nodes.rank * tensor.numel(), tensor)

    return TensorSet(names=names, pieces=pieces, style=FileStyle(stem=f"{OPTIMIZER}/states"))
