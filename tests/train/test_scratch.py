"""Weights drawn by us: the distributions are transformers', and no split changes a number."""

from __future__ import annotations

import math
import subprocess
import sys
import threading
from itertools import pairwise
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from small_models import FAMILIES, config_of, on_meta, real

from tightfit.train import scratch
from tightfit.train.scratch import Scratch
from tightfit.types import ModelError

SIGMAS = 5
"""How far a mean or a standard deviation may be from another draw's."""


def whole(source: Scratch, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    return source.read(name, shape, 0, math.prod(shape))


@pytest.mark.thorough
@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_is_distributed_as_transformers_draws_it(family: str) -> None:
    config = config_of(family)
    source = Scratch(on_meta(config), seed=1)
    for name, parameter in real(config).named_parameters():
        ours = whole(source, name, tuple(parameter.shape))
        theirs = parameter.detach().flatten()
        spread = float(theirs.std()) if theirs.numel() > 1 else 0.0
        if spread == 0 or "A_log" in name:
            assert torch.equal(ours, theirs), name
            continue
        error = SIGMAS * spread / math.sqrt(theirs.numel())
        assert abs(float(ours.mean() - theirs.mean())) < 2 * error, name
        assert abs(float(ours.std()) - spread) < 2 * error, name
        # Uniform draws fill their bounds; the ends of a thousand normal draws lie beyond three sigmas.
        assert (
            theirs.numel() < 1000 or 0.7 < float(ours.max() - ours.min()) / float(theirs.max() - theirs.min()) < 1.4
        ), name


def test_residual_projections_are_scaled_and_padding_rows_are_zero() -> None:
    gpt2 = Scratch(on_meta(config_of("gpt2")), seed=0)
    narrow = whole(gpt2, "transformer.h.0.mlp.c_proj.weight", (256, 64)).std()
    assert float(narrow) == pytest.approx(0.02 / 2, rel=0.05)
    llama = Scratch(on_meta(config_of("llama")), seed=0)
    embedding = whole(llama, "model.embed_tokens.weight", (384, 64)).view(384, 64)
    assert torch.count_nonzero(embedding[3]) == 0
    assert torch.count_nonzero(embedding[4]) == 64


def test_a_tied_head_is_the_embedding() -> None:
    source = Scratch(on_meta(config_of("qwen2")), seed=0)
    head = whole(source, "lm_head.weight", (384, 64))
    assert torch.equal(head, whole(source, "model.embed_tokens.weight", (384, 64)))
    assert torch.count_nonzero(head.view(384, 64)[3]) == 0


def test_any_split_gives_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "BLOCK", 1000)
    source = Scratch(on_meta(config_of("mamba")), seed=3)
    for name, shape in (
        ("backbone.layers.0.mixer.in_proj.weight", (256, 64)),
        ("backbone.layers.1.mixer.A_log", (128, 16)),
    ):
        numel = math.prod(shape)
        expected = whole(source, name, shape)
        for cuts in ([0, 1, 999, 1000, 1001, numel], [0, 1500, 1500, 1999, numel], [0, numel - 1, numel]):
            pieces = [source.read(name, shape, a, b) for a, b in pairwise(cuts)]
            assert torch.equal(torch.cat(pieces), expected)
    alone = Scratch(on_meta(config_of("mamba")), seed=3, threads=1)
    assert torch.equal(
        whole(alone, "backbone.layers.0.mixer.in_proj.weight", (256, 64)),
        whole(source, "backbone.layers.0.mixer.in_proj.weight", (256, 64)),
    )


