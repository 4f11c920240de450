"""Why this way and not another, in plain sentences; and what can be said about the time it takes.

Which ways are worth showing is decided here too: a table and the sentences under it must speak of the same ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields, replace
from math import ceil
from typing import get_args

from tightfit.inputs.flags import LEVERS, checkpointing_word, flags_from_levers
from tightfit.job import Job
from tightfit.job.file import timeout_s
from tightfit.memory.optimizers import EIGHT_BIT
from tightfit.memory.pipeline import count_depths
from tightfit.memory.stages import split_layers
from tightfit.memory.units import stays, units_of, updates_ahead, waits_for_norm
from tightfit.messages import Listing, Message, Said, id_of
from tightfit.pace import step_seconds
from tightfit.pace.rates import GROUPS
from tightfit.pace.stream import updates_on_card
from tightfit.planner.calibration import COMPONENT
from tightfit.planner.candidates import is_searched
from tightfit.planner.certainty import find_merit, spared_bytes, tell_apart
from tightfit.planner.plan import Plan, Remedy, Way
from tightfit.planner.question import Question, excess_bytes, excess_share, needed_bytes, weigh
from tightfit.planner.search import something_fits
from tightfit.planner.trainers import NAMES
from tightfit.priced import amounts, name_largest_layer, seconds_words, strategy_name
from tightfit.types import PARTS, STRATEGY, Buckets, Cause, Hardware, Levers, PhaseName

MOST_SLOWER = 3  # sentences about ways that fit and are slower
MOST_NAMED = 3  # ways that are as fast as the chosen one
MOST_FITTING = 5
MOST_TEMPTING = 3
MOST_HOPELESS = 6
"""Ways of each kind to show: the chosen one with the next best, those that were faster and do not fit, and, where
nothing fits, those that are nearest to it."""
_CAUSES = [
    *("plan.cause-arithmetic", "plan.cause-memory-traffic", "plan.cause-recomputation"),
    *("plan.cause-dequantisation", "plan.cause-optimizer", "plan.cause-communication"),
    *("plan.cause-host-link", "plan.cause-host-optimizer", "plan.cause-launch-overhead"),
    "plan.cause-pipeline-bubble",
]
CAUSES: dict[Cause, Message] = dict(zip(get_args(Cause), map(Message, _CAUSES), strict=True))
_RATES = [
    *("plan.rate-products", "plan.rate-attention", "plan.rate-memory", "plan.rate-unpacking", "plan.rate-launch"),
    *("plan.rate-host-link", "plan.rate-host-optimizer", "plan.rate-link", "plan.rate-network", "plan.rate-nvme"),
]
RATES: dict[str, Message] = dict(zip(GROUPS, map(Message, _RATES), strict=True))
_PARTS = dict(
    zip(
        PARTS,
        map(Message, ("plan.part-elementwise", "plan.part-qkv", "plan.part-mixer", "plan.part-out", "plan.part-mlp")),
        strict=True,
    )
)
_PLACES = ("plan.at-init", "plan.at-forward", "plan.at-loss", "plan.at-backward", "plan.at-step", "plan.at-eval")
PLACES: dict[PhaseName, Message] = dict(zip(get_args(PhaseName), map(Message, (*_PLACES, "plan.at-save")), strict=True))
NO_LEVER = {"deepspeed_version", "dataloader_workers"}  # what a job may pin without narrowing the choice
_SAVING = [flag for flag, lever in LEVERS.items() if lever.group == "what saves memory" and flag not in STRATEGY]


def in_order(ways: Iterable[Way]) -> tuple[Way, ...]:
    """Those that fit first, each group the fastest first."""
    return tuple(sorted(ways, key=lambda way: (not way.fits, way.pace.step_s, str(strategy_name(way.levers)))))


def mark_equal(chosen: Way | None, others: Iterable[Way]) -> Iterator[Way]:
    """The others, of which those that train the same and cannot be told from the chosen one by their pace say so."""
    for way in others:
        if chosen is None or not (chosen.is_paced and way.fits) or _training(way) != _training(chosen):
            yield way
        else:
            yield replace(way, is_as_fast=not tell_apart(chosen.pace, way.pace).is_sure)


def chosen_for(chosen: Way, others: Iterable[Way]) -> Said:
    """Why this one of those that are as fast; empty: there is no other."""
    equal = [way for way in others if way.is_as_fast]
    if not equal:
        return ""
    merit, rival, near = find_merit(chosen, equal)
    size = amounts(max(1, spared_bytes(chosen, rival)))[0]
    what = {
        "ram": Message("plan.for-ram", size=size, other=_name_beside(chosen, rival)),
        "simplicity": Message("plan.for-simplicity"),
        "pace": Message("plan.for-pace"),
    }
    name = strategy_name(chosen.levers)
    shown: list[Said] = [_name_beside(chosen, way) for way in near or equal]
    if len(shown) > MOST_NAMED:
        shown[MOST_NAMED - 1 :] = [Message("plan.others", count=len(shown) - MOST_NAMED + 1)]
    named = Listing([name, *shown], "and")
    return Message("plan.chosen-of-equals", ways=named, way=name, what=what[merit])


def _name_beside(chosen: Way, way: Way) -> Said:
    """With the number of GPUs where that is another."""
    name = strategy_name(way.levers)
    if way.world == chosen.world:
        return name
    return Message("plan.on-gpus", way=name, count=way.world) if way.world > 1 else Message("plan.on-one-gpu", way=name)


def worth_showing(plan: Plan) -> tuple[Way, ...]:
    """The best few ways and the tempting ones that do not fit, the fastest first; the nearest where nothing fits. Where
    a change of the training was made, those that train otherwise are no alternatives to what was chosen."""
    chosen = plan.chosen
    if chosen is None:
        return tuple(sorted(plan.alternatives, key=_distance)[:MOST_HOPELESS])
    others = [way for way in plan.alternatives if _training(way) == _training(chosen)]
    unfit = [way for way in others if not way.fits]
    tempting = [way for way in unfit if way.pace.step_s < chosen.pace.step_s]
    tempting = sorted(tempting, key=_distance)[:MOST_TEMPTING]
    if not tempting:  # slower and too large: still what people try first
        tempting = unfit[:2]
    fitting = [way for way in others if way.fits][: MOST_FITTING - 1]
    return tuple(sorted((chosen, *tempting, *fitting), key=lambda way: way.pace.step_s))


def _training(way: Way) -> tuple[object, ...]:
    """All that changes the result."""
    levers = way.levers
    what = (way.shape.name, levers.method, levers.lora, levers.sequence, levers.frozen_layers, levers.trains)
    return (*what, levers.precision, levers.optimizer, levers.master_weights, levers.compress, levers.states)


def _distance(way: Way) -> tuple[float, float]:
    """How far a way is from fitting, in the search's own measure; of two that are as far, the faster first."""
    return excess_share(way.footprint, way.hardware, way.gpu_limit_bytes), way.pace.step_s


