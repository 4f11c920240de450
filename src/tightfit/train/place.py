"""Where this process stands among the ranks: its number, its device, and the group it belongs to.

Ranks must part in order: without a last barrier and `destroy_process_group` about one exit in ten aborts.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from inspect import signature
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tightfit.hardware.slurm import has_its_own_gpu, slurm_rank
from tightfit.messages import Message, Said, as_json, from_json, text
from tightfit.train.config import Options, WorkerConfig
from tightfit.types import ConfigError, HardwareError

GROUP_TIMEOUT = timedelta(minutes=30)  # for a collective: one that takes longer hangs
WRITING = timedelta(hours=6)  # for the rank whose disk is slowest, when a checkpoint is written
EXCHANGE, RECEIVE = "all_to_all_single", "irecv"
RECEIVED_STD = 1e-2
"""Of what a rehearsed rank of a pipeline receives: hidden states, and gradients, which fp16 may not overflow."""
PATIENCE = timedelta(days=2)  # for the rank that downloads weights and tokenises data


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    rank: int
    local_rank: int
    world: int
    device: torch.device
    launcher: str
    rehearsal: bool = False
    job: str | None = None  # SLURM's number for what this is a rank of

    @property
    def leads(self) -> bool:
        return self.rank == 0 or self.rehearsal

    @property
    def is_alone(self) -> bool:
        """There is nobody to talk to."""
        return self.rehearsal or self.world == 1

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def device_number(self) -> int:
        """What DeepSpeed takes for the local rank: it only chooses a GPU by it."""
        return self.local_rank if self.device.index is None else self.device.index


def place_of(environment: Mapping[str, str], config: WorkerConfig, options: Options) -> Place:
    """This process's place, as its launcher told it; a plan for several ranks is not started alone."""
    ranks = config.world.ranks
    if options.rehearse:
        device = _device(0, config, environment)
        rank = config.rehearsed_gpu * config.levers.stage_ranks(ranks)
        return Place(rank=rank, local_rank=0, world=ranks, device=device, launcher="rehearsal", rehearsal=True)
    # Torchrun's names, or SLURM's under `srun`.
    rank, local, world, launcher = 0, 0, 1, "python"
    if "RANK" in environment and "WORLD_SIZE" in environment:
        rank, world = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        local = int(environment.get("LOCAL_RANK", rank))
        torchrun = "torchrun" if "TORCHELASTIC_RUN_ID" in environment else ""
        launcher = environment.get("TIGHTFIT_LAUNCHER", torchrun) or text("train.a-launcher")
    elif (found := slurm_rank(environment)) is not None:
        rank, local, world, launcher = found.rank, found.local_rank, found.world, "srun"
    if world != ranks:
        fix = Message("train.how-to-start", plan=config.plan)
        if world == 1:
            raise ConfigError(Message("train.single-process", ranks=ranks, fix=fix))
        raise ConfigError(Message("train.other-ranks", ranks=ranks, world=world, fix=fix))
    device = _device(local, config, environment)
    job = environment.get("SLURM_JOB_ID")
    return Place(rank=rank, local_rank=local, world=world, device=device, launcher=launcher, job=job)


def _device(local_rank: int, config: WorkerConfig, environment: Mapping[str, str]) -> torch.device:
    if config.world.vendor == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise HardwareError(Message("train.no-gpus"))
    count = torch.cuda.device_count()
    if (index := device_index(local_rank, count, environment)) is None:
        raise HardwareError(Message("train.too-few-gpus", wanted=config.world.gpus_per_node, count=count))
    return torch.device("cuda", index)


def device_index(local_rank: int, count: int, environment: Mapping[str, str]) -> int | None:
    """The GPU of a rank among the `count` that it sees; None: there is none for it."""
    if local_rank < count:
        return local_rank
    return 0 if count == 1 and has_its_own_gpu(environment, local_rank) else None


def rendezvous(place: Place) -> Any:
    """Where ranks leave each other messages before there is a group. Preparing data may take hours."""
    if place.is_alone:
        return torch._C._distributed_c10d.HashStore()
    from torch.distributed.rendezvous import rendezvous as meeting

    # All processes are started at once: PATIENCE is for their work, not for one that never comes.
    store, *_ = next(iter(meeting("env://", rank=place.rank, world_size=place.world, timeout=GROUP_TIMEOUT)))
    return store


