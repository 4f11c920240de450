"""A layer that runs as code of torch.compile's: what it holds, kernel by kernel.

The compiler sees both passes of a layer at once, and decides what goes from one to the other: see graph.py. Inductor
then turns chains of elementwise work into single kernels. So only these tensors ever exist: what products and kernels
read and write, what is kept, and the layer's output; and a chain that would read too much at once is written down in
between. A kernel writes over something that it reads for the last time, where sizes agree. Then inductor looks for the
order that holds least. The backward pass is one function, whose weight gradients come out together at its end, and
whose kept tensors go as soon as they have been used; the gradient that it was given stays to its end.

The tape of the layer is the same as for a layer that is run operation by operation. It is read here as a graph of
values and becomes two lists of kernels. What is modelled was read in inductor's sources and in the code that it made
for layers of four models on an H200. What these keep comes out exactly; so do their peaks, unless inductor takes
another order: the largest difference seen is 3.5 % of one layer's (tests/memory/test_compiled.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from tightfit.memory.graph import REDUCTION, Graph, Value, cut, follow_tags, read_graph
from tightfit.memory.tape import SMALLEST_MOVED_BYTES, LayerCost, Op, Slot, Tape

MOST_READS, MOST_READS_REUSED = 8, 4
"""Inductor's `realize_acc_reads_threshold` and `realize_reads_threshold`: a chain that reads more tensors than this is
written to memory in between; the second where more than one kernel would compute it."""

BESIDE_SOFTMAX = 3  # what a softmax reads in its backward pass beside gradient and scores: two sums of rows, the mask

Kind = Literal["heavy", "row", "column"]
"""What a kernel does: a product or the like; elementwise work, with sums over rows; sums over all rows, for the
gradient of a norm's weight."""


class _Piece(NamedTuple):
    """One tensor that fused work writes, and what it is computed from."""

    reads: frozenset[int]
    write: int
    shifts: bool  # from elements at other places, too: it cannot be written over what it reads
    is_first: bool  # in a loop over the row of its own, after which another goes over it again


@dataclass(slots=True, eq=False)
class Launch:
    """One launch of generated code, or a call of a library."""

    number: int
    kind: Kind
    reads: set[int]  # buffers
    writes: list[int]
    temp: int = 0
    pieces: list[_Piece] = field(default_factory=list)


def measure_graph(
    tape: Tape, layer_input: Slot, layer_output: Slot, select: tuple[str, ...] | None = None
) -> LayerCost:
    """`select`: the parts that run again inside the graph, empty for all; None: nothing does, but what the compiler
    likes to. Then the layer's input is counted if it is kept; otherwise it is left to who asks for recomputation."""
    graph = read_graph(tape, layer_input)
    output = graph.of(layer_output)
    if select is None:
        cut(graph)
    else:
        follow_tags(graph, select)
    own = layer_input.size if graph.input.saved else 0
    forward = _Schedule(graph).run_forward(output, keeps=True).most() + own
    backward = _Schedule(graph)
    weight_grads, input_grad = backward.run_backward(tape.ops, layer_input, layer_output)
    # There is an order to choose where weight gradients are large. Forwards, and where they are small, that in which
    # the layer was traced is the best.
    most = backward.most(search=sum(weight_grads) > layer_output.size)
    arrivals, rest = [], sum(weight_grads) + input_grad
    for size in weight_grads:
        rest -= size
        arrivals.append((size, rest))
    saved = [value.size for value in graph.values if value.saved]
    return LayerCost(
        saved=sum(saved),
        output=layer_output.size,
        forward=forward,
        forward_unsaved=_Schedule(graph).run_forward(output, keeps=False).most() if select is None else forward,
        recompute=forward if select is None else 0,
        backward=most,
        backward_kept=most,
        weight_grads=sum(weight_grads),
        input_grad=input_grad,
        arrivals=tuple(arrivals),
        small=sum([size for size in saved if size < SMALLEST_MOVED_BYTES]),
    )


