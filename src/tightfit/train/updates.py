"""Gradients on their way to the host, and the update of weights there.

The gradients of a unit are added up on the device in fp32, in one of two places that layers take turns in, until its
last micro batch has run backwards. Then they leave, beside the computation.

A thread updates unit by unit. Without clipping it does so as soon as a unit's gradients are there, and two buffers on
the host hold what has yet to be used. Clipping needs the norm of all gradients: the thread waits for it, and then goes
in the order of the next forward pass.

Or it goes ahead, as if nothing had to be clipped, into a second set of states. When the norm is known, what was so
updated only changes sets, if that was right; all the rest is updated now, from the first set: to the bit what waiting
would have made of it. If it was wrong, that cost at most the unit which the thread had at hand, and the traffic. Where
most steps are clipped it is of no use, and the thread waits until fewer are.

Ranks of one machine add up their gradients of a unit, each takes its share of the sum, updates that share, and writes
the new weights where all of them read. A counter for each rank and unit, which all can read, says how far each is.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import accumulate
from pathlib import Path
from threading import Event
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tightfit.memory.units import PIECE, count_kept, has_masters, updates_ahead, waits_for_norm
from tightfit.messages import Message
from tightfit.runs.processes import is_alive, mark_of
from tightfit.train.engines import send_to_host
from tightfit.train.host_adam import Step, find_host_adam
from tightfit.train.host_memory import HostMemory
from tightfit.train.host_states import CardRoom, HostStates, count_bytes, cut
from tightfit.train.optimizers import BLOCK, CLIP_EPS
from tightfit.train.place import Place, everyone, meet, scatter_sum_into
from tightfit.train.state_file import StateFile
from tightfit.train.streaming import Part, Stream, Unit, copy
from tightfit.types import Levers

SWITCH_S = 2e-4
"""The thread that updates has much to launch, and so has the one that feeds the GPU: each gets Python's lock sooner."""
LOOK_S = 2e-4  # between two looks at how far others are
ALIVE_S = 1.0  # between two looks at whether they live
FEW_CORES = 3
RECENT = 8  # steps: where more than half of them were clipped, the next is not made ahead


