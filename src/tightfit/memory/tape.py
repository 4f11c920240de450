"""A layer as a list of operations, and what autograd makes of it.

Autograd's memory is decided by three facts about each operation: which tensors it keeps for the backward
pass (PyTorch writes them down in `derivatives.yaml`), what it allocates, and when the last user of a tensor
is done. So a layer is written here as a tape of such operations, in the order in which Hugging Face's code
runs them, and `measure` walks it twice: forwards, freeing what nobody needs any more, and backwards,
allocating the gradients and freeing what was kept. The result is exact where the tape is: saved bytes are
those that saved-tensor hooks see (each storage once), peaks are those of a real run of that layer.

The alternative, closed formulas such as "34·s·b·h", is shorter and stays wrong in the corners that decide
whether a job fits: fp32 copies inside norms, adapters, quantised weights, small batches whose weight
gradients outweigh the activations. Walking the real thing on the meta device would be exact too, but needs
torch and seconds; a tape takes microseconds.

Sizes are bytes for the whole micro batch. A `Slot` is a tensor; a view is a slot that names another's storage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from tightfit.memory.selection import Place

Access = Literal["plain", "cast", "rows", "parts", "sent"]
"""How an operation's kernels go through memory, which decides how fast: element by element, with another width, summing
rows up, or over parts of rows that lie apart. `sent`: its inputs and outputs pass between ranks, its temporaries are
put in order for it."""
Part = Place | Literal["elementwise", "random"]
"""What computes: a product or a kernel of a part of the layer, elementwise work, or random numbers."""
Turn = tuple[int, int, int]
"""Of one module: what is held when it is called, the most while it runs, and the most from then to the next call."""
Turns = tuple[tuple[Turn, ...], tuple[Turn, ...], tuple[Turn, ...]]
"""Forwards with everything kept, forwards with nothing kept, and backwards."""


class Slot:
    """One tensor."""

    __slots__ = ("grad", "size", "storage")

    def __init__(self, size: int, grad: bool, storage: Slot | None = None) -> None:
        self.size = size
        self.grad = grad
        """A gradient flows through it."""
        self.storage: Slot = storage.storage if storage is not None else self
        """Itself, or the tensor whose memory it shares."""


@dataclass(slots=True)
class Op:
    """One operation. `saves` are storages kept until its backward has run."""

    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]
    saves: tuple[Slot, ...] = ()
    makes: tuple[Slot, ...] = ()
    """Storages that appear beside the outputs (row sums of an attention kernel, masks of a dropout)."""
    keeps: tuple[Slot, ...] = ()  # storages that add up only where autograd keeps them (the states of a loop)
    forward_temp: int = 0  # allocated and freed inside the forward
    backward_temp: int = 0  # likewise inside the backward, beside the gradients of the inputs
    weight_grad: int = 0  # gradient of the parameters, handed to the engine as soon as it is there
    weight_grads: tuple[int, ...] = ()  # of several parameters, of which all are there before the first is handed over
    passes: bool = False  # the gradient of the output is that of the inputs: nothing is allocated (additions, views)
    grad_sizes: tuple[int, ...] | None = None  # gradients of the inputs where they are not as large as the inputs
    product: bool = False
    """A matrix product or a kernel around one: the arithmetic is its time, its bytes pass meanwhile."""
    part: Part = "elementwise"
    sums: Part | None = None  # adds an adapter's product to that of the module, which is of this part
    weighs: bool = False  # times a parameter: what it saves is for the gradient of that alone
    rows: int = 0
    """Maxima and sums of its rows, from which compiled code makes its output again (softmax)."""
    inner: int = 0
    """What its forward and its backward both compute, in fp32 (the tangent of a GELU); for compiled code."""
    access: Access = "plain"
    again: int = 0
    """Bytes that pass through memory in its forward beyond its inputs, its outputs and its temporaries twice."""
    again_back: int = 0  # likewise in its backward
    fused: bool = False
    """One kernel of Liger's: each pass reads what there is and writes what comes of it once."""
    overwrites: bool = False  # the gradients of its inputs are written over what it keeps


SMALLEST_MOVED_BYTES = 1 << 20
"""Of what layers keep, a smaller tensor costs more to move to the host than to keep."""