def of_choice(question: Question, way: Way) -> tuple[Said, ...]:
    """What decided the levers of one way."""
    card, need = way.hardware.gpu.memory_bytes, way.footprint.gpu.required_bytes
    needed, size, spare = amounts(need, card, max(card - need, 1))
    where = Message("plan.each-gpu") if way.world > 1 else Message("plan.the-gpu")
    share = (card - need) / card
    free = Message("plan.free-memory", needed=needed, size=size, where=where, spare=spare, share=share)
    said: list[Said] = [free, *explain_calibration(way), *explain_taught(way)]
    said += _of_row(question, way)
    said += _of_streaming(question, way)
    said += [each for each in way.footprint.because if id_of(each) == "price.busiest-experts"]
    said += _of_recomputation(question, way)
    said += _of_speed(question, way)
    if way.levers.loss == "fused" and "loss" not in question.pinned:
        said.append(Message("plan.fused-loss"))
        if not question.trainer.is_ours:
            said.append(Message("plan.loss-from-liger", trainer=NAMES[question.trainer.trainer]))
    if way.levers.mlp == "tiled" and "mlp" not in question.pinned:
        said.append(Message("plan.tiled-mlp"))
    if way.levers.attention == "flash" and "attention" not in question.pinned:
        said.append(Message("plan.flash-windows"))
    if way.world < question.hardware.world:
        said.append(Message("plan.fewer-gpus", used=way.world, all=question.hardware.world))
    said += _of_sharing(question, way)
    largest = next(iter(way.pace.causes), None)
    if largest is not None and way.is_paced:
        share = way.pace.causes[largest] / way.pace.step_s
        said.append(Message("plan.largest-cause", **seconds_words(way.pace), share=share, cause=CAUSES[largest]))
    return tuple(said)


