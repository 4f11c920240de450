"""What one layer, the head with its loss, and all of them together take on the GPU and on the host that launches them.

The layer's tape, which the memory model reads for what is held, is read here for what is moved: an operation
that is no matrix product takes as long as its tensors take to pass through the card's memory. Products take
as long as their arithmetic, or their bytes where they are thin. A tape knows its operations but not their
arithmetic, so products are counted from the layer's own matrices. Of a compiled layer `graph.py` says what is moved.

A layer that recomputes runs again as it is written, all of it. Where it is compiled, or where only some of its parts
are chosen, just these do, with the elementwise work between them.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import NamedTuple

from tightfit.memory.activations import setting_of
from tightfit.memory.attention import computed_keys, is_masked, kernel_of
from tightfit.memory.layers import layer_tape
from tightfit.memory.loss import chunk_tokens
from tightfit.memory.operations import FP32, Setting
from tightfit.memory.selection import place_of
from tightfit.memory.tape import Op, Slot, Tape
from tightfit.memory.weights import is_linear
from tightfit.pace import engines
from tightfit.pace import rates as constants
from tightfit.pace.engines import PassTimes
from tightfit.pace.graph import fuse, is_kernel
from tightfit.pace.rates import Card, Rates
from tightfit.types import PARTS, Attention, Block, Gpu, Levers, Mamba1, ModelShape, Moe, Traced

MODULES_WITHOUT_WEIGHTS = 4  # the layer itself, its mixer, its MLP and the activation
MODULES_OF_AN_ADAPTER = 4  # PEFT's wrapper, dropout, A and B around a linear layer
WIDE_HEAD = 128
ELEMENTWISE = PARTS[:1]
"""What all compiled layers recompute as soon as one recomputes anything."""
BACKWARD_OPERATIONS = 1.0
"""Host time of an operation's backward over its forward: no Python, but twice the kernels. Measured."""


class LayerTime(NamedTuple):
    """Seconds of one layer and one micro batch."""

    products: float
    traffic: float
    products_back: float
    traffic_back: float
    unpacking: float  # 4-bit weights made 16-bit: once in each pass
    host: float  # what Python and the driver need to launch the forward pass
    host_back: float
    modules: int  # modules that an engine hooks
    parts: tuple[float, ...] = ()
    """Of `products`, those of each of `PARTS`; nobody needs the rest again. Nothing: it recomputes as a whole."""
    scan: float = 0.0  # of `traffic`, the mixer's own kernel
    fused_again: float | None = None  # of a compiled layer: its elementwise work once more; None: it is not compiled
    host_again: float = 0.0  # likewise what launching that takes, and what the choice of parts costs beside it


class Again(NamedTuple):
    """Seconds of what runs once more in the backward pass of a layer."""

    products: float
    others: float
    host: float


def recompute_time(layer: LayerTime, select: tuple[str, ...]) -> Again:
    """`select`: the parts that do; empty: all."""
    if not layer.parts or (layer.fused_again is None and not select):
        host = layer.host + constants.CHECKPOINTED_LAYER_S
        return Again(layer.products, layer.traffic + layer.unpacking, host)
    each = zip(PARTS, layer.parts, strict=True)
    products = sum([seconds for part, seconds in each if not select or part in select])
    # A scan's kernels keep what only they can read: it runs again with whatever is chosen.
    others = layer.traffic if layer.fused_again is None else layer.fused_again + layer.scan
    return Again(products, others + layer.unpacking * products / layer.products, layer.host_again)


