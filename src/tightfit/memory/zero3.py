"""DeepSpeed's stage 3 (`stage3.py`): weights, gradients and optimizer in parts; whole only while in use.

Beside the parts themselves a rank holds, from initialisation to the end: one reduce bucket, a flat buffer of
its gradients (in the working precision), and the parameters below the persistence threshold. How much of the
rest is whole at any moment, `gathered.py` replays. The optimizer works on sub-groups of `sub_group_size`
elements, so its temporaries are bounded by that.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from tightfit.inputs.versions import release
from tightfit.memory.activations import Activations, Moment
from tightfit.memory.backward import fullest, peak_with_buckets, turns_of
from tightfit.memory.compressed import scattering_bytes, unpacking_bytes
from tightfit.memory.gathered import EMPTY, Gathered, GatherLimits, Model, Module, Node, Passes, Settled, gather, settle
from tightfit.memory.job import Components, MemoryJob, building, combine, keeping, passing, share, worst
from tightfit.memory.operations import FP64
from tightfit.memory.optimizers import flat_states, step_temporary
from tightfit.memory.tape import LayerCost
from tightfit.memory.weights import Weights, effective_lora, is_adapted, is_linear
from tightfit.types import Block, Levers, Lora, Mamba1, Mamba2, ModelShape, Moe, PhaseName, Tensor

BUCKETS_AS_SENT_SINCE = (0, 17, 2)  # `ipg_buckets`, one for each `communication_data_type`


class Shards(NamedTuple):
    """One rank's parts, in elements."""

    trainable: int
    frozen: int
    persistent: int  # whole elements of the parameters that are never released
    sub_groups: tuple[int, ...]
    largest: int  # the largest trainable parameter's part


@lru_cache(maxsize=1024)
def shards(weights: Weights, world: int, threshold: int, sub_group_size: int) -> Shards:
    trainable, frozen = weights.trainable, weights.frozen
    groups = [0]
    for numel in trainable:
        if groups[-1] >= sub_group_size:
            groups.append(0)
        groups[-1] += share(numel, world)
    return Shards(
        trainable=sum(groups),
        frozen=sum(share(numel, world) for numel in frozen),
        persistent=sum(numel for numel in (*trainable, *frozen) if numel <= threshold),
        sub_groups=tuple(groups),
        largest=max((share(numel, world) for numel in trainable), default=0),
    )


def shards_of(job: MemoryJob) -> Shards:
    buckets = job.levers.buckets
    return shards(job.weights, job.world, buckets.persistence_threshold, buckets.sub_group_size)


def passes(job: MemoryJob) -> dict[PhaseName, Components]:
    base = _persistent(job)
    usual = _passes(job, base, gather_for(job))
    if job.levers.precision != "fp16" and job.levers.accumulation == 1:
        return usual
    # The small parameters are not whole where a pass begins, and it fetches them as it fetches the others: a step whose
    # gradients overflow cuts every parameter and ends before `_post_step`, which makes the small ones whole again; and
    # while the order of modules is not known yet, in the first micro batch, `release_sub_module` releases them too, so
    # that the second one has to fetch them.
    after = _passes(job, base | {"gathered_weights": 0}, gather_for(job, all_cut=True))
    return {name: worst(usual[name], after[name]) for name in usual}


