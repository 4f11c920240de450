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
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from tightfit.memory import shared_layers
from tightfit.memory.activations import setting_of
from tightfit.memory.attention import computed_keys, exchanged_bytes, is_masked, kernel_of
from tightfit.memory.feedforward import count_arriving, mlp, set_tile, tile_tokens
from tightfit.memory.layers import has_parts, layer_tape
from tightfit.memory.loss import chunk_tokens
from tightfit.memory.operations import FP32, Operations, Setting
from tightfit.memory.selection import place_of
from tightfit.memory.shared_layers import cut_block, inside_of
from tightfit.memory.ssm import CUDA_CHANNELS, CUDA_STATES
from tightfit.memory.tape import Op, Slot, Tape
from tightfit.memory.weights import is_linear
from tightfit.pace import engines
from tightfit.pace import rates as constants
from tightfit.pace.engines import PassTimes
from tightfit.pace.graph import Fused, find_needed, fuse, is_kernel
from tightfit.pace.rates import Card, Rates
from tightfit.types import PARTS, Attention, Block, Gpu, Levers, Mamba1, Mlp, ModelShape, Moe, Traced

MODULES_WITHOUT_WEIGHTS = 4  # the layer itself, its mixer, its MLP and the activation
MODULES_OF_AN_ADAPTER = 4  # PEFT's wrapper, dropout, A and B around a linear layer
EXCHANGES = 4  # of queries, keys, values and what attention makes of them
WIDE_HEAD = 128
LEAST_KEYS = 512  # with fewer, eager attention's scores may be smaller than what others hold instead
ELEMENTWISE = PARTS[:1]
"""What all compiled layers recompute as soon as one recomputes anything."""
BACKWARD_OPERATIONS = 1.0
"""Host time of an operation's backward over its forward: no Python, but twice the kernels. Measured."""


class Again(NamedTuple):
    """Seconds of what runs once more in the backward pass of a layer."""

    products: float
    others: float
    host: float


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
    parts: tuple[Again, ...] = ()
    """What runs again with each of `PARTS`. The first of them goes along with any other; it has what always runs again:
    elementwise work, a scan whose kernels keep what only they can read, and what the choice itself costs. Nothing: the
    layer recomputes as a whole."""
    is_compiled: bool = False
    spared: Again = Again(0.0, 0.0, 0.0)
    """What of its forward pass does not run when it recomputes as a whole."""

    @property
    def lightens(self) -> bool:
        """Whether it recomputes its elementwise work as soon as any layer recomputes anything."""
        return self.is_compiled and bool(self.parts)


def recompute_time(layer: LayerTime, select: tuple[str, ...]) -> Again:
    """`select`: the parts that do; empty: all."""
    if not layer.parts or not (layer.is_compiled or select):
        products, others, host = layer.products, layer.traffic + layer.unpacking, layer.host
        less = layer.spared
        return Again(products - less.products, others - less.others, host - less.host + constants.CHECKPOINTED_LAYER_S)
    wanted = (*ELEMENTWISE, *select) if select else PARTS
    chosen = [each for part, each in zip(PARTS, layer.parts, strict=True) if part in wanted]
    return Again(
        sum([each.products for each in chosen]),
        sum([each.others for each in chosen]),
        sum([each.host for each in chosen]),
    )


class _Outline(NamedTuple):
    """What of a layer is the same on every card."""

    tape: Tape
    needed: set[int]  # see `find_needed`
    moved: Fused | None  # where it is compiled


@lru_cache(maxsize=48)
def _outline(block: Block, hidden: int, setting: Setting) -> _Outline:
    tape, x, y = layer_tape(block, hidden, setting, True)
    return _Outline(tape, find_needed(tape), fuse(tape, x, y) if setting.compiled else None)


