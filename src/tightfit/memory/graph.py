"""The tensors of a layer's forward pass as a graph, and which of them are kept for the backward pass.

By `cut`, what torch.compile keeps where nothing is asked of it (`_functorch/partitioners.py`): products, kernels and
random numbers are never computed twice; what a product needs again in the backward pass is kept as it stands; all else
is made again from what is kept, wherever that is fewer bytes, which is a minimum cut of the graph. Two of its
exceptions matter: sums over rows are kept, since they are small, and an addition that reaches over a product (a
residual) is not made again.

By `follow_tags`, what is kept where recomputation is asked for by part (`train/recompute.py`), compiled or not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from itertools import pairwise

from tightfit.memory.tape import Slot, Tape

NEARER = 1.1
"""`get_node_weight`: of two equal cuts the one nearer to the backward pass is cheaper, by this factor a step."""
REDUCTION = 4  # `ban_if_reduction`: what is so many times smaller than what it comes from is kept


@dataclass(slots=True, eq=False)
class Value:
    """One tensor of the forward pass, with all its views."""

    size: int
    order: int  # the operation that makes it; -1: the layer's input
    heavy: bool  # a product's, a kernel's or a random one: not computed twice
    part: str = "elementwise"
    sums: str | None = None  # see `Op`
    inputs: list[Value] = field(default_factory=list)
    users: list[Value] = field(default_factory=list)
    stays: bool = False  # it may not be made again though it could
    needed: bool = False  # by some backward
    whole: bool = False  # likewise as a tensor in memory, since a product or a kernel reads it
    saved: bool = False
    temp: int = 0
    shifts: bool = False
    inner: int = 0  # see `Op`


@dataclass(slots=True)
class Graph:
    """The values of a tape."""

    values: list[Value]
    by_storage: dict[int, Value]
    input: Value
    made_by: dict[int, list[Value]] = field(default_factory=dict)  # what each product or kernel writes, by its order

    def of(self, slot: Slot) -> Value:
        return self.by_storage[id(slot.storage)]


def read_graph(tape: Tape, layer_input: Slot) -> Graph:
    source = Value(layer_input.size, -1, True)
    graph = Graph([source], {id(layer_input.storage): source}, source)
    copies: dict[tuple[int, int], Value] = {}
    """Casts of one tensor to one precision are one (`fx_graph_cse`)."""
    for order, op in enumerate(tape.ops):
        inputs = [graph.of(slot) for slot in op.inputs]
        heavy = op.part not in ("elementwise", "random")
        flows, made = any([slot.grad for slot in op.outputs]), list[Value]()
        for slot in (*op.makes, *op.keeps):
            made.append(Value(slot.size, order, True, op.part, inputs=[] if heavy else inputs))
            graph.by_storage[id(slot)] = made[-1]
        if op.rows:
            made.append(Value(op.rows, order, True, op.part, inputs=inputs, needed=flows))
        for slot in op.outputs:
            if slot.storage is not slot:
                continue
            key = (id(inputs[0]), slot.size) if op.access == "cast" and not op.weight_grad else None
            if key in copies:
                graph.by_storage[id(slot)] = copies[key]
                continue
            value = Value(slot.size, order, heavy, op.part, inputs=inputs, temp=op.forward_temp if heavy else 0)
            value.shifts, value.sums, value.inner = op.again > 0, op.sums, op.inner
            if op.part == "random":
                value.inputs = [*inputs, *made]
            graph.by_storage[id(slot)] = value
            graph.values.append(value)
            if key:
                copies[key] = value
        graph.values += made
        for value in inputs:
            value.users += [graph.of(slot) for slot in op.outputs if slot.storage is slot]
        if flows:
            for slot in op.saves:
                value = graph.of(slot)
                value.needed = True
                value.whole = value.whole or heavy
        if heavy:
            graph.made_by[order] = [graph.of(slot) for slot in op.outputs if slot.storage is slot] + made
    return graph


def cut(graph: Graph) -> None:
    """Choose what is kept, as `solve_min_cut` does."""
    for value in graph.values:
        if not value.heavy and value.inputs:
            value.stays = value.whole or value.size * REDUCTION < sum([each.size for each in value.inputs])
    _forbid_far_uses(graph)
    wanted: list[Value] = []
    for value in graph.values:
        if value.needed and (value.heavy or value.stays):
            value.saved = True
        elif value.needed:
            wanted.append(value)
    _save_cheapest(wanted, lambda value: value.heavy or value.stays)


def _save_cheapest(wanted: list[Value], ends: Callable[[Value], bool]) -> None:
    """Keep the fewest bytes from which all that is wanted can be made: of what lies between it, what is kept already,
    and what is not made again, where it `ends`."""
    between: set[Value] = set()
    leaves: set[Value] = set()
    waiting = list(wanted)
    while waiting:
        value = waiting.pop()
        if value in between or value.saved:
            continue
        between.add(value)
        if ends(value):
            leaves.add(value)
        else:
            waiting += value.inputs
    if leaves:
        for value in _find_minimum_cut(between, leaves, wanted):
            value.saved = True


def _forbid_far_uses(graph: Graph) -> None:
    """`ban_if_used_far_apart`: what is read both before and after a product is not read again after it; not so for what
    no kernel could go on from, as products and the layer's input."""
    for value in graph.values:
        if len(value.users) < 2 or value.heavy:
            continue
        last = max([user.order for user in value.users])
        waiting, seen = deque(sorted(value.users, key=lambda user: user.order)), set[Value]()
        first = last
        while waiting:
            user = waiting.popleft()
            if user in seen or user.order > first:
                continue
            seen.add(user)
            if user.heavy:
                first = min(first, user.order)
            else:
                waiting += user.users
        for user in value.users:
            if user.order > first and not user.heavy:
                user.stays = True


