"""This machine as a run finds it: its GPUs less those that live runs have, its RAM less what they have reserved."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from shutil import disk_usage
from typing import TypeVar

from tightfit.cli.train_flags import TrainOptions
from tightfit.desk.request import Request
from tightfit.hardware.occupancy import Device, Occupancy, occupancy
from tightfit.hardware.probes.card import CardProcess
from tightfit.hardware.slurm import slurm_node
from tightfit.inputs.surroundings import cache_folder, inherited
from tightfit.job import Job
from tightfit.messages import Message, text
from tightfit.priced import GIB, amounts
from tightfit.runs.records import WorkerFile
from tightfit.runs.reservations import Reservation, Reservations
from tightfit.types import ConfigError, Hardware, HardwareError

T = TypeVar("T")
WAIT_S = 5.0
"""Between two looks at what others hold."""
LOOK_S = 0.1


ROUNDED = 1.1
"""A machine is sold with more than its system can use: up to so much more than there is was rounded, not claimed."""


def _as_it_is(job: Job, hardware: Hardware) -> Hardware:
    """What was claimed for this machine, held against it: a run that counts on more would end in the middle."""
    from tightfit.hardware.machine import ram_here

    there, claimed = ram_here()[0], hardware.host_ram_bytes
    if job.hardware.host_ram is not None and there is not None and claimed is not None and claimed > there:
        if claimed > ROUNDED * there:
            raise HardwareError(Message("cli.host-ram-more-than", host_ram=job.hardware.host_ram, there=there / GIB))
        gpu = hardware.gpu
        if gpu.vendor == "cpu":
            gpu = replace(gpu, memory_bytes=min(gpu.memory_bytes, there // 2))
        said = text("cli.host-ram-gib", there=there / GIB, host_ram=job.hardware.host_ram)
        hardware = replace(hardware, gpu=gpu, host_ram_bytes=there, because=(*hardware.because, said))
    if hardware.nvme_bytes is not None and job.hardware.nvme_path is not None:
        folder = Path(job.hardware.nvme_path).expanduser().absolute()
        free = disk_usage(next(place for place in (folder, *folder.parents) if place.is_dir())).free
        if hardware.nvme_bytes > free:
            raise HardwareError(Message("cli.nvme-more-than", nvme=job.hardware.nvme, free=free / GIB, folder=folder))
    return hardware


class Busy(HardwareError):
    """Others have what the run needs, and may give it back.

    `of` names what is awaited where the sentence holds amounts that change: the GPU, and the process on it.
    """

    def __init__(self, problem: Message, fix: Message, of: tuple[str, ...] = ()) -> None:
        super().__init__(Message("cli.busy", problem=problem, fix=fix))
        self.problem, self.of = problem, of or (str(problem),)


DEFAULT_PORT = 29500
"""Where the ranks of several machines meet: each machine must name the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """The machines of a run, and which of them this is."""

    count: int = 1
    rank: int = 0
    address: str = "127.0.0.1"
    port: int | None = None
    """None: a free one."""
    hostfile: str | None = None
    """The text of a hostfile: all machines are started from here."""


def nodes_of(request: Request, options: TrainOptions) -> Nodes:
    """As flags say, or SLURM; one machine, where nobody says anything."""
    port = request.port
    if request.hostfile is not None:
        from tightfit.desk.plan_files import read_hostfile
        from tightfit.formats.launch.hostfile import parse_hostfile

        text = read_hostfile(request.hostfile)
        return Nodes(count=len(parse_hostfile(text)), port=port, hostfile=text)
    if options.nodes is not None:
        port = port or (DEFAULT_PORT if options.nodes > 1 else None)
        return Nodes(count=options.nodes, rank=options.node_rank, address=options.master_addr, port=port)
    found = slurm_node(inherited({}))
    if found is None:
        return Nodes(port=port)
    return Nodes(count=found.nodes, rank=found.rank, address=found.address, port=port or found.port)


