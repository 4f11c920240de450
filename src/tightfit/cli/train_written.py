"""A plan that was written before, read back: `worker.json` leaves nothing to be guessed, so another follows from it.

What is trained comes from the file as it was resolved there. What the user had pinned is not in it any more: every free
lever may change, but for those that depend on what is installed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tightfit.formats.worker.read import find_worker
from tightfit.hardware.machine import this_machine
from tightfit.inputs.flags import LEVERS, TRAINING, flags_from_levers, levers_as_written
from tightfit.job import Adapters, Data, Evaluation, Job, Limits, Machine, Saving
from tightfit.job.file import model_of
from tightfit.memory import estimate
from tightfit.messages import Message
from tightfit.pace import pace
from tightfit.planner.plan import Plan, Way
from tightfit.types import ConfigError, Hardware, Levers, ModelShape

_LEAST_MARGIN, _MOST_MARGIN = 0.0, 0.89


def read_written_plan(folder: Path) -> Plan:
    """The plan in a run's folder, on this machine; ConfigError: why it cannot be read back."""
    try:
        tree = find_worker(folder)
        levers = levers_as_written(tree)
        job = _job(tree, levers)
        hardware = _hardware(tree)
        shape = model_of(job)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(Message("cli.plan-s-worker")) from None
    return _plan(job, shape, levers, hardware)


def _plan(job: Job, shape: ModelShape, levers: Levers, hardware: Hardware) -> Plan:
    limit = int(hardware.gpu.memory_bytes * (1 - job.limits.margin))
    footprint = estimate(shape, levers, hardware.world, hardware)
    way = Way(
        shape=shape,
        levers=levers,
        hardware=hardware,
        footprint=footprint,
        pace=pace(shape, levers, hardware),
        fits=footprint.gpu.required_bytes <= limit,
        gpu_limit_bytes=limit,
    )
    return Plan(
        job=job,
        shape=shape,
        hardware=hardware,
        effective_batch=way.effective_batch,
        chosen=way,
        alternatives=(),
        considered=1,
        search_s=0.0,
        because=(),
    )


def _job(tree: Mapping[str, Any], levers: Levers) -> Job:
    model, training, data = tree["model"], tree["training"], dict(tree["data"])
    most = data.pop("max_samples")
    data.pop("overlong")
    return Job(
        model=model["weights"] or model["source"],
        **{name: getattr(levers, name) for name in TRAINING if name != "lora"},
        lora=_adapters(tree["lora"]),
        effective_batch=tree["effective_batch"],
        data=Data(**data),
        max_samples=most,
        learning_rate=training["learning_rate"],
        schedule=training["schedule"],
        warmup=training["warmup"],
        epochs=training["epochs"],
        max_steps=training["max_steps"],
        weight_decay=training["weight_decay"],
        clip=training["clip"],
        seed=training["seed"],
        evaluation=Evaluation(**tree["evaluation"]),
        saving=Saving(**tree["saving"]),
        logging_steps=tree.get("logging_steps"),
        timeout=None if tree["timeout_s"] is None else f"{tree['timeout_s']}s",
        hardware=Machine(nvme_path=tree["nvme_path"]),
        limits=Limits(margin=_margin(tree)),
        levers={flag: value for flag, value in flags_from_levers(levers).items() if LEVERS[flag].kept},
        tier=tree["tier"],
        trust_remote_code=model["trust_remote_code"],
    )


def _margin(tree: Mapping[str, Any]) -> float:
    share = 1 - float(tree["predicted"]["gpu"]["limit_bytes"]) / float(tree["world"]["gpu_memory_bytes"])
    return min(_MOST_MARGIN, max(_LEAST_MARGIN, round(share, 6)))


def _adapters(tree: Mapping[str, Any] | None) -> Adapters:
    if tree is None:
        return Adapters()
    targets = tree["targets"] if tree["targets"] == "all" else tuple(tree["targets"])
    return Adapters(
        rank=tree["rank"], alpha=tree["alpha"], dropout=tree["dropout"], targets=targets, dtype=tree["dtype"]
    )


def _hardware(tree: Mapping[str, Any]) -> Hardware:
    """This machine, with as many ranks as the plan has."""
    world = tree["world"]
    return replace(this_machine(), nodes=world["nodes"], gpus_per_node=world["gpus_per_node"])
