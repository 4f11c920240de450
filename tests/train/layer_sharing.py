"""One rank of four that share layers: for each model below its losses and gradients against those of one rank alone, in
float64. Rank 0 prints for each how far they are from each other, against the largest gradient.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from sharing import CAPPED, DYNAMIC, LLAMA, ROWS, SMALL, TOKENS
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from tightfit.train.documents import Told
from tightfit.train.loss import WindowLoss
from tightfit.train.place import Place
from tightfit.train.recompute import recompute
from tightfit.train.row_parts import RowParts
from tightfit.train.shards import Columns
from tightfit.train.tensor import share_layers
from tightfit.types import Checkpointing, Levers

WIDE = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16}
CASES: dict[str, dict[str, Any]] = {
    "four ranks": {"config": LLAMA},
    "two ranks": {"config": {**LLAMA, "num_key_value_heads": 2}, "size": 2},
    "tied": {"config": {**LLAMA, "tie_word_embeddings": True}},
    "written out": {"config": LLAMA, "kernel": "eager"},
    "plain loss": {"config": LLAMA, "loss": "plain"},
    "all of it twice": {"config": LLAMA, "again": ()},
    "biases": {"config": {"model_type": "qwen2", **SMALL}},
    "norms of heads": {"config": {"model_type": "qwen3", **SMALL, **WIDE}},
    "norms of heads and windows": {"config": {"model_type": "gemma3_text", **SMALL, **WIDE, "sliding_window": 5}},
    "windows and caps": {"config": CAPPED, "kernel": "eager"},
    "norms on both sides, twice": {"config": CAPPED, "kernel": "eager", "again": ()},
    "documents": {"config": LLAMA, "starts": (0, 7, 13)},
    "frequencies by length": {"config": {**LLAMA, "max_position_embeddings": 8, "rope_parameters": DYNAMIC}},
    "adapters": {"config": LLAMA, "targets": "all-linear"},
    "some adapters": {"config": LLAMA, "targets": ["q_proj", "down_proj"], "again": ()},
    "elementwise work twice": {"config": LLAMA, "again": ("elementwise",)},
    "parts twice": {"config": LLAMA, "again": ("elementwise", "qkv", "mlp")},
    "the last product twice": {"config": LLAMA, "again": ("elementwise", "out")},
    "norms on both sides, parts twice": {"config": CAPPED, "kernel": "eager", "again": ("elementwise", "mlp")},
    "adapters, parts twice": {"config": LLAMA, "targets": "all-linear", "again": ("elementwise", "mixer")},
    "norms on both sides, adapters, parts twice": {
        "config": CAPPED,
        "kernel": "eager",
        "targets": "all-linear",
        "again": ("elementwise",),
    },
}


def compare(case: dict[str, Any], place: Place) -> float:
    """The largest difference of a gradient, or of the loss, against the largest gradient."""
    torch.manual_seed(0)
    fields, size = dict(case["config"]), case.get("size", 4)
    hf = AutoConfig.for_model(fields.pop("model_type"), **fields)
    made: list[Any] = [
        AutoModelForCausalLM.from_config(hf, dtype=torch.float64, attn_implementation=case.get("kernel", "sdpa"))
        for _ in range(2)
    ]
    if (targets := case.get("targets")) is not None:
        adapters = LoraConfig(r=2, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM")
        made = [get_peft_model(each, adapters, autocast_adapter_dtype=False) for each in made]
    whole, shared = made
    for param in whole.parameters():  # norms begin with ones, biases with zeros
        param.data += 0.1 * torch.randn_like(param)
    shared.load_state_dict(whole.state_dict())
    ids, positions = torch.randint(0, 64, (ROWS, TOKENS)), torch.arange(TOKENS).repeat(ROWS, 1)
    labels = ids.clone()
    for start in case.get("starts", ()):
        positions[:, start:] = torch.arange(TOKENS - start)
        labels[:, start] = -100
    plain = whole(input_ids=ids, position_ids=positions, use_cache=False).logits
    targets = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
    expected = torch.nn.functional.cross_entropy(plain.flatten(0, 1), targets.flatten(), reduction="sum") / 10
    expected.backward()  # type: ignore[no-untyped-call]

    mesh = init_device_mesh("cpu", (place.world // size, size), mesh_dim_names=("others", "tensor"))["tensor"]
    levers = Levers(sequence=TOKENS, tensor_parallel=size)
    if "again" in case:
        recompute(shared, Checkpointing(layers=None, select=case["again"]))
    share_layers(shared, mesh)
    parts = RowParts(levers, place)
    loss, told = WindowLoss(shared, case.get("loss", "fused"), shifted=True), Told()
    loss.divisor, told.several = 10.0, "starts" in case
    inputs = {"input_ids": ids, "labels": labels} | ({"position_ids": positions} if told.several else {})
    inputs = parts.cut(inputs)
    told.position_ids = parts.position_ids
    with told, parts:
        found = shared(**inputs, use_cache=False).loss
        found.backward()
    group = mesh.get_group()
    total = found.detach().clone()
    dist.all_reduce(total, group=group)
    worst, largest = float((total - expected.detach()).abs()), 0.0
    for mine, its in zip(shared.parameters(), whole.parameters(), strict=True):
        if its.grad is None:
            assert mine.grad is None
            continue
        grad = mine.grad.full_tensor() if isinstance(mine, DTensor) else mine.grad
        if not isinstance(mine, DTensor):
            dist.all_reduce(grad, group=group)
        worst, largest = (
            max(worst, float((grad - its.grad).abs().max())),
            max(largest, float(its.grad.abs().max())),
        )
    return worst / largest


def join_columns(place: Place) -> float:
    """Rows that each rank has some columns of become whole rows of each rank, also where they do not divide."""
    worst = 0.0
    for rows in (0, 3, 8, 10):
        whole, first = torch.arange((rows + 5) * 12, dtype=torch.float64).view(-1, 12), 5
        columns = Columns(3 * place.rank, 3 * place.rank + 3, dist.group.WORLD)
        start, mine = columns.join(whole[first:, columns.low : columns.high].reshape(-1), first * 3)
        counts: list[Any] = [None] * 4
        dist.all_gather_object(counts, len(mine))
        assert sum(counts) == rows * 12
        worst += float((mine - whole.view(-1)[start : start + len(mine)]).abs().sum())
    return worst


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    place = Place(rank=rank, local_rank=rank, world=4, device=torch.device("cpu"), launcher="tests")
    found = {"columns": join_columns(place)} | {name: compare(case, place) for name, case in CASES.items()}
    every: list[Any] = [None] * 4
    dist.all_gather_object(every, found)
    if rank == 0:
        sys.stdout.write(json.dumps({name: max(each[name] for each in every) for name in found}) + "\n")
    dist.destroy_process_group()