@lru_cache(maxsize=1024)
def layer_time(block: Block, hidden: int, setting: Setting, card: Card) -> LayerTime:
    products = _products(block, setting, card)
    forward, back = sum([once for _, once, _ in products]), sum([once for _, _, once in products])
    linears = [tensor for tensor in block.tensors if is_linear(tensor)]
    if isinstance(block.mixer, Mamba1):
        modules = 5  # one fused call: of the mixer's own modules only the input projection is called
    else:
        adapted = sum(1 for tensor in linears if setting.adapts(tensor.name.rpartition(".")[0]))
        owners = {tensor.name.rpartition(".")[0] for tensor in block.tensors}
        modules = len(owners) + MODULES_WITHOUT_WEIGHTS + MODULES_OF_AN_ADAPTER * adapted
    if isinstance(block.mixer, Traced):
        # An unknown layer: its matrices are known, its bytes were seen, its operations are taken to be usual.
        usual = 40 * constants.OPERATION_S
        return LayerTime(
            products=forward,
            traffic=2 * setting.tokens * block.mixer.forward_bytes_per_token / card.memory,
            products_back=back,
            traffic_back=2 * setting.tokens * block.mixer.backward_bytes_per_token / card.memory,
            unpacking=0.0,
            host=usual,
            host_back=usual * BACKWARD_OPERATIONS,
            modules=modules,
        )
    tape, x, y = layer_tape(block, hidden, setting, True)
    real = [op for op in tape.ops if op.fused or any([slot.storage is slot for slot in op.outputs])]
    attention, attention_back = _attention(block, setting, card)
    scan, scan_back, scan_host = _scan(block, setting)
    packed = sum([tensor.numel for tensor in linears]) if setting.quantised else 0
    unpack_s = len(linears) * constants.PACKED_LINEAR_S if packed else 0.0
    by_part = {part: sum([once for name, once, _ in products if place_of(name) == part]) for part in PARTS}
    by_part["mixer"] += attention
    if block.mlp is None:  # the last projection, which nothing needs again
        by_part["out"] = 0.0
    time = LayerTime(
        products=forward + attention,
        traffic=scan,
        products_back=back + attention_back,
        traffic_back=scan_back,
        unpacking=packed * setting.width / card.unpacking,
        host=unpack_s + scan_host,
        host_back=unpack_s + scan_host,
        modules=modules,
        parts=tuple(by_part.values()),
        scan=scan,
    )
    if setting.compiled:
        return _compile_time(time, tape, x, y, setting, card)
    launches = len(real) * constants.OPERATION_S
    return time._replace(
        traffic=sum([_forward_s(op, card) for op in real if not op.product]) + scan,
        traffic_back=_backward_s(tape.ops, card) + scan_back,
        host=time.host + launches,
        host_back=time.host_back + launches * BACKWARD_OPERATIONS,
        # in both passes each operation is looked at, whether it is one that is kept
        host_again=time.host + launches + 2 * len(real) * constants.CHOSEN_OPERATION_S,
    )


def _compile_time(time: LayerTime, tape: Tape, x: Slot, y: Slot, setting: Setting, card: Card) -> LayerTime:
    """The same layer, compiled: its products and kernels are as they were, what lies between them is moved once."""
    moved, speed = fuse(tape, x, y), card.memory * constants.FUSED_SHARE
    kernels = [op for op in tape.ops if is_kernel(op)]
    own = [op for op in kernels if not op.product]  # a scan's, whose buffers pass through memory all the same
    back = sum([2 if op.weight_grad else 1 for op in kernels])
    fused_s = [size / speed + count * card.kernel_start_s for size, count in (moved.forward, moved.back, moved.again)]
    return time._replace(
        traffic=time.traffic + fused_s[0] + sum([_forward_s(op, card) for op in own]),
        traffic_back=time.traffic_back + fused_s[1] + _backward_s(own, card),
        host=time.host + _launch_code(len(kernels) + moved.forward.kernels) + constants.COMPILED_CALL_S,
        host_back=time.host_back + _launch_code(back + moved.back.kernels) + constants.COMPILED_BACK_S,
        fused_again=fused_s[2],
        host_again=_launch_code(len(kernels) + moved.again.kernels) + constants.COMPILED_AGAIN_S,
    )


def _launch_code(kernels: int) -> float:
    return kernels * constants.COMPILED_KERNEL_S


def _forward_s(op: Op, card: Card) -> float:
    """Seconds of an operation that is no product. A temporary is written and read."""
    read, written = sum([slot.size for slot in op.inputs]), sum([slot.size for slot in op.outputs])
    moved = read + written + sum([slot.size for slot in op.makes]) + 2 * op.forward_temp + op.again
    kernels = 5 if op.again else 3 if op.forward_temp else 1
    return moved / _speed(op, card, widens=written > read) + kernels * card.kernel_start_s


