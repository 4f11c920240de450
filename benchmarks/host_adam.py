"""How fast AdamW is over states on the host: ours in pieces of several sizes, in every format, and others beside it.

    python benchmarks/host_adam.py                        on this machine's cores
    python benchmarks/host_adam.py --millions 400 --card  on a GPU machine, also through the card

Every way updates the same number of elements from fp32 gradients, with a factor for clipping, and writes bf16 weights.
Ways take turns, the best turn counts. Bytes are what an update has to read and write once: gradients, states, weights.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tightfit.train import host_states
from tightfit.train.host_adam import Step, find_host_adam
from tightfit.train.host_states import CardRoom, HostStates
from tightfit.types import States

RATE, FACTOR, TURNS = 1e-4, 0.9, 5
PIECES = (2**17, 2**18, 2**19, 2**20, 2**21, 2**22, 2**24)
FORMATS: dict[States, float] = {"fp32": 8, "bf16": 4, "8bit": 2 + 8 / 256}  # bytes of both moments
Way = Callable[[], None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=int, default=64, help="elements")
    parser.add_argument("--card", action="store_true", help="also through the first GPU")
    args = parser.parse_args()
    bench = Bench(args.millions * 10**6 // 2**18 * 2**18, args.card)
    most = torch.get_num_threads()
    print(f"{bench.elements / 1e6:.0f} million elements, {most} threads, torch {torch.__version__}")
    for threads in sorted({max(1, most // 2), most}):
        torch.set_num_threads(threads)
        ways = {f"ours fp32, pieces of 2^{piece.bit_length() - 1}": bench.ours("fp32", piece) for piece in PIECES}
        show(bench, threads, "fp32", ways)
    torch.set_num_threads(most)
    others = {"torch AdamW, fused": bench.torch(fused=True), "torch AdamW, foreach": bench.torch(fused=False)}
    if (kernel := find_host_adam(most)) is not None:
        others["ours fp32, compiled"] = bench.ours("fp32", kernel=kernel)
        others["ours fp32, compiled, to a second set"] = bench.ours("fp32", ahead=True, kernel=kernel)
    show(bench, most, "fp32", others | bench.deepspeed())
    for states in FORMATS:
        ways = {
            f"ours {states}": bench.ours(states),
            f"ours {states}, no fp32 copies": bench.ours(states, master=False),
        }
        show(bench, most, states, ways)
    if args.card:
        for states in FORMATS:
            show(bench, most, states, {f"ours {states}, through the card": bench.card(states)})


def show(bench: Bench, threads: int, states: States, ways: dict[str, Way]) -> None:
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(TURNS):
        for name, way in ways.items():
            start = time.perf_counter()
            way()
            best[name] = min(best[name], time.perf_counter() - start)
    for name, seconds in best.items():
        # Copies are read and written, 8; moments too; gradients are read, 4; weights are written, 2.
        moved = (2 if "no fp32 copies" in name else 8) + 2 * FORMATS[states] + 4 + 2
        rate = bench.elements / seconds
        print(
            f"{threads:3} threads  {name:38} {rate / 1e9:7.3f} G elements/s {rate * moved / 1e9:7.1f} GB/s", flush=True
        )


class Bench:
    """The tensors that all ways share."""

    def __init__(self, elements: int, card: bool) -> None:
        self.elements, self._pins = elements, card
        made = torch.Generator().manual_seed(0)
        self.gradients = self._allocate(4 * elements).view(torch.float32).normal_(generator=made)
        self.weights = self._allocate(2 * elements).view(torch.bfloat16).normal_(generator=made)

    def _allocate(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.uint8, pin_memory=self._pins)

    def ours(
        self, states: States, piece: int = host_states.PIECE, *, master: bool = True, ahead: bool = False, **more: Any
    ) -> Way:
        """`more`: the compiled kernel, or a card's room."""
        held = HostStates([(self.elements, 0.1)], states, master=master, allocate=self._allocate, **more)
        held.start(self.weights)
        if ahead:
            held.make_other(self.weights.dtype, self._allocate)

        def update() -> None:
            host_states.PIECE = piece
            held.update(self.gradients, self.weights, Step(RATE, 3, FACTOR), ahead=ahead)

        return update

    def card(self, states: States) -> Way:
        room = CardRoom(torch.device("cuda"), states, master=True, dtype=torch.bfloat16)
        return self.ours(states, through=room)

    def torch(self, *, fused: bool) -> Way:
        copy = self.weights.float()
        return self._step(torch.optim.AdamW([copy], lr=RATE, fused=fused, foreach=not fused), copy)

    def deepspeed(self) -> dict[str, Way]:
        try:
            from deepspeed.ops.adam import DeepSpeedCPUAdam

            copy = self.weights.float()
            return {"DeepSpeedCPUAdam": self._step(DeepSpeedCPUAdam([copy], lr=RATE), copy)}
        except Exception as error:  # it is compiled now
            print(f"DeepSpeedCPUAdam: {str(error).splitlines()[0]}")
            return {}

    def _step(self, optimizer: torch.optim.Optimizer, copy: Tensor) -> Way:
        copy.grad = torch.empty_like(copy)

        def step() -> None:
            torch.mul(self.gradients, FACTOR, out=copy.grad)
            optimizer.step()
            self.weights.copy_(copy)

        return step


if __name__ == "__main__":
    main()
