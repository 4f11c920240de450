"""PyTorch's and Hugging Face's operations as they stand on a tape: what each keeps, what each allocates.

Every rule here is a line of `derivatives.yaml` or of a `transformers` module; the tests run the real modules
under saved-tensor hooks and compare. A method named after an operation takes slots and returns its output.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from tightfit.memory.selection import place_of
from tightfit.memory.tape import Part, Slot, Tape
from tightfit.types import AttentionKernel, NormKind, Tensor

FP32, FP64 = 4, 8
UNADAPTABLE = "mixer.out_proj"
"""PEFT refuses Mamba's output projection: the fused kernels read its weight past the adapter."""
INT64 = 8
BOOL = 1

_SAVES_OUTPUT = frozenset({"relu", "relu6", "tanh", "sigmoid"})
LIGER_MODELS = frozenset(
    "gemma gemma2 gemma3_text granite llama ministral mistral mixtral olmo2 olmo3 phi3 qwen2 qwen3 qwen3_moe "
    "smollm3".split()
)
"""The model types, of those that we know, whose layers Liger has kernels for."""
_LIGER_GATES = frozenset({"silu", "swish", "gelu_pytorch_tanh"})
_LIGER_SUMS = 132
"""Rows in which Liger's norm sums up the gradient of its weight: one for each multiprocessor, here an H100's or H200's
(other cards have from 46 to 170, which makes no difference of a megabyte)."""