@lru_cache(maxsize=1024)
def layer_time(block: Block, hidden: int, setting: Setting, card: Card) -> LayerTime:
    if setting.tiled:
        return _tile_time(layer_time(block, hidden, replace(setting, tiled=False), card), block, hidden, setting, card)
    own, inside = cut_block(block, setting.tensor), inside_of(setting)
    products = _products(own, inside, card)
    forward, back = sum([once for _, once, _ in products]), sum([once for _, _, once in products])
    linears = [tensor for tensor in own.tensors if is_linear(tensor)]
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
    tape, needed, moved = _outline(block, hidden, setting)
    real = _launched(tape)
    attention, attention_back = _attention(own, inside, card)
    exchanged, travelled = _exchange(block, hidden, setting, card), _travel(block, hidden, setting, card)
    waited = constants.ROUTED_OPERATIONS * constants.OPERATION_S if _shares_experts(block, setting) else 0.0
    scan, scan_back, scan_host = _scan(block, setting, card)
    packed = sum([tensor.numel for tensor in linears]) if setting.quantised else 0
    unpack_s = len(linears) * constants.PACKED_LINEAR_S if packed else 0.0
    time = LayerTime(
        products=forward + attention,
        traffic=scan + exchanged + travelled + waited,
        products_back=back + attention_back,
        traffic_back=scan_back + exchanged + travelled,
        unpacking=packed * setting.width / card.unpacking,
        host=unpack_s + scan_host,
        host_back=unpack_s + scan_host,
        modules=modules,
        is_compiled=setting.compiled,
    )
    again = _PartTimes(tape, needed, block, setting)
    again.add_products(products, card)
    again.add("mixer", products=attention, others=exchanged if setting.parts > 1 else 0.0)
    again.add("elementwise", others=exchanged if setting.tensor > 1 else 0.0)
    again.add("elementwise", others=travelled + waited)  # rows travel again, whatever is kept
    again.add_scan(scan, scan_host)
    if moved is not None:
        time = _compile_time(time, again, moved, card)
    else:
        launches = len(real) * constants.OPERATION_S
        time = time._replace(
            traffic=time.traffic + sum([_forward_s(op, card) for op in real if not op.product]),
            traffic_back=time.traffic_back + _backward_s(tape.ops, card),
            host=time.host + launches,
            host_back=time.host_back + launches * BACKWARD_OPERATIONS,
        )
        for op in real:
            if not op.product:
                again.add(op.part, others=_forward_s(op, card))
        # In both passes each operation is looked at, whether it is one that is kept; and Python runs every module.
        again.add("elementwise", host=unpack_s + launches + 2 * len(real) * constants.CHOSEN_OPERATION_S)
    return time._replace(parts=tuple(again.by_part.values())) if has_parts(block, setting) else time


class _MlpTime(NamedTuple):
    """Seconds of an MLP and one micro batch, as `LayerTime` has them of a layer."""

    products: float
    products_back: float
    traffic: float
    unpacking: float
    host: float
    trained: int  # elements that have a gradient


def _mlp_time(block: Block, hidden: int, setting: Setting, card: Card) -> _MlpTime:
    assert isinstance(block.mlp, Mlp)
    products = [each for each in _products(block, setting, card) if each[0].startswith("mlp.")]
    packed = [tensor for tensor in block.tensors if is_linear(tensor) and tensor.name.startswith("mlp.")]
    if not setting.quantised:
        packed = []
    ops = Operations(setting, {tensor.name: tensor for tensor in block.tensors})
    mlp(ops, Slot(ops.size(hidden), True), block.mlp, hidden)
    launched = _launched(ops.tape)
    width = setting.width if setting.trains_base else setting.adapter_width
    return _MlpTime(
        products=sum([once for _, once, _ in products]),
        products_back=sum([back for _, _, back in products]),
        traffic=sum([_forward_s(op, card) for op in launched if not op.product]),
        unpacking=sum([tensor.numel for tensor in packed]) * setting.width / card.unpacking,
        host=len(launched) * constants.OPERATION_S + len(packed) * constants.PACKED_LINEAR_S,
        trained=sum([op.weight_grad for op in launched]) // width,
    )


