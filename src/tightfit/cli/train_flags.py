"""The flags of `tightfit train`: those of `plan`, those of the data, and those of a run."""

from __future__ import annotations

import argparse

from tightfit.cli.flags import ALIASES, CHANGE, Parser
from tightfit.cli.plan import FLAGS, WHOLE, add_data_flags, add_flags
from tightfit.inputs.flags import spelt
from tightfit.inputs.times import seconds_in
from tightfit.types import ConfigError

EXAMPLE = "tightfit train --model tiny_mamba --seq 128 --max-steps 50 --output runs/first"

RUN = "the run"
RUN_FLAGS: dict[str, tuple[str | None, str]] = {
    "output": ("DIR", "the run's folder (output; with --plan DIR: DIR/output)"),
    "overwrite": (None, "replace a finished run in that folder"),
    "take_over": (
        None,
        "the run that held the folder on another machine has gone: watch it for 20 seconds instead of a minute, and "
        "go on there",
    ),
    "plan": ("DIR", "start this plan, which `tightfit plan --write DIR` made, instead of planning"),
    "dry_run": (None, "stop after the plan and the checks; nothing is written"),
    "check_memory": (None, "say what is free on each GPU and who holds the rest, and end"),
    "no_probe": (None, "skip the trial of the largest batch before the first step"),
    "tensorboard": (None, "write TensorBoard files into the run's folder as well"),
    "wandb": (None, "report to wandb as well, where it is installed"),
    "save_every": ("500|10m|1h|none", "the same as --save-steps, or a time between two checkpoints (500 steps)"),
    "keep_last": ("N", "how many checkpoints stay, the newest ones (2)"),
    "keep_every": ("N", "a checkpoint at a multiple of so many steps stays for ever"),
    "resume": (
        "auto|none|PATH",
        "where to begin: auto goes on from the newest whole checkpoint in the run's folder, where there is one; none "
        "begins anew; PATH is a checkpoint, or a run and its newest; also a DeepSpeed checkpoint of another program "
        "(auto)",
    ),
    "trust_pickle": (None, "open a DeepSpeed checkpoint that cannot be read safely: it may run any program"),
    "resume_anyway": (None, "go on from a checkpoint although the model, the data or the sequence has changed"),
    "max_attempts": (
        "N",
        "give up after so many starts in a row that kept no new step; 1 starts nothing again (5)",
    ),
    "hang_timeout": (
        "300s|10m|1h",
        "how long a rank may give no sign of life in a step, an evaluation or a save before all are ended and started "
        "again (twenty steps, and at least 5 minutes)",
    ),
    "wait_for_gpu": (None, "wait while others hold the GPUs or the memory that the run needs"),
    "deepspeed_config": ("FILE", "a DeepSpeed JSON: what it says is kept, and the rest is planned"),
    "port": ("N", "where the ranks meet (a free one)"),
}
NODE_FLAGS: dict[str, tuple[str | None, str]] = {
    "hostfile": ("FILE", "start on all machines of this file from here, `name slots=8` a line"),
    "nodes": ("N", "machines that train together; start the same command on each, with its own --node-rank"),
    "node_rank": ("K", "which of them this is, from 0"),
    "master_addr": ("HOST", "the machine with number 0"),
}
EXIT_CODES = {
    "0": "done",
    **CHANGE,
    "3": "the training failed, and to start it again would not help",
    "4": "asked to stop (SIGTERM, SIGUSR1, Ctrl-C, or the job's timeout) and saved a checkpoint: the same command goes "
    "on",
    "130, 143": "interrupted before a checkpoint could be saved, by Ctrl-C or SIGTERM",
}
WRITES = (
    "The run's folder: plan/, events.jsonl, logs/, checkpoints/, run.json and at the end model/, with pictures of loss "
    "and memory. What was measured is noted for later plans in ~/.cache/tightfit (not with --no-calibration)."
)

_NUMBERS = WHOLE | {"max_gpus", "nodes", "node_rank", "keep_last", "keep_every", "max_attempts"}
_WITH_PLAN = {
    *("plan", "output", "overwrite", "dry_run", "check_memory", "no_probe", "tensorboard", "wandb", "port", "json"),
    *("take_over", "gpu_ids", "nodes", "node_rank", "master_addr", "hostfile", "resume", "resume_anyway"),
    "trust_pickle",
    *("max_attempts", "hang_timeout", "wait_for_gpu", "no_calibration"),
}
"""What may be said beside a plan that is written already."""


