"""Why this way and not another, in plain sentences; and what can be said about the time it takes.

Which ways are worth showing is decided here too: a table and the sentences under it must speak of the same ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import ceil

from tightfit.inputs.flags import checkpointing_word
from tightfit.job import Job
from tightfit.job.file import timeout_s
from tightfit.memory.optimizers import EIGHT_BIT
from tightfit.planner.calibration import COMPONENT
from tightfit.planner.plan import Plan, Way
from tightfit.planner.question import Question, excess_share, needed_bytes, weigh
from tightfit.planner.trainers import NAMES
from tightfit.priced import amounts, strategy_name
from tightfit.types import Checkpointing, Hardware

MOST_SLOWER = 3
"""Sentences about ways that fit and are slower."""
MOST_FITTING = 5
MOST_TEMPTING = 3
MOST_HOPELESS = 6
"""Ways of each kind to show: the chosen one with the next best, those that were faster and do not fit, and, where
nothing fits, those that are nearest to it."""
NO_LEVER = {"deepspeed_version", "dataloader_workers"}
"""What a job may pin without narrowing the choice."""


def in_order(ways: Iterable[Way]) -> tuple[Way, ...]:
    """Those that fit first, each group the fastest first."""
    return tuple(sorted(ways, key=lambda way: (not way.fits, way.pace.step_s, strategy_name(way.levers))))


def worth_showing(plan: Plan) -> tuple[Way, ...]:
    """The best few ways and the tempting ones that do not fit, the fastest first; the nearest where nothing fits.

    Where a change of the training was made, those that train otherwise are no alternatives to what was chosen.
    """
    chosen = plan.chosen
    if chosen is None:
        return tuple(sorted(plan.alternatives, key=lambda way: _distance(plan, way))[:MOST_HOPELESS])
    others = [way for way in plan.alternatives if _training(way) == _training(chosen)]
    unfit = [way for way in others if not way.fits]
    tempting = [way for way in unfit if way.pace.step_s < chosen.pace.step_s]
    tempting = sorted(tempting, key=lambda way: _distance(plan, way))[:MOST_TEMPTING]
    if not tempting:  # slower and too large: still what people try first
        tempting = unfit[:2]
    fitting = [way for way in others if way.fits][: MOST_FITTING - 1]
    return tuple(sorted((chosen, *tempting, *fitting), key=lambda way: way.pace.step_s))


def _training(way: Way) -> tuple[object, ...]:
    """All that changes the result."""
    levers = way.levers
    what = (way.shape.name, levers.method, levers.lora, levers.sequence, levers.frozen_layers, levers.trains)
    return (*what, levers.precision, levers.optimizer, levers.master_weights)


def _distance(plan: Plan, way: Way) -> tuple[float, float]:
    """How far a way is from fitting, in the search's own measure; of two that are as far, the faster first."""
    question = Question(
        shape=way.shape,
        base=way.levers,
        pinned=frozenset(),
        hardware=way.hardware,
        effective_batch=way.effective_batch,
        margin=plan.job.limits.margin,
    )
    return excess_share(question, way.footprint), way.pace.step_s


def of_choice(question: Question, way: Way) -> tuple[str, ...]:
    """What decided the levers of one way."""
    said = [_margin(way), *calibrated(way)]
    depth, total = way.levers.checkpointing.layers, question.shape.n_layers
    if "checkpointing" not in question.pinned:
        if depth is not None and 0 < depth < total:
            fewer = replace(way.levers, checkpointing=Checkpointing(layers=depth - 1))
            need = weigh(replace(question, shape=way.shape, hardware=way.hardware), fewer).gpu.required_bytes
            said.append(
                f"{depth} of {total} layers recompute their activations: with {depth - 1} "
                f"{'a' if way.world > 1 else 'the'} GPU would need {amounts(need)[0]} GiB."
            )
        elif depth == 0:
            said.append("No layer recomputes: there is room for all activations.")
    if way.levers.loss == "fused" and "loss" not in question.pinned:
        said.append("The fused loss never holds all logits at once; the result is the same.")
        if not question.trainer.is_ours:
            said.append(f"{NAMES[question.trainer.trainer]} takes it from Liger: pip install liger-kernel.")
    if way.levers.attention == "flash" and "attention" not in question.pinned:
        said.append(
            "The layers' windows are cut by flash attention, a package of its own: --attention sdpa does without."
        )
    if way.world < question.hardware.world:
        used = f"{way.world} of the {question.hardware.world} GPUs {'is' if way.world == 1 else 'are'} used"
        said.append(
            f"{used}: with all of them, what they exchange takes longer than what they save, or the host runs short."
        )
    largest = next(iter(way.pace.causes), None)
    if largest is not None:
        share = way.pace.causes[largest] / way.pace.step_s
        said.append(f"Of each step's {way.pace.step_s:.2f} s, {share:.0%} is {largest}.")
    return tuple(said)