def join(place: Place, store: Any) -> None:
    """Become a member of the group. The host has a backend of its own: offloaded gradients meet there."""
    if place.on_gpu:
        torch.cuda.set_device(place.device)
    if place.rehearsal:
        join_alone(place.rank, place.world)
        return
    backend = "cpu:gloo,cuda:nccl" if place.on_gpu else "gloo"
    group = store if place.world == 1 else torch._C._distributed_c10d.PrefixStore("tightfit", store)
    dist.init_process_group(backend, rank=place.rank, world_size=place.world, store=group, timeout=GROUP_TIMEOUT)


def join_alone(rank: int, world: int) -> None:
    """Become the one real rank of a group of `world`: torch's fake one, which allocates every buffer and sends nothing.

    What it gathers are copies of this rank's own share. What it scatters, torch before 2.13 leaves as it lay in memory,
    and likewise what it exchanges: such gradients may be infinite, fp16 then skips every step, and the optimizer's
    memory is never measured. So this rank's share is put there, or all that it has. It gathers by a copy for each rank,
    launched one by one; a real group launches once, and so does this one. Nothing more is allocated than in a real
    group.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    # By the names of several torch versions; the last one takes a list of shares, the others the whole.
    for name in ("reduce_scatter_tensor", "reduce_scatter_single", "reduce_scatter"):
        for module in (dist, dist.distributed_c10d):  # DeepSpeed and FSDP2 call both
            if hasattr(module, name):
                setattr(module, name, fill_own_share(getattr(module, name)))
    for module in (dist, dist.distributed_c10d):
        setattr(module, EXCHANGE, keep_own(getattr(module, EXCHANGE)))
    for module in (dist, dist.distributed_c10d):
        setattr(module, RECEIVE, receive_something(getattr(module, RECEIVE)))
    for name in ("all_gather_into_tensor", "all_gather_single"):
        for module in (dist, dist.distributed_c10d):
            if hasattr(module, name):
                setattr(module, name, gather_at_once(getattr(module, name)))


def gather_at_once(gather: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, which fills its first argument with copies of the second at once."""
    how = signature(gather)

    def gather_and_fill(*words: Any, **named: Any) -> Any:
        told = how.bind(*words, **named).arguments
        output, given, *_ = told.values()
        if told.get("async_op"):
            rest = dict(list(told.items())[2:])
            return gather(output.view(-1), given.view(-1), **rest)  # torch's fake group takes no other shapes
        rank, world = dist.get_rank(told.get("group")), dist.get_world_size(told.get("group"))
        rows, row = output.view(world, -1), given.view(1, -1)
        if row.nbytes % 8 == 0 and row.data_ptr() % 8 == 0 == output.data_ptr() % 8:
            rows, row = rows.view(torch.int64), row.view(torch.int64)  # the fewer elements, the faster
        in_place = row.data_ptr() == rows[rank].data_ptr()
        with torch.no_grad():
            for others in (rows[:rank], rows[rank + 1 :]) if in_place else (rows,):
                if len(others):
                    others.copy_(row)
        return None

    return gather_and_fill


