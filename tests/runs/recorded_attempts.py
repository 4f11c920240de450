"""Attempts that failed, as they were recorded: logs, last words, exit codes, heartbeats and the kernel's lines.

Each folder of `recorded/` is what two real ranks left on the CPU when an injected fault befell the second.
"""

from __future__ import annotations

import json
from pathlib import Path

from tightfit.runs.cause import FailedAttempt, KernelSaid, config_of_plan
from tightfit.runs.events import Tally
from tightfit.runs.heartbeat import Beat
from tightfit.runs.launch import Exit, RankStart
from tightfit.runs.records import LastWords, WorkerFile
from tightfit.runs.run import Outcome, first_failure

RECORDED = Path(__file__).with_name("recorded")
NAMES = sorted(path.name for path in RECORDED.iterdir())
PLANNED = WorkerFile(
    model="tiny",
    method="full",
    engine="zero2",
    optimizer="adamw",
    offload_optimizer="none",
    nodes=1,
    gpus_per_node=1,
    vendor="nvidia",
    folder="output",
    required_bytes=10 * 2**30,
    peak_bytes=9 * 2**30,
    host_bytes_per_node=2**30,
    step_s=1.0,
    tokens_per_s=1000.0,
)
"""A plan as its launcher sees it."""


def recorded(name: str, *, kernel_readable: bool = True) -> FailedAttempt:
    folder = RECORDED / name
    told = json.loads((folder / "known.json").read_text(encoding="utf-8"))
    starts = [
        RankStart(name=f"rank-{rank}", rank=rank, command=(), environment={}, log=folder / f"rank-{rank}.log")
        for rank in range(len(told["exit_codes"]))
    ]
    exits = tuple(Exit(start=starts[rank], code=code, at=100.1) for rank, code in enumerate(told["exit_codes"]))
    words = tuple(
        LastWords(rank=each["rank"], kind=each["kind"], text=each["text"], at=each["time"]) for each in told["words"]
    )
    failure = first_failure(exits, starts, words)
    outcome = Outcome(state="failed", exit_code=3, failure=failure, tally=Tally(), exits=exits, words=words)
    beats = []
    for rank, text in enumerate(told["beats"]):
        count, stage, step, micro = text.split()
        beats.append(Beat(rank=rank, count=int(count), stage=stage, step=int(step), micro=int(micro)))
    return FailedAttempt(
        outcome=outcome,
        starts=starts,
        kernel=KernelSaid(lines=tuple(told["kernel"]), readable=kernel_readable),
        beats=tuple(beats),
        config=config_of_plan(folder),
    )
