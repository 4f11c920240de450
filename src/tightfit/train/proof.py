"""Proof at the start: what was planned is what runs.

Guides say which lines to look for in a log. Here each claim is checked against what this process really holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tightfit.messages import Message, Said
from tightfit.train.adapters import adapter_dtype
from tightfit.train.build import DTYPES, rests_in
from tightfit.train.config import WorkerConfig
from tightfit.train.engines import HeldHere
from tightfit.train.place import Place

MEBIBYTE = 2**20
ROOM = 0.25
"""Small parameters are not sharded, and parts are padded; a share may be this much above the ideal and is still one."""


@dataclass(frozen=True, slots=True)
class PlanProof:
    name: str
    ok: bool
    text: Said


def proofs(config: WorkerConfig, place: Place, held: HeldHere) -> Iterator[PlanProof]:
    """What can be seen before the first batch."""
    levers, world = config.levers, place.world
    started = {"world": world, "launcher": place.launcher, "device": place.device.type, "nodes": config.world.nodes}
    yield PlanProof("world", True, Message("train.ranks-started", **started))
    # An untied head or a layer too many would show here; 4-bit weights are counted by their bytes.
    trained, wanted = held.trainable_elements, config.predicted.trainable_parameters
    yield PlanProof("parameters", trained == wanted, Message("train.parameters-train", trained=trained, wanted=wanted))
    # A training in another precision than planned computes all the same, and its losses hardly show it.
    words = {dtype: word for word, dtype in DTYPES.items()}
    frozen = words[rests_in(levers, trains=False)]
    trained_in = words[rests_in(levers, trains=True) if levers.lora is None else adapter_dtype(levers)]
    works = trained_in if levers.is_fsdp2 else "fp32" if levers.master_weights else levers.precision
    text = Message(
        "train.trained-dtypes",
        trained=held.trained_in,
        planned=trained_in,
        optimizer=held.optimizer_in,
        wanted=works,
    )
    if held.frozen_in:
        text = Message("train.frozen-dtypes", frozen=held.frozen_in, planned=frozen, others=text)
    ok = (held.frozen_in or frozen, held.trained_in, held.optimizer_in) == (frozen, trained_in, works)
    yield PlanProof("precision", ok, text)
    if levers.shards_parameters:
        share = held.weight_bytes / max(1, held.whole_weight_bytes)
        small = config.levers.buckets.persistence_threshold * 4 / max(1, held.whole_weight_bytes)
        ok = world == 1 or share <= (1 + ROOM) / world + small
        text = Message(
            "train.weights-sharded",
            held=held.weight_bytes / MEBIBYTE,
            whole=held.whole_weight_bytes / MEBIBYTE,
            share=share,
        )
        yield PlanProof("weights", ok, text)
    if levers.engine != "zero0":
        share = held.state_elements / max(1, held.trainable_elements)
        fair = held.trainable_elements / world if held.fair_elements is None else held.fair_elements
        ok = world == 1 or held.state_elements <= (1 + ROOM) * fair + 1e-3 * held.trainable_elements
        text = Message(
            "train.optimizer-sharded",
            held=held.state_elements,
            whole=held.trainable_elements,
            share=share,
        )
        yield PlanProof("optimizer", ok, text)
    if place.on_gpu:
        if levers.offload_optimizer != "none":
            ok = "cuda" not in held.optimizer_on
            yield PlanProof("offload_optimizer", ok, Message("train.optimizer-place", place=held.optimizer_on))
        if levers.offload_param != "none":
            ok = "cuda" not in held.weights_on
            yield PlanProof("offload_param", ok, Message("train.weights-place", place=held.weights_on))


def recomputation(wanted: int, seen: int) -> PlanProof:
    """After the first backward pass: layers that really ran twice."""
    if wanted == 0:
        text = Message("train.none-recompute") if seen == 0 else Message("train.some-recompute", seen=seen)
        return PlanProof("checkpointing", seen == 0, text)
    return PlanProof("checkpointing", seen == wanted, Message("train.layers-recompute", seen=seen, wanted=wanted))