def _margin(way: Way) -> str:
    card, need = way.hardware.gpu.memory_bytes, way.footprint.gpu.required_bytes
    needed, size, spare = amounts(need, card, max(card - need, 1))
    where = "each GPU" if way.world > 1 else "the GPU"
    return f"Needs {needed} of {size} GiB on {where}: {spare} GiB ({(card - need) / card:.1%} of the card) stays free."


def calibrated(way: Way) -> tuple[str, ...]:
    """By how much, and from which run."""
    if way.correction is None:
        return ()
    gpu, host = way.footprint.gpu, way.footprint.host
    phase = "init" if gpu.init_peak_bytes > gpu.peak_bytes else gpu.peak_phase
    card = gpu.phases[phase].components.get(COMPONENT, 0)
    ram = max(each.components.get(COMPONENT, 0) for each in host.phases.values())
    parts = [_signed(card)] if card else []
    parts += [f"{_signed(ram)} of host RAM a rank"] if ram else []
    if not parts:
        return ()
    entry = way.correction.entry
    how = "" if way.correction.same_way else ", which ran another way"
    by = " and ".join(parts)
    return (f"Calibrated by {by} from a run on {entry.day}{how} (--no-calibration leaves it out).",)


def _signed(size_bytes: int) -> str:
    return f"{'+' if size_bytes > 0 else '-'}{amounts(abs(size_bytes))[0]} GiB"


def further(plan: Plan) -> list[str]:
    """Of a plan's sentences what is left where its choice, its changes and its doubts have places of their own."""
    said = set(plan.unproven)
    if plan.chosen is not None:
        said.add(f"Chosen: {strategy_name(plan.chosen.levers)}.")
        said |= {f"It changes the training: {change}." for change in plan.chosen.changes}
    return [sentence for sentence in plan.because if sentence not in said]


def of_plan(plan: Plan, question: Question, said: tuple[str, ...]) -> tuple[str, ...]:
    """Every sentence under the table."""
    sentences = [*said, *_batch(plan), *question.hardware.because]
    chosen = plan.chosen
    if chosen is not None:
        sentences += [f"Chosen: {strategy_name(chosen.levers)}.", *chosen.because, *_kept_apart(question, chosen)]
        sentences += [f"It changes the training: {change}." for change in chosen.changes]
        sentences += [*_unchanged(plan, chosen), *_against(plan, chosen), *_cut_off(plan)]
        sentences += chosen.pace.because
    else:
        sentences += [*_nothing(plan), *(calibrated(worth_showing(plan)[0]) if plan.alternatives else ())]
    if question.hardware.host_ram_bytes is None:
        sentences.append("The host's RAM is not known (--host-ram 256GB, say): every way is taken to have enough.")
    return tuple(dict.fromkeys((*sentences, *plan.unproven)))


def _batch(plan: Plan) -> list[str]:
    if plan.job.effective_batch is not None or {"micro_batch", "accum"} <= set(plan.job.levers):
        return []
    return [
        f"No --effective-batch was named: {plan.effective_batch} sequences a step, "
        f"{plan.effective_batch // plan.hardware.world} a GPU."
    ]


def _kept_apart(question: Question, chosen: Way) -> list[str]:
    if chosen.levers.optimizer not in EIGHT_BIT or not question.ours:
        return []
    return [
        "ZeRO's stages are left out: only FSDP2 and the unsharded engine keep 8-bit states parameter by parameter, as "
        "a checkpoint needs them."
    ]