class Updates:
    def __init__(
        self, model: nn.Module, stream: Stream, levers: Levers, place: Place, disk: Path | None = None
    ) -> None:
        """`disk`: the folder in which states rest that have no room in memory; None: all have."""
        self._stream, self._place, self.waits = stream, place, waits_for_norm(levers)
        self._may_go_ahead = updates_ahead(levers)
        self._ranks, self._rank = place.world, place.rank
        self.units = [unit for unit in stream.units if unit.trained]
        self.where = {part.name: (unit, part) for unit in self.units for part in unit.parts if part.decay is not None}
        self.has_masters = has_masters(levers)
        self.steps = 0  # that were taken
        self.expected = Step(0.0, 0, 1.0)  # how the window that follows will end, but for the step's number
        own = HostMemory(place, shared=False)  # of what other ranks do not look at
        self.states: dict[Unit, HostStates] = {}
        on_card = updates_on_card(levers, place, stream.cores)
        threads = stream.cores - (stream.cores > FEW_CORES)  # one for the thread that feeds the GPU meanwhile
        through = kernel = None
        if on_card:
            dtype = self.units[0].weights.dtype
            through = CardRoom(place.device, levers.states, master=self.has_masters, dtype=dtype)
        else:
            kernel = find_host_adam(threads)
        allocate = partial(own.take, lock=on_card)
        self._file: StateFile | None = None
        self._in_file = self.units[count_kept(levers, len(self.units)) :]
        if self._in_file:
            assert disk is not None
            counts = [unit.trained // self._ranks for unit in self._in_file]
            sizes = [count_bytes(count, levers.states, master=self.has_masters) for count in counts]
            self._file = StateFile(disk, sizes, allocate)
        for number, unit in enumerate(self.units):
            self.states[unit] = held = HostStates(
                _cut(unit.decays, *self.share(unit)),
                levers.states,
                master=self.has_masters,
                allocate=self._file.room(self._in_file.index(unit))
                if self._file is not None and unit in self._in_file
                else allocate,
                through=through,
                kernel=kernel,
                seed=number * self._ranks + self._rank,
            )
            with self.resident(unit, write=True):
                held.start(unit.weights[slice(*self.share(unit))])
            if self._may_go_ahead:
                held.make_other(unit.weights.dtype, allocate)
        if self._file is not None:
            self._file.wait()  # a disk that has not what it promised is known now
        sizes = [4 * unit.trained // self._ranks for unit in self.units]
        if self.waits:
            memories = [own.take(size) for size in sizes]
        else:
            pair = [own.take(max(sizes)) for _ in range(2)]
            memories = [pair[number % 2][:size] for number, size in enumerate(sizes)]
        self._arrived = {unit: memory.view(torch.float32) for unit, memory in zip(self.units, memories, strict=True)}
        device = stream.streams.device
        largest = max((unit.trained for unit in stream.layers if unit is not None), default=0)
        trained = [unit for unit in stream.layers if unit is not None and unit.trained]
        places = [torch.empty(largest, device=device) for _ in trained[:2]]
        self._places = {unit: places[number % 2] for number, unit in enumerate(trained)}
        self._pieces: dict[Unit, list[tuple[slice, Any]]] = {}  # of the gradients there, with an event for each
        self._sums: dict[Unit, Tensor] = {}  # of what is being added up
        self._left: dict[int, Any] = {}  # by the address of a place: an event, when its last user's have left
        self._leaving: list[tuple[Tensor, Any]] = []
        self._norms: list[Tensor] = []
        self._began: list[Future[None]] = []  # updates of this window
        self._goes_ahead = False  # in this window
        self._clipped: deque[bool] = deque(maxlen=RECENT)
        self._is_norm_known: Callable[[], bool] = lambda: False
        self._says = self._may_go_ahead  # that it waits, once
        self._said: list[Message] = []
        self._counts = None
        self._others = Others(place)
        if not place.is_alone:
            self._counts = stream.memory.take(8 * self._ranks * len(self.units), lock=False).view(torch.int64)
        self._launched = 0
        self._thread = ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(threads,))
        sys.setswitchinterval(SWITCH_S)
        for name, param in model.named_parameters():
            if name in self.where:
                hook = _Adding(self._sums, *self.where[name])
                param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def share(self, unit: Unit) -> tuple[int, int]:
        """Which of a unit's elements this rank updates."""
        each = unit.trained // self._ranks
        return self._rank * each, (self._rank + 1) * each

    def resident(self, unit: Unit, *, write: bool, step: int = 1) -> AbstractContextManager[None]:
        """A unit's states in memory, if they rest in a file. `write`: they are changed; `step`: how far it is to the
        unit whose turn is next."""
        if self._file is None or unit not in self._in_file:
            return nullcontext()
        number = self._in_file.index(unit)
        return self._file.resident(number, write=write, then=(number + step) % len(self._in_file))

    # --- gradients ----------------------------------------------------------------------------

    def open(self, unit: Unit | None) -> None:
        """Gradients of it will follow."""
        if unit is None or not unit.trained or unit in self._sums:
            return
        if unit in self._places:
            sum_ = self._places[unit][: unit.trained]
            self._stream.streams.wait(self._left.get(sum_.data_ptr()))
            sum_.zero_()
        else:
            sum_ = torch.zeros(unit.trained, device=self._stream.streams.device)
        self._sums[unit] = sum_

    @torch.no_grad()
    def close(self, unit: Unit | None) -> None:
        """It has all of them."""
        if unit is None or unit not in self._sums:
            return
        streams, sum_ = self._stream.streams, self._sums.pop(unit)
        self._let_go()
        mine = sum_[slice(*self.share(unit))]
        if self._ranks > 1:
            _reduce(mine, sum_)
        self._norms.append(measure_norm(mine))
        if not self._began:
            self._goes_ahead = self._may_go_ahead and self._is_worth_it()
        if not self.waits:  # whoever had this buffer before has used it
            for future in self._began[: max(0, len(self._began) - 1)]:
                future.result()
        pieces = self._pieces[unit] = []
        with streams.on(streams.gradients, after=streams.mark()):
            for part in cut(0, len(mine), PIECE):
                copy(self._arrived[unit][part], mine[part])
                pieces.append((part, streams.mark(streams.gradients)))
        event = pieces[-1][1]
        if unit in self._places:
            self._left[sum_.data_ptr()] = event
        else:
            self._leaving.append((sum_, event))
        if not self.waits:
            made = self.expected._replace(number=self.steps + 1)
            self._began.append(self._submit(unit, lambda: made))
            self._stream.renew([unit])
        elif self._goes_ahead:
            self._began.append(self._thread.submit(self._go_ahead, unit, self.expected, event))

    def _is_worth_it(self) -> bool:
        clipped = sum(self._clipped)
        if clipped <= RECENT // 2:
            return True
        if self._says:
            self._said.append(Message("train.update-waits", clipped=clipped, recent=RECENT))
            self._says = False
        return False

    def take_said(self) -> list[Message]:
        """What there was to tell since this was last asked."""
        said, self._said = self._said, []
        return said

    def _go_ahead(self, unit: Unit, expected: Step, after: Any) -> None:
        while after is not None and not after.query():
            if self._is_norm_known():  # what waits is updated piece by piece
                return
            time.sleep(LOOK_S)
        if not self._is_norm_known():  # or it is not ahead
            low, high = self.share(unit)
            made = expected._replace(number=self.steps + 1)
            self.states[unit].update(self._arrived[unit], unit.weights[low:high], made, ahead=True)

    def _let_go(self) -> None:
        """Of gradients that have left, once they have: the lowest unit's else stood there to the next window's loss."""
        for tensor, event in self._leaving:
            self._stream.streams.wait(event)
            del tensor
        self._leaving.clear()

    # --- a step -------------------------------------------------------------------------------

    def measure(self) -> Tensor:
        """The norm of all gradients of the window."""
        norm: Tensor = torch.linalg.vector_norm(torch.stack(self._norms))
        self._norms.clear()
        if self._ranks > 1:
            norm.square_()
            dist.all_reduce(norm)
            norm.sqrt_()
        return norm

    def launch(self, rate: float, norm: Tensor, clip: float, scale: float) -> None:
        """A step; `norm`: of the gradients as they should be, which are `scale` times as large."""
        self._launched += 1
        began = self._began.copy()
        self._began.clear()
        if not self.waits:
            self._let_go()
            self.steps += 1
            return
        measured, known = send_to_host(norm)
        self._let_go()
        self._is_norm_known = (lambda: True) if known is None else known.query

        def decide() -> Step | None:
            """None: something is not finite, and nothing is updated."""
            for future in began:
                future.result()
            self._is_norm_known = lambda: False
            if known is not None:
                known.synchronize()
            found = float(measured)
            factor = min(1.0, clip / (found + CLIP_EPS)) if clip > 0 else 1.0
            is_finite = math.isfinite(found)
            self._clipped.append(factor < 1 or not is_finite)
            self.steps += is_finite
            return Step(rate, self.steps, factor / scale) if is_finite else None

        decided = self._thread.submit(decide)
        for unit in self.units:
            self._submit(unit, decided.result)
        self._stream.renew(self.units)

    def _submit(self, unit: Unit, find_step: Callable[[], Step | None]) -> Future[None]:
        turn, number = self._launched + (not self.waits), self.units.index(unit)
        pieces = self._pieces.pop(unit)
        made = _Update([part.stop for part, _ in pieces])

        def update() -> None:
            step, held = find_step(), self.states[unit]
            weights = unit.weights[slice(*self.share(unit))]
            if step is None:
                held.drop(weights)
            elif held.ahead == step:
                held.accept()
            else:
                with self.resident(unit, write=True, step=1 if self.waits else -1):
                    for (part, arrived), is_done in zip(pieces, made.are_done, strict=True):
                        if arrived is not None:
                            arrived.synchronize()
                        held.update(self._arrived[unit], weights, step, begin=part.start, end=part.stop)
                        is_done.set()
            if self._counts is not None:
                self._counts[self._rank * len(self.units) + number] = turn

        future = made.submit(self._thread, update)
        unit.update = made
        if self._counts is not None:
            unit.update = _OfAll(made, self._counts[number :: len(self.units)], turn, self._others)
        return future

    def settle(self) -> None:
        """Wait for the last step."""
        self._stream.settle()


class _Adding:
    """What a parameter's gradient of one micro batch is added to."""

    def __init__(self, sums: dict[Unit, Tensor], unit: Unit, part: Part) -> None:
        self._sums, self._unit, self._part = sums, unit, part

    def __call__(self, param: nn.Parameter) -> None:
        first, grad = self._part.first, param.grad
        assert grad is not None
        self._sums[self._unit][first : first + self._part.numel].view(grad.shape).add_(grad)
        param.grad = None


class _Update:
    """Of a unit's weights, piece by piece."""

    def __init__(self, ends: list[int]) -> None:
        self._ends = ends
        self.are_done = [Event() for _ in ends]
        self._future: Future[None] | None = None

    def submit(self, thread: ThreadPoolExecutor, update: Callable[[], None]) -> Future[None]:
        def run() -> None:
            try:
                update()
            finally:
                for is_done in self.are_done:
                    is_done.set()

        self._future = thread.submit(run)
        return self._future

    def done(self) -> bool:
        assert self._future is not None
        return self._future.done()

    def ends(self) -> Iterator[int]:
        assert self._future is not None
        for end, is_done in zip(self._ends, self.are_done, strict=True):
            is_done.wait()
            yield end
        self._future.result()  # raises what went wrong


class Others:
    """The other ranks, which are processes of this machine. Who waits for their shares is not told when one ends."""

    def __init__(self, place: Place) -> None:
        pids = everyone(place, os.getpid())
        self._place, self._next = place, time.monotonic() + ALIVE_S
        self._marks = {pid: mark_of(pid) for pid in pids if pid != os.getpid()}

    def check(self) -> None:
        """From time to time; an error where one has ended."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + ALIVE_S
        if not all(is_alive(pid, mark) for pid, mark in self._marks.items()):
            meet(self._place)  # which says whose connection is gone


class _OfAll:
    """An update of which every rank makes its share."""

    def __init__(self, own: _Update, counts: Tensor, turn: int, others: Others) -> None:
        self._own, self._counts, self._turn, self._others = own, counts, turn, others

    def done(self) -> bool:
        return self._own.done() and int(self._counts.min()) >= self._turn

    def ends(self) -> Iterator[int]:
        for _ in self._own.ends():  # of the share alone
            pass
        while not self.done():
            time.sleep(LOOK_S)
            self._others.check()
        return iter(())


def measure_norm(vector: Tensor) -> Tensor:
    """Of blocks first: on a CPU torch adds up a long vector in fp32 as it comes, 1 % wrong for a large embedding."""
    norm: Tensor = torch.linalg.vector_norm(torch.linalg.vector_norm(vector.view(-1, BLOCK), dim=1))
    return norm


def _reduce(mine: Tensor, whole: Tensor) -> None:
    """The mean over the ranks, of which each takes its share, in place."""
    if dist.get_backend() == "gloo":
        dist.all_reduce(whole)
    else:
        scatter_sum_into(mine, whole)
    mine.div_(dist.get_world_size())


def _cut(decays: Sequence[tuple[int, float]], low: int, high: int) -> list[tuple[int, float]]:
    """Of consecutive elements those from `low` to `high`."""
    ends = list(accumulate(length for length, _ in decays))
    found = []
    for (length, decay), end in zip(decays, ends, strict=True):
        inside = min(end, high) - max(end - length, low)
        if inside > 0:
            found.append((inside, decay))
    return found


def updates_on_card(levers: Levers, place: Place, cores_here: int) -> bool:
    """Whether states pass through the card, rather than being updated where they are. 8-bit ones cost a processor too
    long to look up. Of the others either way moves all bytes through the host's memory once, so that both at once are
    no faster than the faster one: measured, a card behind PCIe 5 updates as many a second as ten cores."""
    if not place.on_gpu or levers.states == "8bit":
        return place.on_gpu
    is_fast = torch.cuda.get_device_capability(place.device) >= (9, 0)
    return cores_here < (10 if is_fast else 5)
