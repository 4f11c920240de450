"""Which layers get adapters when nobody names them, and what packed ones keep."""

from __future__ import annotations

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import AutoConfig, AutoModelForCausalLM

from tightfit.train.build import add_adapters, layers_of, quantise, skeleton
from tightfit.train.config import AdapterSettings
from tightfit.train.host_memory import HUGE, HostMemory
from tightfit.train.place import Place
from tightfit.train.streaming import Packed, place_model
from tightfit.types import Levers, Lora

SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 32}
KINDS = {
    "mamba": {"in_proj", "x_proj", "dt_proj"},
    "falcon_mamba": {"in_proj", "x_proj", "dt_proj"},
    "llama": {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_linear_layer_that_can_have_one(kind: str) -> None:
    more = {"intermediate_size": 32, "num_attention_heads": 2} if kind == "llama" else {}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SMALL, **more))
    adapted = add_adapters(model, Lora(rank=2), AdapterSettings(alpha=4, dropout=0.0), torch.float32)
    trained = {name for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    assert {name.split(".lora_")[0].rpartition(".")[2] for name in trained} == KINDS[kind]


def test_packed_layers_that_stream_are_on_the_host_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is packed goes to its home matrix by matrix, and leaves nothing behind."""
    pytest.importorskip("bitsandbytes")
    held, most = dict[int, int](), 0
    take, give_back = HostMemory.take, HostMemory.give_back

    def count(memory: HostMemory, size: int, *, lock: bool = True) -> torch.Tensor:
        nonlocal most
        made = take(memory, size, lock=lock)
        held[made.data_ptr()] = -(-size // HUGE) * HUGE
        most = max(most, sum(held.values()))
        return made

    def forget(memory: HostMemory, made: torch.Tensor, *, locked: bool = True) -> None:
        del held[made.data_ptr()]
        give_back(memory, made, locked=locked)

    monkeypatch.setattr(HostMemory, "take", count)
    monkeypatch.setattr(HostMemory, "give_back", forget)
    wide = {"hidden_size": 2048, "intermediate_size": 2048, "num_attention_heads": 16, "num_hidden_layers": 5}
    config = AutoConfig.for_model("llama", vocab_size=32, **wide)
    levers = Levers(method="qlora", lora=Lora(rank=2), engine="stream", precision="bf16", resident=1)
    place = Place(rank=0, local_rank=0, world=2, device=torch.device("cpu"), launcher="python", rehearsal=True)
    model = skeleton(config, torch.bfloat16, "sdpa")
    packed = Packed(model, levers, place)
    quantise(model, lambda name, shape: torch.ones(shape), place.device, torch.bfloat16, packed.keep)
    assert len(held) == 4 * 7  # one of five layers stays
    adapted = add_adapters(model, Lora(rank=2), AdapterSettings(alpha=4, dropout=0.0), torch.float32)
    stream = place_model(adapted, levers, place, {}, packed)
    homes = [unit.home for unit in stream.layers if unit is not None]
    assert sorted(held) == sorted(home.data_ptr() for home in homes)
    assert most <= sum(held.values()) + max(held.values())
    q = layers_of(adapted)[1].self_attn.q_proj.base_layer.weight
    assert q.data.shape == (2048 * 2048 // 2, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_packed_matrix_that_zero3_releases_is_gone_until_the_backward_pass(dtype: torch.dtype) -> None:
    """The layer computes in fp32; `dtype` is that of what enters it."""
    pytest.importorskip("bitsandbytes")
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("llama", **SMALL, intermediate_size=32, num_attention_heads=2)
    )
    quantise(model, lambda name, shape: torch.randn(shape), torch.device("cpu"), torch.float32)
    layer = model.model.layers[0].mlp.up_proj
    given = torch.randn(3, 16, dtype=dtype, requires_grad=True)
    layer(given).sum().backward()
    assert given.grad is not None
    wanted, given.grad = given.grad, None

    layer.weight.ds_id = 0  # as ZeRO-3 marks its parameters
    output = layer(given)
    packed, whole = layer.weight.data.clone(), StorageWeakRef(layer.weight.data.untyped_storage())
    layer.weight.data = torch.empty(0, dtype=torch.uint8)
    assert whole.expired()
    layer.weight.data = packed
    output.sum().backward()
    torch.testing.assert_close(given.grad, wanted)
