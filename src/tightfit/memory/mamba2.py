"""Mamba-2's state-space duality on a tape.

official: `mamba_split_conv1d_scan_combined` of mamba-ssm 2.3 (`ops/triton/ssd_combined.py`), one autograd function
that keeps the projected input, the scan's output and the norm's deviations, and recomputes the rest.

torch: transformers without kernels (`mamba2_chunk_scan`): matrices of position against position in every chunk,
kept together with every operand that `einsum` had to lay out anew. Before 5.18 there was no `einsum`: two tensors
were multiplied out into all of their indices and the product was summed, so that contracting the states took a
number for every pair of positions, head and state, twice of them in the backward pass. Ours covers Mamba-1 only, so
`tightfit` is this path too.

Letters: E inner width, N state size, H heads, P head width, G groups, Q tokens a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

from tightfit.memory.operations import BOOL, FP32, Operations
from tightfit.memory.tape import Slot
from tightfit.types import Mamba2


def mamba2(ops: Operations, x: Slot, shape: Mamba2, hidden: int) -> Slot:
    channels = shape.inner + 2 * shape.groups * shape.state
    projected = ops.linear(x, "mixer.in_proj", shape.inner + channels + shape.heads, hidden)
    if ops.setting.scan == "official":
        return _official(ops, projected, shape, hidden)
    return _torch(ops, projected, shape, hidden)


@dataclass(frozen=True, slots=True)
class _Sizes:
    """fp32 tensors of the scan, whose length is padded to whole chunks."""

    chunks: int
    per_head: int  # one number a token and head: steps, decays
    inner: int
    state: int  # B or C repeated for every head
    scores: int  # position against position in every chunk
    borders: int  # a state for every chunk


def _sizes(ops: Operations, shape: Mamba2) -> _Sizes:
    setting = ops.setting
    chunks = -(-setting.sequence // shape.chunk)
    tokens = setting.micro_batch * chunks * shape.chunk * FP32
    return _Sizes(
        chunks=chunks,
        per_head=tokens * shape.heads,
        inner=tokens * shape.inner,
        state=tokens * shape.heads * shape.state,
        scores=tokens * shape.heads * shape.chunk,
        borders=setting.micro_batch * chunks * shape.inner * shape.state * FP32,
    )


def _official(ops: Operations, projected: Slot, shape: Mamba2, hidden: int) -> Slot:
    setting, sizes = ops.setting, _sizes(ops, shape)
    wide, narrow = ops.size(shape.inner), ops.size(hidden)
    group = ops.size(shape.groups * shape.state)
    conv = wide + 2 * group
    pair = sizes.scores // shape.heads * shape.groups  # C·B of every chunk, in fp32
    states16 = sizes.borders * setting.width // FP32
    weights = ops.mixer_weights * setting.width
    deviations = ops.size(shape.groups, FP32)
    # Forward: the convolution, steps and decays stay variables to the end; the norm's output is the last.
    steps = conv + 2 * sizes.per_head
    forward = steps + max(sizes.borders + states16 - wide, states16 + pair, states16 + wide + narrow) - narrow
    # Backward: recomputed convolution and norm output, the gradients of the convolution, of the norm's output and
    # of its input are variables to the end; the scan's own working set and the weight gradients take turns.
    scan = 2 * sizes.per_head + ops.size(shape.heads) + pair
    passing = 2 * (sizes.borders + states16)
    products = 2 * states16 + 3 * sizes.per_head + 2 * ops.size(shape.groups * shape.state, FP32) + 2 * pair
    backward = 2 * conv + 3 * wide
    inner = scan + max(passing, products)
    return ops.tape.op(
        (projected,),
        narrow,
        saves=(projected,),
        makes=(wide, deviations, shape.heads * FP32, shape.heads * FP32),
        forward_temp=max(forward, 0),
        backward_temp=backward + max(inner - weights, 0) + (0 if setting.trains_base else weights),
        weight_grad=weights if setting.trains_base else 0,
        part="scan",
    )


def _torch(ops: Operations, projected: Slot, shape: Mamba2, hidden: int) -> Slot:
    tape = ops.tape
    group = ops.size(shape.groups * shape.state)
    wide, conv = ops.size(shape.inner), ops.size(shape.inner) + 2 * group
    decay = tape.op((), shape.heads * FP32, makes=(shape.heads * FP32,), weight_grad=ops.grad(shape.heads))
    gate, xbc, dt = tape.split(projected, (wide, conv, ops.size(shape.heads)))
    mixed = ops.convolve(xbc, "mixer.conv1d", shape.inner + 2 * shape.groups * shape.state, shape.conv)
    x, b, c = tape.split(mixed, (wide, group, group))
    scanned = _chunk_scan(ops, (x, b, c, dt, decay), shape)
    # norm(x · silu(gate)), all in fp32, since the scan's output is
    gate32 = ops.cast(gate, shape.inner, FP32)
    product = ops.multiply(scanned, ops.tape.op((gate32,), gate32.size, saves=(gate32,)))
    normed = ops.weigh(ops.normalise(product, 1), shape.inner)
    narrow = ops.cast(normed, shape.inner, ops.setting.width)
    out = ops.linear(narrow, "mixer.out_proj", hidden, shape.inner)
    tape.hold(projected, mixed, normed, scanned)
    return out


def _chunk_scan(ops: Operations, tensors: tuple[Slot, ...], shape: Mamba2) -> Slot:
    """`mamba2_chunk_scan`. Everything it makes is a variable until it returns."""
    tape, sizes = ops.tape, _sizes(ops, shape)
    x, b, c, raw, decay = tensors
    # clamp(softplus(dt + bias)): both keep their inputs
    biased = tape.op((raw,), raw.size, passes=True, weight_grad=ops.grad(shape.heads))
    soft = tape.op((biased,), raw.size, saves=(biased,))
    dt = tape.op((soft,), raw.size, saves=(soft,))
    x32 = ops.cast(x, shape.inner, FP32)
    # the groups of B and C are repeated for every head
    per_head = ops.size(shape.heads * shape.state, FP32)
    b32, c32 = (tape.op((ops.cast(slot, shape.groups * shape.state, FP32),), per_head) for slot in (b, c))
    padded = tape.op((x32,), sizes.inner, grad_sizes=(ops.size(shape.inner, FP32),))
    skip = ops.weigh(padded, shape.heads)  # D · x
    dt_x, dt_a = ops.cast(dt, shape.heads, FP32), ops.cast(dt, shape.heads, FP32)
    driven = tape.op((x32, dt_x), ops.size(shape.inner, FP32), saves=(x32, dt_x), backward_temp=x32.size)
    decayed = ops.multiply(decay, dt_a)
    xp, ap = tape.op((driven,), sizes.inner), tape.op((decayed,), sizes.per_head)
    bp, cp = tape.op((b32,), sizes.state), tape.op((c32,), sizes.state)
    tape.hold(driven, decayed, b32, c32)
    sums = tape.op((ap,), sizes.per_head, backward_temp=2 * sizes.per_head)
    near, near_variables = _within_chunks(ops, (xp, bp, cp, ap), shape, sizes)
    far, far_variables = _across_chunks(ops, (xp, bp, cp, sums), shape, sizes)
    total = tape.op((near, far), sizes.inner, passes=True)
    ordered = tape.op((total,), sizes.inner, passes=True)
    out = tape.op((ordered, skip), sizes.inner, passes=True)
    tape.hold(dt, sums, xp, ap, bp, cp, skip, near, far, ordered, *near_variables, *far_variables)
    return tape.view(out, size=ops.size(shape.inner, FP32), copies_grad=True)


def _by_head(ops: Operations, x: Slot, sizes: _Sizes) -> Slot:
    """B or C as a batch of matrices for `bmm`: a copy, unless there is one sequence of one chunk."""
    return _lay_out(ops, x, ops.setting.micro_batch * sizes.chunks > 1)


def _lay_out(ops: Operations, x: Slot, copy: bool) -> Slot:
    """x and the states have time or chunks last, so that one chunk alone needs no copy; a broadcast never does."""
    return ops.tape.op((x,), x.size, passes=True) if copy and not ops.setting.broadcast_scan else x


def _contract(ops: Operations, a: Slot, b: Slot, size: int, summed: int) -> Slot:
    """A product of a and b with an index of `summed` values summed over. Broadcast, the whole product stands beside its
    sum; backwards both factors' gradients are as large, and autograd sums them to their shapes when both are there."""
    whole = size * summed if ops.setting.broadcast_scan else 0
    return ops.tape.op((a, b), size, saves=(a, b), forward_temp=whole, backward_temp=2 * whole)


