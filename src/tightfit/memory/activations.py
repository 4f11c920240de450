"""The layers of a model put together: what a pass keeps, and the worst moments of both passes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from copy import copy
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import NamedTuple

from tightfit.memory import weights as weights_of
from tightfit.memory.attention import mask_bytes
from tightfit.memory.compiled import KeptBytes
from tightfit.memory.layers import has_parts, kept_bytes, layer_cost, layer_input_bytes, recompute_cost
from tightfit.memory.loss import HeadCost, head_cost
from tightfit.memory.operations import LIGER_MODELS, Setting
from tightfit.memory.shared_layers import inside_of
from tightfit.memory.ssm import runs_cuda_scan
from tightfit.memory.tape import SMALLEST_MOVED_BYTES, LayerCost
from tightfit.memory.weights import WIDTH
from tightfit.types import Attention, Checkpointing, Gpu, Levers, ModelShape

CUDNN_FIRST = ("sm_90", "sm_90a", "sm_100", "sm_100a", "sm_103", "sm_103a")
AOTRITON = "gfx(90a|942|950|1100|1101|1201)"
"""The AMD cards for which PyTorch has fused attention kernels: AOTriton's, less those it calls experimental."""


class Moment(NamedTuple):
    """One layer's turn in the backward pass."""

    layer: int
    kept: int  # what all layers up to this one have kept, its own activations left out
    working: int  # its own: kept or recomputed activations, gradients; weight gradients handed over as they come
    working_kept: int  # the same where its weight gradients stay
    cost: LayerCost
    recomputes: bool


class Activations:
    """What layers and head hold at one depth, worked out when it is asked for: of most ways a search wants to know
    little."""

    def __init__(self, depth: Checkpointing, shape: ModelShape, setting: Setting, frozen: int, fused: bool) -> None:
        self.depth, self.shape, self.setting = depth, shape, setting
        self._frozen, self._fused = frozen, fused
        self._recomputing = shape.n_layers if depth.layers is None else depth.layers

    def taking(self, moments: tuple[Moment, ...]) -> Activations:
        """The same with other turns in the backward pass."""
        made = copy(self)
        made.moments = moments
        return made

    @cached_property
    def _layers(self) -> _Layers:
        return _layers(self.shape, self.setting, self.depth, self._frozen)

    @property
    def kept(self) -> int:
        """By all layers after the forward pass."""
        return self._layers.kept

    @property
    def below_top(self) -> int:
        """By all but the last."""
        return self._layers.below_top

    @property
    def stream(self) -> int:
        """What the last layer hands to the final norm."""
        return self._layers.stream

    @cached_property
    def moments(self) -> tuple[Moment, ...]:
        """Top to bottom."""
        return self._layers.moments

    @cached_property
    def host_kept(self) -> int:
        """By all layers on the host."""
        if not self.depth.offload:
            return 0
        if self.setting.compiled:
            return sent_by(self.shape, self.setting, self._frozen, self.depth.select)[self._recomputing]
        return sum(_list_streams(self.shape, self.setting)[_lowest(self.setting, self._frozen) : self._recomputing])

    @property
    def shared(self) -> int:
        """Kept once for the model: rotary tables; and masks, which recomputed layers will be called with again."""
        return count_rotary_bytes(self.shape, self.setting) + self._kept_masks

    @cached_property
    def _kept_masks(self) -> int:
        return self._masks if self._recomputing > _lowest(self.setting, self._frozen) else 0

    @cached_property
    def _masks(self) -> int:
        return count_mask_bytes(self.shape, self.setting)

    @cached_property
    def forward(self) -> int:
        """The most that the last layer holds in its turn; its input, and a mask that is not kept, included."""
        top = _way(self.shape, self.setting, self.depth, self.shape.n_layers - 1)
        held = top.cost.forward_unsaved if top.recomputes else top.cost.forward
        return held + self.stream + self._layers.leaving + self._masks - self._kept_masks

    @property
    def evaluation(self) -> int:
        """The most that a layer holds without keeping anything."""
        costs = [layer_cost(block, self.shape.hidden_size, self.setting) for block in self.shape.blocks]
        return max(cost.forward_unsaved for cost in costs) + self.stream + self._masks

    @cached_property
    def head(self) -> HeadCost:
        trains = self.setting.trains_head(tied=self.shape.tied)
        return head_cost(self.shape, self.setting, self._fused, trains)


