"""Checkpoints that lie on the disks of several nodes: which there are, and their bytes from wherever they lie.

The first rank of each node tells all what lies in its folder. Parts of one checkpoint are known by their id, so it does
not matter which node wrote them, nor under which number. To whoever reads, the files of the whole checkpoint are there
(`PartFiles`): a range that lies on this node's disk is read there, any other one comes over the process group from the
first rank of a node that has it, where a thread waits for such questions. Nodes, ranks and layout may therefore
differ from those that wrote the parts; where they are the same, next to nothing travels.

The trained model is wanted in one folder. Other nodes send what they would have written to rank 0, a piece at a time.
"""

from __future__ import annotations

import json
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tightfit.inputs.records import parse_json
from tightfit.messages import Listing, Message, Said, as_json, from_json, message_of
from tightfit.runs import checkpoints
from tightfit.runs.checkpoints import MANIFEST, Manifest, Span, Torn, Unknown, find_lacking, name_part
from tightfit.train.nodes import NodeDisks
from tightfit.train.place import WRITING, Place, make_side_group, meet, words
from tightfit.train.safetensors_files import Files
from tightfit.train.saved_model import HOST_BYTES, Names, SaveError, TensorPiece, TensorSet, write_model
from tightfit.types import ModelError

QUESTION, ANSWER, PIECE = 1, 2, 3  # tags of what travels
ENOUGH = -1  # instead of a number: there will be no more


@dataclass(frozen=True, kw_only=True)
class Lying:
    """A folder with a checkpoint, or a part of one, on some node's disk."""

    node: int
    folder: Path
    id: str  # of the parts that belong together; of a whole one: of itself


@dataclass(frozen=True, kw_only=True)
class Offer:
    """A checkpoint that can be looked at."""

    step: int
    lying: tuple[Lying, ...]

    @property
    def folder(self) -> Path:
        return self.lying[0].folder


def find_offers(place: Place, nodes: NodeDisks, folders: Sequence[Path]) -> list[Offer]:
    """What lies in the folders that each node names; the newest first. The same on every rank."""
    found = []
    for folder in folders if nodes.leads else ():
        with suppress(Torn):
            part = checkpoints.read_manifest(folder).part
            found.append((checkpoints.step_of(folder), str(folder), "" if part is None else part.id))
            continue
        found.append((checkpoints.step_of(folder), str(folder), ""))
    offers: dict[tuple[int, str], list[Lying]] = {}
    for rank, line in enumerate(words(place, json.dumps(found))):
        node = nodes.of_rank[rank]
        for step, name, id_ in parse_json(line):
            own = id_ or f"{name} on {node}"
            offers.setdefault((step, own), []).append(Lying(node=node, folder=Path(name), id=own))
    ordered = sorted(offers.items(), key=lambda offer: -offer[0][0])
    return [Offer(step=step, lying=tuple(lying)) for (step, _), lying in ordered]


@dataclass(frozen=True, kw_only=True)
class Judged:
    """An offer that was looked at."""

    problem: Said | None = None  # why it is no whole checkpoint; None: it is one
    is_unknown: bool = False  # nobody can tell: it is a newer version's, or the disk does not answer
    lying: tuple[Lying, ...] = ()  # what of it holds
    manifests: tuple[Manifest, ...] = ()
    state: Mapping[str, Any] = field(default_factory=dict)


Verify = Callable[[Path, Sequence[tuple[str, Span]]], None]


def judge(offer: Offer, place: Place, nodes: NodeDisks, verify: Verify) -> Judged:
    """Whether all of its bytes are there and as they were written. `verify`: hashes what it is given, on this rank."""
    wrong: list[tuple[int, bool, Any]] = []
    for number, lying in enumerate(offer.lying):
        if lying.node == nodes.here:
            try:
                manifest = checkpoints.checked(lying.folder)
                checkpoints.read_state(lying.folder)
                here = nodes.ranks_here
                verify(lying.folder, checkpoints.spans_of(manifest)[here.index(place.rank) :: len(here)])
            except Torn as error:
                wrong.append((number, isinstance(error, Unknown), as_json(message_of(error))))
    told = [each for line in words(place, json.dumps(wrong)) for each in parse_json(line)]
    if unknown := next((why for _, unsure, why in told if unsure), None):
        return Judged(problem=from_json(unknown), is_unknown=True)
    torn = {number: from_json(why) for number, _, why in reversed(told)}
    holding = tuple(lying for number, lying in enumerate(offer.lying) if number not in torn)
    if not holding:
        return Judged(problem=torn[0])
    texts = [_broadcast(place, nodes, lying, MANIFEST) for lying in holding]
    manifests = tuple(checkpoints.manifest_of(parse_json(text)) for text in texts)
    parts = [manifest.part for manifest in manifests if manifest.part is not None]
    if parts:
        try:
            lacking = find_lacking(parts)
        except Torn as error:
            return Judged(problem=error.said)
        if lacking:
            wanted = Listing([name_part(parts[0], number) for number in lacking], "and")
            missing = Message("train.parts-missing", step=offer.step, parts=wanted)
            broken = Listing([torn[number] for number in sorted(torn)], ";")
            return Judged(problem=Message("train.parts-broken", missing=missing, why=broken) if torn else missing)
    state = parse_json(_broadcast(place, nodes, holding[0], checkpoints.STATE))
    return Judged(lying=holding, manifests=manifests, state=state)


