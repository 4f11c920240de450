"""When nothing free fits: what a change of the training itself would bring, first what does least to the result.

The order is that of `job.Allowance`, and `EFFECTS` says why. Each change has several sizes (half the rank,
a quarter …); the smallest that fits is the one that is named. Whether anything fits at all is asked first, of the
candidates that can hold least: that takes a fraction of a search.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import combinations
from typing import get_args

from tightfit.inputs.layouts import find_compression_obstacle
from tightfit.job import Allowance
from tightfit.memory.optimizers import EIGHT_BIT
from tightfit.messages import Message
from tightfit.model.load import load_model
from tightfit.model.presets import PRESETS
from tightfit.planner.plan import Plan, Remedy, Way
from tightfit.planner.question import Question
from tightfit.planner.search import fits_at_all, search, something_fits
from tightfit.types import COMPRESSING, Compress, Hardware, Levers, ModelShape, States

ORDER: tuple[Allowance, ...] = get_args(Allowance)
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
SHORTEST = 128
LEAST_RANK = 1
MOST_GPUS = 1024
FULL_NODE = 8  # GPUs that one machine takes
MILDEST_FIRST: tuple[Compress, ...] = ("zeropp", "onebit", "powersgd")
SMALLER_STATES: tuple[States, ...] = ("bf16", "8bit")
DOMINATES, WORTH = 0.5, 0.8
"""Communication's share of a step from which on it is worth a thought, and how long a compressed step may be."""

_SAID = [
    *("plan.effect-precision", "plan.effect-8bit", "plan.effect-states", "plan.effect-compress"),
    *("plan.effect-rank", "plan.effect-quantize", "plan.effect-targets"),
    *("plan.effect-shorter", "plan.effect-lora", "plan.effect-skip", "plan.effect-pure", "plan.effect-model"),
]
EFFECTS: dict[Allowance, Message] = dict(zip(ORDER, map(Message, _SAID), strict=True))
"""What each does to the result. States of 8 bits: block-wise quantisation (Dettmers et al., 2022); 4-bit weights and
adapters everywhere against attention alone: QLoRA (Dettmers et al., 2023). Pure bf16: between 0.0156 and 0.0312, where
most weights are, two neighbours lie 2^-13 apart, and an AdamW step of 1e-5 is less than half of that."""

Change = tuple[Question, Message]  # the question with the change made, and what it changes in the result


def remedies(question: Question) -> tuple[Remedy, ...]:
    """Every single change that would make the job fit, the mildest first; or else the first pair that would."""
    found = [remedy for name in ORDER if (remedy := _smallest(question, name)) is not None]
    if found:
        return tuple(found)
    for group in _groups(ORDER, 2):
        if made := _together(question, group):
            first, *others = made
            cost = first.cost
            for other in others:
                cost = Message("plan.together-with", cost=cost, allowance=other.allowance, other=other.cost)
            worst = max(made, key=lambda remedy: ORDER.index(remedy.allowance))
            return (replace(first, cost=cost, effect=worst.effect),)
    return ()


def mildest_changes(question: Question, names: Sequence[Allowance]) -> tuple[Remedy, ...]:
    """The mildest allowed change that fits; or as few together as it takes, each at its strongest but the last. Another
    model is the last resort: whatever keeps the user's comes first, alone or together."""
    same_model = [name for name in ORDER if name in names and name != "smaller-model"]
    for group in (group for size in range(1, len(same_model) + 1) for group in _groups(same_model, size)):
        if made := _together(question, group):
            return made
    for group in (group for size in range(1, len(set(names)) + 1) for group in _groups(names, size)):
        if "smaller-model" in group and (made := _together(question, group)):
            return made
    return ()


def _groups(names: Sequence[Allowance], size: int) -> list[tuple[Allowance, ...]]:
    """So many of the changes; those first whose worst is mildest, each in the order in which they are made. Adapters
    come first: rank, targets and 4-bit weights mean nothing without them."""
    groups = combinations([name for name in ORDER if name in names], size)
    mildest = sorted(groups, key=lambda group: [ORDER.index(name) for name in reversed(group)])
    return [tuple(sorted(group, key=lambda name: name != "lora")) for group in mildest]


