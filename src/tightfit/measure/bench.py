"""The bench on which parts are measured: a device, the ranks of this node, and ways to time.

A GPU is timed by its own events, in a row without a pause, as a training keeps it busy; kernels that are shorter than
their launch are timed inside a CUDA graph, where the host does not matter. A CPU is timed by the clock. Medians
throughout: one hiccup of the machine is not its speed.

Every wait for the other ranks has its counterpart whatever fails between them, so that a rank that cannot measure a
part does not leave the others standing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")
Run = Callable[[], object]

FEWEST, MOST = 3, 40  # repeats of which the median is taken
SHORT_S = 0.5e-3  # a kernel shorter than this is launched from a graph
IN_A_GRAPH = 20
SLOW_FLOPS = 3e12  # FLOP/s below which a device gets the small grid: a CPU, or the GPU inside one


@dataclass(kw_only=True)
class Bench:
    device: torch.device
    rank: int = 0
    world: int = 1  # ranks of this node
    quick: bool = False
    slow: bool = False  # it gets small shapes
    until: float = field(default=float("inf"))  # when the part that is measured should be done, by `perf_counter`

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def leads(self) -> bool:
        return self.rank == 0

    @property
    def out_of_time(self) -> bool:
        return time.perf_counter() >= self.until

    def wait(self) -> None:
        """For all that was asked of the device."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def randn(self, *shape: int, dtype: torch.dtype, grad: bool = False) -> torch.Tensor:
        """From a generator of its own: torch's may be left inside a graph that could not be captured."""
        made = torch.Generator(self.device)
        return torch.randn(shape, device=self.device, dtype=dtype, requires_grad=grad, generator=made)

    # --- time -----------------------------------------------------------------------------------

    def seconds(self, run: Run, budget_s: float = 0.2, *, graphs: bool = True) -> float:
        """Median seconds of one call; `graphs`: it can be captured."""
        run()  # the first one loads and chooses kernels
        once = self._series(run, 1, 1)
        if once > budget_s:
            return once
        calls = 1
        if graphs and self.on_gpu and once < SHORT_S and (graph := self._graph(run)) is not None:
            run, calls = graph.replay, IN_A_GRAPH
            once = self._series(run, 1, 1)
        repeats = int(min(MOST, max(FEWEST, budget_s / max(once, 1e-7))))
        if not self.on_gpu and once < 1e-4:  # below what the clock and a loop of Python can tell
            calls = 50
        return self._series(run, repeats, 1 if self.on_gpu else calls) / (calls if self.on_gpu else 1)

    def _series(self, run: Run, repeats: int, calls: int) -> float:
        """Median seconds of a call, over some repeats of some calls each."""
        if not self.on_gpu:
            found = []
            for _ in range(repeats):
                began = time.perf_counter()
                for _ in range(calls):
                    run()
                found.append((time.perf_counter() - began) / calls)
            return median(found)
        event: Any = torch.cuda.Event
        marks = [event(enable_timing=True) for _ in range(repeats + 1)]
        marks[0].record()
        for mark in marks[1:]:
            for _ in range(calls):
                run()
            mark.record()
        self.wait()
        return float(median([first.elapsed_time(then) / 1e3 / calls for first, then in pairwise(marks)]))

    def _graph(self, run: Run) -> Any:
        """A CUDA graph of several calls; None: this device, or what is run, cannot be captured."""
        try:
            side = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(side):
                for _ in range(3):
                    run()
            torch.cuda.current_stream(self.device).wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for _ in range(IN_A_GRAPH):
                    run()
        except (RuntimeError, AttributeError):
            self.wait()
            return None
        return graph

    def keep_busy(self, run: Run, seconds: float) -> None:
        """Run it for this long: clocks and temperatures of a card at rest are not those of a training."""
        began = time.perf_counter()
        while time.perf_counter() - began < seconds:
            for _ in range(5):
                run()
            self.wait()

    # --- the other ranks of this node -------------------------------------------------------------

    def meet(self) -> None:
        """Wait for every rank, over the host: a barrier of NCCL would claim memory on the GPU."""
        if self.world > 1:
            dist.all_reduce(torch.zeros(1))

    def alone(self, run: Callable[[], T]) -> T | None:
        """What the first rank finds while the others wait; None on the others."""
        self.meet()
        try:
            return run() if self.leads else None
        finally:
            self.meet()

    def together(self, run: Callable[[], T]) -> T:
        """What each rank finds while all do the same."""
        self.meet()
        try:
            return run()
        finally:
            self.meet()

    def agree(self, value: float) -> float:
        """The largest that any rank has, so that all go on alike."""
        if self.world == 1:
            return value
        held = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(held, op=dist.ReduceOp.MAX)
        return float(held[0])


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a part found: rates by their names, and everything they come from."""

    rates: dict[str, float]
    raw: Any