def _passes(job: MemoryJob, base: Components, whole: Gathered) -> dict[PhaseName, Components]:
    acts, width = job.acts, job.weights.width
    leaving = job.world if job.levers.offload_optimizer != "none" else 0
    if acts.setting.trains_base and (_leaf_mixers(job.levers) or _leaf_experts(job)):
        acts = hold_by_leaves(acts, job.shape)
    peak = peak_with_buckets(acts, job.levers.buckets.reduce_bucket, job.tied_grad, job.embedding_grad, whole, leaving)
    # In the final norm's backward pass the head is no longer whole. A head's gradient that does not fit into the bucket
    # or that waits for the embedding's is still there.
    head = acts.head
    grad = head.head_grad or head.fused_grad
    waits = grad if job.shape.tied or grad > job.levers.buckets.reduce_bucket * width else 0
    loss = worst(
        _head(acts) | {"gathered_weights": whole.at_loss * width},
        {"activations": head.saved_norm, "gathered_weights": whole.loss * width},
        {"activations": head.norm_forward, "gathered_weights": whole.norm_forward * width},
        {"activations": head.norm_backward, "gradients": waits, "gathered_weights": whole.norm * width},
    )
    passes: dict[PhaseName, Components] = {
        "forward": combine(base, _forward(acts, whole, width)),
        "loss": combine(base, keeping(acts), loss),
        "backward": combine(base, peak.components(acts.shared)),
    }
    if job.levers.compress == "zeropp":
        # A pass holds most while a layer runs. The head is put together before the logits are there.
        unpacking = unpacking_bytes(max(tensor.numel for block in job.shape.blocks for tensor in block.tensors))
        filled = min(job.levers.buckets.reduce_bucket, job.weights.trainable_numel)
        scattering = scattering_bytes(filled) if job.levers.trainer == "tightfit" else 0
        passes["forward"] = combine(passes["forward"], {"buckets": unpacking})
        passes["backward"] = combine(passes["backward"], {"buckets": max(unpacking, scattering)})
    if (ranks := job.levers.shard_within) and job.levers.offload_param == "none":
        # hpZ: the weights once more, among fewer ranks. A step makes the copies void, and a parameter's comes back when
        # it is released: what is still whole in the forward pass has none.
        copies = job.weights.trainable_numel * job.weights.trainable_width + job.weights.frozen_bytes
        for name, parts in passes.items():
            released = copies if name == "backward" else copies - parts.get("gathered_weights", 0)
            passes[name] = combine(parts, {"weights": share(max(released, 0), ranks)})
    return passes


def _forward(acts: Activations, whole: Gathered, width: int) -> Components:
    """Module by module, of every layer: the higher ones have more kept beneath them."""
    best = passing(acts) | {"gathered_weights": whole.forward * width}
    if not acts.moments or not whole.forwards:
        return best
    known: dict[object, tuple[int, int]] = {}
    best, highest = {}, -1
    top = acts.moments[0]
    beside = acts.forward - (top.cost.forward_unsaved if top.recomputes else top.cost.forward)
    for moment in acts.moments:
        called, cost = whole.forwards[moment.layer], moment.cost
        key = id(cost), moment.recomputes, id(called)
        if key not in known:
            turns = cost.turns[1 if moment.recomputes else 0]
            known[key] = fullest(turns, turns_of(cost.modules, called, "forward"), width)
        working, gathered = known[key]
        below = moment.kept - (acts.stream if moment.recomputes and not acts.host_kept else 0)
        if below + working + gathered > highest:
            highest = below + working + gathered
            best = {"activations": below + acts.shared, "recompute": beside + working, "gathered_weights": gathered}
    return best


def _head(acts: Activations) -> Components:
    head = acts.head
    return {"activations": head.saved_norm, "logits": max(head.forward_logits, head.backward_head)}


def at_the_loss(job: MemoryJob) -> Components:
    """Without the parameters that are released again: how many of them are whole depends on the depth."""
    return combine(_persistent(job), _head(job.acts))


def at_the_top(job: MemoryJob) -> Components:
    """Likewise."""
    return _persistent(job)


at_the_end = at_the_top


def _persistent(job: MemoryJob) -> Components:
    levers, weights, own = job.levers, job.weights, shards_of(job)
    width = weights.trainable_width
    # in the precision that is sent, which is the working one; before, in that of what trains
    sent = weights.width if release(levers.deepspeed_version) >= BUCKETS_AS_SENT_SINCE else width
    packed = share(weights.quantised_bytes - weights.scales_bytes, job.world)
    parts = own.trainable * width + own.frozen * weights.width + packed
    components: Components = {
        "weights": weights.scales_bytes + (0 if levers.offload_param != "none" else parts),
        "gathered_weights": own.persistent * width,
        "buckets": levers.buckets.reduce_bucket * sent if levers.buckets.contiguous_gradients else 0,
        "temporaries": job.workspaces,
    }
    if levers.offload_optimizer == "none":
        components["gradients"] = own.trainable * width
        components["master_weights"] = own.trainable * job.master_width
        components["optimizer_states"] = flat_states(levers.optimizer, own.trainable, job.master_width)
    return components