def _of_sharing(question: Question, way: Way) -> Iterator[Message]:
    """Why GPUs read the same sequences, where nobody asked for that."""
    levers = way.levers
    if levers.row_parts == question.base.row_parts:
        return
    if way.effective_batch < way.world:
        yield Message("plan.fewer-sequences", batch=way.effective_batch, gpus=way.world, shared=levers.ranks_per_sample)
    if levers.tensor_parallel > 1:
        yield Message("plan.layers-in-parts", size=levers.tensor_parallel)


def _of_row(question: Question, way: Way) -> Iterator[Message]:
    """Which layers the GPUs of a pipeline have, which of them is the fullest, and what they wait."""
    gpus, fullest = way.levers.pipeline_parallel, way.footprint.pipeline_gpu
    if fullest is None:
        return

    def list_layers(levers: Levers) -> Listing:
        counts = list(map(len, split_layers(way.shape, levers)))
        return Listing([str(sum(counts[place::gpus])) for place in range(gpus)], "and")

    yield Message("plan.row-of-gpus", gpus=gpus, layers=list_layers(way.levers), place=fullest + 1)
    if way.levers.stage_layers and "stage_layers" not in question.pinned:
        plain, asked = replace(way.levers, stage_layers=""), replace(question, shape=way.shape, hardware=way.hardware)
        held = weigh(asked, plain)
        if excess_bytes(asked, held):
            need = amounts(held.gpu.required_bytes)[0]
            yield Message("plan.layers-moved-for-room", layers=list_layers(plain), need=need)
        elif way.is_paced:
            share = step_seconds(way.shape, plain, way.hardware) / way.pace.step_s - 1
            yield Message("plan.layers-moved-for-pace", layers=list_layers(plain), share=share)
    if way.is_paced:
        share = way.pace.causes.get("pipeline bubble", 0.0) / way.pace.step_s
        yield Message("plan.row-waits", share=share, count=way.levers.accumulation)


def _of_streaming(question: Question, way: Way) -> Iterator[Message]:
    """Which layers rest on the host, and what comes from there how often."""
    levers = way.levers
    if not levers.streams:
        return
    layers = units_of(way.shape, levers).layers
    streamed = [unit.bytes for index, unit in enumerate(layers) if not stays(index, levers.resident, len(layers))]
    if streamed:
        numbers = {"count": len(streamed), "total": len(layers), "size": amounts(sum(streamed))[0]}
        yield Message("plan.layers-stream", **numbers)
    if 0 < levers.resident < len(layers) and "resident" not in question.pinned:
        yield Message("plan.as-many-stay", count=levers.resident)
    if any(unit.trained for unit in layers):
        has_copies = levers.master_weights or levers.precision == "fp32"
        more = Message("plan.steps-of-adamw") if has_copies and levers.states == "fp32" else None
        if updates_on_card(levers, way.hardware):
            more = Message("plan.states-pass-gpu")
        if updates_ahead(levers):
            plain = weigh(question, replace(levers, update="waits"))
            second = way.footprint.host.peak_bytes_per_node - plain.host.peak_bytes_per_node
            yield Message("plan.updated-ahead", size=amounts(second)[0], more=more)
        else:
            yield Message("plan.updated-on-host" if waits_for_norm(levers) else "plan.updated-at-once", more=more)
    if levers.offload_optimizer == "nvme":
        yield _of_file(question, way)
    if levers.checkpointing.offload and not levers.checkpointing.select:
        waiting = way.footprint.host.phases["forward"].components.get("activations", 0)
        yield Message("plan.inputs-wait", size=amounts(waiting)[0])


def _of_file(question: Question, way: Way) -> Message:
    """Why states rest on an NVMe: because RAM has no room for them, or because somebody asked for it."""
    size, ram = amounts(way.footprint.host.nvme_bytes_per_node)[0], way.hardware.host_ram_bytes
    if "offload_optimizer" not in question.pinned:
        return Message("plan.states-in-file", size=size)
    if ram is None:
        return Message("plan.states-in-file-as-asked", size=size, though=None)
    in_ram = weigh(replace(question, hardware=way.hardware), replace(way.levers, offload_optimizer="none"))
    if in_ram.host.peak_bytes_per_node > ram:
        return Message("plan.states-in-file", size=size)
    return Message("plan.states-in-file-as-asked", size=size, though=Message("plan.though-ram-has-room"))


