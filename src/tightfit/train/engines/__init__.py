"""The engines behind one small interface.

An engine takes the skeleton of a model, shards it, and turns micro batches into optimizer steps. What it does not do:
choose anything, read data, write files. The loop calls `accumulate` with the micro batches of a window, which is
`forward` and `backward` for each of them, and `step` once.

A checkpoint knows parameters by name and their elements by number. What this rank holds of the fp32 copies and of each
moment is handed out as such ranges (`State`), to be read or, with `write`, to be written into. One at a time: a range
may be unpacked, or fetched from NVMe, for as long as the caller looks at it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor

from tightfit.messages import Message
from tightfit.train import documents
from tightfit.train.build import DTYPES
from tightfit.train.loss import WindowLoss
from tightfit.train.nvme import is_on_nvme
from tightfit.train.optimizers import BLOCK, Which, read_8bit, write_8bit
from tightfit.train.place import Place
from tightfit.train.row_parts import RowParts
from tightfit.train.shards import Columns, Shard, find_resting, outline
from tightfit.train.ulysses import SequenceParts
from tightfit.types import Levers, Optimizer, TightfitError

MASTER = "master"  # the kind of the fp32 copies of weights; moments are called as torch's optimizers call them
PIECE = BLOCK * 2**16  # elements of an 8-bit state that are unpacked at a time
_EIGHT_BIT: dict[str, Which] = {"exp_avg": 1, "exp_avg_sq": 2}

Watch = Callable[[Literal["forward", "backward", "done"], int], None]
"""Told before a micro batch's forward pass, before its backward pass and after it; which one."""

Shapes = Mapping[str, Mapping[str, tuple[int, ...]]]
"""For each kind the parameters that have such a state, by path, and its shape; the same on every rank."""


class Diverged(TightfitError):
    """The loss, or the gradients, are no numbers any more."""

    kind: Literal["not-finite", "loss-scale"] = "not-finite"  # as the last words have it


class ScaleExhausted(Diverged):
    """Under fp16 gradients overflow at the smallest loss scale too."""

    kind = "loss-scale"
    advice = Message("engine.against-overflows")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped:
    """What an optimizer step did."""

    grad_norm: float | None  # before clipping; None: nobody measured it
    skipped: bool  # a gradient overflowed, and nothing was updated
    loss_scale: float | None  # fp16's; None: there is none


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """A step that the host has launched. What became of it may still be on the device: the host does what it can
    meanwhile, and then reads everything at once, since each number that it asked for by itself would be a wait."""

    grad_norm: Tensor | float | None
    skipped: Tensor | bool
    loss_scale: Tensor | float | None

    def read(self, loss: Tensor) -> tuple[float, Stepped]:
        """Wait for it. `loss` travels along."""
        asked = (loss, self.grad_norm, self.skipped, self.loss_scale)
        there = [each.detach().float() for each in asked if isinstance(each, Tensor) and each.device == loss.device]
        numbers, arrived = send_to_host(torch.stack(there))
        if arrived is not None:
            arrived.synchronize()
        read = iter(numbers.tolist())

        def number(each: Any) -> Any:
            if isinstance(each, Tensor):
                return next(read) if each.device == loss.device else float(each)
            return each

        value, norm, skipped, scale = map(number, asked)
        return value, Stepped(
            grad_norm=None if norm is None else float(norm),
            skipped=bool(skipped),
            loss_scale=None if scale is None else float(scale),
        )


def send_to_host(numbers: Tensor) -> tuple[Tensor, Any]:
    """They are in the tensor that this returns after the event beside it; on a CPU, at once. In locked memory: while
    the driver waits to copy into other memory, threads such as the one that updates weights on the host cannot let go
    of their events."""
    if not numbers.is_cuda:
        return numbers, None
    host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
    host.copy_(numbers, non_blocking=True)
    arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
    arrived.record()
    return host, arrived


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldHere:
    """What this rank really holds, to be set against the whole."""

    weight_bytes: int  # of parameters, on this rank, at rest
    whole_weight_bytes: int
    trainable_elements: int
    weights_on: str  # cpu, cuda or nvme
    frozen_in: str
    """The precisions of floating-point weights that do not train, at rest; of 4-bit ones there is none to tell."""
    trained_in: str
    state_elements: int  # of the optimizer's fp32 copies or, without them, of what it works on; so are the next two
    optimizer_on: str
    optimizer_in: str
    fair_elements: float  # the share of `state_elements` that a rank should have


