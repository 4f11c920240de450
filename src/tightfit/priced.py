"""An estimate with all that it was made from, and the words for it.

No drawing here: a program that asks for JSON, the planner and the page say the same sentences as the
terminal does.
"""

from __future__ import annotations

from dataclasses import dataclass

from tightfit.inputs.flags import checkpointing_word
from tightfit.memory.units import SLOTS, units_of
from tightfit.messages import Message, Said, text
from tightfit.types import DDP, FSDP2, STREAM, ZERO3, Engine, Footprint, Hardware, Levers, ModelShape, Pace

GIB = 2**30

STEP = ("forward", "loss", "backward", "step")  # the phases of a training step
WEIGHTS = frozenset({"weights", "gathered_weights"})
GRADIENTS = frozenset({"gradients", "buckets"})
OPTIMIZER = frozenset({"master_weights", "optimizer_states"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """One estimate with all that it was made from: what a picture or a report shows."""

    shape: ModelShape
    levers: Levers
    world: int
    hardware: Hardware | None
    footprint: Footprint
    said: tuple[Said, ...] = ()  # what the inputs' readers had to say: files, the hardware's word
    planned: bool = False
    """Whether the levers are those that `tightfit train` would choose, since a job file names no engine."""

    @property
    def because(self) -> tuple[Said, ...]:
        """Every choice that was made for the user."""
        return (*self.said, *(self.hardware.because if self.hardware else ()), *self.footprint.because)

    @property
    def gpu_spare_bytes(self) -> int | None:
        """What stays free on each card; negative: what is missing; None: no card was named."""
        return _less(self.hardware.gpu.memory_bytes if self.hardware else None, self.footprint.gpu.required_bytes)

    @property
    def host_spare_bytes(self) -> int | None:
        """Likewise of a node's RAM; None: its size is not known."""
        return _less(self.hardware.host_ram_bytes if self.hardware else None, self.footprint.host.peak_bytes_per_node)

    @property
    def fits(self) -> bool | None:
        """None: there is no card to compare with."""
        if self.gpu_spare_bytes is None:
            return None
        spare = (self.gpu_spare_bytes, self.host_spare_bytes, self.nvme_spare_bytes)
        return all(room is None or room >= 0 for room in spare)

    @property
    def nvme_spare_bytes(self) -> int | None:
        """None: the size of the disk is not known."""
        return _less(self.hardware.nvme_bytes if self.hardware else None, self.footprint.host.nvme_bytes_per_node)


def _less(have: int | None, need: int) -> int | None:
    return None if have is None else have - need


@dataclass(frozen=True, slots=True)
class Share:
    """What one GPU holds, in four parts, each at its largest within a training step."""

    priced: Priced

    @property
    def weights_bytes(self) -> int:
        return self._largest(WEIGHTS)

    @property
    def gradients_bytes(self) -> int:
        return self._largest(GRADIENTS)

    @property
    def optimizer_bytes(self) -> int:
        return self._largest(OPTIMIZER)

    @property
    def activations_bytes(self) -> int:
        """All that is neither weights, gradients nor optimizer: what grows with the tokens."""
        return self._largest(WEIGHTS | GRADIENTS | OPTIMIZER, others=True)

    def _largest(self, names: frozenset[str], others: bool = False) -> int:
        steps = [phase for phase in self.priced.footprint.gpu.phases.values() if phase.name in STEP]
        return max(
            sum(size for name, size in phase.components.items() if (name in names) is not others) for phase in steps
        )


def billions(count: int) -> str:
    """6.93B, 494M: a count of parameters as people say it."""
    for unit, letter, decimals in ((10**9, "B", 2), (10**6, "M", 0), (10**3, "k", 0)):
        if count >= unit:
            return f"{count / unit:.{decimals}f}{letter}"
    return str(count)


def amounts(*sizes_bytes: int) -> list[str]:
    """Sizes in GiB to one decimal, or to as many as it takes to tell different ones apart."""
    first = 1 if min(sizes_bytes) >= GIB // 20 else 2
    for decimals in range(first, 5):
        words = [f"{size / GIB:.{decimals}f}" for size in sizes_bytes]
        if len(set(words)) == len(set(sizes_bytes)):
            break
    return words


def why_no_pace(shape: ModelShape, hardware: Hardware) -> Message | None:
    """Why no pace is claimed; None: one is. Of a CPU it is only where its products were measured, and of a Mamba there
    not at all: nobody has measured a scan on one. What is computed still orders the ways."""
    if hardware.gpu.vendor != "cpu":
        return None
    if shape.scans:
        return Message("plan.no-scan-pace")
    known = hardware.measured.rates if hardware.measured is not None else {}
    is_known = {"memory", "launch_s"} <= set(known) and any(name.startswith("products.") for name in known)
    return None if is_known else Message("plan.no-pace")  # an interrupted measurement may lack what a step hangs on


def seconds_words(pace: Pace) -> dict[str, str | None]:
    """`step`, the seconds of a step, and `range`, between which they lie; None where nobody knows."""
    decimals = 0 if pace.step_s >= 100 else 2 if pace.step_s >= 0.1 else 3
    step, low, high = (f"{seconds:.{decimals}f}" for seconds in (pace.step_s, pace.low_s, pace.high_s))
    return {"step": step, "range": f"{low}–{high}" if 0 < pace.low_s < pace.high_s and low != high else None}


def verdict(priced: Priced) -> Message:
    """The answer, in one sentence."""
    need = priced.footprint.gpu.required_bytes
    where = Message("price.each-of", world=priced.world) if priced.world > 1 else Message("price.the-gpu")
    if priced.hardware is None or priced.gpu_spare_bytes is None:
        return Message("price.needs", needed=amounts(need)[0], where=where)
    needed, usable, apart = amounts(need, priced.hardware.gpu.memory_bytes, abs(priced.gpu_spare_bytes))
    if priced.gpu_spare_bytes < 0 and priced.levers.streams and not priced.levers.resident:
        said = {"needed": needed, "usable": usable, "where": where, "apart": apart}
        largest = name_largest_layer(priced.shape, priced.levers)
        return Message("price.stream-too-large", **said, largest=largest)
    if priced.gpu_spare_bytes < 0:
        return Message("price.too-large", needed=needed, usable=usable, where=where, apart=apart)
    if priced.host_spare_bytes is not None and priced.host_spare_bytes < 0:
        ram = priced.hardware.host_ram_bytes or 0
        host, have = amounts(priced.footprint.host.peak_bytes_per_node, ram)
        return Message("price.host-too-small", host=host, have=have)
    if priced.nvme_spare_bytes is not None and priced.nvme_spare_bytes < 0:
        disk, have = amounts(priced.footprint.host.nvme_bytes_per_node, priced.hardware.nvme_bytes or 0)
        return Message("price.nvme-too-small", disk=disk, have=have)
    return Message("price.fits", needed=needed, usable=usable, where=where, apart=apart)


def name_largest_layer(shape: ModelShape, levers: Levers) -> Message:
    """Which layer that streams is the largest, counted from 1, and what such layers take of the GPU."""
    layers = units_of(shape, levers).layers
    largest = max(range(len(layers)), key=lambda number: layers[number].bytes)
    size = amounts(layers[largest].bytes)[0]
    return Message("price.largest-layer", layer=largest + 1, size=size, count=min(SLOTS, len(layers)))


def strategy_line(priced: Priced) -> Message:
    """How the training is spread, and over what."""
    return Message("price.on-machine", way=strategy_name(priced.levers), machine=machine_words(priced))


def machine_words(priced: Priced) -> Said:
    """`6 × RTX 4090`."""
    if priced.hardware is None:
        return Message("price.gpus", world=priced.world)
    return f"{priced.world} × {priced.hardware.gpu.name}"


def training_line(priced: Priced) -> str:
    """What one step computes, and how."""
    levers = priced.levers
    scan, attention = Message("price.scan", scan=levers.scan), Message("price.attention", attention=levers.attention)
    kernel = scan if priced.shape.scans else attention
    return f"{training_words(levers)} · {kernel}"


def training_words(levers: Levers) -> str:
    """The same for any model: what does not depend on the kind of its layers."""
    tokens = text("price.tokens", batch=levers.micro_batch, tokens=levers.sequence)
    lora = levers.lora
    parts = (
        levers.method if lora is None else text("price.rank", method=levers.method, rank=lora.rank),
        tokens if levers.accumulation == 1 else f"{tokens} × {levers.accumulation}",
        levers.precision if levers.master_weights else text("price.pure", precision=levers.precision),
        levers.optimizer,
        text("price.checkpointing", layers=checkpointing_word(levers.checkpointing)),
        text("price.loss", loss=levers.loss),
        *([text("price.tiled")] if levers.mlp == "tiled" else []),
        *([text("price.compiled")] if levers.compile == "layers" else []),
        *([text("price.liger")] if levers.kernels == "fused" else []),
    )
    return " · ".join(parts)


ENGINES: dict[Engine, Said] = {
    DDP: "DDP",
    "zero0": Message("plan.zero0"),
    "zero1": "ZeRO-1",
    "zero2": "ZeRO-2",
    ZERO3: "ZeRO-3",
    FSDP2: "FSDP2",
    STREAM: Message("plan.stream"),
}


def strategy_name(levers: Levers) -> Said:
    """`ZeRO-3, optimizer + weights on CPU`."""
    engine: Said = ENGINES[levers.engine]
    if levers.streams and levers.resident:
        engine = Message("plan.stream-but", count=levers.resident)
    if levers.update == "ahead":
        engine = Message("plan.stream-ahead", engine=engine)
    if levers.shard_within:
        engine = Message("plan.in-groups", engine=engine, size=levers.shard_within)
    if levers.sequence_parallel > 1:
        engine = Message("plan.shares-sequences", engine=engine, size=levers.sequence_parallel)
    if levers.tensor_parallel > 1:
        engine = Message("plan.shares-layers", engine=engine, size=levers.tensor_parallel)
    if levers.expert_parallel > 1:
        engine = Message("plan.shares-experts", engine=engine, size=levers.expert_parallel)
    if levers.pipeline_parallel > 1:
        said = {"engine": engine, "size": levers.pipeline_parallel, "stages": levers.stages_per_gpu}
        engine = Message("plan.in-pipeline" if levers.stages_per_gpu == 1 else "plan.in-interleaved-pipeline", **said)
    if levers.compress != "none":
        engine = Message("plan.compressed", engine=engine, how=levers.compress)
    if levers.states != "fp32":
        engine = Message("plan.states-in", engine=engine, states=levers.states)
    optimizer, param = levers.offload_optimizer, levers.offload_param
    places = {"cpu": "CPU", "nvme": "NVMe"}
    if param == optimizer:
        return engine if param == "none" else Message("plan.one-place", engine=engine, place=places[param])
    if param == "none":
        return Message("plan.optimizer-away", engine=engine, place=places[optimizer])
    if optimizer == "none":
        return Message("plan.weights-away", engine=engine, place=places[param])
    return Message("plan.two-places", engine=engine, place=places[optimizer], other=places[param])


def describe_training(priced: Priced) -> Message:
    total, trainable = priced.shape.parameters, priced.footprint.trainable_parameters
    if trainable == total:
        return Message("price.all-trained", short=billions(total), total=total)
    return Message("price.some-trained", short=billions(total), total=total, trained=billions(trainable))


def spell_component(component: str) -> str:
    """A component's name as people read it."""
    return component.replace("_", " ")