def reservations() -> Reservations:
    """What live runs of this user have reserved."""
    return Reservations(cache_folder() / "reservations")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingMachine:
    """What there is, and what of it is taken."""

    occupancy: Occupancy
    live: tuple[Reservation, ...]
    nodes: Nodes
    num_gpus: int | None
    max_gpus: int | None
    ids_asked: bool

    @property
    def taken(self) -> dict[str, Reservation]:
        """GPU → the live run that has it."""
        return {key: entry for entry in self.live for key in entry.gpus}

    @property
    def reserved_bytes(self) -> int:
        return sum(entry.host_bytes for entry in self.live)

    def adapt(self, job: Job, hardware: Hardware) -> Hardware:
        """The planned-for hardware, less what is taken."""
        named = job.hardware.gpus is not None and job.hardware.gpus.strip().lower() != "this"
        if job.hardware.gpu_ids is not None:
            self.check_ids(named=named)
        if self.nodes.hostfile is None and hardware.nodes == 1:
            hardware = _as_it_is(job, hardware)
        if not named:
            hardware = self._free_gpus(job, hardware)
            hardware = self._free_ram(job, hardware)
        if self.max_gpus is not None and self.max_gpus < hardware.gpus_per_node:
            said = text("cli.gpus-used-each", max_gpus=self.max_gpus, gpus_per_node=hardware.gpus_per_node)
            hardware = replace(hardware, gpus_per_node=self.max_gpus, because=(*hardware.because, said))
        if hardware.nodes == 1 and self.nodes.count > 1:
            if self.nodes.hostfile is not None and hardware.gpu.vendor == "cpu":
                raise HardwareError(Message("cli.machine-gpu-judge"))
            said = text("cli.all-nodes-taken", count=self.nodes.count)
            hardware = replace(hardware, nodes=self.nodes.count, because=(*hardware.because, said))
        return hardware

    def check_ids(self, *, named: bool) -> None:
        """GPUs by number, where numbers mean nothing or two things."""
        if self.occupancy.chosen_by_user:
            raise ConfigError(Message("cli.gpu-ids-both-choose", variable=self.occupancy.variable))
        if not self.occupancy.devices and not named:
            raise HardwareError(Message("cli.gpu-ids-names-gpus"))

    def _free_gpus(self, job: Job, hardware: Hardware) -> Hardware:
        devices, taken = self.occupancy.devices, self.taken
        if not devices or job.hardware.gpu_ids is not None:
            return hardware
        free = [device for device in devices if device.key not in taken]
        busy = [device for device in devices if device.key in taken]
        if not busy or len(free) >= hardware.gpus_per_node:
            return hardware
        who = taken[busy[0].key].words
        if not free:
            raise Busy(Message("cli.every-gpu-use-2", who=who), Message("cli.wait-for-it-with"))
        if self.num_gpus is not None:
            raise Busy(
                Message(
                    "cli.num-gpus-gpus-free", num_gpus=self.num_gpus, free=len(free), number=busy[0].number, who=who
                ),
                Message("cli.say-fewer-or-wait", free=len(free)),
            )
        said = text("cli.gpus-used-gpu", free=len(free), devices=len(devices), number=busy[0].number, who=who)
        return replace(hardware, gpus_per_node=len(free), because=(*hardware.because, said))

    def _free_ram(self, job: Job, hardware: Hardware) -> Hardware:
        """RAM that the user names is the user's to share out."""
        ram, reserved = hardware.host_ram_bytes, self.reserved_bytes
        if not reserved or ram is None or job.hardware.host_ram is not None:
            return hardware
        left = ram - reserved
        who = self.live[0].words
        if left <= 0:
            raise Busy(Message("cli.live-runs-reserved", ram=ram / GIB, who=who), Message("cli.wait-for-it-with"))
        gpu = hardware.gpu
        if gpu.vendor == "cpu":
            gpu = replace(gpu, memory_bytes=left // 2)
        said = text("cli.host-ram-reserved", left=amounts(left)[0], ram=ram / GIB, who=who)
        return replace(hardware, gpu=gpu, host_ram_bytes=left, because=(*hardware.because, said))

    def check(self, worker: WorkerFile) -> None:
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
        """The GPUs that the ranks of this node get."""
        if ids is not None:
            self.check_ids(named=False)
        if worker.vendor == "cpu":
            return ()
        devices, wanted = self.occupancy.devices, worker.gpus_per_node
        if len(devices) < wanted:
            has = text("cli.machine-has", devices=len(devices)) if devices else text("cli.machine-none")
            raise HardwareError(Message("cli.plan-wants-plan", wanted=_gpus(wanted), has=has))
        chosen = self._by_number(ids, wanted) if ids is not None else self._choose_devices(worker)
        for device in chosen:
            check_free(device, worker)
        return chosen

    def _by_number(self, ids: Sequence[int], wanted: int) -> tuple[Device, ...]:
        devices = self.occupancy.devices
        if max(ids) >= len(devices):
            raise HardwareError(Message("cli.gpu-ids-gpus-machine", ids=max(ids), devices=len(devices) - 1))
        if len(ids) < wanted:
            raise HardwareError(Message("cli.gpu-ids-names-plan", ids=_gpus(len(ids)), wanted=wanted))
        chosen = tuple(devices[number] for number in ids[:wanted])
        for device in chosen:
            if device.key in self.taken:
                who = self.taken[device.key].words
                raise Busy(Message("cli.gpu-use-choose", number=device.number, who=who), Message("cli.choose-or-wait"))
        return chosen

    def _choose_devices(self, worker: WorkerFile) -> tuple[Device, ...]:
        """The first that no live run has, those with room before those without."""
        free = [device for device in self.occupancy.devices if device.key not in self.taken]
        if len(free) < worker.gpus_per_node:
            who = self.live[0].words if self.live else text("cli.others")
            raise Busy(
                Message("cli.plan-wants-free", gpus_per_node=_gpus(worker.gpus_per_node), free=len(free), who=who),
                Message("cli.wait-with"),
            )
        roomy = [device for device in free if _has_room(device, worker)]
        narrow = [device for device in free if device not in roomy]
        chosen = (roomy + narrow)[: worker.gpus_per_node]
        return tuple(sorted(chosen, key=self.occupancy.devices.index))


def machine_for(request: Request, options: TrainOptions, nodes: Nodes) -> TrainingMachine:
    """This machine, as it is now."""
    found = TrainingMachine(
        occupancy=occupancy(),
        live=reservations().live(),
        nodes=nodes,
        num_gpus=request.num_gpus,
        max_gpus=options.max_gpus,
        ids_asked="gpu_ids" in request.flags,
    )
    if found.ids_asked:
        found.check_ids(named="gpus" in request.flags)
    return found


def holder_words(holder: CardProcess) -> str:
    """`process 4711 (anna, python train.py)`"""
    who = ", ".join(filter(None, (holder.user, holder.command)))
    return text("cli.process-of", pid=holder.pid, who=who) if who else text("cli.process", pid=holder.pid)


def _has_room(device: Device, worker: WorkerFile) -> bool:
    return device.free_bytes is None or device.free_bytes >= worker.required_bytes


def check_free(device: Device, worker: WorkerFile) -> None:
    """Whether the plan fits beside what others hold; nobody is asked to end anything that is not theirs."""
    if _has_room(device, worker):
        return
    assert device.free_bytes is not None
    need, free = amounts(worker.required_bytes, device.free_bytes)
    who = describe_main_holder(device)
    raise Busy(
        Message(
            "cli.too-little-for-plan",
            number=device.number,
            free=free,
            need=need,
            held=Message("cli.holds-rest", who=who) if who else "",
        ),
        Message("cli.wait-or-choose"),
        of=(device.key, who) if who else (device.key,),
    )


def describe_main_holder(device: Device) -> str:
    """In words the process that holds most of a GPU; "": none is known."""
    who = max(device.holders, key=lambda each: each.held_bytes or 0, default=None)
    return "" if who is None else holder_words(who)


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


def _gpus(count: int) -> Message:
    return Message("cli.gpus", n=count)
