"""Layers that come from the host, in one process: losses, norms and what an evaluation says, against `ddp` with the
same weights, batches and steps. Nothing differs but the order of sums."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from tightfit.train import build, updates
from tightfit.train.assemble import fill, materialise
from tightfit.train.config import AdapterSettings, OptimizerConfig
from tightfit.train.engines import Engine
from tightfit.train.engines.ddp import Ddp
from tightfit.train.engines.stream import StreamAdapters, StreamWeights
from tightfit.train.host_adam import Step
from tightfit.train.optimizers import BLOCK, name_decays
from tightfit.train.place import Place
from tightfit.train.recompute import recompute
from tightfit.train.scratch import Scratch
from tightfit.train.shards import find_resting
from tightfit.train.streaming import place_model
from tightfit.train.updates import measure_norm
from tightfit.train.walk import Walk
from tightfit.types import AttentionKernel, Buckets, Checkpointing, Levers, Lora, ModelError, Precision

pytestmark, SLOW = pytest.mark.thorough, pytest.mark.slow

WINDOW, STEPS, RATE = 3, 3, 1e-2
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "tie_word_embeddings": False, **SMALL},
    "tied": {"model_type": "llama", "tie_word_embeddings": True, **SMALL},
    "gemma3": {"model_type": "gemma3_text", "head_dim": 16, "sliding_window": 8, **SMALL},
    "bloom": {"model_type": "bloom", "vocab_size": 384, "hidden_size": 64, "n_layer": 5, "n_head": 4},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, **SMALL},
    "mamba": {"model_type": "mamba", "hidden_size": 32, "num_hidden_layers": 4, "vocab_size": 320, "state_size": 8},
}
ATTENTION: dict[str, AttentionKernel] = {"bloom": "eager"}
WHOLE = Levers(
    engine="stream", precision="fp32", accumulation=WINDOW, checkpointing=Checkpointing(layers=None), micro_batch=2
)
LORA = replace(WHOLE, method="lora", lora=Lora(rank=4))
WAYS: dict[str, tuple[str, Levers]] = {
    **{family: (family, WHOLE) for family in MODELS},
    "two stay": ("llama", replace(WHOLE, resident=2)),
    "all stay": ("tied", replace(WHOLE, resident=5)),
    "nothing recomputes": ("llama", replace(WHOLE, checkpointing=Checkpointing(layers=0))),
    "some recompute": ("tied", replace(WHOLE, checkpointing=Checkpointing(layers=2))),
    "parts recompute": (
        "llama",
        replace(WHOLE, checkpointing=Checkpointing(layers=None, select=("elementwise", "mlp"))),
    ),
    "inputs wait on the host": ("tied", replace(WHOLE, checkpointing=Checkpointing(layers=None, offload=True))),
    "fused loss": ("tied", replace(WHOLE, loss="fused")),
    "frozen layers": ("llama", replace(WHOLE, frozen_layers=2)),
    "the embeddings alone": ("llama", replace(WHOLE, trains="embeddings")),
    "all but the embeddings": ("llama", replace(WHOLE, trains="layers")),
    "adapters": ("llama", LORA),
    "adapters, two stay": ("tied", replace(LORA, resident=2)),
    "adapters, nothing recomputes": ("tied", replace(LORA, checkpointing=Checkpointing(layers=0))),
}
MORE = (
    *("gemma3", "bloom", "all stay", "some recompute", "the embeddings alone", "all but the embeddings"),
    *("adapters, two stay", "adapters, nothing recomputes"),
)
"""What another way covers nearly as well."""
HERE = Place(rank=0, local_rank=0, world=1, device=torch.device("cpu"), launcher="python")


def make(model: str, levers: Levers, *, clip: float = 1.0, dropout: float = 0.0, disk: Path | None = None) -> Engine:
    config, working = AutoConfig.for_model(**MODELS[model]), build.DTYPES[levers.precision]
    levers = replace(levers, gradient_clipping=clip > 0)

    def adapt(skeleton: Any) -> Any:
        if levers.lora is None:
            return skeleton
        settings = AdapterSettings(alpha=16, dropout=dropout)
        return build.add_adapters(skeleton, levers.lora, settings, build.adapter_dtype(levers))

    draws = Scratch(adapt(build.skeleton(config, working, ATTENTION.get(model, "sdpa"))), 1)
    made = build.skeleton(config, working, ATTENTION.get(model, "sdpa"))
    build.audit(made, working)
    build.freeze(made, levers)
    made = adapt(made)
    build.cast_meta(made, lambda name, param: param.dtype if ".lora_" in name else working)
    training = OptimizerConfig(
        learning_rate=RATE, schedule="constant", warmup=0, epochs=None, max_steps=STEPS, weight_decay=0.1, clip=clip,
        first_scale_power=None, seed=1,
    )  # fmt: skip
    if levers.compile == "off" and (levers.engine == "ddp" or levers.checkpointing.select):
        recompute(made, replace(levers.checkpointing, offload=False))
    if levers.engine == "ddp":
        materialise(made, HERE.device)
    else:
        stream = place_model(made, levers, HERE, {} if levers.lora else name_decays(made, 0.1))
    fill(made, draws.read, working, 0, lambda *_: None)
    if levers.engine == "ddp":
        engine: Engine = Ddp(made, levers, HERE, training)
    else:
        if levers.lora:
            engine = StreamAdapters(made, levers, HERE, training, stream)
        else:
            engine = StreamWeights(made, levers, HERE, training, stream, disk)
    engine.train(True)
    return engine


def batches(step: int) -> Iterator[dict[str, Tensor]]:
    random = torch.Generator().manual_seed(step)
    for _ in range(WINDOW):
        ids = torch.randint(0, 320, (2, 12), generator=random)
        yield {"input_ids": ids, "labels": ids}


def run(engine: Engine, first: int = 0, steps: int = STEPS) -> list[float]:
    """Loss and norm of each step, and the loss of an evaluation."""
    said = []
    for step in range(first, first + steps):
        torch.manual_seed(step)
        engine.expect_rate(RATE)
        added = engine.accumulate(batches(step), WINDOW, 2.0 * 11 * WINDOW, lambda *_: None)
        loss, stepped = engine.step(RATE).read(added)
        said += [loss, stepped.grad_norm or 0.0]
    engine.train(False)
    with torch.no_grad():
        said.append(float(engine.evaluate(batches(0), WINDOW)))
    engine.train(True)
    return said


def plain(levers: Levers) -> Levers:
    return replace(levers, engine="ddp", resident=0)


@pytest.mark.parametrize("way", [pytest.param(way, marks=[SLOW] if way in MORE else []) for way in WAYS])
def test_every_way_follows_ddp(way: str) -> None:
    model, levers = WAYS[way]
    expected = run(make(model, plain(levers)))
    assert expected[-1] != pytest.approx(run(make(model, plain(levers)), steps=0)[-1], rel=1e-3), "nothing was learnt"
    assert run(make(model, levers)) == pytest.approx(expected, rel=2e-5)


@pytest.mark.parametrize("model", ["llama", "tied"])
def test_without_clipping_a_unit_is_updated_as_its_gradients_arrive(model: str) -> None:
    assert run(make(model, WHOLE, clip=0.0)) == pytest.approx(run(make(model, plain(WHOLE), clip=0.0)), rel=2e-5)


def test_what_is_dropped_out_is_dropped_again() -> None:
    """The same step twice, and with nothing recomputed: the generator stands where it should."""
    levers = replace(LORA, checkpointing=Checkpointing(layers=0))
    expected = run(make("llama", levers, dropout=0.3))
    assert run(make("llama", LORA, dropout=0.3)) == pytest.approx(expected, rel=2e-5)


def test_bf16_follows_ddp() -> None:
    levers = replace(WHOLE, precision="bf16")
    assert run(make("llama", levers)) == pytest.approx(run(make("llama", plain(levers))), rel=1e-2)


ALL_IN_FILE = replace(WHOLE, buckets=Buckets(optimizer_buffer_count=2))


@pytest.mark.parametrize(
    ("levers", "clip"),
    [
        (ALL_IN_FILE, 0.5),
        (replace(ALL_IN_FILE, precision="bf16"), 0.0),
        (replace(ALL_IN_FILE, precision="bf16", states="8bit"), 0.5),
        pytest.param(replace(ALL_IN_FILE, precision="bf16", master_weights=False, states="bf16"), 0.5, marks=SLOW),
        pytest.param(replace(ALL_IN_FILE, precision="fp16"), 0.5, marks=SLOW),
        pytest.param(replace(WHOLE, buckets=Buckets(optimizer_buffer_count=4)), 0.5, marks=SLOW),
        (replace(WHOLE, buckets=Buckets(optimizer_buffer_count=6)), 0.0),
    ],
    ids=["fp32", "as gradients arrive", "8 bits", "no copies", "fp16", "two stay in memory", "four do"],
)
def test_states_in_a_file_are_those_in_memory(levers: Levers, clip: float, tmp_path: Path) -> None:
    """Losses, norms and states, bit for bit; also where they were read and forgotten in between."""
    in_memory = make("llama", levers, clip=clip)
    in_file = make("llama", replace(levers, offload_optimizer="nvme"), clip=clip, disk=tmp_path)
    assert in_file.holdings().optimizer_on == "cpu,nvme"
    assert run(in_file) == run(in_memory)
    assert states(in_file) == states(in_memory)
    for engine in (in_memory, in_file):
        for state in engine.states(write=True):
            state.tensor.mul_(0.5)
        engine.go_on(engine.counters(), STEPS)
    assert states(in_file) == states(in_memory)
    assert run(in_file, first=STEPS) == run(in_memory, first=STEPS)
    for engine in (in_memory, in_file):
        engine.forget()
    assert states(in_file) == states(in_memory)
    assert not list(tmp_path.iterdir())


SCALED = replace(WHOLE, precision="fp16")
SEVERAL = 5  # steps


@pytest.mark.parametrize(
    "levers",
    [
        WHOLE,
        replace(WHOLE, precision="bf16"),
        replace(WHOLE, precision="bf16", states="8bit"),
        pytest.param(replace(WHOLE, precision="bf16", states="bf16", master_weights=False), marks=SLOW),
        pytest.param(SCALED, marks=SLOW),
    ],
    ids=["fp32", "bf16", "8 bits", "no copies", "fp16"],
)
def test_updates_ahead_of_the_norm_are_those_that_wait(levers: Levers) -> None:
    """Losses, norms, states and weights, bit for bit, in steps that clip and in steps that do not, and where something
    is not finite."""
    norms = run(make("llama", levers, clip=1e9), steps=SEVERAL)[1:-1:2]
    clip = sorted(norms)[SEVERAL // 2]  # of the norms as they are without clipping: some are above it
    waiting, hasty = (make("llama", replace(levers, update=word), clip=clip) for word in ("waits", "ahead"))
    assert isinstance(hasty, StreamWeights)
    counted, made_again = watch_updates(hasty)
    expected = run(waiting, steps=SEVERAL)
    assert run(hasty, steps=SEVERAL) == expected
    assert states(hasty) == states(waiting)
    assert weights(hasty) == weights(waiting)
    assert counted, "no step went ahead and counted"
    assert made_again, "no step went ahead and was made again"
    before = states(hasty), weights(hasty)
    for engine in (waiting, hasty):
        engine.accumulate(batches(0), WINDOW, 1e-30 if levers.precision == "fp16" else 1e-45, lambda *_: None)
        assert engine.step(RATE).read(torch.zeros(()))[1].skipped
    assert (states(hasty), weights(hasty)) == before
    assert run(hasty, first=SEVERAL) == run(waiting, first=SEVERAL)
    assert states(hasty) == states(waiting)


@pytest.mark.parametrize("clip", [0.0, 1.0], ids=["at once", "after the norm"])
@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=SLOW), "bf16"])
def test_units_are_updated_piece_by_piece(clip: float, precision: Precision, monkeypatch: pytest.MonkeyPatch) -> None:
    levers = replace(WHOLE, precision=precision)
    at_once = make("tied", levers, clip=clip)
    expected = run(at_once, steps=SEVERAL)
    monkeypatch.setattr(updates, "PIECE", BLOCK)
    by_pieces = make("tied", levers, clip=clip)
    assert isinstance(by_pieces, StreamWeights)
    bottom = by_pieces._stream.bottom
    assert bottom is not None
    assert bottom.trained > 3 * BLOCK
    assert run(by_pieces, steps=SEVERAL) == expected
    assert states(by_pieces) == states(at_once)
    assert weights(by_pieces) == weights(at_once)
    by_pieces.accumulate(batches(0), WINDOW, 1.0, lambda *_: None)
    by_pieces.step(RATE)
    ready = list(bottom.become_ready())
    assert len(ready) > 3, "nothing to wait for piece by piece"
    assert [0, *(each.stop for each in ready)] == [*(each.start for each in ready), bottom.bytes]


def test_the_lowest_unit_is_updated_while_its_gradients_still_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the norm is known, whether or not others were updated ahead of it."""
    monkeypatch.setattr(updates, "PIECE", BLOCK)
    engine = make("tied", replace(WHOLE, update="ahead"), clip=1e9)
    assert isinstance(engine, StreamWeights)
    run(engine, steps=1)
    made, streams, bottom = engine._updates, engine._stream.streams, engine._stream.bottom
    assert bottom is not None
    pieces: list[Arrival] = []
    monkeypatch.setattr(streams, "mark", lambda *_: pieces.append(Arrival()) or pieces[-1])
    monkeypatch.setattr(streams, "wait", lambda _: None)

    def close(unit: Any) -> None:
        pieces.clear()
        made.close(unit)
        for piece in pieces if unit is not bottom else pieces[:2]:
            piece.set()

    engine._close = close  # type: ignore[method-assign]
    done = Event()
    update = made.states[bottom].update

    def tell(*args: Any, **kwargs: Any) -> None:
        update(*args, **kwargs)
        done.set()

    made.states[bottom].update = tell  # type: ignore[method-assign]
    engine.accumulate(batches(1), WINDOW, 1.0, lambda *_: None)
    arriving = pieces[2:]
    assert arriving, "all of it is there at once"
    pieces.clear()
    engine.step(RATE)
    for known in pieces:
        known.set()
    assert done.wait(60), "it waits for the rest"
    for piece in arriving:
        piece.set()
    made.settle()


