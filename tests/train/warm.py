"""Many real workers in little time.

    codes = run_workers(["worker.json"], [Rank(environment, said) for environment in environments])

A worker spends its first seconds on importing torch, transformers and DeepSpeed. Here each rank is forked from a
process that has done so (see `warm_desk.py`); it is the worker from its `main` on, with its own environment, its own
standard error and its own exit code.
"""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path

import patience
import warm_desk

GRACE_S = 20.0
"""For the ranks that are left when one has failed; a launcher would end them too."""
LIMIT_S = 240.0
SOON = (
    "deepspeed.module_inject",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "encodings.utf_8_sig",
    "peft",
    "tightfit.mamba",
    "tightfit.train.engines.ddp",
    "tightfit.train.engines.deepspeed",
    "tightfit.train.engines.stream",
    "tightfit.train.pictures",
    "torch.utils.cpp_extension",
    "transformers.models.gemma3.modeling_gemma3",
    "transformers.models.mamba.modeling_mamba",
    "transformers.models.qwen2.modeling_qwen2",
)
"""What the first step and an adapter import: half of the time of a short training."""


@dataclass(frozen=True, slots=True)
class Rank:
    env: Mapping[str, str]
    """All of it."""
    said: str
    """The file that takes its standard error."""
    first: str = ""
    """Python that the child executes before the worker begins."""
    draws: bool = False
    """Also the pictures at the end."""


def run_workers(argv: Sequence[str], ranks: Sequence[Rank]) -> list[int]:
    """The exit codes of the ranks, once all have ended. Several train while no others do."""
    with warm_desk.turn.taken(len(ranks) > 1):
        return _run(argv, ranks)


def _run(argv: Sequence[str], ranks: Sequence[Rank]) -> list[int]:
    server, common = warm_desk.server(True), {"words": list(argv), "cwd": str(Path.cwd()), "worker": True}
    children: list[int] = [server.ask({**common, **asdict(rank)}) for rank in ranks]
    codes: dict[int, int] = {}
    end, pauses = patience.now() + LIMIT_S, warm_desk.growing()
    while len(codes) < len(children):
        for child in children:
            if child in codes:
                continue
            if patience.now() > end:
                os.kill(child, signal.SIGKILL)
            code = server.ask({"poll": child})
            if code is not None:
                codes[child] = code
                if code:
                    end = min(end, patience.now() + GRACE_S)
        time.sleep(next(pauses))
    return [codes[child] for child in children]


def load() -> None:
    """All that every child would do alike, short of what starts threads: those do not live on in a fork."""
    import deepspeed
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    import tightfit.train.__main__
    import tightfit.train.engines.fsdp2
    import tightfit.train.worker  # noqa: F401
    from tightfit.train.data.tokens import load_tokenizer
    from tightfit.train.sources import name_parts

    for name in SOON:
        import_module(name)
    torch.set_num_threads(1)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # takes a minute to compile, and is for inference
    load_tokenizer(None, 10**6, trust_remote_code=False)
    with torch.device("meta"):
        name_parts(AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", num_hidden_layers=1)))
    gc.collect()
