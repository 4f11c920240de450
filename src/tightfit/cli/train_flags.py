"""The flags of `tightfit train`: those of `plan`, those of the data, and those of a run."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tightfit.cli.flags import ALIASES, CHANGE, GROUPS, Parser, read_options
from tightfit.cli.plan import FLAGS, WHOLE, add_data_flags, add_flags
from tightfit.inputs.flags import spelt
from tightfit.inputs.times import seconds_in
from tightfit.messages import Message, text
from tightfit.runs.folder import AUTO
from tightfit.runs.supervise import MAX_ATTEMPTS
from tightfit.types import ConfigError

EXAMPLE = "tightfit train --model tiny_mamba --seq 128 --max-steps 50 --output runs/first"

RUN = "the run"
RUN_FLAGS: dict[str, tuple[str | None, Message]] = {
    "output": ("DIR", Message("help.output")),
    "overwrite": (None, Message("help.overwrite")),
    "take_over": (
        None,
        Message("help.take-over"),
    ),
    "plan": ("DIR", Message("help.plan")),
    "dry_run": (None, Message("help.dry-run")),
    "check_memory": (None, Message("help.check-memory")),
    "no_probe": (None, Message("help.no-probe")),
    "tensorboard": (None, Message("help.tensorboard")),
    "wandb": (None, Message("help.wandb")),
    "save_every": ("500|10m|1h|none", Message("help.save-every")),
    "keep_last": ("N", Message("help.keep-last")),
    "keep_every": ("N", Message("help.keep-every")),
    "resume": (
        "auto|none|PATH",
        Message("help.resume"),
    ),
    "trust_pickle": (None, Message("help.trust-pickle")),
    "resume_anyway": (None, Message("help.resume-anyway")),
    "max_attempts": (
        "N",
        Message("help.max-attempts"),
    ),
    "hang_timeout": (
        "300s|10m|1h",
        Message("help.hang-timeout"),
    ),
    "wait_for_gpu": (None, Message("help.wait-for-gpu")),
    "deepspeed_config": ("FILE", Message("help.deepspeed-config")),
    "port": ("N", Message("help.train-port")),
}
NODE_FLAGS: dict[str, tuple[str | None, Message]] = {
    "hostfile": ("FILE", Message("help.train-hostfile")),
    "nodes": ("N", Message("help.nodes")),
    "node_rank": ("K", Message("help.node-rank")),
    "master_addr": ("HOST", Message("help.master-addr")),
}
EXIT_CODES = {
    "0": Message("help.train-exit-0"),
    **CHANGE,
    "3": Message("help.train-exit-3"),
    "4": Message("help.train-exit-4"),
    "130, 143": Message("help.train-exit-130-143"),
}
WRITES = Message("help.train-writes")

_NUMBERS = WHOLE | {"max_gpus", "nodes", "node_rank", "keep_last", "keep_every", "max_attempts"}
_WITH_PLAN = {
    *("plan", "output", "overwrite", "dry_run", "check_memory", "no_probe", "tensorboard", "wandb", "port", "json"),
    *("take_over", "gpu_ids", "nodes", "node_rank", "master_addr", "hostfile", "resume", "resume_anyway"),
    "trust_pickle",
    *("max_attempts", "hang_timeout", "wait_for_gpu", "no_calibration"),
}
"""What may be said beside a plan that is written already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """What is said of the run itself, beside what is asked of its plan."""

    plan: str | None = None
    """The folder of a plan that was written before."""
    overwrite: bool = False
    take_over: bool = False
    dry_run: bool = False
    check_memory: bool = False
    no_probe: bool = False
    tensorboard: bool = False
    wandb: bool = False
    resume: str = AUTO
    trust_pickle: bool = False
    resume_anyway: bool = False
    max_attempts: int = MAX_ATTEMPTS
    hang_timeout: str | None = None
    wait_for_gpu: bool = False
    deepspeed_config: str | None = None
    max_gpus: int | None = None
    nodes: int | None = None
    """Of SLURM or one, where nothing is said."""
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    json: bool = False


