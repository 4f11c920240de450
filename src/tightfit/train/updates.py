"""Gradients on their way to the host, and the update of weights there.

The gradients of a unit are added up on the device in fp32, in one of two places that layers take turns in, until its
last micro batch has run backwards. Then they leave, beside the computation.

Clipping needs the norm of all of them: the update waits for it. To update at once and to correct afterwards would need
AdamW to be undone exactly, which rounding forbids. A thread updates unit by unit in the order of the next forward pass.
Without clipping a unit is updated as soon as its gradients are there, and two buffers on the host hold what has yet to
be used.

Ranks of one machine add up their gradients of a unit, each takes its share of the sum, updates that share, and writes
the new weights where all of them read. A counter for each rank and unit, which all can read, says how far each is.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tightfit.inputs.surroundings import cores
from tightfit.train.host_adam import find_host_adam
from tightfit.train.host_memory import HostMemory
from tightfit.train.host_states import CardRoom, HostStates
from tightfit.train.optimizers import CLIP_EPS
from tightfit.train.place import Place
from tightfit.train.streaming import Part, Stream, Unit, copy
from tightfit.types import Levers

SWITCH_S = 2e-4
"""The thread that updates has much to launch, and so has the one that feeds the GPU: each gets Python's lock sooner."""
LOOK_S = 2e-4  # between two looks at how far other ranks are


class Updates:
    def __init__(self, model: nn.Module, stream: Stream, levers: Levers, place: Place, *, waits: bool) -> None:
        """`waits`: for the norm of all gradients."""
        self._stream, self._place, self.waits = stream, place, waits
        self._ranks, self._rank = place.world, place.rank
        self.units = [unit for unit in stream.units if unit.trained]
        self.where = {part.name: (unit, part) for unit in self.units for part in unit.parts if part.decay is not None}
        self.has_masters = levers.master_weights and levers.precision != "fp32"
        self.steps = 0  # that were taken
        self.next_rate = 0.0
        own = HostMemory(place, shared=False)  # of what other ranks do not look at
        self.states: dict[Unit, HostStates] = {}
        on_card, threads = updates_on_card(levers, place, cores() // self._ranks), max(1, cores() // self._ranks)
        through = kernel = None
        if on_card:
            dtype = self.units[0].weights.dtype
            through = CardRoom(place.device, levers.states, master=self.has_masters, dtype=dtype)
        else:
            kernel = find_host_adam(threads)
        for number, unit in enumerate(self.units):
            self.states[unit] = held = HostStates(
                _cut(unit.decays, *self.share(unit)),
                levers.states,
                master=self.has_masters,
                allocate=partial(own.take, lock=on_card),
                through=through,
                kernel=kernel,
                seed=number * self._ranks + self._rank,
            )
            held.start(unit.weights[slice(*self.share(unit))])
        sizes = [4 * unit.trained // self._ranks for unit in self.units]
        if waits:
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
        self._sums: dict[Unit, Tensor] = {}  # of what is being added up
        self._left: dict[int, Any] = {}  # by the address of a place: an event, when its last user's have left
        self._leaving: list[tuple[Tensor, Any]] = []
        self._norms: list[Tensor] = []
        self._began: list[Future[None]] = []
        self._counts = None
        if not place.is_alone:
            self._counts = stream.memory.take(8 * self._ranks * len(self.units), lock=False).view(torch.int64)
        self._launched = 0
        self._last: Any = None  # an event: all gradients of the window are on the host
        self._decided: Future[None] | None = None
        self._thread = ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(threads,))
        sys.setswitchinterval(SWITCH_S)
        self._factor: float | None = None
        for name, param in model.named_parameters():
            if name in self.where:
                hook = _Adding(self._sums, *self.where[name])
                param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def share(self, unit: Unit) -> tuple[int, int]:
        """Which of a unit's elements this rank updates."""
        each = unit.trained // self._ranks
        return self._rank * each, (self._rank + 1) * each

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
        self._norms.append(torch.linalg.vector_norm(mine))
        number = self.units.index(unit)
        if not self.waits:  # whoever had this buffer before has used it
            for future in self._began[: max(0, len(self._began) - 1)]:
                future.result()
        with streams.on(streams.gradients, after=streams.mark()):
            copy(self._arrived[unit], mine)
        event = streams.mark(streams.gradients)
        if unit in self._places:
            self._left[sum_.data_ptr()] = event
        else:
            self._leaving.append((sum_, event))
        if not self.waits:
            self._factor = 1.0
            self._began.append(self._submit(unit, number, self.next_rate, self.steps + 1, event))
            self._stream.renew([unit])
        self._last = event

    def _let_go(self) -> None:
        """Of gradients that have left, once they have."""
        for tensor, event in self._leaving:
            self._stream.streams.wait(event)
            del tensor
        self._leaving.clear()

    # --- a step -------------------------------------------------------------------------------

    def measure(self) -> Tensor:
        """The norm of all gradients of the window."""
        self._let_go()  # of the lowest unit's, which else stood there to the next window's loss
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
        if not self.waits:
            self._began.clear()
            self.steps += 1
            return

        def decide() -> None:
            if self._last is not None:
                self._last.synchronize()
            measured = float(norm)
            factor = min(1.0, clip / (measured + CLIP_EPS)) if clip > 0 else 1.0
            self._factor = factor / scale if math.isfinite(measured) else None
            self.steps += self._factor is not None

        self._decided = self._thread.submit(decide)
        for number, unit in enumerate(self.units):
            self._submit(unit, number, rate, None, None)
        self._stream.renew(self.units)

    def _submit(self, unit: Unit, number: int, rate: float, step: int | None, after: Any) -> Future[None]:
        turn = self._launched + (not self.waits)

        def update() -> None:
            if after is not None:
                after.synchronize()
            if self._decided is not None:
                self._decided.result()
            if self._factor is not None:
                low, high = self.share(unit)
                at = self.steps if step is None else step
                self.states[unit].update(
                    self._arrived[unit], unit.weights[low:high], rate=rate, step=at, factor=self._factor
                )
            if self._counts is not None:
                self._counts[self._rank * len(self.units) + number] = turn

        future = self._thread.submit(update)
        unit.update = future if self._counts is None else _OfAll(future, self._counts[number :: len(self.units)], turn)
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


class _OfAll:
    """An update of which every rank makes its share."""

    def __init__(self, own: Future[None], counts: Tensor, turn: int) -> None:
        self._own, self._counts, self._turn = own, counts, turn

    def done(self) -> bool:
        return self._own.done() and int(self._counts.min()) >= self._turn

    def result(self) -> None:
        self._own.result()
        while not self.done():
            time.sleep(LOOK_S)


def _reduce(mine: Tensor, whole: Tensor) -> None:
    """The mean over the ranks, of which each takes its share, in place."""
    if dist.get_backend() == "gloo":
        dist.all_reduce(whole)
    else:
        dist.reduce_scatter_tensor(mine, whole)
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