class _Schedule:
    """Kernels, and the buffers between them."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.kernels: list[Launch] = []
        self.sizes: list[int] = []
        self.held: set[int] = set()  # buffers that outlive the pass, or are somebody else's
        self.start: set[int] = set()  # those that are there when it begins
        self.fixed: set[int] = set()  # inputs that are not the compiler's own: it does not plan with them
        self.buffers: dict[Value, int] = {}
        self.inners: dict[Value, int] = {}

    def launch(
        self,
        kind: Kind,
        reads: Iterable[int],
        sizes: Iterable[int],
        temp: int = 0,
        *,
        shifts: bool = False,
        is_first: bool = False,
    ) -> list[int]:
        writes = [self.buffer(size) for size in sizes]
        known = set(reads)
        pieces = [_Piece(frozenset(known), write, shifts, is_first) for write in writes] if kind == "row" else []
        self.kernels.append(Launch(len(self.kernels), kind, known, writes, temp, pieces))
        return writes

    def buffer(self, size: int) -> int:
        self.sizes.append(size)
        return len(self.sizes) - 1

    # what the forward pass computes

    def sources(self, value: Value) -> set[int]:
        """The buffers from which it is computed, wherever it is read; itself, where it has one."""
        if value in self.buffers:
            return {self.buffers[value]}
        if value.heavy:
            return {self.make(value)}
        found = self._gather_sources(value)
        if value.inner and self.start and len(found) > 1:
            found.add(self._write_inner(value, found))
        if len(found) > (MOST_READS_REUSED if len(value.users) > 1 else MOST_READS):
            return {self._write(value, found)}
        return found

    def _gather_sources(self, value: Value) -> set[int]:
        found: set[int] = set()
        for each in value.inputs:
            found |= self.sources(each)
        return found

    def make(self, value: Value) -> int:
        """Its buffer."""
        if value in self.buffers:
            return self.buffers[value]
        if not value.heavy or value.part in ("elementwise", "random"):  # the latter: sums of a norm, masks
            return self._write(value, self._gather_sources(value))
        same = self.graph.made_by[value.order]
        inputs = next((each.inputs for each in same if each.inputs), [])
        reads = [self.make(each) for each in inputs]
        writes = self.launch("heavy", reads, [each.size for each in same], max([each.temp for each in same]))
        self.buffers.update(zip(same, writes, strict=True))
        return self.buffers[value]

    def _write_inner(self, value: Value, found: set[int]) -> int:
        """What both passes of an activation share, if that is long to compute: it is written down where the activation
        is made again, unless what that reads is there as one tensor."""
        if value not in self.inners:
            (self.inners[value],) = self.launch("row", found, [value.inner])
        return self.inners[value]

    def _write(self, value: Value, found: set[int]) -> int:
        (self.buffers[value],) = self.launch("row", found, [value.size], shifts=value.shifts)
        return self.buffers[value]

    def run_forward(self, output: Value, *, keeps: bool) -> _Schedule:
        source = self.buffers[self.graph.input] = self.buffer(0)
        self.held.add(source)
        for value in self.graph.values:
            if value is self.graph.input:
                continue
            kept = keeps and value.saved
            if kept or value is output or (value.heavy and value.part not in ("elementwise", "random")):
                buffer = self.make(value)
                if kept or value is output:
                    self.held.add(buffer)
        return self

    # what the backward pass computes

    def run_backward(self, ops: list[Op], layer_input: Slot, layer_output: Slot) -> tuple[list[int], int]:
        """The weight gradients in the order in which they are made, and the gradient of the input."""
        for value in self.graph.values:
            if value.saved:
                self.buffers[value] = self.buffer(value.size)
                self.start.add(self.buffers[value])
        source = self.graph.input
        if not source.saved:
            self.buffers[source] = self.buffer(0)
        top = self.buffer(layer_output.size)
        self.start.add(top)
        self.fixed |= {self.buffers[source], top}
        self.held.add(top)  # by the engine, as long as it runs
        gradients: dict[int, _Flow] = {id(layer_output): _Flow({top}, top)}
        weight_grads: list[int] = []
        for op in reversed(ops):
            arrived = [gradients.pop(id(slot)) for slot in op.outputs if id(slot) in gradients]
            if arrived:
                gradient = arrived[0]
                if len(arrived) > 1:  # parts that were split, joined again
                    gradient = _Flow(set().union(*[each.sources for each in arrived]), None, True)
                self._go_back(op, gradient, gradients, weight_grads)
        final = gradients.get(id(layer_input))
        if final is None:
            return weight_grads, 0
        self.held.add(self._gather(final, layer_input.size))
        return weight_grads, layer_input.size

    def _gather(self, gradient: _Flow, size: int) -> int:
        if gradient.buffer is None:
            (gradient.buffer,) = self.launch("row", gradient.sources, [size], shifts=gradient.shifts)
            gradient.sources = {gradient.buffer}
        return gradient.buffer

    def _go_back(self, op: Op, gradient: _Flow, gradients: dict[int, _Flow], weight_grads: list[int]) -> None:
        """Through one operation."""
        inputs = [(slot, op.grad_sizes[i] if op.grad_sizes else slot.size) for i, slot in enumerate(op.inputs)]
        inputs = [(slot, size) for slot, size in inputs if slot.grad]
        size = op.outputs[0].size
        if op.part in ("elementwise", "random"):
            if op.passes and not op.weight_grad:
                for slot, _ in inputs:
                    self._add(gradients, slot, _Flow(set(gradient.sources), gradient.buffer, gradient.shifts))
                return
            uses = len(inputs) + (op.weight_grad > 0)
            if uses > 1 and len(gradient.sources) + (op.weight_grad == 0) > MOST_READS_REUSED:
                self._gather(gradient, size)  # the one more that is read: the norm's weight
            known = {slot: self.sources(self.graph.of(slot)) for slot in op.saves}
            if op.inner and (inner := self.inners.get(self.graph.of(op.outputs[0]))) is not None:
                known[op.outputs[0]] = {inner}
            reads = gradient.sources.union(*known.values())
            if op.rows and len(reads) + BESIDE_SOFTMAX > MOST_READS_REUSED:
                # A softmax: the product of its output and its gradient is added up by rows, and read again.
                (product,) = self.launch("row", reads, [op.outputs[0].size], is_first=True)
                gradient = _Flow({product}, product)
            if op.weight_grad:
                self.held.update(self.launch("column", reads, [op.weight_grad]))
                weight_grads.append(op.weight_grad)
            for slot, _ in reversed(inputs):
                # what a product of two keeps of one is for the gradient of the other
                others = [made for each, made in known.items() if len(inputs) < 2 or each is not slot]
                needs = gradient.sources.union(*([] if op.weighs else others))
                shifts = gradient.shifts or op.again > 0
                if slot.size * REDUCTION < size:  # it was spread over a row: summed up again
                    (summed,) = self.launch("row", needs, [slot.size], shifts=True)
                    self._add(gradients, slot, _Flow({summed}, summed))
                else:
                    self._add(gradients, slot, _Flow(needs, None, shifts))
            return
        arrived = self._gather(gradient, size)
        kept = [self.make(self.graph.of(slot)) for slot in op.saves]
        if op.product and len(op.inputs) == 1:  # a linear layer
            if op.weight_grad:
                self.held.update(self.launch("heavy", [arrived, *kept], [op.weight_grad], op.backward_temp))
                weight_grads.append(op.weight_grad)
            for slot, size in inputs:
                (made,) = self.launch("heavy", [arrived], [size], op.backward_temp)
                self._add(gradients, slot, _Flow({made}, made))
            return
        if len(op.inputs) == 2 and op.saves == op.inputs:  # a product of two, whose second gradient is computed first
            for slot, size in reversed(inputs):
                factors = [buffer for each, buffer in zip(op.saves, kept, strict=True) if each is not slot]
                (made,) = self.launch("heavy", [arrived, *factors], [size], op.backward_temp)
                self._add(gradients, slot, _Flow({made}, made))
            return
        sizes = [size for _, size in inputs] + ([op.weight_grad] if op.weight_grad else [])
        made_all = self.launch("heavy", [arrived, *kept], sizes, op.backward_temp)
        if op.weight_grad:
            self.held.add(made_all[-1])
            weight_grads.append(op.weight_grad)
        for (slot, _), made in zip(inputs, made_all, strict=False):
            self._add(gradients, slot, _Flow({made}, made))

    def _add(self, gradients: dict[int, _Flow], slot: Slot, gradient: _Flow) -> None:
        have = gradients.get(id(slot))
        if have is None:
            gradients[id(slot)] = gradient
            return
        both = _Flow(have.sources | gradient.sources, None, have.shifts or gradient.shifts)
        if len(both.sources) > MOST_READS:
            self._gather(both, slot.size)
        gradients[id(slot)] = both

    # in which order, and in what space

    def most(self, *, search: bool = False) -> int:
        """The most that is held at once, in the order in which the layer was traced, or in the best of those that
        inductor tries (`search`)."""
        order = _order(self._fuse(), self, search=search)
        last: dict[int, int] = {}
        for place, kernel in enumerate(order):
            for buffer in (*kernel.reads, *kernel.writes):
                last[buffer] = place
        live = most = sum([self.sizes[buffer] for buffer in self.start])
        for place, kernel in enumerate(order):
            ending = {buffer for buffer in kernel.reads if last[buffer] == place and buffer not in self.held}
            taken = self._in_place(kernel, ending)
            live += sum([self.sizes[buffer] for buffer in kernel.writes])
            live -= sum([self.sizes[buffer] for buffer in taken])
            most = max(most, live + kernel.temp)
            live -= sum([self.sizes[buffer] for buffer in ending if buffer not in taken])
            unread = [buffer for buffer in kernel.writes if last[buffer] == place and buffer not in self.held]
            live -= sum([self.sizes[buffer] for buffer in unread])
        return most

    def _in_place(self, kernel: Launch, ending: set[int]) -> set[int]:
        """Which of the buffers that end with this kernel it writes over: each by the one tensor that is computed from
        it (`decide_inplace_update`)."""
        taken: set[int] = set()
        for piece in kernel.pieces:
            if piece.shifts:
                continue
            for old in piece.reads:
                if old in ending and old not in taken and old not in self.fixed:
                    readers = sum([old in other.reads and not other.is_first for other in kernel.pieces])
                    if readers == 1 and self.sizes[old] == self.sizes[piece.write]:
                        taken.add(old)
                        break
        return taken

    def _fuse(self) -> list[Launch]:
        """Kernels of one kind that share what they read, or of which one reads what the other writes, become one,
        unless some other kernel has to run between them."""
        maker = {write: kernel.number for kernel in self.kernels for write in kernel.writes}
        before: list[int] = []  # bits: all kernels that have to run before this one
        for kernel in self.kernels:
            bits = 0
            for buffer in kernel.reads:
                if buffer in maker:
                    bits |= before[maker[buffer]] | 1 << maker[buffer]
            before.append(bits)
        alone = [kernel for kernel in self.kernels if kernel.kind == "heavy"]
        groups: list[tuple[Launch, int, int]] = []
        """Of the others: a kernel, the kernels that became it, and those that run before any of these."""
        for kernel in self.kernels:
            joined, own, ahead = kernel, 1 << kernel.number, before[kernel.number]
            if kernel.kind != "heavy":
                for i in range(len(groups) - 1, -1, -1):
                    other, members, theirs = groups[i]
                    if other.kind != kernel.kind or (
                        other.reads.isdisjoint(joined.reads) and joined.reads.isdisjoint(other.writes)
                    ):
                        continue
                    if _stands_between(before, ahead & ~members, members) or _stands_between(
                        before, theirs & ~own, own
                    ):
                        continue
                    joined = Launch(
                        other.number,
                        other.kind,
                        other.reads | joined.reads,
                        other.writes + joined.writes,
                        0,
                        other.pieces + joined.pieces,
                    )
                    own, ahead = own | members, ahead | theirs
                    del groups[i]
                groups.append((joined, own, ahead & ~own))
        for kernel, _, _ in groups:
            kernel.reads = kernel.reads.difference(kernel.writes)
        return alone + [kernel for kernel, _, _ in groups]


def _stands_between(before: list[int], kernels: int, members: int) -> bool:
    """Whether one of these kernels has to run after one of those. All are bits."""
    while kernels:
        highest = kernels.bit_length() - 1
        if before[highest] & members:
            return True
        kernels ^= 1 << highest
    return False


@dataclass(slots=True, eq=False)
class _Node:
    """A kernel for the search of an order."""

    kernel: Launch
    index: int
    size: int
    before: set[_Node] = field(default_factory=set)
    after: set[_Node] = field(default_factory=set)


def _order(kernels: list[Launch], schedule: _Schedule, *, search: bool) -> list[Launch]:
    """`reorder_for_peak_memory`: the order in which they were traced, and three others; the one that holds least."""
    sizes = schedule.sizes
    maker: dict[int, _Node] = {}
    nodes = []
    for index, kernel in enumerate(sorted(kernels, key=lambda each: each.number)):
        nodes.append(_Node(kernel, index, sum([sizes[write] for write in kernel.writes])))
        maker.update(dict.fromkeys(kernel.writes, nodes[-1]))
    for node in nodes:
        node.before = {maker[read] for read in node.kernel.reads if read in maker} - {node}
        for each in node.before:
            each.after.add(node)
    nodes = _visit(nodes)
    if not search:
        return [node.kernel for node in nodes]
    for index, node in enumerate(nodes):
        node.index = index
    readers: dict[int, int] = {}
    for node in nodes:
        for read in node.kernel.reads:
            readers[read] = readers.get(read, 0) + 1
    planned = {buffer for buffer in schedule.start if buffer not in schedule.fixed and buffer in readers}
    free = {b for b in readers if b not in schedule.held and (b in maker or b in planned)}
    begin = sum([sizes[buffer] for buffer in planned])

    def peak(order: list[_Node]) -> int:
        left, live = dict(readers), begin
        most = live
        for node in order:
            live += node.size
            most = max(most, live)
            for read in node.kernel.reads:
                left[read] -= 1
                if left[read] == 0 and read in free:
                    live -= sizes[read]
        return most

    wide = {node: node.size + sum([sizes[read] for read in node.kernel.reads if read in free]) for node in nodes}
    by_size = sorted(nodes, key=lambda node: (wide[node], node.index))
    tried = [
        nodes,
        _least_first(nodes, readers, free, begin, schedule),
        _widest_first(nodes),
        _visit(by_size, wide),
    ]
    return [node.kernel for node in min(tried, key=peak)]


def _visit(wanted: list[_Node], wide: dict[_Node, int] | None = None) -> list[_Node]:
    """`topological_sort_dfs`, and how the traced order is made: each node after those before it."""
    seen: set[_Node] = set()
    result: list[_Node] = []

    def visit(node: _Node) -> None:
        if node in seen:
            return
        seen.add(node)
        for each in sorted(node.before, key=lambda other: (wide[other] if wide else 0, other.index)):
            visit(each)
        result.append(node)

    for node in wanted:
        visit(node)
    return result


def _least_first(
    nodes: list[_Node], readers: dict[int, int], free: set[int], begin: int, schedule: _Schedule
) -> list[_Node]:
    """`topological_sort_lpmf`: whatever holds least next."""
    sizes = schedule.sizes
    left, waits = dict(readers), {node: len(node.before) for node in nodes}
    frees = {node: sum([sizes[r] for r in node.kernel.reads if r in free and left[r] == 1]) for node in nodes}
    users: dict[int, list[_Node]] = {}
    for node in nodes:
        for read in node.kernel.reads:
            users.setdefault(read, []).append(node)
    ready = [node for node in nodes if waits[node] == 0]
    live = begin
    most = max(live, sum([sizes[write] for node in nodes for write in node.kernel.writes if write in schedule.held]))
    order: list[_Node] = []
    while ready:
        gap = most - live
        chosen = min(ready, key=lambda node: (node.size if node.size > gap else 0, node.size - frees[node], node.index))
        ready.remove(chosen)
        order.append(chosen)
        live += chosen.size
        most = max(most, live)
        live -= frees[chosen]
        for node in chosen.after:
            waits[node] -= 1
            if waits[node] == 0:
                ready.append(node)
        for read in chosen.kernel.reads:
            left[read] -= 1
            if left[read] == 1 and read in free:
                for node in users[read]:
                    frees[node] += sizes[read]
    return order


def _widest_first(nodes: list[_Node]) -> list[_Node]:
    """`topological_sort_bfs`: what comes after the earliest."""
    waits, place = {node: len(node.before) for node in nodes}, dict[_Node, int]()
    ready = [node for node in nodes if waits[node] == 0]
    order: list[_Node] = []
    while ready:
        chosen = min(ready, key=lambda node: (sorted([place[each] for each in node.before]), node.index))
        ready.remove(chosen)
        place[chosen] = len(order)
        order.append(chosen)
        for node in chosen.after:
            waits[node] -= 1
            if waits[node] == 0:
                ready.append(node)
    return order


@dataclass(slots=True)
class _Flow:
    """What it is computed from, and the buffer that it is in, if it is."""

    sources: set[int]
    buffer: int | None = None
    shifts: bool = False
