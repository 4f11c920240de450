"""Where a run stands: what `state.json` says beside the tensors, and whether another job may go on from there.

Of random numbers nothing has to be kept: each step draws them from the seed, its own number and the rank. Nor of the
data: the step's number says which samples come next, whatever the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from tightfit.messages import Message
from tightfit.runs.checkpoints import SCHEMA, Torn
from tightfit.train.config import WorkerConfig
from tightfit.train.data import Samples
from tightfit.train.engines import Counters, LossScale

SILENT = ("_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype", "use_cache")
"""Fields of a Hugging Face config that say nothing about what is trained."""
SAVED_AS = ("rescale_prenorm_residual",)
"""Fields that a saved model has otherwise than the one that is made from scratch."""


def describe_state(
    config: WorkerConfig, job: Mapping[str, Any], counters: Counters, step: int, versions: Mapping[str, str]
) -> dict[str, Any]:
    """`state.json` after `step` steps."""
    levers = config.levers
    return {
        "schema": SCHEMA,
        "step": step,
        "samples": step * config.effective_batch,
        "epoch": round(step * config.effective_batch / max(1, job["data"]["samples"]), 6),
        "random": {"seed": config.training.seed, "drawn": "from seed, step and rank, anew at every step"},
        "optimizer": {"kind": levers.optimizer, "steps": counters.optimizer_steps},
        "loss_scale": None if counters.scale is None else asdict(counters.scale),
        "schedule": asdict(config.training),
        "job": dict(job),
        "plan": {
            "engine": levers.engine,
            "world": config.world.ranks,
            "precision": levers.precision,
            "method": levers.method,
            "micro_batch": levers.micro_batch,
            "accumulation": levers.accumulation,
            "offload_optimizer": levers.offload_optimizer,
            "offload_param": levers.offload_param,
        },
        "versions": dict(versions),
    }


def job_of(config: WorkerConfig, hf_config: Any, samples: Samples) -> dict[str, Any]:
    """What a training is, apart from how it is computed."""
    levers, adapters = config.levers, None
    if levers.lora is not None and config.adapters is not None:
        targets = "all" if levers.lora.targets is None else sorted(levers.lora.targets)
        adapters = {"rank": levers.lora.rank, "targets": targets, **asdict(config.adapters)}
    return {
        "model": _plain(hf_config.to_dict()),
        "base": (config.model.weights or config.model.name) if adapters else None,
        "method": levers.method,
        "lora": adapters,
        "trains": levers.trains,
        "frozen_layers": levers.frozen_layers,
        "precision": levers.precision,
        "optimizer": levers.optimizer,
        "sequence": levers.sequence,
        "effective_batch": config.effective_batch,
        "seed": config.training.seed,
        "data": {
            "path": str(config.data.get("path")),
            "samples": len(samples),
            "fingerprint": samples.fingerprint,
            "held_back": config.evaluation_split,
        },
    }


def _plain(tree: Any) -> Any:
    """As JSON has it."""
    if isinstance(tree, Mapping):
        return {str(key): _plain(value) for key, value in tree.items() if str(key) not in (*SILENT, *SAVED_AS)}
    if isinstance(tree, (list, tuple)):
        return [_plain(value) for value in tree]
    return tree if isinstance(tree, (str, int, float, bool)) or tree is None else str(tree)


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[Message]:
    """What of the job is not what it was, a sentence each."""
    found = [(path, old, new) for path, old, new in _compare(then, now)]
    changed = [path for path, *_ in found]
    said = []
    for path, old, new in found:
        if path == "data.path" and "data.fingerprint" not in changed:
            continue  # the same samples from another place
        if path == "data.fingerprint":
            said.append(Message("train.other-samples"))
        else:
            said.append(Message("train.was-and-is", name=path, old=old, new=new))
    return said


def _compare(then: Any, now: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Fields that both know and that differ: a newer transformers may know more."""
    if isinstance(then, Mapping) and isinstance(now, Mapping):
        for key in then:
            if key in now:
                yield from _compare(then[key], now[key], f"{path}.{key}" if path else key)
    elif then != now:
        yield path, then, now


def schedule_differences(then: Mapping[str, Any], config: WorkerConfig) -> list[Message]:
    """What of the optimizer's numbers is not what it was: a longer run, say, which is the user's to choose."""
    now = asdict(config.training)
    return [
        Message("train.was-and-is", name=path, old=old, new=new)
        for path, old, new in _compare(then, now)
        if path != "seed"
    ]


def counters_of(state: Mapping[str, Any]) -> Counters:
    try:
        scale = state["loss_scale"]
        return Counters(
            optimizer_steps=int(state["optimizer"]["steps"]), scale=None if scale is None else LossScale(**scale)
        )
    except (KeyError, TypeError, ValueError):
        raise Torn(Message("train.state-lacks")) from None
