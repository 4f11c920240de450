"""Layers whose weights rest on the host and come to the device when it is their turn.

A unit is what comes and goes together: a layer, or what lies below or above all layers. Its weights lie side by side on
the host, in its home. Units that stay have a place of their own on the device. The others take turns in a few slots,
each always in the same one: so a parameter is at the same address whenever it is read, whatever autograd has kept of
it, and only what lies there changes. Copies run on a stream of their own, one streamed layer ahead of the computation.

What trains lies at the front of its unit, that which decays first, and every parameter begins a block of 8-bit moments:
gradients and states of a unit have the same order, and are one vector each. Gaps are zero and stay so.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from tightfit.memory.units import SLOTS, stays
from tightfit.train.build import body_of, layers_of, replace_meta
from tightfit.train.host_memory import HUGE, HostMemory
from tightfit.train.numa import bind_to_nodes
from tightfit.train.optimizers import BLOCK
from tightfit.train.place import Place
from tightfit.train.shards import HOME
from tightfit.train.stages import is_below_layers
from tightfit.types import Levers

ALIGNMENT = 512  # bytes at which a parameter begins, so that every kernel takes it
COPY_BYTES = 32 * 2**20
"""Of a unit at a time: what else has to be copied meanwhile comes in between."""


class Pending(Protocol):
    """New weights of a unit that are being made."""

    def done(self) -> bool: ...

    def ends(self) -> Iterator[int]:
        """How many elements, from the first on, are as they should be: whenever there are more, until all are."""


@dataclass(slots=True)
class Part:
    """One parameter of a unit."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    begin: int  # bytes from the beginning of the unit
    decay: float | None  # None: it does not train

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def first(self) -> int:
        """Its number among the elements of its unit; of what trains."""
        return self.begin // self.dtype.itemsize

    def view(self, memory: Tensor) -> Tensor:
        bytes_ = self.numel * self.dtype.itemsize
        return memory[self.begin : self.begin + bytes_].view(self.dtype).view(self.shape)


@dataclass(slots=True, eq=False)
class Unit:
    name: str
    parts: list[Part]
    bytes: int
    trained: int  # elements at its front
    home: Tensor  # on the host
    slot: Slot
    update: Pending | None = None  # of its weights, on the host; None: they are as they should be

    @property
    def weights(self) -> Tensor:
        """What trains, flat, on the host."""
        dtype = self.parts[0].dtype
        return self.home[: self.trained * dtype.itemsize].view(dtype)

    @property
    def decays(self) -> list[tuple[int, float]]:
        """Elements in a row that decay alike, and how fast."""
        trained = [part for part in self.parts if part.decay is not None]
        ends = [*(part.first for part in trained[1:]), self.trained]
        found: list[tuple[int, float]] = []
        for part, end in zip(trained, ends, strict=True):
            length, decay = end - part.first, part.decay or 0.0
            if found and found[-1][1] == decay:
                length += found.pop()[0]
            found.append((length, decay))
        return found

    def become_ready(self) -> Iterator[slice]:
        """Bytes of it that are as they should be, as soon as they are."""
        width, begin = self.parts[0].dtype.itemsize, 0
        if self.update is not None:
            for end in self.update.ends():
                yield slice(begin * width, end * width)
                begin = end
            self.update = None
        yield slice(begin * width, self.bytes)

    def wait(self) -> None:
        for _ in self.become_ready():
            pass


@dataclass(slots=True, eq=False)
class Slot:
    """A place on the device for one unit at a time."""

    memory: Tensor
    holds: Unit | None = None
    arrived: Any = None  # events
    free: Any = None