def _of_recomputation(question: Question, way: Way) -> Iterator[Message]:
    again, total = way.levers.checkpointing, count_depths(question.shape, way.levers)
    depth = total if again.layers is None else again.layers
    if not is_searched(question.base, question.pinned):
        return
    where = Message("plan.a-gpu") if way.world > 1 else Message("plan.the-gpu")
    if again.select and depth:
        called = _PARTS | ({"mixer": Message("plan.part-scan")} if question.shape.scans else {})
        parts = Listing([called[part] for part in again.select], "and")
        yield Message("plan.parts-recompute", parts=parts)
    if again.select and again.offload and depth:
        waiting = way.footprint.host.phases["forward"].components["activations"]
        yield Message("plan.kept-on-host", size=amounts(waiting)[0])
    if 0 < depth < total:
        fewer = replace(way.levers, checkpointing=replace(again, layers=depth - 1))
        need = weigh(replace(question, shape=way.shape, hardware=way.hardware), fewer).gpu.required_bytes
        numbers = {"depth": depth, "total": total, "fewer": depth - 1, "need": amounts(need)[0]}
        of_each = way.levers.pipeline_parallel > 1
        said = "plan.some-of-each-stage-recompute" if of_each else "plan.some-layers-recompute"
        yield Message(said, where=where, **numbers)
    elif depth == 0:
        yield Message("plan.no-layer-recomputes")


def _of_speed(question: Question, way: Way) -> Iterator[Message]:
    """What compiled layers and other kernels bring, where nobody asked for them."""
    if way.levers.compile == "layers" and "compile" not in question.pinned:
        plain = step_seconds(way.shape, replace(way.levers, compile="off"), way.hardware)
        times = plain / way.pace.step_s
        known = "plan.layers-compiled" if way.is_paced and times >= 1.05 else "plan.layers-compiled-unpaced"
        yield Message(known, times=times, warm_up=way.pace.warm_up_s)
    if way.levers.kernels == "fused" and "kernels" not in question.pinned:
        yield Message("plan.kernels-from-liger")


def explain_calibration(way: Way) -> tuple[Message, ...]:
    """By how much, and from which run."""
    if way.correction is None:
        return ()
    gpu, host = way.footprint.gpu, way.footprint.host
    phase = "init" if gpu.init_peak_bytes > gpu.peak_bytes else gpu.peak_phase
    card = gpu.phases[phase].components.get(COMPONENT, 0)
    ram = max(each.components.get(COMPONENT, 0) for each in host.phases.values())
    if not (card or ram):
        return ()
    on_card, on_host = (f"{'+' if size > 0 else '-'}{amounts(max(abs(size), 1))[0]}" for size in (card, ram))
    by = Message("plan.card-and-ram", gpu=on_card, ram=on_host)
    if not (card and ram):
        by = Message("plan.card-alone", gpu=on_card) if card else Message("plan.ram-alone", ram=on_host)
    how = "plan.calibrated-by" if way.correction.same_way else "plan.calibrated-otherwise"
    return (Message(how, by=by, day=way.correction.entry.day),)


def explain_taught(way: Way) -> tuple[Message, ...]:
    """By how much step times of earlier runs have changed this way's."""
    taught = way.hardware.taught
    if taught is None:
        return ()
    share = way.pace.step_s / step_seconds(way.shape, way.levers, replace(way.hardware, taught=None)) - 1
    return () if abs(share) < 0.005 else (Message("plan.taught-by", share=share, day=taught.on),)


def further(plan: Plan) -> list[Said]:
    """Of a plan's messages what is left where its choice, its changes and its doubts have places of their own."""
    elsewhere = ("plan.chosen-way", "plan.changes-training")
    return [said for said in plan.because if said not in plan.unproven and id_of(said) not in elsewhere]