@dataclass(frozen=True, slots=True)
class LayerCost:
    """What a layer holds, beside its input."""

    saved: int  # kept for the backward pass when the layer is not checkpointed
    output: int
    forward: int  # the most that is held while it runs with everything kept
    forward_unsaved: int  # the same when nothing is kept: the first pass of a checkpointed layer, or evaluation
    recompute: int  # the same when a checkpointed layer runs again: it stops as soon as the last kept tensor is there
    backward: int = 0  # the most that is held in its backward pass, the gradient of its output included
    backward_kept: int = 0  # the same where its weight gradients stay until the step (unsharded, ZeRO-1)
    weight_grads: int = 0
    input_grad: int = 0
    asking: int = 0
    """Gradients of all tokens that are there when the backward pass first asks for what was kept, where ranks share the
    layer or its experts; with that of its output."""
    small: int = 0  # of `saved`, in tensors below `SMALLEST_MOVED_BYTES`; known of compiled layers alone
    arrivals: tuple[tuple[int, int], ...] = ()
    """Each weight gradient in the order in which it arrives: its bytes, and what is held right then beside it."""
    modules: tuple[str, ...] = ()
    """The modules that own matrices, in the order in which they are called; what follows is for each of them."""
    turns: Turns = ((), (), ())
    arrives_in: tuple[int, ...] = ()  # for each of `arrivals`, in which module's turn it comes


@dataclass(slots=True, eq=False)
class Tape:
    """Records a layer. Helpers that know PyTorch's operations stand in `operations.py`."""

    ops: list[Op] = field(default_factory=list)
    calls: list[tuple[str, int, int]] = field(default_factory=list)
    """Modules that own matrices: the name, the operation at which the call begins, and the one after its last."""

    def op(
        self,
        inputs: tuple[Slot, ...],
        size: int,
        *,
        saves: tuple[Slot, ...] = (),
        saves_output: bool = False,
        makes: tuple[int, ...] = (),
        keeps: tuple[int, ...] = (),
        weight_grad: int = 0,
        **facts: Any,
    ) -> Slot:
        """An operation with a fresh output; see `Op`. What it `makes` or `keeps` it also saves, where a gradient
        flows."""
        grad = weight_grad > 0 or True in [slot.grad for slot in inputs]
        output = Slot(size, grad)
        extra = tuple([Slot(each, False) for each in makes]) if makes else ()
        added = tuple([Slot(each, False) for each in keeps]) if keeps else ()
        kept: tuple[Slot, ...] = ()
        if grad:
            kept = (*[slot.storage for slot in saves], *extra, *added)
            if saves_output:
                kept += (output,)
        self.ops.append(Op(inputs, (output,), kept, extra, added, weight_grad=weight_grad, **facts))
        return output

    def view(self, x: Slot, *, size: int | None = None, copies_grad: bool = False, fused: bool = False) -> Slot:
        """Another look at the same storage. `copies_grad`: on the way back a fresh tensor as large as x. `fused`: a
        kernel of Liger's has changed it in place."""
        output = Slot(x.size if size is None else size, x.grad, x)
        self.ops.append(Op((x,), (output,), passes=not copies_grad, access="plain" if fused else "parts", fused=fused))
        return output

    def split(self, x: Slot, sizes: tuple[int, ...]) -> tuple[Slot, ...]:
        """Views of parts of x; on the way back their gradients are joined into a fresh one."""
        outputs = tuple([Slot(size, x.grad, x) for size in sizes])
        self.ops.append(Op((x,), outputs, access="parts"))
        return outputs

    def called(self, name: str, since: int) -> None:
        """A module has run: all operations from the one with this number on were its own."""
        self.calls.append((name, since, len(self.ops)))

    def hold(self, *slots: Slot) -> None:
        """A Python variable keeps these until here, though no operation needs them any more."""
        self.ops.append(Op(slots, ()))


def measure(
    tape: Tape,
    layer_input: Slot,
    layer_output: Slot,
    *,
    stops: bool = True,
    handed: Mapping[int, Slot] | None = None,
) -> LayerCost:
    """Walk the tape. The layer's input is not counted, unless some operation keeps it. `stops`: a recomputation ends
    with the last tensor that is kept. `handed`: what is kept from the first pass and handed to the second where it was
    made; then that is `saved`, and beside the layer's input."""
    kept = {id(slot): slot for op in tape.ops for slot in op.saves}
    if handed is not None:
        return _measure_replay(tape, (layer_input, layer_output), kept, handed)
    saved = sum([slot.size for slot in kept.values()])
    forward, again, turns = _walk_forward(tape, kept, layer_input, layer_output)
    unsaved, _, unsaved_turns = _walk_forward(tape, {}, layer_input, layer_output)
    so_far = LayerCost(
        saved=saved,
        output=layer_output.size,
        forward=forward,
        forward_unsaved=unsaved,
        recompute=again if stops else forward,
        modules=tuple([name for name, _, _ in tape.calls]),
        turns=(turns, unsaved_turns, ()),
    )
    return _walk_back(tape, so_far, layer_input, layer_output)