class Streams:
    """Where copies run beside the computation; on a CPU there is nothing beside it."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.on_gpu = device, device.type == "cuda"
        make: Any = torch.cuda.Stream if self.on_gpu else lambda _: None
        self.weights, self.gradients, self.out, self.back = (make(device) for _ in range(4))

    def mark(self, stream: Any = None) -> Any:
        """An event where this stream stands, or the computation."""
        if not self.on_gpu:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(stream or torch.cuda.current_stream(self.device))
        return event

    def wait(self, event: Any) -> None:
        """The computation does, not the host."""
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)

    @contextmanager
    def on(self, stream: Any, after: Any = None) -> Iterator[None]:
        if stream is not None and after is not None:
            stream.wait_event(after)
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            yield


def copy(to: Tensor, source: Tensor) -> None:
    """In pieces."""
    step = COPY_BYTES // source.dtype.itemsize
    for begin in range(0, source.numel(), step):
        to[begin : begin + step].copy_(source[begin : begin + step], non_blocking=True)


@dataclass(slots=True)
class Stream:
    """A model's units, and which of them is where."""

    bottom: Unit | None  # what trains below the layers
    layers: list[Unit | None]  # None: it stays, and nothing of it trains
    top: Unit | None
    streams: Streams
    memory: HostMemory
    cores: int
    """Processors that this rank may take."""

    @property
    def units(self) -> list[Unit]:
        return [unit for unit in (self.bottom, *self.layers, self.top) if unit is not None]

    def fetch(self, unit: Unit | None, *, wait: bool = True) -> bool:
        """Have it come; whether it does. Without `wait` only where its weights have been updated."""
        if unit is None or unit.slot.holds is unit:
            return True
        if not wait and unit.update is not None and not unit.update.done():
            return False
        slot = unit.slot
        slot.holds = None  # whole
        with self.streams.on(self.streams.weights, after=slot.free):
            for ready in unit.become_ready():
                copy(slot.memory[ready], unit.home[ready])
        slot.holds, slot.arrived = unit, self.streams.mark(self.streams.weights)
        return True

    def use(self, unit: Unit | None) -> None:
        """The computation that follows reads it."""
        self.fetch(unit)
        if unit is not None:
            self.streams.wait(unit.slot.arrived)

    def release(self, unit: Unit | None) -> None:
        """The computation so far was the last to read it."""
        if unit is not None:
            unit.slot.free = self.streams.mark()

    def find_next(self, layer: int, step: int) -> Unit | None:
        """The streamed layer that comes next above it, or below."""
        numbers = range(layer + step, len(self.layers) if step > 0 else -1, step)
        streamed = (self.layers[number] for number in numbers)
        return next((unit for unit in streamed if unit is not None), None)

    def renew(self, units: Iterable[Unit]) -> None:
        """The weights at home are, or will be, others than those on the device."""
        for unit in units:
            if unit.slot.holds is unit:
                unit.slot.holds = None

    def settle(self) -> None:
        """Wait until all weights at home are those of the last step."""
        for unit in self.units:
            unit.wait()


class Packed:
    """4-bit weights of layers that stream, between the time when they are packed and that when they have their homes.
    All ranks make the same ones, and have one copy."""

    def __init__(self, model: Any, levers: Levers, place: Place) -> None:
        self._memory = HostMemory(place, shared=place.world > 1)
        layers = layers_of(model)
        self._streamed = {
            id(module)
            for number, layer in enumerate(layers)
            if not stays(number, levers.resident, len(layers))
            for module in layer.modules()
        }

    def keep(self, layer: nn.Module, made: Tensor) -> Tensor:
        if id(layer) not in self._streamed:
            return made
        if made.nbytes < HUGE:  # it is gone sooner than a page is filled
            return made.cpu()
        held = self._memory.take(made.nbytes, lock=False).view(made.dtype).view(made.shape)
        return held.copy_(made)

    def move(self, kept: Tensor, home: Tensor) -> None:
        home.copy_(kept)
        if kept.nbytes >= HUGE:
            self._memory.give_back(kept, locked=False)


