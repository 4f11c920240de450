"""Every GPU has everything, and torch alone computes it: no buckets, no wrapper around the optimizer.

Weights and gradients have the working precision, and what trains has an fp32 copy, with which the optimizer works.
Before a step every gradient is widened, and the narrow ones go. With accumulation that happens after each micro batch,
so that nothing is added up in 16 bits. In fp32, and in pure 16 bits, the optimizer works on the parameters themselves.
Messages that are compressed are made of gradients that lie side by side in fp32, whatever they were.
"""

from __future__ import annotations

from tightfit.memory.backward import peak_with_accumulation
from tightfit.memory.compressed import gradient_messages
from tightfit.memory.job import Components, MemoryJob, building, combine, keeping, logits, passing, worst
from tightfit.memory.operations import FP32
from tightfit.memory.optimizers import EIGHT_BIT, eight_bit_states, state_bytes
from tightfit.types import PhaseName


def passes(job: MemoryJob) -> dict[PhaseName, Components]:
    acts, earlier = job.acts, _earlier(job)
    wide = earlier if _widens(job) else 0
    same = earlier - wide  # what autograd adds new gradients to
    peak = peak_with_accumulation(acts, job.tied_grad, job.embedding_grad, same)
    before = combine(hold_always(job), {"gradients": wide})
    return {
        "forward": combine(before, {"gradients": same}, passing(acts)),
        "loss": combine(at_the_loss(job), keeping(acts)),
        "backward": worst(combine(before, peak.components(acts.shared)), at_the_end(job)),
    }


def at_the_loss(job: MemoryJob) -> Components:
    return combine(at_the_top(job), logits(job))


def at_the_top(job: MemoryJob) -> Components:
    return combine(hold_always(job), {"gradients": _earlier(job)})


def at_the_end(job: MemoryJob) -> Components:
    widened = FP32 * job.weights.trainable_numel if _widens(job) else 0
    return combine(hold_always(job), {"gradients": _narrow(job) + (widened if job.levers.accumulation > 1 else 0)})


def step(job: MemoryJob) -> Components:
    """The narrow gradients go one by one while they are widened, all of whose room was asked for at once."""
    messages = gradient_messages(job.shape, job.levers, job.world)
    widened = FP32 * job.weights.trainable_numel if _widens(job) or messages.sent else 0
    narrow = 0 if _widens(job) and job.levers.accumulation > 1 else _narrow(job)
    beside = {"gradients": narrow} if narrow > messages.working else {"buckets": messages.working}
    return combine(hold_always(job), {"gradients": widened}, beside)


def initialise(job: MemoryJob) -> Components:
    kept = gradient_messages(job.shape, job.levers, job.world).kept
    made = {"weights": job.weights.bytes, "master_weights": _masters(job), "optimizer_states": kept}
    return worst(building(job), made)


def _widens(job: MemoryJob) -> bool:
    return job.weights.trainable_width < FP32 and job.levers.master_weights


def _narrow(job: MemoryJob) -> int:
    return job.weights.trainable_numel * job.weights.trainable_width


def _earlier(job: MemoryJob) -> int:
    """Gradients of earlier micro batches."""
    each = FP32 if _widens(job) else job.weights.trainable_width
    return each * job.weights.trainable_numel if job.levers.accumulation > 1 else 0


def _masters(job: MemoryJob) -> int:
    return FP32 * job.weights.trainable_numel if _widens(job) else 0


def hold_always(job: MemoryJob) -> Components:
    optimizer, kept = job.levers.optimizer, gradient_messages(job.shape, job.levers, job.world).kept
    states = state_bytes(optimizer, job.weights.trainable_numel, job.master_width, flat=True)
    if optimizer in EIGHT_BIT:
        states = eight_bit_states(optimizer, job.weights.trainable, 1).gpu
    return {
        "weights": job.weights.bytes,
        "master_weights": _masters(job),
        "optimizer_states": states + kept,
        "temporaries": job.workspaces,
    }
