"""The config of our own training worker: one JSON file, from which nothing is left to be guessed.

The worker never sees the job file, the flags or the planner. Defaults that depend on something else (a learning
rate on the method, alpha on the rank) are resolved here, and the functions that resolve them are public: the
files for other trainers must say the same numbers. What was predicted travels along, so that the worker can
hold its own measurements against it.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tightfit.formats.worker.read import SCHEMA
from tightfit.inputs.flags import flags_from_levers
from tightfit.job import Job, Saving
from tightfit.job.file import timeout_s
from tightfit.memory.stages import split_layers
from tightfit.messages import Message, text
from tightfit.model.load import config_from_fields, find_config
from tightfit.model.presets import PRESETS, checkpoint_of
from tightfit.planner.plan import Plan, Way
from tightfit.types import ConfigError, Levers

LOGGING_STEPS = 10
SAVING_S = 300  # what a checkpoint may take when a run is asked to stop

DEEPSPEED_FILE = "deepspeed.json"

FIRST_SCALE_POWER = 12  # at DeepSpeed's own 16 the first steps overflow and are skipped
LOW_SCALE_POWER = 8
"""What the guide says that these tiers come from: hardly a step overflows, and the scale grows from there."""
LOW_SCALE_TIERS = ("fp16_safe", "extreme")


def require_way(plan: Plan) -> Way:
    """The way that the files are for; without one there is nothing to write."""
    if plan.chosen is None:
        raise ConfigError(Message("planfile.nothing-to-write"))
    return plan.chosen


def deepspeed_file_of(plan: Plan) -> str | None:
    """The name of DeepSpeed's own file; None: another engine runs it."""
    return DEEPSPEED_FILE if require_way(plan).levers.uses_deepspeed else None