def of_plan(plan: Plan, question: Question, said: tuple[Said, ...]) -> tuple[Said, ...]:
    """Every message under the table."""
    job, chosen, sentences = plan.job, plan.chosen, list(said)
    if job.effective_batch is None and not {"micro_batch", "accum"} <= set(job.levers):
        # the GPUs of a pipeline pass all sequences of their row on
        rows = question.base.data_ranks(plan.hardware.world)
        per_gpu = plan.effective_batch // (rows * question.base.pipeline_parallel)
        sentences.append(Message("plan.default-batch", batch=plan.effective_batch, per_gpu=per_gpu))
    sentences += question.hardware.because
    if chosen is not None:
        sentences += [Message("plan.chosen-way", way=strategy_name(chosen.levers)), *chosen.because]
        if chosen.levers.optimizer in EIGHT_BIT and question.ours:
            sentences.append(Message("plan.zero-left-out"))
        sentences += [Message("plan.changes-training", change=change) for change in chosen.changes]
        others = [way for way in plan.alternatives if _training(way) != _training(chosen)]
        sentences += [remedy_message("plan.faster-change", remedy) for remedy in plan.remedies]
        if chosen.changes and others and chosen.levers.compress == job.compress:
            nearest = _nearest(min(others, key=_distance))
            sentences.append(Message("plan.nothing-without-change", nearest=nearest))
        elif not chosen.changes and job.limits.allow:
            sentences.append(Message("plan.no-change-needed"))
        sentences += _against(plan, chosen)
        if is_cut_off(plan) and plan.hours is not None and job.timeout is not None:
            share = timeout_s(job.timeout) / (3600 * plan.hours)
            sentences.append(Message("plan.cut-off", limit=job.timeout, time=time_words(plan.hours), share=share))
        sentences += chosen.assumed
    else:
        sentences += _nothing(plan, question)
        if plan.alternatives:
            nearest_way = worth_showing(plan)[0]
            sentences += [*explain_calibration(nearest_way), *(() if nearest_way.is_paced else nearest_way.assumed)]
    if question.hardware.host_ram_bytes is None:
        sentences.append(Message("plan.host-ram-unknown"))
    return tuple(dict.fromkeys((*sentences, *plan.unproven)))


def _against(plan: Plan, chosen: Way) -> list[Said]:
    """The others that are shown: what was faster and does not fit, what is as fast, what fits and is slower."""
    faster, slower, equal = list[Said](), list[Said](), list[Way]()
    for way in worth_showing(plan):
        name = _name_beside(chosen, way)
        if not way.fits and way.pace.step_s < chosen.pace.step_s:
            faster.append(Message("plan.faster-but", way=name, missing=missing(way)))
        elif way.fits and way is not chosen and chosen.is_paced:
            share = way.pace.step_s / chosen.pace.step_s - 1
            much = f"{abs(share):.0%}" if abs(share) >= 0.005 else Message("plan.less-than-a-percent")
            if way.is_as_fast:
                equal.append(way)
                continue
            more_s = {cause: took - chosen.pace.causes.get(cause, 0.0) for cause, took in way.pace.causes.items()}
            cause = CAUSES[max(more_s, key=lambda each: more_s[each])]
            slower.append(Message("plan.fits-too", way=name, much=much, cause=cause))
    if plan.chosen_for:
        faster.append(plan.chosen_for)
    return [*faster, *(_would_tell(chosen, equal[0]) if equal else ()), *slower[:MOST_SLOWER]]


def _would_tell(chosen: Way, equal: Way) -> Iterator[Message]:
    """The one measurement that would say which of two ways is the faster."""
    name = tell_apart(chosen.pace, equal.pace).rate
    used = chosen.pace.rates.get(name) or equal.pace.rates.get(name)
    if used is not None:
        known = "plan.runs-would-tell" if used.source in ("measured", "run") else "plan.measuring-would-tell"
        yield Message(
            known,
            way=strategy_name(chosen.levers),
            other=strategy_name(equal.levers),
            rate=RATES[name],
        )


def lever_changes(before: Way, after: Way) -> tuple[str, ...]:
    """`ZeRO-2 → ZeRO-3`, `checkpointing none → full` …; what changes the result is not among them."""
    old, new = _words(before), _words(after)
    both = [name for name in new if name in old]
    return tuple(f"{name} {old[name]} → {new[name]}".strip() for name in both if old[name] != new[name])


