"""One question to the footprint model, with what every engine needs to answer it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from tightfit.memory import weights as weights_of
from tightfit.memory.activations import Activations, activations, activations_at
from tightfit.memory.layers import keeps_input, layer_input_bytes
from tightfit.memory.operations import FP32
from tightfit.memory.pipeline import PipelineGpu, Stage, lay_out
from tightfit.memory.stages import Direction
from tightfit.memory.weights import NF4_BLOCK, Weights
from tightfit.types import Checkpointing, Gpu, Levers, ModelShape

Components = dict[str, int]  # bytes by component

CUBLAS_WORKSPACE = {"hopper": 32 * 2**20, "other": 8 * 2**20 + 128 * 2**10}
"""Of each cuBLAS handle (`getChosenWorkspaceSize`): one for the forward pass, one for autograd's thread."""


class MemoryJob(NamedTuple):
    shape: ModelShape
    levers: Levers
    depth: Checkpointing  # which layers recompute: as the levers say, or as is asked instead
    world: int  # ranks among which states, gradients and weights are shared out
    weights: Weights
    acts: Activations
    workspaces: int
    card_bytes: int | None  # the card's size; None: ample
    on_cpu: bool = False  # the CPU stands in for the card, and its RAM for the card's memory
    built_whole: bool = False
    """A script built the model on the GPU as the library does by default, instead of laying every weight straight into
    its place, as our worker and every loader of checkpoints do."""
    row: PipelineGpu | None = None  # the GPU's place in a pipeline, whose weights these are
    stage: Stage | None = None  # the one of its stages whose turn it is, which the shape is

    @property
    def embedding_grad(self) -> int:
        trains = self.levers.trains_embedding and self.shape.before
        return self.shape.before[0].numel * self.weights.width if trains else 0

    @property
    def tied_grad(self) -> int:
        """A tied head's gradient waits in autograd until the embedding's own arrives."""
        tied = self.shape.tied and self.levers.trains_embedding
        return self.acts.head.head_grad or self.embedding_grad if tied else 0

    @property
    def master_width(self) -> int:
        return 4 if self.levers.master_weights or self.levers.precision == "fp32" else self.weights.width


def make_job(shape: ModelShape, levers: Levers, world: int, gpu: Gpu | None, *, built_whole: bool = False) -> MemoryJob:
    hopper = gpu is None or gpu.arch in (None, "sm_90", "sm_90a", "sm_100", "sm_103", "sm_120")
    on_cpu = gpu is not None and gpu.vendor == "cpu"
    weights = weights_of.of(shape, levers)
    if on_cpu and levers.buckets.reduce_bucket > weights.trainable_numel:
        # RAM that is asked for costs nothing until it is written to, and gradients fill no more of the bucket than this
        levers = replace(levers, buckets=replace(levers.buckets, reduce_bucket=weights.trainable_numel))
    return MemoryJob(
        shape=shape,
        levers=levers,
        depth=levers.checkpointing,
        world=levers.shards(world),
        weights=weights,
        acts=activations(shape, levers, gpu),
        workspaces=0 if on_cpu else 2 * CUBLAS_WORKSPACE["hopper" if hopper else "other"],
        card_bytes=None if gpu is None else gpu.memory_bytes,
        on_cpu=on_cpu,
        built_whole=built_whole,
    )


def make_jobs(
    shape: ModelShape,
    levers: Levers,
    world: int,
    gpu: Gpu | None,
    *,
    built_whole: bool = False,
    row: tuple[PipelineGpu, ...] | None = None,
) -> list[list[MemoryJob]]:
    """Of each GPU that may be the fullest one for each of its stages, or of those of `row`; of a model in one piece
    there is but one."""
    if levers.pipeline_parallel == 1:
        return [[make_job(shape, levers, world, gpu, built_whole=built_whole)]]
    jobs = []
    for one in lay_out(shape, levers) if row is None else row:
        weights, own = weights_of.of(one.shape, one.levers(levers)), list[MemoryJob]()
        for stage in one.stages:
            job = make_job(stage.shape, levers.change(frozen_layers=stage.frozen), world, gpu)
            own.append(job._replace(weights=weights, row=one, stage=stage))
        jobs.append(own)
    return jobs


