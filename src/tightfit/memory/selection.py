"""Which part of a layer a module is, by its name: what `select:` chooses among, for the worker and for the tapes.

Hugging Face names modules alike from family to family: something mixes tokens (`self_attn`, `attention`, `mixer`),
something feeds forward (`mlp`, `block_sparse_moe`), and inside either one the last projection has a name of its own.
"""

from __future__ import annotations

import re
from typing import Literal

Place = Literal["qkv", "mixer", "scan", "out", "mlp", "down"]
"""A part by the name that `types.PARTS` has for it, or one of two that cannot be chosen. `scan`: what a state-space
mixer computes between its projections. Our operators go along with `mixer`; any other scan recomputes always, since its
kernels keep what only they can read.
`down`: the last projection, whose output matters only where a norm or a router's weight follows; then it goes along
with `mlp`."""

ATTENTIONS = frozenset({"self_attn", "attn", "attention", "self_attention"})
SCANS = frozenset({"mixer", "mamba"})
FEEDS = frozenset({"mlp", "feed_forward", "ffn", "block_sparse_moe", "moe", "experts", "shared_expert"})
OUTS = frozenset({"o_proj", "out_proj", "dense", "c_proj"})
DOWNS = frozenset({"down_proj", "c_proj", "dense_4h_to_h", "w2"})
ADAPTER = frozenset({"base_layer", "lora_A", "lora_B", "lora_dropout"})
"""Modules that an adapter puts below the one that it adapts, whose part they share."""


def is_below_adapter(module: str) -> bool:
    return not ADAPTER.isdisjoint(module.split("."))


def place_of(module: str) -> Place | None:
    """None: outside of both halves of the layer, where no product is computed."""
    names = re.findall(r"\w+", module)
    end = next((i for i, name in enumerate(names) if name in ADAPTER), len(names))
    names = names[:end]
    if not names:
        return None
    if not FEEDS.isdisjoint(names):
        return "down" if names[-1] in DOWNS else "mlp"
    if ATTENTIONS.isdisjoint(names) and SCANS.isdisjoint(names):
        return None
    if names[-1] in OUTS:
        return "out"
    if names[-1] in SCANS or names[-1] == "conv1d":
        return "scan"
    return "mixer" if names[-1] in ATTENTIONS else "qkv"
