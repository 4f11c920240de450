"""PyTorch's `fully_shard`, laid out as our worker does it.

Groups: the embedding, each layer, and the final norm with the head; a tied embedding belongs to the root and
stays whole from the first use to the end of the step. Trainable parameters are kept in fp32 shards, gathered
in the working precision and reduced in fp32; frozen ones are kept as they are. A gather writes into one flat
buffer and then copies it out into the parameters (`foreach_all_gather_copy_out`). In the forward pass that buffer
lives until the next group has been copied out, or the pass ends; in the backward pass it goes at once, and the next
layer's is filled while this one runs. A single rank has nothing to gather: it copies its parameters one by one
(`wait_for_unshard`), and nothing ahead. A reduction copies the group's gradients into one flat fp32 buffer.

Where ranks share layers (`shared_layers.py`), a layer's group is what each of them has of its matrices, shared by those
that have the same. What is used whole is shared by all of these ranks together: embedding, head, and of each layer a
second group, which is small and stays whole from the forward pass to the end of the layer's backward pass.

Where ranks share experts, those of a layer are a group of their own inside it, cut up among the ranks that own the same
ones. It comes when the layer has got there; its gradients leave before the rest of the layer runs backwards; and while
it is at work, it is the rest of the layer below that is fetched ahead.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from tightfit.memory.activations import Activations, Moment
from tightfit.memory.backward import NOTHING, Peak
from tightfit.memory.job import Components, MemoryJob, building, combine, keeping, passing, share, worst
from tightfit.memory.operations import FP32
from tightfit.memory.optimizers import EIGHT_BIT, eight_bit_states, state_bytes, step_temporary
from tightfit.memory.shared_layers import count_uncut, cut_block
from tightfit.memory.weights import effective_lora, is_adapted, is_linear
from tightfit.types import Lora, ModelShape, PhaseName

EXPERTS = "mlp.experts"


class Group(NamedTuple):
    """Elements of one `fully_shard` call."""

    trainable: int
    frozen: int
    packed: int = 0
    largest: int = 0  # of its parameters

    def whole(self, width: int) -> int:
        """Bytes. Adapters too are gathered in the working precision."""
        return (self.trainable + self.frozen) * width + self.packed // 2


class Gather(NamedTuple):
    """Bytes of a group on its way."""

    whole: int
    buffer: int  # the flat buffer that travels
    arriving: int
    """What stands beside the parameters while they come: that buffer, or a single rank's copy of one of them."""


def passes(job: MemoryJob) -> dict[PhaseName, Components]:
    base, groups = _persistent(job), _groups_of(job)
    return {
        "forward": combine(base, {"gradients": _earlier(job)}, _forward(job, *_gathers_of(job))),
        "loss": combine(at_the_loss(job), keeping(job.acts)),
        "backward": combine(base, _backward(job, *groups)),
    }


def at_the_loss(job: MemoryJob) -> Components:
    """A head of its own is whole while it runs, which covers the fused loss and not the plain one, and is gathered once
    more when its backward pass begins. A tied one is the root's, whose backward pass begins with the loss and fetches
    the last layer's buffer at once."""
    embedding, layer, _, head = _gathers_of(job)
    cost, tied, plain = job.acts.head, job.shape.tied, job.levers.loss == "plain"
    norm, root = cost.saved_norm, embedding.whole + layer.buffer
    own = head.buffer + (0 if plain else head.whole)
    moments: list[Components] = [
        {"activations": norm, "logits": cost.forward_logits, "gathered_weights": root if tied else own},
        {"activations": norm, "logits": cost.backward_logits, "gathered_weights": root if tied else 0},
    ]
    if not tied:
        logits = cost.arriving
        if plain and not job.shape.hands_on:
            logits += job.acts.setting.tokens * job.shape.vocab_size * job.weights.width
        whole = head.whole + max(head.arriving, layer.buffer)
        moments.append({"activations": norm, "logits": logits, "gathered_weights": whole})
    earlier: Components = {"gradients": _earlier(job), "gathered_weights": _staying(job)}
    return combine(_persistent(job), earlier, worst(*moments))


