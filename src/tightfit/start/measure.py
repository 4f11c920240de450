"""`tightfit measure`: one process for each GPU tries what this machine reaches, and what they find becomes one file.

Each rank appends a line to a file of its own for every part that is done. A part that some rank does not end in time,
or in which a rank dies, is given up: all are ended and started again with the parts that are left. So a wedged driver,
a collective that hangs or a Ctrl-C costs one part, and never the file.

The ranks of a node meet among themselves alone. Those of several nodes meet for the last part, the network, if this was
started on each of them: by `srun` with one task a node, or by torchrun.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

from tightfit.hardware.doctor.gpus import describe_process
from tightfit.hardware.machine import find_visible, fingerprint_of, look, name_of, this_machine
from tightfit.hardware.measured import PARTS, MeasuredMachine, Measurement
from tightfit.hardware.probes import name_process
from tightfit.hardware.probes.card import Card
from tightfit.hardware.slurm import slurm_node
from tightfit.inputs.records import parse_json
from tightfit.inputs.surroundings import cache_folder, cores, inherited, is_installed
from tightfit.inputs.versions import find_installed
from tightfit.messages import Listing, Message, from_json
from tightfit.pace.rates import know_rates
from tightfit.runs.launch import Exit, Ranks, RankStart
from tightfit.runs.reservations import free_port
from tightfit.types import ConfigError, Hardware, HardwareError, Precision

WORKER = (sys.executable, "-m", "tightfit.measure")
START_S = 60.0  # to import torch from a slow disk, and to meet
MOST_S = {False: 90.0, True: 30.0}
"""Of everything, from the first part on; with `--quick` or not."""
PATIENCE, GRACE_S = 2.0, 8.0
"""A part is given up after so many times its budget, and so much more."""
LOOK_S = 0.05
BUSY_PERCENT = 10.0  # of a GPU that is at rest: more is somebody's work
BUSY_LOAD = 0.5  # of the cores: with more in use, what the host reaches is not what it could
HOST_RATES = ("host_memory", "host_optimizer", "host_optimizer_together", "nvme_read", "nvme_write")
"""What a busy GPU does not change."""
SUMMED = ("host_memory", "host_optimizer_together")
"""Rates of all ranks of the node together. Of all others the slowest rank's counts, for which the others wait."""

