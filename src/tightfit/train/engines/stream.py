"""Weights that rest on the host and visit the device: one card is enough.

A window goes through the model layer by layer (`walk.py`), and layers come when it is their turn (`streaming.py`). With
adapters nothing else moves: they stay on the device and train there, as `ddp` trains them.

Where the layers themselves train, gradients leave for the host, where fp32 copies and moments are, and new weights come
from there (`updates.py`). A unit never comes to the device before its update.

Several GPUs have one copy of all that rests on the host. Each updates its share of every unit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tightfit.messages import Message
from tightfit.train.build import body_of
from tightfit.train.config import OptimizerConfig
from tightfit.train.engines import MASTER, PIECE, Counters, Launched, Shapes, State, Watch, moments
from tightfit.train.engines.ddp import Ddp
from tightfit.train.engines.scaled import ScaledEngine
from tightfit.train.host_adam import Step
from tightfit.train.host_memory import HostMemory
from tightfit.train.place import Place, meet
from tightfit.train.shards import Shard
from tightfit.train.streaming import Stream, Unit
from tightfit.train.updates import Updates
from tightfit.train.walk import Kept, MicroBatch, Passage, Walk
from tightfit.types import Levers


class Streamed(ScaledEngine):
    """The way of a window through the model. Whoever inherits says what happens to gradients."""

    def _set_out(self, stream: Stream, levers: Levers) -> None:
        self._stream, self._walk = stream, Walk(self.model)
        how, layers, body = levers.checkpointing, self._walk.layers, body_of(self.model)
        self._whole = [not how.select and (how.layers is None or number < how.layers) for number in range(len(layers))]
        """Whether a layer recomputes whole, and so keeps no graph."""
        memory = HostMemory(self._place, shared=False) if how.offload and not how.select else None
        self._kept = Kept(stream.streams, memory)
        embedding, head = (get().weight for get in (body.get_input_embeddings, body.get_output_embeddings))
        self._is_tied, self._below = head is embedding, embedding.requires_grad
        trains = (number for number, layer in enumerate(layers) if any(p.requires_grad for p in layer.parameters()))
        self._lowest = 0 if self._below else next(trains, len(layers))
        """Below it nothing trains, and no gradient is wanted."""
        self._draws = _draws(self.model)
        self._meet()

    def _open(self, unit: Unit | None) -> None:
        """Gradients of it will follow."""

    def _close(self, unit: Unit | None) -> None:
        """It has all of them."""

    def accumulate(self, inputs: Iterable[dict[str, Tensor]], count: int, divisor: float, watch: Watch) -> Tensor:
        stream, kept = self._stream, self._kept
        kept.clear()
        batches = self._go_up(inputs, divisor, watch, keeps=True)
        added = torch.zeros((), dtype=torch.float32, device=self._place.device)
        stream.use(stream.top)
        self._open(stream.top)
        if self._is_tied:
            self._open(stream.bottom)
        for number in reversed(range(len(batches))):
            batch = batches[number]
            watch("backward", number)
            assert batch.hidden is not None
            hidden = batch.hidden.detach().requires_grad_(self._lowest < len(self._walk.layers) or self._below)
            batch.hidden = None
            with self._in(batch):
                loss = self._walk.end(self._runs, batch, hidden)
                if loss.requires_grad:
                    self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            batch.gradient = hidden.grad
            added += loss.detach()
            del loss, hidden
        stream.release(stream.top)
        self._close(stream.top)
        for layer in reversed(range(self._lowest, len(self._walk.layers))):
            self._go_down(layer, batches, watch)
        if self._below:
            self._open(stream.bottom)
            for batch in reversed(batches):
                assert batch.start is not None
                with self._in(batch):
                    torch.autograd.backward(batch.start, batch.gradient)
                batch.start = batch.gradient = None
        self._close(stream.bottom)
        return added

    def evaluate(self, inputs: Iterable[dict[str, Tensor]], count: int) -> Tensor:
        added = torch.zeros((), dtype=torch.float64, device=self._place.device)
        rest = iter(inputs)
        while few := list(islice(rest, self._levers.accumulation)):
            for batch in self._go_up(few, 1.0, lambda *_: None, keeps=False):
                self._stream.use(self._stream.top)
                assert batch.hidden is not None
                with self._in(batch):
                    added += self._walk.end(self._runs, batch, batch.hidden).double()
        return added

    def _go_up(
        self, inputs: Iterable[dict[str, Tensor]], divisor: float, watch: Watch, *, keeps: bool
    ) -> list[MicroBatch]:
        stream, walk = self._stream, self._walk
        self._loss.divisor = divisor / self._ranks
        stream.use(stream.bottom)
        stream.fetch(next((unit for unit in stream.layers if unit is not None), None), wait=False)
        batches = []
        for number, each in enumerate(inputs):
            watch("forward", number)
            batch = MicroBatch(each, "position_ids" in each)
            with self._in(batch):
                walk.begin(self._runs, batch)
            assert batch.start is not None
            batch.hidden = batch.start.detach()
            if not (keeps and self._below):
                batch.start = None
            batches.append(batch)
        stream.release(stream.bottom)
        for layer, unit in enumerate(stream.layers):
            stream.use(unit)
            ahead = stream.find_next(layer, 1)
            is_coming = False
            for number, batch in enumerate(batches):
                watch("forward", number)
                with self._in(batch):
                    self._pass_up(layer, batch, keeps=keeps and layer >= self._lowest)
                is_coming = is_coming or stream.fetch(ahead, wait=False)
            stream.release(unit)
            stream.fetch(ahead)
        return batches

    def _pass_up(self, layer: int, batch: MicroBatch, *, keeps: bool) -> None:
        hidden = batch.hidden
        assert hidden is not None
        if keeps and not self._whole[layer]:
            passage, batch.hidden = self._pass(layer, batch, hidden)
            batch.kept.append((passage, None))
            return
        state = self._read_draws() if keeps else None
        with torch.no_grad():
            made = self._walk.run(layer, batch, hidden)
        if keeps:
            batch.kept.append((self._kept.put(hidden), state))
        batch.hidden = made

    def _pass(self, layer: int, batch: MicroBatch, hidden: Tensor) -> tuple[Passage, Tensor]:
        """With a graph, and what the layer makes."""
        passage = Passage()
        needs_below = layer > self._lowest or self._below
        made = self._walk.run(layer, batch, passage.enter(hidden) if needs_below else hidden)
        return passage, passage.leave(made)

    def _go_down(self, layer: int, batches: list[MicroBatch], watch: Watch) -> None:
        stream, unit = self._stream, self._stream.layers[layer]
        stream.use(unit)
        self._open(unit)
        ahead = stream.find_next(layer, -1) if layer > self._lowest else None
        for number in reversed(range(len(batches))):
            batch = batches[number]
            watch("backward", number)
            kept, state = batch.kept.pop()
            with self._in(batch):
                if self._whole[layer]:
                    with self._drawing(state):
                        kept, _ = self._pass(layer, batch, self._kept.take(kept))
                        del _
                batch.gradient = kept.go_back(batch.gradient)
            del kept
            watch("done", number)
            stream.fetch(ahead, wait=False)
        stream.release(unit)
        self._close(unit)
        stream.fetch(ahead)

    def _in(self, batch: MicroBatch) -> Any:
        self._documents.several = batch.several
        return self._inside()

    def _read_draws(self) -> Any:
        """Where the generator stands, for a layer that draws to draw the same again."""
        if not self._draws:
            return None
        return torch.cuda.get_rng_state(self._place.device) if self._place.on_gpu else torch.get_rng_state()

    def _drawing(self, state: Any) -> Any:
        if state is None:
            return nullcontext()
        return _Drawing(state, self._place.device)

    def _meet(self) -> None:
        """Nobody changes the weights that all ranks share while another still writes them from outside."""
        meet(self._place)

    def go_on(self, counters: Counters, step: int) -> None:
        super().go_on(counters, step)
        self._stream.renew(self._stream.units)
        self._meet()


class _Drawing:
    """Inside, the generator begins at `state`; outside, it goes on where it was."""

    def __init__(self, state: Tensor, device: torch.device) -> None:
        self._state, self._device = state, device

    def _set(self, state: Tensor) -> Tensor:
        if self._device.type == "cuda":
            before = torch.cuda.get_rng_state(self._device)
            torch.cuda.set_rng_state(state, self._device)
        else:
            before = torch.get_rng_state()
            torch.set_rng_state(state)
        return before

    def __enter__(self) -> None:
        self._state = self._set(self._state)

    def __exit__(self, *_: object) -> None:
        self._set(self._state)


def _draws(model: nn.Module) -> bool:
    """Whether a layer drops anything out."""
    config = getattr(model, "config", None)
    named = vars(config).items() if config is not None else ()
    return any(isinstance(each, nn.Dropout) and each.p > 0 for each in model.modules()) or any(
        "drop" in name and isinstance(value, float) and value > 0 for name, value in named
    )


class StreamAdapters(Streamed, Ddp):
    """Nothing but adapters trains: on the device, as `ddp` trains them."""

    def __init__(self, model: Any, levers: Levers, place: Place, training: OptimizerConfig, stream: Stream) -> None:
        super().__init__(model, levers, place, training)
        self._set_out(stream, levers)
        if self._has_copies:
            self._accumulates = True  # by hooks, since a layer's micro batches follow each other
            for param, copy in zip(self._trained, self._copies, strict=True):
                param.register_post_accumulate_grad_hook(_AddingWide(copy))  # type: ignore[no-untyped-call]

    def accumulate(self, inputs: Iterable[dict[str, Tensor]], count: int, divisor: float, watch: Watch) -> Tensor:
        if self._has_copies:
            self._make_wide().zero_()
        return super().accumulate(inputs, count, divisor, watch)


class _AddingWide:
    """The gradient of one micro batch, to that of the parameter's fp32 copy."""

    def __init__(self, copy: Tensor) -> None:
        self._copy = copy

    def __call__(self, param: nn.Parameter) -> None:
        assert self._copy.grad is not None
        assert param.grad is not None
        self._copy.grad.add_(param.grad)
        param.grad = None


