"""From flags, files and the machine to a rehearsal that can be started."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tightfit.desk.plan import bounds_of, way_out
from tightfit.desk.plan_request import resolve_request
from tightfit.desk.request import Request
from tightfit.formats.target import Target
from tightfit.formats.worker.read import WORKER_FILE, parse_worker
from tightfit.hardware.machine import Device, occupancy
from tightfit.hardware.words import parse_size
from tightfit.inputs.records import json_text
from tightfit.job import Job
from tightfit.memory.overhead import beside
from tightfit.messages import Message, text
from tightfit.model.load import config_from_fields, find_config
from tightfit.model.presets import DRAWN_STD
from tightfit.planner.plan import Plan
from tightfit.priced import GIB, amounts
from tightfit.runs.free_ram import check_free_ram
from tightfit.runs.records import WorkerFile
from tightfit.start.machine import change_hardware, describe_holder, reservations, taken_gpus
from tightfit.start.train import (
    HOW_FAR,
    answer_of,
    check_packages,
    read_plan,
    rendered,
    with_a_scan_that_runs,
    with_whole_folder,
)
from tightfit.types import ConfigError, Hardware, HardwareError

STEPS = 5  # of a rehearsal; the first two only warm up


@dataclass(frozen=True, slots=True, kw_only=True)
class RehearseOptions:
    """What is said of the rehearsal itself, beside what is asked of its plan."""

    cap: str | None = None
    from_plan: str | None = None  # the folder of a plan that was written before
    full_length: bool = False
    steps: int = STEPS
    on: int | None = None
    keep: str | None = None
    json: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyRehearsal:
    """A rehearsal that can be started."""

    worker: WorkerFile
    files: Mapping[str, str]  # the plan: by name
    cap_bytes: int  # the card, as it is to be taken
    tensor_bytes: int | None  # what of it torch's allocator may have; None: the rank is on the CPU
    ram_bytes: int  # that this process takes: of what the ranks of a training share, it has all
    device: Device | None
    variable: str  # chooses among the GPUs of this machine
    plan: Plan | None  # None: it was written before
    said: tuple[str, ...]  # before the start
    notes: tuple[str, ...]  # at the end, about the figures


def prepare(request: Request, options: RehearseOptions) -> ReadyRehearsal:
    """The rehearsal that was asked for, checked."""
    cap, plan = None if options.cap is None else parse_size(options.cap), None
    said: tuple[str, ...] = ()
    if options.from_plan is not None:
        files, worker, sentence = read_plan(options.from_plan)
        said = (sentence,)
    else:

        def smaller(job: Job, hardware: Hardware) -> Hardware:
            if cap is None or cap >= hardware.gpu.memory_bytes:
                return hardware
            gpu = replace(hardware.gpu, memory_bytes=cap)
            return change_hardware(hardware, text("cli.each-card-taken", cap=cap / GIB), gpu=gpu)

        settled, target = with_whole_folder(with_a_scan_that_runs(resolve_request(request, smaller))), Target()
        plan = answer_of(request, settled, bounds_of(settled.job, target))
        if plan.chosen is None:
            raise ConfigError(Message("cli.nothing-fits-so-2", answer=way_out(plan, str(HOW_FAR))))
        files, worker = rendered(plan, settled.job, target)
    check_packages(worker)
    way = None if plan is None else plan.chosen
    try:
        tree = parse_worker(files[WORKER_FILE], WORKER_FILE)
        card = int(tree["world"]["gpu_memory_bytes"])
        if options.full_length:
            tree["data"] |= {"path": None, "recipe": None, "ablation": None, "tokenizer": None}
        orders, notes = rehearsed(tree), []  # the notes: what the figures mean and what they do not
        if worker.ranks > 1:
            sent = 0.0 if way is None else way.pace.causes.get("communication", 0.0)
            part = text("cli.s-predicted-step", sent=sent) if sent else ""
            notes.append(text("cli.nothing-sent-rehearsal", part=part))
        if tree["model"]["weights"] is None or draws_weights(tree):
            notes.append(text("cli.weights-drawn-at"))
        if tree["data"].get("path") is None and tree["data"].get("recipe") is None:
            notes.append(text("cli.samples-random-all"))
        if tree["levers"].get("attention") == "flash" and find_spec("flash_attn") is None:
            notes.append(text("cli.no-flash-here"))
    except (KeyError, TypeError, ValueError, AttributeError):
        raise ConfigError(Message("cli.whole-write-plan", worker_file=WORKER_FILE)) from None
    if cap is not None and cap > card:
        raise ConfigError(Message("cli.cap-more-than", cap=options.cap, card=card / GIB))
    cap = card if cap is None else cap
    tensors = None
    if worker.vendor != "cpu":
        # The driver's context and the communicator lie outside torch's allocator, so the allocator gets the rest.
        outside = sum(beside(0, worker.ranks, None).values())
        tensors = cap - outside
        if tensors <= 0:
            raise ConfigError(Message("cli.card-gib-leaves", cap=cap / GIB, outside=outside / GIB))
    found = occupancy()
    device = choose_device(found.devices, worker, cap, options.on)
    ram = worker.ram_bytes_per_rank
    if way is not None and way.levers.streams:
        ram += (worker.ranks - 1) * way.footprint.host.phases["step"].components.get("weights", 0)
    check_free_ram(worker.engine, ram)
    about = text("cli.without-gpu-only") if device is None else text("cli.pace-here-plan", name=device.name)
    return ReadyRehearsal(
        worker=worker,
        files={**files, WORKER_FILE: orders},
        cap_bytes=cap,
        tensor_bytes=tensors,
        ram_bytes=ram,
        device=device,
        variable=found.variable,
        plan=plan,
        said=said,
        notes=(*notes, about),
    )


def choose_device(devices: tuple[Device, ...], worker: WorkerFile, cap: int, number: int | None) -> Device | None:
    """The GPU to rehearse on; None: the plan is for the CPU."""
    if worker.vendor == "cpu":
        if number is not None:
            raise ConfigError(Message("cli.plan-cpu-so"))
        return None
    if not devices:
        raise HardwareError(Message("cli.plan-gpus-rehearsal"))
    taken = taken_gpus(reservations().live())
    if number is None:
        free = [device for device in devices if device.key not in taken]
        if not free:
            who = taken[devices[0].key].words
            raise HardwareError(Message("cli.every-gpu-use", who=who))
        chosen = max(free, key=lambda device: device.free_bytes or 0)
    else:
        named = [device for device in devices if device.number == number]
        if not named:
            numbers = ", ".join(str(device.number) for device in devices)
            raise HardwareError(Message("cli.gpu-machine-there", number=number, numbers=numbers))
        chosen = named[0]
        if chosen.key in taken:
            raise HardwareError(Message("cli.gpu-use-name", number=number, words=taken[chosen.key].words))
    # What fails for want of room here would say nothing about the plan.
    need, total = min(worker.required_bytes, cap), chosen.total_bytes
    if total is not None and total < need:
        wanted, there = amounts(need, total)
        about = {"wanted": wanted, "number": chosen.number, "there": there, "total_bytes": int(total / GIB)}
        raise HardwareError(Message("cli.plan-needs-gib", **about))
    if chosen.free_bytes is not None and chosen.free_bytes < need:
        wanted, there = amounts(need, chosen.free_bytes)
        about = {"wanted": wanted, "number": chosen.number, "there": there, "held": describe_holder(chosen)[0]}
        raise HardwareError(Message("cli.too-little-to-rehearse", **about))
    return chosen


def rehearsed(written: Mapping[str, Any]) -> str:
    """The worker's orders for a rehearsal: without evaluation, and without fetching any weights."""
    tree = copy.deepcopy(dict(written))
    tree["evaluation"]["split"] = 0.0  # it may take hours, and holds less than a step
    model, data = tree["model"], tree["data"]
    if draws_weights(tree):
        word = model["weights"]
        found = find_config(word)
        fields = config_from_fields(found.config, found.name) if found.is_block else found.config
        model["config"], model["weights"] = {**fields, "initializer_range": DRAWN_STD}, None
        if data.get("tokenizer") is None and (data.get("path") or data.get("recipe")):
            data["tokenizer"] = word  # lengths in the tokens that the training will see
    return json_text(tree)


def draws_weights(tree: Mapping[str, Any]) -> bool:
    """Whether weights that would have to be fetched are drawn instead; a model with code of its own needs them."""
    model = tree["model"]
    word = model["weights"]
    return isinstance(word, str) and not Path(word).expanduser().exists() and not model["trust_remote_code"]