def test_threads_draw_into_their_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a thread allocates comes from a heap of its own, of which the process keeps some MiB for good."""
    monkeypatch.setattr(scratch, "BLOCK", 1000)
    source = Scratch(on_meta(config_of("mamba")), seed=3, threads=4)
    made, threads = torch.empty, list[tuple[int, bool]]()

    def empty(*sizes: int, **options: torch.dtype) -> torch.Tensor:
        threads.append((sizes[0], threading.current_thread() is threading.main_thread()))
        return made(*sizes, **options)

    monkeypatch.setattr(torch, "empty", empty)
    source.read("backbone.layers.0.mixer.in_proj.weight", (256, 64), 1, 9_500)
    assert threads == [(9_499, True), (1000, True), (1000, True)], "the result, and the two blocks that are cut"


@pytest.mark.thorough
def test_seed_and_name_decide_and_nothing_else() -> None:
    config = config_of("llama")
    first, other = Scratch(on_meta(config), seed=0), Scratch(on_meta(config), seed=1)
    name, shape = "model.layers.0.self_attn.q_proj.weight", (64, 64)
    torch.manual_seed(12345)
    drawn = whole(first, name, shape)
    torch.rand(3)
    assert torch.equal(drawn, whole(Scratch(on_meta(config), seed=0), name, shape))
    assert not torch.equal(drawn, whole(other, name, shape))
    assert not torch.equal(drawn, whole(first, "model.layers.1.self_attn.q_proj.weight", shape))


def test_the_global_generator_is_left_alone() -> None:
    before, waiting = torch.random.get_rng_state(), len(torch.cuda._queued_calls)
    Scratch(on_meta(config_of("mamba")), seed=0)
    assert torch.equal(before, torch.random.get_rng_state())
    assert len(torch.cuda._queued_calls) == waiting


@pytest.mark.slow
def test_another_process_draws_the_same() -> None:
    script = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from small_models import config_of, on_meta\n"
        "from tightfit.train.scratch import Scratch\n"
        "source = Scratch(on_meta(config_of('mamba')), seed=7)\n"
        "print(source.read('backbone.layers.1.mixer.dt_proj.bias', (128,), 0, 128).double().sum().item())\n"
        "print(source.read('backbone.layers.1.mixer.x_proj.weight', (36, 128), 100, 900).double().sum().item())\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    source = Scratch(on_meta(config_of("mamba")), seed=7)
    here = [
        source.read("backbone.layers.1.mixer.dt_proj.bias", (128,), 0, 128),
        source.read("backbone.layers.1.mixer.x_proj.weight", (36, 128), 100, 900),
    ]
    assert [float(line) for line in done.stdout.split()] == [one.double().sum().item() for one in here]


def test_adapters_begin_as_peft_begins_them() -> None:
    from peft import LoraConfig, get_peft_model

    model = on_meta(config_of("llama"))
    plain = Scratch(model, seed=0)
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"]), low_cpu_mem_usage=True)
    source = Scratch(adapted, seed=0)
    layer = "base_model.model.model.layers.0.self_attn.q_proj"
    down = whole(source, f"{layer}.lora_A.default.weight", (4, 64))
    assert 0.1 < float(down.abs().max()) <= 1 / 8
    assert torch.count_nonzero(whole(source, f"{layer}.lora_B.default.weight", (64, 4))) == 0
    base = whole(source, f"{layer}.base_layer.weight", (64, 64))
    assert torch.equal(base, whole(plain, "model.layers.0.self_attn.q_proj.weight", (64, 64)))


def test_rotary_frequencies_can_be_read() -> None:
    config = config_of("llama")
    theirs = real(config).model.rotary_emb.inv_freq
    ours = whole(Scratch(on_meta(config), seed=0), "model.rotary_emb.inv_freq", tuple(theirs.shape))
    assert torch.equal(ours, theirs)


def test_a_strange_name_is_refused() -> None:
    with pytest.raises(ModelError, match=r"'model\.nothing'"):
        Scratch(on_meta(config_of("llama")), seed=0).read("model.nothing", (3,), 0, 3)


def test_habits_answer_where_no_model_speaks() -> None:
    class Bare(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.matrix = torch.nn.Linear(32, 64, device="meta")
            self.norm = torch.nn.LayerNorm(32, device="meta")

    source = Scratch(Bare(), seed=0)
    assert float(whole(source, "matrix.weight", (64, 32)).std()) == pytest.approx(0.02, rel=0.1)
    assert torch.equal(whole(source, "matrix.bias", (64,)), torch.zeros(64))
    assert torch.equal(whole(source, "norm.weight", (32,)), torch.ones(32))
