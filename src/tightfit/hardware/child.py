"""Questions that may hang, asked in a process of their own: run by path, free of imports of ours, and answered with one
JSON object. A wedged driver holds whoever calls its library, and a network disk whose server is gone everybody who asks
about it.

    child.py nvml           the cards, by the names of `Card`'s fields; each may be refused by itself, and is null then
    child.py torch          likewise: the last resort, for to import it takes seconds
    child.py disk FOLDER    folder, bytes, seconds, free, total; or a problem
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
import time
from typing import Any

CHUNK_BYTES = 4 * 2**20
MOST_BYTES = 256 * 2**20
MOST_S = 0.6
SPARE_BYTES = 512 * 2**20  # a disk that is nearly full is not written to


def ask_nvml() -> dict[str, object]:
    nvml: Any = importlib.import_module("pynvml")

    def ask(function: str, *values: object) -> Any:
        try:
            found = getattr(nvml, function)(*values)
        except Exception:  # NVML's own errors are made when it is imported
            return None
        return found.decode(errors="replace") if isinstance(found, bytes) else found

    nvml.nvmlInit()
    cards = []
    for index in range(ask("nvmlDeviceGetCount") or 0):
        handle = ask("nvmlDeviceGetHandleByIndex", index)
        pci = getattr(ask("nvmlDeviceGetPciInfo", handle), "busId", None)
        memory = ask("nvmlDeviceGetMemoryInfo", handle)
        running = ask("nvmlDeviceGetComputeRunningProcesses", handle)
        capability = ask("nvmlDeviceGetCudaComputeCapability", handle)
        milliwatts = ask("nvmlDeviceGetPowerUsage", handle)
        cards.append(
            {
                "index": index,
                "name": ask("nvmlDeviceGetName", handle),
                "uuid": ask("nvmlDeviceGetUUID", handle),
                "pci": pci.decode(errors="replace") if isinstance(pci, bytes) else pci,
                "total_bytes": getattr(memory, "total", None),
                "used_bytes": getattr(memory, "used", None),
                "free_bytes": getattr(memory, "free", None),
                "use_percent": getattr(ask("nvmlDeviceGetUtilizationRates", handle), "gpu", None),
                "temperature_c": ask("nvmlDeviceGetTemperature", handle, 0),
                "power_w": None if milliwatts is None else milliwatts / 1000,
                "arch": None if capability is None else "sm_{}{}".format(*capability),
                "processes": None if running is None else [[each.pid, each.usedGpuMemory] for each in running],
            }
        )
    driver, cuda = ask("nvmlSystemGetDriverVersion"), ask("nvmlSystemGetCudaDriverVersion")
    return {"cards": cards, "driver": driver, "cuda": cuda}


def ask_torch() -> dict[str, object]:
    torch: Any = importlib.import_module("torch")
    cards = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        known = torch.cuda.get_device_properties(index)
        try:
            free = torch.cuda.mem_get_info(index)[0]
        except Exception:  # whatever the driver refuses with
            free = None
        arch = getattr(known, "gcnArchName", None) if torch.version.hip else f"sm_{known.major}{known.minor}"
        sizes = {"total_bytes": known.total_memory, "free_bytes": free}
        cards.append({"index": index, "name": known.name, "arch": arch, **sizes})
    return {"hip": torch.version.hip, "cards": cards}


def ask_disk(folder: str) -> dict[str, object]:
    """Write for a moment and say how fast that went. A folder that is not there yet is looked for upwards.

    The file has no name from its first byte on where the system can do that, and loses it at once elsewhere: nothing is
    left behind, even if the process is killed.
    """
    while not os.path.isdir(folder) and os.path.dirname(folder) != folder:
        folder = os.path.dirname(folder)
    try:
        told = os.statvfs(folder)
        free, done = told.f_bavail * told.f_frsize, 0
        data = os.urandom(CHUNK_BYTES)  # a file system that packs or dedupes must not look faster than it is
        begun = time.monotonic()
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            while free > SPARE_BYTES + MOST_BYTES and done < MOST_BYTES and time.monotonic() - begun < MOST_S:
                done += file.write(data)
                os.fsync(file.fileno())
            seconds = time.monotonic() - begun
        total = told.f_blocks * told.f_frsize
        return {"folder": folder, "free": free, "total": total, "bytes": done, "seconds": seconds}
    except OSError as error:
        return {"folder": folder, "problem": error.strerror or str(error)}


if __name__ == "__main__":
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path = [place for place in sys.path if place != here]  # what lies beside this file is nobody's package
    questions: dict[str, Any] = {"nvml": ask_nvml, "torch": ask_torch, "disk": ask_disk}
    sys.stdout.write(json.dumps(questions[sys.argv[1]](*sys.argv[2:])))
