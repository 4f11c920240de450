"""FSDP2 hands layers what their authors hand them, in the forward pass and when they recompute.

`fully_shard` would cast floating-point inputs of a layer to the working precision. Some releases of torch (2.11, and
not 2.13) do so in the forward pass and not in the recomputation: a layer that reads fp32 (OLMo 2's rotary tables) then
saves other tensors the second time, and the backward pass dies. Where the residual is fp32 (Mamba's), a cast would
round it at every layer. The ranks here cast as torch 2.11 does, whichever is installed.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from plain import write_examples
from running import run_ranks, write_plan
from small_models import config_of

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
