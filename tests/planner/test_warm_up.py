"""Compiled layers and parts that recompute: chosen where they pay, never where they cannot run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from small_questions import GIB, card, machine

from tightfit.desk.estimate import price
from tightfit.inputs.flags import checkpointing_from_word, checkpointing_word, find_compile_obstacle
from tightfit.job import Job
from tightfit.messages import id_of
from tightfit.model.load import load_model
from tightfit.pace.rates import COMPILE_CODE_S, COMPILE_PRODUCT_S, COMPILE_START_S
from tightfit.pace.warm_up import HALVINGS, MULTIPLE, count_lengths, warm_up_s
from tightfit.planner import plan
from tightfit.planner.plan import Plan
from tightfit.planner.selection import selections
from tightfit.planner.step_down import Shortfall, StepDown, Tried, step_down
from tightfit.train import compile as compiling
from tightfit.types import ConfigError, Gpu, Hardware, Levers, Lora

LLAMA = load_model("llama-3.1-8b")
H200 = machine("1xh200")
CPU = Hardware(gpu=Gpu(name="CPU", vendor="cpu", memory_bytes=16 * GIB), gpus_per_node=2, host_ram_bytes=32 * GIB)


def ask(hardware: Hardware = H200, model: str = "llama-3.1-8b", **said: Any) -> Plan:
    said = {"method": "lora"} | said
    return plan(Job(model=model, **said), load_model(model), hardware)


def said(answer: Plan) -> list[str | None]:
    return [id_of(each) for each in answer.because]


def levers(answer: Plan) -> Levers:
    assert answer.chosen is not None
    return answer.chosen.levers


def test_layers_are_compiled_where_they_can_be() -> None:
    answer = ask()
    assert answer.chosen is not None
    assert levers(answer).compile == "layers"
    assert "plan.layers-compiled" in said(answer)
    plain = ask(levers={"compile": "off"})
    assert plain.chosen is not None
    assert levers(plain).compile == "off"
    assert answer.chosen.pace.step_s < plain.chosen.pace.step_s
    assert plain.chosen.pace.warm_up_s == 0 < answer.chosen.pace.warm_up_s


@pytest.mark.parametrize(
    ("model", "hardware", "pins"),
    [
        ("llama-3.1-8b", H200, {"engine": "zero3"}),
        ("7b_mamba", machine("4xh200"), {"scan": "official"}),
        ("tiny_llama", CPU, {}),
        ("llama-3.1-8b", machine("1xK100-64GB"), {}),
    ],
)
def test_and_nowhere_else(model: str, hardware: Hardware, pins: dict[str, Any]) -> None:
    answer = ask(hardware, model, method="full" if model != "llama-3.1-8b" else "lora", levers=pins)
    assert levers(answer).compile == "off"
    assert not levers(answer).checkpointing.select
    assert not {"plan.layers-compiled", "plan.layers-compiled-unpaced"} & set(said(answer))


def test_a_short_job_does_not_wait_for_a_compiler() -> None:
    short, long = ask(max_steps=20), ask(max_steps=20_000)
    assert levers(short).compile == "off"
    assert "plan.compiling-does-not-pay" in said(short)
    assert levers(long).compile == "layers"
    assert levers(ask(max_steps=20, levers={"compile": "layers"})).compile == "layers"
    assert long.hours is not None
    assert long.chosen is not None
    assert long.hours * 3600 == pytest.approx(20_000 * long.chosen.pace.step_s + long.chosen.pace.warm_up_s)


def test_every_code_is_counted() -> None:
    """Kinds of layers, what recomputes in them, and whether their input has a gradient: times the lengths of rows."""
    plain = Levers(compile="layers", packed=True)
    deep, some, light = (checkpointing_from_word(word) for word in ("full", "layers:3", "select:elementwise+layers:3"))
    none, parts = checkpointing_from_word("none"), checkpointing_from_word("select:mlp+layers:3")

    def codes(changed: Levers, model: str = "llama-3.1-8b") -> float:
        shape, products = load_model(model), {"full": 7, "lora": 21}[changed.method]
        return (warm_up_s(shape, changed) - COMPILE_START_S) / (COMPILE_CODE_S + products * COMPILE_PRODUCT_S)

    counted = {none: 1, deep: 1, some: 2, parts: 2, light: 1}  # above the others all recompute elementwise work
    for depth, count in counted.items():
        full = replace(plain, checkpointing=depth)
        assert codes(full) == pytest.approx(count)
        # Nothing below the lowest layer trains, whatever recomputes.
        assert codes(replace(full, method="lora", lora=Lora())) == pytest.approx(count + 1)
        assert codes(replace(full, trains="layers")) == pytest.approx(count + 1)
    frozen = replace(plain, checkpointing=none, frozen_layers=2)
    assert codes(frozen) == pytest.approx(3)  # those below, the lowest that trains, and the others
    assert warm_up_s(LLAMA, replace(plain, compile="off")) == 0


def test_rows_that_are_not_packed_have_a_code_for_each_length() -> None:
    assert (HALVINGS, MULTIPLE) == (compiling.HALVINGS, compiling.MULTIPLE)
    for sequence in (5, 8, 12, 60, 2000, 2048):
        widths = {compiling.fix_width(longest, sequence) for longest in range(1, sequence + 1)}
        assert count_lengths(sequence) == len(widths), sequence
    packed, loose = (
        warm_up_s(LLAMA, Levers(compile="layers", packed=is_packed)) - COMPILE_START_S for is_packed in (True, False)
    )
    assert loose == pytest.approx(5 * packed)


def test_a_faster_host_is_not_taken_for_a_faster_compiler() -> None:
    one, other = (ask(machine(gpus)) for gpus in ("1xh200", "1xh100"))
    assert one.chosen is not None
    assert other.chosen is not None
    assert one.chosen.pace.warm_up_s == other.chosen.pace.warm_up_s > 0


@pytest.mark.parametrize("pin", [{"compile": "layers"}, {"kernels": "fused"}, {"checkpointing": "select:mlp"}])
@pytest.mark.parametrize("trainer", ["llamafactory", "trainer"])
def test_other_trainers_have_none_of_it(pin: dict[str, str], trainer: str) -> None:
    with pytest.raises(ConfigError, match="--for tightfit"):
        ask(trainer=trainer, levers=pin)
    answer = ask(trainer=trainer)
    assert (levers(answer).compile, levers(answer).kernels) == ("off", "plain")


def test_what_recomputes_is_what_frees_most_for_its_time() -> None:
    levers = Levers(method="lora", lora=Lora(), sequence=2048, compile="layers")
    short = selections(LLAMA, levers, H200).alone
    long = selections(LLAMA, replace(levers, sequence=32_768), H200).alone
    assert short[0] == long[0] == ("elementwise",)
    assert "mixer" in short[1]  # a short sequence's attention costs little
    assert all("mixer" not in parts for parts in long)


def test_auto_means_parts_that_fit() -> None:
    asked = Levers(method="lora", lora=Lora(), micro_batch=2, compile="layers", loss="fused")
    asked = replace(asked, checkpointing=checkpointing_from_word("select:auto"))
    kept = {}
    for size in (18, 20, 22, 24, 32):
        priced = price(LLAMA, asked, 1, card(H200, size * GIB))
        kept[size] = checkpointing_word(priced.levers.checkpointing)
        assert priced.levers == replace(asked, checkpointing=priced.levers.checkpointing)
    assert kept[32] == "none" or kept[32].startswith("select:elementwise")
    assert len(set(kept.values())) > 2, kept
    with pytest.raises(ConfigError, match="--gpus"):
        price(LLAMA, asked, 1, None)
    chosen = ask(card(H200, 20 * GIB), levers={"checkpointing": "select:auto"}).chosen
    assert chosen is not None
    assert "auto" not in chosen.levers.checkpointing.select


def test_what_takes_more_memory_than_predicted_twice_is_not_compiled_again() -> None:
    first = ask(card(H200, 24 * GIB))
    assert first.chosen is not None
    assert first.chosen.levers.compile == "layers"
    shortfall = Shortfall(where="gpu", missing_bytes=GIB // 4, phase="backward")
    second = step_down(first, shortfall)
    assert isinstance(second, StepDown)
    assert second.plan.chosen is not None
    if second.plan.chosen.levers.compile == "layers":
        third = step_down(second.plan, shortfall, before=(Tried(way=first.chosen, shortfall=shortfall),))
        assert isinstance(third, StepDown)
        assert third.plan.chosen is not None
        assert third.plan.chosen.levers.compile == "off"


def test_every_chosen_way_can_be_compiled_as_it_says() -> None:
    for model, gpus in (("qwen2.5-32b", "8xh100"), ("7b_mamba", "4xa100-80gb"), ("gemma-3-27b", "4x80GB")):
        answer = ask(machine(gpus, "512GB"), model, method="full" if model == "7b_mamba" else "lora")
        way = levers(answer)
        assert way.compile == "off" or find_compile_obstacle(way, load_model(model)) is None
