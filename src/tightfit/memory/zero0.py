"""DeepSpeed without sharding: `FP16_Optimizer` (fused Adam) or `FP16_UnfusedOptimizer` around the optimizer.

Every GPU holds everything. In bf16 and fp16 DeepSpeed flattens the trainable weights into one buffer, clones
it in fp32 and takes one step with zero gradients while initialising; the real step makes an fp32 copy of each
gradient and then one flat buffer of all of them. In fp32 there is no wrapper: the optimizer works on the
parameters themselves, and its states appear with the first step.
"""

from __future__ import annotations

from tightfit.memory.backward import peak_with_accumulation
from tightfit.memory.job import Components, MemoryJob, building, combine, keeping, logits, passing, worst
from tightfit.memory.optimizers import EIGHT_BIT, eight_bit_states, factored_bytes, state_bytes, step_temporary
from tightfit.types import PhaseName

ALLREDUCE_ELEMENTS = 500_000_000
"""`MEMORY_OPT_ALLREDUCE_SIZE`: gradients are flattened for the all-reduce in pieces of this many elements."""


def passes(job: MemoryJob) -> dict[PhaseName, Components]:
    base, acts, earlier = _persistent(job), job.acts, _earlier(job)
    peak = peak_with_accumulation(acts, job.tied_grad, job.embedding_grad, earlier)
    return {
        "forward": combine(base, {"gradients": earlier}, passing(acts)),
        "loss": combine(at_the_loss(job), keeping(acts)),
        "backward": combine(base, worst(peak.components(acts.shared), _ends(job))),
    }


def at_the_loss(job: MemoryJob) -> Components:
    return combine(at_the_top(job), logits(job))


def at_the_top(job: MemoryJob) -> Components:
    return combine(_persistent(job), {"gradients": _earlier(job)})


def at_the_end(job: MemoryJob) -> Components:
    return combine(_persistent(job), _ends(job))


def _ends(job: MemoryJob) -> Components:
    """Our worker's single rank has nothing to reduce, and in 16 bits leaves the buffer out."""
    weights, levers = job.weights, job.levers
    if job.world == 1 and levers.trainer == "tightfit" and levers.precision != "fp32":
        return {"gradients": _grads(job)}
    bucket = min(weights.trainable_numel, ALLREDUCE_ELEMENTS + weights.largest_trainable) * weights.trainable_width
    return {"gradients": _grads(job), "buckets": bucket}


def _grads(job: MemoryJob) -> int:
    return job.weights.trainable_numel * job.weights.trainable_width


def _earlier(job: MemoryJob) -> int:
    """Gradients of earlier micro batches."""
    return _grads(job) if job.levers.accumulation > 1 else 0


def _persistent(job: MemoryJob) -> Components:
    weights, levers = job.weights, job.levers
    masters = 0 if levers.precision == "fp32" or not levers.master_weights else 4 * weights.trainable_numel
    return {
        "weights": weights.bytes,
        "master_weights": masters,
        "optimizer_states": _states(job),
        "temporaries": job.workspaces,
    }


def _states(job: MemoryJob) -> int:
    levers = job.levers
    if levers.optimizer in EIGHT_BIT:
        return eight_bit_states(levers.optimizer, job.weights.trainable, 1).gpu
    if levers.optimizer == "adafactor":
        matrices = {
            "all": job.shape.tensors,
            "embeddings": job.shape.before,
            "layers": job.shape.tensors[len(job.shape.before) :],
        }[levers.trains]
        return factored_bytes(tuple(tensor.shape for tensor in matrices)) if levers.method == "full" else 0
    return state_bytes(levers.optimizer, job.weights.trainable_numel, job.master_width, flat=True)


def step(job: MemoryJob) -> Components:
    levers, weights = job.levers, job.weights
    copies = 0
    if levers.precision != "fp32" and levers.master_weights:
        copies = (8 if levers.optimizer == "adamw" else 4) * weights.trainable_numel
    temporary = copies + step_temporary(levers.optimizer, weights.largest_trainable)
    return combine(_persistent(job), {"gradients": _grads(job), "temporaries": temporary})


def initialise(job: MemoryJob) -> Components:
    weights, levers = job.weights, job.levers
    numel = weights.trainable_numel
    if levers.precision == "fp32" or not levers.master_weights:
        return building(job)
    zero_grads = 4 * numel if levers.optimizer == "adamw" else 6 * numel
    engine: Components = {
        "weights": weights.bytes,
        "master_weights": 4 * numel,
        "optimizer_states": _states(job),
        "temporaries": zero_grads,
    }
    return worst(building(job), engine)
