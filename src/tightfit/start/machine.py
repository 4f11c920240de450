"""This machine as a run finds it: its GPUs less those that live runs have, its RAM less what they have reserved."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from shutil import disk_usage
from typing import Any, TypeVar

from tightfit.hardware.machine import Device, Occupancy, occupancy
from tightfit.hardware.named import is_this
from tightfit.inputs.surroundings import cache_folder
from tightfit.job import Job
from tightfit.messages import Message, Said, text
from tightfit.priced import GIB, amounts
from tightfit.runs.records import WorkerFile
from tightfit.runs.reservations import Reservation, Reservations
from tightfit.types import ConfigError, Hardware, HardwareError

T = TypeVar("T")
WAIT_S = 5.0  # between two looks at what others hold
LOOK_S = 0.1
FREE_SHARE = 0.9
"""Of a card's memory: with so much free nobody else is on it, where it is not known how much a command needs."""
ROUNDED = 1.1
"""A machine is sold with more than its system can use: up to so much more than there is was rounded, not claimed."""


class Busy(HardwareError):
    """Others have what the run needs, and may give it back.

    `of` names what is awaited where the sentence holds amounts that change: the GPU, and the process on it.
    """

    def __init__(self, problem: Message, fix: Message, of: tuple[str, ...] = ()) -> None:
        super().__init__(Message("cli.busy", problem=problem, fix=fix))
        self.problem, self.of = problem, of or (str(problem),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """The machines of a run, and which of them this is."""

    count: int = 1
    rank: int = 0
    address: str = "127.0.0.1"
    port: int | None = None  # None: a free one
    hostfile: str | None = None  # the text of a hostfile: all machines are started from here


def reservations() -> Reservations:
    """What live runs of this user have reserved."""
    return Reservations(cache_folder() / "reservations")


def taken_gpus(live: Sequence[Reservation]) -> dict[str, Reservation]:
    """GPU → the live run that has it."""
    return {key: entry for entry in live for key in entry.gpus}


def change_hardware(hardware: Hardware, said: str, **changes: Any) -> Hardware:
    """Other hardware than was named or found, and the sentence that says so."""
    return replace(hardware, because=(*hardware.because, said), **changes)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingMachine:
    """What there is, and what of it is taken."""

    occupancy: Occupancy
    live: tuple[Reservation, ...]
    nodes: Nodes
    num_gpus: int | None
    max_gpus: int | None

    @property
    def taken(self) -> dict[str, Reservation]:
        return taken_gpus(self.live)

    @property
    def reserved_bytes(self) -> int:
        return sum(entry.host_bytes for entry in self.live)

    def adapt(self, job: Job, hardware: Hardware) -> Hardware:
        """The planned-for hardware, less what is taken."""
        named = not is_this(job.hardware.gpus)
        if job.hardware.gpu_ids is not None:
            self.check_ids(named=named)
        if self.nodes.hostfile is None and hardware.nodes == 1:
            # What was claimed for this machine, held against it: a run that counts on more would end in the middle.
            from tightfit.hardware.machine import ram_here

            there, claimed = ram_here()[0], hardware.host_ram_bytes
            if job.hardware.host_ram is not None and there is not None and claimed is not None and claimed > there:
                if claimed > ROUNDED * there:
                    more = Message("cli.host-ram-more-than", host_ram=job.hardware.host_ram, there=there / GIB)
                    raise HardwareError(more)
                gpu = hardware.gpu
                if gpu.vendor == "cpu":
                    gpu = replace(gpu, memory_bytes=min(gpu.memory_bytes, there // 2))
                said = text("cli.host-ram-gib", there=there / GIB, host_ram=job.hardware.host_ram)
                hardware = change_hardware(hardware, said, gpu=gpu, host_ram_bytes=there)
            if hardware.nvme_bytes is not None and job.hardware.nvme_path is not None:
                folder = Path(job.hardware.nvme_path).expanduser().absolute()
                room = disk_usage(next(place for place in (folder, *folder.parents) if place.is_dir())).free
                if hardware.nvme_bytes > room:
                    about_disk = {"nvme": job.hardware.nvme, "free": room / GIB, "folder": folder}
                    raise HardwareError(Message("cli.nvme-more-than", **about_disk))
        if not named:
            # Without the GPUs and the RAM of live runs. RAM that the user names is the user's to share out.
            devices, taken = self.occupancy.devices, self.taken
            free = [device for device in devices if device.key not in taken]
            if job.hardware.gpu_ids is None and len(free) < min(len(devices), hardware.gpus_per_node):
                busy = next(device for device in devices if device.key in taken)
                about = {"free": len(free), "number": busy.number, "who": taken[busy.key].words}
                if not free:
                    raise Busy(Message("cli.every-gpu-use-2", who=about["who"]), Message("cli.wait-for-it-with"))
                if self.num_gpus is not None:
                    raise Busy(
                        Message("cli.num-gpus-gpus-free", num_gpus=self.num_gpus, **about),
                        Message("cli.say-fewer-or-wait", free=len(free)),
                    )
                said = text("cli.gpus-used-gpu", devices=len(devices), **about)
                hardware = change_hardware(hardware, said, gpus_per_node=len(free))
            ram, reserved = hardware.host_ram_bytes, self.reserved_bytes
            if reserved and ram is not None and job.hardware.host_ram is None:
                left, who, gpu = ram - reserved, self.live[0].words, hardware.gpu
                if left <= 0:
                    problem = Message("cli.live-runs-reserved", ram=ram / GIB, who=who)
                    raise Busy(problem, Message("cli.wait-for-it-with"))
                if gpu.vendor == "cpu":
                    gpu = replace(gpu, memory_bytes=left // 2)
                said = text("cli.host-ram-reserved", left=amounts(left)[0], ram=ram / GIB, who=who)
                hardware = change_hardware(hardware, said, gpu=gpu, host_ram_bytes=left)
        if self.max_gpus is not None and self.max_gpus < hardware.gpus_per_node:
            said = text("cli.gpus-used-each", max_gpus=self.max_gpus, gpus_per_node=hardware.gpus_per_node)
            hardware = change_hardware(hardware, said, gpus_per_node=self.max_gpus)
        if hardware.nodes == 1 and self.nodes.count > 1:
            if self.nodes.hostfile is not None and hardware.gpu.vendor == "cpu":
                raise HardwareError(Message("cli.machine-gpu-judge"))
            said = text("cli.all-nodes-taken", count=self.nodes.count)
            hardware = change_hardware(hardware, said, nodes=self.nodes.count)
        return hardware

    def check_ids(self, *, named: bool) -> None:
        """GPUs by number, where numbers mean nothing or two things."""
        if self.occupancy.chosen_by_user:
            raise ConfigError(Message("cli.gpu-ids-both-choose", variable=self.occupancy.variable))
        if not self.occupancy.devices and not named:
            raise HardwareError(Message("cli.gpu-ids-names-gpus"))

    def check_ram(self, worker: WorkerFile) -> None:
        """For a plan that was made elsewhere or before: whether this machine has the RAM."""
        from tightfit.hardware.machine import this_machine

        ram = this_machine().host_ram_bytes
        left = None if ram is None else ram - self.reserved_bytes
        if left is not None and worker.ram_bytes_per_node > left:
            need, there = amounts(worker.ram_bytes_per_node, max(left, 0))
            held = text("cli.after-what-live", words=self.live[0].words) if self.live else ""
            problem = Message("cli.plan-needs-ram", need=need, there=there, held=held)
            busy = Busy(problem, Message("cli.plan-again-here"))
            raise busy if self.live else HardwareError(busy.said)

    def devices_for(self, worker: WorkerFile, ids: Sequence[int] | None) -> tuple[Device, ...]:
        """The GPUs that the ranks of this node get: those that were named, or the first that no live run has, those
        with room before those without."""
        if ids is not None:
            self.check_ids(named=False)
        if worker.vendor == "cpu":
            return ()
        devices, wanted, taken = self.occupancy.devices, worker.gpus_per_node, self.taken
        if len(devices) < wanted:
            has = text("cli.machine-has", devices=len(devices)) if devices else text("cli.machine-none")
            raise HardwareError(Message("cli.plan-wants-plan", wanted=Message("cli.gpus", n=wanted), has=has))
        if ids is not None:
            if max(ids) >= len(devices):
                raise HardwareError(Message("cli.gpu-ids-gpus-machine", ids=max(ids), devices=len(devices) - 1))
            if len(ids) < wanted:
                there = Message("cli.gpus", n=len(ids))
                raise HardwareError(Message("cli.gpu-ids-names-plan", ids=there, wanted=wanted))
            chosen = [devices[number] for number in ids[:wanted]]
            for device in chosen:
                if device.key in taken:
                    problem = Message("cli.gpu-use-choose", number=device.number, who=taken[device.key].words)
                    raise Busy(problem, Message("cli.choose-or-wait"))
        else:
            free = [device for device in devices if device.key not in taken]
            if len(free) < wanted:
                who = self.live[0].words if self.live else text("cli.others")
                count = Message("cli.gpus", n=wanted)
                problem = Message("cli.plan-wants-free", gpus_per_node=count, free=len(free), who=who)
                raise Busy(problem, Message("cli.wait-with"))
            roomy_first = sorted(free, key=lambda device: not _has_room(device, worker))
            chosen = sorted(roomy_first[:wanted], key=devices.index)
        for device in chosen:
            check_free(device, worker)
        return tuple(chosen)


def _has_room(device: Device, worker: WorkerFile) -> bool:
    return device.free_bytes is None or device.free_bytes >= worker.required_bytes


def check_free(device: Device, worker: WorkerFile) -> None:
    """Whether the plan fits beside what others hold; nobody is asked to end anything that is not theirs."""
    if _has_room(device, worker):
        return
    assert device.free_bytes is not None
    need, free = amounts(worker.required_bytes, device.free_bytes)
    held, of = describe_holder(device)
    problem = Message("cli.too-little-for-plan", number=device.number, free=free, need=need, held=held)
    raise Busy(problem, Message("cli.wait-or-choose"), of)


def describe_holder(device: Device) -> tuple[Said, tuple[str, ...]]:
    """In words the process that holds most of a GPU, "" where none is known; and what is awaited: see `Busy`."""
    holder = max(device.holders, key=lambda each: each.held_bytes or 0, default=None)
    if holder is None:
        return "", (device.key,)
    about = ", ".join(filter(None, (holder.user, holder.command)))
    who = text("cli.process-of", pid=holder.pid, who=about) if about else text("cli.process", pid=holder.pid)
    return Message("cli.holds-rest", who=who), (device.key, who)


def wait_while_busy(
    ready: Callable[[], T], say: Callable[[str], None], give_up: Callable[[], bool] = lambda: False
) -> T | None:
    """What `ready` returns once nobody else holds what it needs; None: it was given up.

    What is awaited is said once, and again when it is another GPU or another's process.
    """
    said: set[str] = set()
    while not give_up():
        try:
            return ready()
        except Busy as error:
            if not said.issuperset(error.of):
                say(text("cli.waiting", problem=error.problem))
                said.update(error.of)
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline and not give_up():
            time.sleep(LOOK_S)
    return None


def wait_for_gpus(
    need_bytes: int | None, count: int, say: Callable[[str], None], give_up: Callable[[], bool] = lambda: False
) -> bool:
    """Whether there is room on the first `count` GPUs that a program may see; False: it was given up.

    `need_bytes`: of each; None: not known, so nobody else may be on it.
    """

    def look() -> bool:
        taken = taken_gpus(reservations().live())
        for device in occupancy().devices[:count]:
            if device.key in taken:
                problem = Message("cli.gpu-use-wait", number=device.number, words=taken[device.key].words)
                raise Busy(problem, Message("cli.wait-for-it"))
            free, total = device.free_bytes, device.total_bytes
            if free is None:
                continue
            held, of = describe_holder(device)
            about = {"number": device.number, "held": held}
            if need_bytes is not None and free < need_bytes:
                needed, left = amounts(need_bytes, free)
                problem = Message("cli.too-little-for-command", left=left, needed=needed, **about)
                raise Busy(problem, Message("cli.wait"), of)
            if need_bytes is None and total is not None and free < FREE_SHARE * total:
                left, whole = amounts(free, total)
                raise Busy(Message("cli.too-little-free", left=left, whole=whole, **about), Message("cli.wait"), of)
        return True

    return wait_while_busy(look, say, give_up) is not None