def activations(shape: ModelShape, levers: Levers, gpu: Gpu | None = None) -> Activations:
    setting = setting_of(levers, gpu, shape.model_type)
    return activations_at(levers.checkpointing, shape, setting, levers.frozen_layers, levers.loss == "fused")


def setting_of(levers: Levers, gpu: Gpu | None = None, model_type: str = "") -> Setting:
    """`model_type`: Liger has no kernels for those that it does not know."""
    lora = weights_of.effective_lora(levers)
    width = WIDTH[levers.precision]
    vendor, arch = (gpu.vendor, gpu.arch) if gpu else ("unknown", None)
    before_ampere = gpu is not None and gpu.sm is not None and gpu.sm < 80  # flash attention needs sm_80
    without_kernels = vendor == "amd" and not re.match(AOTRITON, arch or "gfx942")
    return Setting(
        micro_batch=levers.micro_batch,
        sequence=levers.sequence,
        parts=levers.sequence_parallel,
        expert_ranks=levers.expert_parallel,
        tensor=levers.tensor_parallel,
        width=width,
        trains_base=levers.trains_base,
        trains_embedding=levers.trains_embedding,
        keeps_inputs=levers.stage == 3 and levers.method != "qlora",
        lora_rank=lora.rank if lora else 0,
        lora_targets=lora.targets if lora else None,
        lora_drops=lora is not None and lora.dropout > 0,
        adapter_width=4 if width == 4 or (lora and lora.dtype == "fp32") else 2,
        quantised=levers.method == "qlora",
        attention=levers.attention,
        packed=levers.packed,
        padded=levers.padded,
        compiled=levers.compile == "layers" and levers.trainer == "tightfit" and levers.stage != 3,
        tiled=levers.mlp == "tiled",
        liger=_runs_liger(levers, model_type) and vendor != "cpu",
        liger_loss=levers.loss == "fused" and levers.trainer != "tightfit",
        loss_kernel=gpu is None or gpu.runs_triton or (vendor != "cpu" and levers.trainer != "tightfit"),
        reentrant=levers.trainer == "llamafactory",  # its use_reentrant_gc is on unless the file says otherwise
        scan=levers.scan,
        cuda_scan=gpu is None or runs_cuda_scan(gpu),
        broadcast_scan=True,  # until transformers 5.18; later releases hold less, and which one runs is not known here
        on_gpu=vendor != "cpu",
        # `check_prefer_cudnn_attention`; a card that is not known may be such a one, which holds the more
        prefers_cudnn=levers.precision != "fp32" and (arch in CUDNN_FIRST if arch else vendor in ("nvidia", "unknown")),
        flash_capable=levers.precision != "fp32" and not before_ampere and not without_kernels,
        fused_capable=not (before_ampere and levers.precision == "bf16") and not without_kernels,
    )


def _runs_liger(levers: Levers, model_type: str) -> bool:
    """Other trainers switch all of Liger on for its loss. Our worker binds the kernels of layers that are neither
    compiled nor recomputed in part (`train/kernels.py`)."""
    if levers.trainer != "tightfit":
        return levers.loss == "fused"
    plain = levers.kernels == "plain" or levers.compile != "off" or levers.checkpointing.select
    return not plain and model_type in LIGER_MODELS


@lru_cache(maxsize=1024)
def activations_at(depth: Checkpointing, shape: ModelShape, setting: Setting, frozen: int, fused: bool) -> Activations:
    return Activations(depth, shape, setting, frozen, fused)


class _Way(NamedTuple):
    """How one layer runs."""

    cost: LayerCost
    recomputes: bool  # it keeps its input, and `saved` of its cost beside that


def _select(shape: ModelShape, setting: Setting, depth: Checkpointing, index: int) -> tuple[str, ...] | None:
    """What of a layer runs again, empty for all; None: nothing. The lowest layers recompute. In compiled layers, as
    soon as any recomputes, elementwise work is made again in all of them."""
    if depth.layers is None or index < depth.layers:
        return depth.select
    is_lighter = setting.compiled and depth.layers and has_parts(shape.blocks[shape.pattern[index]], setting)
    return ("elementwise",) if is_lighter else None


def _way(shape: ModelShape, setting: Setting, depth: Checkpointing, index: int, input_grad: bool = True) -> _Way:
    made = shape.blocks[shape.pattern[index]], shape.hidden_size, setting
    select = _select(shape, setting, depth, index)
    if select is None:
        return _Way(layer_cost(*made, input_grad), False)
    return _Way(recompute_cost(*made, select, input_grad), True)


