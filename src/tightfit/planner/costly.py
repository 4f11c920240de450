"""When nothing free fits: what a change of the training itself would bring, the cheapest first.

The order is that of `job.Allowance`. Each change has several sizes (half the rank, a quarter …); the smallest
that fits is the one that is named. Whether anything fits at all is asked first of the corner of each
strategy that holds least, which takes a thousandth of a search.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import get_args

from tightfit.inputs.models import load_model
from tightfit.inputs.presets import PRESETS
from tightfit.job import Allowance
from tightfit.memory import estimate
from tightfit.planner.candidates import attention_choices, smallest_buckets, strategies
from tightfit.planner.plan import Remedy
from tightfit.planner.search import FULL, OFFLOADED, Question, excess_bytes, search
from tightfit.types import Hardware, Levers, Lora, ModelShape, UserError

ORDER: tuple[Allowance, ...] = get_args(Allowance)
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
SHORTEST = 128
LEAST_RANK = 1
MOST_GPUS = 1024

Change = tuple[Question, str]
"""The question with the change made, and what it changes in the result."""


def least_excess_bytes(question: Question) -> int:
    """How far the most frugal candidate is from fitting; 0: something fits."""
    return min((excess for excess, _ in _frugal(question)), default=2**62)


def _frugal(question: Question) -> Iterator[tuple[int, Levers]]:
    """For every strategy the candidates that hold least: one sequence at a time, everything recomputed."""
    share = question.effective_batch // question.hardware.world
    for base in strategies(question.base, question.pinned, question.hardware):
        changes: dict[str, object] = {}
        if not {"micro_batch", "accumulation"} & question.pinned:
            changes |= {"micro_batch": 1, "accumulation": share}
        elif "micro_batch" in question.pinned:
            changes |= {"accumulation": max(1, share // base.micro_batch)}
        else:
            changes |= {"micro_batch": max(1, share // base.accumulation)}
        if "loss" not in question.pinned and not question.shape.final_softcap:
            changes["loss"] = "fused"
        if "scan" not in question.pinned:
            changes["scan"] = "tightfit"
        changes["buckets"] = smallest_buckets(base, question.pinned)
        depths = (base.checkpointing,) if "checkpointing" in question.pinned else (FULL, OFFLOADED)
        for kernel in attention_choices(question.shape, base, question.pinned, question.hardware):
            for depth in depths:
                levers = replace(base, **changes, attention=kernel, checkpointing=depth)  # type: ignore[arg-type]
                footprint = estimate(question.shape, levers, question.hardware.world, question.hardware)
                yield excess_bytes(question, footprint), levers


def remedies(question: Question) -> tuple[Remedy, ...]:
    """Every single change that would make the job fit, the cheapest first; or else the first pair that would."""
    found = [remedy for name in ORDER if (remedy := _smallest(question, name)) is not None]
    if found:
        return tuple(found)
    changed = allowed(question, ORDER)
    return (changed[-1],) if changed else ()


def allowed(question: Question, names: Sequence[Allowance]) -> tuple[Remedy, ...]:
    """The cheapest allowed change that fits; or several together, each at its strongest but the last."""
    ordered = [name for name in ORDER if name in names]
    for name in ordered:
        if (remedy := _smallest(question, name)) is not None:
            return (remedy,)
    made: list[tuple[Allowance, str]] = []
    now = question
    for name in ordered:
        if made and (remedy := _smallest(now, name)) is not None:
            return (*(Remedy(allowance=each, cost=cost, way=remedy.way) for each, cost in made), remedy)
        for changed, cost in list(CHANGES[name](now))[-1:]:
            made.append((name, cost))
            now = changed
    return ()


def _smallest(question: Question, name: Allowance) -> Remedy | None:
    """The mildest size of this change with which something fits, with the fastest way that it opens."""
    for changed, cost in CHANGES[name](question):
        if least_excess_bytes(changed) == 0:
            best = search(changed).best
            if best is not None:
                return Remedy(allowance=name, cost=cost, way=best)
    return None


# --- the changes ----------------------------------------------------------------------------------


def _with(question: Question, **changes: object) -> Question:
    return replace(question, base=replace(question.base, **changes))  # type: ignore[arg-type]


def _precision(question: Question) -> Iterator[Change]:
    if question.base.precision == "fp32":
        yield _with(question, precision="bf16"), "computes in bf16 instead of fp32"
    elif question.base.master_weights:
        yield (
            _with(question, master_weights=False),
            f"pure {question.base.precision}: updates below its precision are lost, since no fp32 weights are kept",
        )


def _eight_bit(question: Question) -> Iterator[Change]:
    if question.base.optimizer == "adamw":
        yield _with(question, optimizer="adamw8bit"), "the optimizer's states have 8 bits instead of 32"


def _fewer_targets(question: Question) -> Iterator[Change]:
    lora = question.base.lora
    names = {
        tensor.name.split(".")[-2] for block in question.shape.blocks for tensor in block.tensors if "." in tensor.name
    }
    if lora is not None and lora.targets is None and set(ATTENTION) <= names:
        fewer = replace(lora, targets=ATTENTION)
        yield _with(question, lora=fewer), "adapters on the attention projections only, not on the MLPs"


def _lower_rank(question: Question) -> Iterator[Change]:
    lora = question.base.lora
    rank = lora.rank if lora else 0
    while lora is not None and rank > LEAST_RANK:
        rank //= 2
        yield _with(question, lora=replace(lora, rank=rank)), f"adapters of rank {rank} instead of {lora.rank}"


def _shorter(question: Question) -> Iterator[Change]:
    for sequence in shorter_sequences(question):
        yield (
            _with(question, sequence=sequence),
            f"sequences are cut at {sequence} tokens instead of {question.base.sequence}",
        )


def shorter_sequences(question: Question) -> list[int]:
    """The longest shorter sequence that fits, found by bisection in steps of 128; empty: none does."""
    low, high = 0, (question.base.sequence - 1) // SHORTEST
    while low < high:
        middle = (low + high + 1) // 2
        if least_excess_bytes(_with(question, sequence=middle * SHORTEST)) == 0:
            low = middle
        else:
            high = middle - 1
    return [low * SHORTEST] if low else []


def _quantised(question: Question) -> Iterator[Change]:
    if question.base.method == "lora":
        yield _with(question, method="qlora"), "the frozen weights have 4 bits (NF4) instead of 16"


def _adapters(question: Question) -> Iterator[Change]:
    if question.base.method == "full" and question.base.frozen_layers == 0:
        lora = Lora()
        yield _with(question, method="lora", lora=lora), f"trains adapters of rank {lora.rank} instead of every weight"


def _skipped(question: Question) -> Iterator[Change]:
    for sequence in shorter_sequences(question):
        yield _with(question, sequence=sequence), f"samples longer than {sequence} tokens are left out"


def _smaller(question: Question) -> Iterator[Change]:
    for shape in smaller_models(question.shape):
        changed = replace(question, shape=shape)
        yield changed, f"trains {shape.name} instead of {question.shape.name}"


def smaller_models(shape: ModelShape) -> list[ModelShape]:
    """The presets of the same family that are smaller, the largest first."""
    presets = [load_model(name) for name in PRESETS]
    same = [other for other in presets if other.model_type == shape.model_type and other.parameters < shape.parameters]
    return sorted((other for other in same if not other.name.startswith("tiny")), key=lambda other: -other.parameters)


CHANGES: dict[Allowance, Callable[[Question], Iterator[Change]]] = {
    "precision": _precision,
    "8bit-optimizer": _eight_bit,
    "lora-targets": _fewer_targets,
    "lora-rank": _lower_rank,
    "shorter-seq": _shorter,
    "quantize": _quantised,
    "lora": _adapters,
    "skip-data": _skipped,
    "smaller-model": _smaller,
}


# --- more GPUs ------------------------------------------------------------------------------------


def gpus_needed(question: Question) -> int | None:
    """The smallest number of these GPUs that would do; None: no number would, up to a thousand."""
    low, high = question.hardware.world, question.hardware.world
    while high < MOST_GPUS:
        high *= 2
        if _would_do(question, high):
            break
        low = high
    else:
        return None
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _would_do(question, middle) else (middle, high)
    return high


def _would_do(question: Question, world: int) -> bool:
    """The batch grows with the GPUs where it would not reach every one of them."""
    hardware = _machines(question.hardware, world)
    batch = -(-question.effective_batch // hardware.world) * hardware.world
    try:
        return least_excess_bytes(replace(question, hardware=hardware, effective_batch=batch)) == 0
    except UserError:
        return False


def _machines(hardware: Hardware, world: int) -> Hardware:
    """More of the same: in the same machine up to eight, then in more machines like it."""
    room = max(8, hardware.gpus_per_node)
    if hardware.nodes == 1 and world <= room:
        return replace(hardware, gpus_per_node=world)
    per_node = hardware.gpus_per_node if hardware.nodes > 1 else room
    return replace(hardware, nodes=-(-world // per_node), gpus_per_node=per_node)
