"""Seconds of a step in which layers come from the host in turn (`train/engines/stream.py`).

Four work beside each other: the GPU, copies to it, copies from it, and the host's optimizer. Which of them waits for
which is followed unit by unit, through one step, from the top of the backward pass to the loss of the next forward
pass. There nothing is under way, so that a step takes as long as the next:

- Backwards a layer that streams comes into the slot that the last but one has left: it is there as soon as the slot is
  free and the link has brought it. The two at the top are there still. A layer's gradients leave once they are summed
  up over the GPUs, and a layer begins when those of the last but one have left.
- Clipping needs the norm of all gradients, so the optimizer begins when the backward pass is over, with the unit that
  the forward pass wants first, piece by piece as its gradients arrive; and piece by piece it goes up. Without clipping,
  and without a loss scale, each unit is updated as it arrives. With a second set of states too: those for which there
  was time before the norm is known only wait for that, and the rest follows in the order of the forward pass. That
  nothing is clipped is taken for granted.
- Forwards each unit that trains comes anew, whether it stays on the GPU or not, as soon as it is updated; of frozen
  layers those that stream, but for the lowest two, which are there still.
- What layers keep may wait on the host: it leaves behind the forward pass and comes back before the other, micro batch
  by micro batch: of layers that recompute whole the inputs of a few, of others what one of them keeps.

8-bit states pass through a GPU to be updated there, piece by piece, so that the link carries them up and down again,
beside whatever else it has to carry: of its two directions and the host's memory the slowest sets the pace.

All micro batches pass through a layer while it is there, so bytes on the link do not grow with their number. Copies in
both directions are taken not to slow each other, nor an optimizer that the host's cores run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

from tightfit.memory.activations import setting_of
from tightfit.memory.stream import BLOCK, list_turns
from tightfit.memory.units import (
    AHEAD,
    GRADS,
    PIECE,
    SLOTS,
    Unit,
    count_kept,
    has_masters,
    stays,
    units_of,
    updates_ahead,
    waits_for_norm,
)
from tightfit.memory.weights import WIDTH
from tightfit.pace import engines
from tightfit.pace import rates as constants
from tightfit.pace.engines import FP32, WIDENING_BYTES
from tightfit.pace.rates import Rates
from tightfit.pace.work import ELEMENTWISE, LayerTime, frozen_of, head_time, layer_time, passes_of, recompute_time
from tightfit.types import DDP, Cause, Checkpointing, Hardware, Levers, ModelShape


class Turn(NamedTuple):
    """What a step does with one unit: seconds of all micro batches together."""

    forward: float
    back: float | None  # None: nothing below needs a gradient
    streams: bool
    trains: bool
    up: float  # its weights on their way to the GPU
    down: float  # its gradients, or this GPU's share of them, on their way to the host
    summed: float  # before that, over all GPUs
    updated: float
    updated_ahead: float  # into the second set of states
    sent: float  # what it keeps, on its way to the host, and back as long
    piece: float = 1.0  # the share of it that is updated, and leaves for the GPU, as soon as it is there


def follow(
    turns: Sequence[Turn], *, waits: bool, through_host: bool, ahead: float, updates_ahead: bool = False
) -> float:
    """Seconds from one loss to the next. `waits`: no update counts before all gradients are there; `through_host`:
    gradients are summed up over the link to the host; `ahead`: the share of a layer's micro batches that are on the
    GPU beside the one that is computed; `updates_ahead`: as long as the norm is not known, units are updated all the
    same."""
    streamed = [index for index, turn in enumerate(turns) if turn.streams]
    slots = max(1, min(SLOTS, len(streamed)))
    slot_of = {index: number % slots for number, index in enumerate(streamed)}
    there = {slot_of[index]: index for index in streamed[-slots:]}  # the unit in each slot
    free = [0.0] * slots  # since when each may be filled
    gpu = up = down = ring = began = 0.0
    arrived, left = [0.0] * len(turns), [0.0] * GRADS
    for index in range(len(turns) - 1, -1, -1):
        turn = turns[index]
        if turn.back is None:
            break
        ready = gpu
        if turn.streams and there[slot_of[index]] != index:
            up = max(up, free[slot_of[index]]) + turn.up
            there[slot_of[index]], ready = index, max(gpu, up)
        if turn.trains:
            ready = max(ready, left[-GRADS])
        if turn.sent:
            up = max(up, gpu - ahead * (gpu - began)) + turn.sent
        began, gpu = ready, ready + turn.back
        if turn.sent:
            gpu = max(gpu, up)
        if turn.trains:
            if through_host:
                down = max(down, gpu) + turn.summed + turn.down
            else:
                ring = max(ring, gpu) + turn.summed
                down = max(down, ring) + turn.down
            arrived[index] = down
            left.append(down)
        if turn.streams:
            free[slot_of[index]] = gpu
    trained = [index for index, turn in enumerate(turns) if turn.trains]
    known = max(gpu, down if through_host else ring) if waits else 0.0
    done, host = [0.0] * len(turns), 0.0 if updates_ahead else known
    first = done.copy()  # when the first piece is done
    late = trained if waits else trained[::-1]  # in this order: when the norm is known, or as they arrive
    if waits and updates_ahead:
        late = []
        for index in reversed(trained):
            begins = max(host, arrived[index])
            if begins >= known:
                late.insert(0, index)
                continue
            # or, at worst, it had better waited
            host = min(begins + turns[index].updated_ahead, known + turns[index].updated)
            first[index] = done[index] = max(host, known)
    for index in late:
        turn, begins = turns[index], max(host, known)
        begins = max(begins, arrived[index] - (1 - turn.piece) * turn.down)
        first[index] = begins + turn.piece * turn.updated
        host = done[index] = max(begins + turn.updated, arrived[index] + turn.piece * turn.updated)
    for index, turn in enumerate(turns):
        ready = gpu
        if turn.trains or (turn.streams and there[slot_of[index]] != index):
            if turn.streams:
                there[slot_of[index]] = index
                up = max(up, free[slot_of[index]])
            up = max(max(up, first[index]) + turn.up, done[index] + turn.piece * turn.up)
            ready = max(gpu, up)
        gpu = ready + turn.forward
        if turn.sent:
            down = max(down, ready) + turn.sent
            gpu = max(gpu, down - ahead * turn.sent)
        if turn.streams:
            free[slot_of[index]] = gpu
    return gpu


class _Busy(NamedTuple):
    """Seconds of one micro batch."""

    gpu: float
    host: float

    @property
    def longest(self) -> float:
        return max(self.gpu, self.host)


class _Kind(NamedTuple):
    """One kind of layer, or the ends together, and one micro batch."""

    forward: _Busy
    back: _Busy
    light: _Busy  # backwards where other layers recompute, and of this one elementwise work alone
    again: _Busy  # backwards where it recomputes

    def back_at(self, index: int, recomputing: int) -> _Busy:
        """Of the layer with this number, where the lowest so many recompute."""
        if index < recomputing:
            return self.again
        return self.light if recomputing else self.back


_State = Literal["back", "light", "again"]
"""Of a layer on the way back: see `_Kind`."""


class StreamClock:
    """Step times of one way of computing, with some layers that recompute and some that stay on the GPU."""

    def __init__(
        self, shape: ModelShape, levers: Levers, hardware: Hardware, rates: Rates, *, rehearsal: bool = False
    ) -> None:
        self.shape, self.levers, self.hardware, self.rates = shape, levers, hardware, rates
        self.units, self.micro_batches = units_of(shape, levers), levers.accumulation
        self.setting = setting_of(levers, hardware.gpu, shape.model_type)
        # What trains beside the layers does so as under ddp.
        adapters = replace(levers, engine=DDP, offload_optimizer="none", checkpointing=Checkpointing(layers=0))
        self.traffic = engines.traffic(shape, adapters, hardware, rates, rehearsal=rehearsal)
        self.step = engines.StepTime(0.0, 0.0, 0.0, 0.0)
        self.added = self.reduced = 0.0
        if levers.method != "full":
            self.step = engines.step(shape, adapters, hardware, rates, rehearsal=rehearsal)
            self.added, self.reduced = (self.micro_batches - 1) * self.traffic.added, self.traffic.reduced
        self._kinds: dict[tuple[str, ...], list[_Kind]] = {}
        self._layers: dict[tuple[tuple[str, ...], _State], list[tuple[Turn, Turn]]] = {}
        self._known: dict[tuple[Checkpointing, int], float] = {}
        self._link = engines.Links(hardware, rates, rehearsal)

    def seconds(self, depth: Checkpointing, resident: int) -> float:
        key = depth, resident
        if key not in self._known:
            turns = self.turns(depth, resident)
            self._known[key] = self.follow(turns) + self.slowed_s(turns) + self.added + self.reduced + sum(self.step)
        return self._known[key]

    def follow(self, turns: Sequence[Turn]) -> float:
        return follow(
            turns,
            waits=waits_for_norm(self.levers),
            updates_ahead=updates_ahead(self.levers),
            through_host=self.traffic.shares_host,
            ahead=min(1.0, (1 if self.levers.checkpointing.select else AHEAD) / self.micro_batches),
        )

    def slowed_s(self, turns: Sequence[Turn]) -> float:
        """What copies take from the computation beside which they run."""
        copied = sum([turn.up * (2 if turn.streams else turn.trains) + turn.down + 2 * turn.sent for turn in turns])
        return constants.STREAM_COPY_COST * min(copied, sum([turn.forward + (turn.back or 0.0) for turn in turns]))

    def turns(self, depth: Checkpointing, resident: int) -> list[Turn]:
        shape, select = self.shape, depth.select
        again = shape.n_layers if depth.layers is None else depth.layers
        both = self._turns_at(select, "light" if again else "back"), self._turns_at(select, "again")
        found = [
            both[index < again][index][not stays(index, resident, shape.n_layers)] for index in range(shape.n_layers)
        ]
        if depth.offload:
            moves = [turn.moves for turn in list_turns(shape, self.setting, depth, self.levers.frozen_layers)]
            found = [
                turn._replace(sent=self.micro_batches * moved / self.rates.host_link) if moved else turn
                for turn, moved in zip(found, moves, strict=True)
            ]
        before, after = self._ends
        found = [before, *found, after]
        if updates_on_card(self.levers, self.hardware):
            found = [self._share_link(turn, unit) for turn, unit in zip(found, self.all_units, strict=True)]
        return self._bring_states(found)

    def _turns_at(self, select: tuple[str, ...], state: _State) -> list[tuple[Turn, Turn]]:
        """Of each layer in this state, where it stays on the GPU, and where it streams."""
        key = select, state
        if key not in self._layers:
            kinds, frozen, known = self._kinds_of(select), frozen_of(self.levers), dict[Any, tuple[Turn, Turn]]()
            found = self._layers[key] = []
            for index, kind in enumerate(self.shape.pattern):
                unit, trains = self.units.layers[index], index >= frozen
                if (kind, unit, trains) not in known:  # layers of a kind differ in little
                    back = getattr(kinds[kind], state) if trains else None
                    staying, streaming = (
                        self._turn(unit, kinds[kind].forward, back, streams=streams) for streams in (False, True)
                    )
                    known[kind, unit, trains] = staying, streaming
                found.append(known[kind, unit, trains])
        return self._layers[key]

    @cached_property
    def _ends(self) -> tuple[Turn, Turn]:
        """What lies below the layers, and above."""
        nothing, ends = _Busy(0.0, 0.0), self._kinds_of(())[-1]
        back = None if frozen_of(self.levers) else nothing
        before = self._turn(self.units.before, nothing, back, streams=False)
        return before, self._turn(self.units.after, ends.forward, ends.back, streams=False)

    @property
    def all_units(self) -> tuple[Unit, ...]:
        return self.units.before, *self.units.layers, self.units.after

    def _share_link(self, turn: Turn, unit: Unit) -> Turn:
        """Its states pass through the GPU beside what else the link carries then. Before the next forward pass that is
        new weights, and what layers keep; as long as the backward pass runs, what that brings and sends."""
        if not turn.trains:
            return turn
        up, down = passing_s(unit.trained, self.levers, self.hardware, self.rates)
        brought = turn.sent + (turn.up if turn.streams else 0.0)
        left = turn.down + (turn.summed if self.traffic.shares_host else 0.0)
        late, early = max(up + turn.up, down + turn.sent), max(up + brought, down + left)
        return turn._replace(
            updated=max(turn.updated, late if waits_for_norm(self.levers) else early),
            updated_ahead=max(turn.updated_ahead, early),
        )

    def _bring_states(self, turns: list[Turn]) -> list[Turn]:
        """States may come from a drive, which is one for all ranks, and go back: beside the update of others."""
        trained = [index for index, turn in enumerate(turns) if turn.trains]
        for index in trained[count_kept(self.levers, len(trained)) :]:
            stored = self.all_units[index].trained * _state_bytes(self.levers)
            moved = stored / self.rates.nvme_read + stored / self.rates.nvme_write
            turns[index] = turns[index]._replace(updated=max(turns[index].updated, moved))
        return turns

    def recomputed_s(self, depth: Checkpointing) -> float:
        """Of one micro batch, on the GPU."""
        kinds, frozen = self._kinds_of(depth.select), frozen_of(self.levers)
        again = self.shape.n_layers if depth.layers is None else depth.layers
        layers = [(index, kinds[kind]) for index, kind in enumerate(self.shape.pattern) if index >= frozen]
        return sum([time.back_at(index, again).gpu - time.back.gpu for index, time in layers])

    def _turn(self, unit: Unit, forward: _Busy, back: _Busy | None, *, streams: bool) -> Turn:
        count, trained, rates, ranks = self.micro_batches, unit.trained, self.rates, self.hardware.world
        back_s = None if back is None else count * back.longest
        if not trained:
            up = unit.bytes / rates.host_link if streams else 0.0
            return Turn(count * forward.longest, back_s, streams, False, up, 0.0, 0.0, 0.0, 0.0, 0.0)
        return Turn(
            forward=count * forward.longest,
            back=(back_s or 0.0) + self.summing_s(unit),
            streams=streams,
            trains=True,
            up=unit.bytes / rates.host_link,
            down=FP32 * -(-trained // ranks) / rates.host_link,
            summed=self._link.ring(FP32 * trained, ranks) + self._link.latency(1),
            updated=update_s(trained, self.levers, self.hardware, rates),
            updated_ahead=update_s(trained, self.levers, self.hardware, rates, ahead=True),
            sent=0.0,
            piece=min(1.0, PIECE / trained) if ranks == 1 else 1.0,
        )

    def summing_s(self, unit: Unit) -> float:
        """Gradients of all micro batches added to zeros, and their norm."""
        moved = unit.trained * (self.micro_batches * WIDENING_BYTES + 2 * FP32)
        return moved / self.rates.card.memory

    def _kinds_of(self, select: tuple[str, ...]) -> list[_Kind]:
        """Each kind of layer, and last the ends of the model."""
        if select not in self._kinds:
            shape, setting, card = self.shape, self.setting, self.rates.card
            fused, trains_head = self.levers.loss == "fused", setting.trains_head(tied=shape.tied)
            times = [layer_time(block, shape.hidden_size, setting, card) for block in shape.blocks]
            ends = head_time(shape, setting, card, fused, trains_head)
            passes = passes_of(shape, self.levers, self.hardware.gpu, self.rates, recomputing=0)
            self._kinds[select] = [self._kind(time, passes.throttle, select) for time in (*times, ends)]
        return self._kinds[select]

    def _kind(self, time: LayerTime, throttle: float, select: tuple[str, ...]) -> _Kind:
        launch = self.rates.launch

        def busy(products: float, others: float, host: float) -> _Busy:
            return _Busy(throttle * products + others, launch * host)

        def add(one: _Busy, products: float, others: float, host: float) -> _Busy:
            more = busy(products, others, host)
            return _Busy(one.gpu + more.gpu, one.host + more.host)

        called = time.host + constants.STREAM_CALL_S, time.host_back + constants.STREAM_CALL_S
        forward = busy(time.products, time.traffic + time.unpacking, called[0])
        back = busy(time.products_back, time.traffic_back + time.unpacking, called[1])
        if not select:  # as a whole, which the engine itself sees to
            return _Kind(forward, back, back, _Busy(back.gpu + forward.gpu, back.host + forward.host))
        light, once = recompute_time(time, ELEMENTWISE), recompute_time(time, select)
        lighter = add(back, 0.0, light.others, light.host) if time.lightens else back
        return _Kind(forward, back, lighter, add(back, *once))


def updates_on_card(levers: Levers, hardware: Hardware) -> bool:
    """Whether what streams is updated on the GPU: processors take too long to look 8-bit moments up."""
    return levers.states == "8bit" and hardware.gpu.vendor != "cpu"


def update_s(trained: int, levers: Levers, hardware: Hardware, rates: Rates, *, ahead: bool = False) -> float:
    """Of so many elements, shared out over the ranks of the host, with nothing else on the link. `ahead`: into a second
    set of states."""
    own = -(-trained // hardware.world)
    if not updates_on_card(levers, hardware):
        return own * _update_bytes(levers, ahead=ahead) / rates.host_optimizer
    kept = 2 * WIDTH[levers.precision] if ahead and not has_masters(levers) else 0
    return max(
        *passing_s(trained, levers, hardware, rates), own * (sum(_passing_bytes(levers)) + kept) / rates.host_memory
    )


def passing_s(trained: int, levers: Levers, hardware: Hardware, rates: Rates) -> tuple[float, float]:
    """What an update on the GPU takes of the link, up and down."""
    own, (up, down) = -(-trained // hardware.world), _passing_bytes(levers)
    return own * up / rates.host_link, own * down / rates.host_link


def _passing_bytes(levers: Levers) -> tuple[float, float]:
    """Of one parameter, up and down: `UnitPiece.take_from` and `give_to` of train/host_states.py. Its gradient in fp32
    goes up; its moments, with a scale for each block, and its fp32 copy go both ways, and the weight comes down. Where
    there is no copy, the weight goes both ways."""
    states, weight = _state_bytes(levers) + 2 * FP32 / BLOCK, WIDTH[levers.precision]
    return FP32 + states + (0 if has_masters(levers) else weight), states + weight


def _state_bytes(levers: Levers) -> int:
    """Of one parameter: both moments, and an fp32 copy."""
    return {"fp32": 8, "bf16": 4, "8bit": 2}[levers.states] + (FP32 if has_masters(levers) else 0)


def _update_bytes(levers: Levers, *, ahead: bool) -> int:
    """Of host memory that the update of one parameter reads and writes: its gradient in fp32, its moments, its fp32
    copy, and its weight in the working precision. Before one that goes ahead, weights of which there is no copy are
    kept as they were."""
    has_copies, width = has_masters(levers), WIDTH[levers.precision]
    weights = width if has_copies else 2 * width
    in_place = FP32 + 2 * _state_bytes(levers) + weights
    return in_place + weights if ahead and not has_copies else in_place


def list_causes(
    shape: ModelShape, levers: Levers, hardware: Hardware, rates: Rates, *, rehearsal: bool
) -> list[tuple[Cause, float]]:
    """What a step takes; a wait is put down to what would end it: states from a drive and back, which count with the
    link, then the optimizer, which does too where states pass through the GPU, then the other GPUs, then the link."""
    clock = StreamClock(shape, levers, hardware, rates, rehearsal=rehearsal)
    count, depth = levers.accumulation, levers.checkpointing
    passes = passes_of(shape, levers, hardware.gpu, rates, recomputing=0)
    recomputed, turns = count * clock.recomputed_s(depth), clock.turns(depth, levers.resident)
    step_s, alone_s = clock.follow(turns), sum([turn.forward + (turn.back or 0.0) for turn in turns])
    in_memory_s = step_s
    if levers.offload_optimizer == "nvme":
        in_memory = StreamClock(shape, replace(levers, offload_optimizer="none"), hardware, rates, rehearsal=rehearsal)
        in_memory_s = in_memory.follow(in_memory.turns(depth, levers.resident))
    free = [turn._replace(updated=0.0, updated_ahead=0.0) for turn in turns]
    updated_s = clock.follow(free)
    summed_s = clock.follow([turn._replace(summed=0.0) for turn in free])
    added = sum([clock.summing_s(unit) for unit in clock.all_units])
    gpu = count * (passes.forward_gpu + passes.back_gpu) + recomputed + added
    return [
        ("arithmetic", count * (passes.products + passes.products_back)),
        ("memory traffic", count * (passes.traffic + passes.traffic_back) + added + clock.added),
        ("dequantisation", count * (passes.unpacking + passes.unpacking_back)),
        ("recomputation", recomputed),
        ("launch overhead", alone_s - gpu),
        ("host link" if updates_on_card(levers, hardware) else "host optimizer", in_memory_s - updated_s),
        ("communication", updated_s - summed_s + clock.reduced),
        ("host link", step_s - in_memory_s + summed_s - alone_s + clock.slowed_s(turns)),
        ("optimizer", clock.step.gpu),
        ("launch overhead", clock.step.host),
    ]