def place_model(
    model: Any, levers: Levers, place: Place, decays: Mapping[str, float], packed: Packed | None = None
) -> Stream:
    """Give a model its memory, on the host and on the device; values come later, but those that are `packed`. `decays`:
    of everything that trains and is no adapter, by its path."""
    cores = bind_to_nodes(place)
    memory = HostMemory(place, shared=place.world > 1)
    layers, streams = layers_of(model), Streams(place.device)
    names = {id(param): name for name, param in model.named_parameters()}
    inside = {id(param) for layer in layers for param in layer.parameters()}
    head = body_of(model).get_output_embeddings()
    below: list[nn.Parameter] = []
    above: list[nn.Parameter] = []
    for path, module in model.named_modules():
        for param in module.parameters(recurse=False):
            if id(param) in inside or names[id(param)] not in decays:
                continue
            inside.add(id(param))  # a tied head is the embedding, which comes first
            (below if is_below_layers(path, module, head) else above).append(param)
    ranks = place.world
    homes: dict[int, tuple[Tensor, Tensor]] = {}  # of each parameter, and its place on the device

    def lay_out(params: Sequence[nn.Parameter]) -> tuple[list[Part], int, int]:
        """Its parts, its bytes, and how many elements train."""
        order = sorted(params, key=lambda param: -decays.get(names[id(param)], -1.0))
        parts: list[Part] = []
        begin = trained = 0
        for param in order:
            decay = decays.get(names[id(param)])
            if decay is None and parts and parts[-1].decay is not None:
                trained, begin = _pad_trained(parts, begin, ranks)
            parts.append(Part(names[id(param)], tuple(param.shape), param.dtype, begin, decay))
            block = max(ALIGNMENT, BLOCK * param.dtype.itemsize)
            begin += -(-param.numel() * param.dtype.itemsize // block) * block
        if parts and parts[-1].decay is not None:
            trained, begin = _pad_trained(parts, begin, ranks)
        return parts, begin, trained

    def make(name: str, params: Sequence[nn.Parameter], slot: Slot | None = None) -> Unit | None:
        if not params:
            return None
        parts, size, trained = lay_out(params)
        home = memory.take(size)
        unit = Unit(
            name, parts, size, trained, home, slot or Slot(torch.zeros(size, dtype=torch.uint8, device=place.device))
        )
        by_name = {names[id(param)]: param for param in params}
        for part in parts:
            param = by_name[part.name]
            if param.device.type != "meta":  # 4-bit, and packed already
                assert packed is not None
                packed.move(param.data, part.view(home))
                param.data = part.view(unit.slot.memory)
                setattr(param, HOME, part.view(home))
            homes[id(param)] = part.view(home), part.view(unit.slot.memory)
        return unit

    count = len(layers)
    streamed = [number for number in range(count) if not stays(number, levers.resident, count)]
    moving = {
        number: [param for param in layers[number].parameters() if _comes(names[id(param)], param, decays)]
        for number in streamed
    }
    largest = max((lay_out(params)[1] for params in moving.values()), default=0)
    slots = [
        Slot(torch.empty(largest, dtype=torch.uint8, device=place.device)) for _ in range(min(SLOTS, len(streamed)))
    ]
    bottom = make("bottom", below)
    found: list[Unit | None] = []
    for number, layer in enumerate(layers):
        if number in moving:
            unit = make(f"layer {number}", moving[number], slots[streamed.index(number) % len(slots)])
        else:
            unit = make(f"layer {number}", [p for p in layer.parameters() if names[id(p)] in decays])
        found.append(unit)
    made = Stream(bottom, found, make("top", above), streams, memory, cores)

    def materialise(_: str, param: nn.Parameter) -> nn.Parameter:
        if id(param) in homes:
            home, here = homes[id(param)]
            # Autograd may not think that a parameter was changed when another layer has come to the same slot.
            new = nn.Parameter(here.new_empty(0), requires_grad=param.requires_grad)
            new.data = here
            setattr(new, HOME, home)
            return new
        return nn.Parameter(torch.empty_like(param, device=place.device), requires_grad=param.requires_grad)

    replace_meta(model, materialise)
    return made


def _comes(name: str, param: nn.Parameter, decays: Mapping[str, float]) -> bool:
    """Whether it comes and goes with its layer: adapters stay, and train on the device."""
    return not param.requires_grad or name in decays


def _pad_trained(parts: Sequence[Part], begin: int, ranks: int) -> tuple[int, int]:
    """How many elements train, and the bytes of them, so that ranks have equal shares of whole blocks."""
    width = parts[0].dtype.itemsize
    trained = -(-begin // width // (BLOCK * ranks)) * BLOCK * ranks
    return trained, -(-trained * width // ALIGNMENT) * ALIGNMENT
