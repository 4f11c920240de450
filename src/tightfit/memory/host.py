"""Host memory of one rank and of a node.

Pinned buffers are the trap: PyTorch's caching host allocator rounds each of them up to a power of two and
never gives one back, so the 4-bytes-an-element arithmetic of guides is short by up to a factor of two. Every
buffer below is one that DeepSpeed pins when `pin_memory` is on. NVMe staging buffers are locked by DeepSpeed's
own allocator, which does not round.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from tightfit.memory import stream
from tightfit.memory import weights as weights_of
from tightfit.memory.job import Components, MemoryJob, combine, count_waiting_on_host, share, worst
from tightfit.memory.optimizers import EIGHT_BIT, eight_bit_states, state_bytes
from tightfit.memory.weights import Weights
from tightfit.memory.zero3 import shards_of
from tightfit.memory.zero12 import flattens_on_gpu, partition
from tightfit.types import Levers, ModelShape, Moe, PhaseName

PROCESS_BYTES = int(1.1 * 2**30)
"""A Python process with torch, transformers, DeepSpeed and a CUDA context, before its first kernel. Taken apart by
mapping on an H200: libraries' pages 0.4 GiB, Python's objects 0.5, the driver 0.1."""
LIBRARIES_BYTES = int(0.65 * 2**30)
"""What the first training step adds, whatever the model's size: kernels that CUDA reads into the heap when each is
first launched (0.5 GiB), and pages of cuBLAS, cuDNN and torch."""
EXPERTS_BYTES = int(0.2 * 2**30)  # kernels of grouped products, likewise: 0.20 and 0.22 GiB in two runs of `moe-z2`
WORKER_BYTES = int(0.2 * 2**30)
"""A forked dataloader worker, once counting references has copied its parent's pages: torch and transformers take
0.16 GiB of anonymous memory, and a spawned worker the same."""
LEAST_SWAPPED_BYTES = 2**20  # DeepSpeed's `MIN_AIO_BYTES`: a smaller part stays in memory
SWAP_ALIGNMENT_BYTES = 1024  # DeepSpeed's `AIO_ALIGNED_BYTES`: buffers are multiples of it


def pinned_bytes(size: int, *, pin: bool = True) -> int:
    """One pinned allocation as it really is."""
    return 1 << (size - 1).bit_length() if pin and size > 0 else size


def phases(job: MemoryJob) -> dict[PhaseName, Components]:
    levers, weights = job.levers, job.weights
    process: Components = {"dataloader": levers.dataloader_workers * WORKER_BYTES}
    libraries: Components = {}
    if not job.on_cpu:  # there the process is what stands beside tensors on the "card"
        grouped = EXPERTS_BYTES if any(isinstance(block.mlp, Moe) for block in job.shape.blocks) else 0
        process, libraries = {"process": PROCESS_BYTES, **process}, {"libraries": LIBRARIES_BYTES + grouped}
    training: list[Components] = []
    if levers.engine in ("zero1", "zero2") and levers.offload_optimizer != "none":
        training.append(_zero12(job))
    elif levers.stage == 3:
        training += [_zero3_params(job), _zero3_optimizer(job)]
    if levers.is_fsdp2 and levers.offload_param != "none":
        training.append(_fsdp2(job))
    elif levers.optimizer == "paged_adamw8bit":  # unified memory: it may all be paged out to the host
        paged = 2 * share(weights.trainable_numel, job.world)
        if levers.stage in (None, 0):
            world = 1 if levers.shards_nothing else job.world
            paged = eight_bit_states(levers.optimizer, weights.trainable, world).paged
        training.append({"optimizer_states": paged})
    resting: Components = {}
    if levers.streams:
        resting = stream.on_host(job)
        training.append(resting)
    steady = combine(process, libraries, *training, {"activations": waiting_bytes(job)})
    return {
        "init": combine(process, resting, worst(_initialising(job), _packing(job))),
        "forward": steady,
        "backward": steady,
        "step": combine(steady, _stepping(job)),
    }


def waiting_bytes(job: MemoryJob) -> int:
    """What layers keep that waits there, which alone depends on the depth of checkpointing. Compiled layers have
    buffers of exactly the sizes that they send."""
    if job.levers.streams:
        return stream.waiting_bytes(job)
    return pinned_bytes(job.acts.host_kept + count_waiting_on_host(job), pin=not job.acts.setting.compiled)


def _zero12(job: MemoryJob) -> Components:
    numel = partition(job.weights, job.world).numel
    width, pin = job.weights.trainable_width, job.levers.buckets.pin_memory
    largest = pinned_bytes(job.weights.largest_trainable * width, pin=pin)
    accumulating = 0
    if job.levers.accumulation > 1 and job.levers.master_weights:
        accumulating = _accumulated_bytes(job.weights, job.world, width, pin)
    return {
        "master_weights": pinned_bytes(numel * job.master_width, pin=pin),
        "gradients": pinned_bytes(numel * job.master_width, pin=pin) + accumulating,
        "optimizer_states": 2 * numel * job.master_width,
        "weights": pinned_bytes(numel * width, pin=pin),
        "buckets": largest,
    }


@lru_cache(maxsize=512)
def _accumulated_bytes(weights: Weights, world: int, width: int, pin: bool) -> int:
    """`accumulated_grads_in_cpu`: one buffer for each parameter of the partition."""
    members = partition(weights, world).members
    return sum(pinned_bytes(numel * width, pin=pin) for numel in weights.trainable[:members])


@lru_cache(maxsize=512)
def _parts_of(weights: Weights, world: int, width: int, frozen_width: int, pin: bool) -> tuple[int, int]:
    """Of what trains, and of what is frozen."""
    return _parts(weights.trainable, world, width, pin), _parts(weights.frozen, world, frozen_width, pin)


def _parts(parameters: Iterable[int], world: int, width: int, pin: bool) -> int:
    """One rank's part of each parameter, each an allocation of its own."""
    return sum(pinned_bytes(share(numel, world) * width, pin=pin) for numel in parameters)