def _together(question: Question, group: tuple[Allowance, ...]) -> tuple[Remedy, ...]:
    *others, last = group
    made: list[tuple[Allowance, Message]] = []
    now = question
    for name in others:
        strongest = list(changes(now, name))[-1:]
        if not strongest:
            return ()
        now, cost = strongest[0]
        made.append((name, cost))
    remedy = _smallest(now, last)
    if remedy is None:
        return ()
    return (*[_say_with(name, cost, remedy.way) for name, cost in made], remedy)


def _smallest(question: Question, name: Allowance) -> Remedy | None:
    """The mildest size of this change with which something fits, with the fastest way that it opens."""
    for changed, cost in changes(question, name):
        if something_fits(changed):
            best = search(changed, nearest=False).best
            if best is not None:
                return _say_with(name, cost, best)
    return None


def _say_with(name: Allowance, cost: Message, way: Way) -> Remedy:
    """What a change does, which may depend on the way that it opens."""
    effect = EFFECTS[name]
    if name == "pure-16bit" and _rounds_at_random(way.levers):
        cost, effect = _say_pure(way.levers), Message("plan.effect-pure-streamed")
    return Remedy(allowance=name, cost=cost, effect=effect, way=way)


def _rounds_at_random(levers: Levers) -> bool:
    """Whether updates of 16-bit weights do so: those that the host makes, not those of adapters on the GPU."""
    return levers.streams and levers.method == "full"


def _say_pure(levers: Levers) -> Message:
    said = "plan.cost-pure-streamed" if _rounds_at_random(levers) else "plan.cost-pure"
    return Message(said, precision=levers.precision)


def list_asked(plan: Plan) -> tuple[Message, ...]:
    """What the job itself asks for that approximates a training: optimizer states, weights and messages of fewer bits.
    What is trained and on what is no approximation."""
    job, way = plan.job, plan.chosen
    if way is None:
        return ()
    asked = {
        Message("plan.cost-8bit"): job.optimizer in EIGHT_BIT,
        Message("plan.cost-states", states=job.states): job.states != "fp32",
        Message("plan.cost-compress-asked", how=job.compress): job.compress != "none",
        _say_pure(way.levers): not job.master_weights and job.precision != "fp32",
    }
    return tuple(said for said, is_asked in asked.items() if is_asked)


def compress(question: Question, chosen: Way) -> Remedy | None:
    """Compressed messages, where a step mostly waits for them, or some of the GPUs are left out because of them, and it
    would be much shorter. Of the ways to compress, a later one only where it is much faster yet, since it does more to
    the loss (docs/compression.md)."""
    told = chosen.pace.causes.get("communication", 0.0)
    is_slow = told >= DOMINATES * chosen.pace.step_s or chosen.world < question.hardware.world
    if question.base.compress != "none" or not chosen.is_paced or not is_slow:
        return None
    best, remedy = chosen, None
    for how in MILDEST_FIRST:
        engine = COMPRESSING[how]
        changed = _with(question, compress=how, engine=engine)
        pinned = "engine" in question.pinned and question.base.engine != engine
        if pinned or find_compression_obstacle(changed.base, question.shape, question.hardware.world) is not None:
            continue
        way = search(changed, nearest=False).best
        if way is not None and way.pace.step_s < WORTH * best.pace.step_s:
            said = {"how": how, "step": way.pace.step_s, "before": chosen.pace.step_s}
            cost = Message("plan.cost-compress", **said)
            best, remedy = way, Remedy(allowance="compress", cost=cost, effect=EFFECTS["compress"], way=way)
    return remedy


def _with(question: Question, **changes: object) -> Question:
    return replace(question, base=replace(question.base, **changes))  # type: ignore[arg-type]