class Arrival(Event):
    """What stands for a CUDA event."""

    synchronize, query = Event.wait, Event.is_set


def test_an_update_that_fails_is_told_where_its_weights_are_wanted() -> None:
    engine = make("tied", WHOLE)
    assert isinstance(engine, StreamWeights)
    run(engine, steps=1)
    held = engine._updates.states[engine._updates.units[0]]

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("no more")

    held.update = fail  # type: ignore[method-assign]
    with pytest.raises(OSError, match="no more"):
        run(engine, first=1, steps=2)


def weights(engine: Engine) -> dict[str, list[float]]:
    return {shard.path: find_resting(shard.parameter).float().view(-1).tolist() for shard in engine._trainable()}


def watch_updates(engine: StreamWeights) -> tuple[list[Step], list[Step]]:
    """Steps of units that went ahead and counted, and that were made again. They go ahead while the norm is not known,
    which here takes no time: each is waited for."""
    made, counted, again = engine._updates, list[Step](), list[Step]()
    close = made.close

    def close_and_wait(unit: Any) -> None:
        close(unit)
        if made._began:
            made._began[-1].result()

    engine._close = close_and_wait  # type: ignore[method-assign]
    for held in made.states.values():

        def accept(held: Any = held, accept: Any = held.accept) -> None:
            counted.append(held.ahead)
            accept()

        def update(*args: Any, held: Any = held, update: Any = held.update, **kwargs: Any) -> None:
            if held.ahead is not None:
                again.append(held.ahead)
            update(*args, **kwargs)

        held.accept, held.update = accept, update
    return counted, again


