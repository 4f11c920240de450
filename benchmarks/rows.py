"""Measured runs, each with the levers that describe it, so that both models can be held against them.

`data/h200-*.jsonl` hold one run a line: real DeepSpeed or FSDP2 and a real Hugging Face model on one H200 that
posed as rank 0 of `world`. `measure_peaks.py` makes such rows. What a scenario does not say has the value that
`levers_of` gives it.

The rows of `h200-pace*.jsonl` were measured for their times, five steps and more; those of the first file when the
footprint model stood as it stands. They ran in forks of one process that had torch loaded. A fork does not count
the pages of libraries that it has not touched, so its resident memory is a few hundred MiB below that of a process
of its own, and is not compared.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from statistics import median
from typing import Any

from tightfit.inputs.flags import levers_as_written
from tightfit.memory import estimate
from tightfit.memory.overhead import CONTEXT_BYTES
from tightfit.model.load import find_config, shape_from_config
from tightfit.types import Buckets, Checkpointing, Footprint, Gpu, Hardware, Levers, Lora, ModelShape, Offload

GIB = 2**30
DATA = Path(__file__).parent / "data"
GIVEN = DATA / "h200-peaks.jsonl"
OWN = DATA / "h200-own.jsonl"
PACE = DATA / "h200-pace.jsonl"
PACE_LATER = tuple(DATA / f"h200-pace{number}.jsonl" for number in (2, 3, 4))
"""Measured after the constants of the pace model had been set as they were then. The third file taught the model of
`pace/` what it is now, the fourth was measured after that and taught nothing yet."""
HELD = DATA / "h200-held.jsonl"
"""Plans that our own worker ran, with those who held the memory at the peak."""
RESIDENT = DATA / "h200-host.jsonl"
"""Rehearsals whose pages of RAM were counted by kind, phase by phase."""
WHOLE_GIB = 139.0  # of an H200, its context apart
FORKED = frozenset({PACE.name, *[path.name for path in PACE_LATER]})

Scenario = Mapping[str, Any]

_BUCKETS = {
    "reduce_bucket_size": "reduce_bucket",
    "allgather_bucket_size": "allgather_bucket",
    "stage3_prefetch_bucket_size": "prefetch_bucket",
    "stage3_param_persistence_threshold": "persistence_threshold",
    "stage3_max_live_parameters": "max_live_parameters",
    "stage3_max_reuse_distance": "max_reuse_distance",
    "sub_group_size": "sub_group_size",
    "overlap_comm": "overlap_comm",
    "contiguous_gradients": "contiguous_gradients",
}
"""DeepSpeed's name of each bucket and threshold, and ours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measured run. Bytes are rounded to what the file holds: a thousandth of a GiB."""

    id: str
    scenario: Scenario
    parameters: int
    """As the built model counts them: packed weights by their bytes, adapters included."""
    peak_bytes: int
    init_bytes: int | None
    """None: not measured, or measured of something else than loading."""
    host_bytes: int | None
    """None: of a fork."""
    step_s: float
    """The median of the steps that were only timed; without such steps, of those after the first."""
    timed_steps: int
    """How many were only timed; 0: the steps were watched phase by phase as well, which slows them."""
    source: str
    """The file it stands in."""
    frozen: bool = False
    """Measured after the footprint model had been written down; the others were there to learn from."""
    pace_frozen: bool = False
    """Likewise of the pace model's constants."""
    note: str = ""


def read_rows(*paths: Path) -> tuple[Row, ...]:
    """Every complete row of these files, or of those that the footprint is held against.

    A run that failed has no peak and is no row.
    """
    rows = []
    for path in paths or (GIVEN, OWN, PACE, *PACE_LATER):
        for line in path.read_text(encoding="utf-8").splitlines():
            raw = json.loads(line)
            if "peak" in raw:
                rows.append(_row(raw, path.name))
    return tuple(rows)


def _row(raw: Mapping[str, Any], source: str) -> Row:
    phases = raw["phases"]
    init = max(phases["model"]["peak"], phases["engine"]["peak"]) if raw.get("init_peak", 0) is not None else None
    return Row(
        id=raw["id"],
        scenario=raw["scenario"],
        parameters=raw["params"],
        peak_bytes=_bytes(raw["peak"]),
        init_bytes=None if init is None else _bytes(init),
        host_bytes=None if source in FORKED else _bytes(raw["host_rss"]),
        step_s=raw.get("median_s") or median(raw["times"][1:]),
        timed_steps=len(raw.get("timed", ())),
        source=source,
        frozen=raw.get("frozen", source == PACE.name),
        pace_frozen=raw.get("pace_frozen", False),
        note=raw.get("note", ""),
    )


def _bytes(gib: float) -> int:
    return round(gib * GIB)


