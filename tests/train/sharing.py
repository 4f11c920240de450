"""One rank of four that share rows: for each model below its losses and gradients against those of whole rows, in
float64. Rank 0 prints for each how far they are from each other, against the largest gradient.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

from tightfit.train.documents import Told
from tightfit.train.loss import WindowLoss
from tightfit.train.place import Place
from tightfit.train.ulysses import SequenceParts, gather_heads, gather_tokens
from tightfit.types import Levers

ROWS, TOKENS = 2, 24
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 64,
    "max_position_embeddings": 64,
}
LLAMA = {"model_type": "llama", **SMALL}
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "n_positions": TOKENS}
DRY = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10_000.0}
CAPPED = {"model_type": "gemma2", **SMALL, "head_dim": 4, "sliding_window": 5, "attn_logit_softcapping": 2.0}
EXPERTS = {"model_type": "mixtral", **SMALL, "num_local_experts": 4, "num_experts_per_tok": 2}

CASES: dict[str, dict[str, Any]] = {
    "as many heads": {"config": LLAMA},
    "two ranks": {"config": LLAMA, "size": 2},
    "fewer heads of keys than ranks": {"config": {**LLAMA, "num_key_value_heads": 2}},
    "one head of keys": {"config": {**LLAMA, "num_key_value_heads": 1}, "kernel": "eager"},
    "written out": {"config": LLAMA, "kernel": "eager"},
    "plain loss": {"config": LLAMA, "loss": "plain"},
    "a window": {"config": {"model_type": "mistral", **SMALL, "sliding_window": 5}},
    "windows and caps": {"config": CAPPED, "kernel": "eager"},
    "documents": {"config": LLAMA, "starts": (0, 7, 13)},
    "documents, written out": {"config": LLAMA, "starts": (0, 7, 13), "kernel": "eager"},
    "frequencies by length": {"config": {**LLAMA, "max_position_embeddings": 8, "rope_parameters": DYNAMIC}},
    "experts": {"config": EXPERTS},
    "learnt positions": {"config": {**GPT2, **DRY}},
    "learnt positions, beyond the last": {"config": {**GPT2, **DRY, "n_positions": TOKENS - 3}, "sequence": TOKENS - 3},
}


def compare(case: dict[str, Any], place: Place) -> float:
    """The largest difference of a gradient, or of the loss, against the largest gradient."""
    torch.manual_seed(0)
    fields, size = dict(case["config"]), case.get("size", 4)
    hf = AutoConfig.for_model(fields.pop("model_type"), **fields)
    hf._experts_implementation = "eager"  # the others know no float64
    made = [
        AutoModelForCausalLM.from_config(hf, dtype=torch.float64, attn_implementation=case.get("kernel", "sdpa"))
        for _ in range(2)
    ]
    whole, shared = made
    shared.load_state_dict(whole.state_dict())
    sequence = case.get("sequence", TOKENS)
    ids, positions = torch.randint(0, 64, (ROWS, sequence)), torch.arange(sequence).repeat(ROWS, 1)
    labels = ids.clone()
    for start in case.get("starts", ()):
        positions[:, start:] = torch.arange(sequence - start)
        labels[:, start] = -100
    plain = whole(input_ids=ids, position_ids=positions, use_cache=False).logits
    targets = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
    expected = torch.nn.functional.cross_entropy(plain.flatten(0, 1), targets.flatten(), reduction="sum") / 10
    expected.backward()  # type: ignore[no-untyped-call]

    parts = SequenceParts(shared, Levers(sequence=sequence, sequence_parallel=size), place)
    loss, told = WindowLoss(shared, case.get("loss", "fused"), shifted=True), Told()
    loss.divisor, told.several = 10.0, "starts" in case
    missing = -sequence % size
    inputs = {
        "input_ids": torch.nn.functional.pad(ids, (0, missing)),
        "labels": torch.nn.functional.pad(labels, (0, missing), value=-100),
    }
    if told.several:
        inputs["position_ids"] = positions
    inputs = parts.cut(inputs)
    told.position_ids = parts.position_ids
    with told, parts:
        found = shared(**inputs, use_cache=False).loss
        parts.check()
        found.backward()
    copies = place.world // size  # groups that have read the same rows
    total = found.detach().clone()
    dist.all_reduce(total)
    worst, largest = float((total / copies - expected.detach()).abs()), 0.0
    for mine, its in zip(shared.parameters(), whole.parameters(), strict=True):
        grad = torch.zeros_like(mine) if mine.grad is None else mine.grad
        dist.all_reduce(grad)
        wanted = torch.zeros_like(its) if its.grad is None else its.grad
        worst, largest = (
            max(worst, float((grad / copies - wanted).abs().max())),
            max(largest, float(wanted.abs().max())),
        )
    return worst / largest


def exchange(place: Place) -> float:
    """Heads for tokens and back, each compared with what is cut from the whole."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SMALL))
    parts = SequenceParts(model, Levers(sequence_parallel=4), place)
    torch.manual_seed(0)
    whole_BHLD = torch.randn(ROWS, 8, TOKENS, 4, dtype=torch.float64)
    tokens, heads = TOKENS // 4, 8 // 4
    mine_BHTD = whole_BHLD[:, :, place.rank * tokens : (place.rank + 1) * tokens]
    mine_BhLD = whole_BHLD[:, place.rank * heads : (place.rank + 1) * heads]
    there, back = gather_tokens(mine_BHTD, parts), gather_heads(mine_BhLD.transpose(1, 2), parts)
    return float((there - mine_BhLD).abs().max() + (back.transpose(1, 2) - mine_BHTD).abs().max())


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    place = Place(rank=rank, local_rank=rank, world=4, device=torch.device("cpu"), launcher="tests")
    found = {"the exchange": exchange(place), **{name: compare(case, place) for name, case in CASES.items()}}
    every: list[Any] = [None] * 4
    dist.all_gather_object(every, found)
    if rank == 0:
        sys.stdout.write(json.dumps({name: max(each[name] for each in every) for name in found}) + "\n")
    dist.destroy_process_group()
