"""Proof at the start: what was planned is what runs.

Guides say which lines to look for in a log. Here each claim is checked against what this process really holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

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
    text: str


def proofs(config: WorkerConfig, place: Place, held: HeldHere) -> Iterator[PlanProof]:
    """What can be seen before the first batch."""
    levers, world = config.levers, place.world
    where = f"{place.device.type}, {config.world.nodes} node{'s' if config.world.nodes > 1 else ''}"
    yield PlanProof("world", True, f"{world} rank{'s' if world > 1 else ''} started by {place.launcher} ({where})")
    # An untied head or a layer too many would show here; 4-bit weights are counted by their bytes.
    trained, wanted = held.trainable_elements, config.predicted.trainable_parameters
    yield PlanProof("parameters", trained == wanted, f"{trained:,} parameters train, as planned ({wanted:,})")
    # A training in another precision than planned computes all the same, and its losses hardly show it.
    words = {dtype: word for word, dtype in DTYPES.items()}
    frozen = words[rests_in(levers, trains=False)]
    trained_in = words[rests_in(levers, trains=True) if levers.lora is None else adapter_dtype(levers)]
    works = trained_in if levers.is_fsdp2 else "fp32" if levers.master_weights else levers.precision
    text = (
        f"trained weights rest in {held.trained_in} (plan: {trained_in}), the optimizer works in {held.optimizer_in} "
        f"(plan: {works})"
    )
    if held.frozen_in:
        text = f"frozen weights rest in {held.frozen_in} (plan: {frozen}), {text}"
    ok = (held.frozen_in or frozen, held.trained_in, held.optimizer_in) == (frozen, trained_in, works)
    yield PlanProof("precision", ok, text)
    if levers.shards_parameters:
        share = held.weight_bytes / max(1, held.whole_weight_bytes)
        small = config.levers.buckets.persistence_threshold * 4 / max(1, held.whole_weight_bytes)
        ok = world == 1 or share <= (1 + ROOM) / world + small
        text = (
            f"weights are sharded: {held.weight_bytes / MEBIBYTE:.1f} of {held.whole_weight_bytes / MEBIBYTE:.1f} MiB "
            f"rest on this rank ({share:.0%})"
        )
        yield PlanProof("weights", ok, text)
    if levers.engine != "zero0":
        share = held.state_elements / max(1, held.trainable_elements)
        fair = held.trainable_elements / world if held.fair_elements is None else held.fair_elements
        ok = world == 1 or held.state_elements <= (1 + ROOM) * fair + 1e-3 * held.trainable_elements
        text = (
            f"optimizer is sharded: {held.state_elements:,} of {held.trainable_elements:,} trained numbers are this "
            f"rank's ({share:.0%})"
        )
        yield PlanProof("optimizer", ok, text)
    if place.on_gpu:
        if levers.offload_optimizer != "none":
            ok = "cuda" not in held.optimizer_on
            yield PlanProof("offload_optimizer", ok, f"the optimizer's numbers are on {held.optimizer_on}")
        if levers.offload_param != "none":
            yield PlanProof("offload_param", "cuda" not in held.weights_on, f"the weights rest on {held.weights_on}")


def recomputation(wanted: int, seen: int) -> PlanProof:
    """After the first backward pass: layers that really ran twice."""
    if wanted == 0:
        return PlanProof("checkpointing", seen == 0, "no layer recomputes" if seen == 0 else f"{seen} layers recompute")
    return PlanProof("checkpointing", seen == wanted, f"{seen} of {wanted} layers recompute in the backward pass")