def parser() -> Parser:
    made = Parser(
        "train",
        text("help.train-does"),
        EXAMPLE,
        "[JOB.yaml] [--model MODEL] [--data DATA] [--output DIR] [flags]",
    )
    made.add_file("JOB.yaml", text("help.plan-file"))
    made.add_argument("--model", metavar="MODEL", help=text("help.model"))
    made.add_argument("--trace", action="store_true", help=text("help.trace"))
    add_data_flags(made)
    add_flags(made, _table(), _NUMBERS)
    _run_group(made).add_argument(
        "--no-async-save",
        dest="async_save",
        action="store_false",
        help=text("help.no-async-save"),
    )
    made.knows_as(ALIASES)
    return made.ends_with(EXIT_CODES, WRITES)


def _run_group(made: Parser) -> argparse._ArgumentGroup:
    return next(group for group in made._action_groups if group.title == str(GROUPS[RUN]))


def _table() -> dict[str, dict[str, tuple[str | None, Message]]]:
    table = {title: dict(flags) for title, flags in FLAGS.items() if title != "the files"}
    del table["the machine"]["world"], table["the question"]["max"]
    table["the machine"]["max_gpus"] = ("N", Message("help.max-gpus"))
    return {RUN: RUN_FLAGS, **table, "several machines": NODE_FLAGS}


def read_train_options(given: Mapping[str, Any]) -> TrainOptions:
    """What was given, unless flags contradict each other."""
    options = read_options(TrainOptions, given)
    if "plan" in given:
        more = sorted(set(given) - _WITH_PLAN)
        if more:
            what = text("cli.job-file") if more[0] == "file" else spelt(more[0])
            raise ConfigError(Message("cli.plan-decided-already", plan=options.plan, what=what))
    for name in ("max_gpus", "nodes"):
        if given.get(name, 1) < 1:
            raise ConfigError(Message("cli.at-least-one", name=spelt(name), given=given[name]))
    if "max_gpus" in given and ("num_gpus" in given or "gpu_ids" in given):
        other = "num_gpus" if "num_gpus" in given else "gpu_ids"
        raise ConfigError(Message("cli.max-gpus-both-say", other=spelt(other)))
    if given.get("max_attempts", 1) < 1:
        raise ConfigError(Message("cli.attempts-at-least-one", given=given["max_attempts"]))
    hang_timeout_s(options.hang_timeout)
    if not 1 <= given.get("port", 1) <= 65_535:
        raise ConfigError(Message("cli.port-must-1", given=given["port"]))
    _check_nodes(given)
    return options


def hang_timeout_s(text: str | None) -> float | None:
    """Seconds; None: nothing was said."""
    if text is None:
        return None
    seconds = float(text) if text.isdecimal() and len(text) < 9 else seconds_in(text)
    if not seconds:
        raise ConfigError(Message("cli.hang-timeout-takes-time", text=repr(text)))
    return seconds


def _check_nodes(given: Mapping[str, Any]) -> None:
    together = [name for name in ("nodes", "node_rank", "master_addr") if name in given]
    if together and "hostfile" in given:
        raise ConfigError(Message("cli.hostfile-starts-every", together=spelt(together[0])))
    if "node_rank" in given and "master_addr" not in given and given["node_rank"] != 0:
        raise ConfigError(Message("cli.node-rank-needs-master-addr", given=given["node_rank"]))
    if "node_rank" in given and "nodes" not in given:
        raise ConfigError(Message("cli.node-rank-needs-nodes"))
    nodes, rank = given.get("nodes", 1), given.get("node_rank", 0)
    assert isinstance(nodes, int)
    assert isinstance(rank, int)
    if nodes > 1 and "node_rank" not in given:
        raise ConfigError(Message("cli.nodes-needs-node-rank", nodes=nodes, nodes2=nodes - 1))
    if not 0 <= rank < nodes:
        raise ConfigError(Message("cli.node-rank-must-0", nodes=nodes - 1, rank=rank))
    if nodes > 1 and given.get("max_attempts", 1) != 1:
        raise ConfigError(Message("cli.max-attempts-starts-again"))
    if nodes > 1 and "master_addr" not in given:
        raise ConfigError(Message("cli.nodes-needs-master-addr"))