def _backward_s(ops: list[Op], card: Card) -> float:
    """Seconds of the backward of all operations, products apart; and of adding up the gradients of what is read more
    than once."""
    seconds, readers = 0.0, Counter[Slot]()
    for op in ops:
        wanted = [slot for slot in op.inputs if slot.grad]
        if not wanted or not op.outputs:
            continue
        readers.update(wanted)
        if op.fused:  # the gradient and what was kept are read, and gradients written
            passing = [*op.outputs, *op.saves, *wanted]
            seconds += sum([slot.size for slot in passing]) / card.memory + card.kernel_start_s
            continue
        if op.passes or op.product:
            continue
        # One kernel for the gradient of each input and of the weight: it reads the output's, and what was kept.
        gradient = sum([slot.size for slot in op.outputs])
        times = len(wanted) + (1 if op.weight_grad else 0)
        made = sum([slot.size for slot in wanted])
        if gradient < made and op.outputs[0].storage is not op.outputs[0]:  # a slice: laid into zeros
            seconds += made / card.memory + 2 * gradient / card.strided + 2 * card.kernel_start_s
            continue
        moved = times * gradient + made + sum([slot.size for slot in op.saves]) + 2 * op.backward_temp + op.again_back
        kernels = 9 if op.again_back else times + (2 if op.backward_temp else 0)
        seconds += moved / _speed(op, card, widens=made > gradient) + kernels * card.kernel_start_s
    for slot, times in readers.items():
        seconds += (times - 1) * (3 * slot.size / card.memory + card.kernel_start_s)
    return seconds


def _speed(op: Op, card: Card, *, widens: bool) -> float:
    """Bytes/s of its kernels. PyTorch narrows numbers as fast as it copies them, and widens them more slowly."""
    if op.access == "cast":
        return card.casting if widens else card.memory
    return {"plain": card.memory, "rows": card.reducing, "parts": card.strided}[op.access]


def _products(block: Block, setting: Setting, card: Card) -> list[tuple[str, float, float]]:
    """All linear layers with their adapters, and experts: their modules, and seconds forward and backward."""
    found, base_back = [], 2 if setting.trains_base else 1
    for tensor in block.tensors:
        module = tensor.name.rpartition(".")[0]
        if is_linear(tensor):
            out_features, in_features = tensor.shape
            once = _product(setting.tokens, out_features, in_features, setting.width, card)
            down = up = 0.0
            if setting.adapts(module):
                down = _product(setting.tokens, setting.lora_rank, in_features, setting.width, card)
                up = _product(setting.tokens, out_features, setting.lora_rank, setting.width, card)
            found.append((module, once + down + up, base_back * once + 2 * (down + up)))
        elif isinstance(block.mlp, Moe) and len(tensor.shape) == 3 and tensor.name.startswith("mlp."):
            # A grouped product. Every expert's weights are read, however few tokens it gets.
            _, out_features, in_features = tensor.shape
            flops = 2 * setting.tokens * block.mlp.top_k * out_features * in_features
            arithmetic = flops / card.products / constants.GROUPED_SHARE
            once = max(arithmetic, tensor.numel * setting.width / card.memory) + card.product_start_s
            module = tensor.name.replace("experts.", "")  # as of an MLP that is no mixture
            found.append((module, once, base_back * once))
    return found


def least_products_s(shape: ModelShape, setting: Setting, card: Card, frozen: int) -> float:
    """No way of computing these tokens takes less: the products of linear layers and head at the card's full rate, in
    however many parts. The lowest `frozen` layers have no backward pass."""
    back = 2 if setting.trains_base else 1
    each = [sum([tensor.numel for tensor in block.tensors if is_linear(tensor)]) for block in shape.blocks]
    layers = [each[kind] * (1 if index < frozen else 1 + back) for index, kind in enumerate(shape.pattern)]
    head = shape.vocab_size * shape.hidden_size * (3 if setting.trains_head(tied=shape.tied) else 2)
    return 2 * setting.tokens * (sum(layers) + head) / card.products


