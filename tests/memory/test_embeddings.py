"""Training the embeddings alone, or all but them: what is kept, what trains, what a step holds, against reality.

With the embeddings alone every layer is frozen and a gradient flows through all of them. Whole models run under
saved-tensor hooks; and a process
of its own (this file, run as a script) trains tiny models with the real DeepSpeed on the CPU, as one rank of four under
torch's fake process group, while a dispatch mode sees every tensor come.
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

torch = pytest.importorskip("torch")

from kept import BATCH, SEQUENCE, WORDS, forward, saved_bytes  # noqa: E402
from live import live_mode  # noqa: E402

from tightfit.memory import estimate  # noqa: E402
from tightfit.memory.activations import activations  # noqa: E402
from tightfit.memory.weights import weights  # noqa: E402
from tightfit.model.load import load_model, shape_from_config  # noqa: E402
from tightfit.train.build import freeze  # noqa: E402
from tightfit.types import Checkpointing, Levers, Trains  # noqa: E402

WORLD = 4
BROAD, NARROW = 4096, 96
"""Vocabularies: beside the one the layers are nothing, beside the other the head is."""
TOLERANCE = 0.01

DENSE: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {**DENSE, "vocab_size": WORDS},
    "llama tied": {**DENSE, "vocab_size": WORDS, "tie_word_embeddings": True},
    "mamba": {"model_type": "mamba", "vocab_size": WORDS, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8},
    "gpt2": {"model_type": "gpt2", "vocab_size": WORDS, "n_embd": 64, "n_layer": 2, "n_head": 4},
}


def built(name: str, dtype: Any, trains: Trains, *, checkpointed: bool = False) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = dict(MODELS[name])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(fields.pop("model_type"), **fields), dtype=dtype)
    if checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    freeze(model, Levers(trains=trains))
    return model.train()


@pytest.mark.thorough
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("name", ["llama", "llama tied", "mamba"])
@pytest.mark.parametrize("trains", ["embeddings", "layers"])
def test_saved_bytes_of_a_whole_model(
    trains: Trains, name: str, precision: str, fused: bool, checkpointed: bool
) -> None:
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[precision]
    model = built(name, dtype, trains, checkpointed=checkpointed)
    got = saved_bytes(model, forward(model, fused=fused))
    levers = Levers(
        trains=trains,
        sequence=SEQUENCE,
        micro_batch=BATCH,
        precision=precision,  # type: ignore[arg-type]
        scan="torch",
        loss="fused" if fused else "plain",
        checkpointing=Checkpointing(layers=None if checkpointed else 0),
        attention="flash",
    )
    acts = activations(shape_from_config(MODELS[name], name), levers)
    indices = (levers.trains_embedding + (not fused)) * 8 * BATCH * SEQUENCE  # of tokens: the embedding, the plain loss
    tables = 0 if checkpointed else acts.shared
    want = acts.kept + tables + acts.head.saved_norm + acts.head.saved_logits + indices
    assert got == pytest.approx(want, rel=0.01)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("trains", ["embeddings", "layers"])
def test_what_trains_is_what_the_model_has(trains: Trains, name: str) -> None:
    model, shape = built(name, torch.bfloat16, trains), shape_from_config(MODELS[name], name)
    ours = weights(shape, "full", None, "bf16", 0, trains)
    real = [param.numel() for param in model.parameters() if param.requires_grad]
    assert list(ours.trainable) == real
    assert sum(ours.frozen) == sum(param.numel() for param in model.parameters()) - sum(real)
    assert ours.bytes == weights(shape, "full", None, "bf16", 0).bytes


@pytest.mark.parametrize("name", ["tiny_llama", "tiny_mamba", "qwen2.5-7b", "7b_mamba"])
@pytest.mark.parametrize("engine", ["zero0", "zero1", "zero2", "zero3", "fsdp2"])
def test_it_takes_less_than_everything(name: str, engine: str) -> None:
    shape = load_model(name)
    for optimizer in ("adamw", "adafactor"):
        lever = Levers(engine=engine, optimizer=optimizer)  # type: ignore[arg-type]
        full, first, second = (
            estimate(shape, replace(lever, trains=trains), 4) for trains in ("all", "embeddings", "layers")
        )
        assert first.trainable_parameters == sum(tensor.numel for tensor in shape.before)
        assert first.trainable_parameters + second.trainable_parameters == full.trainable_parameters
        assert max(first.gpu.peak_bytes, second.gpu.peak_bytes) < full.gpu.peak_bytes
        if optimizer == "adafactor" and engine == "fsdp2":
            continue  # nobody runs that
        states = [each.gpu.phases["step"].components["optimizer_states"] for each in (first, full)]
        assert states[0] < states[1]


# --- ZeRO-1 and 2, for real ---------------------------------------------------------------------

SCENARIOS: dict[str, dict[str, Any]] = {
    f"{engine}, {name}": {"engine": engine, **words}
    for engine in ("zero1", "zero2")
    for name, words in {
        "a bucket for all": {"vocab_size": BROAD, "bucket": 400_000},
        "a bucket for some": {"vocab_size": BROAD, "bucket": 100_000},
        "a tied head": {"vocab_size": BROAD, "bucket": 400_000, "tie_word_embeddings": True},
        "a short batch": {"vocab_size": BROAD, "bucket": 400_000, "seq": 2},
        "a short batch and a small bucket": {"vocab_size": BROAD, "bucket": 100_000, "seq": 2},
        "layers": {"vocab_size": NARROW, "bucket": 400_000, "seq": 256},
    }.items()
}


def scenario(name: str) -> dict[str, Any]:
    words = dict(SCENARIOS[name])
    config = {**DENSE, **{key: words.pop(key) for key in ("vocab_size", "tie_word_embeddings") if key in words}}
    made = {"id": name, "config": config, "world": WORLD, "optimizer": "sgd", "micro": 2, "seq": 32}
    return {**made, "zero": {"reduce_bucket_size": words.pop("bucket")}, **words}


def record(name: str) -> dict[str, int]:
    """The most that each pass of a second step held beside what rests between steps."""
    from measure_peaks import DeepSpeed

    trainer = DeepSpeed(scenario(name))
    trainer.build()
    freeze(trainer.model, Levers(trains="embeddings"))
    trainer.initialise()
    peaks: dict[str, int] = {}
    for _ in range(2):
        ids = torch.randint(0, 90, (trainer.scenario["micro"], trainer.scenario["seq"]))
        optimizer = trainer.engine.optimizer
        masters = optimizer.single_partition_of_fp32_groups
        flat = optimizer.bit16_groups_flat
        with live_mode([ids, *trainer.model.parameters(), *trainer.model.buffers(), *masters, *flat]) as live:
            live.known.clear()
            loss = trainer.forward(ids)
            peaks["forward"], live.peak = live.peak, 0
            trainer.backward(loss)
            peaks["backward"] = live.peak
        del loss
        trainer.step(last=True)
    trainer.engine.destroy()
    return peaks


def predicted(name: str) -> dict[str, int]:
    from rows import levers_of, shape_of

    each = scenario(name)
    phases = estimate(shape_of(each), replace(levers_of(each), trains="embeddings"), WORLD).gpu.phases
    at_rest = ("weights", "master_weights", "optimizer_states")
    workspaces = phases["forward"].components["temporaries"]
    return {
        name: sum(size for part, size in phases[name].components.items() if part not in at_rest) - workspaces
        for name in ("forward", "loss", "backward")
    }


@pytest.fixture(scope="module")
def real() -> dict[str, dict[str, int]]:
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, check=False, timeout=300)
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert lines, done.stderr[-2000:]
    found: dict[str, dict[str, int]] = json.loads(lines[0].removeprefix("FOUND "))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_step_holds_what_deepspeed_holds(real: dict[str, dict[str, int]], name: str) -> None:
    """The loss belongs to both passes: its worst moment is in one of them."""
    wanted = predicted(name)
    assert max(real[name].values()) == pytest.approx(max(wanted.values()), rel=TOLERANCE)
    assert real[name]["backward"] == pytest.approx(max(wanted["backward"], wanted["loss"]), rel=TOLERANCE)


if __name__ == "__main__":
    os.environ.update({"MEASURE_ON_CPU": "1", "LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": str(WORLD)})
    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=WORLD, store=FakeStore())
    print("FOUND " + json.dumps({name: record(name) for name in SCENARIOS}))  # noqa: T201