def at_the_top(job: MemoryJob) -> Components:
    embedding, layer, experts, head = _groups_of(job)
    width, tied = job.weights.width, job.shape.tied
    buckets = 0 if tied or experts.largest else head.trainable * FP32  # shared experts may come later
    gathered = layer.whole(width) + (embedding.whole(width) if tied else 0) + _staying(job)
    return combine(_persistent(job), {"gradients": _earlier(job), "buckets": buckets, "gathered_weights": gathered})


def at_the_end(job: MemoryJob) -> Components:
    return _persistent(job)


def _groups_of(job: MemoryJob) -> tuple[Group, Group, Group, Group]:
    lora, levers = effective_lora(job.levers), job.levers
    trains = job.acts.setting.trains_base, levers.trains_embedding
    return _groups(job.shape, (levers.tensor_parallel, levers.expert_parallel), lora, levers.method, *trains)


def _outside(job: MemoryJob) -> int:
    """Ranks that share embedding and head: those that share layers have a part each."""
    return job.world * job.levers.tensor_parallel


def _gathers_of(job: MemoryJob) -> tuple[Gather, Gather, Gather, Gather]:
    (embedding, layer, experts, head), outside = _groups_of(job), _outside(job)
    owners = job.world // job.levers.expert_parallel
    return (
        _gather(job, embedding, outside),
        _gather(job, layer, job.world),
        _gather(job, experts, owners),
        _gather(job, head, outside),
    )


def _gather(job: MemoryJob, group: Group, ranks: int) -> Gather:
    width = job.weights.width
    whole = group.whole(width)
    if ranks > 1:
        return Gather(whole, whole, whole)
    shard = _shard_width(job)
    if job.levers.offload_param != "none":
        return Gather(whole, 0, group.largest * max(shard, width))  # brought to the GPU as it is, then cast
    return Gather(whole, 0, group.largest * width if shard != width else 0)


def _staying(job: MemoryJob, layers: int | None = None) -> int:
    """What of the lowest so many layers, or of all, is whole from the forward pass on. Of the GPU's other stages of a
    pipeline all layers may wait for their backward pass."""
    if job.levers.tensor_parallel == 1:
        return 0
    lora = effective_lora(job.levers)
    own = _count_staying(job.shape, lora)
    others = 0 if job.row is None else _count_staying(job.row.shape, lora)[-1] - own[-1]
    return (own[-1 if layers is None else layers] + others) * job.weights.width


@lru_cache(maxsize=256)
def _count_staying(shape: ModelShape, lora: Lora | None) -> tuple[int, ...]:
    each = [sum(count_uncut(block, lora)) for block in shape.blocks]
    return tuple(accumulate([each[kind] for kind in shape.pattern], initial=0))


def _forward(job: MemoryJob, embedding: Gather, layer: Gather, experts: Gather, head: Gather) -> Components:
    """While a group is copied out of its buffer, `wait_for_unshard` still has the one before in a variable; where ranks
    share layers, that is the small one."""
    acts, root = job.acts, embedding.whole if job.shape.tied else 0
    before = 0 if job.levers.tensor_parallel > 1 else experts.buffer or layer.buffer
    arriving = root + layer.whole + layer.arriving
    moments: list[Components] = [
        {"gathered_weights": embedding.whole + embedding.arriving},
        {"recompute": acts.stream, "gathered_weights": embedding.buffer + arriving},
        keeping(acts) | {"gathered_weights": before + arriving},
        passing(acts) | {"gathered_weights": root + layer.whole + experts.whole + before},
    ]
    if experts.whole:
        both = root + layer.whole + layer.buffer + experts.whole + experts.arriving
        kept = acts.below_top + acts.shared
        moments.append({"activations": kept, "recompute": _at_experts(acts), "gathered_weights": both})
    if not job.shape.tied:
        top = before + head.whole + head.arriving
        moments.append(keeping(acts) | {"recompute": acts.stream, "gathered_weights": top})
    return combine(worst(*moments), {"gathered_weights": _staying(job)})


