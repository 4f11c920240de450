"""The ways in which one training can be computed: the free levers, multiplied out.

Nothing here changes what is trained. A lever that the user pinned has one value. The depth of checkpointing
is left out: `ladder.py` searches it.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import product
from typing import Any

from tightfit.inputs.flags import (
    AUTO,
    check_levers,
    find_compile_obstacle,
    find_ddp_obstacle,
    find_tiling_obstacle,
    released_at_once,
)
from tightfit.inputs.layouts import find_group_obstacle, find_stream_obstacle
from tightfit.memory import Scale
from tightfit.memory.activations import setting_of
from tightfit.memory.optimizers import EIGHT_BIT
from tightfit.memory.units import BUFFERS, units_of, updates_ahead
from tightfit.messages import Listing, Message
from tightfit.pace import TIE_S, KernelChoice
from tightfit.pace.rates import rates_of
from tightfit.pace.work import ELEMENTWISE, outdoes_eager
from tightfit.planner.selection import selections
from tightfit.planner.trainers import Abilities
from tightfit.types import (
    COMPRESSING,
    DDP,
    PARTS,
    STRATEGY,
    STREAM,
    Attention,
    AttentionKernel,
    Buckets,
    Checkpointing,
    Compile,
    ConfigError,
    Engine,
    Hardware,
    Kernels,
    Levers,
    Loss,
    Mamba1,
    ModelShape,
    Offload,
    Scan,
    UserError,
)

Pinned = frozenset[str]  # names of the levers that the user fixed

STRATEGIES: tuple[tuple[Engine, Offload, Offload], ...] = (
    (DDP, "none", "none"),
    ("zero0", "none", "none"),
    ("zero1", "none", "none"),
    ("zero2", "none", "none"),
    ("fsdp2", "none", "none"),
    ("zero3", "none", "none"),
    ("zero1", "cpu", "none"),
    ("zero2", "cpu", "none"),
    ("fsdp2", "cpu", "cpu"),
    ("zero3", "cpu", "none"),
    ("zero3", "cpu", "cpu"),
    ("zero3", "nvme", "none"),
    ("zero3", "nvme", "cpu"),
    ("zero3", "nvme", "nvme"),
    (STREAM, "none", "none"),
    (STREAM, "nvme", "none"),
)
"""Engine, place of the optimizer's states, place of the weights; the simpler ones first."""

IF_PINNED: tuple[tuple[Engine, Offload, Offload], ...] = (
    ("zero3", "none", "cpu"),
    ("zero3", "none", "nvme"),
    ("zero3", "cpu", "nvme"),
)
"""What runs as well but is never the better choice: only for those who name a place themselves."""
_PLACES = (*STRATEGIES, *IF_PINNED)

BY_PARAMETER: tuple[Engine, ...] = (DDP, "zero0", "fsdp2")
"""The engines that keep the optimizer's states parameter by parameter, also where their wrapper has fp32 copies of the
weights (`FP16_UnfusedOptimizer`). ZeRO's stages keep them for flat partitions, where one 8-bit scale covers the end of
one parameter and the start of the next: a checkpoint that has each parameter on its own cannot hold such states."""

SMALL_BUCKETS = (200_000_000, 50_000_000)  # elements of ZeRO's buckets, beside DeepSpeed's own 500 million
FILLED = 0.9  # of the host's RAM, where more of it makes a step faster: the system wants the rest
LONG_TOKENS = 16_384  # of a sequence whose activations outweigh what it costs to hold fewer of them
MOST_MICRO = 256  # sequences in one forward pass: long before that a GPU is busy, and more only take memory
FRUGAL: dict[str, Any] = {
    "prefetch_bucket": 10_000_000,
    "max_live_parameters": 100_000_000,
    "max_reuse_distance": 100_000_000,
}
"""ZeRO-3 with little gathered at a time."""


@dataclass(frozen=True)
class Corner:
    """Everything but the depth of checkpointing."""

    rest: Levers  # all but the choice
    choice: KernelChoice
    searched: bool  # the depth of checkpointing is ours to choose; all else about it is that of `rest`

    @property
    def is_whole(self) -> bool:
        """Layers that recompute do so as a whole."""
        return not self.rest.checkpointing.select

    def depths(self, n_layers: int, *, partial: bool = True) -> tuple[int, ...]:
        """Numbers of recomputing layers to try, from none to all: only these two, where a trainer knows nothing
        between, and where compiled layers recompute elementwise work alone, which all of them do or none. Of those
        that send what they keep all but one are as good as all: the top layer's stays."""
        depth = self.rest.checkpointing
        is_light = self.rest.compile == "layers" and depth.select == ELEMENTWISE and not depth.offload
        if not partial or is_light:
            return 0, n_layers
        return _every_depth(n_layers, sends=depth.offload)

    def count_depths(self, n_layers: int, *, partial: bool = True) -> int:
        """Those to compare; of what is pinned there is one."""
        return len(self.depths(n_layers, partial=partial)) if self.searched else 1

    @cached_property
    def levers(self) -> Levers:
        """With full checkpointing, or with what was pinned. Most corners are timed alone, and need no levers."""
        return self.choice.over(self.rest)


