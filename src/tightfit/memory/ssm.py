"""Mamba's selective scan on a tape, by the three ways of computing it.

official: `mamba_inner_fn` of mamba-ssm 2.3 (`MambaInnerFn` in `ops/selective_scan_interface.py`, the kernels'
allocations in `csrc/selective_scan/selective_scan.cpp`), one autograd function from the input projection's
output to the block's. Its checkpoint level 1 recomputes the convolution and delta in the backward pass.

torch: the plain PyTorch path of transformers, which writes every state of every step down.

tightfit: our own function (`mamba/mixer.py`): keeps the projected input, the small projections and the states at
chunk borders, and recomputes the rest. Under every engine: FSDP2 gathers a layer whole, and ZeRO-3 a mixer, which is
made a leaf. With adapters inside, or packed matrices, its modules are called one by one (`_unfused` in
`mamba/install.py`): then our convolution and our scan keep their own inputs.

Letters: E inner width, N state size, R rank of the step projection.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tightfit.memory.operations import FP32, Operations
from tightfit.memory.tape import Slot
from tightfit.types import Gpu, Mamba1

OFFICIAL_CHUNK = 2048
"""Tokens between the states that the official kernel writes down (`n_chunks` in selective_scan.cpp)."""
TIGHTFIT_BORDER, TIGHTFIT_STEPS, TIGHTFIT_SUMS = 64, 4, 64 << 20
TIGHTFIT_FORWARD, TIGHTFIT_BACKWARD = (512, 4096), (256, 5000)
"""As mamba/gpu_scan.py cuts its launches: steps between the states that are kept, steps between those of the backward
pass's scratch, room for sums; and for each direction the cells of a program and how many programs are wanted."""
CUDA_STATES, CUDA_CHANNELS, CUDA_PROGRAMS, CUDA_UNCUT = 16, 64, 2048, 512
"""The same of mamba/cuda_scan.py, whose backward pass is for 16-bit inputs: states of a channel and channels of a
program; how many programs it wants, and with how many it does without cutting time."""
PROJECTIONS = ("in_proj", "x_proj", "dt_proj", "out_proj")


def mamba1(ops: Operations, x: Slot, shape: Mamba1, hidden: int) -> Slot:
    xz = ops.linear(x, "mixer.in_proj", 2 * shape.inner, hidden)
    if ops.setting.scan == "official":
        return _official(ops, xz, shape, hidden)
    if ops.setting.scan == "tightfit":
        adapted = any([ops.setting.adapts(f"mixer.{name}") for name in PROJECTIONS])
        return (_modules if adapted or ops.setting.quantised else _tightfit)(ops, xz, shape, hidden)
    return _torch(ops, xz, shape, hidden)


