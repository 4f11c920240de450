"""What layers keep for their backward pass, in host memory until then.

Copies run beside the computation, on streams of their own, one layer behind it on the way out and one ahead of it on
the way back. So a layer's tensors stand on the device while the next layer runs forwards, and while the layer above it
runs backwards, and in between only on the host: at most two layers hold theirs at a time, however slow the link is,
since the computation waits for the copies of the layer before the last. That makes the bytes certain, and costs nothing
as long as a layer computes longer than its copies take.

The top layer's own would come back as soon as they had left, so they stay. So do tensors that are not the layer's:
weights, rotary tables, masks; and small ones, which cost more to move than to keep. Tensors are moved by storage:
views of one are one copy. Each layer has its buffers on the host for good, registered with the driver as they are:
PyTorch's own pinned memory comes in powers of two.

Several micro batches may pass a layer before the next layer's turn (`walk.py`): then each of them has buffers of its
own there, and copies follow the turns in whatever order these come.
"""

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from tightfit.memory.tape import SMALLEST_MOVED_BYTES
from tightfit.messages import Message
from tightfit.train.host_memory import register, unregister

Say = Callable[[Message], None]
Layer = Callable[..., Any]


@dataclass(slots=True, eq=False)
class _Moved:
    """One storage of a layer: its copy on the host, and the one that has come back."""

    host: Tensor
    handles: int = 0  # tensors in it that autograd has yet to ask for
    back: Tensor | None = None


@dataclass(slots=True, eq=False)
class _Turn:
    """What one layer has sent in one forward pass."""

    moved: dict[int, _Moved] = field(default_factory=dict)  # by storage
    leaving: list[Tensor] = field(default_factory=list)  # on the device until they have left
    left: Any = None  # events
    arrived: Any = None


@dataclass(slots=True)
class _Handle:
    """What autograd keeps instead of a tensor."""

    turn: _Turn
    moved: _Moved
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class HostStore:
    """Of the layers of one model."""

    def __init__(self, device: torch.device, say: Say) -> None:
        self._device, self._say, self._pins = device, say, device.type == "cuda"
        make: Any = torch.cuda.Stream if self._pins else lambda _: None
        self._out, self._in = make(device), make(device)
        self._buffers: dict[tuple[int, int, int], Tensor] = {}
        """By layer, by the number of its turn since the last backward pass, and by the order in which it keeps its
        tensors: that pass is over when it keeps them anew."""
        self._below: _Turn | None = None  # the last one, before the one that runs next
        self._turns: Counter[int] = Counter()  # of each layer
        self._is_back = False  # something is, since then

    def run(self, call: Layer, sends: bool, index: int, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """A layer's forward pass. If it `sends`, whatever it keeps goes to the host; and when its own backward pass
        begins, what was sent in the turn before it comes back."""
        if self._is_back:
            self._turns.clear()
        number, self._is_back = self._turns[index], False
        self._turns[index] += torch.is_grad_enabled()
        below, self._below = self._below if index or number else None, None
        made = self._send(call, (index, number), layer, *args, **kwargs) if sends else call(layer, *args, **kwargs)
        if below is None:
            return made
        if below.left is not None:  # the computation waits, not the host
            torch.cuda.current_stream(self._device).wait_event(below.left)
        below.leaving.clear()
        output = next((each for each in _tensors_in(made) if each.requires_grad), None)
        if output is not None:
            output.register_hook(lambda _: self._fetch(below))  # type: ignore[no-untyped-call]
        return made

    def _send(self, call: Layer, number: tuple[int, int], layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        others = {each.untyped_storage()._cdata for each in (*_weights_of(layer), *_tensors_in((args[1:], kwargs)))}
        turn = _Turn()

        def pack(tensor: Tensor) -> Tensor | _Handle:
            storage = tensor.untyped_storage()
            own = storage._cdata
            if tensor.device != self._device or own in others or storage.nbytes() < SMALLEST_MOVED_BYTES:
                return tensor
            if own not in turn.moved:
                source = torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)
                moved = turn.moved[own] = _Moved(self._take((*number, len(turn.moved)), storage.nbytes()))
                self._copy(moved.host, source, self._out)
                turn.leaving.append(source)
            turn.moved[own].handles += 1
            size, stride, offset = tensor.shape, tensor.stride(), int(tensor.storage_offset())
            return _Handle(turn, turn.moved[own], tensor.dtype, size, stride, offset)

        def unpack(kept: Tensor | _Handle) -> Tensor:
            if isinstance(kept, Tensor):
                return kept
            self._fetch(kept.turn)
            if self._in is not None:
                torch.cuda.current_stream(self._device).wait_event(kept.turn.arrived)
            back = kept.moved.back
            if back is None:  # asked for once more than it was kept
                back = kept.moved.host.to(self._device)
            kept.moved.handles -= 1
            if kept.moved.handles <= 0:
                kept.moved.back = None  # whoever asked has it, and lets go of it when it has been read
            tensor = torch.empty(0, dtype=kept.dtype, device=self._device)
            return tensor.set_(back.untyped_storage(), kept.offset, kept.size, kept.stride)

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            made = call(layer, *args, **kwargs)
        if turn.moved:
            turn.left = None if self._out is None else self._out.record_event()
            self._below = turn
        return made

    def _fetch(self, turn: _Turn) -> None:
        if turn.arrived is not None:
            return
        self._is_back = True
        for moved in turn.moved.values():
            moved.back = torch.empty(moved.host.numel(), dtype=torch.uint8, device=self._device)
            self._copy(moved.back, moved.host, self._in)
        turn.arrived = True if self._in is None else self._in.record_event()

    def _copy(self, to: Tensor, source: Tensor, stream: Any) -> None:
        """Beside the computation, once that has come to here: what is read has been written, and what is written to is
        no longer in use."""
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(self._device))
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            to.copy_(source, non_blocking=True)

    def _take(self, key: tuple[int, int, int], size: int) -> Tensor:
        """The layer's buffer on the host, of which a shorter row takes a part."""
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < size:
            if buffer is not None and self._pins:
                unregister(buffer, self._device)
            # Whole pages of its own: the driver registers no page twice.
            pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            buffer = self._buffers[key] = torch.frombuffer(pages, dtype=torch.uint8)
            if self._pins and not register(buffer, self._device):
                self._pins = False
                self._say(Message("train.cannot-lock"))
        return buffer[:size]


def _tensors_in(values: Any) -> list[Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, Tensor)]


def _weights_of(layer: nn.Module) -> Iterator[Tensor]:
    """With the scales of 4-bit ones."""
    for weight in (*layer.parameters(), *layer.buffers()):
        yield weight
        state = getattr(weight, "quant_state", None)
        while state is not None:
            yield from _tensors_in([state.absmax, state.code, state.offset])
            state = state.state2
