"""Compressed communication: what is sent and what is kept are all gradients; runs follow the exact one from a distance;
a checkpoint has what was kept.

A run begins exact. From there on it may be off by a part in ten of the way that the loss has come: gradients have the
right sign and size. By a quarter with 1-bit Adam, whose second moment stays what two steps of these few have made it.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from plain import plain_losses, write_examples
from running import Ran, edit, figures_of, run_ranks, write_plan
from test_resume import cut_off

from tightfit.inputs.flags import levers_from_flags
from tightfit.inputs.layouts import check_layout
from tightfit.memory.compressed import SIGNED, gradient_messages
from tightfit.model.load import load_model
from tightfit.train.compression import OneBit, PowerSgd, count_warm_up
from tightfit.train.config import OptimizerConfig
from tightfit.train.engines.ddp import Ddp
from tightfit.train.place import Place
from tightfit.types import Compress, ConfigError, Levers

STEPS, MIDDLE = 10, 6
FLAGS: dict[str, Any] = {
    "model": "tiny_llama",
    "precision": "fp32",
    "seq": 48,
    "effective_batch": 4,
    "micro_batch": 1,
    "max_steps": STEPS,
    "learning_rate": 3e-3,
}
WAYS: dict[str, dict[str, Any]] = {
    "powersgd": {"compress": "powersgd"},
    "onebit": {"compress": "onebit"},
    "zeropp": {"compress": "zeropp", "persistence_threshold": 0},
    "powersgd bf16": {"compress": "powersgd", "precision": "bf16"},
    "onebit bf16": {"compress": "onebit", "precision": "bf16"},
    "onebit fp16": {"compress": "onebit", "precision": "fp16"},
    "zeropp lora": {"compress": "zeropp", "persistence_threshold": 0, "method": "lora", "learning_rate": 3e-2},
    "zeropp in groups": {"compress": "zeropp", "persistence_threshold": 0, "shard_within": 2},
    "powersgd mamba": {"compress": "powersgd", "model": "tiny_mamba"},
    "onebit mamba": {"compress": "onebit", "model": "tiny_mamba"},
}
QUICKLY = ("powersgd", "onebit", "zeropp")
"""What `make test` has of it."""
ROUNDED = {"fp32": 1e-5, "bf16": 2e-3, "fp16": 2e-3}


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """Those of four ranks, by name."""
    return figures_of("compressing.py", 4, tmp_path_factory.mktemp("cache"))


def test_what_was_sent_and_what_is_kept_are_all_gradients(figures: dict[str, float]) -> None:
    assert figures["powersgd"] < 1e-12
    assert figures["powersgd, what goes whole"] < 1e-12
    assert figures["onebit"] < 1e-12
    assert figures["powersgd keeps"] > 1
    assert figures["onebit keeps"] > 1


def test_all_ranks_get_the_same(figures: dict[str, float]) -> None:
    assert figures["ranks apart"] < 1e-14


def test_matrices_of_few_columns_arrive_whole(figures: dict[str, float]) -> None:
    assert figures["a few columns"] < 1e-12
    assert figures["not orthogonal"] < 1e-12


def test_the_norm_of_a_mean_that_nobody_has(figures: dict[str, float]) -> None:
    """Of as many sums of random signs as it takes, to a few per cent."""
    assert figures["norm"] < 0.1


def test_gradients_of_four_bits_are_means(figures: dict[str, float]) -> None:
    """Half a level, and half a level more where they hop twice."""
    assert 0 < figures["scatter by 4"] < 0.51
    assert 0 < figures["scatter by 2"] < 1.01
    assert figures["levels by 4"] < 1e-12 > figures["levels by 2"]


def write(folder: Path, world: int = 2, **flags: Any) -> Path:
    folder.mkdir(exist_ok=True)
    data = write_examples(folder / "examples.jsonl")
    plan = write_plan(folder, world, **{**FLAGS, "data": str(data), **flags})
    return edit(plan, saving__every_steps=2, saving__keep_last=9)


def run_well(folder: Path, *options: str) -> Ran:
    ran = run_ranks(folder, *options)
    assert ran.codes == [0] * len(ran.codes), "\n".join(ran.stderr)
    return ran


@pytest.mark.thorough
@pytest.mark.parametrize("way", [pytest.param(way, marks=[] if way in QUICKLY else [pytest.mark.slow]) for way in WAYS])
def test_a_run_follows_the_exact_one_and_goes_on_bit_for_bit(tmp_path: Path, way: str) -> None:
    flags = {**FLAGS, **WAYS[way]}
    plan = write(tmp_path, 4 if "shard_within" in flags else 2, **WAYS[way])
    whole = run_well(plan, "--no-probe")
    how = flags["compress"]
    same = 0 if how == "zeropp" else count_warm_up(how, STEPS) + 1  # a loss is that of the weights before the step
    if flags["precision"] == "fp16":
        exact = run_well(write(tmp_path / "exact", engine="ddp", precision="fp16"), "--no-probe").losses
    else:
        exact = plain_losses(plan)
    came = exact[0] - exact[-1]
    assert came > 0.3
    assert whole.losses[:same] == pytest.approx(exact[:same], rel=ROUNDED[flags["precision"]])
    off = max(abs(mine - its) for mine, its in zip(whole.losses, exact, strict=True))
    assert off < came / (4 if how == "onebit" else 10)
    assert whole.losses[same:] != pytest.approx(exact[same:], rel=1e-6), "nothing was compressed"
    cut_off(whole.folder, MIDDLE)
    rest = run_well(plan)
    assert rest.of("resumed")[0]["step"] == MIDDLE
    assert rest.losses == whole.losses[MIDDLE:]
    assert not [each for each in rest.of("warning") if "left out" in each["text"]]


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("compress", ["powersgd", "onebit"])
def test_another_number_of_ranks_goes_on_without_what_was_kept(tmp_path: Path, compress: str) -> None:
    whole = run_well(write(tmp_path / "two", compress=compress), "--no-probe")
    for world, then in ((4, compress), (2, "none")):
        other = write(tmp_path / f"{world}", world, compress=then, engine="ddp")
        middle = Path("checkpoints") / f"step-{MIDDLE:08d}"
        shutil.copytree(whole.folder / middle, tmp_path / str(world) / "run" / middle)
        rest = run_well(other, "--no-probe")
        assert rest.losses[0] == pytest.approx(whole.losses[MIDDLE], rel=1e-5)
        assert [each["step"] for each in rest.of("step")] == [*range(MIDDLE + 1, STEPS + 1)]
        assert any("starts at zero again" in each["text"] for each in rest.of("warning"))
        assert max(rest.losses) < whole.losses[0]


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Place]:
    """The one rank of a group."""
    place = Place(rank=0, local_rank=0, world=1, device=torch.device("cpu"), launcher="tests")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield place
    dist.destroy_process_group()


class Small(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(SIGNED))


def make_engine(place: Place, scale_power: int | None = None, compress: Compress = "onebit") -> Ddp:
    training = OptimizerConfig(
        learning_rate=1e-2,
        schedule="constant",
        warmup=0.0,
        epochs=None,
        max_steps=None,
        weight_decay=0.0,
        clip=0.0,
        first_scale_power=scale_power,
        seed=0,
    )
    engine = Ddp(Small(), Levers(engine="ddp", compress=compress, precision="fp32"), place, training)
    engine.expect(10)
    return engine


def take_steps(engine: Ddp, grads: list[float]) -> None:
    for grad in grads:
        engine.backward(engine.model.weight.mul(grad).sum(), last=True)
        engine.step(1e-2)


def settled(engine: Ddp) -> int:
    return int(engine.own_states()["onebit.settled"])


def test_the_second_moment_counts_its_own_updates(alone: Place) -> None:
    """Three of them, of another run, where this one would have had two."""
    engine = make_engine(alone)
    take_steps(engine, [1.0, 1.0])
    engine.go_on(replace(engine.counters(), optimizer_steps=3), 5)
    assert settled(engine) == 0
    take_steps(engine, [1.0])
    assert settled(engine) == 3
    engine.forget()
    assert settled(engine) == 0


def test_steps_that_overflow_are_no_updates(alone: Place) -> None:
    """Gradients that stay the same move weights by the learning rate."""
    engine = make_engine(alone, scale_power=0)
    take_steps(engine, [float("inf")] * 3)
    assert engine.counters().optimizer_steps == 0
    take_steps(engine, [1.0, float("inf"), 1.0])
    assert settled(engine) == 0
    before = engine.model.weight.detach().clone()
    take_steps(engine, [1.0])
    assert settled(engine) == 2
    assert (before - engine.model.weight).tolist() == pytest.approx([1e-2] * SIGNED, rel=1e-3)


def test_exact_steps_go_on_after_compressed_ones(alone: Place) -> None:
    """Gradients that stay the same move weights by the learning rate, though few steps changed the second moment."""
    engine, exact = make_engine(alone), make_engine(alone, compress="none")
    take_steps(engine, [1.0] * 8)
    assert settled(engine) == 2
    for its, ours in zip(engine.states(write=False), exact.states(write=True), strict=True):
        ours.tensor.copy_(its.tensor)
    exact.go_on(engine.counters(), 8)
    before = exact.model.weight.detach().clone()
    take_steps(exact, [1.0])
    assert (before - exact.model.weight).tolist() == pytest.approx([1e-2] * SIGNED, rel=1e-3)


def test_a_second_moment_without_updates_is_not_frozen(alone: Place) -> None:
    """Without a loss scale nobody waits to see whether gradients were finite."""
    engine = make_engine(alone)
    take_steps(engine, [float("nan")] * 3)
    take_steps(engine, [1.0])
    assert settled(engine) == 0
    take_steps(engine, [1.0])
    assert settled(engine) == 1


@pytest.mark.parametrize("model", ["tiny_llama", "tiny_mamba"])
def test_the_price_counts_what_is_kept(model: str) -> None:
    shape = load_model(model)
    place = Place(rank=0, local_rank=0, world=4, device=torch.device("cpu"), launcher="tests")
    shapes = [torch.Size(tensor.shape) for tensor in shape.tensors]
    kept = {"powersgd": PowerSgd(shapes, place), "onebit": OneBit(shape.parameters, place)}
    for compress, each in kept.items():
        held = sum(tensor.nbytes for tensor in each.states().values() if tensor.numel() > 1)  # a number is on the host
        priced = gradient_messages(shape, Levers(engine="ddp", compress=compress), 4).kept
        extra = each.states()["powersgd.q"].nbytes if compress == "powersgd" else 0  # where iterations begin
        assert priced == held + extra


REFUSED = {
    "powersgd for several GPUs": ({"compress": "powersgd", "engine": "ddp"}, 1, "one has nobody to send anything to"),
    "powersgd on zero3": ({"compress": "powersgd", "engine": "zero3"}, 4, "needs --engine ddp"),
    "zeropp on fsdp2": ({"compress": "zeropp", "engine": "fsdp2"}, 4, "needs --engine zero3"),
    "onebit with adapters": ({"compress": "onebit", "engine": "ddp", "method": "lora"}, 4, "--method lora"),
    "zeropp of 4 bits": ({"compress": "zeropp", "engine": "zero3", "method": "qlora"}, 4, "--method qlora"),
    "onebit of another optimizer": ({"compress": "onebit", "engine": "ddp", "optimizer": "sgd"}, 4, "--optimizer sgd"),
    "in 16 bits alone": ({"compress": "powersgd", "engine": "ddp", "master_weights": False}, 4, "--master-weights off"),
    "zeropp on six": ({"compress": "zeropp", "engine": "zero3"}, 6, "packs 8 weights at a time, and 6 GPUs"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_compressed_is_one_sentence(case: str) -> None:
    flags, world, said = REFUSED[case]
    shape = load_model("qwen2.5-7b")
    with pytest.raises(ConfigError, match=said):
        check_layout(levers_from_flags(flags, shape, Levers()), shape, world)
