"""What a compiled layer moves between its products, counted by hand; and what its layers took on an H200."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tightfit.hardware.words import parse_hardware
from tightfit.inputs.flags import checkpointing_from_word
from tightfit.memory.activations import setting_of
from tightfit.memory.layers import layer_tape
from tightfit.model.load import load_model, shape_from_config
from tightfit.pace import pace
from tightfit.pace.graph import fuse
from tightfit.pace.rates import rates_of
from tightfit.pace.work import layer_time, recompute_time
from tightfit.types import PARTS, Checkpointing, Levers, Lora, ModelShape

DATA = Path(__file__).parents[2] / "benchmarks" / "data"
H200 = parse_hardware("h200")
LLAMA = load_model("llama-3.1-8b")
MODELS: dict[str, dict[str, Any]] = {
    "llama8": {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "heads": (32, 8)},
    "qwen7": {"model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "heads": (28, 4)},
    "qwen05": {"model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "heads": (14, 2)},
    "qwen32": {"model_type": "qwen2", "hidden_size": 5120, "intermediate_size": 27648, "heads": (40, 8)},
}


def shape(name: str) -> ModelShape:
    config = dict(MODELS[name])
    heads, kv_heads = config.pop("heads")
    counts = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "num_hidden_layers": 4, "vocab_size": 256}
    return shape_from_config(config | counts, name)


def test_elementwise_work_is_read_once_and_written_once() -> None:
    setting = setting_of(Levers(sequence=512, compile="layers"), H200.gpu)
    moved = fuse(*layer_tape(LLAMA.blocks[0], LLAMA.hidden_size, setting, True))
    hidden, queries, keys, inner = 4096, 4096, 1024, 14336
    norm, turn, middle = 2 * hidden, 2 * (queries + keys), 4 * hidden  # x and o in, their sum and its norm out
    gate, end = 3 * inner, 3 * hidden
    assert moved.forward.size == 512 * 2 * (norm + turn + middle + gate + end)
    assert moved.again.size == moved.forward.size - 512 * 2 * end  # what follows the last product is not needed again
    # each reader of a norm's output brings a gradient; the sum's own is handed on
    assert moved.forward.kernels == 5
    assert moved.forward.size < moved.back.size < 2 * moved.forward.size


def test_compiled_layers_run_less_again() -> None:
    setting = setting_of(Levers(sequence=512, compile="layers"), H200.gpu)
    card = rates_of(H200, "bf16").card
    compiled = layer_time(LLAMA.blocks[0], LLAMA.hidden_size, setting, card)
    plain = layer_time(LLAMA.blocks[0], LLAMA.hidden_size, replace(setting, compiled=False), card)
    whole, parts = recompute_time(compiled, ()), recompute_time(compiled, ("elementwise", "mlp"))
    assert plain.products == compiled.products == recompute_time(plain, ()).products
    assert sum(part.products for part in compiled.parts) == pytest.approx(whole.products)
    assert parts.products == pytest.approx(compiled.parts[PARTS.index("mlp")].products)
    assert parts.products < whole.products < compiled.products  # the last product is not needed again
    assert recompute_time(compiled, ("elementwise",)).products == 0
    assert compiled.traffic < plain.traffic / 2
    assert compiled.host < plain.host


ROWS = [json.loads(line) for line in (DATA / "h200-compiled.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["id"])
def test_a_layer_takes_on_the_gpu_what_was_measured(row: dict[str, Any]) -> None:
    """Kernels' own seconds, as a profiler saw them: without adding up gradients, which only the measurement did."""
    name, mode, compiled = row["id"].split(" ")[:3]
    model, method, batch = name.split("-")
    micro, sequence = map(int, batch.split("x"))
    levers = Levers(
        method=method,  # type: ignore[arg-type]
        lora=Lora() if method == "lora" else None,
        micro_batch=micro,
        sequence=sequence,
        compile="layers" if compiled == "compile1" else "off",
        checkpointing=checkpointing_from_word(mode),
    )
    block, card = shape(model).blocks[0], rates_of(H200, "bf16").card
    time = layer_time(block, shape(model).hidden_size, setting_of(levers, H200.gpu), card)
    seconds = time.products + time.traffic + time.products_back + time.traffic_back
    if levers.checkpointing.layers != 0:
        again = recompute_time(time, levers.checkpointing.select)
        seconds += again.products + again.others
    measured = sum(row["gpu_us"].values()) + sum(row["gpu_back_us"].values()) - row["added_us"]
    assert seconds == pytest.approx(measured * 1e-6, rel=0.1)


def test_nothing_measured_was_slower_compiled_and_so_it_is_predicted() -> None:
    """Of each job that was measured both ways the faster is predicted to be the faster."""
    rows = [json.loads(line) for line in (DATA / "h200-limits.jsonl").read_text().splitlines()]
    took = {row["id"]: row["median_s"] for row in rows}
    small = {"model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24}
    small |= {"num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151_936, "tie_word_embeddings": True}
    lora, full = {"method": "lora", "lora": Lora()}, {"method": "full"}
    jobs: dict[str, tuple[ModelShape, dict[str, Any], str]] = {
        "qwen05-full-w1-m8 liger0": (shape_from_config(small, "0.5B"), full | {"micro_batch": 8}, "h200"),
        "llama8-lora-w1-m2 liger0": (LLAMA, lora | {"micro_batch": 2}, "h200"),
        "qwen7-full-w8-m1 liger0": (load_model("qwen2.5-7b"), full | {"engine": "fsdp2"}, "8xh200"),
        "qwen32-lora-w8-m1": (load_model("qwen2.5-32b"), lora | {"engine": "fsdp2", "sequence": 1024}, "8xh200"),
    }
    for name, (model, said, machine) in jobs.items():
        depth = Checkpointing(layers=0 if "qwen05" in name else None)
        plain, compiled = (
            pace(model, Levers(**said, checkpointing=depth, compile=how), parse_hardware(machine), rehearsal=True)  # type: ignore[arg-type]
            for how in ("off", "layers")
        )
        assert took[f"{name} compile1"] < took[f"{name} compile0"]
        assert compiled.step_s < 0.9 * plain.step_s
        assert compiled.warm_up_s > 0 == plain.warm_up_s