def _broadcast(place: Place, nodes: NodeDisks, lying: Lying, name: str) -> bytes:
    """A small file of one node, to all."""
    if not nodes.are_apart:
        return (lying.folder / name).read_bytes()
    source = nodes.ranks_of(lying.node)[0]
    data = (lying.folder / name).read_bytes() if source == place.rank else b""
    size = torch.tensor([len(data)])
    dist.broadcast(size, source)
    held = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(held, source)
    return held.numpy().tobytes()


# --- bytes from anywhere --------------------------------------------------------------------------


@dataclass(frozen=True)
class _ByteRange:
    """Bytes [start, stop) of a file of the checkpoint, which lie in a source from `offset` on."""

    start: int
    stop: int
    source: int
    offset: int


class PartFiles(Files):
    """The files of a checkpoint, as if they lay in one folder. All ranks make and finish it together."""

    def __init__(self, folder: Path, judged: Judged, place: Place, nodes: NodeDisks) -> None:
        """`folder`: the one in which the files seem to lie."""
        super().__init__()
        self._folder, self._place, self._nodes = folder, place, nodes
        self._sources: list[tuple[int, Path]] = []  # which node's, and where
        self._sizes: dict[str, int] = {}
        pieces: dict[str, list[_ByteRange]] = {}
        for lying, manifest in zip(judged.lying, judged.manifests, strict=True):
            ranges = {} if manifest.part is None else manifest.part.ranges
            for name, file in sorted(manifest.files.items()):
                number, at = len(self._sources), 0
                self._sources.append((lying.node, lying.folder / name))
                for one in ranges.get(name, ()):
                    pieces.setdefault(one.file, []).append(_ByteRange(one.start, one.stop, number, at))
                    at += one.stop - one.start
                if name not in ranges:
                    pieces.setdefault(name, []).append(_ByteRange(0, file.bytes, number, 0))
                    self._sizes[name] = file.bytes
            if manifest.part is not None:
                self._sizes |= manifest.part.sizes
        self._pieces = {name: self._choose(of_one) for name, of_one in pieces.items()}
        self._starts = {name: [piece.start for piece in of_one] for name, of_one in self._pieces.items()}
        self._group = make_side_group(place) if nodes.are_apart else None
        self._server: threading.Thread | None = None
        if self._group is not None and nodes.leads:
            self._server = threading.Thread(target=self._serve, name="parts", daemon=True)
            self._server.start()

    def _choose(self, pieces: Iterable[_ByteRange]) -> list[_ByteRange]:
        """One for every byte, in order: of copies those that lie on this node's disk."""
        chosen: list[_ByteRange] = []
        for piece in sorted(pieces, key=lambda one: self._sources[one.source][0] != self._nodes.here):
            low = piece.start
            for other in [*sorted(chosen, key=lambda one: one.start), None]:
                high = piece.stop if other is None else min(piece.stop, other.start)
                if low < high:
                    chosen.append(_ByteRange(low, high, piece.source, piece.offset + low - piece.start))
                if other is not None:
                    low = max(low, other.stop)
        return sorted(chosen, key=lambda one: one.start)

    def _name(self, path: Path) -> str | None:
        name = path.relative_to(self._folder).as_posix() if path.is_relative_to(self._folder) else None
        return name if name in self._sizes else None

    def find(self, folder: Path, pattern: str) -> list[Path]:
        every = (self._folder / name for name in self._sizes)
        return sorted(path for path in every if path.parent == folder and path.match(pattern))

    def has(self, path: Path) -> bool:
        return self._name(path) is not None

    def size(self, path: Path) -> int:
        name = self._name(path)
        return super().size(path) if name is None else self._sizes[name]

    def read_into(self, path: Path, view: memoryview, position: int) -> None:
        name = self._name(path)
        if name is None:
            super().read_into(path, view, position)
            return
        stop = position + view.nbytes
        while position < stop:
            piece = self._pieces[name][bisect_right(self._starts[name], position) - 1]
            count = min(stop, piece.stop) - position
            part, offset = view[:count], piece.offset + position - piece.start
            node, source = self._sources[piece.source]
            if node == self._nodes.here:
                super().read_into(source, part, offset)
            else:
                self._ask(node, piece.source, offset, part)
            view, position = view[count:], position + count

    def _ask(self, node: int, source: int, offset: int, view: memoryview) -> None:
        peer = self._nodes.ranks_of(node)[0]
        for low in range(0, view.nbytes, HOST_BYTES):
            part = view[low : low + HOST_BYTES]
            asked = torch.tensor([self._place.rank, source, offset + low, part.nbytes])
            dist.send(asked, peer, group=self._group, tag=QUESTION)
            answer = torch.empty(part.nbytes + 1, dtype=torch.uint8)  # the last byte: whether it could be read
            dist.recv(answer, peer, group=self._group, tag=ANSWER)
            if answer[-1]:
                host, path = self._nodes.hosts[node], self._sources[source][1]
                raise ModelError(Message("train.other-node-cannot-read", host=host, path=path))
            part[:] = answer[:-1].numpy().data

    def _serve(self) -> None:
        files = Files()
        while True:
            asked = torch.empty(4, dtype=torch.int64)
            try:
                dist.recv(asked, None, group=self._group, tag=QUESTION)
                rank, source, offset, count = map(int, asked.tolist())
                if rank == ENOUGH:
                    return
                answer = torch.zeros(count + 1, dtype=torch.uint8)
                try:
                    files.read_into(self._sources[source][1], answer.numpy().data[:count], offset)
                except (ModelError, OSError):
                    answer[-1] = 1
                dist.send(answer, rank, group=self._group, tag=ANSWER)
            except RuntimeError:  # the other end is gone, and so is the run
                return

    def finish(self) -> None:
        """Nobody reads any more, on any rank."""
        self.close()
        if self._group is None:
            return
        meet(self._place, self._group)
        firsts = [self._nodes.ranks_of(node)[0] for node in range(len(self._nodes.hosts))]
        for rank, teller in zip(firsts, firsts[1:] + firsts[:1], strict=True):
            if teller == self._place.rank:
                dist.send(torch.tensor([ENOUGH, 0, 0, 0]), rank, group=self._group, tag=QUESTION)
        if self._server is not None:
            self._server.join()
        dist.destroy_process_group(self._group)


