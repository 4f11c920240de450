"""What an engine adds to the computation: shards gathered and reduced, copies to the host, its own bookkeeping.

How much each moves is read in its source. ZeRO-1/2 keep whole weights: gradients are summed over all ranks in
buckets (`allreduce_and_scatter`: as much as an all-reduce), then every rank's updated part is gathered. ZeRO-2
does that after each micro batch, ZeRO-1 and the unsharded engine before the step only. ZeRO-3 and FSDP2 gather
each layer in the forward pass and again on the way back (a recomputation and its backward share one gather,
since a layer is smaller than DeepSpeed's reuse distance), and scatter gradients after each micro batch; FSDP2
does so in fp32. Where ranks share experts, a rank gathers and scatters its own alone, among those that own them too.
Collectives run beside the computation where the engine lets them: ZeRO-3 and FSDP2 by
default, ZeRO-1/2 with `overlap_comm`. Torch alone (`train/engines/ddp.py`) adds the gradients of every further micro
batch to those before it, in fp32 where there are fp32 copies of the weights, and sends them before the step: widened
ones in one message, others as they are, one by one.

Compressed messages take less of the network and more of the GPU. A run's first steps are exact (`train/compression.py`)
and are not what is priced.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from tightfit.hardware.reached import reached
from tightfit.memory import weights as weights_of
from tightfit.memory.activations import activations
from tightfit.memory.compressed import gradient_messages, levelled_bytes, weight_bytes
from tightfit.memory.optimizers import state_bytes
from tightfit.memory.shared_layers import Uncut, count_uncut
from tightfit.pace import rates as constants
from tightfit.pace.rates import Rates
from tightfit.types import DDP, Hardware, Levers, ModelShape, Moe

FP32 = 4
STEP_BYTES = 44
"""Moved on the GPU for each parameter of a step with fp32 states: flattened and cast gradients, their norm,
both moments and the master weight read and written, the 16-bit weight written. Counted from the source."""
WIDENING_BYTES = 10
"""Likewise where a micro batch's 16-bit gradients are added to fp32 ones: both read, one written. The first micro
batch's are widened without a sum, which `STEP_BYTES` has."""


PACKING_BYTES = {"powersgd": 40, "onebit": 250}
"""Likewise to compress a step's gradients, for each parameter that is approximated."""
UNPACKED_WEIGHT_BYTES, PACKED_GRADIENT_BYTES = 7, 90
"""Likewise under ZeRO++, for each weight that is gathered and for each gradient that is scattered."""


class PassTimes(NamedTuple):
    """Seconds of one micro batch."""

    products: float
    traffic: float
    unpacking: float
    host: float
    products_back: float
    traffic_back: float
    unpacking_back: float
    recomputed: float
    recomputed_products: float  # of that
    host_back: float
    head: float  # of the forward pass, the head and its loss on the GPU
    head_products: float
    head_host: float
    throttle: float  # how much longer products take than at full clock

    @property
    def forward_gpu(self) -> float:
        return self.products + self.traffic + self.unpacking

    @property
    def back_gpu(self) -> float:
        return self.products_back + self.traffic_back + self.unpacking_back + self.recomputed

    def busy(self, traffic: Traffic) -> float:
        """A forward pass: the GPU waits for launches, layer by layer, and what it has left to do at the end, most often
        the head's, nothing hides."""
        gpu, host = self.forward_gpu + traffic.copied, self.host + traffic.host
        return max(max(gpu - self.head, host - self.head_host) + self.head, host)

    def lead(self, traffic: Traffic) -> float:
        """How far the launches are ahead of the GPU when the forward pass is over. Where weights are fetched, launches
        wait for them."""
        return 0.0 if traffic.gathered or traffic.from_host else self.busy(traffic) - self.host - traffic.host

    def forward_s(self, traffic: Traffic) -> float:
        """A forward pass with all that it waits for."""
        busy = self.busy(traffic)
        return busy + sum(traffic.waiting(busy, traffic.gathered))


