"""RAM that a rank holds for a moment or for good, beside what it keeps there on purpose."""

from __future__ import annotations

from dataclasses import replace

from tightfit.memory import estimate
from tightfit.memory.host import EXPERTS_BYTES, pinned_bytes
from tightfit.model.load import load_model
from tightfit.types import Gpu, Hardware, Levers, Lora, ModelShape, Moe, PhaseName

SHAPE = load_model("qwen2.5-7b")
OPTIMIZER = Levers(engine="zero3", offload_optimizer="cpu")
BOTH = replace(OPTIMIZER, offload_param="cpu")
OWN = -(-SHAPE.parameters // 8)


def parts(levers: Levers, phase: PhaseName = "step", shape: ModelShape = SHAPE) -> dict[str, int]:
    return dict(estimate(shape, levers, 8).host.phases[phase].components)


def test_new_weights_are_rounded_on_the_host_on_their_way_to_the_gpu() -> None:
    assert "temporaries" not in parts(OPTIMIZER, "backward")
    assert 2 * OWN <= parts(OPTIMIZER)["temporaries"] < 2 * OWN + 2**20
    assert "temporaries" not in parts(BOTH), "they stay on the host, and are rounded into their place"
    assert "temporaries" not in parts(replace(OPTIMIZER, precision="fp32"))
    small = replace(OPTIMIZER, buckets=replace(OPTIMIZER.buckets, sub_group_size=10**8))
    assert parts(small)["temporaries"] < parts(OPTIMIZER)["temporaries"] / 2, "a sub-group at a time"


def test_fp16_looks_at_all_gradients_at_once() -> None:
    asked = parts(replace(BOTH, precision="fp16"))["temporaries"]
    assert 3 * OWN <= asked < 3 * OWN + 2**20
    on_gpu = Levers(engine="zero3", precision="fp16")
    assert "temporaries" not in parts(on_gpu)


def test_a_tied_head_leaves_its_pinned_block() -> None:
    tied = load_model("qwen1.5-0.5b")
    assert tied.tied
    head = -(-tied.vocab_size * tied.hidden_size // 8) * 2
    untied = replace(tied, tied=False)
    assert parts(BOTH, shape=tied)["weights"] - parts(BOTH, shape=untied)["weights"] == pinned_bytes(head)


def test_a_rank_on_the_cpu_has_one_process_and_no_cuda() -> None:
    cpu = Hardware(gpu=Gpu(name="CPU", vendor="cpu", arch=None, memory_bytes=2**35), gpus_per_node=1)
    found = estimate(SHAPE, Levers(engine="zero2"), 1, cpu)
    assert found.host.peak_bytes_per_rank == 0, "it stands beside the tensors already"
    assert found.gpu.overhead["context"] > 0


def test_4_bit_weights_pass_through_whole_a_matrix_at_a_time() -> None:
    levers = Levers(method="qlora", engine="zero2", lora=Lora(rank=8))
    largest = max(tensor.numel for block in SHAPE.blocks for tensor in block.tensors)
    assert parts(levers, "init")["weights"] == 6 * largest


def test_experts_bring_kernels_of_their_own() -> None:
    block = replace(SHAPE.blocks[0], mlp=Moe(experts=4, top_k=2, intermediate=64, activation="silu"))
    experts = replace(SHAPE, blocks=(block,))
    more = parts(Levers(), shape=experts)["libraries"] - parts(Levers())["libraries"]
    assert more == EXPERTS_BYTES
