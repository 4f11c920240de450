"""The worker's orders: `worker.json`, as typed values.

The desk wrote the file (`formats/worker/write.py`), with every default resolved. What a run adds to it (a rehearsal, no
probe) comes as options of the command line, because the same file serves them all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tightfit.formats.worker.read import read_worker
from tightfit.inputs.flags import levers_as_written
from tightfit.inputs.records import read_json
from tightfit.job import Evaluation, Saving
from tightfit.messages import Message
from tightfit.types import ConfigError, Levers, PhaseName

Milestone = Literal["init", "forward", "backward", "step"]
"""The four moments at which memory is measured against the plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    name: str
    config: Mapping[str, Any] | None  # a Hugging Face config; None: the one that lies beside the weights
    weights: str | None  # a folder or an id; None: they are drawn from the seed
    parameters: int
    trust_remote_code: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    nodes: int
    gpus_per_node: int
    ranks: int
    vendor: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    learning_rate: float
    schedule: str
    warmup: float
    epochs: float | None
    max_steps: int | None
    weight_decay: float
    clip: float
    first_scale_power: int | None
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSettings:
    """What LoRA needs beside its rank and targets, which are levers."""

    alpha: float
    dropout: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What the desk expects, to be held against what is measured."""

    phases: Mapping[PhaseName, int]
    milestones: Mapping[str, int]
    peak_bytes: int
    limit_bytes: int
    host_bytes_per_rank: int
    nvme_bytes_per_node: int
    trainable_parameters: int
    step_s: float
    tokens_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    model: ModelSource
    levers: Levers
    adapters: AdapterSettings | None
    world: World
    effective_batch: int
    deepspeed: Mapping[str, Any] | None  # DeepSpeed's own config; None: the engine is another
    nvme_path: Path | None  # a folder for what streams from a disk; DeepSpeed's own config has it as well
    data: Mapping[str, Any]  # the fields of `train.data.spec.DataSpec`, less those that stand elsewhere here
    training: OptimizerConfig
    evaluation: Evaluation
    folder: Path  # of the run
    plan: Path  # the folder where this file lies
    saving: Saving
    logging_steps: int | None  # steps between two lines of the log; None: time decides
    timeout_s: int | None
    predicted: Prediction
    stages: tuple[range, ...]  # the layers of each stage of a pipeline; none: there is no pipeline
    rehearsed_gpu: int  # of a pipeline's row, the one that a rehearsal stands for


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a start adds to the file; the help of the worker's command line says more."""

    probe: bool = True
    rehearse: bool = False
    cap_bytes: int | None = None
    rehearse_steps: int = 3
    tensorboard: bool = False
    wandb: bool = False
    resume: str = "auto"
    resume_anyway: bool = False
    trust_pickle: bool = False
    skip_steps: frozenset[int] = frozenset()  # from 1


def _pick(kind: type[Any], fields: Mapping[str, Any]) -> Any:
    return kind(**{name: fields[name] for name in kind.__slots__})


def read_worker_config(path: Path) -> WorkerConfig:
    """The file, or one sentence about what is wrong with it."""
    tree = read_worker(path)
    try:
        gpu, host = tree["predicted"]["gpu"], tree["predicted"]["host"]
        expected = {**tree["predicted"], **gpu, **host, "host_bytes_per_rank": host["peak_bytes_per_rank"]}
        deepspeed: Mapping[str, Any] | None = None
        if tree["deepspeed"] is not None:
            file = path.parent / tree["deepspeed"]
            try:
                deepspeed = read_json(file)
            except (OSError, ValueError) as error:
                raise ConfigError(Message("train.plan-unreadable", path=file, why=error)) from None
        pipeline = tree.get("pipeline") or {"stages": [], "fullest_gpu": 0}
        return WorkerConfig(
            model=_pick(ModelSource, tree["model"]),
            levers=levers_as_written(tree),
            adapters=None if tree["lora"] is None else _pick(AdapterSettings, tree["lora"]),
            world=_pick(World, tree["world"]),
            effective_batch=tree["effective_batch"],
            deepspeed=deepspeed,
            nvme_path=None if tree["nvme_path"] is None else Path(tree["nvme_path"]).expanduser(),
            data=tree["data"],
            training=OptimizerConfig(**tree["training"]),
            evaluation=_pick(Evaluation, tree["evaluation"]),
            folder=(path.parent / tree["saving"]["folder"]).absolute(),
            plan=path.parent.absolute(),
            saving=_pick(Saving, tree["saving"]),
            logging_steps=tree.get("logging_steps"),
            timeout_s=tree["timeout_s"],
            predicted=_pick(Prediction, expected),
            stages=tuple(range(start, stop) for start, stop in pipeline["stages"]),
            rehearsed_gpu=pipeline["fullest_gpu"],
        )
    except (KeyError, TypeError) as error:
        raise ConfigError(Message("train.worker-json-lacks", path=path, key=error)) from None
