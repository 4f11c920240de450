"""PyTorch's and Hugging Face's operations as they stand on a tape: what each keeps, what each allocates.

Every rule here is a line of `derivatives.yaml` or of a `transformers` module; the tests run the real modules
under saved-tensor hooks and compare. A method named after an operation takes slots and returns its output.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tightfit.memory.tape import Slot, Tape
from tightfit.types import AttentionKernel, NormKind, Tensor

FP32 = 4

# What an activation keeps beside its input, in tensors as large as the input: gelu_new and quick_gelu are
# written in Python by transformers, so every factor of the product is a tensor of its own.
_PYTHON_ACTIVATIONS = {"gelu_new": 3, "gelu_fast": 3, "quick_gelu": 1}
_SAVES_OUTPUT = frozenset({"relu", "tanh", "sigmoid"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a tape needs to know of the levers: hashable, so that tapes are measured once."""

    micro_batch: int
    sequence: int
    width: int
    """Bytes of the working precision."""
    trains_base: bool
    lora_rank: int = 0
    lora_targets: tuple[str, ...] | None = None
    adapter_width: int = 2
    quantised: bool = False
    attention: AttentionKernel = "sdpa"
    scan: str = "official"

    @property
    def tokens(self) -> int:
        return self.micro_batch * self.sequence

    def adapts(self, module: str) -> bool:
        """Does LoRA sit on this module? PEFT's `all-linear` leaves the head out; so do the blocks."""
        if self.lora_rank == 0:
            return False
        return self.lora_targets is None or module.rsplit(".", 1)[-1] in self.lora_targets


@dataclass(slots=True)
class Operations:
    """A tape with the vocabulary of transformers."""

    setting: Setting
    tensors: dict[str, Tensor]
    tape: Tape = field(default_factory=Tape)

    def size(self, features: int, width: int | None = None) -> int:
        return self.setting.tokens * features * (width or self.setting.width)

    # --- matrices ---------------------------------------------------------------------------

    def find(self, *names: str) -> str:
        """The one of these module names that this layer has (`o_proj`, `dense`, `c_proj` …)."""
        return next(name for name in names if name + ".weight" in self.tensors)

    def weights(self, module: str) -> int:
        """Elements of a module's weight and bias."""
        names = (module + ".weight", module + ".bias")
        return sum([self.tensors[name].numel for name in names if name in self.tensors])

    def linear(self, x: Slot, module: str, out_features: int, in_features: int) -> Slot:
        """A linear layer with whatever adapter sits on it. Keeps its input only if its weight trains."""
        setting = self.setting
        numel = out_features * in_features
        trains = setting.trains_base
        whole = numel * setting.width if setting.quantised else 0
        y = self.tape.op(
            (x,),
            self.size(out_features),
            saves=(x,) if trains else (),
            weight_grad=numel * setting.width if trains else 0,
            forward_temp=whole,
            backward_temp=whole,
        )
        return self._adapter(x, y, in_features, out_features) if setting.adapts(module) else y

    def _adapter(self, x: Slot, y: Slot, in_features: int, out_features: int) -> Slot:
        """PEFT: result + lora_B(lora_A(x)) * scaling, in the adapter's precision."""
        setting, width = self.setting, self.setting.adapter_width
        cast = x if width == setting.width else self.tape.op((x,), self.size(in_features, width))
        down = self.tape.op(
            (cast,),
            self.size(setting.lora_rank, width),
            saves=(cast,),
            weight_grad=in_features * setting.lora_rank * width,
        )
        up = self.tape.op(
            (down,),
            self.size(out_features, width),
            saves=(down,),
            weight_grad=out_features * setting.lora_rank * width,
        )
        scaled = self.tape.op((up,), self.size(out_features, width))
        total = self.add(y, scaled, size=self.size(out_features, max(width, setting.width)))
        return total if width <= setting.width else self.tape.op((total,), self.size(out_features))

    # --- elementwise ------------------------------------------------------------------------

    def add(self, a: Slot, b: Slot, size: int | None = None) -> Slot:
        return self.tape.op((a, b), size or max(a.size, b.size), passes=True)

    def multiply(self, a: Slot, b: Slot) -> Slot:
        saves = tuple(kept for kept, other in ((a, b), (b, a)) if other.grad)
        return self.tape.op((a, b), max(a.size, b.size), saves=saves)

    def activate(self, x: Slot, name: str) -> Slot:
        if name in _SAVES_OUTPUT:
            return self.tape.op((x,), x.size, saves_output=True)
        extra = _PYTHON_ACTIVATIONS.get(name, 0)
        inner = tuple(self.tape.op((x,), x.size, saves_output=True) for _ in range(extra))
        return self.tape.op((x, *inner), x.size, saves=(x, *inner))

    def cast(self, x: Slot, features: int, width: int) -> Slot:
        """`.to(dtype)`: a new tensor, or the same one where the precision is the same."""
        size = self.size(features, width)
        return x if size == x.size else self.tape.op((x,), size)

    def scale(self, x: Slot, parameter: str, *, width: int | None = None) -> Slot:
        """x times a vector parameter, which may be cast up for it; x is kept if the vector trains."""
        vector, width = self.tensors[parameter].numel, width or self.setting.width
        size = x.size * width // self.setting.width
        trains = self.setting.trains_base
        return self.tape.op(
            (x,),
            size,
            saves=(x,) if trains else (),
            makes=() if width == self.setting.width else (vector * width,),
            backward_temp=size if trains else 0,
            weight_grad=vector * self.setting.width if trains else 0,
        )

    def convolve(self, x: Slot, module: str, channels: int, kernel: int) -> Slot:
        """silu of torch's own causal convolution, which pads on both sides and drops the tail."""
        setting = self.setting
        padded = setting.micro_batch * (setting.sequence + kernel - 1) * channels * setting.width
        trains = setting.trains_base
        wide = self.tape.op(
            (x,),
            padded,
            saves=(x,) if trains else (),
            weight_grad=self.weights(module) * setting.width if trains else 0,
        )
        cut = self.tape.view(wide, size=x.size, copies_grad=True)
        return self.tape.op((cut,), x.size, saves=(cut,))

    # --- norms ------------------------------------------------------------------------------

    def norm(self, x: Slot, features: int, kind: NormKind, *, rows: int = 1, trains: bool | None = None) -> Slot:
        """A norm over the last dimension of `features`; `rows` of them a token (heads of q and k)."""
        trains = self.setting.trains_base if trains is None else trains
        if kind == "layer":
            return self._layer_norm(x, features, rows)
        total = features * rows
        x32 = self.cast(x, total, FP32)
        # rsqrt(mean(x², -1) + eps): the square is a passing tensor, both ways
        whole = self.size(total, FP32)
        inverse = self.tape.op(
            (x32,), self.size(rows, FP32), saves=(x32,), saves_output=True, forward_temp=whole, backward_temp=whole
        )
        n32 = self.tape.op(
            (x32, inverse), whole, saves=(x32, inverse), backward_temp=whole, grad_sizes=(whole, inverse.size)
        )
        if kind == "gemma":
            scaled = self.tape.op((n32,), whole, saves=(n32,) if trains else (), backward_temp=whole if trains else 0)
            return self.cast(scaled, total, self.setting.width)
        n = self.cast(n32, total, self.setting.width)
        return self.tape.op((n,), n.size, saves=(n,) if trains else (), backward_temp=n.size if trains else 0)

    def _layer_norm(self, x: Slot, features: int, rows: int) -> Slot:
        return self.tape.op((x,), self.size(features * rows), saves=(x,), makes=(2 * self.size(rows, FP32),))
