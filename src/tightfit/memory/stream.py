"""Layers that rest on the host and visit the GPU, and a window of micro batches that goes through each together.

On the GPU: what lies outside of the layers, those layers that stay, and slots in which the others take turns. Adapters
train there, as `ddp` trains them. What else trains is updated on the host: a layer's gradients are added up in fp32 in
one of few slots, those of the model's ends in memory of their own, from the loss or the embedding's backward pass until
they have left. 4-bit weights come and go without their scales, which are small.

All micro batches pass a layer before the next one's turn (`train/walk.py`). So what layers keep is there once for each
micro batch, and what they work with is there once. A layer that recomputes whole keeps its input alone, and runs
without a graph; on the way back it runs anew, to its end. Of any other layer nothing is held but what autograd keeps,
and that may wait on the host: what one micro batch sent stands on the GPU until the next has passed a layer, and what
it wants comes back while the one before it runs backwards. The gradient of a layer's output belongs to the walk, and
stays while the layer runs backwards.

On the host: pages of exactly the size that is needed (`train/host_memory.py`). The ranks of a machine share the weights
and have a part of everything else each, so a rank is counted with its part of the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from itertools import accumulate
from typing import NamedTuple

from tightfit.memory import ddp
from tightfit.memory.activations import count_mask_bytes, count_rotary_bytes, count_sent_bytes
from tightfit.memory.job import Components, MemoryJob, combine, packing_of, share, worst
from tightfit.memory.layers import has_parts, keeps_input, layer_cost, layer_input_bytes, recompute_cost
from tightfit.memory.operations import FP32, Setting
from tightfit.memory.units import (
    AHEAD,
    BUFFERS,
    GRADS,
    LEAVING,
    SLOTS,
    Unit,
    Units,
    count_kept,
    has_masters,
    stays,
    units_of,
    updates_ahead,
    waits_for_norm,
)
from tightfit.types import Block, Checkpointing, Levers, ModelShape, PhaseName, States

PAGE = 2 * 2**20  # bytes: what is taken of the host's memory comes in huge pages
DIRECT, BESIDE = 4096, 64  # bytes at which a unit's states begin in a file, and each tensor of them
BLOCK = 256  # elements of an 8-bit moment that share a scale
PASSING = 2 * BLOCK * 2**13
"""Elements on the GPU at a time where it updates them: `STAGED` and `LANES` of train/host_states.py."""
WIDENED_BYTES = 28
"""Of each of these beside itself: both moments in fp32, the gradient that was scaled, and what looks up the numbers of
8-bit moments. Others are updated on the host, unless that has few cores."""
INPUT_BYTES = 16  # of each token of a micro batch that waits: its number and its label


class Turn(NamedTuple):
    """What one layer holds of one micro batch."""

    reads: int
    makes: int
    keeps: int  # for the backward pass; 0: it has none
    moves: int  # of that, to the host
    forward: int  # while it runs forwards, beside its input
    backward: int  # while it runs backwards, beside what it keeps and the gradient of its output
    whole: bool  # it keeps its input alone


def passes(job: MemoryJob) -> dict[PhaseName, Components]:
    turns, below = _turns_of(job), _keep_below(job)
    always, adapters = combine(hold_always(job), _shared(job)), _adapters_gradients(job)
    return {
        "forward": combine(always, adapters, _forward(job, turns, below)),
        "loss": combine(at_the_loss(job), {"activations": count_kept_bytes(job) + _beside_the_loss(job, turns)}),
        "backward": combine(always, adapters, _backward(job, turns, below)),
    }


def _forward(job: MemoryJob, turns: tuple[Turn, ...], below: int) -> Components:
    """The worst turn of all layers, from the bottom."""
    count, kept, sent, most, fullest = job.levers.accumulation, below, 0, -1, (0, 0)
    for turn in turns:
        own = turn.keeps - turn.moves
        first = (count - 1) * turn.reads + (LEAVING * turn.moves if turn.whole else sent)
        last = (count - 1) * (own + turn.makes) + (LEAVING if turn.whole else count > 1) * turn.moves
        held = kept + turn.reads + (first if first > last else last)
        if held + turn.forward > most:
            most, fullest = held + turn.forward, (held, turn.forward)
        kept, sent = kept + count * own, turn.moves
    return {"activations": fullest[0], "recompute": fullest[1]}


def _keep_below(job: MemoryJob) -> int:
    """Hidden states below the layers; where their inputs do not leave for the host, the lowest layer keeps them."""
    return _start_below(job) * job.levers.accumulation if job.depth.offload else 0


def count_kept_bytes(job: MemoryJob) -> int:
    """On the GPU between the passes."""
    frozen, depth = job.levers.frozen_layers, job.depth
    kept = _add_up_kept(job.shape, job.acts.setting, depth.select, frozen, sends=depth.offload)
    return job.levers.accumulation * kept[-1 if depth.layers is None else depth.layers] + _keep_below(job)


def _backward(job: MemoryJob, turns: tuple[Turn, ...], below: int) -> Components:
    """The worst turn of all layers, from the top; or that of the embedding."""
    count, units = job.levers.accumulation, units_of(job.shape, job.levers)
    tied = _tied_gradients(job, units)
    kept, leaving = count_kept_bytes(job), FP32 * units.after.trained  # until the layer below has its gradients
    most, fullest = -1, (0, 0, 0)
    for index in range(len(turns) - 1, -1, -1):
        turn = turns[index]
        if not turn.keeps:
            break
        own = turn.keeps - turn.moves
        kept -= count * own
        if turn.whole:
            reads = (1 + AHEAD) * turn.reads if turn.moves else count * own
        else:
            first, last = count * own + (count > 1) * turn.moves, own + (turns[index - 1].moves if index else 0)
            reads = turn.moves + (first if first > last else last)
        held = kept + reads + count * turn.makes
        if held + turn.backward + leaving + tied > most:
            most, fullest = held + turn.backward + leaving + tied, (held, turn.backward, leaving + tied)
        leaving = 0
    found: Components = {"activations": fullest[0], "recompute": fullest[1], "gradients": fullest[2]}
    if start := _start_below(job):
        embedding = units.before.trained
        grads = embedding * job.weights.width + FP32 * embedding
        return worst(found, {"activations": 2 * count * start, "gradients": grads})
    return found


def at_the_loss(job: MemoryJob) -> Components:
    units = units_of(job.shape, job.levers)
    ends = FP32 * units.after.trained + _tied_gradients(job, units)
    head = job.acts.head  # whose gradient has been added to that sum before the final norm's backward pass
    back = max(head.backward_head, head.arriving, head.norm_backward - head.saved_norm)
    loss: Components = {"activations": head.saved_norm, "logits": max(head.forward_logits, back)}
    return combine(at_the_top(job), {"gradients": ends}, loss)


def _beside_the_loss(job: MemoryJob, turns: tuple[Turn, ...]) -> int:
    """What the layers made, or its gradient."""
    top = turns[-1]
    return job.levers.accumulation * top.makes + (LEAVING * top.moves if top.whole else 0)


def at_the_top(job: MemoryJob) -> Components:
    return combine(hold_always(job), _shared(job), _adapters_gradients(job))


def at_the_end(job: MemoryJob) -> Components:
    return combine(hold_always(job), _adapters_gradients(job))


def step(job: MemoryJob) -> Components:
    return at_the_end(job)


def initialise(job: MemoryJob) -> Components:
    """A matrix is packed on the GPU before anything else is there but scales."""
    packing = {"weights": job.weights.scales_bytes, "temporaries": packing_of(job.weights)}
    made = hold_always(job) | {"optimizer_states": 0, "temporaries": 0}
    return worst(packing if job.weights.quantised_numel else {}, made)


def evaluate(job: MemoryJob) -> tuple[Components, Components]:
    """A window goes up as in training, and keeps nothing; then each micro batch has its loss."""
    count, top = job.levers.accumulation, _turns_of(job)[-1]
    shared, waiting = _shared(job), (count - 1) * top.makes
    passing: Components = {"activations": waiting, "recompute": job.acts.evaluation}
    ending: Components = {"activations": waiting + top.makes, "logits": job.acts.head.eval_logits}
    return combine(shared, passing), combine(shared, ending)


def hold_always(job: MemoryJob) -> Components:
    levers, units = job.levers, units_of(job.shape, job.levers)
    layers = _weigh_layers(units.layers, levers.resident)
    held: Components = {
        "weights": units.before.bytes + layers.staying + units.after.bytes + job.weights.scales_bytes,
        "gathered_weights": layers.slots,
        "gradients": FP32 * layers.gradients,
        "temporaries": job.workspaces + _count_passing_bytes(job),
    }
    if levers.method != "full":
        adapters = ddp.hold_always(job)
        held |= {name: adapters[name] for name in ("master_weights", "optimizer_states")}
        held["weights"] += job.weights.trainable_numel * job.weights.trainable_width
    return held


def _count_passing_bytes(job: MemoryJob) -> int:
    """Pieces of 8-bit moments, with weights and gradients: the GPU updates them as they pass."""
    if job.levers.states != "8bit" or job.on_cpu:
        return 0
    masters = FP32 if has_masters(job.levers) else 0
    return PASSING * (FP32 + job.weights.width + masters + 2 + WIDENED_BYTES)


class _Layers(NamedTuple):
    """What the layers hold together."""

    staying: int  # weights of those that stay on the GPU
    slots: int  # for the weights of the others
    gradients: int  # elements
    home: int  # weights that rest on the host: of layers that stream, and of those that train


@lru_cache(maxsize=1024)
def _weigh_layers(layers: tuple[Unit, ...], resident: int) -> _Layers:
    split: tuple[list[Unit], list[Unit]] = [], []
    for number, unit in enumerate(layers):
        split[not stays(number, resident, len(layers))].append(unit)
    staying, streamed = split
    trained = [unit.trained for unit in layers if unit.trained]
    return _Layers(
        staying=sum([unit.bytes for unit in staying]),
        slots=min(SLOTS, len(streamed)) * max([unit.bytes for unit in streamed], default=0),
        gradients=max(trained, default=0) * min(GRADS, len(trained)),
        home=sum([pages(unit.bytes) for unit in (*streamed, *[unit for unit in staying if unit.trained])]),
    )


def _adapters_gradients(job: MemoryJob) -> Components:
    """In fp32 from the beginning of a window; where there are no fp32 copies, as autograd leaves them."""
    if job.levers.method == "full":
        return {}
    wide = job.levers.master_weights and job.levers.precision != "fp32"
    return {"gradients": job.weights.trainable_numel * (FP32 if wide else job.weights.trainable_width)}


def _tied_gradients(job: MemoryJob, units: Units) -> int:
    """Of an embedding that is the head as well: from the loss to the end of the pass."""
    return FP32 * units.before.trained if job.shape.tied else 0


def _start_below(job: MemoryJob) -> int:
    """The hidden states below the layers, of one micro batch, where the embedding trains: their graph holds them."""
    return _turns_of(job)[0].reads if job.levers.trains_embedding and job.shape.before else 0


def _shared(job: MemoryJob) -> Components:
    """What every layer is called with, of each micro batch; and these themselves, but for the one that every engine
    has."""
    setting, count = job.acts.setting, job.levers.accumulation
    each = count_rotary_bytes(job.shape, setting) + count_mask_bytes(job.shape, setting)
    return {"activations": count * each + (count - 1) * INPUT_BYTES * setting.tokens}


def _turns_of(job: MemoryJob) -> tuple[Turn, ...]:
    return list_turns(job.shape, job.acts.setting, job.depth, job.levers.frozen_layers)


def list_turns(shape: ModelShape, setting: Setting, depth: Checkpointing, frozen: int) -> tuple[Turn, ...]:
    light, again = _list_both(shape, setting, depth.select, frozen, sends=depth.offload)
    return again if depth.layers is None else again[: depth.layers] + light[depth.layers :]


@lru_cache(maxsize=256)
def _list_both(
    shape: ModelShape, setting: Setting, select: tuple[str, ...], frozen: int, *, sends: bool
) -> tuple[tuple[Turn, ...], tuple[Turn, ...]]:
    """All layers as they are where they do not recompute, and where they do."""
    embedded = setting.tokens * shape.hidden_size * setting.width
    lowest = frozen if setting.trains_base and not setting.trains_embedding else 0
    known: dict[tuple[int, bool, bool, bool, bool, bool], Turn] = {}

    def list_all(*, recompute: bool) -> Iterator[Turn]:
        for index, kind in enumerate(shape.pattern):
            is_first, needs_below = index == 0, index > lowest or setting.trains_embedding
            leaves = sends and recompute and (not select or index < shape.n_layers - 1)
            key = kind, recompute, leaves, is_first, index >= lowest, needs_below
            if key not in known:
                block, hidden = shape.blocks[kind], shape.hidden_size
                stream = layer_input_bytes(block, hidden, setting)
                reads = min(stream, embedded) if is_first and shape.before else stream
                own = select if recompute else None
                if not recompute and setting.compiled and select and has_parts(block, setting):
                    own = ("elementwise",)  # which costs compiled layers next to nothing
                known[key] = _turn(block, hidden, setting, own, reads, sends=leaves, needs_below=needs_below)
                if index < lowest:  # nothing below it trains
                    known[key] = known[key]._replace(keeps=0, moves=0, backward=0, whole=True)
            yield known[key]

    return tuple(list_all(recompute=False)), tuple(list_all(recompute=True))


@lru_cache(maxsize=256)
def _add_up_kept(
    shape: ModelShape, setting: Setting, select: tuple[str, ...], frozen: int, *, sends: bool
) -> tuple[int, ...]:
    """By how many layers recompute, what all of them keep on the GPU of one micro batch."""
    light, again = ([turn.keeps - turn.moves for turn in turns] for turns in
                    _list_both(shape, setting, select, frozen, sends=sends))  # fmt: skip
    more = [kept - least for kept, least in zip(again, light, strict=True)]
    return tuple(accumulate(more, initial=sum(light)))


def _turn(
    block: Block,
    hidden: int,
    setting: Setting,
    select: tuple[str, ...] | None,
    reads: int,
    *,
    sends: bool,
    needs_below: bool,
) -> Turn:
    """`select`: what of the layer runs again, empty for all; None: nothing."""
    cost = layer_cost(block, hidden, setting, needs_below)
    own = reads if keeps_input(block, hidden, setting) else 0  # among what autograd keeps
    if select is None:
        again = cost.backward - cost.saved - cost.output
        return Turn(reads, cost.output, cost.saved, 0, cost.forward - own, again, whole=False)
    if not select:
        again = max(cost.forward - own, cost.backward - cost.output - reads)
        return Turn(reads, cost.output, reads, reads if sends else 0, cost.forward_unsaved, again, whole=True)
    cost = recompute_cost(block, hidden, setting, select, needs_below)
    again = max(cost.recompute + max(cost.output, cost.asking), cost.backward) - cost.saved - cost.output
    moves = count_sent_bytes(cost, reads) if sends else 0
    return Turn(reads, cost.output, reads + cost.saved, moves, cost.forward_unsaved, again, whole=False)


# --- the host -----------------------------------------------------------------------------------


def on_host(job: MemoryJob) -> Components:
    """What training takes there, of one rank: its part of the weights, and what is its own."""
    levers, units = job.levers, units_of(job.shape, job.levers)
    ranks, trained = job.world, [unit.trained for unit in _all(units) if unit.trained]
    own = [share(numel, ranks) for numel in trained]
    kept, files = own[: count_kept(levers, len(own))], file_sizes(job)
    sets, masters = 1 + updates_ahead(levers), has_masters(levers)
    # Without fp32 copies the weights themselves are kept as they were before a step that goes ahead.
    before = 0 if masters or sets == 1 else sum([pages(job.weights.width * numel) for numel in own])
    return {
        "weights": share(home_bytes(units, levers), ranks) + before,
        "master_weights": sets * sum([pages(FP32 * numel) for numel in kept]) if masters else 0,
        "optimizer_states": sets * sum([_moments_bytes(levers.states, numel, pages) for numel in kept]),
        "gradients": _arriving_bytes(levers, own),
        "buckets": sum([pages(max(files[number::BUFFERS])) for number in range(min(BUFFERS, len(files)))]),
    }


def file_sizes(job: MemoryJob) -> list[int]:
    """Of units whose states are on an NVMe: what they take of a rank's file there."""
    levers, units = job.levers, units_of(job.shape, job.levers)
    own = [share(unit.trained, job.world) for unit in _all(units) if unit.trained]
    own = own[count_kept(levers, len(own)) :]
    masters = FP32 if has_masters(levers) else 0
    sizes = [
        _align(masters * numel, BESIDE) + _moments_bytes(levers.states, numel, partial(_align, to=BESIDE))
        for numel in own
    ]
    return [_align(size, DIRECT) for size in sizes]


