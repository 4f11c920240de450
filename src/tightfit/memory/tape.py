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

Sizes are bytes for the whole micro batch. A view shares its storage, so it is the same `Slot`.
"""

from __future__ import annotations

from dataclasses import dataclass, field


class Slot:
    """One storage."""

    __slots__ = ("grad", "size")

    def __init__(self, size: int, grad: bool) -> None:
        self.size = size
        self.grad = grad
        """A gradient flows through it."""


@dataclass(slots=True)
class Op:
    """One operation. `saves` are kept until its backward has run."""

    inputs: tuple[Slot, ...]
    output: Slot | None
    saves: tuple[Slot, ...] = ()
    forward_temp: int = 0
    """Allocated and freed inside the forward."""
    backward_temp: int = 0
    """Likewise inside the backward, beside the gradients of the inputs."""
    weight_grad: int = 0
    """Gradient of the parameter, handed to the engine as soon as it is there."""
    passes: bool = False
    """The gradient of the output is that of the inputs: nothing is allocated (additions, views)."""
    grad_sizes: tuple[int, ...] | None = None
    """Gradients of the inputs where they are not as large as the inputs."""


@dataclass(frozen=True, slots=True)
class LayerCost:
    """What a layer holds, beside its input."""

    saved: int
    """Kept for the backward pass when the layer is not checkpointed."""
    output: int
    forward: int
    """The most that is held while it runs with everything kept."""
    forward_unsaved: int
    """The same when nothing is kept: the first pass of a checkpointed layer, or evaluation."""
    backward: int
    """The most that is held in its backward pass, the gradient of its output included."""
    backward_kept: int
    """The same where its weight gradients stay until the step (unsharded, ZeRO-1)."""
    weight_grads: int
    input_grad: int


@dataclass(slots=True)
class Tape:
    """Records a layer. Helpers that know PyTorch's operations stand in `operations.py`."""

    ops: list[Op] = field(default_factory=list)

    def input(self, size: int, *, grad: bool = True) -> Slot:
        return Slot(size, grad)

    def op(
        self,
        inputs: tuple[Slot, ...],
        size: int,
        *,
        saves: tuple[Slot, ...] = (),
        saves_output: bool = False,
        forward_temp: int = 0,
        backward_temp: int = 0,
        weight_grad: int = 0,
        passes: bool = False,
        grad_sizes: tuple[int, ...] | None = None,
    ) -> Slot:
        grad = weight_grad > 0 or any(slot.grad for slot in inputs)
        output = Slot(size, grad)
        kept: tuple[Slot, ...] = ()
        if grad:
            kept = (*saves, output) if saves_output else saves
        self.ops.append(Op(inputs, output, kept, forward_temp, backward_temp, weight_grad, passes, grad_sizes))
        return output

    def saved(self) -> dict[int, Slot]:
        return {id(slot): slot for op in self.ops for slot in op.saves}


def measure(tape: Tape, layer_input: Slot, layer_output: Slot) -> LayerCost:
    """Walk the tape. The layer's input is not counted, unless some operation keeps it."""
    kept = tape.saved()
    saved = sum(slot.size for slot in kept.values())
    backward, backward_kept, weight_grads, input_grad = _walk_back(tape, saved, layer_input, layer_output)
    return LayerCost(
        saved=saved,
        output=layer_output.size,
        forward=_walk_forward(tape, kept, layer_input, layer_output),
        forward_unsaved=_walk_forward(tape, {}, layer_input, layer_output),
        backward=backward,
        backward_kept=backward_kept,
        weight_grads=weight_grads,
        input_grad=input_grad,
    )


def _walk_forward(tape: Tape, kept: dict[int, Slot], layer_input: Slot, layer_output: Slot) -> int:
    uses: dict[int, int] = {}
    for op in tape.ops:
        for slot in op.inputs:
            uses[id(slot)] = uses.get(id(slot), 0) + 1
    held = {id(layer_input), id(layer_output), *kept}
    live = peak = layer_input.size if id(layer_input) in kept else 0
    for op in tape.ops:
        live += op.output.size if op.output else 0
        peak = max(peak, live + op.forward_temp)
        for slot in op.inputs:
            uses[id(slot)] -= 1
            if uses[id(slot)] == 0 and id(slot) not in held:
                live -= slot.size
    return peak


def _walk_back(tape: Tape, saved: int, layer_input: Slot, layer_output: Slot) -> tuple[int, int, int, int]:
    """Peak with weight gradients released at once, peak with them kept, their sum, the input's gradient."""
    keepers: dict[int, int] = {}
    for op in tape.ops:
        for slot in op.saves:
            keepers[id(slot)] = keepers.get(id(slot), 0) + 1
    gradients: dict[int, list[int]] = {id(layer_output): [layer_output.size, 1]}
    """Per slot: bytes, and how many slots share this gradient's storage (as a one-element owner list)."""
    live = saved + layer_output.size
    peak = peak_kept = live
    weight_grads = 0
    for op in reversed(tape.ops):
        gradient = gradients.pop(id(op.output), None) if op.output is not None else None
        if gradient is None:
            continue
        sizes = op.grad_sizes or tuple(slot.size for slot in op.inputs)
        fresh = arriving = 0
        for slot, size in zip(op.inputs, sizes, strict=True):
            if not slot.grad:
                continue
            have = gradients.get(id(slot))
            if op.passes:
                if have is None:
                    gradients[id(slot)] = gradient
                    gradient[1] += 1
            elif have is None:
                gradients[id(slot)] = [size, 1]
                fresh += size
            else:
                arriving += size  # added in place to what is there, then gone
        live += fresh
        now = live + arriving + op.backward_temp + op.weight_grad
        peak = max(peak, now)
        peak_kept = max(peak_kept, now + weight_grads)
        weight_grads += op.weight_grad
        gradient[1] -= 1
        if gradient[1] == 0:
            live -= gradient[0]
        for slot in op.saves:
            keepers[id(slot)] -= 1
            if keepers[id(slot)] == 0:
                live -= slot.size
    final = gradients.get(id(layer_input))
    return peak, peak_kept, weight_grads, final[0] if final else 0
