"""For each component, the lever that would shrink it and has not been pulled yet.

Free levers come first; one that changes the training is named only when no free one is left, and says
so. The tables are tried from the top and the first line whose condition holds is the advice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tightfit.priced import Priced, amounts, shown
from tightfit.types import Buckets, Levers, PhaseName

COSTLY = "changes the training"


@dataclass(frozen=True, slots=True)
class Case:
    """What the advice depends on."""

    levers: Levers
    world: int
    phase: PhaseName

    @property
    def many(self) -> bool:
        return self.world > 1

    @property
    def on_gpu(self) -> bool:
        """The optimizer works on the GPU."""
        return self.levers.offload_optimizer == "none"


Rule = tuple[Callable[[Case], bool], str]

_SMALLER_BATCH: Rule = (
    lambda case: case.levers.micro_batch > 1,
    "--micro-batch {half} with --accum {twice} is the same training in smaller pieces",
)
_SHORTER: Rule = (lambda case: True, f"only a shorter --seq would, and that {COSTLY}")
_LORA: Rule = (lambda case: case.levers.method == "full", f"--method lora trains adapters alone, which {COSTLY}")
_TO_HOST: tuple[Rule, ...] = (
    (
        lambda case: case.on_gpu and case.levers.engine == "fsdp2",
        "--offload-param cpu moves them to host RAM, with the weights",
    ),
    (
        lambda case: case.on_gpu and case.levers.engine == "zero0",
        "--engine zero2 --offload-optimizer cpu moves them to host RAM",
    ),
    (lambda case: case.on_gpu, "--offload-optimizer cpu moves them to host RAM"),
)

RULES: dict[str, tuple[Rule, ...]] = {
    "weights": (
        (
            lambda case: case.many and case.levers.engine in ("zero0", "zero1", "zero2"),
            "--engine zero3 shares them among the {world} GPUs",
        ),
        (
            lambda case: case.levers.offload_param == "none" and case.levers.engine in ("zero3", "fsdp2"),
            "--offload-param cpu keeps them in host RAM between uses",
        ),
        (
            lambda case: case.levers.offload_param == "none",
            "--engine zero3 --offload-param cpu keeps them in host RAM between uses",
        ),
        (lambda case: case.levers.method != "qlora", f"--method qlora holds them in 4 bits, which {COSTLY}"),
    ),
    "gathered weights": (
        (
            lambda case: case.levers.engine == "zero3" and case.levers.buckets.prefetch_bucket > 0,
            "a smaller --max-live-parameters and --prefetch-bucket gather less at a time",
        ),
    ),
    "gradients": (
        (
            lambda case: case.many and case.levers.engine in ("zero0", "zero1"),
            "--engine zero2 keeps this GPU's share only",
        ),
        *_TO_HOST,
        _LORA,
    ),
    "buckets": (
        (
            lambda case: case.levers.buckets.reduce_bucket >= Buckets().reduce_bucket,
            "--reduce-bucket 5e7 makes them ten times smaller",
        ),
    ),
    "master weights": (
        (lambda case: case.many and case.levers.engine == "zero0", "--engine zero1 shares them among the {world} GPUs"),
        *_TO_HOST,
        _LORA,
    ),
    "optimizer states": (
        (lambda case: case.many and case.levers.engine == "zero0", "--engine zero1 shares them among the {world} GPUs"),
        *_TO_HOST,
        (
            lambda case: case.levers.optimizer == "adamw",
            f"--optimizer adamw8bit holds them in 8 bits, which {COSTLY}",
        ),
        _LORA,
    ),
    "activations": (
        (lambda case: case.levers.checkpointing.layers is not None, "--checkpointing full computes them again instead"),
        _SMALLER_BATCH,
        (
            lambda case: not case.levers.checkpointing.offload,
            "--checkpointing full+offload keeps the layers' inputs in host RAM",
        ),
        _SHORTER,
    ),
    "recompute": (
        (lambda case: case.levers.attention == "eager", "--attention sdpa never holds the attention matrix"),
        (lambda case: case.levers.scan == "torch", "--scan tightfit never holds the scan's states"),
        _SMALLER_BATCH,
        _SHORTER,
    ),
    "logits": (
        (lambda case: case.levers.loss == "plain", "--loss fused never holds them whole"),
        _SMALLER_BATCH,
        _SHORTER,
    ),
    "temporaries": (
        (
            lambda case: case.phase == "step" and case.on_gpu and case.levers.engine in ("zero1", "zero2", "zero3"),
            "--offload-optimizer cpu takes the optimizer's step on the host",
        ),
        _SMALLER_BATCH,
    ),
}


def advise(priced: Priced, most: int = 3) -> list[str]:
    """A sentence for each of the largest components of the peak."""
    gpu = priced.footprint.gpu
    case = Case(priced.levers, priced.world, gpu.peak_phase)
    held = gpu.phases[gpu.peak_phase].components
    largest = sorted((name for name in held if held[name]), key=lambda name: -held[name])[:most]
    return [f"{shown(name)}, {amounts(held[name])[0]} GiB: {_shrink(shown(name), case)}." for name in largest]


def _shrink(component: str, case: Case) -> str:
    for holds, sentence in RULES.get(component, ()):
        if holds(case):
            levers = case.levers
            half = -(-levers.micro_batch // 2)
            return sentence.format(world=case.world, half=half, twice=levers.accumulation * 2)
    more = "more GPUs or " if case.levers.engine in ("zero3", "fsdp2") else ""
    return f"every lever is pulled; {more}a smaller model would"
