"""DeepSpeed's stages 1 and 2 (`stage_1_and_2.py`): whole weights on every GPU, the optimizer in parts.

The trainable weights are flattened into one buffer; each rank keeps an fp32 copy of its partition and that
partition's states. Stage 2 reduces gradients into the owner's partition during the backward pass, stage 1
keeps them all until its end. The step then flattens the partition's gradients and casts them to fp32, which
is where these stages usually peak. This is the footprint of rank 0, whose partition is the model's first
parameters: its gradients come last.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from tightfit.inputs.versions import release
from tightfit.memory.backward import Owners, Peak, peak_with_accumulation, peak_with_buckets
from tightfit.memory.job import Components, MemoryJob, building, combine, keeping, logits, passing, share, worst
from tightfit.memory.operations import FP64
from tightfit.memory.optimizers import flat_states, step_temporary
from tightfit.memory.overhead import beside
from tightfit.memory.weights import Weights
from tightfit.messages import Message
from tightfit.types import PhaseName


class Partition(NamedTuple):
    numel: int
    members: int  # how many parameters overlap the first partition
    covering: int  # their elements: the gradients of these parameters are kept whole
    largest: int  # the largest piece of one parameter in it


@lru_cache(maxsize=1024)
def partition(weights: Weights, world: int) -> Partition:
    trainable, total = weights.trainable, weights.trainable_numel
    numel = share(total, 2 * world) * 2
    ends = list(accumulate(trainable))
    last = min(bisect_left(ends, numel), len(ends) - 1) if ends else 0
    covering = ends[last] if ends else 0
    pieces = [*trainable[:last], numel - (ends[last - 1] if last else 0)] if ends else [0]
    return Partition(numel, last + 1 if ends else 0, covering, max(min(piece, numel) for piece in pieces))


def passes(job: MemoryJob) -> dict[PhaseName, Components]:
    base, acts = _persistent(job), job.acts
    return {
        "forward": combine(base, _waiting(job), passing(acts)),
        "loss": combine(at_the_loss(job), keeping(acts)),
        "backward": combine(base, _backward(job)),
    }


def at_the_loss(job: MemoryJob) -> Components:
    return combine(_persistent(job), _waiting(job), logits(job))


def at_the_top(job: MemoryJob) -> Components:
    """The bucket comes with the first gradient: the embedding's where that trains alone, and where adapters of
    compiled layers train, when the top layer is done."""
    later = job.levers.trains == "embeddings" or (job.acts.setting.compiled and job.levers.method != "full")
    bucket = 0 if later else _bucket(job)
    return combine(_persistent(job), {"gradients": _earlier(job), "buckets": bucket})


def _own_grads(job: MemoryJob) -> int:
    offloaded = job.levers.offload_optimizer != "none"
    return 0 if offloaded else partition(job.weights, job.world).covering * job.weights.trainable_width


def _waiting(job: MemoryJob) -> Components:
    """Of earlier micro batches. Stage 1's bucket, which the first backward pass allocates, stays until gradients are
    reduced."""
    stays = job.levers.engine == "zero1" and job.levers.accumulation > 1
    return {"gradients": _earlier(job), "buckets": _bucket(job) if stays else 0}


def _persistent(job: MemoryJob) -> Components:
    weights, levers = job.weights, job.levers
    if levers.offload_optimizer != "none":
        spare = weights.largest_trainable * weights.trainable_width  # temp_grad_buffer_for_gpu_offload
        return {"weights": weights.bytes, "buckets": spare, "temporaries": job.workspaces}
    numel = partition(weights, job.world).numel
    return {
        "weights": weights.bytes,
        "master_weights": job.master_width * numel,
        "optimizer_states": flat_states(levers.optimizer, numel, job.master_width),
        "temporaries": job.workspaces,
    }


def _earlier(job: MemoryJob) -> int:
    """Gradients of earlier micro batches that wait through the next one."""
    if job.levers.accumulation == 1:
        return 0
    if job.levers.engine == "zero1":
        return job.weights.trainable_numel * job.weights.trainable_width
    return _own_grads(job)


def _bucket(job: MemoryJob) -> int:
    """`IPGBucket.buffer`: one, or two where communication overlaps."""
    buckets = job.levers.buckets
    if not (buckets.contiguous_gradients or job.levers.offload_optimizer != "none"):
        return 0
    return buckets.reduce_bucket * job.weights.trainable_width * (2 if buckets.overlap_comm else 1)


def _backward(job: MemoryJob) -> Components:
    if job.levers.trains == "embeddings":
        return _backward_to_the_embedding(job)
    acts, levers, bucket, earlier = job.acts, job.levers, _bucket(job), _earlier(job)
    if not _leave_at_once(job):
        peak = peak_with_accumulation(acts, job.tied_grad, job.embedding_grad, earlier)
        beside: Components = {"buckets": bucket}
    else:
        # Stage 1 reduces a whole bucket where it lies; stage 2 cuts it by owner.
        every, numel = job.weights.trainable_numel, partition(job.weights, job.world).numel
        owners = Owners(every, every if levers.engine == "zero1" else numel) if numel else None
        elements = levers.buckets.reduce_bucket
        peak = peak_with_buckets(acts, elements, job.tied_grad, job.embedding_grad, None, 0, owners)
        head = acts.head.head_grad + acts.head.fused_grad
        beside = {"gradients": earlier + (head if head in _find_oversized(job) else 0), "buckets": bucket}
    inside = combine(peak.components(acts.shared), beside)
    if acts.setting.compiled and levers.method != "full":
        # the bucket comes with the first gradients, and those of a compiled layer's adapters come when it is done
        top, resting = acts.moments[0], _waiting(job)
        begins = Peak(top.kept, top.working_kept, resting["gradients"], resting["buckets"]).components(acts.shared)
        rest = acts.taking(acts.moments[1:])
        inside = worst(begins, combine(peak_with_accumulation(rest, 0, 0, earlier).components(acts.shared), beside))
    return worst(_first_gradient(job, bucket, earlier), _second_gradient(job, bucket, earlier), inside, _ends(job))


def at_the_end(job: MemoryJob) -> Components:
    return combine(_persistent(job), _ends(job) if job.levers.trains != "embeddings" else {})


def _ends(job: MemoryJob) -> Components:
    """All gradients are there, and leave through the bucket."""
    left = _own_grads(job) + _earlier(job) + sum(_find_oversized(job)) if _leave_at_once(job) else _emptying(job)
    ends: Components = {"gradients": left, "buckets": _bucket(job)}
    return worst(ends, _leaving(job)) if job.levers.offload_optimizer != "none" else ends


def _leave_at_once(job: MemoryJob) -> bool:
    """Whether gradients leave through the bucket as they come. Stage 1 watches them where communication overlaps
    (`create_gradient_handling_hooks`), and reduces those of the last micro batch alone."""
    buckets, levers = job.levers.buckets, job.levers
    overlaps = bool(buckets.overlap_comm) and buckets.contiguous_gradients and levers.accumulation == 1
    return levers.engine != "zero1" or overlaps


def _find_oversized(job: MemoryJob) -> list[int]:
    """Gradients larger than the bucket, which stage 1 leaves in their own memory until the step. In bytes."""
    weights, room = job.weights, job.levers.buckets.reduce_bucket
    if job.levers.engine != "zero1" or job.levers.offload_optimizer != "none":
        return []
    return [numel * weights.trainable_width for numel in weights.trainable if numel > room]


def _leaving(job: MemoryJob) -> Components:
    """Each gradient of the partition is upcast for its norm before it leaves for the host."""
    weights, elements = job.weights, job.levers.buckets.reduce_bucket
    oversized = weights.largest_trainable if weights.largest_trainable > elements else 0
    gradients, largest = oversized * weights.trainable_width, partition(weights, job.world).largest
    return {"gradients": gradients, "buckets": _bucket(job), "temporaries": FP64 * largest}


def _backward_to_the_embedding(job: MemoryJob) -> Components:
    """Where nothing above it trains, the first gradient to arrive is the last: only then does the bucket appear."""
    acts, levers, weights, grad = job.acts, job.levers, job.weights, job.embedding_grad
    bucket, earlier, resting = _bucket(job), _earlier(job), _waiting(job)["buckets"]
    peak = peak_with_accumulation(acts, job.tied_grad, 0, earlier)
    moments: list[Components] = [
        peak.components(acts.shared) | {"buckets": resting},
        # the layers' gradient is turned into the embedding's, to which a tied head's is added
        Peak(0, acts.moments[-1].cost.input_grad, earlier + job.tied_grad + grad, resting).components(acts.shared),
    ]
    if levers.engine == "zero1":
        moments.append({"gradients": _emptying(job), "buckets": bucket})
    else:
        room = levers.buckets.reduce_bucket * weights.trainable_width
        stays = grad if grad > room else 0  # a larger one has no room in the bucket
        one_owner = partition(weights, job.world).numel >= weights.trainable_numel
        moments += [
            {"gradients": earlier + grad, "buckets": bucket},
            {"gradients": earlier + stays, "buckets": bucket + (0 if one_owner else grad)},
            {"gradients": earlier + stays + _own_grads(job), "buckets": bucket},
        ]
    if levers.offload_optimizer != "none":
        moments.append(_leaving(job))
    return worst(*moments)


def _first_gradient(job: MemoryJob, bucket: int, earlier: int) -> Components:
    """The first gradient, the head's where it trains, brings the bucket (`setup_buckets`), all activations there. One
    that exceeds the bucket waits by itself through the final norm's backward pass."""
    acts, head = job.acts, job.acts.head
    if job.levers.method != "full":
        return {}
    whole = job.shape.vocab_size * job.shape.hidden_size
    if job.shape.tied and not job.levers.trains_embedding:
        whole = 0
    waits = job.levers.engine == "zero1" or job.shape.tied or whole > job.levers.buckets.reduce_bucket
    norm = head.norm_backward + (whole * job.weights.width if waits else 0)
    return {
        "activations": acts.kept + acts.shared,
        "gradients": earlier + max(head.saved_norm + head.arriving, norm),
        "buckets": bucket,
    }