class Traffic(NamedTuple):
    """Seconds that data takes outside the computation: of one micro batch, `updated` of one step."""

    gathered: float  # in the forward pass
    gathered_back: float
    reduced: float
    replicated: float  # once a step, beside the last backward pass: what groups that each have a copy tell each other
    overlaps: bool  # reductions run beside the backward pass
    copy_cost: float  # what copies from the host cost the computation beside which they run, of their own time
    shares_host: bool  # collectives pass through the host's memory and lanes, so that copies from there wait for them
    each_time: bool
    """They follow every micro batch, not only the last; gradients leave for the host when they are reduced."""
    updated: float
    copied: float  # on the GPU: shards laid out for a collective and back
    copied_back: float
    added: float  # on the GPU, after the backward pass of each micro batch but the first: gradients added up
    from_host: float  # in either pass
    to_host: float
    kept_out: float  # layer inputs that wait on the host: out in the forward pass, back in the other
    sent: float  # likewise what compiled layers keep, beside the computation
    host: float
    host_back: float

    def reductions(self, accumulation: int) -> int:
        return accumulation if self.each_time else 1

    def waiting(self, busy: float, moved: float) -> tuple[float, float]:
        """What a pass of `busy` seconds waits for collectives of `moved` seconds, and for the host link."""
        longest, queued = max(busy, moved), moved if self.shares_host else 0.0
        copies = max(0.0, queued + self.from_host + self.sent - longest)
        copies += self.copy_cost * min(self.from_host, longest) + constants.SENT_COST * min(self.sent, longest)
        return _beside(moved, busy, constants.COLLECTIVE_COST), copies

    def waiting_back(self, busy: float, accumulation: int) -> tuple[float, float]:
        """Likewise all backward passes of a step together."""
        collectives = host_link = 0.0
        for count, moved in self.rounds_back(accumulation):
            for_ranks, for_host = self.waiting(busy, moved)
            collectives, host_link = collectives + count * for_ranks, host_link + count * for_host
        return collectives, host_link

    def price_waiting(self, rounds: list[tuple[int, float]]) -> Callable[[float, float], float]:
        """What such passes wait in all as a function of their busy seconds, and of what layers send meanwhile: a search
        asks it thousands of times."""
        fetched, copy_cost = self.from_host, self.copy_cost
        cost, sent_cost = constants.COLLECTIVE_COST, constants.SENT_COST
        share = 1.0 if self.shares_host else 0.0

        def wait(busy: float, sent: float) -> float:
            total = 0.0
            for count, moved in rounds:
                beside = cost * moved if moved < busy else moved - busy + cost * busy
                longest = busy if busy > moved else moved
                queued = share * moved + fetched + sent
                beside += queued - longest if queued > longest else 0.0
                beside += copy_cost * (fetched if fetched < longest else longest)
                beside += sent_cost * (sent if sent < longest else longest)
                total += count * beside
            return total

        return wait

    def rounds_back(self, accumulation: int) -> list[tuple[int, float]]:
        """The backward passes of a step, of which some or all reduce gradients: how many move how long. Between groups
        the network carries them, beside what a group does in its node."""
        reducing = self.reductions(accumulation)
        moved = self.gathered_back + (self.reduced if self.overlaps else 0.0)
        rounds = [(reducing, moved), (accumulation - reducing, self.gathered_back)]
        if self.replicated > moved:
            rounds = [(1, self.replicated), (reducing - 1, moved), (accumulation - reducing, self.gathered_back)]
        return [each for each in rounds if each[0]]


def _beside(moved: float, busy: float, cost: float) -> float:
    """What moving data adds to a computation that runs beside it: what is longer, and a share of what is not."""
    return max(0.0, moved - busy) + cost * min(moved, busy)


class StepTime(NamedTuple):
    """Seconds of one optimizer step."""

    gpu: float
    host: float
    host_optimizer: float
    link: float


def hooks(levers: Levers, modules: int) -> float:
    """Host seconds of ZeRO-3's hooks around the modules of one pass."""
    return modules * constants.MODULE_HOOKS_S if levers.stage == 3 else 0.0


def gathers_once(levers: Levers) -> bool:
    """Whether a layer that recomputes does so within its backward; otherwise that is one more call, with its hooks."""
    return levers.compile == "layers"


@lru_cache(maxsize=1024)
def _count_tensors_to_gather(shape: ModelShape, threshold: int) -> int:
    return sum(1 for tensor in shape.tensors if tensor.numel > threshold)


@lru_cache(maxsize=1024)
def _count_experts(shape: ModelShape, first: int = 0) -> int:
    """Elements of the experts of all layers, from the one with this number on."""
    each = [sum([t.numel for t in block.tensors if t.name.startswith("mlp.experts.")]) for block in shape.blocks]
    return sum([each[kind] for kind in shape.pattern[first:]])