def receive_something(receive: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, whose first argument is filled with numbers of a size that a model computes with."""

    def receive_and_fill(output: torch.Tensor, *words: Any, **named: Any) -> Any:
        done = receive(output, *words, **named)
        with torch.no_grad():
            output.normal_(std=RECEIVED_STD)
        return done

    return receive_and_fill


def keep_own(exchange: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, whose first argument is filled with the second, as if every rank had sent the same; again and
    again where more arrives than is sent."""

    def exchange_and_fill(output: torch.Tensor, given: torch.Tensor, *words: Any, **named: Any) -> Any:
        done = exchange(output, given, *words, **named)
        with torch.no_grad():
            for begin in range(0, len(output), max(1, len(given))):
                part = output[begin : begin + len(given)]
                part.copy_(given[: len(part)])
        return done

    return exchange_and_fill


def fill_own_share(scatter: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, whose first argument is filled with this rank's share of the second."""
    how = signature(scatter)

    def scatter_and_fill(*words: Any, **named: Any) -> Any:
        told = how.bind(*words, **named)
        output, given, *_ = told.args
        done = scatter(*words, **named)
        rank, size = dist.get_rank(told.arguments.get("group")), output.numel()
        whole = isinstance(given, torch.Tensor)
        share = given.view(-1)[rank * size : (rank + 1) * size] if whole else given[rank].view(-1)
        if share.data_ptr() != output.data_ptr():  # ZeRO-3 scatters in place
            with torch.no_grad():
                output.view(-1).copy_(share)
        return done

    return scatter_and_fill


def cap(place: Place, cap_bytes: int) -> None:
    """Make the card a smaller one. DeepSpeed asks how much is free and takes other ways on a small card."""
    if not place.on_gpu:
        return
    total = torch.cuda.get_device_properties(place.device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(cap_bytes / total, 1.0), place.device)
    try:
        from deepspeed.accelerator import get_accelerator
    except ImportError:
        return
    get_accelerator().available_memory = lambda *_: cap_bytes - torch.cuda.memory_allocated()


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    now_bytes: int | None  # allocated on the GPU; None: there is none
    peak_bytes: int | None  # the most since the last `restart_peaks`
    host_bytes: int
    host_peak_bytes: int
    alloc_retries: int | None
    """Times since the process began that the allocator had to free its cache and try again; None: there is no GPU."""


def restart_peaks(device: torch.device) -> None:
    """Peaks are counted from here."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)


def read_memory(place: Place) -> Reading:
    """Of this process, on its GPU and on the host. Of memory that ranks share (host_memory.py) each has its part."""
    try:  # resident memory now and at its highest, as the kernel counts it
        text = Path("/proc/self/status").read_text(encoding="ascii")
    except OSError:
        text = ""
    host = {name: rest for name, _, rest in (line.partition(":") for line in text.splitlines())}
    now, peak, shared = (1024 * int(host.get(name, "0").split()[0]) for name in ("VmRSS", "VmHWM", "RssShmem"))
    others = shared - shared // place.world
    device, on_gpu = place.device, place.on_gpu
    # Once: memory_allocated and its kin each read all of it again.
    stats, missing = torch.cuda.memory_stats(device) if on_gpu else {}, 0 if on_gpu else None
    return Reading(
        now_bytes=stats.get("allocated_bytes.all.current", missing),
        peak_bytes=stats.get("allocated_bytes.all.peak", missing),
        host_bytes=now - others,
        host_peak_bytes=peak - others,
        alloc_retries=stats.get("num_alloc_retries", missing),
    )


def gather_into(output: torch.Tensor, given: torch.Tensor, group: Any = None) -> None:
    """All ranks' tensors one after the other. As this release calls it: a rehearsal puts its own in that place."""
    (getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor)(output, given, group=group)


def scatter_sum_into(output: torch.Tensor, given: torch.Tensor, group: Any = None) -> None:
    """This rank's part of the sum over the ranks."""
    (getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor)(output, given, group=group)


def meet(place: Place, group: Any = None) -> None:
    """Wait for every rank."""
    if not place.is_alone:
        dist.all_reduce(torch.zeros(1), group=group)  # over gloo: a barrier of NCCL would claim memory on the GPU


def make_side_group(place: Place) -> Any:
    """A group by which another thread meets all ranks, so that nothing of the training's is met. All ranks ask for it
    at the same moment; None: there is nobody to meet."""
    return None if place.is_alone else dist.new_group(backend="gloo", timeout=WRITING)


def words(place: Place, text: str, group: Any = None) -> list[str]:
    """What each rank has to say, in the order of ranks."""
    if place.is_alone:
        return [text]
    said = text.encode()
    longest = max(1, *everyone(place, len(said), group))
    held = torch.zeros(place.world, longest, dtype=torch.uint8)
    held[place.rank, : len(said)] = torch.tensor(list(said), dtype=torch.uint8)
    dist.all_reduce(held, group=group)
    return [bytes(row.tolist()).rstrip(b"\0").decode() for row in held]


def gather_messages(place: Place, said: Sequence[Message]) -> list[tuple[list[int], Said]]:
    """What ranks have to say, each sentence once: who says it, and the sentence, which names them unless all do."""
    found: dict[Said, list[int]] = {}
    lines = words(place, json.dumps([as_json(each) for each in said]))
    for rank, line in enumerate(lines):
        for each in map(from_json, json.loads(line)):
            found.setdefault(each, []).append(rank)
    return [
        (ranks, each)
        if len(ranks) == len(lines)
        else (ranks, Message("train.said-by-ranks", count=len(ranks), ranks=", ".join(map(str, ranks)), said=each))
        for each, ranks in found.items()
    ]


def totals(place: Place, *values: float, group: Any = None) -> list[float]:
    """The sums over all ranks, on the host, in one go."""
    held = torch.tensor(values, dtype=torch.float64)
    if not place.is_alone:
        dist.all_reduce(held, group=group)
    return [float(each) for each in held.tolist()]


def everyone(place: Place, value: int, group: Any = None) -> list[int]:
    """The number that each rank has, in the order of ranks."""
    if place.is_alone:
        return [value]
    own = (value * (rank == place.rank) for rank in range(place.world))
    return [int(each) for each in totals(place, *own, group=group)]


def part(place: Place) -> None:
    """Leave together."""
    if not dist.is_initialized():
        return
    meet(place)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.destroy_process_group()
