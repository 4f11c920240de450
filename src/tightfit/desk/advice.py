"""For each component, the lever that would shrink it and has not been pulled yet.

Free levers come first; one that changes the training is named only when no free one is left, and says
so. The tables are tried from the top. A lever is advised only if pulling it really lowers what the GPU
needs: each is priced before it is named, since what shrinks one part may grow another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from tightfit.memory.overhead import name_component
from tightfit.messages import Message, text
from tightfit.priced import Priced, amounts, spell_component
from tightfit.types import FSDP2, ZERO3, Buckets, Checkpointing, Levers, UserError

COSTLY = Message("cli.changes-training")
FEW_LIVE, FEW_PREFETCHED = 100_000_000, 10_000_000  # a tenth and less of DeepSpeed's own limits on gathered weights


@dataclass(frozen=True, slots=True)
class AdviceCase:
    levers: Levers
    many: bool  # several GPUs train
    in_step: bool  # the peak is the optimizer's step

    @property
    def on_gpu(self) -> bool:
        """The optimizer works on the GPU."""
        return self.levers.offload_optimizer == "none"

    @property
    def engine(self) -> str:
        """Empty: the weights are on the host already."""
        return self.levers.engine if self.levers.offload_param == "none" else ""


Change = Callable[[Levers], Levers]
Rule = tuple[Callable[[AdviceCase], bool], str, Change | None]
"""When it may help, what to say, and the levers it leads to; None: it changes the training, and is not priced."""
Ask = Callable[[Levers], int]  # what the GPU would need with these levers, in bytes
WORTHWHILE = 0.995


def _pull(**changes: Any) -> Change:
    return lambda levers: replace(levers, **changes)


def _buckets(**changes: Any) -> Change:
    return lambda levers: replace(levers, buckets=replace(levers.buckets, **changes))


def _halve(levers: Levers) -> Levers:
    return replace(levers, micro_batch=-(-levers.micro_batch // 2), accumulation=2 * levers.accumulation)


_LOW = ("ddp", "zero0", "zero1", "zero2")  # engines under which every GPU has all of the weights
_PLAIN = Buckets().reduce_bucket
_TO_CPU, _BOTH_TO_CPU = _pull(offload_optimizer="cpu"), _pull(offload_param="cpu", offload_optimizer="cpu")
_SMALLER_BATCH: Rule = (lambda case: case.levers.micro_batch > 1, "cli.smaller-pieces", _halve)
_SHORTER: Rule = (lambda case: True, "cli.only-shorter-seq", None)
_LORA: Rule = (lambda case: case.levers.method == "full", "cli.method-lora-trains", None)
_TO_HOST: tuple[Rule, ...] = (
    (lambda case: case.on_gpu and case.levers.is_fsdp2, "cli.offload-param-cpu-moves", _BOTH_TO_CPU),
    (
        lambda case: case.on_gpu and case.levers.shards_nothing,
        "cli.engine-zero2-offload-optimizer",
        _pull(engine="zero2", offload_optimizer="cpu"),
    ),
    (lambda case: case.on_gpu and not case.levers.shards_nothing, "cli.offload-optimizer-cpu-moves", _TO_CPU),
)
_TO_ZERO1 = _pull(engine="zero1")
_SHARE: Rule = (lambda case: case.many and case.levers.shards_nothing, "cli.engine-zero1-shares", _TO_ZERO1)

RULES: dict[str, tuple[Rule, ...]] = {
    "weights": (
        (lambda case: case.many and case.levers.engine in _LOW, "cli.engine-zero3-shares", _pull(engine=ZERO3)),
        (lambda case: case.engine == FSDP2, "cli.offload-param-cpu-keeps", _BOTH_TO_CPU),
        (lambda case: case.engine == ZERO3, "cli.offload-param-cpu-keeps", _pull(offload_param="cpu")),
        (lambda case: case.engine in _LOW, "cli.engine-zero3-offload-param", _pull(engine=ZERO3, offload_param="cpu")),
        (lambda case: case.levers.method != "qlora", "cli.method-qlora-holds", None),
    ),
    "gathered weights": (
        (
            lambda case: case.levers.stage == 3 and case.levers.buckets.prefetch_bucket > FEW_PREFETCHED,
            "cli.gather-less",
            _buckets(max_live_parameters=FEW_LIVE, prefetch_bucket=FEW_PREFETCHED),
        ),
    ),
    "gradients": (
        (lambda case: case.many and case.levers.engine in _LOW[:2], "cli.engine-zero2-keeps", _pull(engine="zero2")),
        *_TO_HOST,
        _LORA,
    ),
    "buckets": (
        (
            lambda case: case.levers.buckets.reduce_bucket >= _PLAIN,
            "cli.reduce-bucket-5e7-makes",
            _buckets(reduce_bucket=_PLAIN // 10),
        ),
    ),
    "master weights": (_SHARE, *_TO_HOST, _LORA),
    "optimizer states": (
        _SHARE,
        *_TO_HOST,
        (lambda case: case.levers.optimizer == "adamw", "cli.optimizer-adamw8bit-engine", None),
        _LORA,
    ),
    "activations": (
        (
            lambda case: case.levers.checkpointing.layers is not None,
            "cli.checkpointing-full-computes",
            _pull(checkpointing=Checkpointing(layers=None)),
        ),
        _SMALLER_BATCH,
        (
            lambda case: not case.levers.checkpointing.offload,
            "cli.checkpointing-full-offload",
            _pull(checkpointing=Checkpointing(layers=None, offload=True)),
        ),
        _SHORTER,
    ),
    "recompute": (
        (lambda case: case.levers.attention == "eager", "cli.attention-sdpa-never", _pull(attention="sdpa")),
        (lambda case: case.levers.scan == "torch", "cli.scan-tightfit-never", _pull(scan="tightfit")),
        _SMALLER_BATCH,
        _SHORTER,
    ),
    "logits": (
        (lambda case: case.levers.loss == "plain", "cli.loss-fused-never", _pull(loss="fused")),
        _SMALLER_BATCH,
        _SHORTER,
    ),
    "temporaries": (
        (lambda case: case.in_step and _SHARE[0](case), "cli.engine-zero1-takes", _TO_ZERO1),
        (
            lambda case: case.in_step and case.on_gpu and case.levers.stage not in (None, 0),
            "cli.offload-optimizer-cpu-takes",
            _TO_CPU,
        ),
        _SMALLER_BATCH,
    ),
}


def advise(priced: Priced, ask: Ask | None = None, most: int = 3) -> list[str]:
    """A sentence for each of the largest components of the peak. Without `ask`, levers are named unpriced."""
    gpu = priced.footprint.gpu
    case = AdviceCase(priced.levers, priced.world > 1, gpu.peak_phase == "step")
    held = gpu.phases[gpu.peak_phase].components
    largest = sorted((name for name in held if held[name]), key=lambda name: -held[name])[:most]
    limit = int(gpu.required_bytes * WORTHWHILE)

    def helps(change: Change | None) -> bool:
        if ask is None or change is None:
            return True
        try:
            return ask(change(priced.levers)) < limit
        except UserError:
            return False  # this model or these levers do not go with it

    half, twice = -(-priced.levers.micro_batch // 2), priced.levers.accumulation * 2
    otherwise = text("cli.more-gpus-would" if priced.levers.shards_parameters else "cli.smaller-model-would")
    lines = []
    for name in largest:
        rules = RULES.get(spell_component(name), ())
        found = next((rule for rule in rules if rule[0](case) and helps(rule[2])), None)
        how = otherwise
        if found is not None:
            costly = {} if found[2] else {"costly": COSTLY}
            how = text(found[1], **costly).format(world=priced.world, half=half, twice=twice)
        lines.append(text("cli.shrinks", name=name_component(name), size=amounts(held[name])[0], how=how))
    return lines