def traffic(shape: ModelShape, levers: Levers, hardware: Hardware, rates: Rates, *, rehearsal: bool) -> Traffic:
    weights = weights_of.of(shape, levers)
    world = levers.stage_ranks(hardware.world)  # of a pipeline: neighbours
    trained = weights.trainable_numel * weights.trainable_width
    sharded = levers.shards_parameters
    link = Links(hardware, rates, rehearsal, world)
    within, tensor = levers.shard_within or world, levers.tensor_parallel
    near = Links(hardware, rates, rehearsal, within)
    # Of ranks that share layers each is in a ring of its own with those that have the same part of them. What they use
    # whole, all of them gather together.
    alike = Links(hardware, rates, rehearsal, within // tensor, rings=tensor)
    owners = levers.expert_parallel
    owning = Links(hardware, rates, rehearsal, within // owners, rings=owners)
    outside, trained_outside = _count_outside(shape, levers) if tensor > 1 else (0, 0)
    memory, launch = rates.card.memory, rates.launch
    # Collectives of one pass, and host seconds of each: a parameter each in ZeRO-3, a layer each in FSDP2, which lays
    # every group out for its collectives and back, where ZeRO copies gradients into buckets.
    gathers, copied, copied_back = 0, 0.0, 0.0 if levers.engine == DDP else 2 * trained / memory
    guards = 0.0
    shared = _count_experts(shape) if owners > 1 else 0
    shared_trained = _count_experts(shape, levers.frozen_layers) if owners > 1 and levers.trains_base else 0
    foreign, foreign_trained = shared - shared // owners, shared_trained - shared_trained // owners
    gather_s = constants.GATHER_S + (constants.FETCH_FROM_HOST_S if levers.offload_param != "none" else 0.0)
    if levers.is_fsdp2:
        groups = 1 if tensor == 1 else 2  # of a layer: what ranks have of it, and what they use whole
        ends = 0 if shape.tied else bool(shape.before) + bool(shape.after)
        gathers, gather_s = groups * shape.n_layers + ends, constants.SHARD_GROUP_S
        if shared:
            gathers += sum([isinstance(shape.blocks[kind].mlp, Moe) for kind in shape.pattern])
        laid_out = weights.bytes + (outside - outside // tensor - foreign) * weights.width
        more = trained_outside - trained_outside // tensor - foreign_trained
        reduced_bytes = trained + more * weights.trainable_width
        copied, copied_back = 2 * laid_out / memory, (2 * laid_out + 3 * reduced_bytes) / memory
        if levers.compile == "layers":
            adapters = 0 if levers.method == "full" else len(weights.trainable)
            guards = launch * constants.SHARD_GUARD_S * (len(shape.tensors) + adapters)
    elif sharded:
        gathers = _count_tensors_to_gather(shape, levers.buckets.persistence_threshold)
    whole = weights.bytes if sharded else 0
    gradients = weights.trainable_numel * (weights.trainable_width if levers.uses_deepspeed else FP32)
    messages, added = max(1, -(-weights.trainable_numel // levers.buckets.reduce_bucket)), 0.0
    if levers.engine == DDP:
        if levers.master_weights and levers.precision != "fp32":
            messages, added = 1, WIDENING_BYTES * weights.trainable_numel / memory
        else:  # autograd adds them up, in the precision of the weights
            gradients, messages, added = trained, len(weights.trainable), 3 * trained / memory
    if compressed := gradient_messages(shape, levers, world).sent:
        gradients, messages = compressed // 2, 2
    if levers.compress == "zeropp":
        numel = whole // weights.width
        whole = weight_bytes(numel)
        copied += UNPACKED_WEIGHT_BYTES * numel / memory
        copied_back += UNPACKED_WEIGHT_BYTES * numel / memory
    packs_gradients = levers.compress == "zeropp" and levers.trainer == "tightfit"
    if packs_gradients:
        copied_back += PACKED_GRADIENT_BYTES * weights.trainable_numel / memory
    # `overlap_comm` is ZeRO's: the unsharded engine reduces after the backward pass, FSDP2 always within it.
    overlaps = levers.is_fsdp2
    if levers.stage not in (None, 0):
        overlaps = levers.stage == 3 if levers.buckets.overlap_comm is None else levers.buckets.overlap_comm
    fetched = whole // levers.shards(hardware.world) if levers.offload_param != "none" else 0
    to_host = 0.0
    if levers.offload_optimizer != "none":
        # Each rank's share of the gradients, in fp32.
        own = -(-len(weights.trainable) // world) if levers.engine in ("zero1", "zero2") else len(weights.trainable)
        copies = own * launch * constants.OFFLOADED_GRADIENT_S[levers.engine]
        to_host = link.host(FP32 * weights.trainable_numel // levers.shards(hardware.world)) + copies
    host, again = gathers * launch * gather_s, levers.checkpointing.layers
    waits = link.host(activations(shape, levers, hardware.gpu).host_kept) if levers.checkpointing.offload else 0.0
    is_beside = levers.compile == "layers"

    def ring(size: int, of_outside: int, of_experts: int) -> float:
        """Of so much on each of the ranks that share layers, some of it a part of what is outside, some of it experts
        that ranks share out, of which each has its own."""
        cut = size - of_outside // tensor - of_experts
        both = alike.ring(cut, within // tensor) + near.ring(of_outside, within)
        return both + owning.ring(of_experts // owners, within // owners)

    whole_outside, whole_experts = outside * weights.width, shared * weights.width
    gathered_back = ring(whole, whole_outside, whole_experts) + near.latency(gathers)
    # hpZ's second copy of a weight that trains is old once that has been updated
    old = weights.trainable_numel * weights.trainable_width if levers.stage == 3 and within < world else 0
    old = min(old, whole)
    gathered = ring(whole - old, whole_outside, whole_experts) + link.ring(old, world)
    gathered += (link if old else near).latency(gathers)
    if levers.is_fsdp2:
        reduced = ring(gradients, trained_outside * FP32, shared_trained * FP32) + near.latency(messages)
    else:
        reduced = link.ring(gradients, world) + link.latency(messages)
    reduced *= 1 if sharded else 2
    if packs_gradients:
        reduced = link.hop_twice(levelled_bytes(weights.trainable_numel)) + link.latency(2 * messages)
    elif levers.compress == "onebit":  # an exchange, and what all gather of it
        reduced = link.exchange(gradients) + link.ring(gradients, world) + link.latency(2 * messages)
    return Traffic(
        gathered=gathered,
        gathered_back=gathered_back,
        reduced=reduced,
        replicated=link.between(tensor * gradients, within, world, gathers) if levers.is_fsdp2 else 0.0,
        overlaps=overlaps,
        copy_cost=constants.HOST_COPY_COST.get(levers.engine, 0.0),
        shares_host=reached(hardware).link_through_host and not link.is_alone,
        each_time=levers.shards_parameters or levers.stage == 2,
        updated=link.ring(trained, world) if levers.engine in ("zero1", "zero2") else 0.0,
        copied=copied,
        copied_back=copied_back,
        added=added,
        from_host=link.host(fetched) + (link.nvme(fetched) if levers.offload_param == "nvme" else 0.0),
        to_host=to_host,
        kept_out=0.0 if is_beside else waits,
        sent=waits if is_beside else 0.0,
        host=host + guards,
        host_back=host * (1 + (1.0 if again is None else again / shape.n_layers) * (not gathers_once(levers))),
    )


def _count_outside(shape: ModelShape, levers: Levers) -> tuple[int, int]:
    """Elements that ranks which share layers use whole, and those of them that train."""
    before, after = (sum([tensor.numel for tensor in tensors]) for tensors in (shape.before, shape.after))
    uncut = [count_uncut(block, weights_of.effective_lora(levers)) for block in shape.blocks]
    base, adapters = (sum([getattr(uncut[kind], name) for kind in shape.pattern]) for name in Uncut._fields)
    trained = adapters + (before if levers.trains_embedding else 0) + (after + base if levers.trains_base else 0)
    return before + after + base + adapters, trained


class Links:
    """Bytes to seconds, between GPUs and to the host."""

    def __init__(
        self, hardware: Hardware, rates: Rates, rehearsal: bool, ranks: int | None = None, *, rings: int = 1
    ) -> None:
        """`ranks`: that many neighbours exchange; None: all. `rings`: in that many rings beside each other."""
        self.is_alone = rehearsal or hardware.world == 1 or ranks == 1
        self._ranks = 1 if rehearsal else hardware.gpus_per_node
        self._rates, self._nodes, self._is_spread = rates, hardware.nodes, hardware.nodes > 1
        across = hardware.nodes > 1 and (ranks is None or ranks * rings > hardware.gpus_per_node)
        inside = rates.link if hardware.gpus_per_node > 1 or not across else rates.network
        self._bandwidth = min(inside, rates.network / min(rings, hardware.gpus_per_node)) if across else inside
        self._latency = rates.network_latency_s if across else rates.link_latency_s

    def ring(self, size: int, world: int) -> float:
        """An all-gather or reduce-scatter of this much in all: every rank passes on all but its own part. Rings cross
        from node to node through all NICs at once."""
        return 0.0 if self.is_alone else size * (world - 1) / world / self._bandwidth

    def between(self, size: int, within: int, world: int, collectives: int) -> float:
        """An all-reduce of this much, of which each rank of a group of `within` has its part, among those of all groups
        that have the same part. Those of a node share its network."""
        copies = world // within
        if self.is_alone or copies == 1:
            return 0.0
        each = 2 * size / within * (copies - 1) / copies
        on_link = each / self._rates.link if within < self._ranks else 0.0
        on_network = each * min(within, self._ranks) / self._rates.network if self._is_spread else 0.0
        return max(on_link, on_network) + self.latency(collectives)

    def exchange(self, size: int) -> float:
        """This much of every rank, a part for each: those of a node share its network."""
        if self.is_alone:
            return 0.0
        inside = size / self._rates.link if self._ranks > 1 else 0.0
        if not self._is_spread:
            return inside
        return max(inside, self._ranks * size * (self._nodes - 1) / self._nodes / self._rates.network)

    def hop_twice(self, size: int) -> float:
        """Likewise first among the ranks of a node, so that the network carries each part once for a node."""
        if self.is_alone:
            return 0.0
        inside = size * (self._ranks - 1) / self._ranks / self._rates.link if self._ranks > 1 else 0.0
        return inside + size * (self._nodes - 1) / self._nodes / self._rates.network if self._is_spread else inside

    def latency(self, collectives: int) -> float:
        return 0.0 if self.is_alone else collectives * self._latency

    def host(self, size: int) -> float:
        return size / self._rates.host_link

    def nvme(self, size: int) -> float:
        """The drive is one for all ranks of the node."""
        return size * self._ranks / self._rates.nvme_read


def step(shape: ModelShape, levers: Levers, hardware: Hardware, rates: Rates, *, rehearsal: bool) -> StepTime:
    weights = weights_of.of(shape, levers)
    link = Links(hardware, rates, rehearsal)
    world = 1 if levers.shards_nothing else levers.shards(hardware.world)
    numel = -(-weights.trainable_numel // world)
    launches = len(weights.trainable) * rates.launch * constants.STEP_PARAMETER_S[levers.engine]
    if levers.offload_optimizer == "none":
        if levers.optimizer == "adafactor":
            launches *= 4  # written in Python, several kernels a tensor
        # 8-bit states are a quarter; without master weights there is nothing to cast.
        saved = {"adamw8bit": 12, "paged_adamw8bit": 12, "sgd": 16, "adafactor": 8}.get(levers.optimizer, 0)
        moved = STEP_BYTES - saved - (0 if levers.master_weights else 12)
        packed = gradient_messages(shape, levers, hardware.world).packed * PACKING_BYTES.get(levers.compress, 0)
        return StepTime((numel * moved + packed) / rates.card.memory, launches, 0.0, 0.0)
    ranks = 1 if rehearsal else hardware.gpus_per_node
    each = constants.HOST_ADAM_BYTES + constants.HOST_STEP_BYTES / constants.HOST_PASS_SHARE
    if levers.is_fsdp2:
        each = constants.FSDP2_STEP_BYTES
    elif levers.stage == 3 and levers.offload_param == "none":
        each += constants.ZERO3_STEP_BYTES / constants.HOST_PASS_SHARE
    seconds = numel * each / rates.host_optimizer
    linked = 0.0 if levers.offload_param != "none" else link.host(numel * weights.trainable_width)
    if levers.offload_optimizer == "nvme":
        states = (state_bytes(levers.optimizer, numel, FP32, flat=True) + FP32 * numel) * ranks
        linked += states / rates.nvme_read + states / rates.nvme_write
    return StepTime(0.0, launches, seconds, linked)
