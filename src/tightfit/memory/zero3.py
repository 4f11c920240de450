"""DeepSpeed's stage 3 (`stage3.py`): weights, gradients and optimizer in parts; whole only while in use.

Beside the parts themselves a rank holds, from initialisation to the end: one reduce bucket, a flat buffer of
its gradients (in the working precision), and the parameters below the persistence threshold. How much of the
rest is whole at any moment, `gathered.py` replays. The optimizer works on sub-groups of `sub_group_size`
elements, so its temporaries are bounded by that.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from tightfit.memory.backward import bucketed
from tightfit.memory.gathered import EMPTY, Gathered, Layer, Limits, Module, Param, replay, stretches
from tightfit.memory.job import Components, Job, combine, share
from tightfit.memory.optimizers import state_bytes, step_temporary
from tightfit.memory.weights import effective_lora, is_adapted, is_linear
from tightfit.memory.zero0 import logits, quantising
from tightfit.types import Block, Buckets, Lora, ModelShape, PhaseName, Tensor

FP64 = 8


class Shards(NamedTuple):
    """One rank's parts, in elements."""

    trainable: int
    frozen: int
    persistent: int
    """Whole elements of the parameters that are never released."""
    sub_groups: tuple[int, ...]
    largest: int
    """The largest trainable parameter's part."""


@lru_cache(maxsize=1024)
def shards(
    trainable: tuple[int, ...], frozen: tuple[int, ...], world: int, threshold: int, sub_group_size: int
) -> Shards:
    groups: list[int] = []
    current = 0
    for numel in trainable:
        current += share(numel, world)
        if current >= sub_group_size:
            groups.append(current)
            current = 0
    if current or not groups:
        groups.append(current)
    return Shards(
        trainable=sum(groups),
        frozen=sum(share(numel, world) for numel in frozen),
        persistent=sum(numel for numel in (*trainable, *frozen) if numel <= threshold),
        sub_groups=tuple(groups),
        largest=max((share(numel, world) for numel in trainable), default=0),
    )


def shards_of(job: Job) -> Shards:
    buckets = job.levers.buckets
    return shards(
        job.weights.trainable, job.weights.frozen, job.world, buckets.persistence_threshold, buckets.sub_group_size
    )


def phases(job: Job) -> dict[PhaseName, Components]:
    base, acts, weights = _persistent(job), job.acts, job.weights
    whole = gathered_of(job)
    width = weights.width
    kept: Components = {"activations": acts.kept + acts.shared}
    leaving = job.world if job.levers.offload_optimizer != "none" else 0
    peak = bucketed(acts, job.levers.buckets.reduce_bucket, job.tied_grad, job.embedding_grad, whole, leaving)
    backward: Components = {
        "activations": peak.activations + acts.shared,
        "recompute": peak.recompute,
        "gradients": peak.gradients,
        "buckets": peak.buckets,
        "gathered_weights": peak.gathered,
    }
    return {
        "init": _initialise(job),
        "forward": combine(base, kept, {"recompute": acts.forward, "gathered_weights": whole.forward * width}),
        "loss": combine(base, kept, logits(job), {"gathered_weights": whole.loss * width}),
        "backward": combine(base, backward),
        "step": combine(base, _step(job)),
    }


def _persistent(job: Job) -> Components:
    levers, weights, own = job.levers, job.weights, shards_of(job)
    width = weights.trainable_width
    components: Components = {
        "weights": 0 if levers.offload_param != "none" else own.trainable * width + own.frozen * weights.width,
        "gathered_weights": own.persistent * width,
        "buckets": levers.buckets.reduce_bucket * width if levers.buckets.contiguous_gradients else 0,
        "temporaries": job.workspaces,
    }
    if weights.quantised_numel:
        packed = weights.quantised_bytes - weights.scales_bytes
        components["weights"] += weights.scales_bytes
        components["weights"] += 0 if levers.offload_param != "none" else share(packed, job.world)
    if levers.offload_optimizer == "none":
        paged = levers.optimizer == "paged_adamw8bit"
        components["gradients"] = own.trainable * width
        components["master_weights"] = own.trainable * job.master_width
        components["optimizer_states"] = (
            0 if paged else state_bytes(levers.optimizer, own.trainable, job.master_width, flat=True)
        )
    return components


def _step(job: Job) -> Components:
    own, width = shards_of(job), job.weights.trainable_width
    if job.levers.offload_optimizer != "none":
        return {}
    group = max(own.sub_groups)
    update = group * (width + job.master_width) + step_temporary(job.levers.optimizer, group)
    return {"temporaries": max(update, FP64 * own.largest)}