def _second_gradient(job: MemoryJob, bucket: int, earlier: int) -> Components:
    """The final norm's. With it goes that of the head, if it exceeds the bucket and a fused loss has made it: cut by
    owner, and joining the pieces is a copy."""
    acts, grad, width = job.acts, job.acts.head.fused_grad, job.weights.trainable_width
    part, every = partition(job.weights, job.world).numel, job.weights.trainable_numel
    if not _leave_at_once(job) or job.shape.tied or grad <= job.levers.buckets.reduce_bucket * width:
        return {}
    copy = 0 if Owners(every, part).is_one(every - grad // width, every) else grad
    gradients = earlier + acts.head.saved_norm + grad
    return {"activations": acts.kept + acts.shared, "gradients": gradients, "buckets": bucket + copy}


def _emptying(job: MemoryJob) -> int:
    part, bucket = partition(job.weights, job.world), job.levers.buckets.reduce_bucket
    return _empty(job.weights, bucket, part) * job.weights.trainable_width


@lru_cache(maxsize=256)
def _empty(weights: Weights, bucket: int, part: Partition) -> int:
    """Stage 1 reduces when all gradients are there, from the first on (`reduce_gradients`): each leaves its own memory
    for the bucket's, which is reduced when it is full, and those of this rank go on into a buffer of their own.
    The most elements beside the bucket."""
    owners = Owners(weights.trainable_numel, max(part.numel, 1))
    waiting = most = weights.trainable_numel
    fill = place = own = oversized = 0
    for numel in (*weights.trainable, bucket + 1):
        if fill and fill + numel > bucket:
            copy = 0 if owners.is_one(place - fill, place) else fill
            most = max(most, waiting + own + copy)
            if place <= part.covering:
                own = part.covering
                most = max(most, waiting + own)
                waiting -= oversized
            fill = oversized = 0
        if numel <= bucket:
            waiting -= numel
        else:
            oversized = numel  # it stays in its own memory until it is reduced
        fill += numel
        place += numel
    return most


def step(job: MemoryJob) -> Components:
    part, width = partition(job.weights, job.world), job.weights.trainable_width
    if job.levers.offload_optimizer != "none":
        # older versions copied the updated partition back in fp32 and cast it on the GPU
        copied = 4 * part.numel if release(job.levers.deepspeed_version) < CASTS_ON_HOST_SINCE else 0
        return combine(_persistent(job), {"temporaries": copied})
    # norms are taken in double precision: `get_norm_dtype`
    flat = part.numel * (width + job.master_width if width != job.master_width else width)
    update = flat + step_temporary(job.levers.optimizer, part.numel)
    temporary = max(update, FP64 * part.largest)
    return combine(_persistent(job), {"gradients": _own_grads(job), "temporaries": temporary})


def initialise(job: MemoryJob) -> Components:
    weights, levers, part = job.weights, job.levers, partition(job.weights, job.world)
    trainable = weights.trainable_numel * weights.trainable_width
    flattening: Components = {"weights": weights.bytes, "temporaries": trainable if flattens_on_gpu(job) else 0}
    masters: Components = {"weights": weights.bytes, "temporaries": part.numel * weights.trainable_width}
    if levers.offload_optimizer == "none":
        # fp32 clone of the partition, then a gradient of the same size that is dropped again
        clone = part.numel * job.master_width
        masters |= {"master_weights": clone, "temporaries": clone}
    return worst(building(job), flattening, masters)


CASTS_ON_HOST_SINCE = (0, 17, 0)
FLATTENS_ON_GPU_SINCE = (0, 19, 0)
FLATTENING_SHARE = 0.96  # of the card: up to here the second copy is counted on the GPU


def flattens_on_gpu(job: MemoryJob) -> bool:
    """Where the card has room for a second copy, recent versions flatten there; otherwise on the host.

    DeepSpeed looks at what is free before it does so. A copy that would take the card's last few percent therefore
    breaks nothing, whichever way it goes, and is counted on the host alone: a job must not cease to fit because the
    card became a little larger.
    """
    if release(job.levers.deepspeed_version) < FLATTENS_ON_GPU_SINCE:
        return False
    if job.card_bytes is None:
        return True
    both = job.weights.bytes + job.weights.trainable_numel * job.weights.trainable_width
    return both + sum(beside(both, job.world, None).values()) <= FLATTENING_SHARE * job.card_bytes


def reasons(job: MemoryJob) -> tuple[Message, ...]:
    where = "price.flattens-on-gpu" if flattens_on_gpu(job) else "price.flattens-on-host"
    return (Message(where, version=job.levers.deepspeed_version),)