def _segment_sums(ops: Operations, x: Slot, size: int, side: int) -> Slot:
    """Masked twice around a cumulative sum; each keeps its mask."""
    tape = ops.tape
    masked = tape.op((x,), size, makes=(side * side * BOOL,), grad_sizes=(size,))
    summed = tape.op((masked,), size, backward_temp=2 * size)
    out = tape.op((summed,), size, makes=(side * side * BOOL,))
    tape.hold(masked)
    return out


def _within_chunks(
    ops: Operations, tensors: tuple[Slot, ...], shape: Mamba2, sizes: _Sizes
) -> tuple[Slot, tuple[Slot, ...]]:
    """(C Bᵀ ∘ L) x, where L holds the decay from each position to each later one."""
    xp, bp, cp, ap = tensors
    decay = ops.output_saving(_segment_sums(ops, ap, sizes.scores, shape.chunk))
    left, right = _by_head(ops, cp, sizes), _by_head(ops, bp, sizes)
    pairs = _contract(ops, left, right, sizes.scores, shape.state)
    scores = ops.multiply(pairs, decay)
    if ops.setting.broadcast_scan:
        scores = ops.tape.op((scores,), scores.size, passes=True)  # summed over an index of one value
    near = _contract(ops, scores, _lay_out(ops, xp, sizes.chunks > 1), sizes.inner, shape.chunk)
    return near, (decay, pairs, scores)


