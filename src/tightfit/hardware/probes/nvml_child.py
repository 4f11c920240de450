"""A process of its own that asks NVML and prints one JSON object: run by path, and free of imports of ours.

Every field may be refused by itself, and is null then.
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any


def main() -> int:
    nvml: Any = importlib.import_module("pynvml")

    def ask(function: str, *values: object) -> Any:
        try:
            return getattr(nvml, function)(*values)
        except Exception:  # NVML's own errors are made when it is imported
            return None

    nvml.nvmlInit()
    cards = []
    for index in range(ask("nvmlDeviceGetCount") or 0):
        handle = ask("nvmlDeviceGetHandleByIndex", index)
        memory = ask("nvmlDeviceGetMemoryInfo", handle)
        rates = ask("nvmlDeviceGetUtilizationRates", handle)
        running = ask("nvmlDeviceGetComputeRunningProcesses", handle)
        capability = ask("nvmlDeviceGetCudaComputeCapability", handle)
        milliwatts = ask("nvmlDeviceGetPowerUsage", handle)
        cards.append(
            {
                "index": index,
                "name": _text(ask("nvmlDeviceGetName", handle)),
                "uuid": _text(ask("nvmlDeviceGetUUID", handle)),
                "pci": _text(getattr(ask("nvmlDeviceGetPciInfo", handle), "busId", None)),
                "total_bytes": getattr(memory, "total", None),
                "used_bytes": getattr(memory, "used", None),
                "free_bytes": getattr(memory, "free", None),
                "use_percent": getattr(rates, "gpu", None),
                "temperature_c": ask("nvmlDeviceGetTemperature", handle, 0),
                "power_w": None if milliwatts is None else milliwatts / 1000,
                "arch": None if capability is None else "sm_{}{}".format(*capability),
                "processes": None if running is None else [[each.pid, each.usedGpuMemory] for each in running],
            }
        )
    tree = {
        "cards": cards,
        "driver": _text(ask("nvmlSystemGetDriverVersion")),
        "cuda": ask("nvmlSystemGetCudaDriverVersion"),
    }
    sys.stdout.write(json.dumps(tree))
    return 0


def _text(value: object) -> str | None:
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return value if isinstance(value, str) else None


if __name__ == "__main__":
    raise SystemExit(main())