def shape_of(scenario: Scenario) -> ModelShape:
    return _shape(json.dumps(scenario["config"], sort_keys=True), scenario["config"]["model_type"])


@lru_cache(maxsize=256)
def _shape(config: str, name: str) -> ModelShape:
    return shape_from_config(json.loads(config), name)


def levers_of(scenario: Scenario) -> Levers:
    """The settings of a run. A missing key has the value that the runs were made with."""
    lora = None
    if scenario.get("lora"):
        targets = scenario.get("targets")
        lora = Lora(
            rank=scenario["lora"],
            targets=tuple(targets) if targets else None,
            dtype=scenario.get("adapter_dtype", "bf16"),
        )
    return Levers(
        method="qlora" if scenario.get("quant") else "lora" if lora else "full",
        engine=scenario.get("engine") or f"zero{scenario['stage']}",
        sequence=scenario.get("seq", 2048),
        micro_batch=scenario.get("micro", 1),
        accumulation=scenario.get("accum", 1),
        precision=scenario.get("dtype", "bf16"),
        optimizer=scenario.get("optimizer", "adamw"),
        offload_optimizer=_offload(scenario, "offload_optimizer") or _offload_with_params(scenario),
        offload_param=_offload(scenario, "offload_param") or "none",
        checkpointing=Checkpointing(layers=scenario.get("ckpt_layers") if scenario.get("ckpt", True) else 0),
        loss=scenario.get("loss", "plain"),
        attention=scenario.get("attention", "sdpa"),
        scan=scenario.get("scan", "official"),
        master_weights=lora is None or scenario.get("engine") != "fsdp2",  # there the adapters rested in bf16
        lora=lora,
        buckets=Buckets(**{_BUCKETS[key]: value for key, value in scenario.get("zero", {}).items()}),
    )


def _offload(scenario: Scenario, key: str) -> Offload | None:
    said = scenario.get(key)
    return "cpu" if said is True else said or None


def _offload_with_params(scenario: Scenario) -> Offload:
    """FSDP2 has one offload policy, for parameters, gradients and optimizer together."""
    return "cpu" if scenario.get("engine") == "fsdp2" and scenario.get("offload_param") else "none"


def hardware_of(scenario: Scenario) -> Hardware | None:
    """None: the whole card, ample for every row. A capped run was told that this much is free."""
    triton, cap_gib = scenario.get("triton", True), scenario.get("cap_gib")
    if triton and not cap_gib:
        return None
    memory = _bytes(cap_gib or WHOLE_GIB) + CONTEXT_BYTES
    card = Gpu(name="H200", vendor="nvidia", arch="sm_90", memory_bytes=memory, triton=triton)
    return Hardware(gpu=card, gpus_per_node=scenario["world"])


def predict(row: Row) -> Footprint:
    scenario = row.scenario
    made = shape_of(scenario), levers_of(scenario), scenario["world"], hardware_of(scenario)
    return estimate(*made, built_whole=True)  # `measure_peaks.py` does


def error(predicted: int, measured: int | None) -> float | None:
    """Relative; None where there is nothing to compare with."""
    return predicted / measured - 1 if measured else None


# --- plans, rehearsed ---------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Rehearsed:
    """One plan that our own worker ran."""

    id: str
    init_bytes: int
    peak_bytes: int
    host_bytes: int | None
    """None: several ran at once for other figures, and it was not kept."""
    predicted_first: bool
    raw: Mapping[str, Any]

    @cached_property
    def levers(self) -> Levers:
        raw = self.raw
        return levers_as_written({**raw, "data": {"packing": raw["packed"]}, "training": {"clip": 1.0}})

    @cached_property
    def shape(self) -> ModelShape:
        model = self.raw["model"]
        return shape_from_config(model["config"] or find_config(model["source"]).config, model["name"])

    @cached_property
    def footprint(self) -> Footprint:
        """What is predicted of it now."""
        world = self.raw["world"]
        memory, triton = world["gpu_memory_bytes"], self.raw.get("triton", True)
        card = Gpu(name="the H200", vendor="nvidia", arch="sm_90", memory_bytes=memory, triton=triton)
        hardware = Hardware(gpu=card, gpus_per_node=world["gpus_per_node"])
        return estimate(self.shape, self.levers, world["ranks"], hardware)


def read_rehearsed(path: Path = HELD) -> tuple[Rehearsed, ...]:
    return tuple([_rehearsed(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()])


def _rehearsed(raw: Mapping[str, Any]) -> Rehearsed:
    return Rehearsed(
        id=raw["id"],
        init_bytes=raw["figures"]["init"],
        peak_bytes=raw["figures"]["peak"],
        host_bytes=raw["figures"].get("host"),
        predicted_first=raw["predicted_first"],
        raw=raw,
    )
