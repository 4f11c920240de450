"""Why this way and not another, in plain sentences; and what can be said about the time it takes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import ceil

from tightfit.inputs.flags import checkpointing_word
from tightfit.job import Job
from tightfit.memory import estimate
from tightfit.planner.plan import Plan, Way
from tightfit.planner.search import Question, excess_share
from tightfit.priced import amounts, strategy_name
from tightfit.types import Checkpointing, Hardware, Mamba1

MOST_COMPARED = 4


def in_order(ways: Iterable[Way]) -> tuple[Way, ...]:
    """Those that fit first, each group the fastest first."""
    return tuple(sorted(ways, key=lambda way: (not way.fits, way.pace.step_s, strategy_name(way.levers))))


def of_choice(question: Question, way: Way) -> tuple[str, ...]:
    """What decided the levers of one way."""
    said = [_margin(way)]
    depth, total = way.levers.checkpointing.layers, question.shape.n_layers
    if "checkpointing" not in question.pinned:
        if depth is not None and 0 < depth < total:
            fewer = replace(way.levers, checkpointing=Checkpointing(layers=depth - 1))
            need = estimate(way.shape, fewer, way.world, way.hardware).gpu.required_bytes
            said.append(
                f"{depth} of {total} layers recompute their activations: with {depth - 1} a GPU would need "
                f"{amounts(need)[0]} GiB."
            )
        elif depth == 0:
            said.append("No layer recomputes: there is room for all activations.")
    if way.levers.loss == "fused" and "loss" not in question.pinned:
        said.append("The fused loss never holds all logits at once; the result is the same.")
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
    return f"Needs {needed} of {size} GiB on each GPU: {spare} GiB ({(card - need) / card:.1%} of the card) stay free."


def of_plan(plan: Plan, question: Question, said: tuple[str, ...]) -> tuple[str, ...]:
    """Every sentence under the table."""
    sentences = [*said, *_batch(plan), *question.hardware.because]
    if plan.chosen is not None:
        sentences += [f"Chosen: {strategy_name(plan.chosen.levers)}.", *plan.chosen.because]
        sentences += [f"It changes the training: {change}." for change in plan.chosen.changes]
        sentences += _against(plan, plan.chosen)
        sentences += plan.chosen.pace.because
        sentences += _scan(plan.chosen)
    else:
        sentences += _nothing(plan, question)
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


def _against(plan: Plan, chosen: Way) -> list[str]:
    """The tempting others: what was faster and does not fit, what fits and is slower."""
    faster, slower = [], []
    for way in plan.alternatives:
        name = strategy_name(way.levers)
        name = name[:1].upper() + name[1:]
        if way.world != chosen.world:
            name += f" on {way.world} GPUs" if way.world > 1 else " on one GPU"
        if not way.fits and way.pace.step_s < chosen.pace.step_s:
            faster.append(f"{name} would be faster but {missing(way)}.")
        elif way.fits:
            share = way.pace.step_s / chosen.pace.step_s - 1
            much = f"{share:.0%}" if share >= 0.005 else "less than 1%"
            slower.append(f"{name} fits too and is {much} slower, mostly by {_main_cause(way, chosen)}.")
    return [*faster[: MOST_COMPARED // 2], *slower][:MOST_COMPARED]


def missing(way: Way) -> str:
    """`needs 2.1 GiB more than the card has at the optimizer step`."""
    card, gpu = way.hardware.gpu.memory_bytes, way.footprint.gpu
    phase = "init" if gpu.init_peak_bytes > gpu.peak_bytes else gpu.peak_phase
    place = {"step": "at the optimizer step", "init": "while it is set up", "loss": "at the loss"}.get(
        phase, f"in the {phase} pass"
    )
    if gpu.required_bytes > card:
        return f"needs {amounts(gpu.required_bytes - card)[0]} GiB more than the card has {place}"
    if gpu.required_bytes > way.gpu_limit_bytes:
        return f"would leave only {amounts(max(card - gpu.required_bytes, 1))[0]} GiB of the card free {place}"
    ram = way.hardware.host_ram_bytes
    host = way.footprint.host
    if ram is not None and host.peak_bytes_per_node > ram:
        return f"needs {amounts(host.peak_bytes_per_node)[0]} of {amounts(ram)[0]} GiB of the host's RAM"
    return f"needs {amounts(max(host.nvme_bytes_per_node, 1))[0]} GiB of NVMe"


def _main_cause(way: Way, chosen: Way) -> str:
    more = {cause: seconds - chosen.pace.causes.get(cause, 0.0) for cause, seconds in way.pace.causes.items()}
    return max(more, key=lambda cause: more[cause])


def _scan(way: Way) -> list[str]:
    if any(isinstance(block.mixer, Mamba1) for block in way.shape.blocks) and way.levers.scan == "tightfit":
        return ["tightfit's own scan is taken to be as fast as the official kernels: it has not been timed yet."]
    return []


def _nothing(plan: Plan, question: Question) -> list[str]:
    """Nothing fits: how far it is, what would fit, how many GPUs would do."""
    sentences = []
    nearest = min(plan.alternatives, key=lambda way: excess_share(question, way.footprint), default=None)
    if nearest is not None:
        sentences.append(
            f"Nothing free fits. The nearest is {strategy_name(nearest.levers)} with "
            f"checkpointing {checkpointing_word(nearest.levers.checkpointing)}: it {missing(nearest)}."
        )
    else:
        sentences.append("No engine runs what was asked for: fewer pinned levers would leave a choice.")
    if plan.remedies:
        first, *rest = plan.remedies
        sentences.append(
            f"The cheapest change that would fit is --allow {first.allowance}: {first.cost} "
            f"({strategy_name(first.way.levers)}, {first.way.pace.tokens_per_s:,.0f} tokens/s)."
        )
        sentences += [
            f"--allow {other.allowance} would do as well: {other.cost} ({strategy_name(other.way.levers)}, "
            f"{other.way.pace.tokens_per_s:,.0f} tokens/s)."
            for other in rest
        ]
    else:
        sentences.append("No single change that can be allowed would make it fit.")
    if plan.gpus_needed is not None:
        sentences.append(f"Without any change, {plan.gpus_needed} of these GPUs would do.")
    else:
        sentences.append("No number of these GPUs would do without a change.")
    return sentences


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
