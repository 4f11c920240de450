"""This machine as Hardware: its GPUs through the makers' own tools, its RAM through the system.

The makers' tools are asked in turn, and the first that shows a GPU is believed: NVML (if
nvidia-ml-py is installed), `nvidia-smi`, `hy-smi`, `rocm-smi`, `amd-smi`. hy-smi comes before rocm-smi
because Hygon's toolkit installs its own under both names. All are subprocesses with a time limit, so that a
wedged driver costs seconds and not the session; torch would tell us more, and take a gigabyte of
imports to do it.

What a tool does not report stays unknown. It is never zero: a card without a readable total is
taken to be like the ones beside it, or asked of the user.

With no GPU at all the CPU poses as two ranks, so that everything can be tried anywhere.
"""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from tightfit.hardware.catalogue import GIB
from tightfit.hardware.measured import Fingerprint, find_measured
from tightfit.hardware.probes import ask_tool, name_process
from tightfit.hardware.probes.card import Card, CardProcess, Cards
from tightfit.hardware.words import parse_size, recognise
from tightfit.messages import Listing, Message, Said
from tightfit.types import Gpu, Hardware, HardwareError

_TIMEOUT_S = 15
_ORDER = ("NVML", "nvidia-smi", "hy-smi", "rocm-smi", "amd-smi")
"""amd-smi counts cards in its own order, and is asked last for that."""
_ASSUMED_RAM = 4 * GIB