def step(job: MemoryJob) -> Components:
    if job.levers.offload_optimizer != "none":
        return combine(_persistent(job))
    own, width = shards_of(job), job.weights.trainable_width
    group = max(own.sub_groups)
    update = group * (width + job.master_width) + step_temporary(job.levers.optimizer, group)
    return combine(_persistent(job), {"temporaries": max(update, FP64 * own.largest)})


def initialise(job: MemoryJob) -> Components:
    levers, weights, own, width = job.levers, job.weights, shards_of(job), job.weights.trainable_width
    full, offloaded = levers.method == "full", levers.offload_param != "none"
    parts = 0 if offloaded else (own.trainable if full else 0) * width + own.frozen * weights.width
    largest = max(weights.largest_trainable if full else 0, max(weights.frozen, default=0))
    # zero.Init builds each parameter whole and cuts it: the parts so far, and the largest one whole. Adapters come
    # later. A tied head is built and cut like any other, last of all, and only then tied.
    head = job.shape.vocab_size * job.shape.hidden_size if job.shape.tied else 0
    untied = 0 if offloaded else share(head, job.world)
    cutting: Components = {"weights": parts, "temporaries": (max(largest, head) + untied) * weights.width}
    if weights.quantised_numel:  # a quantised model is loaded whole on every rank, and only then cut
        cutting = building(job)
    finished = _persistent(job) | {"temporaries": 0, "optimizer_states": 0, "gathered_weights": 0}
    # every trainable parameter is gathered once more to hang hooks on it
    returned = share(weights.largest_trainable, job.world) * width if offloaded else 0
    hooks = combine(finished, {"temporaries": weights.largest_trainable * width + returned})
    candidates = [cutting, hooks]
    if levers.offload_optimizer == "none":
        group = max(own.sub_groups)
        before = sum(own.sub_groups) - group
        masters = {"master_weights": before * job.master_width, "temporaries": 2 * group * job.master_width}
        candidates.append(combine({"weights": finished["weights"]}, masters))
    return worst(*candidates)


def _leaf_mixers(levers: Levers) -> bool:
    """Whether our worker makes a leaf of each Mamba mixer, if there are any: no adapters, no packed matrices inside."""
    return levers.scan == "tightfit" and levers.method == "full"


LEAF_EXPERTS = ("mixtral", "qwen2_moe", "qwen3_moe")
"""`DEFAULT_LEAF_MODULE_CLASSES`: what has a router and experts is a leaf, unless a file says otherwise."""
LEAF_EXPERTS_SINCE = (0, 18, 0)


def _leaf_experts(job: MemoryJob) -> bool:
    """Adapters on experts are priced as if nothing were a leaf."""
    recent = release(job.levers.deepspeed_version) >= LEAF_EXPERTS_SINCE
    return recent and job.shape.model_type in LEAF_EXPERTS and job.levers.method == "full"


@lru_cache(maxsize=128)
def hold_by_leaves(acts: Activations, shape: ModelShape) -> Activations:
    """`reduce_leaf_module_grads`: a mixer's gradients wait for that of its input, then they leave one after another."""
    alike: dict[tuple[int, int, bool], tuple[int, LayerCost]] = {}
    moments = []
    for moment in acts.moments:
        kind = shape.pattern[moment.layer]
        key = kind, id(moment.cost), moment.recomputes
        if key not in alike:
            alike[key] = _hold_by_leaf(moment, acts, shape.blocks[kind], shape.hidden_size)
        more, cost = alike[key]
        moments.append(moment._replace(working=moment.working + more, cost=cost))
    return acts.taking(tuple(moments))


def _hold_by_leaf(moment: Moment, acts: Activations, block: Block, hidden_size: int) -> tuple[int, LayerCost]:
    """What a layer holds more at its fullest, and its costs with its gradients in the order in which they leave."""
    cost, setting = moment.cost, acts.setting
    if not isinstance(block.mixer, Mamba1):
        return 0, _hold_by_experts(cost, block, setting.width) if isinstance(block.mlp, Moe) else cost
    (inner, _), (projection, left), *others = cost.arrivals
    # in the projection's backward pass its input and its output's gradient are still there
    turn = setting.tokens * (2 * block.mixer.inner + hidden_size) * setting.width
    most = inner + projection + left + turn
    usual = max(cost.recompute + cost.output, cost.backward) if moment.recomputes else cost.backward
    waiting, arrivals = inner + projection, []
    for tensor in sorted(block.tensors, key=lambda each: len(each.shape) < 2):  # those without weight decay come last
        if _place(tensor.name) == 1:
            waiting -= tensor.numel * setting.width
            arrivals.append((tensor.numel * setting.width, left + waiting))
    return max(most - usual, 0), replace(cost, arrivals=(*arrivals, *others), arrives_in=())