class Curve(NamedTuple):
    """By how many layers recompute, from none to all: what `Activations` has of each depth, for many depths at once."""

    kept: tuple[int, ...]
    below_top: tuple[int, ...]
    shared: tuple[int, ...]
    top: tuple[int, ...] | None
    """`working` of the top layer, and its input where it keeps that; None: no layer has a backward pass."""
    sent: tuple[int, ...]  # what waits on the host, where so many compiled layers send what they keep


@lru_cache(maxsize=1024)
def curve_of(shape: ModelShape, setting: Setting, frozen: int, select: tuple[str, ...] = ()) -> Curve:
    """`select`: what of the layers that recompute does."""
    lowest, count, streams = _lowest(setting, frozen), shape.n_layers, _list_streams(shape, setting)

    def keep(depth: Checkpointing, indices: range) -> list[int]:
        return [
            0 if index < lowest else kept.saved + (0 if select is None else streams[index])
            for index, select, kept in _list_kept(shape, setting, depth, lowest, indices)
        ]

    nothing, some, everything = (Checkpointing(layers=n, select=select) for n in (0, 1, None))
    # the layers above those that recompute, and these themselves
    above, again = keep(some, range(min(1, count), count)), keep(everything, range(count))
    kept, total = [sum(keep(nothing, range(count)))], sum(above) + sum(again[:1])
    for depth in range(1, count + 1):
        kept.append(total)
        if depth < count:
            total += again[depth] - above[depth - 1]
    # the top layer may be the lowest as well
    ends_of = [
        _way(shape, setting, depth, count - 1, count - 1 != lowest or _trains_below(shape, setting, depth))
        for depth in (nothing, some, everything)
    ]
    if count == 1:
        ends_of[1] = ends_of[2]
    ends = [(way.cost.saved + streams[-1], _recompute(way.cost)[0] + streams[-1]) if way.recomputes else
            (way.cost.saved, way.cost.backward) for way in ends_of]  # fmt: skip
    each = [ends[0], *[ends[1]] * (count - 1), ends[2]]
    tables, masks = count_rotary_bytes(shape, setting), count_mask_bytes(shape, setting)
    return Curve(
        kept=tuple(kept),
        below_top=tuple([whole - (own if lowest < count else 0) for whole, (own, _) in zip(kept, each, strict=True)]),
        shared=tuple([tables + (masks if depth > lowest else 0) for depth in range(count + 1)]),
        top=tuple([working for _, working in each]) if lowest < count else None,
        sent=sent_by(shape, setting, frozen, select),
    )


@lru_cache(maxsize=1024)
def sent_by(shape: ModelShape, setting: Setting, frozen: int, select: tuple[str, ...]) -> tuple[int, ...]:
    """`Curve.sent`. The top layer's stays."""
    if not setting.compiled:
        return (0,) * (shape.n_layers + 1)
    lowest, streams, indices = _lowest(setting, frozen), _list_streams(shape, setting), range(shape.n_layers - 1)
    sent = [
        0 if index < lowest else count_sent_bytes(kept, streams[index])
        for index, _, kept in _list_kept(shape, setting, Checkpointing(layers=None, select=select), lowest, indices)
    ]
    return (0, *accumulate(sent), sum(sent))


def _list_streams(shape: ModelShape, setting: Setting) -> list[int]:
    """What each layer reads."""
    inputs = [layer_input_bytes(block, shape.hidden_size, setting) for block in shape.blocks]
    streams = [inputs[kind] for kind in shape.pattern]
    if shape.before:
        streams[0] = min(streams[0], setting.tokens * shape.hidden_size * setting.width)
    return streams


def _list_kept(
    shape: ModelShape, setting: Setting, depth: Checkpointing, lowest: int, indices: range
) -> Iterator[tuple[int, tuple[str, ...] | None, KeptBytes]]:
    """Each of these layers with what of it runs again and what it keeps. No two of a kind differ but for the lowest
    with a backward pass."""
    known: dict[tuple[int, bool], tuple[tuple[str, ...] | None, KeptBytes]] = {}
    trains_below = _trains_below(shape, setting, depth)
    for index in indices:
        key = kind, input_grad = shape.pattern[index], index != lowest or trains_below
        if key not in known:
            select = _select(shape, setting, depth, index)
            known[key] = select, kept_bytes(shape.blocks[kind], shape.hidden_size, setting, select, input_grad)
        yield index, *known[key]