def changes(question: Question, name: Allowance) -> Iterator[Change]:
    """The sizes of a change, the mildest first; none where it means nothing."""
    base, lora = question.base, question.base.lora
    match name:
        case "precision":
            if base.precision == "fp32":
                yield _with(question, precision="bf16"), Message("plan.cost-precision")
        case "8bit-optimizer":
            if base.optimizer == "adamw":
                yield _with(question, optimizer="adamw8bit"), Message("plan.cost-8bit")
        case "states":
            if base.method == "full" and base.optimizer == "adamw" and base.states == "fp32":
                for states in SMALLER_STATES:
                    yield _with(question, states=states), Message("plan.cost-states", states=states)
        case "lora-rank":
            rank = lora.rank if lora else 0
            while lora is not None and rank > LEAST_RANK:
                rank //= 2
                cost = Message("plan.cost-rank", rank=rank, before=lora.rank)
                yield _with(question, lora=replace(lora, rank=rank)), cost
        case "quantize":
            if base.method == "lora":
                yield _with(question, method="qlora"), Message("plan.cost-quantize")
        case "lora-targets":
            tensors = [tensor.name for block in question.shape.blocks for tensor in block.tensors if "." in tensor.name]
            has_attention = set(ATTENTION) <= {tensor.split(".")[-2] for tensor in tensors}
            if lora is not None and lora.targets is None and has_attention:
                yield _with(question, lora=replace(lora, targets=ATTENTION)), Message("plan.cost-targets")
        case "shorter-seq":
            for sequence in shorter_sequences(question):
                cost = Message("plan.cost-shorter", tokens=sequence, before=base.sequence)
                yield _with(question, sequence=sequence), cost
        case "lora":
            if base.method == "full" and base.frozen_layers == 0 and base.trains == "all":
                adapters = question.adapters
                yield _with(question, method="lora", lora=adapters), Message("plan.cost-lora", rank=adapters.rank)
        case "skip-data":
            for sequence in shorter_sequences(question):
                yield _with(question, sequence=sequence), Message("plan.cost-skip", tokens=sequence)
        case "pure-16bit":
            if base.precision != "fp32" and base.master_weights:
                yield _with(question, master_weights=False), Message("plan.cost-pure", precision=base.precision)
        case "smaller-model":
            for shape in smaller_models(question.shape):
                cost = Message("plan.cost-model", model=shape.name, before=question.shape.name)
                yield replace(question, shape=shape), cost


@lru_cache(maxsize=64)
def shorter_sequences(question: Question) -> tuple[int, ...]:
    """The longest shorter sequence that fits, in steps of 128; where none does, the shortest."""
    low, high = 1, (question.base.sequence - 1) // SHORTEST
    if high < 1:
        return ()
    if not something_fits(_with(question, sequence=SHORTEST)):
        return (SHORTEST,)
    while low < high:
        middle = (low + high + 1) // 2
        if something_fits(_with(question, sequence=middle * SHORTEST)):
            low = middle
        else:
            high = middle - 1
    return (low * SHORTEST,)


def smaller_models(shape: ModelShape) -> list[ModelShape]:
    """The presets of the same family that are smaller, the largest first."""
    presets = [load_model(name) for name in PRESETS]
    same = [other for other in presets if other.model_type == shape.model_type and other.parameters < shape.parameters]
    return sorted((other for other in same if not other.name.startswith("tiny")), key=lambda other: -other.parameters)


def more_machines(hardware: Hardware) -> list[Hardware]:
    """More of the same: in the same machine up to eight, then in more machines, all of them full."""
    room = max(FULL_NODE, hardware.gpus_per_node) if hardware.nodes == 1 else hardware.gpus_per_node
    inside = [replace(hardware, gpus_per_node=gpus) for gpus in range(hardware.gpus_per_node + 1, room + 1)]
    nodes = range(hardware.nodes + 1, MOST_GPUS // room + 1)
    return [*inside, *(replace(hardware, nodes=count, gpus_per_node=room) for count in nodes)]


def count_gpus(question: Question, *, batch_asked: bool) -> int | None:
    """The smallest number of these GPUs that would do; None: no number would, up to a thousand. An effective batch that
    was asked for stays, so the GPUs must share it evenly; the usual one grows with them."""
    hardware, batch, ranks = question.hardware, question.effective_batch, question.base.data_ranks
    each = batch // ranks(hardware.world)
    larger = [
        replace(question, hardware=more, effective_batch=batch if batch_asked else each * ranks(more.world))
        for more in more_machines(hardware)
        if (question.splits_over(more) if batch_asked else more.world % question.base.ranks_per_sample == 0)
    ]
    low, high = -1, 0
    while high < len(larger) and not fits_at_all(larger[high]):
        low, high = high, 2 * high + 1
    if high >= len(larger):
        high = len(larger) - 1
        if high <= low or not fits_at_all(larger[high]):
            return None
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits_at_all(larger[middle]) else (middle, high)
    return larger[high].hardware.world
