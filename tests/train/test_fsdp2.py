"""FSDP2 hands layers what their authors hand them, in the forward pass and when they recompute; and where its gradients
lie.

`fully_shard` would cast floating-point inputs of a layer to the working precision. Some releases of torch (2.11, and
not 2.13) do so in the forward pass and not in the recomputation: a layer that reads fp32 (OLMo 2's rotary tables) then
saves other tensors the second time, and the backward pass dies. Where the residual is fp32 (Mamba's), a cast would
round it at every layer. The ranks here cast as torch 2.11 does, whichever is installed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from plain import write_examples
from running import run_ranks, write_plan
from small_models import config_of

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.thorough

CASTS_ONLY_FORWARD = """
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState, TrainingState
cast = getattr(FSDPState, "_cast_forward_inputs", None)
def older(self, args, kwargs):
    return (args, kwargs) if self._training_state == TrainingState.PRE_BACKWARD else cast(self, args, kwargs)
if cast is not None:
    FSDPState._cast_forward_inputs = older
"""
SEES = """
import json
from pathlib import Path
from torch import Tensor
from tightfit.train import assemble, recompute
from tightfit.train.build import layers_of
seen = set()
def note(module, args, kwargs):
    tables = kwargs.get("position_embeddings") or ()
    seen.update(str(each.dtype) for each in (*args, *tables) if isinstance(each, Tensor) and each.is_floating_point())
    Path({path!r}).write_text(json.dumps(sorted(seen)))
made = recompute.recompute
def observed(model, how):
    for layer in layers_of(model)[1:]:
        layer.register_forward_pre_hook(note, with_kwargs=True)
    return made(model, how)
assemble.recompute = observed
"""


@pytest.mark.parametrize(
    ("family", "read"),
    [
        ("olmo2", ["torch.bfloat16", "torch.float32"]),
        pytest.param("mamba", ["torch.float32"], marks=pytest.mark.slow),
    ],
)
def test_layers_that_read_fp32_train_and_recompute(tmp_path: Path, family: str, read: list[str]) -> None:
    config_of(family, num_hidden_layers=3).save_pretrained(tmp_path / "shape")
    data = write_examples(tmp_path / "examples.jsonl")
    flags = {"model": str(tmp_path / "shape"), "seq": 64, "effective_batch": 2, "max_steps": 2, "data": str(data)}
    plan = write_plan(tmp_path / "plan", 2, **flags, engine="fsdp2", checkpointing="layers:2", precision="bf16")
    seen = tmp_path / "seen.json"
    ran = run_ranks(plan, "--no-probe", first=CASTS_ONLY_FORWARD + SEES.format(path=str(seen)))
    assert ran.codes == [0, 0], ran.stderr[0][-3000:]
    assert len(ran.losses) == 2
    assert json.loads(seen.read_text()) == read


POOLS = """
import gc, json
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from tightfit.train.engines.fsdp2 import reduce_into_common_pool
from tightfit.train.place import join_alone

join_alone(0, 2)
torch.cuda.set_device(0)
found = []
for common in (False, True):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(2048, 2048, bias=False) for _ in range(8)]).cuda()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    if common:
        reduce_into_common_pool(model)
    x = torch.randn(512, 2048, device="cuda")
    for _ in range(3):  # what a micro batch adds to the one before is freed while it is being added
        model(x).square().mean().backward()
    torch.cuda.synchronize()
    gradients = [each.grad.to_local().double().sum().item() for each in model.parameters()]
    elsewhere = [each["allocated_size"] for each in torch.cuda.memory_snapshot() if each["stream"] != 0]
    found.append([gradients, sum(elsewhere)])
    del model, layer, x
    gc.collect()  # what is sharded refers to itself
    torch.cuda.empty_cache()
print(json.dumps(found))
"""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gradients_lie_where_activations_did() -> None:
    done = subprocess.run([sys.executable, "-c", POOLS], capture_output=True, text=True, check=True)
    (apart, beside), (together, left) = json.loads(done.stdout.splitlines()[-1])
    assert together == pytest.approx(apart, rel=1e-5)
    assert any(together)
    assert left < 0.2 * beside