def _measure_replay(
    tape: Tape, ends: tuple[Slot, Slot], kept: Mapping[int, Slot], handed: Mapping[int, Slot]
) -> LayerCost:
    first, _, first_turns = _walk_forward(tape, handed, *ends)
    _, again, turns = _walk_forward(tape, kept, *ends, handed)
    modules = tuple([name for name, _, _ in tape.calls])
    whole = sum([slot.size for slot in kept.values()])
    so_far = LayerCost(whole, ends[1].size, again, first, again, modules=modules, turns=(turns, first_turns, ()))
    cost = _walk_back(tape, so_far, *ends)
    own = ends[0].size if id(ends[0]) in kept else 0
    return replace(
        cost,
        saved=sum([slot.size for slot in handed.values()]),
        forward=again - own,
        recompute=again - own,
        backward=cost.backward - own,
        backward_kept=cost.backward_kept - own,
    )


def _skip(ops: list[Op], kept: Mapping[int, Slot], handed: Mapping[int, Slot]) -> set[int]:
    """The numbers of operations that do not run again, since what they make is handed in, or nobody needs it."""
    wanted, skipped = set(kept), set[int]()
    for i in range(len(ops) - 1, -1, -1):
        made = {id(slot.storage) for slot in (*ops[i].outputs, *ops[i].makes)}
        if made & wanted - set(handed):
            wanted.update([id(slot.storage) for slot in ops[i].inputs])
        elif made:
            skipped.add(i)
    return skipped


def _runs_again(ops: list[Op]) -> int:
    """How many operations a recomputation runs. Non-reentrant checkpointing raises out of the forward when the last
    kept tensor has been packed; inputs are packed before their operation runs, outputs after it."""
    last = next((i for i in range(len(ops) - 1, -1, -1) if ops[i].saves), -1)
    if last < 0:
        return 0
    op = ops[last]
    own = {id(slot) for slot in (*op.outputs, *op.makes, *op.keeps)}
    return last + any([id(slot) in own for slot in op.saves])


def _walk_forward(
    tape: Tape,
    kept: Mapping[int, Slot],
    layer_input: Slot,
    layer_output: Slot,
    handed: Mapping[int, Slot] | None = None,
) -> tuple[int, int, tuple[Turn, ...]]:
    """The most that is held, the most of the part that a recomputation runs, and the turns. `handed`: see `measure`."""
    ops, uses = tape.ops, dict[int, int]()
    for op in ops:
        for slot in op.inputs:
            key = id(slot.storage)
            uses[key] = uses.get(key, 0) + 1
    held = {id(layer_input.storage), id(layer_output.storage), *kept}
    live = layer_input.size if id(layer_input) in kept else 0
    skipped: set[int] = set()
    if handed:
        live += sum([slot.size for slot in handed.values()])
        skipped = _skip(ops, kept, handed)
    absent = {id(slot) for i in skipped for slot in ops[i].outputs if handed and id(slot) not in handed}
    peak = again = most = live
    stop = _runs_again(ops)
    borders = [border for _, since, until in tape.calls for border in (since, until)]
    places = set(borders)
    passed: list[int] = []
    """The most up to each border."""
    calls: list[int] = []
    for i, op in enumerate(ops):
        if i == stop:
            again = peak
        while i in places and len(passed) < len(borders) and i == borders[len(passed)]:
            if len(passed) % 2 == 0:
                calls.append(live if passed else most)  # what comes before the first one belongs to its call
            passed.append(most)
            most = live
        born = [slot for slot in op.outputs if slot.storage is slot]
        if op.makes:
            born += op.makes
        if op.keeps:
            born += [slot for slot in op.keeps if id(slot) in kept]
        temp = op.forward_temp
        if i in skipped:
            born, temp = [], 0
        for slot in born:
            live += slot.size
        if live + temp > most:
            most = live + temp
            if most > peak:
                peak = most
        for slot in op.inputs:
            key = id(slot.storage)
            uses[key] -= 1
            if uses[key] == 0 and key not in held and key not in absent:
                live -= slot.storage.size
        for slot in born:
            key = id(slot)
            if key not in uses and key not in held:
                live -= slot.size
    passed += [most, 0, 0][: len(borders) + 1 - len(passed)]  # the last module may end with the layer
    turns = tuple(zip(calls, passed[1::2], passed[2::2], strict=True))
    return peak, again if stop < len(ops) else peak, turns


