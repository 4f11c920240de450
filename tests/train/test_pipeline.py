"""Stages of real models, one after another in one process, against the whole: the same loss, and every gradient once.

Packed rows, tied embeddings, embeddings that are scaled or added to, layers that differ in their attention; two stages
on each of two GPUs. The arithmetic is the same, so that nothing may differ but how a tied weight's gradient is added
up.
"""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from running import edit, run_ranks, write_plan
from small_models import FAMILIES, config_of, real
from torch import Tensor
from transformers import AutoConfig

from tightfit.train.build import layers_of, number_layers
from tightfit.train.loss import WindowLoss
from tightfit.train.shards import outline
from tightfit.train.stages import Handover, Stages, cut, leave_after_stage

LAYERS = (range(1), range(1, 3), range(3, 4), range(4, 5))
BLOOM = {"vocab_size": 384, "hidden_size": 64, "n_layer": 5, "n_head": 4, "pad_token_id": 3}
"""Whose layers return tuples."""


def model_of(family: str) -> Any:
    count = {"n_layer" if family == "gpt2" else "num_hidden_layers": LAYERS[-1].stop}
    config = AutoConfig.for_model("bloom", **BLOOM) if family == "bloom" else config_of(family, **count)
    config.use_cache = False
    return real(config)


def batch(rows: int = 2, length: int = 12) -> dict[str, Tensor]:
    ids = torch.randint(4, 384, (rows, length), generator=torch.Generator().manual_seed(1))
    places = torch.cat([torch.arange(5), torch.arange(length - 5)]).expand(rows, length)
    return {"input_ids": ids, "labels": ids.clone(), "position_ids": places}


@pytest.mark.parametrize("kind", ["plain", "fused"])
@pytest.mark.parametrize("family", [*FAMILIES, "bloom"])
def test_stages_compute_what_the_whole_model_does(family: str, kind: Any) -> None:
    whole = model_of(family)
    rows = batch()
    if "mamba" in family:
        del rows["position_ids"]
    parts, stages = [], []
    for gpu in range(2):
        part, own = deepcopy(whole), Stages(LAYERS, gpu, 2)
        cut(part, own)
        WindowLoss(part, kind).divisor = 7.0
        leave_after_stage(part, own)
        parts.append(part)
        stages.append(own)
    WindowLoss(whole, kind).divisor = 7.0
    expected = whole(**rows).loss
    expected.backward()

    arrived: Tensor | None = None
    flying: list[tuple[Tensor | None, Tensor, list[Tensor]]] = []
    for number in range(len(LAYERS)):
        own, part, gradient = stages[number % 2], parts[number % 2], []
        own.now, own.arrived = number, arrived
        given = {name: each for name, each in rows.items() if name != "input_ids" or arrived is None}
        made = part(**given, **({} if arrived is None else {"inputs_embeds": arrived}))
        own.now = own.arrived = None
        if number == len(LAYERS) - 1:
            assert torch.equal(made.loss, expected)
            flying.append((arrived, made.loss, gradient))
        else:
            flying.append((arrived, Handover.apply(made, gradient), gradient))
            arrived = made.detach().requires_grad_()
    came: Tensor | None = None
    for read, end, gradient in reversed(flying):
        if came is not None:
            gradient.append(came)
        end.backward()
        came = None if read is None else read.grad

    wanted = {shard.name: shard.parameter.grad for shard in outline(whole, 0)}
    found: dict[str, Tensor | None] = {}
    copies = []
    for part in parts:
        for shard in outline(part, 0):
            grad = shard.parameter.grad
            if shard.is_copy:
                copies.append(shard.name)
            other = found.get(shard.name)
            found[shard.name] = grad if other is None or grad is None else other + grad
    assert found.keys() == wanted.keys()
    for name, grad in wanted.items():
        assert (grad is None) == (found[name] is None)
        if grad is not None and name in copies:
            torch.testing.assert_close(found[name], grad)
        elif grad is not None:
            assert torch.equal(found[name], grad), name
    assert bool(copies) == bool(whole.config.tie_word_embeddings)


def test_layers_keep_their_numbers_and_count_within_their_stage() -> None:
    model = model_of("llama")
    cut(model, Stages(LAYERS, 1, 2))
    assert [name for name, _ in model.named_parameters() if "q_proj" in name] == [
        f"model.layers.{number}.self_attn.q_proj.weight" for number in (1, 2, 4)
    ]
    assert [depth for depth, _ in number_layers(model)] == [0, 1, 0]
    assert len(layers_of(model)) == 3
    assert not [name for name, _ in model.named_parameters() if "embed" in name]


LOOK = """
import json
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from tightfit.train.engines import pipeline

def look(self, window, this, *, last, run=pipeline.Pipeline._pass_backward):
    run(self, window, this, last=last)
    whole = [name for name, each in self.model.named_parameters() if not isinstance(each, DTensor)]
    reduced = [name for name, each in self.model.named_parameters() if each.grad is not None]
    seen = {"in_flight": len(window.in_flight), "whole": whole, "reduced": len(reduced), "read": len(window.read),
            "arriving": len(window.arriving), "sent": len(window.sent)}
    with open(PATH, "a") as out:
        out.write(json.dumps(seen) + "\\n")

pipeline.Pipeline._pass_backward = look
"""


@pytest.mark.parametrize(
    ("gpu", "in_flight", "sharers"),
    [(0, 1, 1), (1, 0, 1), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((0, 1, 2), (1, 0, 2)))],
)
def test_a_rehearsed_gpu_keeps_what_is_in_flight_and_gathers_nothing_between_passes(
    tmp_path: Path, gpu: int, in_flight: int, sharers: int
) -> None:
    """Of two: after its first backward pass the first GPU still has a micro batch, and the second none. Either has its
    part of the gradients, and of the weights, also where ranks of a stage share its layers."""
    flags = {"model": "tiny_llama", "precision": "fp32", "seq": 32, "micro_batch": 1}
    flags |= {"effective_batch": 8 // sharers, "tensor_parallel": sharers}
    folder = write_plan(tmp_path / "plan", 4, engine="fsdp2", pipeline_parallel=2, **flags)
    edit(folder, pipeline__fullest_gpu=gpu)
    notes = tmp_path / "seen.jsonl"
    ran = run_ranks(folder, "--rehearse", "--no-probe", "--steps", "1", world=1, first=f"PATH = {str(notes)!r}\n{LOOK}")
    assert ran.codes == [0], ran.stderr
    seen = [json.loads(line) for line in notes.read_text().splitlines()]
    assert len(seen) == 4  # micro batches
    assert [each["in_flight"] for each in seen[:2]] == [in_flight] * 2
    assert not any(each["whole"] for each in seen)
    assert all(each["reduced"] for each in seen)
    assert all(each["sent"] <= 1 for each in seen)
    assert (ran.losses[0] > 0) == (gpu == 1)
