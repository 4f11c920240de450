"""Training in stages: first the embeddings alone, then everything, from the folder that the first stage left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from running import Ran, run_ranks, write_plan
from safetensors.torch import load_file
from small_models import ATTENTION, config_of, on_meta

from tightfit.train import build
from tightfit.types import Levers

EMBEDDING = "model.embed_tokens.weight"
FLAGS = {"seq": 64, "effective_batch": 4, "data": "shipped:text", "learning_rate": 1e-2}


# --- what is frozen -----------------------------------------------------------------------------


def trains(model: Any) -> set[str]:
    return {name for name, param in model.named_parameters() if param.requires_grad}


@pytest.mark.parametrize(
    ("family", "wanted"),
    [
        ("llama", {EMBEDDING}),
        ("qwen2", {EMBEDDING}),
        ("gemma3_text", {EMBEDDING}),
        ("mamba", {"backbone.embeddings.weight"}),
        ("gpt2", {"transformer.wte.weight", "transformer.wpe.weight"}),
    ],
)
def test_only_the_embeddings_train(family: str, wanted: set[str]) -> None:
    made = on_meta(config_of(family))
    build.freeze(made, Levers(trains="embeddings"))
    assert trains(made) == wanted
    head, embedding = made.get_output_embeddings().weight, made.get_input_embeddings().weight
    assert head.requires_grad == (head is embedding), "a tied head is the embedding"


@pytest.mark.parametrize("family", ["llama", "mamba", "gpt2"])
def test_the_two_stages_share_nothing_and_leave_nothing(family: str) -> None:
    made = on_meta(config_of(family))
    everything = trains(made)
    build.freeze(made, Levers(trains="embeddings"))
    first = trains(made)
    made = on_meta(config_of(family))
    build.freeze(made, Levers(trains="layers"))
    assert trains(made) == everything - first


def test_frozen_layers_stand_on_frozen_embeddings() -> None:
    """All of them: gpt2 learns its positions too."""
    made = on_meta(config_of("gpt2"))
    build.freeze(made, Levers(frozen_layers=1))
    assert not {"transformer.wte.weight", "transformer.wpe.weight"} & trains(made)
    assert "transformer.h.1.ln_1.weight" in trains(made)


# --- two stages, for real -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A trained model with a head of its own, and one whose head is the embedding."""
    folder = tmp_path_factory.mktemp("start")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **ATTENTION}))
    found = {}
    for name, model in {"own head": str(folder / "config.json"), "tied head": "tiny_llama"}.items():
        ran = run_ranks(write_plan(folder / name, 1, **FLAGS, model=model, max_steps=1, engine="zero1"))
        assert ran.codes == [0], "\n".join(ran.stderr)
        found[name] = ran.folder / "model"
    return found


def stage(folder: Path, model: Path, engine: str, **flags: Any) -> Ran:
    ran = run_ranks(write_plan(folder, 2, **FLAGS, model=str(model), max_steps=8, engine=engine, **flags))
    assert ran.codes == [0, 0], "\n".join(ran.stderr)
    return ran


def saved(model: Path) -> dict[str, torch.Tensor]:
    return load_file(model / "model.safetensors")


def changed(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> set[str]:
    assert before.keys() == after.keys()
    return {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "head"), [pytest.param("zero2", "own head", marks=pytest.mark.slow), ("fsdp2", "tied head")]
)
def test_embeddings_first_then_everything(tmp_path: Path, start: dict[str, Path], engine: str, head: str) -> None:
    first = stage(tmp_path / "first", start[head], engine, trains="embeddings")
    base, middle = saved(start[head]), saved(first.folder / "model")
    assert ("lm_head.weight" in base) == (head == "own head")
    assert changed(base, middle) == {EMBEDDING}, "everything else is as it was, bit for bit"
    began, ended = first.losses[0], first.losses[-1]
    assert ended < began
    share = next(each["text"] for each in first.of("proof") if each["name"] == "optimizer")
    assert f"of {base[EMBEDDING].numel():,} trained numbers" in share
    second = stage(tmp_path / "second", first.folder / "model", engine)
    assert abs(second.losses[0] - ended) < abs(second.losses[0] - began), "it starts where the first stage ended"
    assert changed(middle, saved(second.folder / "model")) == set(base)


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "head"), [("zero2", "tied head"), ("fsdp2", "own head"), ("zero3", "own head")])
def test_the_rest_stays_as_it_was(tmp_path: Path, start: dict[str, Path], engine: str, head: str) -> None:
    ran = stage(tmp_path, start[head], engine, trains="embeddings", checkpointing="full")
    assert changed(saved(start[head]), saved(ran.folder / "model")) == {EMBEDDING}