def test_who_waits_for_a_share_of_a_rank_that_has_ended_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank of a machine makes its share of an update; nothing else says that the others' never comes."""
    ended = subprocess.Popen(["sleep", "60"])
    place = replace(HERE, world=2)

    def meet(_: Place) -> None:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(updates, "everyone", lambda _, own: [own, ended.pid])
    monkeypatch.setattr(updates, "meet", meet)
    monkeypatch.setattr(updates, "ALIVE_S", 0.01)
    others = updates.Others(place)
    try:
        time.sleep(0.02)
        others.check()  # both live
    finally:
        ended.kill()
    own = updates._Update([])
    own.submit(ThreadPoolExecutor(1), lambda: None)
    with pytest.raises(RuntimeError, match="closed by peer"):
        list(updates._OfAll(own, torch.tensor([1, 0]), 1, others).ends())
    ended.wait()


def test_the_norm_of_a_long_vector_is_right() -> None:
    vector = torch.randn(2**24, generator=torch.Generator().manual_seed(1))
    assert float(measure_norm(vector)) == pytest.approx(float(vector.double().norm()), rel=1e-6)


def test_a_loss_of_routers_is_refused() -> None:
    """Layers that stream hand on nothing but hidden states."""
    config = AutoConfig.for_model(**MODELS["mixtral"], output_router_logits=True)
    with pytest.raises(ModelError, match="use --engine fsdp2, or set output_router_logits to false"):
        Walk(build.skeleton(config, torch.float32, "sdpa"))


def test_where_most_steps_are_clipped_updates_wait() -> None:
    engine = make("llama", replace(WHOLE, update="ahead"), clip=1e-3)
    assert isinstance(engine, StreamWeights)
    _, again = watch_updates(engine)
    run(engine, steps=5)
    assert again
    assert engine.take_said() == []
    again.clear()
    run(engine, first=5, steps=4)
    assert not again
    (said,) = engine.take_said()
    assert said.id == "train.update-waits"
    engine._clip = 1e9
    run(engine, first=9, steps=9)
    counted, _ = watch_updates(engine)
    run(engine, first=18, steps=1)
    assert counted, "no step went ahead, although none is clipped any more"
    assert engine.take_said() == []


def states(engine: Engine) -> dict[tuple[str, str, int], list[float]]:
    return {(each.kind, each.path, each.start): each.tensor.tolist() for each in engine.states(write=False)}
