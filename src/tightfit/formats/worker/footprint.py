"""What the plan of a run of ours takes, from its `worker.json`."""

from __future__ import annotations

from pathlib import Path

from tightfit.formats.worker.read import find_worker
from tightfit.inputs.flags import levers_as_written
from tightfit.memory import estimate
from tightfit.model.load import load_model, shape_from_config
from tightfit.types import Footprint, Gpu, Hardware, UserError


def read_planned_footprint(plan: Path) -> Footprint | None:
    """What the plan of a run of ours takes; None: there is none, or none that can be read."""
    try:
        tree = find_worker(plan)
        model, world = tree["model"], tree["world"]
        found = model["config"]  # None: it lies beside the weights
        shape = load_model(model["weights"]) if found is None else shape_from_config(found, str(model["name"]))
        card = Gpu(name=world["vendor"], vendor=world["vendor"], memory_bytes=world["gpu_memory_bytes"])
        hardware = Hardware(gpu=card, nodes=world["nodes"], gpus_per_node=world["gpus_per_node"])
        return estimate(shape, levers_as_written(tree), world["ranks"], hardware)
    except (ValueError, KeyError, TypeError, AttributeError, UserError):
        return None
