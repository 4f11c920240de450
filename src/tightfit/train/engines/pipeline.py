"""A pipeline of stages, each of which FSDP2 shards: micro batches go up, and their gradients come down.

Torch has a runtime for pipelines (`torch.distributed.pipelining`). With FSDP2 inside, it gathers whole stages and keeps
them and their whole gradients from a window's first backward pass to its last, and it has a buffer for everything that
arrives in a window, in both directions: what a pipeline saves would be spent again. Here every micro batch reduces its
gradients, as without a pipeline; what arrives has memory from when it is asked for; and what was sent is kept by
nobody. The order of passes is torch's (`memory/stages.py`).

Where ranks of a stage share its layers or its rows, each hands on the hidden states of its own tokens, to the rank that
has the same ones in the next stage.

A tied embedding is on the first GPU of the row, and once more as the head on the last. Both take the same steps: their
gradients are added up after each window. It is counted in the norm, and saved, by the first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from tightfit.memory.stages import Direction, Pass, order_actions
from tightfit.train import optimizers
from tightfit.train.build import DTYPES, body_of, layers_of
from tightfit.train.config import OptimizerConfig
from tightfit.train.engines import Launched, Watch
from tightfit.train.engines.fsdp2 import Fsdp2
from tightfit.train.mesh import STAGES
from tightfit.train.place import Place
from tightfit.train.shards import find_tied_copy
from tightfit.train.stages import Handover, Stages, leave_after_stage
from tightfit.types import Levers


@dataclass(slots=True)
class _Rows:
    """A micro batch as this rank reads it, which may have a part of the tokens."""

    inputs: dict[str, Tensor]
    several: bool  # documents in a row
    positions: Tensor | None  # of whole rows, where it has a part of them


@dataclass(slots=True)
class _InFlight:
    """A micro batch between a stage's forward pass and its backward pass."""

    arrived: Tensor | None  # what the stage read, to which the gradient comes; None: its batch
    end: Tensor  # the loss, or the end of the stage's graph
    several: bool  # as of its rows
    positions: Tensor | None
    gradient: list[Tensor] = field(default_factory=list)


@dataclass(slots=True)
class _Window:
    """What is on its way between forward and backward passes."""

    rows: Iterator[_Rows]
    loss: Tensor  # the sum so far
    read: dict[int, _Rows] = field(default_factory=dict)
    shapes: list[torch.Size] = field(default_factory=list)  # of each micro batch that was read
    arriving: dict[Pass, tuple[Any, Tensor]] = field(default_factory=dict)
    in_flight: dict[tuple[int, int], _InFlight] = field(default_factory=dict)
    made: dict[Pass, Tensor] = field(default_factory=dict)  # what is to be sent next
    sent: dict[Direction, tuple[Any, Tensor]] = field(default_factory=dict)  # what was sent last

    def batch(self, number: int) -> _Rows:
        self.shape_of(number)
        return self.read[number]

    def shape_of(self, number: int) -> torch.Size:
        while number >= len(self.shapes):
            rows = self.read[len(self.shapes)] = next(self.rows)
            self.shapes.append(rows.inputs["input_ids"].shape)
        return self.shapes[number]