def worker_json(plan: Plan) -> str:
    """Everything that the worker needs, and what it should find."""
    way, job = require_way(plan), plan.job
    lora, overlong = way.levers.lora, "skip" if way.skips_long else "cut"
    gpu, host = way.footprint.gpu, way.footprint.host
    config: dict[str, Any] = {
        "schema": SCHEMA,
        "model": _model(plan, way),
        "levers": flags_from_levers(way.levers),
        "buckets": asdict(way.levers.buckets),
        "lora": lora
        and {
            "rank": lora.rank,
            "alpha": lora_alpha(job, way.levers),
            "dropout": job.lora.dropout,
            "targets": "all" if lora.targets is None else list(lora.targets),
            "dtype": lora.dtype,
        },
        "world": {
            "nodes": way.hardware.nodes,
            "gpus_per_node": way.hardware.gpus_per_node,
            "ranks": way.world,
            "vendor": way.hardware.gpu.vendor,
            "gpu_memory_bytes": way.hardware.gpu.memory_bytes,
        },
        "pipeline": _pipeline(way),
        "effective_batch": way.effective_batch,
        "deepspeed": deepspeed_file_of(plan),
        "nvme_path": _nvme_path(job, way.levers),
        "data": asdict(job.data) | {"max_samples": job.max_samples, "overlong": overlong},
        "training": training_values(job, way.levers),
        "evaluation": asdict(job.evaluation),
        "saving": asdict(job.saving),
        "logging_steps": job.logging_steps,
        "timeout_s": time_limit_s(job),
        "tier": job.tier,
        "changes": list(map(str, way.changes)),
        "predicted": {
            "gpu": {
                "peak_bytes": gpu.peak_bytes,
                "peak_phase": gpu.peak_phase,
                "init_peak_bytes": gpu.init_peak_bytes,
                "required_bytes": gpu.required_bytes,
                "limit_bytes": way.gpu_limit_bytes,
                "phases": {name: phase.total_bytes for name, phase in gpu.phases.items()},
                "milestones": _milestones(way),
            },
            "host": {
                "peak_bytes_per_rank": host.peak_bytes_per_rank,
                "peak_bytes_per_node": host.peak_bytes_per_node,
                "nvme_bytes_per_node": host.nvme_bytes_per_node,
            },
            "trainable_parameters": way.footprint.trainable_parameters,
            "step_s": way.pace.step_s if way.is_paced else None,
            "tokens_per_s": way.pace.tokens_per_s if way.is_paced else None,
        },
    }
    return json.dumps(config, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _nvme_path(job: Job, levers: Levers) -> str | None:
    path = job.hardware.nvme_path
    if path is None and levers.streams and levers.offload_optimizer == "nvme":
        raise ConfigError(Message("planfile.no-nvme-path"))
    return path


def training_values(job: Job, levers: Levers) -> dict[str, Any]:
    """The numbers of the optimizer and its schedule, each resolved."""
    return {
        "learning_rate": learning_rate(job, levers),
        "schedule": job.schedule,
        "warmup": job.warmup,
        "epochs": epochs(job),
        "max_steps": job.max_steps,
        "weight_decay": job.weight_decay,
        "clip": clip(job, levers),
        "first_scale_power": first_scale_power(job) if levers.precision == "fp16" else None,
        "seed": job.seed,
    }


def learning_rate(job: Job, levers: Levers) -> float:
    """The job's, or the usual one for the method that was planned."""
    if job.learning_rate is not None:
        return float(job.learning_rate)
    return 1e-5 if levers.method == "full" else 1e-4


def first_scale_power(job: Job) -> int:
    """fp16's loss scale starts at two to this power; the tiers that promise a low start have it."""
    return LOW_SCALE_POWER if job.tier in LOW_SCALE_TIERS else FIRST_SCALE_POWER


def save_steps(job: Job) -> int | None:
    """Steps between two checkpoints for trainers that know no minutes; None: no checkpoints."""
    if job.saving.every_steps is None and job.saving.every_minutes is not None:
        return Saving().every_steps
    return job.saving.every_steps


def logging_steps(job: Job) -> int:
    """Steps between two lines of the log for trainers that know no seconds."""
    return LOGGING_STEPS if job.logging_steps is None else job.logging_steps


def epochs(job: Job) -> float | None:
    """None: `max_steps` decides."""
    if job.max_steps is not None:
        return None
    return 1.0 if job.epochs is None else float(job.epochs)


def lora_alpha(job: Job, levers: Levers) -> float | None:
    """The scaling numerator; None: there are no adapters."""
    if levers.lora is None:
        return None
    return float(2 * levers.lora.rank) if job.lora.alpha is None else float(job.lora.alpha)


def clip(job: Job, levers: Levers) -> float:
    """The gradient norm above which gradients are scaled down; 0: never."""
    return float(job.clip) if levers.gradient_clipping else 0.0


def time_limit_s(job: Job) -> int | None:
    """When the job itself wants to be stopped; None: never."""
    return None if job.timeout is None else timeout_s(job.timeout)


def time_to_save_s(plan: Plan) -> int:
    """How long before its end a run has to be told: it ends the steps that it is in, and saves."""
    return SAVING_S + math.ceil(2 * require_way(plan).pace.step_s)


def _model(plan: Plan, way: Way) -> dict[str, Any]:
    """`source` is what the user named; where a smaller model was allowed, that one's name.

    A preset, a block of fields and a config without weights beside it are drawn from the seed.
    """
    name = way.shape.name
    source = plan.job.model if way.shape is plan.shape else name
    # the config to build from, or what has both config and weights
    config = weights = None
    if not isinstance(source, str):
        config = dict(config_from_fields(source, name))
    else:
        word = source.strip()
        path = Path(word).expanduser()
        if word.lower() not in PRESETS and (not path.exists() or (path.is_dir() and any(path.glob("*.safetensors")))):
            weights = str(path.absolute()) if path.exists() else word
        else:
            found = find_config(word)
            config = dict(config_from_fields(found.config, name) if found.is_block else found.config)
    return {
        "name": name,
        "source": source if isinstance(source, str) else dict(source),
        "config": config,
        "weights": weights,
        "model_type": way.shape.model_type,
        "parameters": way.shape.parameters,
        "trust_remote_code": plan.job.trust_remote_code,
    }


def _pipeline(way: Way) -> dict[str, Any] | None:
    """Which layers each stage has, from one number up to another; None: every GPU has all of them."""
    if way.levers.pipeline_parallel == 1:
        return None
    stages = [[each.start, each.stop] for each in split_layers(way.shape, way.levers)]
    return {"stages": stages, "fullest_gpu": way.footprint.pipeline_gpu}


def _milestones(way: Way) -> dict[str, int]:
    """What the first window shows at each of its ends. The optimizer makes its states in its first step.

    With the plain loss the first forward pass stays below this: the loss is largest when its backward begins.
    """
    gpu, levers = way.footprint.gpu, way.levers
    totals = {name: phase.total_bytes for name, phase in gpu.phases.items()}
    at_once = levers.engine == "zero0" and levers.precision != "fp32"  # DeepSpeed takes a step while it starts
    states = 0 if at_once else gpu.phases["step"].components.get("optimizer_states", 0)
    forward = max(totals["forward"], totals["loss"])
    return {
        "init": gpu.init_peak_bytes,
        "forward": forward - states,
        "backward": max(forward, totals["backward"]) - states,
        "step": gpu.peak_bytes,
    }


# --- on what it would train ---------------------------------------------------------------------


def untrained(job: Job) -> tuple[Message, ...]:
    """What whoever starts it has to know first: that it begins with drawn weights, or trains on random tokens."""
    return (*seeded(job), *without_data(job))


def seeded(job: Job) -> tuple[Message, ...]:
    """A preset is a shape: what trains it in earnest names a model that has weights."""
    name = job.model.strip().lower() if isinstance(job.model, str) else ""
    if name not in PRESETS:
        return ()
    public = checkpoint_of(name)
    if public is None:
        return (Message("planfile.only-shape-unpublished", name=name),)
    return (Message("planfile.only-shape", name=name, flag=f"--model {public}"),)


def without_data(job: Job) -> tuple[Message, ...]:
    """A plan needs no data, and a training is nothing without it."""
    named = job.data.path is not None or job.data.recipe is not None
    return () if named else (Message("planfile.random-tokens"),)


WORKER = "--module tightfit.train worker.json"


def node_flag(flag: str, variable: str) -> str:
    """A flag whose value differs from node to node, or is known on the cluster only."""
    return f'--{flag} "${{{variable}:?{text("launch.set-on-node")}}}"'