def _find_minimum_cut(inside: set[Value], leaves: set[Value], wanted: list[Value]) -> list[Value]:
    """Which of these values to keep, so that all that is wanted can be made: from source to sink, each value an edge
    as wide as its bytes."""
    goals, near = set(wanted), dict[Value, int]()
    for value in sorted(inside, key=lambda value: -value.order):
        near[value] = 1 if value in goals else 1 + min([near.get(user, 100) for user in value.users], default=100)
    room: dict[Value, float] = {}
    for value in inside:
        is_whole = value.heavy or any([user.heavy for user in value.users])
        room[value] = value.size * NEARER ** min(near[value], 100) * (1 if is_whole else 2)
    flow: dict[tuple[Value, Value], float] = {}
    through = dict.fromkeys(inside, 0.0)
    while True:  # shortest augmenting paths over (value, side): side 0 before its edge, 1 behind it
        came: dict[tuple[Value, int], tuple[Value, int] | None] = {(leaf, 0): None for leaf in leaves}
        waiting = deque(came)
        end: tuple[Value, int] | None = None
        while waiting and end is None:
            at = value, side = waiting.popleft()
            steps: list[tuple[Value, int]] = []
            if side == 0:
                if through[value] < room[value]:
                    steps.append((value, 1))
                steps += [(each, 1) for each in value.inputs if flow.get((each, value), 0) > 0]
            else:
                if value in goals:
                    end = at
                    break
                if through[value] > 0:
                    steps.append((value, 0))
                steps += [(user, 0) for user in value.users if user in inside and user not in leaves]
            for step in steps:
                if step not in came:
                    came[step] = at
                    waiting.append(step)
        if end is None:
            return [value for value in inside if (value, 0) in came and (value, 1) not in came]
        path = [end]
        while (before := came[path[-1]]) is not None:
            path.append(before)
        path.reverse()
        pushed = min(
            [
                room[a] - through[a] if (a is b and i < j) else through[a] if a is b else flow.get((b, a), 0.0)
                for (a, i), (b, j) in pairwise(path)
                if a is b or i == 0
            ]
        )
        for (a, i), (b, j) in pairwise(path):
            if a is b:
                through[a] += pushed if i < j else -pushed
            elif i == 1:
                flow[a, b] = flow.get((a, b), 0.0) + pushed
            else:
                flow[b, a] -= pushed


def follow_tags(graph: Graph, select: Collection[str]) -> None:
    """Choose what is kept where these parts run again, or with none, all of them: products and kernels of the others,
    as far as anything that is made again or their own backward reads them; and of a module with an adapter the sum,
    instead of both products."""
    wanted: list[Value] = []
    seen: set[Value] = set()
    waiting = [value for value in graph.values if value.needed and value is not graph.input]
    for value in waiting:
        value.stays = value.whole and value.sums is not None and not runs_again(value.sums, select)
    while waiting:
        value = waiting.pop()
        if value in seen or value is graph.input:
            continue
        seen.add(value)
        if value.part in ("elementwise", "random") and (value.sums is None or runs_again(value.sums, select)):
            waiting += value.inputs
        elif value.sums is None:
            if runs_again(value.part, select):
                waiting += [each for made in graph.made_by[value.order] for each in made.inputs]
            else:
                value.saved = True
        elif value.stays:
            value.saved = True
        else:
            wanted.append(value)
    _save_cheapest(wanted, lambda value: value.sums is None)
    graph.input.saved = False  # whoever asks for recomputation counts it


def runs_again(part: str, select: Collection[str]) -> bool:
    """Whether a product or a kernel of this part does, where these are selected; a scan always does."""
    return not select or part == "scan" or ("mlp" if part == "down" else part) in select