class Pipeline(Fsdp2):
    runs_in_step = False

    def __init__(
        self,
        model: Any,
        levers: Levers,
        place: Place,
        training: OptimizerConfig,
        mesh: Any,
        stages: Stages,
        whole: dict[str, tuple[int, ...]],
    ) -> None:
        """`whole`: paths and shapes of all that trains, on whichever rank."""
        super().__init__(model, levers, place, training)
        self._stages, self._whole = stages, whole
        self._row = mesh.get_group(STAGES)
        self._peers = dist.get_process_group_ranks(self._row)
        self._gpu = self._peers.index(place.rank)
        config = body_of(model).config
        # Between layers a Mamba may keep its residual stream in fp32.
        wide = getattr(config, "residual_in_fp32", False)
        self._travels_in, self._width = torch.float32 if wide else DTYPES[levers.precision], config.hidden_size
        self._tied = self._find_tied()
        leave_after_stage(model, stages)
        order_gathering(model, stages)

    def trained(self) -> dict[str, tuple[int, ...]]:
        return self._whole

    # --- a window -----------------------------------------------------------------------------

    def accumulate(self, inputs: Iterable[dict[str, Tensor]], count: int, divisor: float, watch: Watch) -> Tensor:
        self._loss.divisor = divisor / self._ranks
        nothing = torch.zeros((), dtype=torch.float32, device=self._place.device)
        self._scaler.scale(nothing)  # which only the last stage scales a loss with, and every stage reads
        window = _Window(map(self._read, inputs), nothing)
        for action in self._order(count, backward=True):
            number = action.of.micro_batch
            if action.what == "receive":
                self._receive(window, action.of, action.peer)
            elif action.what == "send":
                self._send(window, action.of, action.peer)
            elif action.of.direction == "forward":
                watch("forward", number)
                self._pass_forward(window, action.of)
            else:
                watch("backward", number)
                self._pass_backward(window, action.of, last=number == count - 1)
                watch("done", number)
        for work, _ in window.sent.values():
            work.wait()
        self._add_tied()
        return window.loss

    def evaluate(self, inputs: Iterable[dict[str, Tensor]], count: int) -> Tensor:
        self._loss.divisor = 1.0 / self._ranks
        window = _Window(map(self._read, inputs), torch.zeros((), dtype=torch.float64, device=self._place.device))
        for action in self._order(count, backward=False):
            if action.what == "receive":
                self._receive(window, action.of, action.peer)
            elif action.what == "send":
                self._send(window, action.of, action.peer)
            else:
                self._pass_forward(window, action.of)
                window.in_flight.clear()
        for work, _ in window.sent.values():
            work.wait()
        return window.loss

    def _read(self, inputs: dict[str, Tensor]) -> _Rows:
        several = "position_ids" in inputs
        if self._parts is None:
            return _Rows(inputs, several, None)
        return _Rows(self._parts.cut(inputs), several, self._parts.position_ids)

    def _turn_to(self, rows: _Rows | _InFlight) -> None:
        """The next pass is of these."""
        self._documents.several = rows.several
        if self._parts is not None:
            self._documents.position_ids = self._parts.position_ids = rows.positions

    def _order(self, count: int, *, backward: bool) -> Any:
        gpus, per_gpu = self._levers.pipeline_parallel, self._levers.stages_per_gpu
        return order_actions(gpus, per_gpu, count, backward=backward)[self._gpu]

    def _receive(self, window: _Window, reader: Pass, peer: int | None) -> None:
        """Memory for it, and the request."""
        assert peer is not None
        shape = *window.shape_of(reader.micro_batch), self._width
        buffer = torch.empty(shape, dtype=self._travels_in, device=self._place.device)
        window.arriving[reader] = dist.irecv(buffer, src=self._peers[peer], group=self._row), buffer

    def _send(self, window: _Window, maker: Pass, peer: int | None) -> None:
        """What went before it in the same direction is let go."""
        assert peer is not None
        if maker.direction in window.sent:
            window.sent.pop(maker.direction)[0].wait()
        made = window.made.pop(maker)
        window.sent[maker.direction] = dist.isend(made, dst=self._peers[peer], group=self._row), made

    def _wait_for(self, window: _Window, reader: Pass) -> Tensor:
        work, buffer = window.arriving.pop(reader)
        work.wait()
        return buffer

    def _pass_forward(self, window: _Window, this: Pass) -> None:
        stages, number = self._stages, this.micro_batch
        rows = window.batch(number)
        inputs = dict(rows.inputs)
        if this.stage == stages.own[-1]:
            del window.read[number]
        arrived = None
        if this.stage:
            arrived = self._wait_for(window, this).requires_grad_(torch.is_grad_enabled())
            del inputs["input_ids"]
            inputs["inputs_embeds"] = arrived
        stages.now, stages.arrived = this.stage, arrived
        self._turn_to(rows)
        try:
            with self._inside():
                made: Any = self._runs(**inputs, use_cache=False)
        finally:
            stages.now = stages.arrived = None
        if self._parts is not None and this.stage == stages.own[-1]:
            self._parts.check()
        flying = _InFlight(arrived, window.loss, rows.several, rows.positions)
        if this.stage == stages.last:
            flying.end = made.loss
            window.loss += made.loss.detach()
        else:
            hidden = made.to(self._travels_in)
            flying.end = Handover.apply(hidden, flying.gradient)  # type: ignore[no-untyped-call]
            window.made[this] = hidden.detach().contiguous()
        window.in_flight[this.stage, number] = flying

    def _pass_backward(self, window: _Window, this: Pass, *, last: bool) -> None:
        flying = window.in_flight.pop((this.stage, this.micro_batch))
        self._turn_to(flying)
        if this.stage == self._stages.last:
            self.backward(flying.end, last=last)
        else:
            flying.gradient.append(self._wait_for(window, this))
            if flying.end.requires_grad:
                self._set_reduction(last=last)
                with self._inside():
                    flying.end.backward()  # type: ignore[no-untyped-call]
        if flying.arrived is not None:
            grad = flying.arrived.grad
            window.made[this] = (torch.zeros_like(flying.arrived) if grad is None else grad).contiguous()

    # --- a step -------------------------------------------------------------------------------

    def _launch(self, grads: list[Tensor], reduce: Callable[[Tensor], Any] | None = None, copies: int = 0) -> Launched:
        if self._scaler.is_enabled():  # an overflow in one stage is one of all
            for found in self._scaler._per_optimizer_states[id(self._optimizer)]["found_inf_per_device"].values():
                dist.all_reduce(found, dist.ReduceOp.MAX, group=self._row)
        if self._gpu and self._tied is not None:
            own = optimizers.part_of(self._tied.grad)
            grads, copies = [*(each for each in grads if each is not own), own], 1
        return super()._launch(grads, reduce, copies)

    def _add_up(self, norm: Tensor) -> None:
        super()._add_up(norm)
        dist.all_reduce(norm, group=self._row)

    def _find_tied(self) -> nn.Parameter | None:
        """The weight that the first and the last GPU of the row both have, if this is one of them and it trains."""
        found = find_tied_copy(self.model)
        return found if found is not None and found.requires_grad else None

    def _add_tied(self) -> None:
        """Either end of the row has the gradient of its own use of the weight."""
        if self._tied is None:
            return
        own = optimizers.part_of(self._tied.grad)
        other, peer = torch.empty_like(own), self._peers[0 if self._gpu else -1]

        def send() -> Any:
            return dist.isend(own, dst=peer, group=self._row)

        def receive() -> Any:
            return dist.irecv(other, src=peer, group=self._row)

        if own.numel():  # as many rows as the other end has
            for work in [act() for act in ((receive, send) if self._gpu else (send, receive))]:
                work.wait()
        own.add_(other)


def order_gathering(model: Any, stages: Stages) -> None:
    """A layer's backward pass gathers the one below it. FSDP2 would look for that in the order of the forward passes,
    which are those of another micro batch by then."""
    layers, body = iter(layers_of(model)), body_of(model)
    for stage in stages.own:
        # Groups within a layer (what is not cut of shared ones, experts) are through before it is.
        chain = [group for _ in stages.layers[stage] for group in reversed(_list_groups(next(layers)))]
        if stage == 0:
            chain.insert(0, body.get_input_embeddings())
        if stage == stages.last:
            chain.append(body.get_output_embeddings())
        chain = [each for each in chain if isinstance(each, FSDPModule)]
        for below, module in zip([*chain[:1], *chain], chain, strict=False):
            module.set_modules_to_backward_prefetch([below])  # the lowest: itself, which is there


def _list_groups(layer: Any) -> list[Any]:
    """A module of each, the layer's own first."""
    found = {module._get_fsdp_state(): module for module in layer.modules() if isinstance(module, FSDPModule)}
    return list(found.values())
