"""The layers of a model put together: what a pass keeps, and the worst moments of both passes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from tightfit.memory import weights as weights_of
from tightfit.memory.attention import mask_bytes
from tightfit.memory.layers import layer_cost, layer_input_bytes
from tightfit.memory.loss import HeadCost, head_cost
from tightfit.memory.operations import Setting
from tightfit.memory.tape import LayerCost
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


@dataclass(frozen=True, slots=True, eq=False)
class Activations:
    kept: int  # by all layers after the forward pass
    host_kept: int  # the same on the host, where inputs are offloaded
    shared: int  # kept once for the model: rotary tables; and masks, which recomputed layers will be called with again
    below_top: int  # by all but the last
    forward: int  # the most that the last layer holds in its turn; its input, and a mask that is not kept, included
    evaluation: int  # the most that a layer holds without keeping anything
    stream: int  # what the last layer hands to the final norm
    moments: tuple[Moment, ...]  # top to bottom
    head: HeadCost
    setting: Setting


def activations(shape: ModelShape, levers: Levers, gpu: Gpu | None = None) -> Activations:
    setting = setting_of(levers, gpu)
    return activations_at(levers.checkpointing, shape, setting, levers.frozen_layers, levers.loss == "fused")


def setting_of(levers: Levers, gpu: Gpu | None = None) -> Setting:
    lora = weights_of.effective_lora(levers)
    width = WIDTH[levers.precision]
    vendor, arch = (gpu.vendor, gpu.arch) if gpu else ("unknown", None)
    number = arch[3:].rstrip("a") if arch and arch.startswith("sm_") else ""
    before_ampere = number.isdigit() and int(number) < 80  # flash attention needs sm_80
    without_kernels = vendor == "amd" and not re.match(AOTRITON, arch or "gfx942")
    return Setting(
        micro_batch=levers.micro_batch,
        sequence=levers.sequence,
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
        liger=levers.loss == "fused" and levers.trainer != "tightfit",
        reentrant=levers.trainer == "llamafactory",  # its use_reentrant_gc is on unless the file says otherwise
        scan=levers.scan,
        broadcast_scan=True,  # until transformers 5.18; later releases hold less, and which one runs is not known here
        on_gpu=vendor != "cpu",
        # `check_prefer_cudnn_attention`; a card that is not known may be such a one, which holds the more
        prefers_cudnn=levers.precision != "fp32" and (arch in CUDNN_FIRST if arch else vendor in ("nvidia", "unknown")),
        flash_capable=levers.precision != "fp32" and not before_ampere and not without_kernels,
        fused_capable=not (before_ampere and levers.precision == "bf16") and not without_kernels,
    )


@lru_cache(maxsize=256)
def activations_at(depth: Checkpointing, shape: ModelShape, setting: Setting, frozen: int, fused: bool) -> Activations:
    head = head_cost(shape, setting, fused, setting.trains_head(tied=shape.tied))
    recomputing = shape.n_layers if depth.layers is None else depth.layers
    kept, host_kept, below_top, stream, moments = _layers(shape, setting, recomputing, depth.offload, frozen)
    costs = [layer_cost(block, shape.hidden_size, setting) for block in shape.blocks]
    top = costs[shape.pattern[-1]]
    masks = _masks(shape, setting)
    kept_masks = masks if recomputing > _lowest(setting, frozen) else 0
    forward = top.forward_unsaved if recomputing >= shape.n_layers else top.forward
    return Activations(
        kept=kept,
        host_kept=host_kept,
        shared=_rotary_tables(shape, setting) + kept_masks,
        below_top=below_top,
        forward=forward + stream + masks - kept_masks,
        evaluation=max(cost.forward_unsaved for cost in costs) + stream + masks,
        stream=stream,
        moments=moments,
        head=head,
        setting=setting,
    )


class Curve(NamedTuple):
    """By how many layers recompute, from none to all: what `Activations` has of each depth, for many depths at once."""

    kept: tuple[int, ...]
    below_top: tuple[int, ...]
    shared: tuple[int, ...]
    top: int | None  # `working` of the top layer where it does not recompute; None: no layer has a backward pass


@lru_cache(maxsize=1024)
def curve_of(shape: ModelShape, setting: Setting, frozen: int) -> Curve:
    costs = [layer_cost(block, shape.hidden_size, setting) for block in shape.blocks]
    inputs = [layer_input_bytes(block, shape.hidden_size, setting) for block in shape.blocks]
    embedded = setting.tokens * shape.hidden_size * setting.width
    lowest, count = _lowest(setting, frozen), shape.n_layers
    each = [costs[kind] for kind in shape.pattern]
    if lowest < count and not setting.trains_embedding:  # where it does not recompute, nor does anything below
        each[lowest] = layer_cost(shape.blocks[shape.pattern[lowest]], shape.hidden_size, setting, False)
    streams = [inputs[kind] for kind in shape.pattern]
    streams[0] = min(streams[0], embedded)
    kept = [sum(streams[lowest:])]
    for index in range(count - 1, -1, -1):
        kept.append(kept[-1] + (each[index].saved - streams[index] if index >= lowest else 0))
    kept.reverse()
    top = each[-1] if lowest < count else None
    own = [0 if top is None else top.saved] * count + [streams[-1] if top else 0]
    tables, masks = _rotary_tables(shape, setting), _masks(shape, setting)
    return Curve(
        kept=tuple(kept),
        below_top=tuple([total - last for total, last in zip(kept, own, strict=True)]),
        shared=tuple([tables + (masks if depth > lowest else 0) for depth in range(count + 1)]),
        top=None if top is None else top.backward,
    )


def _lowest(setting: Setting, frozen: int) -> int:
    """The lowest layer with a backward pass."""
    return frozen if setting.trains_base else 0


@lru_cache(maxsize=256)
def _layers(
    shape: ModelShape, setting: Setting, recomputing: int, offload: bool, frozen: int
) -> tuple[int, int, int, int, tuple[Moment, ...]]:
    """What does not depend on the loss: `kept`, `host_kept`, `below_top`, `stream` and `moments` of `Activations`."""
    costs = [layer_cost(block, shape.hidden_size, setting) for block in shape.blocks]
    inputs = [layer_input_bytes(block, shape.hidden_size, setting) for block in shape.blocks]
    turns = [_recompute(cost) for cost in costs]
    embedded = setting.tokens * shape.hidden_size * setting.width
    # adapters alone need no gradient of the embedding, but checkpointing makes its output require one
    trains_below = setting.trains_embedding or (not setting.trains_base and recomputing > 0)
    lowest = _lowest(setting, frozen)
    kept = host_kept = own = stream = 0
    moments: list[Moment] = []
    for index, kind in enumerate(shape.pattern):
        # below the first layer is the embedding, in working precision whatever the residual is
        stream = inputs[kind] if index else min(inputs[kind], embedded)
        if index < frozen and setting.trains_base:
            continue  # nothing below needs a gradient, so nothing is kept
        cost, turn = costs[kind], turns[kind]
        if index == lowest and not trains_below:
            cost = layer_cost(shape.blocks[kind], shape.hidden_size, setting, False)
            turn = _recompute(cost)
        if index >= recomputing:
            own = cost.saved
            moments.append(Moment(index, kept, cost.backward, cost.backward_kept, cost, False))
        elif offload:  # its input comes back for its turn
            host_kept, own = host_kept + stream, 0
            moments.append(Moment(index, kept, turn[0] + stream, turn[1] + stream, cost, True))
        else:
            own = stream
            moments.append(Moment(index, kept + own, *turn, cost, True))
        kept += own
    return kept, host_kept, kept - own, stream, tuple(reversed(moments))


def _recompute(cost: LayerCost) -> tuple[int, int]:
    """A recomputed layer runs forwards once more, then backwards: its `working` and `working_kept`."""
    again = cost.recompute + cost.output
    return max(again, cost.backward), max(again, cost.backward_kept)


def _masks(shape: ModelShape, setting: Setting) -> int:
    """One mask for every kind of attention: with this window, with that, with none."""
    kinds = {block.mixer.sliding_window: block.mixer for block in shape.blocks if isinstance(block.mixer, Attention)}
    return sum([mask_bytes(mixer, setting) for mixer in kinds.values()])


def _rotary_tables(shape: ModelShape, setting: Setting) -> int:
    """cos and sin, made once a pass and kept by the first layer that multiplies with them."""
    widths = [
        block.mixer.rotary_dim or block.mixer.head_dim
        for block in shape.blocks
        if isinstance(block.mixer, Attention) and block.mixer.rotary
    ]
    rows = setting.micro_batch if setting.packed else 1  # each sequence counts from its own borders
    return 2 * rows * setting.sequence * max(widths, default=0) * setting.width
