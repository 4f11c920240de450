"""What one layer, and the head with its loss, take on the GPU and on the host that launches them.

The layer's tape, which the memory model reads for what is held, is read here for what is moved: an operation
that is no matrix product takes as long as its tensors take to pass through the card's memory. Products take
as long as their arithmetic, or their bytes where they are thin. A tape knows its operations but not their
arithmetic, so products are counted from the layer's own matrices.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from tightfit.memory.attention import kernel_of
from tightfit.memory.layers import layer_tape
from tightfit.memory.loss import fused_chunk_tokens
from tightfit.memory.operations import FP32, Setting
from tightfit.memory.tape import Op
from tightfit.memory.weights import is_linear
from tightfit.pace import rates as constants
from tightfit.pace.rates import Rates
from tightfit.types import Attention, Block, Mamba1, Mamba2, ModelShape, Moe, Traced

MODULES_WITHOUT_WEIGHTS = 4
"""The layer itself, its mixer, its MLP and the activation."""
MODULES_OF_AN_ADAPTER = 4
"""PEFT's wrapper, dropout, A and B around a linear layer."""
BACKWARD_OPERATIONS = 1.0
"""Host time of an operation's backward over its forward: no Python, but twice the kernels. Measured."""


class LayerTime(NamedTuple):
    """Seconds of one layer and one micro batch."""

    products: float
    traffic: float
    products_back: float
    traffic_back: float
    unpacking: float
    """4-bit weights made 16-bit: once in each pass."""
    host: float
    """What Python and the driver need to launch the forward pass."""
    host_back: float
    modules: int
    """Modules that an engine hooks."""


@lru_cache(maxsize=1024)
def layer_time(block: Block, hidden: int, setting: Setting, rates: Rates) -> LayerTime:
    if isinstance(block.mixer, Traced):
        return _time_of_trace(block, block.mixer, setting, rates)
    tape, _, _ = layer_tape(block, hidden, setting, True)
    real = [op for op in tape.ops if any([slot.storage is slot for slot in op.outputs])]
    plain = [op for op in real if not op.product]
    forward, back = _products(block, setting, rates)
    attention, attention_back = _attention(block, setting, rates)
    scan, scan_back, scan_host = _scan(block, setting)
    packed = sum([t.numel for t in block.tensors if is_linear(t)]) if setting.quantised else 0
    linears = len([t for t in block.tensors if is_linear(t)])
    launches = len(real) * constants.OPERATION_S + (linears * constants.PACKED_LINEAR_S if packed else 0)
    return LayerTime(
        products=forward + attention,
        traffic=sum([_bytes(op) for op in plain]) / rates.traffic + scan,
        products_back=back + attention_back,
        traffic_back=sum([_bytes_back(op) for op in plain]) / rates.traffic + scan_back,
        unpacking=packed * setting.width / rates.unpacking,
        host=launches + scan_host,
        host_back=launches * BACKWARD_OPERATIONS + scan_host,
        modules=_modules(block, setting),
    )


def _bytes(op: Op) -> int:
    moved = sum([slot.size for slot in op.inputs]) + sum([slot.size for slot in op.outputs])
    return moved + sum([slot.size for slot in op.makes]) + op.forward_temp


def _bytes_back(op: Op) -> int:
    """The gradient comes in, what was kept is read, gradients of the inputs go out."""
    if op.passes:
        return 0
    moved = sum([slot.size for slot in op.outputs]) + sum([slot.size for slot in op.saves])
    return moved + sum([slot.size for slot in op.inputs if slot.grad]) + op.backward_temp


def _products(block: Block, setting: Setting, rates: Rates) -> tuple[float, float]:
    """Seconds of all linear layers with their adapters, forward and backward."""
    forward = back = 0.0
    for tensor in block.tensors:
        if is_linear(tensor):
            out_features, in_features = tensor.shape
            once = _product(setting.tokens, out_features, in_features, setting.width, rates)
            forward += once
            back += once * (2 if setting.trains_base else 1)
            if setting.adapts(tensor.name.rpartition(".")[0]):
                down = _product(setting.tokens, setting.lora_rank, in_features, setting.width, rates)
                up = _product(setting.tokens, out_features, setting.lora_rank, setting.width, rates)
                forward += down + up
                back += 2 * (down + up)
    if isinstance(block.mlp, Moe):
        once = _experts(block, block.mlp, setting, rates)
        forward += once
        back += once * (2 if setting.trains_base else 1)
    return forward, back


def least_products_s(shape: ModelShape, setting: Setting, rates: Rates, frozen: int) -> float:
    """No way of computing these tokens takes less: the products of linear layers and head at the card's full rate, in
    however many parts. The lowest `frozen` layers have no backward pass."""
    back = 2 if setting.trains_base else 1
    each = [sum([tensor.numel for tensor in block.tensors if is_linear(tensor)]) for block in shape.blocks]
    layers = [each[kind] * (1 if index < frozen else 1 + back) for index, kind in enumerate(shape.pattern)]
    head = shape.vocab_size * shape.hidden_size * (3 if setting.trains_head(tied=shape.tied) else 2)
    return 2 * setting.tokens * (sum(layers) + head) / rates.products


def _product(tokens: int, out_features: int, in_features: int, width: int, rates: Rates) -> float:
    arithmetic = 2 * tokens * out_features * in_features / rates.products
    moved = width * (tokens * (out_features + in_features) + out_features * in_features) / rates.traffic
    return max(arithmetic, moved) + constants.KERNEL_S


