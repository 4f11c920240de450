"""The part of the optimizer that rank 0 keeps under ZeRO-1 and 2: our arithmetic against DeepSpeed's own.

A process of its own (this file, run as a script) initialises the real DeepSpeed on the CPU under torch's fake
process group, and writes down how it cut the parameters.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

WORLDS = (1, 3, 8)
LLAMA = {
    "model_type": "llama",
    "vocab_size": 500,
    "hidden_size": 48,
    "intermediate_size": 130,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MAMBA = {"model_type": "mamba", "vocab_size": 500, "hidden_size": 40, "num_hidden_layers": 2, "state_size": 8}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"config": {**LLAMA, "tie_word_embeddings": False}},
    "llama tied": {"config": {**LLAMA, "tie_word_embeddings": True}},
    "llama lora": {"config": {**LLAMA, "tie_word_embeddings": False}, "lora": 3},
    "mamba": {"config": {**MAMBA, "tie_word_embeddings": True}},
    "llama embeddings": {"config": {**LLAMA, "tie_word_embeddings": False}, "trains": "embeddings"},
    "llama tied embeddings": {"config": {**LLAMA, "tie_word_embeddings": True}, "trains": "embeddings"},
    "mamba embeddings": {"config": {**MAMBA, "tie_word_embeddings": True}, "trains": "embeddings"},
}


def scenario(name: str, world: int) -> dict[str, Any]:
    return {"id": name, "world": world, "engine": "zero2", "optimizer": "sgd", "trains": "all", **MODELS[name]}


def cut(world: int) -> dict[str, Any]:
    """How DeepSpeed cuts each model: elements of rank 0's part, of the parameters in it, and its largest piece."""
    os.environ.update({"MEASURE_ON_CPU": "1", "LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": str(world)})
    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
    import torch.distributed as dist
    from measure_peaks import DeepSpeed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from tightfit.train.build import freeze
    from tightfit.types import Levers

    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    found = {}
    for name in MODELS:
        trainer = DeepSpeed(scenario(name, world))
        trainer.build()
        freeze(trainer.model, Levers(trains=trainer.scenario["trains"]))
        trainer.initialise()
        optimizer = trainer.engine.optimizer
        inside = optimizer.params_in_partition[0]
        size, start = int(optimizer.partition_size[0]), 0
        pieces = []
        for param in inside:
            pieces.append(min(param.numel(), size - start))
            start += param.numel()
        master = optimizer.single_partition_of_fp32_groups[0]
        found[name] = [size, sum(param.numel() for param in inside), max(pieces), master.numel()]
        trainer.engine.destroy()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
def test_rank_0_keeps_what_deepspeed_gives_it(world: int) -> None:
    pytest.importorskip("torch")
    from rows import levers_of, shape_of

    from tightfit.memory import weights
    from tightfit.memory.zero12 import partition

    command = [sys.executable, __file__, str(world)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert lines, done.stderr[-2000:]
    for name, (size, covering, largest, master) in json.loads(lines[0].removeprefix("FOUND ")).items():
        each = scenario(name, world)
        levers = replace(levers_of(each), trains=each["trains"])
        ours = partition(weights.of(shape_of(each), levers), world)
        assert (ours.numel, ours.covering, ours.largest) == (size, covering, largest), name
        assert ours.numel == master


if __name__ == "__main__":
    print("FOUND " + json.dumps(cut(int(sys.argv[1]))))  # noqa: T201