def _tile_time(plain: LayerTime, block: Block, hidden: int, setting: Setting, card: Card) -> LayerTime:
    """The same layer with its MLP in tiles, each of which runs forward in both passes. What comes out of a tile is
    copied to its place, and its weight gradients are added to those of the others, in fp32."""
    tile = tile_tokens(setting.tokens, hidden)
    tiles = -(-setting.tokens // tile)
    whole, one = (_mlp_time(block, hidden, set_tile(setting, tokens), card) for tokens in (setting.tokens, tile))
    copied = tiles * (2 * tile * hidden * setting.width / card.memory + card.kernel_start_s)
    summed = tiles * one.trained * (2 * FP32 + setting.width) / card.memory
    forward = Again(tiles * one.products, tiles * (one.traffic + one.unpacking) + copied, tiles * one.host)
    return plain._replace(
        products=plain.products - whole.products + forward.products,
        traffic=plain.traffic - whole.traffic + tiles * one.traffic + copied,
        products_back=plain.products_back - whole.products_back + tiles * one.products_back + forward.products,
        traffic_back=plain.traffic_back + forward.others + copied + summed,
        unpacking=plain.unpacking + (tiles - 1) * one.unpacking,
        host=plain.host - whole.host + forward.host,
        host_back=plain.host_back - whole.host + 2 * forward.host,
        parts=(),
        # Unless a norm reads what comes out of the MLP, a layer that recomputes stops before it.
        spared=Again(0.0, 0.0, 0.0) if block.arrangement in ("post", "sandwich") else forward,
    )


def _launched(tape: Tape) -> list[Op]:
    """The operations that are not mere views."""
    return [op for op in tape.ops if op.fused or any([slot.storage is slot for slot in op.outputs])]


class _PartTimes:
    """Adds up what runs again with each part."""

    def __init__(self, tape: Tape, needed: set[int], block: Block, setting: Setting) -> None:
        self.tape, self.needed, self.block, self.setting = tape, needed, block, setting
        self.by_part = dict.fromkeys(PARTS, Again(0.0, 0.0, 0.0))
        scans = [op.part for op in tape.ops if is_kernel(op) and op.part in ("mixer", "scan")]
        self._scan = "" if isinstance(block.mixer, Attention) else next(iter(scans), "")

    def add(self, part: str, *, products: float = 0.0, others: float = 0.0, host: float = 0.0) -> None:
        """To a part by any name that a tape has for it; what belongs to none that can be chosen runs with each."""
        name = "mlp" if part == "down" else part if part in PARTS else ELEMENTWISE[0]
        before = self.by_part[name]
        self.by_part[name] = Again(before.products + products, before.others + others, before.host + host)

    def add_scan(self, seconds: float, host: float) -> None:
        """Ours goes along with `mixer`, and is kept where that is; others always run again."""
        self.add(self._scan, others=seconds, host=host)

    def add_products(self, products: list[tuple[str, float, float]], card: Card) -> None:
        """As far as anything reads them again, with the 4-bit weights that they are made of."""
        ops, read = self.tape.ops, {self.tape.ops[number].part for number in self.needed}
        called = {
            name: any([number in self.needed and ops[number].product for number in range(since, until)])
            for name, since, until in self.tape.calls
        }
        linears = [tensor for tensor in self.block.tensors if self.setting.quantised and is_linear(tensor)]
        packed = {tensor.name.rpartition(".")[0]: tensor.numel for tensor in linears}
        for name, once, _ in products:
            part: str = place_of(name.partition("/")[0]) or ""
            if self._scan and name not in called:  # the function around the scan computes it
                part = self._scan
            if not called.get(name, part in read):
                continue
            self.add(part, products=once)
            if name in packed:
                host = constants.PACKED_LINEAR_S if self.setting.compiled else 0.0
                self.add(part, others=packed[name] * self.setting.width / card.unpacking, host=host)


def _compile_time(time: LayerTime, again: _PartTimes, moved: Fused, card: Card) -> LayerTime:
    """The same layer, compiled: its products and kernels are as they were, what lies between them is moved once."""
    tape, speed = again.tape, card.memory * constants.FUSED_SHARE
    kernels = [op for op in tape.ops if is_kernel(op)]
    own = [op for op in kernels if not op.product]  # a scan's, whose buffers pass through memory all the same
    back = sum([2 if op.weight_grad else 1 for op in kernels])
    fused_s = [size / speed + count * card.kernel_start_s for size, count in (moved.forward, moved.back, moved.again)]
    for number in again.needed:
        op = tape.ops[number]
        if is_kernel(op):
            again.add(op.part, others=0.0 if op.product else _forward_s(op, card), host=_launch_code(1))
    launched = _launch_code(moved.again.kernels) + constants.COMPILED_AGAIN_S
    again.add("elementwise", others=fused_s[2], host=launched)
    return time._replace(
        traffic=time.traffic + fused_s[0] + sum([_forward_s(op, card) for op in own]),
        traffic_back=time.traffic_back + fused_s[1] + _backward_s(own, card),
        host=time.host + _launch_code(len(kernels) + moved.forward.kernels) + constants.COMPILED_CALL_S,
        host_back=time.host_back + _launch_code(back + moved.back.kernels) + constants.COMPILED_BACK_S,
    )


def _launch_code(kernels: int) -> float:
    return kernels * constants.COMPILED_KERNEL_S


def _forward_s(op: Op, card: Card) -> float:
    """Seconds of an operation that is no product. A temporary is written and read."""
    if op.access == "sent":
        return _order_s(op.forward_temp, card)
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
        if op.access == "sent":
            seconds += _order_s(op.backward_temp, card)
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


def _order_s(size: int, card: Card) -> float:
    """Of what is sent, or has arrived, read and written in another order."""
    return 2 * size / card.strided + card.kernel_start_s if size else 0.0


def _speed(op: Op, card: Card, *, widens: bool) -> float:
    """Bytes/s of its kernels. PyTorch narrows numbers as fast as it copies them, and widens them more slowly."""
    if op.access == "cast":
        return card.casting if widens else card.memory
    return {"plain": card.memory, "rows": card.reducing, "parts": card.strided}[op.access]


def _products(block: Block, setting: Setting, card: Card) -> list[tuple[str, float, float]]:
    """All linear layers, their adapters' matrices (`…/A`, `…/B`) and experts: their modules as a tape calls them, and
    seconds forward and backward."""
    found, base_back = list[tuple[str, float, float]](), 2 if setting.trains_base else 1
    for tensor in block.tensors:
        module = tensor.name.rpartition(".")[0]
        if is_linear(tensor):
            out_features, in_features = tensor.shape
            once = _product(setting.tokens, out_features, in_features, setting.width, card)
            found.append((module, once, base_back * once))
            if setting.adapts(module):
                down = _product(setting.tokens, setting.lora_rank, in_features, setting.width, card)
                up = _product(setting.tokens, out_features, setting.lora_rank, setting.width, card)
                found += [(f"{module}/A", down, 2 * down), (f"{module}/B", up, 2 * up)]
        elif isinstance(block.mlp, Moe) and len(tensor.shape) == 3 and tensor.name.startswith("mlp."):
            # A grouped product. Every expert's weights are read, however few tokens it gets.
            _, out_features, in_features = tensor.shape
            rows = count_arriving(block.mlp, setting.tokens, setting.expert_ranks)
            arithmetic = 2 * rows * out_features * in_features / card.products / constants.GROUPED_SHARE
            read = tensor.numel // setting.expert_ranks * setting.width
            once = max(arithmetic, read / card.memory) + card.product_start_s
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


def outdoes_eager(shape: ModelShape, setting: Setting, card: Card) -> bool:
    """Whether what `setting` has for attention is no slower and holds no more than eager attention, in every layer and
    whatever else is chosen. Eager attention computes all scores, and moves them at least for the softmax: in and out,
    and once more on the way back. Where scores are few, they may be the smaller."""
    eager = replace(setting, attention="eager")
    for block in shape.blocks:
        mixer = block.mixer
        if not isinstance(mixer, Attention) or kernel_of(mixer, setting) == "eager":  # that very one
            continue
        is_short = setting.sequence < max(LEAST_KEYS, 2 * mixer.head_dim)
        if is_short or kernel_of(mixer, setting) == "math":
            return False
        own, inside = cut_block(block, setting.tensor), inside_of(setting)
        assert isinstance(own.mixer, Attention)
        once, back = _attention(own, inside, card)
        least, least_back = _attention(own, inside_of(eager), card)
        moved_s = setting.width * setting.tokens * own.mixer.heads * setting.sequence / card.memory
        if once > least + 2 * moved_s or back > least_back + 3 * moved_s:
            return False
    return True


def exchange_s(shape: ModelShape, setting: Setting, card: Card) -> float:
    """Seconds of a pass in which ranks that share sequences, layers or experts send each other something. Nothing runs
    meanwhile."""
    hidden = shape.hidden_size
    each = [_exchange(block, hidden, setting, card) + _travel(block, hidden, setting, card) for block in shape.blocks]
    return sum([each[kind] for kind in shape.pattern])


def _exchange(block: Block, hidden: int, setting: Setting, card: Card) -> float:
    seconds = 0.0
    if setting.parts > 1 and isinstance(block.mixer, Attention):
        seconds += exchanged_bytes(block.mixer, setting) / card.exchange + EXCHANGES * card.exchange_start_s
    if setting.tensor > 1:
        seconds += shared_layers.exchanged_bytes(hidden, setting) / card.exchange
        seconds += shared_layers.ENDS * card.exchange_start_s
    return seconds


def _shares_experts(block: Block, setting: Setting) -> bool:
    return setting.expert_ranks > 1 and isinstance(block.mlp, Moe)


def _travel(block: Block, hidden: int, setting: Setting, card: Card) -> float:
    """Rows to the owners of their experts and back, as the busiest of these gets and sends them."""
    if not _shares_experts(block, setting):
        return 0.0
    assert isinstance(block.mlp, Moe)
    ranks = setting.expert_ranks
    rows = count_arriving(block.mlp, setting.tokens, ranks) * (ranks - 1) / ranks
    return 2 * (rows * hidden * setting.width / card.travel + card.travel_start_s)


def _scan(block: Block, setting: Setting, card: Card) -> tuple[float, float, float]:
    """Seconds of the scan forward and backward on the GPU, and of each on the host."""
    mixer = block.mixer
    if not isinstance(mixer, Mamba1):
        return 0.0, 0.0, 0.0  # Mamba-2's is matrix products of chunks: their traffic is on the tape
    if setting.scan == "torch":
        return 0.0, 0.0, setting.sequence * constants.TORCH_SCAN_S_PER_TOKEN
    steps = setting.tokens * mixer.inner * mixer.state
    launches = constants.SCAN_OPERATIONS * constants.OPERATION_S
    forward, back = constants.SCAN_STEPS_PER_S[setting.scan], constants.SCAN_STEPS_BACK_PER_S[setting.scan]
    fits = setting.width < FP32 and mixer.state == CUDA_STATES and mixer.inner % CUDA_CHANNELS == 0
    if setting.scan == "tightfit" and fits:  # as mamba/cuda_scan.py says
        back = card.scan_back
    return steps / forward, steps / back, launches


@lru_cache(maxsize=2048)
def head_time(shape: ModelShape, setting: Setting, card: Card, fused: bool, trains_head: bool) -> LayerTime:
    """Embedding, final norm, head and loss, as far as the shape has them."""
    tokens, vocab, hidden, width = setting.tokens, shape.vocab_size, shape.hidden_size, setting.width
    once = _product(tokens, vocab, hidden, width, card)
    logits = tokens * vocab
    upcast = width + FP32 if width < FP32 else 0
    capped = 6 * width * logits / card.memory if shape.final_softcap else 0.0
    # Widened, then read and written by a softmax; backwards zeros, the softmax's gradient from it and them, narrowed.
    forward = logits * (upcast / card.casting + 2 * FP32 / card.softmax) + capped
    back = logits * ((FP32 + upcast) / card.memory + 3 * FP32 / card.reducing) + capped
    trains = setting.trains_base or setting.trains_embedding
    # a gradient of zeros, filled by token
    embedding = vocab * hidden * width / card.memory if trains and shape.before else 0.0
    if shape.hands_on:
        host = constants.OPERATION_S if shape.before else 0.0
        return LayerTime(0.0, 0.0, 0.0, embedding, 0.0, host, host, modules=len(shape.before))
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
        if again.layers and layer.lightens:
            light = recompute_time(layer, ELEMENTWISE)
            again_s += (back - anew) * light.others
            host_back += (back - anew) * light.host
        modules += count * layer.modules
        modules_back += (back + anew) * layer.modules
    forward, head = (products, traffic, unpacking, host), counted[0][0]
    backward = (products_back, traffic_back, unpacking_back, again_s, again_products, host_back)
    of_head = (head.products + head.traffic, head.products, head.host)
    return PassTimes(*forward, *backward, *of_head, throttle=1.0), modules, modules_back
