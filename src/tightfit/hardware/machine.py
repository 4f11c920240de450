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
        devices, because = visible(sight, os.environ)
    if sight is not None and devices:
        gpu, more = _alike(devices, sight, os.environ)
        count, because = len(devices), (f"{sight.tool} shows {_tally(sight.cards)}.", *because, *more)
    else:
        gpu, count = _cpu(ram), 2
        share = f"{gpu.memory_bytes / GIB:.1f} GiB of host RAM each"
        because = (*because, f"There is no GPU to use, so the CPU stands in as two ranks with {share}.")
    return Hardware(
        gpu=gpu,
        gpus_per_node=count,
        host_ram_bytes=ram,
        nvme_bytes=nvme_bytes,
        because=(*because, *ram_because),
    )


def look(*, whole: bool = False) -> tuple[Answer | None, tuple[str, ...]]:
    """What the first tool with an answer shows; else why those that are installed showed nothing.

    `whole`: with who is on the cards, and what is free there.
    """
    problems: list[str] = []
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


def _cpu(ram: int | None) -> Gpu:
    return Gpu(name="CPU", vendor="cpu", memory_bytes=(ram or _ASSUMED_RAM) // 2, fp16=fp16_here())


_BELOW_FP16 = "SSE41 AVX AVX2 AVX2_VNNI AVX2_VNNI_2 AVX512_CORE AVX512_CORE_VNNI AVX512_CORE_BF16".split()


def fp16_here(root: Path = Path("/"), env: Mapping[str, str] = os.environ) -> bool | None:
    """Whether this processor computes fp16, as torch and DeepSpeed see it; None: its maker has other names for it.

    They ask oneDNN, which takes no more of a processor than ONEDNN_MAX_CPU_ISA allows.
    """
    flags = re.search(r"^flags\s*:(.*)$", _read(root / "proc/cpuinfo"), re.MULTILINE)
    if flags is None:
        return None
    held_back = env.get("ONEDNN_MAX_CPU_ISA", "").upper() in _BELOW_FP16
    return "avx512_fp16" in flags[1].split() and not held_back


# --- from devices to one Gpu --------------------------------------------------------------------


def _alike(devices: tuple[Card, ...], sight: Answer, env: Mapping[str, str]) -> tuple[Gpu, tuple[str, ...]]:
    """One Gpu to stand for all: the smallest memory and the slowest rates among them."""
    because: list[str] = []
    gpus: list[Gpu] = []
    unreadable = 0
    for device in devices:
        name = name_of(device)
        gpu, sentence = recognise(name, device.total_bytes)
        if gpu is None and device.total_bytes is not None:
            gpu = Gpu(name=name, vendor=device.vendor, memory_bytes=device.total_bytes)
            sentence = f"{name} is not in our catalogue, so its rates are unknown."
        if gpu is None:
            unreadable += 1
            continue
        gpus.append(replace(gpu, arch=device.arch or gpu.arch))
        if sentence and sentence not in because:
            because.append(sentence)
    if not gpus:
        raise HardwareError(
            f"{sight.tool} does not say how much memory {name_of(devices[0])} has: "
            f"say it with --gpus, like {len(devices)}x24GB."
        )
    if unreadable:
        because.append(f"{unreadable} of {len(devices)} GPUs report no memory size: taken to be like the others.")
    smallest = min(gpus, key=lambda gpu: gpu.memory_bytes)
    if any(gpu.name != smallest.name or _apart(gpu, smallest) for gpu in gpus):
        because.append(_mixed(gpus, smallest, devices[0].vendor == "nvidia", env))
        smallest = _slowest(gpus, smallest)
    return smallest, tuple(because)


def _apart(gpu: Gpu, other: Gpu) -> bool:
    """Totals of equal cards may differ by a few pages; a gibibyte is another card."""
    return abs(gpu.memory_bytes - other.memory_bytes) > GIB


def _mixed(gpus: list[Gpu], smallest: Gpu, is_nvidia: bool, env: Mapping[str, str]) -> str:
    variable = "CUDA_VISIBLE_DEVICES" if is_nvidia else "HIP_VISIBLE_DEVICES"
    sentence = (
        f"The GPUs are not alike: all are planned with the smallest memory, the {smallest.memory_bytes / GIB:.1f} GiB "
        f"of {smallest.name} (leave it out with {variable} to plan for the larger ones)."
    )
    if is_nvidia and env.get("CUDA_VISIBLE_DEVICES") and env.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        sentence += " CUDA counts the fastest card first: set CUDA_DEVICE_ORDER=PCI_BUS_ID to count as nvidia-smi does."
    return sentence


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


def _tally(devices: tuple[Card, ...]) -> str:
    return " and ".join(f"{count} × {name}" for name, count in Counter(map(name_of, devices)).items())


# --- which of them a job would see --------------------------------------------------------------


def visible(sight: Answer, env: Mapping[str, str]) -> tuple[tuple[Card, ...], tuple[str, ...]]:
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
            because.append(f"{name}={env[name]} leaves {len(kept)} of {len(devices)} GPUs.")
            devices = kept
    return devices, tuple(because)


def _pick(devices: tuple[Card, ...], wanted: str, variable: str) -> tuple[Card, ...]:
    """As the drivers do it: in the order given, and nothing after the first that does not exist."""
    picked: dict[int, Card] = {}
    for word in (part.strip() for part in wanted.split(",")):
        if word.startswith("MIG-"):
            raise HardwareError(f"{variable} names a MIG slice, whose size we cannot read: say it with --gpus 1x20GB.")
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


def ram_here(root: Path = Path("/")) -> tuple[int | None, tuple[str, ...]]:
    """The RAM that a process here may use: the machine's, or its control group's if that is less."""
    total = _meminfo(root) or _sysconf() or _windows_ram()
    limit = min((limit for limit, _ in _cgroups(root)), default=None)
    if limit is not None and (total is None or limit < total):
        return limit, (f"Host RAM is {limit / GIB:.1f} GiB: this process's control group allows no more.",)
    if total is None:
        return None, (
            f"Host RAM could not be read: {_ASSUMED_RAM / GIB:.0f} GiB are assumed (say it with --host-ram).",
        )
    return total, ()


def free_ram(root: Path = Path("/")) -> int | None:
    """The RAM that the system, and this process's control group, could give now; None: they do not say."""
    left = [limit - used for limit, used in _cgroups(root) if used is not None]
    available = _meminfo(root, "MemAvailable")
    return max(0, min([*left, *([] if available is None else [available])])) if left or available is not None else None


def _meminfo(root: Path, name: str = "MemTotal") -> int | None:
    match = re.search(rf"^{name}:\s+([0-9]+) kB", _read(root / "proc/meminfo"), re.MULTILINE)
    return int(match[1]) * 1024 if match else None


def _sysconf() -> int | None:
    """macOS and other Unix systems."""
    if sys.platform != "win32":
        with suppress(OSError, ValueError):
            return positive(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return None


def _windows_ram() -> int | None:
    if sys.platform == "win32":
        import ctypes

        kilobytes = ctypes.c_ulonglong(0)
        if ctypes.windll.kernel32.GetPhysicallyInstalledSystemMemory(ctypes.byref(kilobytes)):
            return positive(kilobytes.value * 1024)
    return None


def _cgroups(root: Path) -> list[tuple[int, int | None]]:
    """Every limit from our own group up to the root, in both versions of control groups, and what is used of it.

    Inside a container the group's path is often the host's, and only the mount's top can be read. Files that are kept
    in memory count as used there, and make way like everywhere.
    """
    limits: list[tuple[int, int | None]] = []
    for line in _read(root / "proc/self/cgroup").splitlines():
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
            value, used = positive(_read(place / name)), positive(_read(place / usage))
            if value is not None:
                held = re.search(rf"^{cached} ([0-9]+)$", _read(place / "memory.stat"), re.MULTILINE)
                limits.append((value, None if used is None else used - (int(held[1]) if held else 0)))
    return limits


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