def _experts(block: Block, moe: Moe, setting: Setting, rates: Rates) -> float:
    """Two grouped products. Every expert's weights are read, however few tokens it gets."""
    stacked = [t for t in block.tensors if len(t.shape) == 3 and t.name.startswith("mlp.")]
    seconds = 0.0
    for tensor in stacked:
        _, out_features, in_features = tensor.shape
        rows = setting.tokens * moe.top_k
        arithmetic = 2 * rows * out_features * in_features / rates.products
        seconds += (
            max(arithmetic / constants.GROUPED_SHARE, tensor.numel * setting.width / rates.traffic) + constants.KERNEL_S
        )
    return seconds


def _attention(block: Block, setting: Setting, rates: Rates) -> tuple[float, float]:
    """The causal half of both products; a window is not used to skip work unless the kernel knows it."""
    mixer = block.mixer
    if not isinstance(mixer, Attention):
        return 0.0, 0.0
    kernel = kernel_of(mixer, setting)
    window = min(mixer.sliding_window or setting.sequence, setting.sequence)
    windowed = mixer.sliding_window is not None and setting.sequence >= mixer.sliding_window
    keys = window - window**2 / (2 * setting.sequence)  # the first positions have fewer than a window before them
    if kernel in ("eager", "math") or (kernel in ("cudnn", "efficient") and windowed):
        keys = setting.sequence  # a mask hides what was computed all the same
    flops = 4 * setting.tokens * keys * mixer.heads * mixer.head_dim
    if kernel in ("eager", "math"):
        once = flops / rates.products
        return once, 2 * once
    reached = rates.attention if kernel == "flash" else rates.masked_attention
    once = flops / reached + constants.ATTENTION_KERNEL_S
    return once, once * constants.ATTENTION_BACK


def _scan(block: Block, setting: Setting) -> tuple[float, float, float]:
    """Seconds of the scan forward and backward on the GPU, and of each on the host."""
    mixer = block.mixer
    if not isinstance(mixer, Mamba1 | Mamba2):
        return 0.0, 0.0, 0.0
    if setting.scan == "torch" and isinstance(mixer, Mamba1):
        return 0.0, 0.0, setting.sequence * constants.TORCH_SCAN_S_PER_TOKEN
    if isinstance(mixer, Mamba2):
        return 0.0, 0.0, 0.0  # matrix products of chunks: their traffic is on the tape
    steps = setting.tokens * mixer.inner * mixer.state
    launches = constants.SCAN_OPERATIONS * constants.OPERATION_S
    forward, back = constants.SCAN_STEPS_PER_S[setting.scan], constants.SCAN_STEPS_BACK_PER_S[setting.scan]
    return steps / forward, steps / back, launches


def _modules(block: Block, setting: Setting) -> int:
    owners = {tensor.name.rpartition(".")[0] for tensor in block.tensors}
    if isinstance(block.mixer, Mamba1):
        return 5  # one fused call: of the mixer's own modules only the input projection is called
    adapted = [t for t in block.tensors if is_linear(t) and setting.adapts(t.name.rpartition(".")[0])]
    return len(owners) + MODULES_WITHOUT_WEIGHTS + MODULES_OF_AN_ADAPTER * len(adapted)


def _time_of_trace(block: Block, mixer: Traced, setting: Setting, rates: Rates) -> LayerTime:
    """An unknown layer: its matrices are known, its bytes were seen, its operations are taken to be usual."""
    forward, back = _products(block, setting, rates)
    usual = 40 * constants.OPERATION_S
    return LayerTime(
        products=forward,
        traffic=2 * setting.tokens * mixer.forward_bytes_per_token / rates.traffic,
        products_back=back,
        traffic_back=2 * setting.tokens * mixer.backward_bytes_per_token / rates.traffic,
        unpacking=0.0,
        host=usual,
        host_back=usual * BACKWARD_OPERATIONS,
        modules=_modules(block, setting),
    )


class HeadTime(NamedTuple):
    """Seconds of embedding, final norm, head and loss."""

    products: float
    traffic: float
    products_back: float
    traffic_back: float
    host: float


@lru_cache(maxsize=2048)
def head_time(shape: ModelShape, setting: Setting, rates: Rates, fused: bool, trains_head: bool) -> HeadTime:
    tokens, vocab, hidden, width = setting.tokens, shape.vocab_size, shape.hidden_size, setting.width
    once = _product(tokens, vocab, hidden, width, rates)
    logits = tokens * vocab
    upcast = width + FP32 if width < FP32 else 0
    capped = 6 * width * logits if shape.final_softcap else 0
    forward = logits * (upcast + 2 * FP32) + capped
    back = logits * (FP32 + 3 * FP32 + upcast) + capped
    trains = setting.trains_base or setting.trains_embedding
    embedding = vocab * hidden * width if trains else 0  # a gradient of zeros, filled by token
    products_back = once * (2 if trains_head else 1)
    launches = constants.HEAD_OPERATIONS * constants.OPERATION_S
    if fused:
        # gradients are made in the forward pass, and the head's is added up chunk by chunk
        chunks = -(-tokens // fused_chunk_tokens(vocab))
        added = 2 * chunks * vocab * hidden * width if trains_head else 0
        launches += chunks * constants.CHUNK_OPERATIONS * constants.OPERATION_S
        moved = (forward + back / 2 + added) / rates.traffic
        return HeadTime(once + products_back, moved, 0.0, embedding / rates.traffic, launches)
    return HeadTime(once, forward / rates.traffic, products_back, (back + embedding) / rates.traffic, launches)