def _official(ops: Operations, xz: Slot, shape: Mamba1, hidden: int) -> Slot:
    setting = ops.setting
    wide, narrow = ops.size(shape.inner), ops.size(hidden)
    x_dbl = ops.size(shape.dt_rank + 2 * shape.state)
    borders = setting.micro_batch * -(-setting.sequence // OFFICIAL_CHUNK)
    states = borders * shape.inner * 2 * shape.state * FP32
    b_and_c = 2 * ops.size(shape.state)
    kept = (2 * wide, x_dbl, b_and_c, states, wide)  # xz with time contiguous; …; the scan's output before its gate
    # Forward: the convolution, delta and the gated output stand beside what is kept; the first two are gone
    # before the output projection allocates the output.
    forward_temp = max(3 * wide - narrow, wide)
    # Backward: everything is a Python variable until the end. Recomputed: convolution, delta, gated output; and
    # the gradients of the scan's output, of the convolution and of delta. With more than one sequence the
    # convolution is copied into (b l) order for x_proj's gradient.
    tail = x_dbl + shape.inner * (shape.state + 2) * FP32
    scan_only = 2 * ops.size(shape.state, FP32)  # dB and dC are summed in fp32
    order = wide if setting.micro_batch > 1 else 0
    weights = ops.mixer_weights * setting.width
    # -exp(A_log.float()) keeps the exponential and the product; D and the dt bias are cast to fp32
    state = shape.inner * shape.state * FP32
    casts = () if setting.width == FP32 else (shape.inner * FP32, shape.inner * FP32)
    # (b, c, l) seen as ((b l), c): a view for one sequence, but gradients of more are copied into that order
    joined = xz if setting.micro_batch == 1 else ops.tape.view(xz, copies_grad=True)
    return ops.tape.op(
        (joined,),
        narrow,
        makes=(*kept, state, state, *casts),
        forward_temp=forward_temp,
        backward_temp=6 * wide + max(order + tail, scan_only) + (0 if setting.trains_base else weights),
        weight_grad=weights if setting.trains_base else 0,
        part="scan",
    )


def _tightfit(ops: Operations, xz: Slot, shape: Mamba1, hidden: int) -> Slot:
    wide, narrow = ops.size(shape.inner), ops.size(hidden)
    x_dbl = ops.size(shape.dt_rank + 2 * shape.state)
    buffers = _scan_buffers(ops, shape)
    weights = ops.grad(ops.mixer_weights)
    return ops.tape.op(
        (xz,),
        narrow,
        saves=(xz,),
        makes=(x_dbl, buffers.borders),
        # the convolution, delta and the gated output
        forward_temp=3 * wide + buffers.forward,
        # In the scan's: the convolution, delta, and the gradients of the output and of the convolution. That of delta
        # and the output take the places of what they come from; the gate's is written into xz's. The gradients of the
        # weights are made when the scan's own buffers are gone.
        backward_temp=4 * wide + x_dbl + max(0, buffers.backward - weights),
        weight_grad=weights,
        part="mixer",
    )


def runs_cuda_scan(gpu: Gpu) -> bool:
    """Whether our scan may go back through kernels in CUDA's own language (`mamba/scan.cu`)."""
    return gpu.vendor in ("nvidia", "unknown") and (gpu.sm is None or gpu.sm >= 80)


class _Buffers(NamedTuple):
    borders: int  # states that are kept
    parameters: int  # -exp(A_log.float()) and what is cast to fp32, where modules are called one by one
    forward: int
    backward: int  # of the scan's passes, for their own use


def _scan_buffers(ops: Operations, shape: Mamba1) -> _Buffers:
    setting = ops.setting
    plain_dt = not (setting.quantised or setting.adapts("mixer.dt_proj"))  # else that module adds its bias itself
    casts = 0 if setting.width == FP32 else (1 + plain_dt) * shape.inner * FP32  # D and the dt bias
    each, batch = shape.inner * shape.state * FP32, setting.micro_batch
    borders = batch * -(-setting.sequence // TIGHTFIT_BORDER) * each
    fits_cuda = setting.width != FP32 and shape.state == CUDA_STATES and shape.inner % CUDA_CHANNELS == 0
    cuda = setting.cuda_scan and fits_cuda
    sizes = batch, shape.inner, setting.sequence
    forward = cut_scan(*sizes, shape.state, backward=False)
    backward = cut_cuda_scan(*sizes) if cuda else cut_scan(*sizes, shape.state, backward=True)
    packed = batch * setting.sequence * 2 * forward.wide * FP32
    rates = each + (2 * shape.inner * FP32 if cuda else 0)  # and D and the bias beside them
    scratch = 0 if cuda else backward.programs * (TIGHTFIT_BORDER // TIGHTFIT_STEPS) * TIGHTFIT_BACKWARD[0] * FP32
    # Of each segment the state that it begins with; backward, what is wanted of its last, and a part of A's gradient.
    return _Buffers(
        borders=borders,
        parameters=each + casts,
        forward=packed + each + batch * forward.slots * each,
        backward=packed + rates + scratch + backward.sums + 2 * batch * backward.slots * each,
    )


class ScanCut(NamedTuple):
    """How our scan cuts a pass: see `_Cut` in mamba/gpu_scan.py, which a test holds equal."""

    wide: int
    slots: int
    programs: int  # that run in one launch
    sums: int  # bytes


def cut_scan(batch: int, channels: int, length: int, states: int, *, backward: bool) -> ScanCut:
    cells, wanted = TIGHTFIT_BACKWARD if backward else TIGHTFIT_FORWARD
    wide = 1 << (states - 1).bit_length()
    tiles = -(-channels // max(1, min(cells // wide, 1 << (channels - 1).bit_length())))
    borders, padded = -(-length // TIGHTFIT_BORDER), -(-length // TIGHTFIT_STEPS) * TIGHTFIT_STEPS
    one = batch * padded * 2 * wide * FP32
    part = tiles
    if backward and tiles * one > TIGHTFIT_SUMS:
        part = min(tiles, max(16, TIGHTFIT_SUMS // one // 16 * 16))
    segments = -(-borders // -(-borders // min(max(1, wanted // (batch * part)), borders)))
    return ScanCut(wide=wide, slots=-(-segments // 4) * 4, programs=part * segments * batch, sums=part * one)


def cut_cuda_scan(batch: int, channels: int, length: int) -> ScanCut:
    """Likewise `Cut` in mamba/cuda_scan.py, of the backward pass."""
    tiles, borders = channels // CUDA_CHANNELS, -(-length // TIGHTFIT_BORDER)
    wanted = 1 if batch * tiles >= CUDA_UNCUT else max(1, CUDA_PROGRAMS // (batch * tiles))
    segments = -(-borders // -(-borders // min(wanted, borders)))
    sums = tiles * batch * -(-length // TIGHTFIT_STEPS) * TIGHTFIT_STEPS * 2 * CUDA_STATES * FP32
    return ScanCut(wide=CUDA_STATES, slots=segments, programs=tiles * segments * batch, sums=sums)


def _modules(ops: Operations, xz: Slot, shape: Mamba1, hidden: int) -> Slot:
    """The same with every module called; the mixer's own weights are frozen."""
    tape, wide = ops.tape, ops.size(shape.inner)
    x, gate = tape.split(xz, (wide, wide))
    u = tape.op((x,), wide, saves=(x,), part="mixer")
    x_dbl, low, b, c = _project(ops, u, shape)
    delta = ops.linear(low, "mixer.dt_proj", shape.inner, shape.dt_rank)
    buffers = _scan_buffers(ops, shape)
    read, makes = (u, delta, b, c, gate), (buffers.borders, buffers.parameters)
    forward, backward = buffers.forward, buffers.backward
    facts: dict[str, Any] = {"forward_temp": forward, "backward_temp": backward, "part": "mixer"}
    out = tape.op(read, wide, saves=read, makes=makes, **facts)
    tape.hold(xz, u, x_dbl, low, b, c, delta)
    return ops.linear(out, "mixer.out_proj", hidden, shape.inner)


def _torch(ops: Operations, xz: Slot, shape: Mamba1, hidden: int) -> Slot:
    """transformers without kernels: every discretised step and every state is a tensor of its own."""
    tape, wide32 = ops.tape, ops.size(shape.inner, FP32)
    numel = shape.inner * shape.state
    # -exp(A_log.float()): the exponential is kept if A_log trains, the product by whoever uses it
    temp = 2 * numel * FP32 if ops.setting.trains_base else 0
    a = tape.op((), numel * FP32, makes=(numel * FP32,), weight_grad=ops.grad(numel), backward_temp=temp)
    u_part, gate = tape.split(xz, (ops.size(shape.inner), ops.size(shape.inner)))
    u = ops.convolve(u_part, "mixer.conv1d", shape.inner, shape.conv)
    step, b, c, delta = _projections(ops, u, shape)
    scanned, variables = _scan(ops, (a, step, b, c, u), shape)
    # D is fp32, so the skip connection, the gate and their product are too
    scaled = ops.scale(u, "mixer.D", width=FP32)
    skipped = tape.op((tape.view(scanned, size=wide32, copies_grad=True), scaled), wide32, passes=True)
    gated = tape.op((gate,), gate.size, saves=(gate,))
    product = tape.op((skipped, gated), wide32, saves=(skipped, gated), backward_temp=wide32)
    tape.hold(*variables)
    narrow = ops.cast(product, shape.inner, ops.setting.width)
    out = ops.linear(_join_copy(ops, narrow), "mixer.out_proj", hidden, shape.inner)
    tape.hold(xz, u, b, c, delta, a)
    return out


def _join_copy(ops: Operations, x: Slot) -> Slot:
    """(b, c, l) as ((b l), c) before a matrix product: with more than one sequence a copy, both ways."""
    return x if ops.setting.micro_batch == 1 else ops.tape.op((x,), x.size)


def _project(ops: Operations, u: Slot, shape: Mamba1) -> tuple[Slot, Slot, Slot, Slot]:
    """The small projections together, and apart: the step's, B and C."""
    widths = (shape.dt_rank, shape.state, shape.state)
    x_dbl = ops.linear(u, "mixer.x_proj", sum(widths), shape.inner)
    low, b, c = ops.tape.split(x_dbl, tuple([ops.size(width) for width in widths]))
    if shape.normed_bcdt:
        low, b, c = (
            ops.norm_by_torch(part, width, "rms", trains=False) for part, width in zip((low, b, c), widths, strict=True)
        )
    return x_dbl, low, b, c


def _projections(ops: Operations, u: Slot, shape: Mamba1) -> tuple[Slot, Slot, Slot, Slot]:
    """The step after softplus, B, C, and the raw step, which a variable keeps."""
    tape, wide = ops.tape, ops.size(shape.inner)
    _, low, b, c = _project(ops, _join_copy(ops, u), shape)
    # weight @ low: folded into one product and copied back into (b, c, l) order
    saves, grad = (low,) if ops.setting.trains_base else (), ops.grad(shape.inner * shape.dt_rank)
    raw = tape.op((low,), wide, saves=saves, forward_temp=wide, backward_temp=wide, weight_grad=grad)
    biased = tape.op((raw,), wide, passes=True, weight_grad=ops.grad(shape.inner))
    return tape.op((biased,), wide, saves=(biased,)), b, c, raw


def _scan(ops: Operations, tensors: tuple[Slot, ...], shape: Mamba1) -> tuple[Slot, tuple[Slot, ...]]:
    """Discretise all steps at once, then walk them one by one; and what variables keep until the end. `cube`: one fp32
    number a token, channel and state."""
    tape, setting = ops.tape, ops.setting
    a, step, b, c, u = tensors
    wide, cube = ops.size(shape.inner), ops.size(shape.inner * shape.state, FP32)
    b32, u32 = ops.cast(b, shape.state, FP32), ops.cast(u, shape.inner, FP32)
    one_state = setting.micro_batch * shape.inner * shape.state
    exponent = tape.op((a, step), cube, saves=(a, step), backward_temp=2 * cube)
    decay = tape.op((exponent,), cube, saves_output=True)
    drive = tape.op((step, b32), cube, saves=(step, b32), backward_temp=2 * cube)
    driven = tape.op((drive, u32), cube, saves=(drive, u32), backward_temp=cube)
    # Each step keeps the state before it (the first, of zeros, in working precision) and, to multiply it with C,
    # the state after it in working precision; in fp32 that is the same tensor.
    zeros = one_state * setting.width
    states = cube if setting.width == FP32 else cube - one_state * FP32 + ops.size(shape.inner * shape.state)
    outputs = tape.op(
        (decay, driven, c),
        wide,
        saves=(decay, c),
        keeps=(zeros, states),
        forward_temp=2 * one_state * FP32,
        # every step's gradient of the whole discretised sequence is as large as that sequence
        backward_temp=cube,
    )
    return tape.op((outputs,), wide, passes=True), (outputs, decay, drive, driven)
