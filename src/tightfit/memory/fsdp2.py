"""PyTorch's `fully_shard`, laid out as our worker does it.

Groups: the embedding, each layer, and the final norm with the head; a tied embedding belongs to the root and
stays whole from the first use to the end of the step. Trainable parameters are kept in fp32 shards, gathered
in the working precision and reduced in fp32; frozen ones are kept as they are. A gather writes into one flat
buffer and then copies it out into the parameters (`foreach_all_gather_copy_out`); that buffer lives until the
next group has been gathered, and the backward pass gathers the next layer while this one runs. A reduction
copies the group's gradients into one flat fp32 buffer.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from tightfit.memory.job import Components, Job, combine, kept, passing, quantising, share, worst
from tightfit.memory.operations import FP32
from tightfit.memory.optimizers import state_bytes, step_temporary
from tightfit.memory.weights import effective_lora, is_adapted, is_linear
from tightfit.types import Lora, ModelShape, PhaseName


class Group(NamedTuple):
    """Elements of one `fully_shard` call."""

    trainable: int
    frozen: int
    packed: int = 0

    def whole(self, width: int, trainable_width: int) -> int:
        return self.trainable * trainable_width + self.frozen * width + self.packed // 2


def phases(job: Job) -> dict[PhaseName, Components]:
    embedding, layer, head = _groups(job.shape, effective_lora(job.levers), job.levers.method, job.trains_embedding)
    acts = job.acts
    width = job.weights.width
    base = _persistent(job)
    waiting: Components = {"gradients": _earlier(job)}

    def whole(group: Group) -> int:
        return group.whole(width, _compute_width(job))

    head_whole, layer_whole, embedding_whole = whole(head), whole(layer), whole(embedding)
    return {
        "init": _initialise(job),
        "forward": combine(base, waiting, _forward(job, embedding_whole, layer_whole, head_whole)),
        "loss": combine(base, waiting, kept(acts), _loss(job, embedding_whole, layer_whole, head_whole)),
        "backward": combine(base, _backward(job, embedding, layer, head)),
        "step": combine(base, _step(job)),
    }


def _forward(job: Job, embedding: int, layer: int, head: int) -> Components:
    """The flat buffer of one gather lives until the next group has been gathered and copied out."""
    acts, root = job.acts, embedding if job.shape.tied else 0
    first: Components = {"recompute": acts.forward, "gathered_weights": embedding + root + 2 * layer}
    middle = passing(acts) | {"gathered_weights": root + 3 * layer}
    top = kept(acts) | {"gathered_weights": root + layer + 2 * head}
    return worst(first, middle, top)


def _loss(job: Job, embedding: int, layer: int, head: int) -> Components:
    """The last gather's buffer goes when the forward pass ends; a head of its own is gathered again later."""
    cost, root = job.acts.head, embedding if job.shape.tied else 0
    norm = cost.saved_norm
    before: Components = {
        "activations": norm,
        "logits": cost.forward_logits,
        "gathered_weights": root + (layer if root else head),
    }
    after: Components = {"activations": norm, "logits": cost.backward_logits, "gathered_weights": root}
    return worst(before, after)


def _compute_width(job: Job) -> int:
    return job.weights.width if job.levers.method == "full" else job.weights.trainable_width


@lru_cache(maxsize=256)
def _groups(shape: ModelShape, lora: Lora | None, method: str, embedding: bool) -> tuple[Group, Group, Group]:
    """Embedding, the largest layer, and norm with head. `embedding`: it trains."""
    layers = []
    for block in shape.blocks:
        adapters = packed = plain = 0
        for tensor in block.tensors:
            if method == "qlora" and is_linear(tensor):
                packed += tensor.numel
            else:
                plain += tensor.numel
            if lora is not None and is_adapted(tensor, lora):
                adapters += lora.rank * (tensor.shape[0] + tensor.shape[1])
        layers.append(Group(plain, 0) if method == "full" else Group(adapters, plain, packed))
    before, after = sum(t.numel for t in shape.before), sum(t.numel for t in shape.after)
    below = Group(before, 0) if embedding else Group(0, before)
    above = Group(after, 0) if method == "full" else Group(0, after)
    return below, max(layers, key=lambda group: group.whole(2, 2)), above


def _persistent(job: Job) -> Components:
    weights, levers = job.weights, job.levers
    own = share(weights.trainable_numel, job.world)
    if levers.offload_param != "none":
        return {"temporaries": job.workspaces}
    trainable_width = FP32 if levers.method == "full" and levers.master_weights else weights.trainable_width
    frozen = share(weights.frozen_bytes - weights.scales_bytes, job.world) + weights.scales_bytes
    return {
        "weights": frozen + own * trainable_width,
        "optimizer_states": _states(job, own),
        "temporaries": job.workspaces,
    }


def _states(job: Job, own: int) -> int:
    if job.levers.optimizer == "paged_adamw8bit":
        return 0
    width = FP32 if job.levers.master_weights else job.weights.width
    return state_bytes(job.levers.optimizer, own, width, flat=False)


def _own_grads(job: Job) -> int:
    width = FP32 if job.levers.method == "full" and job.levers.master_weights else job.weights.trainable_width
    return 0 if job.levers.offload_param != "none" else share(job.weights.trainable_numel, job.world) * width


def _earlier(job: Job) -> int:
    """Reduced gradients of earlier micro batches: every one of them is synchronised."""
    return _own_grads(job) if job.levers.accumulation > 1 else 0


def _backward(job: Job, embedding: Group, layer: Group, head: Group) -> Components:
    """The top layer with everything kept, or the embedding at the end with all gradients there."""
    acts, width, tied = job.acts, job.weights.width, job.shape.tied
    compute = _compute_width(job)
    offloaded = job.levers.offload_param != "none"
    root = embedding.whole(width, compute) if tied else 0
    own = layer.whole(width, compute)
    earlier = _earlier(job)
    reducing = 0 if tied else head.trainable * FP32  # the group above is still being reduced
    reduced = 0 if tied else share(head.trainable * FP32, job.world)
    candidates: list[Components] = []
    for moment in acts.moments:
        below = own if moment.layer or tied else embedding.whole(width, compute)
        candidates.append(
            {
                "activations": moment.kept + acts.shared,
                "recompute": moment.working_kept,
                "gradients": job.tied_grad + (earlier or (0 if offloaded else reduced)),
                "buckets": reducing,
                "gathered_weights": root + own + below,
            }
        )
        reduced += share(layer.trainable * FP32, job.world)
        reducing = layer.trainable * FP32
    candidates.append(
        {
            "activations": acts.shared,
            "gradients": _own_grads(job) + embedding.trainable * compute,
            "buckets": embedding.trainable * FP32,
            "gathered_weights": root,
        }
    )
    return worst(*candidates)


def _step(job: Job) -> Components:
    if job.levers.offload_param != "none":
        return {}
    largest = share(job.weights.largest_trainable, job.world)
    return {"gradients": _own_grads(job), "temporaries": step_temporary(job.levers.optimizer, largest)}


def _initialise(job: Job) -> Components:
    if job.weights.quantised_numel:
        return {"weights": job.weights.bytes, "temporaries": quantising(job)}
    return _persistent(job) | {"optimizer_states": 0, "temporaries": 0}