def home_bytes(units: Units, levers: Levers) -> int:
    """Weights that rest there: of layers that stream, and of whatever trains."""
    ends = [pages(unit.bytes) for unit in (units.before, units.after) if unit.trained]
    return _weigh_layers(units.layers, levers.resident).home + sum(ends)


def _all(units: Units) -> list[Unit]:
    return [units.before, *units.layers, units.after]


def _moments_bytes(states: States, numel: int, pad: Callable[[int], int]) -> int:
    """Of both moments; `pad`: what an allocation takes."""
    if states == "8bit":
        blocks = -(-numel // BLOCK)
        return 2 * (pad(blocks * BLOCK) + pad(FP32 * blocks))
    return 2 * pad({"fp32": 4, "bf16": 2}[states] * numel)


def _arriving_bytes(levers: Levers, own: list[int]) -> int:
    """Gradients in fp32: all of them, where a step may be made, or made again, when their norm is known."""
    sizes = [pages(FP32 * numel) for numel in own]
    return sum(sizes) if waits_for_norm(levers) else min(GRADS, len(sizes)) * max(sizes, default=0)


def waiting_bytes(job: MemoryJob) -> int:
    """What layers keep, of all micro batches of a window, where that waits there."""
    if not job.depth.offload:
        return 0
    count = job.levers.accumulation
    if job.depth.select:
        return count * sum([turn.moves for turn in _turns_of(job)])
    return sum([count * pages(turn.moves) for turn in _turns_of(job)])


def pages(size: int) -> int:
    return _align(size, PAGE)


def _align(size: int, to: int) -> int:
    return -(-size // to) * to