def _unchanged(plan: Plan, chosen: Way) -> list[str]:
    """What there was without the changes; or that none of those allowed was needed."""
    if not chosen.changes:
        return ["This fits as it is: none of the allowed changes was made."] if plan.job.limits.allow else []
    others = [way for way in plan.alternatives if _training(way) != _training(chosen)]
    if not others:
        return []
    return [f"Without a change nothing fits. {_nearest(min(others, key=lambda way: _distance(plan, way)))}"]


def _against(plan: Plan, chosen: Way) -> list[str]:
    """The others that are shown: what was faster and does not fit, what fits and is slower."""
    faster, slower = [], []
    for way in worth_showing(plan):
        name = strategy_name(way.levers)
        name = name[:1].upper() + name[1:]
        if way.world != chosen.world:
            name += f" on {way.world} GPUs" if way.world > 1 else " on one GPU"
        if not way.fits and way.pace.step_s < chosen.pace.step_s:
            faster.append(f"{name} would be faster but {missing(way)}.")
        elif way.fits and way is not chosen:
            share = way.pace.step_s / chosen.pace.step_s - 1
            much = f"{share:.0%}" if share >= 0.005 else "less than 1%"
            slower.append(f"{name} fits too and takes {much} longer, mostly by {_main_cause(way, chosen)}.")
    return [*faster, *slower[:MOST_SLOWER]]


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


def missing(way: Way) -> str:
    """`needs 2.1 GiB more than the card has at the optimizer step, and 32.0 GiB more host RAM than there is`."""
    lacking = lacking_bytes(way)
    said = [_missing_on_card(way)] if "GPU" in lacking else []
    more = [
        f"{amounts(lacking[place])[0]} GiB more {what} than there is"
        for place, what in (("RAM", "host RAM"), ("NVMe", "NVMe"))
        if place in lacking
    ]
    if more:
        said.append(f"{'' if said and said[0].startswith('needs') else 'needs '}{' and '.join(more)}")
    return ", and ".join(said) or "does not fit"


def _missing_on_card(way: Way) -> str:
    card, gpu = way.hardware.gpu.memory_bytes, way.footprint.gpu
    places = {"step": "at the optimizer step", "init": "while it is set up", "loss": "at the loss"}
    if gpu.required_bytes > card:
        phase = "init" if gpu.init_peak_bytes > gpu.peak_bytes else gpu.peak_phase
        place = places.get(phase, f"in the {phase} pass")
        return f"needs {amounts(gpu.required_bytes - card)[0]} GiB more than the card has {place}"
    place = places.get(gpu.peak_phase, f"in the {gpu.peak_phase} pass")
    left = amounts(max(card - needed_bytes(way.footprint, way.hardware), 1))[0]
    return f"would leave only {left} GiB of the card free {place}"


def _main_cause(way: Way, chosen: Way) -> str:
    more = {cause: seconds - chosen.pace.causes.get(cause, 0.0) for cause, seconds in way.pace.causes.items()}
    return max(more, key=lambda cause: more[cause])


def _nothing(plan: Plan) -> list[str]:
    """Nothing fits: how far it is, what would fit, how many GPUs would do."""
    shown = worth_showing(plan)
    if shown:
        sentences = [f"Nothing free fits. {_nearest(shown[0])}"]
    else:
        sentences = ["No engine runs what was asked for: fewer pinned levers would leave a choice."]
    sentences += _allowed_in_vain(plan)
    if plan.remedies:
        first, *rest = plan.remedies
        sentences.append(
            f"The mildest change that would fit is --allow {first.allowance}: {first.cost}; {first.effect} "
            f"({strategy_name(first.way.levers)}, {first.way.pace.tokens_per_s:,.0f} tokens/s)."
        )
        sentences += [
            f"--allow {other.allowance} would do as well: {other.cost}; {other.effect} "
            f"({strategy_name(other.way.levers)}, {other.way.pace.tokens_per_s:,.0f} tokens/s)."
            for other in rest
        ]
    else:
        sentences.append("None of the changes that can be allowed would make it fit, and no two of them together.")
    pins = " and with the pinned levers" if set(plan.job.levers) - NO_LEVER else ""
    if plan.gpus_needed is not None:
        sentences.append(f"Without any change{pins}, {plan.gpus_needed} of these GPUs would do.")
    else:
        sentences.append(f"No number of these GPUs would do without a change{pins}.")
    return sentences