@cache
def part_of(module: str) -> Part:
    """The part of a layer that a linear module belongs to."""
    place = place_of(module)
    assert place, f"{module} is in neither half of the layer"
    return place


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a tape needs to know of the levers: hashable, so that tapes are measured once."""

    micro_batch: int
    sequence: int  # tokens that attention sees
    width: int  # bytes of the working precision
    trains_base: bool  # the layers, the final norm and a head of its own train
    trains_embedding: bool = False  # the embedding trains, and with it a head that is tied to it
    keeps_inputs: bool = False
    """A linear layer keeps its input though its weight is frozen: ZeRO-3 puts a function of its own in its place."""
    lora_rank: int = 0
    lora_targets: tuple[str, ...] | None = None
    lora_drops: bool = False  # each adapter drops a share of its input
    adapter_width: int = 2
    quantised: bool = False
    attention: AttentionKernel = "sdpa"
    packed: bool = False  # documents of one sequence are kept apart by a mask
    padded: bool = False  # rows have a mask for their padding
    liger: bool = False  # Liger's kernels compute norms, rotary embedding and gated activations
    liger_loss: bool = False  # the fused loss is Liger's
    compiled: bool = False  # each layer is code that torch.compile made of it
    tiled: bool = False  # an MLP computes some tokens after the others
    loss_kernel: bool = True  # one kernel turns logits into their gradient where the loss is fused
    reentrant: bool = False
    """Checkpointing runs a whole layer again; the non-reentrant kind stops after the last tensor that is kept."""
    scan: str = "official"
    cuda_scan: bool = True  # our scan goes back through kernels in CUDA's own language, if shapes allow; else Triton's
    broadcast_scan: bool = False  # Mamba-2 without kernels contracts by broadcasting: transformers before 5.18
    on_gpu: bool = True
    prefers_cudnn: bool = False  # PyTorch tries cuDNN's attention first: 16-bit numbers, on sm_90 and sm_100
    flash_capable: bool = True  # PyTorch's own flash kernel can run: 16-bit numbers, and on NVIDIA sm_80 or newer
    fused_capable: bool = True  # its memory-efficient kernel can run: not on every AMD card, nor with bf16 before sm_80
    parts: int = 1  # ranks that share each sequence: all but attention sees a part of its tokens
    expert_ranks: int = 1  # ranks that share the experts of each layer
    tensor: int = 1  # ranks that share each layer: all but attention and MLP sees a part of the tokens

    @property
    def tokens(self) -> int:
        return self.micro_batch * self.own_sequence

    @property
    def own_sequence(self) -> int:
        """Tokens of a sequence that are this rank's."""
        return -(-self.sequence // (self.parts * self.tensor))

    def trains_head(self, *, tied: bool) -> bool:
        return self.trains_embedding if tied else self.trains_base

    def adapts(self, module: str) -> bool:
        """Does LoRA sit on this module? PEFT's `all-linear` leaves the head out; so do the blocks."""
        if self.lora_rank == 0:
            return False
        if self.lora_targets is None:
            return module != UNADAPTABLE
        return module.rsplit(".", 1)[-1] in self.lora_targets


@dataclass(slots=True)
class Operations:
    """A tape with the vocabulary of transformers."""

    setting: Setting
    tensors: Mapping[str, Tensor]
    tape: Tape = field(default_factory=Tape)
    returned: list[Slot] = field(default_factory=list)
    """What a mixer hands back beside its output (eager attention's weights): the layer holds it to its end."""
    local: list[Slot] = field(default_factory=list)  # variables of the mixer that outlive their use
    adds_norms: bool = False  # what a norm puts out is added to something, so that its gradient is another's too
    ranks: int = 1  # that have a part of each matrix
    _tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self._tokens = self.setting.tokens

    def of_rows(self, rows: int) -> Operations:
        """The same tape for so many tokens, such as those that other ranks send."""
        other = replace(self)
        other._tokens = rows
        return other

    def grad(self, numel: int) -> int:
        """Bytes of the gradient of so many of the layer's own weights."""
        return numel * self.setting.width if self.setting.trains_base else 0

    def size(self, features: int, width: int | None = None) -> int:
        return self._tokens * features * (width or self.setting.width)

    def find(self, *names: str) -> str:
        """The one of these module names that this layer has (`o_proj`, `dense`, `c_proj` …)."""
        return next(name for name in names if name + ".weight" in self.tensors)

    def weights(self, module: str) -> int:
        """Elements of a module's weight and bias."""
        names = (module + ".weight", module + ".bias")
        return sum([self.tensors[name].numel for name in names if name in self.tensors])

    @property
    def mixer_weights(self) -> int:
        """Elements that a fused scan reads itself: all of the mixer but the input projection."""
        inside = [name for name in self.tensors if name.startswith("mixer.") and not name.startswith("mixer.in_proj")]
        return sum([self.tensors[name].numel for name in inside])

    def linear(self, x: Slot, module: str, out_features: int, in_features: int) -> Slot:
        """A linear layer with whatever adapter sits on it. Keeps its input if its weight trains, or under ZeRO-3."""
        setting = self.setting
        since = len(self.tape.ops)
        whole = out_features * in_features * setting.width if setting.quantised else 0
        saves = (x,) if setting.trains_base or setting.keeps_inputs else ()
        size, grad = self.size(out_features), self.grad(self.weights(module))
        facts: dict[str, Any] = {"product": True, "part": part_of(module)}
        y = self.tape.op((x,), size, saves=saves, weight_grad=grad, forward_temp=whole, backward_temp=whole, **facts)
        self.tape.called(module, since)
        if setting.adapts(module):
            y = self._adapter(module, (x, y), in_features, out_features)
        if self.ranks > 1 and part_of(module) in ("out", "down"):
            y = self.send(y, y.size // self.ranks)
            self.tape.ops[-1].sums = part_of(module)  # of which nothing but what is left to a rank is read
            self.tape.hold(x)
        return y

    def send(self, x: Slot, size: int) -> Slot:
        """A part of the tokens becomes all of them, or the sums of the ranks' terms for all tokens those for a part; on
        the way back the other. Ranks come before rows in what is sent and what arrives."""
        ordered = max(x.size, size) if self.setting.micro_batch > 1 else 0
        return self.tape.op((x,), size, access="sent", forward_temp=ordered, backward_temp=ordered)

    def _adapter(self, module: str, base: tuple[Slot, Slot], in_features: int, out_features: int) -> Slot:
        """PEFT: result + lora_B(lora_A(dropout(x))) * scaling, in the adapter's precision."""
        setting, width, tape = self.setting, self.setting.adapter_width, self.tape
        x, y = base
        cast = self.cast(x, in_features, width)
        read = self.dropout(cast, width) if setting.lora_drops else cast
        since, rank = len(tape.ops), setting.lora_rank
        grad = in_features * rank * width
        facts: dict[str, Any] = {"product": True, "part": part_of(module)}
        down = tape.op((read,), self.size(rank, width), saves=(read,), weight_grad=grad, **facts)
        tape.called(f"{module}/A", since)
        since, grad = len(tape.ops), out_features * rank * width
        up = tape.op((down,), self.size(out_features, width), saves=(down,), weight_grad=grad, **facts)
        summing = len(tape.ops)
        total = self.cast(self.add(y, self.times_constant(up)), out_features, setting.width)
        for op in tape.ops[summing:]:
            op.sums = part_of(module)
        tape.hold(cast)
        tape.hold(x)
        tape.called(f"{module}/B", since)
        return total

    def add(self, a: Slot, b: Slot) -> Slot:
        """The narrower one is promoted on the way, which shows in its gradient only: that is cast back."""
        size = max(a.size, b.size)
        wide = [x if x.size == size else self.tape.view(x, size=size, copies_grad=True) for x in (a, b)]
        return self.tape.op((wide[0], wide[1]), size, passes=True)

    def multiply(self, a: Slot, b: Slot) -> Slot:
        saves = tuple([kept for kept, other in ((a, b), (b, a)) if other.grad])
        return self.tape.op((a, b), max(a.size, b.size), saves=saves)

    def times_constant(self, x: Slot) -> Slot:
        return self.tape.op((x,), x.size)

    def plus_constant(self, x: Slot) -> Slot:
        return self.tape.op((x,), x.size, passes=True)

    def power(self, x: Slot) -> Slot:
        """x to a constant: the backward makes x to one less, then its multiple, then the product."""
        return self.tape.op((x,), x.size, saves=(x,), backward_temp=2 * x.size)

    def output_saving(self, x: Slot) -> Slot:
        """tanh, exp, sigmoid: known by their outputs."""
        return self.tape.op((x,), x.size, saves_output=True)

    def softmax(self, x: Slot, heads: int, forward_temp: int = 0) -> Slot:
        """Known by its output too, which a GPU first multiplies by the gradient (`softmax_backward_cuda_out`)."""
        back = x.size if self.setting.on_gpu else 0
        facts: dict[str, Any] = {
            "forward_temp": forward_temp,
            "backward_temp": back,
            "rows": 2 * self.size(heads, FP32),
        }
        return self.tape.op((x,), x.size, saves_output=True, **facts)

    def activate(self, x: Slot, name: str) -> Slot:
        """One kernel for most; some are written in Python, where every factor is a tensor of its own."""
        if name in _SAVES_OUTPUT:
            return self.output_saving(x)
        if name == "gelu_new":
            # 0.5 * x * (1 + tanh(c * (x + 0.044715 * x³)))
            half = self.times_constant(x)
            inner = self.add(x, self.times_constant(self.power(x)))
            return self.multiply(half, self.plus_constant(self.output_saving(self.times_constant(inner))))
        if name == "gelu_fast":
            # 0.5 * x * (1 + tanh(x * c * (1 + 0.044715 * x * x)))
            half, scaled = self.times_constant(x), self.times_constant(x)
            inner = self.plus_constant(self.multiply(self.times_constant(x), x))
            tanh = self.output_saving(self.multiply(scaled, inner))
            return self.multiply(half, self.plus_constant(tanh))
        if name == "quick_gelu":
            return self.multiply(x, self.output_saving(self.times_constant(x)))
        if name == "relu2":
            return self.power(self.output_saving(x))
        tangent = x.size // self.setting.width * FP32 if name == "gelu_pytorch_tanh" else 0
        return self.tape.op((x,), x.size, saves=(x,), inner=tangent)

    def cast(self, x: Slot, features: int, width: int) -> Slot:
        """`.to(dtype)`: a new tensor, or the same one where the precision is the same."""
        size = self.size(features, width)
        return x if size == x.size else self.tape.op((x,), size, access="cast")

    def dropout(self, x: Slot, width: int | None = None) -> Slot:
        """CUDA's fused dropout keeps a byte an element."""
        mask = x.size // (width or self.setting.width) * BOOL
        return self.tape.op((x,), x.size, makes=(mask,), part="random")

    def scale(self, x: Slot, parameter: str, *, width: int | None = None) -> Slot:
        """x times a vector parameter, which may be cast up for it; x is kept if the vector trains."""
        vector, width = self.tensors[parameter].numel, width or self.setting.width
        casts = () if width == self.setting.width else (vector * width,)
        return self.weigh(x, vector, size=x.size * width // self.setting.width, makes=casts)

    def weigh(
        self, x: Slot, numel: int, *, size: int | None = None, makes: tuple[int, ...] = (), trains: bool | None = None
    ) -> Slot:
        """x times a parameter of so many elements; where that trains, x is kept, and the gradient is summed up from a
        product as large as the output."""
        size = x.size if size is None else size
        if not (self.setting.trains_base if trains is None else trains):
            return self.tape.op((x,), size, makes=makes)
        grad = numel * self.setting.width
        facts: dict[str, Any] = {"backward_temp": size, "weight_grad": grad, "weighs": True}
        return self.tape.op((x,), size, saves=(x,), makes=makes, **facts)

    def convolve(self, x: Slot, module: str, channels: int, kernel: int) -> Slot:
        """silu of torch's own causal convolution, which pads on both sides and drops the tail."""
        setting = self.setting
        padded = setting.micro_batch * (setting.sequence + kernel - 1) * channels * setting.width
        # its backward is one function, so even a frozen one keeps its input
        wide = self.tape.op((x,), padded, saves=(x,), weight_grad=self.grad(self.weights(module)), part="scan")
        cut = self.tape.view(wide, size=x.size, copies_grad=True)
        return self.tape.op((cut,), x.size, saves=(cut,))

    def norm(self, x: Slot, features: int, kind: NormKind, *, rows: int = 1, copies: bool = False) -> Slot:
        """A norm over the last dimension of `features`; `rows` of them a token (heads of q and k). `copies`: what it
        reads is not laid out head by head, which only Liger's minds."""
        if not self.setting.liger or kind == "layer":
            return self.norm_by_torch(x, features, kind, rows=rows)
        normed = self._norm_by_liger(x, features, rows, copies=copies)
        self.tape.hold(x)
        return normed

    def norm_by_torch(
        self, x: Slot, features: int, kind: NormKind, *, rows: int = 1, trains: bool | None = None
    ) -> Slot:
        trains = self.setting.trains_base if trains is None else trains
        if kind == "layer":
            # Weight and bias; of norms over heads (stablelm) every head has its own weight, and no bias. Mean and
            # deviation are fp32 on a GPU; on the CPU they have the working precision.
            grad = (rows if rows > 1 else 2) * features * self.setting.width if trains else 0
            sums = (2 * self.size(rows, FP32),)
            normed = self.tape.op((x,), self.size(features * rows), saves=(x,), makes=sums, weight_grad=grad)
        else:
            normed = self._rms(x, features, kind, rows, trains)
        self.tape.hold(x)
        return normed

    def _norm_by_liger(self, x: Slot, features: int, rows: int, *, copies: bool) -> Slot:
        """`LigerRMSNormFunction`: keeps its input, or the copy of it, and the inverse root of each row. The gradient of
        the input is written over the output's, where that is nobody else's; a copy of it is made where one of the input
        was."""
        setting, copied = self.setting, x.size if copies else 0
        sums = (_LIGER_SUMS if setting.on_gpu else 1) * features * FP32 if setting.trains_base else 0
        roots = self.size(rows, FP32)
        return self.tape.op(
            (x,),
            x.size,
            saves=() if copies else (x,),
            makes=(copied, roots) if copies else (roots,),
            weight_grad=self.grad(features),
            backward_temp=sums + copied,
            passes=not self.adds_norms,
            fused=True,
        )

    def gates_by_liger(self, activation: str) -> bool:
        """Whether one kernel of Liger's multiplies what it activates."""
        return self.setting.liger and activation in _LIGER_GATES

    def gate_by_liger(self, gate: Slot, up: Slot) -> Slot:
        """`LigerSiLUMulFunction` and `LigerGELUMulFunction`: keep both inputs and write the gradients over them. Parts
        of one tensor (phi3's) are copied first."""
        copies = () if gate.storage is gate else (gate.size, up.size)
        saves = () if copies else (gate, up)
        return self.tape.op((gate, up), gate.size, saves=saves, makes=copies, overwrites=True, fused=True)

    def _rms(self, x: Slot, features: int, kind: NormKind, rows: int, trains: bool) -> Slot:
        total = features * rows
        n32 = self.normalise(self.cast(x, total, FP32), rows)
        if kind == "rms":
            y = self.weigh(self.cast(n32, total, self.setting.width), features, trains=trains)
            self.tape.hold(n32)
            return y
        added = (features * FP32,) if kind == "gemma" else ()  # 1 + w
        y = self.cast(self.weigh(n32, features, makes=added, trains=trains), total, self.setting.width)
        if kind == "olmo":
            self.tape.hold(n32)
        return y

    def normalise(self, x: Slot, rows: int) -> Slot:
        """x · rsqrt(mean(x²) + eps), in fp32."""
        square = self.power(x)
        mean = self.tape.op((square,), self.size(rows, FP32), access="rows")
        inverse = self.output_saving(self.plus_constant(mean))
        return self.tape.op((x, inverse), x.size, saves=(x, inverse), backward_temp=x.size)