@lru_cache(maxsize=64)
def _every_depth(n_layers: int, *, sends: bool) -> tuple[int, ...]:
    return (*range(n_layers - sends), n_layers)


def strategies(base: Levers, pinned: Pinned, hardware: Hardware, ours: bool = True) -> list[Levers]:
    """The base with each engine and place that can run it. `ours`: our own worker does, and saves it."""
    ways = []
    places = {"offload_optimizer", "offload_param"} & pinned
    for engine, optimizer, param in (*STRATEGIES, *(IF_PINNED if places else ())):
        levers = replace(base, engine=engine, offload_optimizer=optimizer, offload_param=param)
        if any(name in pinned and getattr(levers, name) != getattr(base, name) for name in STRATEGY):
            continue
        if levers.buckets.max_reuse_distance == Buckets().max_reuse_distance:  # nobody said how far
            levers = released_at_once(levers)
        if levers.streams and "engine" not in pinned and not gains_by_streaming(hardware):
            continue
        if _runs(levers, hardware, ours=ours):
            ways += [replace(levers, shard_within=size) for size in _group_sizes(levers, pinned, hardware)]
        ahead = replace(levers, update="ahead")
        if updates_ahead(ahead) and "update" not in pinned and _runs(ahead, hardware, ours=ours):
            ways.append(ahead)
    return ways


def gains_by_streaming(hardware: Hardware) -> bool:
    """Whether a card has a host beside it from which layers can come: a CPU is its own."""
    return hardware.gpu.vendor not in ("cpu", "hygon")  # whose torch is too old


def _group_sizes(levers: Levers, pinned: Pinned, hardware: Hardware) -> list[int]:
    """Among how many GPUs a copy of the weights may be shared: all, or those of a node where there are several."""
    if "shard_within" in pinned:
        size = levers.shard_within
        may = not size or find_group_obstacle(levers, hardware.world) is None
        return [0 if size == hardware.world else size] if may else []
    node = replace(levers, shard_within=hardware.gpus_per_node)
    has_several = levers.stage_ranks(hardware.world) > hardware.gpus_per_node > 1
    can_split = has_several and find_group_obstacle(node, hardware.world) is None
    return [0, hardware.gpus_per_node] if can_split else [0]


def _runs(levers: Levers, hardware: Hardware, *, ours: bool) -> bool:
    """What no engine does, or does wrongly, or does so that it cannot be saved."""
    moved = levers.offload_optimizer != "none"
    if levers.engine != COMPRESSING.get(levers.compress, levers.engine):
        return False
    if find_stream_obstacle(levers, hardware.nodes) is not None:
        return False
    if levers.streams and not levers.buckets.pin_memory:
        return False  # what it copies from has to be locked
    if moved and levers.optimizer != "adamw":
        return False  # the host's optimizer is DeepSpeed's CPU Adam
    if ours and levers.optimizer in EIGHT_BIT and (levers.engine not in BY_PARAMETER or _is_pure(levers)):
        return False
    if levers.engine == DDP:
        return ours and not find_ddp_obstacle(levers)
    if levers.engine == "zero0" and levers.precision == "fp16":
        return False  # the unsharded engine divides by a loss scale that it never multiplied with
    if "nvme" in (levers.offload_optimizer, levers.offload_param) and hardware.nvme_bytes is None:
        return False
    if levers.is_fsdp2:
        whole = levers.optimizer == "adafactor"  # its means go over whole rows and columns
        return levers.master_weights and not whole and has_fsdp2(hardware)
    return True


def _is_pure(levers: Levers) -> bool:
    """16 bits and no fp32 copy of the weights, which DeepSpeed refuses without ZeRO."""
    return not levers.master_weights and levers.precision != "fp32"


def has_fsdp2(hardware: Hardware) -> bool:
    return hardware.gpu.vendor != "hygon"  # the DTK's torch 2.4 is older than the fully_shard we use


