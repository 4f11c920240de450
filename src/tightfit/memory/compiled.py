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

Which kernels there are depends on what reads what, and on how large activations are against each other, not on how
large they are. So the kernels of a layer are found once for all micro batches, and for all lengths at which it has the
same proportions (`find_code`); how much they hold is then added up with the sizes of each.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from math import gcd
from typing import Literal, NamedTuple

from tightfit.memory.graph import REDUCTION, Graph, Value, cut, follow_tags, read_graph
from tightfit.memory.tape import SMALLEST_MOVED_BYTES, Access, LayerCost, Op, Part, Slot, Tape

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
    form = _form_of(tape, layer_input, layer_output)
    code, sizes = find_code(form.ops, form.slots, form.ends, form.proportions, select), form.sizes
    kept = measure_kept(tape, layer_input, layer_output, select)
    kernels = find_kernels(code)
    weight_grads = [sizes[place] for place in kernels.backward.weight_grads]
    own = layer_input.size if code.keeps_input else 0
    forward = kernels.forward.most(sizes) + own
    # There is an order to choose where weight gradients are large. Forwards, and where they are small, that in which
    # the layer was traced is the best.
    most = kernels.backward.kernels.most(sizes, search=sum(weight_grads) > layer_output.size)
    input_grad = layer_input.size if kernels.backward.has_input_grad else 0
    arrivals, rest = [], sum(weight_grads) + input_grad
    for size in weight_grads:
        rest -= size
        arrivals.append((size, rest))
    return LayerCost(
        saved=kept.saved,
        output=layer_output.size,
        forward=forward,
        forward_unsaved=kernels.forward_unsaved.most(sizes) if select is None else forward,
        recompute=forward if select is None else 0,
        backward=most,
        backward_kept=most,
        weight_grads=sum(weight_grads),
        input_grad=input_grad,
        arrivals=tuple(arrivals),
        small=kept.small,
    )


class KeptBytes(NamedTuple):
    """As `LayerCost` has them."""

    saved: int
    small: int


def measure_kept(tape: Tape, layer_input: Slot, layer_output: Slot, select: tuple[str, ...] | None) -> KeptBytes:
    """What `measure_graph` says of it, for less."""
    form = _form_of(tape, layer_input, layer_output)
    code = find_code(form.ops, form.slots, form.ends, form.proportions, select)
    saved = [form.sizes[place] for place in code.saved]
    return KeptBytes(sum(saved), sum([size for size in saved if size < SMALLEST_MOVED_BYTES]))


# --- a layer without its size ------------------------------------------------------------------------