def _nearest(way: Way) -> str:
    return (
        f"The nearest is {strategy_name(way.levers)} with checkpointing "
        f"{checkpointing_word(way.levers.checkpointing)}: it {missing(way)}."
    )


def _allowed_in_vain(plan: Plan) -> list[str]:
    """What was allowed and did not help: because it means nothing here, or because it is not enough."""
    job, idle = plan.job, {}
    for name in job.limits.allow:
        if why := _idle(name, job):
            idle[name] = why
    tried = [name for name in job.limits.allow if name not in idle]
    said = [f"--allow {name} is without effect: {why}." for name, why in idle.items()]
    if tried:
        together = " and ".join(tried) if len(tried) < 3 else ", ".join(tried)
        said.append(f"--allow {together}: not enough{', alone or together' if len(tried) > 1 else ''}.")
    return said


def _idle(allowance: str, job: Job) -> str | None:
    """Why a change that was allowed cannot be made on this job; None: it can."""
    full = job.method == "full" and "lora" not in job.limits.allow
    if allowance in ("quantize", "lora-rank", "lora-targets") and full:
        what = "only frozen weights can have 4 bits" if allowance == "quantize" else "full training has no adapters"
        return f"{what}, so it needs lora beside it (--allow lora,{allowance})"
    if allowance == "quantize" and job.method == "qlora":
        return "the weights have 4 bits already"
    if allowance == "lora" and job.method != "full":
        return "adapters are trained already"
    if allowance == "lora-targets" and job.lora.targets != "all":
        return "the adapters' layers were named"
    if allowance == "lora-rank" and job.lora.rank == 1:
        return "no rank is lower than 1"
    if allowance == "8bit-optimizer" and job.optimizer != "adamw":
        return f"it is for adamw, and the optimizer is {job.optimizer}"
    if allowance == "precision" and job.precision != "fp32":
        return f"{job.precision} is computed in already"
    if allowance == "pure-16bit" and not job.master_weights:
        return f"it is pure {job.precision} already"
    return None


# --- time -----------------------------------------------------------------------------------------


def hours(job: Job, effective_batch: int, way: Way) -> float | None:
    """Hours to finish; None where neither steps nor the number of samples are known."""
    steps = steps_of(job, effective_batch)
    return None if steps is None else steps * way.pace.step_s / 3600


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


def time_words(hours: float) -> str:
    """In the unit that people would use."""
    if hours < 1:
        minutes = max(1, round(60 * hours))
        return f"{minutes} minute{'' if minutes == 1 else 's'}"
    return f"{hours:.1f} hours" if hours < 48 else f"{hours / 24:.1f} days"


def is_cut_off(plan: Plan) -> bool:
    """Whether the job's own time limit ends before the training does."""
    limit = plan.job.timeout
    return plan.hours is not None and limit is not None and 3600 * plan.hours > timeout_s(limit)


def _cut_off(plan: Plan) -> list[str]:
    if not is_cut_off(plan) or plan.hours is None or plan.job.timeout is None:
        return []
    share = timeout_s(plan.job.timeout) / (3600 * plan.hours)
    return [
        f"The timeout of {plan.job.timeout} cuts it off: all steps take about {time_words(plan.hours)}, so about "
        f"{share:.0%} of them are done when it stops."
    ]


def unproven(hardware: Hardware) -> tuple[str, ...]:
    said = []
    if hardware.nodes > 1:
        said.append("Several nodes: these files were rendered and never run by us.")
    if hardware.gpu.vendor in ("hygon", "amd"):
        said.append(f"{hardware.gpu.name}: planned and rendered from documentation, never run by us.")
    if hardware.gpu.vendor == "hygon":
        said.append(
            "PyTorch's memory segments cannot grow on this stack, so fragmentation may take more than is priced: "
            "--margin 10% leaves room for it."
        )
    return tuple(said)