def _hold_by_experts(cost: LayerCost, block: Block, width: int) -> LayerCost:
    """Likewise: the gradients of router and experts wait for that of what they all read, each in its own memory."""
    norms = {tensor.numel * width for tensor in block.tensors if not tensor.name.startswith("mlp.")}
    every = list(zip(cost.arrivals, cost.arrives_in, strict=True))
    inside = {pair: whose for pair, whose in every if cost.modules[whose].startswith("mlp.") and pair[0] not in norms}
    waits = [pair for pair, _ in every if pair in inside]
    if not inside:
        return cost
    (_, left), last = waits[-1], inside[waits[-1]]
    waiting = total = sum([grad for grad, _ in waits])
    arrivals = []
    for tensor in block.tensors:
        if tensor.name.startswith("mlp."):
            waiting -= tensor.numel * width
            arrivals.append(((tensor.numel * width, left + waiting), last))
    arrivals += [(pair, whose) for pair, whose in every if pair not in inside]
    largest = max([grad for grad, _ in waits])
    turns = []
    for name, (at_call, most, after) in zip(cost.modules, cost.turns[2], strict=True):
        more = total if name == "mlp.gate" else total - largest if name.startswith("mlp.") else 0
        turns.append((at_call + (more if name == "mlp.gate" else 0), most + more, after))
    return replace(
        cost,
        arrivals=tuple([pair for pair, _ in arrivals]),
        arrives_in=tuple([whose for _, whose in arrivals]),
        turns=(*cost.turns[:2], tuple(turns)),
    )


def gather_for(job: MemoryJob, *, all_cut: bool = False) -> Gathered:
    """`all_cut`: when the step begins nothing is whole, not even what usually stays so."""
    if job.world == 1 and job.levers.offload_param == "none":
        return Gathered.of_nothing(job.shape.n_layers)  # the only part is the whole: nothing is copied
    from_host = job.world if job.world > 1 and job.levers.offload_param != "none" else 0
    return gather(*_replay_inputs(job, all_cut=all_cut), from_host)


def _replay_inputs(job: MemoryJob, *, all_cut: bool = False) -> tuple[Model, Passes, GatherLimits]:
    """What a replay depends on."""
    levers, n_layers = job.levers, job.shape.n_layers
    checkpointing = job.depth.layers
    trains = levers.method == "full"
    passes = Passes(
        recompute=n_layers if checkpointing is None else checkpointing,
        lowest=levers.frozen_layers if trains else 0,
        # adapters alone need no gradient of the embedding, but checkpointing makes its output require one
        input_grad=levers.trains_embedding if trains else checkpointing != 0,
        wrappers=0 if trains else 1,
    )
    style = Style(
        lora=effective_lora(levers),
        method=levers.method,
        frozen=not job.acts.setting.trains_base,
        scan_kernel=levers.scan == "official",
        leaf_mixer=_leaf_mixers(levers),
        leaf_mlp=_leaf_experts(job) or levers.mlp == "tiled",
    )
    buckets = levers.buckets
    limits = GatherLimits(
        buckets.prefetch_bucket,
        buckets.max_live_parameters,
        buckets.max_reuse_distance,
        flat=job.world > 1,
        stays=buckets.persistence_threshold if all_cut else 0,
    )
    return _model(job.shape, style, 0 if all_cut else buckets.persistence_threshold), passes, limits