class _OpForm(NamedTuple):
    """An operation without its sizes: slots by their numbers, and of every size whether there is any."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    saves: tuple[int, ...]
    makes: tuple[int, ...]
    keeps: tuple[int, ...]
    passes: bool
    grad_sizes: int | None  # how many are given
    product: bool
    part: Part
    sums: Part | None
    weighs: bool
    access: Access
    again: bool
    temps: tuple[bool, bool]  # forwards, backwards
    weight_grad: bool
    rows: bool
    inner: bool


class _Form(NamedTuple):
    ops: tuple[_OpForm, ...]
    slots: tuple[tuple[int, bool], ...]  # of each its storage, and whether a gradient flows through it
    ends: tuple[int, int]
    proportions: tuple[int, ...]  # of the sizes that grow with the tokens, which come first
    sizes: list[int]  # of slots and of what is as large as activations, then of all else, and 0


class _Size(int):
    """Bytes, in some unit, and the place where a form lists them."""

    place: int


def _sized(size: int, place: int) -> _Size:
    made = _Size(size)
    made.place = place
    return made


@lru_cache(maxsize=64)
def _form_of(tape: Tape, layer_input: Slot, layer_output: Slot) -> _Form:
    numbers: dict[int, int] = {}
    slots: list[tuple[int, bool]] = []
    growing: list[int] = []
    fixed: list[int] = []
    ops: list[_OpForm] = []

    def number(slot: Slot) -> int:
        known = numbers.get(id(slot))
        if known is None:
            storage = number(slot.storage) if slot.storage is not slot else len(slots)
            known = numbers[id(slot)] = len(slots)
            slots.append((storage, slot.grad))
            growing.append(slot.size)
        return known

    def number_all(group: tuple[Slot, ...]) -> tuple[int, ...]:
        return tuple([number(slot) for slot in group])

    for op in tape.ops:
        form = _OpForm(
            inputs=number_all(op.inputs),
            outputs=number_all(op.outputs),
            saves=number_all(op.saves),
            makes=number_all(op.makes),
            keeps=number_all(op.keeps),
            passes=op.passes,
            grad_sizes=None if op.grad_sizes is None else len(op.grad_sizes),
            product=op.product,
            part=op.part,
            sums=op.sums,
            weighs=op.weighs,
            access=op.access,
            again=op.again > 0,
            temps=(op.forward_temp > 0, op.backward_temp > 0),
            weight_grad=op.weight_grad > 0,
            rows=op.rows > 0,
            inner=op.inner > 0,
        )
        ops.append(form)
        fixed += (op.forward_temp, op.backward_temp, op.weight_grad)
    ends = number(layer_input), number(layer_output)
    for op in tape.ops:
        growing += (op.rows, op.inner, *(op.grad_sizes or ()))
    unit = gcd(*growing) or 1
    proportions = tuple([size // unit for size in growing])
    return _Form(tuple(ops), tuple(slots), ends, proportions, [*growing, *fixed, 0])


class _Code:
    """What the compiler makes of a layer. All sizes are places in the lists of forms.

    Its kernels are those of any layer with the same operations that keeps the same tensors, where the same sizes are
    equal and the same gradients are spread over rows: such codes are equal, and share them (`find_kernels`)."""

    def __init__(self, form: _Unsized, tape: Tape, ends: tuple[Slot, Slot], select: tuple[str, ...] | None) -> None:
        self.tape, self.ends = tape, ends
        self.graph = read_graph(tape, ends[0])
        if select is None:
            cut(self.graph)
        else:
            follow_tags(self.graph, select)
        self.saved = [_place(value.size) for value in self.graph.values if value.saved]
        self.keeps_input = self.graph.input.saved
        first = dict[int, int]()
        alike = tuple([first.setdefault(size, place) for place, size in enumerate(form[-1])])
        spread = tuple([_is_spread(slot, op.outputs[0].size) for op in tape.ops for slot in op.inputs if op.outputs])
        made = tuple([len(value.inputs) for value in self.graph.values])  # of casts that are one there is but one
        self.key = form[:-1], tuple(self.saved), alike, spread, made
        self._hash = hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Code) and self.key == other.key

    def __hash__(self) -> int:
        return self._hash


class _LayerKernels:
    """Of both passes, found when they are asked for."""

    def __init__(self, code: _Code) -> None:
        self.tape, self.ends, self.graph = code.tape, code.ends, code.graph

    @cached_property
    def forward(self) -> _PassKernels:
        return _PassKernels(_Schedule(self.graph).run_forward(self.graph.of(self.ends[1]), keeps=True))

    @cached_property
    def forward_unsaved(self) -> _PassKernels:
        return _PassKernels(_Schedule(self.graph).run_forward(self.graph.of(self.ends[1]), keeps=False))

    @cached_property
    def backward(self) -> _BackwardKernels:
        schedule = _Schedule(self.graph)
        weight_grads, input_grad = schedule.run_backward(self.tape.ops, *self.ends)
        return _BackwardKernels(_PassKernels(schedule), [_place(size) for size in weight_grads], input_grad > 0)


@lru_cache(maxsize=512)
def find_kernels(code: _Code) -> _LayerKernels:
    return _LayerKernels(code)


class _BackwardKernels(NamedTuple):
    kernels: _PassKernels
    weight_grads: list[int]
    has_input_grad: bool


_Unsized = tuple[tuple[_OpForm, ...], tuple[tuple[int, bool], ...], tuple[int, int], tuple[int, ...]]
"""Operations, slots, ends and proportions of a form."""


@lru_cache(maxsize=1024)
def find_code(
    forms: tuple[_OpForm, ...],
    slots: tuple[tuple[int, bool], ...],
    ends: tuple[int, int],
    proportions: tuple[int, ...],
    select: tuple[str, ...] | None,
) -> _Code:
    tape, layer_input, layer_output = _record(forms, slots, ends, proportions)
    return _Code((forms, slots, ends, proportions), tape, (layer_input, layer_output), select)


@lru_cache(maxsize=64)
def _record(
    forms: tuple[_OpForm, ...], slots: tuple[tuple[int, bool], ...], ends: tuple[int, int], proportions: tuple[int, ...]
) -> tuple[Tape, Slot, Slot]:
    """The tape of such a layer, its input and its output: the same whatever of it runs again."""
    sizes = [_sized(size, place) for place, size in enumerate(proportions)]
    tensors: list[Slot] = []
    for place, (storage, grad) in enumerate(slots):
        tensors.append(Slot(sizes[place], grad, None if storage == place else tensors[storage]))
    tape, growing, fixed = Tape(), len(slots), len(proportions)

    def pick(group: tuple[int, ...]) -> tuple[Slot, ...]:
        return tuple([tensors[number] for number in group])

    for form in forms:
        rows, inner, *grads = sizes[growing : growing + 2 + (form.grad_sizes or 0)]
        amounts = (*form.temps, form.weight_grad)
        forward_temp, backward_temp, weight_grad = (_sized(amount, fixed + i) for i, amount in enumerate(amounts))
        growing, fixed = growing + 2 + len(grads), fixed + len(amounts)
        tape.ops.append(
            Op(
                pick(form.inputs),
                pick(form.outputs),
                pick(form.saves),
                pick(form.makes),
                pick(form.keeps),
                forward_temp,
                backward_temp,
                weight_grad,
                passes=form.passes,
                grad_sizes=None if form.grad_sizes is None else tuple(grads),
                product=form.product,
                part=form.part,
                sums=form.sums,
                weighs=form.weighs,
                rows=rows,
                inner=inner,
                access=form.access,
                again=form.again,
            )
        )
    return tape, tensors[ends[0]], tensors[ends[1]]


def _place(size: int) -> int:
    """Where a form lists it; last is 0."""
    return size.place if isinstance(size, _Size) else -1


def _is_spread(slot: Slot, size: int) -> bool:
    """Over the rows of what is made of it, which is so large."""
    return slot.size * REDUCTION < size


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
                if _is_spread(slot, size):  # summed up again
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

    # in what space, and how many

    def list_held(self, order: list[Launch]) -> list[_Held]:
        last: dict[int, int] = {}
        for place, kernel in enumerate(order):
            for buffer in (*kernel.reads, *kernel.writes):
                last[buffer] = place
        turns = []
        for place, kernel in enumerate(order):
            ending = {buffer for buffer in kernel.reads if last[buffer] == place and buffer not in self.held}
            taken = self._in_place(kernel, ending)
            unread = [buffer for buffer in kernel.writes if last[buffer] == place and buffer not in self.held]
            turns.append(
                _Held(
                    self.place(kernel.writes),
                    self.place(taken),
                    _place(kernel.temp),
                    self.place([*ending.difference(taken), *unread]),
                )
            )
        return turns

    def place(self, buffers: Iterable[int]) -> list[int]:
        return [_place(self.sizes[buffer]) for buffer in buffers]

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

    def fuse(self) -> list[Launch]:
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


class _Held(NamedTuple):
    """What a kernel writes, over which of these it does, what it needs meanwhile, and what nobody needs after it: the
    places of the sizes."""

    writes: list[int]
    taken: list[int]
    temp: int
    ends: list[int]


class _PassKernels:
    """The kernels of a pass, and what they hold."""

    def __init__(self, schedule: _Schedule) -> None:
        self.schedule, self.kernels = schedule, schedule.fuse()
        self.start = schedule.place(schedule.start)
        self.traced = schedule.list_held(_order(self.kernels, schedule))

    def most(self, sizes: Sequence[int], *, search: bool = False) -> int:
        """The most that is held at once, in the order in which the layer was traced, or in the best of those that
        inductor tries (`search`)."""
        turns = self.traced
        if search:
            own = [sizes[place] for place in self.schedule.place(range(len(self.schedule.sizes)))]
            turns = self.schedule.list_held(_order(self.kernels, self.schedule, own))
        live = most = sum([sizes[place] for place in self.start])
        for writes, taken, temp, ends in turns:
            for place in writes:
                live += sizes[place]
            for place in taken:
                live -= sizes[place]
            if live + sizes[temp] > most:
                most = live + sizes[temp]
            for place in ends:
                live -= sizes[place]
        return most


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


def _order(kernels: list[Launch], schedule: _Schedule, search: list[int] | None = None) -> list[Launch]:
    """The order in which they were traced, or with the sizes of all buffers that of `reorder_for_peak_memory`, which
    tries three others, too, and takes the one that holds least."""
    sizes = search or schedule.sizes
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
    if search is None:
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
        _least_first(nodes, readers, free, begin, sizes, schedule.held),
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
    nodes: list[_Node], readers: dict[int, int], free: set[int], begin: int, sizes: list[int], held: set[int]
) -> list[_Node]:
    """`topological_sort_lpmf`: whatever holds least next."""
    left, waits = dict(readers), {node: len(node.before) for node in nodes}
    frees = {node: sum([sizes[r] for r in node.kernel.reads if r in free and left[r] == 1]) for node in nodes}
    users: dict[int, list[_Node]] = {}
    for node in nodes:
        for read in node.kernel.reads:
            users.setdefault(read, []).append(node)
    ready = [node for node in nodes if waits[node] == 0]
    live = begin
    most = max(live, sum([sizes[write] for node in nodes for write in node.kernel.writes if write in held]))
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