def _product(tokens: int, out_features: int, in_features: int, width: int, card: Card) -> float:
    arithmetic = 2 * tokens * out_features * in_features / card.products
    moved = width * (tokens * (out_features + in_features) + out_features * in_features) / card.memory
    return max(arithmetic, moved) + card.product_start_s


def _attention(block: Block, setting: Setting, card: Card) -> tuple[float, float]:
    mixer = block.mixer
    if not isinstance(mixer, Attention):
        return 0.0, 0.0
    kernel, masked, keys = kernel_of(mixer, setting), is_masked(mixer, setting), computed_keys(mixer, setting)
    flops = 4 * setting.tokens * mixer.heads * mixer.head_dim
    if kernel in ("eager", "math"):
        once = flops * keys / card.products
        return once, 2 * once
    name = f"masked_{kernel}" if masked else kernel
    keys += 0 if masked else constants.DIAGONAL_TOKENS
    shares = constants.FLASH_HEAD_SHARES if kernel == "flash" else constants.HEAD_SHARES
    share = shares.get(mixer.head_dim, 1.0)
    once = flops * keys / (getattr(card, name) * share) + card.product_start_s
    wide = kernel == "efficient" and mixer.head_dim > WIDE_HEAD
    return once, once * (constants.WIDE_EFFICIENT_BACK if wide else constants.ATTENTION_BACK[name])


def _scan(block: Block, setting: Setting) -> tuple[float, float, float]:
    """Seconds of the scan forward and backward on the GPU, and of each on the host."""
    mixer = block.mixer
    if not isinstance(mixer, Mamba1):
        return 0.0, 0.0, 0.0  # Mamba-2's is matrix products of chunks: their traffic is on the tape
    if setting.scan == "torch":
        return 0.0, 0.0, setting.sequence * constants.TORCH_SCAN_S_PER_TOKEN
    steps = setting.tokens * mixer.inner * mixer.state
    launches = constants.SCAN_OPERATIONS * constants.OPERATION_S
    forward, back = constants.SCAN_STEPS_PER_S[setting.scan], constants.SCAN_STEPS_BACK_PER_S[setting.scan]
    return steps / forward, steps / back, launches