def settle_for(job: MemoryJob) -> Settled:
    if job.world == 1 and job.levers.offload_param == "none":
        return Settled(0, 0, job.shape.n_layers)
    model, passes, limits = _replay_inputs(job)
    return settle(model, replace(passes, recompute=0, input_grad=True), limits)


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """What decides which modules a layer calls."""

    lora: Lora | None
    method: str
    frozen: bool  # the layers' own weights do not train
    scan_kernel: bool
    """A Mamba mixer hands its weights to one kernel: they are the mixer's, not those of modules inside it."""
    leaf_mixer: bool  # a Mamba mixer is a leaf: it is gathered whole
    leaf_mlp: bool  # likewise a router with its experts, or an MLP that runs in tiles


@lru_cache(maxsize=64)
def _model(shape: ModelShape, style: Style, threshold: int) -> Model:
    layers: list[Node] = []
    first = 0
    for kind in shape.pattern:
        layer, first = _layer(shape.blocks[kind], style, threshold, first)
        layers.append(layer)
    embeddings = tuple(_module((tensor,), threshold, first + i) for i, tensor in enumerate(shape.before))
    norm = _module(shape.after[:-1] if not shape.tied else shape.after, threshold, first + len(shape.before))
    top = shape.before[:1] if shape.tied else shape.after[-1:]
    head = _module(top, threshold, first if shape.tied else first + len(shape.before) + len(shape.after))
    scans = shape.scans
    root, body = Module(head.params) if scans else EMPTY, EMPTY
    containers = [layer[0] for layer in layers if isinstance(layer, tuple)]
    if leaves := tuple([leaf for each in containers if isinstance(each, Module) for leaf in each.leaves]):
        root = replace(root, spans=_span(root, shape.tensors), leaves=leaves)
        body = Module(spans=_span(body, shape.tensors) - (0 if shape.tied else top[0].numel), leaves=leaves)
    return Model(
        root=root,
        embeddings=embeddings,
        layers=tuple(layers),
        norm=norm,
        head=head,
        between=() if scans else (EMPTY,),
        body=body,
    )


def _span(container: Module, tensors: Iterable[Tensor]) -> int:
    """All that is inside it, and once more what it reads itself."""
    return sum([tensor.numel for tensor in tensors]) + sum([numel for _, numel in container.params])


def _module(tensors: tuple[Tensor, ...], threshold: int, first: int) -> Module:
    params = ((first + index, tensor.numel) for index, tensor in enumerate(tensors) if tensor.numel > threshold)
    return Module(tuple(params))


_FIRST = ("input_layernorm", "ln_1", "norm")
_BETWEEN = ("post_attention_layernorm", "ln_2", "pre_feedforward_layernorm")
_READS_INPUT = ("q_proj", "k_proj", "v_proj", "qkv_proj", "c_attn", "query_key_value", "in_proj", *_FIRST)


def _place(name: str) -> int:
    """Norm, mixer, norm, feed-forward, norm."""
    root = name.partition(".")[0]
    if root in _FIRST:
        return 0
    if root in _BETWEEN:
        return 2
    if root.startswith("post_feedforward"):
        return 4
    return 3 if root.startswith(("mlp", "feed_forward", "block_sparse")) else 1


def _layer(block: Block, style: Style, threshold: int, first: int) -> tuple[Node, int]:
    """The calls of one layer, in the order in which they run; containers own nothing but are called as well."""
    identity = first
    places: list[list[Node]] = [[], [], [], [], []]
    named: dict[str, list[Tensor]] = {}
    for tensor in block.tensors:
        named.setdefault(tensor.name.rpartition(".")[0], []).append(tensor)
    # a router is registered after the experts and called before them
    for name, tensors in sorted(named.items(), key=lambda item: not item[0].endswith(("mlp.gate", "router"))):
        node, identity = _call(name, tensors, style, threshold, identity)
        places[_place(name)].append(node)
    before, mixer, between, feedforward, after = places
    if feedforward:
        feedforward = [(EMPTY, feedforward[0], EMPTY, *feedforward[1:])]  # the activation is a module too
    inside: Node = (EMPTY, *mixer)
    container = EMPTY
    if style.leaf_mlp:
        leaf = _leaf_of({name: tensors for name, tensors in named.items() if _place(name) == 3}, places[3], style)
        feedforward = [leaf]
        inside = (Module(spans=sum([t.numel for t in block.tensors if _place(t.name) == 1])), *mixer)
        container = Module(spans=sum([tensor.numel for tensor in block.tensors]), leaves=(leaf,))
    if isinstance(block.mixer, Mamba1 | Mamba2):  # the layer itself reads its norm's weight, for the dtype
        own = [param for node in before if isinstance(node, Module) for param in node.params]
        container = Module(tuple(own), style.frozen)
    if isinstance(block.mixer, Mamba1) and style.scan_kernel and style.method == "full":
        inside = _kernel_mixer(list(named), mixer, style.frozen)
    elif isinstance(block.mixer, Mamba1) and style.leaf_mixer:
        inside = leaf = _leaf_mixer(named, mixer, style.frozen)
        container = replace(container, spans=_span(container, block.tensors), leaves=(leaf,))
    return (container, *before, inside, *between, *feedforward, *after), identity