class StreamWeights(Streamed):
    """The layers' own weights train: on the host."""

    def __init__(
        self,
        model: Any,
        levers: Levers,
        place: Place,
        training: OptimizerConfig,
        stream: Stream,
        disk: Path | None = None,
    ) -> None:
        """`disk`: the folder in which the optimizer's states rest that have no room in the host's memory."""
        super().__init__(model, levers, place, training)
        self._set_out(stream, levers)
        self._updates = Updates(model, stream, levers, place, disk)
        self._open, self._close = self._updates.open, self._updates.close  # type: ignore[method-assign]

    def expect_rate(self, learning_rate: float) -> None:
        scale = self._scaler.get_scale() if self._scaler.is_enabled() else 1.0
        self._updates.expected = Step(learning_rate, 0, 1.0 / scale)

    @torch.no_grad()
    def step(self, learning_rate: float) -> Launched:
        is_scaled = self._scaler.is_enabled()
        scale = self._scaler.get_scale() if is_scaled else 1.0
        norm = self._updates.measure() / scale
        spoilt = torch.isfinite(norm).logical_not().float()
        self._updates.launch(learning_rate, norm, self._clip, scale)
        if is_scaled:
            self._scaler._per_optimizer_states[id(self)]["found_inf_per_device"] = {norm.device: spoilt}
            self._scaler.update()
        skipped = spoilt if self._updates.waits else False  # or what is not finite is in the weights by now
        return Launched(
            grad_norm=norm, skipped=skipped, loss_scale=self._scaler._get_scale_async() if is_scaled else None
        )

    def take_said(self) -> list[Message]:
        return self._updates.take_said()

    def forget(self) -> None:
        self._updates.settle()
        for unit, states in self._updates.states.items():
            with self._updates.resident(unit, write=True):
                states.forget()
        self._updates.steps = 0
        self._scaler = self._fresh_scaler()

    def counters(self) -> Counters:
        self._updates.settle()
        return Counters(optimizer_steps=self._updates.steps, scale=self._read_scale())

    def go_on(self, counters: Counters, step: int) -> None:
        self._updates.steps = counters.optimizer_steps
        self._set_scale(counters)
        self._stream.renew(self._stream.units)
        self._meet()

    def states(self, *, write: bool) -> Iterator[State]:
        self._updates.settle()
        where = self._updates.where
        for unit, shards in groupby(self._trainable(), lambda shard: where[shard.path][0]):
            with self._updates.resident(unit, write=write):
                for shard in shards:
                    yield from self._states_of(shard, write=write)

    def _states_of(self, shard: Shard, *, write: bool) -> Iterator[State]:
        unit, part = self._updates.where[shard.path]
        held = self._updates.states[unit]
        low, high = self._updates.share(unit)
        begin, end = max(low, part.first), min(high, part.first + part.numel)
        for kind in held.kinds:
            for at in range(begin, end, PIECE):
                stop = min(at + PIECE, end)
                values = held.read(kind, at - low, stop - low)
                start = at - part.first
                yield State(kind, shard.path, shard.shape, start, values, alike=self._place.world == 1)
                if write:
                    held.write(kind, at - low, values)

    def shapes(self) -> Shapes:
        whole = {shard.path: shard.shape for shard in self._trainable()}
        kinds = moments(self._levers.optimizer)
        return dict.fromkeys((MASTER, *kinds) if self._updates.has_masters else kinds, whole)

    def _weigh_optimizer(self) -> tuple[Iterable[Tensor], int, str, float]:
        held = self._updates.states
        few = [
            states.read(MASTER, 0, 1) if self._updates.has_masters else unit.weights for unit, states in held.items()
        ]
        shards = self._trainable()
        whole = sum(shard.numel for shard in shards)
        elements = 0
        for shard in shards:
            unit, part = self._updates.where[shard.path]
            low, high = self._updates.share(unit)
            elements += max(0, min(high, part.first + part.numel) - max(low, part.first))
        on = "cpu" if self._levers.offload_optimizer == "none" else "cpu,nvme"
        return few, elements, on, whole / self._place.world