@lru_cache(maxsize=2048)
def head_time(shape: ModelShape, setting: Setting, card: Card, fused: bool, trains_head: bool) -> LayerTime:
    """Embedding, final norm, head and loss."""
    tokens, vocab, hidden, width = setting.tokens, shape.vocab_size, shape.hidden_size, setting.width
    once = _product(tokens, vocab, hidden, width, card)
    logits = tokens * vocab
    upcast = width + FP32 if width < FP32 else 0
    capped = 6 * width * logits / card.memory if shape.final_softcap else 0.0
    # Widened, then read and written by a softmax; backwards zeros, the softmax's gradient from it and them, narrowed.
    forward = logits * (upcast / card.casting + 2 * FP32 / card.softmax) + capped
    back = logits * ((FP32 + upcast) / card.memory + 3 * FP32 / card.reducing) + capped
    trains = setting.trains_base or setting.trains_embedding
    embedding = vocab * hidden * width / card.memory if trains else 0.0  # a gradient of zeros, filled by token
    products_back = once * (2 if trains_head else 1)
    launches = constants.HEAD_OPERATIONS * constants.OPERATION_S
    if fused:
        # gradients are made in the forward pass, and the head's is added up chunk by chunk
        kernel, chunks = setting.loss_kernel, -(-tokens // chunk_tokens(shape, setting, trains_head))
        added = (2 * chunks - 1) * vocab * hidden * width / card.memory if trains_head else 0.0
        operations = constants.KERNEL_CHUNK_OPERATIONS if kernel else constants.CHUNK_OPERATIONS
        launches += chunks * operations * constants.OPERATION_S
        if kernel:  # which reads the logits twice and writes their gradient in place of them
            moved = 3 * logits * width / (card.capped_loss if shape.final_softcap else card.loss)
        else:  # widened; read for its maximum and its sum; four times read and written in place; narrowed
            moved = logits * (upcast / card.casting + 2 * FP32 / card.reducing + (8 * FP32 + upcast) / card.memory)
        if setting.liger_loss:  # the same kernel, and another that scales
            moved = 4 * logits * width / card.memory
        times = (once + products_back, moved + added, 0.0, embedding)
    else:
        times = (once, forward, products_back, back + embedding)
    return LayerTime(*times, 0.0, launches, constants.HEAD_OPERATIONS * constants.OPERATION_S, modules=3)


# --- all layers and the head together: the seconds of one micro batch ---------------------------


class Recomputing(NamedTuple):
    """How many layers do, and which of their parts."""

    layers: int
    select: tuple[str, ...]


def passes_of(shape: ModelShape, levers: Levers, gpu: Gpu, rates: Rates, *, recomputing: int) -> PassTimes:
    """With the engine's hooks; `recomputing`: the lowest so many layers run twice, or what is selected of them."""
    again = Recomputing(recomputing, levers.checkpointing.select if recomputing else ())
    plain, modules, modules_back = _plain(
        shape,
        setting_of(levers, gpu, shape.model_type),
        rates.card,
        again,
        frozen_of(levers),
        levers.loss == "fused",
    )
    slower = _throttle(plain, rates.card)
    return plain._replace(
        products=slower * plain.products,
        products_back=slower * plain.products_back,
        recomputed=plain.recomputed + (slower - 1) * plain.recomputed_products,
        recomputed_products=slower * plain.recomputed_products,
        head=plain.head + (slower - 1) * plain.head_products,
        throttle=slower,
        host=rates.launch * (plain.host + engines.hooks(levers, modules)),
        head_host=rates.launch * plain.head_host,
        host_back=rates.launch * (plain.host_back + engines.hooks(levers, modules_back)),
    )


def _throttle(plain: PassTimes, card: Card) -> float:
    """How much longer products take because the card may not draw more power: it averages over many kernels. What
    recomputes has the mix of what does not."""
    products, others = plain.products + plain.products_back, plain.traffic + plain.traffic_back
    if card.power <= 1:
        return 1.0
    power = (card.power * products + constants.OTHER_POWER * others) / (products + others)
    slower: float = max(1.0, power) ** constants.CLOCK_BY_POWER
    return slower


def frozen_of(levers: Levers) -> int:
    """Layers without a backward pass."""
    return levers.frozen_layers if levers.method == "full" else 0


@lru_cache(maxsize=1024)
def _plain(
    shape: ModelShape, setting: Setting, card: Card, again: Recomputing, frozen: int, fused: bool
) -> tuple[PassTimes, int, int]:
    """Without hooks, so that all engines share it; and the modules that are called in each pass."""
    # How many layers of each kind there are, how many run twice, how many have a backward pass.
    counted = [(head_time(shape, setting, card, fused, setting.trains_head(tied=shape.tied)), 1, 0, 1)]
    for kind, block in enumerate(shape.blocks):
        anew, back = shape.pattern[frozen : again.layers].count(kind), shape.pattern[frozen:].count(kind)
        layer = layer_time(block, shape.hidden_size, setting, card)
        counted.append((layer, shape.pattern.count(kind), anew, back))
    products = traffic = unpacking = host = 0.0
    products_back = traffic_back = unpacking_back = again_s = again_products = host_back = 0.0
    modules = modules_back = 0
    for layer, count, anew, back in counted:
        products += count * layer.products
        traffic += count * layer.traffic
        unpacking += count * layer.unpacking
        host += count * layer.host
        products_back += back * layer.products_back
        traffic_back += back * layer.traffic_back
        unpacking_back += back * layer.unpacking
        once_more = recompute_time(layer, again.select)
        again_s += anew * (once_more.products + once_more.others)
        again_products += anew * once_more.products
        host_back += back * layer.host_back + anew * once_more.host
        if again.layers and layer.fused_again is not None:
            light = recompute_time(layer, ELEMENTWISE)
            again_s += (back - anew) * light.others
            host_back += (back - anew) * light.host
        modules += count * layer.modules
        modules_back += (back + anew) * layer.modules
    forward, head = (products, traffic, unpacking, host), counted[0][0]
    backward = (products_back, traffic_back, unpacking_back, again_s, again_products, host_back)
    of_head = (head.products + head.traffic, head.products, head.host)
    return PassTimes(*forward, *backward, *of_head, throttle=1.0), modules, modules_back
