"""What 8-bit states take where each parameter has its own."""

from __future__ import annotations

import pytest

from tightfit.memory import estimate
from tightfit.memory.optimizers import BLOCK_8BIT, SMALL_8BIT, UNPAGED, eight_bit_states
from tightfit.memory.weights import of
from tightfit.model.load import load_model
from tightfit.types import Engine, Levers, Lora, Optimizer


def states(levers: Levers, world: int, model: str = "qwen2.5-7b") -> tuple[int, int]:
    """On the GPU and on one rank's host."""
    found = estimate(load_model(model), levers, world)
    host = found.host.phases["step"].components
    return found.gpu.phases["step"].components.get("optimizer_states", 0), host.get("optimizer_states", 0)


def test_parts_are_counted_one_by_one() -> None:
    large = 4 * SMALL_8BIT
    assert eight_bit_states("adamw8bit", (large,), 1) == (2 * large + 8 * large // BLOCK_8BIT, 0)
    assert eight_bit_states("adamw8bit", (large, large), 4) == (2 * (2 * large // 4 + 8 * large // 4 // BLOCK_8BIT), 0)
    assert eight_bit_states("adamw8bit", (large,), 8) == (8 * large // 8, 0), "a small part has fp32 states"


def test_only_large_parts_are_paged_and_their_scales_stay() -> None:
    scales = 8 * -(-UNPAGED // BLOCK_8BIT)
    assert eight_bit_states("paged_adamw8bit", (UNPAGED,), 1) == (scales, 2 * UNPAGED)
    assert eight_bit_states("paged_adamw8bit", (UNPAGED,), 2) == (UNPAGED + 8 * -(-UNPAGED // 2 // BLOCK_8BIT), 0)


@pytest.mark.parametrize("world", [1, 2, 8])
def test_fsdp2_holds_a_share_of_8_bit_states(world: int) -> None:
    plain = Levers(engine="fsdp2", optimizer="adamw")
    levers = Levers(engine="fsdp2", optimizer="adamw8bit")
    on_gpu, on_host = states(levers, world)
    numel = of(load_model("qwen2.5-7b"), levers).trainable_numel
    assert on_gpu == pytest.approx((2 + 8 / BLOCK_8BIT) * numel / world, rel=0.01)
    assert on_host == 0
    assert states(plain, world)[0] == pytest.approx(8 * numel / world, rel=1e-6)
    shape = load_model("qwen2.5-7b")
    parts = [estimate(shape, each, world).gpu.phases["step"].components for each in (plain, levers)]
    assert {**parts[0], "optimizer_states": 0} == {**parts[1], "optimizer_states": 0}, "nothing else differs"


@pytest.mark.parametrize("engine", ["zero0", "fsdp2"])
def test_paged_states_are_the_hosts(engine: Engine) -> None:
    held, paged = (states(Levers(engine=engine, optimizer=kind), 4) for kind in ("adamw8bit", "paged_adamw8bit"))
    assert sum(paged) == held[0]
    assert paged[0] < 0.05 * paged[1]


@pytest.mark.parametrize("kind", ["adamw8bit", "paged_adamw8bit"])
def test_adapters_in_small_parts_have_fp32_states(kind: Optimizer) -> None:
    lora = Levers(engine="fsdp2", optimizer=kind, method="lora", lora=Lora(rank=1))
    numel = of(load_model("qwen2.5-7b"), lora).trainable_numel
    on_gpu, on_host = states(lora, 8)
    assert on_gpu == pytest.approx(8 * numel / 8, rel=0.01)
    assert on_host == 0


def test_offloaded_shards_have_their_states_on_the_host() -> None:
    levers = Levers(engine="fsdp2", optimizer="adamw8bit", offload_optimizer="cpu", offload_param="cpu")
    on_gpu, on_host = states(levers, 4)
    assert (on_gpu, on_host) == (0, states(Levers(engine="fsdp2", optimizer="adamw8bit"), 4)[0])