TORCHRUN = {"LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
Tell = Callable[[str, int, int], None]
"""Of a part that is begun: its name, its number, and how many there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuringNode:
    """This node among those that measure together."""

    number: int = 0
    count: int = 1
    address: str = ""  # where all their ranks meet


@dataclass(slots=True, kw_only=True)
class MeasuredSoFar:
    """What was found so far."""

    rates: dict[str, float] = field(default_factory=dict)
    missing: dict[str, Message | str] = field(default_factory=dict)
    raw: dict[str, Any] = field(default_factory=dict)
    interrupted: bool = False


def find_node(env: Mapping[str, str]) -> MeasuringNode | None:
    """This node, as torchrun or SLURM has it; None: another process of this node measures."""
    if env.keys() >= TORCHRUN:
        if env["LOCAL_RANK"] != "0":
            return None
        count = int(env["WORLD_SIZE"]) // int(env["LOCAL_WORLD_SIZE"])
        # torchrun's own port is its own: the ranks that are started here meet at the next
        address = f"{env['MASTER_ADDR']}:{int(env['MASTER_PORT']) + 1}"
        return MeasuringNode(number=int(env.get("GROUP_RANK", "0")), count=count, address=address)
    found = slurm_node(env)
    if found is None:
        return MeasuringNode()
    return MeasuringNode(number=found.rank, count=found.nodes, address=f"{found.address}:{found.port}")


def measure_machine(
    *, quick: bool, node: MeasuringNode, tell: Tell, parts: Sequence[str] | None = None
) -> tuple[Measurement, list[Message], bool]:
    """Measure this machine: what was found, what is to be said about it, and whether it was interrupted.

    `parts`: these alone; None: all that this machine has.
    """
    if not is_installed("torch"):
        raise ConfigError(Message("measure.needs-torch"))
    sight, hardware = look(whole=True), this_machine()
    on_gpu = hardware.gpu.vendor != "cpu"
    visible = find_visible(sight, inherited({}))[0] if sight.cards else ()
    if parts is None:
        lacking = {
            "host_link": not on_gpu,
            "collectives": hardware.gpus_per_node == 1,
            "nvme": quick,
            "network": node.count == 1,
        }
        parts = [part for part in PARTS if not lacking.get(part)]
    said = [busy] if (busy := describe_busy(visible)) is not None else []
    load, have = _load(), cores()
    found = _run(hardware, parts, node, tell, quick=quick)
    if not said and on_gpu and visible:
        after = look(whole=True)
        found_after = find_visible(after, inherited({}))[0] if after.cards else ()
        said = [busy] if (busy := describe_busy(found_after, at_rest=False)) is not None else []
    marked = {name for name in found.rates if said and name not in HOST_RATES}
    if load > BUSY_LOAD * have:
        said.append(Message("measure.busy-host", load=load, cores=have))
        marked |= {name for name in found.rates if not on_gpu or name in HOST_RATES or name == "launch_s"}
    first = visible[0] if visible else None
    measurement = Measurement(
        tightfit=find_installed("tightfit") or "",
        on=date.today().isoformat(),
        quick=quick,
        fingerprint=fingerprint_of(sight),
        machine=MeasuredMachine(
            card=name_of(first) if first is not None else hardware.gpu.name,
            vendor=hardware.gpu.vendor,
            memory_bytes=hardware.gpu.memory_bytes,
            arch=hardware.gpu.arch,
            fp16=hardware.gpu.fp16,
            nodes=node.count,
            gpus_per_node=hardware.gpus_per_node,
            host_ram_bytes=hardware.host_ram_bytes,
        ),
        rates=found.rates,
        marked=tuple(name for name in found.rates if name in marked),
        missing=found.missing,
        raw=found.raw,
    )
    return measurement, said, found.interrupted


def _load() -> float:
    """How many processes have wanted a core in the last minute; 0 where the system does not say."""
    try:
        return os.getloadavg()[0]
    except (OSError, AttributeError):
        return 0.0


def assumed_rates(hardware: Hardware) -> dict[str, float]:
    """What a plan would go by if nothing had been measured, by the names of the rates; of a CPU nothing is known."""
    if hardware.gpu.vendor == "cpu":
        return {}
    plain, many = replace(hardware, measured=None, taught=None), hardware.gpus_per_node > 1
    found = {f"products.{precision}": know_rates(plain, precision).known["products"] for precision in PRECISIONS}
    known = know_rates(plain, "bf16").known
    for group, name in (
        ("memory", "memory_copy"),
        ("unpacking", "unpacking"),
        ("launch", "launch_s"),
        ("host_link", "host_link_together" if many else "host_link"),
        ("host_optimizer", "host_optimizer_together" if many else "host_optimizer"),
        ("link", "link"),
        ("network", "network"),
        ("nvme", "nvme_read"),
    ):
        found[name] = known[group]
    return {name: each.value for name, each in found.items()}


def describe_busy(cards: Sequence[Card], *, at_rest: bool = True) -> Message | None:
    """Who else is on the GPUs; None: nobody. `at_rest`: nothing of ours ran on them until now."""
    who = [describe_process(name_process(process)) for card in cards for process in card.processes or ()]
    if at_rest and not who:
        who = [
            Message("measure.busy-card", index=card.index, percent=card.use_percent)
            for card in cards
            if (card.use_percent or 0) > BUSY_PERCENT
        ]
    return Message("measure.busy", who=Listing(who, ";")) if who else None


# --- the processes ---------------------------------------------------------------------------------


def _run(hardware: Hardware, parts: Sequence[str], node: MeasuringNode, tell: Tell, *, quick: bool) -> MeasuredSoFar:
    """Measure the parts, in as many starts as it takes."""
    found, left = MeasuredSoFar(), list(parts)
    deadline = time.monotonic() + START_S + MOST_S[quick]
    try:
        while left:
            with _started(hardware, left, node, quick=quick) as watched:
                if (why := watched.wait_for_start(found, min(deadline, time.monotonic() + START_S))) is not None:
                    found.missing |= dict.fromkeys(left, why)
                    break
                deadline = min(deadline, time.monotonic() + MOST_S[quick])
                while left:
                    part = left[0]
                    tell(part, len(parts) - len(left) + 1, len(parts))
                    budget_s = PARTS[part].quick_s if quick else PARTS[part].budget_s
                    until = min(deadline, time.monotonic() + PATIENCE * budget_s + GRACE_S)
                    left.pop(0)
                    if (why := watched.wait_for(part, until)) is not None:
                        found.missing[part] = why
                        break  # the others of its ranks may stand in it: all begin again with what is left
                    _take(found, part, watched.lines_of(part))
            if time.monotonic() >= deadline:
                found.missing |= dict.fromkeys(left, Message("measure.no-time-left"))
                break
    except KeyboardInterrupt:
        done = {*found.raw, *found.missing}
        found.missing |= {part: Message("measure.interrupted") for part in parts if part not in done}
        found.interrupted = True
    return found


def _take(found: MeasuredSoFar, part: str, lines: Sequence[Mapping[str, Any]]) -> None:
    """What all ranks found of a part, as one."""
    found.raw[part] = [line.get("raw") for line in lines]
    by_name: dict[str, list[float]] = {}
    for line in lines:
        for name, rate in (line.get("rates") or {}).items():
            by_name.setdefault(name, []).append(rate)
    by_name = {name: rates for name, rates in by_name.items() if name not in SUMMED or len(rates) == len(lines)}
    for name, rates in by_name.items():
        found.rates[name] = sum(rates) if name in SUMMED else max(rates) if name.endswith("_s") else min(rates)
    if not by_name:
        why = next((line["missing"] for line in lines if "missing" in line), "")
        found.missing[part] = from_json(why) if isinstance(why, dict) else str(why)


class WatchedRanks:
    """Ranks that measure, and the lines that they have left."""

    def __init__(self, ranks: Ranks, files: Sequence[Path], wanted: int) -> None:
        self._ranks, self._files, self._wanted = ranks, files, wanted

    def _lines(self) -> list[list[dict[str, Any]]]:
        """The whole lines of each rank."""
        found = []
        for file in self._files:
            try:
                written = file.read_text(encoding="utf-8").rpartition("\n")[0].splitlines()
            except FileNotFoundError:
                written = []
            found.append([parse_json(line) for line in written])
        return found

    def wait_for_start(self, found: MeasuredSoFar, until: float) -> Message | None:
        """None: every rank has said what it runs on; or why they are not waited for any longer."""
        began = time.monotonic()
        while True:
            self._ranks.poll()  # before the last look at their lines
            told = [lines[0] for lines in self._lines() if lines]
            # A rank that sees too few GPUs ends at once, maybe before another has said anything.
            if few := next((line for line in told if line["gpus"] < self._wanted), None):
                problem = Message("measure.too-few-seen", seen=few["gpus"], wanted=self._wanted)
                if not few["gpus"]:
                    problem = Message("measure.torch-without-gpus", torch=few["torch"])
                if found.rates:  # a GPU was lost on the way: what was found before is kept
                    return problem
                raise HardwareError(problem)
            if len(told) == len(self._files):
                found.raw["software"] = {name: told[0][name] for name in ("torch", "cuda", "hip")}
                return None
            if self._ranks.exits:
                return _describe_exit(self._ranks.exits[0])
            if time.monotonic() >= until:
                return Message("measure.never-started", seconds=time.monotonic() - began)
            time.sleep(LOOK_S)

    def lines_of(self, part: str) -> list[dict[str, Any]]:
        """What the ranks have left of a part, of those that have."""
        return [line for lines in self._lines() for line in lines if line.get("part") == part]

    def wait_for(self, part: str, until: float) -> Message | None:
        """None: all ranks are done with it; or why it is given up."""
        began = time.monotonic()
        while True:
            self._ranks.poll()  # before the last look at their lines
            open_ranks = {
                rank for rank, lines in enumerate(self._lines()) if not any(line.get("part") == part for line in lines)
            }
            if not open_ranks:
                return None
            if last := next((gone for gone in self._ranks.exits if gone.start.rank in open_ranks), None):
                return _describe_exit(last)
            if time.monotonic() >= until:
                return Message("measure.took-too-long", seconds=time.monotonic() - began)
            time.sleep(LOOK_S)


def _describe_exit(last: Exit) -> Message:
    log = last.start.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return Message("measure.ended-early", code=last.code, line=log[-1][:200] if log else None)


@contextmanager
def _started(hardware: Hardware, parts: Sequence[str], node: MeasuringNode, *, quick: bool) -> Iterator[WatchedRanks]:
    """The ranks of this node; whatever happens, none is left behind."""
    count, on_gpu = hardware.gpus_per_node, hardware.gpu.vendor != "cpu"
    shared: dict[str, str | None] = {
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": str(-(-cores() // count)),  # each rank has its share of the cores
        "PYTHONUNBUFFERED": "1",
        **dict.fromkeys(("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")),
    }
    if not on_gpu:
        shared["CUDA_VISIBLE_DEVICES"] = ""
    options = ["--parts", ",".join(parts), "--folder", str(cache_folder()), *(["--quick"] if quick else [])]
    if on_gpu:
        options += ["--wanted", str(count)]
    if node.count > 1:
        options += ["--network", node.address, "--nodes", str(node.count), "--node", str(node.number)]
    with TemporaryDirectory(prefix="tightfit-measure-") as name:
        folder = Path(name)
        files = [folder / f"found-{rank}.jsonl" for rank in range(count)]
        starts = [
            RankStart(
                name=f"rank-{rank}",
                rank=rank,
                command=(*WORKER, "--found", str(file), *options),
                environment=inherited({**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}),
                log=folder / f"rank-{rank}.log",
            )
            for rank, file in enumerate(files)
        ]
        ranks = Ranks(starts, folder)
        with ranks:
            try:
                yield WatchedRanks(ranks, files, count if on_gpu else 0)
            finally:
                ranks.end(grace_s=0)