def count_waiting_bytes(job: MemoryJob, way: Direction) -> int:
    """What a pipeline holds beside the micro batch that passes through a stage: those that wait between their passes,
    and what is on its way between GPUs."""
    if job.stage is None:
        return 0
    total = 0
    for shape, acts, count in _list_waiting(job, way):
        kept = acts.kept + acts.shared + acts.head.saved_norm + acts.head.saved_logits
        total += count * (kept + _count_received_bytes(shape, job.depth, acts))
    own = _count_received_bytes(job.shape, job.depth, job.acts)
    return total + own + job.acts.stream * job.stage.waiting[way == "backward"].travelling


def count_waiting_on_host(job: MemoryJob) -> int:
    return sum(count * acts.host_kept for _, acts, count in _list_waiting(job, "backward"))


def _list_waiting(job: MemoryJob, way: Direction) -> Iterator[tuple[ModelShape, Activations, int]]:
    """The stages of the GPU of which micro batches wait, and how many."""
    if job.row is not None and job.stage is not None:
        setting, fused = job.acts.setting, job.levers.loss == "fused"
        for stage, count in zip(job.row.stages, job.stage.waiting[way == "backward"].begun, strict=True):
            if count:
                yield stage.shape, activations_at(job.depth, stage.shape, setting, stage.frozen, fused), count


def _count_received_bytes(shape: ModelShape, depth: Checkpointing, acts: Activations) -> int:
    """The hidden states that a stage has received wait for their gradient, whether its lowest layer keeps them or
    not: what it does not."""
    block = shape.blocks[shape.pattern[0]]
    if shape.before or depth.layers != 0 or keeps_input(block, shape.hidden_size, acts.setting):
        return 0
    return layer_input_bytes(block, shape.hidden_size, acts.setting)


def at_depth(job: MemoryJob, depth: Checkpointing) -> MemoryJob:
    if depth == job.depth:
        return job
    levers = job.levers
    acts = activations_at(depth, job.shape, job.acts.setting, levers.frozen_layers, levers.loss == "fused")
    return job._replace(depth=depth, acts=acts)


def combine(*parts: Components) -> Components:
    """Sum by component."""
    total: Components = {}
    for part in parts:
        for name, size in part.items():
            if size:
                total[name] = total.get(name, 0) + size
    return total


def share(numel: int, world: int) -> int:
    return -(-numel // world)


def worst(*moments: Components) -> Components:
    """The moment at which the most is held."""
    return max(moments, key=lambda parts: sum(parts.values()))


def keeping(acts: Activations) -> Components:
    """What all layers keep for the backward pass."""
    return {"activations": acts.kept + acts.shared}


def passing(acts: Activations) -> Components:
    """The last layer's turn in the forward pass."""
    return {"activations": acts.below_top + acts.shared, "recompute": acts.forward}


def logits(job: MemoryJob) -> Components:
    """The worst moment of the loss, both passes."""
    head = job.acts.head
    return {"activations": head.saved_norm, "logits": max(head.forward_logits, head.backward_logits)}


def building(job: MemoryJob) -> Components:
    """The weights come one after another, each into its place; a matrix is whole until it is packed, and that happens
    before anything else is there."""
    weights = job.weights
    packing = max(weights.quantised_bytes + packing_of(weights) - weights.bytes, 0)
    built: Components = {"weights": weights.bytes, "temporaries": packing}
    if job.built_whole:
        # a tied head exists until it is tied; adapters come later
        untied = job.shape.vocab_size * job.shape.hidden_size * weights.width if job.shape.tied else 0
        adapters = 0 if job.levers.method == "full" else weights.trainable_numel * weights.trainable_width
        whole = weights.largest_frozen * 2 if weights.quantised_numel else 0
        built = {"weights": weights.bytes, "temporaries": max(untied + whole - adapters, 0)}
    if job.levers.trainer != "llamafactory" or not job.levers.master_weights:
        return built
    # LLaMA-Factory casts what trains to fp32 on the GPU (`cast_trainable_params_to_fp32`), before DeepSpeed casts it
    # back; not for pure_bf16
    one = weights.largest_trainable * weights.trainable_width
    upcast = {"weights": weights.frozen_bytes + FP32 * weights.trainable_numel, "temporaries": one}
    return worst(built, upcast)


def packing_of(weights: Weights) -> int:
    """One matrix in 16 bits on the GPU while it is packed into 4, with the scales of its blocks still in fp32."""
    return weights.largest_quantised * 2 + 4 * (weights.largest_quantised // NF4_BLOCK)