def _across_chunks(
    ops: Operations, tensors: tuple[Slot, ...], shape: Mamba2, sizes: _Sizes
) -> tuple[Slot, tuple[Slot, ...]]:
    """Each chunk's state, passed on from chunk to chunk and read by C."""
    tape = ops.tape
    xp, bp, cp, sums = tensors
    left = ops.output_saving(tape.op((sums,), sizes.per_head))
    weighted = tape.op((bp, left), sizes.state, saves=(bp, left), backward_temp=sizes.state)
    batches = _by_head(ops, weighted, sizes), _lay_out(ops, xp, sizes.chunks > 1)
    own = _contract(ops, *batches, sizes.borders, shape.chunk)
    one = sizes.borders // sizes.chunks
    zeros = tape.op((), one)
    joined = tape.op((zeros, own), sizes.borders + one, grad_sizes=(0, sizes.borders))
    between = ops.setting.micro_batch * shape.heads * (sizes.chunks + 1) ** 2 * FP32
    last = tape.view(sums, size=between, copies_grad=True)
    passed_on = ops.output_saving(_segment_sums(ops, last, between, sizes.chunks + 1))
    passed = _contract(ops, passed_on, _lay_out(ops, joined, True), joined.size, sizes.chunks + 1)
    starts = tape.view(passed, size=sizes.borders, copies_grad=True)
    read, whole = _read_states(ops, cp, starts, shape, sizes)
    out_decay = ops.output_saving(sums)
    far = tape.op((read, out_decay), sizes.inner, saves=(read, out_decay), backward_temp=sizes.inner)
    return far, (left, weighted, zeros, passed_on, passed, whole, out_decay)


def _read_states(ops: Operations, cp: Slot, starts: Slot, shape: Mamba2, sizes: _Sizes) -> tuple[Slot, Slot]:
    """Every position's C · state; and the variable that holds it, or broadcast, the product before it is summed."""
    if not ops.setting.broadcast_scan:
        batches = _by_head(ops, cp, sizes), _lay_out(ops, starts, sizes.chunks > 1)
        read = _contract(ops, *batches, sizes.inner, shape.state)
        return read, read
    size = sizes.inner * shape.state
    whole = ops.tape.op((cp, starts), size, saves=(cp, starts), backward_temp=2 * size)
    return ops.tape.op((whole,), sizes.inner, passes=True), whole
