"""The optimizer's side of a unit of the streaming engine: fp32 copies and moments on the host, and AdamW over them.

Everything that trains in a unit lies flat, one parameter after the other. On the host an update walks over it in pieces
that fit in the processors' caches, so that what comes before and after the fused kernel (moments in another format,
rounding to the working precision) moves no bytes of its own. Or the pieces pass through a card (`CardRoom`), where
there is time enough for any format while the link is busy.

Ranges begin at multiples of `BLOCK` elements and end there too, or where the unit ends. Torch's kernel computes the
last few elements of what it is given in another way than the vectors before them, with other roundings; where pieces
and ranges keep to blocks, only a unit's last few elements are of that kind, whoever updates which range. For the same
reason weight decay, of which a unit has several, is applied before the kernel: the product is the same.

**Formats of the moments.** fp32: as they are. bf16: the second moment is rounded stochastically; it changes by a
thousandth a step at most where gradients are small, less than half of what bf16 can tell apart, and rounded to nearest
it would never come down. 8bit: bitsandbytes' (`optimizers.py` describes it), so that states cross to its optimizers
and back bit for bit where parameters begin at multiples of `BLOCK`.

**Quantising** looks for the nearest of 256 numbers. A search for each element takes far longer than the update itself.
Here floats become integers of the same order; the upper 17 bits pick an entry of a table, which has the code of the
first float with these bits and, as no two boundaries share them, how many more of the lower bits lead to the next code.
One addition and one shift then give exactly the code that a search gives.

**Without fp32 copies** weights of 16 bits are rounded stochastically: up or down with the odds that keep the mean,
since most updates are smaller than half a step. Noise depends on the seed, the step, and the element's position alone,
not on pieces, ranges, threads or the device: it is read from a table of random numbers, from another place in each step
and for each stretch of elements.

**Ahead.** A step that may have to be undone goes to a second set of copies and moments, and the first stays as it was:
AdamW cannot be undone by arithmetic, since it rounds. If the step counts, the sets change places.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import count as count_up
from typing import Any, Protocol

import torch
from torch import Tensor

from tightfit.train.engines import MASTER, moments
from tightfit.train.host_adam import Elements, HostAdam, Step
from tightfit.train.optimizers import BETAS, BLOCK, EPS, quantise
from tightfit.types import States

PIECE = BLOCK * 2**12  # elements that are updated at a time on the host
STAGED = BLOCK * 2**13  # on a card
LANES = 2  # pieces on a card: one arrives while the other leaves
STRETCH = 2**20  # elements that read the table of noise from one place on
ALIGNMENT = 64  # bytes
LOWER = 15  # bits of a float below those that the table of codes is read by
FIRST, SECOND = moments("adamw")

Noise = Callable[[], Tensor]
Stored = tuple[Tensor, ...]  # a moment as it is kept: its elements and, with 8 bits, a scale for each block


class Workbench:
    """Memory for one piece at work, on one device."""

    def __init__(self, elements: int, device: torch.device) -> None:
        self._elements, self._device = -(-elements // BLOCK) * BLOCK, device
        self._taken: dict[str, Tensor] = {}

    def take(self, name: str, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """`count` elements, the same memory for a name each time; made when it is first wanted."""
        if name not in self._taken:
            self._taken[name] = torch.empty(self._elements, dtype=dtype, device=self._device)
        return self._taken[name][:count]


class Format(Protocol):
    """How a moment is kept."""

    def allocate(self, elements: int, allocate: Callable[[int], Tensor]) -> Stored: ...
    def widen(self, kind: str, stored: Stored, bench: Workbench) -> Tensor: ...
    def narrow(self, kind: str, wide: Tensor, stored: Stored, bench: Workbench, noise: Noise) -> None: ...
    def write(self, kind: str, stored: Stored, values: Tensor) -> None: ...


class Fp32:
    def allocate(self, elements: int, allocate: Callable[[int], Tensor]) -> Stored:
        return (allocate(4 * elements).view(torch.float32),)

    def widen(self, kind: str, stored: Stored, bench: Workbench) -> Tensor:
        return stored[0]

    def narrow(self, kind: str, wide: Tensor, stored: Stored, bench: Workbench, noise: Noise) -> None:
        pass  # `wide` is what is kept

    def write(self, kind: str, stored: Stored, values: Tensor) -> None:
        stored[0].copy_(values)


class Bf16:
    def allocate(self, elements: int, allocate: Callable[[int], Tensor]) -> Stored:
        return (allocate(2 * elements).view(torch.bfloat16),)

    def widen(self, kind: str, stored: Stored, bench: Workbench) -> Tensor:
        return bench.take(kind, stored[0].numel()).copy_(stored[0])

    def narrow(self, kind: str, wide: Tensor, stored: Stored, bench: Workbench, noise: Noise) -> None:
        if kind == SECOND:
            round_stochastically(wide, noise(), stored[0])
        else:
            stored[0].copy_(wide)

    def write(self, kind: str, stored: Stored, values: Tensor) -> None:
        stored[0].copy_(values)


class EightBit:
    """Elements are kept in whole blocks, with zeros after a unit's last."""

    def allocate(self, elements: int, allocate: Callable[[int], Tensor]) -> Stored:
        blocks = -(-elements // BLOCK)
        return allocate(blocks * BLOCK), allocate(4 * blocks).view(torch.float32)

    def widen(self, kind: str, stored: Stored, bench: Workbench) -> Tensor:
        codes, scales = stored
        index = bench.take("index", codes.numel(), torch.int64).copy_(codes)
        wide = look_up(numbers_of(kind, codes.device), index, bench.take(kind, codes.numel()))
        wide.view(-1, BLOCK).mul_(scales[:, None])
        return wide

    def narrow(self, kind: str, wide: Tensor, stored: Stored, bench: Workbench, noise: Noise) -> None:
        codes, scales = stored
        blocks = wide.view(-1, BLOCK)
        if kind == FIRST:
            torch.amax(torch.abs(blocks, out=bench.take("magnitude", wide.numel()).view(-1, BLOCK)), 1, out=scales)
        else:
            torch.amax(blocks, 1, out=scales)
        blocks.div_(torch.where(scales > 0, scales, 1)[:, None])
        find_nearest(wide, codes, kind, bench)

    def write(self, kind: str, stored: Stored, values: Tensor) -> None:
        found, scales = quantise(values.view(-1, BLOCK), numbers_of(kind, values.device))
        stored[0].copy_(found.view(-1))
        stored[1].copy_(scales)


FORMATS: dict[States, Format] = {"fp32": Fp32(), "bf16": Bf16(), "8bit": EightBit()}


@dataclass(frozen=True)
class UnitPiece:
    """Some of a unit's elements, from `start` on, wherever they are at work."""

    start: int
    gradients: Tensor
    weights: Tensor
    master: Tensor | None
    held: Mapping[str, Stored]
    bench: Workbench

    @property
    def place(self) -> slice:
        return slice(self.start, self.start + self.weights.numel())

    def take_from(self, other: UnitPiece) -> None:
        """All that an update needs of it."""
        changed = [(self.weights, other.weights)] if self.master is None else []
        for mine, its in (*changed, *self.pair_states(other), (self.gradients, other.gradients)):
            mine.copy_(its, non_blocking=True)

    def give_to(self, other: UnitPiece) -> None:
        """All that an update changed."""
        for mine, its in ((self.weights, other.weights), *self.pair_states(other)):
            its.copy_(mine, non_blocking=True)

    def pair_states(self, other: UnitPiece) -> Iterator[tuple[Tensor, Tensor]]:
        if self.master is not None and other.master is not None:
            yield self.master, other.master
        for kind, stored in self.held.items():
            yield from zip(stored, other.held[kind], strict=True)


@dataclass(frozen=True)
class StateSet:
    """What is kept of a unit's trained elements."""

    master: Tensor | None
    held: Mapping[str, Stored]

    def pick(self, place: slice, gradients: Tensor, weights: Tensor, bench: Workbench) -> UnitPiece:
        master = None if self.master is None else self.master[place]
        held = {kind: cut_stored(stored, place) for kind, stored in self.held.items()}
        return UnitPiece(place.start, gradients[place], weights[place], master, held, bench)


class CardRoom:
    """Room on a card through which pieces of units pass, up, updated, and down; made once, for all units."""

    def __init__(self, device: torch.device, states: States, *, master: bool, dtype: torch.dtype) -> None:
        """`dtype`: of the weights."""
        self.lanes = [Lane(device, states, master=master, dtype=dtype) for _ in range(LANES)]


class Lane:
    """Room for one piece. Pieces of a lane go one after the other; its stream keeps them apart from other lanes'."""

    def __init__(self, device: torch.device, states: States, *, master: bool, dtype: torch.dtype) -> None:
        def allocate(size: int) -> Tensor:
            return torch.empty(size, dtype=torch.uint8, device=device)

        make_stream: Any = torch.cuda.Stream
        self._stream = make_stream(device) if device.type == "cuda" else None
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(device))  # whose memory these may have been
        self._room = UnitPiece(
            start=0,
            gradients=torch.empty(STAGED, dtype=torch.float32, device=device),
            weights=torch.empty(STAGED, dtype=dtype, device=device),
            master=torch.empty(STAGED, dtype=torch.float32, device=device) if master else None,
            held={kind: FORMATS[states].allocate(STAGED, allocate) for kind in (FIRST, SECOND)},
            bench=Workbench(STAGED, device),
        )

    def use(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def make_room(self, piece: UnitPiece) -> UnitPiece:
        count, room = piece.weights.numel(), self._room
        return replace(
            room,
            start=piece.start,
            gradients=room.gradients[:count],
            weights=room.weights[:count],
            master=None if room.master is None else room.master[:count],
            held={kind: cut_stored(stored, slice(0, count)) for kind, stored in room.held.items()},
        )

    def wait(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()


def pad(size: int) -> int:
    """Bytes up to where the next tensor of a unit may begin."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def count_bytes(elements: int, states: States, *, master: bool) -> int:
    """What a unit of so many elements allocates, each tensor at a multiple of `ALIGNMENT`."""
    total = 0

    def allocate(size: int) -> Tensor:
        nonlocal total
        total += pad(size)
        return torch.empty(size, dtype=torch.uint8, device="meta")

    HostStates([(elements, 0.0)], states, master=master, allocate=allocate)
    return total


class HostStates:
    """fp32 copies and moments of one unit's trained elements, flat, on the host, and their update."""

    def __init__(
        self,
        decays: Sequence[tuple[int, float]],
        states: States,
        *,
        master: bool,
        allocate: Callable[[int], Tensor],
        through: CardRoom | None = None,
        kernel: HostAdam | None = None,
        seed: int = 0,
    ) -> None:
        """`decays`: consecutive segments of the unit, elements and weight decay of each; `allocate` gives so many bytes
        of host memory. Without `master`, the weights themselves are what is updated. `through`: updates happen on a
        card. `kernel`: in the place of torch's, for moments that it takes. `seed` tells the noise of one unit from
        another's."""
        self._decays, self._format, self._through, self._seed = tuple(decays), FORMATS[states], through, seed
        self._kernel = kernel
        self.elements = sum(count for count, _ in self._decays)
        self.kinds = (MASTER, FIRST, SECOND) if master else (FIRST, SECOND)
        self._set = self._make_set(allocate)
        self._other: StateSet | None = None
        self._before: Tensor | None = None  # the weights before a step that went ahead, if there are no copies of them
        self.ahead: Step | None = None  # what the other set is the outcome of, as the weights are

    def _make_set(self, allocate: Callable[[int], Tensor]) -> StateSet:
        copies = allocate(4 * self.elements).view(torch.float32) if MASTER in self.kinds else None
        return StateSet(copies, {kind: self._format.allocate(self.elements, allocate) for kind in (FIRST, SECOND)})

    def make_other(self, dtype: torch.dtype, allocate: Callable[[int], Tensor]) -> None:
        """A second set, for steps that go ahead. `dtype`: of the weights."""
        self._other = self._make_set(allocate)
        if self._set.master is None:
            self._before = allocate(dtype.itemsize * self.elements).view(dtype)

    def start(self, weights: Tensor) -> None:
        """Copies of the unit's weights, and moments as before the first step."""
        if self._set.master is not None:
            self._set.master.copy_(weights)
        self.forget()

    @torch.no_grad()
    def update(
        self,
        gradients: Tensor,
        weights: Tensor,
        step: Step,
        *,
        begin: int = 0,
        end: int | None = None,
        ahead: bool = False,
    ) -> None:
        """A step of elements `begin` to `end`; the new weights are written to `weights`. Both tensors are the whole
        unit's. `ahead`: of all elements, into the other set, until `accept`, `drop` or an update that is not ahead."""
        end = self.elements if end is None else end
        if begin % BLOCK or (end % BLOCK and end != self.elements):
            raise ValueError(f"elements {begin} to {end} are no whole blocks of {BLOCK}")
        if self._before is not None:
            if self.ahead is not None:
                weights.copy_(self._before)
            elif ahead:
                self._before.copy_(weights)
        into = self._other if ahead else self._set
        assert into is not None
        self.ahead = None
        if self._through is not None:
            bench = Workbench(0, torch.device("cpu"))
            for number, place in enumerate(cut(begin, end, STAGED)):
                lane, resting = self._through.lanes[number % LANES], self._set.pick(place, gradients, weights, bench)
                with lane.use():
                    piece = lane.make_room(resting)
                    piece.take_from(resting)
                    self._advance(piece, step)
                    piece.give_to(into.pick(place, gradients, weights, bench))
            for lane in self._through.lanes:
                lane.wait()
        elif not self._run_kernel(into, gradients, weights, step, begin, end):
            bench = Workbench(min(PIECE, end - begin), torch.device("cpu"))
            for place in cut(begin, end, PIECE):
                piece = into.pick(place, gradients, weights, bench)
                if ahead:
                    for new, old in piece.pair_states(self._set.pick(place, gradients, weights, bench)):
                        new.copy_(old)
                self._advance(piece, step)
        if ahead:
            self.ahead = step

    def accept(self) -> None:
        """The step that went ahead counts."""
        assert self.ahead is not None
        assert self._other is not None
        self._set, self._other, self.ahead = self._other, self._set, None

    @torch.no_grad()
    def drop(self, weights: Tensor) -> None:
        """It does not: `weights` become what they were."""
        before = self._set.master if self._before is None else self._before
        if self.ahead is not None and before is not None:
            weights.copy_(before)
        self.ahead = None

    def _run_kernel(self, into: StateSet, gradients: Tensor, weights: Tensor, step: Step, begin: int, end: int) -> bool:
        """Whether there is one, with code for these."""
        masters: tuple[Tensor | None, Tensor | None] = (self._set.master, into.master)
        narrow: Tensor | None = weights
        if weights.dtype == torch.float32:  # they are updated themselves
            masters, narrow = (weights, weights), None
        (first, *more), (second, *_) = self._set.held[FIRST], self._set.held[SECOND]
        new = masters[1], into.held[FIRST][0], into.held[SECOND][0]
        whole = Elements(masters[0], gradients, first, second, *new, narrow)
        if self._kernel is None or more or not self._kernel.takes(whole):
            return False
        for low, high, decay in self._segments(slice(begin, end)):
            self._kernel.update(whole.cut(low, high), step, begin=low, decay=decay, seed=self._seed)
        return True

    def _advance(self, piece: UnitPiece, step: Step) -> None:
        """One piece, in place."""
        (beta1, beta2), count, bench = BETAS, piece.weights.numel(), piece.bench
        gradients, weights, device = piece.gradients, piece.weights, piece.weights.device
        updated = piece.master
        if updated is None:
            updated = weights if weights.dtype == torch.float32 else bench.take(MASTER, count).copy_(weights)
        if step.factor != 1.0:
            gradients = torch.mul(gradients, step.factor, out=bench.take("gradients", count))
        for first, last, decay in self._segments(piece.place):
            if decay:
                updated[first - piece.start : last - piece.start].mul_(1 - step.rate * decay)
        wide = {kind: self._format.widen(kind, stored, bench) for kind, stored in piece.held.items()}
        torch._fused_adamw_(
            [updated], [gradients], [wide[FIRST][:count]], [wide[SECOND][:count]], [],
            [torch.full((), float(step.number), dtype=torch.float32, device=device)],
            lr=step.rate, beta1=beta1, beta2=beta2, weight_decay=0.0, eps=EPS, amsgrad=False, maximize=False,
        )  # fmt: skip
        noises = (partial(make_noise, (self._seed, use, step.number), piece.place, device) for use in count_up())
        if piece.master is not None:
            weights.copy_(piece.master)
        elif updated is not weights:
            round_stochastically(updated, next(noises)(), weights)
        for kind, stored in piece.held.items():
            self._format.narrow(kind, wide[kind], stored, bench, next(noises))

    def _segments(self, piece: slice) -> Iterator[tuple[int, int, float]]:
        """Those of the unit's segments that a piece overlaps, cut to it."""
        start = 0
        for count, decay in self._decays:
            first, last = max(start, piece.start), min(start + count, piece.stop)
            if first < last:
                yield first, last, decay
            start += count

    def read(self, kind: str, begin: int, end: int) -> Tensor:
        """Elements `begin` to `end` of one of `kinds`, in fp32."""
        made = torch.empty(end - begin, dtype=torch.float32)
        bench = Workbench(PIECE, made.device)
        for piece in cut(begin, end, PIECE):
            place = made[piece.start - begin : piece.stop - begin]
            if kind == MASTER:
                assert self._set.master is not None
                place.copy_(self._set.master[piece])
            else:
                whole = slice(piece.start // BLOCK * BLOCK, piece.stop)
                wide = self._format.widen(kind, cut_stored(self._set.held[kind], whole), bench)
                place.copy_(wide[piece.start - whole.start :][: place.numel()])
        return made

    def write(self, kind: str, begin: int, values: Tensor) -> None:
        """Put `values` in place from element `begin` on."""
        values = values.reshape(-1)
        end = begin + values.numel()
        for piece in cut(begin, end, PIECE):
            part = values[piece.start - begin : piece.stop - begin]
            if kind == MASTER:
                assert self._set.master is not None
                self._set.master[piece].copy_(part)
            elif self._format is not FORMATS["8bit"]:
                self._format.write(kind, cut_stored(self._set.held[kind], piece), part)
            else:  # blocks that are written in part keep their other elements
                whole = slice(piece.start // BLOCK * BLOCK, -(-piece.stop // BLOCK) * BLOCK)
                stored = cut_stored(self._set.held[kind], whole)
                wide = self._format.widen(kind, stored, Workbench(whole.stop - whole.start, values.device))
                wide[piece.start - whole.start :][: part.numel()].copy_(part)
                self._format.write(kind, stored, wide)

    def forget(self) -> None:
        """Moments as before the first step."""
        for stored in self._set.held.values():
            for each in stored:
                each.zero_()


def cut(begin: int, end: int, piece: int) -> Iterator[slice]:
    """Pieces from `begin` to `end`, cut at multiples of `piece`."""
    at = begin
    while at < end:
        after = min(at - at % piece + piece, end)
        yield slice(at, after)
        at = after


def cut_stored(stored: Stored, piece: slice) -> Stored:
    """The part of a moment that has a piece's elements; with scales, in whole blocks."""
    if len(stored) == 1:
        return (stored[0][piece],)
    blocks = slice(piece.start // BLOCK, -(-piece.stop // BLOCK))
    return stored[0][blocks.start * BLOCK : blocks.stop * BLOCK], stored[1][blocks]


# --- rounding -------------------------------------------------------------------------------------


def round_stochastically(wide: Tensor, noise: Tensor, into: Tensor) -> None:
    """`wide` in 16 bits, up or down by `noise`, of 16 random bits; it changes `wide`."""
    bits = wide.view(torch.int32)
    if into.dtype == torch.bfloat16:
        bits.add_(noise).bitwise_and_(-1 << 16)
    else:
        # fp16 has 13 bits less than fp32 and, below its smallest normal number, steps of one size.
        step = 2.0**-24
        noise = noise >> 3
        even = wide.div(step).add_(noise, alpha=2.0**-13).floor_().mul_(step)
        small = wide.abs() < 2.0**-14
        bits.add_(noise).bitwise_and_(-1 << 13)
        wide.copy_(torch.where(small, even, wide))
    into.copy_(wide)


def make_noise(key: tuple[int, ...], place: slice, device: torch.device) -> Tensor:
    """16 random bits for each of a unit's elements in `place`, in int32."""
    table, parts = _noise(device), []
    for part in cut(place.start, place.stop, STRETCH):
        words = b"".join(word.to_bytes(8, "little") for word in (*key, part.start // STRETCH))
        offset = zlib.crc32(words) % STRETCH + part.start % STRETCH
        parts.append(table[offset : offset + part.stop - part.start])
    return parts[0] if len(parts) == 1 else torch.cat(parts)


@cache
def _noise(device: torch.device) -> Tensor:
    """Twice the same, so that from wherever a stretch reads, it gets each number equally often."""
    order = torch.randperm(STRETCH, generator=torch.Generator().manual_seed(0x7F17))
    return ((order << 16) // STRETCH).to(device, torch.int32).repeat(2)


# --- 8 bits ---------------------------------------------------------------------------------------


@cache
def numbers_of(kind: str, device: torch.device) -> Tensor:
    """The 256 numbers that codes of a moment stand for, as bitsandbytes makes them: for each power of ten twice as many
    as for the one below. The second moment has no negative ones."""
    made = [0.0, 1.0]
    for power in range(7):
        borders = torch.linspace(0.1, 1, 2 ** (power if kind == FIRST else power + 1) + 1, dtype=torch.float32)
        middles = 10 ** (power - 6) * ((borders[:-1] + borders[1:]) / 2.0)
        made += [*middles.tolist(), *((-middles).tolist() if kind == FIRST else ())]
    return torch.tensor(sorted(made), dtype=torch.float32, device=device)


def find_nearest(values: Tensor, codes: Tensor, kind: str, bench: Workbench) -> None:
    """The code of the nearest number for each of `values`, whole blocks of them between -1 and 1; it changes them."""
    if values.is_cuda:  # which has time for a search, in one kernel
        codes.copy_(torch.bucketize(values, _borders(kind, values.device), out_int32=True))
        return
    keys = _order(values.view(torch.int32), bench.take("sign", values.numel(), torch.int32))
    index = bench.take("index", values.numel(), torch.int64)
    upper = torch.bitwise_right_shift(keys, LOWER, out=bench.take("sign", values.numel(), torch.int32))
    index.copy_(upper).add_(1 << 31 - LOWER)
    found = look_up(_table(kind, values.device), index, upper)
    codes.copy_(found.add_(keys.bitwise_and_((1 << LOWER) - 1)).bitwise_right_shift_(LOWER))


def look_up(table: Tensor, index: Tensor, out: Tensor) -> Tensor:
    """`table[index]`. Over one dimension torch gathers with a single thread."""
    torch.gather(table.expand(index.numel() // BLOCK, -1), 1, index.view(-1, BLOCK), out=out.view(-1, BLOCK))
    return out


def _order(bits: Tensor, spare: Tensor) -> Tensor:
    """Floats' bits, in place, as integers of the same order: those of negative ones count downwards."""
    return bits.bitwise_xor_(torch.bitwise_right_shift(bits, 31, out=spare).bitwise_and_(0x7FFFFFFF))


@cache
def _borders(kind: str, device: torch.device) -> Tensor:
    """Up to each of them, values are nearer to the number before it."""
    numbers = numbers_of(kind, torch.device("cpu")).double()
    return ((numbers[1:] + numbers[:-1]) / 2).to(device, torch.float32)


@cache
def _table(kind: str, device: torch.device) -> Tensor:
    """By the upper bits of a float: the code of the first such float, shifted, and what its lower bits want to the
    next."""
    borders = _borders(kind, torch.device("cpu")).clone().view(torch.int32)
    keys = _order(borders, torch.empty_like(borders)).long()
    assert (keys >> LOWER).diff().min() > 0
    first = torch.arange(-1 << 31 - LOWER, 1 << 31 - LOWER) << LOWER
    codes = torch.searchsorted(keys, first)
    following = torch.cat([keys, keys.new_tensor([1 << 40])])[codes]
    most = (1 << LOWER) - 1
    last = torch.where(following >> LOWER == first >> LOWER, following & most, most)  # of the first code
    return ((codes << LOWER) + most - last).to(device, torch.int32)