def _zero3_params(job: MemoryJob) -> Components:
    levers, width = job.levers, job.weights.trainable_width
    if levers.offload_param == "none":
        return {}
    if levers.offload_param == "nvme":
        return _swap_buffers(job)
    # each part is pinned as it is made; the trainable ones then move into one flat buffer,
    # and their old blocks stay with the allocator
    pin = levers.buckets.pin_memory
    trainable, frozen = _parts_of(job.weights, job.world, width, width, pin)
    # a head is made and cut before it is tied to the embedding, and its block stays too
    head = pinned_bytes(share(job.shape.before[0].numel, job.world) * job.weights.width)
    kept = head if job.shape.tied and pin else 0
    return {"weights": trainable + frozen + kept, "buckets": pinned_bytes(shards_of(job).trainable * width)}


def swap_buffer_numel(shape: ModelShape, levers: Levers, world: int) -> int:
    """Elements of one of the buffers through which weights pass to NVMe: DeepSpeed takes no part that is larger."""
    return _swap_buffer(weights_of.of(shape, levers), levers, world)


def _swap_buffer(weights: Weights, levers: Levers, world: int) -> int:
    if levers.buckets.param_buffer_size is not None:
        return levers.buckets.param_buffer_size
    aligned = SWAP_ALIGNMENT_BYTES // weights.width
    largest = share(max((*weights.trainable, *weights.frozen), default=1), world)
    return -(-largest // aligned) * aligned


def _is_swapped(numel: int, job: MemoryJob) -> bool:
    return share(numel, job.world) * job.weights.width >= LEAST_SWAPPED_BYTES


def _swap_buffers(job: MemoryJob) -> Components:
    """Buffers of one dtype for all, locked; and what is too small for a file. Parameters that are never released lie on
    the GPU. `reserve_partitioned_swap_space`: updated weights go out through one more buffer, which DeepSpeed makes as
    large as the largest sub group is whole, on every rank."""
    levers, weights, buckets = job.levers, job.weights, job.levers.buckets
    reading = buckets.param_buffer_count * _swap_buffer(weights, levers, job.world)
    writing = max(shards_of(job).sub_groups) * job.world
    small = [
        numel
        for numel in (*weights.trainable, *weights.frozen)
        if numel > buckets.persistence_threshold and not _is_swapped(numel, job)
    ]
    return {
        "buckets": (reading + writing) * weights.width,
        "weights": _parts(small, job.world, weights.width, buckets.pin_memory),
    }


def _zero3_optimizer(job: MemoryJob) -> Components:
    levers, own = job.levers, shards_of(job)
    if levers.offload_optimizer == "none":
        return {}
    width, pin = job.weights.trainable_width, levers.buckets.pin_memory
    gradients = pinned_bytes(own.trainable * width, pin=pin)
    if levers.offload_optimizer == "nvme":
        return {"gradients": gradients, "buckets": _optimizer_buffers(job)}
    return {
        "master_weights": own.trainable * job.master_width,
        "optimizer_states": 2 * own.trainable * job.master_width,
        "gradients": gradients + sum(pinned_bytes(group * job.master_width, pin=pin) for group in own.sub_groups),
    }


def _stepping(job: MemoryJob) -> Components:
    """What ZeRO-3 makes and drops again on its way through a step whose optimizer is on the host."""
    levers, own, width = job.levers, shards_of(job), job.weights.trainable_width
    if levers.stage != 3 or levers.offload_optimizer == "none":
        return {}
    # `has_overflow` asks all gradients at once: `isinf` holds their magnitudes and an answer of one byte for each.
    asked = own.trainable * (width + 1) if levers.precision == "fp16" else 0
    # A sub-group's new weights are rounded before they go to the GPU: torch does it on the host where a copy blocks.
    rounds = levers.offload_param == "none" and width != job.master_width
    return {"temporaries": max(asked, max(own.sub_groups) * width if rounds else 0)}


def _optimizer_buffers(job: MemoryJob) -> int:
    return job.levers.buckets.optimizer_buffer_count * max(shards_of(job).sub_groups) * job.master_width


def nvme_bytes(job: MemoryJob) -> int:
    """Swap files of one rank: weights as the model computes; master weights, both moments and gradients in fp32."""
    levers, weights, swapped = job.levers, job.weights, 0
    if levers.streams:
        return sum(stream.file_sizes(job))
    if levers.offload_param == "nvme":
        files = (numel for numel in (*weights.trainable, *weights.frozen) if _is_swapped(numel, job))
        swapped += sum(share(numel, job.world) for numel in files) * weights.width
    if levers.offload_optimizer == "nvme":
        swapped += 4 * shards_of(job).trainable * job.master_width
    return swapped


def _fsdp2(job: MemoryJob) -> Components:
    width = 4 if job.levers.method == "full" and job.levers.master_weights else job.weights.trainable_width
    parts, frozen = _parts_of(job.weights, job.world, width, job.weights.width, True)
    optimizer = job.levers.optimizer
    if optimizer in EIGHT_BIT:
        states = sum(eight_bit_states(optimizer, job.weights.trainable, job.world))
    else:
        states = state_bytes(optimizer, share(job.weights.trainable_numel, job.world), 4, flat=False)
    return {"weights": parts + frozen, "gradients": parts, "optimizer_states": states}


def _packing(job: MemoryJob) -> Components:
    """The largest matrix whole before it is packed to 4 bits: as it was drawn, and in the working precision."""
    return {"weights": job.weights.largest_quantised * (4 + job.weights.width)}


def _initialising(job: MemoryJob) -> Components:
    """Weights that pass through the host while the engine starts."""
    levers, weights = job.levers, job.weights
    if levers.engine in ("zero1", "zero2") and not flattens_on_gpu(job):
        return {"weights": 2 * weights.trainable_numel * weights.trainable_width}
    if levers.stage == 3 and levers.offload_param == "none":
        return {"weights": shards_of(job).trainable * weights.trainable_width}  # `defragment` goes through the host
    if levers.offload_param == "nvme" and levers.offload_optimizer == "nvme":
        # a sub group's fp32 copy is put together in memory on its way from one file to the other
        copy = max(shards_of(job).sub_groups) * job.master_width
        return combine(_swap_buffers(job), {"buckets": _optimizer_buffers(job), "master_weights": copy})
    return {}