@dataclass(slots=True, eq=False)
class _Gradient:
    """A gradient's storage, and how many tensors have it as theirs."""

    size: int
    owners: int = 1
    is_view: bool = False  # of the matrix that a product put out


def _walk_back(tape: Tape, so_far: LayerCost, layer_input: Slot, layer_output: Slot) -> LayerCost:
    """The cost with that of the backward pass."""
    ops = tape.ops
    keepers = Counter([id(slot) for op in ops for slot in op.saves])
    gradients: dict[int, _Gradient] = {id(layer_output): _Gradient(layer_output.size)}
    arrivals: list[tuple[int, int]] = []
    live = peak = peak_kept = so_far.saved + layer_output.size
    weight_grads = 0
    asking: int | None = None if any([op.access == "sent" for op in ops]) else 0
    arrives_in: list[int] = []
    borders = [border for _, since, until in reversed(tape.calls) for border in (until, since)]
    passed: list[int] = []
    """The most up to each border: a module is called backwards when its last operation is reached."""
    calls: list[int] = []
    most = live
    for i in range(len(ops) - 1, -1, -1):
        op = ops[i]
        while len(passed) < len(borders) and i < borders[len(passed)]:
            if len(passed) % 2 == 0:
                calls.append(live if passed else most)  # what comes before the first one belongs to its call
            passed.append(most)
            most = live
        arrived = [gradients.pop(id(slot)) for slot in op.outputs if id(slot) in gradients]
        if not arrived:
            continue
        if op.saves and asking is None:
            asking = live - so_far.saved
        fresh, arriving, copied, joined = _spread(op, arrived[0], gradients)
        live += fresh
        now = live + arriving + op.backward_temp + op.weight_grad - (fresh if op.overwrites else 0)
        before = weight_grads
        for slot in op.saves:
            keepers[id(slot)] -= 1
            if keepers[id(slot)] == 0:
                live -= slot.size
        live += copied
        adding = live + arriving + joined
        for gradient in arrived:
            gradient.owners -= 1
            if gradient.owners == 0:
                live -= gradient.size
        if op.weight_grad:
            weight_grads += op.weight_grad
            waiting = op.weight_grad
            for grad in op.weight_grads or (op.weight_grad,):
                waiting -= grad
                arrivals.append((grad, live + waiting))
                arrives_in.append(max(len(tape.calls) - max(len(calls), 1), 0))
        most = max(most, now, adding)
        peak = max(peak, most)
        peak_kept = max(peak_kept, now + before, adding + weight_grads)
    final = gradients.get(id(layer_input))
    passed += [most, 0, 0][: len(borders) + 1 - len(passed)]  # the first module may begin with the layer
    turns = tuple(zip(calls, passed[1::2], passed[2::2], strict=True))[::-1]
    return replace(
        so_far,
        backward=peak,
        backward_kept=peak_kept,
        weight_grads=weight_grads,
        input_grad=final.size if final else 0,
        asking=asking or 0,
        arrivals=tuple(arrivals),
        turns=(*so_far.turns[:2], turns),
        arrives_in=tuple(arrives_in),
    )


def _spread(op: Op, gradient: _Gradient, gradients: dict[int, _Gradient]) -> tuple[int, int, int, int]:
    """Hand gradients to the inputs: bytes that stay, bytes that are added to what is there, copies made for it, and
    sums for which the first is freed. A second gradient is added in place, unless the first is still somebody else's
    too, or a view: autograd adds to no storage that was handed on as another tensor."""
    fresh = arriving = copied = joined = 0
    sizes = op.grad_sizes
    for i, slot in enumerate(op.inputs):
        if not slot.grad:
            continue
        have = gradients.get(id(slot))
        if have is None:
            if op.passes:
                gradients[id(slot)] = gradient
                gradient.owners += 1
            else:
                size = sizes[i] if sizes else slot.size
                gradients[id(slot)] = _Gradient(size, is_view=op.product)
                fresh += size
            continue
        if not op.passes:
            arriving += sizes[i] if sizes else slot.size
        others = have.owners - (have is gradient and not op.passes)  # this operation is done with it by then
        if others > 1:
            have.owners -= 1
            gradients[id(slot)] = _Gradient(have.size)
            copied += have.size
        elif have.is_view:
            have.is_view = False
            joined += have.size
    return fresh, arriving, copied, joined