# --- the trained model ----------------------------------------------------------------------------


def write_on_first(folder: Path, model: TensorSet, place: Place, nodes: NodeDisks) -> int:
    """The model as one folder on the disk that rank 0 sees; called by all ranks. Returns the bytes of its files."""
    if not nodes.are_apart:
        return write_model(
            folder,
            model.pieces(),
            model.names,
            rank=place.rank,
            world=place.world,
            barrier=lambda: meet(place),
            style=model.style,
        )
    first, line = nodes.ranks_of(0), make_side_group(place)
    group = dist.new_group(first, backend="gloo", timeout=WRITING)
    own = (piece for piece in model.pieces() if not piece.again)
    written, problem = 0, None
    if nodes.here == 0:
        senders = [rank for rank in range(place.world) if rank not in first] if place.leads else []
        pieces = _receive(own, model.names, senders, line)
        try:
            written = write_model(
                folder,
                pieces,
                model.names,
                rank=first.index(place.rank),
                world=len(first),
                barrier=lambda: dist.all_reduce(torch.zeros(1), group=group),
                style=model.style,
            )
        except Exception as error:
            problem = error
        for _ in pieces:  # or the others would wait for somebody to take them
            pass
    else:
        _send(own, model.names, line)
    told = words(place, "" if problem is None else json.dumps(as_json(message_of(problem) or repr(problem))), line)
    for each in (group, line):
        dist.destroy_process_group(each)
    if problem is not None:
        raise problem
    if why := next(filter(None, told), ""):
        raise SaveError(Message("train.other-node-failed", host=nodes.hosts[0], why=from_json(parse_json(why))))
    return written


def _send(pieces: Iterable[TensorPiece], names: Names, group: Any) -> None:
    """All are made before the first is sent: other ranks may need this one to make theirs, and rank 0 takes all of one
    rank before those of the next."""
    numbers = {name: number for number, name in enumerate(names)}
    made = [
        (piece.name, piece.start, piece.tensor.detach().reshape(-1).to("cpu", names[piece.name][1], copy=True))
        for piece in pieces
    ]
    for name, start, flat in made:
        step = HOST_BYTES // flat.dtype.itemsize
        for low in range(0, flat.numel(), step):
            part = flat[low : low + step]
            dist.send(torch.tensor([numbers[name], start + low, part.numel()]), 0, group=group, tag=PIECE)
            dist.send(part.view(torch.uint8), 0, group=group, tag=PIECE)
    dist.send(torch.tensor([ENOUGH, 0, 0]), 0, group=group, tag=PIECE)


def _receive(own: Iterable[TensorPiece], names: Names, senders: Sequence[int], group: Any) -> Iterator[TensorPiece]:
    """This rank's pieces, and then those of others, one after another."""
    yield from own
    every = list(names)
    for sender in senders:
        while True:
            head = torch.empty(3, dtype=torch.int64)
            dist.recv(head, sender, group=group, tag=PIECE)
            number, start, count = map(int, head.tolist())
            if number == ENOUGH:
                break
            shape, dtype = names[every[number]]
            data = torch.empty(count * dtype.itemsize, dtype=torch.uint8)
            dist.recv(data, sender, group=group, tag=PIECE)
            yield TensorPiece(every[number], shape, start, data.view(dtype))
