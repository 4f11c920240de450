"""What torch.compile leaves of a layer's elementwise work: one pass over memory for each group of operations.

The compiler leaves matrix products and the kernels of attention and scans as they are, and makes one kernel of what
lies between two of them: whatever it reads it reads once, and only what a product, another group or the caller will
read is written. So a group is what depends on equally many products one after another. In the backward pass it reads
the gradients of what it wrote, from each reader one, and what it needs of the values that were written, and it writes
the gradients of what it read; values that were not written are computed again on the way, which costs no traffic.
Additions pass their gradient on.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from tightfit.memory.tape import Op, Slot, Tape


class Moved(NamedTuple):
    """Through the card's memory, and in how many kernels."""

    size: int
    kernels: int


class Fused(NamedTuple):
    """What the elementwise work of one layer moves."""

    forward: Moved
    back: Moved
    again: Moved  # of `forward`, what a layer that recomputes moves once more: all that comes before its last product


@dataclass(slots=True)
class _Group:
    """The elementwise operations that depend on equally many products, one after another."""

    ops: list[Op] = field(default_factory=list)
    reads: dict[int, Slot] = field(default_factory=dict)
    writes: dict[int, Slot] = field(default_factory=dict)


def is_kernel(op: Op) -> bool:
    """Whether the compiler leaves it as it is."""
    return op.product or op.part not in ("elementwise", "random")


def find_needed(tape: Tape) -> set[int]:
    """The numbers of the operations that have to run once more where nothing is kept: those that lead to something that
    a backward reads. A layer's last product does not, unless a norm follows, say, or a router's weight."""
    wanted = {id(slot.storage) for op in tape.ops for slot in op.saves}
    needed: set[int] = set()
    for number in range(len(tape.ops) - 1, -1, -1):
        op = tape.ops[number]
        if any([id(slot.storage) in wanted for slot in (*op.outputs, *op.makes, *op.keeps)]):
            needed.add(number)
            wanted.update([id(slot.storage) for slot in op.inputs])
    return needed


def fuse(tape: Tape, layer_input: Slot, layer_output: Slot) -> Fused:
    groups, readers = _groups(tape, layer_input, layer_output)
    last = max(groups, default=0)
    forward, back, again = Moved(0, 0), Moved(0, 0), Moved(0, 0)
    for level, group in groups.items():
        once = Moved(_size(group.reads.values()) + _size(group.writes.values()), 1)
        forward = _add(forward, once)
        back = _add(back, _backward(group, readers, layer_output))
        again = _add(again, once) if level < last else again
    return Fused(forward, back, again)


def _add(one: Moved, other: Moved) -> Moved:
    return Moved(one.size + other.size, one.kernels + other.kernels)


def _groups(tape: Tape, layer_input: Slot, layer_output: Slot) -> tuple[dict[int, _Group], dict[int, int]]:
    """The groups by level, and how many read each tensor from outside of its own group."""
    level: dict[int, int] = {id(layer_input.storage): 0}
    readers: dict[int, set[tuple[str, int]]] = {}
    groups: dict[int, _Group] = {}
    made_in: dict[int, int] = {}
    """The group in which an elementwise result is made; what a product or a kernel makes is in none."""
    for number, op in enumerate(tape.ops):
        fresh = [slot for slot in (*op.outputs, *op.makes) if slot.storage is slot]
        at = max([level.get(id(slot.storage), 0) for slot in op.inputs], default=0)
        if is_kernel(op):
            for slot in op.inputs:
                readers.setdefault(id(slot.storage), set()).add(("kernel", number))
            level.update({id(slot): at + 1 for slot in fresh})
            continue
        if not fresh:
            continue
        group = groups.setdefault(at, _Group())
        group.ops.append(op)
        for slot in op.inputs:
            own = slot.storage
            if made_in.get(id(own)) != at:
                group.reads[id(own)] = own
                readers.setdefault(id(own), set()).add(("group", at))
        for slot in fresh:
            level[id(slot)] = made_in[id(slot)] = at
    slots = {id(slot): slot for op in tape.ops for slot in op.outputs if slot.storage is slot}
    for key, at in made_in.items():
        if key in readers or key == id(layer_output.storage):
            groups[at].writes[key] = slots.get(key, layer_output.storage)
    return groups, {key: len(who) for key, who in readers.items()}


def _backward(group: _Group, readers: dict[int, int], layer_output: Slot) -> Moved:
    inside = {id(slot): op for op in group.ops for slot in op.outputs if slot.storage is slot}
    shared = _Shared()
    for op in group.ops:
        if op.passes:
            for slot in op.inputs:
                if slot.grad:
                    shared.join(id(slot.storage), id(op.outputs[0].storage))
    computed = {id(slot.storage) for op in group.ops if not op.passes for slot in op.inputs if slot.grad}
    """Tensors to whose gradient this group adds something of its own."""
    arriving: dict[int, int] = {}
    moved = 0
    for key, slot in group.writes.items():
        if slot.grad:
            count = readers.get(key, 0) + (1 if slot is layer_output.storage else 0)
            arriving[shared.root(key)] = arriving.get(shared.root(key), 0) + count
            moved += count * slot.size
    made: dict[int, int] = {}
    for key, slot in group.reads.items():
        if slot.grad:
            made[shared.root(key)] = max(slot.size, made.get(shared.root(key), 0))
    own = {shared.root(key) for key in computed}
    for root, size in made.items():
        if root not in own and arriving.get(root) == 1:  # handed on as it came, and never read
            moved -= size
        else:
            moved += size
    needed = _find_needed(group, inside)
    moved += _size(needed.values())
    weighed = [op for op in group.ops if op.weight_grad]
    # A vector's gradient is a sum over all tokens: kernels of its own, over the same again.
    moved += sum([2 * _size(op.inputs) for op in weighed])
    return Moved(max(moved, 0), int(moved > 0) + 2 * len(weighed))


def _find_needed(group: _Group, inside: dict[int, Op]) -> dict[int, Slot]:
    """Values that its gradients are computed from: what was written, and of what was not, what that came from."""
    needed: dict[int, Slot] = {}
    waiting = [slot.storage for op in group.ops for slot in op.saves if not op.passes]
    seen: set[int] = set()
    while waiting:
        slot = waiting.pop()
        if id(slot) in seen:
            continue
        seen.add(id(slot))
        if id(slot) in group.reads or id(slot) in group.writes:
            needed[id(slot)] = slot
        elif id(slot) in inside:
            waiting += [each.storage for each in inside[id(slot)].inputs]
    return needed


class _Shared:
    """Tensors that have one gradient together."""

    def __init__(self) -> None:
        self._above: dict[int, int] = {}

    def root(self, key: int) -> int:
        while key in self._above:
            key = self._above[key]
        return key

    def join(self, one: int, other: int) -> None:
        one, other = self.root(one), self.root(other)
        if one != other:
            self._above[one] = other


def _size(slots: Iterable[Slot]) -> int:
    return sum([slot.size for slot in slots])