def this_machine(host_ram: str | None = None, nvme: str | None = None) -> Hardware:
    """The GPUs that a job started here would see, or the CPU as two ranks.

    `host_ram` and `nvme` overrule what was found, in `parse_size`'s words.
    """
    ram, ram_because = ram_here() if host_ram is None else (parse_size(host_ram), ())
    nvme_bytes = None if nvme is None else parse_size(nvme)
    sight = look()
    devices, because = find_visible(sight, os.environ) if sight.cards else ((), sight.problems)
    if devices:
        gpu, more = _find_least(devices, sight.tools[0])
        tally = Listing((f"{count} × {name}" for name, count in Counter(map(name_of, sight.cards)).items()), "and")
        because = (Message("machine.tool-shows", tool=sight.tools[0], cards=tally), *because, *more)
        count = len(devices)
    else:
        gpu = Gpu(name="CPU", vendor="cpu", memory_bytes=(ram or _ASSUMED_RAM) // 2, fp16=fp16_here())
        count, because = 2, (*because, Message("machine.no-gpu-here", share=gpu.memory_bytes / GIB))
    measured, about = find_measured(fingerprint_of(sight), count)
    said: tuple[Said, ...] = (*because, *ram_because, *about)
    return Hardware(
        gpu=gpu, gpus_per_node=count, host_ram_bytes=ram, nvme_bytes=nvme_bytes, measured=measured, because=said
    )


_MODULES = ("nvidia", "hycu", "hydcu", "amdgpu")
_CPU_NAMES = ("model name", "Hardware", "CPU part", "cpu")


def fingerprint_of(sight: Cards, root: Path = Path("/")) -> Fingerprint:
    """By what this machine is known again: all that it has, whatever of it a job may use."""
    if (total := read_meminfo(root, "MemTotal")) is None:
        total = ram_here(root)[0]
    return Fingerprint(
        gpus=tuple(map(name_of, sight.cards)),
        driver=driver_here(root) if sight.cards else None,
        cpu=processor_here(root),
        cores=os.cpu_count() or 1,
        ram_gib=round((total or 0) / GIB),
    )


def processor_here(root: Path = Path("/")) -> str | None:
    """What this machine's processor is called."""
    told = read_text(root / "proc/cpuinfo")
    cpu = next(filter(None, (re.search(rf"^{name}\s*:\s*(.+)$", told, re.MULTILINE) for name in _CPU_NAMES)), None)
    return " ".join(cpu[1].split()) if cpu else None


def driver_here(root: Path = Path("/")) -> str | None:
    """The version of the cards' driver, as its kernel module says it."""
    told = (read_text(root / "sys/module" / name / "version").strip() for name in _MODULES)
    return next(filter(None, told), None)


def look(*, whole: bool = False) -> Cards:
    """What the first tool with an answer shows; else no card, and why those that are installed showed nothing.

    `whole`: with who is on the cards, and what is free there.
    """
    problems: list[Message] = []
    for tool in _ORDER:
        answer = ask_tool(tool, time.monotonic() + _TIMEOUT_S, whole=whole)
        if answer.cards:
            return answer
        problems += answer.problems
    return Cards(problems=tuple(dict.fromkeys(problems)))


def name_of(card: Card) -> str:
    """What the card is called, where its tool does not say."""
    return card.name or {"hygon": "Hygon DCU", "amd": "AMD GPU"}.get(card.vendor, "NVIDIA GPU")


_BELOW_FP16 = "SSE41 AVX AVX2 AVX2_VNNI AVX2_VNNI_2 AVX512_CORE AVX512_CORE_VNNI AVX512_CORE_BF16".split()


def fp16_here(root: Path = Path("/"), env: Mapping[str, str] = os.environ) -> bool | None:
    """Whether this processor computes fp16, as torch and DeepSpeed see it; None: its maker has other names for it.

    They ask oneDNN, which takes no more of a processor than ONEDNN_MAX_CPU_ISA allows.
    """
    flags = re.search(r"^flags\s*:(.*)$", read_text(root / "proc/cpuinfo"), re.MULTILINE)
    if flags is None:
        return None
    held_back = env.get("ONEDNN_MAX_CPU_ISA", "").upper() in _BELOW_FP16
    return "avx512_fp16" in flags[1].split() and not held_back


# --- from devices to one Gpu --------------------------------------------------------------------


def _find_least(devices: tuple[Card, ...], tool: str) -> tuple[Gpu, tuple[Message, ...]]:
    """One Gpu to stand for all: the smallest memory and the slowest rates among them."""
    because: list[Message] = []
    gpus: list[Gpu] = []
    for device in devices:
        name = name_of(device)
        gpu, sentence = recognise(name, device.total_bytes)
        if gpu is None and device.total_bytes is not None:
            gpu = Gpu(name=name, vendor=device.vendor, memory_bytes=device.total_bytes)
            sentence = Message("machine.not-in-catalogue", name=name)
        if gpu is not None:
            gpus.append(replace(gpu, arch=device.arch or gpu.arch))
            if sentence and sentence not in because:
                because.append(sentence)
    if not gpus:
        name = name_of(devices[0])
        raise HardwareError(Message("machine.no-memory-size", tool=tool, name=name, count=len(devices)))
    if unreadable := len(devices) - len(gpus):
        because.append(Message("machine.some-without-size", unknown=unreadable, count=len(devices)))
    smallest = min(gpus, key=lambda gpu: gpu.memory_bytes)
    # Totals of equal cards may differ by a few pages; a gibibyte is another card.
    if all(gpu.name == smallest.name and gpu.memory_bytes - smallest.memory_bytes <= GIB for gpu in gpus):
        return smallest, tuple(because)
    variable = "CUDA_VISIBLE_DEVICES" if devices[0].vendor == "nvidia" else "HIP_VISIBLE_DEVICES"
    counts = variable.startswith("CUDA") and os.environ.get(variable)
    is_odd = counts and os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID"
    mixed = Message(
        "machine.mixed-gpus",
        size=smallest.memory_bytes / GIB,
        name=smallest.name,
        variable=variable,
        order=Message("machine.count-as-smi") if is_odd else None,
    )

    def least(name: str) -> float | None:
        """A rate that one card keeps to itself is unknown."""
        rates: list[float | None] = [getattr(gpu, name) for gpu in gpus]
        return min(rates, key=lambda rate: -1.0 if rate is None else rate)

    slowest_link = min(gpus, key=lambda gpu: gpu.link_bytes_per_s or 0)
    gpu = replace(
        smallest,
        bf16_flops=least("bf16_flops"),
        fp16_flops=least("fp16_flops"),
        memory_bytes_per_s=least("memory_bytes_per_s"),
        link=slowest_link.link,
        link_bytes_per_s=slowest_link.link_bytes_per_s,
    )
    return gpu, (*because, mixed)


# --- which of them a job would see --------------------------------------------------------------


def visibility_variables(sight: Cards, env: Mapping[str, str]) -> list[str]:
    """The variables that choose among the cards, as CUDA or HIP would read them.

    ROCr filters first and HIP counts among what is left; HIP's own variable wins over CUDA's, which HIP reads as well.
    """
    if sight.cards[0].vendor == "nvidia":
        return ["CUDA_VISIBLE_DEVICES"]
    return ["ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES" if "HIP_VISIBLE_DEVICES" in env else "CUDA_VISIBLE_DEVICES"]


def find_visible(sight: Cards, env: Mapping[str, str]) -> tuple[tuple[Card, ...], tuple[Message, ...]]:
    """The devices that the visibility variables leave."""
    devices, because = sight.cards, []
    for name in visibility_variables(sight, env):
        if name not in env:
            continue
        # As the drivers do it: in the order given, and nothing after the first that does not exist.
        picked: dict[int, Card] = {}
        for word in (part.strip() for part in env[name].split(",")):
            if word.startswith("MIG-"):
                raise HardwareError(Message("machine.mig-slice", variable=name))
            if re.fullmatch("[0-9]{1,6}", word):
                matches = [int(word)] if int(word) < len(devices) else []
            else:
                matches = [i for i, device in enumerate(devices) if word and (device.uuid or "").startswith(word)]
            if len(matches) != 1:
                break
            picked[matches[0]] = devices[matches[0]]
        because.append(
            Message("machine.visible-gpus", variable=name, value=env[name], kept=len(picked), all=len(devices))
        )
        devices = tuple(picked.values())
    return devices, tuple(because)


# --- who holds their memory, and how much of it is free --------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A GPU that a job started here may see."""

    number: int  # as the maker's tool counts
    word: str  # as the variable that chooses visible GPUs calls it
    key: str  # a name that stays the same whoever looks
    name: str
    total_bytes: int | None
    free_bytes: int | None
    holders: tuple[CardProcess, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Occupancy:
    """The GPUs of this machine that a job may see."""

    variable: str  # the variable that chooses among them
    chosen_by_user: bool  # the user has set that variable already
    devices: tuple[Device, ...]
    unplaced: tuple[CardProcess, ...] = ()  # processes that hold memory of some GPU, and the tool does not say of which


def occupancy() -> Occupancy:
    """The GPUs, what is free on each, and who holds the rest; none, where there is no GPU."""
    sight = look(whole=True)
    if not sight.cards:
        return Occupancy(variable="CUDA_VISIBLE_DEVICES", chosen_by_user=False, devices=())
    variable = visibility_variables(sight, os.environ)[-1]
    if variable not in os.environ and sight.cards[0].vendor != "nvidia":
        variable = "HIP_VISIBLE_DEVICES"
    words = list(dict.fromkeys(word.strip() for word in os.environ.get(variable, "").split(",") if word.strip()))
    devices = []
    for position, card in enumerate(find_visible(sight, os.environ)[0]):
        number = next(place for place, each in enumerate(sight.cards) if each is card)
        devices.append(
            Device(
                number=number,
                word=words[position] if position < len(words) else str(position),
                key=card.uuid or f"{card.vendor}-{number}",
                name=name_of(card),
                total_bytes=card.total_bytes,
                free_bytes=card.free_bytes,
                holders=tuple(map(name_process, card.processes or ())),
            )
        )
    return Occupancy(
        variable=variable,
        chosen_by_user=variable in os.environ,
        devices=tuple(devices),
        unplaced=tuple(map(name_process, sight.unplaced)),
    )


# --- host RAM -----------------------------------------------------------------------------------


def ram_here(root: Path = Path("/")) -> tuple[int | None, tuple[Said, ...]]:
    """The RAM that a process here may use: the machine's, or its control group's if that is less."""
    total = read_meminfo(root, "MemTotal")
    if total is None:  # macOS, Windows, other Unix systems
        import psutil

        with suppress(OSError):
            total = psutil.virtual_memory().total
    limit = min((limit for limit, _ in _memory_limits(root)), default=None)
    if limit is not None and (total is None or limit < total):
        return limit, (Message("machine.ram-of-group", size=limit / GIB),)
    if total is None:
        return None, (Message("machine.ram-unknown", size=_ASSUMED_RAM / GIB),)
    return total, ()


def free_ram(root: Path = Path("/")) -> int | None:
    """The RAM that the system, and this process's control group, could give now; None: they do not say."""
    left = [limit - used for limit, used in _memory_limits(root) if used is not None]
    if (available := read_meminfo(root, "MemAvailable")) is not None:
        left.append(available)
    return max(0, min(left)) if left else None


def read_meminfo(root: Path, name: str) -> int | None:
    """Bytes, by a name of /proc/meminfo."""
    match = re.search(rf"^{name}:\s+([0-9]+) kB", read_text(root / "proc/meminfo"), re.MULTILINE)
    return int(match[1]) * 1024 if match else None


def _memory_limits(root: Path) -> list[tuple[int, int | None]]:
    """Every limit of memory, and what is used of it. Files that are kept in memory count as used, and make way."""
    limits: list[tuple[int, int | None]] = []
    for controller, place in control_groups(root, "memory"):
        if controller:
            name, usage, cached = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
        else:
            name, usage, cached = "memory.max", "memory.current", "inactive_file"
        limit, used = read_count(place / name), read_count(place / usage)
        if limit is not None:
            held = re.search(rf"^{cached} ([0-9]+)$", read_text(place / "memory.stat"), re.MULTILINE)
            limits.append((limit, None if used is None else used - (int(held[1]) if held else 0)))
    return limits


def control_groups(root: Path, controller: str) -> Iterator[tuple[str, Path]]:
    """The folders of our own control group and all above it, in both versions: with "" or the controller's name.

    Inside a container the group's path is often the host's, and only the mount's top can be read.
    """
    for line in read_text(root / "proc/self/cgroup").splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        version = "" if controllers == "" else controller
        if version in controllers.split(","):
            group = PurePosixPath("/", path)
            for folder in (group, *group.parents):
                if ".." not in folder.parts:
                    yield version, root / "sys/fs/cgroup" / version / folder.relative_to("/")


def read_count(path: Path) -> int | None:
    """A number that a file really holds: `max`, a negative, zero and what is as good as endless are not."""
    text = read_text(path).strip()
    return int(text) if re.fullmatch("[0-9]{1,18}", text) and int(text) else None


def read_text(path: Path) -> str:
    """What a file of /proc or /sys says; empty: nothing."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