def check_states(base: Levers, pinned: Pinned, hardware: Hardware) -> None:
    """8-bit states that were pinned to an engine whose checkpoint could not hold them, or have none that could."""
    if base.optimizer not in EIGHT_BIT:
        return
    states, offloaded = Message("plan.states-of", optimizer=base.optimizer), base.offload_optimizer != "none"
    # those that run such states and keep them by parameter, the one that holds less first
    ways = [replace(base, engine=engine, offload_param="none") for engine in reversed(BY_PARAMETER)]
    runs = [levers.engine for levers in ways if not offloaded and _runs(levers, hardware, ours=True)]
    holding = [f"--engine {engine}" for engine in runs]
    if "engine" in pinned and base.engine not in BY_PARAMETER:
        fix = Listing((*holding, "--optimizer adamw"), "or")
        raise ConfigError(Message("plan.states-of-no-parameter", engine=base.engine, states=states, fix=fix))
    if not holding and not offloaded:
        precision = f"pure {base.precision}" if _is_pure(base) else base.precision
        raise ConfigError(Message("plan.no-engine-for-states", states=states, precision=precision))


def corners(
    shape: ModelShape,
    base: Levers,
    pinned: Pinned,
    hardware: Hardware,
    effective_batch: int,
    trainer: Abilities | None = None,
) -> Iterator[Corner]:
    """Every combination but the depth of checkpointing, for one strategy's levers. `trainer`: who will run it; None:
    our own worker."""
    trainer = trainer or Abilities()
    searched = is_searched(base, pinned)
    share = effective_batch // base.data_ranks(hardware.world)
    attentions, scans = attention_choices(shape, base, pinned, hardware), _scans(shape, base, pinned, hardware, trainer)
    buckets = bucket_choices(base, pinned, hardware)
    if rests_on_nvme(base) and "optimizer_buffer_count" not in pinned:
        buckets = rooms_for_states(shape, base, hardware)
    choices = [KernelChoice(*each) for each in product(attentions, scans, buckets)]
    losses: tuple[Loss, ...] = ("plain", "fused")
    if "loss" in pinned:
        losses = (base.loss,)
    elif not trainer.fuses(shape):
        losses = ("plain",)
    speeds = {choice: _speeds(shape, choice.over(base), pinned, hardware, trainer) for choice in choices}
    for micro in _micro_batches(base, pinned, share):
        for loss in losses:
            levers = base.change(micro_batch=micro, accumulation=share // micro, loss=loss, compile="off")
            with suppress(UserError):
                # of which neither kernels nor buckets make a difference; what needs a compiler `_speeds` knows
                check_levers(levers.change(checkpointing=replace(levers.checkpointing, offload=False)), shape)
                every = {how: None for each in speeds.values() for how in each}
                fastest = max([how[0] for how in every], default="off", key=("off", "layers").index)
                ways = {
                    how: _cut_mlps(
                        _list_depths(
                            shape,
                            levers.change(compile=how[0], kernels=how[1]),
                            pinned,
                            hardware,
                            tries_parts=how == (fastest, "plain") and trainer.selects_on(hardware),
                        ),
                        shape,
                        pinned,
                    )
                    for how in every
                }
                yield from [
                    Corner(way, choice, searched) for choice in choices for how in speeds[choice] for way in ways[how]
                ]


def is_searched(base: Levers, pinned: Pinned) -> bool:
    """Whether the depth of checkpointing, or what of it is selected, is ours to choose."""
    return "checkpointing" not in pinned or base.checkpointing.select == AUTO


def _speeds(
    shape: ModelShape, levers: Levers, pinned: Pinned, hardware: Hardware, trainer: Abilities
) -> list[tuple[Compile, Kernels]]:
    """How layers may be computed. Compiled ones are the faster, but their gradients come all at once: both are tried.
    What a compiler fuses needs no other kernels."""
    compiles = trainer.compiles_on(hardware) and levers.kernels == "plain"
    if "compile" in pinned:
        compiles = levers.compile == "layers"
    borrows = "kernels" not in pinned and trainer.borrows_kernels(shape, hardware)
    kernels: tuple[Kernels, ...] = ("plain", "fused") if borrows else (levers.kernels,)
    found: list[tuple[Compile, Kernels]] = [("off", each) for each in kernels]
    if compiles and find_compile_obstacle(levers, shape) is None:
        found.insert(0, ("layers", levers.kernels))
    needed = levers.compile if "compile" in pinned else None
    if "checkpointing" in pinned and levers.checkpointing.select and levers.checkpointing.offload:
        needed = "layers"
    return [each for each in found if needed in (None, each[0])]


def _list_depths(
    shape: ModelShape, levers: Levers, pinned: Pinned, hardware: Hardware, *, tries_parts: bool
) -> list[Levers]:
    """With whole layers that recompute, and with parts of them; parts alone where that was asked for. Of layers that
    are not compiled parts are tried only where none can be: they take twice as long to launch. What is left of
    compiled ones may wait on the host."""
    if not is_searched(levers, pinned):
        return [levers]
    asked = "checkpointing" in pinned
    can_send = levers.compile == "layers" and levers.trainer == "tightfit" and hardware.gpu.vendor != "cpu"
    can_send = can_send and levers.pipeline_parallel == 1  # or what several micro batches keep would wait there at once
    found = [] if asked else [Checkpointing(layers=None)]
    # ZeRO-3's hooks fetch the weights of a whole layer, whatever of it runs again.
    if asked or (tries_parts and levers.stage != 3):
        worth = selections(shape, levers, hardware)
        alone, sending = worth.alone, worth.alone if asked else worth.sending
        if levers.streams and levers.compile == "layers" and alone:
            alone += (PARTS,)  # in its own code a layer stops after what it needs; the engine runs it anew to its end
            sending += (worth.largest,) if worth.largest not in sending else ()  # weights leave the link less room
        found += [Checkpointing(layers=None, select=parts) for parts in alone]
        if can_send:
            found += [Checkpointing(layers=None, select=parts, offload=True) for parts in sending]
    return [levers.change(checkpointing=each) for each in found]


def _cut_mlps(ways: list[Levers], shape: ModelShape, pinned: Pinned) -> list[Levers]:
    """As they are and, where sequences are long, with tiles as well."""
    if "mlp" in pinned:
        return [way for way in ways if way.mlp == "plain" or find_tiling_obstacle(way, shape) is None]
    tiled = [way.change(mlp="tiled") for way in ways if way.sequence >= LONG_TOKENS]
    return [*ways, *(way for way in tiled if find_tiling_obstacle(way, shape) is None)]


def _micro_batches(base: Levers, pinned: Pinned, share: int) -> list[int]:
    """Those that divide a GPU's share of the batch. Fewer GPUs have a larger one, which a pin may not divide."""
    micros = [micro for micro in range(1, min(share, MOST_MICRO) + 1) if share % micro == 0]
    if "micro_batch" in pinned:
        micros = [base.micro_batch] if share % base.micro_batch == 0 else []
    elif "accumulation" in pinned and share % base.accumulation == 0:
        micros = [share // base.accumulation]
    if "accumulation" in pinned:
        micros = [micro for micro in micros if share // micro == base.accumulation]
    return micros


def attention_choices(
    shape: ModelShape, base: Levers, pinned: Pinned, hardware: Hardware
) -> tuple[AttentionKernel, ...]:
    """`flash` is a package of its own: tried only where sdpa cannot do the same, as with a sliding window. `eager` only
    where it may be faster or hold less than sdpa."""
    mixers = [block.mixer for block in shape.blocks if isinstance(block.mixer, Attention)]
    if "attention" in pinned or not mixers:
        return (base.attention,)
    windowed = any(m.sliding_window is not None and m.sliding_window <= base.sequence for m in mixers)
    tries_flash = windowed and base.precision != "fp32" and (hardware.gpu.sm or 0) >= 80
    setting = setting_of(base.change(micro_batch=1, attention="sdpa"), hardware.gpu, shape.model_type)
    tries_eager = not outdoes_eager(shape, setting, rates_of(hardware, base.precision).card)
    return ("sdpa", *(("flash",) if tries_flash else ()), *(("eager",) if tries_eager else ()))


def _scans(shape: ModelShape, base: Levers, pinned: Pinned, hardware: Hardware, trainer: Abilities) -> tuple[Scan, ...]:
    mambas = [block.mixer for block in shape.blocks if isinstance(block.mixer, Mamba1)]
    if "scan" in pinned or not mambas:
        return (base.scan,)
    if not trainer.is_ours:  # transformers takes the official kernels where they are installed
        return ("official",) if hardware.gpu.vendor == "nvidia" else ("torch",)
    return ("tightfit", "official", "torch") if hardware.gpu.vendor == "nvidia" else ("tightfit", "torch")


def bucket_choices(base: Levers, pinned: Pinned, hardware: Hardware) -> list[Buckets]:
    """DeepSpeed's own buffers, then smaller ones, then ones that let communication overlap."""
    usual = base.buckets
    if "buckets" in pinned or base.stage in (None, 0):
        return [usual]
    sizes: list[dict[str, Any]] = [{}, *({"reduce_bucket": n, "allgather_bucket": n} for n in SMALL_BUCKETS)]
    if base.stage == 3:
        little = FRUGAL if base.offload_param != "nvme" else {**FRUGAL, "max_reuse_distance": usual.max_reuse_distance}
        sizes += [{**little}, {**little, "reduce_bucket": SMALL_BUCKETS[-1], "allgather_bucket": SMALL_BUCKETS[-1]}]
    elif hardware.world > 1:
        sizes += [{**size, "overlap_comm": True} for size in sizes]
    return [replace(usual, **size) for size in sizes]


def rests_on_nvme(levers: Levers) -> bool:
    """Whether layers stream whose states rest on an NVMe, but for those that RAM has room for."""
    return levers.streams and levers.offload_optimizer == "nvme"


def rooms_for_states(shape: ModelShape, base: Levers, hardware: Hardware) -> list[Buckets]:
    """For as many units' states as RAM has room for, the others being on an NVMe; and for as few as will do."""
    ram, units = hardware.host_ram_bytes, units_of(shape, base)
    trained = [unit for unit in (units.before, *units.layers, units.after) if unit.trained]

    def with_room(count: int) -> Levers:
        return replace(base, buckets=replace(base.buckets, optimizer_buffer_count=count))

    def fits(count: int) -> bool:
        held = Scale(shape, with_room(count), hardware).host_bytes(Checkpointing(layers=None))
        return ram is not None and held <= FILLED * ram

    counts = range(BUFFERS, max(BUFFERS, len(trained)) + 1)
    most = bisect(counts, False, key=lambda count: not fits(count)) - 1
    return [with_room(count).buckets for count in sorted({counts[max(0, most)], BUFFERS}, reverse=True)]


def frugal(every: Iterable[Corner]) -> list[Corner]:
    """The corners of one strategy that can hold least; the likeliest first. One sequence at a time holds least where
    gradients of earlier ones wait anyway; all at once, where they need not."""
    all_corners = list(every)
    micros = {corner.rest.micro_batch for corner in all_corners}
    ends = {min(micros), max(micros)} if micros else set()
    least = min((_buffers(corner.choice.buckets) for corner in all_corners), default=None)
    kept = [each for each in all_corners if each.rest.micro_batch in ends and _buffers(each.choice.buckets) == least]
    # Between the passes a layer that recomputes whole keeps least; in its own turn one may hold less of which a part
    # was kept. Of layers that send what they keep, those that keep more have less to recompute in their turn.
    most = max((len(each.rest.checkpointing.select) for each in kept), default=0)

    def may_hold_least(each: Corner) -> bool:
        depth = each.rest.checkpointing
        return not depth.select or depth.offload or len(depth.select) == most

    return sorted(filter(may_hold_least, kept), key=_likeliness)


def _likeliness(corner: Corner) -> tuple[bool, int, bool, bool]:
    rest = corner.rest
    return not corner.is_whole, rest.micro_batch, rest.loss != "fused", rest.mlp != "tiled"


def _buffers(buckets: Buckets) -> tuple[int, int, int]:
    return int(buckets.overlap_comm or False), buckets.reduce_bucket, buckets.optimizer_buffer_count


def find_simplest(level: Iterable[tuple[float, Levers]], most_s: float, world: int) -> Levers | None:
    """Of ways with their seconds the simplest of those that take no more than this, which is what the fastest takes."""
    near = [(round(seconds, 9), levers) for seconds, levers in level if seconds <= most_s + TIE_S]
    return min(near, key=lambda each: (each[0], complexity(each[1], world)), default=(0.0, None))[1]


def complexity(levers: Levers, world: int) -> tuple[int, ...]:
    """Which of two equally fast ways is the simpler: one that needs no room on the host, then fewer moving parts."""
    place = (levers.engine, levers.offload_optimizer, levers.offload_param)
    depth = levers.checkpointing
    return (
        int(depth.offload or levers.streams or place[1:] != ("none", "none")),
        _PLACES.index(place) if place in _PLACES else len(_PLACES),
        levers.groups,
        int(levers.buckets != Buckets()),
        int(levers.loss != "plain"),
        int(levers.mlp != "plain"),
        int(levers.compile != "off"),
        int(levers.kernels != "plain"),
        len(depth.select),
        ("sdpa", "flash", "eager").index(levers.attention),
        ("tightfit", "official", "torch").index(levers.scan),
        int(depth.offload),
        {0: 0, None: 1}.get(depth.layers, 2),
        levers.accumulation,
        -levers.buckets.reduce_bucket,
        -levers.buckets.max_live_parameters,
        int(levers.buckets.overlap_comm or False),
        depth.layers or 0,
        int(levers.update == "ahead"),
        -levers.resident,
        world,
    )