def _kernel_mixer(names: list[str], modules: list[Node], frozen: bool) -> Node:
    """in_proj is called; everything else belongs to the mixer itself, which works when in_proj has run. `zero.Init`
    numbers parameters as it closes modules: the mixer's direct ones come last."""
    mixing = dict(zip([name for name in names if _place(name) == 1], modules, strict=True))
    called = [node for name, node in mixing.items() if name.endswith("in_proj")]
    inner = [node for name, node in mixing.items() if "." in name and node not in called]
    direct = [node for name, node in mixing.items() if "." not in name]
    own = [param for node in (*inner, *direct) if isinstance(node, Module) for param in node.params]
    return (Module(tuple(own), frozen), *called)


def _leaf_mixer(named: dict[str, list[Tensor]], modules: list[Node], frozen: bool) -> Module:
    """All of it is one module's; persistent parameters count where a next use is searched."""
    mixing = {name: tensors for name, tensors in named.items() if _place(name) == 1}
    nodes = dict(zip(mixing, modules, strict=True))
    numel = {name: sum([tensor.numel for tensor in tensors]) for name, tensors in mixing.items()}
    ordered = sorted(mixing, key=lambda name: "." not in name)  # numbered as in `_kernel_mixer`
    params = [param for name in ordered if isinstance(node := nodes[name], Module) for param in node.params]
    own = sum([numel[name] for name in mixing if "." not in name])
    return Module(tuple(params), frozen, reads_input=True, own=own, spans=sum(numel.values()), leaf=True)


def _leaf_of(inside: dict[str, list[Tensor]], modules: list[Node], style: Style) -> Module:
    """An MLP with its adapters, or router and experts: one module's, of which nothing is its own; experts are
    registered before the router."""
    owned = [each for node in modules for each in (node if isinstance(node, tuple) else (node,))]
    owned.sort(key=lambda node: isinstance(node, Module) and node.name.endswith(("mlp.gate", "router")))
    params = tuple(dict.fromkeys([param for node in owned if isinstance(node, Module) for param in node.params]))
    numel = sum([tensor.numel for tensors in inside.values() for tensor in tensors])
    return Module(params, style.frozen, own=0, spans=numel, leaf=True, name="mlp")


def _call(name: str, tensors: list[Tensor], style: Style, threshold: int, first: int) -> tuple[Node, int]:
    """A module, or PEFT's wrapper with base, dropout, A and B; the wrapper reads A's weight itself."""
    lora, packs = style.lora, style.method == "qlora"
    sizes = [tensor.numel // 2 if packs and is_linear(tensor) else tensor.numel for tensor in tensors]
    owned = tuple([(first + index, numel) for index, numel in enumerate(sizes) if numel > threshold])
    first += len(tensors)
    named = "" if _place(name) in (0, 2, 4) or name.startswith("mixer") else name
    base = Module(owned, frozen=style.frozen, reads_input=name.rpartition(".")[2] in _READS_INPUT, name=named)
    adapted = next((t for t in tensors if lora is not None and is_adapted(t, lora)), None)
    if adapted is None or lora is None:
        return base, first
    pair = (lora.rank * adapted.shape[1], adapted.shape[0] * lora.rank)
    down, up = (((first + i, size),) if size > threshold else () for i, size in enumerate(pair))
    wrapper, lower, upper = (f"{named}/{part}" if named else "" for part in ("", "A", "B"))
    return (Module(down, name=wrapper), base, EMPTY, Module(down, name=lower), Module(up, name=upper)), first + 2