@dataclass(frozen=True, slots=True)
class State:
    kind: str
    path: str  # of the parameter
    shape: tuple[int, ...]
    start: int
    tensor: Tensor  # flat: elements [start, start + its own number)
    alike: bool  # every rank holds the same range: one of them writes it
    is_copy: bool = False  # another rank holds the same range, and writes it
    columns: Columns | None = None  # of the parameter's rows, as a `Shard` has them
    holders: tuple[int, ...] = ()  # the ranks that hold the same range, where these are not all or this one alone


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScale:
    """fp16's loss scale."""

    value: float
    good_steps: int  # since the last overflow
    hysteresis: int | None  # overflows that are left before the scale falls, where an engine counts them

    @classmethod
    def of_deepspeed(cls, scaler: Any) -> LossScale | None:
        """None: there is none, or it stays as it was."""
        held = getattr(scaler, "__dict__", {})
        if "cur_iter" not in held:
            return None
        good_steps = int(held["cur_iter"]) - int(held["last_overflow_iter"]) - 1
        return cls(value=float(held["cur_scale"]), good_steps=good_steps, hysteresis=int(held["cur_hysteresis"]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    optimizer_steps: int  # those that were skipped do not count
    scale: LossScale | None


def moments(optimizer: Optimizer) -> tuple[str, ...]:
    """What is kept of each element."""
    few: dict[Optimizer, tuple[str, ...]] = {"sgd": (), "adafactor": ("exp_avg_sq",)}
    return few.get(optimizer, ("exp_avg", "exp_avg_sq"))


def precisions(tensors: Iterable[Tensor]) -> str:
    """Of those with floating-point numbers: bf16, or bf16,fp32."""
    words = {dtype: word for word, dtype in DTYPES.items()}
    found = {each.dtype for each in tensors if each.is_floating_point()}
    return ",".join(sorted(words.get(dtype, str(dtype).removeprefix("torch.")) for dtype in found))


class Engine(ABC):
    """`model` is the model as it was wrapped by adapters and sharded."""

    runs_in_step = True  # every rank is at the same pass of a window at the same time

    def __init__(self, model: Any, levers: Levers, place: Place) -> None:
        self.model, self._levers, self._place = model, levers, place
        self._parts: RowParts | None = None
        if levers.sequence_parallel > 1:
            self._parts = SequenceParts(model, levers, place)
        elif levers.tensor_parallel > 1:
            self._parts = RowParts(levers, place)
        self._loss = WindowLoss(model, levers.loss, shifted=self._parts is not None)
        self._runs: Any = model  # what is called: the model, or what a library puts around it
        self._documents = documents.Told()
        self._ranks = levers.stage_ranks(place.world)

    def accumulate(self, inputs: Iterable[dict[str, Tensor]], count: int, divisor: float, watch: Watch) -> Tensor:
        """Add up the gradients of a window's `count` micro batches; this rank's share of its loss, as `forward` has
        it. Nothing of a micro batch outlives it."""
        added = torch.zeros((), dtype=torch.float32, device=self._place.device)
        for number, each in enumerate(inputs):
            watch("forward", number)
            loss = self.forward(each, divisor)
            watch("backward", number)
            self.backward(loss, last=number == count - 1)
            added += loss.detach()
            del loss, each  # what the graph still holds would be there beside the next micro batch's
            watch("done", number)
        return added

    def evaluate(self, inputs: Iterable[dict[str, Tensor]], count: int) -> Tensor:
        """The sum of the losses of these `count` micro batches, each token by itself, times the number of ranks that
        have the same layers. No logits outlive their micro batch."""
        added = torch.zeros((), dtype=torch.float64, device=self._place.device)
        for each in inputs:
            added += self.forward(each, 1.0).double()
        return added

    def forward(self, inputs: dict[str, Tensor], divisor: float) -> Tensor:
        """A micro batch's share of the window's mean loss, times the number of ranks that have the same layers.
        `divisor` is the number of tokens of the window that count."""
        self._loss.divisor = divisor / self._ranks  # the reduction divides by the ranks
        self._documents.several = "position_ids" in inputs
        if self._parts is not None:
            inputs = self._parts.cut(inputs)
            self._documents.position_ids = self._parts.position_ids
        with self._inside():
            loss: Tensor = self._runs(**inputs, use_cache=False).loss
        if self._parts is not None:
            self._parts.check()
        return loss

    @contextmanager
    def _inside(self) -> Iterator[None]:
        """A pass, forward or backward, where layers may run once more."""
        with self._documents, nullcontext() if self._parts is None else self._parts:
            yield

    def train(self, mode: bool) -> None:
        """Training, or evaluation."""
        self._runs.train(mode)

    def _trainable(self) -> list[Shard]:
        return [shard for shard in outline(self.model, self._place.rank) if shard.parameter.requires_grad]

    def _states_per_parameter(
        self, states: Mapping[Any, Any], copies: Mapping[int, Tensor], *, write: bool
    ) -> Iterator[State]:
        """Of an optimizer that works on the parameters, on this rank's parts of them, or on fp32 copies of whole ones.
        `copies`: those, by the id of the parameter."""
        for shard in self._trainable():
            worked_on = copies.get(id(shard.parameter), shard.parameter)
            if worked_on is not shard.parameter:
                yield State(MASTER, shard.path, shard.shape, 0, worked_on.detach().view(-1), alike=True)
            held = states.get(worked_on, {})
            if "state1" in held:
                step = PIECE if shard.columns is None else max(1, shard.size)  # of columns whole rows are wanted
                for kind, which in _EIGHT_BIT.items():
                    for begin in range(0, shard.size, step):
                        values = read_8bit(held, which, begin, min(begin + step, shard.size))
                        at = shard.start + begin
                        yield self._state(kind, shard, at, values)
                        if write:
                            write_8bit(held, which, values, begin)
                continue
            for kind, tensor in held.items():
                if not isinstance(tensor, Tensor) or tensor.dim() == 0:
                    continue  # a counter
                local = tensor._local_tensor if hasattr(tensor, "_local_tensor") else tensor
                flat = local.detach().reshape(-1)
                if shard.cut or tuple(local.shape) == shard.shape:
                    yield self._state(kind, shard, shard.start, flat)
                else:  # adafactor's rows and columns
                    yield State(kind, shard.path, tuple(local.shape), 0, flat, alike=True)

    @staticmethod
    def _state(kind: str, shard: Shard, start: int, values: Tensor) -> State:
        who = (not shard.cut, shard.is_copy, shard.columns, shard.holders)
        return State(kind, shard.path, shard.shape, start, values, *who)

    def expect(self, steps: int) -> None:  # noqa: B027 - most have no use for it
        """The run has so many steps in all."""

    def expect_rate(self, learning_rate: float) -> None:  # noqa: B027 - likewise
        """The window that follows ends in a step at this rate."""

    def take_said(self) -> list[Message]:
        """What there was to tell of the steps since this was last asked."""
        return []

    def own_states(self) -> Mapping[str, Tensor]:
        """What only this rank has, and only ranks of the same number and way of sharing could use, flat, by name: what
        a compressed message left out. Every rank has tensors of the same size."""
        return {}

    @abstractmethod
    def backward(self, loss: Tensor, *, last: bool) -> None:
        """`last`: of the window; what follows is its step."""

    @abstractmethod
    def step(self, learning_rate: float) -> Launched:
        """Where gradients are not finite nothing is updated."""

    @abstractmethod
    def forget(self) -> None:
        """Undo what steps at learning rate zero left behind: moments, counters, loss scale."""

    @abstractmethod
    def states(self, *, write: bool) -> Iterator[State]:
        """fp32 copies and moments that this rank holds, each to be done with before the next is asked for. `write`:
        what is written into them stays."""

    def trained(self) -> dict[str, tuple[int, ...]]:
        """Everything that trains, that of other ranks too: paths and shapes."""
        return {shard.path: shard.shape for shard in self._trainable()}

    @abstractmethod
    def shapes(self) -> Shapes:
        """Which states there are, those of other ranks too."""

    @abstractmethod
    def counters(self) -> Counters: ...

    @abstractmethod
    def go_on(self, counters: Counters, step: int) -> None:
        """Weights and states were written from outside, as they were after `step` steps."""

    @abstractmethod
    def _weigh_optimizer(self) -> tuple[Iterable[Tensor], int, str, float]:
        """The optimizer's fp32 copies or, without them, what it works on; how many elements this rank has of it, where,
        and how many would be its share."""

    def holdings(self) -> HeldHere:
        worked_on, elements, optimizer_on, fair = self._weigh_optimizer()
        shards = list(outline(self.model, self._place.rank))
        resting = [(shard.parameter, find_resting(shard.parameter)) for shard in shards]
        return HeldHere(
            weight_bytes=sum(shard.size * shard.parameter.element_size() for shard in shards),
            whole_weight_bytes=sum(shard.numel * shard.parameter.element_size() for shard in shards),
            trainable_elements=sum(map(prod, self.trained().values())),
            weights_on=",".join(sorted({"nvme" if is_on_nvme(param) else part.device.type for param, part in resting})),
            frozen_in=precisions(part for param, part in resting if not param.requires_grad),
            trained_in=precisions(part for param, part in resting if param.requires_grad),
            state_elements=elements,
            optimizer_on=optimizer_on,
            optimizer_in=precisions(worked_on),
            fair_elements=fair,
        )