def _words(way: Way) -> dict[str, str]:
    levers, said = way.levers, flags_from_levers(way.levers)
    has_buckets = levers.stage not in (None, 0)
    names = [each.name for each in fields(Buckets) if has_buckets or each.name == "pin_memory"]
    buckets = {}
    for name in names:
        value = getattr(levers.buckets, name)
        word = "DeepSpeed's choice" if value is None else f"{value:,}"
        buckets[name.replace("_", " ")] = ("on" if value else "off") if isinstance(value, bool) else word
    return {
        "": str(strategy_name(levers)),
        "GPUs": str(way.world),
        "micro batch × accumulation": f"{levers.micro_batch} × {levers.accumulation}",
        **{flag: str(said.get(flag, "–")) for flag in _SAVING},
        **buckets,
    }


# --- what does not fit ----------------------------------------------------------------------------


def lacking_bytes(way: Way) -> dict[str, int]:
    """What a way lacks: of `GPU`, less the margin, of host `RAM`, of `NVMe`; only what is missing is named."""
    hardware, gpu, host = way.hardware, way.footprint.gpu, way.footprint.host
    needed = needed_bytes(way.footprint, hardware)
    on_card = max(gpu.required_bytes - hardware.gpu.memory_bytes, needed - way.gpu_limit_bytes)
    ram, nvme = hardware.host_ram_bytes, hardware.nvme_bytes
    lacking = {
        "GPU": on_card,
        "RAM": 0 if ram is None else host.peak_bytes_per_node - ram,
        "NVMe": 0 if nvme is None else host.nvme_bytes_per_node - nvme,
    }
    return {place: size for place, size in lacking.items() if size > 0}


def missing(way: Way) -> Message:
    """`needs 2.1 GiB more than the card has at the optimizer step, and 32.0 GiB more host RAM than there is`."""
    lacking = lacking_bytes(way)
    more = [
        Message(what, size=amounts(lacking[place])[0])
        for place, what in (("RAM", "plan.more-ram"), ("NVMe", "plan.more-nvme"))
        if place in lacking
    ]
    host = Message("plan.more-ram-and-nvme", ram=more[0], nvme=more[1]) if len(more) == 2 else next(iter(more), None)
    if "GPU" not in lacking:
        return Message("plan.does-not-fit") if host is None else Message("plan.lacks-host", more=host)
    card, gpu = way.hardware.gpu.memory_bytes, way.footprint.gpu
    if gpu.required_bytes > card:
        phase = "init" if gpu.init_peak_bytes > gpu.peak_bytes else gpu.peak_phase
        said = Message("plan.lacks-card", size=amounts(gpu.required_bytes - card)[0], place=PLACES[phase])
        return said if host is None else Message("plan.lacks-card-and-host", card=said, more=host)
    left = amounts(max(card - needed_bytes(way.footprint, way.hardware), 1))[0]
    said = Message("plan.leaves-little", size=left, place=PLACES[gpu.peak_phase])
    return said if host is None else Message("plan.leaves-little-and-host", card=said, more=host)


def _nothing(plan: Plan, question: Question) -> list[Message]:
    """Nothing fits: how far it is, what would fit, how many GPUs would do."""
    shown = worth_showing(plan)
    sentences = [Message("plan.nothing-free", nearest=_nearest(shown[0])) if shown else Message("plan.no-engine")]
    if shown and shown[0].levers.streams and "GPU" in lacking_bytes(shown[0]):
        sentences.append(name_largest_layer(shown[0].shape, shown[0].levers))
    if question.base.compress != "none" and something_fits(
        replace(question, base=replace(question.base, compress="none"))
    ):
        sentences.append(Message("plan.fits-uncompressed", how=question.base.compress))
    # what was allowed and did not help: because it means nothing here, or because it is not enough
    idle = {name: why for name in plan.job.limits.allow if (why := _idle(name, plan.job))}
    sentences += [Message("plan.allowed-idle", name=name, why=why) for name, why in idle.items()]
    tried = [name for name in plan.job.limits.allow if name not in idle]
    if tried:
        together = " and ".join(tried) if len(tried) < 3 else ", ".join(tried)
        vain = "plan.allowed-together-in-vain" if len(tried) > 1 else "plan.allowed-in-vain"
        sentences.append(Message(vain, names=together))
    if plan.remedies:
        first, *rest = plan.remedies
        sentences += [remedy_message("plan.mildest-change", first)]
        sentences += [remedy_message("plan.other-change", other) for other in rest]
    else:
        sentences.append(Message("plan.no-change-fits"))
    is_pinned = bool(set(plan.job.levers) - NO_LEVER)
    if plan.gpus_needed is not None:
        said = "plan.gpus-would-do-pinned" if is_pinned else "plan.gpus-would-do"
        sentences.append(Message(said, gpus=plan.gpus_needed))
    else:
        sentences.append(Message("plan.no-gpus-would-do-pinned" if is_pinned else "plan.no-gpus-would-do"))
    return sentences