def _trains_below(shape: ModelShape, setting: Setting, depth: Checkpointing) -> bool:
    """Whether the lowest layer's input has a gradient. Adapters alone need none of the embedding, but checkpointing
    makes its output require one; not so inside compiled code."""
    if not shape.before:
        return shape.receives
    checkpoints = depth.layers != 0 and not setting.compiled
    return setting.trains_embedding or (not setting.trains_base and checkpoints)


def _lowest(setting: Setting, frozen: int) -> int:
    """The lowest layer with a backward pass."""
    return frozen if setting.trains_base else 0


class _Layers(NamedTuple):
    """What does not depend on the loss: see `Activations`."""

    kept: int
    below_top: int
    leaving: int  # for the host, beside the top layer's forward pass
    stream: int
    moments: tuple[Moment, ...]


@lru_cache(maxsize=1024)
def _layers(shape: ModelShape, setting: Setting, depth: Checkpointing, frozen: int) -> _Layers:
    """Compiled layers send all that they keep, but for small tensors: a layer's stands on the GPU while the next one
    runs forwards, and while that runs backwards (`train/to_host.py`). The others send their inputs, one after
    another."""
    inputs = [layer_input_bytes(block, shape.hidden_size, setting) for block in shape.blocks]
    embedded = setting.tokens * shape.hidden_size * setting.width
    trains_below = _trains_below(shape, setting, depth)
    lowest = _lowest(setting, frozen)
    kept = own = stream = before = moving = 0
    moments: list[Moment] = []
    ways: dict[tuple[int, bool, bool], _Way] = {}  # layers of a kind differ in this alone
    recomputing = shape.n_layers if depth.layers is None else depth.layers
    for index, kind in enumerate(shape.pattern):
        # below the first layer is the embedding, in working precision whatever the residual is
        stream = inputs[kind] if index or not shape.before else min(inputs[kind], embedded)
        if index < frozen and setting.trains_base:
            continue  # nothing below needs a gradient, so nothing is kept
        key = kind, index < recomputing, index != lowest or trains_below
        if key not in ways:
            ways[key] = _way(shape, setting, depth, index, key[-1])
        cost, recomputes = ways[key]
        before, moving = moving, 0
        if not recomputes:
            own = cost.saved
            moments.append(Moment(index, kept + before, cost.backward, cost.backward_kept, cost, False))
            kept += own
            continue
        turn = _recompute(cost)
        if depth.offload and not setting.compiled:  # its input comes back for its turn
            own = cost.saved
            moments.append(Moment(index, kept, turn[0] + stream, turn[1] + stream, cost, True))
        else:
            own = stream + cost.saved
            moments.append(Moment(index, kept + stream + before, *turn, cost, True))
            if depth.offload and index < shape.n_layers - 1 and (depth.layers is None or index < depth.layers):
                moving = count_sent_bytes(cost, stream)
                own -= moving
        kept += own
    return _Layers(kept, kept - own, before, stream, tuple(reversed(moments)))


def count_sent_bytes(cost: LayerCost | KeptBytes, stream: int) -> int:
    return cost.saved - cost.small + (stream if stream >= SMALLEST_MOVED_BYTES else 0)


def _recompute(cost: LayerCost) -> tuple[int, int]:
    """A recomputed layer runs forwards once more, as soon as its backward pass asks for something, then backwards: its
    `working` and `working_kept`."""
    again = cost.recompute + max(cost.output, cost.asking)
    return max(again, cost.backward), max(again, cost.backward_kept)


def count_mask_bytes(shape: ModelShape, setting: Setting) -> int:
    """One mask for every kind of attention: with this window, with that, with none."""
    kinds = {block.mixer.sliding_window: block.mixer for block in shape.blocks if isinstance(block.mixer, Attention)}
    return sum([mask_bytes(mixer, setting) for mixer in kinds.values()])


def count_rotary_bytes(shape: ModelShape, setting: Setting) -> int:
    """cos and sin, made once a pass and kept by the first layer that multiplies with them; of whole rows, where ranks
    that share layers see these."""
    widths = [
        block.mixer.rotary_dim or block.mixer.head_dim
        for block in shape.blocks
        if isinstance(block.mixer, Attention) and block.mixer.rotary
    ]
    # Each sequence counts from its own borders; positions of rows that are cut are those of each row.
    rows = setting.micro_batch if setting.packed or setting.own_sequence < setting.sequence else 1
    return 2 * rows * inside_of(setting).own_sequence * max(widths, default=0) * setting.width