def _initialise(job: Job) -> Components:
    levers, weights, own = job.levers, job.weights, shards_of(job)
    width = weights.trainable_width
    parts = 0 if levers.offload_param != "none" else own.trainable * width + own.frozen * weights.width
    largest = max(weights.largest_trainable if levers.method == "full" else 0, max(weights.frozen, default=0))
    # zero.Init builds each parameter whole and cuts it: the parts so far, and the largest one whole
    building: Components = {"weights": parts, "temporaries": largest * weights.width}
    if weights.quantised_numel:
        # a quantised model is loaded whole on every rank, and only then cut
        building = {"weights": weights.bytes, "temporaries": quantising(job)}
    finished = _persistent(job) | {"temporaries": 0, "optimizer_states": 0, "gathered_weights": 0}
    # every trainable parameter is gathered once more to hang hooks on it
    returned = share(weights.largest_trainable, job.world) * width if levers.offload_param != "none" else 0
    hooks = combine(finished, {"temporaries": weights.largest_trainable * width + returned})
    candidates = [building, hooks]
    if levers.offload_optimizer == "none":
        group = max(own.sub_groups)
        before = sum(own.sub_groups) - group
        masters = {"master_weights": before * job.master_width, "temporaries": 2 * group * job.master_width}
        candidates.append(combine({"weights": finished["weights"]}, masters))
    return max(candidates, key=lambda part: sum(part.values()))


# --- what is whole when -------------------------------------------------------------------------


def gathered_of(job: Job) -> Gathered:
    if job.world == 1 and job.levers.offload_param == "none":
        return Gathered(0, 0, (0,) * job.shape.n_layers, 0)  # the only part is the whole: nothing is copied
    checkpointing = job.levers.checkpointing.layers
    recompute = job.shape.n_layers if checkpointing is None else checkpointing
    return _gathered(job.shape, effective_lora(job.levers), job.levers.method, recompute, job.levers.buckets)


@lru_cache(maxsize=256)
def _gathered(shape: ModelShape, lora: Lora | None, method: str, recompute: int, buckets: Buckets) -> Gathered:
    threshold = buckets.persistence_threshold
    layers: list[Layer] = []
    first = 0
    for kind in shape.pattern:
        layer, first = _layer(shape.blocks[kind], lora, method, threshold, first)
        layers.append(layer)
    embedding = _module(shape.before, threshold, first)
    head_tensors = shape.before[:1] if shape.tied else shape.after[-1:]
    head = _module(head_tensors, threshold, first if shape.tied else first + len(shape.before))
    norm = _module(shape.after[: len(shape.after) - (0 if shape.tied else 1)], threshold, first + 10)
    limits = Limits(buckets.prefetch_bucket, buckets.max_live_parameters, buckets.max_reuse_distance)
    again = tuple(index < recompute for index in range(shape.n_layers))
    return replay(stretches((embedding, norm, head), tuple(layers), again, 2 if lora else 1), limits)


def _module(tensors: tuple[Tensor, ...], threshold: int, first: int) -> Module:
    params = ((first + index, tensor.numel) for index, tensor in enumerate(tensors) if tensor.numel > threshold)
    return Module(tuple(params))


_BEFORE = ("input_layernorm", "ln_1", "norm")
_BETWEEN = ("post_attention_layernorm", "ln_2", "pre_feedforward_layernorm")
_ACTIVATED = ("gate_proj", "fc1", "c_fc", "dense_h_to_4h")


def _layer(block: Block, lora: Lora | None, method: str, threshold: int, first: int) -> tuple[Layer, int]:
    """The calls of one layer, in the order in which they run; containers own nothing but are called as well."""
    identity = first
    own: dict[str, list[Param]] = {}
    adapters: dict[str, tuple[Module, Module]] = {}

    def module(params: list[Param]) -> Module:
        return Module(tuple(param for param in params if param[1] > threshold))

    for tensor in block.tensors:
        name = tensor.name.rpartition(".")[0]
        packed = method == "qlora" and is_linear(tensor)
        own.setdefault(name, []).append((identity, tensor.numel // 2 if packed else tensor.numel))
        identity += 1
        if lora is not None and is_adapted(tensor, lora):
            down, up = lora.rank * tensor.shape[1], tensor.shape[0] * lora.rank
            adapters[name] = (module([(identity, down)]), module([(identity + 1, up)]))
            identity += 2
    forward: list[Module] = [EMPTY]
    backward: list[Module] = []
    names = sorted(own, key=_place)
    for index, name in enumerate(names):
        place = _place(name)
        opens = place in (1, 3) and (index == 0 or _place(names[index - 1]) != place)
        closes = place in (1, 3) and (index + 1 == len(names) or _place(names[index + 1]) != place)
        there, back = _calls(module(own[name]), adapters.get(name))
        active = [EMPTY] if name.endswith(_ACTIVATED) else []
        forward += [*([EMPTY] if opens else []), *there, *active]
        backward = [*([EMPTY] if closes else []), *active, *back, *backward]
    lead = 2 + (2 if names[-1] in adapters else 1)
    frozen = tuple(module(own[name]) for name in names) if method != "full" else ()
    return Layer(tuple(forward), (EMPTY, *backward), lead, frozen), identity


def _calls(base: Module, adapter: tuple[Module, Module] | None) -> tuple[list[Module], list[Module]]:
    """Forwards and backwards: the module alone, or PEFT's layer with base, dropout, lora_A and lora_B."""
    if adapter is None:
        return [base], [base]
    down, up = adapter
    return [EMPTY, base, EMPTY, down, up], [EMPTY, up, down, EMPTY, base]


def _place(name: str) -> int:
    root = name.split(".", maxsplit=1)[0]
    if root in _BEFORE:
        return 0
    if root in _BETWEEN:
        return 2
    return 3 if root.startswith(("mlp", "feed_forward", "block_sparse")) else 1