def remedy_message(said: str, remedy: Remedy) -> Message:
    """What one costly change would do, in one of several messages that say it."""
    way, pace = strategy_name(remedy.way.levers), remedy.way.pace_words
    return Message(said, allowance=remedy.allowance, cost=remedy.cost, effect=remedy.effect, way=way, pace=pace)


def _nearest(way: Way) -> Message:
    word: Said = checkpointing_word(way.levers.checkpointing)
    if word in ("none", "full"):
        word = Message("plan.checkpointing-none" if word == "none" else "plan.checkpointing-full")
    return Message("plan.nearest-way", way=strategy_name(way.levers), word=word, missing=missing(way))


def _idle(allowance: str, job: Job) -> Message | None:
    """Why a change that was allowed cannot be made on this job; None: it can."""
    full = job.method == "full" and "lora" not in job.limits.allow
    if allowance in ("quantize", "lora-rank", "lora-targets") and full:
        what = Message("plan.only-frozen-quantised" if allowance == "quantize" else "plan.full-without-adapters")
        return Message("plan.needs-lora-beside", what=what, allowance=allowance)
    made = {
        "quantize": job.method == "qlora" and Message("plan.four-bits-already"),
        "lora": job.method != "full" and Message("plan.adapters-already"),
        "lora-targets": job.lora.targets != "all" and Message("plan.targets-named"),
        "lora-rank": job.lora.rank == 1 and Message("plan.rank-lowest"),
        "8bit-optimizer": job.optimizer != "adamw" and Message("plan.only-for-adamw", optimizer=job.optimizer),
        "states": (job.states != "fp32" and Message("plan.states-already", states=job.states))
        or (job.optimizer != "adamw" and Message("plan.only-for-adamw", optimizer=job.optimizer)),
        "precision": job.precision != "fp32" and Message("plan.precision-already", precision=job.precision),
        "compress": Message("plan.compress-saves-seconds"),
        "pure-16bit": not job.master_weights and Message("plan.pure-already", precision=job.precision),
    }
    return made.get(allowance) or None


# --- time -----------------------------------------------------------------------------------------


def hours(job: Job, effective_batch: int, way: Way) -> float | None:
    """Hours to finish; None where neither steps nor the number of samples are known, or no pace is claimed."""
    steps = steps_of(job, effective_batch)
    return None if steps is None or not way.is_paced else (way.pace.warm_up_s + steps * way.pace.step_s) / 3600


def steps_of(job: Job, effective_batch: int) -> int | None:
    if job.max_steps is not None:
        return job.max_steps
    samples = job.data.samples
    if job.max_samples is not None:
        samples = min(samples, job.max_samples) if samples is not None else job.max_samples
    if samples is None:
        return None
    trained = samples * (1 - job.evaluation.split)
    return max(1, ceil(trained * (job.epochs or 1.0) / effective_batch))


def time_words(hours: float) -> Message:
    """In the unit that people would use."""
    if hours < 1:
        return Message("plan.in-minutes", count=max(1, round(60 * hours)))
    return Message("plan.in-hours", count=hours) if hours < 48 else Message("plan.in-days", count=hours / 24)


def is_cut_off(plan: Plan) -> bool:
    """Whether the job's own time limit ends before the training does."""
    limit = plan.job.timeout
    return plan.hours is not None and limit is not None and 3600 * plan.hours > timeout_s(limit)


def unproven(hardware: Hardware) -> tuple[Message, ...]:
    said = []
    if hardware.nodes > 1:
        said.append(Message("plan.unproven-nodes"))
    if hardware.gpu.vendor in ("hygon", "amd"):
        said.append(Message("plan.unproven-card", card=hardware.gpu.name))
    if hardware.gpu.vendor == "hygon":
        said.append(Message("plan.segments-fixed"))
    return tuple(said)