def parser() -> Parser:
    made = Parser(
        "train",
        "Plan a training for this machine, start it on every GPU, and follow it to the end. Every lever can be pinned "
        "by its flag; what is not named is planned as `tightfit plan` does.",
        EXAMPLE,
        "[JOB.yaml] [--model MODEL] [--data DATA] [--output DIR] [flags]",
    )
    made.add_file("JOB.yaml", "a job file, or a LLaMA-Factory YAML; flags win over it")
    made.add_argument("--model", metavar="MODEL", help="a preset, a Hugging Face id, a folder or a config.json")
    made.add_argument("--trace", action="store_true", help="an unknown kind of model: build it on the meta device")
    add_data_flags(made)
    add_flags(made, _table(), _NUMBERS)
    _run_group(made).add_argument(
        "--no-async-save",
        dest="async_save",
        action="store_false",
        help="the training waits while a checkpoint is written",
    )
    made.knows_as(ALIASES)
    return made.ends_with(EXIT_CODES, WRITES)


def _run_group(made: Parser) -> argparse._ArgumentGroup:
    return next(group for group in made._action_groups if group.title == RUN)


def _table() -> dict[str, dict[str, tuple[str | None, str]]]:
    table = {title: dict(flags) for title, flags in FLAGS.items() if title != "the files"}
    del table["the machine"]["world"], table["the question"]["max"]
    table["the machine"]["max_gpus"] = ("N", "as --num-gpus, and no mistake where there are fewer (all)")
    return {RUN: RUN_FLAGS, **table, "several machines": NODE_FLAGS}


def check(args: argparse.Namespace) -> None:
    """Flags that contradict each other."""
    given = vars(args)
    if "plan" in given:
        more = sorted(set(given) - _WITH_PLAN)
        if more:
            what = "a job file" if more[0] == "file" else spelt(more[0])
            raise ConfigError(f"--plan {args.plan} has decided that already: leave {what} out, or leave --plan out")
    for name in ("max_gpus", "nodes"):
        if given.get(name, 1) < 1:
            raise ConfigError(f"{spelt(name)} must be at least 1, not {given[name]}")
    if "max_gpus" in given and ("num_gpus" in given or "gpu_ids" in given):
        other = "num_gpus" if "num_gpus" in given else "gpu_ids"
        raise ConfigError(f"--max-gpus and {spelt(other)} both say how many GPUs: leave one out")
    if given.get("max_attempts", 1) < 1:
        raise ConfigError(f"--max-attempts must be at least 1, a single start, not {given['max_attempts']}")
    hang_timeout_s(args)
    if not 1 <= given.get("port", 1) <= 65_535:
        raise ConfigError(f"--port must be from 1 to 65535, not {given['port']}")
    _check_nodes(given)


def hang_timeout_s(args: argparse.Namespace) -> float | None:
    """Seconds; None: nothing was said."""
    text: str | None = getattr(args, "hang_timeout", None)
    if text is None:
        return None
    seconds = float(text) if text.isdecimal() and len(text) < 9 else seconds_in(text)
    if not seconds:
        raise ConfigError(f"--hang-timeout takes a time such as 300s, 10m or 1h, not {text!r}")
    return seconds


def _check_nodes(given: dict[str, object]) -> None:
    together = [name for name in ("nodes", "node_rank", "master_addr") if name in given]
    if together and "hostfile" in given:
        raise ConfigError(f"--hostfile starts every machine from here: leave {spelt(together[0])} out")
    if "node_rank" in given and "master_addr" not in given and given["node_rank"] != 0:
        raise ConfigError(f"--node-rank {given['node_rank']} needs --master-addr, the machine with number 0")
    if "node_rank" in given and "nodes" not in given:
        raise ConfigError("--node-rank needs --nodes, the number of machines")
    nodes, rank = given.get("nodes", 1), given.get("node_rank", 0)
    assert isinstance(nodes, int)
    assert isinstance(rank, int)
    if nodes > 1 and "node_rank" not in given:
        raise ConfigError(f"--nodes {nodes} needs --node-rank on each machine, from 0 to {nodes - 1}")
    if not 0 <= rank < nodes:
        raise ConfigError(f"--node-rank must be from 0 to {nodes - 1}, not {rank}")
    if nodes > 1 and given.get("max_attempts", 1) != 1:
        raise ConfigError("--max-attempts starts again on one machine, or with --hostfile: leave --nodes or it out")
    if nodes > 1 and "master_addr" not in given:
        raise ConfigError("--nodes needs --master-addr on each machine: the name of the machine with number 0")
