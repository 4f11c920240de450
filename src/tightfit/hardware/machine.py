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
import sys
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path, PurePosixPath

from tightfit.hardware.catalogue import GIB
from tightfit.hardware.probes import TOOLS
from tightfit.hardware.probes.card import Answer, Card
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
    devices: tuple[Card, ...] = ()
    sight, because = look()
    if sight is not None:
        devices, because = find_visible(sight, os.environ)
    if sight is not None and devices:
        gpu, more = _find_least(devices, sight, os.environ)
        tally = Listing((f"{count} × {name}" for name, count in Counter(map(name_of, sight.cards)).items()), "and")
        because = (Message("machine.tool-shows", tool=sight.tool, cards=tally), *because, *more)
        count = len(devices)
    else:
        gpu = Gpu(name="CPU", vendor="cpu", memory_bytes=(ram or _ASSUMED_RAM) // 2, fp16=fp16_here())
        count, because = 2, (*because, Message("machine.no-gpu-here", share=gpu.memory_bytes / GIB))
    return Hardware(
        gpu=gpu,
        gpus_per_node=count,
        host_ram_bytes=ram,
        nvme_bytes=nvme_bytes,
        because=(*because, *ram_because),
    )


def look(*, whole: bool = False) -> tuple[Answer | None, tuple[Message, ...]]:
    """What the first tool with an answer shows; else why those that are installed showed nothing.

    `whole`: with who is on the cards, and what is free there.
    """
    problems: list[Message] = []
    for tool in _ORDER:
        answer = TOOLS[tool](time.monotonic() + _TIMEOUT_S, whole=whole)
        if answer.cards:
            return answer, ()
        if answer.problem is not None:
            problems.append(answer.problem)
    return None, tuple(dict.fromkeys(problems))


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


def _find_least(devices: tuple[Card, ...], sight: Answer, env: Mapping[str, str]) -> tuple[Gpu, tuple[Message, ...]]:
    """One Gpu to stand for all: the smallest memory and the slowest rates among them."""
    because: list[Message] = []
    gpus: list[Gpu] = []
    unreadable = 0
    for device in devices:
        name = name_of(device)
        gpu, sentence = recognise(name, device.total_bytes)
        if gpu is None and device.total_bytes is not None:
            gpu = Gpu(name=name, vendor=device.vendor, memory_bytes=device.total_bytes)
            sentence = Message("machine.not-in-catalogue", name=name)
        if gpu is None:
            unreadable += 1
            continue
        gpus.append(replace(gpu, arch=device.arch or gpu.arch))
        if sentence and sentence not in because:
            because.append(sentence)
    if not gpus:
        name = name_of(devices[0])
        raise HardwareError(Message("machine.no-memory-size", tool=sight.tool, name=name, count=len(devices)))
    if unreadable:
        because.append(Message("machine.some-without-size", unknown=unreadable, count=len(devices)))
    smallest = min(gpus, key=lambda gpu: gpu.memory_bytes)
    # Totals of equal cards may differ by a few pages; a gibibyte is another card.
    if any(gpu.name != smallest.name or abs(gpu.memory_bytes - smallest.memory_bytes) > GIB for gpu in gpus):
        is_nvidia = devices[0].vendor == "nvidia"
        counts = is_nvidia and env.get("CUDA_VISIBLE_DEVICES") and env.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID"
        because.append(
            Message(
                "machine.mixed-gpus",
                size=smallest.memory_bytes / GIB,
                name=smallest.name,
                variable="CUDA_VISIBLE_DEVICES" if is_nvidia else "HIP_VISIBLE_DEVICES",
                order=Message("machine.count-as-smi") if counts else None,
            )
        )
        smallest = _slowest(gpus, smallest)
    return smallest, tuple(because)


def _slowest(gpus: list[Gpu], smallest: Gpu) -> Gpu:
    """The smallest card with the least of every rate; a rate that one card keeps to itself is unknown."""

    def least(rates: list[float | None]) -> float | None:
        known = [rate for rate in rates if rate is not None]
        return min(known) if len(known) == len(rates) else None

    slowest_link = min(gpus, key=lambda gpu: gpu.link_bytes_per_s or 0)
    return replace(
        smallest,
        bf16_flops=least([gpu.bf16_flops for gpu in gpus]),
        fp16_flops=least([gpu.fp16_flops for gpu in gpus]),
        memory_bytes_per_s=least([gpu.memory_bytes_per_s for gpu in gpus]),
        link=slowest_link.link,
        link_bytes_per_s=slowest_link.link_bytes_per_s,
    )


# --- which of them a job would see --------------------------------------------------------------


def find_visible(sight: Answer, env: Mapping[str, str]) -> tuple[tuple[Card, ...], tuple[Message, ...]]:
    """The devices that the visibility variables leave, as CUDA or HIP would read them.

    ROCr filters first and HIP counts among what is left; HIP's own variable wins over CUDA's, which
    HIP reads as well.
    """
    if sight.cards[0].vendor == "nvidia":
        names = ["CUDA_VISIBLE_DEVICES"]
    else:
        hip = "HIP_VISIBLE_DEVICES" if "HIP_VISIBLE_DEVICES" in env else "CUDA_VISIBLE_DEVICES"
        names = ["ROCR_VISIBLE_DEVICES", hip]
    devices, because = sight.cards, []
    for name in names:
        if name in env:
            kept = _pick(devices, env[name], name)
            because.append(
                Message("machine.visible-gpus", variable=name, value=env[name], kept=len(kept), all=len(devices))
            )
            devices = kept
    return devices, tuple(because)


def _pick(devices: tuple[Card, ...], wanted: str, variable: str) -> tuple[Card, ...]:
    """As the drivers do it: in the order given, and nothing after the first that does not exist."""
    picked: dict[int, Card] = {}
    for word in (part.strip() for part in wanted.split(",")):
        if word.startswith("MIG-"):
            raise HardwareError(Message("machine.mig-slice", variable=variable))
        if re.fullmatch("[0-9]{1,6}", word):
            matches = [int(word)] if int(word) < len(devices) else []
        else:
            matches = [i for i, device in enumerate(devices) if word and (device.uuid or "").startswith(word)]
        if len(matches) != 1:
            break
        picked[matches[0]] = devices[matches[0]]
    return tuple(picked.values())


# --- sizes --------------------------------------------------------------------------------------


def positive(value: object, unit: int = 1) -> int | None:
    """A size that was really reported: '[N/A]', '[Not Supported]', a negative and zero are not."""
    try:
        number = float(str(value).strip())
    except ValueError:
        return None
    return round(number * unit) if 0 < number < float("1e18") else None


# --- host RAM -----------------------------------------------------------------------------------


def ram_here(root: Path = Path("/")) -> tuple[int | None, tuple[Said, ...]]:
    """The RAM that a process here may use: the machine's, or its control group's if that is less."""
    total = read_meminfo(root, "MemTotal") or _ask_system()
    limit = min((limit for limit, _ in _cgroups(root)), default=None)
    if limit is not None and (total is None or limit < total):
        return limit, (Message("machine.ram-of-group", size=limit / GIB),)
    if total is None:
        return None, (Message("machine.ram-unknown", size=_ASSUMED_RAM / GIB),)
    return total, ()


def free_ram(root: Path = Path("/")) -> int | None:
    """The RAM that the system, and this process's control group, could give now; None: they do not say."""
    left = [limit - used for limit, used in _cgroups(root) if used is not None]
    available = read_meminfo(root, "MemAvailable")
    return max(0, min([*left, *([] if available is None else [available])])) if left or available is not None else None


def read_meminfo(root: Path, name: str) -> int | None:
    """Bytes, by a name of /proc/meminfo."""
    match = re.search(rf"^{name}:\s+([0-9]+) kB", read_text(root / "proc/meminfo"), re.MULTILINE)
    return int(match[1]) * 1024 if match else None


def _ask_system() -> int | None:
    """macOS, Windows, other Unix systems."""
    if sys.platform == "win32":
        import ctypes

        kilobytes = ctypes.c_ulonglong(0)
        if ctypes.windll.kernel32.GetPhysicallyInstalledSystemMemory(ctypes.byref(kilobytes)):
            return positive(kilobytes.value * 1024)
        return None
    with suppress(OSError, ValueError):
        return positive(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return None


def _cgroups(root: Path) -> list[tuple[int, int | None]]:
    """Every limit from our own group up to the root, in both versions of control groups, and what is used of it.

    Inside a container the group's path is often the host's, and only the mount's top can be read. Files that are kept
    in memory count as used there, and make way like everywhere.
    """
    limits: list[tuple[int, int | None]] = []
    for line in read_text(root / "proc/self/cgroup").splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        if controllers == "":
            base, name, usage, cached = root / "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            base, name, usage = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            cached = "total_inactive_file"
        else:
            continue
        group = PurePosixPath("/", path)
        for folder in (group, *group.parents):
            place = base / folder.relative_to("/")
            value, used = positive(read_text(place / name)), positive(read_text(place / usage))
            if value is not None:
                held = re.search(rf"^{cached} ([0-9]+)$", read_text(place / "memory.stat"), re.MULTILINE)
                limits.append((value, None if used is None else used - (int(held[1]) if held else 0)))
    return limits


def read_text(path: Path) -> str:
    """What a file of /proc or /sys says; empty: nothing."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
