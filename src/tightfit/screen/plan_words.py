"""The words of a plan on the screen: what is trained on what, the levers as flags, the time it takes.

The line of levers is a promise: after `tightfit estimate` with the same model and machine it prices the very way that
was chosen. So it holds every flag that `estimate` would set otherwise by itself, and every one that the user's own
command set otherwise, since people put the line behind that.
"""

from __future__ import annotations

from typing import cast

from tightfit.hardware.catalogue import native_bf16
from tightfit.hardware.words import parse_hardware
from tightfit.inputs.flags import flags_from_levers, spelt
from tightfit.job.file import levers_of
from tightfit.messages import Message, Said, text
from tightfit.planner.plan import Plan, Way
from tightfit.planner.reasons import further, is_cut_off, steps_of, time_words, worth_showing
from tightfit.priced import billions, strategy_name
from tightfit.types import Hardware, Levers, Lora, UserError

ALWAYS = ("engine", "micro_batch", "accum", "checkpointing")
"""The levers that say most, printed whatever they are."""


def model_words(plan: Plan) -> str:
    """What is trained, and how: as it was chosen, where that differs from what was asked."""
    shown = plan.chosen or next(iter(worth_showing(plan)), None)
    shape = shown.shape if shown else plan.shape
    levers = shown.levers if shown else levers_of(plan.job, plan.shape)
    parts = [
        f"{shape.name} ({billions(shape.parameters)})",
        levers.method if levers.lora is None else text("screen.rank", method=levers.method, rank=levers.lora.rank),
        levers.precision if levers.master_weights else text("screen.pure", precision=levers.precision),
        *([] if levers.optimizer == "adamw" else [levers.optimizer]),
    ]
    return ", ".join(parts)


def hardware_words(hardware: Hardware) -> str:
    """`2 nodes × 8 × A100`, `6 × 24GB cards`."""
    name = hardware.gpu.name
    many = "s" if hardware.gpus_per_node > 1 and name.endswith(" card") else ""
    if hardware.nodes == 1:
        return f"{hardware.gpus_per_node} × {name}{many}"
    return text("screen.nodes", nodes=hardware.nodes, per_node=hardware.gpus_per_node, name=f"{name}{many}")


def head_words(plan: Plan, hardware: Hardware, tokens: int) -> Message:
    """What is trained on what, and how much of it in a step."""
    what, where = model_words(plan), hardware_words(hardware)
    return Message("screen.head", what=what, hardware=where, batch=plan.effective_batch, tokens=tokens)


def verdict_words(plan: Plan, way: Way, needed: str, size: str) -> Message:
    """How fast it is, in what, and how long it takes where the steps are known."""
    steps = steps_of(plan.job, plan.effective_batch)
    duration: Message | str = ""
    if plan.hours is not None and steps is not None:
        late = Message("screen.late", timeout=plan.job.timeout) if is_cut_off(plan) else ""
        duration = Message("screen.duration", time=time_words(plan.hours), steps=steps, late=late)
    return Message(
        "screen.verdict",
        way=strategy_name(way.levers),
        pace=way.pace.tokens_per_s,
        needed=needed,
        size=size,
        duration=duration,
    )


def lever_flags(plan: Plan, way: Way, *, with_model: bool = False) -> list[str]:
    """The way as flags of `estimate`, each with its value. `with_model`: no command named the model."""
    now, method = flags_from_levers(way.levers), way.levers.method
    # What `estimate` takes where nothing is said.
    plain = Levers(method=method, lora=None if method == "full" else Lora())
    usual = flags_from_levers(plain) | {"method": Levers().method}
    if native_bf16(way.hardware.gpu.arch) is False:
        usual["precision"] = ""  # chosen by the card: what was chosen is said
    try:  # what the user's own command or file says
        said = flags_from_levers(levers_of(plan.job, plan.shape))
    except UserError:
        said = {}
    names = [*ALWAYS, *(name for name in now if name not in ALWAYS)]
    told = [
        name
        for name in names
        if name in ALWAYS or name not in usual or now[name] != usual[name] or now[name] != said.get(name, now[name])
    ]
    flags = [f"--model {way.shape.name}"] if with_model or way.shape.name != plan.shape.name else []
    flags += [f"{spelt(name)} {now[name]}" for name in told if name != "master_weights"]
    if not way.levers.master_weights:
        flags.append("--no-master-weights")
    # `estimate` prices by itself all GPUs that --gpus names, or one.
    word = plan.job.hardware.gpus
    usual_world = 1 if word is None or word.strip().lower() == "this" else parse_hardware(word).world
    if way.world != usual_world:
        flags.append(f"--world {way.world}")
    return flags


def reason_lines(plan: Plan) -> list[Said]:
    """What was not said above and will not be said below: that nothing fits, the verdict has said already."""
    return [
        cast(Message, said.fields["nearest"]) if isinstance(said, Message) and said.id == "plan.nothing-free" else said
        for said in further(plan)
    ]