def _at_experts(acts: Activations) -> int:
    """What the top layer holds in its forward pass when its experts are called."""
    top = acts.moments[0] if acts.moments else None
    if top is None or EXPERTS not in top.cost.modules:
        return acts.stream
    turns = top.cost.turns[1 if top.recomputes else 0]
    return acts.stream + turns[top.cost.modules.index(EXPERTS)][0]


def _shard_width(job: MemoryJob) -> int:
    """Bytes of a trainable element at rest, of its gradient and of each of its moments."""
    return FP32 if job.levers.master_weights else job.weights.trainable_width


@lru_cache(maxsize=256)
def _groups(
    shape: ModelShape, ranks: tuple[int, int], lora: Lora | None, method: str, base: bool, embedding: bool
) -> tuple[Group, Group, Group, Group]:
    """Embedding, the largest layer, a rank's experts of it where several share these, and norm with head. `ranks`: so
    many share each layer, and its experts. `base`, `embedding`: what of them trains."""
    sharers, owners = ranks
    layers = []
    for block in shape.blocks:
        tensors = cut_block(block, sharers).tensors
        shared = [tensor.numel // owners for tensor in tensors if owners > 1 and tensor.name.startswith(EXPERTS)]
        adapters = packed = plain = 0
        if shared:
            tensors = tuple([tensor for tensor in tensors if not tensor.name.startswith(EXPERTS)])
        largest = max([tensor.numel for tensor in tensors], default=0)
        for tensor in tensors:
            if method == "qlora" and is_linear(tensor):
                packed += tensor.numel
            else:
                plain += tensor.numel
            if lora is not None and is_adapted(tensor, lora):
                adapters += lora.rank * (tensor.shape[0] + tensor.shape[1])
        if sharers > 1:
            uncut = count_uncut(block, lora)
            plain, adapters = plain - uncut.base, adapters - uncut.adapters
        experts = Group(*((sum(shared), 0) if base else (0, sum(shared))), 0, max(shared, default=0))
        rest = Group(plain, 0, 0, largest) if base else Group(adapters, plain, packed, largest)
        layers.append((rest, experts))
    before, after = [t.numel for t in shape.before], [t.numel for t in shape.after]
    below = Group(*((sum(before), 0) if embedding else (0, sum(before))), 0, max(before, default=0))
    above = Group(*((sum(after), 0) if base else (0, sum(after))), 0, max(after, default=0))
    return below, *max(layers, key=lambda groups: sum(group.whole(2) for group in groups)), above


def _persistent(job: MemoryJob) -> Components:
    weights, levers = job.weights, job.levers
    if levers.offload_param != "none":
        return {"temporaries": job.workspaces}
    own, width = share(weights.trainable_numel, job.world), _shard_width(job)
    if levers.optimizer in EIGHT_BIT:  # those of each shard on its own: our worker hands bitsandbytes the local tensors
        states = eight_bit_states(levers.optimizer, weights.trainable, job.world).gpu
    else:
        states = state_bytes(levers.optimizer, own, width, flat=False)
    frozen = share(weights.frozen_bytes - weights.scales_bytes, job.world) + weights.scales_bytes
    return {"weights": frozen + own * width, "optimizer_states": states, "temporaries": job.workspaces}


def _own_grads(job: MemoryJob) -> int:
    offloaded = job.levers.offload_param != "none"
    return 0 if offloaded else share(job.weights.trainable_numel, job.world) * _shard_width(job)


def _earlier(job: MemoryJob) -> int:
    """Reduced gradients of earlier micro batches: every one of them is synchronised."""
    return _own_grads(job) if job.levers.accumulation > 1 else 0


def _backward(job: MemoryJob, embedding: Group, layer: Group, experts: Group, head: Group) -> Components:
    """The top layer with everything kept, or the embedding at the end with all gradients there."""
    acts, width, tied = job.acts, job.weights.width, job.shape.tied
    shard = _shard_width(job)
    offloaded = job.levers.offload_param != "none"
    root = embedding.whole(width) if tied else 0
    own = layer.whole(width)
    gathers, outside = _gathers_of(job), _outside(job)
    ahead, last_ahead = gathers[1].buffer, gathers[0].buffer
    earlier = _earlier(job)
    reducing = 0 if tied else head.trainable * FP32  # the group above is still being reduced
    reduced = 0 if tied else share(head.trainable * shard, outside)
    tied_grad, each = job.tied_grad, share(layer.trainable * shard, job.world)
    each_experts = share(experts.trainable * job.levers.expert_parallel * shard, job.world)
    fullest, highest = NOTHING, -1
    for moment in acts.moments:
        whole = root + own + (ahead if moment.layer else 0 if tied else last_ahead)  # the root is whole already
        whole += _staying(job, moment.layer + 1)
        stages = [(moment.working_kept, reducing, whole)]
        if experts.largest:
            stages = _stages(moment, experts, reducing, whole, width)
        for number, (working, in_flight, gathered) in enumerate(stages):
            gradients = tied_grad + (earlier or (0 if offloaded else reduced + (each_experts if number == 2 else 0)))
            total = moment.kept + working + gradients + in_flight + gathered
            if total > highest:
                highest = total
                fullest = Peak(moment.kept, working, gradients, in_flight, gathered)
        reduced += each + each_experts
        reducing = layer.trainable * FP32
    # A gradient goes when it is in the buffer, before this rank's part of it comes; but of several ranks each has the
    # group's last one in a variable of `foreach_reduce`, and the embedding is alone in its group. Where there are
    # gradients of earlier micro batches, the part is then added to them.
    last, part = embedding.trainable * width, share(embedding.trainable * shard, outside)
    if outside > 1 or offloaded:
        last += part if earlier else 0
    else:
        last = max(last, part) if earlier else max(last - part, 0)
    moments = [fullest.components(acts.shared)]
    if outside > 1 and not tied:  # likewise the head's, when the layers have kept all; the first of them is on its way
        above = head.largest * width if head.trainable else 0
        beside = above + earlier + (0 if offloaded else share(head.trainable * shard, outside))
        gathered = ahead + _staying(job)
        moments.append(Peak(acts.kept, acts.stream, beside, head.trainable * FP32, gathered).components(acts.shared))
    return worst(
        *moments,
        Peak(0, 0, _own_grads(job) + last, embedding.trainable * FP32, 0).components(acts.shared),
    )


def _stages(moment: Moment, experts: Group, reducing: int, whole: int, width: int) -> list[tuple[int, int, int]]:
    """A layer's turn where its experts are a group of their own: while they are at work, when their gradients leave,
    and what follows. What the layer holds, what is being reduced, and what is whole."""
    cost = moment.cost
    if EXPERTS not in cost.modules:
        return [(moment.working_kept, reducing, whole)]
    at = cost.modules.index(EXPERTS)
    turns, grads = cost.turns[2], experts.trainable * width
    first = (experts.trainable - experts.largest) * width if grads else 0  # of the projection that runs back first
    others = cost.weight_grads - grads
    again = cost.recompute + max(cost.output, cost.asking) if moment.recomputes else 0
    at_work = max(again, *[max(turn) + first for turn in turns[at:]])
    after = max([max(turn) for turn in turns[:at]], default=0) + others
    leaving = turns[at - 1][0] + grads
    in_flight = experts.trainable * FP32
    return [
        (at_work, reducing, whole + experts.whole(width)),
        (leaving, in_flight, whole),
        (after, in_flight or reducing, whole),
    ]


def step(job: MemoryJob) -> Components:
    if job.levers.offload_param != "none":
        return combine(_persistent(job))
    largest = share(job.weights.largest_trainable, job.world)
    updating = {"gradients": _own_grads(job), "temporaries": step_temporary(job.levers.optimizer, largest)}
    return combine(_persistent(job), updating)


def initialise(job: MemoryJob) -> Components:
    if job.weights.quantised_numel:
        return building(job)
    # `to_empty` makes a tied weight once for each module that has it; our worker makes it but once
    tied = job.built_whole and job.shape.tied and job.levers.offload_param == "none"
    width = _shard_width(job) if job.levers.trains_embedding else job.weights.width
    twice = share(job.shape.before[0].numel, _outside(job)) * width if tied else 0
    return _persistent(job) | {"optimizer_states": 0, "temporaries": twice}
